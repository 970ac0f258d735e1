"""Build a comparison's plots and self-contained report.html from results.json."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import pydantic

from relinear.compare import figures
from relinear.compare.gaps import gap_of_means
from relinear.compare.schema import AXES, FORMAT, RESULTS, SCALE, EntryResult, Gap, Results, SeriesEntry, Statistic
from relinear.deprecated import with_new_columns
from relinear.pages.blocks import Block, Cell, Chart, Listing, Row, Section, Table, Text
from relinear.pages.figures import Panel, Series, colors
from relinear.pages.matplotlib_figures import save_panels
from relinear.pages.page import write_page
from relinear.pages.records import about, as_yaml, loss_unit, what_ran
from relinear.settings.messages import quoted
from relinear.system.files import damaged_file_errors, read_json
from relinear.system.text import gib, number
from relinear.training.settings import TrainSettings

REPORT = "report.html"
#: training tokens below which a run is short, and the note that its page then has
_LONG_RUN = 3_000_000
SHORT_RUN_NOTE = (
    "Short runs often rank entries differently from long ones: see 'How far short runs decide' in docs/claims.md."
)

# stem of the figure -> what it shows
_FIGURES = {
    "curves": "Validation loss against training tokens, one line per entry: the mean of seeds and their range.",
    "pareto": "Validation loss against {}, one point per entry.",
    "speeds": "Speed relative to the reference, faster to the right: training (dots), inference (open diamonds).",
    "budgets": "Gap to the reference against the budget, one line per entry, with 95 % intervals.",
    "sizes": "{}: mean over seeds and their range of the stored models, then the bits that each entry chose.",
    "tuning": "Validation loss of the tuning runs against the learning rate, one line per entry; rings: the choice.",
}
_FRONT_CAPTION = " The grey line joins the entries that no other beats in both."


def read_results(directory: str | Path) -> Results:
    """Return the contents of ``results.json`` in ``directory``.

    Raises:
        FileNotFoundError: if no comparison has finished there.
        ValueError: if the file is damaged or written by a newer relinear.
    """
    return _read(Path(directory) / RESULTS, pydantic.TypeAdapter(Results).validate_python)


def read_scale(directory: str | Path) -> dict[str, Any]:
    """Return the contents of ``scale.json`` in ``directory``. Raises as ``read_results``."""
    return _read(Path(directory) / SCALE, lambda results: results["entries"][0]["points"])


def _read(path: Path, check: Callable[[Any], object]) -> Any:
    """Return the values of a file of results that pass ``check``, with the columns' names of this version."""
    with damaged_file_errors(path, "damaged", "delete it and start the comparison again"):
        results = with_new_columns(read_json(path))
        if (version := results.get("format", FORMAT)) <= FORMAT:
            check(results)
            return results
    raise ValueError(f"{path} has format {quoted(version)}, this relinear reads up to {FORMAT}; upgrade relinear")


def write_report(directory: str | Path) -> Path:
    """Draw the plots (plots/*.png, *.svg) and write ``report.html`` beside ``results.json``; returns its path.

    The page holds everything inline: it can be mailed. Raises as ``read_results``.
    """
    scaled = (Path(directory) / SCALE).is_file()
    return write_page(Path(directory) / REPORT, [(scale_section if scaled else results_section)(directory)])


