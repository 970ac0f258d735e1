"""Operators that wrap another layer, such as modulators and gates."""

# Legend: I in_features, O out_features

import dataclasses
from typing import Any, ClassVar, Self

import torch
from pydantic import InstanceOf
from torch import Tensor, nn

from relinear.contract.calibration_statistics import CalibrationStatistics
from relinear.contract.config import check_value
from relinear.contract.linear_layers import dense_bias, dense_weight, linear_features, reference_tensor, replaced_layer
from relinear.contract.operator import Init, NotLinearError, Operator, OperatorConfig, named_operators
from relinear.contract.parameter_roles import ParamRole


@dataclasses.dataclass(frozen=True, kw_only=True)
class WrapperConfig(OperatorConfig):
    """Settings of an operator that wraps another layer.

    Attributes:
        base: settings of the wrapped operator, which may be text; None wraps the replaced layer or, outside of a model,
            a new nn.Linear.
    """

    base: InstanceOf[OperatorConfig] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.base, str):
            object.__setattr__(self, "base", OperatorConfig.read(self.base))
        super().__post_init__()

    @property
    def conditioned(self) -> bool:  # type: ignore[override]
        """Return whether the wrapped operator reads the context."""
        return self.base is not None and self.base.conditioned

    @property
    def context_dim(self) -> int | None:
        """Return the width of the context that the wrapped operator reads."""
        return getattr(self.base, "context_dim", None)

    @property
    def fits_weight(self) -> bool:
        """Return whether the wrapped layer can be fitted to a weight, and the wrapper be made neutral."""
        can_be_neutral = getattr(self.module_class, "neutralize", None) is not Wrapper.neutralize
        return can_be_neutral and (self.base is None or self.base.fits_weight)

    def check_shape(self, in_features: int, out_features: int) -> None:
        if self.base is not None:
            self.base.check_shape(in_features, out_features)

    def convert(self, source: nn.Module, init: Init = "fresh") -> Operator:
        """Wrap ``source`` itself, or the ``base`` operator that replaces it.

        The resulting config contains the inner operator's, so that a checkpoint can rebuild it from the stock layer.
        ``init="from_weight"`` also makes the wrapper neutral, if it can be, so that it computes what ``source`` does.
        """
        check_value("init", init, Init)
        inner: nn.Module = source if self.base is None else self.base.convert(source, init)
        resolved = self.replace(base=inner.config) if isinstance(inner, Operator) else self
        in_features, out_features = linear_features(source)
        resolved.check_shape(in_features, out_features)
        reference = reference_tensor(source)
        wrapper: Wrapper = type(self).module_class(  # type: ignore[assignment]
            resolved, in_features, out_features, inner=inner, device=reference.device, dtype=reference.dtype
        )
        if init == "from_weight":
            wrapper.neutralize()
        for name, child in wrapper.named_children():
            if name != "base":
                child.requires_grad_(reference.requires_grad).train(source.training)
        for parameter in wrapper._parameters.values():
            if parameter is not None:
                parameter.requires_grad_(reference.requires_grad)
        wrapper.training = source.training
        wrapper.replaced = replaced_layer(source)
        return wrapper

    def scaled(self, in_features: int, out_features: int, ratio: float) -> OperatorConfig | None:
        base = None if self.base is None else self.base.scaled(in_features, out_features, ratio)
        return None if base is None else self.replace(base=base)


