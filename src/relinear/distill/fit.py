"""Fit operators to recorded outputs of layers or, within the model, to the outputs of a module or its logits.

A ``FitObjective`` has samples, the loss of some of them, and an evaluation of the result; ``improve`` trains on it.
"""

# Legend: M recorded tokens, I in_features, O out_features, N blocks, T tokens per block, V vocabulary

import contextlib
import copy
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from relinear.activations.shared_context import context
from relinear.contract.objective import kl_terms
from relinear.contract.operator import Operator
from relinear.distill.record import output_of
from relinear.hf.modes import eval_mode, frozen_parameters

#: recorded tokens that are evaluated at a time
_ROWS = 4096


@dataclasses.dataclass(frozen=True)
class FitError:
    """Hold the errors of outputs relative to the target outputs.

    relative: sum of squared errors over sum of squares, or the divergence of logits. cosine: mean cosine of a token's
    output with the target; None if nothing has one.
    """

    relative: float
    cosine: float | None = None


@dataclasses.dataclass(frozen=True)
class FitObjective:
    """Hold an objective on which modules are trained together.

    samples: number of training samples. loss: of some samples, by index. error: of the current modules in eval mode.
    by_cosine: whether results are compared by cosine.
    """

    samples: int
    loss: Callable[[Tensor], Tensor]
    error: Callable[[], FitError]
    by_cosine: bool = False

    def is_no_worse(self, after: FitError, before: FitError) -> bool:
        """Return whether a result is no worse than the initialisation; NaN is worse."""
        if self.by_cosine and after.cosine is not None and before.cosine is not None:
            return after.cosine >= before.cosine
        return after.relative <= before.relative


@dataclasses.dataclass(frozen=True)
class FitSchedule:
    """Set how modules are trained: passes over the samples, samples per step, Adam's peak learning rate, seed.

    report_every: steps between two reports of progress.
    """

    epochs: int
    batch: int
    learning_rate: float
    seed: int
    report_every: int = 1

    def steps(self, samples: int) -> Sequence[Tensor]:
        """Return the samples of each step, in a new order each pass; samples that do not fill a step are skipped."""
        generator, batch = torch.Generator().manual_seed(self.seed), min(self.batch, samples)
        passes = [torch.randperm(samples, generator=generator).split(batch) for _ in range(self.epochs)]
        return [rows for epoch in passes for rows in epoch if len(rows) == batch]


def improve(
    modules: Sequence[nn.Module],
    objective: FitObjective,
    schedule: FitSchedule,
    on_progress: Callable[[int, int, float], None] = lambda step, steps, loss: None,
) -> tuple[FitError, FitError]:
    """Train ``modules`` together in place: Adam, a cosine from the full rate to 0, auxiliary losses of operators added.

    Args:
        on_progress: called with step, steps and the loss.

    Returns:
        the errors before and after. Where the second is worse, the modules get their first parameters back.
    """
    group = nn.ModuleList(modules).eval()
    before = objective.error()
    initial = copy.deepcopy(group.state_dict())
    group.train().requires_grad_(True)
    operators = [module for module in modules if isinstance(module, Operator)]
    groups = []
    for module in modules:
        roles = module.param_roles() if isinstance(module, Operator) else {}
        for name, parameter in module.named_parameters():
            rate = schedule.learning_rate * (roles[name].lr_multiplier if name in roles else 1.0)
            groups.append({"params": [parameter], "lr": rate})
    optimizer = torch.optim.Adam(groups)
    order = schedule.steps(objective.samples)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda at: 0.5 * (1 + math.cos(math.pi * at / len(order))))
    with torch.enable_grad():
        for step, rows in enumerate(order, start=1):
            value = objective.loss(rows) + sum(
                added for operator in operators for added in operator.aux_losses().values()
            )
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
            scheduler.step()
            if step % schedule.report_every == 0 or step == len(order):
                on_progress(step, len(order), float(value.detach()))
    optimizer.zero_grad()
    group.eval()
    after = objective.error()
    if objective.is_no_worse(after, before):
        return before, after
    group.load_state_dict(initial)
    return before, before


