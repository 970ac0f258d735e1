"""Patterns for names: PEFT's rules, with regular expressions in a time that is bounded."""

import functools
import math
import re
from collections.abc import Iterable
from typing import Any

import regex  # transformers has it; unlike re it can be told when to stop

from relinear.core.config import shown

ALL_LINEAR = "all-linear"
_PLAIN = re.compile(r"[\w.\-]+")
_LONGEST = 1_000  # characters of a pattern
_REPEATS = 10_000  # least ones, of braces within braces
_SECONDS = 1.0  # for one name


def is_plain(pattern: str) -> bool:
    """Return whether ``pattern`` is a name or the end of one, not a regular expression."""
    return _PLAIN.fullmatch(pattern) is not None


def matches(pattern: str, name: str) -> bool:
    """PEFT's rule: a plain key is an exact or dotted-suffix name, anything else a regular expression in full.

    Raises:
        ValueError: if the expression goes through its ways for more than a second, as ``(a+)+$`` can.
    """
    if is_plain(pattern):
        return name == pattern or name.endswith(f".{pattern}")
    try:
        return _compiled(pattern).fullmatch(name, timeout=_SECONDS) is not None
    except TimeoutError:
        raise ValueError(
            f"pattern {shown(pattern)} takes too long on {shown(name)}: it repeats what it repeats, as (a+)+ does; "
            "write it with a single * or +"
        ) from None


def check_patterns(patterns: Iterable[Any]) -> None:
    """Raise ValueError for a pattern that is no text, empty, or no valid regular expression."""
    for pattern in patterns:
        if not isinstance(pattern, str) or not pattern:
            raise ValueError(f"a pattern must be a non-empty string, got {shown(pattern)}")
        if pattern != ALL_LINEAR and not is_plain(pattern):
            try:
                _compiled(pattern)
                re.compile(pattern)  # what PEFT would say
            except (re.error, regex.error, RecursionError, OverflowError) as error:
                raise ValueError(f"pattern {shown(pattern)} is no valid regular expression: {error}") from error


@functools.lru_cache(maxsize=256)
def _compiled(pattern: str) -> Any:
    repeats = math.prod(map(int, re.findall(r"\{(\d+)", pattern)))  # memory is taken for each
    if len(pattern) > _LONGEST or repeats > _REPEATS:
        raise regex.error(f"it has more than {_LONGEST:,} characters, or repeats more than {_REPEATS:,} times")
    return regex.compile(pattern)
