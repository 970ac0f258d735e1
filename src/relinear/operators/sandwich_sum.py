"""Sums of sandwiches r x s~ as a module with parameters, from which rotor layers and networks are built."""

# Legend: V = 2^n window, P = n(n-1)/2 planes, J = n // 2 simple parts of a bivector, W terms, o / i windows of output /
# input, S blocks of a window with separate factors, L and R sizes of the left and the right factor

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from relinear import clifford
from relinear.clifford.tables import device_table
from relinear.contract.auxiliary_mixin import is_recomputing
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

    Parameters: ``left`` and ``right``, which are bivectors (W, o, i, P) of rotors (``left`` alone if these are single),
    elements of the algebra (W, o, i, V), or free factors (W, o, i, L, L) and (W, o, i, R, R); optional ``scale``
    (W, o, i). With ``power_iterations`` there are also the buffers ``left_vectors`` and ``right_vectors``
    (J - 1, W, o, i, n), from which the next decomposition starts.
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
        """Return (W, o, i)."""
        terms, outputs, inputs = self.left.shape[:3]
        return terms, outputs, inputs

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw bivectors with ``init_std`` (see ``Rotor``), and general terms and scales so that variance is kept."""
        terms, _, inputs = self.counts
        scale = (terms * inputs) ** -0.5 / self._input_weight  # of each term, so that the sum keeps the variance
        for parameter in (self.left, self.right):
            if parameter is None:
                continue
            if self.config.terms == "rotor":
                nn.init.normal_(parameter, std=self.config.init_std)
            else:
                root = 1.0 if self.config.scale else scale**0.5  # both factors contribute equally
                nn.init.normal_(parameter, std=root / math.sqrt(parameter.shape[-1]))
        if self.scale is not None:
            nn.init.constant_(self.scale, 1.0 if self.config.gains == "ones" else scale)
        for vectors in self.buffers():
            nn.init.normal_(vectors)
            vectors.div_(vectors.norm(dim=-1, keepdim=True))

    @property
    def _input_weight(self) -> float:
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
        a, b = reference.product_of_simple_rotors(self._simple_parts(self.left, "left_vectors"))
        if self.right is None:
            return a, b
        return a, reference.product_of_simple_rotors(self._simple_parts(self.right, "right_vectors"))[1]

    def _simple_parts(self, beta: Tensor, name: str) -> Tensor:
        """Return simple parts (J, W, o, i, P) by Algorithms 1 and 2 of the paper; start from the buffer ``name``.

        In training the buffer is then updated.
        """
        wide = torch.promote_types(beta.dtype, torch.float32)
        beta = beta.to(wide)
        buffer = getattr(self, name)
        if is_recomputing():  # the buffer holds the vectors of the forward pass
            return reference.simple_parts(beta, buffer.to(wide, copy=True))
        assert self.config.power_iterations is not None
        vectors = reference.plane_vectors(beta, buffer.to(wide), self.config.power_iterations)
        if self.training and torch.is_grad_enabled() and not is_transformed():
            with torch.no_grad():
                buffer.copy_(vectors)
        return reference.simple_parts(beta, vectors)

    def factors(self, rotors: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
        """Return left (W, o, i, S, L, L) and right (W, o, i, S, R, R) matrices, in at least single precision.

        Args:
            rotors: what ``exponentials`` returns, if it has been computed already.
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
            if self._input_weight != 1:
                a = a * self._input_weight
        return a, b

    def apply_factors(self, x: Tensor, left: Tensor, right: Tensor) -> Tensor:
        """Return y for x (..., I), with factors in the dtype of x (``functional.rotor.rotor_layer``)."""
        orders = None
        terms = self.counts[0]
        if self.config.permute_terms and terms > 1:
            orders = device_table(reference.term_orders, (self.window, terms, self.config.seed), x)
        return reference.rotor_layer(
            x,
            left,
            right,
            self.out_features,
            self.window,
            basis=self.config.basis,
            product=sandwich_windows,
            layout=self.config.windows,
            orders=orders,
        )

    def dense(self) -> Tensor:
        """Return the (O, I) matrix in at least single precision."""
        left, right = self.factors()
        eye = torch.eye(self.in_features, dtype=left.dtype, device=left.device)
        return self.apply_factors(eye, left, right).T

    def flops_per_token(self) -> int:
        """Return the FLOPs per token of the factored product."""
        terms, outputs, inputs = self.counts
        left, right = self.factor_sizes
        basis = 0 if self.config.basis == "spinor" else 2 * self.shape.rows * self.window * (inputs + outputs)
        return 2 * terms * outputs * inputs * self.window * (left + right) + basis

    @property
    def factor_sizes(self) -> tuple[int, int]:
        """Return (L, R)."""
        if self.config.terms == "kronecker":
            return self.left.shape[-1], self.right.shape[-1]
        size = self.shape.rows * self.shape.components
        return size, size

    def factored_cost(self, tokens: int, dtype: torch.dtype) -> float:
        """Estimate the time of the factored product in inference on a CPU, like ``kernels.dense.dense_cost``."""
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
        """Return ``factors`` in the dtype of x; in inference from the cache."""
        cache = self.cache_for(x)
        cached = None if cache is None else self._cached_factors(cache, x.dtype)
        if cached is not None:
            return cached
        left, right = self.factors(rotors)
        return left.to(x.dtype), right.to(x.dtype)

    def _cached_factors(self, cache: ParameterCache, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return cache.get(("factors", dtype), lambda: tuple(factor.to(dtype).contiguous() for factor in self.factors()))

    def cache_for(self, x: Tensor) -> ParameterCache | None:
        """Return the cache for values computed from parameters alone; None if caching is not allowed.

        Nothing is cached if something else replaces a parameter, such as a mask, a parametrisation or a tensor that
        another network computes.
        """
        if self.training or torch.compiler.is_compiling() or not are_parameters(self, "left", "right", "scale"):
            return None
        if torch.is_grad_enabled() and (x.requires_grad or any(p.requires_grad for p in self.parameters())):
            return None
        return self.cache_or_compare(self.left)

    def _inference(self, cache: ParameterCache, dtype: torch.dtype, device: torch.device) -> Callable[[Tensor], Tensor]:
        """Return a function from x to y with cached factors; on a CPU a faster one for a single input window."""
        left, right = self._cached_factors(cache, dtype)
        terms, _, inputs = self.counts
        single = terms == inputs == left.shape[3] == 1 and self.in_features == self.window
        if device.type != "cpu" or not single or self.config.basis == "blade":
            return lambda x: self.apply_factors(x, left, right)
        # two products per output window, without the passes over memory that splitting into windows takes
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
    """Return left (W, o, i, L, L) and right (W, o, i, R, R) rotors of every sum, in few batches.

    All windows of one size are one batch of matrix exponentials for each side, or for both sides if these use the same
    matrices. The matrices are so small that a call takes longer than its arithmetic.
    """
    sizes = {s.window for s in sums}
    if len(sizes) > 1:
        by_size = {size: iter(exponentials([s for s in sums if s.window == size])) for size in sizes}
        return [next(by_size[s.window]) for s in sums]
    lefts = [s.left for s in sums]
    rights = [s.left if s.right is None else s.right for s in sums]
    with torch.autocast(sums[0].left.device.type, enabled=False):
        if sums[0].shape.components == 1:  # components are numbers, which commute: both sides use the same matrices
            factors = _batched(clifford.left_factor, [*lefts, *rights])
            return list(zip(factors[: len(sums)], factors[len(sums) :], strict=True))
        sides = _batched(clifford.left_factor, lefts), _batched(clifford.right_factor, rights)
    return list(zip(*sides, strict=True))


def _batched(factor: Callable[[Tensor], Tensor], betas: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return ``factor(beta)`` for each of the bivectors ``betas`` (W, o, i, P), computed in one call."""
    if len(betas) == 1:
        return (factor(betas[0]),)
    factors = factor(torch.cat([beta.flatten(0, 2) for beta in betas]))
    parts = factors.split([beta.shape[:3].numel() for beta in betas])
    return tuple(part.unflatten(0, beta.shape[:3]) for part, beta in zip(parts, betas, strict=True))
