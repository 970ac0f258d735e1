"""Define the settings of a compression."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PositiveFloat, model_validator

from relinear.contract.operator import OperatorConfig
from relinear.distill.settings import check_whole_blocks
from relinear.settings.base import Batch, Seed, Settings, size_in_bytes

#: bits of a weight where no budget is given: the least that every reader stores with its scales
DEFAULT_BITS = 4.5
#: a pretrained decoder's inputs have a few channels of enormous size, and at 1e-4 Adam's first steps undo it
DEFAULT_HEALING_RATE = 3e-5
#: settings of which one is given
BUDGETS = ("keep", "bits", "size")


def _or_default_rate(value: Any) -> Any:
    return DEFAULT_HEALING_RATE if value is None else value  # which records of 0.2 hold


class CompressSettings(Settings):
    """Hold the settings of ``compress``; unknown keys and values out of range are errors.

    Attributes:
        size: upper limit of the weights' file: "90MB", bytes, or a share of the original's size at half precision.
        bits: in place of ``size``, average bits per weight, below 16, scales included: of linear layers, embedding and
            head, as ``reader`` stores them; 4.5 where no budget is given.
        keep: in place of both, the share of the parameters of the linear layers, between 0 and 1, by low rank.
        reader: the program that will run the model, and decides what layers can become: "relinear", "llama.cpp"
            (GGUF) or "vllm" (compressed-tensors).
        tokens: number of calibration tokens: excerpts of the corpus that are spread over documents.
        self_sampled: where all texts are of one kind, half of the tokens that calibrate are written by the model
            itself, at temperature 1: what decides bits and rounding has to hold on another kind of text.
        sequence_length: tokens a block of the corpus; by default 512, or as many as the model reads.
        batch_size: blocks a forward pass.
        candidates: operators that a layer may become, as text (``low_rank``, ``monarch:blocks=8``). A low-rank layer is
            considered at every rank; other operators at the size that is named. Where bytes are the budget these store
            integers, by default whatever ``reader`` does.
        seed: of the excerpts, of the next tokens that the model draws, and of the order of blocks in healing.
        heal_tokens: distillation tokens after compression, of the corpus behind those that calibrate; 0 turns it off.
            The operators learn to give the original's logits, four blocks a step or ``batch_size``.
        heal_learning_rate: peak of the learning rate in healing.
        evaluate: compare the compressed model with the original: loss and agreement on tokens that
            calibration has not seen.
        evaluation_tokens: number of tokens to evaluate on, from documents that do not calibrate.
        passages: number of text passages that the model continues, to test for repetition; 0 for none.

    Raises:
        ValueError: for an unknown key (names the nearest) or a value out of range.

    Examples:
        >>> settings = relinear.compression.CompressSettings(bits=4.25, tokens=16384)
        >>> settings.bits
        4.25
    """

    size: float | str | None = None
    bits: float | None = Field(default=None, gt=0, lt=16)
    keep: float | None = Field(default=None, gt=0, lt=1)
    reader: Literal["relinear", "llama.cpp", "vllm"] = "relinear"
    tokens: int = Field(default=32768, ge=2, le=10**12)
    self_sampled: bool = True
    sequence_length: int = Field(default=512, ge=2)
    batch_size: Batch = 2
    candidates: tuple[str, ...] = ()
    seed: Seed = 0
    heal_tokens: int = Field(default=0, ge=0)
    heal_learning_rate: Annotated[PositiveFloat, BeforeValidator(_or_default_rate)] = DEFAULT_HEALING_RATE
    evaluate: bool = True
    evaluation_tokens: int = Field(default=16384, ge=2)
    passages: int = Field(default=50, ge=0)

    @model_validator(mode="after")
    def _consistent(self) -> CompressSettings:
        budgets = [name for name in BUDGETS if getattr(self, name) is not None]
        if not budgets:  # a default, which a budget that is given later replaces
            object.__setattr__(self, "bits", DEFAULT_BITS)
        if len(budgets) > 1:
            raise ValueError(f"{' and '.join(budgets)} are {len(budgets)} budgets: give one of them")
        if self.reader != "relinear" and not self.by_bytes:
            raise ValueError(
                f"files for {self.reader} (reader, --for) cannot store low-rank layers: give bits or size, not keep"
            )
        if self.size is not None:
            self.bytes_of(1)
        check_whole_blocks(self, "tokens")
        for text in self.candidates:
            OperatorConfig.read(text)
        if self.heal_tokens and not self.heal_blocks:
            step = f"{self.heal_batch} blocks of sequence_length={self.sequence_length}"
            raise ValueError(f"heal_tokens={self.heal_tokens} is less than one step of {step}")
        return self

    @property
    def heal_batch(self) -> int:
        """Return the blocks per healing step: four, rounded down to a multiple of ``batch_size``, or one batch."""
        return self.batch_size * max(1, 4 // self.batch_size)

    @property
    def by_bytes(self) -> bool:
        """Return whether stored bytes are the budget, so that the result is saved at no more than half precision."""
        return self.keep is None

    def bytes_of(self, original: int) -> float:
        """Return the bytes that ``size`` means for a model of ``original`` bytes. Raises ValueError for other text."""
        number = size_in_bytes(self.size) or 0.0
        has_unit = str(self.size).rstrip().endswith("B")
        if 0 < number < 1 and not has_unit:
            return number * original
        if number <= 1 or not (has_unit or number.is_integer()):
            rule = "without a unit bytes are whole, and a share is below 1"
            raise ValueError(
                f"size must be bytes, such as 90MB, or a share of the original, such as 0.3; got {self.size} ({rule})"
            )
        return number

    @property
    def measured(self) -> dict[str, Any]:
        """Return the settings that statistics depend on, as JSON values; all others may change between starts."""
        return self.model_dump(mode="json", include={"tokens", "sequence_length", "batch_size", "seed"})

    @property
    def heal_blocks(self) -> int:
        """Return the blocks that healing trains on: whole steps."""
        blocks = self.heal_tokens // self.sequence_length
        return blocks - blocks % self.heal_batch

    @property
    def blocks(self) -> int:
        """Return the number of calibration blocks."""
        return self.tokens // self.sequence_length

    @property
    def evaluation_blocks(self) -> int:
        """Return the number of blocks, after these, to evaluate the compressed model on; 0 if it is not evaluated."""
        return max(1, self.evaluation_tokens // self.sequence_length) if self.evaluate else 0
