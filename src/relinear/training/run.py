"""Run one training from its settings (``train``): build the model, prepare data, fit, and write a results folder."""

import dataclasses
import functools
import math
import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from relinear.activations.shared_context import check_context_is_there
from relinear.data import prepare_data
from relinear.data.corpora import open_corpus
from relinear.data.tasks import RegressionTask, task_of
from relinear.deprecated import overwriting
from relinear.evaluate.losses import perplexity_of
from relinear.hf.vocabulary import check_length_fits
from relinear.models import draw_as_torch_, from_preset, is_preset, locate_model, preset_names
from relinear.settings.messages import did_you_mean
from relinear.surgery import checkpoint
from relinear.surgery.packed import gradient_moments
from relinear.surgery.plan import attach_, replace_
from relinear.surgery.summary import summary
from relinear.system.files import damaged_file_errors, read_json, tensor_digest
from relinear.system.machine import is_first_rank, on_threads
from relinear.system.progress import ProgressCallback, no_progress
from relinear.system.run_folder import RunFolder
from relinear.system.text import gib
from relinear.training.callbacks import read_metrics
from relinear.training.fitting import (
    FILES,
    MAY_DIFFER,
    NonFiniteLossError,
    TrainResult,
    allow_other_ranks_,
    final_validation_loss,
    fit_in_folder,
    rank_count,
    remove_checkpoints,
)
from relinear.training.optim import check_readout, scale_added_, scale_stock_, width_ratio
from relinear.training.settings import TrainSettings

RUN = "run.json"
#: advice in errors about a damaged record
_ADVICE = "choose another directory, or overwrite this one"
#: training sequences, spread over the text, for the gradient moments that rounding uses
_SAMPLES = 64


def train(
    settings: TrainSettings | Mapping[str, Any],
    out_dir: str | Path,
    *,
    overwrite: bool = False,
    resume: bool | None = None,
    callbacks: Iterable[TrainerCallback] = (),
    on_progress: ProgressCallback = no_progress,
) -> TrainResult:
    """Train one model from its settings and write the results to ``out_dir``.

    ``out_dir`` gets ``run.json`` (settings, machine, model, data, status, result), ``metrics.jsonl``,
    ``block_losses.npy`` (the loss of every validation block at the end), the trained model with its tokenizer in
    ``model/``, and checkpoints during the run. Called again with the same settings, it resumes a killed run from its
    last checkpoint and reaches exactly the same result (on one thread, to the last bit). A finished run returns its
    result at once.

    Args:
        settings: ``TrainSettings`` or a mapping of them.
        out_dir: directory of the run, created if it does not exist.
        overwrite: start over; earlier results in ``out_dir`` are renamed: ``model`` becomes ``model.<time>``.
        resume: deprecated; ``resume=False`` is ``overwrite=True``.
        callbacks: further transformers callbacks.
        on_progress: called with a ``Progress`` after every step, evaluation and checkpoint.

    Returns:
        The run's result: losses in nats per token, tokens per second, memory in bytes.

    Raises:
        ValueError: for wrong settings, before anything is written; if ``out_dir`` has another run, or other programs'
            files under the run's names, or if another process works in it; ``NonFiniteLossError`` if the loss becomes
            NaN or explodes.
        OSError: if ``out_dir`` cannot be written.

    Examples:
        >>> settings = {"model": "tiny", "operators": {"all-linear": "low_rank:rank=8"}, "steps": 2}
        >>> settings["data"] = {"max_validation_tokens": 2048}
        >>> relinear.train(settings, "run").steps
        2
    """
    settings = TrainSettings.load(settings)
    out_dir = Path(out_dir)
    overwrite = overwriting(overwrite, resume)
    folder = run_folder(out_dir, settings, overwrite)
    values = settings.model_dump(mode="json")
    if overwrite and os.path.exists(settings.model) and out_dir.resolve() in Path(settings.model).resolve().parents:
        raise ValueError(f"{settings.model}, which the run starts from, would be renamed; choose another directory")
    if folder.check(values, overwrite=overwrite) and (finished := read_result(out_dir)):
        return finished
    _check_before_reading(settings)
    data = prepare_data(settings.data)
    model = build_model(settings, data.vocab_size)
    objective = None if settings.objective_config is None else settings.objective_config.prepare(model)
    run = functools.partial(
        fit_in_folder,
        model,
        data,
        settings,
        objective=objective,
        out_dir=out_dir,
        resume=not overwrite,
        callbacks=callbacks,
        on_progress=on_progress,
    )
    if not is_first_rank():  # the first rank locks the folder and writes the record; the others only train
        return run()
    with folder.open(values, overwrite=overwrite) as record:
        if record and (finished := read_result(out_dir)):  # another process finished it meanwhile
            return finished
        facts = run_facts(model, data)
        folder.write(**facts)
        try:
            result = run()
        except ValueError as error:
            diverged = isinstance(error, NonFiniteLossError)
            folder.write(**facts | {"status": "failed", "error": str(error), "diverged": diverged})
            raise
        if settings.bits is not None:
            with tempfile.TemporaryDirectory() as temporary:
                target = folder.take("model") if settings.save_model else Path(temporary)
                result = _store_in_bits(model, data, settings, result, target)
        elif settings.save_model:
            checkpoint.save_pretrained(model, folder.take("model"), tokenizer=data.tokenizer)
        folder.write(**facts | {"status": "done", "result": result.to_dict()})
        if not settings.keep_checkpoint:
            remove_checkpoints(out_dir / "checkpoints")
        return result


