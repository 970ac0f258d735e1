"""``relinear doctor`` says what is there, what is not, and fails where something is wrong."""

import os
from importlib import metadata

import pytest

from relinear.contract import plugins
from relinear_cli.main import main


def lines(capsys):
    """Lines of the output, split: state, what, found."""
    return [line.split(maxsplit=2) for line in capsys.readouterr().out.splitlines()]


def test_a_sound_installation_has_nothing_that_fails(capsys):
    assert main(["doctor"]) == 0
    found = lines(capsys)
    assert {"relinear", "torch", "processor", "GPU", "Triton", "compiler"} <= {what for _, what, _ in found}
    assert not [line for line in found if line[0] == "FAILS"]


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        ("torch>=99", "FAILS packages needs torch>=99"),
        ("no-such-package>=1", "FAILS packages no-such-package is not installed: pip install 'no-such-package>=1'"),
        (
            'no-such-package>=1; extra == "sweep"',
            "- [sweep] no-such-package is not installed: pip install 'no-",
        ),
    ],
)
def test_packages_that_are_missing_or_of_another_version_are_named(monkeypatch, capsys, wanted, said):
    monkeypatch.setattr(metadata, "requires", lambda name: [wanted])
    assert main(["doctor"]) == int(said.startswith("FAILS"))
    assert said in [" ".join(line)[: len(said)] for line in lines(capsys)]


@pytest.mark.skipif(getattr(os, "geteuid", lambda: 1)() != 0, reason="another user's files can be made by root alone")
def test_a_broken_plug_in_is_named(monkeypatch, capsys):
    point = metadata.EntryPoint("btt", "no_such_module:BTT", plugins.GROUPS["operator"])
    monkeypatch.setattr(plugins, "entry_points", lambda family: {"btt": point} if family == "operator" else {})
    assert main(["doctor"]) == 1
    assert any(line[0] == "FAILS" and "no_such_module" in line[2] for line in lines(capsys))
