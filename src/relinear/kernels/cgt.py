"""Compute ``functional.cgt`` without building the weights of any token."""

# Legend: D width of x, M templates, R rank, N tokens in all

import torch
from torch import Tensor

from relinear.kernels import triton
from relinear.kernels.implementations import Call, Implementation, dispatch

#: columns M R that the Triton kernel can hold in one tile
MAX_COLUMNS_ON_CHIP = 128


def _triton_unsupported(call: Call) -> str:
    *_, right_bias = call.arguments
    if right_bias.numel() > MAX_COLUMNS_ON_CHIP:
        return "too many columns"
    return triton.unsupported_reason(call, "cgt", 5, lambda call: call.x.shape[-1], training=False)


def _triton(*arguments: Tensor) -> Tensor:
    from relinear.kernels.triton import cgt as fused

    return fused.modulate(*arguments)


@dispatch(Implementation("Triton", _triton_unsupported, _triton), otherwise="three thin products")
def modulate(x: Tensor, sigma: Tensor, left: Tensor, right: Tensor, right_bias: Tensor) -> Tensor:
    """Compute T(x; y) of ``functional.cgt.modulate`` in three thin matrix products, in another order of summation.

    Let P = [x, 1] R_all (N, M R), and s be the weights sigma, each repeated R times. The first sum over templates,
    repeated for all of them, is (P * s) J J^T, where J stacks M identities of size R. Multiplied by s again and by
    L_all (M R, D) it gives T(x; y) - x. This takes memory for M R numbers per token instead of 2 R D.
    """
    templates, rank, width = left.shape
    columns = templates * rank
    shares = sigma.repeat_interleave(rank, -1)
    mixer = torch.eye(rank, dtype=x.dtype, device=x.device).repeat(templates, templates)
    inner = torch.nn.functional.linear(x, right.reshape(columns, width), right_bias.reshape(columns))
    inner = (inner * shares) @ mixer * shares
    flat = torch.addmm(x.reshape(-1, width), inner.reshape(-1, columns), left.reshape(columns, width))
    return flat.view(x.shape)
