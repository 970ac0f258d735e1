"""Train a model in place (``fit``), with checkpoints, resuming, metrics and compilation.

``train`` (run.py) and ``fit`` lock a folder and call ``fit_in_folder``, which sets up the model, resumes, evaluates and
calls ``RelinearTrainer.train``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from relinear.contract.module_state import training_modes_restored
from relinear.contract.objective import Objective
from relinear.deprecated import overwriting
from relinear.hf.training_loss import ModelWithObjective
from relinear.surgery.summary import summary
from relinear.system.files import MANIFEST
from relinear.system.machine import PeakMemory, fast_bfloat16, is_first_rank, on_threads
from relinear.system.progress import ProgressCallback, no_progress
from relinear.system.run_folder import RunFolder
from relinear.system.signals import Terminated, on_terminate
from relinear.training.settings import FitSettings

if TYPE_CHECKING:
    from transformers import TrainerCallback

    from relinear.training.callbacks import RunLog, StopOnTerminate
    from relinear.training.trainer import RelinearTrainer

BLOCK_LOSSES = "block_losses.npy"
#: what training writes at the top of its folder
FILES = ("metrics.jsonl", "checkpoints", BLOCK_LOSSES, "latent_moments.json")
#: settings that a continued run may change: they alter neither the weights nor the rows that are logged
MAY_DIFFER: tuple[str, ...] = ("threads", "save_every", "report_to")

# trainer.py takes seconds to import and imports this module, so functions import it.


class NonFiniteLossError(ValueError):
    """Raised when the loss or a weight becomes NaN or infinite, or when the loss explodes."""


@dataclasses.dataclass(frozen=True)
class TrainResult:
    """Result of a training run.

    Attributes:
        validation_loss: validation loss at the end, in nats per token; None without validation data.
        perplexity: exp(``validation_loss``).
        initial_perplexity: perplexity before the first step.
        parameters: number of the model's parameters.
        flops_per_token: FLOPs per token of the forward pass, in linear layers and attached parts.
        tokens_per_second: throughput of training steps, without the first ones, evaluations and checkpoints.
        peak_memory_bytes: the most memory in use during training (of the process, or of the GPU).
        aux: the auxiliary terms of the loss and the operators' measurements in the last row, by name.
        steps: number of optimiser steps done.
        out_dir: folder of metrics.jsonl, run.json and model/; None if nothing was written.
        curve: the rows of metrics.jsonl.
        stored: for a model that was stored in a few bits: its ``bits``, the ``bytes`` of its file of weights, and
            ``loss_before``, the validation loss before it was stored. ``validation_loss`` is that of the stored model.
    """

    validation_loss: float | None
    perplexity: float | None
    initial_perplexity: float | None
    parameters: int
    flops_per_token: int
    tokens_per_second: float | None
    peak_memory_bytes: int
    aux: dict[str, float]
    steps: int
    out_dir: Path | None
    curve: list[dict[str, Any]]
    stored: dict[str, Any] | None = None

    @classmethod
    def of_rows(cls, rows: Sequence[dict[str, Any]], **fields: Any) -> TrainResult:
        """Return the result from rows of metrics.jsonl; ``fields`` adds what the rows do not have."""
        evaluations = [row for row in rows if "perplexity" in row]
        last: dict[str, Any] = next((row for row in reversed(rows) if "loss" in row), {})
        return cls(
            validation_loss=evaluations[-1]["validation_loss"] if evaluations else None,
            perplexity=evaluations[-1]["perplexity"] if evaluations else None,
            initial_perplexity=evaluations[0]["perplexity"] if evaluations and evaluations[0]["step"] == 0 else None,
            aux={key: value for key, value in last.items() if key.startswith(("aux/", "metric/"))},
            curve=list(rows),
            **fields,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the result as JSON values, without the curve (it is in metrics.jsonl)."""
        values = {name: value for name, value in vars(self).items() if name != "curve"}
        return values | {"out_dir": None if self.out_dir is None else str(self.out_dir)}


