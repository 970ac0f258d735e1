"""Recipes: what ``relinear compare`` is asked to do, as YAML that is checked before anything starts."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from relinear.core import plugins
from relinear.core.config import nearest, shown
from relinear.system.files import read_text
from relinear.system.text import cut

#: the recipes that come with relinear
BUNDLED = Path(__file__).parent / "recipes"


#: characters of what the YAML parser says
_LONGEST = 500
#: characters of a file of settings; a device never ends
_LONGEST_FILE = 1_000_000
#: values in a file of settings, and how deep they are nested
_MOST, _DEEPEST = 100_000, 64


class _Loader(yaml.SafeLoader):
    """The safe loader that refuses repeated keys and endless texts, and reads 1e-3 as a number, as YAML 1.2 does."""

    depth = nodes = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self.depth, self.nodes = self.depth + 1, self.nodes + 1
        if self.depth > _DEEPEST:
            raise ValueError(f"it is nested too deeply: at most {_DEEPEST} levels")
        if self.nodes > _MOST:
            raise ValueError(f"it has more than {_MOST:,} values")
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    loader.flatten_mapping(node)
    pairs: dict[Any, Any] = {}
    for key_node, value_node in node.value:
        key = loader.construct_object(key_node, deep=True)
        try:
            repeated = key in pairs
        except TypeError:
            raise yaml.constructor.ConstructorError(
                None, None, f"a key must be plain text, got {key!r}", key_node.start_mark
            ) from None
        if repeated:
            raise yaml.constructor.ConstructorError(None, None, f"the key {key!r} comes twice", key_node.start_mark)
        pairs[key] = loader.construct_object(value_node, deep=True)
    return pairs


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def read_yaml(path: str | Path) -> dict[str, Any]:
    """Return the mapping in a YAML file, by a safe loader.

    Raises:
        FileNotFoundError, IsADirectoryError: if there is no such file.
        ValueError: if it is no YAML (with line and column), or no mapping.
    """
    path = Path(path)
    text = read_text(path, _LONGEST_FILE + 1)
    if len(text) > _LONGEST_FILE:
        raise ValueError(f"{path} is longer than {_LONGEST_FILE:,} characters, and so no file of settings")
    values = read_value(text, str(path))
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold a mapping of settings, got {shown(values)}")
    return values


def _one_line(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
    return where + str(getattr(error, "problem", None) or error).replace("\n", " ")[:_LONGEST]


def parse_overrides(assignments: Iterable[str]) -> dict[str, Any]:
    """``["a.b=1e-3", ...]`` as {"a.b": 0.001}; values are read as YAML, so lists and mappings work too.

    Raises:
        ValueError: if one has no ``=``, an empty key or a value that is no YAML.
    """
    values: dict[str, Any] = {}
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        key = key.strip()
        if not equals or not key or not all(key.split(".")):
            raise ValueError(f"--set {shown(assignment)}: write it as key.subkey=value, for instance train.steps=100")
        values[key] = read_value(text, f"--set {shown(assignment)}")
    return values


def read_value(text: str, where: str) -> Any:
    """Return one value in YAML; ``where`` heads the message of the ValueError if it is none."""
    try:
        value = yaml.load(text, Loader=_Loader)  # a SafeLoader
    except yaml.YAMLError as error:
        raise ValueError(f"{where}: the value is no valid YAML: {_one_line(error)}") from None
    except (ValueError, LookupError, AttributeError) as error:  # an integer of 5,000 digits; a tag on what is none
        raise ValueError(f"{where}: the value cannot be read: {cut(str(error))}") from None
    _check_size(value, where)
    return value


def _check_size(value: Any, where: str) -> None:
    """Refuse what a few lines with anchors can stand for: values that hold themselves, or more than any file would."""
    waiting, seen = [value], 0
    while waiting:
        node = waiting.pop()
        seen += 1
        if seen > _MOST:
            raise ValueError(f"{where} stands for more than {_MOST:,} values; write out what its anchors (&, *) repeat")
        if isinstance(node, dict | list):
            waiting.extend(node.values() if isinstance(node, dict) else node)


def apply_overrides(values: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of nested ``values`` with dotted keys set; mappings on the way are made where they are missing.

    A key that itself contains dots (a module name) is found if it exists as a whole at its level.

    Raises:
        ValueError: if a key leads through something that is no mapping.
    """
    result = dict(values)
    for dotted, value in overrides.items():
        _set(result, dotted, dotted, value)
    return result


def _set(values: dict[str, Any], key: str, whole: str, value: Any) -> None:
    head, dot, rest = key.partition(".")
    if not dot or key in values:
        values[key] = value
        return
    inner = values.get(head)
    if inner is not None and not isinstance(inner, Mapping):
        raise ValueError(f"--set {shown(whole)}: {shown(head)} is {shown(inner)}, which has no settings of its own")
    inner = dict(inner or {})
    _set(inner, rest, whole, value)
    values[head] = inner


def find_recipe(name: str | Path) -> Path:
    """The file of a recipe: a path, or the name of one in the folder ``recipes`` here or of those that relinear brings.

    A file that is there comes first. Else NAME, NAME.yaml, recipes/NAME and recipes/NAME.yaml all mean the recipe NAME.

    Raises:
        FileNotFoundError: if there is none, with the nearest names.
    """
    path = Path(name)
    if path.is_file():
        return path
    folders = [Path("recipes"), BUNDLED]
    if path.parent in (Path(), Path("recipes")):
        for folder in folders:
            candidate = folder / f"{path.name.removesuffix('.yaml')}.yaml"
            if candidate.is_file():
                return candidate
    if path.exists():
        return path  # a folder, say: reading it tells
    if (other := plugins.find("recipe", path.name.removesuffix(".yaml"))) is not None:
        return Path(other)
    known = sorted(
        set(plugins.offered("recipe"))
        | {file.stem for folder in folders if folder.is_dir() for file in folder.glob("*.yaml")}
    )
    raise FileNotFoundError(f"no recipe {str(name)!r}; {nearest(path.stem, known)}")


def read_recipe(name: str | Path) -> dict[str, Any]:
    """Return the values of a recipe by file or by name; its name is the file's unless it says otherwise.

    Raises:
        FileNotFoundError: if there is none (names the nearest).
        ValueError: if it is no YAML mapping.
    """
    path = find_recipe(name)
    return {"name": path.stem} | read_yaml(path)
