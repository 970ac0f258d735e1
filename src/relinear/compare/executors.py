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
from importlib.util import find_spec
from multiprocessing import forkserver
from pathlib import Path
from typing import Any, NamedTuple

from relinear.contract import plugins
from relinear.contract.config import worker_environment
from relinear.system.allocator import tune_allocator
from relinear.system.signals import Terminated

_CONTEXT: Any = multiprocessing.get_context("forkserver")
_QUIET_ENV = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "TQDM_DISABLE": "1", "TOKENIZERS_PARALLELISM": "false"}
#: for the process that all others are forked from: torch then looks for GPUs without starting CUDA, which cannot fork
_SERVER_ENV = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
#: seconds that a process has to save its state after a SIGTERM
_SECONDS_TO_SAVE = 60
#: jobs of SLURM or Dask at once, and how often one that was lost is submitted again
_MAX_JOBS, _RETRIES = 256, 3


class Execution(NamedTuple):
    """Where and how runs are executed: arguments of ``compare``, which says what they mean."""

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
    """Wait for each call, which runs elsewhere, in a thread; end the calls that still run when the block ends."""

    #: run one call and return its result; end all of them
    call: Callable[..., Any]
    end: Callable[[], None]

    def submit(self, function: Callable[..., Any], /, *arguments: Any, **options: Any) -> Future:
        return super().submit(self.call, function, *arguments, **options)

    def __exit__(self, *error: Any) -> Any:
        self.shutdown(wait=False, cancel_futures=True)
        self.end()
        return super().__exit__(*error)


class ProcessExecutor(_ThreadPerCall):
    """Run each call in a process on this machine.

    Args:
        workers: how many processes run at once.
        log: file for the output of the processes; None leaves it on the terminal.
    """

    def __init__(self, workers: int = 1, log: Path | None = None) -> None:
        super().__init__(workers)
        self._log = log
        self._running: set[Any] = set()
        self._ended = False
        self._starting = threading.RLock()  # SLURM's signal may call ``end`` in the midst of ``call``

    def call(self, function: Callable[..., Any], /, *arguments: Any) -> Any:
        """Run the function in a new process and return its result; its exceptions are raised here.

        Raises:
            ChildProcessError: if the process ended without a result.
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
            error = _lost_process_error(process.exitcode, self._log)
            result = None
        receive.close()
        process.join()
        self._running.discard(process)
        if error is not None:
            raise error
        return result

    def end(self) -> None:
        """Let every process save its state and end; start no more."""
        with self._starting:
            self._ended = True
            running = list(self._running)
        deadline = time.monotonic() + _SECONDS_TO_SAVE
        for process in running:
            process.terminate()
        for process in running:
            process.join(max(0.0, deadline - time.monotonic()))
            process.kill()


def _start_server() -> None:
    """Start the process that imports everything once and is forked for every call."""
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


def _lost_process_error(code: int | None, log: Path | None) -> ChildProcessError:
    log_hint = "" if log is None else f"; see {log}"
    return ChildProcessError(
        f"the process of the run ended without a result (exit code {code}), most likely killed for want of memory; "
        f"start the same command again where more is free, or with fewer --workers{log_hint}"
    )


@dataclasses.dataclass(repr=False)  # Dask names tasks by it, and arguments are long
class RemoteCall:
    """Run a call in a process on another machine, which saves its state before SLURM ends the job."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]

    def __call__(self) -> Any:
        # Dask's workers are daemons, and multiprocessing refuses them children; these end with their parent
        multiprocessing.current_process()._config.pop("daemon", None)  # type: ignore[attr-defined]
        self.executor = ProcessExecutor()
        return self.executor.call(self.function, *self.arguments)

    def checkpoint(self) -> Any:
        """Queue the job again; submitit calls this when the time is up or the job is preempted."""
        from submitit.helpers import DelayedSubmission

        self.executor.end()
        return DelayedSubmission(RemoteCall(self.function, self.arguments))


class SlurmExecutor(_ThreadPerCall):
    """Run each call as a job of SLURM.

    Args:
        workers: how many jobs are in the queue at once.
        folder: directory for scripts and logs; all nodes see it by this path.
        parameters: parameters of ``submitit.AutoExecutor``.
        cluster: kind of cluster, as submitit names it.
    """

    def __init__(self, workers: int, folder: Path, parameters: Mapping[str, Any], cluster: str = "slurm") -> None:
        import submitit

        super().__init__(workers)
        self._executor = submitit.AutoExecutor(folder, cluster=cluster, slurm_max_num_timeout=1000)
        self._executor.update_parameters(name="relinear", **parameters)
        self._running = set[Any]()

    def call(self, function: Callable[..., Any], /, *arguments: Any) -> Any:
        from submitit.core.utils import FailedJobError, UncompletedJobError

        for attempt in range(_RETRIES + 1):
            job = self._executor.submit(RemoteCall(function, arguments))
            self._running.add(job)
            try:
                return job.result()
            except FailedJobError as error:
                raise ValueError(f"{str(error).strip().splitlines()[-1]}; see {job.paths.stderr}") from None
            except UncompletedJobError as error:  # its node failed, or it was killed
                if attempt == _RETRIES:
                    raise ChildProcessError(f"a job was lost {_RETRIES + 1} times: {error}") from None
            finally:
                self._running.discard(job)

    def end(self) -> None:
        for job in list(self._running):
            job.cancel()


class DaskExecutor(_ThreadPerCall):
    """Run calls on the workers of the Dask cluster at an address; runs whose calls are cut off resume later."""

    def __init__(self, address: str) -> None:
        from distributed import Client

        super().__init__(_MAX_JOBS)
        self._client = Client(address)
        self.end = self._client.close

    def call(self, function: Callable[..., Any], /, *arguments: Any) -> Any:
        return self._client.submit(RemoteCall(function, arguments), pure=False).result()


def executor_at(
    executor: Executor | str | None, workers: int, folder: Path, parameters: Mapping[str, Any]
) -> AbstractContextManager[Executor]:
    """Return an executor whose running calls end with its block.

    Args:
        executor: an executor; None for processes on this machine, "slurm", or the address of a scheduler of Dask.
        workers: how many calls run at once on this machine, or are in SLURM's queue. 0 means 256 jobs of SLURM, or
            calls in this process if ``executor`` is None.
        folder: directory of the comparison; gets ``worker.log`` or ``slurm/``.
        parameters: parameters of SLURM's jobs, for submitit.

    Raises:
        ValueError: for any other executor.
        ImportError, OSError: if its package is not installed, or it does not answer.
    """
    if isinstance(executor, Executor):
        return nullcontext(executor)
    if executor is None:
        return ProcessExecutor(workers, folder / "worker.log") if workers else InlineExecutor()
    extra, package = ("slurm", "submitit") if executor == "slurm" else ("dask", "distributed")
    if extra == "dask" and "://" not in executor:
        raise ValueError(f"executor must be slurm or the address of a scheduler (tcp://HOST:8786), got {executor!r}")
    if find_spec(package) is None:
        raise ImportError(f"executor {executor!r} needs the package {package}: pip install 'relinear[{extra}]'")
    if extra == "dask":
        return DaskExecutor(executor)
    return SlurmExecutor(workers or _MAX_JOBS, folder / "slurm", parameters)
