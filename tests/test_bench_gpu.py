"""``make gpu`` without a GPU: what it says then, and its rehearsal."""

import json
import subprocess
import sys

import pytest
import torch

import gpu


def test_wrong_calls_are_refused_before_anything_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    out = tmp_path / "out"
    for settings, words in (
        ({}, "REHEARSE=1"),
        ({"minutes": 0}, "positive"),
        ({"parts": ["ccll"]}, "unknown part 'ccll'"),
    ):
        with pytest.raises(ValueError, match=words):
            gpu.run_parts(out, **settings)
    assert not out.exists()


def test_a_row_says_how_it_failed_and_the_rest_goes_on(tmp_path, monkeypatch):
    def rows(part, plan):
        yield gpu._measured({"what": "time"}, lambda: 1 / 0)
        yield gpu._measured({"what": "time"}, lambda: {"seconds": float("inf")})

    monkeypatch.setattr(gpu, "STAGES", {"time": rows})
    gpu._run_part("ccl", tmp_path, 60.0, gpu.Plan.rehearsal())
    found = json.loads((tmp_path / "ccl.json").read_text())
    assert found["state"] == "complete"
    first, second = found["rows"]
    assert first["error"].startswith("ZeroDivisionError")
    assert second["seconds"] == "inf"
    gpu._run_part("ccl", tmp_path, 0.0, gpu.Plan.rehearsal())
    cut = json.loads((tmp_path / "ccl.json").read_text())
    assert cut["state"] == "out of time"
    assert len(cut["rows"]) == 1


@pytest.mark.slow
@pytest.mark.timeout(1800)  # as long as the rehearsal itself may take
def test_the_rehearsal_has_every_row_and_no_error(tmp_path):
    pytest.importorskip("triton")
    # what `make gpu REHEARSE=1` runs
    command = [sys.executable, gpu.__file__, "--rehearse", "--minutes", "30", "--out", str(tmp_path)]
    subprocess.run(command, check=True)
    ended = json.loads((tmp_path / "run.json").read_text())["parts"]
    assert {part["state"] for part in ended.values()} == {"ended"}
    assert set(ended) == set(gpu.PARTS)
    for part in gpu.PARTS:
        found = json.loads((tmp_path / f"{part}.json").read_text())
        assert found["state"] == "complete"
        assert not [row for row in found["rows"] if "error" in row]
        assert all(row["right"] for row in found["rows"] if row["what"] == "check")
        kinds = (
            {"training"} if part in gpu.MODELS else {"check", "time"} | (set() if part in gpu.FIXED_TILES else {"tile"})
        )
        assert {row["what"] for row in found["rows"]} == kinds