def results_section(directory: str | Path) -> Section:
    """Return a page's blocks on a comparison; draws the plots beside ``results.json``. Raises as ``read_results``."""
    directory = Path(directory)
    results = read_results(directory)
    entries = results["entries"]
    palette = colors([entry["name"] for entry in entries], _base_name(results))
    key, axis, rows = series_of(results)
    panels = {
        "curves": figures.curves(entries, palette, results.get("ngram")),
        "pareto": figures.pareto(entries, palette),
        "speeds": figures.speeds(entries, palette),
        key: figures.series(entries, palette, rows, axis, results.get("reference")),
        "tuning": figures.tuning(entries, palette),
    }
    charts = [
        chart
        for stem, shown in panels.items()
        for chart in _charts(directory / "plots" / stem, shown, _FIGURES[stem], 340 if stem == "speeds" else 440)
    ]
    facts = [results["description"], results["budget"], results["match"]["text"]]
    blocks: list[Block] = [Text(verdict(results), lead=True), *charts[:1], results_table(results)]
    blocks += [Text("What was compared", heading=True), *(Text(fact) for fact in facts if fact)]
    is_short = entries[0]["runs"][0]["curve"][-1]["tokens"] < _LONG_RUN
    blocks += [Text(note, soft=True) for note in [*results["notes"], *([SHORT_RUN_NOTE] if is_short else [])]]
    if (by_value := series_table(results)) is not None:
        blocks += [Text(series_title(results), heading=True), by_value]
    blocks += [Text("More figures", heading=True), *charts[1:]] if charts[1:] else []
    blocks += [Text("Entries", heading=True), _entries_table(results), *_settings_blocks(results)]
    seeds = ", ".join(str(run.get("seed")) for run in entries[0]["runs"])
    ran = what_ran(results, {"recipe": results["name"], "budget": results["budget"], "seeds": seeds})
    blocks += [Listing("data", as_yaml(results["data"])), *ran]
    trained = entries[0]["settings"]
    corpus = (trained.get("data") or {}).get("data")
    note = about({"date": results.get("finished", "")[:16].replace("T", " ")}, trained.get("model"), corpus)
    return Section(f"Comparison: {results['name']}", "compare", blocks, palette, note)


def _settings_blocks(results: Results) -> list[Block]:
    """Return the recipe, and the settings of every entry that are not defaults."""
    blocks: list[Block] = [Text("Settings other than the defaults", heading=True)]
    if results.get("recipe"):
        blocks.append(Listing("recipe, as given", as_yaml(results["recipe"])))
    defaults = TrainSettings().model_dump(mode="json")
    for entry in results["entries"]:
        blocks.append(Listing(entry["name"], as_yaml(_non_defaults(entry["settings"], defaults))))
    return blocks


def verdict(results: Results) -> str:
    """Summarise a comparison in one or two sentences, with its confidence.

    The n-gram model is named if it has the lowest loss. Entries of other sizes than the dense one do not win against
    one of its size.
    """
    entries = sorted(results["entries"], key=lambda entry: entry["validation_loss"]["mean"])
    base = next((entry for entry in entries if entry["name"] == _base_name(results)), entries[0])
    compared = [entry for entry in entries if entry is not base]
    if not compared:
        return f"{base['name']} has a validation loss of {_statistic_cell(base['validation_loss'], 3).text}."
    first = next((entry for entry in compared if _same_size(entry, base, results)), compared[0])
    gap = _gap_over_seeds(first, base)
    low, high = gap["low"], gap["high"]
    flaws = ["one seed"] * (low is None) + ["untuned learning rate"] * (not first["tuning"])
    if not (same_size := _same_size(first, base, results)):
        times = _ratio_of_sizes(base, first, results)
        quantity = _size(base, results)[1]
        flaws.append(f"{base['name']} has {times:.2g} times the {quantity}")
    unit = loss_unit(entries[0]["settings"])
    side = "ahead of" if gap["mean"] < 0 else "behind"
    outcome = f"{first['name']} is {side} {base['name']} by {abs(gap['mean']):.3f} {unit}"
    if low is None or high is None or not same_size:
        text = f"Illustration only: {', '.join(flaws)}. Here {outcome}."
    elif low <= 0 <= high:
        text = f"Inconclusive: no difference detected between {first['name']} and {base['name']}. "
        text += f"Their gap is {gap['mean']:+z.3f} {unit}, 95 % interval {low:+z.3f} to {high:+z.3f}."
    else:
        nearest, furthest = sorted((abs(low), abs(high)))
        text = f"{outcome}, 95 % interval {nearest:.3f} to {furthest:.3f}."
        text += f" With {flaws[0]}." if flaws else ""
    if (ngram := results.get("ngram")) and ngram["validation_loss"] < entries[0]["validation_loss"]["mean"]:
        text += f" An n-gram model ({ngram['order']}-grams) still has a lower loss than every entry: train longer."
    return text


