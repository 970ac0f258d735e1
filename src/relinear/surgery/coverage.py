"""Coverage: the share of a model's linear parameters that operators replaced, and why the others were not replaced."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from relinear.contract.linear_layers import embeds, linear_features
from relinear.contract.operator import Operator, is_replaceable
from relinear.deprecated import with_attributes_of_0_2
from relinear.settings.messages import warn_user
from relinear.surgery.select import (
    OUTPUT_HEAD,
    PART_PREFIX,
    READ_ELSEWHERE,
    is_added_by_peft,
    output_head_ids,
    reader_of_weight,
)

_TIED = "tied to the embedding"
_SUBCLASS = "a subclass of nn.Linear"
_FUSED = "held as parameters, no nn.Linear"
_ADAPTER = "PEFT's"
#: reasons why no pattern can reach a layer
_OUT_OF_REACH = (READ_ELSEWHERE, _SUBCLASS, _FUSED)
_WARN_ABOVE_SHARE = 0.1  # of the linear parameters


@dataclasses.dataclass(frozen=True)
class Unreplaced:
    """Group the linear layers of one class that were not replaced for one reason.

    Attributes:
        reason: why they were not replaced.
        kind: name of their class.
        names: their names in the model.
        parameters: number of their parameters.
    """

    reason: str
    kind: str
    names: tuple[str, ...]
    parameters: int

    def describe(self) -> str:
        """Return their number, class, one name and the reason as text."""
        return f"{len(self.names)} {self.kind} such as {self.names[0]} ({self.reason})"


@with_attributes_of_0_2
@dataclasses.dataclass(frozen=True)
class Coverage:
    """Count the replaced and the other linear parameters of a model: dense matrices and their biases.

    Embeddings, norms, convolutions and a head that is tied to the embedding do not count.

    Attributes:
        replaced_layers: number of replaced layers.
        replaced_parameters: number of parameters that they had before.
        skipped: the layers that were not replaced, by reason.
    """

    replaced_layers: int
    replaced_parameters: int
    skipped: tuple[Unreplaced, ...]

    @property
    def total(self) -> int:
        """Return the number of linear parameters, replaced or not."""
        return self.replaced_parameters + sum(entry.parameters for entry in self.skipped)

    def share(self, parameters: int) -> float:
        """Return ``parameters`` as a share of the total."""
        return parameters / self.total if self.total else 0.0

    def __str__(self) -> str:
        lines = [
            f"replaced: {self.replaced_layers} layers, {self.share(self.replaced_parameters):.1%} of the linear "
            "parameters (embeddings left out)"
        ]
        lines += [f"skipped: {self.share(entry.parameters):.1%}, {entry.describe()}" for entry in self.skipped]
        return "\n".join(lines)


def dense_size(module: nn.Module) -> int:
    """Return the number of parameters of a dense layer with the sizes of ``module``."""
    in_features, out_features = linear_features(module)
    return in_features * out_features + (out_features if getattr(module, "bias", None) is not None else 0)


def coverage(model: nn.Module, before: Mapping[str, int], skipped: Mapping[str, str]) -> Coverage:
    """Return which linear layers of ``model`` operators replaced, and why others were not.

    Args:
        model: any module, also on the meta device.
        before: parameters of replaced layers by name; by default those of a dense layer.
        skipped: why the selection left layers alone, by name; for other names, the reason is determined here.
    """
    head_ids = output_head_ids(model)
    embedded = {id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters(recurse=False)}

    def reason(name: str, module: nn.Module, obstacle: str | None, weights: list[nn.Parameter]) -> str:
        if obstacle is not None:
            return obstacle
        if any(id(p) in embedded for p in weights):
            return _TIED
        if id(module) in head_ids:
            return OUTPUT_HEAD
        return skipped.get(name) or _weight_reader_reason(model, name)

    layers = parameters = 0
    groups: dict[tuple[str, str], tuple[list[str], list[int]]] = {}
    for name, module, obstacle, weights in _linear_maps(model):
        if embeds(module):
            continue
        if isinstance(module, Operator):
            layers += 1
            parameters += before.get(name, dense_size(module))
            continue
        names, counts = groups.setdefault((reason(name, module, obstacle, weights), type(module).__name__), ([], []))
        names.append(name)
        counts.append(sum(p.numel() for p in weights if id(p) not in embedded))
    entries = (Unreplaced(*group, tuple(names), sum(counts)) for group, (names, counts) in groups.items())
    return Coverage(layers, parameters, tuple(sorted(entries, key=lambda entry: -entry.parameters)))


def _weight_reader_reason(model: nn.Module, name: str) -> str:
    reader = reader_of_weight(model, name) if name else None
    return f"{READ_ELSEWHERE} ({reader})" if reader else "dense"


def _linear_maps(model: nn.Module) -> Iterator[tuple[str, nn.Module, str | None, list[nn.Parameter]]]:
    """Yield (name, module, why no pattern can match it, own parameters) of operators, linear layers and other matrices.

    Each module comes once; the reason is None if a pattern can match it.
    """
    visited: set[int] = set()

    def walk(module: Any, name: str, adapter: bool) -> Iterator[tuple[str, nn.Module, str | None, list[nn.Parameter]]]:
        if id(module) in visited:
            return
        visited.add(id(module))
        if is_replaceable(module):
            yield name, module, _ADAPTER if adapter else None, list(module.parameters(recurse=not adapter))
            return
        weights = list(module.parameters(recurse=False))
        if isinstance(module, nn.Linear):
            yield name, module, _ADAPTER if adapter else _SUBCLASS, weights
        elif _holds_matrices(module):
            if not adapter:
                weights = [p for p in weights if p.ndim > 1]
            yield name, module, _ADAPTER if adapter else _FUSED, weights
        for key, child in module.named_children():
            if not key.startswith(PART_PREFIX):
                yield from walk(child, f"{name}.{key}" if name else key, adapter or is_added_by_peft(module, key))

    yield from walk(model, "", False)


def _holds_matrices(module: nn.Module) -> bool:
    """Return whether a module that is not one of torch's layers has matrices as parameters: fused experts, routers."""
    if type(module).__module__.startswith("torch.") or isinstance(module, nn.Embedding | nn.modules.conv._ConvNd):
        return False
    return any(p is not None and p.ndim > 1 and p.is_floating_point() for p in module._parameters.values())


def out_of_reach(report: Coverage) -> list[Unreplaced]:
    """Return the layers that no pattern can reach: fused experts, subclasses of nn.Linear, weights read elsewhere."""
    return [entry for entry in report.skipped if entry.reason.startswith(_OUT_OF_REACH)]


def warn_of_gaps(report: Coverage) -> None:
    """Warn if patterns cannot reach more than a tenth of the linear parameters outside of the output head."""
    gaps = out_of_reach(report)
    head = sum(entry.parameters for entry in report.skipped if entry.reason == OUTPUT_HEAD)
    missing = sum(entry.parameters for entry in gaps)
    if missing > _WARN_ABOVE_SHARE * (report.total - head):
        described = "; ".join(entry.describe() for entry in gaps)
        warn_user(
            f'"all-linear" leaves {missing / (report.total - head):.0%} of the linear parameters (embeddings and '
            f"output head not counted) as they were: {described}"
        )
