"""Define a comparison's settings (entries, budget, matching, seeds, tuning), and preregistered ones."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, BeforeValidator, Field, PositiveFloat, model_validator

from relinear.compare.recipe import SHORT_FORMS, true_as
from relinear.data.tasks import task_of
from relinear.settings.base import Patterns, PositiveInt, Seed, Settings, Unique, size_in_bytes
from relinear.settings.config_text import keeps_layer, parse_config_text
from relinear.settings.messages import did_you_mean, quoted
from relinear.settings.yaml_settings import apply_overrides, read_yaml, without_key
from relinear.system.confidence import seeds_needed
from relinear.training.settings import TrainSettings

#: settings that give a time within a run in steps
_STEPS_WITHIN = ("warmup_steps", "eval_every")
_ENTRY_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+=-]*")


def _read_tokens(value: Any) -> Any:
    """Return a number of tokens, also written as 300k, 20.5M or 1G."""
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([kMG]?)", value.strip())
    if match is None:
        raise ValueError(f"{quoted(value)} is not a number of tokens; write 300k, 20.5M or 1G")
    return round(float(match[1]) * {"": 1, "k": 1e3, "M": 1e6, "G": 1e9}[match[2]])


def _read_file_sizes(value: Any) -> Any:
    """Return bytes written as 500KB, 1.5MiB or 1GB, or several of them, ascending; anything else unchanged."""
    if isinstance(value, list | tuple):
        file_sizes = list(map(_read_file_sizes, value))
        if wrong := [size for size in file_sizes if not isinstance(size, int) or size < 1]:
            raise ValueError(f"{wrong[0]!r} is not a size of a file; write 500KB or 1.5MB")
        ascending = tuple(sorted(set(file_sizes)))
        return ascending if ascending[1:] else next(iter(ascending), None)
    in_bytes = size_in_bytes(value) if isinstance(value, str) else None
    return value if in_bytes is None else round(in_bytes)


def _as_tuple(value: Any) -> Any:
    return (value,) if isinstance(value, int) and not isinstance(value, bool) else value


_ASCENDING = AfterValidator(lambda values: tuple(sorted(values)))
_Grid = Annotated[tuple[PositiveFloat, ...], Field(min_length=2), Unique, _ASCENDING]
_Shares = Annotated[tuple[Annotated[float, Field(ge=0, lt=1)], ...], Field(min_length=2), Unique, _ASCENDING]
#: seeds of the final runs, each once
Seeds = Annotated[tuple[Seed, ...], Field(min_length=1), Unique]
_Tokens = Annotated[PositiveInt, BeforeValidator(_read_tokens)]
_Bits = Annotated[tuple[Annotated[int, Field(ge=2, le=8)], ...], Field(min_length=1), Unique, _ASCENDING]


def _read_operator(value: Any) -> Any:
    if isinstance(value, str):
        return None if keeps_layer(value) else parse_config_text(value)
    return value


def _read_entry(value: Any) -> Any:
    """Read an entry, or only its operator."""
    if value is None or isinstance(value, str):
        return {"operator": value}
    return {"operator": dict(value)} if isinstance(value, Mapping) and "kind" in value else value


def _refuse_overruled(changes: dict[str, Any]) -> dict[str, Any]:
    """Refuse settings in an entry's ``set`` that belong elsewhere."""
    instead = {"learning_rate": "the entry's own learning_rate", "seed": "the recipe's seeds"}
    for key, setting in instead.items():
        if key in changes:
            raise ValueError(f"set.{key} would be overruled, or overrule what tuning finds; use {setting}")
    return changes


_Operator = Annotated[dict[str, Any] | None, BeforeValidator(_read_operator)]


