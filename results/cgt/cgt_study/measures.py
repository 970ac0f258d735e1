"""How a Contextually Guided Transformer does on the in-context tasks, with its context computed or frozen."""

# Legend: B samples, T tokens, E width of y, N pairs, K tasks of a sample

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from cgt_study.tasks import ArithmeticTask, RegressionTask
from relinear.contract.config import check_choice
from relinear.contract.modes import evaluating

__all__ = [
    "Accuracy",
    "Probe",
    "answer_accuracy",
    "answers_by_block",
    "arithmetic_report",
    "context_variation",
    "guessing_accuracy",
    "linear_probe",
    "probe_features",
    "regression_errors",
    "ridge_errors",
    "task_vector_accuracy",
]


@dataclasses.dataclass(frozen=True)
class Accuracy:
    """Share of answer symbols that are right given the symbols before them, and of answers right as a whole."""

    symbols: float
    answers: float


def _score(logits: Tensor, ids: Tensor, answers: Tensor, examples: int) -> Accuracy:
    """Accuracy of logits (B, T, V) on the symbols of ids (B, T) that ``answers`` (T,) marks: ``examples`` answers."""
    right = (logits[:, :-1].argmax(-1) == ids[:, 1:])[:, answers[1:]].float()
    whole = right.view(len(ids), examples, -1).amin(-1)
    return Accuracy(right.mean().item(), whole.mean().item())


def _mean(parts: Sequence[Accuracy]) -> Accuracy:
    return Accuracy(*(float(np.mean([getattr(p, f.name) for p in parts])) for f in dataclasses.fields(Accuracy)))


@torch.no_grad()
def answer_accuracy(model: nn.Module, task: ArithmeticTask, count: int = 256, first: int = 0) -> dict[str, Accuracy]:
    """Accuracy on the answers of the second half of each task's examples (CGT, Section 4.2 and Table 1).

    Args:
        model: a ``CGTForCausalLM``, or any causal language model over the task's symbols (``dynamic`` only).
        task: ``count`` of its samples are used, from the ``first`` on.
        count, first: B, and a number of a sample.

    Returns:
        ``dynamic``: the whole sample in context, y computed for each token. Of a CGT also ``specialized``: y frozen at
        the end of the first half, whose examples are then taken out of the context; and ``specialized_ctx``: the same
        y, for all tokens of the task, with its examples in the context ("ctx" in Figure 9; Figures 7 and 8).
    """
    ids = task.batch(range(first, first + count))["input_ids"]
    second = task.examples // 2
    if second < 1:
        raise ValueError(f"accuracy is measured on the second half of the examples; the task has {task.examples}")
    answers = task.answer_mask()
    late = task.example_of() >= task.examples - second
    with evaluating(model):
        results = {"dynamic": _score(model(input_ids=ids).logits, ids, answers & late, second * task.tasks)}
        if not hasattr(model, "context"):
            return results
        y = model.context(ids)
        without: list[Accuracy] = []
        within: list[Accuracy] = []
        for start in range(0, task.length, task.task_length):
            middle, end = start + (task.examples - second) * task.example_length, start + task.task_length
            for parts, begin in ((without, middle), (within, start)):
                rest = ids[:, begin:end]
                logits = model(input_ids=rest, frozen_context=y[:, middle - 1]).logits
                parts.append(_score(logits, rest, (answers & late)[begin:end], second))
    return results | {"specialized": _mean(without), "specialized_ctx": _mean(within)}


def answers_by_block(model: nn.Module, task: ArithmeticTask, size: int, blocks: int) -> dict[str, list[float]]:
    """Share of right answers in each of ``blocks`` blocks of ``size`` samples, by kind of y (``answer_accuracy``)."""
    found = [answer_accuracy(model, task, size, size * number) for number in range(blocks)]
    return {kind: [one[kind].answers for one in found] for kind in found[0]}


def guessing_accuracy(task: ArithmeticTask, count: int = 256, draws: int = 4096) -> float:
    """Share of answers that are right for the best guess from the query's two numbers alone, without any example.

    The best guess is the answer that most coefficients give. Whole coefficients are all tried; of real ones the guess
    is made from ``draws`` and its share counted among as many others.

    Args:
        task: the queries are the examples of its first ``count`` samples.
        count, draws: see above.
    """
    if task.integers:
        ranges = [np.arange(int(low), int(high) + 1) for low, high in (task.a_range, task.b_range)]
        tried = counted = np.stack(np.meshgrid(*ranges), -1).reshape(-1, 2)
    else:
        generator = np.random.default_rng(0)
        tried, counted = (task.draw_coefficients(generator, draws) for _ in range(2))
    queries = np.concatenate([task.numbers(index).reshape(-1, 2) for index in range(count)])
    right = 0.0
    for query in queries:
        values, votes = np.unique(np.trunc(tried @ query), return_counts=True)
        right += np.mean(np.trunc(counted @ query) == values[votes.argmax()])
    return right / len(queries)


