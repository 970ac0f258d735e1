"""Patterns for names: PEFT's rules, with regular expressions in a time that is bounded."""

import difflib
import functools
import math
import re
from collections.abc import Iterable
from typing import Any

import regex  # transformers has it; unlike re it can be told when to stop

from relinear.contract.config import shown

ALL_LINEAR = "all-linear"
_PLAIN = re.compile(r"[\w.\-]+")
_LONGEST = 1_000  # characters of a pattern
_REPEATS = 10_000  # least ones, of braces within braces
_SECONDS = 1.0  # for one name
#: types of models -> what the names of their linear layers end in
_ENDS = {
    "llama mistral qwen2 qwen3": "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj",
    "gpt2": "c_attn c_proj c_fc",
}


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


def listed(patterns: Any, what: str) -> list[str]:
    """Return one pattern or several, checked, as a list; what is neither is refused with the words ``what``."""
    if not isinstance(patterns, Iterable):
        raise ValueError(f"{what}, got {shown(patterns)}")
    wanted = [patterns] if isinstance(patterns, str) else list(patterns)
    check_patterns(wanted)
    return wanted


def patterns_of(names: Iterable[str], others: Iterable[str]) -> list[str]:
    """Return a few patterns that match ``names`` and none of ``others``: of whole modules that hold none of these."""
    others, found = list(others), dict[str, None]()
    for name in names:
        parts = name.split(".")
        prefixes = [".".join(parts[:stop]) for stop in range(1, len(parts))]
        module = next((p for p in prefixes if not any(other.startswith(p) for other in others)), None)
        found[name if module is None else f"{module}.*"] = None
    return list(found)


def check_misspelt(patterns: Iterable[str], model_type: str) -> None:
    """Raise ValueError for what no name is as long as, and for what is nearly the name of a layer of common types.

    All other patterns are judged by the model, once it is there.
    """
    ends = next((ends.split() for types, ends in _ENDS.items() if model_type in types.split()), [])
    for pattern in patterns:
        last = pattern.rpartition(".")[2]
        close = difflib.get_close_matches(last, ends, n=3, cutoff=0.75)
        if len(pattern) > _LONGEST or (close and last not in ends and is_plain(pattern)):
            raise no_match(pattern, close or ends or [ALL_LINEAR])


def no_match(pattern: str, close: Iterable[str]) -> ValueError:
    """Return what is raised about a pattern that names no module, with the nearest names."""
    return ValueError(f"pattern {shown(pattern)} matches no module; nearest: {', '.join(close)}")


@functools.lru_cache(maxsize=256)
def _compiled(pattern: str) -> Any:
    repeats = math.prod(map(int, re.findall(r"\{(\d+)", pattern)))  # memory is taken for each
    if len(pattern) > _LONGEST or repeats > _REPEATS:
        raise regex.error(f"it has more than {_LONGEST:,} characters, or repeats more than {_REPEATS:,} times")
    return regex.compile(pattern)
