"""Plans: a comparison that is written down, with the effect it looks for, before its first final run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import Field, PositiveFloat, model_validator

from relinear.compare.recipe import read_yaml
from relinear.compare.settings import CompareSettings
from relinear.core.settings import Seed, Settings
from relinear.system.student import seeds_needed

_Said = Field(min_length=1)


class Study(Settings):
    """What a script of results/ trains, where ``relinear compare`` cannot.

    Attributes:
        arms: name -> what it is.
        settings: that all arms share, as the script takes them.
        grid: name of a setting -> values that are tried for every arm.
        seeds: a run of every arm for each.
    """

    arms: dict[str, str] = Field(min_length=2)
    settings: dict[str, Any]
    grid: dict[str, tuple[Any, ...]]
    seeds: tuple[Seed, ...] = Field(min_length=1)


class Plan(Settings):
    """A planned comparison. Gaps are in nats a token.

    Attributes:
        question: that the comparison decides.
        command: that carries it out.
        effect: the gap that is looked for; "not seen" takes a half-width below half of it.
        effect_from: where it comes from.
        spread: standard deviation over seeds of the paired differences, as far as it is known.
        spread_from: where it was seen.
        budget: what the runs may take.
        stopping: when the runs end, and what counts if they are cut off.
        without_power: why there are fewer seeds than effect and spread take; the rows then say "no power".
        comparison: the recipe: arms, settings, grid and seeds.
        study: the same for a script, in place of a comparison.
    """

    question: str = _Said
    command: str = _Said
    effect: PositiveFloat
    effect_from: str = _Said
    spread: PositiveFloat
    spread_from: str = _Said
    budget: str = _Said
    stopping: str = _Said
    without_power: str = ""
    comparison: CompareSettings | None = None
    study: Study | None = None

    @model_validator(mode="after")
    def _has_power(self) -> Plan:
        planned = self.comparison or self.study
        if planned is None or (self.comparison is not None and self.study is not None):
            raise ValueError("a plan has a comparison, or the study of a script: one of them")
        count = len(planned.seeds)
        if count < self.seeds_needed and not self.without_power:
            raise ValueError(
                f"{count} seeds cannot tell an effect of {self.effect:g} from none at a spread of {self.spread:g}: it "
                f"takes {self.seeds_needed}; add seeds, or say why not as without_power"
            )
        return self

    @property
    def seeds_needed(self) -> int:
        """Seeds that bring the half-width below half of the effect."""
        return seeds_needed(self.effect, self.spread)


def read_plan(path: str | Path) -> Plan:
    """Return a checked plan; a comparison is named by the file unless it says otherwise.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if it is no plan, with every fault in it, or has too few seeds.
    """
    values: dict[str, Any] = read_yaml(path)
    if isinstance(recipe := values.get("comparison"), dict):
        values["comparison"] = {"name": Path(path).stem} | recipe
    return Plan.load(values, str(path))


def planned(path: str | Path) -> CompareSettings:
    """Return the comparison of a plan. Raises as ``read_plan``, and ValueError where a script carries it out."""
    plan = read_plan(path)
    if plan.comparison is None:
        raise ValueError(f"{path} is carried out by a script: {plan.command}")
    return plan.comparison
