"""Index the units of a model over a corpus: the texts in which each is highest and lowest, in bounded memory.

A unit is one dimension of a hook point (``relinear.activations.hooks``): a gate, a dimension of a latent, a
channel of a layer's output. The index of all units is one safetensors file of numbers and one JSON file, which load
quickly.
"""

# Legend: N texts, T tokens of a text, B texts at a time, R units of a hook point, U units of all, K = TOP, H = BINS

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from relinear.activations.hooks import OUTPUT, Activation, HookPoint, hook_points, matching_names, observe
from relinear.contract.module_state import eval_mode
from relinear.hf.model_layout import layer_finder
from relinear.settings.messages import did_you_mean
from relinear.system.files import atomic_directory, read_json, write_json
from relinear.system.private_cache import check_all_private
from relinear.system.progress import Progress, ProgressCallback, no_progress
from relinear.system.run_folder import RunFolder, made_by

TOP, BINS = 20, 40
FORMAT = 1
#: texts in a forward pass
BATCH = 8
#: bytes of a unit in the index, and the most bytes of an index
_BYTES, _MAX_BYTES = 4 * (6 * TOP + BINS + 6), 1 << 30


def choose_hook_points(model: nn.Module, patterns: Sequence[str] = ()) -> dict[str, HookPoint]:
    """Return the hook points to index: all latents and gates; without any, the outputs of the layers' linear maps.

    Args:
        model: any model.
        patterns: those to use instead, as in ``relinear.activations.intervene``.

    Raises:
        ValueError: if there is no hook point, or the index would take more than a GiB.
    """
    every = hook_points(model, outputs=True)
    inside = {name: point for name, point in every.items() if point.kind != OUTPUT}
    chosen = {name: every[name] for pattern in patterns for name in matching_names(every, pattern)}
    if not patterns:
        chosen = inside or _outputs_of_layers(model, every)
    if not chosen:
        raise ValueError(f"{type(model).__name__} has no units: no latent, no gate and no layer with a linear map")
    units = sum(point.size for point in chosen.values())
    if units * _BYTES > _MAX_BYTES:
        raise ValueError(f"{units:,} units are too many for one index; name some, such as {next(iter(chosen))!r}")
    return chosen


def _outputs_of_layers(model: nn.Module, every: Mapping[str, HookPoint]) -> dict[str, HookPoint]:
    """Return the outputs of linear maps and operators of the decoder's layers, without the parts of operators."""
    find = layer_finder(model)
    inside = [name for name, point in every.items() if point.kind == OUTPUT and find(name) is not None]
    within = {n for n in inside for other in inside if n != other and n.startswith(other.removesuffix(OUTPUT))}
    return {name: every[name] for name in inside if name not in within}


@dataclasses.dataclass(frozen=True)
class HookPointFacts:
    """Locate a hook point in an index.

    Attributes:
        name: name of the hook point.
        kind: kind of the hook point.
        layer: index of its decoder layer; None outside of them.
        size: number of its units.
        start: the row of its first unit; the others follow.
    """

    name: str
    kind: str
    layer: int | None
    size: int
    start: int

    @property
    def rows(self) -> slice:
        return slice(self.start, self.start + self.size)


