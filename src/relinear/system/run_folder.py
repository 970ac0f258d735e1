"""Manage a folder of results (``RunFolder``): a record says that relinear made it; earlier results are never deleted.

1. The record is written first. It has ``"made_by": "relinear"``, the task and its settings.
2. A folder that has a name that the task writes, but no record of the task, is an error. Other files do not matter.
3. The same settings resume. Other settings are an error that lists the differences.
4. To overwrite is to rename: ``model`` becomes ``model.20261231-235959``.
"""

import contextlib
import datetime
import itertools
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from relinear.system.files import read_json, remove_temporaries, write_json
from relinear.system.lock import exclusive
from relinear.system.machine import provenance
from relinear.system.text import shorten
from relinear.system.version import __version__

_ADVICE = "give another directory, or overwrite=True (--overwrite), which renames what is there"
#: settings whose keys are in a meaningful order
_ORDERED = ("entries", "operators")
#: how many differences a message lists
_MAX_LISTED = 10


class RunFolder:
    """The folder that a task writes its results into.

    Args:
        path: the folder, which need not exist.
        task: its name, such as "train".
        record: the file name of its record.
        names: the other files and folders that the task writes at the top of the folder.
        earlier_records: how to recognise records of 0.1 and 0.2, which lack ``made_by``: file -> its top-level keys.
        may_differ: settings that may differ when the task resumes.
        settings_of: returns a record's settings as this version writes them, also for records of earlier versions.
    """

    def __init__(
        self,
        path: str | Path,
        task: str,
        record: str,
        names: Collection[str] = (),
        *,
        earlier_records: Mapping[str, Collection[str]] = MappingProxyType({}),
        may_differ: Collection[str] = (),
        settings_of: Callable[[Mapping[str, Any]], Any] = lambda record: record.get("settings"),
    ) -> None:
        self.path, self.task, self.names = Path(path), task, (record, *names)
        self.may_differ, self.settings_of, self._earlier_records = may_differ, settings_of, earlier_records
        self._header: dict[str, Any] = {}
        self._facts: dict[str, Any] = {}

    @property
    def record_path(self) -> Path:
        """Return the path of the record."""
        return self.path / self.names[0]

    def read(self) -> dict[str, Any] | None:
        """Return the record of this task; None if there is none, or only one of another task. Raises OSError.

        The record is empty if an earlier version used another file for it.
        """
        values = _object_in(self.record_path)
        if "made_by" in values:
            return values if (values["made_by"], values.get("task")) == ("relinear", self.task) else None
        for name, keys in self._earlier_records.items():
            if _object_in(self.path / name).keys() >= set(keys):
                return values
        return None

    def check_ours(self) -> dict[str, Any] | None:
        """Return the record of this task, None if there is none; writes nothing.

        Raises:
            ValueError: if the path is a file, or if something else has the names that the task writes.
        """
        _check_directory(self.path)
        record = self.read()
        if record is None and (taken := self._taken()):
            problem = f"{self.path} has {', '.join(taken)}, and no record ({self.names[0]}) of relinear's {self.task}"
            raise ValueError(f"{problem}; {_ADVICE}")
        return record

    def check(self, settings: Mapping[str, Any], *, overwrite: bool = False) -> dict[str, Any] | None:
        """Return the record to resume from, None if the task starts anew; writes nothing.

        Args:
            settings: the task's, as JSON values.
            overwrite: existing results will be renamed.

        Raises:
            ValueError: as ``check_ours``; if the record has other settings, which the message lists.
        """
        if overwrite:
            _check_directory(self.path)
            return None
        if (record := self.check_ours()) is None:
            return None
        different = list(differences(self._compared(self.settings_of(record)), self._compared(settings)))
        if different:
            more = [f"and {len(different) - _MAX_LISTED} more"] if different[_MAX_LISTED:] else []
            lines = "\n  ".join([*different[:_MAX_LISTED], *more])
            raise ValueError(f"{self.path} holds results of {self.task} with other settings; {_ADVICE}:\n  {lines}")
        return record

    @contextlib.contextmanager
    def open(self, settings: Mapping[str, Any], *, overwrite: bool = False) -> Iterator[dict[str, Any] | None]:
        """Lock the folder and write its record within the block; yield what ``check`` returns.

        Unfinished files of an earlier process are removed. If the block fails before it writes anything, the record is
        removed as well.

        Raises:
            ValueError: as ``check``; if another process is at work in the folder.
            OSError: if the folder cannot be written to.
        """
        with exclusive(self.path):
            record = self.check(settings, overwrite=overwrite)
            if overwrite:
                for name in self.names:  # the record first, so that a killed process leaves no half of a run
                    set_aside(self.path / name)
            remove_temporaries(self.path)
            self._header = made_by(self.task) | {"settings": dict(settings)} | provenance()
            self._header["wrote"] = list((record or {}).get("wrote", []))
            self._facts = {key: value for key, value in (record or {}).items() if key not in self._header}
            if not record:
                self.write()
            try:
                yield record
            except BaseException:
                if record is None and self._taken() == [self.names[0]]:
                    self.record_path.unlink()
                raise

    def write(self, **facts: Any) -> dict[str, Any]:
        """Write the record with ``facts``, which replace those of before, and return it. Raises OSError."""
        self._facts = facts
        write_json(self.record_path, record := self._header | facts)
        return record

    def take(self, name: str) -> Path:
        """Return the path to write a result to; whatever exists there is renamed, unless this task wrote it."""
        if name not in self._header["wrote"]:
            set_aside(self.path / name)
            self._header["wrote"].append(name)
            self.write(**self._facts)
        return self.path / name

    def _compared(self, settings: Any) -> Any:
        """Return the settings that must not differ when the task resumes."""
        if not isinstance(settings, Mapping):  # of a damaged record: they differ from all settings
            return settings
        return {key: value for key, value in settings.items() if key not in self.may_differ}

    def _taken(self) -> list[str]:
        """Return the names of the task that exist; empty folders do not count."""
        paths = (self.path / name for name in self.names)
        return [p.name for p in paths if os.path.lexists(p) and not (p.is_dir() and not any(p.iterdir()))]


