"""The benchmark of layers: what is timed is right first, and one contender that fails does not cost the others."""

import dataclasses
import json
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import relinear
from relinear.bench.operators import Case, bench_case
from relinear.bench.report import _layers
from relinear.bench.run import BenchSettings, merge_runs, slower
from relinear.contract.operator import OperatorConfig
from relinear_cli.main import main

CASE = Case(in_features=32, out_features=86, tokens=5, dtype=torch.float32, mode="eager", phase="step")


def test_contenders_that_are_wrong_are_reported_and_the_others_timed():
    class Random(nn.Linear):
        def forward(self, x):
            return torch.randn(x.shape[0], self.out_features, dtype=x.dtype)

    wrong = {"short": lambda i, o: nn.Linear(i, o - 1), "random": Random}
    broken = [
        (name, SimpleNamespace(build=lambda i, o, bias, build=build: build(i, o))) for name, build in wrong.items()
    ]
    measured = {
        row["contender"]: row for row in bench_case(CASE, [("low_rank", relinear.LowRank(rank=4)), *broken], rounds=3)
    }
    assert "shape (5, 85)" in measured["short"]["error"]
    assert "relative error" in measured["random"]["error"]
    for name in ("dense", "low_rank"):
        assert measured[name]["error"] is None
        assert measured[name]["seconds"] > 0
        assert measured[name]["peak_bytes"] > 0
    forward = bench_case(dataclasses.replace(CASE, phase="forward"), [], rounds=3)
    assert [row["contender"] for row in forward] == ["dense"]


@pytest.mark.slow
def test_command(tmp_path, capfd):
    few = ["-o", "rotor", "-o", "low_rank:rank=4", "--tokens", "3", "--modes", "eager", "--rounds", "3"]
    arguments = [*few, "--shapes", "64x64,64->172"]
    assert main(["bench", *arguments, "--dtypes", "fp32", "--out", str(tmp_path / "bench")]) == 0
    out = capfd.readouterr().out
    assert "rotor" in out
    found = json.loads((tmp_path / "bench" / "bench.json").read_text())
    assert found["settings"]["rounds"] == 3
    assert "forward: inference after relinear.for_inference_" in out
    assert (tmp_path / "bench" / "bench.png").stat().st_size > 1000
    assert main(["bench", "--shapes", "64", "--out", str(tmp_path / "other")]) == 2
    assert "IN->OUT" in capfd.readouterr().err
    assert main(["bench", "--tokens", "0", "--out", str(tmp_path / "other")]) == 2
    assert "must be above 0" in capfd.readouterr().err


def test_every_operator_is_timed_as_it_comes():
    kinds = {
        kind: config for kind, config in OperatorConfig.kinds().items() if config.__module__.startswith("relinear.")
    }
    timed = [config for _, config in BenchSettings().parsed_operators()]
    assert {config.kind for config in timed} == set(kinds)
    assert [kind for kind, config in kinds.items() if config() not in timed] == []


def test_results_of_earlier_versions_are_read():
    """Their rows call the phase ``passed``."""
    row = {"contender": "x", "in_features": 4, "out_features": 4, "tokens": 1, "dtype": "float32", "mode": "eager"}
    row |= {"ratio": 0.5}
    assert _layers([row | {"passed": "step"}], {"x": ""}) == _layers([row | {"phase": "step"}], {"x": ""})


def _row(contender, ratio, error=None):
    case = {"in_features": 4, "out_features": 4, "tokens": 1, "dtype": "float32", "mode": "eager", "phase": "step"}
    return case | {"contender": contender, "ratio": ratio, "error": error}


def test_slower_is_beyond_what_either_run_varies_by():
    def runs(*ratios):
        return merge_runs([[_row("dense", 1.0), _row("x", r), _row("y", 2 * r), _row("z", r)] for r in ratios])

    recorded = runs(0.5, 0.7, 0.6)
    assert [row["contender"] for row in recorded] == ["dense", "x", "y", "z"]
    assert [recorded[1][name] for name in ("ratio_minimum", "ratio", "ratio_maximum")] == [0.5, 0.6, 0.7]
    assert slower(recorded, runs(0.69, 0.9, 0.8)) == []
    lines = slower(recorded, merge_runs([[_row("x", 0.75), _row("y", 1.3), _row("z", None, "off"), _row("new", 9.0)]]))
    assert [line.split(":")[0] for line in lines] == ["x", "z"]
    assert "0.75 (0.75 to 0.75), recorded 0.60 (0.50 to 0.70)" in lines[0]
    assert "not timed any more: off" in lines[1]


@pytest.mark.slow
def test_a_run_is_checked_against_a_recorded_one(tmp_path, capfd):
    common = ["bench", "-o", "low_rank:rank=4", "--shapes", "16x16", "--tokens", "3", "--modes", "eager", "--dtypes",
              "fp32", "--passes", "forward", "--rounds", "3"]  # fmt: skip
    assert main([*common, "--out", str(tmp_path / "once")]) == 0
    assert main(["bench", "--check", str(tmp_path / "once")]) == 2
    assert "--repeats 5" in capfd.readouterr().err
    assert main(["bench", "--check", str(tmp_path / "nowhere")]) == 2
    assert main([*common, "--repeats", "2", "--out", str(tmp_path / "twice")]) == 0
    path = tmp_path / "twice" / "bench.json"
    record = json.loads(path.read_text())
    for slowest, code in ((1e9, 0), (1e-9, 1)):
        for row in record["rows"]:
            row["ratio_maximum"] = slowest
        path.write_text(json.dumps(record))
        capfd.readouterr()
        again = ["bench", "--check", str(path), "--out", str(tmp_path / "now")]
        assert main(again) == code
        assert ("nothing is slower" in capfd.readouterr().out) == (code == 0)
    assert [row["contender"] for row in json.loads((tmp_path / "now" / "bench.json").read_text())["rows"]] == [
        "dense", "low_rank:rank=4"]  # fmt: skip
