"""Sum second moments of linear layers' inputs and output gradients over forward and backward passes."""

# Legend: I in_features, O out_features

import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from relinear.contract.calibration_statistics import CalibrationStatistics
from relinear.contract.linear_layers import linear_features
from relinear.distill.record import SharedTensors
from relinear.system.grouped import grouped

#: statistics of one decoder layer's linear layers, by name
Statistics = Mapping[str, CalibrationStatistics]


class StatisticsSums:
    """Sum x x^T in float64 by name; inputs that share a tensor are summed once, each ``kind`` of text separately.

    Args:
        diagonal: sum only the diagonal for gradients at outputs.
    """

    def __init__(self, *, diagonal: bool = False) -> None:
        self.kind, self.diagonal = 0, diagonal
        #: layer -> kind -> sum, and number of tokens
        self.inputs = defaultdict[str, dict[int, Tensor]](dict)
        self.counts = defaultdict[str, Counter[int]](Counter)
        self.outputs: dict[str, Tensor] = {}
        #: a layer's inputs are summed under the first layer that shares them
        self.shared = SharedTensors()

    def new_pass(self) -> None:
        """Forget the inputs of the previous pass."""
        self.shared.new_pass()

    def add_inputs(self, name: str, x: Tensor) -> None:
        """Add inputs (..., I) of the layer ``name``."""
        if self.shared.is_first(name, x):
            self.counts[name][self.kind] += x[..., 0].numel()
            add_products(self.inputs[name], self.kind, x)

    def on_forward(self, name: str, module: nn.Module, args: tuple, output: Tensor) -> None:
        """Add the inputs of a forward pass of the layer ``name`` and, in the backward pass, its output gradients."""
        self.add_inputs(name, args[0])
        if output.requires_grad:
            output.register_hook(lambda grad: add_products(self.outputs, name, grad, diagonal=self.diagonal))

    def statistics(self, modules: Mapping[str, nn.Module], tokens: int) -> dict[str, CalibrationStatistics]:
        """Return the statistics of linear layers by name; the sums are used up.

        Second moments of inputs are means over the tokens that a layer saw, those of gradients over all ``tokens``: a
        token that does not reach an expert has a gradient of zero there. Kinds are pooled if an expert saw too few
        tokens of them.
        """
        means, kinds = dict[str, Tensor](), dict[str, tuple[Tensor, ...]]()
        for name, sums in self.inputs.items():
            counts = self.counts[name]
            means[name] = torch.stack([*sums.values()]).sum(0) / counts.total()
            enough = [kind for kind in sums if counts.total() == tokens or counts[kind] >= len(sums[kind])]
            kinds[name] = tuple(sums[kind].div_(counts[kind]) for kind in enough)
        statistics = {}
        for name, module in modules.items():
            if (owner := self.shared.owners.get(name)) is None:  # an expert may have seen no token
                statistics[name] = CalibrationStatistics.identity(linear_features(module)[0], tokens=0)
                continue
            outputs = self.outputs[name].div_(tokens)
            count = self.counts[owner].total()
            statistics[name] = CalibrationStatistics(means[owner], outputs, count, kinds[owner])
        return shrunk_to_peers(statistics)


def shrunk_to_peers(statistics: Statistics) -> dict[str, CalibrationStatistics]:
    """Shrink the statistics of experts that saw few tokens towards the mean of their layer's experts.

    One with I inputs that saw n < I tokens keeps n / I of its own. Names of peers differ in a number alone.
    """
    shrunk, mixed = dict(statistics), dict[int, Tensor]()
    for names in grouped((re.sub(r"\.\d+\.", ".*.", name), name) for name in statistics).values():
        counts = {name: statistics[name].tokens or 0 for name in names}
        size = len(statistics[names[0]].input_moment)
        reached = [name for name in names if counts[name]]
        if len(names) == 1 or not reached or min(counts.values()) >= size:
            continue
        inputs: Any = sum(counts[name] * statistics[name].input_moment for name in reached) / sum(counts.values())
        outputs: Any = sum(statistics[name].gradient_moment for name in reached) / len(names)  # type: ignore[misc]
        for name, count in counts.items():
            if count < size:
                measured, share = statistics[name], count / size
                if (key := id(measured.input_moment)) not in mixed:  # gate and up have the same inputs
                    mixed[key] = torch.lerp(inputs, measured.input_moment, share)
                gradients = torch.zeros_like(outputs) if measured.gradient_moment is None else measured.gradient_moment
                shrunk[name] = CalibrationStatistics(mixed[key], torch.lerp(outputs, gradients, share), size)
    return shrunk


def add_products(sums: dict[Any, Tensor], name: Any, values: Tensor, *, diagonal: bool = False) -> None:
    """Add x x^T of the rows x of ``values`` (..., I) to the sum called ``name``, or only its diagonal."""
    rows = values.detach().reshape(-1, values.shape[-1]).float()
    product = rows.square().sum(0) if diagonal else rows.T @ rows
    if name in sums:
        sums[name] += product
    else:
        sums[name] = product.double()
