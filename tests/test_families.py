"""The table of model families: the page is what its record says, the record is what a run gives, faults are seen."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import families
import relinear
from families import FAILED, OK, OPERATORS, REFUSED

ROOT = Path(__file__).resolve().parents[1]
RECORD = json.loads((ROOT / "results" / "families.json").read_text(encoding="utf-8"))
WITHOUT_CONTEXT = [name for name, config in OPERATORS.items() if not hasattr(config, "context_dim")]


def statuses(record) -> dict[str, dict[str, str]]:
    return {family: {name: c["status"] for name, c in cells.items()} for family, cells in record["families"].items()}


def test_the_page_is_what_the_record_says() -> None:
    assert (ROOT / "docs" / "families.md").read_text(encoding="utf-8") == families.page(RECORD)


def test_the_record_is_whole() -> None:
    assert tuple(RECORD["families"]) == families.MADE
    assert all(list(cells) == list(OPERATORS) for cells in RECORD["families"].values())
    assert not families.failures(RECORD)
    run = [f for f, cells in statuses(RECORD).items() if all(cells[name] == OK for name in WITHOUT_CONTEXT)]
    assert len(run) >= 24
    refused = [c for cells in RECORD["families"].values() for c in cells.values() if c["status"] == REFUSED]
    assert all(cell["message"] for cell in refused)


def test_refusals_are_worded_as_the_record_says(tmp_path) -> None:
    for family, cells in RECORD["families"].items():
        for name, cell in cells.items():
            if cell["status"] == REFUSED:
                assert families._here(family, name, tmp_path)["message"] == cell["message"]


@pytest.mark.slow
def test_a_run_gives_what_the_record_says() -> None:
    chosen, operators = ["llama", "t5"], ["LowRank", "CCL"]
    live = families.run(chosen, operators)
    assert statuses(live) == {f: {name: statuses(RECORD)[f][name] for name in operators} for f in chosen}
    assert live["families"]["llama"]["CCL"]["logits_difference"] <= families.TOLERANCE
    assert "encoder-decoder" in live["families"]["t5"]["CCL"]["message"]


@pytest.mark.slow
def test_all_families_give_what_the_record_says(tmp_path) -> None:
    assert families.main(["--out", str(tmp_path / "page.md"), "--json", str(tmp_path / "record.json")]) == 0
    assert statuses(json.loads((tmp_path / "record.json").read_text())) == statuses(RECORD)


def test_a_fault_fails_the_command(tmp_path, monkeypatch) -> None:
    layer = type(relinear.LowRank(rank=2).build(4, 4))
    monkeypatch.setattr(layer, "forward", lambda self, x: x.new_full((*x.shape[:-1], self.out_features), torch.nan))
    page = tmp_path / "page.md"
    given = [
        "--out",
        str(page),
        "--json",
        str(tmp_path / "record.json"),
        "--families",
        "gpt2",
        "--operators",
        "LowRank",
    ]
    assert families.main(given) == 1
    assert "FAILED (1) |" in page.read_text()
    assert "forward: AssertionError: not finite: logits" in page.read_text()


def test_other_answers_elsewhere_fail(tmp_path) -> None:
    logits, tokens = torch.randn(2, 3), torch.arange(4)
    save_file({"logits": logits, "tokens": tokens}, tmp_path / "expected.safetensors")

    def outcome(**answer) -> tuple[str, str]:
        save_file({"logits": logits, "tokens": tokens} | answer, tmp_path / "answer.safetensors")
        cell = families._compare(tmp_path)
        return cell.get("status", OK), cell.get("step", "")

    assert outcome() == (OK, "")
    assert outcome(logits=logits + 1e-3) == (FAILED, "equal logits")
    assert outcome(logits=logits * torch.nan) == (FAILED, "equal logits")
    assert outcome(tokens=tokens + 1) == (FAILED, "generate elsewhere")
    (tmp_path / "error.txt").write_text("KeyError: x")
    assert outcome() == (FAILED, "load")


def test_unknown_names_are_refused_before_anything_runs() -> None:
    with pytest.raises(ValueError, match="unknown: lama; expected names of gpt2, llama"):
        families.run(["lama"])
