"""A short fuzz on every run of the tests, the long one by `make fuzz`."""

import sys

import pytest

from fuzz.run import FAILURES, run

pytestmark = [
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="forks, and limits memory"),
    pytest.mark.timeout(900),
]


def test_a_short_fuzz():
    found = run(100, seed=11, seconds=200.0)  # on a busy machine a case may take long without hanging
    assert found["failures"] == []
    assert not set(found["outcomes"]) & set(FAILURES)
    assert found["outcomes"]["refused"] > 33
    assert found["outcomes"]["accepted"] > 3
    assert sum(found["outcomes"].values()) == 100


@pytest.mark.slow
def test_the_fuzz_sees_failures(monkeypatch):
    """Of every kind: an exception that is no error in words, a hang, memory, a death, a file elsewhere."""
    import os
    import time
    from pathlib import Path

    import torch

    from fuzz import kinds

    def failing(rng, folder):
        work = rng.choice(
            [lambda: {}["a"], lambda: time.sleep(5), lambda: torch.zeros(2**32), lambda: os._exit(3), Path("x").touch]
        )
        work()

    monkeypatch.setattr(kinds, "KINDS", {"failing": (1, failing)})
    found = run(25, seed=1, seconds=0.5)
    assert set(found["outcomes"]) == {"traceback", "hang", "memory", "crash", "outside"}
    assert len(found["failures"]) == 25


@pytest.mark.slow
@pytest.mark.timeout(14_400)
def test_a_long_fuzz():
    assert run(100_000, seed=0)["failures"] == []