def _datasets(data: Any) -> tuple[Dataset, Dataset | None]:
    if isinstance(data, tuple) and len(data) == 2:
        train, validation = data
    elif hasattr(data, "train"):
        train, validation = data.train, getattr(data, "validation", None)
    else:
        train, validation = data, None
    if not hasattr(train, "__getitem__") or not hasattr(train, "__len__"):
        raise ValueError(
            f"data must be a map-style dataset, a pair (train, validation), or from relinear.data.prepare_data; got "
            f"{type(data).__name__}"
        )
    if len(train) == 0:
        raise ValueError("the training data has no samples")
    return train, validation if validation is not None and len(validation) > 0 else None


def training_device(settings: FitSettings) -> torch.device:
    """Return the device for these settings on this machine. Raises ValueError if they ask for a missing GPU."""
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device='cuda', but torch sees no GPU here; use device='cpu' or 'auto'")
    return torch.device("cuda" if settings.device != "cpu" and torch.cuda.is_available() else "cpu")


def training_dtype(settings: FitSettings, device: torch.device) -> torch.dtype:
    """Return the dtype of matrix products: the setting, with "auto" resolved for ``device``."""
    if settings.dtype == "auto":
        return torch.bfloat16 if fast_bfloat16(device) else torch.float32
    return torch.float32 if settings.dtype == "float32" else torch.bfloat16


def autocast_dtype(settings: FitSettings, device: torch.device) -> torch.dtype | None:
    """Return the dtype that forward passes run in by autocast; None if they compute in the weights' dtype."""
    dtype = training_dtype(settings, device)
    return None if settings.dtype == "pure_bfloat16" or dtype == torch.float32 else dtype


def prepare_model_(model: Any, settings: FitSettings) -> None:
    """Give the weights the dtype that ``settings`` ask for, and turn gradient checkpointing on if they do."""
    if settings.dtype == "pure_bfloat16":
        model.to(torch.bfloat16)
    if settings.gradient_checkpointing:
        set_gradient_checkpointing(model, True)


def training_step(
    model: Any, ids: Tensor, optimizer: torch.optim.Optimizer, dtype: torch.dtype | None, replayed: bool = False
) -> Callable[[], None]:
    """Return a function that makes a training step: forward, backward and optimiser.

    Args:
        model: the model, in training mode.
        ids: tokens (B, T), which are also the labels.
        optimizer: optimiser of the model's parameters.
        dtype: dtype of autocast; None computes in the weights' dtype.
        replayed: whether steps are CUDA graphs.
    """

    def step() -> None:
        if replayed:
            torch.compiler.cudagraph_mark_step_begin()
        with torch.autocast(ids.device.type, dtype=dtype, enabled=dtype is not None):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@contextlib.contextmanager
def _set_up_for_training(model: Any, settings: FitSettings) -> Iterator[None]:
    """Set threads, precision, checkpointing and compilation of the model for training, and restore them afterwards."""
    from transformers.utils import logging

    use_cache = getattr(getattr(model, "config", None), "use_cache", None)
    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # of writing shards: a run shows its own progress
    prepare_model_(model, settings)
    try:
        with on_threads(settings.threads), training_modes_restored(model), compiled(model, settings.compile):
            yield
    finally:
        if settings.gradient_checkpointing:
            set_gradient_checkpointing(model, False)
        if use_cache is not None:
            model.config.use_cache = use_cache  # Trainer turns it off, which would make generation slow
        if bars:
            logging.enable_progress_bar()


