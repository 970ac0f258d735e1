"""Accuracy of arithmetic answers with y computed and with y frozen (CGT, Table 1)."""

# Legend: B samples, T tokens, E width of y, K tasks of a sample

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from relinear.analysis.analyses import Subject
from relinear.analysis.cgt_context import context_variation
from relinear.contract.module_state import eval_mode, observe_forwards
from relinear.data.tasks import SYMBOLS, ArithmeticTask, Samples
from relinear.pages.blocks import Block, Cell, Chart, Row, Table
from relinear.pages.figures import Axis, Guide, Panel, Series

#: how to read its figures, for the page
HOW_TO_READ = (
    "Answers of the second half of a task's examples. The accuracy lost from y computed to y frozen shows what y does "
    "not store; guessing is the best that the numbers alone allow. A constant has a probe's error of 1."
)
KINDS = {
    "dynamic": "y computed, examples in context",
    "specialized": "y frozen, examples removed",
    "specialized_ctx": "y frozen, examples in context",
    "another": "y frozen, of another sample, examples removed",
}
#: where a probe reads y: at a random position of the second half (Section 4.2), its mean there (Figure 3b), at the end
PROBES = ("anywhere", "average", "last")


def _accuracy(logits: Tensor, ids: Tensor, answers: Tensor, examples: int) -> Tensor:
    """Return (B, 2): shares of correct symbols (given those before) and of correct answers, at ``answers`` (T,)."""
    correct = (logits[:, :-1].argmax(-1) == ids[:, 1:])[:, answers[1:]].double()
    return torch.stack([correct.mean(1), correct.view(len(ids), examples, -1).amin(-1).mean(1)], 1)


@torch.no_grad()
def answer_accuracy(model: Any, task: ArithmeticTask, ids: Tensor) -> dict[str, Tensor]:
    """Return the accuracy on the answers of the second half of each task's examples (CGT, Section 4.2 and Table 1).

    Args:
        model: a ``CGTForCausalLM``, or any causal language model over the task's symbols (``dynamic`` only).
        task, ids: the task, and samples of it (B, T).

    Returns:
        Kind -> (B, 2), shares of symbols and of whole answers. ``dynamic``: the whole sample in context, y computed for
        each token. For a CGT also ``specialized``: y frozen at the end of the first half, whose examples are then
        removed from the context; ``specialized_ctx``: the same y, for all tokens of the task, with its examples in the
        context ("ctx" in Figure 9; Figures 7 and 8); and ``another``, the control: y of another sample, which has
        other coefficients.
    """
    second = task.examples // 2
    if second < 1:
        raise ValueError(f"accuracy is measured on the second half of the examples; the task has {task.examples}")
    answers = task.answer_mask() & (task.example_numbers() >= task.examples - second)
    with eval_mode(model):
        accuracies = {"dynamic": _accuracy(model(input_ids=ids).logits, ids, answers, second * task.tasks)}
        if not hasattr(model, "context"):
            return accuracies
        y = model.context(ids)
        parts: dict[str, list[Tensor]] = {kind: [] for kind in KINDS if kind != "dynamic"}
        for start in range(0, task.length, task.task_length):
            middle, end = start + task.half_length, start + task.task_length
            frozen = y[:, middle - 1]
            other = frozen.roll(1, 0)
            for kind, begin, context in (
                ("specialized", middle, frozen),
                ("specialized_ctx", start, frozen),
                ("another", middle, other),
            ):
                rest = ids[:, begin:end]
                logits = model(input_ids=rest, frozen_context=context).logits
                parts[kind].append(_accuracy(logits, rest, answers[begin:end], second))
    return accuracies | {kind: torch.stack(values).mean(0) for kind, values in parts.items()}


