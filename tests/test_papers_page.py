"""docs/papers.md names nothing that is not there, and every row of it has a test or a reason."""

import functools
import importlib
import inspect
import re
from pathlib import Path

import pytest

from relinear.testing.conformance import OperatorConformance

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "papers.md").read_text(encoding="utf-8")
NAMES = sorted(set(re.findall(r"`([^`\s]+)`", PAGE)))
CODE = [name for name in NAMES if name.startswith(("relinear.", "cgt_study."))]
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


def tables() -> list[list[str]]:
    """The rows of all tables, heads and rules left out, as cells."""
    rows = []
    for block in re.findall(r"(?:^\|.*\n)+", PAGE, flags=re.M):
        lines = block.strip().splitlines()[2:]
        rows += [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    return rows


def test_all_five_papers_are_there() -> None:
    assert re.findall(r"^## (.+)$", PAGE, flags=re.M) == ["CGT", "Rotor", "HDPL", "Transponder", "CCL"]


def test_every_row_has_a_test_or_a_reason() -> None:
    assert len(tables()) > 100
    for row in tables():
        paper, here, checked, differs = row
        assert paper
        assert here or differs, f"neither a place nor a reason: {paper}"
        assert "test_" in checked or differs, f"neither a test nor a reason: {paper}"


#: how many of each kind a paper numbers; the rotor paper's summary numbers its lemma and algorithms alone
NUMBERED = {
    "CGT": {"Eq.": 10, "Figure": 20, "Table": 1},
    "Rotor": {"Lemma": 1, "Algorithm": 2},
    "HDPL": {"Eq.": 14, "Figure": 2, "Table": 2, "Algorithm": 1},
    "Transponder": {"Eq.": 10, "Figure": 3, "Table": 7},
    "CCL": {"Eq.": 5, "Figure": 7, "Table": 4},
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
def test_whatever_a_paper_numbers_has_a_row(paper: str) -> None:
    (section,) = re.findall(rf"^## {paper}$(.*?)(?=^## |\Z)", PAGE, flags=re.M | re.S)
    first_cells = "\n".join(re.split(r"(?<!\\)\|", line)[1] for line in section.splitlines() if line.startswith("|"))
    for kind, count in NUMBERED[paper].items():
        assert set(range(1, count + 1)) <= numbers(kind, first_cells), kind


def test_numbers_are_read_from_lists_and_ranges() -> None:
    assert numbers("Eq.", "Eq. 1 to 3, 7 and 9; Eq. 12") == {1, 2, 3, 7, 9, 12}
    assert numbers("Figure", "Figures 6c, 15 and 16, Figure 3b, Table 9") == {3, 6, 15, 16}
