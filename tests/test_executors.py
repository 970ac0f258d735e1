"""Runs in processes, as jobs and on workers: the results of one process, whatever is killed on the way."""

import functools
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from compare_helpers import losses, small
from conftest import mostly_slow
from relinear.compare import executors
from relinear.compare.executors import ProcessExecutor, executor_at
from relinear.compare.run import compare
from relinear_cli.errors import is_user_error

pytestmark = [
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks for processes in /proc"),
    pytest.mark.timeout(600),
]


def recipe(text, **changes):
    entries = {"dense": "dense", "low_rank": "low_rank:rank=4"}
    found = small(text, entries=entries, match="width", seeds=[0], **changes)
    found["train"] |= {"steps": 40, "save_every": 10, "eval_every": 20, "save_model": False}
    return found


@pytest.fixture(scope="module")
def expected(text, tmp_path_factory):
    return losses(compare(recipe(text), tmp_path_factory.mktemp("here") / "out", workers=0))


def at_work_in(folder):
    """Numbers of the processes that hold the lock of a run below ``folder``."""
    found = []
    for lock in folder.rglob("seed-*/.relinear.lock"):
        if number := re.match(r"process (\d+)", lock.read_text()):
            found.append(int(number[1]))
    return found


def when_saved(out, strike):
    """Call ``strike`` with the number of a run's process once that has saved a checkpoint, in a thread."""

    def watch():
        deadline = time.monotonic() + 300
        while time.monotonic() < deadline:
            for folder in out.rglob("seed-*/checkpoints/checkpoint-*"):
                if numbers := at_work_in(folder.parents[1].parent):
                    strike(numbers[0])
                    return
            time.sleep(0.02)

    thread = threading.Thread(target=watch)
    thread.start()
    return thread


def kill(number):
    os.kill(number, signal.SIGKILL)


@pytest.mark.parametrize("start", mostly_slow(["forkserver", "fork"], "fork"))
def test_a_call_is_a_process_of_its_own(start, monkeypatch):
    if start == "fork":  # a server imports everything once more
        monkeypatch.setattr(executors, "_CONTEXT", multiprocessing.get_context("fork"))
        monkeypatch.setattr(executors, "_start_server", lambda: None)
    with ProcessExecutor(2) as executor:
        numbers = {executor.submit(os.getpid).result() for _ in range(2)} | {os.getpid()}
        assert len(numbers) == 3
        assert list(executor.map(int, ["1", "2"])) == [1, 2]
        with pytest.raises(ValueError, match="invalid literal"):
            executor.submit(int, "x").result()
        with pytest.raises(ChildProcessError, match=r"ended without a result \(exit code 3\)"):
            executor.submit(os._exit, 3).result()
    processes = ProcessExecutor()
    processes.end()
    with pytest.raises(KeyboardInterrupt):
        processes.call(os.getpid)


def test_places_that_are_none(tmp_path):
    with pytest.raises(ValueError, match=r"slurm or the address .* got 'mars'"), executor_at("mars", 1, tmp_path, {}):
        pass


@pytest.mark.slow
def test_a_killed_run_is_told_of_and_ends_none_of_the_others(text, tmp_path, expected):
    out = tmp_path / "out"
    thread = when_saved(out, kill)
    with pytest.raises(ChildProcessError, match=r"(dense|low_rank): .*for want of memory.*worker\.log") as caught:
        compare(recipe(text), out, workers=2)
    thread.join()
    assert is_user_error(caught.value)
    ended = [json.loads(path.read_text())["status"] for path in out.rglob("seed-0/run.json")]
    assert sorted(ended) == ["done", "running"]
    events = []
    assert losses(compare(recipe(text), out, workers=2, on_progress=events.append)) == expected
    assert events[-1].run == events[-1].runs == 2


@pytest.mark.parametrize(("executor", "extra"), [("slurm", "slurm"), ("tcp://127.0.0.1:8786", "dask")])
def test_an_executor_names_its_package_if_that_is_missing(executor, extra, tmp_path, monkeypatch):
    monkeypatch.setattr(executors, "find_spec", lambda package: None)
    with pytest.raises(ImportError, match=re.escape(f"pip install 'relinear[{extra}]'")):
        executor_at(executor, 1, tmp_path, {})


COMMAND = "import sys; from relinear_cli.main import main; sys.exit(main(sys.argv[1:]))"


@pytest.mark.slow  # of one run, which does the same, test_faults.py holds it
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_the_runs_of_all_processes(number, text, tmp_path):
    out, found = tmp_path / "out", recipe(text)
    found["train"] |= {"steps": 100_000, "save_every": 100_000, "eval_every": 0}
    (tmp_path / "recipe.yaml").write_text(json.dumps(found))
    words = ["compare", "--recipe", str(tmp_path / "recipe.yaml"), "--out", str(out), "--workers", "2"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    process = subprocess.Popen(
        [sys.executable, "-c", COMMAND, *words], env=environment, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 200
    while len(list(out.rglob("metrics.jsonl"))) < 2 and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(1)
    process.send_signal(number)
    _, told = process.communicate(timeout=100)
    assert process.returncode == (143 if number == signal.SIGTERM else 130), told
    assert "to resume, start the same command again" in told
    assert len(list(out.rglob("checkpoint-*/manifest.json"))) == 2
    assert at_work_in(out) == []


@pytest.mark.slow
@pytest.mark.parametrize("how", ["preempted", "killed"])
def test_jobs_give_the_results_of_one_process(how, text, tmp_path, expected, monkeypatch):
    pytest.importorskip("submitit")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    # submitit's executor of this machine stands for SLURM
    monkeypatch.setattr(executors, "SlurmExecutor", functools.partial(executors.SlurmExecutor, cluster="local"))

    def strike(number):
        struck.append(number)
        job = next(path for path in Path("/proc").glob("[0-9]*") if number in children_of(path.name))
        server = int(job.name)
        parent = int((job / "stat").read_text().rpartition(")")[2].split()[1])
        os.kill(parent, signal.SIGUSR2 if how == "preempted" else signal.SIGKILL)
        servers.append(server)

    struck, servers = [], []
    out = tmp_path / "out"
    thread = when_saved(out, strike)
    # on a busy machine jobs take longer than submitit's two minutes, and would be signalled for that
    results = compare(recipe(text), out, executor="slurm", workers=2, slurm={"timeout_min": 10})
    thread.join()
    assert struck
    assert losses(results) == expected
    said = "".join(path.read_text() for path in (out / "slurm").glob("*.err"))
    assert ("Caught signal SIGUSR2" in said) == (how == "preempted")


def children_of(number):
    try:
        return list(map(int, Path(f"/proc/{number}/task/{number}/children").read_text().split()))
    except OSError:
        return []


@pytest.mark.slow
def test_workers_of_dask_give_the_results_of_one_process(text, tmp_path, expected, monkeypatch):
    distributed = pytest.importorskip("distributed")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    out, struck = tmp_path / "out", []
    with distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster:
        worker = next(iter(cluster.workers.values())).pid

        def strike(number):
            struck.append(worker)
            kill(worker)

        thread = when_saved(out, strike)
        results = compare(recipe(text), out, executor=cluster.scheduler_address)
        thread.join()
    assert struck
    assert losses(results) == expected
