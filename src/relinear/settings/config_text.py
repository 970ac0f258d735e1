"""Parse configs written as text, as on the command line: ``hdpl:rank=128,blocks=8``."""

from typing import Any

from relinear.settings.messages import quoted
from relinear.settings.yaml_settings import read_value


def parse_config_text(text: str) -> dict[str, Any]:
    """Parse ``kind:key=value,key=value`` into a mapping for ``Config.from_dict``.

    Values are those of YAML (numbers, words, lists), ``none``, or a nested config in parentheses:
    ``hdpl:rank=128,blocks=8`` gives ``{"kind": "hdpl", "rank": 128, "blocks": 8}``, and
    ``transponder:rank=8,base=(low_rank:rank=4)`` nests one config in another. Kinds and keys are not checked here but
    by ``from_dict``.

    Raises:
        ValueError: if the text does not have this form.
    """
    kind, colon, rest = text.strip().partition(":")
    config: dict[str, Any] = {"kind": kind.strip()}
    parts = _split(rest, text) if colon else []
    if not kind.strip().isidentifier() or (colon and not parts):
        example = "write it as kind:key=value,key=value, as in hdpl:rank=128,blocks=8"
        raise ValueError(f"{quoted(text)} names no kind with its settings; {example}")
    for part in parts:
        key, equals, value = (word.strip() for word in part.partition("="))
        if not equals or not key.isidentifier() or not value:
            raise ValueError(f"{quoted(text)}: expected key=value, got {quoted(part.strip())}")
        if key in config:
            raise ValueError(f"{quoted(text)}: {quoted(key)} is given twice")
        config[key] = _parse_value(value)
    return config


def keeps_layer(text: str) -> bool:
    """Return whether ``text`` stands in an operator's place and leaves the layer as it is: ``none`` or ``dense``."""
    return text.strip().lower() in ("none", "dense")


def _split(text: str, whole: str) -> list[str]:
    """Split ``text`` at commas outside of brackets and parentheses."""
    parts, depth, start = [], 0, 0
    for index, character in enumerate(text):
        depth += (character in "([{") - (character in ")]}")
        if depth < 0:
            break
        if character == "," and depth == 0:
            parts.append(text[start:index])
            start = index + 1
    if depth != 0:
        raise ValueError(f"{quoted(whole)}: brackets do not match")
    return [part for part in (*parts, text[start:]) if part.strip() or parts]


def _parse_value(text: str) -> Any:
    if text.startswith("(") and text.endswith(")"):
        return parse_config_text(text[1:-1])
    if text.lower() in ("true", "false", "none", "null"):
        return {"true": True, "false": False}.get(text.lower())
    try:
        return read_value(text, "")
    except ValueError:
        return text
