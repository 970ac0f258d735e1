"""Loss on the second half of a text with y frozen, from another text, or constant."""

# Legend: N texts, H tokens of the rest, E width of y

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from relinear.analysis.analyses import Subject
from relinear.contract.module_state import eval_mode
from relinear.data.tasks import SYMBOLS
from relinear.evaluate.losses import token_losses
from relinear.models.cgt import CGTForCausalLM
from relinear.pages.blocks import Block, Cell, Chart, Row, Table, Text
from relinear.pages.figures import Axis, Guide, Panel, Series

#: how to read its figures, for the page
HOW_TO_READ = (
    "Models read only the second half of each text. A line is named after the source of its y; below zero that y "
    "lowers the loss. The gain from another text of the same source measures the source; the gain from a learned "
    "constant needs no text."
)
#: tokens of the second half: those of the paper's Figure 6a, and on to where the text itself gives its subject away
POSITIONS = {"1 to 4": slice(0, 4), "5 to 16": slice(4, 16), "17 to 48": slice(16, 48), "after 48": slice(48, None)}
#: rate of the moving average (Figure 14)
RATE = 1 / 300
DYNAMIC, FROZEN, AVERAGE, CONSTANT = "computed", "frozen", "moving average", "learned constant"
SAME, OTHER = "frozen, of another text of its source", "frozen, of another source"
ANOTHER = "frozen, of another text"


@torch.no_grad()
def losses(model: Any, ids: Tensor, context: Tensor | None = None, rate: float = 0.0, batch: int = 32) -> Tensor:
    """Return cross-entropies (N, H - 1) of all tokens (N, H) but the first, with y frozen at ``context`` (N, E)."""
    parts = []
    with eval_mode(model):
        for start in range(0, len(ids), batch):
            part = ids[start : start + batch]
            y = {} if context is None else {"frozen_context": context[start : start + batch], "context_rate": rate}
            parts.append(token_losses(model(part, use_cache=False, **y).logits, part))
    return torch.cat(parts)


def learned_constant(model: Any, ids: Tensor, start: Tensor, steps: int = 100, rate: float = 0.03) -> Tensor:
    """Return the single y (E,) of lowest loss on texts ids (N, H), by Adam from ``start``; the model is unchanged."""
    y = start.clone().requires_grad_()
    optimizer = torch.optim.Adam([y], rate)
    generator = torch.Generator().manual_seed(0)
    with eval_mode(model):
        for _ in range(steps):
            part = ids[torch.randperm(len(ids), generator=generator)[:16]]
            loss = model(part, labels=part, frozen_context=y.expand(len(part), -1), use_cache=False).loss
            (y.grad,) = torch.autograd.grad(loss, y)
            optimizer.step()
    return y.detach()


@torch.no_grad()
def token_shifts(model: Any, ids: Tensor, contexts: Tensor, other: Tensor, top: int = 12) -> list[tuple[int, float]]:
    """Return the tokens whose logits rise most with y from another text (CGT, Appendix D.3, "Token probabilities").

    Args:
        model: a ``CGTForCausalLM``.
        ids: (N, H), the texts that are read.
        contexts: (N, E), their y.
        other: (E,), the other text's y.
        top: number of tokens.

    Returns:
        (token id, mean rise of its logit relative to the mean over the vocabulary), the largest first.
    """
    with eval_mode(model):
        logits = [model(ids, frozen_context=y, use_cache=False).logits for y in (contexts, other.expand(len(ids), -1))]
    rise = (logits[1] - logits[0]).mean((0, 1))
    best = (rise - rise.mean()).topk(min(top, len(rise)))
    return list(zip(best.indices.tolist(), best.values.tolist(), strict=True))


def applies(model: nn.Module) -> bool:
    """Return whether the model is a CGT of text."""
    config = model.config if isinstance(model, CGTForCausalLM) else None
    return config is not None and config.modulated and config.vocab_size != len(SYMBOLS)


