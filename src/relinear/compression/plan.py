"""Define the plan of a compression, saved as an editable file: each layer's operator and its predicted loss."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

from relinear.compression.budget import size_of
from relinear.compression.storage import write_record
from relinear.contract.linear_layers import is_embedding, linear_features
from relinear.contract.operator import NotLinearError, Operator, OperatorConfig, is_replaceable
from relinear.settings.messages import quoted
from relinear.surgery.summary import module_parameters
from relinear.system.files import damaged_file_errors, read_json
from relinear.system.grouped import grouped
from relinear.system.text import columns

FORMAT = 1


@dataclasses.dataclass(frozen=True)
class LayerPlan:
    """Plan one layer.

    Attributes:
        operator: the operator that replaces it; None leaves it unchanged.
        parameters: number of the operator's parameters.
        parameters_before: number of the layer's parameters.
        nats: predicted increase of the loss per token; None without a prediction.
        bits: stored for each weight of the original layer; a float counts as at most half precision.
    """

    operator: OperatorConfig | None
    parameters: int
    parameters_before: int
    nats: float | None
    bits: float

    @classmethod
    def of(cls, module: Any, operator: OperatorConfig | None, nats: float | None, stored: float | None = None) -> Self:
        """Return the plan for the linear layer ``module``; ``stored``: its bytes, if not those that relinear stores."""
        size, before = size_of(module, operator), module_parameters(module)
        return cls(operator, size.parameters, before, nats, 8 * (size.stored if stored is None else stored) / before)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        return dataclasses.asdict(self) | {"operator": None if self.operator is None else self.operator.to_dict()}


@dataclasses.dataclass(frozen=True)
class CompressPlan:
    """The operator of every replaceable layer, by name in the model's order."""

    layers: dict[str, LayerPlan]

    @property
    def replaced(self) -> dict[str, OperatorConfig]:
        """Return the operators of the layers that are replaced, by name."""
        return {name: layer.operator for name, layer in self.layers.items() if layer.operator is not None}

    @property
    def rows(self) -> dict[str, dict[str, Any]]:
        """Return each layer's values in a plan's file and in a report, by name."""
        return {name: layer.to_dict() for name, layer in self.layers.items()}

    @property
    def parameters(self) -> int:
        """Return the number of parameters of the layers after compression."""
        return sum(layer.parameters for layer in self.layers.values())

    @property
    def parameters_before(self) -> int:
        """Return the number of parameters of the layers before compression."""
        return sum(layer.parameters_before for layer in self.layers.values())

    @property
    def nats(self) -> float | None:
        """Return the predicted increase of the loss, in nats per token; None if a layer has no prediction."""
        each = [layer.nats for layer in self.layers.values()]
        return None if any(value is None for value in each) else sum(each)  # type: ignore[arg-type]

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON, atomically."""
        write_record(path, {"format": FORMAT, "layers": self.rows})

    @classmethod
    def load(
        cls, path: str | Path, model: Any, stored: Callable[[str, OperatorConfig | None], float] | None = None
    ) -> CompressPlan:
        """Read a plan from a file, which may have been edited.

        Sizes are counted again. Operators may be mappings or text.

        Args:
            path: path of the file.
            model: the original.
            stored: gives the bytes of a layer with an operator, if another file format stores it.

        Raises:
            ValueError: if the file is not a plan, or names a layer that the model does not have or an operator that
                does not fit it.
            OSError: if there is no such file.
        """
        modules = dict(model.named_modules())
        plans = {}
        with damaged_file_errors(path, "not a compression plan", "give the file, such as DIR/plan.json"):
            values = read_json(path)
            rows = {name: dict(layer) for name, layer in dict(values["layers"]).items()}
        if values.get("format", FORMAT) != FORMAT or not rows:
            reason = f"format {FORMAT} is read, got {quoted(values.get('format'))}" if rows else "it names no layer"
            raise ValueError(f"{path} is not a compression plan that can be applied: {reason}")
        for name, layer in rows.items():
            module = modules.get(name)
            if not (is_replaceable(module) or is_embedding(module)) or isinstance(module, Operator):
                raise ValueError(f"{path}: the model has no linear layer {quoted(name)}; the plan is for another model")
            try:
                config = layer.get("operator")
                operator = None if config is None else OperatorConfig.read(config, is_record=True)
                if operator is not None:
                    check_fittable(operator, module)
                layer_plan = LayerPlan.of(module, operator, None, stored(name, operator) if stored else None)
                unedited = all(layer.get(key) in (None, getattr(layer_plan, key)) for key in ("parameters", "bits"))
                nats = 0.0 if operator is None else layer.get("nats") if unedited else None
                plans[name] = dataclasses.replace(layer_plan, nats=nats)
            except (ValueError, TypeError) as error:
                raise ValueError(f"{path}: {name}: {error}") from error
        return cls(plans)

    def table(self, in_bits: bool) -> str:
        """Return a text table by type of layer, with bits per weight or the share of parameters kept."""
        rows = [("layers", "count", "dense", "bits" if in_bits else "kept", "predicted nats")]
        for row in by_type(self.rows):
            nats = "" if row["nats"] is None else f"{row['nats']:.4f}"
            share = f"{row['bits']:.2f}" if in_bits else f"{row['after'] / row['before']:.3f}"
            rows.append((row["name"], str(row["count"]), str(row["dense"]), share, nats))
        return columns(rows)


def by_type(layers: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for every type of layer, and one for all, from the layers' ``LayerPlan.to_dict``."""
    groups = grouped((layer_type(name), layer) for name, layer in layers.items())
    groups["all"] = list(layers.values())
    rows = []
    for name, group in groups.items():
        nats = [layer["nats"] for layer in group]
        row = {"name": name, "count": len(group), "nats": None if None in nats else sum(nats)}
        row["dense"] = sum(layer["operator"] is None for layer in group)
        row["before"] = sum(layer["parameters_before"] for layer in group)
        row["after"] = sum(layer["parameters"] for layer in group)
        row["bits"] = sum(layer["parameters_before"] * (layer.get("bits") or 0) for layer in group) / row["before"]
        rows.append(row)
    return rows


def layer_type(name: str) -> str:
    """Return a layer's type: the last part of its name."""
    return name.rpartition(".")[2]


def check_fittable(operator: OperatorConfig, module: Any) -> Operator:
    """Return the operator for the linear layer ``module``, without values. Raises ValueError if it has no matrix."""
    if operator.conditioned:
        raise ValueError(f"{operator} reads a context, which a plain layer does not have")
    built = operator.build(*linear_features(module), bias=False, device="meta")
    try:
        built.to_dense()
    except NotLinearError as error:
        raise ValueError(f"{error}; only operators with a dense matrix can be fitted") from error
    return built