@contextlib.contextmanager
def compiled(model: Any, mode: bool | str = True, **options: Any) -> Iterator[None]:
    """Compile decoder layers and the loss within a ``with`` block; the whole model if it has no such layers.

    Layers of the same class share one compilation, which takes several times less than that of the whole model and runs
    as fast. Modules are compiled in place, so names in checkpoints do not change.

    Args:
        model: any model.
        mode: as ``FitSettings.compile``; False does nothing. With "reduce-overhead" the caller calls
            ``torch.compiler.cudagraph_mark_step_begin`` before each step.
        options: further arguments of ``torch.compile``.
    """
    if not mode:
        yield
        return
    if mode is not True:
        options["mode"] = mode
    from transformers.modeling_layers import GradientCheckpointingLayer

    config: Any = torch._dynamo.config
    # At the default limit of 8, a ninth shape or mode of the same code silently runs uncompiled.
    changes: dict[str, Any] = {"recompile_limit": max(config.recompile_limit, 64)}
    # Operators record auxiliary losses and metrics in the forward pass, and they are read before the backward pass, so
    # checkpointing need not record them again. Without this option, layers that record run uncompiled under it.
    if hasattr(config, "skip_fwd_side_effects_in_bwd_under_checkpoint"):
        changes["skip_fwd_side_effects_in_bwd_under_checkpoint"] = True
    modules: list[Any] = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)] or [model]
    had_custom_loss = "_loss_function" in vars(model)
    loss = model.loss_function if modules != [model] and hasattr(model, "loss_function") else None
    for module in modules:
        module.compile(**options)
    if loss is not None:
        model.loss_function = torch.compile(loss, **options)
    try:
        with config.patch(**changes):
            yield
    finally:
        for module in modules:
            module._compiled_call_impl = None
        if had_custom_loss and loss is not None:
            model.loss_function = loss
        elif loss is not None:
            del model._loss_function


def set_gradient_checkpointing(model: Any, on: bool) -> None:
    """Turn gradient checkpointing on or off. Raises ValueError for a model without it."""
    # With reentrant checkpointing no gradient would flow from auxiliary losses to their parameters.
    for prefix in ("activation", "gradient"):
        method = getattr(model, f"{prefix}_checkpointing_{'enable' if on else 'disable'}", None)
        if method is not None:
            method({"use_reentrant": False}) if on else method()
            return
    raise ValueError(f"{type(model).__name__} has no gradient checkpointing; set gradient_checkpointing=False")


