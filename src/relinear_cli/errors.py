"""Turn exceptions into exit codes: a message and code 2 for errors that a user can fix, a traceback for our bugs."""

from __future__ import annotations

import errno
import os
import sys
import traceback
from collections.abc import Callable
from pickle import UnpicklingError

from relinear_cli.terminal import wrapped

#: environment variable that shows the traceback of user errors too
TRACEBACK_VARIABLE = "RELINEAR_TRACEBACK"
USER_ERROR = 2
INTERRUPTED = 130
TERMINATED = 143
INTERNAL_ERROR = 1

_LONGEST = 2_000
#: advice for a disk that is full, over its quota or failing
_DISK_ADVICE = "finished files are intact. Free space or repair the disk, then start the same command again"

# Exceptions of other packages without a common base class, by the name of one of their base classes. With names, the
# packages need not be imported to catch them.
_FOREIGN = {"SafetensorError", "HfHubHTTPError", "HTTPError", "RequestException", "UsageError"}  # the last is wandb's
_MEMORY_ADVICE = "out of memory: take a lower batch size, shorter sequences, a smaller model or gradient checkpointing"


def is_user_error(error: BaseException) -> bool:
    """Return whether the user can fix ``error``: in settings, files, data, numbers, or by installing an extra."""
    known = isinstance(error, ValueError | OSError | FloatingPointError | ImportError | UnpicklingError)
    return known or _is_foreign(error) or _is_out_of_memory(error)


def _is_foreign(error: BaseException) -> bool:
    return any(base.__name__ in _FOREIGN for base in type(error).__mro__)


def _is_out_of_memory(error: BaseException) -> bool:
    """Return whether memory ran out: Python's error, torch's for a GPU, or its plain RuntimeError for the processor."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def one_message(error: BaseException) -> str:
    """Return the message about ``error`` for the user, shortened to what fits on a terminal."""
    text = _message(error).replace("overwrite=True (--overwrite)", "--overwrite")
    if len(text) <= _LONGEST:  # without the slow import, so that a mistyped option is reported quickly
        return text
    from relinear.system.text import shorten

    return shorten(text, _LONGEST)


def _message(error: BaseException) -> str:
    """Return the text of ``error``, with the name of its class only if the text is unclear without it."""
    if isinstance(error, OSError) and error.strerror:
        names = " -> ".join(str(name) for name in (error.filename, error.filename2) if name is not None)
        message = f"{names}: {error.strerror}" if names else error.strerror
        return (
            f"{message}; {_DISK_ADVICE}"
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
            else message
        )
    if hasattr(error, "errors") and hasattr(error, "error_count"):
        from relinear.settings.messages import validation_message

        return validation_message(error)  # type: ignore[arg-type]  # pydantic's error, recognised without importing pydantic
    if isinstance(error, UnpicklingError):  # torch's message would advise to load it anyway
        return "the weights are a pickle with more than tensors in it, which could run code; get them as safetensors"
    if _is_out_of_memory(error):
        return _MEMORY_ADVICE
    text = str(error).strip()
    if _is_foreign(error):
        return f"{type(error).__name__}: {text}"
    return text or type(error).__name__


def exit_code(command: Callable[[], int | None]) -> int:
    """Run ``command`` and return the exit code of the process; errors are printed to stderr."""
    try:
        return command() or 0
    except KeyboardInterrupt as error:
        return TERMINATED if type(error).__name__ == "Terminated" else INTERRUPTED  # relinear.system.signals'
    except BrokenPipeError:
        # The reader of our output (head, less) has ended, so nobody would see a message.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        if os.environ.get(TRACEBACK_VARIABLE, "0") not in ("", "0"):
            traceback.print_exception(error)
        elif not is_user_error(error):
            traceback.print_exception(error)
            print("this is a fault of relinear: please report it with the lines above", file=sys.stderr)
        if is_user_error(error):
            print(wrapped(f"error: {one_message(error)}", sys.stderr), file=sys.stderr)
            return USER_ERROR
        return INTERNAL_ERROR
