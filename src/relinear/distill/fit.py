"""Fit operators to the recorded outputs of layers or, within the model, to a module's outputs or the logits.

A ``FitObjective`` defines the samples, the loss of some of them, and how a result is evaluated; ``improve`` trains on
it.
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
from relinear.contract.module_state import eval_mode, frozen_parameters
from relinear.contract.operator import Operator
from relinear.distill.record import output_of
from relinear.distill.settings import DistillSettings
from relinear.evaluate.losses import kl_terms

#: recorded tokens that are evaluated at a time
_ROWS = 4096
#: about how often progress is reported while modules are trained
REPORTS = 50


@dataclasses.dataclass(frozen=True)
class FitError:
    """Errors of outputs relative to the target outputs.

    Attributes:
        relative: sum of squared errors over the targets' sum of squares, or the divergence of logits.
        cosine: mean cosine of a token's output with the target; None for logits.
    """

    relative: float
    cosine: float | None = None


@dataclasses.dataclass(frozen=True)
class FitObjective:
    """Define what modules are trained on together.

    Attributes:
        samples: number of training samples.
        loss: returns the loss of some samples, by their indices.
        error: returns the error of the current modules in eval mode.
        by_cosine: whether results are compared by cosine.
    """

    samples: int
    loss: Callable[[Tensor], Tensor]
    error: Callable[[], FitError]
    by_cosine: bool = False


def improve(
    modules: Sequence[nn.Module],
    objective: FitObjective,
    settings: DistillSettings,
    batch: int,
    learning_rate: float,
    on_step: Callable[[int, int, float], None] = lambda step, steps, loss: None,
) -> tuple[FitError, FitError]:
    """Train ``modules`` together in place with Adam and a cosine schedule; operators' auxiliary losses are added.

    Args:
        modules: the modules to train.
        objective: what to train on.
        settings: has the number of ``epochs``, and the ``seed`` of the order of the samples.
        batch: samples per step; those that do not fill a step are skipped.
        learning_rate: the initial learning rate.
        on_step: called with step, steps and the loss.

    Returns:
        the errors before and after. If training raises the error, the initial parameters are restored.
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
            rate = learning_rate * (roles[name].lr_multiplier if name in roles else 1.0)
            groups.append({"params": [parameter], "lr": rate})
    optimizer = torch.optim.Adam(groups)
    order = _order(objective.samples, min(batch, objective.samples), settings)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: 0.5 * (1 + math.cos(math.pi * step / len(order)))
    )
    with torch.enable_grad():
        for step, rows in enumerate(order, start=1):
            value = objective.loss(rows) + sum(
                added for operator in operators for added in operator.auxiliary_losses().values()
            )
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
            scheduler.step()
            if step % max(1, len(order) // REPORTS) == 0 or step == len(order):
                on_step(step, len(order), float(value.detach()))
    optimizer.zero_grad()
    group.eval()
    after = objective.error()
    if objective.by_cosine:
        is_no_worse = after.cosine >= before.cosine  # type: ignore[operator]
    else:
        is_no_worse = after.relative <= before.relative  # False for NaN
    if is_no_worse:
        return before, after
    group.load_state_dict(initial)
    return before, before


def _order(samples: int, batch: int, settings: DistillSettings) -> list[Tensor]:
    """Return the samples of each step, in a new order each pass."""
    generator = torch.Generator().manual_seed(settings.seed)
    passes = [torch.randperm(samples, generator=generator).split(batch) for _ in range(settings.epochs)]
    return [rows for epoch in passes for rows in epoch if len(rows) == batch]


# Errors and losses of outputs


def _error(pairs: Iterator[tuple[Tensor, Tensor]]) -> FitError:
    """Return the error of pairs of outputs and target outputs (N, O), computed in double precision."""
    squared_error = total = cosine = 0.0
    rows = 0
    for outputs, targets in ((part.double() for part in pair) for pair in pairs):
        squared_error += float((outputs - targets).square().sum())
        total += float(targets.square().sum())
        cosine += float(torch.nn.functional.cosine_similarity(outputs, targets, dim=-1).sum())
        rows += len(outputs)
    return FitError(squared_error / max(total, 1e-30), cosine / rows)


def _loss(kind: str, outputs: Tensor, targets: Tensor, mean_square: float) -> Tensor:
    """Return the loss "mse", relative to ``mean_square``, or "cosine" of outputs (..., O)."""
    if kind == "cosine":
        return 1 - torch.nn.functional.cosine_similarity(outputs, targets, dim=-1).mean()
    return (outputs - targets).square().mean() / mean_square


# One layer, on recorded inputs


@dataclasses.dataclass(frozen=True)
class LayerSamples:
    """Inputs of one layer and their target outputs.

    Attributes:
        inputs: (M, I).
        targets: takes rows, an index tensor or a slice, and returns their target outputs (rows, O).
        contexts: (M, C), or None if the layer reads none.
    """

    inputs: Tensor
    targets: Callable[[Tensor | slice], Tensor]
    contexts: Tensor | None = None

    def run(self, module: nn.Module, rows: Tensor | slice) -> Tensor:
        """Return the outputs of ``module`` for these rows."""
        reference = next(module.parameters())
        with contextlib.nullcontext() if self.contexts is None else context(self.contexts[rows].to(reference)):
            return module(self.inputs[rows].to(reference))

    def outputs_and_targets(self, module: nn.Module, rows: slice) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield pairs of the outputs of ``module`` and the target outputs, for some of the rows at a time."""
        for start in range(rows.start, rows.stop, _ROWS):
            part = slice(start, min(start + _ROWS, rows.stop))
            yield self.run(module, part), self.targets(part)


@torch.no_grad()
def measure(module: nn.Module, samples: LayerSamples, rows: slice) -> FitError:
    """Return the errors of ``module``, in eval mode, on ``rows``."""
    with eval_mode(module):
        return _error(samples.outputs_and_targets(module, rows))


@torch.no_grad()
def initialize_bias_(module: Operator, samples: LayerSamples, rows: slice, *, fitted: bool) -> None:
    """Initialise the bias of ``module`` with the mean target output.

    Args:
        rows: the rows over which the mean is taken.
        fitted: whether ``module`` is already fitted (in closed form): the mean error is then added to its bias.
    """
    assert module.bias is not None
    with eval_mode(module):
        sums = [
            (targets.double() - outputs.double() if fitted else targets.double()).sum(0)
            for outputs, targets in samples.outputs_and_targets(module, rows)
        ]
    mean = sum(sums) / (rows.stop - rows.start)
    module.bias.copy_(module.bias + mean if fitted else mean)


def layer_objective(module: nn.Module, samples: LayerSamples, train_rows: int, loss: str) -> FitObjective:
    """Return the objective that trains ``module``, in its training precision, towards its target outputs.

    Args:
        module: the module to train.
        samples: inputs and target outputs.
        train_rows: number of rows to train on, the first ones; the others are for evaluation.
        loss: "mse" or "cosine".
    """
    held_out = slice(train_rows, len(samples.inputs))
    mean_square = float(samples.targets(slice(0, min(train_rows, 16384))).double().square().mean()) or 1.0

    def training_loss(rows: Tensor) -> Tensor:
        outputs = samples.run(module, rows)
        return _loss(loss, outputs, samples.targets(rows).to(outputs), mean_square)

    return FitObjective(train_rows, training_loss, lambda: measure(module, samples, held_out), loss == "cosine")


# Several operators, within the model


@contextlib.contextmanager
def swapped(model: nn.Module, modules: Mapping[str, nn.Module]) -> Iterator[None]:
    """Put ``modules`` into ``model`` under their names (including aliases) within the block."""
    previous = {name: model.get_submodule(name) for name in modules}
    try:
        _set_submodules(model, modules)
        yield
    finally:
        _set_submodules(model, previous)


def _set_submodules(model: nn.Module, modules: Mapping[str, nn.Module]) -> None:
    for name, module in modules.items():
        model.set_submodule(name, module)


class _SinglePrecision(nn.Module):
    """Run an operator in its own precision within a model of another one, so that it can be trained in float32."""

    def __init__(self, operator: nn.Module) -> None:
        super().__init__()
        self.operator = operator

    def forward(self, x: Tensor) -> Tensor:
        return self.operator(x.to(next(self.operator.parameters()).dtype)).to(x.dtype)


@dataclasses.dataclass(frozen=True)
class InModelFit:
    """Fit operators within the model on blocks of tokens; targets are the outputs of the original model.

    Attributes:
        model: the model, in eval mode; its parameters do not change.
        operators: name -> operator, with every alias of a layer; their dtype may differ from the model's.
        originals: the original modules by the same names.
        blocks: token ids (N, T); blocks from index ``train_blocks`` on are for evaluation.
        train_blocks: number of blocks to train on.
        batch: blocks per forward pass.
    """

    model: nn.Module
    operators: Mapping[str, Operator]
    originals: Mapping[str, nn.Module]
    blocks: Tensor
    train_blocks: int
    batch: int

    def improve(
        self, objective: FitObjective, settings: DistillSettings, on_step: Callable[..., None]
    ) -> tuple[FitError, FitError]:
        """Train the operators together by ``improve``."""
        unique = list({id(operator): operator for operator in self.operators.values()}.values())
        with frozen_parameters(self.model):
            return improve(unique, objective, settings, self.batch, settings.learning_rate, on_step)

    def _ids(self, rows: Tensor | slice) -> Tensor:
        return self.blocks[rows].to(next(self.model.parameters()).device)

    def _validation_ids(self) -> Iterator[Tensor]:
        for start in range(self.train_blocks, len(self.blocks), self.batch):
            yield self._ids(slice(start, start + self.batch))

    def logits_objective(self) -> FitObjective:
        """Return the objective KL(original model || model with operators) of the logits, in nats per token."""

        def divergence(ids: Tensor) -> Tensor:
            with torch.no_grad(), swapped(self.model, self.originals):
                target_logits = self.model(input_ids=ids).logits
            with swapped(self.model, self.operators):
                return kl_terms(self.model(input_ids=ids).logits, target_logits).sum(-1).mean()

        @torch.no_grad()
        def error() -> FitError:
            evaluated = len(self.blocks) - self.train_blocks
            return FitError(sum(float(divergence(ids)) * len(ids) for ids in self._validation_ids()) / evaluated)

        return FitObjective(self.train_blocks, lambda rows: divergence(self._ids(rows)), error)

    def output_objective(self, holder: str, loss: str) -> FitObjective:
        """Return the objective "mse" or "cosine" of the outputs of the module ``holder``, which holds the operators."""
        casting = {id(operator): _SinglePrecision(operator).eval() for operator in self.operators.values()}
        operators = {name: casting[id(operator)] for name, operator in self.operators.items()}

        def output(ids: Tensor, modules: Mapping[str, nn.Module]) -> Tensor:
            with swapped(self.model, modules):
                return output_of(self.model, holder, ids).float()

        @torch.no_grad()
        def target_outputs(ids: Tensor) -> Tensor:
            return output(ids, self.originals)

        @torch.no_grad()
        def error() -> FitError:
            pairs = ((output(ids, operators), target_outputs(ids)) for ids in self._validation_ids())
            return _error((outputs.flatten(0, -2), targets.flatten(0, -2)) for outputs, targets in pairs)

        first_ids = self._ids(slice(0, min(self.train_blocks, self.batch)))
        mean_square = float(target_outputs(first_ids).double().square().mean()) or 1.0

        def training_loss(rows: Tensor) -> Tensor:
            ids = self._ids(rows)
            return _loss(loss, output(ids, operators), target_outputs(ids), mean_square)

        return FitObjective(self.train_blocks, training_loss, error, loss == "cosine")
