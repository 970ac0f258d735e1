"""The report of a comparison: results.json -> plots and one self-contained report.html."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, NotRequired

import pydantic
from typing_extensions import TypedDict  # pydantic asks for it before Python 3.12

from relinear.core.config import shown
from relinear.core.settings import readable
from relinear.system.files import read_json, write_text

__all__ = ["budget_rows", "gap_text", "gib", "number", "plus_minus", "read_results", "write_report", "write_scale_plot"]

RESULTS = "results.json"
REPORT = "report.html"
FORMAT = 1

# name of the figure -> (function in compare.plots, what it shows, for readers who do not see it)
_FIGURES = {
    "curves": "Validation loss against training tokens, one line an entry.",
    "pareto": "Validation loss against parameters (left) and FLOPs per token (right), one point an entry.",
    "speeds": "Training and inference tokens per second as ratios to the reference, one bar an entry.",
    "budgets": "Gap to the reference against the budget, one line an entry, with 95 % intervals.",
    "tuning": "Validation loss of the tuning runs against the learning rate, one line an entry.",
}


# What the table, the page and the plots read of results.json; more may be there. Numbers are finite.

_Number = Annotated[float, pydantic.Field(allow_inf_nan=False, strict=True, ge=-1e305, le=1e305)]
_Count = Annotated[int, pydantic.Field(strict=True, ge=0, le=2**63)]
_Text = Annotated[str, pydantic.Field(strict=True, max_length=100_000)]


class _Statistic(TypedDict):
    mean: _Number
    spread: _Number | None
    values: list[_Number]


class _Point(TypedDict):
    step: _Count
    tokens: _Count
    loss: NotRequired[_Number]
    validation_loss: NotRequired[_Number]


class _RunOfEntry(TypedDict):
    validation_loss: _Number
    curve: list[_Point]


class _Trial(TypedDict):
    learning_rate: _Number
    validation_loss: _Number | None


class _Tuning(TypedDict):
    trials: list[_Trial]
    edge: bool


class _Speed(TypedDict):
    train_ratio: _Number
    inference_ratio: _Number
    train_tokens_per_second: _Number
    inference_tokens_per_second: _Number


class _EntryOfResults(TypedDict):
    name: _Text
    operators: _Text
    settings: dict[str, Any]
    parameters: _Count
    flops_per_token: _Count
    deviation: _Number | None
    learning_rate: _Number
    validation_loss: _Statistic
    perplexity: _Statistic
    initial_perplexity: _Statistic
    peak_memory_bytes: _Count
    speed: _Speed | None
    tuning: _Tuning | None
    runs: Annotated[list[_RunOfEntry], pydantic.Field(min_length=1)]


class _Match(TypedDict):
    by: _Text
    text: _Text


class _Results(TypedDict):
    format: _Count
    name: _Text
    description: _Text
    budget: _Text
    match: _Match
    notes: list[_Text]
    data: dict[str, Any]
    entries: Annotated[list[_EntryOfResults], pydantic.Field(min_length=1)]
    recipe: dict[str, Any]
    machine: dict[str, Any]
    command: _Text
    finished: _Text


def read_results(directory: str | Path) -> dict[str, Any]:
    """What ``results.json`` in ``directory`` says.

    Raises:
        FileNotFoundError: if no comparison has finished there.
        ValueError: if the file is damaged or written by a newer relinear.
    """
    path = Path(directory) / RESULTS
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} does not exist: no comparison has finished in {directory}; start it, or start it again to go on"
        )
    advice = "delete it and start the comparison again"
    try:
        results = read_json(path)
    except ValueError as error:
        raise ValueError(f"{error}; {advice}") from None
    version = results.get("format") if isinstance(results, dict) else None
    if isinstance(version, int) and version > FORMAT:
        raise ValueError(f"{path} has format {shown(version)}, this relinear reads up to {FORMAT}; upgrade relinear")
    try:
        pydantic.TypeAdapter(_Results).validate_python(results)
    except pydantic.ValidationError as error:
        raise ValueError(f"{path} is damaged; {advice}: {readable(error)}") from None
    return results


def write_report(directory: str | Path) -> Path:
    """Draw the plots (plots/*.png, *.svg) and write ``report.html`` beside ``results.json``; returns its path.

    The page holds everything inline: it can be mailed. Raises as ``read_results``.
    """
    from relinear.analysis.plots import save_figure
    from relinear.compare import plots

    directory = Path(directory)
    results = read_results(directory)
    figures = []
    for name, description in _FIGURES.items():
        figure = getattr(plots, name)(results["entries"], **_more(name, results))
        if figure is not None:
            _, svg = save_figure(figure, directory / "plots" / name)
            image = base64.b64encode(svg.read_bytes()).decode("ascii")
            figures.append({"name": name, "description": description, "image": image})
    path = directory / REPORT
    write_text(path, render(results, figures))
    return path


def write_scale_plot(directory: str | Path) -> Path:
    """Draw plots/scale.png and .svg beside ``scale.json``; returns the picture. Raises as ``read_scale``."""
    from relinear.analysis.plots import save_figure
    from relinear.compare import plots
    from relinear.compare.scaling import read_scale

    directory = Path(directory)
    return save_figure(plots.scaling(read_scale(directory)), directory / "plots" / "scale")[0]


def _more(figure: str, results: Mapping[str, Any]) -> dict[str, Any]:
    """What a figure shows beside the entries."""
    if figure == "budgets":
        return {"budgets": results.get("budgets"), "reference": results.get("reference")}
    return {"ngram": results.get("ngram")} if figure == "curves" else {}


def render(results: Mapping[str, Any], figures: list[dict[str, str]]) -> str:
    """The page as text. ``figures`` hold name, description and the SVG in base64."""
    import jinja2

    from relinear.analysis.plots import colours

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("relinear", "compare"),
        autoescape=True,  # names and paths in the results are the user's text
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "number": number,
        "plus_minus": plus_minus,
        "gib": gib,
        "gap_text": gap_text,
        "settings": _settings,
        "plain": _plain,
    }
    return environment.get_template(REPORT).render(
        results=results,
        entries=results["entries"],
        budgets=budget_rows(results),
        figures=figures,
        colours=colours(results["entries"]),
    )


def number(value: float | None, digits: int = 3) -> str:
    """A short form for tables: 62.53M, 1.20G, 0.035; an en dash where there is nothing."""
    if value is None:
        return "–"
    for scale, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= scale:
            return f"{value / scale:.2f}{unit}"
    return f"{value:.{digits}g}"


def plus_minus(statistic: Mapping[str, Any], digits: int = 3) -> str:
    """Mean and, over several seeds, the sample standard deviation."""
    mean = f"{statistic['mean']:.{digits}f}"
    return mean if statistic["spread"] is None else f"{mean} ± {statistic['spread']:.{digits}f}"


def gap_text(gap: Mapping[str, Any] | None) -> str:
    """A gap with its interval: -0.120 [-0.131, -0.108]."""
    if gap is None:
        return "–"
    mean = f"{gap['mean']:+.3f}"
    return mean if gap["low"] is None else f"{mean} [{gap['low']:+.3f}, {gap['high']:+.3f}]"


def budget_rows(results: Mapping[str, Any]) -> list[list[str]]:
    """Entry by budget: a head row, then a row an entry with its gaps; the reference and the n-grams have losses."""
    budgets = results.get("budgets") or []
    if not budgets:
        return []
    rows = [["tokens", *(number(budget["tokens"]) for budget in budgets)]]
    for index, entry in enumerate(budgets[-1]["entries"]):
        cells = [budget["entries"][index] for budget in budgets]
        texts = [gap_text(cell["gap"]) if cell["gap"] else plus_minus(cell["validation_loss"]) for cell in cells]
        rows.append([entry["name"] + " (loss)" * (entry["gap"] is None), *texts])
    if all(budget["ngram"] for budget in budgets):
        losses = [f"{budget['ngram']['validation_loss']:.3f}" for budget in budgets]
        rows.append([f"{budgets[-1]['ngram']['order']}-grams (loss)", *losses])
    return rows


def gib(value: float | None) -> str:
    """Bytes in MiB or GiB."""
    if value is None:
        return "–"
    return f"{value / 2**30:.2f} GiB" if value >= 2**30 else f"{value / 2**20:.0f} MiB"


def _plain(value: Any, name: str) -> str:
    """A fact about the machine in words."""
    if name.endswith("bytes"):
        return gib(value)
    return ", ".join(map(str, value)) or "none" if isinstance(value, list) else str(value)


def _settings(value: Any) -> str:
    import yaml

    return yaml.safe_dump(value, sort_keys=False, allow_unicode=True, default_flow_style=None, width=110)
