"""SIGTERM, by which schedulers and service managers ask a process to end: work is saved first, then it ends."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any


class Terminated(KeyboardInterrupt):
    """The process was asked to end by SIGTERM. Whatever handles Ctrl-C handles it."""


def raise_terminated(*_: Any) -> None:
    """Raise ``Terminated``: the handler for work whose state is always on disk."""
    raise Terminated("ended by SIGTERM")


@contextlib.contextmanager
def on_terminate(handler: Callable[..., None]) -> Iterator[None]:
    """Call ``handler`` at the first SIGTERM within the block. Further ones are ignored: the work is on its way out.

    Python hands signals to the main thread alone: in another one this does nothing.
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