def made_by(task: str) -> dict[str, Any]:
    """Return the entries of a record that identify its maker: relinear, the version and the task."""
    return {"made_by": "relinear", "version": __version__, "task": task}


def _object_in(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; an empty one if the file is missing or has none."""
    with contextlib.suppress(ValueError):
        values = read_json(path) if path.is_file() else {}
        return values if isinstance(values, dict) else {}
    return {}


def _check_directory(path: Path) -> None:
    existing = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
    if not existing.is_dir():
        raise ValueError(f"{existing} is a file; give a directory")


def set_aside(path: Path) -> Path | None:
    """Rename what is at ``path`` to NAME.<time>; return its new path, None if nothing is there. Raises OSError."""
    if not os.path.lexists(path):
        return None
    stem = f"{path.name}.{datetime.datetime.now():%Y%m%d-%H%M%S}"
    names = itertools.chain([stem], (f"{stem}-{number}" for number in itertools.count(2)))
    free = next(candidate for name in names if not os.path.lexists(candidate := path.with_name(name)))
    return path.rename(free)


def differences(before: Any, now: Any, path: str = "") -> Iterator[str]:
    """Yield ``a.b: old -> new`` for every value that differs between two JSON trees."""
    if not (isinstance(before, Mapping) and isinstance(now, Mapping)):
        if before != now:
            yield f"{path}: {_shown(before)} -> {_shown(now)}"
        return
    for key in dict.fromkeys([*before, *now]):
        inner = shorten(f"{path}.{key}" if path else key)
        if key not in now:
            yield f"{inner}: {_shown(before[key])} -> (gone)"
        elif key not in before:
            yield f"{inner}: (not there) -> {_shown(now[key])}"
        else:
            yield from differences(before[key], now[key], inner)
    if path.rpartition(".")[2] in _ORDERED and before.keys() == now.keys() and list(before) != list(now):
        yield f"{path}: order {shorten(', '.join(before))} -> {shorten(', '.join(now))}"


def _shown(value: Any) -> str:
    return shorten(repr(value), 200)
