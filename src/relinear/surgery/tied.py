"""Keep an output head tied to an embedding when an operator replaces the embedding."""

import re
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from torch import Tensor, nn

from relinear.contract.linear_layers import ReplacedLayer, embeds, linear_features, linear_of
from relinear.contract.operator import NotLinearError, Operator, OperatorConfig
from relinear.contract.wrapper import WrapperConfig
from relinear.hf.config_record import finish_surgery_
from relinear.hf.model_layout import output_head
from relinear.hf.peft_models import unwrapped
from relinear.surgery.replace_module import replace_module_


class TiedHead(nn.Module):
    """y = x W^T + bias, with the matrix W (V, D) of the operator that replaces the embedding; ``bias`` is (V,)."""

    bias: nn.Parameter | None

    def __init__(self, table: Operator, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.register_parameter("bias", bias)
        self._table = (table,)  # in a tuple, so that it is not a submodule: it is saved and moved as the embedding

    @property
    def table(self) -> Operator:
        """Return the operator that replaces the embedding."""
        return self._table[0]

    def flops_per_token(self) -> int:
        """Return the FLOPs per token of the product; the lookup is free."""
        return self.table.flops_per_token()

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits (..., V) of hidden states (..., D)."""
        product = self.table.forward(x)  # without the hooks on the embedding, which may add noise to its rows
        return product if self.bias is None else product + self.bias


def check_can_embed(config: OperatorConfig, source: nn.Module, name: str) -> None:
    """Raise ValueError if ``source``, called ``name``, is an embedding and operators of ``config`` have no rows."""
    if not embeds(source):
        return
    with suppress(NotLinearError):
        if not config.conditioned and not isinstance(config, WrapperConfig):
            config.build(*linear_features(source), bias=False, device="meta").to_dense()
            return
    raise ValueError(f"{name} is an embedding, and {config.kind} has no rows; give an operator with some, as quantized")


def tied_head(model: Any, table: nn.Module) -> Any:
    """Return the output head of ``model`` if it is tied to the embedding ``table``, else None."""
    model = unwrapped(model)
    head = output_head(model) if embeds(table) else None
    if isinstance(head, TiedHead):
        return head if head.table is table else None
    if not isinstance(head, nn.Linear):
        return None
    names = {id(module): name for name, module in model.named_modules()}
    # in a model on the meta device, before loading, the two weights are not the same object yet
    tied_to = getattr(model, "all_tied_weights_keys", {}).get(f"{names[id(head)]}.weight")
    shared = any(head.weight is p for p in table.parameters())
    return head if shared or tied_to == f"{names.get(id(table))}.weight" else None


def replace_layer_keeping_ties_(model: Any, names: Iterable[str], source: nn.Module, target: Any) -> None:
    """Replace ``source`` by ``target``, and tie a head that was tied to ``source`` to ``target``."""
    head = tied_head(model, source)
    replace_module_(model, names, source, target)
    if head is None:
        return
    model = unwrapped(model)
    names = [name for name, module in model.named_modules() if module is head]
    tied: Any = TiedHead(target, head.bias)
    keys = (type(model)._tied_weights_keys or {}).items()
    model._tied_weights_keys = {k: v for k, v in keys if not re.match(f"({k}|{v})$", f"{names[0]}.weight")}
    if not isinstance(target, Operator):
        tied = linear_of(target.weight)
        tied.weight, tied.bias = target.weight, head.bias
        del model._tied_weights_keys  # the class attribute applies again
    tied.train(head.training)
    replace_module_(model, names, head, tied)
    model.all_tied_weights_keys = model.get_expanded_tied_weights_keys(all_submodels=True)


def untie_config_(model: Any) -> None:
    """Untie model and config if embedding and head no longer share weights, as after PEFT merged a copy of one."""
    model = unwrapped(model)
    head = output_head(model)
    if isinstance(head, TiedHead):
        if any(module is head.table for module in model.modules()):
            return
        names = [n for n, m in model.named_modules() if m is head]
        operator = head.table
        operator.replaced, operator.bias = ReplacedLayer(), head.bias
        replace_module_(model, names, head, operator)
        finish_surgery_(model)
    elif head is None or not isinstance(model.get_input_embeddings(), Operator):
        return
    if getattr(model.config, "tie_word_embeddings", False):
        model.config.tie_word_embeddings = False
        model.all_tied_weights_keys = model.get_expanded_tied_weights_keys(all_submodels=True)
