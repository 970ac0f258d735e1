"""Replicate the main tables of a paper at a share of its budget (``relinear replicate``).

A paper is a file in ``papers/``: its recipe, what a small machine changes in that, its tables, and what is claimed.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

import numpy as np

from relinear.analysis.report import analyses_blocks
from relinear.compare import papers
from relinear.compare.executors import Execution
from relinear.compare.folder import seed_folder
from relinear.compare.gaps import gap, gap_of_means
from relinear.compare.recipe import change_recipe, read_recipe
from relinear.compare.replicate_fits import DECODER, FITS, SECOND, FitReplication
from relinear.compare.report import read_results, results_section
from relinear.compare.requirements import compare_requirements
from relinear.compare.run import compare
from relinear.compare.schema import EntryResult, Gap
from relinear.compare.settings import CompareSettings
from relinear.data.tasks import task_of
from relinear.models import is_preset, preset_config
from relinear.pages.blocks import Cell, Section, Text
from relinear.pages.page import write_page
from relinear.pages.records import loss_unit, read_values
from relinear.settings.yaml_settings import apply_overrides
from relinear.system.progress import ProgressCallback, no_progress
from relinear.system.run_folder import RunFolder
from relinear.system.text import number

#: below the paper's budget: evaluations during training, and the fewest and the most validation tokens
_EVALUATIONS, _FEWEST, _MOST = 10, 16_384, 2**20


@dataclasses.dataclass(frozen=True)
class Replication:
    """A replication by training, ready to run.

    Attributes:
        paper: the paper to replicate.
        request: the options of the replication.
        whole: the recipe at the paper's sizes and budget.
        recipe: the recipe that is run here.
    """

    paper: papers.Paper
    request: papers.Request
    whole: CompareSettings
    recipe: CompareSettings

    @property
    def share(self) -> float:
        """Return the share of the paper's tokens."""
        return training_tokens(self.recipe) / training_tokens(self.whole)

    @property
    def _share_text(self) -> str:
        return f"{100 * self.share:.2g} % of the paper's {number(training_tokens(self.whole))}"

    def requirements(self, workers: int | None = None) -> dict[str, str]:
        """Return the requirements on this machine like ``compare_requirements``, with its errors."""
        requirements = compare_requirements(self.recipe, workers)
        return requirements | {"tokens": f"{requirements['tokens']}, {self._share_text}"}

    def run(self, folder: Path, on_progress: ProgressCallback, execution: Execution) -> None:
        """Train the entries."""
        compare(self.recipe, folder / papers.COMPARISON, on_progress=on_progress, **execution._asdict())

    def section(self, folder: Path) -> Section:
        """Return its page: the paper compared with ours, then the comparison. Raises as ``replicate_section``."""
        comparison = folder / papers.COMPARISON
        results, below = read_results(comparison), results_section(comparison)
        entries = {entry["name"]: entry for entry in results["entries"]}
        first = entries.get(next(iter(self.recipe.entries)))
        diverged = {entry["name"] for entry in results.get("diverged", ())}

        def cell(name: str, measure: str) -> Cell:
            if name not in entries:
                return Cell("diverged" if name in diverged else "–")
            if measure in ANALYZED:
                return _analyzed(seed_folder(comparison, name, self.recipe.seeds[0]), measure)
            value, template = MEASURES[measure]
            return Cell.of(value(entries[name], first), template)

        def gap_of(claim: papers.Claim) -> Gap | None:
            if claim.measure:
                ours, other = cell(claim.entry, claim.measure).value, cell(claim.against, claim.than).value
                return None if ours is None or other is None else gap_of_means([ours], [other])
            if claim.entry not in entries or claim.against not in entries:
                return None
            runs = [entries[name]["runs"] for name in (claim.entry, claim.against)]
            return gap(*([np.asarray(run["block_losses"]) for run in of_entry] for of_entry in runs))

        trained = results["entries"][0]
        parameters = f"{number(trained['parameters'])} parameters"
        scale = (
            f"Each of {len(entries)} models saw {number(training_tokens(self.recipe))} tokens of "
            f"{self.recipe.train.data.data}, {self._share_text}. The first has {parameters}."
        )
        facts = _facts(self.whole), _facts(self.recipe)
        facts[1]["model"] += f" ({parameters})"
        unit = loss_unit(trained["settings"])
        blocks = papers.paper_blocks(self.paper, scale, cell, gap_of, unit, facts, self.share)
        blocks.append(Text("The comparison in full", heading=True))
        for block in below.blocks:  # a page has one verdict
            blocks.append(dataclasses.replace(block, lead=False) if isinstance(block, Text) else block)
        blocks += analyses_blocks(comparison)
        return Section(f"{self.paper.title}: replicated", "replicate", blocks, below.entries, below.note)


def training_tokens(recipe: CompareSettings) -> int:
    """Return the training tokens of a run."""
    return recipe.steps * recipe.train.tokens_per_step


