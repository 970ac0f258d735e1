"""Replicate a paper that fits operators to projections of a pretrained decoder."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from concurrent.futures import as_completed
from inspect import isroutine
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from relinear.compare import papers
from relinear.compare.engine import Engine, Run
from relinear.compare.executors import Placement, executor_at
from relinear.compare.figures import loss_unit
from relinear.compare.gaps import gap_of_means
from relinear.compare.match import measure_size
from relinear.compare.report import number
from relinear.compare.schema import Gap
from relinear.compare.speed import seconds_per_token
from relinear.data import DataSettings, iter_texts
from relinear.data.corpora import evaluation_split, open_corpus
from relinear.data.tokenizers import expected_vocabulary, load_tokenizer
from relinear.distill import distill_
from relinear.evaluate.language import perplexity
from relinear.hf.model_layout import decoder_layers
from relinear.models import from_preset, model_folder
from relinear.pages.blocks import Cell, Section
from relinear.pages.figures import colors
from relinear.pages.records import read_values, what_ran
from relinear.surgery.checkpoint import from_pretrained
from relinear.surgery.plan import plan
from relinear.surgery.summary import summary
from relinear.system.files import write_json, write_text
from relinear.system.machine import available_cores, on_threads
from relinear.system.progress import Progress, ProgressCallback
from relinear.system.timing import duration, seconds_of
from relinear.training.settings import TrainSettings

#: names in the folder: the stand-in model, one file per fit, the stand-in for a second text
DECODER, FITS, SECOND = "decoder", "fits", "second.txt"
ORIGINAL = "original"
#: a plan times a fit on this share of the tokens
_TIMED = 1 / 8
#: documents that are read of a text of the Hub
_DOCUMENTS = 50_000
#: tokens of a sequence
_LENGTH = 128
#: nats above the original from which on a page calls a fit bad
_BAD = 1.0


@dataclasses.dataclass(frozen=True)
class FitReplication:
    """Plan a replication by fits: every method in every set of projections, on every seed.

    fits: the paper's. request: the options, defaults filled in.
    """

    paper: papers.Paper
    fits: papers.Fits
    request: Mapping[str, Any]

    @property
    def share(self) -> float:
        """Return the share of the tokens of a fit with ``--budget paper``."""
        return self._last_job()["settings"]["tokens"] / self.fits.tokens

    @property
    def decoder(self) -> TrainSettings | None:
        """Return how the stand-in model is trained; None if a model is named."""
        if self.request["model"] != papers.SMALL:
            return None
        data = {"data": self._texts[0], "tokenizer": self.request["tokenizer"] or "bytes", "sequence_length": _LENGTH}
        data |= {"max_validation_tokens": 128 * _LENGTH}
        settings = TrainSettings.load(
            {"data": data, "seed": self.request["seeds"][0], **self.fits.decoder}, self.request["paper"]
        )
        tokens = self.request["budget"] * self.fits.decoder_tokens
        steps = max(2, round(tokens / settings.tokens_per_step))
        return settings.replace(steps=steps, eval_every=max(1, steps // 4))

    @property
    def _texts(self) -> tuple[str, str | None]:
        """Return the text that is fitted on, and the second."""
        data, second = self.request["data"], self.request["evaluate_on"]
        return self.fits.data if data == papers.PAPER else data, self.fits.second if second == papers.PAPER else second

    def _jobs(self, part: float = 1.0) -> dict[str, dict[str, Any]]:
        """Name of the file -> what ``fit`` is to do beside model and texts, at a part of the budget."""
        share = part * self.request["budget"]
        tokens = max(_LENGTH, round(share * self.fits.tokens))
        budget = {"evaluation": max(2 * _LENGTH, round(share * self.fits.evaluation))}
        settings = self.fits.settings | {"sequence_length": _LENGTH, "tokens": tokens}
        settings |= {"validation_tokens": max(_LENGTH, tokens // 8)}
        jobs: dict[str, dict[str, Any]] = {ORIGINAL: budget}
        for seed in self.request["seeds"]:
            for method, about in self.fits.methods.items():
                for which, names in self.fits.projections.items():
                    chosen = settings | {"seed": seed, "learning_rate": about.learning_rate}
                    facts = {"operator": about.operator, "projections": names, "settings": chosen}
                    jobs[f"{method}-{which}-seed-{seed}"] = budget | facts
        return jobs

    def _last_job(self, part: float = 1.0) -> dict[str, Any]:
        return list(self._jobs(part).values())[-1]

    def requirements(self, workers: int | None = None) -> dict[str, str]:
        """Return the requirements on this machine, by name: runs, parameters, tokens, time, disk.

        A fit on fewer tokens and a step of training are timed; it takes seconds.

        Raises:
            ValueError, OSError: for a model or text that is not there, a model that a method does not fit.
        """
        for text in filter(None, self._texts):
            open_corpus(settings_of(text))
        jobs, trained, at_once = self._jobs(), self.decoder, workers or available_cores()
        seconds, first, short = 0.0, self._last_job(), self._last_job(_TIMED)
        if trained is None:
            folder = model_folder(self._model)
            model, tokenizer = from_pretrained(folder), load_tokenizer(self.request["tokenizer"] or folder)
        else:
            vocabulary = expected_vocabulary(trained.data.tokenizer)
            assert vocabulary is not None
            model = from_preset(trained.model, **trained.model_overrides, vocab_size=vocabulary)
            tokenizer = load_tokenizer(trained.data.tokenizer)
            flops = measure_size(trained, vocabulary).flops
            seconds = trained.steps * trained.tokens_per_step * seconds_per_token(trained, vocabulary, flops)
        check_projections(model, self.fits, self._shown)
        pace = seconds_of(lambda: fitted(model, tokenizer, [self._texts[0]] * 2, short))
        longer = first["settings"]["tokens"] / short["settings"]["tokens"]
        seconds += longer * pace * len(jobs) / at_once
        table, tokens = summary(model), first["settings"]["tokens"]
        also = "" if trained is None else f"; {number(trained.steps * trained.tokens_per_step)} to train the decoder"
        return {
            "runs": f"{len(jobs) - 1} fits of {len(self.fits.methods)} methods to {len(self.fits.projections)} sets of "
            f"projections, {at_once} at once",
            "parameters": f"{trained.model if trained else self._model} {number(table.parameters)} "
            f"({number(table.flops_per_token)} FLOPs per token)",
            "tokens": f"{number(tokens)} a fit, {number(first['evaluation'])} of each text to evaluate{also}",
            "time": f"{duration(seconds)}, by a fit timed now, after reading the text",
            "disk": f"about {number(16 * table.parameters + 5e6 if trained else 5e6)}B",
        }

    @property
    def _model(self) -> str:
        return self.fits.model if self.request["model"] == papers.PAPER else self.request["model"]

    def run(self, folder: Path, on_progress: ProgressCallback, placement: Placement) -> None:
        """Train the decoder unless one is named, then make the remaining fits."""
        workers, executor, slurm = placement
        first, second = self._texts
        if second is None:
            second = str(folder / SECOND)
            write_text(folder / SECOND, prose())
        at_once = workers or available_cores()
        if (trained := self.decoder) is not None:
            with executor_at(executor, 1, folder.resolve(), slurm or {}) as pool:
                Engine(pool, 1, on_progress).run_round([Run("train", "a decoder to fit to", trained, folder / DECODER)])
        model = model_folder(str(folder / DECODER) if trained else self._model)
        pending = {name: job for name, job in self._jobs().items() if not (folder / FITS / f"{name}.json").is_file()}
        threads = max(1, available_cores() // at_once)
        with executor_at(executor, at_once, folder.resolve(), slurm or {}) as pool:
            arguments = model, self.request["tokenizer"], [first, second], threads
            started = [
                pool.submit(fit, str(folder / FITS / f"{name}.json"), *arguments, job) for name, job in pending.items()
            ]
            for done, future in enumerate(as_completed(started), start=1):
                future.result()
                on_progress(Progress("fitting projections", done, len(started), "fit"))

    # The page

    def section(self, folder: Path) -> Section:
        """Return its page. Raises FileNotFoundError if it has not ended, ValueError for damaged files."""
        fits_by_name = {name: read_values(folder / FITS / f"{name}.json") for name in self._jobs()}

        def values(method: str, measure: str) -> list[float]:
            column, _, which = measure.partition(":")
            rows = [
                fits_by_name[ORIGINAL if method == ORIGINAL else f"{method}-{which}-seed-{seed}"]
                for seed in self.request["seeds"]
            ]
            return [row["losses"][int(column) - 1] if column in ("1", "2") else row[column] for row in rows]

        def cell(method: str, measure: str) -> Cell:
            if method == ORIGINAL and measure[0] not in "12":
                return Cell("–")
            return Cell.of(fmean(values(method, measure)), ",.0f" if measure.startswith("par") else ".3f")

        def gap_of(claim: papers.Claim) -> Gap:
            """Return values over q, k and v alone, on the first text."""
            single = [f"1:{which}" for which, names in self.fits.projections.items() if len(names) == 1]

            def over_seeds(method: str) -> list[float]:
                return [fmean(each) for each in zip(*(values(method, run) for run in single), strict=True)]

            return gap_of_means(over_seeds(claim.entry), over_seeds(claim.against))

        def is_bad(method: str, which: str) -> bool:
            return any(max(values(method, f"{text}:{which}")) > values(ORIGINAL, text)[0] + _BAD for text in "12")

        whole: dict[str, Any] = dict.fromkeys(("model", "data", "evaluate_on"), papers.PAPER)
        whole |= {"budget": 1.0, "tokenizer": None, "seeds": [0]}
        facts = dataclasses.replace(self, request=whole)._facts, self._facts
        model, tokens, evaluated, first, second, *_ = facts[1].values()
        scale = (
            f"The decoder is {model}. Every method was fitted on {tokens} tokens of {first}, {100 * self.share:.2g} % "
            f"of those with --budget paper, and evaluated on {evaluated} of it (1) and of {second} (2)."
        )
        if bad := [f"{m} in {s}" for m in self.fits.methods for s in self.fits.projections if is_bad(m, s)]:
            scale += f" These fits are bad, more than {_BAD:g} nat above the original: {', '.join(bad)}. "
            scale += "Their gaps say more about the fit than about the operator."
        palette = colors([ORIGINAL, *self.fits.methods], ORIGINAL)
        unit = "nats per token" if self.decoder is None else loss_unit({"data": self.decoder.data.model_dump()})
        blocks = papers.paper_blocks(self.paper, scale, cell, gap_of, unit, facts, self.share)
        blocks += what_ran(read_values(folder / papers.RECORD), {"model": model})
        note = " · ".join([model, first, second])
        return Section(f"{self.paper.title}: replicated", "replicate", blocks, palette, note)

    @property
    def _shown(self) -> str:
        return f"{self.decoder.model}, trained here" if self.decoder else self._model

    @property
    def _facts(self) -> dict[str, str]:
        """Return the settings that a replication may change, by name."""
        job, (first, second) = self._last_job(), self._texts
        return {
            "model": self._shown,
            "tokens to fit": number(job["settings"]["tokens"]),
            "tokens to evaluate": number(job["evaluation"]),
            "text (1)": first,
            "text (2)": second or "PyTorch's documentation",
            "tokenizer": self.request["tokenizer"] or (self.decoder.data.tokenizer if self.decoder else "the model's"),
            "seeds": ", ".join(map(str, self.request["seeds"])),
        }


def prose() -> str:
    """Return the documentation of PyTorch's functions, which serves as a second text.

    That of Python would not do: the standard library, which the decoder is trained on, holds it in a file.
    """
    dtypes = [vars(torch).get(name) for name in sorted(torch.__all__)]
    return "\n\n".join(dict.fromkeys(each.__doc__ for each in dtypes if isroutine(each) and each.__doc__))


def settings_of(text: str) -> DataSettings:
    """Return a text's settings; from a data set of the Hub, several times the documents that fits need."""
    return DataSettings(data=text, max_documents=None if papers.is_here(text) else _DOCUMENTS)