def fit(
    model: nn.Module,
    data: Any,
    settings: FitSettings | None = None,
    *,
    objective: Objective | None = None,
    out_dir: str | Path | None = None,
    overwrite: bool = False,
    resume: bool | None = None,
    callbacks: Iterable[TrainerCallback] = (),
    on_progress: ProgressCallback = no_progress,
    collate: Callable | None = None,
) -> TrainResult:
    """Train ``model`` in place.

    A second call with the same settings and ``out_dir`` resumes from the last checkpoint there.

    Args:
        model: any module that returns ``loss`` (in a dict-like output, or first in a tuple) for a batch, as Hugging
            Face models do; auxiliary losses of its operators are part of that loss.
        data: what ``prepare_data`` returns, a pair (train, validation), or a training dataset; map-style datasets of
            samples such as ``{"input_ids": (T,), "labels": (T,)}``.
        settings: how to train; the defaults of ``FitSettings`` if None.
        objective: minimised in place of the model's own loss: what ``ObjectiveConfig.prepare(model)`` returns, or any
            function (model, batch) -> (loss, its weighted terms by name, the model's output).
        out_dir: directory for fit.json (the settings), metrics.jsonl, checkpoints and block_losses.npy (a language
            model's loss on every validation sample at the end, in order); None writes nothing.
        overwrite: start over; earlier results in ``out_dir`` are renamed: ``checkpoints`` becomes
            ``checkpoints.<time>``.
        resume: deprecated; ``resume=False`` is ``overwrite=True``.
        callbacks: further transformers callbacks.
        on_progress: called with a ``Progress`` after every step, evaluation and checkpoint.
        collate: makes a batch from a list of samples; stacks tensors by default.

    Returns:
        The result. ``model`` is then trained, and in training or evaluation mode as before.

    Raises:
        ValueError: if data or settings do not fit the model; if ``out_dir`` has a fit with other settings, or other
            programs' files under the names that ``fit`` writes; if a part of the checkpoint to resume from is missing
            or changed (before anything has changed).
        NonFiniteLossError: (a ValueError) if the loss becomes NaN or infinite, or grows a hundredfold; the message
            names the last good checkpoint.
        Terminated: (a KeyboardInterrupt) after a SIGTERM, if there is an ``out_dir``, once the current step is saved.

    Examples:
        >>> from relinear.training import FitSettings
        >>> ids = torch.randint(258, (8, 32))
        >>> samples = [{"input_ids": row, "labels": row} for row in ids]
        >>> relinear.fit(relinear.from_preset("tiny"), samples, FitSettings(steps=2, batch_size=4)).steps
        2
    """
    settings = settings or FitSettings()
    overwrite = overwriting(overwrite, resume)
    _datasets(data)  # raises before the folder is touched
    run_context: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    folder: RunFolder | None = None
    if out_dir is not None and is_first_rank():
        values = settings.model_dump(mode="json")
        folder = RunFolder(
            out_dir,
            task="fit",
            record="fit.json",
            names=FILES,
            may_differ=MAY_DIFFER,
            settings_of=lambda record: FitSettings.upgraded(record.get("settings")),
        )
        if not overwrite and (record := folder.read()) is not None:
            allow_other_ranks_(folder, record, values)
        run_context = folder.open(values, overwrite=overwrite)
    with run_context:
        if folder is not None:
            folder.write(ranks=rank_count())
        return fit_in_folder(
            model,
            data,
            settings,
            objective=objective,
            out_dir=out_dir,
            resume=not overwrite,
            callbacks=callbacks,
            on_progress=on_progress,
            collate=collate,
        )