def run(subject: Subject) -> dict[str, Any]:
    """Return losses on second halves of texts by the source of y, and the tokens that a source's y makes likelier.

    The learned constant is fitted on the first half of the texts; all losses are measured on the others.
    """
    model, ids, names = subject.model, subject.ids, subject.sources
    fit = len(ids) // 2 // len(names) * len(names)
    if not fit or ids.shape[1] < 8:
        raise ValueError(f"cgt_specialized takes at least {2 * len(names)} texts of 8 tokens, got {tuple(ids.shape)}")
    first, rest = ids[:, : ids.shape[1] // 2], ids[:, ids.shape[1] // 2 :]
    y = torch.cat([model.context(part)[:, -1] for part in first.split(32)])
    constant = learned_constant(model, rest[:fit], y[:fit].mean(0))
    contexts, rest = y[fit:], rest[fit:]
    if len(names) > 1:
        # far apart, in case a source is one document; odd, as documents come in turn
        distance = len(rest) // len(names) // 2 | 1
        other_texts = {SAME: contexts.roll(-distance * len(names), 0), OTHER: contexts.roll(-1, 0)}
    else:
        other_texts = {ANOTHER: contexts.roll(-1, 0)}
    frozen = {FROZEN: contexts, **other_texts, CONSTANT: constant.expand_as(contexts)}
    results = {DYNAMIC: losses(model, rest), AVERAGE: losses(model, rest, contexts, RATE)}
    results |= {kind: losses(model, rest, context) for kind, context in frozen.items()}
    if subject.control is not None:  # Figure 13a
        results[f"none: {subject.control_name}"] = losses(subject.control, rest)
    numbers: dict[str, Any] = {
        "texts": len(rest),
        "losses": {kind: values.mean(0).tolist() for kind, values in results.items()},
        "less_computed": {
            kind: {name: _mean((values - results[DYNAMIC])[:, part]) for name, part in POSITIONS.items()}
            for kind, values in results.items()
            if kind != DYNAMIC
        },
        "shifts": {},
    }
    for number, name in enumerate(names if len(names) > 1 else ()):
        foreign = [index for index in range(len(rest)) if index % len(names) != number][:16]
        shifts = token_shifts(model, rest[foreign], contexts[foreign], contexts[number :: len(names)].mean(0))
        numbers["shifts"][name] = [[subject.token_text(token), round(rise, 4)] for token, rise in shifts]
    return numbers


def _mean(values: Tensor) -> list[float] | None:
    """Return the mean over texts of values (N, K), and its standard error; None for K = 0."""
    if not values.shape[1]:
        return None
    texts = values.double().mean(1)
    return [float(texts.mean()), float(texts.std() / len(texts) ** 0.5)]


def blocks(numbers: Mapping[str, Any]) -> list[Block]:
    """Return the page's blocks for ``numbers``: a row for each y, losses by position, the tokens of each source."""
    rows = [
        Row([kind, *(Cell("–") if v is None else Cell(f"{v[0]:+.4f}", v[0], f"± {v[1]:.4f}") for v in means.values())])
        for kind, means in numbers["less_computed"].items()
    ]
    base, width = numbers["losses"][DYNAMIC], 8
    series = []
    for number, (kind, values) in enumerate((k, v) for k, v in numbers["losses"].items() if k != DYNAMIC):
        gaps = [value - reference for value, reference in zip(values, base, strict=True)]
        means = [sum(gaps[i : i + width]) / width for i in range(max(1, len(gaps) - width + 1))]
        middles = [i + width / 2 for i in range(len(means))]
        series.append(Series(name=kind, number=number, x=middles, y=means, mode="plain"))
    y_axis = Axis(title="gap to computed y (nats per token)")
    panel = Panel(series, Axis(title="position in the second half"), y_axis, [Guide(y=0)])
    page_blocks: list[Block] = [
        Table(["y", *(f"{name}, nats" for name in POSITIONS)], rows),
        Chart(f"Running means over {width} positions, {numbers['texts']} texts.", panel, stem="cgt_specialized"),
    ]
    for name, shifts in numbers["shifts"].items():
        page_blocks.append(
            Text(f"With the y of {name} these rise most: {', '.join(token for token, _ in shifts)}.", soft=True)
        )
    return page_blocks
