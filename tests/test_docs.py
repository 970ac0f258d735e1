"""The examples of the docs run, every operator has its page, and CONTRIBUTING's passes the suite from outside."""

import os
import re
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
def test_contributing_adds_an_operator_in_a_package_of_its_own(tmp_path) -> None:
    """Outside of the repository, with nothing of it but the package itself."""
    maths, operator, test = blocks(ROOT / "CONTRIBUTING.md")
    package = tmp_path / "my_operators"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "maths.py").write_text(maths)
    (package / "shift_scale.py").write_text(operator)
    (tmp_path / "test_shift_scale.py").write_text(test)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--strict-markers", "-p", "no:cacheprovider", "-k", "not inductor"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{tmp_path}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) > 20
    rules = ["--isolated", "--select", "E,F,I,B", "--line-length", "120"]
    check = subprocess.run([sys.executable, "-m", "ruff", "check", *rules, "."], cwd=tmp_path, check=False)
    assert check.returncode == 0
