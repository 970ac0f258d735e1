"""Runs in processes of their own: peak memory is each run's, and nothing that one leaves behind reaches the next.

A worker imports everything once, then forks for every job (on Linux; elsewhere it is started anew for each). Jobs and
answers are lines of JSON through pipes. A worker dies with the process that started it, so that no forgotten run goes
on writing.
"""

import contextlib
import dataclasses
import json
import os
import platform
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from relinear.core.config import environment
from relinear.system.signals import Terminated

Progress = Callable[[dict[str, Any]], None]
_QUIET = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "TQDM_DISABLE": "1", "TOKENIZERS_PARALLELISM": "false"}
# torch then looks for GPUs without CUDA, which would not work in a fork of a process that has begun to use it
_FORKED = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
_FORKS = sys.platform.startswith("linux")
#: seconds that a job has to save its state after a SIGTERM
_GENTLY = 60


def _train(arguments: Mapping[str, Any], on_progress: Progress) -> dict[str, Any]:
    from relinear.train.run import train

    def tell(progress: Any) -> None:
        on_progress(dataclasses.asdict(progress))

    result = train(arguments["settings"], arguments["out_dir"], on_progress=tell)
    return result.to_dict() | {"curve": result.curve}


def _speed(arguments: Mapping[str, Any], on_progress: Progress) -> dict[str, Any]:
    from relinear.compare.speed import measure_speed

    return measure_speed(**arguments, on_progress=on_progress)


#: what a worker can do: name -> function of its arguments and a callback, both JSON
JOBS = {"train": _train, "speed": _speed}


class InProcess:
    """Does the jobs here and now: no isolation, nothing to start."""

    def run(self, job: str, arguments: Mapping[str, Any], on_progress: Progress) -> dict[str, Any]:
        """Return what the job returns; its exceptions pass through."""
        return JOBS[job](arguments, on_progress)

    def close(self) -> None:
        """Nothing to end."""


class Worker:
    """A process that does one job after another.

    Args:
        log: file that takes whatever the jobs print, and the traceback of one that fails.
    """

    def __init__(self, log: str | Path) -> None:
        self.log = Path(log)
        self._process: subprocess.Popen[str] | None = None

    def run(self, job: str, arguments: Mapping[str, Any], on_progress: Progress) -> dict[str, Any]:
        """Return what the job returns.

        Raises:
            ValueError: what the job raised as a fault of settings, files or numbers, with its message.
            ChildProcessError: if somebody or the system killed its process.
            RuntimeError: any other fault of the job.
        """
        process = self._start()
        try:
            process.stdin.write(json.dumps({"job": job, "arguments": arguments}) + "\n")
            process.stdin.flush()
            for line in process.stdout:
                message = json.loads(line)
                if "progress" in message:
                    on_progress(message["progress"])
                elif "result" in message:
                    return message["result"]
                elif "error" in message:
                    raise _error(message)
                elif "killed" in message:
                    raise _killed(message["killed"], self.log)
        except BrokenPipeError:
            pass
        except Terminated:
            self._end_gently()
            raise
        except BaseException:
            self.close()  # a job may still be going on
            raise
        code = process.wait()
        self.close()
        raise _killed(-code if code < 0 else code, self.log)

    def _start(self) -> subprocess.Popen[str]:
        if self._process is not None and (not _FORKS or self._process.poll() is not None):
            self.close()
        if self._process is None:
            self.log.parent.mkdir(parents=True, exist_ok=True)
            with self.log.open("a", encoding="utf-8") as log:
                self._process = subprocess.Popen(
                    [sys.executable, "-c", "from relinear.compare.worker import serve; serve()", *sys.argv],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                    encoding="utf-8",
                    start_new_session=True,  # Ctrl-C reaches this process alone, which then ends the worker
                    env=os.environ
                    | _QUIET
                    | _FORKED
                    | environment()
                    | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                )
        return self._process

    def _end_gently(self) -> None:
        """Let the job save what it has done."""
        process = self._process
        if process is not None and _FORKS:
            with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(process.pid, signal.SIGTERM)
                process.stdin.close()
                process.wait(_GENTLY)
        self.close()

    def close(self) -> None:
        """End the worker and what it is doing."""
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # its own session: the worker and its forks
        process.wait()
        for pipe in (process.stdin, process.stdout):
            with contextlib.suppress(OSError):
                pipe.close()


def at_work(out_dir: Path, isolate: bool, shared: bool) -> contextlib.AbstractContextManager[Worker | InProcess]:
    """Have somebody do the jobs of ``out_dir``: a process of its own, where ``isolate``, or this one.

    What runs print goes to ``worker.log`` there; of shared work a file for each process.
    """
    log = out_dir / (f"worker-{platform.node()}-{os.getpid()}.log" if shared else "worker.log")
    return contextlib.closing(Worker(log) if isolate else InProcess())


def _error(message: Mapping[str, Any]) -> Exception:
    from relinear.train.trainer import NonFiniteLossError

    kinds: dict[str, type[Exception]] = {"NonFiniteLossError": NonFiniteLossError, "mendable": ValueError}
    return kinds.get(message["kind"], RuntimeError)(message["error"])


def _killed(code: int, log: Path) -> Exception:
    if code == signal.SIGKILL:
        return ChildProcessError(
            "the process of the run was killed, most likely for want of memory; what is done is kept, and the same "
            "command goes on where more memory is free (a smaller batch_size is another run, and takes another "
            f"directory); see {log}"
        )
    return RuntimeError(f"the process of the run ended without a result (signal or exit code: {code}); see {log}")


def serve() -> None:
    """Read jobs from stdin until it ends, and answer on what was stdout; anything printed goes to stderr."""
    _die_with_parent()
    signal.signal(signal.SIGTERM, lambda *_: None)  # the job hears it too, saves and ends; then this process does
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)

    def send(message: dict[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    from relinear.system.allocator import tune_allocator

    tune_allocator()
    for line in sys.stdin:
        request = json.loads(line)
        if not _FORKS:
            _answer(request, send)
            continue
        import relinear.train.run  # noqa: F401  imported once, for every fork

        child = os.fork()
        if child == 0:
            _die_with_parent()
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            code = _answer(request, send)
            sys.stderr.flush()
            os._exit(code)
        _, status = os.waitpid(child, 0)
        code = os.waitstatus_to_exitcode(status)
        if code != 0:
            send({"killed": abs(code)})


def _answer(request: Mapping[str, Any], send: Callable[[dict[str, Any]], None]) -> int:
    """Do a job and send what came of it; the exit code of a process that did it."""
    try:
        result = JOBS[request["job"]](request["arguments"], lambda progress: send({"progress": progress}))
        message: dict[str, Any] = {"result": result}
    except Exception as error:
        traceback.print_exc()
        from relinear.train.trainer import NonFiniteLossError

        kind = "mendable" if isinstance(error, ValueError | OSError | FloatingPointError | ImportError) else "fault"
        kind = "NonFiniteLossError" if isinstance(error, NonFiniteLossError) else kind
        message = {"error": str(error) if kind != "fault" else f"{type(error).__name__}: {error}", "kind": kind}
    except Terminated:
        return signal.SIGTERM
    send(message)
    return 0


def _die_with_parent() -> None:
    """Be killed when the parent ends in whatever way (Linux); elsewhere a closed pipe ends the worker."""
    if not _FORKS:
        return
    import ctypes

    pr_set_pdeathsig = 1
    parent = os.getppid()
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
