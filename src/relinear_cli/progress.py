"""Show live progress on stderr: a bar on a terminal, otherwise a line now and then."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from relinear.system.progress import Progress, ProgressCallback

#: seconds between two lines if there is no terminal
_REPEAT_AFTER_S = 20.0
_FIGURES = {"loss": "loss {:.3f}", "validation_loss": "validation {:.3f}", "tokens_per_second": "{:,.0f} tok/s"}


class _Lines:
    """Print progress for logs: a line when a new task starts, and then at intervals."""

    def __init__(self) -> None:
        self._last, self._printed = ("", 0), ("", 0.0)

    def show(self, now: Progress, text: str, detail: str, left: str) -> None:
        printed, at = self._printed
        recent = text == printed and now.done != now.total and time.monotonic() - at <= _REPEAT_AFTER_S
        if (text, now.done) == self._last or recent:
            return
        self._printed, self._last = (text, time.monotonic()), (text, now.done)
        counted = f" {now.done:,}/{now.total:,}" if now.total else f" {now.done:,}" if now.done else ""
        print("  ".join(filter(None, [text + counted, detail, left])), file=sys.stderr, flush=True)


class _Bars:
    """Show progress on a terminal: a bar for the current task."""

    def __init__(self, progress: Any) -> None:
        self._progress, self._text = progress, ""
        self._task = progress.add_task("", total=None, detail="", left="")

    def show(self, now: Progress, text: str, detail: str, left: str) -> None:
        if text != self._text:
            self._text = text
            self._progress.reset(self._task)
        shown = {"description": text, "completed": now.done, "total": now.total or None}
        self._progress.update(self._task, **shown, detail=detail, left=left)


def _callback(view: _Lines | _Bars, title: str) -> ProgressCallback:
    """Return a callback that shows progress in ``view``, and the remaining time as reported, or by the pace so far."""
    started: dict[str, float] = {}

    def show(now: Progress) -> None:
        seconds = now.seconds_left
        time_now = time.monotonic()
        since = started.setdefault(now.text, time_now)
        if seconds is None and now.runs <= 1 and 0 < now.done < now.total:
            seconds = (time_now - since) / now.done * (now.total - now.done)
        figures = (text.format(value) for name, text in _FIGURES.items() if (value := getattr(now, name)) is not None)
        run = f"run {min(now.run + 1, now.runs)} of {now.runs}" if now.runs > 1 else ""
        detail = "  ".join(filter(None, [run, now.detail, *figures]))
        view.show(now, f"{title}, {now.text}" if title else now.text, detail, _remaining_text(seconds or 0.0))

    return show


def _remaining_text(seconds: float) -> str:
    """Return the remaining time as text; "" if it is unknown or below 5 seconds."""
    return "" if seconds < 5 else f"{seconds:.0f} s left" if seconds < 90 else f"about {seconds / 60:.0f} min left"


@contextlib.contextmanager
def watch(title: str = "", *, resumable: bool = False) -> Iterator[ProgressCallback]:
    """Yield a callback that shows progress while the block runs.

    Args:
        title: before the text of each step.
        resumable: whether the command resumes when it is started again; a message then says so.
    """
    from relinear.system.machine import is_first_rank
    from relinear.system.progress import no_progress

    with _resumable() if resumable else contextlib.nullcontext():
        if not is_first_rank():  # only the first of several ranks shows progress
            yield no_progress
            return
        if not sys.stderr.isatty():
            yield _callback(_Lines(), title)
            return
        from rich import progress as bars
        from rich.console import Console

        columns = (
            bars.TextColumn("{task.description}"),
            bars.BarColumn(bar_width=28),
            bars.MofNCompleteColumn(),
            bars.TimeElapsedColumn(),
            bars.TextColumn("{task.fields[left]}"),
            bars.TextColumn("{task.fields[detail]}"),
        )
        with bars.Progress(*columns, console=Console(stderr=True), transient=True) as progress:
            yield _callback(_Bars(progress), title)


@contextlib.contextmanager
def _resumable() -> Iterator[None]:
    """On Ctrl-C or SIGTERM within the block, end cleanly and say how to resume."""
    from relinear.system.signals import Terminated, on_terminate, raise_terminated

    try:
        with on_terminate(raise_terminated):
            yield
    except KeyboardInterrupt as error:
        ending = "ended by SIGTERM" if isinstance(error, Terminated) else "interrupted"
        print(f"\n{ending}; to resume, start the same command again", file=sys.stderr)
        raise
