"""What a fresh network of rotors does before its rotors learn, added to another operator: the controls of `control`.

PYTHONPATH=results/rotor relinear compare --import added -o 'added:path=network' ...
"""

# Legend: V features in and out, W branches

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from relinear import register
from relinear.contract.config import check_choice
from relinear.contract.operator import NotLinearError
from relinear.contract.wrapper import Wrapper, WrapperConfig
from relinear.functional.rotor import branch_permutation, mixed_branches
from relinear.operators.rotor import Rotor

__all__ = ["Added", "AddedLinear"]

#: the network of rotors as it comes
_ROTOR = Rotor()


class _Network(nn.Module):
    """A rotor network whose rotors are 1: steps of permutation, LayerNorm and PReLU, mixed by ``mix`` (W,) each.

    Slopes and mixing scalars learn, as those of the rotor network do. The permutations are its own, too: the same in
    every layer.
    """

    def __init__(self, features: int, device=None, dtype=None):
        super().__init__()
        kw = {"device": device, "dtype": dtype}
        self.mix, self.slopes = (
            nn.ParameterList(torch.empty(_ROTOR.width, **kw) for _ in range(_ROTOR.depth)) for _ in range(2)
        )
        orders = [branch_permutation(features, _ROTOR.width, _ROTOR.seed, step) for step in range(_ROTOR.depth)]
        self.register_buffer("orders", torch.stack([torch.from_numpy(order) for order in orders]).to(device))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Such that variance is kept."""
        for mix, slopes in zip(self.mix, self.slopes, strict=True):
            nn.init.constant_(mix, _ROTOR.width**-0.5)
            nn.init.constant_(slopes, 0.25)

    def forward(self, x: Tensor) -> Tensor:
        y = x.flatten(0, -2)
        for order, slopes, mix in zip(self.orders, self.slopes, self.mix, strict=True):
            y = mixed_branches(y[:, None].expand(-1, len(mix), -1), order, slopes, mix)
        return y.view(x.shape)


class AddedLinear(Wrapper):
    """y = base(x) + x, or base(x) + network(x)."""

    def __init__(self, config, in_features, out_features, *, bias=True, device=None, dtype=None, inner=None):
        super().__init__(config, in_features, out_features, bias=bias, device=device, dtype=dtype, inner=inner)
        self.network = _Network(in_features, device, dtype) if config.path == "network" else None

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + (x if self.network is None else self.network(x))

    def to_dense(self) -> Tensor:
        if self.network is not None:
            raise NotLinearError("added: the network normalises and activates, so it has no dense matrix")
        weight, _ = self.base_dense()
        return weight + torch.eye(self.in_features, dtype=weight.dtype, device=weight.device)

    def dense_bias(self) -> Tensor | None:
        return self.base_dense()[1]

    def flops_per_token(self) -> int:
        """Pointwise operations of the network as ``Rotor`` counts them."""
        path = 0 if self.network is None else 12 * self.in_features * _ROTOR.width * _ROTOR.depth
        return self.base_flops_per_token() + path + self.out_features


@register
class Added(WrapperConfig):
    """Another operator with a fixed path beside it.

    Args:
        path: "identity", or "network": the rotor network without its rotors.
        base: the operator; None keeps the layer that is there.
    """

    kind = "added"
    module_class = AddedLinear
    fits_weight: ClassVar[bool] = False

    path: str = "identity"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("path", self.path, ("identity", "network"))

    def check_shape(self, in_features: int, out_features: int) -> None:
        super().check_shape(in_features, out_features)
        if in_features != out_features:
            raise ValueError(f"added: as many outputs as inputs, got {in_features} -> {out_features}")
