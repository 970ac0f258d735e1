"""A full disk, a failing one, a dead neighbour: one message that names the file, and the next run goes on."""

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from relinear.compare.folder import read_losses
from relinear.data.packing import PackedDataset
from relinear.settings.yaml_settings import read_yaml
from relinear.system.files import atomic_path, os_errors_named, read_json
from relinear.system.lock import exclusive
from relinear.training.fitting import remove_checkpoints

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="forks, preloads and locks")


def faults(tmp_path, *arguments, timeout):
    """In a process of its own, before which the shim is loaded."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "faults.run", *arguments, "--out", str(tmp_path / "faults.json")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((tmp_path / "faults.json").read_text())


@linux
@pytest.mark.timeout(900)
@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
@pytest.mark.slow
def test_a_few_faults(tmp_path):
    found = faults(tmp_path, "--sample", "2", "--command", "tune", timeout=850)
    assert found["faults"] == 4


@linux
@pytest.mark.slow
@pytest.mark.timeout(7_200)
def test_faults_in_every_command(tmp_path):
    found = faults(tmp_path, "--sample", "10", timeout=7_000)
    assert len(found["by_command"]) == 14


def test_errors_without_a_name_get_it(tmp_path, monkeypatch):
    with pytest.raises(OSError, match=r"some/file") as caught, os_errors_named("some/file"):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert caught.value.filename == "some/file"
    with pytest.raises(OSError, match="else") as caught, os_errors_named("some/file"):
        raise OSError(errno.EIO, "Input/output error", "else")
    with pytest.raises(OSError, match=r"Input.*'.*a\.json'"), atomic_path(tmp_path / "a.json") as temporary:
        raise OSError(errno.EIO, "Input/output error", str(temporary))

    def fails(*arguments, **kwargs):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("pathlib.Path.read_text", fails)
    for read in (read_json, read_yaml):
        with pytest.raises(OSError, match=r"a\.yaml"):
            read(tmp_path / "a.yaml")


def test_tokens_that_cannot_be_read_are_named(tmp_path, monkeypatch):
    np.save(tmp_path / "train.npy", np.arange(8))
    packed = PackedDataset(tmp_path / "train.npy", 4)
    del packed.tokens

    def fails(*arguments, **kwargs):
        raise OSError(errno.EIO, "Input/output error")

    for name in ("numpy.load", "relinear.data.packing.checksum"):
        monkeypatch.setattr(name, fails)
    for look in (lambda: packed.tokens, lambda: packed.checksum):
        with pytest.raises(OSError, match=r"train\.npy"):
            look()


def test_what_a_failing_disk_leaves_of_a_checkpoint_is_none(tmp_path, monkeypatch):
    for name in ("checkpoint-2", "checkpoint-4"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
        (tmp_path / "checkpoints" / name / "manifest.json").touch()
    unlink = os.unlink

    def fails(path, **where):
        monkeypatch.setattr("os.unlink", unlink)
        raise OSError(errno.EIO, "Input/output error", path)

    monkeypatch.setattr("os.unlink", fails)
    remove_checkpoints(tmp_path / "checkpoints")
    assert not list(tmp_path.rglob("checkpoint-*"))
    remove_checkpoints(tmp_path / "checkpoints")
    assert not list(tmp_path.iterdir())


def test_a_lock_whose_file_cannot_be_removed_is_free(tmp_path, monkeypatch):
    def fail(path, missing_ok=False):
        raise OSError(errno.EIO, "Input/output error", str(path))

    monkeypatch.setattr(Path, "unlink", fail)
    for _ in range(2):  # a handle that stayed open would hold it against this process
        with exclusive(tmp_path / "out", 0.1):
            pass


def test_losses_by_block_that_cannot_be_read_are_named(tmp_path, monkeypatch):
    def fail(path, **how):
        raise OSError(errno.EIO, "Input/output error")

    np.save(tmp_path / "block_losses.npy", np.ones(3))
    monkeypatch.setattr(np, "load", fail)
    with pytest.raises(OSError, match="Input/output error") as caught:
        read_losses(tmp_path)
    assert caught.value.filename == str(tmp_path / "block_losses.npy")
