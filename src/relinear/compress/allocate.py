"""Which size of which operator every layer gets: the least predicted loss under a budget."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from relinear.core.operator import OperatorConfig

__all__ = ["Candidate", "allocate", "best_uniform"]


@dataclasses.dataclass(frozen=True)
class Candidate:
    """What a layer could become.

    config: None leaves the layer as it is. size: parameters. nats: predicted increase of the loss per token.
    """

    config: OperatorConfig | None
    size: int
    nats: float


def _choice(candidates: Sequence[Candidate], price: float) -> Candidate:
    return min(candidates, key=lambda c: (c.nats + price * c.size, c.size))


def allocate(candidates: Mapping[str, Sequence[Candidate]], budget: int) -> dict[str, Candidate]:
    """One candidate a layer, of least summed ``nats`` with a summed size of at most ``budget``.

    One price of a parameter for the whole model (the multiplier of the budget), found by bisection; what the budget
    still allows then goes to the best single upgrades.

    Raises:
        ValueError: if even the smallest candidates exceed the budget.
    """
    least = sum(min(c.size for c in options) for options in candidates.values())
    if least > budget:
        raise ValueError(
            f"the budget of {budget:,} parameters cannot be met: the smallest choices take {least:,}; keep more"
        )

    def at(price: float) -> dict[str, Candidate]:
        return {name: _choice(options, price) for name, options in candidates.items()}

    def size(chosen: Mapping[str, Candidate]) -> int:
        return sum(c.size for c in chosen.values())

    chosen = at(0.0)
    if size(chosen) > budget:
        low, high = 0.0, 1e-12
        while size(at(high)) > budget:
            low, high = high, high * 4
        for _ in range(100):
            middle = (low + high) / 2
            low, high = (low, middle) if size(at(middle)) <= budget else (middle, high)
        chosen = at(high)
    return _spend(chosen, candidates, budget - size(chosen))


def _spend(
    chosen: dict[str, Candidate], candidates: Mapping[str, Sequence[Candidate]], left: int
) -> dict[str, Candidate]:
    """Upgrade layer after layer, the most nats a parameter first, while something fits."""
    chosen = dict(chosen)
    while True:
        upgrades = [
            ((chosen[name].nats - option.nats) / (option.size - chosen[name].size), name, option)
            for name, options in candidates.items()
            for option in options
            if chosen[name].size < option.size <= chosen[name].size + left and option.nats < chosen[name].nats
        ]
        if not upgrades:
            return chosen
        _, name, option = max(upgrades, key=lambda u: (u[0], u[1]))
        left -= option.size - chosen[name].size
        chosen[name] = option


def best_uniform(candidates: Mapping[str, Sequence[Candidate]], share: float) -> dict[str, Candidate]:
    """The best candidate a layer within ``share`` of its own dense size: every layer shrinks alike.

    Raises:
        ValueError: if a layer has no candidate that small.
    """
    chosen = {}
    for name, options in candidates.items():
        dense = max(c.size for c in options if c.config is None)
        fitting = [c for c in options if c.size <= share * dense]
        if not fitting:
            raise ValueError(f"{name}: no candidate takes {share:.0%} of its parameters or fewer; keep more")
        chosen[name] = min(fitting, key=lambda c: (c.nats, c.size))
    return chosen
