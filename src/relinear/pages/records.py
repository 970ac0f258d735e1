"""Read the records of commands and describe them for pages: pictures, settings, and how a result was made."""

import base64
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from relinear.pages.blocks import Block, Facts, Text
from relinear.system.files import read_json

#: of a picture with a larger SVG the PNG is embedded, if there is one
_LARGEST_SVG = 400_000


def picture_of(stem: str | Path) -> str | None:
    """Return STEM.svg, or if it is large or missing STEM.png, as a data URI; None if there is neither."""
    svg, png = Path(f"{stem}.svg"), Path(f"{stem}.png")
    if svg.is_file() and (svg.stat().st_size <= _LARGEST_SVG or not png.is_file()):
        return f"data:image/svg+xml;base64,{base64.b64encode(svg.read_bytes()).decode('ascii')}"
    if png.is_file():
        return f"data:image/png;base64,{base64.b64encode(png.read_bytes()).decode('ascii')}"
    return None


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
        name.removesuffix("_bytes").replace("_", " "): in_words(name, value)
        for name, value in (record.get("machine") or {}).items()
    }
    return [Text("What was run", heading=True), Facts(facts)] if facts else []


def about(record: Mapping[str, Any], *words: str | None) -> str:
    """Return the line under a page's title: ``words`` and the date of ``record``, if known."""
    return " · ".join(map(str, filter(None, [*words, record.get("date")])))


def in_words(name: str, value: Any) -> str:
    """Return a value as text: in GiB if its name ends with "bytes", lists with commas."""
    if name.endswith("bytes") and isinstance(value, int | float):
        return f"{value / 2**30:.2f} GiB"
    return ", ".join(map(str, value)) or "none" if isinstance(value, list) else str(value)
