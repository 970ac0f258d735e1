"""Errors of in-context regression by number of examples, y computed or frozen (CGT, Figure 4)."""

# Legend: B samples, N pairs

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from relinear.analysis.analyses import Subject
from relinear.contract.module_state import eval_mode
from relinear.data.tasks import RegressionTask, Samples
from relinear.models.cgt import CGTForRegression
from relinear.pages.blocks import Block, Cell, Chart, Row, Table
from relinear.pages.figures import REFERENCE, Axis, Panel, Series

#: how to read its figures, for the page
HOW_TO_READ = (
    "Ridge regression with the true noise is the best possible. A frozen y has read the given number of examples, "
    "which are then removed from the context: its line begins where they end, and should begin at the computed one."
)
FREEZE_AFTER = (5, 10, 20)


def ridge_errors(samples: Samples, count: int = 256) -> np.ndarray:
    """Return the mean squared error of ridge regression at pair n = 0 .. N - 1 given the n pairs before it, (N,).

    The penalty eps^2 with a standard normal prior on U and b makes it the Bayes-optimal predictor of the task. The
    error is against U x + b without noise, as for the models.
    """
    task: RegressionTask = samples.task
    errors = np.zeros(task.pairs)
    count = min(count, len(samples))
    for pairs in map(samples.draw, range(count)):
        x = np.concatenate([pairs["x"], np.ones((task.pairs, 1))], 1)
        for n in range(task.pairs):
            gram = x[:n].T @ x[:n] + task.noise**2 * np.eye(x.shape[1])
            weights = np.linalg.solve(gram, x[:n].T @ pairs["y"][:n])
            errors[n] += np.square(x[n] @ weights - pairs["clean"][n]).mean() / count
    return errors


@torch.no_grad()
def regression_errors(model: Any, samples: Samples, freeze_after: Sequence[int] = ()) -> dict[str, np.ndarray]:
    """Return the mean squared error at each pair against U x + b (CGT, Figure 4).

    Returns:
        ``dynamic``: (N,), error at pair n with the n pairs before it in context; and for each k of ``freeze_after``,
        ``frozen_k``: (N - k,), error at the pairs after the k-th, with y frozen there and the first k pairs taken out
        of the context.
    """
    vectors = samples.batch(range(len(samples)))["vectors"]
    clean = torch.from_numpy(np.stack([samples.draw(i)["clean"] for i in range(len(samples))])).float()

    def errors(predictions: Tensor, start: int) -> np.ndarray:
        return (predictions[:, 0::2] - clean[:, start:]).square().mean((0, 2)).numpy()

    with eval_mode(model):
        results = {"dynamic": errors(model(vectors=vectors).logits, 0)}
        for k in freeze_after:
            y = model.context(vectors[:, : 2 * k])[:, -1]
            results[f"frozen_{k}"] = errors(model(vectors=vectors[:, 2 * k :], frozen_context=y).logits, k)
    return results


def applies(model: nn.Module) -> bool:
    """Return whether the model is a CGT that reads vectors."""
    return isinstance(model, CGTForRegression)


def run(subject: Subject) -> dict[str, Any]:
    """Return the errors of the model and of ridge regression."""
    samples = subject.samples_of(RegressionTask)
    after = [k for k in FREEZE_AFTER if k < samples.task.pairs] if subject.model.config.modulated else []
    error = regression_errors(subject.model, samples, after)
    errors = {name: values.tolist() for name, values in error.items()}
    return {"errors": errors, "ridge": ridge_errors(samples).tolist()}


def blocks(numbers: Mapping[str, Any]) -> list[Block]:
    """Return the page's blocks for ``numbers``: the curves, and a row for each number of examples."""
    errors, ridge = numbers["errors"], numbers["ridge"]
    series = [Series(name="ridge", color=REFERENCE, x=range(len(ridge)), y=ridge, mode="plain")]
    rows = []
    for number, values in enumerate(errors.values()):
        start = len(ridge) - len(values)
        label = f"y frozen after {start}" if start else "y computed"
        x = range(start, len(ridge))
        series.append(Series(name=label, number=number, x=x, y=values))
        if start:
            cells = (ridge[start], errors["dynamic"][start], values[0])
            rows.append(Row([str(start), *map(Cell.of, cells), Cell.of(values[0] / errors["dynamic"][start])]))
    x_axis, y_axis = Axis(title="examples, in context or through y"), Axis(title="mean squared error", log=True)
    chart = Chart("Error against the number of examples.", Panel(series, x_axis, y_axis), stem="cgt_regression")
    table = Table(["examples", "ridge", "y computed", "y frozen", "frozen / computed"], rows)
    return [chart, table] if rows else [chart]
