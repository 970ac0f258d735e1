"""The benchmark of layers: what is timed is right first, and one contender that fails does not cost the others."""

import dataclasses
import json
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import relinear
from relinear.bench.operators import TimedCase, bench_case
from relinear.bench.run import BenchSettings, merge_runs
from relinear.contract.operator import OperatorConfig
from relinear.deprecated import with_new_columns
from relinear_cli.main import main

CASE = TimedCase(in_features=32, out_features=86, tokens=5, dtype=torch.float32, mode="eager", phase="step")


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
    forward = bench_case(dataclasses.replace(CASE, phase="forward"), [], rounds=3)
    assert [row["contender"] for row in forward] == ["dense"]


@pytest.mark.slow
def test_command(drawn, tmp_path, capfd):
    few = ["-o", "rotor", "-o", "low_rank:rank=4", "--tokens", "3", "--modes", "eager", "--rounds", "3"]
    arguments = [*few, "--shapes", "64x64,64->172"]
    assert main(["bench", *arguments, "--dtypes", "fp32", "--out", str(tmp_path / "bench")]) == 0
    out = capfd.readouterr().out
    assert "rotor" in out
    found = json.loads((tmp_path / "bench" / "bench.json").read_text())
    assert found["settings"]["rounds"] == 3
    assert "forward: inference after relinear.for_inference_" in out
    assert (tmp_path / "bench" / "bench.svg").stat().st_size > 3_000
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
    assert with_new_columns({"rows": [row | {"passed": "step"}]}) == {"rows": [row | {"phase": "step"}]}


def _row(contender, ratio, error=None):
    case = {"in_features": 4, "out_features": 4, "tokens": 1, "dtype": "float32", "mode": "eager", "phase": "step"}
    return case | {"contender": contender, "ratio": ratio, "error": error}


def test_a_row_of_repeated_runs_is_the_median_ones_and_says_how_they_vary():
    runs = [[_row("dense", 1.0), _row("x", ratio), _row("y", 2 * ratio)] for ratio in (0.5, 0.7, 0.6)]
    dense, x, y = merge_runs(runs)
    assert [row["contender"] for row in (dense, x, y)] == ["dense", "x", "y"]
    assert [x[name] for name in ("ratio_minimum", "ratio", "ratio_maximum")] == [0.5, 0.6, 0.7]
    assert merge_runs([[_row("x", 0.5)], [_row("x", None, "off")]]) == [_row("x", None, "off")]


@pytest.mark.slow
def test_repeated_runs_make_one_record(tmp_path):
    arguments = ["bench", "-o", "low_rank:rank=4", "--shapes", "16x16", "--tokens", "3", "--modes", "eager", "--dtypes",
                 "fp32", "--passes", "forward", "--rounds", "3", "--repeats", "2"]  # fmt: skip
    assert main([*arguments, "--out", str(tmp_path / "twice")]) == 0
    rows = json.loads((tmp_path / "twice" / "bench.json").read_text())["rows"]
    assert [row["contender"] for row in rows] == ["dense", "low_rank:rank=4"]
    assert all(row["ratio_minimum"] <= row["ratio"] <= row["ratio_maximum"] for row in rows)
