"""How long linear layers take on this machine, as they are and as operators: a measured table."""

# Legend: B batch, T tokens a sequence, I in_features, O out_features

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from relinear.compress.checksums import read_record, write_record
from relinear.core.inference import build_for_inference
from relinear.core.operator import OperatorConfig, linear_features
from relinear.system.files import read_json, understood
from relinear.system.grouped import grouped
from relinear.system.machine import describe_machine
from relinear.system.timing import Timing, interleave

#: (in_features, out_features) of a layer
Shape = tuple[int, int]

#: sizes of an operator that are measured for a shape; those between are interpolated
MEASURED_SIZES = 6
#: weights of one contender: several layers' worth, so that none comes from the processor's cache each time
WEIGHT_BYTES = 48 * 2**20
#: seconds that the rounds may take, about, and how many there are; each times one call of every contender
SECONDS, ROUNDS = 4.0, (7, 60)


@dataclasses.dataclass(frozen=True)
class SpeedConditions:
    """What is timed: ``purpose`` "decode" (one token of ``batch`` sequences) or "prefill" (``tokens`` of each)."""

    purpose: str
    batch: int
    tokens: int

    def __str__(self) -> str:
        what = "decoding" if self.purpose == "decode" else f"prefill of {self.tokens} tokens"
        return f"{what} at batch {self.batch}"

    def inputs(self, in_features: int, like: Tensor) -> Tensor:
        """Random inputs (B, T, I); T is 1 for decoding."""
        tokens = 1 if self.purpose == "decode" else self.tokens
        return torch.randn(self.batch, tokens, in_features, device=like.device).to(like.dtype)


@dataclasses.dataclass(frozen=True)
class SpeedTable:
    """Seconds of a call by shape and operator (None: the layer as it is)."""

    conditions: SpeedConditions
    rows: Mapping[Shape, Mapping[OperatorConfig | None, float]]

    def seconds(self, shape: Shape, config: OperatorConfig | None) -> float:
        """Of one call; between two measured sizes of an operator, on the line between them by FLOPs.

        Raises:
            ValueError: if the table has nothing on this shape, or nothing on this operator.
        """
        known = self.rows.get(shape, {})
        if config in known:
            return known[config]
        alike = sorted((_flops(c, shape), t) for c, t in known.items() if c is not None and type(c) is type(config))
        if config is None or not alike:
            raise ValueError(f"the table of speeds has no {config or 'dense layer'} of (in, out) sizes {shape}")
        flops, times = zip(*alike, strict=True)
        return float(np.interp(_flops(config, shape), flops, times))

    def check(self, wanted: Mapping[Shape, Iterable[OperatorConfig | None]], conditions: SpeedConditions) -> None:
        """Raise ValueError if the table is of other conditions, or says nothing on some of what is ``wanted``."""
        if self.conditions != conditions:
            raise ValueError(
                f"the table of speeds is of {self.conditions}, and {conditions} is asked for; give speed_for, "
                "speed_batch and sequence_length as they were there"
            )
        for shape, configs in wanted.items():
            for config in (None, *configs):
                self.seconds(shape, config)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        rows = [
            {"in": shape[0], "out": shape[1], "operator": None if c is None else c.to_dict(), "seconds": seconds}
            for shape, times in self.rows.items()
            for c, seconds in times.items()
        ]
        return {"conditions": dataclasses.asdict(self.conditions), "rows": rows}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SpeedTable:
        """Return what ``to_dict`` wrote."""
        rows: dict[Shape, dict[OperatorConfig | None, float]] = {}
        for row in values["rows"]:
            config = None if row["operator"] is None else OperatorConfig.from_dict(row["operator"])
            rows.setdefault((row["in"], row["out"]), {})[config] = float(row["seconds"])
        return cls(SpeedConditions(**values["conditions"]), rows)

    @classmethod
    def load(cls, path: str | Path) -> SpeedTable:
        """Return the table in a ``speed.json``. Raises ValueError if it holds none, OSError if it cannot be read."""
        with understood(path, "no table of speeds", "give the speed.json of a compression"):
            return cls.from_dict(read_json(path))


@functools.lru_cache(maxsize=100_000)
def _flops(config: OperatorConfig, shape: Shape) -> int:
    return config.build(*shape, bias=False, device="meta").flops_per_token()


def _sampled(configs: Iterable[OperatorConfig], shape: Shape) -> list[OperatorConfig]:
    """Of every kind of operator a few sizes, the smallest and the largest among them."""
    found: list[OperatorConfig] = []
    for group in grouped((type(config), config) for config in dict.fromkeys(configs)).values():
        group.sort(key=lambda c: _flops(c, shape))
        places = np.linspace(0, len(group) - 1, min(MEASURED_SIZES, len(group))).round().astype(int)
        found += [group[place] for place in places]
    return found


