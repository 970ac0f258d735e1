"""Extend transformers' Trainer: auxiliary losses by name, bf16, resumable order of data, atomic checkpoints."""

# Legend: B batch, T tokens

import contextlib
import math
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, Sampler
from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed
from transformers.integrations import get_reporting_integration_callbacks
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.trainer_callback import PrinterCallback

from relinear.contract.auxiliary_losses import auxiliary_losses_of, operator_metrics
from relinear.contract.inference import caching_for_inference
from relinear.contract.module_state import eval_mode
from relinear.evaluate.losses import perplexity_of, token_losses
from relinear.hf.config_record import finish_surgery_
from relinear.hf.labels import IGNORED_LABEL, share_of_batch
from relinear.hf.training_loss import ModelWithObjective
from relinear.settings.messages import warn_user
from relinear.system.files import MANIFEST, atomic_path, check_manifest, os_errors_named, sync_files, write_manifest
from relinear.system.grouped import grouped
from relinear.system.run_folder import set_aside
from relinear.training.fitting import NonFiniteLossError, autocast_dtype, remove_checkpoints, training_device
from relinear.training.optim import build_optimizer, build_schedule
from relinear.training.settings import FitSettings

_RANK_SEED_STEP = 2_654_435_761  # large, because users choose seeds that are close together
#: a training loss above this multiple of the first one (or of 1 nat, if that is more) counts as diverged
DIVERGENCE_FACTOR = 100.0
#: seconds after which an evaluation reports its progress
_REPORT_AFTER_S = 2.0
_PARTIAL = ".partial"  # checkpoints are written here and renamed when they are complete


class SteadySampler(Sampler[int]):
    """Yield the sample indices of a whole run: one shuffle of the dataset after another, by the seed and its number.

    Batches run across the end of a shuffle, so every batch is full (compiled code sees one shape), and a resumed run
    only skips indices.

    Args:
        size: number of samples in the dataset.
        total: number of indices to yield.
        seed: seed of the shuffles.
    """

    def __init__(self, size: int, total: int, seed: int) -> None:
        self.size, self.total, self.seed = size, total, seed

    def __len__(self) -> int:
        return self.total

    def __iter__(self) -> Iterator[int]:
        for number in range(math.ceil(self.total / self.size)):
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + number)
            order = torch.randperm(self.size, generator=generator)
            yield from order[: self.total - number * self.size].tolist()


def check_checkpoint(checkpoint: Path) -> None:
    """Check a checkpoint against its checksums, as a run that resumes from incomplete state would look normal.

    An older checkpoint without a manifest is accepted with a warning.

    Raises:
        ValueError: if a part is missing or was changed; the message names it.
    """
    try:
        manifest = check_manifest(checkpoint)
    except ValueError as error:
        advice = "or start over with overwrite=True (--overwrite)"
        raise ValueError(f"cannot resume from {checkpoint}: {error}, {advice}") from None
    if manifest is None:
        warn_user(f"{checkpoint} has no manifest, so its parts cannot be checked for damage")


def last_checkpoint(checkpoints_folder: str | Path) -> Path | None:
    """Return the newest complete checkpoint in ``checkpoints_folder``, or None.

    Checkpoints of an earlier version have no manifest, and count only if no checkpoint has one.
    """
    folders = [path for path in Path(checkpoints_folder).glob("checkpoint-*") if path.is_dir()]
    paths = [path for path in folders if path.name[11:].isdecimal()]
    return max(paths, key=lambda path: ((path / MANIFEST).is_file(), int(path.name[11:])), default=None)