def fit(path: str, model: str, tokenizer: str | None, texts: list[str], threads: int, job: Mapping[str, Any]) -> None:
    """Fit, evaluate, and write the result to ``path``: losses by text, parameters and error.

    Args:
        path: of the file. model: directory or Hub name. tokenizer: the model's own by default.
        texts, job: as ``fitted`` takes them. threads: of the CPU.
    """
    with on_threads(threads):
        results = fitted(from_pretrained(model).eval(), load_tokenizer(tokenizer or model), texts, job)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    write_json(path, results)


def check_projections(model: Any, fits: papers.Fits, name: str) -> None:
    """Raise ValueError unless every method can replace all projections of the model called ``name``."""
    projections = dict.fromkeys(each for names in fits.projections.values() for each in names)
    for method in fits.methods.values():
        try:
            plan(model, dict.fromkeys(projections, method.operator), layers=fitted_layer(model))
        except ValueError as error:
            raise ValueError(
                f"{name} cannot take {method.operator}, which the paper fits: {error}. Give a model with "
                f"{', '.join(projections)}, each a layer of its own and wide enough, such as a Llama"
            ) from None


def fitted_layer(model: Any) -> int:
    """Return the number of the decoder layer whose projections are replaced: the one in the middle."""
    return len(decoder_layers(model)) // 2