def rank_count() -> int:
    """Return the number of processes that train together."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def allow_other_ranks_(folder: RunFolder, record: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """Allow a run to resume with another number of ranks if ``batch_size`` and ``accumulation`` compensate for it.

    Raises:
        ValueError: if the number of sequences per step would differ.
    """
    before = folder.settings_of(record)
    ranks = record.get("ranks", rank_count())
    if ranks == rank_count() or not isinstance(ranks, int) or not isinstance(before, Mapping):
        return
    expected, actual = (
        values["batch_size"] * values["accumulation"] * count
        for values, count in ((before, ranks), (settings, rank_count()))
    )
    if expected != actual:
        raise ValueError(
            f"{folder.path} holds a run of {ranks} ranks with {expected} sequences in a step, and this would be "
            f"{rank_count()} with {actual}; change batch_size or accumulation to make it {expected}"
        )
    folder.may_differ = (*folder.may_differ, "batch_size", "accumulation")


def fit_in_folder(
    model: nn.Module,
    data: Any,
    settings: FitSettings,
    *,
    objective: Objective | None = None,
    out_dir: str | Path | None,
    resume: bool = True,
    callbacks: Iterable[TrainerCallback] = (),
    on_progress: ProgressCallback = no_progress,
    collate: Callable | None = None,
) -> TrainResult:
    """Run ``fit`` in a folder that the caller has locked, and has emptied unless ``resume``."""
    from relinear.training.callbacks import RunLog, StopOnTerminate
    from relinear.training.trainer import RelinearTrainer

    train_data, validation = _datasets(data)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()) if out_dir is None else out_dir)
        if out_dir is None and settings.save_every is None:
            settings = settings.replace(save_every=0)
        stack.enter_context(_set_up_for_training(model, settings))
        trainer = RelinearTrainer(
            model if objective is None else ModelWithObjective(model, objective),
            settings,
            train_data,
            validation,
            folder / "checkpoints",
            callbacks=callbacks,
            data_collator=collate,
            block_losses=None if out_dir is None else folder / BLOCK_LOSSES,
        )
        log = RunLog(trainer, None if out_dir is None else folder / "metrics.jsonl", on_progress)
        trainer.on_evaluating = log.report_batch
        stop = StopOnTerminate(trainer.accelerator)
        trainer.add_callback(stop)
        trainer.add_callback(log)
        if out_dir is not None:
            stack.enter_context(on_terminate(stop.request))
        return _train_and_summarize(model, trainer, log, stop, resume)


def final_validation_loss(model: nn.Module, data: Any, settings: FitSettings, out_dir: Path) -> float:
    """Return the validation loss of ``model`` as at the end of a run; write the loss of every block to ``out_dir``."""
    from relinear.training.trainer import RelinearTrainer

    losses = out_dir / BLOCK_LOSSES
    with _set_up_for_training(model, settings.replace(compile=False)):
        trainer = RelinearTrainer(model, settings, *_datasets(data), out_dir / "checkpoints", block_losses=losses)
        trainer.state.global_step = settings.steps  # the last evaluation reads the whole validation text
        return trainer.evaluate()["eval_loss"]


def remove_checkpoints(folder: Path, keep: str = "") -> None:
    """Remove a run's checkpoints except ``keep``, and the folder if nothing else is in it.

    Checkpoints are the folders with a manifest, and the hidden folders of unfinished writes and removals.
    """
    complete = [path.parent for path in folder.glob(f"checkpoint-*/{MANIFEST}")]
    hidden = [part for part in folder.glob(".*") if re.fullmatch(r"\.checkpoint-\d+|\.partial", part.name)]
    for part in (part for part in (*complete, *hidden) if part.name != keep):
        with contextlib.suppress(OSError):  # hide it first: a partly removed folder is not a checkpoint
            part = part.rename(folder / f".{part.name.lstrip('.')}")
        shutil.rmtree(part, ignore_errors=True)
    with contextlib.suppress(OSError):
        folder.rmdir()


def _train_and_summarize(
    model: nn.Module, trainer: RelinearTrainer, log: RunLog, stop: StopOnTerminate, resume: bool
) -> TrainResult:
    from accelerate.utils import broadcast_object_list

    from relinear.training.trainer import check_checkpoint, last_checkpoint

    checkpoints = trainer.checkpoints_folder
    checkpoint = last_checkpoint(checkpoints) if resume else None
    if checkpoint is not None and trainer.is_world_process_zero():
        check_checkpoint(checkpoint)
    step = -1 if checkpoint is None else int(checkpoint.name.rpartition("-")[2])
    if trainer.is_world_process_zero():
        log.rewind(step)
    # only the first rank reads the earlier rows, and all ranks must compare with the same first loss
    first_loss = broadcast_object_list([next((row["loss"] for row in log.rows if "loss" in row), None)])[0]
    trainer.start_from(max(step, 0), max((row["tokens"] for row in log.rows), default=0), first_loss)
    has_validation = trainer.eval_dataset is not None
    memory = PeakMemory(trainer.args.device)
    memory.reset()
    log.report("prepare", max(step, 0))
    if checkpoint is None and has_validation:
        trainer.evaluate()
    trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    steps = trainer.state.global_step
    if stop.stopped:
        raise Terminated(f"ended by SIGTERM after step {steps}, which is saved in {last_checkpoint(checkpoints)}")
    if has_validation and not any(row["step"] == steps and "perplexity" in row for row in log.rows):
        trainer.evaluate()
    log.report("done", steps)
    table = summary(model)
    return TrainResult.of_rows(
        log.rows,
        parameters=table.parameters,
        flops_per_token=table.flops_per_token,
        tokens_per_second=log.tokens_per_second,
        peak_memory_bytes=memory.read(),
        steps=steps,
        out_dir=None if log.path is None else log.path.parent,
    )
