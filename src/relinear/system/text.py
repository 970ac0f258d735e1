"""Format text for messages and pages: shortened values, numbers, aligned tables, what a setting must be."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def shorten(text: str, limit: int = 400) -> str:
    """Return ``text``, without its middle if it is longer than ``limit`` characters."""
    return text if len(text) <= limit else f"{text[: limit // 2 - 4]} [...] {text[4 - limit // 2 :]}"


def number(value: float, template: str = ".2f") -> str:
    """Return a short form for tables: 62.53M, 1.20G, 0.035; with the template ".3g" 62.5M, 1.2G."""
    for scale, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= scale:
            return f"{value / scale:{template}}{unit}"
    return f"{value:.3g}"


def gib(value: float) -> str:
    """Return bytes of memory in MiB or GiB."""
    return f"{value / 2**30:,.2f} GiB" if value >= 2**30 else f"{value / 2**20:.0f} MiB"


def columns(rows: Sequence[Sequence[str]], left_aligned: int = 1) -> str:
    """Return ``rows`` as a text table; the first ``left_aligned`` columns are aligned left, the others right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    padded = (
        [
            cell.ljust(width) if n < left_aligned else cell.rjust(width)
            for n, (cell, width) in enumerate(zip(row, widths))
        ]
        for row in rows
    )
    return "\n".join("  ".join(row).rstrip() for row in padded)


#: beginning of an error type of pydantic, or of a type of the command line -> what a value must be
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


def requirement(error_type: str, value: str, limits: Mapping[str, Any]) -> str | None:
    """Say what a wrong value must be, as ``must be below 1, got 80; for 80 % write 0.8``.

    Args:
        error_type: kind of the fault, as pydantic names it.
        value: the wrong value as text.
        limits: the bounds in pydantic's error.

    Returns:
        None for an unknown error type.
    """
    must_be = next((text for start, text in _MUST_BE.items() if error_type.startswith(start)), None)
    if must_be is None:
        return None
    bounds = {key: int(v) if isinstance(v, float) and v.is_integer() else v for key, v in limits.items()}
    text = f"must be {must_be.format_map(bounds)}, got {value}"
    percent = re.fullmatch(r"(\d{1,3}(?:\.\d+)?) ?(%?)", value.strip("'"))
    if percent and (percent[2] or limits.get("lt", limits.get("le")) == 1) and 1 < float(percent[1]) <= 100:
        text += f"; for {float(percent[1]):g} % write {float(percent[1]) / 100:g}"
    return text


def some_names(names: Iterable[str], count: int = 6) -> str:
    """Return the first ``count`` of the sorted ``names`` as text, and how many more there are."""
    names = sorted(names)
    more = f" and {len(names) - count} more" if len(names) > count else ""
    return ", ".join(map(shorten, names[:count])) + more
