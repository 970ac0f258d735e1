"""Puts work off to the first import that needs it: ``import relinear`` and ``relinear --help`` take a moment.

relinear's kinds, models and loader are found by name: by transformers, and by whoever reads a setting. They have to be
there before any room of ours runs, and when transformers can load a checkpoint. Registering them takes torch and
transformers with it, so it waits until transformers has run, which every room asks for before its own code.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__all__ = ["after_import", "on_first_use"]


def on_first_use(package: str, without: Sequence[str], beside: str, work: Callable[[], Any]) -> None:
    """Call ``work`` once, after module ``beside`` has run; the subpackages of ``package`` import it before they run.

    Where ``beside`` has been imported already, that is now. If ``work`` fails, so does the import that asked for it,
    and the next one tries again. Looking for a module without importing it changes nothing.

    Args:
        package: its name.
        without: subpackages that do not count.
        beside: name of a module.
        work: what to do; the modules that it imports do not ask for it again.
    """
    for finder in _finders(package):  # of an import of the package that is now repeated
        finder.is_done = True
    if beside in sys.modules:
        work()
    else:
        # Nothing is ever taken out again: an import in another thread that is going through the list would pass over
        # the finder behind, and not find its module. One that is done gives way.
        sys.meta_path.insert(0, _Finder(package, without, beside, work))


def after_import(module: str, work: Callable[[], Any]) -> None:
    """Call ``work`` once, after ``module`` (a dotted name) has run; now, where it has been imported already."""
    on_first_use(module, without=(), beside=module, work=work)  # no import is inside a package of a dotted name


def _finders(package: str) -> list[_Finder]:
    return [finder for finder in sys.meta_path if isinstance(finder, _Finder) and finder.package == package]


class _Finder:
    """A finder for ``sys.meta_path`` that lets the others find, and adds the work to what the loader does."""

    def __init__(self, package: str, without: Sequence[str], beside: str, work: Callable[[], Any]) -> None:
        self.package, self.without, self.beside, self.work = package, without, beside, work
        self.is_done = False
        self._asked: set[tuple[int, str]] = set()  # threads, and the names that they are looking for

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, inner = name.partition(".")
        is_room = package == self.package and inner != "" and inner.partition(".")[0] not in self.without
        if self.is_done or (not is_room and name != self.beside):
            return None
        spec = self._found_by_others(name, path, target)
        if spec is not None and hasattr(spec.loader, "exec_module"):
            before, after = (self.import_beside, None) if is_room else (None, self.finish)
            spec.loader = _Loader(spec.loader, before, after)  # type: ignore[assignment]
        return spec

    def _found_by_others(self, name: str, path: Sequence[str] | None, target: ModuleType | None) -> ModuleSpec | None:
        """What an import without this finder finds.

        None where another finder, which also looks through the others, has come back to this one.
        """
        question = (threading.get_ident(), name)
        if question in self._asked:
            return None
        self._asked.add(question)
        try:
            for finder in list(sys.meta_path):
                find = None if isinstance(finder, _Finder) else getattr(finder, "find_spec", None)
                spec = None if find is None else find(name, path, target)
                if spec is not None:
                    return spec
            return None
        finally:
            self._asked.discard(question)

    def import_beside(self) -> None:
        """What every room does first; nothing while ``beside`` itself is being imported, or was."""
        import_module(self.beside)

    def finish(self) -> None:
        self.work()
        self.is_done = True


class _Loader:
    """A module's own loader, with a call before the module is made or after it has run."""

    is_loaded = False

    def __init__(self, loader: Any, before: Callable[[], None] | None, after: Callable[[], None] | None) -> None:
        self.loader, self.before, self.after = loader, before, after

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        if self.before is not None:
            try:
                self.before()
            except BaseException:
                sys.modules.pop(spec.name, None)  # the next import of it tries again
                raise
            if spec.name in sys.modules:  # what was done before needed this module, whole
                self.is_loaded = True
                return sys.modules[spec.name]
        module: ModuleType | None = self.loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:  # from here on as if it had been found without us
            module.__spec__.loader = module.__loader__ = self.loader
        if not self.is_loaded:
            self.loader.exec_module(module)
        if self.after is not None:
            self.after()

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # of a copy that is being made
            raise AttributeError(name)
        return getattr(self.loader, name)
