"""Rows of docs/papers.md name tests that see a mutant of what they are about (``python -m tests.mutants``)."""

import subprocess
import sys

import pytest

import mutants
from conftest import REPOSITORY


@pytest.mark.parametrize("mutant", mutants.MUTANTS, ids=lambda mutant: mutant.row)
def test_a_mutant_is_of_one_place_and_its_row_names_its_test(mutant):
    assert (REPOSITORY / mutant.file).read_text(encoding="utf-8").count(mutant.was) == 1
    assert mutant.was != mutant.now
    assert any(cell.startswith(mutant.row) and mutant.test in tests for cell, tests in mutants.rows())


def test_rows_without_a_mutant_are_listed():
    assert [cell for cell in mutants.uncovered() if not cell.startswith(mutants.WITHOUT)] == []
    assert all(any(cell.startswith(row) for cell in mutants.uncovered()) for row in mutants.WITHOUT)


def test_what_a_mutant_changes_is_seen_or_not(tmp_path, monkeypatch):
    (tmp_path / "tests").mkdir()
    (tmp_path / "code.py").write_text("def double(x):\n    return 2 * x\n")
    (tmp_path / "tests" / "test_code.py").write_text(
        "import sys\nsys.path.insert(0, '.')\n"
        "def test_value():\n    from code_ import double\n    assert double(2) == 4\n".replace("code_", "doubled")
    )
    (tmp_path / "code.py").rename(tmp_path / "doubled.py")

    def survives(now):
        asked = (
            "import sys; from pathlib import Path; sys.path.insert(0, sys.argv[1]); import mutants;"
            "found = mutants.Mutant('', 'doubled.py', '2 * x', sys.argv[3], 'test_code::test_value');"
            "sys.exit(10 + mutants.survives(Path(sys.argv[2]), found))"
        )
        told = [sys.executable, "-c", asked, str(REPOSITORY / "tests"), str(tmp_path), now]
        return subprocess.run(told, check=False).returncode - 10

    assert survives("3 * x") == 0
    assert survives("x + x") == 1


@pytest.mark.slow
def test_no_mutant_survives():
    told = [sys.executable, "-m", "tests.mutants"]
    done = subprocess.run(told, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
