"""Compress a model: ``Compression`` checks the input, and its ``run`` takes the steps, one after another."""

from __future__ import annotations

import dataclasses
import itertools
import tempfile
import time
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch

from relinear.compression.budget import stored_bytes
from relinear.compression.calibrate import Calibration
from relinear.compression.candidates import SearchSpace, fit_layers_, load_plan
from relinear.compression.corpus import CompressionData, read_corpus, read_elsewhere, with_sampled_text
from relinear.compression.evaluation import evaluate
from relinear.compression.file_formats import FILE_FORMATS, budget_of
from relinear.compression.healing import heal, original_copy
from relinear.compression.inputs import (
    by_decoder_layer,
    check_compressible,
    check_enough_tokens,
    check_ids,
    describe_out_of_reach,
    embedding_tables,
    fitted_window,
    linear_layers,
)
from relinear.compression.plan import CompressPlan
from relinear.compression.report import CompressReport, write_page
from relinear.compression.settings import CompressSettings
from relinear.compression.storage import is_edited
from relinear.contract.module_state import eval_mode
from relinear.hf.half_precision import at_half_precision, round_to_half_
from relinear.hf.model_config import loaded_from, model_name
from relinear.settings.patterns import ALL_LINEAR
from relinear.surgery.checkpoint import save_pretrained
from relinear.surgery.separate_experts import separate_experts
from relinear.surgery.summary import module_parameters
from relinear.system.files import fingerprint, os_errors_named, write_json
from relinear.system.machine import PeakMemory
from relinear.system.progress import Progress, ProgressCallback, no_progress
from relinear.system.run_folder import RunFolder, set_aside

#: the model's directory
MODEL = "model"
#: stage of a compression -> the text that is shown meanwhile
STAGES = {
    "forward": "calibrating",
    "candidates": "planning",
    "original": "running the original",
    "fit": "fitting layers",
    "evaluate": "running the compressed model",
    "heal": "healing",
}
#: what a plan leads to
_RESULTS = (
    "plan.json",
    "report.json",
    "report.html",
    MODEL,
    *filter(None, (one.file for one in FILE_FORMATS.values())),
)


def compress(
    model: Any,
    texts: Iterable[Any] | Mapping[str, Iterable[Any]],
    *,
    bits: float | None = None,
    size: float | str | None = None,
    keep: float | None = None,
    tokenizer: Any = None,
    targets: str | Iterable[str] = ALL_LINEAR,
    exclude: str | Iterable[str] | None = None,
    settings: CompressSettings | Mapping[str, Any] | None = None,
    plan_file: str | Path | None = None,
    plan_only: bool = False,
    out_dir: str | Path | None = None,
    overwrite: bool = False,
    evaluate_on: Mapping[str, Iterable[Any]] | None = None,
    on_progress: ProgressCallback = no_progress,
) -> CompressReport:
    """Make a pretrained decoder smaller, in place: calibrate, choose an operator for every layer, fit it, save.

    Args:
        model: a Hugging Face decoder.
        texts: texts, conversations (lists of ``{"role", "content"}``, written by the tokenizer's chat template), or
            tensors or mappings of token ids, as for ``distill_``; read as needed. Or a mapping of several such
            corpora by name, which are taken in turns, ``sequence_length`` tokens of each.
        bits, size, keep: the budget; shorthands for the settings of these names.
        tokenizer: the model's tokenizer, needed for texts; saved with the model.
        targets, exclude: patterns of the linear layers that may be replaced; by default all but the head.
        settings: ``CompressSettings`` or a mapping of its fields.
        plan_file: a plan to apply, in place of a new one.
        plan_only: stop after the plan; the model stays unchanged. If ``out_dir`` already holds a model, plan and report
            are called ``proposed-*``.
        evaluate_on: texts of other kinds, by name, that the result is also evaluated on; of each ``evaluation_tokens``.
        out_dir: folder of statistics, plan, state, report (``report.json``, ``report.html``) and model. Killed and
            called again with the same arguments, it resumes. Other candidates, and budgets of the same unit and reader,
            use the same statistics; the model of the earlier one is renamed: ``model.<time>``. None leaves nothing.
        overwrite: start over, and rename what is in the way in ``out_dir``, statistics included.
        on_progress: called with a ``Progress``, whose ``stage`` is a key of ``STAGES``.

    Returns:
        The report: what every layer became, sizes in bytes, losses in nats per token, seconds by phase. ``model`` has
        changed in place, unless only a plan was asked for.

    Raises:
        ValueError: if the budget cannot be met, the corpus is too short or of another vocabulary, the model is
            quantized, has weights that are not finite or cannot be run layer by layer, or ``out_dir`` holds results for
            another model or corpus, or other programs' files under its names.

    Examples:
        >>> model, ids = relinear.from_preset("tiny", num_hidden_layers=1), torch.randint(258, (8, 128))
        >>> settings = {"tokens": 512, "sequence_length": 64, "evaluate": False}
        >>> report = relinear.compress(model, ids, bits=4.25, targets="up_proj", settings=settings)
        >>> report.bytes < report.bytes_before
        True
    """
    options = (
        settings.model_dump(exclude_unset=True) if isinstance(settings, CompressSettings) else dict(settings or {})
    )
    options |= {name: value for name, value in {"bits": bits, "size": size, "keep": keep}.items() if value is not None}
    resolved = CompressSettings.load(options, "compress settings")
    with separate_experts(model), tempfile.TemporaryDirectory() if out_dir is None else nullcontext(out_dir) as folder:
        compression = Compression(
            model,
            resolved,
            folder,
            saves=out_dir is not None,
            tokenizer=tokenizer,
            targets=targets,
            exclude=exclude,
            plan_file=plan_file,
            overwrite=overwrite,
        )
        return compression.run(texts, evaluate_on or {}, plan_only, on_progress)


