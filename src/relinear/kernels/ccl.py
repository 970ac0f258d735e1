"""CCL with as few passes over memory as plain torch allows; compilers fuse the pointwise ends into the products."""

# Legend: I in_features, O out_features, R rank, G width of the gate network's last hidden layer

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from relinear.kernels.choice import prefers_triton

__all__ = ["ccl"]


def ccl(
    x: Tensor,
    features: Tensor | None,
    basis: Tensor,
    mix: Tensor,
    bias: Tensor | None = None,
    norm_gain: Tensor | None = None,
    norm_offset: Tensor | None = None,
    basis_gate: Tensor | None = None,
    basis_gate_bias: Tensor | None = None,
    output_gate: Tensor | None = None,
    output_gate_bias: Tensor | None = None,
    gate_bias: bool = True,
    eps: float = 1e-5,
) -> Tensor:
    """``functional.ccl.ccl`` in the input's dtype.

    The gate network's last layer is two products, one a gate, so that no gate is a strided slice; the bias rides in the
    product before it; sigmoids are in place, and so are the products with the gates where no graph is kept.
    """
    gates = basis_gate, basis_gate_bias, output_gate, output_gate_bias
    if prefers_triton(x, features, basis, mix, bias, norm_gain, norm_offset, *gates):
        from relinear.kernels.triton import ccl as fused

        norm = norm_gain, norm_offset
        return fused.ccl(x, features, basis, mix, bias, *norm, *gates, gate_bias, eps)
    h = F.linear(x, basis)
    if norm_gain is not None:
        h = F.layer_norm(h, h.shape[-1:], norm_gain, norm_offset, eps)
    if basis_gate is not None:
        h = _times(h, _gate(features, basis_gate, basis_gate_bias))
    if output_gate is None:
        return F.linear(h, mix, bias)
    g_out = _gate(features, output_gate, output_gate_bias)
    if bias is None or gate_bias:
        return _times(F.linear(h, mix, bias), g_out)
    return torch.addcmul(bias, F.linear(h, mix), g_out)


def _gate(features: Tensor | None, weight: Tensor, bias: Tensor | None) -> Tensor:
    assert features is not None
    return F.linear(features, weight, bias).sigmoid_()


def _times(value: Tensor, gates: Tensor) -> Tensor:
    return value * gates if torch.is_grad_enabled() else value.mul_(gates)
