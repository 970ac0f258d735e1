"""Quantized linear layers: integers of 2 to 8 bits, in groups of inputs that share a scale and a zero point."""

# Legend: I in_features, O out_features, K groups of a row

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn

from relinear.contract.calibration_statistics import CalibrationStatistics
from relinear.contract.config import Count, IntRange, register
from relinear.contract.linear_layers import dense_weight
from relinear.contract.operator import Operator, OperatorConfig, ParamRole
from relinear.functional import quantized as reference
from relinear.functional.rounding import (
    Grid,
    change_codes,
    coordinate_descent,
    cross_validated_shrinkage,
    expected_error,
    gptq,
    gptq_costs,
    nearest_grid,
    round_to_nearest,
    shrunk,
    with_units,
)
from relinear.kernels.quantized import code_changer, prepare_few_rows, quantized
from relinear.operators.fused_inference import FusedInference

#: bits per weight of a layer's candidates
_CANDIDATE_BITS = (2, 3, 4, 5, 6, 8)
#: rows that are rounded to estimate the error of a candidate: at least this many, and one in so many of a large matrix
SAMPLED_ROWS, SAMPLED_EVERY = 16, 64
#: rows that are rounded at a time if they are independent, as the rows of a vocabulary take gigabytes
ROWS_AT_ONCE = 2**15
#: shrinkage of the moments of 8,192 tokens of one kind of text, chosen on moments of other tokens
INPUTS_SHRINKAGE, OUTPUTS_SHRINKAGE = 0.05, 0.5


