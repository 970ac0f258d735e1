"""The generated parts of the docs are what results/ and the settings' docstrings make of them."""

import dataclasses
import re
import subprocess
import sys

import pytest

from conftest import REPOSITORY
from relinear.core.operator import OperatorConfig

OPERATORS = sorted((REPOSITORY / "docs" / "operators").glob("*.md"))
CLAIMS = REPOSITORY / "docs" / "claims.md"


def test_generated_parts_are_up_to_date() -> None:
    done = subprocess.run(
        [sys.executable, str(REPOSITORY / "docs" / "make"), "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("page", OPERATORS, ids=lambda page: page.stem)
def test_a_page_has_its_parts(page) -> None:
    """Idea, formula, picture, measurements, settings with every field."""
    text = page.read_text(encoding="utf-8")
    assert "$$" in text
    assert f"]({page.stem}.svg)" in text
    assert (page.with_suffix(".svg")).stat().st_size < 20_000
    idea = re.sub(r"\s+", " ", text.split("\n\n")[1])
    assert 4 <= len(re.findall(r"[.?)](?: |$)", idea)) <= 9, "the idea in about five sentences"
    for part in ("measured", "settings"):
        inside = re.search(rf"<!-- generated: {part} -->(.*)<!-- end of {part} -->", text, flags=re.S)
        assert inside is not None, f"no part {part}"
        assert "| --- |" in inside[1]
    for field in dataclasses.fields(OperatorConfig.kinds()[page.stem]):
        assert f"| `{field.name}` |" in text


def test_every_claim_has_a_verdict_and_every_verdict_a_meaning() -> None:
    text = CLAIMS.read_text(encoding="utf-8")
    meanings = set(re.findall(r"^\| \*\*(.+?)\*\* \| \d+ \|", text, flags=re.M))
    rows = [line.split(" | ") for line in text.splitlines() if line.count(" | ") == 4 and " | **" in line]
    assert len(rows) > 50
    assert {row[2].strip("*") for row in rows} <= meanings
    assert all(row[3].strip() for row in rows)
    for paper in ("HDPL", "CCL", "Transponder", "CGT", "Rotor"):
        assert f"\n## {paper}" in text


def test_runs_of_claims_are_listed() -> None:
    for section in CLAIMS.read_text(encoding="utf-8").split("\n## ")[1:]:
        named = {
            letter
            for line in re.findall(r"\| ([A-Z](?:, [A-Z])*) \|$", section, flags=re.M)
            for letter in line.split(", ")
        }
        assert named <= set(re.findall(r"^\| ([A-Z]) \| `", section, flags=re.M))
