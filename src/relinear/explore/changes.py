"""Change a unit of a model, or specialise it to a prefix, and compare the next token with that of a control."""

# Legend: B batch, T tokens, V vocabulary, E width of y

import random
from collections.abc import Mapping, Sequence
from importlib import resources
from string import Template
from typing import Annotated, Any, NamedTuple

import torch
from pydantic import Field, StrictFloat
from torch import Tensor

from relinear.activations.hooks import Intervention
from relinear.activations.interventions import Add, Clamp, Patch
from relinear.explore.explored_model import SHOWN, ExploredModel
from relinear.explore.units import values_of

#: the most tokens to generate after a text
MAX_NEW_TOKENS = 100
#: number of texts on which a unit's effect is measured
EFFECT_TEXTS = 5
#: name of a change -> the intervention and its argument
ACTIONS: dict[str, tuple[type[Intervention], str]] = {
    "set": (Patch, "value"),
    "add": (Add, "direction"),
    "at least": (Clamp, "minimum"),
    "at most": (Clamp, "maximum"),
}


class Change(NamedTuple):
    """Describe a change of one unit.

    Attributes:
        point: name of the hook point.
        unit: index of the unit there.
        action: one of ``ACTIONS``.
        value: what the action sets, adds or limits to.
    """

    point: str
    unit: int
    action: str
    value: float

    def interventions(self) -> dict[str, Intervention]:
        """Return arguments for ``relinear.activations.intervene``. Raises ValueError for an unknown action."""
        if self.action not in ACTIONS:
            raise ValueError(f"unknown action {self.action!r}; there are: {', '.join(ACTIONS)}")
        intervention, argument = ACTIONS[self.action]
        return {self.point: intervention(**{argument: self.value, "dims": [self.unit]})}

    def code(self) -> str:
        """Return the change as Python source."""
        intervention, argument = ACTIONS[self.action]
        call = f"{intervention.__name__}({argument}={self.value!r}, dims=[{self.unit}])"
        return f"{{{self.point!r}: relinear.activations.{call}}}"


def try_change(
    explored: ExploredModel,
    text: str,
    point: str,
    unit: int,
    action: str,
    value: StrictFloat,
    new: Annotated[int, Field(ge=0, le=MAX_NEW_TOKENS)] = 30,
    seed: int = 0,
) -> dict[str, Any]:
    """Return the effect of a change of a unit on the next token and on ``new`` tokens, compared with a control.

    The control is a random other unit that is moved equally far, in its own standard deviations.

    Raises:
        ValueError: for an unknown unit or action, or a text that is empty or too long.
    """
    change = Change(point, unit, action, value)
    ids = explored.encode(text, new)
    sides: dict[str, dict[str, Any]] = {}
    changes = {"before": None, "after": change}
    if (control := _control(explored, change, seed)) is not None:
        changes["control"] = control
    with explored.lock:
        for side, side_change in changes.items():
            interventions = {} if side_change is None else side_change.interventions()
            probabilities = explored.next_token_probabilities(ids[None], interventions)[0, -1]
            continuation = explored.continued(ids, new, interventions) if new else ""
            described = side_change and side_change._asdict()
            sides[side] = {"probabilities": probabilities, "text": continuation, "change": described}
    return _side_by_side(explored, sides) | {"code": code(explored, text, change, new)}


def _control(explored: ExploredModel, change: Change, seed: int) -> Change | None:
    """Return the same change (in standard deviations) of a control unit; None if there is none."""
    control = explored.control_of(change.point, change.unit, seed)
    if control is None:
        return None
    row, other = explored.index.row(change.point, change.unit), explored.index.row(*control)
    mean, std = explored.index.tensors["mean"].double(), explored.index.tensors["std"].double()
    scale = float(std[other] / std[row]) if std[row] > 0 else 1.0
    value = change.value * scale
    if change.action != "add":
        value = float(mean[other]) + (change.value - float(mean[row])) * scale
    return Change(*control, change.action, value)


