"""Time single layers: each operator against a dense nn.Linear of the same shape."""

# Legend: I in_features, O out_features, N tokens

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from typing import Any, Literal

import torch
from torch import Tensor, nn

from relinear.activations.shared_context import context
from relinear.contract.inference import caching_for_inference, for_inference_
from relinear.contract.operator import Operator, OperatorConfig
from relinear.system.timing import interleave

DENSE = "dense"
Pass = Literal["forward", "step"]
Mode = Literal["eager", "compiled"]
#: largest relative error (Frobenius norm) of a contender's output against that of its float64 copy
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 4e-2}


@dataclasses.dataclass(frozen=True)
class TimedCase:
    """What is timed; all contenders run the same case.

    Attributes:
        in_features: of the layer.
        out_features: of the layer.
        tokens: of the input.
        dtype: of weights and input.
        mode: "eager" or "compiled".
        phase: "forward" (inference after ``relinear.for_inference_``) or "step" (with backward).
    """

    in_features: int
    out_features: int
    tokens: int
    dtype: torch.dtype
    mode: str
    phase: str

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        shape = f"{self.in_features} -> {self.out_features}, {self.tokens} tokens"
        return f"{shape}, {dtype}, {self.mode}, {self.phase}"


def _context_values(modules: Iterable[nn.Module], tokens: int) -> Tensor | None:
    """Return a random context of the width that conditioned contenders need; None if no contender is conditioned."""
    configs: list[Any] = [m.config for m in modules if isinstance(m, Operator) and m.config.conditioned]
    widths = {config.context_dim for config in configs}
    assert len(widths) <= 1, "conditioned contenders share one context"
    return torch.randn(tokens, widths.pop()) if widths else None


def _with_context(values: Tensor | None, dtype: torch.dtype) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext() if values is None else context(values.to(dtype))


@torch.no_grad()
def _relative_error(module: nn.Module, case: TimedCase) -> float:
    """Return the relative error of the forward pass against a float64 copy: the check before timing."""
    x = torch.randn(min(case.tokens, 64), case.in_features).to(case.dtype)
    values = _context_values([module.eval()], x.shape[0])
    with _with_context(values, case.dtype), caching_for_inference(module):  # unlike for_inference_, it rounds no inputs
        output = module(x).double()
    if output.shape != (len(x), case.out_features):
        raise ValueError(f"the output has shape {tuple(output.shape)}, expected {(len(x), case.out_features)}")
    with _with_context(values, torch.float64):
        expected = deepcopy(module).double()(x.double())
    return float((output - expected).norm() / expected.norm().clamp_min(1e-30))


def _call(module: nn.Module, case: TimedCase) -> Callable[[], object]:
    """Return a function that runs one contender: forward only, or forward and backward to input and parameters."""
    x = torch.randn(case.tokens, case.in_features).to(case.dtype)
    run = torch.compile(module, dynamic=False) if case.mode == "compiled" else module
    if case.phase == "forward":
        for_inference_(module)

        return torch.no_grad()(lambda: run(x))
    module.train()
    x.requires_grad_(True)
    output_gradient = torch.randn(case.tokens, case.out_features).to(case.dtype)
    leaves = [x, *(p for p in module.parameters() if p.requires_grad)]

    def step() -> object:
        run(x).backward(output_gradient)
        for leaf in leaves:
            leaf.grad = None
        return None

    return step


def bench_case(
    case: TimedCase,
    operators: Sequence[tuple[str, OperatorConfig]],
    *,
    rounds: int = 15,
) -> list[dict[str, Any]]:
    """Time dense and the operators in one case, taking turns in this process.

    A contender that cannot be built at this size, or whose output is wrong, is reported with ``error`` and not timed.

    Returns:
        rows of ``bench.json``, one per contender, of flat JSON values.
    """
    torch._dynamo.reset()
    modules: dict[str, nn.Module] = {}
    failed = []
    builders: dict[str, Callable[..., nn.Module]] = {DENSE: nn.Linear}
    builders |= {name: config.build for name, config in operators}
    for name, build in builders.items():
        torch.manual_seed(0)
        try:
            module = build(case.in_features, case.out_features, bias=False).to(case.dtype)
            if not (error := _relative_error(module, case)) <= TOLERANCES[case.dtype]:
                raise ValueError(f"relative error {error:.2g} exceeds {TOLERANCES[case.dtype]:.2g}")
        except ValueError as problem:
            failed.append(_row(name, case, {}, str(problem)))
            continue
        modules[name] = module
    torch.manual_seed(2)
    calls = {name: _call(module, case) for name, module in modules.items()}
    with _with_context(_context_values(modules.values(), case.tokens), case.dtype):
        timings = interleave(calls, DENSE, rounds=rounds)
    return [_row(name, case, dataclasses.asdict(timing)) for name, timing in timings.items()] + failed


def _row(contender: str, case: TimedCase, timing: dict[str, Any], error: str | None = None) -> dict[str, Any]:
    """Return the row of one contender in one case; one that failed the correctness check has ``error`` and no times."""
    row = dataclasses.asdict(case) | {"dtype": str(case.dtype).removeprefix("torch.")}
    return row | timing | {"contender": contender, "error": error}
