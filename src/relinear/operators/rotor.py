"""Rotor layers: linear maps composed of Clifford sandwiches r x s~, and the network of them that stands in for one."""

# Legend: I in_features, O out_features, V = 2^n window, P = n(n-1)/2 planes, W terms, i / o windows of input / output,
# S blocks of a window with factors of their own, L and R sizes of the left and the right factor

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Self, cast

import torch
from torch import Tensor, nn

from relinear import clifford
from relinear.clifford.blades import MAX_DIMENSION, device_table, take_last
from relinear.core.config import check_at_least, check_choice, check_depth, check_type, register
from relinear.core.dense_cache import dense_inference
from relinear.core.operator import NotLinearError, Operator, OperatorConfig, ParamRole
from relinear.core.parameter_cache import CachingModule, ParameterCache, ValueCache
from relinear.functional.rotor import (
    NetworkForm,
    branch_orders,
    branch_permutation,
    nearest_kronecker,
    product_of_simple_rotors,
    rotor_layer,
    simple_parts,
    term_orders,
    turned_vectors,
    window_count,
    window_size,
)
from relinear.kernels.autograd import lowered
from relinear.kernels.choice import against_native_network, factored_cost, is_plain, is_transformed, prefers_dense_to
from relinear.kernels.cpu.portions import PORTION_BYTES
from relinear.kernels.rotor import PreparedNetwork, mixed_branches, rotor_network, sandwich_windows
from relinear.system.machine import fast_bfloat16

__all__ = ["Rotor", "RotorLinear"]


def _elu(x: Tensor) -> Tensor:
    # torch.nn.functional.elu under torch.compile is wrong about the strides of its gradient
    return torch.where(x > 0, x, torch.expm1(x.clamp(max=0)))


_ACTIVATIONS = {
    "prelu": None,
    "relu": torch.relu,
    "gelu": torch.nn.functional.gelu,
    "silu": torch.nn.functional.silu,
    "leaky_relu": torch.nn.functional.leaky_relu,
    "elu": _elu,
    "none": None,
}


_SLOPE = 0.25  # of a fresh PReLU

#: activations that are a PReLU of one slope
_SLOPES = {"relu": 0.0, "leaky_relu": 0.01, "none": 1.0}

_ROTOR_PARAMETERS = {"left", "right", "scale"}


def _tiled(dtype: torch.dtype) -> bool:
    return dtype in (torch.bfloat16, torch.float16) and fast_bfloat16()


class _Remembering(CachingModule):
    """Keeps what it computes from its parameters by their values, outside of ``relinear.for_inference_``.

    Beside exponentials of matrices it takes no time to compare the few parameters that they come from. On a GPU it
    would, as that waits for the device.
    """

    _known: ValueCache | None = None

    def _remembered(self, parameter: Tensor) -> ParameterCache | None:
        if self._kept is None and self._known is None and parameter.is_cpu:
            self._known = ValueCache(self)
        return self._kept or self._known

    def keep_for_inference(self, keep: bool) -> None:
        super().keep_for_inference(keep)
        self._known = None

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_known": None}


