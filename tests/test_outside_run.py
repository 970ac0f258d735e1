"""How `make outside` judges what other people's suites said: against the stock model, and against its list."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from outside import run
from outside.families import FAMILIES

LISTED = "test_model_weights_reload_no_missing_tied_weights"


def outcomes(**by_test: str) -> dict:
    return {test: {"outcome": outcome, "seconds": 0.0, "said": ""} for test, outcome in by_test.items()}


@pytest.mark.parametrize(
    ("stock", "found", "wrong"),
    [
        ({"test_a": "passed", LISTED: "passed"}, {"test_a": "passed", LISTED: "failed"}, []),
        ({"test_a": "failed"}, {"test_a": "failed"}, []),
        ({"test_a": "passed"}, {"test_a": "failed"}, ["low_rank: test_a fails"]),
        ({LISTED: "passed"}, {LISTED: "passed"}, [f"low_rank: {LISTED} is expected to fail and passed"]),
        ({LISTED: "passed"}, {LISTED: "skipped"}, [f"low_rank: {LISTED} is expected to fail and skipped"]),
    ],
)
def test_a_failure_is_held_against_the_stock_model_and_the_list(stock, found, wrong) -> None:
    given = {"llama": outcomes(**stock)}, {"low_rank": outcomes(**found)}, {"low_rank": "llama"}
    (row,), said = run.judge(*given)
    assert row["run"] == sum(outcome != "skipped" for outcome in found.values())
    assert len(said) == len(wrong)
    assert all(line.startswith(start) for line, start in zip(said, wrong, strict=True))


def test_the_list_names_families_and_gives_each_three_reasons_at_most() -> None:
    entries = run.expected()
    assert all(entry["reason"] and entry["tests"] for entry in entries)
    counts = Counter(family for entry in entries for family in entry["families"])
    assert counts.keys() <= FAMILIES.keys()
    assert max(counts.values()) <= 3


def test_a_test_of_peft_goes_by_the_family_of_its_checkpoint(tmp_path: Path) -> None:
    node = f"outside/lora.py::TestLora::test_generate[LoraConfig-config_kwargs0-{tmp_path}/low_rank]"
    assert run._named(node, tmp_path) == ("low_rank", "lora::test_generate[LoraConfig-config_kwargs0-MODEL]")
