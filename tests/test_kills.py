"""Killed at any moment, work goes on to the same bits: a few kills on every run of the tests, 200 by `make kills`."""

import json
import os
import subprocess
import sys

import pytest

from kills.works import COMPRESSIONS

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


@pytest.mark.slow
def test_a_few_kills(tmp_path):
    found = kills(tmp_path, "--kills", "6", "--work", "train", "--work", "save", "--work", "compare", timeout=850)
    assert found["kills"] >= 6


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
    assert found["by_work"].keys() == {word for name in COMPRESSIONS for word in name.split()}
