"""LoRA on an operator as a whole.

PEFT adapts ``nn.Linear`` and a few other classes, any other class by one that its configuration names.
"""

from typing import Any

from relinear.contract.operator import Operator


def lora_on_operators_(config: Any) -> Any:
    """Let ``target_modules`` of a PEFT ``LoraConfig`` name operators: y = operator(x) + scaling * B A dropout(x).

    A plain ``LoraConfig`` does the same since relinear tells PEFT's LoRA what an operator is; this tells one
    configuration, and is kept for programs that call it.

    An operator has no weight that an adapter could be added to: merging is refused until ``fold_`` has made it a layer.
    ``"all-linear"`` means plain layers (a Transponder's ``base`` among them), no operators and nothing inside them.

    Args:
        config: changed in place. Layers that are not operators are adapted as ever.

    Returns:
        ``config``.

    Raises:
        ValueError: if ``config`` is not a ``LoraConfig``.
        ImportError: without PEFT (the extra ``peft``).

    Examples:
        >>> from peft import LoraConfig
        >>> config = relinear.surgery.lora_on_operators_(LoraConfig(r=4, target_modules=["q_proj"]))
        >>> config.r
        4
    """
    try:
        from peft import LoraConfig
    except ImportError as error:
        raise ImportError("adapters need PEFT: pip install 'relinear[peft]'") from error
    from relinear.surgery.lora_layer import OperatorLora

    if type(config) is not LoraConfig:
        raise ValueError(
            f"expected a peft.LoraConfig (no other adapter goes on operators), got {type(config).__name__}"
        )
    config._register_custom_module({Operator: OperatorLora})
    return config
