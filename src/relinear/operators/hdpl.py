"""HDPL layers (Khasia 2026): the sum of a block-diagonal detail path and a low-rank variational context path."""

# Legend: I in_features, O out_features, K blocks, R latent size (rank)

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from relinear.activations.hooks import LATENT, Activation, LatentOperator, as_activation
from relinear.contract.config import Count, NonNegative, check_divides, register
from relinear.contract.operator import OperatorConfig
from relinear.contract.parameters import AffineParameters, are_affine_parameters
from relinear.functional import hdpl as reference
from relinear.kernels.autograd import recomputed
from relinear.kernels.hdpl import hdpl, prepare_few_rows
from relinear.operators.fused_inference import FusedInference

#: log sigma^2 after ``fit_to_linear_``: noise of 2 % of a latent of unit variance
_FITTED_LOGVAR = -8.0


class HDPLLinear(FusedInference, LatentOperator):
    """y = diag(W_1 .. W_K) x + D silu(z) + bias with z ~ N(mu(x), sigma(x)^2) in training and z = mu(x) in eval.

    Parameters: ``blocks`` (K, O/K, I/K), ``mu.weight`` (R, I), ``mu.bias`` (R,), ``logvar.weight`` (R, I),
    ``logvar.bias`` (R,), ``decoder.weight`` (O, R), optional ``bias`` (O,). Without noise there is no ``logvar``.

    Metrics: ``clamped``, the share of tokens (with free bits: of dimensions) whose regulariser has no gradient;
    ``divergence``, the divergence of the posterior from the prior in nats per token, before any bound.
    """

    config: HDPL
    finite_fan_in = ("decoder",)
    finite_fan_out = ("mu", "logvar")
    tensor_parallel: ClassVar = {"blocks": 0, "mu": 0, "logvar": 0, "decoder": 1}
    orthogonal_initialized = ("mu", "decoder")

    def create(self, **kw: Any) -> None:
        k, rank = self.config.blocks, self.config.rank
        self.blocks = nn.Parameter(torch.empty(k, self.out_features // k, self.in_features // k, **kw))
        self.mu = AffineParameters(rank, self.in_features, **kw)
        self.logvar = AffineParameters(rank, self.in_features, **kw) if self.config.noise else None
        self.decoder = AffineParameters(self.out_features, rank, bias=False, **kw)

    @property
    def latent_size(self) -> int:
        return self.config.rank

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialise as the paper describes (``init="blocks"``) or as the authors' code does (``init="authors"``).

        In both, the encoder of mu and the decoder are orthogonal. The encoder of the variance and the additive bias are
        zero, so that sigma = 1.

        "blocks": in a square layer every block is the identity plus noise of standard deviation 0.01, else an
        orthogonal matrix. All biases are zero.

        "authors": in a square layer only block 0 is the identity, and all blocks have the noise. Else all blocks,
        stacked to (O, I / K), are one orthogonal matrix. The encoders' biases are uniform within 1 / sqrt(I).
        """
        authors = self.config.init == "authors"
        if self.in_features == self.out_features:
            nn.init.normal_(self.blocks, std=0.01)
            (self.blocks[:1] if authors else self.blocks).diagonal(dim1=1, dim2=2).add_(1)
        else:
            for matrix in [self.blocks.flatten(0, 1)] if authors else self.blocks:
                _orthogonal_(matrix)
        _orthogonal_(self.mu.weight)
        _orthogonal_(self.decoder.weight)
        self.zero_bias_()
        if self.logvar is not None:
            nn.init.zeros_(self.logvar.weight)
        bound = 1 / math.sqrt(self.in_features)
        for encoder in (self.mu, self.logvar):
            if encoder is not None and encoder.bias is not None:
                nn.init.uniform_(encoder.bias, -bound, bound) if authors else nn.init.zeros_(encoder.bias)

    def fused_kernel(self, x: Tensor) -> Callable[[Tensor], Tensor] | None:
        if not are_affine_parameters((self.mu, self.decoder)):
            return None
        # ``forward`` instead of a call: hooks of the submodules run only in a forward pass of the layer
        return prepare_few_rows(x, self.blocks, *self.mu.forward(), self.decoder.forward()[0], self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return y = diag(W_1 .. W_K) x + D silu(z) + bias (Eq. 1-7), written out in ``functional.hdpl.hdpl``.

        z = mu + sigma noise, where mu and log sigma^2 are affine in x; without noise, as in eval, z = mu.
        """
        if (y := self.fused_forward(x)) is not None:
            return y
        mu_encoder = self.mu()  # calling it returns (weight, bias)
        logvar_encoder = None, None
        noise = None
        if self.training and self.logvar is not None:
            dtype = torch.promote_types(x.dtype, torch.float32)  # where the generator is fastest
            noise = torch.randn(*x.shape[:-1], self.config.rank, device=x.device, dtype=dtype)
            logvar_encoder = self.logvar()
        decoder, _ = self.decoder()
        y, z, mu, logvar = hdpl(x, self.blocks, *mu_encoder, *logvar_encoder, decoder, self.bias, noise)
        if self.activation_hooks is not None:
            latent = Activation(z, mu, self._log_variance(x, mu) if logvar is None else logvar)
            changed = self.hooked(LATENT, latent)
            y = y if changed is z else reference.hdpl_decode(x, changed, self.blocks, decoder, self.bias)
        if logvar is not None:
            bound, free_nats = self.config.bound, self.config.free_nats
            loss, clamped, divergence = recomputed(reference.regularizer, mu, logvar, bound, free_nats)
            metrics = {"clamped": clamped.to(loss.dtype), "divergence": divergence}
            self.record_auxiliary({"latent": self.config.beta * loss}, metrics)
        return y

    def _log_variance(self, x: Tensor, mu: Tensor) -> Tensor:
        """Return log sigma^2 (..., R); -inf without noise."""
        return as_activation(mu).logvar if self.logvar is None else F.linear(x, *self.logvar())

    def fit_to_weight_(self, weight: Tensor) -> None:
        """Fit a block-diagonal part plus a part of rank R // 2, which the context path represents exactly in eval.

        Because silu(z) - silu(-z) = z, two latent dimensions with opposite encoders and decoders act as one exactly
        linear dimension, at any scale of the input. Blocks and low-rank part are fitted together
        (``functional.hdpl.hdpl_fit``). If R is odd, the last dimension keeps its encoder and gets a zero decoder. The
        variance encoder is set to log sigma^2 = -8: the noise in training is 2 % of a latent of unit variance.
        """
        pairs = min(self.config.rank // 2, *weight.shape)
        blocks, down, up = reference.hdpl_fit(weight, self.config.blocks, pairs)
        self.blocks.copy_(blocks)
        self.mu.weight[: 2 * pairs].copy_(torch.cat([down, -down]))
        self.decoder.weight.copy_(F.pad(torch.cat([up, -up], 1), (0, self.config.rank - 2 * pairs)))
        self.mu.bias.zero_()
        if self.logvar is not None:
            self.logvar.weight.zero_()
            self.logvar.bias.fill_(_FITTED_LOGVAR)

    def flops_per_token(self) -> int:
        """Return the FLOPs per token of a training forward; eval, or no noise, saves the variance encoder's 2 R I."""
        encoders = [encoder for encoder in (self.mu, self.logvar) if encoder is not None]
        return 2 * sum(p.numel() for p in (self.blocks, self.decoder.weight, *(e.weight for e in encoders)))


def _orthogonal_(matrix: Tensor) -> None:
    # torch has no QR in half precision, and none for tensors without data.
    if not matrix.is_meta:
        matrix.copy_(nn.init.orthogonal_(torch.empty_like(matrix, dtype=torch.float32)))


@register
class HDPL(OperatorConfig):
    """Replace a linear layer by a block-diagonal detail path plus a variational bottleneck (Eq. 1-9).

    Args:
        rank: R, latent dimensions of the context path.
        blocks: K, blocks of the detail path; must divide in_features and out_features.
        beta: weight of the regulariser, which is averaged over the tokens whose prediction the model's loss counts.
        bound: how the divergence from the standard normal prior enters the loss. "clamp" (the paper): each token's KL,
            at most ln 2; tokens above, nearly all at usual sizes, have no gradient (metric ``clamped``). "free_bits":
            each dimension's KL above ``free_nats``. "geometric_jsd": without a bound, the divergence that the paper's
            approximates, in closed form. Only the last two regularise in practice.
        free_nats: free nats per latent dimension with "free_bits"; None divides the paper's ln 2 by R.
        noise: sample z in training (the paper). False is the ablation without the variational part: z = mu(x) in
            training, too. There is no variance encoder, auxiliary loss or metric, and ``beta`` has no effect.
        init: initialisation. "blocks": identity or orthogonal in each block, as the paper suggests. "authors": as in
            the authors' code: only block 0 is an identity, orthogonality is that of the whole convolution, and the
            encoders' biases are uniform. See ``HDPLLinear.reset_parameters``.

    Examples:
        >>> layer = relinear.HDPL(rank=8, blocks=4).build(64, 32)
        >>> layer(torch.randn(2, 64)).shape
        torch.Size([2, 32])
        >>> sorted(layer.train() and layer.auxiliary_losses())
        ['latent']
    """

    kind = "hdpl"
    module_class = HDPLLinear

    rank: Count = 128
    blocks: Count = 8
    beta: NonNegative = 0.001
    bound: Literal["clamp", "free_bits", "geometric_jsd"] = "clamp"
    free_nats: NonNegative | None = None
    noise: bool = True
    init: Literal["blocks", "authors"] = "blocks"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.noise and self.bound != "clamp":
            raise ValueError(f"bound={self.bound!r} needs noise=True: without noise there is no posterior to bound")
        if self.free_nats is not None and self.bound != "free_bits":
            raise ValueError(f"free_nats={self.free_nats} needs bound='free_bits'")

    def check_shape(self, in_features: int, out_features: int) -> None:
        check_divides("blocks", self.blocks, in_features=in_features, out_features=out_features)

    def scaled(self, in_features: int, out_features: int, ratio: float) -> HDPL:
        return self.replace(rank=max(1, round(self.rank * ratio)))
