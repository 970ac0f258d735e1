"""The settings of an operator as a table, from its fields and its docstring."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from measured import table
from relinear.contract.operator import OperatorConfig
from relinear_cli.list import setting_meanings

#: settings, and words of one, that are shown at once; more are folded
MOST, WORDS = 5, 25


def settings_table(kind: str) -> str:
    """Name, default and meaning of every field of the operator's config."""
    config = OperatorConfig.kinds()[kind]
    fields = dataclasses.fields(config)
    meanings = setting_meanings(config)
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


def _default(field: Any) -> str:
    return json.dumps(field.default) if isinstance(field.default, str) else str(field.default)