class QuantizedLinear(FusedInference, Operator):
    """y = x W^T + bias with W = scales (codes - zeros).

    Parameters: ``scales`` (O, K), optional ``bias`` (O,). Buffers, which training does not change: ``codes``, bytes of
    packed integers, and ``zeros`` (O, K), one byte each (None if symmetric). In K types a group's scale and offset are
    integer multiples, ``multiples`` (O, K) and ``zeros``, of units that groups share; ``scales`` holds the units.
    """

    config: Quantized
    codes: Tensor
    zeros: Tensor | None
    multiples: Tensor | None

    def create(self, **kw: Any) -> None:
        outputs, groups = self.out_features, reference.group_count(self.in_features, self.config.group)
        width = reference.packed_width(self.in_features, self.config.bits)
        integers = kw | {"dtype": torch.uint8}
        self.register_buffer("codes", torch.empty(outputs, width, **integers))
        self.register_buffer("zeros", None if self.config.symmetric else torch.empty(outputs, groups, **integers))
        is_k = self.config.levels == "k"
        self.register_buffer("multiples", torch.empty(outputs, groups, **integers) if is_k else None)
        if is_k:
            groups = self.in_features // reference.SUPER * (1 if self.config.symmetric else 2)
        self.scales = nn.Parameter(torch.empty(outputs, groups, **kw))

    @property
    def weights_beyond_parameters(self) -> int:  # type: ignore[override]
        """Return the number of integers minus that of their scales."""
        return self.in_features * self.out_features - self.scales.numel()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw codes uniformly, with scales that give the weights variance 1 / I; zero bias."""
        self.codes.random_(0, 256)
        if self.zeros is not None:
            self.zeros.fill_(int(2 ** (8 - self.config.bits) * (2**self.config.bits - 1) / 2))
        nonlinear = self.config.levels == "iq4_nl"
        variance = sum(v * v for v in reference.IQ4_NL) / 16 if nonlinear else (4**self.config.bits - 1) / 12
        nn.init.constant_(self.scales, math.sqrt(1 / variance / self.in_features))
        if self.multiples is not None:
            self.multiples.fill_(1 + self.config.middle_multiple)
            if self.zeros is not None:
                self.zeros.fill_(1)
                self.scales[:, self.scales.shape[1] // 2 :] *= (2**self.config.bits - 1) / 2
        self.zero_bias_()

    def fused_kernel(self, x: Tensor) -> Callable[[Tensor], Tensor] | None:
        if self.config.levels != "uniform" or self.parameter_cache is None:
            return None
        return prepare_few_rows(self.parameter_cache.rounds_inputs, x, *self._tensors())

    def forward(self, x: Tensor) -> Tensor:
        if self.config.levels != "uniform":  # relinear has no kernel for these; they are made for llama.cpp
            return nn.functional.linear(x, self.to_dense(), self.bias)
        y = self.fused_forward(x)
        return quantized(x, *self._tensors()) if y is None else y

    def _tensors(self) -> tuple[Any, ...]:
        """Return the arguments of ``quantized`` after x."""
        return self.codes, self.scales, self.zeros, self.config.bits, self.config.group, self.bias

    def rows(self, ids: Tensor) -> Tensor:
        flat_ids, tensors = ids.flatten(), (self.codes, self.scales, self.zeros, self.multiples)
        rows = (None if t is None else t.index_select(0, flat_ids) for t in tensors)  # raises for negative ids
        return self._values(*rows).unflatten(0, ids.shape)

    def to_dense(self) -> Tensor:
        return self._values(self.codes, self.scales, self.zeros, self.multiples)

    def _values(self, codes: Any, scales: Any, zeros: Tensor | None, multiples: Tensor | None) -> Tensor:
        config, levels = self.config, self.config.level_values(codes)
        if multiples is not None:
            return reference.k_dequantized(codes, scales, multiples, zeros, config.bits, self.in_features)
        return reference.dequantized(codes, scales, zeros, config.bits, config.group, self.in_features, levels)

    def gguf_type(self) -> str:
        """Return the GGUF block type that stores these integers unchanged. Raises ValueError if there is none."""
        bits, symmetric, group = self.config.bits, self.config.symmetric, self.config.group
        if self.config.levels == "k":
            return f"Q{bits}_K"
        if self.in_features % 32 or group % 32:
            raise ValueError("GGUF holds integers in blocks of 32 inputs: inputs and group must be multiples of 32")
        if bits > 5 and not symmetric:
            raise ValueError(
                "GGUF has no integers of more than 5 bits with zero points; give candidates=quantized:symmetric=true"
            )
        if self.config.levels != "uniform":
            return self.config.levels.upper()
        return ("Q4" if bits <= 4 else "Q5" if bits == 5 else "Q8") + ("_0" if symmetric else "_1")

    @torch.no_grad()
    def gguf_rows(self) -> Tensor:
        """Return the rows (O, bytes) of the weight in blocks of ``gguf_type``."""
        config = self.config
        if self.multiples is not None:
            return reference.gguf_k_rows(self.codes, self.scales, self.multiples, self.zeros, config.bits)
        return reference.gguf_rows(self.codes, self.scales, self.zeros, config.bits, config.group, self.in_features)

    @torch.no_grad()
    def compressed_tensors(self) -> tuple[dict[str, int], dict[str, Tensor]]:
        """Return settings and tensors in compressed-tensors' format "pack-quantized", for a symmetric layer.

        Codes take 4 or 8 bits, as vLLM reads no others.
        """
        bits, group = self.config.bits, min(self.config.group, self.in_features)
        width = 4 if bits <= 4 else 8
        codes = (
            reference.unpack(self.codes, bits, self.in_features).to(torch.int16) + 2 ** (width - 1) - 2 ** (bits - 1)
        )
        shape = torch.tensor([self.out_features, self.in_features])
        parts = {"packed": reference.words(codes, width), "scale": self.scales.detach(), "shape": shape}
        return {"num_bits": width, "group_size": group}, parts

    def fit_to_weight_(self, weight: Tensor) -> None:
        """Round to nearest, on grids that are clipped and shifted to minimise the squared error of every group."""
        weight = weight.float()
        grid = self.config.grid(weight)
        self._store_(grid, round_to_nearest(weight, grid, self.config.group))

    def fit_to_statistics_(self, weight: Tensor, statistics: CalibrationStatistics, steps: int) -> None:
        """Round by GPTQ under A, then lower the error under A and G by coordinate descent over codes.

        ``steps`` is ignored. Both moments are shrunk towards their diagonals: a descent that fits the correlations of
        one sample's gradients can raise the error on another sample. If G is diagonal, rows are independent, and there
        is no descent, as no row can compensate another's error.
        """
        weight, group = weight.float(), self.config.group
        shrinkage = INPUTS_SHRINKAGE
        if len(statistics.input_moments_by_text) > 1:
            shrinkage, _ = cross_validated_shrinkage(statistics.input_moments_by_text)
        inputs = shrunk(statistics.input_moment.to(weight), shrinkage)
        outputs = statistics.gradient_moment
        independent_rows = outputs is not None and outputs.ndim == 1
        rounded = []
        for rows in weight.split(ROWS_AT_ONCE if independent_rows else len(weight)):
            grid = self.config.grid(rows, statistics)
            rounded.append((grid, gptq(rows, grid, group, inputs)))
        levels = self.config.level_values(weight)
        scale, zero, top = (torch.cat(parts) for parts in zip(*(grid[:3] for grid, _ in rounded)))
        units = [grid.units for grid, _ in rounded if grid.units is not None]
        grid = Grid(scale, zero, top, levels, torch.cat(units) if units else None)
        codes = torch.cat([codes for _, codes in rounded])
        if not independent_rows:
            outputs = None if outputs is None else shrunk(outputs.to(weight), OUTPUTS_SHRINKAGE)
            change = code_changer(weight) if levels is None else partial(change_codes, levels=levels)
            codes = coordinate_descent(weight, codes, grid, group, inputs, outputs, change=change)
        self._store_(grid, codes)

    def _store_(self, grid: Grid, codes: Tensor) -> None:
        """Copy codes and grid into parameters and buffers; raise ValueError if the scales' dtype cannot hold them."""
        exact = grid.scale
        zeros = grid.zero * 2 ** (8 - self.config.bits)
        if self.multiples is not None:
            assert grid.units is not None
            per_group = grid.units.repeat_interleave(reference.SUPER // self.config.group, 1)
            self.multiples.copy_((grid.scale / per_group[..., 0]).round() + self.config.middle_multiple)
            zeros = (grid.scale * grid.zero / per_group[..., 1]).round()
            exact = grid.units[..., : 1 if self.zeros is None else 2].mT.flatten(1)
        scales = exact.to(self.scales.dtype)
        if (scales.float() - exact).norm() > exact.norm() / 64:
            size = f"{float(exact.abs().max()):.2g}"
            raise ValueError(f"{scales.dtype} does not hold scales of {size}: load the model in bfloat16 or float32")
        if grid.levels is not None:
            codes = torch.searchsorted(grid.levels, codes)
        self.codes.copy_(reference.pack(codes, self.config.bits))
        self.scales.copy_(scales)
        if self.zeros is not None:
            self.zeros.copy_(zeros)

    def param_roles(self) -> dict[str, ParamRole]:
        """Return roles of gains for the scales: weight decay would shrink the weights, whose codes are fixed."""
        return dict.fromkeys(super().param_roles(), ParamRole(weight_decay=False))

    def problem_with_values(self, values: Mapping[str, Tensor]) -> str | None:
        for name, value in values.items():
            if not isinstance(value, Tensor) or value.is_meta:
                continue
            if name in ("codes", "zeros", "multiples") and value.dtype != torch.uint8:
                return f"{name} must be bytes (torch.uint8), got {value.dtype}"
            if name == "scales" and not bool(torch.isfinite(value).all()):
                return "scales must be finite, and are not"
        return None

    def flops_per_token(self) -> int:
        return 2 * self.in_features * self.out_features


@register
class Quantized(OperatorConfig):
    """Store a linear layer in few bits: integers, and a scale for each group of neighbouring inputs.

    A weight takes ``bits`` + 24 / ``group`` bits in half precision, or ``bits`` + 16 / ``group`` if symmetric.

    Args:
        bits: bits per weight, 2 to 8.
        group: inputs that share a scale; the last group of a row may be shorter. On a CPU only multiples of 32 are
            fast.
        symmetric: whether the middle of the integers means zero; if not, every group has a zero point, one byte.
        levels: values of the codes: whole numbers ("uniform"), llama.cpp's 16 uneven values ("iq4_nl", 4 bits,
            symmetric), or whole numbers with integer scales, as in its K types ("k", 2 to 6 bits).

    Examples:
        >>> layer = torch.nn.Linear(64, 32)
        >>> rounded = relinear.Quantized(bits=4).build(64, 32).fit_to_linear_(layer)
        >>> bool((rounded.to_dense() - layer.weight).abs().max() < 0.02)
        True
    """

    kind = "quantized"
    module_class = QuantizedLinear

    bits: Annotated[int, IntRange(2, 8)] = 4
    group: Count = 64
    symmetric: bool = False
    levels: Literal["uniform", "iq4_nl", "k"] = "uniform"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.levels == "iq4_nl" and (self.bits != 4 or not self.symmetric):
            got = f"bits={self.bits} and symmetric={str(self.symmetric).lower()}"
            raise ValueError(f"levels=iq4_nl needs bits=4 and symmetric=true, got {got}")
        if self.levels == "k" and (self.group, self.symmetric) != reference.K_TYPES.get(self.bits, ())[:2]:
            groups = ", ".join(f"group={k.group},symmetric={k.symmetric}".lower() for k in reference.K_TYPES.values())
            raise ValueError(f"levels=k has for 2 to 6 bits {groups}, got bits={self.bits},group={self.group}")

    def level_values(self, like: Tensor) -> Tensor | None:
        """Return the value of each code on the device of ``like``: in its dtype, as int16 if it holds bytes.

        None means whole numbers.
        """
        dtype = like.dtype if like.is_floating_point() else torch.int16
        return None if self.levels != "iq4_nl" else torch.tensor(reference.IQ4_NL, dtype=dtype, device=like.device)

    def scaled(self, in_features: int, out_features: int, ratio: float) -> Quantized:
        return self.replace(bits=max(2, min(8, round(self.bits * ratio)))) if self.levels == "uniform" else self

    def candidates(self, in_features: int, out_features: int) -> list[OperatorConfig]:
        """Return a candidate for every number of bits, with this group size, or for every K type."""
        if self.levels == "k":
            types = [] if in_features % reference.SUPER else reference.K_TYPES.items()
            return [self.replace(bits=bits, group=kind.group, symmetric=kind.symmetric) for bits, kind in types]
        return [self.replace(bits=bits) for bits in (_CANDIDATE_BITS if self.levels == "uniform" else (self.bits,))]

    def check_shape(self, in_features: int, out_features: int) -> None:
        if self.levels == "k" and in_features % reference.SUPER:
            raise ValueError(f"levels=k needs inputs in multiples of {reference.SUPER}, got {in_features}")

    @property
    def middle_multiple(self) -> int:
        """Return the byte in ``multiples`` that means 0, for K types."""
        return 2 ** (reference.K_TYPES[self.bits].bits - 1) if self.symmetric else 0

    def grid(self, weight: Tensor, statistics: CalibrationStatistics | None = None) -> Grid:
        """Return scales and zero points for rounding ``weight`` (O, I)."""
        importance = None if statistics is None else statistics.input_moment.diagonal()
        levels = self.level_values(weight)
        grid = nearest_grid(weight, self.bits, self.group, self.symmetric, importance, levels=levels)
        if self.levels == "k":
            bits = reference.K_TYPES[self.bits].bits
            return with_units(weight, grid, self.group, self.symmetric, bits, importance)
        return grid

    @torch.no_grad()
    def candidate_errors(
        self, linear: nn.Module, statistics: CalibrationStatistics, configs: Sequence[OperatorConfig] | None = None
    ) -> list[tuple[OperatorConfig, float]]:
        """Return candidates, each with the error expected after GPTQ; only a few rows are rounded.

        This ignores what the descent under G gains, mostly on the calibration tokens alone.
        """
        weight = dense_weight(linear).detach().float()
        by_text, gradients = statistics.input_moments_by_text, statistics.gradient_moment
        several = len(by_text) > 1
        costs = cross_validated_shrinkage(by_text)[1] if several else gptq_costs(statistics.input_moment)
        count = min(len(weight), max(SAMPLED_ROWS, len(weight) // SAMPLED_EVERY))
        rows = torch.linspace(0, len(weight) - 1, count).long().to(weight.device)
        row_weights = torch.ones(len(weight))
        if gradients is not None:
            row_weights = gradients if gradients.ndim == 1 else gradients.diagonal()
        costs, row_weights = costs.to(weight), row_weights.to(weight)
        errors = list[tuple[OperatorConfig, float]]()
        for config in self.candidates(*reversed(weight.shape)) if configs is None else configs:
            assert isinstance(config, Quantized)
            grid = config.grid(weight[rows], statistics)
            errors.append((config, float(expected_error(weight, rows, grid, config.group, costs, row_weights))))
        return errors
