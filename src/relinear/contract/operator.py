"""Base classes of operators: a config without layer sizes, and a module that replaces ``nn.Linear``."""

# Legend: I in_features, O out_features

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any, ClassVar, Literal, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from relinear.contract.auxiliary_mixin import AuxiliaryLossMixin
from relinear.contract.calibration_statistics import CalibrationStatistics, fit_by_lbfgs_
from relinear.contract.config import Config, Count, check_value
from relinear.contract.inference import CachingModule
from relinear.contract.input_checks import check_features, check_finite
from relinear.contract.linear_layers import (
    ReplacedLayer,
    dense_bias,
    dense_weight,
    is_stock_linear,
    linear_features,
    linear_of,
    reference_tensor,
    replaced_layer,
)
from relinear.contract.module_tree import outermost
from relinear.contract.parameter_roles import DeclaredFans, ParamRole
from relinear.deprecated import adopt_renamed_attributes, with_attributes_of_0_2
from relinear.settings.messages import quoted

Init = Literal["fresh", "from_weight"]


class NotLinearError(ValueError):
    """Report that an operator has no matrix where one is needed or, when folding, one matrix for all tokens.

    Examples are HDPL with its SiLU path, and gates that read x. ``relinear.fold_`` leaves such operators in place.

    Examples:
        >>> try:
        ...     relinear.HDPL(rank=4).build(16, 16).to_dense()
        ... except relinear.contract.NotLinearError:
        ...     print("no matrix")
        no matrix
    """


