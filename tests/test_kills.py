"""Killed at any moment, work goes on to the same bits: a few kills on every run of the tests, 200 by `make kills`."""

import json
import os
import subprocess
import sys

import pytest

# Each takes some ten seconds; the limits are for a machine that has other things to do.
pytestmark = [
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="forks"),
    pytest.mark.timeout(900),
]


def kills(tmp_path, *arguments, timeout):
    """In a process of its own: one that has computed gradients must not fork."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "kills.run", *arguments, "--out", str(tmp_path / "kills.json")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((tmp_path / "kills.json").read_text())


def test_a_few_kills(tmp_path):
    found = kills(tmp_path, "--kills", "6", "--work", "train", "--work", "save", "--work", "compare", timeout=850)
    assert found["kills"] >= 6


def shared(name):
    """What two workers, one of which is killed, and a third one come to."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "kills.shared", name]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=850)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_two_workers_share_a_comparison_and_a_killed_one_loses_nothing():
    found = shared("compare")
    assert found["codes"] == [0, 0]
    assert found["same"], "results other than those of one process"
    assert found["workers"] >= 2
    assert found["twice"] <= 1, "steps that two workers made: at most the one that was not on disk at the kill"


@pytest.mark.slow
@pytest.mark.timeout(7_200)
def test_two_hundred_kills(tmp_path):
    found = kills(tmp_path, "--kills", "200", timeout=7_000)
    assert found["kills"] >= 200
    assert len(found["by_work"]) == 5


@pytest.mark.slow
@pytest.mark.timeout(7_200)
def test_two_hundred_kills_of_every_way_of_compressing(tmp_path):
    found = kills(tmp_path, "--kills", "200", "--work", "compressions", timeout=7_000)
    assert found["kills"] >= 200
    assert len(found["by_work"]) == 1 + 2 + 4 + 2 + 2 + 3
