"""Named peers in the same run: other libraries' layers, and the operators in their plainly published forms.

A peer is a plain module with the operator's contract for inputs and outputs. It is here to be timed, so it is written
as its authors published it, not as one would write it for speed.
"""

# Legend: I in_features, O out_features, K blocks, R rank, N tokens

import warnings
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from relinear.contract.operator import OperatorConfig

Builder = Callable[[int, int], nn.Module]


class Conv1dHDPL(nn.Module):
    """HDPL with a grouped Conv1d between two transposes and three separate linear layers (the paper's Algorithm 1)."""

    def __init__(self, in_features: int, out_features: int, blocks: int = 8, rank: int = 128) -> None:
        super().__init__()
        self.local = nn.Conv1d(in_features, out_features, 1, groups=blocks, bias=False)
        self.mu = nn.Linear(in_features, rank)
        self.logvar = nn.Linear(in_features, rank)
        self.decoder = nn.Linear(rank, out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        local = self.local(x[None].transpose(1, 2)).transpose(1, 2)[0]
        mu, logvar = self.mu(x), self.logvar(x)
        z = mu + torch.exp(0.5 * logvar) * torch.randn_like(mu) if self.training else mu
        return local + self.decoder(nn.functional.silu(z))


class TwoProducts(nn.Module):
    """Monarch as two batched products with permutations between them (Dao et al., 2022)."""

    def __init__(self, in_features: int, out_features: int, blocks: int = 4) -> None:
        super().__init__()
        self.blocks = blocks
        inner = min(in_features, out_features) // blocks
        if in_features % blocks or out_features % inner:
            raise ValueError(f"two batched products need sizes that {blocks} and {inner} divide")
        self.first = nn.Parameter(torch.randn(blocks, inner, in_features // blocks) / in_features**0.5)
        self.second = nn.Parameter(torch.randn(inner, out_features // inner, blocks) / blocks**0.5)

    def forward(self, x: Tensor) -> Tensor:
        parts = x.reshape(x.shape[0], self.blocks, -1).transpose(0, 1)  # K N I/K
        hidden = torch.bmm(parts, self.first.transpose(1, 2))  # K N inner
        mixed = torch.bmm(hidden.permute(2, 1, 0), self.second.transpose(1, 2))  # inner N O/inner
        return mixed.permute(1, 2, 0).reshape(x.shape[0], -1)


class DenseSandwich(nn.Module):
    """A rotor layer as its authors compute it: the 2^n x 2^n matrix of the sandwich is built, then multiplied with."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        if in_features != out_features or in_features & (in_features - 1):
            raise ValueError("the dense sandwich needs equal sizes that are a power of two")
        config = OperatorConfig.from_dict({"kind": "rotor", "width": 1, "depth": 0})
        self.rotor = config.build(in_features, out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.rotor.to_dense())


def _adapted(kind: str, in_features: int, out_features: int, **settings: int) -> nn.Module:
    """Return a dense layer with a PEFT adapter on it, injected the way PEFT does it in a model."""
    import peft

    config = getattr(peft, f"{kind}Config")(target_modules=["proj"], **settings)
    host = nn.ModuleDict({"proj": nn.Linear(in_features, out_features)})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of BOFT's missing CUDA code, which more than one factor needs
        return peft.inject_adapter_in_model(config, host).get_submodule("proj")


#: name -> (the operator kind it does the same job as, builder)
PEERS: dict[str, tuple[str, Builder]] = {
    "peft LoRA r=8": ("transponder", partial(_adapted, "Lora", r=8, lora_alpha=16)),
    "peft OFT b=32": ("rotor", partial(_adapted, "OFT", r=0, oft_block_size=32)),
    "peft BOFT b=32": ("rotor", partial(_adapted, "BOFT", boft_block_size=32)),
    "HDPL as grouped Conv1d": ("hdpl", Conv1dHDPL),
    "Monarch as two products": ("monarch", TwoProducts),
    "rotor as dense sandwich": ("rotor", DenseSandwich),
}
