"""Rotor layers: linear maps composed of Clifford sandwiches r x s~, and the network of them that stands in for one."""

# Legend: I in_features, O out_features, V = 2^n window, P = n(n-1)/2 planes, W terms, i / o windows of input / output,
# S blocks of a window with factors of their own, L and R sizes of the left and the right factor

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, ClassVar, Self, cast

import torch
from torch import Tensor, nn

from relinear import clifford
from relinear.clifford.blades import device_table
from relinear.core.config import check_at_least, check_choice, check_type, register
from relinear.core.dense_cache import dense_inference
from relinear.core.operator import NotLinearError, Operator, OperatorConfig, ParamRole
from relinear.core.parameter_cache import CachingModule, ParameterCache, ValueCache
from relinear.functional.rotor import branch_permutation, nearest_kronecker, rotor_layer, window_count, window_size
from relinear.kernels.autograd import lowered
from relinear.kernels.choice import factored_cost, prefers_dense_to
from relinear.kernels.cpu.portions import PORTION_BYTES
from relinear.kernels.rotor import sandwich_windows
from relinear.system.machine import fast_bfloat16

__all__ = ["Rotor", "RotorLinear"]

_ACTIVATIONS = {
    "prelu": None,
    "relu": torch.relu,
    "gelu": torch.nn.functional.gelu,
    "silu": torch.nn.functional.silu,
    "none": None,
}


_ROTOR_PARAMETERS = {"left", "right", "scale"}


def _tiled(dtype: torch.dtype) -> bool:
    return dtype in (torch.bfloat16, torch.float16) and fast_bfloat16()


