"""Types of the values in results.json, for the run that writes it and the report that reads and checks it.

``NotRequired`` marks keys that only some entries have, or that earlier versions did not write. Other keys are ignored.
"""

from typing import Annotated, Any, NotRequired

import pydantic
from typing_extensions import TypedDict  # pydantic asks for it before Python 3.12

#: names of the two files, and the version of their format
RESULTS, SCALE, FORMAT = "results.json", "scale.json", 1
#: axes of the power laws in scale.json, and what they measure
AXES = {"flops": "training FLOPs", "seconds": "seconds of training"}

Number = Annotated[float, pydantic.Field(allow_inf_nan=False, strict=True, ge=-1e305, le=1e305)]
NonNegativeInt = Annotated[int, pydantic.Field(strict=True, ge=0, le=2**63)]
Words = Annotated[str, pydantic.Field(strict=True, max_length=100_000)]


class Statistic(TypedDict):
    """Mean and sample standard deviation over seeds; ``std`` is None for one seed."""

    mean: Number
    std: Number | None
    values: list[Number]


class CurvePoint(TypedDict):
    """The losses at a step of a run."""

    step: NonNegativeInt
    tokens: NonNegativeInt
    loss: NotRequired[Number | None]
    validation_loss: NotRequired[Number | None]


class StoredModel(TypedDict):
    """Bits and bytes of a stored model, whose losses are the run's; ``loss_before`` is the loss before storing."""

    bits: NonNegativeInt
    bytes: NonNegativeInt
    loss_before: Number


class SeedRun(TypedDict):
    """A run of full length on one seed."""

    seed: NotRequired[NonNegativeInt]
    validation_loss: Number
    perplexity: NotRequired[Number]
    initial_perplexity: NotRequired[Number]
    steps: NotRequired[NonNegativeInt]
    tokens_per_second: NotRequired[Number | None]
    peak_memory_bytes: NotRequired[NonNegativeInt]
    aux: NotRequired[dict[str, Any]]
    block_losses: NotRequired[list[Number]]
    curve: list[CurvePoint]
    stored: NotRequired[StoredModel | None]


class Trial(TypedDict):
    """A run that tuning made; ``validation_loss`` is None if it diverged."""

    learning_rate: Number
    initializer_range: NotRequired[Number]
    validation_loss: Number | None
    steps: NotRequired[NonNegativeInt]
    seed: NotRequired[NonNegativeInt]
    warmup_ratio: NotRequired[Number]
    bits: NotRequired[NonNegativeInt]


#: the check of a tuned learning rate in runs of full length: whether it ``moved`` from that of short runs
FullLengthCheck = TypedDict("FullLengthCheck", {"trials": list[Trial], "from": Number, "moved": bool, "edge": bool})


class Tuning(TypedDict):
    """The tuning of an entry; ``edge``: the best learning rate is the lowest or highest that was tried."""

    trials: list[Trial]
    edge: bool
    initializer_range: NotRequired[Number | None]
    initializer_edge: NotRequired[bool | None]
    warmup_ratio: NotRequired[Number | None]
    warmup_edge: NotRequired[bool]
    bits: NotRequired[NonNegativeInt | None]
    bits_edge: NotRequired[bool | None]
    full_length: NotRequired[FullLengthCheck]
    diverged: NotRequired[list[Number] | None]


class Speed(TypedDict):
    """Throughput of an entry, timed in turn with all others; ratios are to the ``reference``."""

    train_ratio: Number
    inference_ratio: Number
    train_tokens_per_second: Number
    inference_tokens_per_second: Number
    rounds: NotRequired[NonNegativeInt]
    reference: NotRequired[Words]
    processor: NotRequired[Words]


class Gap(TypedDict):
    """An entry's loss minus the reference's; the interval is None for one seed."""

    mean: Number
    low: Number | None
    high: Number | None
    values: list[Number]
    standard_error: Number | None
    blocks: NonNegativeInt


class Ngram(TypedDict):
    """Loss of the n-gram model."""

    order: NonNegativeInt
    tokens: NonNegativeInt
    validation_loss: Number
    perplexity: Number


class SeriesEntry(TypedDict):
    """An entry at one value of a series."""

    name: Words
    learning_rate: Number
    tuning: Tuning | None
    validation_loss: Statistic
    gap: NotRequired[Gap | None]
    initializer_range: NotRequired[Number | None]
    warmup_ratio: NotRequired[Number | None]
    bits: NotRequired[NonNegativeInt | None]


def _with_data(settings: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(settings.get("data") or {}, dict):
        raise ValueError("data must be a mapping")
    return settings


class EntryResult(SeriesEntry):
    """Results of an entry, over all seeds."""

    operators: Words
    settings: Annotated[dict[str, Any], pydantic.AfterValidator(_with_data)]
    parameters: pydantic.PositiveInt
    flops_per_token: pydantic.PositiveInt
    inactive_parameters: NotRequired[NonNegativeInt]
    inactive_flops: NotRequired[NonNegativeInt]
    size_mismatch: Number | None
    perplexity: Statistic
    initial_perplexity: Statistic
    peak_memory_bytes: NonNegativeInt
    speed: Speed | None
    runs: Annotated[list[SeedRun], pydantic.Field(min_length=1)]
    dense: NotRequired[bool]
    stored: NotRequired[StoredModel | None]


class DivergedEntry(TypedDict):
    """An entry whose training diverged, and at which learning rates."""

    name: Words
    text: Words


class SeriesRow(TypedDict):
    """One of several budgets (``tokens``) or file sizes (``bytes``)."""

    tokens: NotRequired[NonNegativeInt]
    bytes: NotRequired[NonNegativeInt]
    folder: NotRequired[Words]
    ngram: Ngram | None
    entries: list[SeriesEntry]


class MatchResult(TypedDict):
    """The size at which entries are compared."""

    by: Words
    target: NotRequired[NonNegativeInt | None]
    tolerance: NotRequired[Number]
    text: Words


class Provenance(TypedDict):
    """The recipe, the machine and the command that made the results."""

    recipe: dict[str, Any]
    machine: dict[str, Any]
    command: Words


class Results(Provenance):
    """The values of results.json."""

    format: NonNegativeInt
    name: Words
    description: Words
    budget: Words
    match: MatchResult
    notes: list[Words]
    reference: NotRequired[Words | None]
    ngram: NotRequired[Ngram | None]
    data: dict[str, Any]
    entries: Annotated[list[EntryResult], pydantic.Field(min_length=1)]
    diverged: NotRequired[list[DivergedEntry]]
    budgets: NotRequired[list[SeriesRow]]
    sizes: NotRequired[list[SeriesRow]]
    finished: Words