class SandwichSum(_Remembering):
    """y = sum_w a_w x b_w over every pair of an input and an output window; no bias.

    Parameters: ``left`` and ``right`` (W, o, i, P) bivectors of the rotors (``left`` alone where they are single), or
    (W, o, i, V) elements of the algebra, or free factors (W, o, i, L, L) and (W, o, i, R, R); optional ``scale``
    (W, o, i). With ``power_iterations`` also the buffers ``left_vectors`` and ``right_vectors`` (J - 1, W, o, i, n), at
    which the next decomposition starts.
    """

    left: nn.Parameter
    right: nn.Parameter | None
    scale: nn.Parameter | None
    left_vectors: Tensor
    right_vectors: Tensor

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
        if config.power_iterations is not None:
            for name in ("left_vectors",) if single else ("left_vectors", "right_vectors"):
                self.register_buffer(name, torch.empty(max(n // 2 - 1, 0), *counts, n, **kw))

    @property
    def counts(self) -> tuple[int, int, int]:
        """(W, o, i)."""
        terms, outputs, inputs = self.left.shape[:3]
        return terms, outputs, inputs

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Rotors by ``init_std`` (see ``Rotor``); general terms normal, such that variance is kept; scales likewise."""
        terms, _, inputs = self.counts
        kept = (terms * inputs) ** -0.5 / self._share  # the factor of a term that keeps the variance of the sum
        for parameter in (self.left, self.right):
            if parameter is None:
                continue
            if self.config.terms == "rotor":
                nn.init.normal_(parameter, std=self.config.init_std)
            else:
                share = 1.0 if self.config.scale else kept**0.5  # half for either factor
                nn.init.normal_(parameter, std=share / math.sqrt(parameter.shape[-1]))
        if self.scale is not None:
            nn.init.constant_(self.scale, 1.0 if self.config.gains == "ones" else kept)
        for vectors in self._buffers.values():
            nn.init.normal_(cast("Tensor", vectors))
            cast("Tensor", vectors).div_(cast("Tensor", vectors).norm(dim=-1, keepdim=True))

    @property
    def _share(self) -> float:
        """Of every input window in an output: spread windows are averaged, others summed."""
        return 1 / self.counts[2] if self.config.windows == "spread" else 1.0

    @property
    def exponentiates(self) -> bool:
        """Whether the factors are exact exponentials of the parameters."""
        return self.config.terms == "rotor" and self.config.power_iterations is None

    def bivectors(self) -> dict[str, Tensor]:
        """The bivectors (W, o, i, P) of the rotors by side; single rotors have one side, other terms none."""
        if self.config.terms != "rotor":
            return {}
        sides: dict[str, Tensor | None] = {"left": self.left, "right": self.right}
        return {side: beta for side, beta in sides.items() if beta is not None}

    def _rotor_factors(self) -> tuple[Tensor, Tensor]:
        if self.exponentiates:
            return _exponentials([self])[0]
        a, b = product_of_simple_rotors(self._parts(self.left, "left_vectors"))
        if self.right is None:
            return a, b
        return a, product_of_simple_rotors(self._parts(self.right, "right_vectors"))[1]

    def _parts(self, beta: Tensor, name: str) -> Tensor:
        """Simple parts by Algorithms 1 and 2 of the paper, from where the last ones in training ended."""
        wide = torch.promote_types(beta.dtype, torch.float32)
        beta, stored = beta.to(wide), getattr(self, name)
        again = not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1
        if again:  # gradient checkpointing: what the forward pass found is there
            return simple_parts(beta, stored.to(wide, copy=True))
        assert self.config.power_iterations is not None
        vectors = turned_vectors(beta, stored.to(wide), self.config.power_iterations)
        if self.training and torch.is_grad_enabled() and not is_transformed():
            with torch.no_grad():
                stored.copy_(vectors)
        return simple_parts(beta, vectors)

    def factors(self, rotors: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
        """Left (W, o, i, S, L, L) and right (W, o, i, S, R, R) matrices, in at least single precision.

        Args:
            rotors: of ``_exponentials``, where they are there already.
        """
        right = self.left if self.right is None else self.right
        with torch.autocast(self.left.device.type, enabled=False):
            if self.config.terms == "rotor":
                a, b = (factor.unsqueeze(3) for factor in rotors or self._rotor_factors())
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
            if self._share != 1:
                a = a * self._share
        return a, b

    def apply_factors(self, x: Tensor, left: Tensor, right: Tensor) -> Tensor:
        """The map itself, with factors in the dtype of ``x``."""
        orders, terms = None, self.counts[0]
        if self.config.permute_terms and terms > 1:
            orders = device_table(term_orders, (self.window, terms, self.config.seed), x)
        settings = self.config.basis, sandwich_windows, self.config.windows, orders
        return rotor_layer(x, left, right, self.out_features, self.window, *settings)

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

    def forward(self, x: Tensor, rotors: tuple[Tensor, Tensor] | None = None) -> Tensor:
        run, cache = None, self._cache_for(x)
        if cache is not None:
            # tokens up to a power of two, so that one decision serves many sizes of input
            key = (x.numel() // self.in_features).bit_length(), x.dtype
            run = cache.get(key)
            if run is None and cache.opens():
                run = cache.keep(key, lambda: self._inference(cache, (1 << key[0]) - 1, x.dtype, x.device))
        if run is not None:
            return run(x)
        left, right = self.factors(rotors)
        return self.apply_factors(x, left.to(x.dtype), right.to(x.dtype))

    def _cache_for(self, x: Tensor) -> ParameterCache | None:
        """Where what depends on parameters alone is kept, if it may be.

        Where something else stands in a parameter's place (a mask, a parametrisation, a tensor that another network
        computes), its values come from more than parameters: nothing is kept.
        """
        if self.training or torch.compiler.is_compiling() or not self._parameters.keys() >= _ROTOR_PARAMETERS:
            return None
        if torch.is_grad_enabled() and (x.requires_grad or any(p.requires_grad for p in self.parameters())):
            return None
        return self._remembered(self.left)

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


def _exponentials(sums: Sequence[SandwichSum]) -> list[tuple[Tensor, Tensor]]:
    """Left (W, o, i, L, L) and right (W, o, i, R, R) rotors of every sum.

    Every side is one batch of matrix exponentials for all windows of one size, and both are one where they are made of
    the same matrices: of such small ones a call takes longer than what it computes.
    """
    sizes = {s.window for s in sums}
    if len(sizes) > 1:
        every = {size: iter(_exponentials([s for s in sums if s.window == size])) for size in sizes}
        return [next(every[s.window]) for s in sums]
    sides: list[tuple[Tensor, ...]] = []
    given = [s.left for s in sums], [s.left if s.right is None else s.right for s in sums]
    with torch.autocast(sums[0].left.device.type, enabled=False):
        if sums[0].shape.components == 1:  # numbers commute, and either side is an exponential of the same kind
            found = _batched(clifford.left_factor, [*given[0], *given[1]])
            return list(zip(found[: len(sums)], found[len(sums) :], strict=True))
        for betas, factor in zip(given, (clifford.left_factor, clifford.right_factor), strict=True):
            sides.append(_batched(factor, betas))
    return list(zip(*sides, strict=True))


def _batched(factor: Callable[[Tensor], Tensor], betas: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """``factor`` of each of the bivectors (W, o, i, P)."""
    if len(betas) == 1:
        return (factor(betas[0]),)
    found = factor(torch.cat([beta.flatten(0, 2) for beta in betas]))
    parts = found.split([beta.shape[:3].numel() for beta in betas])
    return tuple(part.unflatten(0, beta.shape[:3]) for part, beta in zip(parts, betas, strict=True))


def _activated(config: Rotor, x: Tensor, window: int, step: int, slopes: Tensor | None) -> Tensor:
    """What follows a rotor layer (..., W V) within the network: (..., W, V), permuted, normalised and activated.

    Args:
        step: number of the step, for the permutation.
        slopes: of the PReLU, (W,) or (1,); None for other activations.
    """
    branches = x.shape[-1] // window
    if config.normalize:  # which knows no order, and reads rows as they lie
        x = torch.nn.functional.layer_norm(x.unflatten(-1, (branches, window)), (window,)).flatten(-2)
    if config.permute:
        x = take_last(x, _order(config, window, branches, step, x))
    x = x.unflatten(-1, (branches, window))
    if slopes is not None:
        channels = x.reshape(-1, branches, window), slopes.to(x.dtype).expand(branches)
        return torch.nn.functional.prelu(*channels).view(x.shape)
    activation = _ACTIVATIONS[config.activation]
    return x if activation is None else activation(x)


def _order(config: Rotor, window: int, branches: int, step: int, like: Tensor) -> Tensor:
    """The permutation of a step's branches, as a table of indices (W V,)."""
    return device_table(branch_permutation, (window, branches, config.seed, step), like, torch.int32)


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
        has_slopes = config.activation == "prelu" and config.slopes == "branch"
        self.register_parameter("slopes", nn.Parameter(torch.empty(config.width, **kw)) if has_slopes else None)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        self.rotors.reset_parameters()
        nn.init.constant_(self.mix, 1.0 if self.config.gains == "ones" else self.config.width**-0.5)
        if self.slopes is not None:
            nn.init.constant_(self.slopes, _SLOPE)

    def forward(self, x: Tensor, slope: Tensor | None = None, rotors: tuple[Tensor, Tensor] | None = None) -> Tensor:
        slopes = slope if self.slopes is None else self.slopes
        branches = self.rotors(x, rotors)
        if slopes is not None:
            config, width = self.config, self.config.width
            order = _order(config, self.window, width, self.index, branches) if config.permute else None
            tokens = branches.reshape(-1, width, self.window)
            mixed = mixed_branches(tokens, order, slopes, self.mix, config.normalize)
            return mixed.view(*branches.shape[:-1], self.window)
        branches = _activated(self.config, branches, self.window, self.index, None)
        return torch.einsum("...wv,w->...v", branches, self.mix.to(branches.dtype))


class RotorLinear(_Remembering, Operator):
    """The plain sum of sandwiches (depth 0), or the network of the paper (depth >= 1).

    Parameters of ``SandwichSum`` under ``entry``; with depth >= 1 also ``hidden.k.rotors``, ``hidden.k.mix`` (W,),
    ``hidden.k.slopes`` (W,) and ``exit``; optional ``bias`` (O,). ``slope`` (1,) is that of the entry layer's PReLU or,
    where it is shared, of every one.
    """

    config: Rotor
    exit: SandwichSum | None
    slope: nn.Parameter | None

    def __init__(self, config, in_features, out_features, *, bias=True, device=None, dtype=None):
        super().__init__(config, in_features, out_features)
        window = window_size(in_features, out_features)
        self.inner = inner = config.inner_size(in_features, out_features)
        kw = {"device": device, "dtype": dtype}
        if config.depth:
            self.entry = SandwichSum(config, in_features, inner, window_size(in_features, inner), 1, **kw)
            self.hidden = nn.ModuleList(_Branches(config, inner, k, **kw) for k in range(config.depth))
            self.exit = SandwichSum(config, inner, out_features, window_size(inner, out_features), 1, **kw)
        else:
            self.entry = SandwichSum(config, in_features, out_features, window, config.width, **kw)
            self.hidden, self.exit = nn.ModuleList(), None
        has_slope = (
            config.depth and config.activation == "prelu" and (config.activate_entry or config.slopes == "shared")
        )
        self.register_parameter("slope", nn.Parameter(torch.empty(1, **kw)) if has_slope else None)
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
        if self.slope is not None:
            nn.init.constant_(self.slope, _SLOPE)
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
        if not self._against_one_pass(x):
            return self._in_one_pass(x)
        y = self._without_bias(x)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def _against_one_pass(self, x: Tensor) -> str:
        """Against the kernel of a whole network."""
        if self.exit is None:
            return "no network"
        if self.config.activation not in _SLOPES and self.config.activation != "prelu":
            return "an activation that is not piecewise linear"
        sums = self._sums()
        if not all(is_plain(s.left) for s in sums):
            return "no plain parameters on a CPU"
        sizes = [size for s in sums for size in s.factor_sizes]
        return against_native_network(x, self.config.basis, sizes)

    def _in_one_pass(self, x: Tensor) -> Tensor:
        cache, tokens, run = self._network_cache(x), x.reshape(-1, self.in_features), None
        if cache is not None:
            run = cache.get("network")
            if run is None and cache.opens():
                run = cache.keep("network", lambda: PreparedNetwork(self.in_features, *self._network_numbers()))
        if run is not None:
            y = run(tokens, self.bias)
        else:
            left, right, orders, slopes, mix, form = self._network_numbers()
            y = rotor_network(tokens, left, right, orders, slopes, mix, self.bias, form)
        return y.view(*x.shape[:-1], self.out_features)

    def _network_cache(self, x: Tensor) -> ParameterCache | None:
        """Of ``_network_numbers``, where every layer may keep its own."""
        own = all({"mix", "slopes"} <= step._parameters.keys() for step in self.hidden) and "slope" in self._parameters
        if not own or any(s._cache_for(x) is None for s in self._sums()):
            return None
        return self._remembered(self.entry.left)

    def _network_numbers(self) -> tuple[Any, ...]:
        """What ``rotor_network`` takes beside inputs and bias."""
        config, sums = self.config, self._sums()
        hidden = cast("list[_Branches]", list(self.hidden))
        rotors = _exponentials(sums) if self.entry.exponentiates else [None] * len(sums)
        factors = [s.factors(of) for s, of in zip(sums, rotors, strict=True)]
        left, right = ([factor.squeeze(0) for factor in side] for side in zip(*factors, strict=True))
        slopes: list[Tensor] = [self._slopes(step.slopes, config.width) for step in hidden]
        mix: list[Tensor] = [step.mix for step in hidden]
        if config.activate_entry:
            slopes, mix = [self._slopes(None, 1), *slopes], [self.entry.left.new_ones(1), *mix]
        orders = None
        if config.permute:
            steps = self.inner, config.width, config.depth, config.activate_entry, config.seed
            orders = device_table(branch_orders, steps, self.entry.left, torch.int32)
        windows = tuple(s.window for s in sums)
        settings = config.basis, config.windows, config.normalize, config.activate_entry, config.residual
        form = NetworkForm(self.out_features, windows, *settings)
        return left, right, orders, torch.cat(slopes), torch.cat(mix), form

    def _slopes(self, own: Tensor | None, branches: int) -> Tensor:
        """Those of the PReLU of a step's branches (W,), its own or the network's."""
        if self.config.activation != "prelu":
            return self.entry.left.new_full((branches,), _SLOPES[self.config.activation])
        slopes = self.slope if own is None else own
        assert slopes is not None
        return slopes.expand(branches)

    def _rotors(self, x: Tensor) -> Sequence[tuple[Tensor, Tensor] | None]:
        """Those of every stage, from one batch; None where stages know theirs or compute them in another way."""
        sums = self._sums()
        kept = not self.entry.exponentiates or self.entry._cache_for(x) is not None
        return [None] * len(sums) if kept else _exponentials(sums)

    def _without_bias(self, x: Tensor) -> Tensor:
        if self.exit is None:
            return self.entry(x)
        every = self._rotors(x)
        y = self.entry(x, every[0])
        window, residual = self.inner, self.config.residual
        if self.config.activate_entry:
            y = _activated(self.config, y, window, self.config.depth, self.slope).squeeze(-2)
        if residual and self.in_features == window:
            y = y + x
        for step, rotors in zip(self.hidden, every[1:-1], strict=True):
            y = step(y, self.slope, rotors)
        z = self.exit(y, every[-1])
        return z + y if residual and self.out_features == window else z

    def to_dense(self) -> Tensor:
        if not self.config.linear:
            raise NotLinearError(
                f"{self.config} normalises or activates between its rotors, so it has no dense matrix; depth=0, or "
                "activation='none' with normalize=False, has one"
            )
        if self.exit is None:
            return self.entry.dense().to(self.entry.left.dtype)
        eye = torch.eye(self.in_features, dtype=self.entry.left.dtype, device=self.entry.left.device)
        return self._without_bias(eye).T

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
        activated = self.config.width * self.config.depth + self.config.activate_entry
        pointwise = 12 * self.inner * activated
        return sum(stage.flops_per_token() for stage in self._sums()) + pointwise

    def param_roles(self) -> dict[str, ParamRole]:
        """No decay on bivectors, which would turn the rotors back; matrices of free terms as usual.

        A general element multiplies as a matrix that sums over its V coordinates. Kronecker factors have sizes that
        multiply to V.
        """
        roles = super().param_roles()
        for name in roles:
            if name.rpartition(".")[2] in ("left", "right") and self.config.terms == "rotor":
                roles[name] = ParamRole(None, lr_multiplier=self.config.lr_multiplier, weight_decay=False)
            elif name.rpartition(".")[2] in ("left", "right") and self.config.terms == "kronecker":
                roles[name] = roles[name]._replace(growth=0.5)
            elif name.rpartition(".")[2] in ("left", "right"):
                roles[name] = roles[name]._replace(fan_out=None)
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
        activation: "prelu", "relu", "gelu", "silu", "leaky_relu" (slope 0.01), "elu" or "none", in the hidden steps.
        normalize: whether branches are normalised (LayerNorm without parameters).
        permute: whether branches are permuted, at random but for good (by ``seed``).
        scale: a learnt factor for every term and pair of windows; without it a rotor layer cannot change norms.
        init_std: standard deviation of fresh bivector coordinates.
        lr_multiplier: of the bivectors, on the learning rate of a training recipe.
        seed: of the permutations.
        inner: the width within the network (depth 1 or more), a power of two: "both": the largest one that fits into
            inputs and outputs; "input": into the inputs; or a number. Each layer's windows are the largest that fit
            into its own two sides.
        windows: "wrapped": one after another, the last wrapping round to the beginning, input windows summed;
            "spread": the i-th of c windows of d coordinates starts at i d / c, and input windows are averaged.
        activate_entry: whether permutation, normalisation and activation follow the entry layer too.
        slopes: "branch": every branch learns a slope of its PReLU; "shared": one slope for the whole network.
        gains: how ``scale`` and the mixing scalars start: "variance": such that variance is kept; "ones": at 1.
        residual: whether the entry and the exit layer add their input, where they have as many inputs as outputs.
        permute_terms: with ``depth`` 0, whether every term but the first reads a window in an order of its own (fixed,
            by ``seed``). Without it the sums of rotor terms, however many, fill a space of V^2 / 4 of the V^2
            dimensions of matrices (general terms V^2 / 2 for odd n, all for even n); with it all of them.
        power_iterations: None: exact exponentials of bivectors; else they are decomposed by Algorithms 1 and 2 of the
            paper, with so many iterations a plane in every forward pass (the authors: at most 20), from where those of
            the last training step ended, of which one more is differentiated. Its gradient is biased
            (see ``clifford.decompose``); it is there for reproduction.
    """

    kind: ClassVar[str] = "rotor"
    module_class = RotorLinear
    formerly: ClassVar[Mapping[str, Any]] = {
        "inner": "both",
        "windows": "wrapped",
        "activate_entry": False,
        "slopes": "branch",
        "gains": "variance",
        "residual": False,
        "permute_terms": False,
        "power_iterations": None,
    }

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
    inner: str | int = "both"
    windows: str = "wrapped"
    activate_entry: bool = False
    slopes: str = "branch"
    gains: str = "variance"
    residual: bool = False
    permute_terms: bool = False
    power_iterations: int | None = None

    def __post_init__(self) -> None:
        check_at_least("width", self.width, 1)
        check_depth("depth", self.depth, 0)
        check_choice("rotors", self.rotors, ("double", "single"))
        check_choice("basis", self.basis, ("spinor", "blade"))
        check_choice("terms", self.terms, ("rotor", "multivector", "kronecker"))
        check_choice("activation", self.activation, _ACTIVATIONS)
        check_choice("windows", self.windows, ("wrapped", "spread"))
        check_choice("slopes", self.slopes, ("branch", "shared"))
        check_choice("gains", self.gains, ("variance", "ones"))
        for name in ("normalize", "permute", "scale", "activate_entry", "residual", "permute_terms"):
            check_type(name, getattr(self, name), bool)
        check_at_least("init_std", self.init_std, 0, integer=False)
        if not self.init_std > 0:
            raise ValueError(f"init_std must be positive, got {self.init_std!r}: equal rotors would stay equal")
        check_at_least("lr_multiplier", self.lr_multiplier, 0, integer=False)
        check_at_least("seed", self.seed, 0, most=2**63 - 1)
        self._check_inner()
        self._check_depth()
        if self.power_iterations is not None:
            check_at_least("power_iterations", self.power_iterations, 1)
            if self.terms != "rotor":
                raise ValueError(f"power_iterations decompose the bivectors of rotors; terms={self.terms!r} has none")

    def _check_inner(self) -> None:
        if isinstance(self.inner, str):
            check_choice("inner", self.inner, ("both", "input"))
            return
        check_type("inner", self.inner, int)
        if self.inner not in {1 << n for n in range(1, MAX_DIMENSION + 1)}:
            raise ValueError(
                f"inner must be 'both', 'input' or a power of two from 2 to {1 << MAX_DIMENSION}, got {self.inner!r}"
            )

    def _check_depth(self) -> None:
        for name in ("activate_entry", "residual"):
            if getattr(self, name) and not self.depth:
                raise ValueError(f"{name}=True is about a network's layers and needs a depth of 1 or more, got depth=0")
        if self.inner != "both" and not self.depth:
            raise ValueError(
                f"inner={self.inner!r} is the width of a network and needs a depth of 1 or more, got depth=0"
            )
        if self.permute_terms and self.depth:
            raise ValueError(
                f"permute_terms=True is about the plain sum, depth=0, got depth={self.depth}; the branches of a "
                "network are permuted by permute=True"
            )

    @classmethod
    def authors(cls, **changes: Any) -> Rotor:
        """The network as the authors' code builds it, up to what ``changes`` says otherwise.

        Blade coordinates, standard normal bivectors, a scale for every rotor that starts at 1 as the mixing scalars
        do, permutation, LayerNorm and PReLU after the entry layer too, one slope, spread windows averaged on either
        side; depth 2, width 3, double rotors, no residual, as in their settings; the width within is what fits into
        the inputs (theirs is a number for each model: ``inner=2048`` for 1,536 inputs). Their exponentials come from a
        power iteration that has converged as a rule: ``power_iterations=20`` adds it, and with it its biased gradient.
        """
        settings: dict[str, Any] = {
            "basis": "blade",
            "scale": True,
            "init_std": 1.0,
            "inner": "input",
            "windows": "spread",
            "activate_entry": True,
            "slopes": "shared",
            "gains": "ones",
        }
        return cls(**settings | changes)

    @property
    def linear(self) -> bool:
        """Whether the layer is a linear map of its input."""
        return self.depth == 0 or (self.activation == "none" and not self.normalize)

    @property
    def fits_weight(self) -> bool:  # type: ignore[override]
        """Only a plain sum of free Kronecker factors in the spinor basis has a closed-form fit."""
        return self.depth == 0 and self.terms == "kronecker" and self.basis == "spinor" and not self.permute_terms

    def inner_size(self, in_features: int, out_features: int) -> int:
        """The width within the network."""
        if isinstance(self.inner, int):
            return self.inner
        return window_size(in_features, in_features if self.inner == "input" else out_features)

    def check_shape(self, in_features: int, out_features: int) -> None:
        if min(in_features, out_features) < 2:
            raise ValueError(
                f"a rotor layer needs at least two inputs and outputs, got in_features={in_features}, "
                f"out_features={out_features}"
            )

    def resized(self, in_features: int, out_features: int, scale: float) -> Rotor:
        return self.replace(width=max(1, round(self.width * scale)))
