"""Sections -> one page that holds everything inline: it opens from a file, without a network, and can be mailed."""

import contextlib
import math
import os
import re
from collections.abc import Sequence
from pathlib import Path

from markupsafe import Markup, escape

from relinear.pages.blocks import Section
from relinear.pages.figures import described
from relinear.pages.records import as_yaml
from relinear.system.files import read_text, write_text
from relinear.system.run_folder import set_aside

TEMPLATE = "pages/base.html"
#: by which a page of relinear's is known
GENERATOR = '<meta name="generator" content="relinear">'


def write_page(path: str | Path, sections: Sequence[Section]) -> Path:
    """Write the page on ``sections`` and return its path. Raises as ``render``, and OSError."""
    return write_html(path, render(sections))


def write_html(path: str | Path, page: str) -> Path:
    """Write a page and return its path; a file there that is not a page of relinear's is renamed. Raises OSError."""
    if not _is_page(Path(path)):
        set_aside(Path(path))
    write_text(path, page)
    return Path(path)


def check_page(path: str | Path, overwrite: bool = False) -> None:
    """Raise ValueError if ``path`` is a file that relinear's page would rename, unless that is asked for."""
    if not overwrite and os.path.lexists(path) and not _is_page(Path(path)):
        raise ValueError(f"{path} is not a page of relinear's; give another path, or --overwrite, which renames it")


def _is_page(path: Path) -> bool:
    with contextlib.suppress(ValueError, OSError):
        return path.is_file() and GENERATOR in read_text(path, 2_000)
    return False


def render(sections: Sequence[Section]) -> str:
    """Return the page as text."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("relinear", ""),
        autoescape=True,  # names, paths and what models generate are anybody's text
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "as_yaml": as_yaml,
        "perplexity_of": _perplexity,
        "breakable": _breakable,
        "described": described,
    }
    return environment.get_template(TEMPLATE).render(sections=sections)


def _breakable(text: str) -> Markup:
    """Return a name with line breaks allowed between its parts."""
    parts = re.split(r"(?<=[._,:/])(?=\S)", text)
    return Markup("<wbr>").join(map(escape, parts))


def _perplexity(loss: float) -> str:
    return f"{math.exp(loss):,.2f}" if loss < 20 else "–"
