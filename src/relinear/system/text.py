"""Format values for messages."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def cut(text: str, limit: int = 400) -> str:
    """Return ``text``, with its middle left out if it is longer than ``limit`` characters."""
    return text if len(text) <= limit else f"{text[: limit // 2 - 4]} [...] {text[4 - limit // 2 :]}"


def columns(rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Return ``rows`` as lines, each column as wide as its widest cell; the first ``left`` of them flush left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    padded = (
        [cell.ljust(width) if n < left else cell.rjust(width) for n, (cell, width) in enumerate(zip(row, widths))]
        for row in rows
    )
    return "\n".join("  ".join(row).rstrip() for row in padded)


#: start of the name that pydantic gives a fault, or a command line a type -> what a value must be
_MUST_BE = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "string_type": "text",
    "tuple_type": "a list",
    "list_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping of settings",
    "path": "a path",
    "finite_number": "a finite number",
    "is_instance_of": "an instance of {class}",
    "greater_than_equal": "at least {ge}",
    "greater_than": "above {gt}",
    "less_than_equal": "at most {le:,}",
    "less_than": "below {lt}",
    "too_short": "a list of at least {min_length}",
    "string_too_short": "{min_length} characters or more",
    "literal_error": "one of {expected}",
}


def requirement(fault: str, shown: str, limits: Mapping[str, Any]) -> str | None:
    """Return what a setting must be instead of a value, as ``must be below 1, got 80; for 80 % write 0.8``.

    Args:
        fault: its kind, as pydantic names it.
        shown: the value as text.
        limits: what pydantic states beside that.

    Returns:
        None for a kind that is not known here.
    """
    must_be = next((text for start, text in _MUST_BE.items() if fault.startswith(start)), None)
    if must_be is None:
        return None
    stated = {key: int(v) if isinstance(v, float) and v.is_integer() else v for key, v in limits.items()}
    text = f"must be {must_be.format_map(stated)}, got {shown}"
    share = re.fullmatch(r"(\d{1,3}(?:\.\d+)?) ?(%?)", shown.strip("'"))
    if share and (share[2] or limits.get("lt", limits.get("le")) == 1) and 1 < float(share[1]) <= 100:
        text += f"; for {float(share[1]):g} % write {float(share[1]) / 100:g}"
    return text


def some_names(names: Iterable[str], count: int = 6) -> str:
    """Return the first ``count`` of ``names`` in order, and how many more there are."""
    names = sorted(names)
    more = f" and {len(names) - count} more" if len(names) > count else ""
    return ", ".join(map(cut, names[:count])) + more
