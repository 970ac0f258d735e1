"""The page of a benchmark: bench.json's or models.json's values -> tables and figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from relinear.analysis.plots import colours
from relinear.bench.operators import DENSE, phase_of
from relinear.pages.blocks import (
    Block,
    Cell,
    Chart,
    Listing,
    Row,
    Section,
    Table,
    Text,
    as_yaml,
    axes,
    points,
    what_ran,
)

__all__ = ["layers_section", "models_section"]


def layers_section(values: Mapping[str, Any], image: str | None = None) -> Section:
    """What a page says of bench.json; ``image`` is its plot, a data URI."""
    rows = [row for row in values["rows"] if row["contender"] != DENSE]
    names = list(dict.fromkeys(row["contender"] for row in rows))
    palette = colours([{"name": name} for name in names])
    blocks: list[Block] = [
        Text("Times relative to a dense nn.Linear of the same shape, in the same rounds: below 1 is faster."),
        Text("Results", heading=True),
        _layers(rows, palette),
        *_by_tokens(rows, palette, image),
        *_end(values),
    ]
    return Section("Layers against dense", "bench", blocks, palette)


def _layers(rows: Sequence[Mapping[str, Any]], palette: Mapping[str, str]) -> Table:
    head = ["layer", "shape", "dtype", "mode", "pass", "tokens", "time / dense", "quartiles", "untuned allocator"]
    shown = []
    for row in rows:
        low, high, untuned = (row.get(key) for key in ("ratio_low", "ratio_high", "ratio_untuned"))
        ratio = row.get("ratio")
        failed = "not timed" if row.get("error") else "–"
        cells = [
            row["contender"],
            f"{row['in_features']} → {row['out_features']}",
            row["dtype"],
            row["mode"],
            phase_of(row),
            Cell(f"{row['tokens']:,}", row["tokens"]),
            Cell(failed if ratio is None else f"{ratio:.3f}", ratio, title=row.get("error") or ""),
            Cell("–" if low is None or high is None else f"{low:.3f} to {high:.3f}", low),
            Cell("–" if untuned is None else f"{untuned:.3f}", untuned),
        ]
        shown.append(Row(cells, row["contender"], palette[row["contender"]]))
    return Table(head, shown, (0, 1, 2, 3, 4))


def _by_tokens(rows: Sequence[Mapping[str, Any]], palette: Mapping[str, str], image: str | None) -> list[Chart]:
    """A figure for every number of tokens: a row a layer, a dot a shape, dtype, mode and pass."""
    charts: list[Chart] = []
    timed = [row for row in rows if row.get("ratio")]
    names = list(palette)
    for tokens in sorted({row["tokens"] for row in timed}, reverse=True):
        data = []
        for row in timed:
            if row["tokens"] != tokens:
                continue
            name = row["contender"]
            case = f"{row['in_features']} → {row['out_features']}, {row['dtype']}, {row['mode']}, {phase_of(row)}"
            dot = points(name, palette[name], 0, [row["ratio"]], [name], [f"{name}: {row['ratio']:.3f} ({case})"])
            hollow = "circle" if phase_of(row) == "forward" else "circle-open"
            data.append(dot | {"marker": {"symbol": hollow, "size": 9}, "showlegend": False})
        layout = axes("time / dense", "", xaxis={"type": "log"})
        layout["yaxis"] |= {"type": "category", "autorange": "reversed"}
        layout["shapes"] = [{"type": "line", "x0": 1, "x1": 1, "yref": "paper", "y0": 0, "y1": 1, "line": _ONE}]
        many = f"{tokens:,} token{'s' * (tokens > 1)}"
        text = f"{many}, every shape and dtype; filled: forward, open: with backward. Left of 1 is faster."
        charts.append(Chart(text, {"data": data, "layout": layout}, None if charts else image, 140 + 34 * len(names)))
    return charts


_ONE = {"color": "#7F7F7F", "width": 1.2, "dash": "dash"}


def models_section(values: Mapping[str, Any]) -> Section:
    """What a page says of models.json."""
    names = list(dict.fromkeys(row["variant"] for row in values["rows"]))
    palette = colours([{"name": name, "dense": name == DENSE} for name in names])
    head = ["variant", "dtype", "mode", "pass", "batch", "parameters", "tokens / s", "speed / dense", "quartiles"]
    rows, data = [], []
    for row in values["rows"]:
        mode = "compiled" if row["compiled"] else "eager"
        case = f"{row['dtype']}, {mode}, {phase_of(row)}, batch {row['batch_size']}"
        cells = [
            row["variant"],
            *(row["dtype"], mode, phase_of(row)),
            Cell(str(row["batch_size"]), row["batch_size"]),
            Cell(f"{row['parameters']:,}", row["parameters"]),
            Cell(f"{row['tokens_per_second']:,.0f}", row["tokens_per_second"]),
            Cell(f"{row['speedup']:.2f}", row["speedup"]),
            f"{row['speedup_low']:.2f} to {row['speedup_high']:.2f}",
        ]
        rows.append(Row(cells, row["variant"], palette[row["variant"]]))
        name, text = row["variant"], f"{row['variant']}: {row['speedup']:.3f} ({case})"
        dot = points(name, palette[name], 0, [row["speedup"]], [case], [text], showlegend=False)
        data.append(dot)
    layout = axes("speed / stock", "")
    layout["yaxis"] |= {"type": "category", "autorange": "reversed"}
    figure, height = {"data": data, "layout": layout}, 140 + 34 * len({trace["y"][0] for trace in data})
    preset = (
        values["settings"]["preset"] if "settings" in values else values["rows"][0]["preset"]
    )  # older ones have none
    blocks: list[Block] = [
        Text(f"Whole models of the preset {preset}: above 1 is faster than the stock model."),
        Text("Results", heading=True),
        Table(head, rows, (0, 1, 2, 3)),
        Chart("Speed relative to the stock model, a dot a variant: right of 1 is faster.", figure, None, height),
        *_end(values),
    ]
    return Section("Models against dense", "bench", blocks, palette)


def _end(values: Mapping[str, Any]) -> list[Block]:
    allocator = {"allocator": as_yaml(values["allocator"]).strip() if values.get("allocator") else "untouched"}
    settings = [Listing("settings", as_yaml(values["settings"]))] if "settings" in values else []
    return [*what_ran(values, allocator), *settings]
