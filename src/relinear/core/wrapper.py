"""Operators that keep the layer they are put on: what a modulator and a gate have in common."""

# Legend: I in_features, O out_features

from __future__ import annotations

import dataclasses
from typing import Any, Self

import torch
from torch import Tensor, nn

from relinear.core.operator import (
    Init,
    Operator,
    OperatorConfig,
    ParamRole,
    dense_bias,
    dense_weight,
    is_conv1d,
    linear_features,
)

__all__ = ["Wrapper", "WrapperConfig"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class WrapperConfig(OperatorConfig):
    """Settings of an operator that wraps another layer.

    Args:
        base: settings of the wrapped operator. None keeps the layer that is there (an ``nn.Linear``, a ``Conv1D`` or an
            operator); a wrapper built on its own then has an ``nn.Linear`` inside.
    """

    base: OperatorConfig | None = None

    def __post_init__(self) -> None:
        if self.base is not None and not isinstance(self.base, OperatorConfig):
            raise ValueError(f"base must be an operator's settings or None, got {self.base!r}")

    def check_shape(self, in_features: int, out_features: int) -> None:
        if self.base is not None:
            self.base.check_shape(in_features, out_features)

    def convert(self, source: nn.Module, init: Init = "fresh") -> Operator:
        """Wrap ``source`` itself, or the ``base`` operator that replaces it.

        The config of the result says what is inside, so that a checkpoint can rebuild it from the stock layer.
        ``init="from_weight"`` also makes the wrapper neutral (where it can be), so that the source is reproduced.
        """
        inner: nn.Module = source if self.base is None else self.base.convert(source, init)
        resolved = self.replace(base=inner.config) if isinstance(inner, Operator) else self
        in_features, out_features = linear_features(source)
        resolved.check_shape(in_features, out_features)
        reference = next(p for p in source.parameters() if p.is_floating_point())
        wrapper: Wrapper = type(self).module_class(  # type: ignore[assignment]
            resolved, in_features, out_features, inner=inner, device=reference.device, dtype=reference.dtype
        )
        if init == "from_weight":
            wrapper.neutralize()
        for name, child in wrapper.named_children():
            if name != "base":
                child.requires_grad_(reference.requires_grad).train(source.training)
        wrapper.training = source.training
        wrapper.replaces_conv1d = is_conv1d(source) or getattr(source, "replaces_conv1d", False)
        return wrapper

    def resized(self, in_features: int, out_features: int, scale: float) -> OperatorConfig | None:
        base = None if self.base is None else self.base.resized(in_features, out_features, scale)
        return None if base is None else self.replace(base=base)


class Wrapper(Operator):
    """An operator around the layer ``base``; everything of its own lives in other submodules.

    Args:
        inner: the layer to wrap; None builds the config's base, or an ``nn.Linear``.
    """

    config: Any
    base: nn.Module

    def __init__(self, config, in_features, out_features, *, bias=True, device=None, dtype=None, inner=None):
        super().__init__(config, in_features, out_features)
        if inner is None:
            kw = {"device": device, "dtype": dtype}
            if config.base is None:
                inner = nn.Linear(in_features, out_features, bias=bias, **kw)
            else:
                inner = config.base.build(in_features, out_features, bias, **kw)
        self.base = inner

    @property
    def bias(self) -> nn.Parameter | None:  # type: ignore[override]
        """The bias of the wrapped layer."""
        return self.base.bias  # type: ignore[return-value]

    @property
    def _aux_losses(self) -> dict[str, Tensor]:  # type: ignore[override]
        return self.base._aux_losses if isinstance(self.base, Operator) else {}

    @_aux_losses.setter
    def _aux_losses(self, value: dict[str, Tensor]) -> None:
        if isinstance(self._modules.get("base"), Operator):
            self.base._aux_losses = value  # type: ignore[assignment]

    def aux_losses(self) -> dict[str, Tensor]:
        return self.base.aux_losses() if isinstance(self.base, Operator) else {}

    def metrics(self) -> dict[str, Tensor]:
        return self.base.metrics() if isinstance(self.base, Operator) else {}

    def neutralize(self) -> None:
        """Set the wrapper's own parameters so that it passes the wrapped layer's output on unchanged.

        Raises:
            ValueError: if no finite parameters do that.
        """
        raise ValueError(f"{self.config.kind} cannot be made neutral; use init='fresh'")

    @torch.no_grad()
    def from_linear(self, linear: nn.Module) -> Self:
        """Fit the wrapped layer to ``linear`` and make the wrapper neutral."""
        self.neutralize()
        if isinstance(self.base, Operator):
            self.base.from_linear(linear)
            return self
        weight, bias = dense_weight(linear), dense_bias(linear)
        target = dense_weight(self.base)  # a view of the stored weight, also where that is transposed
        if target.shape != weight.shape:
            raise ValueError(f"cannot fit a layer of shape {tuple(target.shape)} to one of {tuple(weight.shape)}")
        target.copy_(weight)
        if self.bias is not None:
            self.bias.copy_(bias) if bias is not None else self.bias.zero_()
        return self

    def base_dense(self) -> tuple[Tensor, Tensor | None]:
        """Matrix (O, I) and bias (O,) of the wrapped layer."""
        return dense_weight(self.base), dense_bias(self.base)

    def base_flops_per_token(self) -> int:
        """FLOPs of the wrapped layer for one token."""
        if isinstance(self.base, Operator):
            return self.base.flops_per_token()
        return 2 * self.in_features * self.out_features

    def param_roles(self) -> dict[str, ParamRole]:
        roles = super().param_roles()
        if isinstance(self.base, Operator):
            roles |= {f"base.{name}": role for name, role in self.base.param_roles().items()}
        return roles
