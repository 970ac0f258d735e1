"""Build the report page of a benchmark (tables and figures) from bench.json or models.json."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from relinear.bench.operators import DENSE
from relinear.pages.blocks import Block, Cell, Chart, Listing, Row, Section, Table, Text
from relinear.pages.figures import Axis, Guide, Panel, Series, colors
from relinear.pages.matplotlib_figures import save_panels
from relinear.pages.records import about, as_yaml, what_ran
from relinear.system.grouped import grouped


def layers_section(values: Mapping[str, Any]) -> Section:
    """Return the page's section about bench.json."""
    rows = [row for row in values["rows"] if row["contender"] != DENSE]
    palette = colors(list(dict.fromkeys(row["contender"] for row in rows)))
    figures = _charts_by_tokens(rows, palette)
    remark = "Times relative to a dense nn.Linear of the same shape, in the same rounds: below 1 is faster."
    blocks: list[Block] = [
        Text(_summary_sentence(rows), lead=True),
        *figures[:1],
        _table(rows),
        Text(remark, soft=True),
        *figures[1:],
        *_settings_blocks(values),
    ]
    return Section("Layers against dense", "bench", blocks, palette, about(values))


def _summary_sentence(rows: Sequence[Mapping[str, Any]]) -> str:
    """Say which layer is the fastest at the most tokens, by the median of its cases, and how many beat dense there."""
    timed = [row for row in rows if row.get("ratio")]
    if not timed:
        return "Nothing was timed."
    most = max(row["tokens"] for row in timed)
    cases = grouped((row["contender"], row["ratio"]) for row in timed if row["tokens"] == most)
    medians = {name: statistics.median(ratios) for name, ratios in cases.items()}
    name = min(medians, key=lambda contender: medians[contender])
    faster = f"{sum(value < 1 for value in medians.values())} of {len(medians)} layers are faster than dense there."
    speed = f"{name} takes {medians[name]:.2f} of a dense layer's time, the median of {len(cases[name])} cases."
    return f"At {most:,} token{'s' * (most > 1)} {speed} {faster}"


def _table(rows: Sequence[Mapping[str, Any]]) -> Table:
    head = ["layer", "shape", "dtype", "mode", "pass", "tokens", "time / dense", "quartiles"]
    table_rows = []
    for row in rows:
        ratio = row.get("ratio")
        timed = ("not timed", "–")
        if ratio is not None:
            timed = (f"{ratio:.3f}", f"{row['ratio_low']:.3f} to {row['ratio_high']:.3f}")
        cells = [
            row["contender"],
            f"{row['in_features']} → {row['out_features']}",
            row["dtype"],
            row["mode"],
            row["phase"],
            Cell(f"{row['tokens']:,}", row["tokens"]),
            Cell(timed[0], ratio, title=row.get("error") or ""),
            Cell(timed[1], row.get("ratio_low")),
        ]
        table_rows.append(Row(cells, row["contender"]))
    return Table(head, table_rows, (0, 1, 2, 3, 4))


def _charts_by_tokens(rows: Sequence[Mapping[str, Any]], palette: Mapping[str, str]) -> list[Chart]:
    """Return a figure for every number of tokens: a line per layer, a dot per shape, dtype, mode and pass."""
    charts: list[Chart] = []
    by_tokens = grouped((row["tokens"], row) for row in rows if row.get("ratio"))
    for tokens in sorted(by_tokens, reverse=True):
        dots = []
        for row in sorted(by_tokens[tokens], key=lambda row: list(palette).index(row["contender"])):
            case = f"{row['in_features']} → {row['out_features']}, {row['dtype']}, {row['mode']}, {row['phase']}"
            name = row["contender"]
            hollow = row["phase"] != "forward"
            dots.append(_dot(name, palette, row["ratio"], name, case, size=9, hollow=hollow))
        many = f"{tokens:,} token{'s' * (tokens > 1)}"
        bottom = Axis(title="time / dense", log=True, ticks={tick: f"{tick:g}" for tick in (0.05, 0.2, 1, 5)})
        panel = Panel(dots, bottom, Axis(rows=True), [Guide(x=1)], many)
        text = f"{many}, every shape and dtype; filled: forward, open: with backward. Left of 1 is faster."
        charts.append(Chart(text, panel, 140 + 34 * len(palette)))
    return charts


def _dot(name: str, palette: Mapping[str, str], x: float, y: str, case: str, **look: Any) -> Series:
    texts = [f"{name}: {x:.3f} ({case})"]
    return Series(name=name, color=palette[name], x=[x], y=[y], texts=texts, mode="points", legend=False, **look)


def draw_layers(values: Mapping[str, Any], stem: str | Path) -> None:
    """Draw the page's figures about bench.json as STEM.png and STEM.svg."""
    panels = [block.panel for block in layers_section(values).blocks if isinstance(block, Chart)]
    if panels:
        save_panels(panels, stem, "time relative to dense nn.Linear (filled: forward, open: with backward)")


def models_section(values: Mapping[str, Any]) -> Section:
    """Return the page's section about models.json."""
    names = list(dict.fromkeys(row["variant"] for row in values["rows"]))
    palette = colors(names, DENSE)
    head = ["variant", "dtype", "mode", "pass", "batch", "parameters", "tokens / s", "speed / dense", "quartiles"]
    rows, dots = [], []
    for row in values["rows"]:
        mode = "compiled" if row["compiled"] else "eager"
        case = f"{row['dtype']}, {mode}, {row['phase']}, batch {row['batch_size']}"
        cells = [
            row["variant"],
            *(row["dtype"], mode, row["phase"]),
            Cell(str(row["batch_size"]), row["batch_size"]),
            Cell(f"{row['parameters']:,}", row["parameters"]),
            Cell(f"{row['tokens_per_second']:,.0f}", row["tokens_per_second"]),
            Cell(f"{row['speedup']:.2f}", row["speedup"]),
            f"{row['speedup_low']:.2f} to {row['speedup_high']:.2f}",
        ]
        rows.append(Row(cells, row["variant"]))
        dots.append(_dot(row["variant"], palette, row["speedup"], case, case))
    panel = Panel(dots, Axis(title="speed / stock"), Axis(rows=True))
    height = 140 + 34 * len({series.y[0] for series in dots})
    preset = values["rows"][0]["preset"]
    speeds = {name: [r["speedup"] for r in values["rows"] if r["variant"] == name] for name in names if name != DENSE}
    texts = (
        f"{name} runs at {statistics.median(runs):.2f} of the stock model's speed" for name, runs in speeds.items()
    )
    blocks: list[Block] = [
        Text(f"{'; '.join(texts) or 'Only the stock model was timed'}.", lead=True),
        Chart("Speed relative to the stock model, one dot per variant: right of 1 is faster.", panel, height),
        Table(head, rows, (0, 1, 2, 3)),
        *_settings_blocks(values),
    ]
    return Section("Models against dense", "bench", blocks, palette, about(values, preset))


def _settings_blocks(values: Mapping[str, Any]) -> list[Block]:
    allocator = {"allocator": as_yaml(values["allocator"]).strip() if values.get("allocator") else "untouched"}
    settings = [Listing("settings", as_yaml(values["settings"]))] if "settings" in values else []
    return [*what_ran(values, allocator), *settings]
