"""Compress a model: calibrate, plan, fit, save."""

from __future__ import annotations

import dataclasses
import itertools
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch

from relinear.compression.budget import stored_bytes
from relinear.compression.calibrate import Calibration, StageCallback
from relinear.compression.candidates import SearchSpace, fit_layers_
from relinear.compression.checksums import is_edited
from relinear.compression.corpus import CompressionData, read_corpus, read_elsewhere, with_sampled_text
from relinear.compression.evaluation import compared, observe
from relinear.compression.healing import HealReport, heal, original_copy
from relinear.compression.plan import CompressPlan
from relinear.compression.readers import READERS, budget_of
from relinear.compression.report import CompressReport, write_page
from relinear.compression.settings import CompressSettings
from relinear.compression.task import (
    Task,
    check_compressible,
    check_ids,
    fitted_window,
    linear_layers,
    tables_of,
    unreached,
)
from relinear.contract.module_state import at_half_precision, eval_mode, round_to_half_
from relinear.hf.model_config import model_name
from relinear.surgery.checkpoint import save_pretrained
from relinear.surgery.patterns import ALL_LINEAR
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
    "evaluation": "running the compressed model",
    "heal": "healing",
}
#: what a plan leads to
_RESULTS = ("plan.json", "report.json", "report.html", MODEL, *filter(None, (r.file for r in READERS.values())))


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
        tokenizer: of the model, needed for texts; saved with the model.
        targets, exclude: patterns of the linear layers that may be replaced; by default all but the head.
        settings: ``CompressSettings`` or a mapping of its fields.
        plan_file: a plan to apply, in place of a new one.
        plan_only: stop after the plan; the model stays unchanged. If ``out_dir`` already holds a model, plan and report
            are called ``proposed-*``.
        evaluate_on: texts of other kinds, by name, that the result is also evaluated on; of each ``evaluation_tokens``.
        out_dir: folder of statistics, plan, state, report (``report.json``, ``report.html``) and model. Killed and
            called again with the same arguments, it resumes. Other candidates, and budgets of the same unit and reader,
            use the same statistics; the model of the earlier one is renamed: ``model.<time>``. None writes nothing.
        overwrite: start over, and rename what is in the way in ``out_dir``, statistics included.
        on_progress: called with a ``Progress``, whose ``stage`` is a key of ``STAGES``.

    Returns:
        The report: what every layer became, sizes in bytes, losses in nats per token, seconds by phase. ``model`` has
        changed in place, unless only a plan was asked for.

    Raises:
        ValueError: if the budget cannot be met, the corpus is too short or of another vocabulary, the model is
            quantised, has weights that are not finite or cannot be run layer by layer, or ``out_dir`` holds results for
            another model or corpus, or other programs' files under its names.

    Examples:
        >>> model, ids = relinear.from_preset("tiny", num_hidden_layers=1), torch.randint(258, (8, 128))
        >>> settings = {"tokens": 512, "sequence_length": 64, "evaluate": False}
        >>> report = relinear.compress(model, ids, bits=4.25, targets="up_proj", settings=settings)
        >>> report.bytes < report.bytes_before
        True
    """
    by_name = settings.model_dump(exclude_unset=True) if isinstance(settings, CompressSettings) else settings
    options = dict(by_name or {})
    options |= {name: value for name, value in {"bits": bits, "size": size, "keep": keep}.items() if value is not None}
    resolved = CompressSettings.load(options, "compress settings")
    with prepared(
        model,
        resolved,
        tokenizer=tokenizer,
        targets=targets,
        exclude=exclude,
        plan_file=plan_file,
        out_dir=out_dir,
        overwrite=overwrite,
    ) as job:
        return job.run(texts, evaluate_on or {}, plan_only, on_progress)


@contextmanager
def prepared(
    model: Any,
    settings: CompressSettings,
    *,
    tokenizer: Any = None,
    targets: str | Iterable[str] = ALL_LINEAR,
    exclude: str | Iterable[str] | None = None,
    plan_file: str | Path | None = None,
    out_dir: str | Path | None = None,
    overwrite: bool = False,
) -> Iterator[_Job]:
    """Separate the experts of ``model`` within the block, and give its compression; arguments of ``compress``.

    Raises:
        ValueError: for all that can be refused before texts are read.
    """
    settings = fitted_window(settings, model)
    reader = READERS[settings.reader]
    if reader.file is not None and out_dir is None:
        raise ValueError(f"reader={settings.reader}: {reader.file} is written into out_dir, and none is given: give it")
    source = getattr(model, "name_or_path", "")
    run_folder = None if out_dir is None else check_folder(out_dir, settings, source, overwrite=overwrite)
    reader.check(model, tokenizer)
    check_compressible(model, settings.sequence_length)
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory()) if run_folder is None else run_folder.path
        stack.enter_context(separate_experts(model))
        left = unreached(model, targets)
        modules = linear_layers(model, targets, exclude)
        if settings.by_bytes and reader.tables and targets == ALL_LINEAR:
            modules |= tables_of(model, exclude)
        task = Task(model, modules, settings, Path(folder), left)
        yield _Job(task, tokenizer, plan_file, run_folder, overwrite)


def check_folder(
    out_dir: str | Path, settings: CompressSettings | None, source: str, *, overwrite: bool = False
) -> RunFolder:
    """Return the folder of a compression of the model ``source``, a name or path.

    Raises:
        ValueError: if it holds that model, other programs' files, or results with other settings than ``settings``.
    """
    folder, original = Path(out_dir), Path(source).expanduser()
    taken = [folder.resolve(), *((folder / name).resolve() for name in _RESULTS)]
    if source and (original / "config.json").is_file() and original.resolve() in taken:
        raise ValueError(f"{folder} holds the model itself, {original}; give another directory (--out) for the result")
    measured = {} if settings is None else settings.measured
    run_folder = RunFolder(
        folder,
        task="compress",
        record="compress.json",
        names=("calibration", *_RESULTS),
        earlier_records={"plan.json": ("format", "layers"), "calibration/fingerprint.json": ("fingerprint",)},
        settings_of=lambda record: record.get("settings", measured),
    )
    if settings is None and not overwrite:
        run_folder.check_ours()
    else:
        run_folder.check(measured, overwrite=overwrite)
    return run_folder


def proposal(folder: Path, name: str) -> Path:
    """Return the path for ``name`` of a plan that is not applied (yet); a model in ``folder`` keeps its own file."""
    return folder / (f"proposed-{name}" if (folder / MODEL).is_dir() else name)


@dataclasses.dataclass
class _Job:
    """Run one compression: plan, fit, save. Raises ValueError if no choice meets the budget."""

    task: Task
    tokenizer: Any
    plan_file: str | Path | None
    run_folder: RunFolder | None
    overwrite: bool

    def __post_init__(self) -> None:
        self.model, self.settings, self.folder = self.task.model, self.task.settings, self.task.folder
        self.budget = budget_of(self.model, self.task.modules, self.settings, self.tokenizer)
        self.space = SearchSpace(self.task, self.budget)
        self.loaded_plan = None if self.plan_file is None else self.space.load_plan(self.plan_file)
        if self.loaded_plan is None:
            self.space.check()
        #: when each phase ended
        self.ends: dict[str, float] = {}

    def _lap(self, phase: str) -> None:
        self.ends[phase] = time.monotonic()

    def run(self, texts: Any, evaluate_on: Any, plan_only: bool, on_progress: ProgressCallback) -> CompressReport:
        """Read texts, calibrate, plan and, unless ``plan_only``, apply the plan; arguments of ``compress``."""

        def report(stage: str, done: int, total: int) -> None:
            on_progress(Progress(STAGES[stage], done, total, stage))

        opened = self.run_folder and self.run_folder.open(self.settings.measured, overwrite=self.overwrite)
        with opened or nullcontext(), os_errors_named(self.folder), eval_mode(self.model):
            elsewhere = read_elsewhere(evaluate_on, self.tokenizer, self.settings)
            corpus = read_corpus(texts, self.tokenizer, self.settings, plan_only)
            corpus = dataclasses.replace(corpus, elsewhere=elsewhere)
            corpus_ids = torch.cat([corpus.blocks, corpus.healing, corpus.evaluation])
            for name, ids in {"the corpus": corpus_ids, **elsewhere}.items():
                check_ids(ids, self.model, name)
            # texts of several kinds calibrate well without samples of the model
            if self.settings.self_sampled and len(corpus.blocks) > 1 and len(set(corpus.kinds)) == 1:
                corpus = with_sampled_text(corpus, self.model, self.folder / "calibration", self.settings.seed)
            return self._run(corpus, plan_only, report)

    def _run(self, corpus: CompressionData, plan_only: bool, on_progress: StageCallback) -> CompressReport:
        """Run the steps; write each result to the folder at once."""
        memory = PeakMemory(next(self.model.parameters()).device)
        memory.reset()
        self._lap("")
        parameters_before, bytes_before = module_parameters(self.model), stored_bytes(self.model)
        calibration = self.task.calibrate(corpus.blocks, corpus.kinds, on_progress)
        loss = calibration.loss
        self._lap("calibration")
        plan = self.loaded_plan or self.space.plan(calibration)
        if is_edited(place := proposal(self.folder, "plan.json")):
            set_aside(place)
        plan.save(place)
        self._lap("plan")
        healing, evaluation, file_bytes = None, None, None
        if not plan_only:
            if plan.replaced:
                healing, evaluation = self._make(corpus, calibration, plan, on_progress)
            # not earlier: if killed before this point, an existing model must keep its own plan
            if self.run_folder is not None:
                self._rename_earlier(self.run_folder, place)
            place.replace(self.folder / "plan.json")
            file_bytes = None if self.run_folder is None else self._save()
        report = CompressReport(
            plan,
            calibration.tokens,
            loss,
            {phase: end - start for (_, start), (phase, end) in itertools.pairwise(self.ends.items())},
            corpus=corpus,
            model=model_name(self.model),
            healing=healing,
            budget=self.budget if self.loaded_plan is None else None,
            parameters_before=parameters_before,
            bytes_before=bytes_before,
            bytes=bytes_before - sum(round(p.parameters_before * (16 - p.bits) / 8) for p in plan.layers.values()),
            file=READERS[self.settings.reader].file or MODEL,
            file_bytes=file_bytes,
            evaluation=evaluation,
            peak_memory_bytes=memory.read(),
            settings=self.settings.model_dump(mode="json"),
            left=self.task.left,
        )
        values = report.to_dict()
        where = partial(proposal, self.folder) if plan_only else self.folder.joinpath
        write_json(where("report.json"), values)
        write_page(where("report.html"), values)
        if file_bytes is not None:  # not earlier: killed before this point, the command resumes from its statistics
            calibration.release()
        return report

    def _rename_earlier(self, run_folder: RunFolder, plan_file: Path) -> None:
        """Rename results of another plan or other settings before the new ones are written."""
        made_by = {"settings": self.settings.model_dump(mode="json"), "plan": fingerprint(plan_file)["sha256"]}
        if made_by != (run_folder.read() or {}).get("made"):
            for name in _RESULTS:
                if name != plan_file.name:
                    set_aside(self.folder / name)
        run_folder.write(made=made_by)

    def _save(self) -> int:
        """Write the model, and the file of its reader; return the bytes of the file that is read."""
        reader, path = READERS[self.settings.reader], self.folder / MODEL
        with at_half_precision(self.model) if self.settings.by_bytes else nullcontext():
            save_pretrained(self.model, path, tokenizer=self.tokenizer)
            if reader.write is not None:
                path = reader.write(self.model, self.folder / str(reader.file), tokenizer=self.tokenizer)
        return sum(file.stat().st_size for file in ([path] if path.is_file() else path.glob("*.safetensors")))

    def _make(
        self, corpus: CompressionData, calibration: Calibration, plan: CompressPlan, on_progress: StageCallback
    ) -> tuple[HealReport | None, dict[str, Any] | None]:
        """Apply the plan and heal; compare the result with the original if the settings say so."""
        settings = self.settings
        observe_model = partial(observe, self.model, corpus.evaluation, corpus.elsewhere, settings.passages)
        original = observe_model(partial(on_progress, "original")) if settings.evaluate else None
        self._lap("original")
        teacher = original_copy(self.model) if settings.heal_tokens else None
        fit_layers_(self.task, plan, calibration)
        self._lap("fit")
        healing = None
        if teacher is not None:
            healing = heal(
                self.model,
                teacher,
                corpus.healing,
                settings=settings,
                folder=self.folder,
                on_progress=lambda progress: on_progress(progress.stage, progress.done, progress.total),
            )
            self._lap("heal")
        if settings.by_bytes:
            round_to_half_(self.model)  # what is evaluated is what is saved
        if original is None:
            return healing, None
        compressed = observe_model(partial(on_progress, "evaluation"))
        self._lap("evaluation")
        return healing, compared(original, compressed, corpus.unseen)
