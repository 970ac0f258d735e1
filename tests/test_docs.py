"""The examples of the docs run, every operator has its page, and CONTRIBUTING's operator passes the suite."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cases import CASES

ROOT = Path(__file__).resolve().parents[1]
PAGES = [
    *sorted((ROOT / "docs" / "operators").glob("*.md")),
    *(ROOT / "docs" / f"{p}.md" for p in ("latents", "outside", "residual")),
]


def blocks(path: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", path.read_text(encoding="utf-8"), flags=re.S | re.M)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_examples_run(page: Path, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    examples = blocks(page)
    assert examples, f"{page.name} has no example"
    namespace: dict = {}
    for example in examples:
        exec(compile(example, str(page), "exec"), namespace)


@pytest.mark.parametrize("kind", sorted({case.config.kind for case in CASES}))
def test_every_operator_has_a_page(kind: str) -> None:
    assert (ROOT / "docs" / "operators" / f"{kind}.md").is_file()


@pytest.mark.slow
def test_contributing_adds_an_operator_in_two_files(tmp_path) -> None:
    maths, operator, line, row = blocks(ROOT / "CONTRIBUTING.md")
    for folder in ("src", "tests"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    package = tmp_path / "src" / "relinear"
    (package / "functional" / "shift_scale.py").write_text(maths)
    (package / "operators" / "shift_scale.py").write_text(operator)
    for file, before, added in (
        (package / "operators" / "__init__.py", "\n__all__", line),
        (tmp_path / "tests" / "cases.py", "    Case(config=relinear.LowRank", f"    {row}"),
    ):
        text = file.read_text()
        assert before in text
        file.write_text(text.replace(before, added + before, 1))
    command = [sys.executable, "-m", "pytest", "tests/test_conformance.py", "tests/test_rooms.py"]
    done = subprocess.run(
        [*command, "-k", "shift_scale or every_operator or name_of_its_files", "-p", "no:cacheprovider"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path / "src")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) > 20
    check = subprocess.run(
        [sys.executable, "-m", "ruff", "check", "src/relinear/operators/shift_scale.py"], cwd=tmp_path, check=False
    )
    assert check.returncode == 0
