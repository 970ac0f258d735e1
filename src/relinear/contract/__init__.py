"""Base classes of operators, attachments and objectives, and what their authors need besides."""

from types import ModuleType as _ModuleType

from relinear.contract.attachment import AttachmentConfig as AttachmentConfig
from relinear.contract.auxiliary_losses import auxiliary_losses_of as auxiliary_losses_of
from relinear.contract.calibration_statistics import CalibrationStatistics as CalibrationStatistics
from relinear.contract.config import Count as Count
from relinear.contract.config import check_divides as check_divides
from relinear.contract.config import register as register
from relinear.contract.objective import ObjectiveConfig as ObjectiveConfig
from relinear.contract.operator import NotLinearError as NotLinearError
from relinear.contract.operator import Operator as Operator
from relinear.contract.operator import OperatorConfig as OperatorConfig
from relinear.contract.parameter_roles import ParamRole as ParamRole
from relinear.contract.wrapper import Wrapper as Wrapper
from relinear.contract.wrapper import WrapperConfig as WrapperConfig

__all__ = [name for name, value in list(globals().items()) if name[0] != "_" and not isinstance(value, _ModuleType)]