def _size(entry: EntryResult, results: Results) -> tuple[float, str]:
    """Return the size of an entry in what entries are matched by (else parameters), and its name."""
    by = results["match"]["by"]
    if by == "bytes" and (stored := entry.get("stored")):
        return stored["bytes"], "bytes"
    return (entry["flops_per_token"], "FLOPs") if by == "flops" else (entry["parameters"], "parameters")


def _ratio_of_sizes(first: EntryResult, second: EntryResult, results: Results) -> float:
    return _size(first, results)[0] / _size(second, results)[0]


def _same_size(first: EntryResult, second: EntryResult, results: Results) -> bool:
    return 0.95 < _ratio_of_sizes(first, second, results) < 1.05


def _non_defaults(settings: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that are not defaults."""
    return {
        name: _non_defaults(value, inner) if isinstance(value, dict) and isinstance(inner, dict) else value
        for name, value in settings.items()
        if value != (inner := defaults.get(name))
    }


def _gap_over_seeds(first: EntryResult, second: EntryResult) -> Gap:
    """Return the gap of ``first`` to ``second`` over the seeds alone."""
    return gap_of_means(first["validation_loss"]["values"], second["validation_loss"]["values"])


def _base_name(results: Results) -> str | None:
    """Return the entry that ratios refer to: the reference or, if none was named, the first dense one."""
    return results.get("reference") or next((e["name"] for e in results["entries"] if e["operators"] == "dense"), None)


def _charts(stem: Path, panels: Sequence[Panel], text: str, height: int = 440) -> list[Chart]:
    """Draw ``panels`` as STEM.png and .svg; return their charts."""
    if panels:
        save_panels(panels, stem)
    charts = []
    for panel in panels:
        has_front = any(isinstance(series, Series) and series.mode == "steps" for series in panel.shown)
        caption = text.format(panel.x.title) + (_FRONT_CAPTION if has_front else "")
        charts.append(Chart(caption, panel, height, inline=len(panels) > 1))
    return charts


def results_table(results: Results) -> Table:
    """Return a row per entry, with standard deviations over seeds and, in small print, ratios to the dense entry."""
    base = next((entry for entry in results["entries"] if entry["name"] == _base_name(results)), None)
    columns = _columns(results, base)
    best = _best_name(results, base)
    rows = [
        Row([cell(entry) for cell in columns.values()], entry["name"], entry["name"] == best)
        for entry in results["entries"]
    ]
    without_runs: list[dict[str, Cell | str]] = [
        {"entry": entry["name"], "validation loss": "diverged"} for entry in results.get("diverged", ())
    ]
    if ngram := results.get("ngram"):
        loss, perplexity = Cell.of(ngram["validation_loss"]), Cell.of(ngram["perplexity"], ".2f")
        without_runs.append({"entry": f"{ngram['order']}-grams", "validation loss": loss, "perplexity": perplexity})
        if base:
            gap = ngram["validation_loss"] - base["validation_loss"]["mean"]
            without_runs[-1]["gap"] = Cell.of(gap, "+z.3f")
    for cells in without_runs:
        rows.append(Row([next((cells[key] for key in cells if head.startswith(key)), "–") for head in columns]))
    return Table(list(columns), rows)


def _best_name(results: Results, base: EntryResult | None) -> str | None:
    """Return the entry that is ahead of the next by more than its interval; one of another size does not win."""
    ranked = sorted(results["entries"], key=lambda entry: entry["validation_loss"]["mean"])
    leader, *followers = [entry for entry in ranked if base is None or _same_size(entry, base, results)]
    high = _gap_over_seeds(leader, followers[0])["high"] if followers else None
    return leader["name"] if high is not None and high < 0 else None


def _columns(results: Results, base: EntryResult | None) -> dict[str, Callable[[EntryResult], Cell]]:
    """Return head -> what makes a cell from an entry; ``base`` is the entry that others are compared with."""
    entries = results["entries"]
    unit = loss_unit(results["entries"][0]["settings"])
    dense_costs = _costs(base, number) if base else None

    def cost(entry: EntryResult, index: int) -> Cell:
        value, text = _costs(entry, number)[index]
        return Cell(text, value, f"{value / dense_costs[index][0]:.3g}× dense" if dense_costs else "")

    def gap(entry: EntryResult) -> Cell:
        difference = entry.get("gap")
        if base is not None and entry is not base and not results.get("reference"):  # of an older comparison
            difference = _gap_over_seeds(entry, base)
        return Cell(gap_text(difference), difference and difference["mean"])

    def rate(entry: EntryResult) -> Cell:
        edge = " *" if entry["tuning"] and entry["tuning"]["edge"] else ""
        return Cell(number(entry["learning_rate"]) + edge, entry["learning_rate"])

    def stored(entry: EntryResult, key: str, template: str = ",") -> Cell:
        file: Any = entry.get("stored") or {}
        return Cell.of(file.get(key), template)

    def speed(entry: EntryResult, key: str) -> Cell:
        ratio: Any = entry["speed"] and entry["speed"].get(key)
        return Cell(f"{ratio:.2f}×" if ratio else "–", ratio or None)

    columns: dict[str, Callable[[EntryResult], Cell]] = {
        # a phone shows only the first columns
        "entry": lambda entry: Cell(entry["name"], None, f"{cost(entry, 0).text} parameters"),
        f"validation loss, {unit}": lambda entry: _statistic_cell(entry["validation_loss"], 3),
    }
    if results.get("reference") or (base and len(entries) > 1):
        columns[f"gap to {_base_name(results)}"] = gap
    if any(entry.get("stored") for entry in entries):
        columns["bits"] = lambda entry: stored(entry, "bits")
        columns["bytes"] = lambda entry: stored(entry, "bytes")
        columns["before storing"] = lambda entry: stored(entry, "loss_before", ".3f")
    return columns | {
        "parameters": lambda entry: cost(entry, 0),
        "training speed": lambda entry: speed(entry, "train_ratio"),
        "inference speed": lambda entry: speed(entry, "inference_ratio"),
        f"perplexity {unit.removeprefix('nats ')}": lambda entry: _statistic_cell(entry["perplexity"], 2),
        "at step 0": lambda entry: _statistic_cell(entry["initial_perplexity"], 1, False),
        "FLOPs / token": lambda entry: cost(entry, 1),
        "peak memory": lambda entry: Cell(gib(entry["peak_memory_bytes"]), entry["peak_memory_bytes"]),
        "learning rate": rate,
    }


def _statistic_cell(statistic: Statistic, digits: int, with_std: bool = True) -> Cell:
    text = plus_minus(statistic, digits) if with_std else f"{statistic['mean']:.{digits}f}"
    return Cell(text, statistic["mean"], title=", ".join(f"{value:.6g}" for value in statistic.get("values", ())))


def _costs(entry: EntryResult, template: Callable[[int], str]) -> list[tuple[int, str]]:
    """Return parameters and FLOPs with their texts; for routed tokens these also name what is active, and in all."""
    inactive, inactive_flops = entry.get("inactive_parameters", 0), entry.get("inactive_flops", 0)
    parameters, flops = entry["parameters"], entry["flops_per_token"]
    active = f" ({template(parameters - inactive)} active)" if inactive else ""
    total = f" ({template(flops + inactive_flops)} in all)" if inactive_flops else ""
    return [(parameters, template(parameters) + active), (flops, template(flops) + total)]


def _entries_table(results: Results) -> Table:
    head = ["entry", "operators", "parameters", "FLOPs / token", "off the target"]
    rows = []
    for entry in results["entries"]:
        costs = [Cell(text, value) for value, text in _costs(entry, "{:,}".format)]
        mismatch = entry["size_mismatch"]
        text = "not matched" if mismatch is None else f"{100 * mismatch:+.2f} %"
        rows.append(Row([entry["name"], entry["operators"], *costs, Cell(text, mismatch)], entry["name"]))
    return Table(head, rows, (0, 1))


def scale_section(directory: str | Path) -> Section:
    """Return a page's blocks on ``scale.json``; draws its plot. Raises as ``read_scale``."""
    results = read_scale(directory)
    entries = results["entries"]
    palette = colors([entry["name"] for entry in entries])
    text = "Loss against {}: a point per size, and every entry's power law."
    unit = loss_unit((results.get("recipe") or {}).get("train"))
    charts = _charts(Path(directory) / "plots" / "scale", figures.scaling(entries, unit), text)
    crossed = sum(": cross " in sentence for sentence in results["verdicts"])
    remarks = ["loss = a x^-b", results.get("description"), *results["verdicts"]]
    blocks: list[Block] = [
        Text(f"{crossed} of {len(results['verdicts'])} pairs of lines cross within the sizes tried.", lead=True),
        *charts,
        scale_table(results),
        *(Text(remark, soft=True) for remark in remarks if remark),
        Listing("recipe, as given", as_yaml(results.get("recipe"))),
    ]
    return Section(results["name"], "scale", [*blocks, *what_ran(results)], palette)


def scale_table(results: Mapping[str, Any]) -> Table:
    """Return a row per entry: its losses by width, and the exponents of its power laws with their intervals."""
    entries, rows = results["entries"], []
    for entry in entries:
        losses = [point["validation_loss"]["mean"] for point in entry["points"]]
        cells: list[Cell | str] = [entry["name"], *(Cell(f"{loss:.3f}", loss) for loss in losses)]
        cells += [_exponent_cell(entry[axis] and entry[axis]["fit"]) for axis in AXES]
        rows.append(Row(cells, entry["name"]))
    widths = [str(point["width"]) for point in entries[0]["points"]]
    return Table(["loss at width", *widths, *(f"b ({axis})" for axis in AXES)], rows)


def _exponent_cell(fit: Mapping[str, Any] | None) -> Cell:
    if fit is None:
        return Cell("–")
    interval = "" if fit["b_interval"] is None else " [{:.3f}, {:.3f}]".format(*fit["b_interval"])
    return Cell(f"{fit['b']:.3f}{interval}", fit["b"])


def plus_minus(statistic: Statistic, digits: int = 3) -> str:
    """Return the mean and, over several seeds, the sample standard deviation."""
    mean = f"{statistic['mean']:.{digits}f}"
    return mean if statistic["std"] is None else f"{mean} ± {statistic['std']:.{digits}f}"


def gap_text(gap: Gap | None) -> str:
    """Return a gap with its interval: -0.120 [-0.131, -0.108]."""
    if gap is None:
        return "–"
    mean = f"{gap['mean']:+z.3f}"
    return mean if gap["low"] is None else f"{mean} [{gap['low']:+z.3f}, {gap['high']:+z.3f}]"


def series_of(results: Results) -> tuple[str, Literal["tokens", "bytes"], list[Any]]:
    """Return the series' key in results, its axis, and its rows; a single comparison has none."""
    by_size = results.get("sizes")
    return ("sizes", "bytes", by_size) if by_size else ("budgets", "tokens", results.get("budgets") or [])


def series_title(results: Results) -> str:
    """Return the heading of ``series_table``."""
    return "Loss by bytes" if results.get("sizes") else f"Gap to {results['reference']} by budget"


def series_table(results: Results) -> Table | None:
    """Return a row per entry with its gap at every budget, or its loss and bits at every size of the file.

    The reference and the n-grams have losses in place of gaps. Returns None for a single budget and size.
    """
    _, axis, series_rows = series_of(results)
    if not series_rows:
        return None

    def cell_text(entry: SeriesEntry | None) -> str:
        if entry is None:
            return "diverged"
        if axis == "bytes":
            return f"{plus_minus(entry['validation_loss'])}, {entry['bits']} bits"
        return gap_text(gap) if (gap := entry.get("gap")) else plus_minus(entry["validation_loss"])

    rows = []
    for entry in series_rows[-1]["entries"]:
        at_values = [next((e for e in row["entries"] if e["name"] == entry["name"]), None) for row in series_rows]
        suffix = " (loss)" * (axis == "tokens" and entry.get("gap") is None)
        rows.append(Row([entry["name"] + suffix, *map(cell_text, at_values)], entry["name"]))
    if all(row["ngram"] for row in series_rows):
        losses = [f"{row['ngram']['validation_loss']:.3f}" for row in series_rows]
        rows.append(Row([f"{series_rows[-1]['ngram']['order']}-grams (loss)", *losses]))
    return Table([axis, *(number(row[axis]) for row in series_rows)], rows)
