"""Define the settings of training and check that they fit each other."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, model_validator

from relinear.contract.attachment import AttachmentConfig
from relinear.contract.config import Config
from relinear.contract.objective import ObjectiveConfig
from relinear.contract.operator import Init, OperatorConfig
from relinear.data import DataSettings
from relinear.settings.base import Batch, Patterns, PositiveInt, Seed, Settings, Threads

_Share = Annotated[float, Field(ge=0, lt=1)]
Schedule = Literal["onecycle", "cosine", "noam", "constant"]


class FitSettings(Settings):
    """Settings of ``fit``: those of training that do not depend on model and data.

    Attributes:
        steps: number of optimiser steps.
        batch_size: sequences in a forward pass (on each rank).
        accumulation: forward passes to an optimiser step; ``batch_size * accumulation`` sequences make a step.
        optimizer: "adamw" (decoupled weight decay) or "adam" (decay added to the gradient).
        learning_rate: the peak of the schedule.
        schedule: "cosine" down to ``min_lr_ratio`` of the peak, "onecycle", "noam" (inverse square root) or "constant",
            all after ``warmup_steps``.
        warmup_steps: steps of the warm-up; None takes ``warmup_ratio``.
        warmup_ratio: warm-up as a share of the steps; None is a tenth (onecycle: three tenths, its own default).
        min_lr_ratio: the learning rate at the end of a cosine, as a share of the peak.
        weight_decay: weight decay of matrices; norms, biases and embeddings have none.
        decay_embeddings: decay embeddings as well, those of attached parts included, as code does that decays every
            parameter of two dimensions.
        betas: decay rates of Adam's running means of gradients and of their squares.
        eps: the constant in the denominator of Adam's update.
        max_grad_norm: a gradient of a larger norm is scaled down to this one; 0 turns this off.
        parametrization: "standard", or "mup", the maximal update parametrisation for Adam: the initial standard
            deviations and learning rates of matrices fall with their fan-in, so that the best rate at one width is
            about the best at others (see ``docs/training.md``). ``fit`` keeps the initialisation of the model.
        parametrization_base_width: the width of the model (``hidden_size``) at which "mup" is the standard.
        dtype: "bfloat16" computes in bf16 with fp32 weights (autocast), "pure_bfloat16" holds weights and optimiser
            states in bf16 as well, "auto" is "bfloat16" where the processor has units for it, else "float32".
        compile: run the model through ``torch.compile``; costs a minute at first, pays off over long runs. On a GPU
            "reduce-overhead" replays each step as CUDA graphs, without the time that launching kernels takes.
        gradient_checkpointing: recompute activations in the backward pass; saves memory, costs about a third of time.
        seed: seed of the order of the data and of the noise that the model draws; in ``train`` also of the model's
            initialisation. Each rank draws different noise.
        threads: number of CPU threads; with one, runs repeat to the last bit; None leaves torch's choice.
        device: "auto" is the GPU if there is one.
        eval_every: steps between evaluations; 0 evaluates only before the first step and at the end.
        log_every: steps between rows of metrics.
        save_every: steps between checkpoints; 0 saves none, None every tenth of the run, but not more often than every
            100 steps.
        eval_batch_size: sequences in an evaluation pass; None takes ``batch_size``.
        eval_start_tokens: validation tokens to evaluate on before the first step; None takes all.
        report_to: names of transformers' reporting integrations ("tensorboard", "wandb", ...).
    """

    steps: int = Field(default=1000, gt=0, le=10**12)
    batch_size: Batch = 16
    accumulation: PositiveInt = 1
    optimizer: Literal["adamw", "adam"] = "adamw"
    learning_rate: float = Field(default=1e-3, gt=0)
    schedule: Schedule = "cosine"
    warmup_steps: int | None = Field(default=None, ge=0)
    warmup_ratio: _Share | None = None
    min_lr_ratio: float = Field(default=0.1, ge=0, le=1)
    weight_decay: float = Field(default=0.1, ge=0)
    decay_embeddings: bool = False
    betas: tuple[_Share, _Share] = (0.9, 0.95)
    eps: float = Field(default=1e-8, gt=0)
    max_grad_norm: float = Field(default=1.0, ge=0)
    parametrization: Literal["standard", "mup"] = "standard"
    parametrization_base_width: PositiveInt = 64
    dtype: Literal["auto", "float32", "bfloat16", "pure_bfloat16"] = "auto"
    compile: Literal[False, True, "reduce-overhead"] = False
    gradient_checkpointing: bool = False
    seed: Seed = 0
    threads: Threads | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"
    eval_every: int = Field(default=0, ge=0)
    log_every: PositiveInt = 10
    save_every: int | None = Field(default=None, ge=0)
    eval_batch_size: Batch | None = None
    eval_start_tokens: PositiveInt | None = None
    report_to: Patterns = ()

    @model_validator(mode="after")
    def _warmup_fits(self) -> FitSettings:  # a method of its own: settings without steps override it
        if self.warmup_steps is not None and self.warmup_steps >= self.steps:
            raise ValueError(
                f"warmup_steps={self.warmup_steps} must be below steps={self.steps}, or the learning rate never "
                "reaches its peak; see warmup_ratio"
            )
        return self

    @model_validator(mode="after")
    def _consistent(self) -> FitSettings:
        if self.compile == "reduce-overhead" and self.accumulation > 1:
            raise ValueError(
                "compile='reduce-overhead' replays CUDA graphs, which overwrite gradients, so "
                f"accumulation={self.accumulation} would be wrong; use compile=True"
            )
        if self.warmup_steps is not None and self.warmup_ratio is not None:
            both = f"warmup_steps={self.warmup_steps} and warmup_ratio={self.warmup_ratio:g}"
            raise ValueError(f"{both} both say how long the warm-up is; give one of them")
        if self.parametrization == "mup" and self.optimizer == "adam" and self.weight_decay:
            raise ValueError(
                f"parametrization='mup' does not scale weight_decay={self.weight_decay:g} for optimizer='adam'; use "
                "optimizer='adamw', or weight_decay=0"
            )
        return self

    @property
    def warmup(self) -> int:
        """Return warm-up steps with the default filled in."""
        if self.warmup_steps is not None:
            return self.warmup_steps
        usual = 0.3 if self.schedule == "onecycle" else 0.1
        share = usual if self.warmup_ratio is None else self.warmup_ratio
        return min(self.steps - 1, round(self.steps * share))

    @property
    def save_interval(self) -> int:
        """Return steps between checkpoints with the default filled in; 0 is never."""
        return max(100, self.steps // 10) if self.save_every is None else self.save_every


def _parsed_as(family: type[Config]) -> BeforeValidator:
    """Return a validator that parses a config of ``family`` from text or a mapping and adds defaults; None stays."""

    def parse(value: Any, info: ValidationInfo) -> dict[str, Any] | None:
        return None if value is None else family.read(value, **info.context or {}).to_dict()

    return BeforeValidator(parse)


class TrainSettings(FitSettings):
    """Settings of ``train``: the model, its replacements, the text and the training.

    Attributes:
        model: a preset, the directory of a saved model, or a Hub name.
        model_overrides: fields of a preset's config. ``vocab_size`` follows the tokenizer unless it is given here.
        model_init: how a preset's own weights are drawn: "config", as transformers draws them, with the config's
            ``initializer_range``; "torch", as in code that leaves linear layers as torch makes them and gives the
            embeddings the weights of the head (the HDPL paper's does), see ``relinear.models.draw_as_torch_``.
        operators: pattern -> operator, as a mapping with ``kind`` or as text (``"hdpl:rank=128,blocks=8"``);
            None leaves a layer alone. Patterns as in ``relinear.replace_``.
        layers: decoder layers by number; None takes all, as in ``relinear.replace_``.
        exclude: patterns of layers that stay.
        init: initialisation of operators, as in ``relinear.replace_``.
        attachments: settings of model-level parts, applied in this order.
        objective: what is minimised in place of the model's own loss, such as ``distill:teacher=DIR`` or
            ``cgt:eta=0.5``; text, or a mapping with ``kind``. Evaluation always uses the model's own loss.
        bits: 2 to 8 store the trained model in this many bits, as ``relinear.save_pretrained`` does, and read it back:
            the run's loss is measured on what was stored.
        data: the corpus, the tokenizer and the sequence length.
        eval_start_tokens: as for ``FitSettings``; a bound by default, as the whole validation text may take minutes.
        save_model: write the trained model to ``out_dir/model``.
        keep_checkpoint: keep the last checkpoint, with the optimiser's state, once the run has ended.
    """

    eval_start_tokens: PositiveInt | None = 65_536
    model: str = "tiny"
    model_overrides: dict[str, Any] = Field(default_factory=dict)
    model_init: Literal["config", "torch"] = "config"
    operators: dict[str, Annotated[dict[str, Any] | None, _parsed_as(OperatorConfig)]] = Field(default_factory=dict)
    layers: tuple[int, ...] | None = None
    exclude: Patterns = ()
    init: Init = "fresh"
    attachments: tuple[Annotated[dict[str, Any], _parsed_as(AttachmentConfig)], ...] = ()
    objective: Annotated[dict[str, Any] | None, _parsed_as(ObjectiveConfig)] = None
    bits: Annotated[int, Field(ge=2, le=8)] | None = None
    data: DataSettings = DataSettings()
    save_model: bool = True
    keep_checkpoint: bool = False

    @property
    def operator_configs(self) -> dict[str, OperatorConfig | None]:
        """Return ``operators`` as configs, for ``relinear.replace_``."""
        return {p: None if s is None else OperatorConfig.from_dict(s) for p, s in self.operators.items()}

    @property
    def attachment_configs(self) -> tuple[AttachmentConfig, ...]:
        """Return ``attachments`` as configs."""
        return tuple(AttachmentConfig.from_dict(config) for config in self.attachments)

    @property
    def tokens_per_step(self) -> int:
        """Return the number of tokens in an optimiser step."""
        return self.batch_size * self.accumulation * self.data.sequence_length

    @property
    def objective_config(self) -> ObjectiveConfig | None:
        """Return ``objective`` as a config."""
        return None if self.objective is None else ObjectiveConfig.from_dict(self.objective)