class EntrySettings(Settings):
    """Describe one row of the comparison: its operators, and its other differences from the shared settings.

    A text such as ``hdpl:rank=16``, a mapping with ``kind``, or ``dense`` stands for an entry with this operator.

    Attributes:
        operator: the operator that replaces the layers of ``target``; None (``dense``) replaces nothing.
        target: patterns of the layers that ``operator`` replaces; by default the recipe's ``target``.
        operators: operators of further patterns, which come before ``target``; None leaves a layer alone.
        attachments: settings of model-level parts.
        learning_rate: learning rate of this entry, instead of the recipe's. It is not tuned, only compared with its
            neighbours in the grid.
        duration: length of training relative to the recipe's budget. With 2 the entry trains on twice the tokens, as a
            dense model of equal time may need.
        resize: what changes to match the size: "operator" (its rank, blocks, ...; the default if there is an
            operator), "width" (of the whole model), or "fixed" (nothing; the default for dense).
        set: other training settings of this entry, by dotted name. If the budget is in tokens, an entry with another
            batch size takes more or fewer steps, and warm-up and evaluations move with them.
    """

    operator: _Operator = None
    target: Patterns | None = None
    operators: dict[str, _Operator] = Field(default_factory=dict)
    attachments: tuple[dict[str, Any], ...] = ()
    learning_rate: PositiveFloat | None = None
    duration: PositiveFloat = 1.0
    resize: Literal["operator", "width", "fixed"] | None = None
    set: Annotated[dict[str, Any], AfterValidator(_refuse_overruled)] = Field(default_factory=dict)

    @property
    def dense(self) -> bool:
        """Return whether the entry uses nothing of relinear."""
        return not self.operator and not any(self.operators.values()) and not self.attachments

    @property
    def resizing(self) -> str:
        """Return ``resize`` with its default filled in."""
        return self.resize or ("operator" if self.operator or any(self.operators.values()) else "fixed")


class MatchSettings(Settings):
    """Set the size at which all entries are compared.

    Attributes:
        by: what is made equal: ``parameters``, ``flops`` (of the forward pass for a token) or ``bytes`` (of the file of
            weights, in which every entry is stored, read back and evaluated). ``width`` resizes no entry.
        to: the entry whose size is the target, or a number; by default the first entry with operators whose size the
            others can be given. For ``bytes`` a size such as 500KB (of 1,000 bytes), or several: one comparison each.
        tolerance: largest relative deviation from the target; beyond it the comparison is refused.
        bits: bits that a stored weight may have, for ``bytes``. Short runs choose for every entry; fewer bits allow a
            wider model.
    """

    by: Literal["width", "parameters", "flops", "bytes"] = "width"
    to: Annotated[str | PositiveInt | tuple[int, ...] | None, BeforeValidator(_read_file_sizes)] = None
    tolerance: PositiveFloat = 0.02
    bits: _Bits = (3, 4, 6, 8)

    @model_validator(mode="after")
    def _has_a_size(self) -> MatchSettings:
        if self.by == "bytes" and (not self.to or isinstance(self.to, str)):
            raise ValueError("match by bytes takes the size of the file: --size 500KB, or to: 500KB")
        if self.by != "bytes" and isinstance(self.to, tuple):
            raise ValueError(f"sizes of the file are for match by bytes, not by {self.by}: --match bytes")
        return self


class TuneSettings(Settings):
    """Set how each entry gets its learning rate and initialisation: by short runs over grids, on one seed.

    Attributes:
        learning_rates: grid of learning rates.
        initializer_range: grid of standard deviations of the model's weights (``true``: 0.02, 0.05, 0.1). The rate is
            searched at the written initialisation, then the initialisation at that rate, then the rate again at the
            best two. None keeps the entry's initialisation, and so does an entry whose ``set`` has one.
        warmup_ratio: grid of warm-ups as shares of the steps (``true``: 0.1, 0.3, 0.5). Rate and initialisation are
            searched at each, as their best values depend on it. None keeps the entry's warm-up, and so does an entry
            whose ``set`` has one.
        fraction: length of a short run, as a share of the steps.
        seed: seed of the short runs; not one of the final seeds, as tuning on it would favour it.
        extensions: how often each grid may grow by one value while the best value is at its edge.
        check_full_length: compare the rate that was chosen (or that the entry sets) with its two neighbours in runs of
            full length, and take the best; at most ``extensions`` further steps follow. False trusts short runs, which
            choose rates that are too high.
        at: where a comparison with several budgets tunes. "smallest" tunes at the first, and compares the rate with its
            neighbours at the second and, with ``check_full_length``, at all others; "each" tunes at all of them.
    """

    learning_rates: _Grid = (5e-4, 1e-3, 2e-3, 4e-3)
    initializer_range: Annotated[_Grid | None, BeforeValidator(true_as((0.02, 0.05, 0.1)))] = None
    warmup_ratio: Annotated[_Shares | None, BeforeValidator(true_as((0.1, 0.3, 0.5)))] = None
    fraction: float = Field(default=0.25, gt=0, le=1)
    seed: Seed = 1000
    extensions: int = Field(default=2, ge=0)
    check_full_length: bool = True
    at: Literal["smallest", "each"] = "smallest"


