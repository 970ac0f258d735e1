"""Find operators, residual methods, objectives, analyses and recipes of other packages by name.

A package declares them as entry points, which are read when a name is unknown and imported on use::

    [project.entry-points."relinear.operators"]
    btt = "my_package.btt:BTT"

Modules of packages that are not installed are named in the environment,
``RELINEAR_IMPORT=my_package.btt,my_package.other``. ``relinear --import`` sets it, also for the processes it starts.
"""

import dataclasses
import functools
import importlib
import os
from collections.abc import Iterable, Iterator
from importlib import metadata
from typing import Any

from relinear.settings.messages import warn_user

#: environment variable: modules to import, separated by commas
IMPORT_VARIABLE = "RELINEAR_IMPORT"
#: family -> the group of its entry points, if packages can add to it
GROUPS = {
    "operator": "relinear.operators",
    "attachment": "relinear.residual",
    "objective": "relinear.objectives",
    "analysis": "relinear.analyses",
    "recipe": "relinear.recipes",
}


def entry_points(family: str) -> dict[str, metadata.EntryPoint]:
    """Return the entry points of a family ("operator", "attachment", "objective", ...), by name."""
    group = GROUPS.get(family)
    return {} if group is None else {point.name: point for point in metadata.entry_points(group=group)}


def load(family: str, name: str) -> Any:
    """Load the entry point ``name`` of a family; return None if there is none, or with a warning if loading fails."""
    point = entry_points(family).get(name)
    if point is None:
        return None
    try:
        return point.load()
    except Exception as error:
        source = f"{point.value} of the package {point.dist.name if point.dist else 'unknown'}"
        warn_user(f"the {family} {name!r} is skipped: {source} fails with {error!r}")
        return None


def import_from_environment() -> None:
    """Import the modules named in ``RELINEAR_IMPORT``; a module that fails is skipped with a warning."""
    for module in _modules_in_environment():
        try:
            importlib.import_module(module)
        except Exception as error:
            warn_user(f"{IMPORT_VARIABLE} names {module}, which fails with {error!r}")


def _modules_in_environment() -> list[str]:
    return [module for part in os.environ.get(IMPORT_VARIABLE, "").split(",") if (module := part.strip())]


def environment(classes: Iterable[type]) -> dict[str, str]:
    """Return environment variables by which a new process imports the modules of ``classes`` of other packages."""
    modules = dict.fromkeys([*_modules_in_environment(), *(cls.__module__ for cls in classes if _is_foreign(cls))])
    return {IMPORT_VARIABLE: ",".join(module for module in modules if module != "__main__")}


def _is_foreign(cls: type) -> bool:
    return cls.__module__.partition(".")[0] != "relinear"


def origin(cls: type) -> dict[str, str]:
    """Return the module of a class and, if known, its package and version."""
    module = cls.__module__
    package = _package(module.partition(".")[0])
    return {"module": module} | ({"package": package, "version": metadata.version(package)} if package else {})


@functools.cache  # reading the files of every installed package takes a second or two
def _package(module: str) -> str | None:
    packages = metadata.packages_distributions().get(module)
    return packages[0] if packages else None


def packages_of(configs: Iterable[Any]) -> dict[str, dict[str, str]]:
    """Return kind -> ``origin`` for every config among ``configs``, nested ones too, that is not relinear's."""
    return {config.kind: origin(type(config)) for config in _with_inner(configs) if _is_foreign(type(config))}


def _with_inner(configs: Iterable[Any]) -> Iterator[Any]:
    for config in configs:
        yield config
        values = (getattr(config, field.name) for field in dataclasses.fields(config))
        yield from _with_inner(value for value in values if dataclasses.is_dataclass(value))
