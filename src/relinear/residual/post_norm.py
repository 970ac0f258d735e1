"""Residual methods that normalise the sum: Post-LN and DeepNorm."""

# Legend: D width of the residual stream, L decoder layers

import torch
from torch import Tensor, nn

from relinear.contract.config import register
from relinear.contract.linear_layers import is_conv1d
from relinear.contract.operator import Operator
from relinear.contract.wrapper import Wrapper
from relinear.hf.model_layout import find_decoder
from relinear.hf.sub_blocks import SubBlock, sub_blocks
from relinear.residual.config import ResidualConfig, without_norm
from relinear.settings.messages import warn_user

_FINAL_NORMS = ("norm", "ln_f", "final_layernorm")


class _PostNorm(nn.Module):
    """Return norm(alpha x + y) - x, to which the layer adds x; ``norm`` is the sub-block's."""

    def __init__(self, norm: nn.Module, alpha: float):
        super().__init__()
        self.norm = norm
        self.alpha = alpha

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.norm(torch.add(y, x, alpha=self.alpha)) - x


@register
class PostLN(ResidualConfig):
    """Normalise after every addition, x_{l+1} = LN(x_l + F(x_l)), as the original Transformer (Vaswani et al., 2017).

    The norm before each sub-block is moved after its addition: it keeps its weights and becomes the sub-block's
    ``relinear_residual.norm``. The norm before the output head is removed, as the last layer ends with one. This is for
    training from scratch; a pretrained pre-norm model's outputs change.

    Args:
        final_norm: keep the norm before the output head as well.

    Examples:
        >>> model = relinear.from_preset("tiny")
        >>> relinear.attach_(model, relinear.residual.PostLN())
        >>> model(torch.randint(258, (1, 8))).logits.shape
        torch.Size([1, 8, 258])
    """

    kind = "post_ln"

    final_norm: bool = False

    def alpha(self, layers: int) -> float:
        """Return the weight of the stream in the sum, for a decoder of this many layers."""
        return 1.0

    def residual_part(self, block: SubBlock, index: int, count: int) -> nn.Module:
        return _PostNorm(without_norm(block), self.alpha(count // 2))

    def attach(self, model: nn.Module) -> None:
        super().attach(model)
        if not self.final_norm:
            owner = find_decoder(model)
            for name in _FINAL_NORMS:
                if isinstance(getattr(owner, name, None), nn.Module):
                    setattr(owner, name, nn.Identity())


@register
class DeepNorm(PostLN):
    """Weigh the stream and normalise after the sum: x_{l+1} = LN(alpha x_l + F(x_l)) (Wang et al., 2022, Figure 2).

    The paper is "DeepNet: scaling Transformers to 1,000 layers". For a decoder of L layers alpha = (2 L)^(1/4). The
    projections of values, of the attention's output and of the MLP are initialised by Xavier's normal distribution with
    gain beta = (8 L)^(-1/4), those of queries and keys with gain 1. Biases are zero.

    Args:
        final_norm: keep the norm before the output head as well.
        initialize: reinitialise the projections when the method is attached; False keeps the weights. Loading a
            checkpoint never reinitialises.

    Examples:
        >>> model = relinear.from_preset("tiny")
        >>> relinear.attach_(model, relinear.residual.DeepNorm())
        >>> model(torch.randint(258, (1, 8))).logits.shape
        torch.Size([1, 8, 258])
    """

    kind = "deepnorm"

    initialize: bool = True

    def alpha(self, layers: int) -> float:
        return float((2 * layers) ** 0.25)

    def beta(self, layers: int) -> float:
        """Return the gain of the initialisation, for a decoder of this many layers."""
        return float((8 * layers) ** -0.25)

    def attach(self, model: nn.Module) -> None:
        super().attach(model)
        if self.initialize:
            self.initialize_(model)

    @torch.no_grad()
    def initialize_(self, model: nn.Module) -> None:
        """Initialise the projections as in the paper. Operators that are not wrappers keep their initialisation."""
        blocks = sub_blocks(model)
        beta = self.beta(len(blocks) // 2)
        skipped = set()
        for block in blocks:
            for name, module in block.module.named_children():
                while isinstance(module, Wrapper):
                    module = module.base
                if isinstance(module, Operator):
                    skipped.add(type(module.config).__name__)
                elif isinstance(module, nn.Linear) or is_conv1d(module):
                    _xavier_(module, name, beta)
        if skipped:
            warn_user(
                f"DeepNorm's initialisation knows plain projections only; {', '.join(sorted(skipped))} keep their own"
            )


def _xavier_(module: nn.Module, name: str, beta: float) -> None:
    """Initialise a projection by Xavier's normal distribution, with gain ``beta`` or, for queries and keys, 1."""
    weight = module.weight.T if is_conv1d(module) else module.weight  # (out, in), a view
    parts = weight.chunk(3) if name == "c_attn" else (weight,)  # GPT-2 keeps q, k and v in one matrix
    gains = (1.0, 1.0, beta) if name == "c_attn" else (1.0 if name in ("q_proj", "k_proj") else beta,)
    for part, gain in zip(parts, gains, strict=True):
        nn.init.xavier_normal_(part, gain=gain)
    if module.bias is not None:
        nn.init.zeros_(module.bias)  # type: ignore[arg-type]