class SeriesValues(NamedTuple):
    """Name the values at which a recipe is compared, each in a comparison of its own.

    Attributes:
        axis: training tokens, width of the reference's model, or bytes of the file.
        key: name of the series in the results, and of the folder of its comparisons.
        values: the values in ascending order; none for a single comparison.
    """

    axis: Literal["tokens", "width", "bytes"]
    key: Literal["budgets", "sizes"]
    values: tuple[int, ...]


class SpeedSettings(Settings):
    """Set how throughput is measured: all models in one process in turn, after training.

    Attributes:
        seconds: about how long the whole measurement takes; 0 skips it.
        rounds: largest number of rounds through all models.
    """

    seconds: float = Field(default=30, ge=0)
    rounds: PositiveInt = 25


class WidthSettings(Settings):
    """Set the widths at which the entries are compared.

    Attributes:
        widths: widths of the reference's model, at least four; every entry is scaled in proportion.
        tokens_per_parameter: training tokens at every width, per parameter of the dense model; None takes the recipe's
            budget.
    """

    widths: Annotated[tuple[PositiveInt, ...], Field(min_length=4), Unique, _ASCENDING]
    tokens_per_parameter: PositiveFloat | None = None


class _SharedTrainSettings(TrainSettings):
    """Training settings whose steps may follow from a budget; warm-up is checked with each entry's steps."""

    @model_validator(mode="after")
    def _warmup_fits(self) -> _SharedTrainSettings:
        return self


def _only_written(value: Any) -> Any:
    return value.model_dump(exclude_unset=True) if isinstance(value, TrainSettings) else value