def guessing_accuracy(samples: Samples, count: int = 256, draws: int = 4096) -> float:
    """Return the share of answers that the best guess from only the query's two numbers predicts.

    The queries are the examples of the first ``count`` samples. The best guess is the answer that most coefficients
    give. Whole coefficients are all tried. For real coefficients the guess is made from ``draws`` of them, and its
    share is counted on as many others.
    """
    task: ArithmeticTask = samples.task
    if task.integers:
        ranges = [np.arange(int(low), int(high) + 1) for low, high in (task.a, task.b)]
        tried = counted = np.stack(np.meshgrid(*ranges), -1).reshape(-1, 2)
    else:
        generator = np.random.default_rng(0)
        tried, counted = (task.draw_coefficients(generator, draws) for _ in range(2))
    queries = np.concatenate([samples.draw(i)["numbers"].reshape(-1, 2) for i in range(min(count, len(samples)))])
    correct = 0.0
    for query in queries:
        values, votes = np.unique(np.trunc(tried @ query), return_counts=True)
        correct += float(np.mean(np.trunc(counted @ query) == values[votes.argmax()]))
    return correct / len(queries)


def linear_probe(features: Tensor, targets: Tensor, penalty: float = 1e-3) -> dict[str, Any]:
    """Return a least-squares fit from y to the task's coefficients (CGT, Section 4.2, "y as task representation").

    Args:
        features: (samples, E).
        targets: (samples, coefficients); coefficients that never change are left out.
        penalty: weight of the squared weights, relative to the features' variance; it keeps the fit defined.

    Returns:
        error: mean squared error on the second half of the samples, to which nothing is fitted, the coefficients scaled
        to unit variance (so 1 is chance); r2 of each coefficient; predicted, truth: (samples, coefficients), scaled.
    """
    x, t = features.double(), targets.double()
    t = t[:, t.std(0) > 0]
    split = len(x) // 2
    if split < 2 or not t.shape[1]:
        raise ValueError(f"a probe needs samples to fit and coefficients that vary, got {tuple(targets.shape)} targets")
    x = (x - x[:split].mean(0)) / x[:split].std(0).clamp_min(1e-9)
    t = (t - t[:split].mean(0)) / t[:split].std(0)
    gram = x[:split].T @ x[:split] + penalty * split * torch.eye(x.shape[1], dtype=x.dtype)
    predicted = x[split:] @ torch.linalg.solve(gram, x[:split].T @ t[:split])
    errors = (predicted - t[split:]).square().mean(0)
    r2 = (1 - errors / t[split:].var(0, unbiased=False)).tolist()
    return {"error": float(errors.mean()), "r2": r2, "predicted": predicted.tolist(), "truth": t[split:].tolist()}


def probe_features(y: Tensor, task: ArithmeticTask, probe: str = "anywhere") -> Tensor:
    """Return the input of the coefficients' probe for each task of each sample: y (B, T, E) -> (B, K, E).

    ``probe`` is one of ``PROBES``: y at one position of the second half of the examples, drawn for each sample and
    task; its mean over that half; or y at the end of the task.
    """
    late = y.view(len(y), task.tasks, task.task_length, -1)[:, :, task.half_length :]
    if probe == "average":
        return late.mean(2)
    if probe == "last":
        return late[:, :, -1]
    chosen = torch.randint(late.shape[2], (*late.shape[:2], 1, 1), generator=torch.Generator().manual_seed(0))
    return late.take_along_dim(chosen.to(y.device), 2).squeeze(2)


@torch.no_grad()
def task_vector_accuracy(model: Any, task: ArithmeticTask, ids: Tensor, token: str = "=") -> list[float]:
    """Return accuracies after activation transplantation into a plain GPT-2, by layer: the baseline of Section 4.2.

    The hidden state after each block at the last ``token`` of the first half of the examples replaces the one at the
    same symbol of a lone query, which is then answered without any example in context.

    Args:
        model: a ``GPT2LMHeadModel`` over the task's symbols.
        task, ids: a task with at least two examples, and samples of it (B, T); tasks after the first are not used.
        token: "=", taken from a query after the examples whose answer is not shown, or "|", the separator after them.

    Returns:
        Share of right answers for each layer.
    """
    step, half = task.example_length, task.half_length
    equals = 2 * task.digits + 1
    query = ids[:, half : half + step]
    if token == "=":
        # The state comes from another sample's numbers, so that it can only carry the task.
        shown, source, target = torch.cat([ids[:, :half], query.roll(1, 0)[:, : equals + 1]], 1), half + equals, equals
    else:
        shown, source, target, query = ids[:, :half], half - 1, 0, torch.cat([ids[:, half - 1 : half], query], 1)
    answers = torch.zeros(query.shape[1], dtype=torch.bool)
    begin = equals + 1 + (token == "|")
    answers[begin : begin + task.digits + 3] = True
    accuracies, states = [], []
    with eval_mode(model):
        blocks = dict(model.transformer.h.named_children())
        # hooks, as the last of hidden_states comes after the final normalisation
        with observe_forwards(blocks.items(), lambda name, module, args, output: states.append(_hidden(output))):
            model(input_ids=shown)
        for block, state in zip(blocks.items(), states, strict=True):

            def transplant(name: str, module: Any, args: Any, output: Any, vector: Tensor = state[:, source]) -> Any:
                hidden = _hidden(output).clone()
                hidden[:, target] = vector
                return (hidden, *output[1:]) if isinstance(output, tuple) else hidden

            with observe_forwards([block], transplant):
                accuracies.append(float(_accuracy(model(input_ids=query).logits, query, answers, 1)[:, 1].mean()))
    return accuracies


