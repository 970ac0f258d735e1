"""Base classes of operators, attachments and objectives, and what all of them need.

What authors derive from and call: ``operator``, ``wrapper``, ``attachment``, ``objective``, ``config``,
``auxiliary_mixin``, ``auxiliary_losses``, ``calibration_statistics``, ``inference``, ``linear_layers`` and
``parameter_roles``. Latents and gates that can be read and changed are in ``activations.hooks``.

What all rooms use: ``input_checks``, ``module_state``, ``module_tree``, ``numerics``, ``parameters``, ``plugins``.
"""

from relinear.contract.attachment import AttachmentConfig, add_part, factory_kwargs_like
from relinear.contract.auxiliary_losses import auxiliary_losses_of
from relinear.contract.calibration_statistics import CalibrationStatistics
from relinear.contract.config import Count, IntRange, NonNegative, check_divides, check_fits, register
from relinear.contract.objective import ObjectiveConfig
from relinear.contract.operator import NotLinearError, Operator, OperatorConfig
from relinear.contract.parameter_roles import ParamRole
from relinear.contract.wrapper import Wrapper, WrapperConfig

__all__ = [
    "AttachmentConfig",
    "CalibrationStatistics",
    "Count",
    "IntRange",
    "NonNegative",
    "NotLinearError",
    "ObjectiveConfig",
    "Operator",
    "OperatorConfig",
    "ParamRole",
    "Wrapper",
    "WrapperConfig",
    "add_part",
    "auxiliary_losses_of",
    "check_divides",
    "check_fits",
    "factory_kwargs_like",
    "register",
]
