"""Block-Hadamard layers: fixed Hadamard transforms, which mix all inputs, alternate with learnt block-diagonal ones."""

# Legend: I in_features, O out_features, K blocks, N padded width of a stage

from __future__ import annotations

import math
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor, nn

from relinear.contract.config import MAX_LAYERS, Count, IntRange, check_fits, register
from relinear.contract.operator import Operator, OperatorConfig
from relinear.contract.parameters import ListedParameters
from relinear.functional.block_hadamard import block_hadamard_dense, block_hadamard_fit, block_hadamard_sizes
from relinear.kernels.block_hadamard import block_hadamard, hadamard_flops
from relinear.kernels.dense import DenseLimits

_DENSE_LIMITS = DenseLimits(
    {torch.float32: ((8, 1024), (math.inf, 256)), torch.bfloat16: ((128, 2048), (math.inf, 1024))},
)


class BlockHadamardLinear(Operator):
    """y = B_L H ... B_1 H x + bias; parameters ``blocks.0`` ... (K, N_out/K, N_in/K), optional ``bias`` (O,)."""

    config: BlockHadamard
    tensor_parallel: ClassVar = {"blocks": 0}

    def create(self, **kw: Any) -> None:
        k = self.config.blocks
        sizes = block_hadamard_sizes(self.in_features, self.out_features, k, self.config.depth)
        self.blocks = ListedParameters(
            nn.Parameter(torch.empty(k, n_out // k, n_in // k, **kw)) for n_in, n_out in sizes
        )

    def reset_parameters(self) -> None:
        """Draw blocks with variance 1 / fan-in: unit-variance inputs give unit-variance outputs; zero bias."""
        for index, stage in enumerate(self.blocks):
            # The transform spreads the energy of the real inputs over the padded width of the first stage.
            padding = 1.0 if index or not self.config.mix_input else stage.shape[0] * stage.shape[2] / self.in_features
            nn.init.normal_(stage, std=math.sqrt(padding / stage.shape[2]))
        self.zero_bias_()

    def forward(self, x: Tensor) -> Tensor:
        dense = _DENSE_LIMITS.product(self, x)
        if dense is not None:
            return dense
        return block_hadamard(x, self.blocks(), self.out_features, self.bias, self.config.mix_input)

    def to_dense(self) -> Tensor:
        return block_hadamard_dense(self.blocks(), self.in_features, self.config.mix_input)[: self.out_features]

    def fit_to_weight_(self, weight: Tensor) -> None:
        """Take the least-squares fit of the weight (see ``block_hadamard_fit``): closed form at depth 1."""
        fits = block_hadamard_fit(weight, list(self.blocks), self.config.mix_input)
        for stage, fitted in zip(self.blocks, fits, strict=True):
            stage.copy_(fitted)

    def flops_per_token(self) -> int:
        """Return the FLOPs per token, with the transform computed as products of small matrices, not as butterflies."""
        transformed = list(self.blocks)[0 if self.config.mix_input else 1 :]
        transforms = sum(hadamard_flops(stage.shape[0] * stage.shape[2]) for stage in transformed)
        return transforms + 2 * sum(stage.numel() for stage in self.blocks)


@register
class BlockHadamard(OperatorConfig):
    """Replace a linear layer by Hadamard transforms alternated with block-diagonal products.

    Sizes that the transform or the blocks do not divide are padded with zeros inside (see
    ``functional.block_hadamard.block_hadamard_sizes``).

    Args:
        blocks: K, the blocks of each product, at most min(in_features, out_features); parameters fall as 1 / K.
        depth: L, how often transform and product are repeated.
        mix_input: whether a transform precedes the first product, too. False has transforms only between products, as
            the code of the rotor paper's authors does: at depth 1 there is none, and the layer is a block-diagonal
            matrix.

    Examples:
        >>> layer = relinear.BlockHadamard(blocks=4).build(64, 32)
        >>> layer(torch.randn(2, 64)).shape
        torch.Size([2, 32])
    """

    kind = "block_hadamard"
    module_class = BlockHadamardLinear

    blocks: Count = 8
    depth: Annotated[int, IntRange(1, MAX_LAYERS)] = 1
    mix_input: bool = True

    def check_shape(self, in_features: int, out_features: int) -> None:
        check_fits("blocks", self.blocks, in_features, out_features)

    def scaled(self, in_features: int, out_features: int, ratio: float) -> BlockHadamard:
        blocks = max(1, min(round(self.blocks / ratio), in_features, out_features))
        return self.replace(blocks=blocks)
