"""Read the records of commands and describe them for pages: settings, and how a result was made."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from relinear.pages.blocks import Block, Facts, Text
from relinear.system.files import read_json
from relinear.system.text import gib


def read_values(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raises ValueError if it has none, FileNotFoundError if it is missing."""
    values = read_json(path)
    if not isinstance(values, dict):
        raise ValueError(f"{path} has no JSON object; delete it and run its command again")
    return values


def as_yaml(value: Any) -> str:
    """Return settings as YAML, as in a recipe. Raises ValueError if they are nested too deeply."""
    import yaml

    try:
        return yaml.safe_dump(value, sort_keys=False, allow_unicode=True, default_flow_style=None, width=110)
    except RecursionError:
        raise ValueError("values are nested too deeply to be shown; restore the file from a copy") from None


def what_ran(record: Mapping[str, Any], more: Mapping[str, str] | None = None) -> list[Block]:
    """Return the blocks "What was run": command, ``more``, and machine with versions, if ``record`` has them."""
    facts = {"command": str(record["command"])} if record.get("command") else {}
    facts |= more or {}
    facts |= {
        name.removesuffix("_bytes").replace("_", " "): _in_words(name, value)
        for name, value in (record.get("machine") or {}).items()
    }
    return [Text("What was run", heading=True), Facts(facts)] if facts else []


def loss_unit(train: Mapping[str, Any] | None) -> str:
    """Return the unit of losses under training settings: nats per byte if tokens are bytes, else per token."""
    data = (train or {}).get("data") or {}
    return f"nats per {'byte' if data.get('tokenizer') == 'bytes' else 'token'}"


def about(record: Mapping[str, Any], *words: str | None) -> str:
    """Return the line under a page's title: ``words`` and the date of ``record``, if known."""
    return " · ".join(map(str, filter(None, [*words, record.get("date")])))


def _in_words(name: str, value: Any) -> str:
    """Return a value as text: in GiB if its name ends with "bytes", lists with commas."""
    if name.endswith("bytes") and isinstance(value, int | float):
        return gib(value)
    return ", ".join(map(str, value)) or "none" if isinstance(value, list) else str(value)
