"""``residual_``: change how a stock decoder's sub-blocks meet the residual stream."""

from typing import Any

from torch import nn

from relinear.contract import plugins
from relinear.contract.attachment import AttachmentConfig
from relinear.contract.config import nearest, shown
from relinear.contract.input_checks import check_model
from relinear.hf.config_record import refuse_quantized, sync_record
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


def residual_(model: nn.Module, method: str | AttachmentConfig) -> None:
    """Put a residual method into the decoder layers of a stock model, in place; checkpoints restore it.

    It goes with operators put in before or after it.

    Args:
        model: a Hugging Face decoder with Llama's, Mistral's, Qwen2's, Qwen3's or GPT-2's layers.
        method: a config; or text as on the command line, ``"laurel_lr:rank=16"``, which may be the kind alone
            ("rezero", "deepnorm", "layernorm_scaling", "laurel_rw", "laurel_lr", "laurel_pa", "post_ln", "sdpa_gate").

    Raises:
        ValueError: for an unknown kind, a model with other layers, or one that already has a residual method. Nothing
            has changed then.

    Examples:
        >>> model = relinear.from_preset("tiny")
        >>> relinear.residual.residual_(model, "laurel_lr:rank=16")  # as relinear.residual.LaurelLR(rank=16)
        >>> model(torch.randint(258, (1, 8))).logits.shape
        torch.Size([1, 8, 258])
    """
    check_model(model, "residual_")
    if isinstance(method, str):
        known = residual_methods()
        name, colon, settings = method.partition(":")
        kind = name.strip().replace("-", "_")
        if kind not in known and plugins.load("attachment", kind) is None:
            raise ValueError(f"unknown residual method {shown(name)}; {nearest(kind, known)}")
        method = AttachmentConfig.read(kind + colon + settings)
    if not isinstance(method, AttachmentConfig):
        raise ValueError(
            f"expected a residual method such as relinear.residual.ReZero() or its kind, got {shown(method)}"
        )
    refuse_quantized(model)
    method.apply_(model)
    sync_record(model)