def _side_by_side(explored: ExploredModel, sides: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the probabilities of the tokens that are likely with or without the change, and the generated texts."""
    before = sides["before"]["probabilities"]
    likely = _likeliest([side["probabilities"] for side in sides.values()])
    answer: dict[str, Any] = {"tokens": explored.tokens(likely), "control": None}
    for name, side in sides.items():
        probabilities = side["probabilities"]
        answer[name] = {**side, "probabilities": probabilities[likely].tolist()}
        answer[name]["divergence"] = divergence(before, probabilities)
    return answer


def _likeliest(distributions: Sequence[Tensor]) -> list[int]:
    """Return the tokens that are likely in one of several distributions (V,), by their probability in the first."""
    count = min(SHOWN, len(distributions[0]))
    tokens = torch.cat([distribution.topk(count).indices for distribution in distributions]).unique()
    return tokens[distributions[0][tokens].sort(descending=True).indices].tolist()


def code(explored: ExploredModel, text: str, change: Change, new: int) -> str:
    """Return a program that repeats a change."""
    program = resources.files("relinear.explore").joinpath("change.txt").read_text(encoding="utf-8")
    values = {"path": explored.path, "tokenizer": explored.tokenizer.name_or_path, "text": text, "new": new}
    shown = {name: repr(value) for name, value in values.items()} | {"change": change.code()}
    lines = program.splitlines() if new else [line for line in program.splitlines() if "written" not in line]
    return Template("\n".join(lines)).substitute(shown, padding=explored.padding()) + "\n"


def effect(explored: ExploredModel, point: str, unit: int, seed: int = 0) -> dict[str, Any]:
    """Return a unit's effect on the next token where it is highest, compared with the same texts with it at its mean.

    The control is a random other unit that is set to its mean on the same texts.
    """
    row, tensors = explored.index.row(point, unit), explored.index.tensors
    texts = tensors["most_row"][row][:EFFECT_TEXTS].long()
    positions = tensors["most_token"][row][:EFFECT_TEXTS].long()[texts >= 0]
    ids = explored.index.ids.long()[texts[texts >= 0]]

    def probabilities(interventions: Mapping[str, Intervention]) -> Tensor:
        # the model is causal, so the tokens after the highest one do not matter
        return explored.next_token_probabilities(ids, interventions)[torch.arange(len(ids)), positions]

    def without(place: tuple[str, int]) -> dict[str, Intervention]:
        return Change(*place, "set", float(tensors["mean"][explored.index.row(*place)])).interventions()

    control = explored.control_of(point, unit, seed)
    with explored.lock:
        whole = probabilities({})
        answer: dict[str, Any] = {"unit": _effect_of(explored, whole, probabilities(without((point, unit))))}
        answer["control"] = _effect_of(explored, whole, probabilities(without(control))) if control else None
    return answer | {"texts": len(ids), "control_unit": control}


def _effect_of(explored: ExploredModel, whole: Tensor, without: Tensor) -> dict[str, Any]:
    """Return the mean divergence (nats), and the tokens whose probability the unit raises and lowers most."""
    change = (whole - without).mean(0)
    count = min(SHOWN // 2, len(change))
    up, down = change.topk(count).indices.tolist(), (-change).topk(count).indices.tolist()
    return {
        "divergence": sum(divergence(*pair) for pair in zip(whole, without, strict=True)) / len(whole),
        "raises": [[explored.token_text(token), float(change[token])] for token in up],
        "lowers": [[explored.token_text(token), float(change[token])] for token in down],
    }


def divergence(before: Tensor, after: Tensor) -> float:
    """Return KL(before || after) in nats."""
    before, after = before.double().clamp_min(1e-30), after.double().clamp_min(1e-30)
    return max(0.0, float((before * (before.log() - after.log())).sum()))


# Prefixes of a Contextually Guided Transformer


_CONTEXT = "transformer.context"


def prefix_view(explored: ExploredModel, prefix: str, text: str) -> dict[str, Any]:
    """Return the model specialised to ``prefix`` compared with the unspecialised one, as JSON values.

    Returns:
        "tokens", "probabilities": the likeliest next tokens after ``text``, and their probabilities in the specialised
        model, in the model itself, which reads the text alone, and in the model that reads prefix and text in one.
        "divergence": KL(unspecialised || specialised) in nats; "control_divergence": the same for a model specialised
        to a random text of the corpus. "weights": by layer, the relative change ||dW|| / ||W|| and the rank that has
        99 % of the square of dW. "context": y (T, E) along prefix and text, with "context_tokens" and, as "steps", the
        distance of each y from the one before, relative to its length. "prefix_tokens", "parameters": counts.

    Raises:
        ValueError: if the model cannot be specialised, or a text is empty or too long.
    """
    from relinear.models.cgt.specialize import specialize

    before, after = explored.encode(prefix), explored.encode(text)
    joined = torch.cat([before, after])
    corpus = explored.index.ids.long()
    other = corpus[random.Random(prefix).randrange(len(corpus))]
    with explored.lock, torch.no_grad():
        special = specialize(explored.model, before)
        control = specialize(explored.model, other)
        probabilities = {
            "specialised": _next_probabilities(special(after[None])),
            "unspecialised": explored.next_token_probabilities(after[None], {})[0, -1],
            "prefix and text in one": explored.next_token_probabilities(joined[None], {})[0, -1],
        }
        control_divergence = divergence(probabilities["unspecialised"], _next_probabilities(control(after[None])))
        context = values_of(explored.model, joined, [_CONTEXT])[_CONTEXT]
    likely = _likeliest(list(probabilities.values()))
    return {
        "prefix_tokens": len(before),
        "parameters": sum(parameter.numel() for parameter in special.parameters()),
        "tokens": explored.tokens(likely),
        "probabilities": {name: distribution[likely].tolist() for name, distribution in probabilities.items()},
        "divergence": divergence(probabilities["unspecialised"], probabilities["specialised"]),
        "control_divergence": control_divergence,
        "weights": _weight_changes(explored.model.state_dict(), special.state_dict()),
        "context": context.tolist(),
        "context_tokens": explored.tokens(joined.tolist()),
        "steps": [0.0, *((context[1:] - context[:-1]).norm(dim=1) / context[1:].norm(dim=1).clamp_min(1e-9)).tolist()],
    }


def _next_probabilities(output: Any) -> Tensor:
    return output.logits[0, -1].float().softmax(-1)


def _weight_changes(before: dict[str, Tensor], after: dict[str, Tensor]) -> list[dict[str, Any]]:
    """Return the matrices that a prefix changes, by name."""
    rows = []
    for name, weight in after.items():
        base = before.get(name)
        if weight.ndim != 2 or base is None or base.shape != weight.shape or torch.equal(base, weight):
            continue
        change = (weight - base).float()
        energy = torch.linalg.svdvals(change).square().cumsum(0)
        rank = int((energy < 0.99 * energy[-1]).sum()) + 1
        rows.append(
            {"name": name.removesuffix(".weight"), "change": float(change.norm() / base.float().norm()), "rank": rank}
        )
    return rows
