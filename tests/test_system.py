"""What is read of the machine."""

import subprocess
from pathlib import Path

import pytest
import torch

from relinear.kernels.native import build
from relinear.system import machine

X86 = "processor\t: 0\nmodel name\t: Some CPU: fast\nflags\t\t: fpu avx2 amx_bf16\n\nprocessor\t: 1\nflags\t\t: none\n"
ARM = "processor\t: 0\nFeatures\t: fp asimd bf16\n"


@pytest.fixture
def cpuinfo(monkeypatch):
    """Puts a text in the place of /proc/cpuinfo; None for a system that has none."""

    def put(text):
        def read(path, **kwargs):
            if text is None:
                raise FileNotFoundError
            return text

        monkeypatch.setattr(Path, "read_text", read)
        machine._cpu_facts.cache_clear()

    yield put
    machine._cpu_facts.cache_clear()


@pytest.mark.parametrize(
    ("text", "features"), [(X86, {"fpu", "avx2", "amx_bf16"}), (ARM, {"fp", "asimd", "bf16"}), (None, set())]
)
def test_features_of_the_processor(cpuinfo, text, features):
    cpuinfo(text)
    assert machine.cpu_features() == features


def test_the_machine_is_described_also_where_little_is_known(cpuinfo):
    cpuinfo(X86)
    described = machine.describe_machine()
    assert (described["processor"], described["extensions"]) == ("Some CPU: fast", ["avx2", "amx_bf16"])
    cpuinfo(None)
    assert machine.describe_machine()["processor"]


def test_a_checkout_is_recorded_by_its_commit(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "__file__", str(tmp_path / "src" / "relinear" / "system" / "machine.py"))
    machine._commit.cache_clear()
    assert "commit" not in machine.describe_machine()  # as installed, wherever that is
    git = ("git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b")
    for words in (("init", "-q"), ("commit", "-q", "--allow-empty", "-m", "one")):
        subprocess.run([*git, *words], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    machine._commit.cache_clear()
    try:
        assert machine.describe_machine()["commit"] == head
    finally:
        machine._commit.cache_clear()


def test_other_processors_have_kernels_of_their_own(monkeypatch):
    before = build.library_path()
    monkeypatch.setattr(build, "cpu_features", lambda: frozenset({"another"}))
    assert build.library_path() != before


@pytest.mark.parametrize(
    ("argv", "typed"),
    [
        (["/usr/bin/relinear", "compare", "--out", "two words"], "relinear compare --out 'two words'"),
        (["-c", "/usr/bin/relinear", "compare"], "relinear compare"),  # a worker's
        (["-c"], ""),
        ([], ""),
    ],
)
def test_the_command_is_as_it_was_typed(argv, typed, monkeypatch) -> None:
    monkeypatch.setattr("sys.argv", argv)
    assert machine.command_line() == typed


def test_threads_are_others_within_a_block_alone() -> None:
    before, seen = torch.get_num_threads(), []

    def work():
        with machine.on_threads(before + 1):
            seen.append(torch.get_num_threads())
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        work()
    with machine.on_threads(None):
        seen.append(torch.get_num_threads())
    assert (*seen, torch.get_num_threads()) == (before + 1, before, before)
