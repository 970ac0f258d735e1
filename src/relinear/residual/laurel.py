"""LAuReL, learned augmented residual layers (Menghani, Kumar and Kumar, "LAuReL: learned augmented residual layer",
ICML 2025): x_{i+1} = alpha f(x_i) + g(x_i, x_{i-1}, ..., x_0), Eq. 2.

Each residual connection of a decoder layer, of its attention and of its MLP, is one LAuReL layer. All three variants
are initialised as the plain x_{i+1} = f(x_i) + x_i, so that a pretrained model's outputs do not change at first.
"""

# Legend: B batch, T tokens, D width of the residual stream, R rank, K streams that a connection reads

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn

from relinear.activations.layer_context import check_passes_to_layers, install_layer_context
from relinear.activations.residual_hooks import ResidualHooks, apply_to_output
from relinear.contract.attachment import add_part, factory_kwargs_like
from relinear.contract.config import Count, register
from relinear.hf.sub_blocks import SubBlock, sub_blocks
from relinear.residual.config import PART_NAME, ResidualConfig, connect

_STREAMS = "relinear_streams"  # keyword argument by which the layers of one forward share their streams


class _Weights(nn.Module):
    """Compute alpha and beta from two logits: 2 softmax(logits) or 2 sigmoid(logits), both exactly 1 at first."""

    def __init__(self, normalize: str, kw: dict[str, Any]):
        super().__init__()
        self.normalize = normalize
        self.logits = nn.Parameter(torch.empty(2, **kw))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.logits)

    def forward(self) -> tuple[Tensor, Tensor]:
        alpha, beta = 2 * (torch.softmax(self.logits, 0) if self.normalize == "softmax" else torch.sigmoid(self.logits))
        return alpha, beta


class _LowRank(nn.Module):
    """Compute B A x with ``down`` A (R, D) and ``up`` B (D, R).

    A is initialised with orthogonal columns, A^T[i, j] = 1 / sqrt(R D) where i mod R = j, and B as zero (Section 3.3).
    """

    finite_fan_in = ("up",)
    finite_fan_out = ("down",)

    def __init__(self, width: int, rank: int, kw: dict[str, Any]):
        super().__init__()
        self.down = nn.Parameter(torch.empty(rank, width, **kw))
        self.up = nn.Parameter(torch.empty(width, rank, **kw))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        rank, width = self.down.shape
        nn.init.zeros_(self.down)
        nn.init.zeros_(self.up)
        columns = torch.arange(width, device=self.down.device)
        with torch.no_grad():
            self.down[columns % rank, columns] = 1 / math.sqrt(rank * width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.linear(torch.nn.functional.linear(x, self.down), self.up)

    def flops_per_token(self) -> int:
        """Return the FLOPs per token of the two products."""
        return 2 * (self.down.numel() + self.up.numel())


class LaurelResidual(nn.Module):
    """Return alpha y + (beta - 1) x + beta B A x, to which the layer adds x; without a rank there is no B A x."""

    def __init__(self, width: int, normalize: str | None, rank: int | None, kw: dict[str, Any]):
        super().__init__()
        self.width = width
        self.weights = None if normalize is None else _Weights(normalize, kw)
        self.low_rank = None if rank is None else _LowRank(width, rank, kw)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        low_rank = None if self.low_rank is None else self.low_rank(x)
        if self.weights is None:
            return y + low_rank
        alpha, beta = self.weights()
        weighted = alpha * y + (beta - 1) * x
        return weighted if low_rank is None else weighted + beta * low_rank

    def flops_per_token(self) -> int:
        """Return the FLOPs per token of the low-rank products and the weighted sum, without the layer's addition."""
        weighted = 0 if self.weights is None else 3 * self.width
        if self.low_rank is None:
            return weighted
        return weighted + self.low_rank.flops_per_token() + (1 if self.weights is None else 2) * self.width


def _width(block: SubBlock) -> int:
    norm: Any = block.norm
    weight = getattr(norm, "weight", None)
    return int(norm.normalized_shape[-1] if weight is None else weight.numel())  # OLMo's norms have no weight


def _check_rank(rank: int, model: nn.Module) -> None:
    width = _width(sub_blocks(model)[0])
    if rank > width:
        raise ValueError(f"rank={rank} exceeds the width {width} of the stream; choose at most {width}")


@register
class LaurelRW(ResidualConfig):
    """Weigh both sides of the residual connection: x_{i+1} = alpha f(x_i) + beta x_i, both learnt (Section 2.1).

    The paper keeps both bounded "using a normalization function such as softmax or sigmoid". Here that function is
    doubled, alpha, beta = 2 softmax(a, b), so that a = b = 0 is the plain residual connection.

    Args:
        normalize: "softmax" (alpha + beta = 2) or "sigmoid" (each in (0, 2)).

    Examples:
        >>> model = relinear.from_preset("tiny")
        >>> relinear.attach_(model, relinear.residual.LaurelRW())
        >>> model(torch.randint(258, (1, 8))).logits.shape
        torch.Size([1, 8, 258])
    """

    kind = "laurel_rw"

    normalize: Literal["softmax", "sigmoid"] = "softmax"

    def residual_part(self, block: SubBlock, index: int, count: int) -> nn.Module:
        return LaurelResidual(_width(block), self.normalize, None, factory_kwargs_like(block.module))


@register
class LaurelLR(ResidualConfig):
    """Add learnt thin matrices to the residual connection: x_{i+1} = f(x_i) + B A x_i + x_i (Section 2.2, Eq. 3).

    Args:
        rank: R; the paper finds 32 to 64 to work well for language models.
        weights: also learn alpha and beta, x_{i+1} = alpha f(x_i) + beta (B A x_i + x_i) (RW+LR, Eq. 5).
        normalize: as in ``LaurelRW``, where ``weights`` is set.

    Examples:
        >>> model = relinear.from_preset("tiny")
        >>> relinear.attach_(model, relinear.residual.LaurelLR(rank=8))
        >>> model(torch.randint(258, (1, 8))).logits.shape
        torch.Size([1, 8, 258])
    """

    kind = "laurel_lr"

    rank: Count = 32
    weights: bool = False
    normalize: Literal["softmax", "sigmoid"] = "softmax"

    def check(self, model: nn.Module) -> None:
        super().check(model)
        _check_rank(self.rank, model)

    def residual_part(self, block: SubBlock, index: int, count: int) -> nn.Module:
        normalize = self.normalize if self.weights else None
        return LaurelResidual(_width(block), normalize, self.rank, factory_kwargs_like(block.module))


class LaurelPreviousResidual(nn.Module):
    """Return y + sum_j gamma_j h(x_{i-j}) over the last streams x_i, x_{i-1}, ..., to which the layer adds x_i.

    gamma (K,) is initialised at 1 / K with a low-rank h (whose B is zero), and at 0 with the identity.
    """

    def __init__(self, width: int, rank: int | None, streams: int, kw: dict[str, Any]):
        super().__init__()
        self.width = width
        self.low_rank = None if rank is None else _LowRank(width, rank, kw)
        self.gamma = nn.Parameter(torch.empty(streams, **kw))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.gamma, 0.0 if self.low_rank is None else 1 / len(self.gamma))

    def forward(self, streams: list[Tensor], y: Tensor) -> Tensor:
        # h is linear, so it is applied once, to the weighted sum.
        mixed = sum(gamma * x for gamma, x in zip(self.gamma, streams, strict=True))
        return y + (mixed if self.low_rank is None else self.low_rank(mixed))

    def flops_per_token(self) -> int:
        """Return the FLOPs per token of the weighted sum of the streams, of h, and of adding it to y."""
        mixing = 2 * self.gamma.numel() * self.width
        return mixing + (0 if self.low_rank is None else self.low_rank.flops_per_token() + self.width)


