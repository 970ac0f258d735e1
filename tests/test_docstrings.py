"""Every public name's docstring shows an example that runs as printed, of at most five lines."""

import doctest
import inspect
import re

import pytest
import torch

import relinear
from relinear.core import config as registry

#: names whose example needs more than this machine has: they are read, not run
NOT_RUN = {"lm_eval": "network"}
NAMES = [name for name in relinear.__all__ if name != "__version__"]
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def examples(name: str) -> list[doctest.Example]:
    return doctest.DocTestParser().get_examples(inspect.getdoc(getattr(relinear, name)) or "", name)


@pytest.mark.parametrize("name", NAMES)
def test_an_example_runs_as_printed(name: str, tmp_path, monkeypatch) -> None:
    """Only ``relinear`` and ``torch`` are imported; files go to the folder that it starts in."""
    found = examples(name)
    assert found, f"{name} has no example"
    assert sum(len(one.source.splitlines()) for one in found) <= 5, name
    assert any(re.search(rf"\b{name}\b", one.source) for one in found), f"the example of {name} does not use it"
    skipped = [one for one in found if doctest.SKIP in one.options]
    assert bool(skipped) == (name in NOT_RUN)
    if skipped:
        return
    monkeypatch.chdir(tmp_path)
    kinds = dict(registry._REGISTRY["operator"])
    torch.manual_seed(0)
    test = doctest.DocTest(found, {"relinear": relinear, "torch": torch}, name, None, 0, None)
    said: list[str] = []
    try:
        outcome = doctest.DocTestRunner(optionflags=FLAGS, verbose=False).run(test, out=said.append)
    finally:
        registry._REGISTRY["operator"] = kinds
    assert outcome.failed == 0, "".join(said)
    assert outcome.attempted == len(found)
