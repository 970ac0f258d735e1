"""Puts work off to the first import that needs it: ``import relinear`` and ``relinear --help`` take a moment.

relinear's kinds, models and loader are found by name: by transformers, and by whoever reads a setting. They have to be
there before any room of ours runs, and when transformers can load a checkpoint. Registering them takes torch and
transformers with it, so it waits for the first import of either a room (it then goes before the room's own code) or
transformers (it then comes after transformers' own code).
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__all__ = ["on_first_use"]


def on_first_use(package: str, without: Sequence[str], beside: str, work: Callable[[], Any]) -> None:
    """Call ``work`` once: before the first subpackage of ``package`` runs, or after the module ``beside`` has.

    Where ``beside`` has been imported already, that is now. If ``work`` fails, so does the import that asked for it,
    and the next one tries again.

    Args:
        package: its name.
        without: subpackages that do not count.
        beside: name of a top-level module.
        work: what to do; the modules that it imports do not ask for it again.
    """
    if beside in sys.modules:
        work()
    else:
        sys.meta_path.insert(0, _Finder(package, without, beside, work))


class _Finder:
    """A finder for ``sys.meta_path`` that lets the others find, and adds the work to what the loader does."""

    def __init__(self, package: str, without: Sequence[str], beside: str, work: Callable[[], Any]) -> None:
        self.package, self.without, self.beside, self.work = package, without, beside, work

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, inner = name.partition(".")
        is_room = package == self.package and inner != "" and inner.partition(".")[0] not in self.without
        if not is_room and name != self.beside:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            sys.meta_path.insert(0, self)
            return spec
        loader: Any = spec.loader
        run = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module  # this once
            if not is_room:
                run(module)
            try:
                self.work()
            except BaseException:
                sys.meta_path.insert(0, self)
                raise
            if is_room:
                run(module)

        loader.exec_module = exec_module
        return spec
