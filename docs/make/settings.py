"""The settings of an operator as a table, from its fields and its docstring."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
from typing import Any

from measured import table
from relinear.core.operator import OperatorConfig

#: settings, and words of one, that are shown at once; more are folded
MOST, WORDS = 5, 25
#: an entry of "Args:", which starts four blanks in; what goes on stands further in
_ENTRY = re.compile(r"^    ([a-z_]+(?:, [a-z_]+)*): (.*(?:\n      .*)*)", flags=re.M)


def settings_table(kind: str) -> str:
    """Name, default and meaning of every field of the operator's config."""
    config = OperatorConfig.kinds()[kind]
    fields = dataclasses.fields(config)
    meanings = meanings_of(config)
    missing = [field.name for field in fields if field.name not in meanings]
    if missing:
        raise ValueError(f"{config.__name__}'s docstring says nothing of {', '.join(missing)}")
    rows = [[f"`{field.name}`", f"`{_default(field)}`", meanings[field.name]] for field in fields]
    found = table(["setting", "default", "meaning"], rows)
    if len(rows) <= MOST and max(len(row[2].split()) for row in rows) <= WORDS:
        return found
    named = ", ".join(row[0].strip("`") for row in rows[:3])
    summary = f"{len(rows)} settings: {named} ..."
    return f'<details markdown="1">\n<summary>{summary}</summary>\n\n{found}\n\n</details>'


def meanings_of(config: type) -> dict[str, str]:
    """Field -> what the docstrings of the class and those it inherits from say; an entry of its own goes first."""
    found: dict[str, str] = {}
    for base in config.__mro__:
        text = inspect.cleandoc(base.__doc__ or "").replace("\nAttributes:\n", "\nArgs:\n")
        arguments = text.partition("\nArgs:\n")[2]
        for names, text in _ENTRY.findall(arguments):
            if ", " not in names:  # several at once are described elsewhere
                found.setdefault(names, _as_markdown(text))
    return found


def _as_markdown(text: str) -> str:
    return " ".join(text.split()).replace("``", "`")


def _default(field: Any) -> str:
    return json.dumps(field.default) if isinstance(field.default, str) else str(field.default)