def replication(
    name: str,
    *,
    budget: float | str | None = None,
    model: str | None = None,
    data: str | None = None,
    tokenizer: str | None = None,
    seeds: Sequence[int] | None = None,
    evaluate_on: str | None = None,
) -> Replication | FitReplication:
    """Prepare a replication, for ``replicate`` to run; its ``requirements()`` say what that takes.

    Args:
        name: name of the paper.
        budget: share of the paper's tokens; warm-ups and evaluations shrink with it. "paper" is 1, with the paper's
            model and text unless others are named. None takes minutes on two cores.
        model: "small", "paper", or a model as in a recipe.
        data: "paper", or a text as in a recipe; ``stdlib`` by default.
        tokenizer: tokenizer to use instead of that of the sizes.
        seeds: seeds to use instead of the paper's.
        evaluate_on: a second text, for what is fitted to a pretrained model.

    Raises:
        ValueError: for an unknown paper, a budget that is not a share, settings that a recipe would not take.
    """
    paper = papers.read_paper(name)
    options: dict[str, Any] = {
        "paper": name,
        "budget": paper.budget if budget is None else budget,
        "model": model or (papers.PAPER if budget == papers.PAPER else papers.SMALL),
        "data": data or (papers.PAPER if budget == papers.PAPER else paper.data),
        "tokenizer": tokenizer,
        "evaluate_on": evaluate_on,
    }
    request = papers.Request.load(options if seeds is None else options | {"seeds": seeds}, name)
    if paper.fits is not None:
        if evaluate_on is None and request.data == papers.PAPER:
            request = request.replace(evaluate_on=papers.PAPER)
        return FitReplication(paper, paper.fits, request)
    if evaluate_on is not None:
        raise ValueError(f"--evaluate-on is for papers that fit to a pretrained model; {name} trains its models")
    settings = CompareSettings.load(read_recipe(paper.recipe), paper.recipe).model_dump(exclude_unset=True)
    values = apply_overrides(settings, paper.changes)
    whole = CompareSettings.load(values, paper.recipe)
    changes = _size_changes(paper, request, values)
    if seeds is not None:
        changes["seeds"] = list(seeds)
    changes |= {f"entries.{entry}.set.save_model": True for entry in paper.analyze} | {"train.save_model": False}
    sized = CompareSettings.load(apply_overrides(values, changes), name)
    if training_tokens(sized) != training_tokens(whole) or request.budget != 1:
        changes |= _budget_changes(request.budget, whole, sized)
    changes |= {"name": f"replicate {name}", "description": paper.title}
    recipe = CompareSettings.load(change_recipe(values, changes), name)
    return Replication(paper, request.replace(seeds=recipe.seeds), whole, recipe)