def context_variation(y: Tensor, first: slice, second: slice) -> float:
    """Mean ||y_s - y_{s-1}|| over the segment E2, y normalised over E1 + E2 (CGT, Eq. 4).

    y is centred with its mean over E1 + E2 of each sample, and divided by the root mean square of its norm there.

    Args:
        y: (B, T, E).
        first, second: the positions of E1 and of E2, which follow each other.
    """
    both = y[:, first.start : second.stop]
    centred = both - both.mean(1, keepdim=True)
    scale = centred.square().sum(-1).mean(1).clamp_min(1e-20).sqrt()
    late = centred[:, second.start - first.start - 1 :] / scale[:, None, None]
    return (late[:, 1:] - late[:, :-1]).norm(dim=-1).mean().item()


@dataclasses.dataclass(frozen=True)
class Probe:
    """A linear read-out of the hidden coefficients from y.

    error: mean squared error on held-out samples, the coefficients scaled to unit variance (so 1 is chance).
    r2: share of the variance explained, for each coefficient.
    predicted, truth: (samples, coefficients), scaled, for a scatter plot.
    """

    error: float
    r2: tuple[float, ...]
    predicted: np.ndarray
    truth: np.ndarray


def linear_probe(features: Tensor, targets: Tensor, held_out: float = 0.5, penalty: float = 1e-3) -> Probe:
    """Least squares from y to the task's coefficients (CGT, Section 4.2, "y as task representation").

    Args:
        features: (samples, E).
        targets: (samples, coefficients); coefficients that never change are left out.
        held_out: share of the samples, the last ones, that the error is measured on.
        penalty: of the squared weights, relative to the features' variance: it keeps the fit defined.
    """
    x, t = features.double(), targets.double()
    t = t[:, t.std(0) > 0]
    split = int(len(x) * (1 - held_out))
    if split < 2 or not t.shape[1]:
        raise ValueError(f"a probe needs samples to fit and coefficients that vary, got {tuple(targets.shape)} targets")
    x = (x - x[:split].mean(0)) / x[:split].std(0).clamp_min(1e-9)
    t = (t - t[:split].mean(0)) / t[:split].std(0)
    gram = x[:split].T @ x[:split] + penalty * split * torch.eye(x.shape[1], dtype=x.dtype)
    predicted = x[split:] @ torch.linalg.solve(gram, x[:split].T @ t[:split])
    errors = (predicted - t[split:]).square().mean(0)
    r2 = tuple((1 - errors / t[split:].var(0, unbiased=False)).tolist())
    return Probe(errors.mean().item(), r2, predicted.numpy(), t[split:].numpy())


