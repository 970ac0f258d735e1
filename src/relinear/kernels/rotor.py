"""Compute ``functional.rotor`` in fused kernels: whole networks on a CPU, sandwich sums and hidden steps on a GPU."""

# Legend: N tokens, I / O windows of the input / output, W terms, L and R sizes of the factors

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from relinear.functional import rotor as reference
from relinear.kernels import native, triton
from relinear.kernels.autograd import differentiable_as, recomputed, save
from relinear.kernels.implementations import Call, Implementation, dispatch

#: tokens per thread in the backward pass, below which fewer threads run; each sums its own gradients of parameters
TOKENS_PER_THREAD = 64


def _outputs(call: Call) -> int:
    x, left, *_ = call.arguments
    return x.shape[-1] * left.shape[1]


_triton_unsupported = functools.partial(
    triton.unsupported_reason,
    kind="rotor",
    tensors=3,
    outputs=_outputs,
    most=2**40,
    training=False,
)


def _triton(*arguments: Any) -> Tensor:
    from relinear.kernels.triton import rotor as fused

    return fused.sandwich_windows(*arguments)


@dispatch(Implementation("Triton", _triton_unsupported, _triton))
def sandwich_windows(x: Tensor, left: Tensor, right: Tensor, basis: str = "spinor") -> Tensor:
    """Compute ``functional.rotor.sandwich_windows``; where intermediate results are large, recompute them."""
    if left.shape[:3].numel() < sum(left.shape[1:3]):  # a window for each sandwich; fewer than those of x and y
        return reference.sandwich_windows(x, left, right, basis)
    return recomputed(reference.sandwich_windows, x, left, right, basis)


def _step_unsupported(call: Call) -> str:
    # large factors are checked separately, as they are compiled to other instructions
    window = call.x.shape[-1]
    kind = "rotor_step" if window < 2048 else "rotor_step_2048" if window < 4096 else "rotor_step_4096"
    return triton.unsupported_reason(call, kind, 5, lambda call: window)


def _step_in_triton(*arguments: Any) -> Tensor:
    from relinear.kernels.triton import rotor as fused

    return fused.rotor_step(*arguments)


def supports_step(x: Tensor, left: Tensor, right: Tensor, slopes: Tensor, mix: Tensor) -> bool:
    """Return whether ``rotor_step`` runs as one kernel for these tensors; otherwise factors need not be computed."""
    return not _step_unsupported(Call(x, left, right, slopes, mix))


rotor_step = dispatch(Implementation("Triton", _step_unsupported, _step_in_triton))(reference.rotor_step)


def _float32(values: Tensor) -> Tensor:
    """Convert to the format that the kernel reads: float32, contiguous, without a graph."""
    if values.dtype == torch.float32 and not values.requires_grad and values.is_contiguous():
        return values
    return values.detach().float().contiguous()


class PreparedNetwork:
    """Compute ``rotor_network`` without gradients, with parameters that are converted for the kernel only once.

    Args:
        in_features: size of the inputs.
        left, right, orders, slopes, mix, network: as for ``rotor_network``.
    """

    def __init__(self, in_features: int, left, right, orders, slopes, mix, network: reference.NetworkSettings) -> None:
        # copies: the kernel stores addresses, and a parameter's memory may move
        self.left, self.right = ([_float32(factor).clone() for factor in factors] for factors in (left, right))
        tensors = self.left, self.right, orders, _float32(slopes), _float32(mix)
        self.run = native.calls.Network(in_features, *tensors, network)

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        y = x.new_empty(x.shape[0], self.run.out_features)
        native.calls.rotor_network(y, x.detach().contiguous(), self.run, None if bias is None else _float32(bias))
        return y


def _network_of_factors(network, orders, x, slopes, mix, bias, *factors) -> Tensor:
    half = len(factors) // 2
    return reference.rotor_network(x, factors[:half], factors[half:], orders, slopes, mix, bias, network)


class _Network(torch.autograd.Function):
    """Run the network in one pass; the backward pass recomputes everything between input and output."""

    @staticmethod
    def forward(ctx, network, orders, x, slopes, mix, bias, *factors):
        save(ctx, (network, orders, x, slopes, mix, bias, *factors))
        half = len(factors) // 2
        ctx.prepared = PreparedNetwork(x.shape[1], factors[:half], factors[half:], orders, slopes, mix, network)
        return ctx.prepared(x, bias)

    @staticmethod
    @differentiable_as(_network_of_factors)
    def backward(ctx, grad):
        _, _, x, slopes, mix, bias, *factors = ctx.saved_tensors  # raises if one was changed in place
        need_x, need_bias = ctx.needs_input_grad[2], ctx.needs_input_grad[5]
        prepared = ctx.prepared
        x = x.contiguous()
        grad = grad.contiguous()
        grad_x = torch.empty_like(x) if need_x else None
        parameters = [*itertools.chain(*zip(prepared.left, prepared.right, strict=True)), slopes, mix]
        sizes = [parameter.numel() for parameter in parameters]
        threads = max(1, min(torch.get_num_threads(), len(x) // TOKENS_PER_THREAD))
        sums = x.new_empty(threads, sum(sizes), dtype=torch.float32)
        native.calls.rotor_network_backward(grad_x, sums, grad, x, prepared.run)
        *to_factor_entries, to_slopes, to_mix = sums.sum(0).split(sizes)
        ordered = [*to_factor_entries[::2], *to_factor_entries[1::2]]
        to_factors = [g.view(f.shape).to(f.dtype) for g, f in zip(ordered, factors, strict=True)]
        to_bias = grad.sum(0).to(bias.dtype) if need_bias else None
        return None, None, grad_x, to_slopes.to(slopes.dtype), to_mix.to(mix.dtype), to_bias, *to_factors


#: elements of the largest factor per row of x, above which a tile of tokens is mostly empty: float32 needs at least two
#: rows for a window of 2,048 (factors of 64) and eight for 4,096
ELEMENTS_PER_ROW = {torch.float32: 1 << 11, torch.bfloat16: 1 << 12}


def _network_unsupported(call: Call) -> str:
    """Return why C++ does not run a network. Kernels are built for training or many tokens, not for few tokens."""
    _, left, right, *_ = call.arguments
    return _sizes_unsupported(call, [factor.shape[-1] for factor in (*left, *right)])


def _sizes_unsupported(call: Call, sizes: Sequence[int]) -> str:
    if any(size % 8 for size in sizes):
        return "factors of sizes not divisible by 8"
    if not call.grad and call.rows * ELEMENTS_PER_ROW.get(call.dtype, 0) < max(sizes) ** 2:
        return "few rows of a large window, where a tile of tokens is mostly empty"
    reason = native.unsupported_reason(call, native.MIN_NETWORK_ENTRIES)
    return native.unsupported_reason(call, fewest=1, may_build=False) if reason and not call.grad else reason


def supports_network(x: Tensor, sizes: Sequence[int]) -> bool:
    """Return whether ``rotor_network`` runs as one kernel for inputs x (N, I) and factors of these sizes."""
    return not _sizes_unsupported(Call(x), sizes)


def _in_tiles(x, left, right, orders, slopes, mix, bias, network) -> Tensor:
    if torch.is_grad_enabled():
        return _Network.apply(network, orders, x, slopes, mix, bias, *left, *right)
    return PreparedNetwork(x.shape[1], left, right, orders, slopes, mix, network)(x, bias)


rotor_network = dispatch(Implementation("tiles of tokens in C++", _network_unsupported, _in_tiles))(
    reference.rotor_network
)
