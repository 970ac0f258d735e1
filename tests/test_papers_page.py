"""The papers, line by line: nothing is named that is not there, and every line has a test or a reason."""

import functools
import importlib
import inspect
import re
from pathlib import Path

import pytest
import yaml

from relinear.testing.conformance import OperatorConformance

ROOT = Path(__file__).resolve().parents[1]
PAPERS = {
    path.stem: yaml.safe_load(path.read_text(encoding="utf-8"))
    for path in (ROOT / "results/claims/lines").glob("*.yaml")
}
ROWS = {paper: [row for rows in parts.values() for row in rows] for paper, parts in PAPERS.items()}
PAGE = "\n".join(text for rows in ROWS.values() for row in rows for text in row.values())
NAMES = sorted(set(re.findall(r"`([^`\s]+)`", PAGE)))
CODE = [name for name in NAMES if name.startswith("relinear.")]
TESTS = [name for name in NAMES if re.match(r"(test_\w+::)?test_", name)]
FILES = [name for name in NAMES if re.match(r"(src|docs|examples|results|tests)/", name)]


@functools.cache
def defined(stem: str) -> set[str]:
    """The tests of a file, methods of classes among them, those of the conformance suite where it runs that."""
    text = (ROOT / "tests" / f"{stem}.py").read_text(encoding="utf-8")
    if "(OperatorConformance)" in text:
        text += inspect.getsource(OperatorConformance)
    return set(re.findall(r"^\s*def (test_\w+)\(", text, flags=re.M))


@pytest.mark.parametrize("name", CODE)
def test_the_place_in_the_code_is_there(name: str) -> None:
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        for attribute in parts[count:]:
            found = getattr(found, attribute)
        return
    raise AssertionError(name)


@pytest.mark.parametrize("name", TESTS)
def test_the_test_is_there(name: str) -> None:
    stem, separator, test = name.partition("::")
    assert separator, f"write the file too: file::{name}"
    assert test in defined(stem)


@pytest.mark.parametrize("name", FILES)
def test_the_file_is_there(name: str) -> None:
    assert (ROOT / name).exists()


def test_all_five_papers_are_there() -> None:
    assert set(PAPERS) == {"cgt", "rotor", "hdpl", "transponder", "ccl"}
    for paper, parts in PAPERS.items():
        page = (ROOT / "docs" / "claims" / f"{paper}.md").read_text(encoding="utf-8")
        assert all(f"<summary>{part}: {len(rows)} items</summary>" in page for part, rows in parts.items())


def test_every_line_has_a_test_or_a_reason() -> None:
    assert sum(map(len, ROWS.values())) > 100
    for rows in ROWS.values():
        for row in rows:
            assert "here" in row or "differs" in row, f"neither a place nor a reason: {row['paper']}"
            assert "test_" in row.get("checked", "") or "differs" in row, f"neither a test nor a reason: {row['paper']}"


#: how many of each kind a paper numbers; the rotor paper's summary numbers its lemma and algorithms alone
NUMBERED = {
    "cgt": {"Eq.": 10, "Figure": 20, "Table": 1},
    "rotor": {"Lemma": 1, "Algorithm": 2},
    "hdpl": {"Eq.": 14, "Figure": 2, "Table": 2, "Algorithm": 1},
    "transponder": {"Eq.": 10, "Figure": 3, "Table": 7},
    "ccl": {"Eq.": 5, "Figure": 7, "Table": 4},
}


def numbers(kind: str, text: str) -> set[int]:
    """Those that a text names: of "Eq. 1 to 3, 7" 1, 2, 3 and 7; "Figures 6c and 15" are 6 and 15."""
    named = set()
    item = r"\d+[a-z]?(?: to \d+)?"
    for found in re.findall(rf"{re.escape(kind)}s? ((?:{item})(?:(?:, | and )(?:{item}))*)", text):
        for first, last in re.findall(r"(\d+)[a-z]?(?: to (\d+))?", found):
            named |= set(range(int(first), int(last or first) + 1))
    return named


@pytest.mark.parametrize("paper", NUMBERED)
def test_whatever_a_paper_numbers_has_a_line(paper: str) -> None:
    first = "\n".join(row["paper"] for row in ROWS[paper])
    for kind, count in NUMBERED[paper].items():
        assert set(range(1, count + 1)) <= numbers(kind, first), kind


def test_numbers_are_read_from_lists_and_ranges() -> None:
    assert numbers("Eq.", "Eq. 1 to 3, 7 and 9; Eq. 12") == {1, 2, 3, 7, 9, 12}
    assert numbers("Figure", "Figures 6c, 15 and 16, Figure 3b, Table 9") == {3, 6, 15, 16}