def _arguments(settings: FitSettings, checkpoints_folder: Path, device: str) -> TrainingArguments:
    return TrainingArguments(
        output_dir=str(checkpoints_folder),
        max_steps=settings.steps,
        per_device_train_batch_size=settings.batch_size,
        per_device_eval_batch_size=settings.eval_batch_size or settings.batch_size,
        gradient_accumulation_steps=settings.accumulation,
        learning_rate=settings.learning_rate,
        max_grad_norm=settings.max_grad_norm,
        logging_steps=settings.log_every,
        logging_nan_inf_filter=False,  # a NaN must stop the run, not be averaged away
        eval_strategy="steps" if settings.eval_every else "no",
        eval_steps=settings.eval_every or None,
        save_strategy="steps" if settings.save_interval else "no",
        save_steps=settings.save_interval or 500,
        save_total_limit=1,
        seed=settings.seed,
        use_cpu=device == "cpu",
        prediction_loss_only=True,
        remove_unused_columns=False,
        dataloader_pin_memory=device != "cpu",
        disable_tqdm=True,
        report_to="none",  # _reporters adds the callbacks
    )


def _reporters(settings: FitSettings, folder: Path) -> list[TrainerCallback]:
    """Return the transformers callbacks that ``report_to`` names; tensorboard writes to ``folder``."""
    try:
        reporters: list[Any] = [reporter() for reporter in get_reporting_integration_callbacks([*settings.report_to])]
    except RuntimeError as error:  # a package is missing
        raise ValueError(f"report_to={', '.join(settings.report_to)}: {error}") from None
    for reporter in reporters:
        if getattr(reporter, "logging_dir", "") is None:  # None would write to the working directory before step 1
            reporter.logging_dir = str(folder)
    return reporters


