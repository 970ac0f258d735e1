"""Sections -> one page that holds everything inline: it opens from a file, without a network, and can be mailed."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from relinear.pages.blocks import Block, Chart, Part, Section, Text, as_yaml
from relinear.system.files import write_text
from relinear.system.written import check_page

if TYPE_CHECKING:
    from markupsafe import Markup

TEMPLATE = "pages/base.html"
#: bytes of a page; figures and pictures beyond are left out, and the page says so
LIMIT = 10_000_000
_TEXTS = 1_000_000  # of these for tables and texts
WITHOUT_PLOTLY = "Figures are still pictures: plotly is not installed (pip install 'relinear[report]' makes them live)."


def can_be_hovered() -> bool:
    """Return whether figures can be live: plotly is there, whose script goes into the page."""
    return importlib.util.find_spec("plotly") is not None


def _script() -> str:
    from plotly.offline import get_plotlyjs

    return get_plotlyjs()


def write_page(path: str | Path, sections: Sequence[Section]) -> Path:
    """Write the page on ``sections`` and return its path. Raises as ``render``, and OSError."""
    check_page(path)
    write_text(path, render(sections))
    return Path(path)


def render(sections: Sequence[Section]) -> str:
    """Return the page as text, in at most ``LIMIT`` bytes where leaving figures out suffices for that."""
    import jinja2
    from markupsafe import Markup

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("relinear", ""),
        autoescape=True,  # names, paths and what models generate are anybody's text
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"as_yaml": as_yaml, "perplexity_of": _perplexity, "breakable": _breakable}
    charts = [chart for section in sections for block in section.blocks for chart in _charts(block)]
    script = _script() if charts and can_be_hovered() else ""
    room = LIMIT - len(script.encode()) - _TEXTS
    notes = [WITHOUT_PLOTLY] if charts and not script else []
    return environment.get_template(TEMPLATE).render(
        sections=_fitted(sections, room, bool(script)),
        notes=notes,
        script=Markup(script),  # not escaped: it is plotly's own
        live=bool(script),
    )


def _charts(block: Block) -> list[Chart]:
    """Figures of a block that can be live."""
    inner = block.values.values() if isinstance(block, Part) else [block]
    return [chart for chart in inner if isinstance(chart, Chart) and chart.panel is not None]


def _breakable(text: str) -> Markup:
    """A name that may go on in the next line behind what joins its parts."""
    from markupsafe import Markup, escape

    parts = re.split(r"(?<=[._,:/])(?=\S)", text)
    return Markup("<wbr>").join(map(escape, parts))


def _perplexity(loss: float) -> str:
    return f"{math.exp(loss):,.2f}" if loss < 20 else "–"


def _fitted(sections: Sequence[Section], room: int, live: bool) -> list[Section]:
    """The sections with what there is room for: live figures first, then pictures, which are the same for no script."""
    lists = [list(section.blocks) for section in sections]
    for part, size_of in (("panel", _bytes_of_figure if live else lambda chart: 0), ("image", _bytes_of_image)):
        for blocks in lists:
            for place, block in enumerate(blocks):
                if isinstance(block, Chart) and (size := size_of(block)) <= room:
                    room -= size
                elif isinstance(block, Chart):
                    blocks[place] = dataclasses.replace(block, **{part: None})  # type: ignore[arg-type]
    for section, blocks in zip(sections, lists, strict=True):
        for place, (before, block) in enumerate(zip(section.blocks, blocks, strict=True)):
            if isinstance(before, Chart) and _shown(before, live) and not _shown(block, live):
                blocks[place] = Text(f"Left out, for the page would be too large: {before.description}", soft=True)
    return [dataclasses.replace(section, blocks=blocks) for section, blocks in zip(sections, lists, strict=True)]


def _bytes_of_figure(chart: Chart) -> int:
    from markupsafe import escape

    return 0 if chart.panel is None else len(escape(json.dumps(chart.figure)))


def _bytes_of_image(chart: Chart) -> int:
    return len(chart.image or "")


def _shown(block: Block, live: bool) -> bool:
    """Whether a block is a figure that the page shows."""
    return isinstance(block, Chart) and (block.image is not None or (live and block.panel is not None))
