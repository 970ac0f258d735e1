"""Fold operators that are plain matrices back into stock linear layers."""

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from relinear.activations.hooks import check_not_hooked
from relinear.contract.input_checks import check_model
from relinear.contract.module_state import eval_mode
from relinear.contract.operator import NotLinearError, named_operators
from relinear.deprecated import with_attributes_of_0_2
from relinear.hf.config_record import finish_surgery_
from relinear.hf.peft_models import is_adapted
from relinear.hf.stock_layer import to_stock_layer
from relinear.surgery.separate_experts import fuse_experts_
from relinear.surgery.tied import replace_layer_keeping_ties_, untie_config_


@with_attributes_of_0_2
@dataclasses.dataclass(frozen=True)
class FoldReport:
    """Report what ``fold_`` did.

    Attributes:
        folded: names of the operators that became linear layers.
        skipped: why the others stayed operators, by name.
        max_logit_difference: the largest change of the logits; None if it was not measured.
    """

    folded: tuple[str, ...]
    skipped: dict[str, str]
    max_logit_difference: float | None

    def __str__(self) -> str:
        difference = "not measured" if self.max_logit_difference is None else f"{self.max_logit_difference:.3g}"
        lines = [f"folded {len(self.folded)} operators into plain linear layers; largest logit difference {difference}"]
        lines += [f"  skipped: {name}: {reason}" for name, reason in self.skipped.items()]
        return "\n".join(lines)


@torch.no_grad()
def fold_(model: nn.Module, inputs: Tensor | dict[str, Tensor] | None = None, *, verbose: bool = True) -> FoldReport:
    """Turn every operator with a context-free ``to_dense`` back into the stock layer that it replaced, in place.

    Stock layers are nn.Linear, nn.Embedding and GPT-2's Conv1D. Matrices are computed in float32 and cast to the
    operator's dtype. If all operators fold, the model is a stock model whose checkpoint loads without this package.

    Args:
        model: any model; operators that are not linear maps stay and are reported.
        inputs: token ids, or keyword arguments of the model, on which to measure the largest logit difference. By
            default a few fixed pseudo-random tokens, if the model has a vocabulary.
        verbose: print the report.

    Returns:
        A report: the folded names, why others stayed operators, and the largest logit difference.

    Raises:
        ValueError: if the model is itself an operator or has none, or within a block of interventions. The model is
            then unchanged.

    Examples:
        >>> model = relinear.from_preset("tiny")
        >>> _ = relinear.replace_(model, {"q_proj": relinear.LowRank(rank=8)})
        >>> _ = relinear.fold_(model, verbose=False)
        >>> type(model.model.layers[0].self_attn.q_proj).__name__
        'Linear'
    """
    check_model(model, "fold_")
    check_not_hooked(model, "fold_")
    untie_config_(model)
    operators = dict(named_operators(model))
    if not operators:
        raise ValueError("the model holds no relinear operator: nothing to fold")
    if "" in operators:
        raise ValueError("the model is itself an operator; build nn.Linear from its to_dense() and dense_bias()")
    stock_layers: dict[str, nn.Module] = {}
    skipped: dict[str, str] = {}
    for name, operator in operators.items():
        if any(map(is_adapted, operator.modules())):
            skipped[name] = "it contains an adapter; merge that first"
            continue
        try:
            stock_layers[name] = to_stock_layer(operator)
        except NotLinearError as error:
            skipped[name] = str(error)
    before = _logits(model, inputs)
    aliases = list(model.named_modules(remove_duplicate=False))
    for name, linear in stock_layers.items():
        operator = operators[name]
        replace_layer_keeping_ties_(model, [alias for alias, module in aliases if module is operator], operator, linear)
    fuse_experts_(model)
    finish_surgery_(model)
    after = _logits(model, inputs)
    difference = None if before is None or after is None else float((before - after).abs().max())
    report = FoldReport(tuple(stock_layers), skipped, difference)
    if verbose:
        print(report)
    return report


def _logits(model: Any, inputs: Tensor | dict[str, Tensor] | None) -> Tensor | None:
    """Return the logits on ``inputs`` in eval mode and float32; None for a meta model or without inputs."""
    vocabulary: Any = getattr(getattr(model, "config", None), "vocab_size", None)
    parameter = next(model.parameters())
    if parameter.is_meta or (inputs is None and vocabulary is None):
        return None
    if inputs is None:
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randint(vocabulary, (2, 16), generator=generator).to(parameter.device)
    with eval_mode(model):
        output = model(**inputs) if isinstance(inputs, dict) else model(inputs)
    logits = getattr(output, "logits", None)
    if logits is None:
        logits = output if isinstance(output, Tensor) else output[0]
    return logits.float()
