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
import claims
import curves
import cut
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
#: methods of results/rotor that an operator's page shows
_FITS = {
    "low_rank": ("low rank 1", "low rank 4"),
    "block_hadamard": ("block-Hadamard, 64 blocks",),
    "hdpl": ("HDPL, rank 8, 8 blocks",),
    "rotor": ("rotor, double", "rotor, single", "Lemma-1 terms, depth 0, 3 terms"),
}
#: files of one budget, their reference, and the entries that an operator's page shows
_LOSSES = {
    "ccl": (
        ("ccl/claims-1M/results.json",),
        "dense-equal-parameters",
        ("dense-64", "dense-second-embedding", "static", "ccl"),
    ),
    "transponder": (
        ("transponder/runs.json",),
        "dense",
        (
            "path_scalar",
            "path_channel",
            "layer_scalar",
            "layer_channel",
            "transponder",
            "dense_same_parameters",
            "dense_same_time",
        ),
    ),
    "output_gate": (("transponder/runs.json",), "dense", ("all_gate", "sdpa_gate_head", "transponder")),
}


def measured_of(kind: str) -> str:
    """What was measured of an operator: losses, fits, compression, time, as far as results/ has them."""
    parts = []
    if kind in _LOSSES:
        names, reference, entries = _LOSSES[kind]
        folder = names[0].split("/")[0]
        parts.append("Trained from scratch at tuned learning rates, nats a token:")
        parts.append(measured.losses_table(names, entries, reference))
        parts.append(f"Budget, command and what it does not show: [{folder}](../../results/{folder}/README.md).")
    if kind in _FITS:
        parts.append(measured.fits_table(_FITS[kind]))
    if kind == "pivoted_low_rank":
        parts.append(measured.compression_table())
    if kind == "quantized":
        how = "[how](../../results/compress/README.md)"
        parts.append(f"SmolLM2 turned off its file's 4-bit grid, nats above the original ({how}):")
        parts.append(frontier.turned_table())
    if measured.timed(kind)[1]:
        parts.append(measured.speed_table(kind))
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
    found |= {DOCS / "pictures" / f"{kind}.svg": pictures.thumbnail(kind) for kind in pictures.PICTURES}
    found |= {DOCS / "pictures" / f"guide-{name}.svg": guides.picture(name) for name in guides.PICTURES}
    large = (DOCS / "large_models.md").read_text(encoding="utf-8")
    found[DOCS / "pictures" / "guide-large_models.svg"] = guides.large_models(large)
    for which in frontier.CHARTS:
        found |= {DOCS / "pictures" / f"{which}-{t}.svg": frontier.chart(t, which) for t in forest.THEMES}
    for which in frontier.EQUAL:
        found |= {DOCS / "pictures" / f"{which}-{t}.svg": frontier.equal_bytes(t, which) for t in forest.THEMES}
    page = DOCS / "compress.md"
    of_page = {"frontier": frontier.frontier_table, **frontier.ROUNDED}
    found[page] = filled(page.read_text(encoding="utf-8"), of_page, "compression")
    made_of = (
        {"compress": {"frontier": frontier.frontier_table, **frontier.ROUNDED}, "speed": speed.PARTS, "gpu": gpu.PARTS},
        *(cut.PARTS, curves.PARTS, biased.PARTS),
    )
    for folder in sorted({folder for made in made_of for folder in made}):
        page = measured.RESULTS / folder / "README.md"
        parts = {name: make for made in made_of for name, make in made.get(folder, {}).items()}
        found[page] = filled(page.read_text(encoding="utf-8"), parts, folder)
    for page in sorted((DOCS / "operators").glob("*.md")):
        parts = {name: functools.partial(make, page.stem) for name, make in PARTS.items()}
        found[page] = filled(page.read_text(encoding="utf-8"), parts, page.stem)
        found[page.with_suffix(".svg")] = pictures.picture(page.stem)
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
