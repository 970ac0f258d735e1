"""What analyses have left in a directory -> blocks of a page, each with a sentence on how to read it."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from relinear.analysis.analyses import ANALYSES
from relinear.pages.blocks import Block, Listing, Picture, Section, Text, picture_of

__all__ = ["analyses_blocks", "analyses_section"]

# where ``relinear analyze --out`` is pointed to for a run, or for the models of a comparison
_PLACES = (".", "analysis", "analysis/*", "runs/*/*/analysis")


def analyses_blocks(directory: Path) -> list[Block]:
    """The analyses in ``directory`` and beside the runs in it; none where there are none."""
    blocks: list[Block] = []
    for pattern in _PLACES:
        for folder in [directory] if pattern == "." else sorted(directory.glob(pattern)):
            for name in ANALYSES:
                if (folder / f"{name}.json").is_file():
                    blocks += _analysis(folder, name, folder.relative_to(directory).as_posix())
    return blocks


def analyses_section(directory: Path) -> Section:
    """What a page says of a directory of analyses alone."""
    return Section(f"Analyses in {directory.resolve().name}", "analyze", analyses_blocks(directory))


def _analysis(folder: Path, name: str, place: str) -> Sequence[Block]:
    title = name.replace("_", " ")
    where = "" if place in (".", "analysis") else f", {place}"
    blocks: list[Block] = [Text(f"Analysis: {title}{where}", heading=True)]
    blocks.append(Text(import_module(f"relinear.analysis.{name}").HOW_TO_READ))
    for stem in sorted({path.stem for path in folder.glob(f"{name}*.*") if path.suffix in (".png", ".svg")}):
        image = picture_of(folder / stem)
        if image is not None:
            blocks.append(Picture(stem.replace("_", " "), image))
    text = (folder / f"{name}.json").read_text(encoding="utf-8")
    if len(text) <= _LARGEST_LISTING:
        blocks.append(Listing(f"{title}: numbers", text))
    return blocks


#: characters of numbers that are shown; what is longer is in its file
_LARGEST_LISTING = 20_000
