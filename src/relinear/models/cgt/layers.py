"""The layers of the Contextually Guided Transformer: GPT-2's layers with a second stream or generated operators."""

# Legend: B batch, T tokens, D width of x, E width of y, M templates, R rank

from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.models.gpt2.modeling_gpt2 import GPT2MLP, GPT2Attention, GPT2Block
from transformers.pytorch_utils import Conv1D

from relinear.contract.operator import ParamRole
from relinear.contract.parameters import AffineParameters
from relinear.functional.cgt import generated_map, mixing
from relinear.kernels.cgt import modulate
from relinear.models.cgt.config import CGTConfig


class Modulator(nn.Module):
    """Apply one generated operator T(x; y) = x + L(y) R(y)^T [x, 1] (CGT, Section 3.1) to an already normalised x."""

    def __init__(self, config: CGTConfig):
        super().__init__()
        self.mixing = config.mixing
        shape = (config.templates, config.rank, config.n_embd)
        self.mix = AffineParameters(config.templates, config.context_size)
        self.left = nn.Parameter(torch.empty(shape))
        self.right = nn.Parameter(torch.empty(shape))
        self.right_bias = nn.Parameter(torch.empty(shape[:2]))

    def shares(self, y: Tensor) -> Tensor:
        """Return sigma(y) (..., M) for y (..., E)."""
        weight, bias = self.mix()
        return mixing(y, weight, bias, self.mixing)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return T(x; y) for x (B, T, D) and y (B, T, E), or (B, 1, E) for one context per sequence."""
        return modulate(x, self.shares(y), self.left, self.right, self.right_bias)

    def flops_per_token(self) -> int:
        """Count the FLOPs of the template weights, [x, 1] R_all, mixing its columns, and the product with L_all."""
        columns, width = self.left.shape[0] * self.left.shape[1], self.left.shape[2]
        return 2 * self.mix.weight.numel() + 4 * columns * width + 2 * columns**2 + 2 * columns

    def param_roles(self) -> dict[str, ParamRole]:
        """Return roles: L sums over M R columns, which the settings fix; R and S sum over widths."""
        templates, rank, width = self.left.shape
        return {
            "left": ParamRole(templates * rank, fan_in_scales=False),
            "right": ParamRole(width, fan_out=templates * rank, fan_out_scales=False),
            "right_bias": ParamRole(1, fan_in_scales=False),
            "mix.weight": ParamRole(self.mix.weight.shape[1], fan_out=templates, fan_out_scales=False),
            "mix.bias": ParamRole(None, weight_decay=False),
        }

    @torch.no_grad()
    def affine(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return the matrix (D, D) and shift (D,) of T at the context y (E,), in float64 where the device has it."""
        dtype = torch.float32 if y.device.type == "mps" else torch.float64
        weight, bias = self.mix()
        shares = mixing(y.to(dtype), weight.to(dtype), bias.to(dtype), self.mixing)
        return generated_map(shares, self.left.to(dtype), self.right.to(dtype), self.right_bias.to(dtype))


class ContextAttention(GPT2Attention):
    """Compute attention with queries, keys and values from [x, y]; the result is added to y alone."""

    def __init__(self, config: CGTConfig, layer_idx: int):
        super().__init__(config, layer_idx=layer_idx)
        self.embed_dim = self.split_size = config.context_size
        self.num_heads = config.context_heads
        self.head_dim = self.embed_dim // self.num_heads
        self.scaling = self.head_dim**-0.5 if config.scale_attn_weights else 1.0
        if config.scale_attn_by_inverse_layer_idx:
            self.scaling /= layer_idx - config.n_layer + 1
        self.c_attn = Conv1D(3 * self.embed_dim, config.n_embd + self.embed_dim)
        self.c_proj = Conv1D(self.embed_dim, self.embed_dim)


class ContextMLP(GPT2MLP):
    """Apply the MLP of the y stream, whose input is [x, y] and whose output is added to y."""

    def __init__(self, config: CGTConfig):
        inner = config.context_inner or 4 * config.context_size
        super().__init__(inner, config)
        self.c_fc = Conv1D(inner, config.n_embd + config.context_size)
        self.c_proj = Conv1D(config.context_size, inner)


class ContextStream(nn.Module):
    """Compute the y stream of a two-stream layer, with separate normalisations, heads and MLP.

    Its cache entry comes after those of all x layers, at ``n_layer + layer_idx``.
    """

    def __init__(self, config: CGTConfig, layer_idx: int):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.context_size, eps=config.layer_norm_epsilon)
        self.attn = ContextAttention(config, config.n_layer + layer_idx)
        self.ln_2 = nn.LayerNorm(config.context_size, eps=config.layer_norm_epsilon)
        self.mlp = ContextMLP(config)

    def attend(self, x: Tensor, y: Tensor, **kwargs: Any) -> Tensor:
        """Return y after its attention, for the normalised x (B, T, D) and the stream y (B, T, E)."""
        return y + self.attn(torch.cat([x, self.ln_1(y)], -1), **kwargs)[0]

    def feed(self, x: Tensor, y: Tensor) -> Tensor:
        """Return y after its MLP, for the normalised x (B, T, D) and the stream y (B, T, E)."""
        return y + self.mlp(torch.cat([x, self.ln_2(y)], -1))


class CGTBlock(GPT2Block):
    """Run a GPT-2 block on x; it also computes y (below layer l) or is modulated by it (from layer l on).

    The parameters of the x stream have the same names as in GPT-2.
    """

    def __init__(self, config: CGTConfig, layer_idx: int):
        super().__init__(config, layer_idx=layer_idx)
        two_streams = layer_idx < config.context_layer
        self.context = ContextStream(config, layer_idx) if two_streams else None
        modulated = config.modulated and not two_streams
        self.modulate_attn = Modulator(config) if modulated else None
        self.modulate_mlp = Modulator(config) if modulated else None

    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        context: Tensor | None = None,
        past_key_values: Cache | None = None,
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return (x, y) after the block, and the attention of x (B, H, T, S) if the implementation computes it.

        Args:
            hidden_states: x, (B, T, D).
            context: below l the y stream (B, T, E), or None to omit it; from l on the context that modulates,
                (B, T, E) or (B, 1, E), returned unchanged.
            past_key_values, attention_mask, kwargs: as in GPT-2.
        """
        kwargs |= {"past_key_values": past_key_values, "attention_mask": attention_mask}
        x, y = hidden_states, context
        normal = self.ln_1(x)
        if self.modulate_attn is not None:
            normal = self.modulate_attn(normal, y)
        elif self.context is not None and y is not None:
            y = self.context.attend(normal, y, **kwargs)
        attended, weights = self.attn(normal, **kwargs)[:2]
        x = x + attended
        normal = self.ln_2(x)
        if self.modulate_mlp is not None:
            normal = self.modulate_mlp(normal, y)
        elif self.context is not None and y is not None:
            y = self.context.feed(normal, y)
        return x + self.mlp(normal), y, weights
