"""Summarise a model in a table: layer, operator, parameters, FLOPs per token, before and after."""

import dataclasses
import math
import textwrap
from collections.abc import Mapping
from typing import Any

from torch import nn

from relinear.contract.input_checks import check_model
from relinear.contract.linear_layers import embeds, linear_features
from relinear.contract.module_tree import outermost
from relinear.contract.operator import Operator, is_replaceable
from relinear.deprecated import warn_renamed
from relinear.surgery.coverage import Coverage, coverage, dense_size
from relinear.surgery.tied import TiedHead
from relinear.system.grouped import grouped
from relinear.system.text import columns


@dataclasses.dataclass(frozen=True)
class Row:
    """Describe one linear layer, operator or attached part.

    Attributes:
        name: its name in the model.
        operator: its settings; for another module, its class.
        in_features: size of the input; None for an attached part.
        out_features: size of the output; None for an attached part.
        parameters: number of weights, including integers.
        flops_per_token: FLOPs of the forward pass.
        parameters_before: parameters of the layer that was replaced, or of a dense layer.
        flops_before: FLOPs of that layer.
        bytes: size in a checkpoint, including scales.
        inactive_parameters: those that a token does not use, if tokens are routed.
        inactive_flops: FLOPs of these.
    """

    name: str
    operator: str
    in_features: int | None
    out_features: int | None
    parameters: int
    flops_per_token: int
    parameters_before: int
    flops_before: int
    bytes: int = 0
    inactive_parameters: int = 0
    inactive_flops: int = 0


@dataclasses.dataclass(frozen=True)
class Summary:
    """A table of a model's linear layers; ``str`` shows equal layers in one line.

    Attributes:
        rows: one for every layer, operator and attached part.
        parameters: all weights of the model, including integers; tied weights count once.
        flops_per_token: forward FLOPs of the rows, without attention scores, norms and activations.
        parameters_before: weights of the model before layers were replaced.
        flops_before: FLOPs of the rows before layers were replaced.
        coverage: which layers were replaced, and why others were not; printed below the table.
        notes: warnings of ``replace_``; printed last.
        bytes: size of the model in a checkpoint.
        inactive_parameters: sum over the rows.
        inactive_flops: sum over the rows.
    """

    rows: tuple[Row, ...]
    parameters: int
    flops_per_token: int
    parameters_before: int
    flops_before: int
    coverage: Coverage
    notes: tuple[str, ...] = ()
    bytes: int = 0
    inactive_parameters: int = 0
    inactive_flops: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Return the table as JSON values."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        return self.within(1_000_000)

    def within(self, width: int) -> str:
        """Return the table in lines of at most ``width`` characters, with several lines per layer if necessary."""
        head = ("layer", "operator", "in -> out", "parameters", "was", "bits", "bytes", "FLOPs/token", "was")
        lines: list[tuple[str, ...]] = [head]
        equal = grouped(((_pattern(row.name), dataclasses.replace(row, name="")), row.name) for row in self.rows)
        for (_, row), names in equal.items():
            shape = "" if row.in_features is None else f"{row.in_features} -> {row.out_features}"
            name = names[0] if len(names) == 1 else f"{_common_pattern(names)} (x{len(names)})"
            lines.append((name, row.operator, shape, *_size_columns(row, len(names))))
        lines.append(("whole model", "", "", *_size_columns(self, 1)))
        table = columns(lines, left_aligned=3).splitlines()
        rule = "-" * min(max(map(len, table)), width)
        if max(map(len, table)) > width:
            template = "{}\n  {}  {}\n  parameters {} (was {}), {} bits each, {} bytes, FLOPs/token {} (was {})"
            table = ["", *(template.format(*line) for line in lines[1:])]
        notes = map("note: {}".format, self.notes)
        text = "\n".join([table[0], rule, *table[1:-1], rule, table[-1], str(self.coverage), *notes])
        return "\n".join(textwrap.fill(line, width, subsequent_indent="    ") for line in text.splitlines() if line)


def _size_columns(row: Row | Summary, count: int) -> list[str]:
    """Return the numeric columns for ``count`` equal rows; bits are per weight, including scales."""
    parameters = row.parameters * count
    before = row.parameters_before * count
    size = row.bytes * count
    bits = f"{8 * size / parameters:.4g}" if parameters else ""
    active = parameters - row.inactive_parameters * count
    flops = row.flops_per_token * count
    total = flops + row.inactive_flops * count
    now = f"{parameters:,}" + (f" ({active:,} active)" if active < parameters else "")
    cost = f"{flops:,}" + (f" ({total:,} in all)" if flops < total else "")
    return [now, f"{before:,}", bits, f"{size:,}", cost, f"{row.flops_before * count:,}"]


