"""A layer of sandwiches r x s~ with its parameters: the part from which rotor layers and networks are built."""

# Legend: V = 2^n window, P = n(n-1)/2 planes, W terms, o / i windows of output / input, S blocks of a window with
# factors of their own, L and R sizes of the left and the right factor

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from relinear import clifford
from relinear.clifford.tables import device_table
from relinear.contract.inference import CachingModule, ParameterCache
from relinear.contract.parameters import are_parameters
from relinear.functional import rotor as reference
from relinear.kernels.dense import factored_cost
from relinear.kernels.implementations import is_transformed
from relinear.kernels.rotor import sandwich_windows
from relinear.system.machine import tiled

if TYPE_CHECKING:
    from relinear.operators.rotor import Rotor


class SandwichSum(CachingModule):
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
        counts = (terms, reference.window_count(out_features, window), reference.window_count(in_features, window))
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
        """Draw rotors by ``init_std`` (see ``Rotor``), and general terms and scales so that variance is kept."""
        terms, _, inputs = self.counts
        scale = (terms * inputs) ** -0.5 / self._share  # of a term, which keeps the variance of the sum
        for parameter in (self.left, self.right):
            if parameter is None:
                continue
            if self.config.terms == "rotor":
                nn.init.normal_(parameter, std=self.config.init_std)
            else:
                share = 1.0 if self.config.scale else scale**0.5  # half for either factor
                nn.init.normal_(parameter, std=share / math.sqrt(parameter.shape[-1]))
        if self.scale is not None:
            nn.init.constant_(self.scale, 1.0 if self.config.gains == "ones" else scale)
        for vectors in self.buffers():
            nn.init.normal_(vectors)
            vectors.div_(vectors.norm(dim=-1, keepdim=True))

    @property
    def _share(self) -> float:
        """Return the weight of an input window in an output: spread windows are averaged, others summed."""
        return 1 / self.counts[2] if self.config.windows == "spread" else 1.0

    @property
    def exponentiates(self) -> bool:
        """Return whether the factors are exact exponentials of the parameters."""
        return self.config.terms == "rotor" and self.config.power_iterations is None

    def bivectors(self) -> dict[str, Tensor]:
        """Return the bivectors (W, o, i, P) of the rotors by side; single rotors have one side, other terms none."""
        if self.config.terms != "rotor":
            return {}
        sides: dict[str, Tensor | None] = {"left": self.left, "right": self.right}
        return {side: beta for side, beta in sides.items() if beta is not None}

    def _rotor_factors(self) -> tuple[Tensor, Tensor]:
        if self.exponentiates:
            return exponentials([self])[0]
        a, b = reference.product_of_simple_rotors(self._parts(self.left, "left_vectors"))
        if self.right is None:
            return a, b
        return a, reference.product_of_simple_rotors(self._parts(self.right, "right_vectors"))[1]

    def _parts(self, beta: Tensor, name: str) -> Tensor:
        """Return simple parts by Algorithms 1 and 2 of the paper, from the end of the last ones in training."""
        wide = torch.promote_types(beta.dtype, torch.float32)
        beta, stored = beta.to(wide), getattr(self, name)
        recomputed = not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1
        if recomputed:  # by gradient checkpointing, from the vectors of the forward pass
            return reference.simple_parts(beta, stored.to(wide, copy=True))
        assert self.config.power_iterations is not None
        vectors = reference.turned_vectors(beta, stored.to(wide), self.config.power_iterations)
        if self.training and torch.is_grad_enabled() and not is_transformed():
            with torch.no_grad():
                stored.copy_(vectors)
        return reference.simple_parts(beta, vectors)

    def factors(self, rotors: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
        """Return left (W, o, i, S, L, L) and right (W, o, i, S, R, R) matrices, in at least single precision.

        Args:
            rotors: of ``exponentials``, where they are there already.
        """
        right = self.left if self.right is None else self.right
        wide = torch.promote_types(self.left.dtype, torch.float32)
        with torch.autocast(self.left.device.type, enabled=False):
            if self.config.terms == "rotor":
                a, b = (factor.unsqueeze(3) for factor in rotors or self._rotor_factors())
            elif self.config.terms == "kronecker":
                a, b = self.left.to(wide).unsqueeze(3), right.to(wide).unsqueeze(3)
            else:
                elements = self.left.to(wide), right.to(wide)
                if self.config.basis == "blade":
                    elements = clifford.to_spin(elements[0]), clifford.to_spin(elements[1])
                a, b = clifford.left_multiplication(elements[0]), clifford.right_multiplication(elements[1])
            if self.scale is not None:
                a = a * self.scale[..., None, None, None]
            if self._share != 1:
                a = a * self._share
        return a, b

    def apply_factors(self, x: Tensor, left: Tensor, right: Tensor) -> Tensor:
        """Return the map itself, with factors in the dtype of ``x``."""
        orders, terms = None, self.counts[0]
        if self.config.permute_terms and terms > 1:
            orders = device_table(reference.term_orders, (self.window, terms, self.config.seed), x)
        settings = self.config.basis, sandwich_windows, self.config.windows, orders
        return reference.rotor_layer(x, left, right, self.out_features, self.window, *settings)

    def dense(self) -> Tensor:
        """Return the (O, I) matrix in at least single precision."""
        left, right = self.factors()
        eye = torch.eye(self.in_features, dtype=left.dtype, device=left.device)
        return self.apply_factors(eye, left, right).T

    def flops_per_token(self) -> int:
        """Return the FLOPs per token of the factored form."""
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
        """Return the cost of the factored form in inference on a CPU, as ``kernels.dense.dense_cost``."""
        blade = self.config.basis == "blade"
        sizes = self.in_features, self.out_features, min(self.factor_sizes)
        return factored_cost(*sizes, math.prod(self.counts), self.flops_per_token(), blade, tokens, tiled(dtype))

    def forward(self, x: Tensor, rotors: tuple[Tensor, Tensor] | None = None) -> Tensor:
        run, cache = None, self.cache_for(x)
        if cache is not None:
            run = cache.get(("map", x.dtype), lambda: self._inference(cache, x.dtype, x.device))
        if run is not None:
            return run(x)
        return self.apply_factors(x, *self.factors_for(x, rotors))

    def factors_for(self, x: Tensor, rotors: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
        """Return ``factors`` in the dtype of ``x``; in inference the cached ones."""
        cache = self.cache_for(x)
        cached = None if cache is None else self._cached_factors(cache, x.dtype)
        if cached is not None:
            return cached
        left, right = self.factors(rotors)
        return left.to(x.dtype), right.to(x.dtype)

    def _cached_factors(self, cache: ParameterCache, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return cache.get(("factors", dtype), lambda: tuple(factor.to(dtype).contiguous() for factor in self.factors()))

    def cache_for(self, x: Tensor) -> ParameterCache | None:
        """Return the cache of what depends on parameters alone; None if caching is not allowed.

        Where something else stands in a parameter's place (a mask, a parametrisation, a tensor that another network
        computes), its values come from more than parameters: nothing is cached.
        """
        if self.training or torch.compiler.is_compiling() or not are_parameters(self, "left", "right", "scale"):
            return None
        if torch.is_grad_enabled() and (x.requires_grad or any(p.requires_grad for p in self.parameters())):
            return None
        return self.cache_or_compare(self.left)

    def _inference(self, cache: ParameterCache, dtype: torch.dtype, device: torch.device) -> Callable[[Tensor], Tensor]:
        """Return the map with everything that depends on parameters computed beforehand, the faster way."""
        left, right = self._cached_factors(cache, dtype)
        terms, _, inputs = self.counts
        alone = terms == inputs == left.shape[3] == 1 and self.in_features == self.window
        if device.type != "cpu" or not alone or self.config.basis == "blade":
            return lambda x: self.apply_factors(x, left, right)
        # a sandwich for each output window is two products, without the windows' bookkeeping and its passes over memory
        pairs = [*zip(left[0, :, 0, 0], right[0, :, 0, 0], strict=True)]
        rows, columns = left.shape[-1], right.shape[-1]
        middle = self.shape.columns if self.config.terms != "kronecker" else columns

        def direct(x: Tensor) -> Tensor:
            matrices = x.reshape(-1, columns)
            outputs = [a @ F.linear(matrices, b).view(-1, rows, middle) for a, b in pairs]
            if len(outputs) == 1:
                return outputs[0].view(*x.shape[:-1], self.out_features)
            windows = torch.stack([y.view(-1, self.window) for y in outputs], 1)
            return reference.from_windows(windows, self.out_features, self.config.windows).view(
                *x.shape[:-1], self.out_features
            )

        return direct


def exponentials(sums: Sequence[SandwichSum]) -> list[tuple[Tensor, Tensor]]:
    """Return left (W, o, i, L, L) and right (W, o, i, R, R) rotors of every sum.

    Every side is one batch of matrix exponentials for all windows of one size, and both are one where they are made of
    the same matrices: of such small ones a call takes longer than what it computes.
    """
    sizes = {s.window for s in sums}
    if len(sizes) > 1:
        every = {size: iter(exponentials([s for s in sums if s.window == size])) for size in sizes}
        return [next(every[s.window]) for s in sums]
    lefts, rights = [s.left for s in sums], [s.left if s.right is None else s.right for s in sums]
    with torch.autocast(sums[0].left.device.type, enabled=False):
        if sums[0].shape.components == 1:  # numbers commute, and either side is an exponential of the same kind
            factors = _batched(clifford.left_factor, [*lefts, *rights])
            return list(zip(factors[: len(sums)], factors[len(sums) :], strict=True))
        sides = _batched(clifford.left_factor, lefts), _batched(clifford.right_factor, rights)
    return list(zip(*sides, strict=True))


def _batched(factor: Callable[[Tensor], Tensor], betas: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return ``factor`` of each of the bivectors (W, o, i, P)."""
    if len(betas) == 1:
        return (factor(betas[0]),)
    factors = factor(torch.cat([beta.flatten(0, 2) for beta in betas]))
    parts = factors.split([beta.shape[:3].numel() for beta in betas])
    return tuple(part.unflatten(0, beta.shape[:3]) for part, beta in zip(parts, betas, strict=True))
