"""Sections -> one page that holds everything inline: it opens from a file, without a network, and can be mailed."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
from collections.abc import Sequence
from pathlib import Path

from relinear.pages.blocks import Block, Chart, Part, Picture, Section, Text, as_yaml
from relinear.system.files import write_text

__all__ = ["LIMIT", "WITHOUT_PLOTLY", "can_be_hovered", "render", "write_page"]

TEMPLATE = "pages/base.html"
#: bytes of a page; pictures beyond are left out, and the page says so
LIMIT = 10_000_000
WITHOUT_PLOTLY = "Figures are still pictures: plotly is not installed (pip install 'relinear[report]' makes them live)."


def can_be_hovered() -> bool:
    """Whether figures can be live: plotly is there, whose script goes into the page."""
    return importlib.util.find_spec("plotly") is not None


def _script() -> str:
    from plotly.offline import get_plotlyjs

    return get_plotlyjs()


def write_page(path: str | Path, sections: Sequence[Section]) -> Path:
    """Write the page on ``sections`` and return its path. Raises as ``render``, and OSError."""
    write_text(path, render(sections))
    return Path(path)


def render(sections: Sequence[Section]) -> str:
    """The page as text, in at most ``LIMIT`` bytes where leaving pictures out suffices for that."""
    import jinja2
    from markupsafe import Markup

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("relinear", ""),
        autoescape=True,  # names, paths and what models generate are anybody's text
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"as_yaml": as_yaml, "perplexity_of": _perplexity}
    charts = [chart for section in sections for block in section.blocks for chart in _charts(block)]
    script = _script() if charts and can_be_hovered() else ""
    room = LIMIT - len(script.encode()) - 1_000_000
    notes = [WITHOUT_PLOTLY] if charts and not script else []
    return environment.get_template(TEMPLATE).render(
        sections=_fitted(sections, room),
        notes=notes,
        script=Markup(script),  # not escaped: it is plotly's own
        live=bool(script),
    )


def _charts(block: Block) -> list[Chart]:
    """Figures of a block that can be live."""
    inner = block.values.values() if isinstance(block, Part) else [block]
    return [chart for chart in inner if isinstance(chart, Chart) and chart.figure is not None]


def _perplexity(loss: float) -> str:
    return f"{math.exp(loss):,.2f}" if loss < 20 else "–"


def _fitted(sections: Sequence[Section], room: int) -> list[Section]:
    """The sections with pictures as long as there is room for them."""
    fitted = []
    for section in sections:
        blocks = []
        for block in section.blocks:
            if isinstance(block, Chart | Picture) and block.image is not None:
                room -= len(block.image)
                if room < 0 and isinstance(block, Chart) and block.figure is not None:
                    block = dataclasses.replace(block, image=None)
                elif room < 0:
                    block = Text(f"Left out, for the page would be too large: {block.description}", soft=True)
            blocks.append(block)
        fitted.append(dataclasses.replace(section, blocks=blocks))
    return fitted
