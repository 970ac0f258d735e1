"""Render sections into one self-contained HTML page, which opens offline and can be mailed."""

import contextlib
import dataclasses
import functools
import json
import math
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup, escape

from relinear.pages.blocks import Block, Chart, Section, Text
from relinear.pages.figures import described
from relinear.pages.records import as_yaml
from relinear.system.files import read_text, write_text
from relinear.system.run_folder import set_aside

TEMPLATE = "pages/base.html"
#: identifies pages that relinear wrote
GENERATOR = '<meta name="generator" content="relinear">'
#: bytes of a page; further figures are omitted, and the page says so
LIMIT = 1_000_000
_TEXTS = 200_000  # bytes of the limit reserved for tables, texts and the page's script


def write_page(path: str | Path, sections: Sequence[Section]) -> Path:
    """Write the page of ``sections`` and return its path. Raises OSError, and what ``render`` raises."""
    return write_html(path, render(sections))


def write_html(path: str | Path, page: str) -> Path:
    """Write a page and return its path; another program's file there is renamed. Raises OSError."""
    if not _is_page(Path(path)):
        set_aside(Path(path))
    write_text(path, page)
    return Path(path)


def check_page(path: str | Path, overwrite: bool = False) -> None:
    """Raise ValueError if ``path`` is a file that is not a page of relinear's, unless ``overwrite``."""
    if not overwrite and os.path.lexists(path) and not _is_page(Path(path)):
        raise ValueError(f"{path} is not a page of relinear's; choose another path, or --overwrite, which renames it")


def _is_page(path: Path) -> bool:
    with contextlib.suppress(ValueError, OSError):
        return path.is_file() and GENERATOR in read_text(path, 2_000)
    return False


def render(sections: Sequence[Section]) -> str:
    """Return the page as text; figures are omitted if it would have more than ``LIMIT`` bytes."""
    template = _environment().get_template(TEMPLATE)
    return template.render(sections=_within_limit(sections, LIMIT - _TEXTS))


@functools.cache  # templates are compiled once a process
def _environment() -> Any:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("relinear", ""),
        autoescape=True,  # names, paths and generated text are untrusted
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "as_yaml": as_yaml,
        "perplexity_text": _perplexity_text,
        "breakable": _breakable,
        "described": described,
    }
    return environment


def _breakable(text: str) -> Markup:
    """Return a name with line breaks allowed between its parts."""
    parts = re.split(r"(?<=[._,:/])(?=\S)", text)
    return Markup("<wbr>").join(map(escape, parts))


def _perplexity_text(loss: float) -> str:
    return f"{math.exp(loss):,.2f}" if loss < 20 else "–"


def _within_limit(sections: Sequence[Section], room: int) -> list[Section]:
    """Put a remark in the place of charts that exceed ``room`` bytes together."""
    limited = []
    for section in sections:
        blocks: list[Block] = []
        for block in section.blocks:
            if isinstance(block, Chart):
                size = len(escape(json.dumps(described(block.panel))))
                if size > room:
                    block = Text(f"Omitted to limit the size of the page: {block.description}", soft=True)
                else:
                    room -= size
            blocks.append(block)
        limited.append(dataclasses.replace(section, blocks=blocks))
    return limited
