"""Every public name's docstring reads as a reference page, with an example that runs as printed, of at most 5 lines."""

import doctest
import inspect
import operator
import re

import pytest
import torch

import relinear
from relinear.contract import config as registry
from relinear.deprecated import MOVED

#: names whose example needs more than this machine has: they are read, not run
NOT_RUN = {"evaluate.lm_eval": "network"}
ROOMS = [name for name in relinear.__all__ if inspect.ismodule(getattr(relinear, name))]
NAMES = ["clifford", *(name for name in relinear.__all__ if name not in [*ROOMS, "__version__"])]
NAMES += [f"clifford.{name}" for name in relinear.clifford.__all__]
NAMES += [f"{room.removeprefix('relinear.')}.{name}" for room, name in MOVED.values() if room != "relinear"]
#: what first lines begin with; a new verb is added here, in the imperative
VERBS = """
Add Attach Change Describe Divide Freeze Gate Give Hold Keep Let Load Make Map Modulate Normalise Predict Put Raise Read
Register Replace Report Resolve Return Run Save Say Set Split Start Store Tabulate Take Tokenise Train Turn Weigh
"""
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def text(name: str) -> str:
    return inspect.getdoc(operator.attrgetter(name)(relinear)) or ""


def examples(name: str) -> list[doctest.Example]:
    return doctest.DocTestParser().get_examples(text(name), name)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "clifford"])
def test_it_begins_with_a_verb_and_says_what_goes_in_and_comes_out(name: str) -> None:
    value = operator.attrgetter(name)(relinear)
    first, _, rest = text(name).partition("\n")
    assert first.split()[0] in VERBS.split(), first
    assert len(first) <= 120
    assert not rest or rest.startswith("\n"), "the first line is a paragraph"
    if not inspect.isclass(value):  # a class has its fields, and what it is
        signature = inspect.signature(value)
        assert "\nArgs:\n" in rest or not signature.parameters
        nothing = signature.return_annotation in (None, "None")
        assert nothing or first.startswith("Return ") or "\nReturns:\n" in rest


@pytest.mark.parametrize("name", NAMES)
def test_an_example_runs_as_printed(name: str, tmp_path, monkeypatch) -> None:
    """Only ``relinear`` and ``torch`` are imported; files go to the folder that it starts in."""
    found = examples(name)
    assert found, f"{name} has no example"
    assert sum(len(one.source.splitlines()) for one in found) <= 5, name
    assert any(re.search(rf"\b{re.escape(name)}\b", one.source) for one in found), (
        f"the example of {name} does not use it"
    )
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
