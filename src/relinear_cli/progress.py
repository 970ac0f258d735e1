"""Live progress on stderr: bars on a terminal, a line now and then elsewhere."""

import contextlib
import functools
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

#: seconds between two lines where there is no terminal
_QUIET = 20.0


class _Lines:
    """Progress for logs and plain terminals: a line when something new starts, and every so often."""

    def __init__(self) -> None:
        self._told, self._shown = ("", 0.0), ("", 0)

    def show(self, title: str, done: int, total: int, detail: str, of_all: str, left: str, run: int, runs: int) -> None:
        now, title = time.monotonic(), title.partition(" (")[0]
        if (title, done) == self._shown or (title == self._told[0] and done != total and now - self._told[1] <= _QUIET):
            return
        self._told, self._shown = (title, now), (title, done)
        counted = f" {done:,}/{total:,}" if total else f" {done:,}" if done else ""
        print("  ".join(filter(None, [title + counted, of_all, detail, left])), file=sys.stderr, flush=True)


class _Bars:
    """Progress for terminals: one bar for the work at hand, one for all runs."""

    def __init__(self, progress: Any) -> None:
        self._progress = progress
        self._current = progress.add_task("", total=None, detail="", left="")
        self._all: Any = None
        self._title = ""

    def show(self, title: str, done: int, total: int, detail: str, of_all: str, left: str, run: int, runs: int) -> None:
        if title.partition(" (")[0] != self._title:
            self._title = title.partition(" (")[0]
            self._progress.reset(self._current, total=total or None)
        if runs > 1 and self._all is None:
            self._all = self._progress.add_task("all runs", total=runs, detail="", left="")
        alone = self._all is None
        shown = {"description": title, "completed": done, "total": total or None, "detail": detail}
        self._progress.update(self._current, **shown, left=left if alone else "")
        if not alone:
            self._progress.update(self._all, completed=run, total=runs or None, left=left)


class _View:
    """What is going on, and how long the rest takes: as it is told, else at the pace so far."""

    def __init__(self, lines: Any) -> None:
        self._lines = lines
        self._began: dict[str, float] = {}

    def show(
        self,
        title: str,
        done: int,
        total: int,
        detail: str,
        run: int = 0,
        runs: int = 0,
        seconds_left: float | None = None,
    ) -> None:
        """Show ``done`` of ``total`` of a piece of work, and how many of several runs have ended."""
        now = time.monotonic()
        began = self._began.setdefault(title.partition(" (")[0], now)
        if seconds_left is None and runs <= 1 and 0 < done < total:
            seconds_left = (now - began) / done * (total - done)
        of_all = f"run {min(run + 1, runs)} of {runs}" if runs > 1 else ""
        self._lines.show(title, done, total, detail, of_all, _left(seconds_left or 0.0), run, runs)


def _left(seconds: float) -> str:
    """How long the rest takes; "" where that is not known, or a moment."""
    return "" if seconds < 5 else f"{seconds:.0f} s left" if seconds < 90 else f"about {seconds / 60:.0f} min left"


@contextlib.contextmanager
def _view() -> Iterator[Any]:
    from relinear.system.machine import is_first_rank

    if not is_first_rank() or not sys.stderr.isatty():  # of several ranks the first tells
        yield _View(_Lines()) if is_first_rank() else SimpleNamespace(show=lambda *shown: None)
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
        yield _View(_Bars(progress))


def _detail(values: Mapping[str, Any]) -> str:
    names = {"loss": "loss {:.3f}", "validation_loss": "validation {:.3f}", "tokens_per_second": "{:,.0f} tok/s"}
    return "  ".join(text.format(values[key]) for key, text in names.items() if values.get(key) is not None)


@contextlib.contextmanager
def _resumable() -> Iterator[None]:
    """On Ctrl-C or SIGTERM within the block, end in an orderly way and tell the user how to go on."""
    from relinear.system.signals import Terminated, on_terminate, raise_terminated

    try:
        with on_terminate(raise_terminated):
            yield
    except KeyboardInterrupt as error:
        what = "ended by SIGTERM" if isinstance(error, Terminated) else "interrupted"
        print(f"\n{what}; to go on: start the same command again", file=sys.stderr)
        raise


def _watch(
    make: Callable[..., Callable[..., None]], resumable: bool = True
) -> Callable[..., contextlib.AbstractContextManager[Any]]:
    """Turn ``make(view, ...)``, which gives a callback, into a context whose block the view is there for."""

    @contextlib.contextmanager
    @functools.wraps(make)
    def watched(*given: Any) -> Iterator[Callable[..., None]]:
        with _resumable() if resumable else contextlib.nullcontext(), _view() as view:
            yield make(view, *given)

    return watched


@_watch
def watch_comparison(view: Any) -> Callable[..., None]:
    """A callback for ``compare(on_event=...)`` that shows what is going on while the block runs."""
    return lambda now: view.show(
        now.what, now.done, now.total, _detail(now.detail), now.run, now.runs, now.seconds_left
    )


@_watch
def watch_training(view: Any, title: str) -> Callable[..., None]:
    """A callback for ``train(on_progress=...)``, likewise."""

    def on_progress(progress: Any) -> None:
        if progress.phase == "evaluating":
            view.show(f"{title}, evaluating", *progress.batches, "")
            return
        phase = {"evaluate": " (evaluating)", "prepare": " (preparing)"}.get(progress.phase, "")
        values = {key: getattr(progress, key) for key in ("loss", "validation_loss", "tokens_per_second")}
        view.show(title + phase, progress.step, progress.steps, _detail(values), 0, 0, progress.seconds_left)

    return on_progress


@_watch
def watch_distillation(view: Any) -> Callable[..., None]:
    """A callback for ``distill_(on_progress=...)``, likewise."""
    return lambda now: view.show(f"{now.phase} {now.name}", now.done, now.total, _detail({"loss": now.loss}))


@_watch
def watch_compression(view: Any) -> Callable[..., None]:
    """A callback for ``compress(on_progress=...)``, likewise."""
    titles = {
        "forward": "calibrating, forward",
        "backward": "calibrating, backward",
        "candidates": "planning",
        "frontier": "measuring budgets",
        "original": "running the original",
        "evaluation": "running the compressed model",
        "heal": "healing",
    }
    return lambda phase, done, total: view.show(titles.get(phase, "fitting layers"), done, total, "")


@functools.partial(_watch, resumable=False)
def watch_steps(view: Any, title: str) -> Callable[..., None]:
    """A callback ``(done, total)`` for work of one kind."""
    return lambda done, total: view.show(title, done, total, "")


@functools.partial(_watch, resumable=False)
def watch_reports(view: Any, title: str) -> Callable[..., None]:
    """A callback for the ``report`` of benchmarks: texts, those of cases with ``3/20  `` before them."""

    def report(text: str) -> None:
        number, _, case = text.partition("  ")
        done, slash, total = number.partition("/")
        if slash and done.isdigit() and total.isdigit():
            view.show(title, int(done) - 1, int(total), case)
        else:
            view.show(text, 0, 0, "")

    return report
