"""List the registered residual methods and attention gates."""

from typing import Any

from relinear.contract.attachment import AttachmentConfig
from relinear.residual.attention_gate import SDPAGate
from relinear.residual.config import ResidualConfig


def residual_methods() -> dict[str, type[AttachmentConfig]]:
    """Return every residual method and attention gate by kind.

    Returns:
        Settings classes by kind: ``{"rezero": relinear.residual.ReZero, ...}``.

    Examples:
        >>> relinear.residual.residual_methods()["rezero"]()
        ReZero(shared=True, keep_norms=False)
    """
    known: dict[str, Any] = AttachmentConfig.kinds()
    return {kind: cls for kind, cls in known.items() if issubclass(cls, ResidualConfig | SDPAGate)}
