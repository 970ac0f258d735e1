"""Work in pieces, done alone or shared: each process takes the next piece that nobody holds, until none is left.

A piece is held by the lock of a folder of its own, which the operating system takes from a process that ends, in
whatever way. What a killed one had begun is then another's, which goes on with it from its last checkpoint.
"""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from relinear.system.files import read_json, write_json
from relinear.system.lock import InUseError, only_process_in
from relinear.train.settings import TrainSettings

#: folder of the locks
CLAIMS = "claims"
#: seconds between looks at what others are doing
_POLL = 1.0


@dataclasses.dataclass(frozen=True)
class Piece:
    """A piece of work.

    name: of its lock, the same in every process. is_done: whether it needs no doing, asked by who holds it. do: does
    it, and leaves on disk what makes ``is_done`` true. later: whether it is put off while others can be done. run: the
    settings and the directory of the one training run that it is.
    """

    name: str
    is_done: Callable[[], bool]
    do: Callable[[], Any]
    later: bool = False
    run: tuple[TrainSettings, Path] | None = None


T = TypeVar("T")
#: yields the pieces that are not done and could be now, as long as there are any; returns what they came to
Work = Generator[Sequence[Piece], None, T]


def all_of(pieces: Sequence[Piece]) -> Work[None]:
    """Have every piece done."""
    while waiting := [piece for piece in pieces if not piece.is_done()]:
        yield waiting


def side_by_side(works: Sequence[Work[T]]) -> Work[list[T]]:
    """Carry out works that do not need each other, and return what each came to; one that fails holds up no other."""
    going, ended = dict(enumerate(works)), dict[int, T]()
    while going:
        waiting: list[Piece] = []
        for place, work in list(going.items()):
            try:
                waiting += next(work)
            except StopIteration as end:
                ended[place] = end.value
                del going[place]
            except ValueError as error:
                going[place] = _failing(f"failing-{place}", error)
                waiting += next(going[place])
        if waiting:
            yield sorted(waiting, key=lambda piece: piece.later)
    return [ended[place] for place in range(len(works))]


def _failing(name: str, error: ValueError) -> Work[Any]:
    """A piece that cannot be done, and says why."""

    def tell() -> NoReturn:
        raise error

    while True:
        yield [Piece(name, lambda: False, tell)]


def kept(path: Path, make: Callable[[], dict[str, Any]]) -> Work[dict[str, Any]]:
    """Return what ``path`` holds, made and written by one process unless it is there."""
    yield from all_of([Piece(path.stem, path.is_file, lambda: write_json(path, make()))])
    return read_json(path)


def alone_at(out_dir: Path, what: str, shared: bool) -> contextlib.AbstractContextManager[Any]:
    """Hold a part of shared work for a moment, to be waited for; work that is not shared is held as a whole."""
    if not shared:
        return contextlib.nullcontext()
    return only_process_in(out_dir / CLAIMS / what, patience=60, required=True)


def carry_out(
    out_dir: Path, work: Work[T], shared: bool, ahead: Callable[[Sequence[Piece]], Any] = lambda waiting: None
) -> T:
    """Do work and return what it came to: alone, piece by piece and until one fails, or as ``share_out``.

    ``ahead`` may do some of the pieces that are waiting before the first is done the usual way.
    """
    results: list[T] = []

    def noted() -> Work[None]:
        results.append((yield from work))

    with contextlib.closing(noted()) as pieces:
        if shared:
            share_out(out_dir, lambda: next(pieces, ()))
        while waiting := next(pieces, ()):
            ahead(waiting)
            if not waiting[0].is_done():
                waiting[0].do()
    return results[0]


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
