"""Format messages: shortened values, suggested names, pydantic's errors, one per line; warn on behalf of the caller."""

import difflib
import re
import reprlib
import sys
import warnings
from collections.abc import Iterable
from typing import Any

from pydantic import ValidationError

from relinear.system.text import requirement, shorten

#: names that a message lists
_MAX_NAMES = 40
#: characters of a value that a message repeats
_MAX_CHARACTERS = 200
#: errors that a message lists
_MAX_ERRORS = 10

# reprlib does not read the rest of a long value
_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = _MAX_CHARACTERS


def quoted(value: Any) -> str:
    """Return ``repr(value)``, shortened, so that a message never repeats pages of input."""
    try:
        text = _repr.repr(value)
    except Exception:  # a value whose repr fails, such as an integer of 5,000 digits, must not hide the message
        text = f"a value of type {type(value).__name__}"
    return text if len(text) <= 2 * _MAX_CHARACTERS else f"{text[:_MAX_CHARACTERS]} ..."


def similar_names(name: str, known: Iterable[str], cutoff: float = 0.6) -> list[str]:
    """Return up to three of the ``known`` names that are similar to ``name``, the most similar one first.

    Names are similar if difflib's ratio is at least ``cutoff``, or if ``name`` abbreviates them ("lr" for
    "learning_rate").
    """
    known = list(known)
    initials = [key for key in known if name.lower() == "".join(word[:1] for word in key.split("_")) and len(name) > 1]
    if initials or len(name) > _MAX_CHARACTERS:  # long texts are similar to no name and slow to compare
        return initials
    by_lower_case = {key.lower(): key for key in known}
    return [by_lower_case[key] for key in difflib.get_close_matches(name.lower(), by_lower_case, cutoff=cutoff)]


def did_you_mean(name: str, known: Iterable[str], limit: int = _MAX_NAMES, cutoff: float = 0.6) -> str:
    """Return "did you mean ...?" with the ``similar_names``, or "known: ..." with the first ``limit`` names."""
    known = list(known)
    if close := similar_names(name, known, cutoff):
        return f"did you mean {' or '.join(map(quoted, close))}?"
    more = f" and {len(known) - limit} more" if len(known) > limit else ""
    return f"known: {shorten(', '.join(known[:limit]), limit * 30)}{more}"


def validation_message(error: ValidationError, name: str = "") -> str:
    """Return pydantic's errors as text, one per line: location (within ``name``), requirement, value, suggestion."""
    lines = []
    errors = error.errors(include_url=False)
    # pydantic also reports a list with a wrong value as too short
    parents = {detail["loc"][:length] for detail in errors for length in range(len(detail["loc"]))}
    errors = [detail for detail in errors if detail["type"] != "too_short" or detail["loc"] not in parents]
    for detail in errors[:_MAX_ERRORS]:
        location = shorten(".".join(filter(None, [name, *map(str, detail["loc"])])))
        value, limits = detail["input"], detail.get("ctx", {})
        must_be = requirement(detail["type"], quoted(value), limits)
        if detail["type"].startswith("missing"):
            lines.append(f"{location} is missing: give it a value")
        elif must_be is None:
            reason = shorten(detail["msg"].removeprefix("Value error, "), 1_000)
            got = "" if detail["type"] == "value_error" else f" (got {quoted(value)})"
            lines.append(f"{location}: {reason}{got}" if location else reason + got)
        else:
            choices = re.findall(r"'([^']*)'", limits["expected"]) if detail["type"] == "literal_error" else []
            hint = f"; {did_you_mean(value, choices)}" if choices and isinstance(value, str) else ""
            lines.append(f"{location} {must_be}{hint if 'did you mean' in hint else ''}".lstrip())
    if len(errors) > _MAX_ERRORS:
        lines.append(f"and {len(errors) - _MAX_ERRORS} more")
    return lines[0] if len(lines) == 1 else "\n  ".join([f"{len(errors)} errors", *lines])


def warn_user(message: str) -> None:
    """Warn with the line of the first caller outside of relinear and of torch, which calls hooks."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).partition(".")[0] in ("relinear", "torch"):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, UserWarning, level)
