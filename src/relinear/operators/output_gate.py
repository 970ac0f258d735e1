"""Sigmoid gates as wide as a projection; on all projections this is the ALL-Gate baseline of the Transponder paper."""

# Legend: I in_features, O out_features

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from relinear.activations.hooks import HasHookPoints
from relinear.contract.config import register
from relinear.contract.wrapper import Wrapper, WrapperConfig
from relinear.functional.output_gate import gated, gates
from relinear.kernels.autograd import recomputed


class _Gate(HasHookPoints, nn.Module):
    """Multiply a projection's output by sigmoid(W_g x); a module, so that PEFT's ``modules_to_save`` can name it.

    Parameter: ``weight`` W_g (O, I). Hook point: ``channel``.
    """

    constant_initialized = ("weight",)
    tensor_parallel: ClassVar = {"weight": 0}

    def __init__(self, in_features: int, out_features: int, device=None, dtype=None):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features, device=device, dtype=dtype))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw with standard deviation 0.02, as Llama's projections, so that gates are near 1/2."""
        nn.init.normal_(self.weight, std=0.02)

    def hook_sizes(self) -> dict[str, int]:
        return {"channel": self.weight.shape[0]}

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        logits = torch.nn.functional.linear(x, self.weight)
        if self.activation_hooks is None:
            return recomputed(gated, z, logits)
        return (z * self.hooked("channel", gates(logits))).to(z.dtype)


class OutputGateLinear(Wrapper):
    """y = base(x) * sigmoid(W_g x); the gate is the submodule ``gate``."""

    def create(self, **kw: Any) -> None:
        self.gate = _Gate(self.in_features, self.out_features, **kw)

    def forward(self, x: Tensor) -> Tensor:
        return self.gate(x, self.base(x))

    def flops_per_token(self) -> int:
        return self.base_flops_per_token() + 2 * self.in_features * self.out_features + 5 * self.out_features


@register
class OutputGate(WrapperConfig):
    """Gate the outputs of a projection by its inputs (Qiu et al., 2025).

    The paper is "Gated attention for large language models". y = base(x) * sigmoid(W_g x) with a W_g as large as the
    projection. On "all-linear" it is the ALL-Gate baseline of the Transponder paper. A fresh gate gives about
    y = base(x) / 2. No gate is the identity, as a sigmoid is never 1. ``SDPAGate`` is the gate on the attention's
    output, before the output projection.

    Args:
        base: operator inside; None wraps the existing layer.

    Examples:
        >>> model = relinear.from_preset("tiny")
        >>> report = relinear.replace_(model, {"o_proj": relinear.OutputGate()})
        >>> report.parameters - report.parameters_before
        65536
    """

    kind = "output_gate"
    module_class = OutputGateLinear
