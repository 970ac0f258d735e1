"""``make gpu`` without a GPU: what it says then, and its rehearsal."""

import dataclasses
import json
import os
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


def tasks(*works):
    row = {"what": "time", "tokens": 1, "phase": "step", "flops": 1}
    return lambda part, plan: iter([(row | {"width": width}, work) for width, work in enumerate(works)])


def test_a_row_says_how_it_failed_and_the_rest_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "_tasks", tasks(lambda: 1 / 0, lambda: {"seconds": float("inf")}))
    gpu._run_part("rotor", tmp_path, 60.0, gpu.Plan.rehearsal())
    found = json.loads((tmp_path / "rotor.json").read_text())
    assert found["state"] == "complete"
    first, second = found["rows"]
    assert first["error"].startswith("ZeroDivisionError")
    assert second["seconds"] == "inf"
    assert "1 rows failed" in str(gpu.verdict(tmp_path))


def test_a_call_goes_on_where_the_one_before_ended(tmp_path, monkeypatch):
    calls = []

    def work(name):
        return lambda: calls.append(name) or {"seconds": 1.0}

    monkeypatch.setattr(gpu, "_tasks", tasks(work("a"), work("b")))
    plan = gpu.Plan.rehearsal()
    gpu._run_part("rotor", tmp_path, -1.0, plan)
    assert gpu._state("rotor", tmp_path) == "out of time"
    assert calls == []
    monkeypatch.setattr(gpu, "_tasks", tasks(work("a")))
    gpu._run_part("rotor", tmp_path, 60.0, plan)
    monkeypatch.setattr(gpu, "_tasks", tasks(work("a"), work("b")))
    gpu._run_part("rotor", tmp_path, 60.0, plan)
    assert calls == ["a", "b"]
    assert gpu._state("rotor", tmp_path) == "complete"
    monkeypatch.setattr(gpu, "_sources", lambda: "others")
    assert gpu._state("rotor", tmp_path) == "not run"
    gpu._run_part("rotor", tmp_path, 60.0, plan)
    assert calls == ["a", "b", "a", "b"]
    assert len(json.loads((tmp_path / "rotor.json").read_text())["rows"]) == 2