class _Streams:
    """The streams x_i of one forward pass, by i; all layers share the object, whatever the pass is of.

    It is not a dictionary, because accelerate passes a copy of every dictionary to each layer when it moves arguments.
    """

    def __init__(self, runner: Any, inputs: dict[str, Any]) -> None:
        self.by_index: dict[int, Tensor] = {}


class _Received:
    """The streams that each layer has received until it uses them."""

    def __init__(self) -> None:
        self.by_layer: dict[int, _Streams] = {}

    def receive(self, layer: int, streams: _Streams | None) -> None:
        """Store a forward pass's streams for a layer that is about to run; ignore the None after the pass."""
        if streams is not None:
            self.by_layer[layer] = streams

    def __getstate__(self) -> dict[str, Any]:
        # Streams have a graph, and belong to a forward pass of the original, not of a copy.
        return {"by_layer": {}}


class _PreviousResidualHooks(ResidualHooks):
    """Add a combination of earlier streams to a sub-block's output."""

    def __init__(self, owner: nn.Module, index: int, previous: int, received: _Received) -> None:
        super().__init__(owner, PART_NAME)
        self.index, self.previous, self.received = index, previous, received

    def replace_output(self, module: nn.Module, args: tuple, output: Any) -> Any:
        layer = self.index // 2
        streams, x = self.received.by_layer[layer].by_index, self.pop_input()
        streams[self.index] = x
        # layers may be on several devices
        last_streams = [streams[self.index - j].to(x.device) for j in range(min(self.previous, self.index + 1))]
        if self.index % 2:  # the MLP, after which the layer does not use them again
            del self.received.by_layer[layer]
        return apply_to_output(module, output, last_streams, getattr(self.owner, self.name))


@register
class LaurelPA(ResidualConfig):
    """Add earlier streams: x_{i+1} = f(x_i) + x_i + sum over j < K of gamma_{i,j} h_i(x_{i-j}) (Section 2.3, Eq. 4).

    x_i is the stream before the i-th residual connection; a decoder layer has two. The first connections read fewer
    than K streams. All streams are kept until the end of the forward pass, as gradient checkpointing may need them.

    Args:
        previous: K, the number of streams that a connection reads, including x_i; the paper takes 3.
        rank: R of h_i = B_i A_i; None for h_i = identity.

    Examples:
        >>> model = relinear.from_preset("tiny")
        >>> relinear.attach_(model, relinear.residual.LaurelPA(rank=8))
        >>> model(torch.randint(258, (1, 8))).logits.shape
        torch.Size([1, 8, 258])
    """

    kind = "laurel_pa"

    previous: Count = 3
    rank: Count | None = 32

    def check(self, model: nn.Module) -> None:
        super().check(model)
        check_passes_to_layers(model)
        if self.rank is not None:
            _check_rank(self.rank, model)

    def attach(self, model: nn.Module) -> None:
        received = _Received()
        install_layer_context(model, _STREAMS, _Streams, received.receive)
        for index, block in enumerate(sub_blocks(model)):
            streams = min(self.previous, index + 1)
            part = LaurelPreviousResidual(_width(block), self.rank, streams, factory_kwargs_like(block.module))
            add_part(block.module, PART_NAME, part, block.module)
            connect(block, _PreviousResidualHooks(block.module, index, self.previous, received))