class SandwichSum(CachingModule):
    """y = sum_w a_w x b_w over every pair of an input and an output window; no bias.

    Parameters: ``left`` and ``right`` (W, o, i, P) bivectors of the rotors (``left`` alone where they are single), or
    (W, o, i, V) elements of the algebra, or free factors (W, o, i, L, L) and (W, o, i, R, R); optional ``scale``
    (W, o, i).
    """

    left: nn.Parameter
    right: nn.Parameter | None
    scale: nn.Parameter | None
    _known: ValueCache | None = None

    def __init__(self, config: Rotor, in_features: int, out_features: int, window: int, terms: int, device, dtype):
        super().__init__()
        self.config, self.in_features, self.out_features, self.window = config, in_features, out_features, window
        n = window.bit_length() - 1
        self.shape = clifford.spin_shape(n)
        counts = (terms, window_count(out_features, window), window_count(in_features, window))
        kw = {"device": device, "dtype": dtype}
        left, right = {
            "rotor": ((n * (n - 1) // 2,),) * 2,
            "multivector": ((window,),) * 2,
            "kronecker": ((2 ** (n // 2),) * 2, (2 ** ((n + 1) // 2),) * 2),
        }[config.terms]
        self.left = nn.Parameter(torch.empty(*counts, *left, **kw))
        single = config.terms == "rotor" and config.rotors == "single"
        self.register_parameter("right", None if single else nn.Parameter(torch.empty(*counts, *right, **kw)))
        self.register_parameter("scale", nn.Parameter(torch.empty(counts, **kw)) if config.scale else None)

    @property
    def counts(self) -> tuple[int, int, int]:
        """(W, o, i)."""
        terms, outputs, inputs = self.left.shape[:3]
        return terms, outputs, inputs

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Rotors by ``init_std`` (see ``Rotor``); general terms normal, such that variance is kept; scales likewise."""
        terms, _, inputs = self.counts
        summed = terms * inputs
        for parameter in (self.left, self.right):
            if parameter is None:
                continue
            if self.config.terms == "rotor":
                nn.init.normal_(parameter, std=self.config.init_std)
            else:
                share = 1.0 if self.config.scale else summed**-0.25  # of 1 / sqrt(summed), half for either factor
                nn.init.normal_(parameter, std=share / math.sqrt(parameter.shape[-1]))
        if self.scale is not None:
            nn.init.constant_(self.scale, summed**-0.5)

    def factors(self) -> tuple[Tensor, Tensor]:
        """Left (W, o, i, S, L, L) and right (W, o, i, S, R, R) matrices, in at least single precision."""
        right = self.left if self.right is None else self.right
        with torch.autocast(self.left.device.type, enabled=False):
            if self.config.terms == "rotor":
                a, b = clifford.left_factor(self.left).unsqueeze(3), clifford.right_factor(right).unsqueeze(3)
            elif self.config.terms == "kronecker":
                wide = torch.promote_types(self.left.dtype, torch.float32)
                a, b = self.left.to(wide).unsqueeze(3), right.to(wide).unsqueeze(3)
            else:
                elements: tuple[Tensor, Tensor] = (self.left, right)
                if self.config.basis == "blade":
                    elements = (clifford.to_spin(self.left), clifford.to_spin(right))
                a, b = clifford.left_multiplication(elements[0]), clifford.right_multiplication(elements[1])
            if self.scale is not None:
                a = a * self.scale[..., None, None, None]
        return a, b

    def apply_factors(self, x: Tensor, left: Tensor, right: Tensor) -> Tensor:
        """The map itself, with factors in the dtype of ``x``."""
        return rotor_layer(x, left, right, self.out_features, self.window, self.config.basis, sandwich_windows)

    def dense(self) -> Tensor:
        """The (O, I) matrix in at least single precision."""
        left, right = self.factors()
        eye = torch.eye(self.in_features, dtype=left.dtype, device=left.device)
        return self.apply_factors(eye, left, right).T

    def flops_per_token(self) -> int:
        """Of the factored form."""
        terms, outputs, inputs = self.counts
        left, right = self.factor_sizes
        basis = 0 if self.config.basis == "spinor" else 2 * self.shape.rows * self.window * (inputs + outputs)
        return 2 * terms * outputs * inputs * self.window * (left + right) + basis

    @property
    def factor_sizes(self) -> tuple[int, int]:
        """(L, R)."""
        if self.config.terms == "kronecker":
            return self.left.shape[-1], self.right.shape[-1]
        size = self.shape.rows * self.shape.components
        return size, size

    def factored_cost(self, tokens: int, dtype: torch.dtype) -> float:
        """Of the factored form in inference on a CPU, as ``kernels.choice.dense_cost``."""
        blade = self.config.basis == "blade"
        sizes = self.in_features, self.out_features, min(self.factor_sizes)
        return factored_cost(*sizes, math.prod(self.counts), self.flops_per_token(), blade, tokens, _tiled(dtype))

    def forward(self, x: Tensor) -> Tensor:
        run, cache = None, self._cache_for(x)
        if cache is not None:
            # tokens up to a power of two, so that one decision serves many sizes of input
            key = (x.numel() // self.in_features).bit_length(), x.dtype
            run = cache.get(key)
            if run is None and cache.opens():
                run = cache.keep(key, lambda: self._inference(cache, (1 << key[0]) - 1, x.dtype, x.device))
        if run is not None:
            return run(x)
        left, right = self.factors()
        return self.apply_factors(x, left.to(x.dtype), right.to(x.dtype))

    def _cache_for(self, x: Tensor) -> ParameterCache | None:
        """Where what depends on parameters alone is kept, if it may be.

        Outside of ``relinear.for_inference_`` that is by value: beside exponentials of matrices it takes no time to
        compare the few parameters that they come from. On a GPU it would, as that waits for the device. Where something
        else stands in a parameter's place (a mask, a parametrisation, a tensor that another network computes), its
        values come from more than parameters: nothing is kept.
        """
        if self.training or torch.compiler.is_compiling() or not self._parameters.keys() >= _ROTOR_PARAMETERS:
            return None
        if torch.is_grad_enabled() and (x.requires_grad or any(p.requires_grad for p in self.parameters())):
            return None
        if self._kept is None and self._known is None and self.left.is_cpu:
            self._known = ValueCache(self)
        return self._kept or self._known

    def keep_for_inference(self, keep: bool) -> None:
        super().keep_for_inference(keep)
        self._known = None

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_known": None}

    def _inference(
        self, cache: ParameterCache, tokens: int, dtype: torch.dtype, device: torch.device
    ) -> Callable[[Tensor], Tensor]:
        """The map with everything that depends on parameters computed beforehand, the faster way."""
        asked = "rotor", self.in_features, self.out_features, dtype, tokens, _tiled(dtype)
        if device.type == "cpu" and prefers_dense_to(self.factored_cost(tokens, dtype), *asked):
            weight = cache.get(("dense", dtype))
            if weight is None:
                weight = cache.keep(("dense", dtype), lambda: self.dense().to(dtype).contiguous())
            return lambda x: torch.nn.functional.linear(x, weight)
        left, right = cache.get(("factors", dtype)) or cache.keep(
            ("factors", dtype), lambda: tuple(factor.to(dtype).contiguous() for factor in self.factors())
        )
        small = tokens * self.window * dtype.itemsize <= PORTION_BYTES // 2
        one = (
            math.prod(self.counts) == 1 and left.shape[3] == 1 and self.in_features == self.out_features == self.window
        )
        if not (small and one and self.config.basis == "spinor"):
            return lambda x: self.apply_factors(x, left, right)
        # for a few tokens the bookkeeping of windows and portions would take longer than the two products
        a, b = left[0, 0, 0, 0], right[0, 0, 0, 0]
        rows, columns = a.shape[0], b.shape[0]
        middle = self.shape.columns if self.config.terms != "kronecker" else columns

        def direct(x: Tensor) -> Tensor:
            half = torch.nn.functional.linear(x.reshape(-1, columns), b).view(-1, rows, middle)
            return torch.matmul(a, half).view(x.shape)

        return direct


class _Branches(nn.Module):
    """One hidden step: W parallel sandwiches, each permuted, normalised and activated, mixed by learnt scalars."""

    slopes: nn.Parameter | None

    def __init__(self, config: Rotor, window: int, index: int, device, dtype):
        super().__init__()
        self.config, self.window, self.index = config, window, index
        # one input and W "output windows": the branches side by side
        self.rotors = SandwichSum(config, window, window * config.width, window, 1, device, dtype)
        kw = {"device": device, "dtype": dtype}
        self.mix = nn.Parameter(torch.empty(config.width, **kw))
        has_slopes = config.activation == "prelu"
        self.register_parameter("slopes", nn.Parameter(torch.empty(config.width, **kw)) if has_slopes else None)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        self.rotors.reset_parameters()
        nn.init.constant_(self.mix, self.config.width**-0.5)
        if self.slopes is not None:
            nn.init.constant_(self.slopes, 0.25)

    def forward(self, x: Tensor) -> Tensor:
        width = self.config.width
        branches = self.rotors(x)
        if self.config.permute:
            sizes = (self.window, width, self.config.seed, self.index)
            order = device_table(branch_permutation, sizes, x)
            branches = branches.index_select(-1, order)
        branches = branches.unflatten(-1, (width, self.window))
        if self.config.normalize:
            branches = torch.nn.functional.layer_norm(branches, (self.window,))
        if self.slopes is not None:
            slopes = self.slopes.to(branches.dtype).unsqueeze(-1)
            branches = torch.where(branches > 0, branches, slopes * branches)
        else:
            activation = _ACTIVATIONS[self.config.activation]
            branches = branches if activation is None else activation(branches)
        return torch.einsum("...wv,w->...v", branches, self.mix.to(branches.dtype))


class RotorLinear(Operator):
    """The plain sum of sandwiches (depth 0), or the network of the paper (depth >= 1).

    Parameters of ``SandwichSum`` under ``entry``; with depth >= 1 also ``hidden.k.rotors``, ``hidden.k.mix`` (W,),
    ``hidden.k.slopes`` (W,) and ``exit``; optional ``bias`` (O,).
    """

    config: Rotor
    exit: SandwichSum | None

    def __init__(self, config, in_features, out_features, *, bias=True, device=None, dtype=None):
        super().__init__(config, in_features, out_features)
        window = window_size(in_features, out_features)
        kw = {"device": device, "dtype": dtype}
        if config.depth:
            self.entry = SandwichSum(config, in_features, window, window, 1, **kw)
            self.hidden = nn.ModuleList(_Branches(config, window, k, **kw) for k in range(config.depth))
            self.exit = SandwichSum(config, window, out_features, window, 1, **kw)
        else:
            self.entry = SandwichSum(config, in_features, out_features, window, config.width, **kw)
            self.hidden, self.exit = nn.ModuleList(), None
        self.register_parameter("bias", nn.Parameter(torch.empty(out_features, **kw)) if bias else None)
        self.reset_parameters()

    def _stages(self) -> list[SandwichSum | _Branches]:
        hidden = cast("list[_Branches]", list(self.hidden))
        return [self.entry, *hidden, *([] if self.exit is None else [self.exit])]

    def _sums(self) -> list[SandwichSum]:
        return [stage.rotors if isinstance(stage, _Branches) else stage for stage in self._stages()]

    def reset_parameters(self) -> None:
        """Every stage by its own rule; zero bias."""
        for stage in self._stages():
            stage.reset_parameters()
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def _prefers_dense(self, kind: str, in_features: int, out_features: int, dtype: torch.dtype, tokens: int) -> bool:
        if not self.config.linear:
            return False
        factored = sum(stage.factored_cost(tokens, dtype) for stage in self._sums())
        return prefers_dense_to(factored, kind, in_features, out_features, dtype, tokens, _tiled(dtype))

    def forward(self, x: Tensor) -> Tensor:
        dense = dense_inference(self, x, self._prefers_dense)
        if dense is not None:
            return dense
        (x,) = lowered(x)
        for stage in (self.entry,) if self.exit is None else self._stages():
            x = stage(x)
        return x if self.bias is None else x + self.bias.to(x.dtype)

    def to_dense(self) -> Tensor:
        if not self.config.linear:
            raise NotLinearError(
                f"{self.config} normalises or activates between its rotors, so it has no dense matrix; depth=0, or "
                "activation='none' with normalize=False, has one"
            )
        if self.exit is None:
            return self.entry.dense().to(self.entry.left.dtype)
        eye = torch.eye(self.in_features, dtype=self.entry.left.dtype, device=self.entry.left.device)
        for stage in self._stages():
            eye = stage(eye)
        return eye.T

    @torch.no_grad()
    def from_linear(self, linear: nn.Module) -> Self:
        """The nearest sum of Kronecker products, where the settings are one (see ``Rotor.fits_weight``)."""
        weight = self.source_weight(linear)
        size = self.entry.window
        if not self.config.fits_weight or self.in_features != size or self.out_features != size:
            return super().from_linear(linear)
        left, right = nearest_kronecker(weight, *self.entry.factor_sizes, self.config.width)
        assert self.entry.right is not None
        nn.init.zeros_(self.entry.left)  # terms beyond the L^2 that suffice for any matrix
        nn.init.zeros_(self.entry.right)
        self.entry.left[: len(left), 0, 0].copy_(left)
        self.entry.right[: len(right), 0, 0].copy_(right)
        if self.entry.scale is not None:
            nn.init.ones_(self.entry.scale)
        self.copy_bias_(linear)
        return self

    def flops_per_token(self) -> int:
        pointwise = 12 * self.config.width * self.entry.window * self.config.depth
        return sum(stage.flops_per_token() for stage in self._sums()) + pointwise

    def param_roles(self) -> dict[str, ParamRole]:
        """No decay on bivectors, which would turn the rotors back; matrices of free terms as usual."""
        roles = super().param_roles()
        for name in roles:
            if name.rpartition(".")[2] in ("left", "right") and self.config.terms == "rotor":
                roles[name] = ParamRole(None, lr_multiplier=self.config.lr_multiplier, weight_decay=False)
            elif name.rpartition(".")[2] == "scale":
                roles[name] = ParamRole(None, weight_decay=False)
        return roles


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class Rotor(OperatorConfig):
    """Rotors of a Clifford algebra in place of a matrix (arXiv 2507.11688): O(log^2 d) parameters.

    A window of the largest power of two that fits, V = 2^n, is an element of Cl(n); a rotor pair turns it into
    r x s~. Sizes that are no power of two are covered by wrapping, overlapping windows; each pair of an input and an
    output window has rotors of its own, and outputs that two windows reach are averaged. With ``depth`` 0 the layer is
    the linear map sum_w r_w x s_w~; with more it is a small network: one rotor layer into the window, ``depth`` times
    ``width`` parallel branches of rotor, permutation, normalisation and activation, mixed by learnt scalars, and one
    rotor layer to the output.

    Args:
        width: W, the terms of the sum (depth 0) or the parallel branches.
        depth: hidden steps.
        rotors: "double": r and s differ, 2 P parameters a pair of windows; "single": s = r, P parameters.
        basis: "spinor": coordinates are those of the spin representation, which is fastest; "blade": coordinates of
            blades, exactly the paper's map. Both are the same family up to a fixed orthogonal change of basis.
        terms: "rotor"; "multivector": general a_w x b_w (Lemma 1), 2 V parameters a pair of windows; "kronecker": free
            Kronecker factors. They cost the same to run and show what the rotor constraint costs and buys. For
            n = 5, 6, 7 modulo 8 general elements are those of Cl(0, n), which has the smaller matrices.
        activation: "prelu", "relu", "gelu", "silu" or "none", in the hidden steps.
        normalize: whether branches are normalised (LayerNorm without parameters).
        permute: whether branches are permuted, at random but for good (by ``seed``).
        scale: a learnt factor for every term and pair of windows; without it a rotor layer cannot change norms.
        init_std: standard deviation of fresh bivector coordinates.
        lr_multiplier: of the bivectors, on the learning rate of a training recipe.
        seed: of the permutations.
    """

    kind: ClassVar[str] = "rotor"
    module_class = RotorLinear

    width: int = 3
    depth: int = 2
    rotors: str = "double"
    basis: str = "spinor"
    terms: str = "rotor"
    activation: str = "prelu"
    normalize: bool = True
    permute: bool = True
    scale: bool = False
    init_std: float = 0.02
    lr_multiplier: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        check_at_least("width", self.width, 1)
        check_at_least("depth", self.depth, 0)
        check_choice("rotors", self.rotors, ("double", "single"))
        check_choice("basis", self.basis, ("spinor", "blade"))
        check_choice("terms", self.terms, ("rotor", "multivector", "kronecker"))
        check_choice("activation", self.activation, _ACTIVATIONS)
        for name in ("normalize", "permute", "scale"):
            check_type(name, getattr(self, name), bool)
        check_at_least("init_std", self.init_std, 0, integer=False)
        if not self.init_std > 0:
            raise ValueError(f"init_std must be positive, got {self.init_std!r}: equal rotors would stay equal")
        check_at_least("lr_multiplier", self.lr_multiplier, 0, integer=False)
        check_at_least("seed", self.seed, 0)

    @property
    def linear(self) -> bool:
        """Whether the layer is a linear map of its input."""
        return self.depth == 0 or (self.activation == "none" and not self.normalize)

    @property
    def fits_weight(self) -> bool:  # type: ignore[override]
        """Only a plain sum of free Kronecker factors in the spinor basis has a closed-form fit."""
        return self.depth == 0 and self.terms == "kronecker" and self.basis == "spinor"

    def check_shape(self, in_features: int, out_features: int) -> None:
        if min(in_features, out_features) < 2:
            raise ValueError(
                f"a rotor layer needs at least two inputs and outputs, got in_features={in_features}, "
                f"out_features={out_features}"
            )

    def resized(self, in_features: int, out_features: int, scale: float) -> Rotor:
        return self.replace(width=max(1, round(self.width * scale)))