def _size_changes(paper: papers.Paper, request: papers.Request, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the changes to the paper's recipe ``values`` that the requested model, text and tokenizer make."""
    changes: dict[str, Any] = {}
    if request.model == papers.SMALL:
        changes = dict(paper.small)
    elif request.model != papers.PAPER:
        changes = {"train.model": request.model}
    if request.data != papers.PAPER:
        data_of_sizes = CompareSettings.load(apply_overrides(values, changes), request.paper).train.data
        if (task := task_of(request.data)) is None or not task.defaults():
            changes["train.data.sequence_length"] = data_of_sizes.sequence_length  # models of tasks read no more
        changes["train.data.data"] = request.data
        if papers.is_here(request.data):
            changes |= {"train.data.max_documents": None, "train.data.validation_fraction": 0.05}
    if request.tokenizer is not None:
        changes["train.data.tokenizer"] = request.tokenizer
    return changes


def _budget_changes(share: float, whole: CompareSettings, sized: CompareSettings) -> dict[str, Any]:
    """Return the changes to ``sized`` that train on a share of the tokens of ``whole``, and evaluate on fewer."""
    tokens = max(round(share * training_tokens(whole)), sized.train.tokens_per_step)
    steps = math.ceil(tokens / sized.train.tokens_per_step)
    held_out = max(_FEWEST, min(tokens // 20, _MOST))
    # evaluations read at most half as many tokens as training
    most = min(_EVALUATIONS, tokens // (2 * held_out))
    evaluations = min(most, whole.steps // (whole.train.eval_every or whole.steps))
    return {
        "tokens": tokens,
        "train.eval_every": math.ceil(steps / max(1, evaluations)),
        "train.data.max_validation_tokens": held_out,
        "train.eval_start_tokens": held_out,
    }


def replicate(
    experiment: Replication | FitReplication,
    out_dir: str | Path,
    *,
    overwrite: bool = False,
    workers: int | None = None,
    executor: Executor | str | None = None,
    slurm: Mapping[str, Any] | None = None,
    on_progress: ProgressCallback = no_progress,
) -> Path:
    """Run a replication and return its page, ``report.html`` in ``out_dir``.

    Started again with the same options it resumes. The comparison is in ``out_dir/comparison``, fits are
    in ``out_dir/fits``.

    Args:
        experiment: the replication, from ``replication``.
        out_dir: directory of the results.
        overwrite: start over, and rename what is in the way.
        workers: as in ``compare``.
        executor: as in ``compare``.
        slurm: as in ``compare``.
        on_progress: as in ``compare``.

    Raises:
        ValueError, ChildProcessError, OSError: as ``compare``; if ``out_dir`` holds another replication.
    """
    folder = replication_folder(out_dir)
    with folder.open(experiment.request.model_dump(mode="json"), overwrite=overwrite):
        folder.write()
        experiment.run(folder.path, on_progress, Execution(workers, executor, slurm))
        return write_page(folder.path / papers.REPORT, [experiment.section(folder.path)])


def replication_folder(out_dir: str | Path) -> RunFolder:
    """Return the folder of a replication."""
    return RunFolder(
        out_dir,
        "replicate",
        papers.RECORD,
        (papers.COMPARISON, DECODER, FITS, SECOND, papers.REPORT),
        settings_of=lambda record: papers.Request.upgraded(record.get("settings")),
    )


def replicate_section(directory: str | Path) -> Section:
    """Return a page's blocks on the replication in ``directory``.

    Raises:
        FileNotFoundError: if it has not ended.
        ValueError: for damaged files.
    """
    request = read_values(Path(directory) / papers.RECORD)["settings"]
    experiment = replication(request["paper"], **{key: value for key, value in request.items() if key != "paper"})
    return experiment.section(Path(directory))


# The page


def _width(entry: EntryResult) -> float | None:
    settings = entry["settings"]
    if not is_preset(settings["model"]):
        return None
    return preset_config(settings["model"], **settings["model_overrides"]).hidden_size


def _rank(entry: EntryResult) -> float | None:
    return next((setting["rank"] for setting in entry["settings"]["operators"].values() if "rank" in setting), None)


def _minimum(entry: EntryResult) -> float:
    curves = ([point.get("validation_loss") for point in run["curve"]] for run in entry["runs"])
    lowest = [min(loss for loss in curve if loss is not None) for curve in curves]
    return sum(lowest) / len(lowest)


#: measure -> its value from the results of an entry and of the first entry (None if that diverged), and its format
MEASURES: dict[str, tuple[Callable[[EntryResult, EntryResult | None], float | None], str]] = {
    "parameters_m": (lambda entry, first: entry["parameters"] / 1e6, ".2f"),
    "megabytes": (lambda entry, first: entry["parameters"] * 4 / 2**20, ".2f"),
    "added_parameters": (lambda entry, first: first and entry["parameters"] / first["parameters"] - 1, "+z.1%"),
    "mflops": (lambda entry, first: entry["flops_per_token"] / 1e6, ".2f"),
    "width": (lambda entry, first: _width(entry), ".0f"),
    "rank": (lambda entry, first: _rank(entry), ".0f"),
    "loss": (lambda entry, first: entry["validation_loss"]["mean"], ".4f"),
    "minimum_loss": (lambda entry, first: _minimum(entry), ".4f"),
    "perplexity": (lambda entry, first: entry["perplexity"]["mean"], ".2f"),
    "training_speed": (lambda entry, first: entry["speed"] and entry["speed"]["train_tokens_per_second"], ",.0f"),
    "inference_speed": (lambda entry, first: entry["speed"] and entry["speed"]["inference_tokens_per_second"], ",.0f"),
}

#: measure of an analysis of an entry's first seed -> the analysis, the keys of the value in it, and its format
ANALYZED = {
    "base_accuracy": ("cgt_arithmetic", ("accuracy", "dynamic", "answers"), ".1%"),
    "specialized_accuracy": ("cgt_arithmetic", ("accuracy", "specialized", "answers"), ".1%"),
    "variation": ("cgt_arithmetic", ("variation",), ".2f"),
    "probe_error": ("cgt_arithmetic", ("probe", "anywhere", "error"), ".2f"),
}


def _analyzed(run: Path, measure: str) -> Cell:
    """Return the cell of a measure of ``ANALYZED``; a dash if the model was not analysed."""
    name, keys, template = ANALYZED[measure]
    path = run / "analysis" / f"{name}.json"
    value: Any = read_values(path) if path.is_file() else {}
    for key in keys:
        value = value.get(key, {})
    return Cell.of(None if value == {} else value, template)


def _facts(recipe: CompareSettings) -> dict[str, str]:
    """Return the settings that a replication may change, by name."""
    train = recipe.settings_of(next(iter(recipe.entries)))
    operators = [
        " ".join(f"{key} {value}" if key != "kind" else str(value) for key, value in entry.operator.items())
        for entry in recipe.entries.values()
        if entry.operator
    ]
    return {
        "model": train.model + "".join(f", {key} {value}" for key, value in train.model_overrides.items()),
        "tokens per run": number(training_tokens(recipe)),
        "steps": f"{train.steps:,} of {train.tokens_per_step:,} tokens",
        "warm-up": f"{train.warmup:,} steps",
        "text": train.data.data,
        "tokenizer": train.data.tokenizer,
        "sequence length": str(train.data.sequence_length),
        "learning rate": f"{train.learning_rate:g}" if recipe.tune is None else "tuned for each entry",
        "precision": train.dtype,
        "seeds": ", ".join(map(str, recipe.seeds)),
        "operators": "; ".join(dict.fromkeys(operators)),
    }
