"""Which size of which operator every layer gets: the least predicted loss under a budget."""

import dataclasses
from collections.abc import Mapping, Sequence

from relinear.core.operator import OperatorConfig


@dataclasses.dataclass(frozen=True)
class Candidate:
    """What a layer could become.

    config: None leaves the layer as it is. cost: in what the budget counts (parameters, bytes, FLOPs, seconds). nats:
    predicted increase of the loss per token.
    """

    config: OperatorConfig | None
    cost: float
    nats: float


def amount(value: float) -> str:
    """Return a cost in words: whole numbers in full, fractions of a second to three digits."""
    return f"{value:,.0f}" if abs(value) >= 10 or value == int(value) else f"{value:.3g}"


def allocate(
    candidates: Mapping[str, Sequence[Candidate]], budget: float, unit: str = "parameters"
) -> dict[str, Candidate]:
    """Return one candidate a layer, of least summed ``nats`` with a summed cost of at most ``budget``.

    One price of a unit of cost for the whole model (the multiplier of the budget), found by bisection; what the budget
    still allows then goes to the best single upgrades.

    Raises:
        ValueError: if even the smallest candidates exceed the budget.
    """
    least = sum(min(c.cost for c in options) for options in candidates.values())
    if least > budget:
        raise ValueError(
            f"the budget of {amount(budget)} {unit} cannot be met: the smallest choices take {amount(least)}; keep more"
        )

    def at(price: float) -> dict[str, Candidate]:
        best = {}
        for name, options in candidates.items():
            best[name] = min(options, key=lambda c: (c.nats + price * c.cost, c.cost))
        return best

    def cost(chosen: Mapping[str, Candidate]) -> float:
        return sum(c.cost for c in chosen.values())

    chosen = at(0.0)
    if cost(chosen) > budget:
        low, high = 0.0, 1e-12
        while cost(at(high)) > budget:
            low, high = high, high * 4
        for _ in range(100):
            middle = (low + high) / 2
            low, high = (low, middle) if cost(at(middle)) <= budget else (middle, high)
        chosen = at(high)
    return _spend(chosen, candidates, budget - cost(chosen))


def _spend(
    chosen: dict[str, Candidate], candidates: Mapping[str, Sequence[Candidate]], left: float
) -> dict[str, Candidate]:
    """Upgrade layer after layer, the most nats a unit of cost first, while something fits."""
    chosen = dict(chosen)
    while True:
        upgrades = [
            ((chosen[name].nats - option.nats) / (option.cost - chosen[name].cost), name, option)
            for name, options in candidates.items()
            for option in options
            if chosen[name].cost < option.cost <= chosen[name].cost + left and option.nats < chosen[name].nats
        ]
        if not upgrades:
            return chosen
        _, name, option = max(upgrades, key=lambda u: (u[0], u[1]))
        left -= option.cost - chosen[name].cost
        chosen[name] = option


def best_uniform(candidates: Mapping[str, Sequence[Candidate]], share: float) -> dict[str, Candidate]:
    """Return the best candidate a layer within ``share`` of its own dense cost: every layer shrinks alike.

    A layer that can become nothing else stays as it is.

    Raises:
        ValueError: if a layer has candidates and none that small.
    """
    chosen = {}
    for name, options in candidates.items():
        dense = max(c.cost for c in options if c.config is None)
        fitting = [c for c in options if c.cost <= share * dense]
        if not fitting and len(options) > 1:
            raise ValueError(f"{name}: no candidate takes {share:.0%} of its cost or less; keep more")
        chosen[name] = min(fitting or options, key=lambda c: (c.nats, c.cost))
    return chosen
