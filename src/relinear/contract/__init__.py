"""What the author of an operator, an attachment or an objective reads: classes to derive from, and their losses."""

from relinear.contract.attachment import AttachmentConfig
from relinear.contract.auxiliary_losses import aux_losses
from relinear.contract.config import register
from relinear.contract.objective import ObjectiveConfig
from relinear.contract.operator import NotLinearError, Operator, OperatorConfig

__all__ = [
    "AttachmentConfig",
    "NotLinearError",
    "ObjectiveConfig",
    "Operator",
    "OperatorConfig",
    "aux_losses",
    "register",
]