def _pattern(name: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _common_pattern(names: list[str]) -> str:
    """Return one pattern for ``names``: parts that differ become a range or a star."""
    merged = []
    for parts in zip(*(name.split(".") for name in names), strict=True):
        values = sorted({int(p) for p in parts}) if all(p.isdigit() for p in parts) else None
        if len(set(parts)) == 1:
            merged.append(parts[0])
        elif values is not None and values == list(range(values[0], values[-1] + 1)):
            merged.append(f"{{{values[0]}..{values[-1]}}}")
        else:
            merged.append("*")
    return ".".join(merged)


def module_parameters(module: nn.Module) -> int:
    """Return the number of weights, shared ones once; integers count, their scales do not."""
    integers = (part.weights_beyond_parameters for part in module.modules() if isinstance(part, Operator))
    return sum(p.numel() for p in module.parameters()) + sum(integers)


def module_bytes(module: nn.Module) -> int:
    """Return the bytes of parameters and saved buffers, shared ones once."""
    parts = module.state_dict(keep_vars=True).values()
    return sum(part.nbytes for part in {id(part): part for part in parts}.values())


def _states_flops(module: Any) -> bool:
    return callable(getattr(module, "flops_per_token", None))


def module_flops(module: Any) -> int:
    """Return forward FLOPs per token of a linear layer, an operator, or an attached part that states them."""
    if embeds(module):
        return 0  # rows are looked up; a product of the tied head counts there
    if _states_flops(module):
        return int(module.flops_per_token())
    in_features, out_features = linear_features(module)
    return 2 * in_features * out_features


def module_inactive(module: nn.Module) -> tuple[int, int]:
    """Return the parameters and the FLOPs that one token does not use, summed over the operators in ``module``."""
    parts = [part.inactive_per_token() for part in module.modules() if isinstance(part, Operator)]
    return sum(parameters for parameters, _ in parts), sum(flops for _, flops in parts)


def _dense_flops(module: Any) -> int:
    """Return the FLOPs per token of a dense layer with the sizes of ``module``."""
    product = module.table if isinstance(module, TiedHead) else None if embeds(module) else module
    return 2 * math.prod(linear_features(product)) if product is not None and is_replaceable(product) else 0


def summary(
    model: nn.Module,
    *,
    before: Mapping[str, tuple[int, int]] | None = None,
    skipped: Mapping[str, str] | None = None,
    left: Mapping[str, str] | None = None,
) -> Summary:
    """Tabulate the linear layers, operators and attached parts of ``model``.

    Args:
        model: any ``nn.Module``, also on the meta device.
        before: (parameters, FLOPs per token) of replaced layers by name, for the "was" columns; by default those of a
            dense layer of the same shape.
        skipped: why linear layers were not replaced, by name, for the lines below the table.
        left: the old name of ``skipped``.

    Returns:
        A table to print, with rows, parameters and forward FLOPs per token, now and before.

    Examples:
        >>> model = relinear.from_preset("tiny")
        >>> _ = relinear.replace_(model, {"all-linear": relinear.LowRank(rank=8)})
        >>> print(relinear.summary(model))
        layer    operator ...
    """
    check_model(model, "summary")
    if left is not None:
        warn_renamed("summary(left=)", "skipped")
        skipped = left
    rows: list[Row] = []
    for name, module in outermost(model, lambda m: is_replaceable(m) or (m is not model and _states_flops(m))):
        shape = linear_features(module) if is_replaceable(module) else None
        operator = str(module.config) if isinstance(module, Operator) else type(module).__name__
        size = (module_parameters(module), module_flops(module))
        dense = (dense_size(module) if shape else 0, _dense_flops(module))
        was = (before or {}).get(name, dense if isinstance(module, Operator) or not shape else size)
        in_features, out_features = shape or (None, None)
        memory = (module_bytes(module), *module_inactive(module))
        rows.append(Row(name, operator, in_features, out_features, *size, *was, *memory))
    parameters = module_parameters(model)
    flops = sum(row.flops_per_token for row in rows)
    return Summary(
        tuple(rows),
        parameters,
        flops,
        parameters + sum(row.parameters_before - row.parameters for row in rows),
        flops + sum(row.flops_before - row.flops_per_token for row in rows),
        coverage(model, {name: size for name, (size, _) in (before or {}).items()}, skipped or {}),
        bytes=module_bytes(model),
        inactive_parameters=sum(row.inactive_parameters for row in rows),
        inactive_flops=sum(row.inactive_flops for row in rows),
    )
