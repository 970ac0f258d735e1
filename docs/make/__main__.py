"""``python docs/make``: every generated part of the docs, anew; ``--check`` only says what is not up to date.

A page holds its generated parts between ``<!-- generated: NAME -->`` and ``<!-- end of NAME -->``; what stands around
them is written by hand, as in results/speed/README.md. The page of claims is generated as a whole.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

import biased
import budgets
import claims
import curves
import cut
import effects
import evidence
import forest
import frontier
import gpu_tables as gpu
import guides
import measured
import pictures
import speed
from settings import settings_table

DOCS = Path(__file__).resolve().parents[1]


def measured_of(kind: str) -> str:
    """What was measured of an operator: its figure, and folded the tables behind it, as far as results/ has them."""
    parts = [effects.in_page(kind)] if kind in effects.FIGURES else []
    if kind in effects.LOSSES:
        names, reference, entries = effects.LOSSES[kind]
        folder = names[0].split("/")[0]
        told = "Trained from scratch at tuned learning rates, nats a token:"
        what = f"Budget, command and what it does not show: [{folder}](../../results/{folder}/README.md)."
        inside = [told, measured.losses_table(names, entries, reference), what]
        parts.append(measured.folded("Table of losses and gaps", "\n\n".join(inside)))
    if kind in effects.FITS:
        parts.append(measured.folded("Table of fits to SmolLM2", measured.fits_table(effects.FITS[kind])))
    if kind == "pivoted_low_rank":
        parts.append(measured.folded("Table of losses on three texts", measured.compression_table()))
    if kind == "quantized":
        how = "[how](../../results/compress/README.md)"
        told = f"SmolLM2 turned off its file's 4-bit grid, nats above the original ({how}):"
        parts.append(measured.folded("Table of losses on two texts", f"{told}\n\n{frontier.turned_table()}"))
    if measured.timed(kind)[1]:
        summary = f"Table of times relative to dense: {measured.faster(kind)}"
        parts.append(measured.folded(summary, measured.speed_table(kind)))
    return "\n\n".join(parts)


PARTS = {"measured": measured_of, "settings": settings_table}


def filled(text: str, parts: Mapping[str, Callable[[], str]], page: str) -> str:
    """A page with its generated parts anew. Raises ValueError for a part that does not end or that nothing makes."""

    def whole(found: re.Match[str]) -> str:
        name = found[1]
        if name not in parts:
            raise ValueError(f"nothing makes the part {name!r}; there are: {', '.join(parts)}")
        return f"<!-- generated: {name} -->\n\n{parts[name]()}\n\n<!-- end of {name} -->"

    marked = re.compile(r"<!-- generated: (\w+) -->\n.*?<!-- end of \1 -->", flags=re.S)
    if len(marked.findall(text)) != text.count("<!-- generated: "):
        raise ValueError(f"the page of {page} has a generated part without its end")
    return marked.sub(whole, text)


def pages() -> dict[Path, str]:
    """Every file with generated parts, and what it should hold."""
    found = {DOCS / name: text for name, text in claims.pages().items()}
    readme = DOCS.parent / "README.md"
    found[readme] = filled(readme.read_text(encoding="utf-8"), {"claims": claims.in_readme}, "README")
    page = measured.RESULTS / "README.md"
    found[page] = filled(page.read_text(encoding="utf-8"), {"gaps": evidence.in_results}, "results")
    for paper in ("", *(make().name for make in claims.PAPERS)):
        named = DOCS / "pictures" / forest.file_name(paper)
        found |= {Path(f"{named}-{theme}.svg"): forest.picture(theme, paper) for theme in forest.THEMES}
    for paper in budgets.PAPERS:
        found |= {DOCS / "pictures" / f"budgets-{paper}-{t}.svg": budgets.picture(t, paper) for t in forest.THEMES}
    found |= {DOCS / "pictures" / f"{kind}.svg": pictures.thumbnail(kind) for kind in pictures.PICTURES}
    found |= {DOCS / "pictures" / f"guide-{name}.svg": guides.picture(name) for name in guides.PICTURES}
    large = (DOCS / "large_models.md").read_text(encoding="utf-8")
    found[DOCS / "pictures" / "guide-large_models.svg"] = guides.large_models(large)
    for which in frontier.CHARTS:
        found |= {DOCS / "pictures" / f"{which}-{t}.svg": frontier.chart(t, which) for t in forest.THEMES}
    for which in frontier.EQUAL:
        found |= {DOCS / "pictures" / f"{which}-{t}.svg": frontier.equal_bytes(t, which) for t in forest.THEMES}
    of_page = {"frontier": frontier.frontier_table, **frontier.ROUNDED}
    for page in (DOCS / "compression_found.md", DOCS / "compress.md"):
        found[page] = filled(page.read_text(encoding="utf-8"), of_page, page.stem)
    made_of = (
        {"compress": of_page, "speed": speed.PARTS, "gpu": gpu.PARTS},
        *(cut.PARTS, curves.PARTS, biased.PARTS, evidence.PARTS),
    )
    for folder in sorted({folder for made in made_of for folder in made}):
        page = measured.RESULTS / folder / "README.md"
        parts = {name: make for made in made_of for name, make in made.get(folder, {}).items()}
        found[page] = filled(page.read_text(encoding="utf-8"), parts, folder)
    for page in sorted((DOCS / "operators").glob("*.md")):
        parts = {name: functools.partial(make, page.stem) for name, make in PARTS.items()}
        found[page] = filled(page.read_text(encoding="utf-8"), parts, page.stem)
        found[page.with_suffix(".svg")] = pictures.picture(page.stem)
    for kind in effects.FIGURES:
        named = DOCS / "pictures" / effects.file_name(kind)
        found |= {Path(f"{named}-{theme}.svg"): effects.picture(theme, kind) for theme in forest.THEMES}
    return found


def main(check: bool) -> int:
    """Write what has changed, or say it."""
    wanted = pages()
    stale = [path for path, text in wanted.items() if not path.is_file() or path.read_text(encoding="utf-8") != text]
    for path in stale:
        print(f"{'out of date' if check else 'written'}: {path.relative_to(DOCS.parent)}")
        if not check:
            path.write_text(wanted[path], encoding="utf-8")
    if check and stale:
        print("run `make docs-operators`")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv[1:]))
