"""Handle SIGTERM, with which schedulers and service managers end a process, so that work is saved first."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any


class Terminated(KeyboardInterrupt):
    """Raised when SIGTERM ends the process; code that handles Ctrl-C handles it too."""


def raise_terminated(*_: Any) -> None:
    """Raise ``Terminated``: the handler for tasks whose state is always on disk."""
    raise Terminated("ended by SIGTERM")


@contextlib.contextmanager
def on_terminate(handler: Callable[..., None]) -> Iterator[None]:
    """Call ``handler`` at the first SIGTERM within the block, and ignore further ones while the task ends.

    Python delivers signals only to the main thread; in other threads this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)

    def once(number: int, frame: Any) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        handler(number, frame)

    signal.signal(signal.SIGTERM, once)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before if before is not None else signal.SIG_DFL)