@with_attributes_of_0_2
@dataclasses.dataclass(frozen=True, kw_only=True)
class OperatorConfig(Config):
    """Hold the settings of an operator, independent of the layer's size: one config serves layers of many shapes.

    Attributes:
        module_class: the operator's class.
        conditioned: whether it reads the context of a ``ContextManager`` or ``relinear.activations.context``.
        fit_hint: advice in the error if ``fit_to_linear_`` cannot fit a weight.

    Examples:
        >>> config = relinear.OperatorConfig.read("low_rank:rank=8")
        >>> config
        LowRank(rank=8)
        >>> config.build(64, 32).to_dense().shape
        torch.Size([32, 64])
    """

    family: ClassVar[str] = "operator"
    module_class: ClassVar[type[Operator]]
    conditioned: ClassVar[bool] = False
    fit_hint: ClassVar[str] = "use init='fresh', or relinear.distill_ to fit it on data"

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        adopt_renamed_attributes(cls)

    @classmethod
    def check_class(cls) -> None:
        module_class = getattr(cls, "module_class", None)
        if not (isinstance(module_class, type) and issubclass(module_class, Operator)):
            raise ValueError(f"register: {cls.__name__} needs a class variable module_class, its Operator")

    @property
    def fits_weight(self) -> bool:
        """Return whether ``fit_to_linear_`` can fit a given weight; by default, whether the operator overrides it."""
        fits = ("fit_to_weight_", "fit_to_linear_")
        return any(getattr(self.module_class, fit) is not getattr(Operator, fit) for fit in fits)

    def check_shape(self, in_features: int, out_features: int) -> None:
        """Raise ValueError, naming what would work, if a layer of this size cannot be built."""

    def build(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> Operator:
        """Build a freshly initialised operator, outside of any model.

        Args:
            in_features: size of the last dimension of the input.
            out_features: size of the last dimension of the output.
            bias: whether an additive bias is learnt, as in ``nn.Linear``.
            device, dtype: where and as what parameters are made, as in ``nn.Linear``.

        Raises:
            ValueError: if a size is not positive or does not fit the settings.
        """
        check_value("in_features", in_features, Count)
        check_value("out_features", out_features, Count)
        self.check_shape(in_features, out_features)
        return self.module_class(self, in_features, out_features, bias=bias, device=device, dtype=dtype)

    def convert(self, source: nn.Module, init: Init = "fresh") -> Operator:
        """Return the operator that replaces ``source`` (a linear layer or an operator) in a model.

        Wrappers override this to keep ``source`` inside. The result has the source's device, dtype, training mode and
        ``requires_grad``.
        """
        check_value("init", init, Init)
        in_features, out_features = linear_features(source)
        reference = reference_tensor(source)
        has_bias = getattr(source, "bias", None) is not None
        operator = self.build(in_features, out_features, has_bias, device=reference.device, dtype=reference.dtype)
        if init == "from_weight":
            operator.fit_to_linear_(source)
        operator.replaced = replaced_layer(source)
        return operator.train(source.training).requires_grad_(reference.requires_grad)

    def scaled(self, in_features: int, out_features: int, ratio: float) -> OperatorConfig | None:
        """Return a config of about ``ratio`` times the parameters, to match budgets; None if no setting is a size."""
        return None

    def candidates(self, in_features: int, out_features: int) -> list[OperatorConfig]:
        """Return configs of this operator in several sizes, as the search space for a layer of this shape.

        By default this config alone, or nothing if it does not fit.
        """
        try:
            self.check_shape(in_features, out_features)
        except ValueError:
            return []
        return [self]

    def candidate_errors(
        self, linear: nn.Module, statistics: CalibrationStatistics, configs: Sequence[OperatorConfig] | None = None
    ) -> list[tuple[OperatorConfig, float]]:
        """Return candidates for replacing ``linear``, each with its error tr(G (W - W') A (W - W')^T).

        By default each is fitted (``fit_to_calibration_``). Override this if one decomposition gives all the errors, as
        an SVD does for ranks. Only ``configs`` of the ``candidates`` are asked for; None for all.
        """
        configs = self.candidates(*linear_features(linear)) if configs is None else configs
        return [(config, config.fit_error(linear, statistics)) for config in configs]

    def fit_error(self, linear: nn.Module, statistics: CalibrationStatistics, *, steps: int = 100) -> float:
        """Fit an operator of this config by ``fit_to_calibration_`` and return its error."""
        weight = dense_weight(linear).detach()
        operator = self.build(*linear_features(linear), bias=False, device=weight.device)
        fitted = operator.fit_to_calibration_(linear_of(weight), statistics, steps=steps).to_dense().detach()
        return float(statistics.error(weight.double() - fitted.double()))


@with_attributes_of_0_2
class Operator(AuxiliaryLossMixin, CachingModule):
    """Map (..., in_features) to (..., out_features), as ``nn.Linear`` does: the base class of operators.

    Subclasses register their parameters in ``create`` and implement ``reset_parameters``, ``forward`` and
    ``flops_per_token``; other methods are optional. ``forward`` returns a tensor, never a tuple. It is wrapped: an
    input that is not a floating-point tensor (..., in_features) raises a ValueError that names the layer; token ids
    give ``rows`` if the operator replaces an embedding. A subclass with an ``__init__`` instead of ``create`` creates
    the bias there and calls ``reset_parameters`` last.

    Fits take a layer, and hand its weight to a method that subclasses override: ``fit_to_linear_`` calls
    ``fit_to_weight_``, ``fit_to_calibration_`` calls ``fit_to_statistics_``, and both then copy the bias. Override
    ``fit_to_linear_`` itself only if the bias changes, too.

    Examples:
        >>> layer = relinear.LowRank(rank=8).build(64, 32)
        >>> isinstance(layer, relinear.Operator), layer.flops_per_token()
        (True, 1536)
        >>> layer(torch.randn(2, 5, 64)).shape
        torch.Size([2, 5, 32])
    """

    bias: nn.Parameter | None
    #: muP: names of parameters (or submodules, with all their parameters) whose fan-in is a setting, such as a rank
    finite_fan_in: tuple[str, ...] = ()
    #: muP: likewise for the fan-out
    finite_fan_out: tuple[str, ...] = ()
    #: muP: names of parameters whose initial values are constants, and of orthogonal matrices (``ParamRole.init_law``)
    constant_initialized: tuple[str, ...] = ()
    orthogonal_initialized: tuple[str, ...] = ()
    #: tensor parallelism: name of a parameter (or submodule, with all its parameters) -> dimension to split
    tensor_parallel: ClassVar[Mapping[str, int]] = {}
    #: the layer that it replaced in a model
    replaced: ReplacedLayer = ReplacedLayer()
    #: added to the number of parameters to count weights; for quantized layers: integer codes minus scales
    weights_beyond_parameters: int = 0
    #: name of the operator in its model, without what PEFT adds; empty outside of a model
    name_in_model: str = ""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        adopt_renamed_attributes(cls)
        # A forward hook would take every call through torch's slow path and could be removed.
        if "forward" in cls.__dict__:
            cls.forward = _checked(cls.forward)

    def __init__(
        self, config: OperatorConfig, in_features: int, out_features: int, *, bias: bool = True, **kw: Any
    ) -> None:
        super().__init__()
        self.config = config
        self.in_features = in_features
        self.out_features = out_features
        self._construct(bias, **kw)

    def _construct(self, bias: bool, **kw: Any) -> None:
        if type(self).__init__ is not Operator.__init__ and type(self).create is Operator.create:
            return  # the subclass registers its parameters in ``__init__``
        self.create(**kw)
        if self._parameters.get("bias") is None:
            self.register_parameter("bias", nn.Parameter(torch.zeros(self.out_features, **kw)) if bias else None)
        # tensors on the meta device have no values, and drawing them there would take time
        if not any(tensor.is_meta for tensor in (*self.parameters(), *self.buffers())):
            self.reset_parameters()

    def __getattr__(self, name: str) -> Any:
        # nn.Module's lookup, inlined: a forward looks up several parameters, and super() would take twice as long
        attributes = self.__dict__
        for kind in ("_parameters", "_modules", "_buffers"):
            if kind in attributes and name in attributes[kind]:
                return attributes[kind][name]
        if name == "weight":
            raise AttributeError(
                f"{self.name_in_model or 'this layer'} is a relinear operator ({type(self).__name__}) and has no "
                "weight, which the model reads here; leave the layer out with exclude="
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @property
    def num_embeddings(self) -> int | None:
        """Return the size of the vocabulary if it replaces an embedding (it maps token ids to ``rows``), else None."""
        return self.replaced.num_embeddings

    def create(self, **kw: Any) -> None:
        """Register uninitialised parameters and buffers; a zero ``bias`` (out_features,) is added afterwards.

        Args:
            **kw: ``device`` and ``dtype`` of parameters.
        """

    def reset_parameters(self) -> None:
        """Initialise every parameter in place from torch's global generator; must also run on the meta device.

        By default it sets the bias to zero, and there must be no other parameter.
        """
        if any(name != "bias" for name, _ in self.named_parameters()):
            raise NotImplementedError(f"{type(self).__name__} does not implement reset_parameters")
        self.zero_bias_()

    # Dense form

    def to_dense(self) -> Tensor:
        """Return the dense matrix (out_features, in_features) without the bias; one per token if conditioned.

        Raises:
            NotLinearError: by default, and if the operator is not a linear map of its input.
        """
        raise NotLinearError(f"{self.config.kind} has no dense matrix (to_dense)")

    def dense_chain(self) -> tuple[Tensor, ...]:
        """Return the weights of equivalent linear layers, in the order in which they are applied.

        By default ``to_dense()`` alone; low-rank operators return their factors. Raises as ``to_dense``.
        """
        return (self.to_dense(),)

    def rows(self, ids: Tensor) -> Tensor:
        """Look up the rows (..., in_features) of ``to_dense()`` at token ids (...), as an embedding does."""
        return F.embedding(ids, self.to_dense())

    def dense_bias(self) -> Tensor | None:
        """Return the bias that belongs to ``to_dense``, or None."""
        return self.bias

    @torch.no_grad()
    def dense_weight_and_bias(self) -> tuple[Tensor, Tensor | None]:
        """Return ``to_dense()`` and ``dense_bias()``, computed in float32 or wider and cast back."""
        dtype = reference_tensor(self).dtype
        # a copy, so that this operator keeps its dtype
        wide = self if dtype in (torch.float32, torch.float64) else deepcopy(self).float()
        weight, bias = wide.to_dense().to(dtype).contiguous(), wide.dense_bias()
        return weight, None if bias is None else bias.to(dtype)

    # Fitting

    @torch.no_grad()
    def fit_to_linear_(self, linear: nn.Module) -> Self:
        """Overwrite the parameters with the best fit to ``linear`` (nn.Linear, Conv1D or an operator with to_dense).

        Raises:
            ValueError: if this operator cannot be fitted in closed form, or the shapes differ.
        """
        self.fit_to_weight_(self.source_weight(linear))
        self.copy_bias_(linear)
        return self

    def fit_to_weight_(self, weight: Tensor) -> None:
        """Overwrite all parameters but the bias with the best fit to ``weight`` (out_features, in_features).

        Raises:
            ValueError: if there is no fit in closed form.
        """
        raise ValueError(f"{self.config.kind} has no closed-form fit of a given weight; {self.config.fit_hint}")

    @torch.no_grad()
    def fit_to_calibration_(self, linear: nn.Module, statistics: CalibrationStatistics, *, steps: int = 100) -> Self:
        """Fit this to a layer, with its bias, on the calibration data; ``fit_to_statistics_`` fits a weight alone.

        Minimises tr(G (W - W') A (W - W')^T) over the operator's dense matrix W', with the statistics A and G. The
        default is L-BFGS, initialised by ``fit_to_linear_`` or, without such a fit, with the current parameters.
        Override ``fit_to_statistics_`` for an exact solution.

        Args:
            linear: nn.Linear, Conv1D or an operator with ``to_dense``.
            statistics: second moments of its inputs, and of the gradients at its output.
            steps: maximum number of L-BFGS iterations.

        Raises:
            ValueError: if sizes differ, or ``steps`` is not a positive integer.
            NotLinearError: if this operator has no dense matrix.
        """
        self.check_calibration(statistics, steps)
        weight = self.source_weight(linear)
        self.fit_to_statistics_(weight, statistics, steps)
        self.copy_bias_(linear)
        return self

    def check_calibration(self, statistics: CalibrationStatistics, steps: int) -> None:
        """Raise ValueError unless these are statistics of this layer's sizes and a positive number of steps."""
        if not isinstance(statistics, CalibrationStatistics):
            raise ValueError(f"statistics must be CalibrationStatistics, got {quoted(statistics)}")
        check_value("steps", steps, Count)
        statistics.check(self.in_features, self.out_features)

    def fit_to_statistics_(self, weight: Tensor, statistics: CalibrationStatistics, steps: int) -> None:
        """Fit this to a weight alone, without a bias, in at most ``steps`` iterations.

        ``fit_to_calibration_``, which fits a layer, calls this.
        """
        if self.config.conditioned:
            raise NotLinearError(f"{self.config.kind} depends on the context of each token: use relinear.distill_")
        self.to_dense()  # raises before anything has changed
        if self.config.fits_weight:
            self.fit_to_linear_(linear_of(weight))
        fit_by_lbfgs_(self, weight, statistics, steps)

    def source_weight(self, linear: nn.Module) -> Tensor:
        """Return the weight of ``linear`` to fit; raise ValueError if shapes differ or a bias would be lost."""
        source_shape = linear_features(linear)
        if source_shape != (self.in_features, self.out_features):
            shape = (self.in_features, self.out_features)
            raise ValueError(f"cannot fit a layer of (in, out) sizes {source_shape} by an operator of sizes {shape}")
        if self.bias is None and dense_bias(linear) is not None:
            raise ValueError("the layer to fit has a bias and this operator has none; build it with bias=True")
        check_finite(linear)
        return dense_weight(linear).detach()

    @torch.no_grad()
    def copy_bias_(self, linear: nn.Module) -> None:
        """Copy the bias of ``linear`` (zero if it has none), if this operator has one."""
        bias = dense_bias(linear)
        if self.bias is None or bias is None:
            self.zero_bias_()
        else:
            self.bias.copy_(bias)

    def zero_bias_(self) -> None:
        """Set the bias to zero, if this operator has one."""
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    # Cost, checkpoints, roles

    def flops_per_token(self) -> int:
        """Return the floating-point operations of the forward pass for one token (a multiply-add counts as two).

        An operator that routes tokens counts only the parts that a token is sent to: its active FLOPs.
        """
        raise NotImplementedError(f"{type(self).__name__} does not implement flops_per_token")

    def inactive_per_token(self) -> tuple[int, int]:
        """Return the (parameters, FLOPs) that one token does not use, such as those of experts that a router skips.

        Leave out those of operators inside this one, which count themselves. Total FLOPs are ``flops_per_token()`` plus
        these FLOPs; active parameters are all minus these parameters.
        """
        return 0, 0

    def problem_with_values(self, values: Mapping[str, Tensor]) -> str | None:
        """Return what is wrong with the tensors ``values`` of a checkpoint; None if nothing is.

        Override this where damage would silently change the result, as in a table of indices.
        """
        return None

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *arguments: Any) -> None:
        tensors = {key.removeprefix(prefix): value for key, value in state_dict.items() if key.startswith(prefix)}
        problem = self.problem_with_values(tensors)
        if problem is None:
            super()._load_from_state_dict(state_dict, prefix, *arguments)
        else:
            arguments[-1].append(f"{prefix.rstrip('.')}: {problem}")  # torch's list of errors

    def param_roles(self) -> dict[str, ParamRole]:
        """Return the role of every parameter by name; the last dimension of a matrix is its fan-in."""
        fans = DeclaredFans(self)
        return {name: fans.role(parameter) for name, parameter in self.named_parameters()}

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, {self.config}, bias={self.bias is not None}"


def named_operators(model: nn.Module) -> Iterator[tuple[str, Operator]]:
    """Yield (name, operator) for the operators of ``model``, each once, without those inside another operator."""
    return outermost(model, lambda module: isinstance(module, Operator))


def is_replaceable(module: Any) -> bool:
    """Return whether ``module`` is a stock linear layer or an operator, which surgery can replace."""
    return isinstance(module, Operator) or is_stock_linear(module)


def _checked(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap an operator's ``forward``: check the input's type and width.

    For token ids, if the operator replaces an embedding, return ``rows`` instead.
    """

    @functools.wraps(forward)
    def checked(self: Operator, x: Tensor) -> Tensor:
        # ``check_features``, inlined: this runs in every call of every layer and takes a third of a microsecond
        if not isinstance(x, Tensor) or not x.ndim or x.shape[-1] != self.in_features or not x.is_floating_point():
            if self.num_embeddings is not None and isinstance(x, Tensor) and x.dtype in (torch.int64, torch.int32):
                rows = self.rows(x)
                scale = self.replaced.row_scale
                return rows if scale == 1 else rows * rows.new_full((), scale)
            check_features(x, self.in_features, self)
        return forward(self, x)

    # torch.compile counts recompilations per code object: with one for all operators they would share one limit.
    wrapper: Any = checked
    wrapper.__code__ = wrapper.__code__.replace(co_qualname=forward.__qualname__)
    return checked