class RelinearTrainer(Trainer):
    """Train any model that returns a loss, with or without operators.

    Unlike transformers' Trainer it draws data in an order that a resumed run continues exactly, groups parameters by
    their roles, runs bf16 autocast without copying outputs back to fp32, logs the auxiliary terms of the loss, stops at
    a loss that is not finite, and writes checkpoints atomically and without pickled arguments.

    Args:
        model: returns ``loss`` when it is called with a batch of the datasets.
        settings: how to train.
        train_dataset, eval_dataset: map-style datasets of ``{"input_ids": (T,), "labels": (T,)}``.
        checkpoints_folder: folder of the checkpoints; tensorboard's files go next to it.
        callbacks: further transformers callbacks.
        data_collator: makes a batch from samples; stacks tensors by default.
        block_losses: file (npy) for the loss of every validation sample at the end of training; None writes none.
    """

    def __init__(
        self,
        model: nn.Module,
        settings: FitSettings,
        train_dataset: Dataset,
        eval_dataset: Dataset | None,
        checkpoints_folder: Path,
        *,
        callbacks: Iterable[TrainerCallback] = (),
        data_collator: Callable | None = None,
        block_losses: Path | None = None,
    ) -> None:
        device = training_device(settings).type
        if eval_dataset is None and settings.eval_every:
            raise ValueError(f"eval_every={settings.eval_every}, but there is no validation data")
        arguments = _arguments(settings, checkpoints_folder, device)
        super().__init__(
            model=model,
            args=arguments,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            data_collator=data_collator,
            callbacks=[*callbacks, *_reporters(settings, checkpoints_folder.parent / "tensorboard")],
        )
        self.remove_callback(PrinterCallback)
        # Trainer counts a step's targets by the config's loss_type. Some models (GPT-2) have none: the loss that they
        # use then shifts the labels too, and Trainer would divide it by one target too many in each row.
        # For a module that wraps such a model Trainer has no loss_type at all.
        loss = next((f for m in model.modules() if (f := getattr(m, "loss_function", None)) is not None), None)
        self._loss_shifts_labels |= getattr(loss, "_torchdynamo_orig_callable", loss) is ForCausalLMLoss
        self.settings = settings
        self.autocast_dtype = autocast_dtype(settings, self.args.device)
        self.tokens_seen = 0
        self._last_drain = 0
        self._first_loss: float | None = None
        self._terms: dict[str, Tensor] = {}
        self.checkpoints_folder = checkpoints_folder
        self._block_losses = block_losses
        self._plain_model: Any = model
        self._save_folder: Path | None = None
        #: called during a long evaluation with the number of batches done and of all batches
        self.on_evaluating: Callable[[int, int], None] = lambda done, total: None

    def start_from(self, step: int, tokens: int, first_loss: float | None) -> None:
        """Set the counts of a resumed run: the checkpoint's step, the tokens seen until then, the run's first loss."""
        self._last_drain, self.tokens_seen, self._first_loss = step, tokens, first_loss

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train with different noise (latents, dropout, drawn positions) on every rank."""
        rank = self.args.process_index
        if rank:  # rank 0 keeps the seed of a run of one process; a resumed run restores the state of each rank
            set_seed((self.settings.seed + _RANK_SEED_STEP * rank) % 2**32)
        return super().train(*args, **kwargs)

    # Data

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler:
        dataset: Any = self.train_dataset if train_dataset is None else train_dataset
        per_step = self.settings.batch_size * self.settings.accumulation * self.args.world_size
        return SteadySampler(len(dataset), per_step * self.settings.steps, self.settings.seed)

    # Optimiser

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """Return AdamW or Adam with the groups of ``parameter_groups``."""
        if self.optimizer is None:
            self.optimizer = build_optimizer(model or self._plain_model, self.settings)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Return the learning-rate schedule of the settings."""
        if self.lr_scheduler is None:
            self.lr_scheduler: Any = build_schedule(optimizer or self.optimizer, self.settings)
            self._created_lr_scheduler = True
        return self.lr_scheduler

    # Loss

    def autocast_smart_context_manager(self, cache_enabled: bool | None = True) -> Any:
        """Return autocast as the settings ask; accelerate's would also copy the logits back to fp32."""
        if self.autocast_dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self.args.device.type, dtype=self.autocast_dtype)

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return the model's loss, and sum its auxiliary losses by name for the log."""
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        if model.training:
            self._add_terms(inputs, num_items_in_batch)
        return (loss, outputs) if return_outputs else loss

    def _add_terms(self, inputs: dict[str, Any], num_items_in_batch: Any) -> None:
        terms = dict(auxiliary_losses_of(self._plain_model))
        if isinstance(self._plain_model, ModelWithObjective):  # the log computes "ce" as loss minus the other terms
            terms |= {name: value for name, value in self._plain_model.terms.items() if name != "ce"}
        if terms:
            kwargs = {**inputs, "num_items_in_batch": num_items_in_batch}
            weighted = num_items_in_batch is not None
            passes = getattr(self, "current_gradient_accumulation_steps", 1)
            share = share_of_batch(kwargs, self._plain_model) * self.args.world_size if weighted else 1 / passes
            for name, value in terms.items():
                key = f"aux/{name.rpartition('/')[2]}"
                part = value.detach() * share
                self._terms[key] = self._terms[key] + part if key in self._terms else part

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """Run one forward and backward pass; on a CPU, where reading the loss is free, check it at once."""
        batch = next((inputs[name] for name in ("input_ids", "vectors") if name in inputs), None)
        self.tokens_seen += 0 if batch is None else math.prod(batch.shape[:2]) * self.args.world_size
        if self.settings.compile == "reduce-overhead":
            torch.compiler.cudagraph_mark_step_begin()
        loss = super().training_step(model, inputs, num_items_in_batch)
        if loss.device.type == "cpu":
            self._check_finite(float(loss), "training loss")
        return loss

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Return 0, as FLOPs are computed once per run and not in every step."""
        return 0

    def _check_finite(self, value: float, quantity: str) -> None:
        if not math.isfinite(value):
            raise self._diverged(f"the {quantity} is {value}")

    def _diverged(self, problem: str) -> NonFiniteLossError:
        saved = last_checkpoint(self.checkpoints_folder)
        rate = self.settings.learning_rate if self.lr_scheduler is None else self._get_learning_rate()
        state = "no checkpoint was written before" if saved is None else f"the last good checkpoint is {saved}"
        return NonFiniteLossError(
            f"{problem} at step {self.state.global_step + 1} of {self.settings.steps}, with a "
            f"learning rate of {rate:.3g}; try a lower learning_rate, more warmup_steps, a max_grad_norm "
            f"above 0, or dtype='float32'; {state}"
        )

    # Logs and evaluation

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add the terms of the loss and the operators' metrics to Trainer's log during training."""
        if "loss" in logs:
            self._check_finite(logs["loss"], "training loss")
            self._first_loss = logs["loss"] if self._first_loss is None else self._first_loss
            if logs["loss"] > DIVERGENCE_FACTOR * max(self._first_loss, 1.0):
                raise self._diverged(f"the training loss has grown from {self._first_loss:.4g} to {logs['loss']:.4g}")
            logs.update(self._drain_terms(logs["loss"]))
        super().log(logs, start_time)

    def _drain_terms(self, loss: float) -> dict[str, float]:
        steps = max(self.state.global_step - self._last_drain, 1)
        self._last_drain = self.state.global_step
        sums = {name: value.float() / steps for name, value in self._terms.items()}
        self._terms = {}
        named = operator_metrics(self._plain_model).items()
        by_name = grouped((f"metric/{name.rpartition('/')[2]}", value.float()) for name, value in named)
        metrics = sums | {name: torch.stack(values).mean() for name, values in by_name.items()}
        if not metrics:
            return {"cross_entropy": loss}
        stacked = self.accelerator.reduce(torch.stack([metrics[name].to(self.args.device) for name in metrics]), "mean")
        values = dict(zip(metrics, stacked.tolist(), strict=True))
        auxiliary = sum(value for name, value in values.items() if name.startswith("aux/"))
        return {"cross_entropy": loss - auxiliary} | values

    @torch.no_grad()
    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Return the mean loss per target token of the validation data, and its exponential, the perplexity.

        Runs uncompiled, as compiling for evaluation mode would take longer than it saves.
        """
        start = time.perf_counter()
        model = self._plain_model
        sums = torch.zeros(2, dtype=torch.float64)
        is_final = self.state.global_step == self.settings.steps and self.args.world_size == 1
        blocks: list[Tensor | None] = []
        eager = torch.compiler.set_stance("force_eager")
        autocast = self.autocast_smart_context_manager()
        with eval_mode(model), eager, autocast, caching_for_inference(model):
            loader = self.get_eval_dataloader(eval_dataset)
            max_tokens = math.inf if self.state.global_step else self.settings.eval_start_tokens or math.inf
            for number, inputs in enumerate(loader):
                if number and time.perf_counter() - start > _REPORT_AFTER_S:
                    expected = float(sums[1]) / number * len(loader)
                    self.on_evaluating(number, math.ceil(len(loader) * min(1, max_tokens / expected)))
                inputs = self._prepare_inputs(inputs)
                output = model(**inputs)
                loss = output["loss"] if isinstance(output, dict) else output[0]
                labels = inputs.get("labels")
                rows = len(next(iter(inputs.values())))
                count = rows if labels is None else (labels[..., 1:] != IGNORED_LABEL).sum()
                sums += torch.stack([loss.double() * count, torch.as_tensor(count, dtype=torch.float64)]).cpu()
                if is_final and self._block_losses is not None:
                    blocks.append(block_losses(output, labels))
                if sums[1] >= max_tokens / self.args.world_size:
                    break
        total, count = self.accelerator.reduce(sums.to(self.args.device), "sum").tolist()
        value = total / max(count, 1)
        self._check_finite(value, "validation loss")
        if self._block_losses is not None:  # before the log: a run whose last loss is logged has this file too
            write_block_losses(self._block_losses, blocks, value)
        metrics = {
            f"{metric_key_prefix}_loss": value,
            f"{metric_key_prefix}_perplexity": perplexity_of(value),
            f"{metric_key_prefix}_seconds": time.perf_counter() - start,
        }
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    # Checkpoints

    def _get_output_dir(self, trial: Any) -> str:
        return str(self._save_folder) if self._save_folder else super()._get_output_dir(trial)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Write a checkpoint under a temporary name and rename it, so that a killed run keeps the previous one."""
        for name, parameter in self._plain_model.named_parameters():
            if not bool(torch.isfinite(parameter).all()):
                self._check_finite(float("nan"), f"weight {name}")
        folder, name = self.checkpoints_folder, f"checkpoint-{self.state.global_step}"
        partial = self._save_folder = folder / _PARTIAL
        try:
            if self.args.should_save:
                shutil.rmtree(partial, ignore_errors=True)
            self.accelerator.wait_for_everyone()
            with os_errors_named(folder / name):
                super()._save_checkpoint(model, trial)
                self.accelerator.wait_for_everyone()
                if self.args.should_save:
                    write_manifest(partial / name, world_size=self.args.world_size)
                    sync_files(partial / name)
                    set_aside(folder / name)  # whatever has this name does not belong to this run
                    (partial / name).rename(folder / name)
        finally:
            self._save_folder = None
            if self.args.should_save:
                shutil.rmtree(partial, ignore_errors=True)
        if self.args.should_save:
            remove_checkpoints(folder, keep=name)
        self.accelerator.wait_for_everyone()

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Raise ValueError if the checkpoint lacks weights; Trainer would only warn."""
        absent = set(load_result.missing_keys)
        names: dict[nn.Parameter, set[str]] = {}
        for name, parameter in self._plain_model.named_parameters(remove_duplicate=False):
            names.setdefault(parameter, set()).add(name)
        tied = set(getattr(self._plain_model, "all_tied_weights_keys", {}))
        tied.update(*(shared for shared in names.values() if shared - absent))  # stored under one of their names
        missing, unknown = sorted(absent - tied), sorted(load_result.unexpected_keys)
        if missing or unknown:
            raise ValueError(f"the checkpoint does not fit the model: missing {missing}, unknown {unknown}")
        if absent and hasattr(self._plain_model, "tie_weights"):
            self._plain_model.tie_weights()

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        """Save only the model; Trainer would also pickle its arguments."""
        if self.args.should_save:
            save_model(self.model, Path(output_dir or self.checkpoints_folder))


def write_block_losses(path: Path, blocks: Sequence[Tensor | None], loss: float) -> None:
    """Write the losses of the validation blocks to ``path`` (npy), if ``loss`` is their mean."""
    present = [block for block in blocks if block is not None]
    if not present or len(present) < len(blocks):
        return
    losses = torch.cat(present)
    # The loss that a model returns may not be the mean of its token losses.
    if not math.isclose(float(losses.mean()), loss, rel_tol=1e-2):
        return
    with atomic_path(path) as temporary, temporary.open("wb") as file:
        np.save(file, losses.numpy().astype(np.float32), allow_pickle=False)


def block_losses(output: Any, labels: Tensor | None) -> Tensor | None:
    """Return the mean loss (B,) of each row's next tokens; None if the model predicts none."""
    logits = output.get("logits") if isinstance(output, dict) else None
    if logits is None or labels is None or logits.dim() != 3 or logits.shape[:2] != labels.shape:
        return None
    counted = (labels[:, 1:] != IGNORED_LABEL).sum(1)
    return (token_losses(logits, labels).double().sum(1) / counted).cpu()


def save_model(model: Any, directory: Path) -> None:
    """Save a Hugging Face model by ``save_pretrained``, any other module as a safetensors file of its weights."""
    directory.mkdir(parents=True, exist_ok=True)
    if hasattr(model, "save_pretrained"):
        finish_surgery_(model)
        model.save_pretrained(directory)
    else:
        from safetensors.torch import save_model as save

        save(model, str(directory / "model.safetensors"))
