"""``python docs/make/lengths.py``: how long every page is: words, words of the longest cell, pictures, and height.

``--site DIR`` names the site that ``make docs`` built, whose pages are then measured as a phone and a desktop show them
(with playwright, the extra ``browser``). Code and what is folded do not count as words.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
#: widths in pixels
PHONE, DESKTOP = 390, 1280


def pages() -> list[Path]:
    """Every page that is written for readers."""
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]


def measured(text: str) -> tuple[int, int, int]:
    """Return words, words of the longest cell of a table, and pictures."""
    pictures = len(re.findall(r"!\[|<img ", text))
    text = re.sub(r"^```.*?^```$|^<details.*?^</details>$|<[^>]*>", "", text, flags=re.S | re.M)
    cells = [cell for line in text.splitlines() if line.startswith("|") for cell in line.strip("| ").split(" | ")]
    longest = max((len(cell.split()) for cell in cells), default=0)
    return len(text.split()), longest, pictures


def heights(site: Path, names: list[str]) -> Iterator[tuple[str, str]]:
    """Yield the heights of pages in pixels on a phone and on a desktop; with "cut" where they are wider than it."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        browser = play.chromium.launch(args=["--no-sandbox"])
        shown = {width: browser.new_page(viewport={"width": width, "height": 900}) for width in (PHONE, DESKTOP)}
        for name in names:
            found = []
            for width, page in shown.items():
                page.goto((site / name).resolve().as_uri())
                height, wide = page.evaluate("[document.body.scrollHeight, document.documentElement.scrollWidth]")
                found.append(f"{height:,}{' cut' * (wide > width)}")
            yield found[0], found[1]


def main(arguments: list[str]) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--site", type=Path)
    site = parser.parse_args(arguments).site
    names = [path.relative_to(ROOT).as_posix() for path in pages()]
    places = ["index.html" if n == "README.md" else n.removeprefix("docs/").replace(".md", ".html") for n in names]
    tall = list(heights(site, places)) if site else [("", "")] * len(names)
    print(f"{'page':36} {'words':>6} {'cell':>5} {'pictures':>8} {PHONE:>9} {DESKTOP:>9}")
    totals = [0, 0, 0]
    for name, path, (phone, desktop) in zip(names, pages(), tall, strict=True):
        words, cell, pictures = measured(path.read_text(encoding="utf-8"))
        totals = [totals[0] + words, max(totals[1], cell), totals[2] + pictures]
        print(f"{name:36} {words:6,} {cell:5} {pictures:8} {phone:>9} {desktop:>9}")
    print(f"{'all':36} {totals[0]:6,} {totals[1]:5} {totals[2]:8}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
