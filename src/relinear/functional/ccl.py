"""Context-conditioned linear maps (CCL): reference of Eq. 1 to 5, and mixtures of templates instead of basis gates."""

# Legend: T tokens, I in_features, O out_features, R rank (d_basis), G width of the gate network's last hidden layer,
# E templates

import torch
from torch import Tensor

from relinear.functional.upcast import upcast


def gate(features: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return K gates sigma(phi(c)) (..., K) of Eq. 2, in at least float32.

    Args:
        features: (..., G), the gate network's last hidden layer.
        weight, bias: (K, G) and (K,), its output layer for these gates.
    """
    features, weight, bias = upcast(features), upcast(weight), upcast(bias)
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
    """Return y = ((LayerNorm(x W_basis) * g_basis) W_mix + b) * g_out (Eq. 1 to 4).

    Args:
        x: (..., I).
        features: (..., G), the gate network's last hidden layer; may be None without gates.
        basis: (R, I), W_basis transposed.
        mix: (O, R), W_mix transposed.
        bias: (O,) or None.
        norm_gain, norm_offset: (R,) of the LayerNorm; None leaves it out.
        basis_gate, basis_gate_bias: (R, G) and (R,), the gate network's output layer for g_basis; None: g_basis = 1.
        output_gate, output_gate_bias: (O, G) and (O,), the same for g_out; None: g_out = 1.
        gate_bias: whether g_out gates the bias too (Eq. 4); False is the paper's Figure 3, y * g_out + b.
        eps: added to the LayerNorm's variance.
    """
    g_basis = _gate(features, basis_gate, basis_gate_bias)
    g_out = _gate(features, output_gate, output_gate_bias)
    return ccl_gated(x, g_basis, g_out, basis, mix, bias, norm_gain, norm_offset, gate_bias, eps)


def ccl_gated(
    x: Tensor,
    g_basis: Tensor | None,
    g_out: Tensor | None,
    basis: Tensor,
    mix: Tensor,
    bias: Tensor | None = None,
    norm_gain: Tensor | None = None,
    norm_offset: Tensor | None = None,
    gate_bias: bool = True,
    eps: float = 1e-5,
) -> Tensor:
    """Return the same as ``ccl`` for gates that have been computed.

    For a mixture of templates, ``g_basis`` is the probability p_e of each feature's template. Template e is the map
    U_e V_e of part e of ``mix`` and ``basis``: without norm and output gate this is y = sum_e p_e U_e V_e x + b.

    Args:
        g_basis, g_out: (..., R) and (..., O), or None for ones.
        x, basis, mix, bias, norm_gain, norm_offset, gate_bias, eps: as in ``ccl``.
    """
    h = upcast(x) @ upcast(basis).T
    if norm_gain is not None and norm_offset is not None:
        centered = h - h.mean(-1, keepdim=True)
        h = centered / (centered.square().mean(-1, keepdim=True) + eps).sqrt() * norm_gain + norm_offset
    h = h if g_basis is None else h * g_basis
    y = h @ upcast(mix).T
    b = torch.zeros_like(y[..., :1]) if bias is None else bias
    if g_out is None:
        y = y + b
    else:
        y = (y + b) * g_out if gate_bias else y * g_out + b
    return y.to(x.dtype)


def template_probabilities(features: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return the probabilities softmax(phi(c)) (..., E) of the templates, in at least float32.

    Args:
        features: (..., G), the gate network's last hidden layer.
        weight, bias: (E, G) and (E,), its output layer.
    """
    features, weight, bias = upcast(features), upcast(weight), upcast(bias)
    return torch.softmax(features @ weight.T + bias, -1)


def keep_largest(probabilities: Tensor, selected: int) -> Tensor:
    """Return ``probabilities`` (..., E) with all but the ``selected`` largest set to zero.

    These keep their values, as in the Switch Transformer (Fedus et al., 2022), so that gradients train the selection.
    """
    chosen = probabilities.topk(selected, -1).indices
    return torch.zeros_like(probabilities).scatter(-1, chosen, probabilities.gather(-1, chosen))


def _gate(features: Tensor | None, weight: Tensor | None, bias: Tensor | None) -> Tensor | None:
    """Return ``gate``, or None if there is none."""
    if weight is None:
        return None
    assert features is not None
    assert bias is not None
    return gate(features, weight, bias)


def ccl_dense(basis: Tensor, mix: Tensor, g_basis: Tensor | None, g_out: Tensor | None) -> Tensor:
    """Return W_eff of Eq. 5, transposed to (..., O, I): the map from x to y without bias, and without the LayerNorm.

    Args:
        basis: (R, I).
        mix: (O, R).
        g_basis: (..., R) or None for ones.
        g_out: (..., O) or None for ones.
    """
    gated_mix = mix if g_basis is None else mix * g_basis[..., None, :]
    weight = gated_mix @ basis.to(gated_mix.dtype)
    return weight if g_out is None else weight * g_out[..., :, None]