@dataclasses.dataclass(frozen=True)
class Index:
    """Statistics of a model's units on a corpus.

    "most_value", "most_row" and "most_token" (U, K) among the tensors are the texts in which a unit is highest, highest
    first, one entry per text at its highest token; the row is -1 if there are fewer texts. "least_...": likewise the
    lowest. "counts" (U, H): histogram over all tokens in bins of "width" (U,) that begin at "low" (U,). "mean", "std":
    (U,).

    Attributes:
        hook_points: the hook points by name, in the model's order.
        ids: token ids of the texts, (N, T).
        tensors: statistics of every unit, by name.
        made_from: JSON values that identify the inputs of the index.
    """

    hook_points: Mapping[str, HookPointFacts]
    ids: Tensor
    tensors: Mapping[str, Tensor]
    made_from: Mapping[str, Any]

    def row(self, point: str, unit: int) -> int:
        """Return the row of a unit in the tensors. Raises ValueError if there is none."""
        facts = self.facts(point)
        if not 0 <= unit < facts.size:
            raise ValueError(f"{point} has units 0 to {facts.size - 1}, got {unit}")
        return facts.start + unit

    def facts(self, point: str) -> HookPointFacts:
        """Return a hook point's entry. Raises ValueError if there is none of this name."""
        if point not in self.hook_points:
            raise ValueError(f"no hook point is named {point!r}; {did_you_mean(point, self.hook_points)}")
        return self.hook_points[point]

    def unit_at(self, row: int) -> tuple[str, int]:
        """Return the hook point and the unit of a row of the tensors."""
        facts = next(facts for facts in self.hook_points.values() if facts.start <= row < facts.start + facts.size)
        return facts.name, row - facts.start

    def save(self, directory: str | Path) -> None:
        """Write both files atomically, over an older index.

        Raises:
            ValueError: if the directory holds files of these names that are not an index of relinear's.
            OSError: if it cannot be written.
        """
        index_folder(directory).check_ours()
        with atomic_directory(directory, "index.json") as folder:
            save_file({"ids": self.ids.to(torch.int32), **self.tensors}, folder / "units.safetensors")
            values = [dataclasses.asdict(facts) for facts in self.hook_points.values()]
            made = made_by("explore") | {"format": FORMAT, "made_from": dict(self.made_from)}
            write_json(folder / "index.json", made | {"hook_points": values})


def index_folder(directory: str | Path) -> RunFolder:
    """Return the folder of an index; an index that was made from other inputs is replaced."""
    earlier = {"index.json": ("format", "made_from", "sites")}
    return RunFolder(directory, "explore", "index.json", ("units.safetensors",), earlier_records=earlier)


def read_index(directory: str | Path, made_from: Mapping[str, Any]) -> Index | None:
    """Return the index in ``directory`` if it is complete and was made from the same inputs, else None.

    Raises PermissionError, before anything is read, if another user could have put it there (``check_all_private``).
    """
    folder = check_all_private(directory)
    try:
        values = read_json(folder / "index.json")
        if values["format"] != FORMAT or values["made_from"] != dict(made_from):
            return None
        facts = {row["name"]: HookPointFacts(**row) for row in values["hook_points"]}
        tensors = load_file(folder / "units.safetensors")
        ids = tensors.pop("ids")
    except (OSError, ValueError, LookupError, TypeError, SafetensorError):
        return None  # it can be built again
    return Index(facts, ids, tensors, dict(made_from))


class _RunningStatistics:
    """Accumulate the index's statistics for the units of one hook point, text by text."""

    def __init__(self, size: int) -> None:
        self.values = {end: torch.full((size, TOP), -math.inf) for end in ("most", "least")}
        self.rows = {end: torch.full((size, TOP), -1) for end in ("most", "least")}
        self.tokens = {end: torch.zeros(size, TOP, dtype=torch.long) for end in ("most", "least")}
        self.counts = torch.zeros(size, BINS, dtype=torch.long)
        self.low = self.span = torch.empty(0)
        self.sum = self.squares = torch.zeros(size, dtype=torch.float64)
        self.seen = 0

    def add(self, values: Tensor, row: int) -> None:
        """Add the values (B, T, R) of the texts from ``row`` on."""
        for end, sign in (("most", 1), ("least", -1)):
            best, positions = (sign * values).max(1)
            rows = torch.arange(row, row + len(values))[None].expand(values.shape[-1], -1)
            candidates = torch.cat([self.values[end], best.T], 1)
            # stable, so that the first of several equal texts stays
            self.values[end], order = (part[:, :TOP] for part in candidates.sort(dim=1, descending=True, stable=True))
            self.rows[end] = torch.cat([self.rows[end], rows], 1).gather(1, order)
            self.tokens[end] = torch.cat([self.tokens[end], positions.T], 1).gather(1, order)
        flat = values.flatten(0, 1)
        self._count(flat)
        self.sum = self.sum + flat.double().sum(0)
        self.squares = self.squares + flat.double().square().sum(0)
        self.seen += len(flat)

    def _count(self, values: Tensor) -> None:
        """Count values in bins; for values outside the range, merge pairs of bins and double the range towards them."""
        least, most = values.amin(0), values.amax(0)
        if not self.seen:
            self.low, self.span = least, (most - least).clamp_min(1e-6 * most.abs().clamp_min(1e-6))
        for _ in range(256):
            below, above = least < self.low, most > self.low + self.span
            if not (below | above).any():
                break
            pairs = self.counts.unflatten(1, (-1, 2)).sum(-1)
            empty = torch.zeros_like(pairs)
            lower, higher = torch.cat([empty, pairs], 1), torch.cat([pairs, empty], 1)
            self.counts = torch.where(below[:, None], lower, torch.where(above[:, None], higher, self.counts))
            self.low = torch.where(below, self.low - self.span, self.low)
            self.span = torch.where(below | above, 2 * self.span, self.span)
        bins = ((values - self.low) / self.span * BINS).long().clamp(0, BINS - 1).T
        self.counts.scatter_add_(1, bins, torch.ones_like(bins))

    def tensors(self) -> dict[str, Tensor]:
        """Return the point's rows of the index's tensors."""
        mean = self.sum / self.seen
        tensors = {}
        for end, sign in (("most", 1), ("least", -1)):
            filled = self.rows[end] >= 0
            tensors[f"{end}_value"] = (sign * self.values[end]).where(filled, torch.zeros(()))
            tensors[f"{end}_row"] = self.rows[end].to(torch.int32)
            tensors[f"{end}_token"] = self.tokens[end].to(torch.int32)
        return tensors | {
            "counts": self.counts.to(torch.int32),
            "low": self.low.clone(),
            "width": self.span / BINS,
            "mean": mean.float(),
            "std": (self.squares / self.seen - mean.square()).clamp_min(0).sqrt().float(),
        }


