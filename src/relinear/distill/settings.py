"""The settings of a distillation."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from relinear.settings.base import Seed, Settings


def check_whole_blocks(settings: Any, *names: str) -> None:
    """Raise ValueError unless each of these settings, a number of tokens, makes a block of ``sequence_length``."""
    length = settings.sequence_length
    for name in names:
        if getattr(settings, name) < length:
            raise ValueError(f"{name}={getattr(settings, name)} is less than one block of sequence_length={length}")


class DistillSettings(Settings):
    """Hold the settings of ``distill_``; unknown keys and values out of range are errors.

    Attributes:
        tokens: number of tokens to fit on. Their activations are stored, so tokens and layer widths decide the memory
            (or disk) needed.
        validation_tokens: number of further tokens, on which the reported fit error is measured.
        sequence_length: tokens per block of the corpus.
        record_batch: blocks per forward pass while recording, and with the loss "kl".
        tokens_per_step: tokens per optimiser step.
        epochs: passes over the recorded tokens.
        learning_rate: Adam's initial learning rate, which falls to 0 along a cosine. The paper's rotors take 0.05,
            matrices much less.
        loss: the loss of a layer's outputs, or of the final logits ("kl"). "mse": squared error over the mean square;
            "cosine": one minus the cosine of each token's output; "kl": all layers of a decoder layer are fitted
            together.
        target: the target outputs. "layer": those of the replaced layer for its inputs, with earlier replacements
            active; "original": those in the original model for the same tokens, so that an operator also compensates
            the errors of earlier replacements (the inputs are the same). "original" keeps a copy of every replaced
            layer until the end.
        joint: afterwards, train the operators of a decoder layer together, towards the original outputs of the module
            that contains them all (``self_attn`` for q, k and v), with the same loss, epochs and rate.
        bias: add a bias to layers without one, and initialise every operator's with its mean target output. After a
            closed-form fit: with the mean error.
        init: "auto" starts from the closed-form fit of the weight if the operator has one; "fresh" always draws new
            parameters. If training raises the error on the validation tokens, the initial parameters are kept.
        retrain: pattern of layers to train after the replaced ones, such as ``o_proj``, towards their earlier outputs.
            None for none.
        retrain_learning_rate: the initial learning rate for these layers.
        on_disk: store recorded activations in memory-mapped files rather than in memory.
        seed: seed of fresh parameters and of the order of tokens.

    Raises:
        ValueError: for an unknown key (names the nearest) or a value out of range.

    Examples:
        >>> settings = relinear.distill.DistillSettings(tokens=4096, loss="cosine")
        >>> settings.loss
        'cosine'
    """

    tokens: int = Field(default=65536, ge=2)
    validation_tokens: int = Field(default=8192, ge=1)
    sequence_length: int = Field(default=256, ge=2)
    record_batch: int = Field(default=8, ge=1)
    tokens_per_step: int = Field(default=256, ge=1)
    epochs: int = Field(default=1, ge=1, le=10**6)
    learning_rate: float = Field(default=0.01, gt=0)
    loss: Literal["mse", "cosine", "kl"] = "mse"
    target: Literal["layer", "original"] = "layer"
    joint: bool = False
    bias: bool = False
    init: Literal["auto", "fresh"] = "auto"
    retrain: str | None = None
    retrain_learning_rate: float = Field(default=1e-3, gt=0)
    on_disk: bool = False
    seed: Seed = 0

    @model_validator(mode="after")
    def _consistent(self) -> DistillSettings:
        check_whole_blocks(self, "tokens", "validation_tokens")
        if self.joint and self.loss == "kl":
            raise ValueError("joint=True is for losses 'mse' and 'cosine': 'kl' fits a decoder layer together anyway")
        return self
