"""Replicate a paper that fits operators to projections of a pretrained decoder."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from concurrent.futures import as_completed
from inspect import isroutine
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from relinear.compare import papers
from relinear.compare.engine import Engine, Run
from relinear.compare.executors import Execution, executor_at
from relinear.compare.gaps import gap_of_means
from relinear.compare.requirements import training_requirements
from relinear.compare.schema import Gap
from relinear.data import DataSettings, iter_texts
from relinear.data.corpora import evaluation_split, open_corpus
from relinear.data.tokenizers import expected_vocabulary, load_tokenizer
from relinear.distill import distill_
from relinear.evaluate.language import perplexity
from relinear.hf.model_layout import decoder_layers
from relinear.models import model_folder
from relinear.pages.blocks import Cell, Section
from relinear.pages.figures import colors
from relinear.pages.records import loss_unit, read_values, what_ran
from relinear.surgery.checkpoint import from_pretrained
from relinear.surgery.plan import plan
from relinear.surgery.summary import summary
from relinear.system.files import write_json, write_text
from relinear.system.machine import available_cores, on_threads
from relinear.system.progress import Progress, ProgressCallback
from relinear.system.text import number
from relinear.system.timing import duration, seconds_of
from relinear.training.run import build_model
from relinear.training.settings import TrainSettings

#: names in the folder: the stand-in model, the folder with a file for each fit, the stand-in for a second text
DECODER, FITS, SECOND = "decoder", "fits", "second.txt"
ORIGINAL = "original"
#: ``requirements`` times a fit on this share of the tokens
_TIMED = 1 / 8
#: documents to read from a data set of the Hub
_DOCUMENTS = 50_000
#: tokens of a sequence
_LENGTH = 128
#: options with which a replication takes the paper's own model and texts
_PAPERS_OWN: dict[str, Any] = dict.fromkeys(("model", "data", "evaluate_on"), papers.PAPER)
#: nats above the original beyond which the page calls a fit bad
_BAD = 1.0


@dataclasses.dataclass(frozen=True)
class FitTask:
    """Request a fit to projections and an evaluation on two texts.

    Attributes:
        evaluation: tokens of each text that are evaluated.
        operator: operator to fit; None evaluates the unchanged model.
        projections: names of the projections that it replaces.
        settings: settings of ``distill_``.
    """

    evaluation: int
    operator: str | None = None
    projections: Sequence[str] = ()
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class FitReplication:
    """A replication by fits, ready to run: every method in every set of projections, on every seed.

    Attributes:
        paper: the paper to replicate.
        fits: the fits of the paper.
        request: the options of the replication.
    """

    paper: papers.Paper
    fits: papers.Fits
    request: papers.Request

    @property
    def tokens(self) -> int:
        """Return the tokens of a fit."""
        return max(_LENGTH, round(self.request.budget * self.fits.tokens))

    @property
    def evaluation(self) -> int:
        """Return the tokens of each text that a fit is evaluated on."""
        return max(2 * _LENGTH, round(self.request.budget * self.fits.evaluation))

    @property
    def decoder(self) -> TrainSettings | None:
        """Return how the stand-in model is trained; None if a model is named."""
        if self.request.model != papers.SMALL:
            return None
        data = {"data": self._texts[0], "tokenizer": self.request.tokenizer or "bytes", "sequence_length": _LENGTH}
        data |= {"max_validation_tokens": 128 * _LENGTH}
        values = {"data": data, "seed": self.request.seeds[0], **self.fits.decoder}
        settings = TrainSettings.load(values, self.request.paper)
        tokens = self.request.budget * self.fits.decoder_tokens
        steps = max(2, round(tokens / settings.tokens_per_step))
        return settings.replace(steps=steps, eval_every=max(1, steps // 4))

    @property
    def _texts(self) -> tuple[str, str | None]:
        """Return the text that is fitted on, and the second."""
        data, second = self.request.data, self.request.evaluate_on
        return self.fits.data if data == papers.PAPER else data, self.fits.second if second == papers.PAPER else second

    @property
    def _model(self) -> str:
        return self.fits.model if self.request.model == papers.PAPER else self.request.model

    def _tasks(self) -> dict[str, FitTask]:
        """Return every fit by the name of its file."""
        settings = self.fits.settings | {"sequence_length": _LENGTH, "tokens": self.tokens}
        settings |= {"validation_tokens": max(_LENGTH, self.tokens // 8)}
        tasks = {ORIGINAL: FitTask(self.evaluation)}
        for seed in self.request.seeds:
            for method, about in self.fits.methods.items():
                for which, projections in self.fits.projections.items():
                    chosen = settings | {"seed": seed, "learning_rate": about.learning_rate}
                    tasks[f"{method}-{which}-seed-{seed}"] = FitTask(
                        self.evaluation, about.operator, projections, chosen
                    )
        return tasks

    def requirements(self, workers: int | None = None) -> dict[str, str]:
        """Return the requirements on this machine, by name: runs, parameters, tokens, time, disk.

        A fit on fewer tokens and a step of training are timed; it takes seconds.

        Raises:
            ValueError, OSError: for a model or text that is not there, a model that a method does not fit.
        """
        for text in filter(None, self._texts):
            open_corpus(data_settings(text))
        tasks = self._tasks()
        trained = self.decoder
        at_once = workers or available_cores()
        if trained is None:
            source = model_folder(self._model)
            to_train = ""
            model, tokenizer = from_pretrained(source), load_tokenizer(self.request.tokenizer or source)
        else:
            to_train = f"; the decoder: {training_requirements(trained)['time']}"
            model = build_model(trained, expected_vocabulary(trained.data.tokenizer))
            tokenizer = load_tokenizer(trained.data.tokenizer)
        projections = {each: None for names in self.fits.projections.values() for each in names}
        for method in self.fits.methods.values():  # raises before anything is timed
            plan(model, dict.fromkeys(projections, method.operator), layers=middle_layer(model))
        shorter = dataclasses.replace(self, request=self.request.replace(budget=_TIMED * self.request.budget))
        short = list(shorter._tasks().values())[-1]
        seconds = seconds_of(lambda: fit_and_evaluate(model, tokenizer, [self._texts[0]] * 2, short))
        seconds *= self.tokens / shorter.tokens * len(tasks) / at_once
        table = summary(model)
        return {
            "runs": f"{len(tasks) - 1} fits of {len(self.fits.methods)} methods to {len(self.fits.projections)} sets "
            f"of projections, {at_once} at once",
            "parameters": f"{trained.model if trained else self._model} {number(table.parameters)} "
            f"({number(table.flops_per_token)} FLOPs per token)",
            "tokens": f"{number(self.tokens)} a fit, {number(self.evaluation)} of each text to evaluate",
            "time": f"{duration(seconds)}, by a fit timed now, after reading the text{to_train}",
            "disk": f"about {number(16 * table.parameters + 5e6 if trained else 5e6)}B",
        }

    def run(self, folder: Path, on_progress: ProgressCallback, execution: Execution) -> None:
        """Train the decoder unless one is named, then make the remaining fits."""
        workers, executor, slurm = execution
        first, second = self._texts
        if second is None:
            second = str(folder / SECOND)
            write_text(folder / SECOND, prose())
        at_once = workers or available_cores()
        paths = {folder / FITS / f"{name}.json": task for name, task in self._tasks().items()}
        threads = max(1, available_cores() // at_once)
        with executor_at(executor, at_once, folder.resolve(), slurm or {}) as pool:
            if (trained := self.decoder) is not None:
                Engine(pool, 1, on_progress).run_round([Run("train", "a decoder to fit to", trained, folder / DECODER)])
            model = model_folder(str(folder / DECODER) if trained else self._model)
            arguments = model, self.request.tokenizer, [first, second], threads
            started = [
                pool.submit(fit, str(path), *arguments, task) for path, task in paths.items() if not path.is_file()
            ]
            for done, future in enumerate(as_completed(started), start=1):
                future.result()
                on_progress(Progress("fitting projections", done, len(started), "fit"))

    # The page

    def section(self, folder: Path) -> Section:
        """Return its page. Raises FileNotFoundError if it has not ended, ValueError for damaged files."""
        values: dict[tuple[str, str], list[float]] = {}  # of a method and MEASURE:PROJECTIONS, by seed
        every = itertools.product((ORIGINAL, *self.fits.methods), self.fits.projections, self.request.seeds)
        for method, which, seed in every:
            name = ORIGINAL if method == ORIGINAL else f"{method}-{which}-seed-{seed}"
            row = read_values(folder / FITS / f"{name}.json")
            losses = row.pop("losses")
            for measure, value in {"1": losses[0], "2": losses[1], **row}.items():
                values.setdefault((method, f"{measure}:{which}"), []).append(value)

        def cell(method: str, measure: str) -> Cell:
            if (method, measure) not in values:
                return Cell("–")
            return Cell.of(fmean(values[method, measure]), ",.0f" if measure.startswith("par") else ".3f")

        def gap_of(claim: papers.Claim) -> Gap:
            """Return values over q, k and v alone, on the first text."""
            single = [f"1:{which}" for which, names in self.fits.projections.items() if len(names) == 1]

            def over_seeds(method: str) -> list[float]:
                return [fmean(each) for each in zip(*(values[method, run] for run in single), strict=True)]

            return gap_of_means(over_seeds(claim.entry), over_seeds(claim.against))

        bad = []
        for method, which in itertools.product(self.fits.methods, self.fits.projections):
            keys = f"1:{which}", f"2:{which}"
            if max(max(values[method, key]) - values[ORIGINAL, key][0] for key in keys) > _BAD:
                bad.append(f"{method} in {which}")
        request = papers.Request(paper=self.request.paper, budget=1, **_PAPERS_OWN)
        facts = dataclasses.replace(self, request=request)._facts, self._facts
        model, tokens, evaluated, first, second, *_ = facts[1].values()
        share = self.tokens / self.fits.tokens
        scale = (
            f"The decoder is {model}. Every method was fitted on {tokens} tokens of {first}, {100 * share:.2g} % "
            f"of those with --budget paper, and evaluated on {evaluated} of it (1) and of {second} (2)."
        )
        if bad:
            scale += f" These fits are bad, more than {_BAD:g} nat above the original: {', '.join(bad)}. "
            scale += "Their gaps say more about the fit than about the operator."
        palette = colors([ORIGINAL, *self.fits.methods], ORIGINAL)
        unit = "nats per token" if self.decoder is None else loss_unit({"data": self.decoder.data.model_dump()})
        blocks = papers.paper_blocks(self.paper, scale, cell, gap_of, unit, facts, share)
        blocks += what_ran(read_values(folder / papers.RECORD), {"model": model})
        note = " · ".join([model, first, second])
        return Section(f"{self.paper.title}: replicated", "replicate", blocks, palette, note)

    @property
    def _facts(self) -> dict[str, str]:
        """Return the settings that a replication may change, by name."""
        first, second = self._texts
        return {
            "model": f"{self.decoder.model}, trained here" if self.decoder else self._model,
            "tokens to fit": number(self.tokens),
            "tokens to evaluate": number(self.evaluation),
            "text (1)": first,
            "text (2)": second or "PyTorch's documentation",
            "tokenizer": self.request.tokenizer or (self.decoder.data.tokenizer if self.decoder else "the model's"),
            "seeds": ", ".join(map(str, self.request.seeds)),
        }


def prose() -> str:
    """Return the documentation of PyTorch's functions, which serves as a second text.

    Python's documentation would not do: the standard library, which the decoder is trained on, contains it.
    """
    members = [vars(torch).get(name) for name in sorted(torch.__all__)]
    return "\n\n".join(dict.fromkeys(each.__doc__ for each in members if isroutine(each) and each.__doc__))


def data_settings(text: str) -> DataSettings:
    """Return the settings of a text; of a data set of the Hub they take several times the documents that fits need."""
    return DataSettings(data=text, max_documents=None if papers.is_here(text) else _DOCUMENTS)


def fit(path: str, model: str, tokenizer: str | None, texts: list[str], threads: int, task: FitTask) -> None:
    """Fit, evaluate, and write the result to ``path``: losses by text, parameters and error.

    Args:
        path: file of the result.
        model: directory or Hub name of the model.
        tokenizer: tokenizer to use instead of the model's own.
        texts: as for ``fit_and_evaluate``.
        threads: threads of the CPU.
        task: what to fit, and how much to evaluate.
    """
    with on_threads(threads):
        results = fit_and_evaluate(from_pretrained(model).eval(), load_tokenizer(tokenizer or model), texts, task)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    write_json(path, results)


def middle_layer(model: Any) -> int:
    """Return the number of the decoder layer whose projections are replaced: the one in the middle."""
    return len(decoder_layers(model)) // 2


def fit_and_evaluate(model: Any, tokenizer: Any, texts: list[str], task: FitTask) -> dict[str, Any]:
    """Fit an operator to projections of the model's middle layer and evaluate the model on two texts.

    Args:
        model: the model; its projections are replaced.
        tokenizer: tokenizer of the texts.
        texts: two texts. The operator is fitted to the first and evaluated on its validation split. The second is
            only evaluated on: all of it, or what it holds out.
        task: what to fit, and how much to evaluate.
    """
    results: dict[str, Any] = {}
    if task.operator is not None:
        report = distill_(
            model,
            dict.fromkeys(task.projections, task.operator),
            iter_texts(data_settings(texts[0]), "train"),
            layers=middle_layer(model),
            tokenizer=tokenizer,
            settings=task.settings,
        )
        results["parameters"] = sum(layer.parameters for layer in report.layers)
        results["error"] = fmean(layer.error for layer in report.layers)
    splits = ("validation", evaluation_split(data_settings(texts[1])))
    results["losses"] = []
    for text, split in zip(texts, splits, strict=True):
        documents = iter_texts(data_settings(text), split)
        measured = perplexity(model, documents, tokenizer, sequence_length=_LENGTH, max_tokens=task.evaluation)
        results["losses"].append(measured.loss)
    return results