def _check_before_reading(settings: TrainSettings) -> None:
    """Raise ValueError or OSError for settings that cannot be trained, as reading the data may take long."""
    open_corpus(settings.data)  # raises if there is no such corpus
    if settings.objective_config is not None:
        settings.objective_config.check()
    if settings.bits is not None and rank_count() > 1:
        raise ValueError("bits needs a run of one process: train on one, or use save_pretrained(bits=) afterwards")
    locate_model(settings.model)  # raises if there is no such model
    if is_preset(settings.model):
        with torch.device("meta"):
            _check_memory(build_model(settings))
    else:
        _check_pretrained(settings)


def _store_in_bits(model: Any, data: Any, settings: TrainSettings, result: TrainResult, target: Path) -> TrainResult:
    """Save the model in ``settings.bits`` bits to ``target``; return ``result`` with the loss of the stored model."""
    indices = range(0, len(data.train), max(1, len(data.train) // _SAMPLES))[:_SAMPLES]
    samples = ({key: value[None].to(model.device) for key, value in data.train[i].items()} for i in indices)
    with on_threads(settings.threads):
        moments = gradient_moments(model, samples)
        checkpoint.save_pretrained(model, target, tokenizer=data.tokenizer, bits=settings.bits, moments=moments)
    size = sum(path.stat().st_size for path in target.glob("*.safetensors"))
    loss = final_validation_loss(checkpoint.from_pretrained(target), data, settings, Path(str(result.out_dir)))
    stored = {"bits": settings.bits, "bytes": size, "loss_before": result.validation_loss}
    return dataclasses.replace(result, validation_loss=loss, perplexity=perplexity_of(loss), stored=stored)


def run_facts(model: Any, data: Any) -> dict[str, Any]:
    """Return what ``run.json`` records besides the settings: facts of the initial model and its data."""
    table = summary(model)
    counts = {"parameters": table.parameters, "flops_per_token": table.flops_per_token}
    return {
        "status": "running",
        "ranks": rank_count(),
        "model": counts | {"initial_sha256": tensor_digest(model.state_dict())},
        "data": data.description,
    }


def run_folder(out_dir: str | Path, settings: TrainSettings, overwrite: bool = False) -> RunFolder:
    """Return the folder of a run; a resumed run may have another number of ranks.

    Raises ValueError if the number of sequences per step would change.
    """
    folder = RunFolder(
        out_dir,
        task="train",
        record=RUN,
        names=("model", *FILES),
        earlier_records={RUN: ("status", "settings", "machine", "model", "data")},
        may_differ=(*MAY_DIFFER, "save_model", "keep_checkpoint"),
        settings_of=lambda record: TrainSettings.upgraded(record.get("settings")),
    )
    record = None if overwrite else folder.read()
    if record is not None and record.get("status") != "done":
        allow_other_ranks_(folder, record, settings.model_dump())
    return folder


def build_model(settings: TrainSettings, vocab_size: int | None = None) -> Any:
    """Return the model of a run, with its attachments and operators, initialised from ``settings.seed``.

    Args:
        settings: settings of the run.
        vocab_size: entries of the tokenizer: a preset is built with it (unless ``model_overrides`` has another), any
            other model is checked against it. None keeps the preset's.

    Raises:
        ValueError: if the model is unknown, too small for the data, or cannot take an operator or an attachment.
    """
    torch.manual_seed(settings.seed)
    model = _stock_model(settings, vocab_size)
    _check_model_matches_data(model, settings, vocab_size)
    ratio = width_ratio(model, settings)
    if is_preset(settings.model):
        scale_stock_(model, ratio, settings.model_init)
    if ratio != 1:
        check_readout(model, ratio)
    stock: set[torch.Tensor] = set(model.parameters())
    for attachment in settings.attachment_configs:
        attach_(model, attachment)
    if settings.operators:
        replace_(model, settings.operator_configs, layers=settings.layers, exclude=settings.exclude, init=settings.init)
    scale_added_(model, ratio, stock, fitted=settings.init == "from_weight")
    check_context_is_there(model)
    return model


def _stock_model(settings: TrainSettings, vocab_size: int | None) -> Any:
    name = settings.model
    locate_model(name)  # raises if there is no such model
    if is_preset(name):
        overrides = {} if vocab_size is None else {"vocab_size": vocab_size}
        model = from_preset(name, **overrides | settings.model_overrides)
        if settings.model_init == "torch":
            draw_as_torch_(model)
        return model
    _check_pretrained(settings)
    model = checkpoint.from_pretrained(name)
    return model if settings.dtype == "pure_bfloat16" else model.float()


def _check_pretrained(settings: TrainSettings) -> None:
    """Raise ValueError if the settings initialise a model that is not a preset."""
    if settings.model_overrides or settings.model_init != "config":
        setting = "model_overrides" if settings.model_overrides else f"model_init={settings.model_init!r}"
        suggestion = did_you_mean(settings.model, preset_names())
        raise ValueError(f"{setting} needs a preset, and {settings.model!r} is none; {suggestion}")


def _check_memory(model: Any) -> None:
    """Raise if weights, gradients and Adam's states exceed the machine's memory."""
    import psutil

    needed = 16 * sum(parameter.numel() for parameter in model.parameters())
    total = psutil.virtual_memory().total + psutil.swap_memory().total
    if not torch.cuda.is_available() and needed > total:
        raise ValueError(
            f"training the model of {needed // 16:,} parameters takes {gib(needed)}, and this machine has "
            f"{gib(total)}; choose smaller sizes"
        )


def _check_model_matches_data(model: Any, settings: TrainSettings, vocab_size: int | None) -> None:
    embedding = model.get_input_embeddings()  # None if a model reads vectors
    entries = 0 if embedding is None else embedding.num_embeddings
    if (task := task_of(settings.data.data)) is not None and isinstance(task, RegressionTask) != (embedding is None):
        kind, read = ("tokens", "vectors") if embedding is None else ("vectors", "tokens")
        raise ValueError(f"data={settings.data.data!r} are {kind}, but model={settings.model!r} reads {read}")
    if vocab_size is not None and vocab_size > entries:
        raise ValueError(
            f"the tokenizer {settings.data.tokenizer!r} has {vocab_size} entries, model {settings.model!r} embeds "
            f"{entries}; use the model's tokenizer, or (for a preset) model_overrides: vocab_size"
        )
    check_length_fits(settings.data.sequence_length, model)
    if settings.objective_config is not None:
        settings.objective_config.check_length(settings.data.sequence_length)


def read_result(out_dir: str | Path) -> TrainResult | None:
    """Read the result of a finished run from its directory; None if the run has not finished."""
    out_dir = Path(out_dir)
    record = _read_record(out_dir)
    if record is None or record.get("status") != "done":
        return None
    curve = read_metrics(out_dir / "metrics.jsonl")
    with damaged_file_errors(out_dir / RUN, "the record of a run whose result is damaged", _ADVICE):
        return TrainResult(**record["result"] | {"out_dir": out_dir, "curve": curve})


def initial_values(out_dir: str | Path, vocab_size: int | None) -> dict[str, torch.Tensor] | None:
    """Draw a run's initial values again from its seed and return them by name.

    None if the run's record has no digest of them, or if the values drawn here have another digest.
    """
    record = _read_record(Path(out_dir)) or {}
    digest = (record.get("model") or {}).get("initial_sha256")
    if digest is None:
        return None
    try:
        values = build_model(TrainSettings.load(record["settings"], is_record=True), vocab_size).state_dict()
    except (ValueError, OSError):  # a pretrained model that was moved or removed
        return None
    return values if tensor_digest(values) == digest else None


def read_final_loss(out_dir: str | Path) -> float | None:
    """Read the validation loss of a finished run, infinite if it diverged; None if it has not finished."""
    record = _read_record(Path(out_dir))
    if record is not None and record.get("diverged"):
        return math.inf
    result = read_result(out_dir)
    return None if result is None else result.validation_loss


def _read_record(out_dir: Path) -> dict[str, Any] | None:
    path = out_dir / RUN
    if not path.exists():
        return None
    with damaged_file_errors(path, "not a record of a run", _ADVICE):
        record = read_json(path)
        return record | {"settings": dict(**record["settings"])}  # raises unless they are an object
