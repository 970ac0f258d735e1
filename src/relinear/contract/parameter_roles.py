"""Parameter roles: fan-in and fan-out, how they grow with a model's width, and muP's scales that follow."""

from typing import Literal, NamedTuple

from torch import Tensor, nn

from relinear.deprecated import declared
from relinear.settings.messages import quoted

InitLaw = Literal["fan_in", "constant", "orthogonal"]


class ParamRole(NamedTuple):
    """The role of a parameter, so that one optimiser recipe serves every operator.

    Attributes:
        fan_in: number of inputs that a unit sums over; None for vectors, lookup tables and bivectors.
        lr_multiplier: factor on the base learning rate.
        weight_decay: whether weight decay applies.
        fan_in_scales: whether the fan-in grows with the model's width; False for those in ``finite_fan_in``, as a rank.
        fan_out: number of units that read an input; None (unknown) means equal to the fan-in.
        fan_out_scales: whether the fan-out grows with the model's width.
        growth: fans grow as this power of the model's width; 0.5 for a factor of a Kronecker product.
        init_law: default std: "fan_in" is fan_in^-0.5, "orthogonal" max(fan_in, fan_out)^-0.5, "constant" any constant.
        readout: whether this is the output layer, which computes the logits.
        fan_in_offset: the fan-in is the model's width minus this constant.
    """

    fan_in: int | None = None
    lr_multiplier: float = 1.0
    weight_decay: bool = True
    fan_in_scales: bool = True
    fan_out: int | None = None
    fan_out_scales: bool = True
    growth: float = 1.0
    init_law: InitLaw = "fan_in"
    readout: bool = False
    fan_in_offset: int = 0

    def lr_scale(self, ratio: float) -> float:
        """Return muP's factor on Adam's learning rate, base fan-in / fan-in.

        Args:
            ratio: the model's width over the base width, at which the factor is 1.
        """
        return self._base_fan_in(ratio) / self.fan_in if self.fan_in else 1.0

    def init_std_scale(self, ratio: float) -> float:
        """Return muP's factor on the standard deviation of the default initialisation.

        In muP the standard deviation is proportional to 1 / sqrt(fan_in), and to 1 / fan_in in the output layer; each
        dense factor of a structured matrix has its own fan-in. The factor is muP's law over the default law, both
        relative to the base width.

        Args:
            ratio: width over base width, as in ``lr_scale``.
        """
        if not self.fan_in or ratio == 1:
            return 1.0
        base_fan_in = self._base_fan_in(ratio)
        fan_out = self.fan_in if self.fan_out is None else self.fan_out
        base_fan_out = fan_out / ratio**self.growth if self.fan_out_scales else fan_out
        std = (base_fan_in / self.fan_in) ** (1.0 if self.readout else 0.5)
        return std * self._default_std(base_fan_in, base_fan_out) / self._default_std(self.fan_in, fan_out)

    def _base_fan_in(self, ratio: float) -> float:
        assert self.fan_in is not None
        if ratio == 1 or not self.fan_in_scales:
            return self.fan_in
        grown = ratio**self.growth
        base_fan_in = (self.fan_in + self.fan_in_offset) / grown - self.fan_in_offset
        return base_fan_in if base_fan_in > 0 else self.fan_in / grown  # the base model has no such inputs

    def _default_std(self, fan_in: float, fan_out: float) -> float:
        if self.init_law == "constant":
            return 1.0
        return (fan_in if self.init_law == "fan_in" else max(fan_in, fan_out)) ** -0.5


class DeclaredFans:
    """Read what ``module`` and its submodules declare about their parameters' fans and initialisation.

    They do so in the attributes ``finite_fan_in`` and ``finite_fan_out`` (fans that do not grow with the model's width)
    and ``constant_initialized`` and ``orthogonal_initialized`` (``ParamRole.init_law``): tuples with names of
    parameters, or of submodules, with all their parameters.
    """

    def __init__(self, module: nn.Module) -> None:
        self._finite_in = _named_in(module, "finite_fan_in")
        self._finite_out = _named_in(module, "finite_fan_out")
        self._laws: dict[Tensor, InitLaw] = dict.fromkeys(_named_in(module, "orthogonal_initialized"), "orthogonal")
        self._laws |= dict.fromkeys(_named_in(module, "constant_initialized"), "constant")

    def role(self, parameter: Tensor, *, transposed: bool = False) -> ParamRole:
        """Return the role of a parameter: matrices (..., fan-out, fan-in) decay, vectors do not.

        Args:
            parameter: one of the module's.
            transposed: whether it is stored as (fan-in, fan-out).
        """
        if parameter.ndim < 2:
            return ParamRole(None, weight_decay=False)
        fan_out, fan_in = parameter.shape[:2][::-1] if transposed else parameter.shape[-2:]
        return ParamRole(
            fan_in,
            fan_in_scales=parameter not in self._finite_in,
            fan_out=fan_out,
            fan_out_scales=parameter not in self._finite_out,
            init_law=self._laws.get(parameter, "fan_in"),
        )


def _named_in(module: nn.Module, attribute: str) -> set[Tensor]:
    """Return the parameters that ``module`` and its submodules name in ``attribute``.

    Raises ValueError if a name is neither a parameter's nor a submodule's.
    """
    result: set[Tensor] = set()
    for part in module.modules():
        keys = declared(part, attribute)
        if isinstance(keys, str):
            raise ValueError(f"{type(part).__name__}.{attribute} must be a tuple of names, got {quoted(keys)}")
        for key in keys:
            named = [p for name, p in part.named_parameters() if name == key or name.startswith(f"{key}.")]
            is_off = key in part._modules or getattr(part, key, part) is None  # with these settings it has no parameter
            if not named and not is_off:
                raise ValueError(f"{type(part).__name__}.{attribute}: no parameter or submodule is named {quoted(key)}")
            result.update(named)
    return result
