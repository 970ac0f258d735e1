"""A dense layer that starts as HDPL's dense matrices do, for results/plans/hdpl.yaml: is HDPL's lead its start?

At the latent's origin the context path is D diag(silu'(0)) M = D M / 2, which is also the expected slope under the
noise that HDPL starts with, since silu'(z) + silu'(-z) = 1. So the matrix is the blocks on the diagonal plus D M / 2.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from relinear import HDPL, Operator, OperatorConfig, register


class DenseLikeHDPLLinear(Operator):
    """y = x W^T + bias; parameter ``weight`` (O, I)."""

    config: DenseLikeHDPL

    def create(self, **kw) -> None:
        self.weight = nn.Parameter(torch.empty(self.out_features, self.in_features, **kw))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        settings = HDPL(rank=self.config.rank, blocks=self.config.blocks, noise=False)
        start = settings.build(self.in_features, self.out_features, bias=False)
        self.weight.copy_(torch.block_diag(*start.blocks) + start.decoder.weight @ start.mu.weight / 2)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight, self.bias)

    def flops_per_token(self) -> int:
        return 2 * self.weight.numel()

    def to_dense(self) -> Tensor:
        return self.weight


@register
class DenseLikeHDPL(OperatorConfig):
    """A dense layer that starts as HDPL with ``rank`` and ``blocks`` does."""

    kind = "dense_like_hdpl"
    module_class = DenseLikeHDPLLinear

    rank: int = 64
    blocks: int = 8
