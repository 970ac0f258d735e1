"""Patterns for names: PEFT's rules, with regular expressions in a time that is bounded.

Python's ``re`` tries one way after the other through a pattern such as ``(a+)+$``, which can take for ever. Here all
ways go through the name together, as sets of positions.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from re import _compiler, _parser  # type: ignore[attr-defined]  # what re parses a pattern into has no public name
from typing import Any

from relinear.core.config import shown

__all__ = ["ALL_LINEAR", "check_patterns", "is_plain", "matches"]

ALL_LINEAR = "all-linear"
_PLAIN = re.compile(r"[\w.\-]+")
_LONGEST = 1_000  # characters of a pattern
_REPEATS = (_parser.MAX_REPEAT, _parser.MIN_REPEAT)
_ASSERTS = (_parser.ASSERT, _parser.ASSERT_NOT)
_PARTS = {
    *(_parser.LITERAL, _parser.NOT_LITERAL, _parser.ANY, _parser.IN, _parser.AT),
    *(_parser.BRANCH, _parser.SUBPATTERN, *_REPEATS, *_ASSERTS),
}


def is_plain(pattern: str) -> bool:
    """Whether ``pattern`` is a name or the end of one, not a regular expression."""
    return _PLAIN.fullmatch(pattern) is not None


def matches(pattern: str, name: str) -> bool:
    """PEFT's rule: a plain key is an exact or dotted-suffix name, anything else a regular expression in full."""
    if is_plain(pattern):
        return name == pattern or name.endswith(f".{pattern}")
    return len(name) in _through(_parsed(pattern), name, frozenset((0,)))


def check_patterns(patterns: Iterable[Any]) -> None:
    """Raise ValueError for a pattern that is no text, empty, or no regular expression that names are matched with."""
    for pattern in patterns:
        if not isinstance(pattern, str) or not pattern:
            raise ValueError(f"a pattern must be a non-empty string, got {shown(pattern)}")
        if pattern != ALL_LINEAR and not is_plain(pattern):
            try:
                _parsed(pattern)
            except (re.error, RecursionError, OverflowError) as error:
                raise ValueError(f"pattern {shown(pattern)} is no valid regular expression: {error}") from error


@functools.lru_cache(maxsize=256)
def _parsed(pattern: str) -> tuple:
    if len(pattern) > _LONGEST:
        raise ValueError(f"pattern {shown(pattern)} has {len(pattern):,} characters; at most {_LONGEST:,} are taken")
    re.compile(pattern)
    tree = _parser.parse(pattern)
    return tuple(_part(item, tree.state.flags, pattern) for item in tree)


def _part(item: tuple, flags: int, pattern: str) -> tuple:
    """A part of a parsed pattern as (what, its numbers, the parts inside of it); one for a character is compiled."""
    what, value = item

    def parts(tree: Any, flags: int = flags) -> tuple:
        return tuple(_part(inner, flags, pattern) for inner in tree)

    if what not in _PARTS:
        raise ValueError(
            f"pattern {shown(pattern)}: names are matched without back-references, conditions, atomic and possessive "
            "parts; write it with groups, |, [...], * and +"
        )
    if what is _parser.BRANCH:
        return what, None, tuple(parts(tree) for tree in value[1])
    if what is _parser.SUBPATTERN:
        return what, None, parts(value[3], flags & ~value[2] | value[1])
    if what in _REPEATS:
        return what, value[:2], parts(value[2])
    if what in _ASSERTS and value[0] > 0:
        return what, None, parts(value[1])
    tree = _parser.SubPattern(_parser.State(), [item])  # one character or place, or a look back, of a fixed width
    return None, _compiler.compile(tree, flags), ()


def _through(parts: tuple, name: str, starts: frozenset[int]) -> frozenset[int]:
    """Where in ``name`` the ``parts``, one after the other, can end if they begin at any of ``starts``."""
    for what, value, inner in parts:
        if not starts:
            break
        if what is None:
            found = (value.match(name, start) for start in starts)
            starts = frozenset(one.end() for one in found if one is not None)
        elif what is _parser.BRANCH:
            starts = frozenset().union(*(_through(way, name, starts) for way in inner))
        elif what is _parser.SUBPATTERN:
            starts = _through(inner, name, starts)
        elif what in _ASSERTS:
            wanted = what is _parser.ASSERT
            starts = frozenset(s for s in starts if bool(_through(inner, name, frozenset((s,)))) is wanted)
        else:
            starts = _repeated(inner, name, starts, *value)
    return starts


def _repeated(parts: tuple, name: str, starts: frozenset[int], least: int, most: int) -> frozenset[int]:
    for _ in range(least):
        before, starts = starts, _through(parts, name, starts)
        if starts in (before, frozenset()):  # nothing changes from here on
            break
    reached = new = starts
    for _ in range(most - least):
        new = _through(parts, name, new) - reached
        if not new:
            break
        reached |= new
    return reached
