"""``relinear doctor`` says what is there, what is not, and fails where something is wrong."""

import getpass
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


def test_a_cache_that_others_can_write_to_fails(tmp_path, monkeypatch, capsys):
    cache = tmp_path / "open"
    cache.mkdir()
    cache.chmod(0o777)
    monkeypatch.setenv("RELINEAR_CACHE", str(cache))
    assert main(["doctor"]) == 1
    failed = [line for line in lines(capsys) if line[0] == "FAILS"]
    assert len(failed) == 1
    assert str(cache) in failed[0][2]
    assert "other users may write" in failed[0][2]


def test_caches_have_a_size_and_an_owner(tmp_path, monkeypatch, capsys):
    cache = tmp_path / "mine"
    cache.mkdir()
    (cache / "tokens").write_bytes(bytes(3 << 19))
    monkeypatch.setenv("RELINEAR_CACHE", str(cache))
    assert main(["doctor"]) == 0
    assert ["ok", "data", f"cache    {cache} (1.5 MiB, of {getpass.getuser()})"] in lines(capsys)


@pytest.mark.skipif(getattr(os, "geteuid", lambda: 1)() != 0, reason="another user's files can be made by root alone")
def test_what_another_user_has_above_a_cache_is_named_with_what_to_do(tmp_path, monkeypatch, capsys):
    above = tmp_path / "theirs"
    cache = above / "cache"
    cache.mkdir(parents=True)
    os.chown(above, 65534, 65534)
    monkeypatch.setenv("RELINEAR_CACHE", str(cache))
    assert main(["doctor"]) == 1
    said = next(found for state, _, found in lines(capsys) if state == "FAILS")
    for part in (f"{cache} (0.0 MiB, of root): {above}: it belongs to another user (", "set RELINEAR_CACHE to it"):
        assert part in said


def test_a_broken_plug_in_is_named(monkeypatch, capsys):
    point = metadata.EntryPoint("btt", "no_such_module:BTT", plugins.GROUPS["operator"])
    monkeypatch.setattr(plugins, "entry_points", lambda family: {"btt": point} if family == "operator" else {})
    assert main(["doctor"]) == 1
    assert any(line[0] == "FAILS" and "no_such_module" in line[2] for line in lines(capsys))