@torch.no_grad()
def index_units(
    model: nn.Module,
    ids: Tensor,
    chosen: Mapping[str, HookPoint],
    made_from: Mapping[str, Any],
    on_progress: ProgressCallback = no_progress,
) -> Index:
    """Run ``model`` in eval mode on the texts ``ids`` (N, T) and index the units of the hook points ``chosen``.

    Raises:
        ValueError: if a value is not finite, or a point has no value for each token of the texts.
    """
    running = {name: _RunningStatistics(point.size) for name, point in chosen.items()}
    for start in range(0, len(ids), BATCH):
        rows = ids[start : start + BATCH]

        def add(name: str, values: Tensor, start: int = start) -> None:
            running[name].add(values, start)

        _run(model, rows, chosen, add)
        on_progress(Progress("indexing", min(start + BATCH, len(ids)), len(ids)))
    incomplete = [name for name, counts in running.items() if counts.seen != ids.numel()]
    if incomplete:
        raise ValueError(f"{incomplete[0]} has no value for some tokens of the texts; choose other hook points")
    layer_of = layer_finder(model)
    facts = {}
    first = 0
    for name, point in chosen.items():
        facts[name] = HookPointFacts(name, point.kind, layer_of(name), point.size, first)
        first += point.size
    parts = [counts.tensors() for counts in running.values()]
    tensors = {key: torch.cat([part[key] for part in parts]) for key in parts[0]}
    return Index(facts, ids.cpu().to(torch.int32), tensors, dict(made_from))


@torch.no_grad()
def values_of(model: nn.Module, ids: Tensor, names: Iterable[str]) -> dict[str, Tensor]:
    """Return values (T, R) of hook points, by name, for token ids (T,), in float32. Raises as ``index_units``."""
    by_point: dict[str, Tensor] = {}
    _run(model, ids[None], names, lambda name, values: by_point.update({name: values[0]}))
    return by_point


def _run(model: Any, ids: Tensor, names: Iterable[str], callback: Callable[[str, Tensor], None]) -> None:
    """Run a forward pass over ids (B, T); call ``callback`` with the name and the values (B, T, R) of each point."""

    def observer(name: str, activation: Activation) -> None:
        values = activation.z.detach().float().cpu()
        if values.shape[:-1] != ids.shape:
            return
        if not values.isfinite().all():
            raise ValueError(f"{name} has values that are not finite on real text: this model is broken")
        callback(name, values)

    with eval_mode(model), observe(model, observer, names):
        model(input_ids=ids.to(next(model.parameters()).device), use_cache=False)