def proposal(folder: Path, name: str) -> Path:
    """Return the path for ``name`` of a plan that is not applied (yet); a model in ``folder`` keeps its own file."""
    return folder / (f"proposed-{name}" if (folder / MODEL).is_dir() else name)


class Compression:
    """Check the input of a compression, then ``run`` it.

    Args:
        model: the model, its experts as separate layers (``separate_experts``).
        settings: settings of the compression.
        folder: directory for state and results.
        saves: whether to save the model, too.
        tokenizer, targets, exclude, plan_file, overwrite: as for ``compress``.

    Raises:
        ValueError: for all that can be refused before texts are read.
    """

    def __init__(
        self,
        model: Any,
        settings: CompressSettings,
        folder: str | Path,
        *,
        saves: bool = True,
        tokenizer: Any = None,
        targets: str | Iterable[str] = ALL_LINEAR,
        exclude: str | Iterable[str] | None = None,
        plan_file: str | Path | None = None,
        overwrite: bool = False,
    ) -> None:
        self.settings = settings = fitted_window(settings, model)
        self.file_format = FILE_FORMATS[settings.reader]
        self.model = model
        self.tokenizer = tokenizer
        self.folder = Path(folder)
        self.saves = saves
        self.overwrite = overwrite
        if self.file_format.file is not None and not saves:
            raise ValueError(f"reader={settings.reader} writes {self.file_format.file} into out_dir: give out_dir")
        self.run_folder = _checked_folder(self.folder, model, settings, overwrite)
        self.file_format.check(model, tokenizer)
        check_compressible(model, settings.sequence_length)
        self.out_of_reach = describe_out_of_reach(model, targets)
        modules = linear_layers(model, targets, exclude)
        if settings.by_bytes and self.file_format.tables and targets == ALL_LINEAR:
            modules |= embedding_tables(model, exclude)
        self.by_layer = by_decoder_layer(model, modules, tables=settings.by_bytes)
        check_enough_tokens(settings, modules.values())
        self.budget = budget_of(model, modules, settings, tokenizer)
        #: a plan from a file, or what to choose it from
        self.plan_source: CompressPlan | SearchSpace = (
            SearchSpace(modules, settings, self.budget)
            if plan_file is None
            else load_plan(plan_file, model, modules, settings, self.budget)
        )

    def run(self, texts: Any, evaluate_on: Any, plan_only: bool, on_progress: ProgressCallback) -> CompressReport:
        """Take the steps, and write each result to the folder at once; arguments of ``compress``.

        Raises:
            ValueError: if texts do not fit the model, or no choice meets the budget.
        """
        opened = self.run_folder.open(self.settings.measured, overwrite=self.overwrite)
        with opened, os_errors_named(self.folder), eval_mode(self.model):
            return self._run(self._read(texts, evaluate_on, plan_only), plan_only, on_progress)

    def _run(self, corpus: CompressionData, plan_only: bool, on_progress: ProgressCallback) -> CompressReport:
        model, settings, folder, source = self.model, self.settings, self.folder, self.plan_source
        parameters_before, bytes_before = module_parameters(model), stored_bytes(model)
        memory = PeakMemory(next(model.parameters()).device)
        memory.reset()
        ends = [("", time.monotonic())]

        def end_of(phase: str) -> None:
            ends.append((phase, time.monotonic()))

        def report_progress(stage: str, done: int, total: int) -> None:
            on_progress(Progress(STAGES[stage], done, total, stage))

        # calibrate
        calibration = Calibration(
            model, corpus.blocks, self.by_layer, folder / "calibration", settings, corpus.kinds, report_progress
        )
        loss = calibration.loss
        end_of("calibration")

        # measure the candidates, and allocate the budget among layers
        plan = source.plan(calibration) if isinstance(source, SearchSpace) else source
        plan_file = proposal(folder, "plan.json")
        if is_edited(plan_file):
            set_aside(plan_file)
        plan.save(plan_file)
        end_of("plan")

        healing, evaluation, file_bytes = None, None, None
        if plan.replaced and not plan_only:
            evaluate_model = partial(evaluate, model, corpus.evaluation, corpus.elsewhere, settings.passages)
            original = evaluate_model(partial(report_progress, "original")) if settings.evaluate else None
            end_of("original")
            teacher = original_copy(model) if settings.heal_tokens else None

            # fit
            fit_layers_(plan, calibration)
            end_of("fit")

            # heal
            if teacher is not None:
                healing = heal(
                    model, teacher, corpus.healing, settings=settings, folder=folder, on_progress=on_progress
                )
                end_of("heal")
            if settings.by_bytes:
                round_to_half_(model)  # what is evaluated is what is saved

            # evaluate
            if original is not None:
                compressed = evaluate_model(partial(report_progress, "evaluate"))
                evaluation = compressed.compared_with(original, corpus.unseen)
                end_of("evaluation")

        # write
        if not plan_only:
            self._rename_earlier(plan_file)
            plan_file.replace(folder / "plan.json")
            file_bytes = self._write_model() if self.saves else None
        report = CompressReport(
            plan,
            calibration.tokens,
            loss,
            {phase: end - start for (_, start), (phase, end) in itertools.pairwise(ends)},
            corpus=corpus,
            model=model_name(model),
            healing=healing,
            budget=self.budget if isinstance(source, SearchSpace) else None,
            parameters_before=parameters_before,
            bytes_before=bytes_before,
            bytes=bytes_before - sum(round(p.parameters_before * (16 - p.bits) / 8) for p in plan.layers.values()),
            file=self.file_format.file or MODEL,
            file_bytes=file_bytes,
            evaluation=evaluation,
            peak_memory_bytes=memory.read(),
            settings=settings.model_dump(mode="json"),
            out_of_reach=self.out_of_reach,
        )
        values = report.to_dict()
        where = partial(proposal, folder) if plan_only else folder.joinpath
        write_json(where("report.json"), values)
        write_page(where("report.html"), values)
        if file_bytes is not None:  # not earlier: killed before this point, the command resumes from its statistics
            calibration.release()
        return report

    def _read(self, texts: Any, evaluate_on: Any, plan_only: bool) -> CompressionData:
        """Return the texts as token ids that the model embeds."""
        elsewhere = read_elsewhere(evaluate_on, self.tokenizer, self.settings)
        corpus = read_corpus(texts, self.tokenizer, self.settings, plan_only)
        corpus_ids = torch.cat([corpus.blocks, corpus.healing, corpus.evaluation])
        for name, ids in {"the corpus": corpus_ids, **elsewhere}.items():
            check_ids(ids, self.model, name)
        # texts of several kinds calibrate well without samples of the model
        if self.settings.self_sampled and len(corpus.blocks) > 1 and len(set(corpus.kinds)) == 1:
            corpus = with_sampled_text(corpus, self.model, self.folder / "calibration", self.settings.seed)
        return dataclasses.replace(corpus, elsewhere=elsewhere)

    def _rename_earlier(self, plan_file: Path) -> None:
        """Rename results of another plan or other settings. Called late: until then a kill leaves a model its plan."""
        made_by = {"settings": self.settings.model_dump(mode="json"), "plan": fingerprint(plan_file)["sha256"]}
        if made_by != (self.run_folder.read() or {}).get("made"):
            for name in _RESULTS:
                if name != plan_file.name:
                    set_aside(self.folder / name)
        self.run_folder.write(made=made_by)

    def _write_model(self) -> int:
        """Write the model, and the file of its program; return the bytes of the file that is read."""
        file_format, path = self.file_format, self.folder / MODEL
        with at_half_precision(self.model) if self.settings.by_bytes else nullcontext():
            save_pretrained(self.model, path, tokenizer=self.tokenizer)
            if file_format.write is not None:
                path = file_format.write(self.model, self.folder / str(file_format.file), tokenizer=self.tokenizer)
        return sum(file.stat().st_size for file in ([path] if path.is_file() else path.glob("*.safetensors")))


def _checked_folder(folder: Path, model: Any, settings: CompressSettings, overwrite: bool) -> RunFolder:
    """Return the folder of the compression of ``model``.

    Raises:
        ValueError: if it holds that model, other programs' files, or results with other settings than ``settings``.
    """
    source = loaded_from(model)
    original = Path(source).expanduser()
    taken = [folder.resolve(), *((folder / name).resolve() for name in _RESULTS)]
    if source and (original / "config.json").is_file() and original.resolve() in taken:
        raise ValueError(f"{folder} holds the model itself, {original}; give another directory (--out) for the result")
    run_folder = RunFolder(
        folder,
        task="compress",
        record="compress.json",
        names=("calibration", *_RESULTS),
        earlier_records={"plan.json": ("format", "layers"), "calibration/fingerprint.json": ("fingerprint",)},
        settings_of=lambda record: record.get("settings", settings.measured),
    )
    run_folder.check(settings.measured, overwrite=overwrite)
    return run_folder