class Wrapper(Operator):
    """Base of operators around another layer, ``base``.

    ``create`` registers the wrapper's own parameters and submodules, after ``base``. Submodules initialise themselves;
    for parameters of the wrapper itself define ``reset_own_parameters``.

    Args:
        inner: the layer to wrap; None builds the config's base, or an ``nn.Linear``.
    """

    config: Any
    base: nn.Module
    tensor_parallel: ClassVar = {"base.weight": 0, "base.bias": 0}

    def __init__(self, config, in_features, out_features, *, bias=True, device=None, dtype=None, inner=None):
        if inner is None:
            build = nn.Linear if config.base is None else config.base.build
            inner = build(in_features, out_features, bias, device, dtype)
        super().__init__(config, in_features, out_features, inner=inner, device=device, dtype=dtype)

    def _construct(self, bias: bool, **kw: Any) -> None:
        self.base = kw.pop("inner")
        self.create(**kw)
        if any(parameter is not None and not parameter.is_meta for parameter in self._parameters.values()):
            self.reset_own_parameters()

    @property
    def bias(self) -> nn.Parameter | None:  # type: ignore[override]
        """Return the bias of the wrapped layer."""
        return self.base.bias  # type: ignore[return-value]

    @property
    def _inner_operators(self) -> list[Operator]:
        """Return the operators inside, also if PEFT has wrapped one in an adapter or trains a copy of it."""
        base = self._modules.get("base")
        return [] if base is None else [operator for _, operator in named_operators(base)]

    def neutralize(self) -> None:
        """Set the wrapper's own parameters so that it returns the wrapped layer's output unchanged.

        Raises:
            ValueError: if no finite parameters do so.
        """
        raise ValueError(f"{self.config.kind} cannot be made neutral; use init='fresh'")

    def reset_parameters(self) -> None:
        """Initialise the wrapped layer and the wrapper's own submodules, if they can be, and its own parameters."""
        for child in self.children():
            reset = getattr(child, "reset_parameters", None)
            if callable(reset):
                reset()
        if self._parameters:
            self.reset_own_parameters()

    def reset_own_parameters(self) -> None:
        """Initialise the parameters of the wrapper itself, which are not in a submodule."""
        raise NotImplementedError(f"{type(self).__name__} does not implement reset_own_parameters")

    @torch.no_grad()
    def fit_to_linear_(self, linear: nn.Module) -> Self:
        """Fit the wrapped layer to ``linear`` and make the wrapper neutral."""
        if not self.config.fits_weight:
            return super().fit_to_linear_(linear)
        weight = self.source_weight(linear)
        self.neutralize()
        if isinstance(self.base, Operator):
            self.base.fit_to_linear_(linear)
        else:
            dense_weight(self.base).copy_(weight)  # a view of the stored weight, even of a transposed one
            self.copy_bias_(linear)
        return self

    @torch.no_grad()
    def fit_to_calibration_(self, linear: nn.Module, statistics: CalibrationStatistics, *, steps: int = 100) -> Self:
        """Fit the wrapped layer to ``linear`` on the calibration data and make the wrapper neutral."""
        self.check_calibration(statistics, steps)
        if not self.config.fits_weight or not isinstance(self.base, Operator):
            return self.fit_to_linear_(linear)
        self.base.fit_to_calibration_(linear, statistics, steps=steps)
        self.neutralize()
        return self

    def dense_bias(self) -> Tensor | None:
        """Return the bias that belongs to ``to_dense``; a wrapper with a ``to_dense`` overrides this, too."""
        if self.bias is None:
            return None
        raise NotLinearError(f"{self.config.kind} does not say what its bias is (dense_bias)")

    def base_dense(self) -> tuple[Tensor, Tensor | None]:
        """Return the matrix (O, I) and bias (O,) of the wrapped layer."""
        return dense_weight(self.base), dense_bias(self.base)

    def base_flops_per_token(self) -> int:
        """Return the FLOPs of the wrapped layer for one token."""
        if self._inner_operators:
            return self._inner_operators[0].flops_per_token()
        return 2 * self.in_features * self.out_features

    def param_roles(self) -> dict[str, ParamRole]:
        roles = super().param_roles()
        inner = self._inner_operators
        for prefix, module in self.base.named_modules(prefix="base"):
            if isinstance(module, Operator) and any(module is operator for operator in inner):
                roles |= {f"{prefix}.{name}": role for name, role in module.param_roles().items()}
        return roles
