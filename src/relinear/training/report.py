"""Build the report page of one training run from its run.json and metrics.jsonl."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from relinear.pages.blocks import Block, Chart, Facts, Listing, Section, Text
from relinear.pages.figures import PALETTE, Axis, Panel, Series
from relinear.pages.records import about, as_yaml, loss_unit, read_values, what_ran
from relinear.system.text import gib
from relinear.training.callbacks import read_metrics


def run_section(directory: Path) -> Section:
    """Return the page's section about the run in ``directory``. Raises ValueError for damaged files."""
    record = read_values(directory / "run.json")
    settings = record["settings"]
    metrics = directory / "metrics.jsonl"
    rows = read_metrics(metrics) if metrics.is_file() else []
    curves: list[Series] = []
    for number, (key, name) in enumerate((("loss", "training loss"), ("validation_loss", "validation loss"))):
        points = [(row["tokens"], row[key]) for row in rows if row.get(key) is not None]
        if len(points) > 1:
            x, y = zip(*points, strict=True)
            curves.append(Series(name=name, color=PALETTE[number], number=number, x=x, y=y))
    result = record["result"] if isinstance(record.get("result"), dict) else {}
    blocks: list[Block] = [Text(_summary_sentence(record, result, rows[-1]["tokens"] if rows else 0), lead=True)]
    if curves:
        panel = Panel(curves, Axis(title="training tokens"), Axis(title=f"loss ({loss_unit(settings)})"))
        blocks.append(Chart("Loss against training tokens.", panel))
    if result:
        blocks += [Text("Results", heading=True), Facts(result_facts(result))]
    facts = {name: str(settings.get(name)) for name in ("model", "steps", "seed")}
    blocks += [*what_ran(record, facts), Listing("settings", as_yaml(settings))]
    corpus = (settings.get("data") or {}).get("data")
    note = about(record, str(settings.get("model")), corpus)
    return Section(f"Training run {directory.resolve().name}", "train", blocks, note=note)


def result_facts(result: Mapping[str, Any]) -> dict[str, str]:
    """Return the numbers of a run's result as text, by name, auxiliary losses included."""
    numbers = {key: v for key, v in {**result, **result.get("aux", {})}.items() if type(v) in (int, float)}
    return {
        name.removesuffix("_bytes").replace("_", " "): gib(v) if name.endswith("_bytes") else f"{v:,.6g}"
        for name, v in numbers.items()
    }


def _summary_sentence(record: Mapping[str, Any], result: Mapping[str, Any], tokens: int) -> str:
    if result.get("validation_loss") is None:
        return f"The run is {record.get('status', 'unfinished')}, after {tokens:,} tokens."
    before = result.get("initial_perplexity")
    improvement = f", from {before:,.1f} before the first step" if before else ""
    return (
        f"A validation loss of {result['validation_loss']:.3f} after {tokens:,} tokens: "
        f"perplexity {result['perplexity']:,.2f}{improvement}."
    )