def fitted(model: Any, tokenizer: Any, texts: list[str], job: Mapping[str, Any]) -> dict[str, Any]:
    """Fit an operator to projections of the model's middle layer and evaluate the model on two texts.

    Args:
        texts: what is fitted on, and evaluated on its validation text; and what is evaluated on, all of it or
            what it holds out.
        job: operator (none evaluates the unchanged model), projections, settings of ``distill_``; evaluation: tokens.
    """
    fits_by_name: dict[str, Any] = {}
    if "operator" in job:
        report = distill_(
            model,
            dict.fromkeys(job["projections"], job["operator"]),
            iter_texts(settings_of(texts[0]), "train"),
            layers=fitted_layer(model),
            tokenizer=tokenizer,
            settings=job["settings"],
        )
        fits_by_name["parameters"] = sum(layer.parameters for layer in report.layers)
        fits_by_name["error"] = fmean(layer.error for layer in report.layers)
    losses = []
    for text, split in zip(texts, ("validation", evaluation_split(settings_of(texts[1]))), strict=True):
        documents = iter_texts(settings_of(text), split)
        losses.append(
            perplexity(model, documents, tokenizer, sequence_length=_LENGTH, max_tokens=job["evaluation"]).loss
        )
    return fits_by_name | {"losses": losses}
