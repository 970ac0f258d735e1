"""Extend transformers' Trainer: auxiliary losses by name, bf16, exact order of data, safe checkpoints."""

# Legend: B batch, T tokens

import contextlib
import math
import shutil
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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

from relinear.contract.auxiliary_losses import IGNORED_LABEL, aux_losses, operator_metrics, share_of_batch
from relinear.contract.inference import caching_for_inference
from relinear.contract.objective import GuidedTraining
from relinear.evaluate.losses import token_losses
from relinear.hf.config_record import sync_record
from relinear.hf.modes import eval_mode
from relinear.system.files import MANIFEST, atomic_path, check_manifest, os_errors_named, sync_files, write_manifest
from relinear.system.grouped import grouped
from relinear.system.run_folder import set_aside
from relinear.training.fitting import NonFiniteLossError, remove_checkpoints, training_device, training_dtype
from relinear.training.optim import build_optimizer, build_schedule
from relinear.training.settings import FitSettings

_RANK_SEEDS = 2_654_435_761  # far from one rank's seed to the next: seeds that users choose are close together
#: parts that every checkpoint has (DeepSpeed keeps its own in one folder)
_ALWAYS = (
    ("optimizer*", "global_step*"),
    ("scheduler.pt", "global_step*"),
    ("trainer_state.json",),
    ("rng_state*.pth",),
)
#: a training loss above this multiple of the first one (or of 1 nat, if that is more) counts as diverged
DIVERGENCE_FACTOR = 100.0
#: seconds after which an evaluation reports its progress
_REPORT_AFTER_S = 2.0
_PARTIAL = ".partial"  # checkpoints are written here and renamed when they are whole


