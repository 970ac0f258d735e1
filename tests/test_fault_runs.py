"""A full disk, a failing one, a dead neighbour: one message that names the file, and the next run goes on."""

import errno
import json
import os
import shutil
import sqlite3
import subprocess
import sys

import pytest

from relinear.compare.recipe import read_yaml
from relinear.compare.tune import JOURNAL, Trials, open_study
from relinear.system.files import atomic_path, read_json, writing
from relinear_cli.main import main

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
def test_a_few_faults(tmp_path):
    found = faults(tmp_path, "--sample", "2", "--command", "sweep --share", timeout=850)
    assert found["faults"] == 4


@linux
@pytest.mark.slow
@pytest.mark.timeout(7_200)
def test_faults_in_every_command(tmp_path):
    found = faults(tmp_path, "--sample", "10", timeout=7_000)
    assert len(found["by_command"]) == 17


def test_errors_without_a_name_get_it(tmp_path, monkeypatch):
    with pytest.raises(OSError, match=r"some/file") as caught, writing("some/file"):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert caught.value.filename == "some/file"
    with pytest.raises(OSError, match="else") as caught, writing("some/file"):
        raise OSError(errno.EIO, "Input/output error", "else")
    with pytest.raises(OSError, match=r"Input.*'.*a\.json'"), atomic_path(tmp_path / "a.json") as temporary:
        raise OSError(errno.EIO, "Input/output error", str(temporary))
    error = RuntimeError("An exception is raised during the commit")
    error.__cause__ = sqlite3.OperationalError("database or disk is full")
    with pytest.raises(OSError, match=r"optuna\.db"), writing(tmp_path / "optuna.db"):
        raise error

    def fails(*arguments, **kwargs):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("pathlib.Path.read_text", fails)
    for read in (read_json, read_yaml):
        with pytest.raises(OSError, match=r"a\.yaml"):
            read(tmp_path / "a.yaml")


# A journal that several processes write


def study(folder):
    return Trials(open_study(folder, "a", shared=True), lambda rate, _: rate)


@linux
@pytest.mark.parametrize("then", ["nothing", "more"])
def test_half_a_line_in_a_journal(tmp_path, then):
    study(tmp_path).loss(0.1)
    path = tmp_path / JOURNAL
    half = path.read_bytes().splitlines()[-1][:25]
    if then == "nothing":  # the next appends behind it
        path.write_bytes(path.read_bytes() + half)
    else:  # an earlier version has
        lines = path.read_bytes().splitlines(keepends=True)
        path.write_bytes(b"".join([*lines[:-1], half, lines[-1]]))
    study(tmp_path).loss(0.2)
    assert [row["learning_rate"] for row in study(tmp_path).rows()] == [0.1, 0.2]


@linux
@pytest.mark.timeout(60)
def test_a_process_that_dies_in_the_lock_of_a_journal_stops_no_other(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trials = study("shared")
    child = os.fork()
    if not child:
        trials.study._storage._backend._lock.acquire()
        os._exit(0)
    os.waitpid(child, 0)
    trials.loss(0.1)
    assert len(trials.rows()) == 1


def test_a_journal_on_a_full_disk_is_an_error_in_words(tmp_path, monkeypatch, capfd):
    def fails(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    (tmp_path / "text.txt").write_text("some text " * 100)
    monkeypatch.setattr("optuna.storages.journal.JournalFileBackend.append_logs", fails)
    arguments = ["sweep", "-p", "learning_rate=0.1,0.2", "--data", str(tmp_path / "text.txt"), "--share"]
    assert main([*arguments, "--out", str(tmp_path / "out")]) == 2
    assert f"error: {tmp_path / 'out' / JOURNAL}: No space left" in capfd.readouterr().err
