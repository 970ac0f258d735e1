"""Execute runs: in processes on this machine, by SLURM through submitit, or on a Dask cluster.

Each is an executor as in ``concurrent.futures``. Every call is a process of its own: if one is killed, others go on,
and no work is lost, as calls are runs that resume.
"""

import ctypes
import dataclasses
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from relinear.contract import plugins
from relinear.contract.config import worker_environment
from relinear.system.allocator import tune_allocator
from relinear.system.signals import Terminated

_CONTEXT: Any = multiprocessing.get_context("spawn" if sys.platform == "win32" else "forkserver")
_QUIET_ENV = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "TQDM_DISABLE": "1", "TOKENIZERS_PARALLELISM": "false"}
#: for the process that all others are forked from: torch then looks for GPUs without CUDA, which survives no fork
_SERVER_ENV = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
#: seconds that a process has to save its state after a SIGTERM
_SECONDS_TO_SAVE = 60
#: jobs in SLURM's queue at once, and how often one that was lost is submitted again
_MAX_JOBS, _RETRIES = 256, 3


class Placement(NamedTuple):
    """Hold where runs are executed: arguments of ``compare``, which says what they mean."""

    workers: int | None = None
    executor: Executor | str | None = None
    slurm: Mapping[str, Any] | None = None


class InlineExecutor(Executor):
    """Execute calls in this process, one after the other."""

    def submit(self, function: Callable[..., Any], /, *arguments: Any, **options: Any) -> Future:
        """Return a future that has ended."""
        future: Future = Future()
        try:
            future.set_result(function(*arguments, **options))
        except Exception as error:
            future.set_exception(error)
        return future


class _ThreadPerCall(ThreadPoolExecutor):
    """Wait in one thread per call, which runs elsewhere; an exception in the block ends all calls."""

    #: run one call and return its result; end all of them
    call: Callable[..., Any]
    end: Callable[[], None]

    def submit(self, function: Callable[..., Any], /, *arguments: Any, **options: Any) -> Future:
        return super().submit(self.call, function, *arguments, **options)

    def __exit__(self, exc_type: Any, *rest: Any) -> Any:
        if exc_type is not None:
            self.shutdown(wait=False, cancel_futures=True)
            self.end()
        return super().__exit__(exc_type, *rest)


class ProcessExecutor(_ThreadPerCall):
    """Run each call in a process on this machine, ``workers`` at once. log: file for their output, if any."""

    def __init__(self, workers: int = 1, log: Path | None = None) -> None:
        super().__init__(workers)
        self._log, self._running, self._ended = log, set[Any](), False
        self._starting = threading.RLock()

    def call(self, function: Callable[..., Any], /, *arguments: Any) -> Any:
        """Run the function in a new process and return its result; its exceptions are raised here.

        Raises:
            ChildProcessError: if the process was killed.
        """
        receive, send = _CONTEXT.Pipe(duplex=False)
        variables = dict(os.environ) | _QUIET_ENV | worker_environment()
        process = _CONTEXT.Process(target=_serve, args=(send, variables, self._log, function, arguments))
        with self._starting:
            if self._ended:
                raise Terminated("ended before it began")
            _start_server()
            process.start()
            self._running.add(process)
        send.close()
        try:
            error, result = receive.recv()
        except EOFError:
            process.join()
            raise _process_error(process.exitcode, self._log) from None
        finally:
            receive.close()
            self._running.discard(process)
        process.join()
        if error is not None:
            raise error
        return result

    def end(self) -> None:
        """Let every process save its state and end; start no more."""
        with self._starting:
            self._ended, running = True, list(self._running)
        deadline = time.monotonic() + _SECONDS_TO_SAVE
        for process in running:
            process.terminate()
        for process in running:
            process.join(max(0.0, deadline - time.monotonic()))
            process.kill()


def _start_server() -> None:
    """Start the process that imports everything once and is forked for every call."""
    if _CONTEXT.get_start_method() == "forkserver":
        from multiprocessing import forkserver

        _CONTEXT.set_forkserver_preload(["relinear.training.run", "relinear.compare.speed"])
        before = dict(os.environ)
        os.environ.update(_QUIET_ENV | _SERVER_ENV | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))})
        try:
            forkserver.ensure_running()
        finally:
            os.environ.clear()
            os.environ.update(before)


