"""Choose the plan of least predicted loss under a budget in parameters or stored bytes."""

import dataclasses
import functools
import heapq
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from relinear.contract.linear_layers import linear_features
from relinear.contract.operator import OperatorConfig
from relinear.surgery.summary import module_parameters


@dataclasses.dataclass(frozen=True)
class Candidate:
    """Describe an option for a layer.

    Attributes:
        config: None leaves the layer unchanged.
        cost: in the budget's unit, parameters or bytes.
        nats: predicted increase of the loss per token.
    """

    config: OperatorConfig | None
    cost: float
    nats: float


#: candidates of every layer, by name
Choices = Mapping[str, Sequence[Candidate]]


def allocate(candidates: Choices, budget: float, unit: str = "parameters") -> dict[str, Candidate]:
    """Return one candidate per layer, of least summed ``nats`` with a summed cost of at most ``budget``.

    The largest layer, such as an embedding, may be most of a model, so that no price per unit of cost meets the budget.
    Therefore the next smaller and larger candidates of this layer are tried, too.

    Raises:
        ValueError: if even the smallest candidates exceed the budget.
    """
    smallest = sum(min(c.cost for c in options) for options in candidates.values())
    if smallest > budget:
        raise ValueError(
            f"the budget of {budget:,.0f} {unit} cannot be met: the smallest choices take {smallest:,.0f}; ask for more"
        )
    largest = max(candidates, key=lambda name: max(c.cost for c in candidates[name]))
    options = sorted(candidates[largest], key=lambda c: c.cost)
    plans = [_upgraded(candidates, budget)]
    at = options.index(plans[0][largest])
    for option in (*options[max(0, at - 1) : at], *options[at + 1 : at + 2]):
        if smallest - options[0].cost + option.cost <= budget:
            plans.append(_upgraded({**candidates, largest: [option]}, budget))
    return min(plans, key=lambda plan: sum(c.nats for c in plan.values()))


def _upgraded(candidates: Choices, budget: float) -> dict[str, Candidate]:
    """Start from the smallest candidate of every layer and upgrade while one fits, most nats per unit of cost first.

    So all layers pay the same price per unit of cost, except for the last upgrades.
    """
    chosen = {name: min(options, key=lambda c: (c.cost, c.nats)) for name, options in candidates.items()}
    remaining = budget - sum(c.cost for c in chosen.values())
    upgrades: list[tuple[float, str, Candidate]] = []

    def offer(name: str) -> None:
        now, best, rate = chosen[name], None, 0.0
        for option in candidates[name]:
            if now.cost < option.cost <= now.cost + remaining:
                change = (option.nats - now.nats) / (option.cost - now.cost)
                if change < rate:
                    best, rate = option, change
        if best is not None:
            heapq.heappush(upgrades, (rate, name, best))

    for name in candidates:
        offer(name)
    while upgrades:
        _, name, option = heapq.heappop(upgrades)
        if option.cost - chosen[name].cost <= remaining:
            remaining -= option.cost - chosen[name].cost
            chosen[name] = option
        offer(name)
    return chosen


class LayerSize(NamedTuple):
    """Cost of a layer: its parameters and its stored bytes."""

    parameters: int
    stored: int


def stored_bytes(module: nn.Module) -> int:
    """Return the bytes of ``module`` in a checkpoint, floats at no more than half precision; tied tensors once.

    Parameters in float32 count as 16 bits each, because they are saved so under a budget of bytes. The dtype in which a
    model was loaded says nothing about that of its checkpoint.
    """
    tensors = module.state_dict().values()
    widest = {True: 2, False: 8}
    distinct = {(t.data_ptr() or id(t), tuple(t.shape)): t for t in tensors}.values()
    return sum(t.numel() * min(t.element_size(), widest[t.is_floating_point()]) for t in distinct)


def size_of(module: Any, config: OperatorConfig | None = None) -> LayerSize:
    """Return the size of a linear layer's replacement; None leaves the layer. Raises ValueError if it does not fit."""
    if config is None:
        return LayerSize(module_parameters(module), stored_bytes(module))
    bias = getattr(module, "bias", None) is not None
    return _built(config, *linear_features(module), bias, next(module.parameters()).dtype)


@functools.lru_cache(maxsize=100_000)
def _built(config: OperatorConfig, in_features: int, out_features: int, bias: bool, dtype: torch.dtype) -> LayerSize:
    return size_of(config.build(in_features, out_features, bias, device="meta", dtype=dtype))


@dataclasses.dataclass(frozen=True)
class Budget:
    """The budget for the replaceable layers, and the cost of each.

    Attributes:
        text: the budget as its setting.
        unit: unit of all costs, "parameters" or "bytes".
        limit: the largest total cost.
        cost: gives the cost of a layer, by name, with an operator or unchanged (None); infinite if it does not fit.
        setting_for: gives the setting for a total cost of the layers, rounded up.
    """

    text: str
    unit: str
    limit: float
    cost: Callable[[str, OperatorConfig | None], float]
    setting_for: Callable[[float], str]

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        return {"what": self.text, "unit": self.unit, "limit": self.limit}
