"""Base classes of operators, attachments and objectives, and the auxiliary losses that operators record."""

from types import ModuleType as _ModuleType

from relinear.contract.attachment import AttachmentConfig as AttachmentConfig
from relinear.contract.auxiliary_losses import auxiliary_losses_of as auxiliary_losses_of
from relinear.contract.config import register as register
from relinear.contract.objective import ObjectiveConfig as ObjectiveConfig
from relinear.contract.operator import NotLinearError as NotLinearError
from relinear.contract.operator import Operator as Operator
from relinear.contract.operator import OperatorConfig as OperatorConfig

__all__ = [name for name, value in list(globals().items()) if name[0] != "_" and not isinstance(value, _ModuleType)]
