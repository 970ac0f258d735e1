"""Build the explore page: one HTML file that requests data from the server, or contains the index and can be mailed."""

# Legend: U units, N texts, T tokens of a text

import base64
import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from relinear.explore.changes import ACTIONS, MAX_NEW_TOKENS, effect
from relinear.explore.explored_model import ExploredModel
from relinear.explore.units import BINS, TOP
from relinear.pages.blocks import Part, Section
from relinear.pages.page import render
from relinear.system.progress import Progress, ProgressCallback, no_progress

_TEMPLATE = "explore/explore.html"
_LIVE = (
    "A unit is one dimension of a hook point: a gate, a dimension of a latent, a channel of a layer's output. "
    "Check whether its texts share something that the texts of the random control unit lack, and whether "
    "changing it has a larger effect than changing the control."
)
_STATIC = (
    _LIVE + " This file holds no model. To type texts or change units, run relinear explore on the model's directory."
)
_KINDS = {torch.float32: "F32", torch.int32: "I32"}


def live_page(overviews: Sequence[Mapping[str, Any]]) -> str:
    """Return the page that requests its data from the server."""
    return _page(overviews, _LIVE, {"models": list(overviews)})


def static_page(models: Sequence[ExploredModel], effects: int = 0, on_progress: ProgressCallback = no_progress) -> str:
    """Return the page that contains the models' indices.

    Args:
        models: one model, or two side by side.
        effects: how many units of each model get their measured effect on the next token; those with the largest
            standard deviation at their hook point come first.
        on_progress: called after each of these measurements.
    """
    overviews = [explored.overview() for explored in models]
    indices: list[dict[str, Any]] = [{"effects": {}} | _encoded_index(explored) for explored in models]
    pairs = zip(models, indices, strict=True)
    chosen = [(explored, encoded, *unit) for explored, encoded in pairs for unit in _most_varying(explored, effects)]
    for done, (explored, encoded, point, unit) in enumerate(chosen, start=1):
        encoded["effects"][f"{point} #{unit}"] = effect(explored, point, unit)
        on_progress(Progress("measuring effects", done, len(chosen)))
    return _page(overviews, _STATIC, {"models": overviews, "index": indices})


def content_policy(page: str) -> str:
    """Return the Content-Security-Policy that lets ``page`` run only its own scripts and contact only its server."""
    scripts = re.findall(r"<script id=\"\w+\">(.*?)</script>", page, flags=re.DOTALL)
    hashes = " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(s.encode()).digest()).decode()}'" for s in scripts)
    return (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _page(overviews: Sequence[Mapping[str, Any]], help_text: str, data: Mapping[str, Any]) -> str:
    title = " and ".join(str(overview["path"]) for overview in overviews)
    whole = {"actions": list(ACTIONS), "most_new_tokens": MAX_NEW_TOKENS, **data}
    return render([Section(title, "explore", [Part(_TEMPLATE, {"help": help_text, "data": whole})])])


def _most_varying(explored: ExploredModel, count: int) -> list[tuple[str, int]]:
    """Return up to ``count`` units, from all hook points in turn, those with the largest standard deviation first."""
    std = explored.index.tensors["std"]
    units: list[tuple[int, str, int]] = []
    for facts in explored.index.hook_points.values():
        order = std[facts.rows].sort(descending=True, stable=True).indices[:count].tolist()
        units += [(rank, facts.name, unit) for rank, unit in enumerate(order)]
    units.sort(key=lambda pair: pair[0])  # stable: the hook points in their order
    return [(point, unit) for _, point, unit in units[:count]]


def _encoded_index(explored: ExploredModel) -> dict[str, Any]:
    """Encode an index for the page: little-endian numbers in base64, and the texts of the tokens that occur."""
    index = explored.index
    return {
        "tensors": {name: _base64(tensor) for name, tensor in index.tensors.items()},
        "ids": _base64(index.ids),
        "token_texts": {str(token): explored.token_text(token) for token in index.ids.unique().tolist()},
        "length": index.ids.shape[1],
        "top": TOP,
        "bins": BINS,
    }


def _base64(tensor: Tensor) -> dict[str, str]:
    numbers = tensor.contiguous().numpy()
    little = numbers.astype(numbers.dtype.newbyteorder("<"))
    return {"kind": _KINDS[tensor.dtype], "base64": base64.b64encode(little.tobytes()).decode("ascii")}
