"""What a comparison is going to train: every entry, at the size that makes it comparable."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from relinear.compare.match import Size, matched, measure_size
from relinear.compare.settings import CompareSettings
from relinear.train.settings import TrainSettings


@dataclasses.dataclass(frozen=True)
class Event:
    """What a comparison is doing, for those who watch.

    stage: "data", "match", "tune", "train" or "speed".
    what: in words.
    done, total: of this piece of work (optimiser steps, or characters read; total 0 where it is not known).
    run, runs: training runs that have ended, and how many there are as far as is known.
    detail: numbers worth showing, by name.
    """

    stage: str
    what: str
    done: int = 0
    total: int = 0
    run: int = 0
    runs: int = 0
    detail: Mapping[str, float | None] = dataclasses.field(default_factory=dict)


OnEvent = Callable[[Event], None]


@dataclasses.dataclass(frozen=True)
class Planned:
    """An entry at its final size. deviation: from the target of matching; None where it was not matched."""

    name: str
    settings: TrainSettings
    size: Size
    deviation: float | None


def plan_comparison(recipe: CompareSettings, vocab_size: int, on_event: OnEvent = lambda event: None) -> list[Planned]:
    """Return every entry at the size that it is trained with.

    Args:
        recipe: what to compare.
        vocab_size: of the tokenizer.
        on_event: told which entry is being sized.

    Raises:
        ValueError: if a model cannot be built, or an entry cannot be matched within the tolerance.
    """
    written = {name: recipe.settings_of(name) for name in recipe.entries}
    sizes: dict[str, Size] = {}
    for name, settings in written.items():
        on_event(Event("match", f"sizing {name}"))
        try:
            sizes[name] = measure_size(settings, vocab_size)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
    match = recipe.match
    if match.by == "width":
        return [Planned(name, written[name], sizes[name], None) for name in recipe.entries]

    def at(target: int, reference: str | None = None) -> list[Planned]:
        """Every entry at the size of ``target``, that of the entry ``reference`` if any."""
        planned = []
        for name, entry in recipe.entries.items():
            settings, size, deviation = written[name], sizes[name], 0.0 if name == reference else None
            if name != reference and entry.how != "fixed":
                on_event(Event("match", f"matching {name} by {match.by}"))
                wanted: Any = {"by": match.by, "target": target, "how": entry.how, "tolerance": match.tolerance}
                settings, size = matched(settings, vocab_size, **wanted, name=name)
                deviation = size.of(match.by) / target - 1
            planned.append(Planned(name, settings, size, deviation))
        return planned

    if isinstance(match.to, int):
        return at(match.to)
    candidates = [match.to] if match.to else [n for n, entry in recipe.entries.items() if entry.how != "fixed"]
    if not candidates:
        raise ValueError(f"match.by is {match.by!r}, but no entry can be resized: all are fixed or dense")
    refused: list[ValueError] = []
    for reference in candidates:  # the first whose size the others can have
        try:
            return at(sizes[reference].of(match.by), reference)
        except ValueError as error:
            refused.append(error)
    raise refused[0]


def match_target(recipe: CompareSettings, planned: Iterable[Planned]) -> tuple[int | None, str | None]:
    """The number that entries were matched to (None where they were not), and the entry that it is taken from."""
    match = recipe.match
    if match.by == "width" or isinstance(match.to, int):
        return (None if match.by == "width" else match.to), None  # type: ignore[return-value]
    found = {p.name: p for p in planned if p.deviation == 0}
    reference = found[match.to] if match.to else next(iter(found.values()))
    return reference.size.of(match.by), reference.name
