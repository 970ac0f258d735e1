"""Named placements of an operator in a decoder: the rows of Table 5 of the Transponder paper."""

from typing import Any

from relinear.contract.operator import OperatorConfig
from relinear.settings.messages import did_you_mean

# Llama's names first, then GPT-2's, whose fused c_attn holds q, k and v.
_ATTENTION = r".*\.(self_attn\.[qkvo]_proj|attn\.c_attn|attn\.c_proj)"
_MLP = r".*\.mlp\.\w+"
_PLACEMENTS: dict[str, tuple[str, int | None]] = {
    "all": ("all-linear", None),
    "attention": (_ATTENTION, None),
    "mlp": (_MLP, None),
    "first": ("all-linear", 0),
    "last": ("all-linear", -1),
    "qk": (r".*\.self_attn\.[qk]_proj", None),
    "without_up_gate": (r".*\.(self_attn\.[qkvo]_proj|mlp\.down_proj)", None),
}


def placement_names() -> tuple[str, ...]:
    """Return the names that ``placement`` accepts.

    Returns:
        Names such as "attention"; see ``placement``.

    Examples:
        >>> relinear.surgery.placement_names()[:3]
        ('all', 'attention', 'mlp')
    """
    return tuple(_PLACEMENTS)


def placement(name: str, operator: OperatorConfig) -> dict[str, Any]:
    """Return the arguments of ``replace_`` for a placement of ``operator`` in Table 5.

    Args:
        name: "all" (every projection of the decoder), "attention" (q, k, v, o), "mlp" (gate, up, down), "first" and
            "last" (all projections of the first or last decoder layer alone), "qk", "without_up_gate" (all but the
            MLP's up and gate projections). The last two need Llama's names: GPT-2 has neither.
        operator: settings of the operator.

    Returns:
        Keyword arguments, ``mapping`` among them.

    Raises:
        ValueError: for an unknown name.

    Examples:
        >>> model = relinear.from_preset("tiny")
        >>> arguments = relinear.surgery.placement("attention", relinear.Transponder())
        >>> report = relinear.replace_(model, **arguments)
        >>> report.parameters - report.parameters_before
        32928
    """
    if name not in _PLACEMENTS:
        raise ValueError(f"unknown placement {name!r}; {did_you_mean(str(name), _PLACEMENTS)}")
    pattern, layer = _PLACEMENTS[name]
    return {"mapping": {pattern: operator}, "layers": layer}
