"""What the author of an operator, an attachment or an objective reads: classes to derive from, and their losses."""

from relinear.core.attachment import AttachmentConfig
from relinear.core.aux import aux_losses
from relinear.core.config import register
from relinear.core.objective import ObjectiveConfig
from relinear.core.operator import NotLinearError, Operator, OperatorConfig

__all__ = [
    "AttachmentConfig",
    "NotLinearError",
    "ObjectiveConfig",
    "Operator",
    "OperatorConfig",
    "aux_losses",
    "register",
]
