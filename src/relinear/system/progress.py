"""Define ``Progress``, the event that every long task passes to its ``on_progress`` callback."""

import dataclasses
from typing import Protocol

from relinear.deprecated import with_attributes_of_0_2


@with_attributes_of_0_2
@dataclasses.dataclass(frozen=True)
class Progress:
    """How far a task has come.

    Attributes:
        text: what is being done.
        done: its steps, batches or characters so far.
        total: all of them; 0 if it is not known.
        stage: the kind of work in one word, for programs.
        detail: the current part of the work.
        loss: the last one, in nats per token.
        validation_loss: the last one, in nats per token.
        tokens_per_second: speed over the last logged steps.
        run: finished training runs of a comparison.
        runs: all its known training runs.
        seconds_left: until the whole task ends, if known.
    """

    text: str
    done: int = 0
    total: int = 0
    stage: str = ""
    detail: str = ""
    loss: float | None = None
    validation_loss: float | None = None
    tokens_per_second: float | None = None
    run: int = 0
    runs: int = 0
    seconds_left: float | None = None


class ProgressCallback(Protocol):
    """Type every ``on_progress``: a function of a ``Progress``."""

    def __call__(self, progress: Progress, /) -> object: ...


def no_progress(progress: Progress) -> None:
    """Ignore progress."""
