"""Changing a unit of a model: what happens to the next token and to the text, beside a control, and the code for it."""

# Legend: B batch, T tokens, V vocabulary

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from relinear.core.latents import Add, Clamp, Edit, Replace
from relinear.explore.subject import SHOWN, Subject

#: tokens that are written after a text
MOST_NEW_TOKENS = 100
#: texts that a unit's effect is measured on
EFFECT_TEXTS = 5
#: what may be done to a unit: name -> the edit and its argument
ACTIONS: dict[str, tuple[type[Edit], str]] = {
    "set": (Replace, "value"),
    "add": (Add, "direction"),
    "at least": (Clamp, "minimum"),
    "at most": (Clamp, "maximum"),
}


class Change(NamedTuple):
    """What is done to one unit of a site."""

    site: str
    unit: int
    action: str
    value: float

    def edits(self) -> dict[str, Edit]:
        """For ``relinear.intervene``. Raises ValueError for an unknown action."""
        if self.action not in ACTIONS:
            raise ValueError(f"unknown action {self.action!r}; there are: {', '.join(ACTIONS)}")
        edit, argument = ACTIONS[self.action]
        return {self.site: edit(**{argument: self.value, "dims": [self.unit]})}

    def code(self) -> str:
        """Return the same as Python source."""
        edit, argument = ACTIONS[self.action]
        return f"{{{self.site!r}: relinear.{edit.__name__}({argument}={self.value!r}, dims=[{self.unit}])}}"


def try_change(subject: Subject, text: str, change: Change, new: int = 30, seed: int = 0) -> dict[str, Any]:
    """Return what a change of a unit does to the next token after ``text`` and to what is written, beside a control.

    The control is a random other unit that is moved equally far, in its own standard deviations.

    Raises:
        ValueError: for an unknown unit or action, a value that is no number, or a text that is empty or too long.
    """
    if not torch.isfinite(torch.tensor(change.value)):
        raise ValueError(f"the value must be a finite number, got {change.value}")
    if not 0 <= new <= MOST_NEW_TOKENS:
        raise ValueError(f"between 0 and {MOST_NEW_TOKENS} tokens can be written, got {new}")
    subject.index.row(change.site, change.unit)
    ids, sides = subject.encode(text, new), dict[str, dict[str, Any]]()
    with subject.lock:
        for side, one in (("before", None), ("after", change), ("control", _alike(subject, change, seed))):
            if one is None and side == "control":
                continue
            edits = {} if one is None else one.edits()
            shares = subject.shares_of(ids[None], edits)[0, -1]
            written = subject.continued(ids, new, edits) if new else ""
            sides[side] = {"shares": shares, "text": written, "change": one and one._asdict()}
    return _side_by_side(subject, sides) | {"code": code(subject, text, change, new)}


def _alike(subject: Subject, change: Change, seed: int) -> Change | None:
    """The same change of a control unit."""
    control = subject.control_of(change.site, change.unit, seed)
    if control is None:
        return None
    row, other = subject.index.row(change.site, change.unit), subject.index.row(*control)
    mean, std = subject.index.tensors["mean"].double(), subject.index.tensors["std"].double()
    scale = float(std[other] / std[row]) if std[row] > 0 else 1.0
    value = change.value * scale
    if change.action != "add":
        value = float(mean[other]) + (change.value - float(mean[row])) * scale
    return Change(*control, change.action, value)


def _side_by_side(subject: Subject, sides: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The distributions over the tokens that are likely on one of the sides, and the texts."""
    before = sides["before"]["shares"]
    likely = torch.cat([side["shares"].topk(min(SHOWN, len(before))).indices for side in sides.values()]).unique()
    likely = likely[before[likely].sort(descending=True).indices].tolist()
    found: dict[str, Any] = {"tokens": subject.tokens(likely), "control": None}
    for name, side in sides.items():
        shares = side["shares"]
        found[name] = {**side, "shares": shares[likely].tolist(), "divergence": divergence(before, shares)}
    return found


def code(subject: Subject, text: str, change: Change, new: int) -> str:
    """Return a program that repeats a change."""
    lines = [
        "import torch",
        "from transformers import AutoTokenizer",
        "",
        "import relinear",
        "",
        f"model = relinear.from_pretrained({subject.path!r}).eval()",
        f"tokenizer = AutoTokenizer.from_pretrained({subject.tokenizer.name_or_path!r})",
        f"ids = torch.tensor([tokenizer({text!r}, add_special_tokens=False)['input_ids']])",
        f"with torch.no_grad(), relinear.intervene(model, {change.code()}):",
        "    shares = model(ids).logits[0, -1].softmax(-1)",
    ]
    if new:
        settings = f"max_new_tokens={new}, do_sample=False, pad_token_id={subject.padding()}"
        lines.append(f"    written = model.generate(ids, attention_mask=torch.ones_like(ids), {settings})")
    lines.append("for share, token in zip(*shares.topk(5)):")
    lines.append("    print(f'{share:.3f}', repr(tokenizer.decode([token])))")
    if new:
        lines.append("print(tokenizer.decode(written[0, ids.shape[1]:]))")
    return "\n".join(lines) + "\n"


def effect(subject: Subject, site: str, unit: int, seed: int = 0) -> dict[str, Any]:
    """Return what a unit does to the next token where it is highest: the same texts with it kept at its mean.

    Beside it a control, a random other unit that is kept at its mean on the same texts.
    """
    row, tensors = subject.index.row(site, unit), subject.index.tensors
    texts = tensors["most_row"][row][:EFFECT_TEXTS].long()
    places = tensors["most_token"][row][:EFFECT_TEXTS].long()[texts >= 0]
    ids = subject.index.ids.long()[texts[texts >= 0]]

    def shares(edits: Mapping[str, Edit]) -> Tensor:
        # a causal model: what comes after the marked token does not matter to it
        return subject.shares_of(ids, edits)[torch.arange(len(ids)), places]

    def without(one: tuple[str, int]) -> dict[str, Edit]:
        return Change(*one, "set", float(tensors["mean"][subject.index.row(*one)])).edits()

    control = subject.control_of(site, unit, seed)
    with subject.lock:
        whole = shares({})
        found: dict[str, Any] = {"unit": _moved(subject, whole, shares(without((site, unit))))}
        found["control"] = _moved(subject, whole, shares(without(control))) if control else None
    return found | {"texts": len(ids), "control_unit": control}


def _moved(subject: Subject, whole: Tensor, without: Tensor) -> dict[str, Any]:
    """Mean divergence (nats), and the tokens whose probability the unit raises and lowers most."""
    change = (whole - without).mean(0)
    count = min(SHOWN // 2, len(change))
    up, down = change.topk(count).indices.tolist(), (-change).topk(count).indices.tolist()
    return {
        "divergence": sum(divergence(*pair) for pair in zip(whole, without, strict=True)) / len(whole),
        "raises": [[subject.token_text(token), float(change[token])] for token in up],
        "lowers": [[subject.token_text(token), float(change[token])] for token in down],
    }


def divergence(before: Tensor, after: Tensor) -> float:
    """KL(before || after) in nats."""
    before, after = before.double().clamp_min(1e-30), after.double().clamp_min(1e-30)
    return max(0.0, float((before * (before.log() - after.log())).sum()))