class SteadySampler(Sampler[int]):
    """Give indices for a whole run: random orders of the dataset in turn, each from ``(seed, round)`` alone.

    There is no epoch boundary, so every batch is full (compiled code sees one shape) and resuming is skipping.

    Args:
        size: samples in the dataset.
        total: indices to yield.
        seed: of the orders.
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
    """Check a checkpoint against its checksums: a run resumed from incomplete state would look like any other.

    An older one without a manifest is accepted with a warning.

    Raises:
        ValueError: if a part is missing or was changed, by name.
    """
    advice = "or start over with overwrite=True (--overwrite)"
    try:
        noted = check_manifest(checkpoint)
    except ValueError as error:
        raise ValueError(f"cannot go on from {checkpoint}: {error}, {advice}") from None
    if noted is None:
        missing = [names[0] for names in _ALWAYS if not any(list(checkpoint.glob(name)) for name in names)]
        if missing:
            raise ValueError(f"cannot go on from {checkpoint}: it lacks {', '.join(missing)}; restore it, {advice}")
        warnings.warn(f"{checkpoint} has no manifest: that its parts are whole cannot be checked", stacklevel=2)


def last_checkpoint(out_dir: str | Path) -> Path | None:
    """Return the newest complete checkpoint below ``out_dir``, or None.

    One without a manifest is of an earlier version, and counts only if none has one.
    """
    paths = [path for path in Path(out_dir).glob("checkpoint-*") if path.name[11:].isdecimal() and path.is_dir()]
    return max(paths, key=lambda path: ((path / MANIFEST).is_file(), int(path.name[11:])), default=None)


def _arguments(settings: FitSettings, out_dir: Path, device: str) -> TrainingArguments:
    return TrainingArguments(
        output_dir=str(out_dir),
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
        report_to="none",  # see _reporters
    )


def _reporters(settings: FitSettings, folder: Path) -> list[TrainerCallback]:
    """Return transformers' callbacks that ``report_to`` names; tensorboard's files go to ``folder``."""
    try:
        reporters: list[Any] = [reporter() for reporter in get_reporting_integration_callbacks([*settings.report_to])]
    except RuntimeError as error:  # a package is missing
        raise ValueError(f"report_to={', '.join(settings.report_to)}: {error}") from None
    for reporter in reporters:
        if getattr(reporter, "logging_dir", "") is None:  # it would be the working directory before the first step
            reporter.logging_dir = str(folder)
    return reporters


class RelinearTrainer(Trainer):
    """Train any model that returns a loss, with or without operators.

    Beyond transformers' own it draws data in an order that a resumed run continues exactly; groups parameters by their
    roles; computes in bf16 by autocast without copying outputs back to fp32; tracks the auxiliary terms of the loss;
    stops at a loss that is not finite; writes checkpoints all or nothing, and no pickled arguments in them.

    Args:
        model: returns ``loss`` when it is called with a batch of the datasets.
        settings: how to train.
        train_dataset, eval_dataset: map-style datasets of ``{"input_ids": (T,), "labels": (T,)}``.
        out_dir: where checkpoints go.
        callbacks: further transformers callbacks.
        data_collator: makes a batch of samples; stacks tensors by default.
        block_losses: file (npy) for the loss of every validation sample at the end of training; None writes none.
    """

    def __init__(
        self,
        model: nn.Module,
        settings: FitSettings,
        train_dataset: Dataset,
        eval_dataset: Dataset | None,
        out_dir: Path,
        *,
        callbacks: Iterable[TrainerCallback] = (),
        data_collator: Callable | None = None,
        block_losses: Path | None = None,
    ) -> None:
        device = training_device(settings).type
        if eval_dataset is None and settings.eval_every:
            raise ValueError(f"eval_every={settings.eval_every}, but there is no validation data")
        arguments = _arguments(settings, out_dir, device)
        super().__init__(
            model=model,
            args=arguments,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            data_collator=data_collator,
            callbacks=[*callbacks, *_reporters(settings, out_dir.parent / "tensorboard")],
        )
        self.remove_callback(PrinterCallback)
        # Trainer counts the targets of a step by the config's loss_type, which some models (GPT-2) leave open; the loss
        # they then fall back on shifts the labels too, and would come out smaller by 1 / T.
        # Of a module around such a model it would know nothing at all.
        loss = next((f for m in model.modules() if (f := getattr(m, "loss_function", None)) is not None), None)
        self._loss_shifts_labels |= getattr(loss, "_torchdynamo_orig_callable", loss) is ForCausalLMLoss
        self.settings = settings
        self.compute_dtype = training_dtype(settings, self.args.device)
        self.tokens_seen = 0
        self._last_drain = 0
        self._first_loss: float | None = None
        self._terms: dict[str, Tensor] = {}
        self.home = out_dir
        self._block_losses = block_losses
        self._plain_model: Any = model
        self._redirect: Path | None = None
        #: called with the batches of a long evaluation, done and in all
        self.on_evaluating: Callable[[int, int], None] = lambda done, total: None

    def start_from(self, step: int, tokens: int, first_loss: float | None) -> None:
        """Continue the counts of a checkpoint: its step, the tokens seen until then, the run's first loss."""
        self._last_drain, self.tokens_seen, self._first_loss = step, tokens, first_loss

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train with different noise (latents, dropout, drawn positions) on every rank."""
        rank = self.args.process_index
        if rank:  # rank 0 draws as a run of one process does; a resumed run reads each rank's own state
            set_seed((self.settings.seed + _RANK_SEEDS * rank) % 2**32)
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
        """Return the schedule that the settings name."""
        if self.lr_scheduler is None:
            self.lr_scheduler: Any = build_schedule(optimizer or self.optimizer, self.settings)
            self._created_lr_scheduler = True
        return self.lr_scheduler

    # Loss

    def autocast_smart_context_manager(self, cache_enabled: bool | None = True) -> Any:
        """Return the autocast to the compute dtype; accelerate's own also copies the logits back to fp32."""
        if self.compute_dtype == torch.float32 or self.settings.dtype == "pure_bfloat16":
            return contextlib.nullcontext()
        return torch.autocast(self.args.device.type, dtype=self.compute_dtype)

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return the model's loss, and record the auxiliary losses in it by name."""
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        if model.training:
            self._add_terms(inputs, num_items_in_batch)
        return (loss, outputs) if return_outputs else loss

    def _add_terms(self, inputs: dict[str, Any], num_items_in_batch: Any) -> None:
        terms = dict(aux_losses(self._plain_model))
        if isinstance(self._plain_model, GuidedTraining):  # "ce" is the remainder when the others are taken off
            terms |= {name: value for name, value in self._plain_model.terms.items() if name != "ce"}
        if terms:
            kwargs = {**inputs, "num_items_in_batch": num_items_in_batch}
            weighted = num_items_in_batch is not None
            passes = getattr(self, "current_gradient_accumulation_steps", 1)
            share = share_of_batch(kwargs, self._plain_model) * self.args.world_size if weighted else 1 / passes
            for name, value in terms.items():
                key, part = f"aux/{name.rpartition('/')[2]}", value.detach() * share
                self._terms[key] = self._terms[key] + part if key in self._terms else part

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """Run one forward and backward pass; on a CPU, where reading it is free, the loss is checked at once."""
        read = next((inputs[name] for name in ("input_ids", "vectors") if name in inputs), None)
        self.tokens_seen += 0 if read is None else math.prod(read.shape[:2]) * self.args.world_size
        if self.settings.compile == "reduce-overhead":
            torch.compiler.cudagraph_mark_step_begin()
        loss = super().training_step(model, inputs, num_items_in_batch)
        if loss.device.type == "cpu":
            self._check_finite(float(loss), "training loss")
        return loss

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Return 0: FLOPs are computed once per run, not in every step."""
        return 0

    def _check_finite(self, value: float, quantity: str) -> None:
        if not math.isfinite(value):
            raise self._diverged(f"the {quantity} is {value}")

    def _diverged(self, problem: str) -> NonFiniteLossError:
        saved = last_checkpoint(self.home)
        rate = self.settings.learning_rate if self.lr_scheduler is None else self._get_learning_rate()
        state = "no checkpoint was written before" if saved is None else f"the last good checkpoint is {saved}"
        return NonFiniteLossError(
            f"{problem} at step {self.state.global_step + 1} of {self.settings.steps}, with a "
            f"learning rate of {rate:.3g}; try a lower learning_rate, more warmup_steps, a max_grad_norm "
            f"above 0, or dtype='float32'; {state}"
        )

    # Logs and evaluation

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add the loss's terms and the operators' metrics to Trainer's log while training."""
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
        metrics = sums | joined("metric", operator_metrics(self._plain_model), torch.mean)
        if not metrics:
            return {"cross_entropy": loss}
        stacked = self.accelerator.reduce(torch.stack([metrics[name].to(self.args.device) for name in metrics]), "mean")
        out = dict(zip(metrics, stacked.tolist(), strict=True))
        return {"cross_entropy": loss - sum(v for name, v in out.items() if name.startswith("aux/"))} | out

    @torch.no_grad()
    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Return the mean loss for each target token of the validation data, and its exponential, the perplexity.

        Runs uncompiled: another compilation for evaluation mode would cost more than it brings.
        """
        start, model = time.perf_counter(), self._plain_model
        sums = torch.zeros(2, dtype=torch.float64)
        last = self.state.global_step == self.settings.steps and self.args.world_size == 1
        blocks: list[Tensor | None] = []
        eager, lowered = torch.compiler.set_stance("force_eager"), self.autocast_smart_context_manager()
        with eval_mode(model), eager, lowered, caching_for_inference(model):
            loader = self.get_eval_dataloader(eval_dataset)
            bound = math.inf if self.state.global_step else self.settings.eval_start_tokens or math.inf
            for number, inputs in enumerate(loader):
                if number and time.perf_counter() - start > _REPORT_AFTER_S:
                    expected = float(sums[1]) / number * len(loader)
                    self.on_evaluating(number, math.ceil(len(loader) * min(1, bound / expected)))
                inputs = self._prepare_inputs(inputs)
                output = model(**inputs)
                loss = output["loss"] if isinstance(output, dict) else output[0]
                labels = inputs.get("labels")
                rows = len(next(iter(inputs.values())))
                count = rows if labels is None else (labels[..., 1:] != IGNORED_LABEL).sum()
                sums += torch.stack([loss.double() * count, torch.as_tensor(count, dtype=torch.float64)]).cpu()
                if last and self._block_losses is not None:
                    blocks.append(block_losses(output, labels))
                if sums[1] >= bound / self.args.world_size:
                    break
        total, count = self.accelerator.reduce(sums.to(self.args.device), "sum").tolist()
        value = total / max(count, 1)
        self._check_finite(value, "validation loss")
        if self._block_losses is not None:  # before the loss is logged: a run with its last loss has these, too
            write_block_losses(self._block_losses, blocks, value)
        metrics = {
            f"{metric_key_prefix}_loss": value,
            f"{metric_key_prefix}_perplexity": math.exp(min(value, 700.0)),
            f"{metric_key_prefix}_seconds": time.perf_counter() - start,
        }
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    # Checkpoints

    def _get_output_dir(self, trial: Any) -> str:
        return str(self._redirect) if self._redirect else super()._get_output_dir(trial)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Write a checkpoint under a temporary name and rename it, so that a killed run keeps the previous one."""
        for name, parameter in self._plain_model.named_parameters():
            if not bool(torch.isfinite(parameter).all()):
                self._check_finite(float("nan"), f"weight {name}")
        home, name = self.home, f"checkpoint-{self.state.global_step}"
        partial = self._redirect = home / _PARTIAL
        try:
            if self.args.should_save:
                shutil.rmtree(partial, ignore_errors=True)
            self.accelerator.wait_for_everyone()
            with os_errors_named(home / name):
                super()._save_checkpoint(model, trial)
                self.accelerator.wait_for_everyone()
                if self.args.should_save:
                    write_manifest(partial / name, world_size=self.args.world_size)
                    sync_files(partial / name)
                    set_aside(home / name)  # a file of this name is not of this run
                    (partial / name).rename(home / name)
        finally:
            self._redirect = None
            if self.args.should_save:
                shutil.rmtree(partial, ignore_errors=True)
        if self.args.should_save:
            remove_checkpoints(home, keep=name)
        self.accelerator.wait_for_everyone()

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Raise ValueError if the checkpoint lacks weights, where Trainer only warns."""
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
        """Save the model alone, as Trainer would also pickle its arguments."""
        if self.args.should_save:
            save_model(self.model, Path(output_dir or self.home))


def joined(family: str, values: Mapping[str, Tensor], reduce: Callable[..., Tensor]) -> dict[str, Tensor]:
    """Return the operators' metrics, reduced over the operators that share a name."""
    by_name = grouped((f"{family}/{name.rpartition('/')[2]}", value.float()) for name, value in values.items())
    return {name: reduce(torch.stack(members), 0) for name, members in by_name.items()}


def write_block_losses(path: Path, blocks: Sequence[Tensor | None], loss: float) -> None:
    """Write the losses of the validation blocks to ``path`` (npy), if ``loss`` is their mean."""
    present = [block for block in blocks if block is not None]
    if not present or len(present) < len(blocks):
        return
    losses = torch.cat(present)
    # A model's own loss may not be the mean of these.
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
        sync_record(model)
        model.save_pretrained(directory)
    else:
        from safetensors.torch import save_model as save

        save(model, str(directory / "model.safetensors"))
