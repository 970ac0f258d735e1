"""Freeze all of a model except the parts to train."""

from collections.abc import Iterable

from torch import nn

from relinear.contract.input_checks import check_model
from relinear.settings.messages import did_you_mean, quoted
from relinear.settings.patterns import listed, matches


def train_only_(model: nn.Module, patterns: str | Iterable[str]) -> int:
    """Freeze every parameter of ``model`` outside the modules that ``patterns`` name.

    With gates that are initialised as the identity (see the example), this is parameter-efficient fine-tuning.

    Args:
        model: any module.
        patterns: names of modules or of parameters, as in ``replace_``: a plain one is an exact name or a dotted suffix
            ("modulator", "relinear_residual", "lm_head"), anything else a regular expression matched in full.

    Returns:
        Number of trainable parameters.

    Raises:
        ValueError: if there is no pattern, or one matches no parameters. The model is then unchanged.

    Examples:
        >>> model = relinear.from_preset("tiny")
        >>> _ = relinear.replace_(model, {"all-linear": relinear.Transponder(init="identity")})
        >>> relinear.surgery.train_only_(model, "modulator")
        94488
    """
    check_model(model, "train_only_")
    chosen: set[int] = set()
    for pattern in listed(patterns, "train_only_ takes names of modules or parameters, one or several"):
        hits = [module for name, module in model.named_modules() if name and matches(pattern, name)]
        matched = {id(p) for module in hits for p in module.parameters()}
        matched |= {id(p) for name, p in model.named_parameters() if matches(pattern, name)}
        if not matched:
            parts = {part for name, _ in model.named_parameters() for part in name.split(".") if not part.isdigit()}
            raise ValueError(f"pattern {quoted(pattern)} names no parameters; {did_you_mean(pattern, sorted(parts))}")
        chosen |= matched
    if not chosen:
        raise ValueError("train_only_ needs at least one pattern")
    parameters = list(model.parameters())
    for parameter in parameters:
        parameter.requires_grad_(id(parameter) in chosen)
    return sum(p.numel() for p in parameters if p.requires_grad)