def test_what_is_timed_first_is_compiled_first(tmp_path, monkeypatch):
    calls = []
    works = [lambda n=n: calls.append(n) or {} for n in range(5)]
    rows = [({"width": n, "mode": "eager" if n == 1 else "compiled"}, work) for n, work in enumerate(works)]
    monkeypatch.setattr(gpu, "_tasks", lambda part, plan: iter(rows))
    for number in range(2):
        gpu._prepare_part("rotor", tmp_path, number, 2, gpu.Plan.rehearsal())
        calls.append("next")
    assert calls == [0, 2, "next", 3, 4, "next"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_what_compiles_beforehand_runs(tmp_path):
    """In the processes of a call, at the sizes of a rehearsal."""
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    gpu._prepare(tmp_path, [gpu.CHECK, "hdpl-67m-hdpl", "monarch"], 800, environment, rehearse=1)
    assert gpu._state(gpu.CHECK, tmp_path) == "complete"
    assert [path.name for path in tmp_path.iterdir()] == [f"{gpu.CHECK}.json"]


class Clock:
    """In place of ``time`` and of processes, which take all the time that they are given, or fail at once."""

    def __init__(self, monkeypatch, codes=()):
        self.now, self.codes, self.ran = 0.0, dict(codes), []
        monkeypatch.setattr(gpu, "time", self)
        monkeypatch.setattr(gpu.subprocess, "run", self.run)
        monkeypatch.setattr(gpu, "_prepare", lambda *given: self.sleep(given[2]))
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(gpu, "verdict", lambda out: [])

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds
        return seconds

    def run(self, command, timeout, **given):
        part = command[4]
        self.ran.append((part, timeout))
        code = self.codes.pop(part, None)
        if code is None:
            self.sleep(timeout)
            raise subprocess.TimeoutExpired(command, timeout)
        return subprocess.CompletedProcess(command, code)


def test_a_call_ends_in_time_and_starts_no_part_that_cannot_come_to_a_row(tmp_path, monkeypatch):
    clock = Clock(monkeypatch)
    gpu.run_parts(tmp_path, minutes=8.5)
    assert clock.now == pytest.approx(8.5 * 60)
    goals = ["hdpl-67m-hdpl", "hdpl-67m", "llama-60m-transponder", "llama-60m"]
    assert [part for part, _ in clock.ran[:5]] == [gpu.CHECK, *goals]
    assert all(seconds >= gpu.LEAST[part] for part, seconds in clock.ran)
    kernels = [part for part in gpu.OPERATORS if part.startswith(("hdpl", "transponder", "rotor", "cgt"))]
    assert set(kernels) <= {part for part, _ in clock.ran}


def test_behind_an_error_that_spoils_the_device_another_process_goes_on(tmp_path, monkeypatch):
    def spoiled():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    works = tasks(spoiled, lambda: {"seconds": 1.0})
    monkeypatch.setattr(gpu, "_tasks", works)
    plan = gpu.Plan.rehearsal()
    with pytest.raises(SystemExit) as ended:
        gpu._run_part("rotor", tmp_path, 60.0, plan)
    assert ended.value.code == gpu.SPOILED
    assert gpu._state("rotor", tmp_path) == "cut off"
    gpu._run_part("rotor", tmp_path, 60.0, plan)
    assert gpu._state("rotor", tmp_path) == "complete"
    rows = json.loads((tmp_path / "rotor.json").read_text())["rows"]
    assert [row.get("seconds") for row in rows] == [None, 1.0]
    clock = Clock(monkeypatch, {"monarch": gpu.SPOILED})
    gpu.run_parts(tmp_path, parts=["monarch", "cgt"])
    assert [part for part, _ in clock.ran] == ["monarch", "cgt", "monarch"]


def test_one_compiler_that_fails_costs_no_other_ones_times(monkeypatch):
    def fails(graph, example_inputs):
        raise ValueError("no such instruction")

    plan = dataclasses.replace(
        gpu.Plan.rehearsal(), compilers=(("compiled", {"backend": fails}), ("graphs", {"backend": "eager"}))
    )
    found = gpu._timing("low_rank:rank=8", 3, 64, True, plan)
    assert list(found["failed"]) == ["compiled"]
    assert {"dense_seconds", "torch_seconds", "graphs_seconds"} <= found.keys()
    assert "compiled_seconds" not in found


def test_the_verdict_keeps_a_kernel_where_it_beats_the_compiled_form_by_a_tenth(tmp_path):
    part, setting = next((part, setting) for part, setting in gpu.OPERATORS.items() if setting.startswith("ccl"))

    def write(part, *rows):
        (tmp_path / f"{part}.json").write_text(json.dumps({"rows": rows}))

    def row(tokens, triton, phase="forward"):
        seconds = {
            "dense": 1.0,
            "dense_graphs": 1.0,
            "torch": 3.0,
            "compiled": 2.0,
            "graphs": 0.5,
            "triton_graphs": 9.0,
        }
        found = {f"{name}_seconds": value for name, value in (seconds | {"triton": triton}).items()}
        shape = {"what": "time", "operator": setting, "width": 2048, "tokens": tokens, "phase": phase}
        return shape | found | {"kernels": ["ccl"], "flops": 10}

    write(part, row(64, 0.44), row(4096, 0.46), row(64, 0.46, "step"))
    write("hdpl-67m", {"what": "training", "mode": "graphs", "tokens_per_second": 100.0, "peak_bytes": 10})
    write("hdpl-67m-hdpl", {"what": "training", "mode": "compiled", "tokens_per_second": 96.0, "peak_bytes": 11})
    said = gpu.verdict(tmp_path)
    assert f"{setting}, forward: the kernel of ccl stays for 64 x 2048 (1 of 2 rows)" in said
    assert f"{setting}, step: the kernel of ccl goes (0 of 1 rows)" in said
    assert "transponder:rank=8, step: not run" in said
    assert "faster than dense with half of its FLOPs: met by 1 rows" in said
    assert "hdpl-67m-hdpl, training, compiled, to hdpl-67m: 0.96, met (goal 0.95)" in said
    assert "hdpl-67m-hdpl, peak memory to hdpl-67m: 1.10, missed (goal 1.0)" in said
    assert "llama-60m-transponder, training, compiled, to llama-60m: not run (goal 0.92)" in said


@pytest.mark.slow
@pytest.mark.timeout(1800)  # as long as the rehearsal itself may take
def test_the_rehearsal_has_every_row_and_no_error(tmp_path):
    pytest.importorskip("triton")
    # what `make gpu REHEARSE=1` runs
    command = [sys.executable, gpu.__file__, "--rehearse", "--minutes", "30", "--out", str(tmp_path)]
    subprocess.run(command, check=True)
    ended = json.loads((tmp_path / "run.json").read_text())["parts"]
    assert {part["state"] for part in ended.values()} == {"complete"}
    assert set(ended) == set(gpu.PARTS)
    kernels = set()
    for part in gpu.PARTS:
        rows = json.loads((tmp_path / f"{part}.json").read_text())["rows"]
        assert not [row for row in rows if "error" in row]
        assert all(row["right"] for row in rows if row["what"] == "check")
        kinds = {"check"} if part == gpu.CHECK else {"time"} if part in gpu.OPERATORS else {"training", "decoding"}
        assert {row["what"] for row in rows} == kinds
        kernels |= {name for row in rows for name in row.get("kernels", ())}
        assert all(row["relative_error"] < 1e-4 for row in rows if row.get("kernels"))
    # every kernel was launched by a layer
    assert kernels == {"modulated_linear", "hdpl", "modulate", "sandwich_windows", "rotor_step"}