def _hidden(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output


def applies(model: nn.Module) -> bool:
    """Return whether the model reads the symbols of the task."""
    return getattr(getattr(model, "config", None), "vocab_size", None) == len(SYMBOLS)


def run(subject: Subject) -> dict[str, Any]:
    """Return the rows of Table 1: accuracies, variation of y (Eq. 4) and errors of linear probes."""
    samples, model, ids = subject.samples_of(ArithmeticTask), subject.model, subject.ids
    task = samples.task
    accuracy = answer_accuracy(model, task, ids)
    numbers: dict[str, Any] = {
        "accuracy": {
            kind: {"symbols": float(v[:, 0].mean()), "answers": float(v[:, 1].mean()), "by_sample": v[:, 1].tolist()}
            for kind, v in accuracy.items()
        },
        "guessing": guessing_accuracy(samples),
    }
    if hasattr(model, "context"):
        y = model.context(ids)
        starts = range(0, task.length, task.task_length)
        ranges = [(start, start + task.half_length, start + task.task_length) for start in starts]
        variation = [context_variation(y, slice(a, b), slice(b, c)) for a, b, c in ranges]
        hidden = torch.from_numpy(np.concatenate([samples.draw(i)["coefficients"] for i in range(len(ids))]))
        probes = {probe: linear_probe(probe_features(y, task, probe).flatten(0, 1), hidden) for probe in PROBES}
        numbers |= {"variation": float(np.mean(variation)), "probe": probes}
    elif hasattr(model, "transformer"):
        numbers["task_vectors"] = {token: task_vector_accuracy(model, task, ids, token) for token in "=|"}
    return numbers


def blocks(numbers: Mapping[str, Any]) -> list[Block]:
    """Return the page's blocks for ``numbers``: a row for each kind of y, and the errors of probes of y."""
    page_blocks: list[Block] = []
    rows = [
        Row([KINDS[kind], Cell.of(value["answers"], ".1%"), Cell.of(value["symbols"], ".1%")])
        for kind, value in numbers["accuracy"].items()
    ]
    rows.append(Row(["best guess without examples", Cell.of(numbers["guessing"], ".1%"), ""]))
    for token, layers in numbers.get("task_vectors", {}).items():
        rows.append(Row([f"activations moved from {token!r}, best layer", Cell.of(max(layers), ".1%"), ""]))
    page_blocks.append(Table(["examples", "answers right", "symbols right"], rows))
    if "probe" not in numbers:
        return page_blocks
    rows = [Row(["variation of y (Eq. 4)", Cell.of(numbers["variation"])])]
    rows += [Row([f"probe of y, {probe}", Cell.of(value["error"])]) for probe, value in numbers["probe"].items()]
    page_blocks.append(Table(["measure", "value"], rows))
    read = numbers["probe"]["average"]
    names = ("a", "b") if len(read["r2"]) == 2 else ("coefficient",)
    for name, truth, predicted in zip(names, zip(*read["truth"]), zip(*read["predicted"])):
        points = Series(name=name, x=truth, y=predicted, mode="points", opacity=0.4)
        panel = Panel([points], Axis(title=f"{name} (scaled)"), Axis(title="read from y"), [Guide()], legend=False)
        page_blocks.append(Chart(f"{name}, read from the mean of y.", panel, inline=True, stem="cgt_probe"))
    return page_blocks
