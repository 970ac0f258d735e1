"""A benchmark against a recorded one: what became slower by more than either varies."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from relinear.bench.operators import DENSE, phase_of
from relinear.system.files import read_json


def key_of(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return what a row of ``bench.json`` is about: the contender and the case."""
    names = ("contender", "in_features", "out_features", "tokens", "dtype", "mode")
    return (*(row[name] for name in names), phase_of(row))


def of_runs(runs: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return one row a contender and case from the rows of several runs of the same benchmark.

    That of the run with the median ratio, with ``ratio_minimum`` and ``ratio_maximum`` over the runs beside ``ratio``.
    """
    merged = []
    for rows in zip(*(sorted(run, key=lambda row: str(key_of(row))) for run in runs), strict=True):
        timed = [row for row in rows if row.get("ratio") is not None]
        if len(timed) < len(rows):
            merged.append(next(row for row in rows if row.get("ratio") is None))
            continue
        ratios = [row["ratio"] for row in timed]
        middle = next(row for row in timed if row["ratio"] == statistics.median_low(ratios))
        merged.append(middle | {"ratio_minimum": min(ratios), "ratio_maximum": max(ratios)})
    places = {key_of(row): place for place, row in enumerate(runs[0])}
    return sorted(merged, key=lambda row: places[key_of(row)])


def spread_of(row: Mapping[str, Any]) -> tuple[float, float, float]:
    """Minimum, median and maximum of the ratio to dense over a row's runs."""
    return row["ratio_minimum"], row["ratio"], row["ratio_maximum"]


def read_record(path: str | Path) -> dict[str, Any]:
    """Return a recorded benchmark: ``bench.json``, or the directory that holds it.

    Raises:
        ValueError: there is none, or it holds no repeated runs, so that nothing is known of its noise.
    """
    path = Path(path)
    path = path / "bench.json" if path.is_dir() else path
    try:
        record = read_json(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"no recorded benchmark can be read from {path}: {error}") from error
    if not isinstance(record, dict) or not {"settings", "machine", "rows"} <= record.keys():
        raise ValueError(f"{path} is not what relinear bench wrote: settings, machine and rows are expected")
    if record["settings"].get("repeats", 1) < 2:
        raise ValueError(f"{path} holds a single run, which does not say how it varies: record with --repeats 5")
    return record


def slower(recorded: Sequence[Mapping[str, Any]], measured: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a line for every contender and case of both whose fastest run is slower than the slowest recorded one.

    One that was timed in the record and is not any more, as its output is off, has a line too.
    """
    before = {key_of(row): row for row in recorded if row.get("ratio") is not None and row["contender"] != DENSE}
    lines = []
    for row in measured:
        old = before.get(key_of(row))
        if old is None:
            continue
        name, inputs, outputs, tokens, dtype, mode, phase = key_of(row)
        case = f"{name}: {inputs} -> {outputs}, {tokens} tokens, {dtype}, {mode}, {phase}"
        if row.get("ratio") is None:
            lines.append(f"{case}: not timed any more: {row.get('error')}")
        elif spread_of(row)[0] > spread_of(old)[2]:
            lines.append(f"{case}: {_told(row)}, recorded {_told(old)}")
    return lines


def _told(row: Mapping[str, Any]) -> str:
    low, middle, high = spread_of(row)
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"
