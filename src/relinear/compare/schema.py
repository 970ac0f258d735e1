"""The types of results.json, from a run to the report: one type for what is written and for what is read.

``NotRequired`` is what records of earlier versions lack, or what some entries have. More may be there.
"""

from typing import Annotated, Any, NotRequired

import pydantic
from typing_extensions import TypedDict  # pydantic asks for it before Python 3.12

Number = Annotated[float, pydantic.Field(allow_inf_nan=False, strict=True, ge=-1e305, le=1e305)]
Count = Annotated[int, pydantic.Field(strict=True, ge=0, le=2**63)]
Words = Annotated[str, pydantic.Field(strict=True, max_length=100_000)]


class Statistic(TypedDict):
    """Over seeds; ``std`` is the sample standard deviation, None for one seed."""

    mean: Number
    std: Number | None
    values: list[Number]


class Point(TypedDict):
    """A step at which something was measured."""

    step: Count
    tokens: Count
    loss: NotRequired[Number | None]
    validation_loss: NotRequired[Number | None]


class Stored(TypedDict):
    """How a run's model was stored; the run's losses were measured on what was stored."""

    bits: Count
    bytes: Count
    loss_before: Number


class SeedRun(TypedDict):
    """A final run."""

    seed: NotRequired[Count]
    validation_loss: Number
    perplexity: NotRequired[Number]
    initial_perplexity: NotRequired[Number]
    steps: NotRequired[Count]
    tokens_per_second: NotRequired[Number | None]
    peak_memory_bytes: NotRequired[Count]
    aux: NotRequired[dict[str, Any]]
    block_losses: NotRequired[list[Number]]
    curve: list[Point]
    stored: NotRequired[Stored | None]


class Trial(TypedDict):
    """A run of tuning; ``validation_loss`` is None if it diverged."""

    learning_rate: Number
    initializer_range: NotRequired[Number]
    validation_loss: Number | None
    steps: NotRequired[Count]
    seed: NotRequired[Count]
    warmup_ratio: NotRequired[Number]
    bits: NotRequired[Count]


#: whether the rate that short runs found was moved in runs of full length
FullLength = TypedDict("FullLength", {"trials": list[Trial], "from": Number, "moved": bool, "edge": bool})


class Tuning(TypedDict):
    """How an entry got its rate; ``edge``: the best value was the first or last that was tried."""

    trials: list[Trial]
    edge: bool
    initializer_range: NotRequired[Number | None]
    initializer_edge: NotRequired[bool | None]
    warmup_ratio: NotRequired[Number | None]
    warmup_edge: NotRequired[bool]
    bits: NotRequired[Count | None]
    bits_edge: NotRequired[bool | None]
    full_length: NotRequired[FullLength]
    diverged: NotRequired[list[Number] | None]


class Speed(TypedDict):
    """Speed of an entry, measured in turn with all others; ratios are to the ``reference``."""

    train_ratio: Number
    inference_ratio: Number
    train_tokens_per_second: Number
    inference_tokens_per_second: Number
    rounds: NotRequired[Count]
    reference: NotRequired[Words]
    processor: NotRequired[Words]


class Gap(TypedDict):
    """An entry's loss minus the reference's; the interval is None for one seed."""

    mean: Number
    low: Number | None
    high: Number | None
    values: list[Number]
    standard_error: Number | None
    blocks: Count


class Ngram(TypedDict):
    """The counting model."""

    order: Count
    tokens: Count
    validation_loss: Number
    perplexity: Number


class EntryResult(TypedDict):
    """A row of the table."""

    name: Words
    operators: Words
    settings: dict[str, Any]
    parameters: Count
    flops_per_token: Count
    inactive_parameters: NotRequired[Count]
    inactive_flops: NotRequired[Count]
    size_mismatch: Number | None
    learning_rate: Number
    tuning: Tuning | None
    validation_loss: Statistic
    perplexity: Statistic
    initial_perplexity: Statistic
    peak_memory_bytes: Count
    speed: Speed | None
    runs: Annotated[list[SeedRun], pydantic.Field(min_length=1)]
    dense: NotRequired[bool]
    gap: NotRequired[Gap | None]
    stored: NotRequired[Stored | None]


class Diverged(TypedDict):
    """An entry without results, and why."""

    name: Words
    text: Words


class BudgetEntry(TypedDict):
    """An entry at one budget, as in a table of budgets."""

    name: Words
    learning_rate: Number
    tuning: Tuning | None
    validation_loss: Statistic
    gap: Gap | None
    initializer_range: NotRequired[Number | None]
    warmup_ratio: NotRequired[Number | None]
    bits: NotRequired[Count | None]
    runs: NotRequired[list[dict[str, Any]]]


class Budget(TypedDict):
    """One of several budgets, or of several sizes of the file (``bytes``)."""

    tokens: NotRequired[Count]
    bytes: NotRequired[Count]
    folder: NotRequired[Words]
    ngram: Ngram | None
    entries: list[BudgetEntry]


class MatchResult(TypedDict):
    """How sizes were made equal."""

    by: Words
    target: NotRequired[Count | None]
    tolerance: NotRequired[Number]
    text: Words


class Provenance(TypedDict):
    """The request, its machine, and the command."""

    recipe: dict[str, Any]
    machine: dict[str, Any]
    command: Words


class Results(Provenance):
    """All of results.json."""

    format: Count
    name: Words
    description: Words
    budget: Words
    match: MatchResult
    notes: list[Words]
    reference: NotRequired[Words | None]
    ngram: NotRequired[Ngram | None]
    data: dict[str, Any]
    entries: Annotated[list[EntryResult], pydantic.Field(min_length=1)]
    diverged: NotRequired[list[Diverged]]
    budgets: NotRequired[list[Budget]]
    sizes: NotRequired[list[Budget]]
    finished: Words
