"""The generated operator T of the Contextually Guided Transformer: reference, which builds every token's weights."""

# Legend: D width of x, E width of y, M templates, R rank, T tokens, B batch

import torch
from torch import Tensor


def mixing(y: Tensor, weight: Tensor, bias: Tensor, kind: str) -> Tensor:
    """Return sigma(y) = h(S [y, 1]), the weight of each template (CGT, Section 3.1).

    Args:
        y: (..., E), the context.
        weight, bias: (M, E) and (M,), the two parts of S.
        kind: the non-linearity h, ``tanh`` or ``softmax``.
    """
    scores = torch.nn.functional.linear(y, weight, bias)
    return torch.tanh(scores) if kind == "tanh" else torch.softmax(scores, -1)


def modulate(x: Tensor, sigma: Tensor, left: Tensor, right: Tensor, right_bias: Tensor) -> Tensor:
    """Return T(x; y) = x + L(y) R(y)^T [x, 1] by building L(y) and R(y) for every token (CGT, Section 3.1).

    Args:
        x: (..., D).
        sigma: (..., M), weights of the templates; broadcasts against x, so that a sequence may share one context.
        left, right: (M, R, D), the templates L^m and R^m, transposed.
        right_bias: (M, R), the row of R^m that is multiplied by the constant 1.
    """
    generated_left = torch.einsum("...m,mrd->...rd", sigma, left)
    generated_right = torch.einsum("...m,mrd->...rd", sigma, right)
    generated_bias = torch.einsum("...m,mr->...r", sigma, right_bias)
    inner = (generated_right * x.unsqueeze(-2)).sum(-1) + generated_bias
    return x + (generated_left * inner.unsqueeze(-1)).sum(-2)


def generated_map(sigma: Tensor, left: Tensor, right: Tensor, right_bias: Tensor) -> tuple[Tensor, Tensor]:
    """Return the matrix A (D, D) and shift t (D,) of T(x) = A x + t for one context; as ``modulate``, but sigma (M,).

    If the context is frozen, they are folded into the projection that follows.
    """
    generated_left = torch.einsum("m,mrd->dr", sigma, left)
    generated_right = torch.einsum("m,mrd->rd", sigma, right)
    eye = torch.eye(left.shape[-1], dtype=left.dtype, device=left.device)
    return eye + generated_left @ generated_right, generated_left @ (sigma @ right_bias)


def moving_average(y: Tensor, initial: Tensor, rate: float, mask: Tensor | None = None) -> Tensor:
    """Return used_i = (1 - rate) used_{i-1} + rate y_i for all i, with used_0 = initial (CGT, caption of Figure 14).

    Args:
        y: (B, T, E), the contexts computed for the tokens.
        initial: (B, E), the average before the first token.
        rate: gamma in [0, 1]; 0 keeps ``initial``, 1 gives ``y``.
        mask: (B, T), nonzero at real tokens; padding does not change the average. None means no padding.

    Returns:
        (B, T, E), the average that each token uses; computed in float32 at least.
    """
    dtype = torch.promote_types(y.dtype, torch.float32)
    real = torch.ones(y.shape[:2], dtype=dtype, device=y.device) if mask is None else (mask != 0).to(dtype)
    count = real.cumsum(-1)
    age = count.unsqueeze(-1) - count.unsqueeze(-2)
    keep = torch.as_tensor(1.0 - rate, dtype=dtype, device=y.device)
    weights = rate * keep ** age.clamp(min=0) * real.unsqueeze(-2)
    causal = torch.ones(y.shape[1], y.shape[1], dtype=torch.bool, device=y.device).tril()
    weights = torch.where(causal, weights, 0.0)
    average = keep ** count.unsqueeze(-1) * initial.to(dtype).unsqueeze(-2) + weights @ y.to(dtype)
    return average.to(y.dtype)
