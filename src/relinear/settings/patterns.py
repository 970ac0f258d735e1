"""Patterns for module names, with PEFT's rules."""

import re
from collections.abc import Iterable
from typing import Any

from relinear.settings.messages import quoted

ALL_LINEAR = "all-linear"
_NAME = re.compile(r"[\w.\-]+")


def is_name(pattern: str) -> bool:
    """Return whether ``pattern`` is a name or a dotted suffix, not a regular expression."""
    return _NAME.fullmatch(pattern) is not None


def matches(pattern: str, name: str) -> bool:
    """Return whether ``pattern`` matches ``name``: as a name or dotted suffix, else as a regular expression in full."""
    if is_name(pattern):
        return name == pattern or name.endswith(f".{pattern}")
    return re.fullmatch(pattern, name) is not None


def check_patterns(patterns: Iterable[Any]) -> None:
    """Raise ValueError for a pattern that is not text, is empty, or is not a valid regular expression."""
    for pattern in patterns:
        if not isinstance(pattern, str) or not pattern:
            raise ValueError(f"a pattern must be a non-empty string, got {quoted(pattern)}")
        if pattern != ALL_LINEAR and not is_name(pattern):
            try:
                re.compile(pattern)
            except (re.error, RecursionError, OverflowError) as error:
                raise ValueError(f"pattern {quoted(pattern)} is not a valid regular expression: {error}") from error


def listed(patterns: Any, expected: str) -> list[str]:
    """Return one or several patterns as a checked list; raise ValueError with the text ``expected`` for other types."""
    if not isinstance(patterns, Iterable):
        raise ValueError(f"{expected}, got {quoted(patterns)}")
    names = [patterns] if isinstance(patterns, str) else list(patterns)
    check_patterns(names)
    return names


def patterns_of(names: Iterable[str], excluded: Iterable[str]) -> list[str]:
    """Return a few patterns that match all ``names`` and no ``excluded`` name: whole modules if possible."""
    excluded, patterns = list(excluded), dict[str, None]()
    for name in names:
        parts = name.split(".")
        prefixes = [".".join(parts[:stop]) for stop in range(1, len(parts))]
        module = next((p for p in prefixes if not any(other.startswith(p) for other in excluded)), None)
        patterns[name if module is None else f"{module}.*"] = None
    return list(patterns)
