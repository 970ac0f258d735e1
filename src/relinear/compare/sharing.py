"""Work in pieces, done alone or shared: each process takes the next piece that nobody holds, until none is left.

A piece is held by the lock of a folder of its own, which the operating system takes from a process that ends, in
whatever way. What a killed one had begun is then another's, which goes on with it from its last checkpoint.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from relinear.compare.tune import JOURNAL, STORAGE
from relinear.system.files import read_json, write_json
from relinear.system.lock import InUseError, only_process_in

__all__ = ["Piece", "Series", "Work", "alone_at", "carry_out", "check_sharing", "share_out", "worker_log"]

#: folder of the locks
CLAIMS = "claims"
#: seconds between looks at what others are doing
_POLL = 1.0


@dataclasses.dataclass(frozen=True)
class Piece:
    """A piece of work.

    name: of its lock, the same in every process. is_done: whether it needs no doing, asked by who holds it. do: does
    it, and leaves on disk what makes ``is_done`` true.
    """

    name: str
    is_done: Callable[[], bool]
    do: Callable[[], Any]


class Work(Protocol):
    """Pieces that come to results."""

    def waiting(self) -> Sequence[Piece]:
        """Return the pieces that have not been done and could be now; none where all has been."""

    def results(self) -> dict[str, Any]:
        """Return what it came to, once nothing is waiting."""


class Series(contextlib.ExitStack):
    """Works one after the other, each made of what those before it came to; then the sum of all is written.

    Args:
        path: of the results; nothing is done where they are there.
        count: of works.
        begin: the next work, as a context manager, from the results so far.
        summed_up: the results of the whole, from those of all works.
    """

    def __init__(self, path: Path, count: int = 0, begin: Any = None, summed_up: Any = None) -> None:
        super().__init__()
        self.path, self._count, self._begin, self._summed_up = path, count, begin, summed_up
        self._found: list[dict[str, Any]] = []
        self._work: Work | None = None

    def waiting(self) -> Sequence[Piece]:
        """Return what waits of the work at hand, at last the sum."""
        while not self.path.is_file():
            if len(self._found) == self._count:
                return [Piece("sum", self.path.is_file, self._write)]
            work = self._work = self._work or self.enter_context(self._begin(self._found))
            if pieces := work.waiting():
                return pieces
            self._found.append(work.results())
            self._work = None
            self.close()
        return ()

    def _write(self) -> None:
        write_json(self.path, self._summed_up(self._found))

    def results(self) -> dict[str, Any]:
        """Return the sum."""
        return read_json(self.path)


def alone_at(out_dir: Path, what: str, shared: bool) -> contextlib.AbstractContextManager[Any]:
    """Hold a part of shared work for a moment, to be waited for; work that is not shared is held as a whole."""
    if not shared:
        return contextlib.nullcontext()
    return only_process_in(out_dir / CLAIMS / what, patience=60, required=True)


def carry_out(out_dir: Path, waiting: Callable[[], Sequence[Piece]], shared: bool) -> None:
    """Do pieces until ``waiting`` gives none: alone, in their order and until one fails, or as ``share_out``."""
    if shared:
        share_out(out_dir, waiting)
        return
    while pieces := waiting():
        pieces[0].do()


def share_out(out_dir: Path, waiting: Callable[[], Sequence[Piece]]) -> None:
    """Do pieces until ``waiting`` gives none: those that are not done and could be done now, held by others or not.

    A piece that fails here is left to the others, and the first such exception is raised when nothing else is left: one
    run that cannot be done keeps nobody from the rest.
    """
    failed: dict[str, Exception] = {}
    while pieces := waiting():
        left = [piece for piece in pieces if piece.name not in failed]
        if not left:
            raise _first(failed)
        if not any(_done_here(out_dir, piece, failed) for piece in left):
            time.sleep(_POLL)  # the others are at the rest of them; one may be killed


def _done_here(out_dir: Path, piece: Piece, failed: dict[str, Exception]) -> bool:
    """Do a piece unless another process holds it; whether it was tried. What goes wrong is noted in ``failed``."""
    try:
        with only_process_in(out_dir / CLAIMS / piece.name, patience=0, required=True):
            try:
                if not piece.is_done():
                    piece.do()
            except InUseError:  # of a folder within: its holder may be another's run that is about to end
                raise
            except Exception as error:  # raised by share_out in the end
                failed[piece.name] = error
            return True
    except InUseError:
        return False


def _first(failed: dict[str, Exception]) -> Exception:
    """The first of several exceptions, with the names of what else failed."""
    names, error = list(failed), next(iter(failed.values()))
    if names[1:]:
        error.args = (f"{error} ({', '.join(names[1:])} failed, too)", *error.args[1:])
    return error


def worker_log(out_dir: Path, shared: bool) -> Path:
    """Return where what runs print goes: of shared work a file for each process."""
    return out_dir / (f"worker-{platform.node()}-{os.getpid()}.log" if shared else "worker.log")


def check_sharing(folder: Path, what: str, shared: bool) -> None:
    """Raise ValueError if the studies in ``folder`` are kept in the other way: of shared work in a journal."""
    kept, other = (STORAGE, "shared=True (--share)") if shared else (JOURNAL, "shared=False (no --share)")
    if (folder / kept).exists():
        raise ValueError(f"{folder} holds {what} that was not begun with {other}; go on as it was begun")
