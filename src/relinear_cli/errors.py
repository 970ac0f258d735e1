"""How the command line ends: one message and exit code 2 for what a user can mend, a traceback for our own faults."""

from __future__ import annotations

import errno
import os
import sys
import traceback
from collections.abc import Callable
from pickle import UnpicklingError

from relinear_cli.terminal import fitted

#: shows the traceback of a user error too
TRACEBACK_VARIABLE = "RELINEAR_TRACEBACK"
USER_ERROR = 2
INTERRUPTED = 130
TERMINATED = 143
OWN_FAULT = 1

_LONGEST = 2_000
#: advice for a disk that is full, over a quota or failing
_DISK = "finished files are intact. Free space or repair the disk, then start the same command again"

# Exceptions of other packages that no common base class covers, by the name of a class among their bases: naming them
# here avoids importing their packages just to catch them.
_FOREIGN = {"SafetensorError", "HfHubHTTPError", "HTTPError", "RequestException", "UsageError"}  # the last is wandb's


def is_user_error(error: BaseException) -> bool:
    """Return whether ``error`` is something that the user can mend: settings, files, data, numbers, a missing extra."""
    if isinstance(error, ValueError | OSError | FloatingPointError | ImportError | UnpicklingError):
        return True
    return _is_foreign(error)


def _is_foreign(error: BaseException) -> bool:
    return any(base.__name__ in _FOREIGN for base in type(error).__mro__)


def one_message(error: BaseException) -> str:
    """Return what to tell the user about ``error``, in so many characters as a terminal shows at once."""
    text = _message(error).replace("overwrite=True (--overwrite)", "--overwrite")
    if len(text) <= _LONGEST:  # so that a mistyped option is reported at once
        return text
    from relinear.system.text import shorten

    return shorten(text, _LONGEST)


def _message(error: BaseException) -> str:
    """Return the text of ``error``, without the name of its class where it speaks for itself."""
    if isinstance(error, OSError) and error.strerror:
        names = " -> ".join(str(name) for name in (error.filename, error.filename2) if name is not None)
        message = f"{names}: {error.strerror}" if names else error.strerror
        return f"{message}; {_DISK}" if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO) else message
    if hasattr(error, "errors") and hasattr(error, "error_count"):
        from relinear.contract.messages import validation_message

        return validation_message(error)  # type: ignore[arg-type]  # pydantic's, recognised without importing it
    if isinstance(error, UnpicklingError):  # torch's message proposes to run it
        return "the weights are a pickle with more than tensors in it, which could run code; get them as safetensors"
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
        # The reader of our output (head, less) has gone: nothing to tell anybody.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        if os.environ.get(TRACEBACK_VARIABLE, "0") not in ("", "0"):
            traceback.print_exception(error)
        elif not is_user_error(error):
            traceback.print_exception(error)
            print("this is a fault of relinear: please report it with the lines above", file=sys.stderr)
        if is_user_error(error):
            print(fitted(f"error: {one_message(error)}", sys.stderr), file=sys.stderr)
            return USER_ERROR
        return OWN_FAULT