def probe_features(y: Tensor, task: ArithmeticTask, where: str = "anywhere", seed: int = 0) -> Tensor:
    """What a probe of the coefficients reads in each task of each sample, (B, K, E).

    Args:
        y: (B, T, E), the contexts of samples of ``task``.
        task: of K tasks.
        where: ``anywhere``, y at one position of the second half of the examples, drawn for each sample and task, as in
            the paper's Section 4.2; ``average``, its mean over that half (the paper's Figure 3b); ``last``, y at the
            end of the task.
        seed: of the drawn positions.
    """
    check_choice("where", where, ("anywhere", "average", "last"))
    half = (task.examples - task.examples // 2) * task.example_length
    late = y.view(len(y), task.tasks, task.task_length, -1)[:, :, half:]
    if where == "average":
        return late.mean(2)
    if where == "last":
        return late[:, :, -1]
    generator = torch.Generator().manual_seed(seed)
    at = torch.randint(late.shape[2], (*late.shape[:2], 1, 1), generator=generator).to(y.device)
    return late.take_along_dim(at, 2).squeeze(2)


def arithmetic_report(model: nn.Module, task: ArithmeticTask, count: int = 256) -> dict[str, Any]:
    """The rows of Table 1 for one model: accuracies, variation of y (Eq. 4) and errors of the linear probe.

    The variation is the mean over the tasks of a sample. ``probe`` has error and R^2 for each place that y is read at
    (``probe_features``), with the last half of the samples held out.
    """
    accuracy = answer_accuracy(model, task, count)
    report: dict[str, Any] = {name: dataclasses.asdict(value) for name, value in accuracy.items()}
    if not hasattr(model, "context"):
        return report
    y = model.context(task.batch(range(count))["input_ids"])
    half = (task.examples - task.examples // 2) * task.example_length
    starts = range(0, task.length, task.task_length)
    report["variation"] = float(
        np.mean([context_variation(y, slice(s, s + half), slice(s + half, s + task.task_length)) for s in starts])
    )
    hidden = torch.from_numpy(np.stack([task.coefficients(i) for i in range(count)])).flatten(0, 1)
    report["probe"] = {}
    for where in ("anywhere", "average", "last"):
        probe = linear_probe(probe_features(y, task, where).flatten(0, 1), hidden)
        report["probe"][where] = {"error": probe.error, "r2": list(probe.r2)}
    return report


def _samples(task: RegressionTask, count: int) -> Iterator[dict[str, np.ndarray]]:
    return (task.sample(index) for index in range(count))


def ridge_errors(task: RegressionTask, count: int = 256) -> np.ndarray:
    """Mean squared error of ridge regression at pair n = 0 .. N - 1 given the n pairs before it, (N,).

    The penalty eps^2 with a standard normal prior on U and b makes it the Bayes-optimal predictor of the task. The
    error is against U x + b without noise, as for the models.
    """
    errors = np.zeros(task.pairs)
    for drawn in _samples(task, count):
        x = np.concatenate([drawn["x"], np.ones((task.pairs, 1))], 1)
        for n in range(task.pairs):
            gram = x[:n].T @ x[:n] + task.noise**2 * np.eye(x.shape[1])
            weights = np.linalg.solve(gram, x[:n].T @ drawn["y"][:n])
            errors[n] += np.square(x[n] @ weights - drawn["clean"][n]).mean() / count
    return errors


@torch.no_grad()
def regression_errors(
    model: nn.Module, task: RegressionTask, freeze_after: Sequence[int] = (), count: int = 256
) -> dict[str, np.ndarray]:
    """Mean squared error at each pair against U x + b (CGT, Figure 4).

    Returns:
        ``dynamic``: (N,), error at pair n with the n pairs before it in context; and for each k of ``freeze_after``,
        ``frozen_k``: (N - k,), error at the pairs after the k-th, with y frozen there and the first k pairs taken out
        of the context.
    """
    vectors = task.batch(range(count))["vectors"]
    clean = torch.from_numpy(np.stack([drawn["clean"] for drawn in _samples(task, count)])).float()

    def errors(predictions: Tensor, start: int) -> np.ndarray:
        return (predictions[:, 0::2] - clean[:, start:]).square().mean((0, 2)).numpy()

    with evaluating(model):
        results = {"dynamic": errors(model(vectors=vectors).logits, 0)}
        for k in freeze_after:
            y = model.context(vectors[:, : 2 * k])[:, -1]
            results[f"frozen_{k}"] = errors(model(vectors=vectors[:, 2 * k :], frozen_context=y).logits, k)
    return results


@torch.no_grad()
def task_vector_accuracy(model: Any, task: ArithmeticTask, token: str = "=", count: int = 128) -> list[Accuracy]:
    """Activation transplantation into a plain GPT-2, layer by layer: the task-vector baseline of Section 4.2.

    The hidden state after each block at the last ``token`` of the first half of the examples replaces the one at the
    same symbol of a lone query, which is then answered without any example in context.

    Args:
        model: a ``GPT2LMHeadModel`` over the task's symbols.
        task: a task with at least two examples; tasks after the first are not used.
        token: "=", taken from a query after the examples whose answer is not shown, or "|", the separator after them.
        count: B.

    Returns:
        Accuracy on the query's answer for each layer.
    """
    if token not in ("=", "|"):
        raise ValueError(f"token must be '=' or '|', got {token!r}")
    ids = task.batch(range(count))["input_ids"]
    step, half = task.example_length, (task.examples - task.examples // 2) * task.example_length
    equals = 2 * task.digits + 1
    query = ids[:, half : half + step]
    if token == "=":
        # The state comes from another sample's numbers, so that it can only carry the task.
        shown, source, target = torch.cat([ids[:, :half], query.roll(1, 0)[:, : equals + 1]], 1), half + equals, equals
    else:
        separator = ids[:, half - 1 : half]
        shown, source, target, query = ids[:, :half], half - 1, 0, torch.cat([separator, query], 1)
    answers = torch.zeros(query.shape[1], dtype=torch.bool)
    begin = equals + 1 + (token == "|")
    answers[begin : begin + task.digits + 3] = True
    with evaluating(model):
        vectors = _states(model, shown, source)
        return [
            _score(_transplanted(model, block, query, vector, target), query, answers, 1)
            for block, vector in zip(model.transformer.h, vectors, strict=True)
        ]


def _states(model: Any, ids: Tensor, position: int) -> list[Tensor]:
    """The hidden state after every block at one position, each (B, D)."""
    # the last of hidden_states comes after the final normalisation
    states = model(input_ids=ids, output_hidden_states=True).hidden_states[1:-1]
    return [state[:, position] for state in (*states, _last_state(model, ids))]


def _transplanted(model: Any, block: Any, query: Tensor, vector: Tensor, position: int) -> Tensor:
    """The logits of ``query`` with ``vector`` in place of what ``block`` gives at ``position``."""

    def transplant(module: nn.Module, args: Any, output: Any) -> Any:
        hidden = output[0] if isinstance(output, tuple) else output
        hidden = hidden.clone()
        hidden[:, position] = vector
        return (hidden, *output[1:]) if isinstance(output, tuple) else hidden

    handle = block.register_forward_hook(transplant)
    try:
        return model(input_ids=query).logits
    finally:
        handle.remove()


def _last_state(model: Any, ids: Tensor) -> Tensor:
    """The hidden state after the last block, before the final normalisation (which ``hidden_states[-1]`` includes)."""
    caught: list[Tensor] = []
    handle = model.transformer.ln_f.register_forward_pre_hook(lambda module, args: caught.append(args[0]))
    try:
        model(input_ids=ids)
    finally:
        handle.remove()
    return caught[0]
