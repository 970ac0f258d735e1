"""How a model is compressed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, model_validator

from relinear.core.operator import OperatorConfig
from relinear.core.settings import Batch, Seed, Settings
from relinear.distill.settings import check_whole_blocks

#: of which one is given
BUDGETS = ("keep", "bits", "speed")
#: what layers may become where bytes are the budget
BYTES_MENU = ("quantized", "quantized:group=256", "pivoted_low_rank")
#: what embedding and head become there
BYTES_EMBEDDING = "quantized:bits=8,symmetric=true"
#: share that is kept where no budget is given
KEEP = 0.8


class CompressSettings(Settings):
    """Hold the settings of ``compress``; unknown keys and values out of range are errors.

    Args:
        keep: share that is left, between 0 and 1; 0.8 where no ``speed`` is asked for.
        budget_of: what ``keep`` is a share of: the parameters of the ``layers`` that may be replaced, those of the
            whole ``model``, its stored ``bytes`` (at no more than half precision, in which the result is saved then),
            or the ``flops`` of these layers for a token.
        bits: in place of ``keep``, how many bits a weight of these layers takes on average, below 16, scales included.
        speed: in place of ``keep``, how many times as fast these layers shall be together, by a table measured here.
        speed_for: what is to be fast: ``decode`` (a token after the other) or ``prefill`` (whole prompts).
        speed_batch: sequences at once, for speeds.
        allow_slower: carry out a plan even if it makes these layers slower, by the table; the default where bytes are
            the budget.
        tokens: how many calibrate: excerpts of the corpus that are spread over documents.
        sequence_length: tokens a block of the corpus.
        batch_size: blocks a forward pass.
        fisher: also measure the gradients at every layer's output, at next tokens that the model draws, which tells how
            much its errors matter; without them layers can only be fitted, not weighed against each other, and every
            layer keeps the same share.
        menu: operators that a layer may become, as text (``low_rank``, ``monarch:blocks=8``). A low-rank layer is
            considered at every rank; other operators at the size that is named. ``neurons``, by itself: narrower MLPs,
            as wide in every layer, of a stock model; the budget decides how wide. Where bytes are the budget the
            default is ``quantized`` in groups of 64 and of 256, and ``pivoted_low_rank``.
        embedding: operator that the embedding becomes, and the output head, where they can be replaced, as text; None
            leaves them. Where bytes are the budget it is ``quantized:bits=8,symmetric=true`` by default.
        anchor: fit layers from the first to the last, on the inputs that the compressed model has there, towards the
            outputs that the original had.
        correct_dense: layers that stay dense take part in that: their weights are fitted to make up for what changed
            before them.
        anchor_tokens: of the calibration's tokens, how many are used for that.
        refine_steps: of Adam, that bring each decoder layer's output nearer to the original's after it was fitted.
        refine_learning_rate: of these.
        seed: of the excerpts, of the next tokens that the model draws for ``fisher``, and of the order of blocks in
            refinement and in healing.
        heal_tokens: how many train the compressed model as a whole to give the original's logits, of the corpus behind
            those that calibrate; 0 leaves it out.
        heal: what is trained then: the "operators"; "all" parameters; or with "lora" the operators, and adapters on
            the layers that stayed dense, which are merged in the end.
        heal_held_out_tokens: how many judge healing: the parameters that were best there are kept.
        heal_learning_rate: the peak; None is 3e-5, and 1e-3 for lora.
        heal_batch: blocks a step; ``batch_size`` of them at a time are in memory.
        heal_rank: of the adapters.
        measured_points: for every type of layer, how many fits of one layer are tried on tokens that calibration has
            not seen, to correct the predictions by; each costs about half a forward pass over ``evaluation_tokens``.
        evaluate: measure what the compressed model is like beside the original: loss and agreement on tokens that
            calibration has not seen, samples, speed.
        evaluation_tokens: of documents that do not calibrate, for ``evaluate``, and the first of them for
            ``measured_points``.
        passages: how many are continued to see whether the model repeats itself; 0 leaves that out.
        prompts: that samples continue.
        sample_tokens: new tokens of a sample at most.

    Raises:
        ValueError: for an unknown key (names the nearest) or a value out of range.

    Examples:
        >>> from relinear.compress import CompressSettings
        >>> settings = CompressSettings(bits=4.25, tokens=16384)
        >>> settings.bits
        4.25
    """

    keep: float | None = Field(default=None, gt=0, lt=1)
    budget_of: Literal["layers", "model", "bytes", "flops"] = "layers"
    bits: float | None = Field(default=None, gt=0, lt=16)
    speed: float | None = Field(default=None, gt=1, le=1000)
    speed_for: Literal["decode", "prefill"] = "decode"
    speed_batch: Batch = 1
    allow_slower: bool = False
    tokens: int = Field(default=32768, ge=2, le=10**12)
    sequence_length: int = Field(default=512, ge=2)
    batch_size: Batch = 2
    fisher: bool = True
    menu: tuple[str, ...] = ("pivoted_low_rank",)
    embedding: str | None = None
    anchor: bool = False
    correct_dense: bool = True
    anchor_tokens: int = Field(default=32768, ge=2)
    refine_steps: int = Field(default=0, ge=0)
    refine_learning_rate: float = Field(default=1e-4, gt=0)
    seed: Seed = 0
    heal_tokens: int = Field(default=0, ge=0)
    heal: Literal["operators", "all", "lora"] = "operators"
    heal_held_out_tokens: int = Field(default=8192, ge=2)
    heal_learning_rate: float | None = Field(default=None, gt=0)
    heal_batch: Batch = 4
    heal_rank: int = Field(default=16, ge=1)
    measured_points: int = Field(default=0, ge=0, le=20)
    evaluate: bool = True
    evaluation_tokens: int = Field(default=16384, ge=2)
    passages: int = Field(default=50, ge=0)
    prompts: tuple[str, ...] = (
        "The capital of France is",
        "Once upon a time, there was a",
        "Explain in one sentence why the sky is blue.",
    )
    sample_tokens: int = Field(default=48, ge=1)

    @model_validator(mode="before")
    @classmethod
    def _a_budget(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        given = dict(values)
        if all(given.get(name) is None for name in BUDGETS):
            given["keep"] = KEEP
        if given.get("bits") is not None or given.get("budget_of") == "bytes":
            given = {"menu": BYTES_MENU, "embedding": BYTES_EMBEDDING, "allow_slower": True} | given
        return given

    @model_validator(mode="after")
    def _consistent(self) -> CompressSettings:
        for check in (self._check_budget, self._check_blocks, self._check_menu, self._check_healing):
            check()
        return self

    def _check_budget(self) -> None:
        given = [name for name in BUDGETS if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"{given[0]} and {given[1]} are two budgets: give one of them")
        if self.keep is None and self.budget_of != "layers":
            raise ValueError(f"budget_of={self.budget_of} says what keep is a share of, and {given[0]} is no share")
        if self.speed is not None and not self.fisher:
            raise ValueError("speed takes fisher: without it every layer keeps the same share, whatever that saves")
        if self.measured_points and not self.fisher:
            raise ValueError("measured_points correct what fisher predicts; leave fisher on or measure no points")

    def _check_blocks(self) -> None:
        check_whole_blocks(self, "tokens", "anchor_tokens")
        if self.heal_tokens:
            check_whole_blocks(self, "heal_held_out_tokens")

    def _check_menu(self) -> None:
        if not self.menu:
            raise ValueError("menu is empty: name at least one operator, such as low_rank")
        for text in {*self.menu, *filter(None, [self.embedding])} - {"neurons"}:
            OperatorConfig.read(text)
        if "neurons" not in self.menu:
            return
        if len(self.menu) > 1:
            raise ValueError("menu: neurons narrows all layers alike, so it stands alone; name no operator beside it")
        if self.keep is None or self.budget_of not in ("layers", "model"):
            given = f"budget_of={self.budget_of}" if self.keep else "bits" if self.bits else "speed"
            raise ValueError(f"menu: neurons meets budgets of parameters; give budget_of=layers or model, not {given}")
        if self.measured_points:
            raise ValueError("measured_points correct the choice among operators, and menu: neurons leaves none")
        if self.heal_tokens and self.heal == "operators":
            raise ValueError("menu: neurons leaves no operators to heal; give heal=all, or heal=lora for adapters")

    def _check_healing(self) -> None:
        if not self.heal_tokens:
            if self.heal != "operators":
                raise ValueError(f"heal={self.heal!r} says how, heal_tokens=0 that nothing is healed; give heal_tokens")
            return
        if self.heal_blocks < self.heal_batch:
            step = f"heal_batch={self.heal_batch} blocks of sequence_length={self.sequence_length}"
            raise ValueError(f"heal_tokens={self.heal_tokens} is less than one step of {step}")
        if self.heal_batch > self.batch_size and self.heal_batch % self.batch_size:
            raise ValueError(f"heal_batch={self.heal_batch} must be a multiple of batch_size={self.batch_size}")

    @property
    def by_bytes(self) -> bool:
        """Whether stored bytes are the budget, so that the result is saved at no more than half precision."""
        return self.bits is not None or self.budget_of == "bytes"

    @property
    def heal_blocks(self) -> int:
        """Blocks that are trained on in healing: whole steps."""
        blocks = self.heal_tokens // self.sequence_length
        return blocks - blocks % self.heal_batch

    @property
    def held_out_blocks(self) -> int:
        """Blocks that judge healing; 0 without any."""
        return self.heal_held_out_tokens // self.sequence_length if self.heal_tokens else 0

    @property
    def blocks(self) -> int:
        """Blocks of the corpus that calibration sees."""
        return self.tokens // self.sequence_length

    @property
    def evaluation_blocks(self) -> int:
        """Blocks after these that the compressed model, or a measured point, is judged on; 0 where nothing is."""
        wanted = self.evaluate or self.measured_points > 0
        return max(1, self.evaluation_tokens // self.sequence_length) if wanted else 0