class CompareSettings(Settings):
    """Settings of a whole comparison.

    Attributes:
        name: name of the comparison, for the report.
        description: what the comparison asks, for the report.
        entries: the entries by name.
        target: patterns of the layers that an entry's ``operator`` replaces.
        train: training settings that all entries share (see ``TrainSettings``).
        tokens: budget in training tokens, instead of ``train.steps``; may be written as 20.5M.
        budgets: several budgets in tokens. Every entry is trained to each with a whole schedule. Warm-up and
            evaluations in steps are meant for the largest, and shrink with the budget.
        widths: widths to compare at, with a comparison at each and power laws over all.
        match: how sizes are made equal.
        seeds: seeds of the final runs; every entry runs once per seed.
        tune: how learning rates are tuned; ``true`` takes the defaults. None trains every entry at
            ``train.learning_rate``, or at its own.
        reference: the entry that the gaps of the others refer to, with intervals; None computes no gaps.
        ngram: longest n-grams of the Kneser-Ney model that is shown as a baseline. "auto" takes 5 for bytes and 3 for
            other tokens; None (or ``false``) leaves it out, and so does a synthetic task.
        speed: how throughput is measured.
    """

    name: str = "comparison"
    description: str = ""
    entries: Annotated[dict[str, Annotated[EntrySettings, BeforeValidator(_read_entry)]], Field(min_length=1)]
    target: Patterns = ("all-linear",)
    train: Annotated[_SharedTrainSettings, BeforeValidator(_only_written)] = _SharedTrainSettings()
    tokens: _Tokens | None = None
    budgets: Annotated[tuple[_Tokens, ...], Field(min_length=1), Unique, _ASCENDING] | None = None
    widths: Annotated[WidthSettings | None, BeforeValidator(SHORT_FORMS["widths"])] = None
    match: Annotated[MatchSettings, BeforeValidator(SHORT_FORMS["match"])] = MatchSettings()
    seeds: Annotated[Seeds, BeforeValidator(_as_tuple)] = (0,)
    tune: Annotated[TuneSettings | None, BeforeValidator(SHORT_FORMS["tune"])] = None
    speed: SpeedSettings = SpeedSettings()
    reference: str | None = None
    ngram: Annotated[Literal["auto"] | PositiveInt | None, BeforeValidator(true_as("auto"))] = "auto"

    @classmethod
    def upgraded(cls, saved: Any) -> Any:
        """Return settings of an earlier version, in which ``train.steps`` may be the default beside another budget."""
        completed = super().upgraded(saved)
        if completed is saved and isinstance(saved, Mapping):
            return super().upgraded(without_key(saved, "train.steps"))
        return completed

    @model_validator(mode="after")
    def _consistent(self) -> CompareSettings:
        if wrong := [name for name in self.entries if not _ENTRY_NAME.fullmatch(name)]:
            raise ValueError(f"entry name {wrong[0]!r}: use letters, digits and _ . + = - (it becomes a folder)")
        for key, name in (("match.to", self.match.to), ("reference", self.reference)):
            if isinstance(name, str) and name not in self.entries:
                raise ValueError(f"{key} names no entry: {name!r}; {did_you_mean(name, self.entries)}")
        if self.train.operators or self.train.attachments:
            raise ValueError("train.operators and train.attachments belong to the entries of a comparison")
        stated = {
            "tokens": self.tokens,
            "budgets": self.budgets,
            "train.steps": "steps" in self.train.model_fields_set,
            "widths.tokens_per_parameter": self.widths and self.widths.tokens_per_parameter,
        }
        if len(budgets := [name for name, value in stated.items() if value]) > 1:
            raise ValueError(f"give the budget once: {' or '.join(budgets)}")
        if self.train.seed != TrainSettings.model_fields["seed"].default:  # which records of recipes hold
            raise ValueError("train.seed is of a single run; a comparison has seeds: seeds: [0, 1, 2]")
        if self.tune is not None and self.tune.seed in self.seeds:
            raise ValueError(
                f"tune.seed={self.tune.seed} is one of seeds: what is tuned on it has an advantage there; take another"
            )
        self._check_series()
        for name, entry in self.entries.items():
            bits = self.settings_of(name).bits
            if self.match.by == "bytes" and (bits is not None or entry.resize == "fixed"):
                setting = "resize: fixed" if bits is None else f"bits: {bits}"
                raise ValueError(
                    f"entries.{name} has {setting}, and match by bytes chooses size and bits: leave it out"
                )
        return self

    def _check_series(self) -> None:
        """Check several budgets or widths: each run has one budget, and there is a reference entry."""
        if self.budgets is not None and (self.widths is not None or self.match.by == "bytes"):
            raise ValueError("give several budgets, or several widths or sizes, not both: each of those has one budget")
        if self.budgets is None and self.widths is None:
            return
        key = "widths" if self.budgets is None else "budgets"
        if self.reference is None:
            raise ValueError(f"{key} need a reference entry: set reference: dense")
        with_steps = [name for name, entry in self.entries.items() if "steps" in entry.set]
        if with_steps:
            raise ValueError(f"entries.{with_steps[0]}.set.steps is one number for all {key}; use duration: 2.0")
        if self.widths is None:
            return
        if not any(entry.dense for entry in self.entries.values()):
            raise ValueError("widths need a dense entry: narrower and shallower models are made of it")
        if self.match.by != "width":
            raise ValueError("widths scale every entry from what is written: leave match at width")

    @property
    def steps(self) -> int:
        """Return the optimiser steps of a final run with the shared batch size, at the largest budget."""
        return self._steps(self.train)

    def _steps(self, settings: TrainSettings) -> int:
        """Return the optimiser steps that the budget takes with the batch size of ``settings``."""
        tokens = self.tokens if self.budgets is None else self.budgets[-1]
        if tokens is None:
            return settings.steps
        return max(1, math.ceil(tokens / settings.tokens_per_step))

    @property
    def series(self) -> SeriesValues:
        """Return the budgets, widths or file sizes to compare at."""
        if self.widths is not None:
            return SeriesValues("width", "sizes", self.widths.widths)
        if isinstance(self.match.to, tuple):
            return SeriesValues("bytes", "sizes", self.match.to)
        return SeriesValues("tokens", "budgets", self.budgets or ())

    @property
    def ngram_order(self) -> int | None:
        """Return ``ngram`` with "auto" filled in."""
        if task_of(self.train.data.data) is not None:
            return None
        if self.ngram != "auto":
            return self.ngram
        return 5 if self.train.data.tokenizer == "bytes" else 3

    @property
    def search_settings(self) -> TuneSettings:
        """Return ``tune``; if that is None, the settings of short runs that only choose bits."""
        return self.tune or TuneSettings(check_full_length=False)

    def tunes_rate(self, name: str) -> bool:
        """Return whether an entry's learning rate is searched: an entry that sets one keeps it."""
        return self.tune is not None and self.entries[name].learning_rate is None

    def tunes_initializer(self, name: str) -> bool:
        """Return whether an entry's initialisation is searched, with its rate: an entry that sets one keeps it."""
        overrides = apply_overrides({}, self.entries[name].set).get("model_overrides")
        sets_own = isinstance(overrides, Mapping) and "initializer_range" in overrides
        return self.tunes_rate(name) and self.search_settings.initializer_range is not None and not sets_own

    def warmup_grid(self, name: str) -> tuple[float | None, ...]:
        """Return the warm-ups at which an entry's rate is searched; (None,) means only the entry's own."""
        sets_own = not self.entries[name].set.keys().isdisjoint(("warmup_steps", "warmup_ratio"))
        tuned = self.tunes_rate(name) and not sets_own
        return (self.search_settings.warmup_ratio if tuned else None) or (None,)

    def settings_of(self, name: str) -> TrainSettings:
        """Return the training settings of an entry, at the size that it is written with, for the first seed.

        Raises:
            ValueError: if the entry's operators or settings are wrong; the message names the entry.
        """
        entry = self.entries[name]
        operators = dict(entry.operators)
        if entry.operator is not None:
            for pattern in entry.target or self.target:
                operators.setdefault(pattern, entry.operator)
        changes = {"operators": operators, "attachments": list(entry.attachments), "seed": self.seeds[0]}
        if entry.learning_rate is not None:
            changes["learning_rate"] = entry.learning_rate
        # Only what was written: a default of the model's fields must stay a default.
        explicit = self.train.model_dump(exclude_unset=True)
        values = apply_overrides(explicit | changes, entry.set)
        location = f"entries.{name}"
        if "steps" not in values:
            values["steps"] = self._steps(_SharedTrainSettings.load(values, location))
            inherited = {key: value for key, value in values.items() if key not in entry.set}
            values |= scaled_steps(inherited, values["steps"] / self.steps)
        settings = TrainSettings.load(values, location)
        return settings if entry.duration == 1 else scaled_run(settings, entry.duration)


