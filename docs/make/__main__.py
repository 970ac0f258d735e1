"""``python docs/make``: every generated part of the docs, anew; ``--check`` only says what is not up to date.

A page holds its generated parts between ``<!-- generated: NAME -->`` and ``<!-- end of NAME -->``; what stands around
them is written by hand. The pages of claims are generated as a whole. Records of finished studies do not change, so
that the tables beside them in results/ are plain text.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "results" / "distributed"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

import budgets
import claims
import effects
import equal_bytes
import evidence
import file_sizes
import forest
import large_models
import measured
from relinear.contract.operator import OperatorConfig
from settings import settings_table

DOCS = Path(__file__).resolve().parents[1]


def measured_of(kind: str) -> str:
    """What was measured of an operator: its figure, and folded the tables behind it, as far as results/ has them."""
    parts = [effects.in_page(kind)] if kind in effects.FIGURES else []
    if kind in effects.LOSSES:
        names, reference, entries = effects.LOSSES[kind]
        folder = names[0].split("/")[0]
        inside = [
            "Trained from scratch at tuned learning rates, nats per token:",
            measured.losses_table(names, entries, reference),
            f"Budget, command and what it does not show: [{folder}](../../results/{folder}/README.md).",
        ]
        parts.append(measured.folded("Table of losses and gaps", "\n\n".join(inside)))
    if kind in effects.FITS:
        parts.append(measured.folded("Table of fits to SmolLM2", measured.fits_table(effects.FITS[kind])))
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
    readme, results = DOCS.parent / "README.md", measured.RESULTS / "README.md"
    found[readme] = filled(readme.read_text(encoding="utf-8"), {"claims": claims.in_readme}, "README")
    found[results] = filled(results.read_text(encoding="utf-8"), {"gaps": evidence.in_results}, "results")
    structures = measured.RESULTS / "bytes" / "README.md"
    found[structures] = filled(structures.read_text(encoding="utf-8"), {"file_sizes": file_sizes.in_page}, "bytes")
    large = DOCS / "distributed.md"
    found[large] = filled(large.read_text(encoding="utf-8"), {"compressed": large_models.in_page}, "distributed")
    for theme in forest.THEMES:
        for paper in ("", *claims.PAPERS):
            found[DOCS / "pictures" / f"{forest.file_name(paper)}-{theme}.svg"] = forest.picture(theme, paper)
        for paper in budgets.PAPERS:
            found[DOCS / "pictures" / f"budgets-{paper}-{theme}.svg"] = budgets.picture(theme, paper)
        for name in equal_bytes.PICTURES:
            found[DOCS / "pictures" / f"{name}-{theme}.svg"] = equal_bytes.picture(theme, name)
        for name in file_sizes.PICTURES:
            found[DOCS / "pictures" / f"{name}-{theme}.svg"] = file_sizes.picture(theme, name)
        for kind in effects.FIGURES:
            found[DOCS / "pictures" / f"{effects.file_name(kind)}-{theme}.svg"] = effects.picture(theme, kind)
    for page in sorted((DOCS / "operators").glob("*.md")):
        parts = {name: functools.partial(make, page.stem) for name, make in PARTS.items()}
        # a page may hold a second operator, whose parts are called after it
        parts |= {
            f"{name}_{kind}": functools.partial(make, kind)
            for name, make in PARTS.items()
            for kind in OperatorConfig.kinds()
        }
        found[page] = filled(page.read_text(encoding="utf-8"), parts, page.stem)
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