def speed_table(
    modules: Iterable[nn.Module],
    configs: Mapping[Shape, Iterable[OperatorConfig]],
    conditions: SpeedConditions,
    path: str | Path,
    on_measure: Callable[[int, int], None] = lambda done, total: None,
) -> SpeedTable:
    """The table for linear layers and what they may become; from ``path`` if it was measured there on this machine.

    Args:
        modules: the layers as they are.
        configs: by shape, operators that are asked about; of many sizes of one operator some are measured.
        conditions: what is timed.
        path: of the file that keeps it.
        on_measure: told how much is done and how much there is.
    """
    groups = grouped((linear_features(module), module) for module in modules)
    like = next(next(iter(groups.values()))[0].parameters())
    machine = describe_machine() | {"device": str(like.device), "dtype": str(like.dtype).removeprefix("torch.")}
    wanted = {shape: [None, *_sampled(configs.get(shape, ()), shape)] for shape in groups}
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):  # none is kept, or a damaged one
        values = read_record(path)
        kept, alike = SpeedTable.from_dict(values), values["machine"] == machine
        every = all(config in kept.rows.get(shape, {}) for shape in wanted for config in wanted[shape])
        if alike and kept.conditions == conditions and every:
            return kept
    on_measure(0, 1)
    table = SpeedTable(conditions, _measure(groups, wanted, conditions))
    write_record(path, {"machine": machine} | table.to_dict())
    on_measure(1, 1)
    return table


@torch.no_grad()
def _measure(
    groups: Mapping[Shape, Sequence[nn.Module]],
    wanted: Mapping[Shape, Sequence[OperatorConfig | None]],
    conditions: SpeedConditions,
) -> dict[Shape, dict[OperatorConfig | None, float]]:
    """Seconds a call, all contenders in turns: the median, which a call that was interrupted does not move."""
    calls: dict[tuple[Shape, OperatorConfig | None], Callable[[], object]] = {}
    with torch.random.fork_rng():
        for shape, group in groups.items():
            like = next(group[0].parameters())
            x = conditions.inputs(shape[0], like)
            some = group[: max(1, WEIGHT_BYTES // (shape[0] * shape[1] * like.element_size()))]
            for config in wanted[shape]:
                layers = some if config is None else [config.convert(module).eval() for module in some]
                build_for_inference(nn.ModuleList(layers))
                calls[shape, config] = _next_of(layers, x)
    timings = timed(calls, next(iter(calls)), SECONDS, ROUNDS)
    return {shape: {config: timings[shape, config].seconds for config in wanted[shape]} for shape in groups}


def timed(
    calls: Mapping[Any, Callable[[], object]], baseline: Any, seconds: float, rounds: tuple[int, int]
) -> dict[Any, Timing]:
    """Time calls in turns (``interleave``) for about so many seconds, with the least and the most rounds given."""
    start = time.perf_counter()
    for call in 2 * [*calls.values()]:
        call()
    count = max(rounds[0], min(rounds[1], int(2 * seconds / (time.perf_counter() - start))))
    return interleave(calls, baseline, rounds=count, min_seconds=0.0, warmup=1)


def _next_of(layers: Sequence[nn.Module], x: Tensor) -> Callable[[], object]:
    """A call of one layer after another, as a model runs through them."""
    for layer in layers:
        layer(x[:1, :1])  # weights of a checkpoint are read from its file when they are first used
    turns = itertools.cycle(layers)
    return lambda: next(turns)(x)


@dataclasses.dataclass(frozen=True)
class PlannedSpeed:
    """Seconds of the layers that may be replaced, by the table, as they are and as a plan makes them."""

    conditions: SpeedConditions
    before: float
    after: float

    @property
    def ratio(self) -> float:
        """How often as fast the plan is; below 1 is slower."""
        return self.before / self.after

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        times = {"seconds_before": self.before, "seconds": self.after, "ratio": self.ratio}
        return dataclasses.asdict(self.conditions) | times

    def __str__(self) -> str:
        times = f"{1e3 * self.before:.3g} -> {1e3 * self.after:.3g} ms"
        return f"linear layers in {self.conditions}, by the table: {times}, {self.ratio:.2f} times the speed"


def planned_speed(
    table: SpeedTable,
    modules: Mapping[str, nn.Module],
    replaced: Mapping[str, OperatorConfig],
    use: Mapping[str, float],
) -> PlannedSpeed:
    """The time of ``modules`` as they are and with some ``replaced``, each weighed by the share of tokens it sees."""
    shapes = {name: linear_features(module) for name, module in modules.items()}
    before = sum(use.get(name, 1.0) * table.seconds(shape, None) for name, shape in shapes.items())
    after = sum(use.get(name, 1.0) * table.seconds(shape, replaced.get(name)) for name, shape in shapes.items())
    return PlannedSpeed(table.conditions, before, after)