# Outputs, by how far they are from the target outputs


def _error(pairs: Iterator[tuple[Tensor, Tensor]]) -> FitError:
    """Return the error of outputs (N, O) against the target outputs, part by part, in double precision."""
    wrong = total = cosine = 0.0
    rows = 0
    for got, target_outputs in ((part.double() for part in pair) for pair in pairs):
        wrong += float((got - target_outputs).square().sum())
        total += float(target_outputs.square().sum())
        cosine += float(torch.nn.functional.cosine_similarity(got, target_outputs, dim=-1).sum())
        rows += len(got)
    return FitError(wrong / max(total, 1e-30), cosine / rows)


def _loss(kind: str, got: Tensor, target_outputs: Tensor, mean_square: float) -> Tensor:
    """Return the loss "mse", relative to ``mean_square``, or "cosine" of outputs (..., O)."""
    if kind == "cosine":
        return 1 - torch.nn.functional.cosine_similarity(got, target_outputs, dim=-1).mean()
    return (got - target_outputs).square().mean() / mean_square


# One layer, on recorded inputs


@dataclasses.dataclass(frozen=True)
class Pairs:
    """Hold inputs (M, I), the function that gives their target outputs, and the contexts (M, C) or None.

    outputs: rows -> (rows, O); an index tensor or slice in.
    """

    inputs: Tensor
    outputs: Callable[[Tensor | slice], Tensor]
    contexts: Tensor | None = None

    def run(self, module: nn.Module, rows: Tensor | slice) -> Tensor:
        """Return the outputs of ``module`` for these rows."""
        reference = next(module.parameters())
        with contextlib.nullcontext() if self.contexts is None else context(self.contexts[rows].to(reference)):
            return module(self.inputs[rows].to(reference))

    def both(self, module: nn.Module, rows: slice) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the outputs of ``module`` for the rows and the target outputs, some rows at a time."""
        for start in range(rows.start, rows.stop, _ROWS):
            part = slice(start, min(start + _ROWS, rows.stop))
            yield self.run(module, part), self.outputs(part)


@torch.no_grad()
def measure(module: nn.Module, pairs: Pairs, rows: slice) -> FitError:
    """Return the errors of ``module``, in eval mode, on ``rows``."""
    with eval_mode(module):
        return _error(pairs.both(module, rows))


@torch.no_grad()
def start_bias_(module: Operator, pairs: Pairs, rows: slice, *, fitted: bool) -> None:
    """Initialise the bias of ``module`` with the mean target output.

    Args:
        rows: the rows over which the mean is taken.
        fitted: whether ``module`` is already fitted (in closed form): the mean error is then added to its bias.
    """
    assert module.bias is not None
    with eval_mode(module):
        sums = [
            (target_outputs.double() - got.double() if fitted else target_outputs.double()).sum(0)
            for got, target_outputs in pairs.both(module, rows)
        ]
    mean = sum(sums) / (rows.stop - rows.start)
    module.bias.copy_(module.bias + mean if fitted else mean)


def to_outputs(module: nn.Module, pairs: Pairs, train_rows: int, loss: str) -> FitObjective:
    """Return the objective that trains ``module``, in its training precision, towards the outputs of ``pairs``.

    Args:
        train_rows: the first rows, to train on; those behind them evaluate.
        loss: "mse" or "cosine".
    """
    held_out = slice(train_rows, len(pairs.inputs))
    mean_square = float(pairs.outputs(slice(0, min(train_rows, 16384))).double().square().mean()) or 1.0

    def value(rows: Tensor) -> Tensor:
        got = pairs.run(module, rows)
        return _loss(loss, got, pairs.outputs(rows).to(got), mean_square)

    return FitObjective(train_rows, value, lambda: measure(module, pairs, held_out), loss == "cosine")


# Several operators, within the model


@contextlib.contextmanager
def swapped(model: nn.Module, modules: Mapping[str, nn.Module]) -> Iterator[None]:
    """Put ``modules`` into ``model`` under their names (aliases included) within the block."""
    before = {name: model.get_submodule(name) for name in modules}
    try:
        _put(model, modules)
        yield
    finally:
        _put(model, before)


def _put(model: nn.Module, modules: Mapping[str, nn.Module]) -> None:
    for name, module in modules.items():
        model.set_submodule(name, module)


class _SinglePrecision(nn.Module):
    """Train an operator in single precision within a model of another precision."""

    def __init__(self, operator: nn.Module) -> None:
        super().__init__()
        self.operator = operator

    def forward(self, x: Tensor) -> Tensor:
        return self.operator(x.to(next(self.operator.parameters()).dtype)).to(x.dtype)


@dataclasses.dataclass(frozen=True)
class InModelFit:
    """Fit operators within the model on blocks of tokens; targets are the outputs of the original.

    model: in eval mode; its own parameters stay unchanged. operators: name -> operator, including every alias of a
    layer, perhaps in another dtype than the model. originals: the original modules by the same names. blocks: (N, T);
    those from ``train_blocks`` on evaluate. batch: blocks per pass.
    """

    model: nn.Module
    operators: Mapping[str, Operator]
    originals: Mapping[str, nn.Module]
    blocks: Tensor
    train_blocks: int
    batch: int

    def improve(
        self, objective: FitObjective, schedule: FitSchedule, on_progress: Callable[..., None]
    ) -> tuple[FitError, FitError]:
        """Train the operators by ``improve``."""
        unique = list({id(operator): operator for operator in self.operators.values()}.values())
        with frozen_parameters(self.model):
            return improve(unique, objective, schedule, on_progress)

    def _ids(self, rows: Tensor | slice) -> Tensor:
        return self.blocks[rows].to(next(self.model.parameters()).device)

    def _held_out(self) -> Iterator[Tensor]:
        for start in range(self.train_blocks, len(self.blocks), self.batch):
            yield self._ids(slice(start, start + self.batch))

    def to_logits(self) -> FitObjective:
        """Return the objective of the model's logits, by KL(model || model with operators) in nats per token."""

        def divergence(ids: Tensor) -> Tensor:
            with torch.no_grad(), swapped(self.model, self.originals):
                target_outputs = self.model(input_ids=ids).logits
            with swapped(self.model, self.operators):
                return kl_terms(self.model(input_ids=ids).logits, target_outputs).sum(-1).mean()

        @torch.no_grad()
        def error() -> FitError:
            evaluated = len(self.blocks) - self.train_blocks
            return FitError(sum(float(divergence(ids)) * len(ids) for ids in self._held_out()) / evaluated)

        return FitObjective(self.train_blocks, lambda rows: divergence(self._ids(rows)), error)

    def to_output(self, holder: str, loss: str) -> FitObjective:
        """Return the objective of the outputs of ``holder``, which holds the operators; by "mse" or "cosine"."""
        cast = {id(operator): _SinglePrecision(operator).eval() for operator in self.operators.values()}
        placed = {name: cast[id(operator)] for name, operator in self.operators.items()}

        def output(ids: Tensor, by: Mapping[str, nn.Module]) -> Tensor:
            with swapped(self.model, by):
                return output_of(self.model, holder, ids).float()

        @torch.no_grad()
        def target_outputs(ids: Tensor) -> Tensor:
            return output(ids, self.originals)

        @torch.no_grad()
        def error() -> FitError:
            both = ((output(ids, placed), target_outputs(ids)) for ids in self._held_out())
            return _error((got.flatten(0, -2), right.flatten(0, -2)) for got, right in both)

        some = self._ids(slice(0, min(self.train_blocks, self.batch)))
        mean_square = float(target_outputs(some).double().square().mean()) or 1.0

        def value(rows: Tensor) -> Tensor:
            ids = self._ids(rows)
            return _loss(loss, output(ids, placed), target_outputs(ids), mean_square)

        return FitObjective(self.train_blocks, value, error, loss == "cosine")