def _serve(
    send: Any, variables: Mapping[str, str], log: Path | None, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    """Execute a call and send (error, result)."""
    if sys.platform.startswith("linux"):  # killed with the parent, however that ends: no forgotten run goes on writing
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which then ends this process
    os.environ.update(variables)
    if log is not None:
        with log.open("a", encoding="utf-8") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
    tune_allocator()
    plugins.import_from_environment()
    try:
        answer: tuple[Exception | None, Any] = (None, function(*arguments))
    except Terminated:
        os._exit(128 + signal.SIGTERM)
    except Exception as error:
        traceback.print_exc()
        is_user_error = isinstance(error, ValueError | OSError | FloatingPointError | ImportError)
        answer = (ValueError(str(error)) if is_user_error else RuntimeError(f"{type(error).__name__}: {error}"), None)
    send.send(answer)


def _process_error(code: int | None, log: Path | None) -> Exception:
    """Return the error for a process that ended without a result."""
    log_hint = "" if log is None else f"; see {log}"
    if code == -signal.SIGKILL:
        return ChildProcessError(
            "the process of the run was killed, most likely for want of memory; what is done is kept, and the same "
            f"command goes on where more memory is free, or with fewer --workers{log_hint}"
        )
    return RuntimeError(f"the process of the run ended without a result (signal or exit code: {code}){log_hint}")


def _import_extra(name: str, extra: str) -> Any:
    """Import an optional package; the error for a missing one names the ``extra`` that installs it."""
    try:
        return import_module(name)
    except ImportError:
        raise ImportError(f"this executor needs {name}: pip install 'relinear[{extra}]'") from None


@dataclasses.dataclass
class SlurmJob:
    """Run a call in a job; before SLURM ends it, the process saves its state and the job is queued again."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]

    def __call__(self) -> Any:
        self.executor = ProcessExecutor()
        return self.executor.call(self.function, *self.arguments)

    def checkpoint(self) -> Any:
        """Queue the job again; submitit calls this when the time is up or the job is preempted."""
        from submitit.helpers import DelayedSubmission

        self.executor.end()
        return DelayedSubmission(SlurmJob(self.function, self.arguments))


class Slurm(_ThreadPerCall):
    """Run jobs of SLURM. folder: for scripts and logs, seen by all nodes. parameters: of ``submitit.AutoExecutor``."""

    def __init__(self, workers: int, folder: Path, parameters: Mapping[str, Any], cluster: str = "slurm") -> None:
        super().__init__(workers)
        submitit = _import_extra("submitit", "slurm")
        self._executor = submitit.AutoExecutor(folder, cluster=cluster, slurm_max_num_timeout=1000)
        self._executor.update_parameters(name="relinear", **parameters)
        self._jobs: list[Any] = []

    def call(self, function: Callable[..., Any], /, *arguments: Any) -> Any:
        from submitit.core.utils import FailedJobError, UncompletedJobError

        for attempt in range(_RETRIES + 1):
            job = self._executor.submit(SlurmJob(function, arguments))
            self._jobs.append(job)
            try:
                return job.result()
            except FailedJobError as error:
                raise ValueError(f"{str(error).strip().splitlines()[-1]}; see {job.paths.stderr}") from None
            except UncompletedJobError as error:  # its node failed, or it was killed
                if attempt == _RETRIES:
                    raise ChildProcessError(f"a job was lost {_RETRIES + 1} times: {error}") from None

    def end(self) -> None:
        for job in self._jobs:
            job.cancel()


class Dask(Executor):
    """Run calls on a Dask cluster at an address; its workers start a process for every call."""

    def __init__(self, address: str) -> None:
        self._client = _import_extra("distributed", "dask").Client(address)
        self._executor = self._client.get_executor(pure=False)

    def submit(self, function: Callable[..., Any], /, *arguments: Any, **options: Any) -> Future:
        return self._executor.submit(_in_a_process, function, *arguments, **options)

    def __exit__(self, exc_type: Any, *rest: Any) -> Any:
        self._executor.shutdown(wait=exc_type is None)
        self._client.close()


def _in_a_process(function: Callable[..., Any], *arguments: Any) -> Any:
    # Dask's workers are daemons: multiprocessing refuses them children, which would outlive them if they did not watch
    multiprocessing.current_process()._config.pop("daemon", None)  # type: ignore[attr-defined]
    return ProcessExecutor().call(function, *arguments)


def executor_at(
    executor: Executor | str | None, workers: int, folder: Path, parameters: Mapping[str, Any]
) -> AbstractContextManager[Executor]:
    """Return an executor; if its block ends by an exception, its running calls end.

    Args:
        executor: an executor; None for processes of this machine, "slurm", or the address of a scheduler of Dask.
        workers: calls at once, of this machine and in SLURM's queue; 0 means SLURM's default, or this process
            when ``executor`` is None.
        folder: of the comparison; gets ``worker.log`` or ``slurm/``.
        parameters: of jobs of SLURM.

    Raises:
        ValueError: for any other executor.
        ImportError, OSError: if its package is not installed, or it does not answer.
    """
    if isinstance(executor, Executor):
        return nullcontext(executor)
    if executor is None:
        return ProcessExecutor(workers, folder / "worker.log") if workers else InlineExecutor()
    if executor == "slurm":
        return Slurm(workers or _MAX_JOBS, folder / "slurm", parameters)
    if "://" in executor:
        return Dask(executor)
    raise ValueError(f"executor must be slurm or the address of a scheduler (tcp://HOST:8786), got {executor!r}")