def scaled_steps(values: Mapping[str, Any], ratio: float) -> dict[str, Any]:
    """Return written settings with warm-up and evaluations placed in a run of ``ratio`` times the length."""
    return {**values, **{key: max(1, round(ratio * values[key])) for key in _STEPS_WITHIN if values.get(key)}}


def scaled_run(settings: TrainSettings, ratio: float) -> TrainSettings:
    """Return a whole run of ``ratio`` times the steps, with warm-up and evaluations scaled alike."""
    steps = max(1, round(ratio * settings.steps))
    scaled = scaled_steps(settings.model_dump(exclude_unset=True), ratio) | {"steps": steps}
    if scaled.get("warmup_steps"):
        scaled["warmup_steps"] = min(steps - 1, scaled["warmup_steps"])
    return settings.replace(**scaled)


# Preregistrations: comparisons that are written down before their first final run


_NonEmpty = Field(min_length=1)


class Preregistration(Settings):
    """A preregistered comparison. Gaps are in nats per token.

    Attributes:
        question: the question that the comparison decides.
        command: the command that runs it.
        effect: the gap that it looks for; "not seen" takes a half-width below half of it.
        effect_from: the source of ``effect``.
        std: standard deviation of the paired differences over seeds.
        std_from: the source of ``std``.
        budget: what the runs may take.
        stopping: when the runs end, and what counts if they are cut off.
        without_power: why there are fewer seeds than ``effect`` and ``std`` need; the rows then say "no power".
        comparison: the recipe: entries, settings, grid and seeds.
    """

    question: str = _NonEmpty
    command: str = _NonEmpty
    effect: PositiveFloat
    effect_from: str = _NonEmpty
    std: PositiveFloat
    std_from: str = _NonEmpty
    budget: str = _NonEmpty
    stopping: str = _NonEmpty
    without_power: str = ""
    comparison: CompareSettings

    @model_validator(mode="after")
    def _has_power(self) -> Preregistration:
        count = len(self.comparison.seeds)
        if count < self.seeds_needed and not self.without_power:
            raise ValueError(
                f"{count} seeds cannot detect an effect of {self.effect:g} at a std of {self.std:g}; use "
                f"{self.seeds_needed}, or say why not as without_power"
            )
        return self

    @property
    def seeds_needed(self) -> int:
        """Return how many seeds bring the half-width below half of the effect."""
        return seeds_needed(self.effect, self.std)


def read_preregistration(path: str | Path) -> Preregistration:
    """Return a checked preregistration; the file's name is the default name of the comparison.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if it is not a preregistration, with every fault in it, or has too few seeds.
    """
    values: dict[str, Any] = read_yaml(path)
    if isinstance(recipe := values.get("comparison"), dict):
        values["comparison"] = {"name": Path(path).stem} | recipe
    return Preregistration.load(values, str(path))
