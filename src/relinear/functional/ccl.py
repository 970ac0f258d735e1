"""Context-conditioned linear maps (CCL): the reference form of Eq. 1 to 5."""

# Legend: T tokens, I in_features, O out_features, R rank (d_basis), G width of the gate network's last hidden layer

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["ccl", "ccl_dense", "gate"]


def gate(features: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """sigma(phi(c)) of Eq. 2 for one part of the gates, in float32 for half precision.

    Args:
        features: (..., G), the gate network's last hidden layer.
        weight, bias: (K, G) and (K,), this part of its last layer.
    """
    features, weight, bias = _upcast(features), _upcast(weight), _upcast(bias)
    return torch.sigmoid(features @ weight.T + bias)


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
    """y = ((LayerNorm(x W_basis) * g_basis) W_mix + b) * g_out (Eq. 1 to 4).

    Args:
        x: (..., I).
        features: (..., G), the gate network's last hidden layer; may be None without gates.
        basis: (R, I), W_basis transposed.
        mix: (O, R), W_mix transposed.
        bias: (O,) or None.
        norm_gain, norm_offset: (R,) of the LayerNorm; None leaves it out.
        basis_gate, basis_gate_bias: (R, G) and (R,), last layer of g_basis; None means g_basis = 1.
        output_gate, output_gate_bias: (O, G) and (O,), last layer of g_out; None means g_out = 1.
        gate_bias: Eq. 4, where g_out gates the bias too; False is the paper's Figure 3, y * g_out + b.
        eps: of the LayerNorm.
    """
    h = _upcast(x) @ _upcast(basis).T
    if norm_gain is not None:
        assert norm_offset is not None
        centred = h - h.mean(-1, keepdim=True)
        h = centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt() * norm_gain + norm_offset
    if basis_gate is not None:
        assert features is not None
        assert basis_gate_bias is not None
        h = h * gate(features, basis_gate, basis_gate_bias)
    y = h @ _upcast(mix).T
    b = torch.zeros_like(y[..., :1]) if bias is None else bias
    if output_gate is None:
        return (y + b).to(x.dtype)
    assert features is not None
    assert output_gate_bias is not None
    g_out = gate(features, output_gate, output_gate_bias)
    return ((y + b) * g_out if gate_bias else y * g_out + b).to(x.dtype)


def ccl_dense(basis: Tensor, mix: Tensor, g_basis: Tensor | None, g_out: Tensor | None) -> Tensor:
    """W_eff of Eq. 5, transposed to (..., O, I): the map from x to y without bias, and without the LayerNorm.

    Args:
        basis: (R, I).
        mix: (O, R).
        g_basis: (..., R) or None for ones.
        g_out: (..., O) or None for ones.
    """
    left = mix if g_basis is None else mix * g_basis[..., None, :]
    weight = left @ basis.to(left.dtype)
    return weight if g_out is None else weight * g_out[..., :, None]


def _upcast(t: Tensor) -> Tensor:
    return t.float() if t.dtype in (torch.bfloat16, torch.float16) else t
