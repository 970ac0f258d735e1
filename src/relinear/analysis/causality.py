"""Check that no output of a language model depends on a later token, by changing later tokens."""

# Legend: T tokens

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from relinear.contract.input_checks import check_model
from relinear.contract.module_state import eval_mode, observe_forwards
from relinear.contract.numerics import check_no_nan, largest_epsilon
from relinear.hf.model_layout import layer_finder
from relinear.hf.vocabulary import max_positions


@dataclasses.dataclass(frozen=True)
class CausalityReport:
    """Result of ``check_causality``.

    Attributes:
        tokens: length of the sequence; every suffix of it was changed.
        modules: number of modules whose outputs were compared.
        module: name of the first module, in order of execution, whose output saw the future, None if none did.
        layer: index of its decoder layer (None outside of them).
        position: the first token of its output that changed.
        source: the first token whose change it saw.
        difference: the largest change there, relative to the output's maximum.
    """

    tokens: int
    modules: int
    module: str | None = None
    layer: int | None = None
    position: int | None = None
    source: int | None = None
    difference: float = 0.0

    @property
    def causal(self) -> bool:
        """Return whether no output depends on a later token."""
        return self.module is None

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return {"causal": self.causal} | dataclasses.asdict(self)

    def __str__(self) -> str:
        if self.causal:
            return (
                f"causal: every suffix of {self.tokens} tokens changed, no earlier output of {self.modules} modules did"
            )
        location = f"{self.module!r}" + ("" if self.layer is None else f" (layer {self.layer})")
        return (
            f"not causal: the output of {location} at token {self.position} depends on token {self.source} or later "
            f"(relative change {self.difference:.2g})"
        )


class CausalityError(ValueError):
    """Raised if an output depends on a later token; ``report`` says which output and which token."""

    def __init__(self, report: CausalityReport) -> None:
        super().__init__(str(report))
        self.report = report


@torch.no_grad()
def check_causality(
    model: nn.Module,
    inputs: Tensor | None = None,
    *,
    tokens: int = 16,
    tolerance: float | None = None,
    seed: int = 0,
    raises: bool = True,
) -> CausalityReport:
    """Change every suffix of a sequence, and compare every module's outputs for the tokens before it.

    The model runs in eval mode on one sequence, tokens + 1 times; its mode is restored.

    Args:
        model: a language model called with ``input_ids``.
        inputs: (1, T) token ids to start from; ``tokens`` pseudo-random ones by default.
        tokens: T, at least 2, where ``inputs`` is not given (fewer if the model has fewer positions).
        tolerance: change allowed, relative to the largest output of the module; None is eight times the precision of
            the coarsest parameters.
        seed: seed of the tokens.
        raises: False returns the report of a leak in place of raising.

    Returns:
        The report: ``causal``, and where it is False the first module, layer and position that leak.

    Raises:
        CausalityError: naming the first module, layer and position that leak.
        ValueError: if the inputs do not fit, or two equal calls differ (nothing can be said then).

    Examples:
        >>> report = relinear.check_causality(relinear.from_preset("tiny"), tokens=8)
        >>> report.causal
        True
    """
    check_model(model, "check_causality")
    vocabulary = _vocabulary(model)
    generator = torch.Generator().manual_seed(seed)
    if inputs is None:
        limit = max_positions(model) or tokens
        inputs = torch.randint(vocabulary, (1, min(tokens, limit)), generator=generator)
    if inputs.ndim != 2 or inputs.shape[0] != 1 or inputs.shape[1] < 2:
        raise ValueError(f"inputs must be token ids of shape (1, T) with T >= 2, got {tuple(inputs.shape)}")
    inputs = inputs.to(next(model.parameters()).device)
    shift = torch.randint(1, vocabulary, inputs.shape, generator=generator).to(inputs.device)
    changed_inputs = (inputs + shift) % vocabulary  # differs from the inputs everywhere
    length = inputs.shape[1]
    if tolerance is None:
        tolerance = 8 * largest_epsilon(model)
    with eval_mode(model):
        expected = _outputs(model, inputs)
        for value in expected.values():
            check_no_nan(model, value, "check_causality")
        again = _outputs(model, inputs)
        unstable = next((n for n in expected if not _change(expected[n], again[n]).max() <= tolerance), None)
        if unstable is not None:
            raise ValueError(f"{unstable!r} gives different outputs for equal inputs in eval mode: nothing to compare")
        leaks: list[tuple[int, int, int, float]] = []  # rank of the module, position, source, difference
        for source in range(1, length):
            changed = _outputs(model, torch.cat([inputs[:, :source], changed_inputs[:, source:]], dim=1))
            for rank, (name, value) in enumerate(expected.items()):
                change = _change(value, changed[name])[:source]
                leaked = ~(change <= tolerance)  # NaN is a change, too
                if leaked.any():
                    leaks.append((rank, int(leaked.nonzero()[0]), source, float(change.max())))
                    break
    if not leaks:
        return CausalityReport(length, len(expected))
    rank, position, source, difference = min(leaks)
    name = list(expected)[rank]
    report = CausalityReport(length, len(expected), name, layer_finder(model)(name), position, source, difference)
    if raises:
        raise CausalityError(report)
    return report


def _vocabulary(model: Any) -> int:
    getter = getattr(model, "get_input_embeddings", None)
    table = getter() if callable(getter) else next((m for m in model.modules() if isinstance(m, nn.Embedding)), None)
    if table is None:
        raise ValueError(f"{type(model).__name__} has no token embedding; check_causality needs a language model")
    return int(table.num_embeddings)


def _outputs(model: nn.Module, inputs: Tensor) -> dict[str, Tensor]:
    """Return the output of every module by name, in order of execution, as (T, ...), if it has one row per token."""
    length = inputs.shape[1]
    outputs: dict[str, Tensor] = {}

    def save(name: str, module: nn.Module, args: Any, output: Any) -> None:
        value = _first_tensor(output)
        if value is None or name in outputs:
            return
        if value.ndim > 1 and tuple(value.shape[:2]) == (1, length):
            value = value[0]
        if value.ndim and value.shape[0] == length and value.is_floating_point():
            outputs[name] = value.reshape(length, -1).clone()

    with observe_forwards(model.named_modules(), save):
        model(input_ids=inputs)
    return outputs


def _first_tensor(output: Any) -> Tensor | None:
    if isinstance(output, Tensor):
        return output
    values = output.values() if hasattr(output, "values") else output if isinstance(output, list | tuple) else ()
    return next((v for v in values if isinstance(v, Tensor)), None)


def _change(before: Tensor, after: Tensor) -> Tensor:
    """Return the largest change of every token, relative to the largest value: (T,)."""
    scale = before.abs().max().clamp_min(torch.finfo(before.dtype).tiny)
    return ((after - before).abs().amax(dim=1) / scale).float()
