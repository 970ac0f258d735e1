"""``python docs/make/lengths.py``: how long every page is: words, words of the longest cell, pictures, and height.

``--before REVISION`` sets the same of an earlier revision beside it. ``--site DIR`` names the site that ``make docs``
built: every page of it is then measured as a phone and a desktop show it (with playwright, the extra ``browser``), and
the exit code is 1 if one is longer than 8,000 pixels on a phone, cut, or has a cell of more than 25 words. Code and
what is folded do not count as words, but for the last line.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
#: widths in pixels
PHONE, DESKTOP = 390, 1280
#: pixels of a page on a phone
LONGEST = 8_000
#: what is wider than its place, but for what is folded, and cells of too many words
_CUT = """() => [...document.querySelectorAll("article :is(table, img, svg, math, td)")].filter((e) => {
  const wide = e.getBoundingClientRect(), wrap = e.closest(".md-typeset__scrollwrap")
  const held = { math: e.parentElement }[e.tagName]
  if (e.tagName == "TD") return e.textContent.trim().split(/\\s+/).length > 25
  if (!wide.width || e.closest("details:not([open])")) return false
  return wide.right > innerWidth + 1 || (held && held.scrollWidth > held.clientWidth + 1)
    || (wrap && wrap.scrollWidth > wrap.clientWidth + 1)
}).map((e) => e.tagName.toLowerCase())"""


def pages() -> list[Path]:
    """Every page that is written for readers."""
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]


def measured(text: str, unfolded: bool = False) -> tuple[int, int, int]:
    """Return words, words of the longest cell of a table, and pictures; ``unfolded`` counts what is folded, too."""
    if unfolded:
        text = re.sub("</?(details|summary)[^>]*>", "", text)
    pictures = len(re.findall(r"!\[|<img ", text))
    text = re.sub(r"^```.*?^```$|^<details.*?^</details>$|<[^>]*>", "", text, flags=re.S | re.M)
    cells = [cell for line in text.splitlines() if line.startswith("|") for cell in line.strip("| ").split(" | ")]
    longest = max((len(cell.split()) for cell in cells), default=0)
    return len(text.split()), longest, pictures


def sentences(text: str) -> list[str]:
    """Return the sentences of the prose, folded or not; names of code in a row are one word."""
    text = re.sub(r"^```.*?^```$|<!--.*?-->|^\$\$.*?^$|<[^>]*>", "", text, flags=re.S | re.M)
    text = "\n".join("" if line.lstrip().startswith(("|", "#", "![")) else line for line in text.splitlines())
    text = re.sub(r"\]\([^)]*\)", "", re.sub(r"`[^`]*`(?:,? `[^`]*`)*", "NAME", text)).replace("[", "")
    parts = re.split(r"\n\s*\n|\n\s*[-*] |\n\s*\d+\. ", text)
    found = [one for part in parts for one in re.split(r"(?<=[.!?:])[*\"]*\s+(?=[*\"(]*[A-Z])", " ".join(part.split()))]
    return [one for one in found if one]


def heights(site: Path) -> Iterator[tuple[str, int, int, str]]:
    """Yield every page of a site with its heights in pixels on a phone and on a desktop, and what is cut on it."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        found = shutil.which("chromium") or shutil.which("google-chrome")
        browser = play.chromium.launch(executable_path=found, args=["--no-sandbox", "--disable-gpu"])
        shown = {width: browser.new_page(viewport={"width": width, "height": 900}) for width in (PHONE, DESKTOP)}
        for path in sorted(site.rglob("*.html")):
            tall, cut = [], []
            for width, page in shown.items():
                page.goto(path.resolve().as_uri())
                tall.append(page.evaluate("document.body.scrollHeight"))
                cut += [f"{what} at {width}" for what in page.evaluate(_CUT)]
            yield path.relative_to(site).as_posix(), *tall, "; ".join(cut)


def earlier(revision: str) -> dict[str, str]:
    """Return page -> text of every page of an earlier revision."""
    git = ["git", "-C", str(ROOT)]
    listed = subprocess.run(
        [*git, "ls-tree", "-r", "--name-only", revision], capture_output=True, text=True, check=True
    )
    names = [
        name
        for name in listed.stdout.splitlines()
        if re.fullmatch(r"(docs/.*|README|CONTRIBUTING|CHANGELOG)\.md", name)
    ]
    return {
        name: subprocess.run([*git, "show", f"{revision}:{name}"], capture_output=True, text=True, check=True).stdout
        for name in names
    }


def main(arguments: list[str]) -> int:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", metavar="REVISION")
    parser.add_argument("--site", type=Path)
    options = parser.parse_args(arguments)
    columns = [{path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in pages()}]
    if options.before:
        columns.insert(0, earlier(options.before))
    print("| page |" + " words | longest cell | pictures |" * len(columns))
    print("| --- |" + " ---: | ---: | ---: |" * len(columns))
    totals = [[0, 0, 0] for _ in columns]
    for name in sorted({name for texts in columns for name in texts}):
        cells = []
        for texts, total in zip(columns, totals, strict=True):
            numbers = measured(texts[name]) if name in texts else None
            cells += ["", "", ""] if numbers is None else [f"{number:,}" for number in numbers]
            if numbers is not None:
                total[:] = [total[0] + numbers[0], max(total[1], numbers[1]), total[2] + numbers[2]]
        print(f"| {name} | {' | '.join(cells)} |")
    print(f"| all | {' | '.join(f'{number:,}' for total in totals for number in total)} |")
    whole = [sum(measured(text, unfolded=True)[0] for text in texts.values()) for texts in columns]
    print(f"| all, with what is folded | {' | '.join(f'{words:,} |  | ' for words in whole)}|")
    if options.site is None:
        return 0
    print(f"\n| page of the site | {PHONE} px | {DESKTOP} px | cut |\n| --- | ---: | ---: | --- |")
    rows = list(heights(options.site))
    for name, phone, desktop, cut in sorted(rows, key=lambda row: -row[1]):
        print(f"| {name} | {phone:,} | {desktop:,} | {cut} |")
    return int(any(phone > LONGEST or cut for _, phone, _, cut in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
