"""Read settings that users write in YAML, in files and as KEY=VALUE, and change some by dotted names."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from relinear.settings.messages import quoted
from relinear.system.files import read_text
from relinear.system.text import shorten

#: longest part of the YAML parser's message that is quoted, in characters
_MAX_PARSER_MESSAGE = 500
#: longest text of settings, in characters; reading a device would never end
_MAX_TEXT = 100_000


def read_yaml(path: str | Path) -> dict[str, Any]:
    """Return the mapping in a YAML file, by a safe loader.

    Raises:
        FileNotFoundError, IsADirectoryError: if there is no such file.
        ValueError: if it is not YAML (with line and column), or no mapping.
    """
    path = Path(path)
    values = read_value(read_text(path, _MAX_TEXT + 1), str(path))
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold a mapping of settings, got {quoted(values)}")
    return values


def _one_line(error: MarkedYAMLError) -> str:
    mark = error.problem_mark
    position = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
    return position + str(error.problem).replace("\n", " ")[:_MAX_PARSER_MESSAGE]


def parse_overrides(assignments: Iterable[str], option: str = "--set") -> dict[str, Any]:
    """Return ``["a.b=1e-3", ...]`` as {"a.b": 0.001}; values are read as YAML, so lists and mappings work too.

    Raises:
        ValueError: if one has no ``=``, an empty key or a value that is not YAML.
    """
    values: dict[str, Any] = {}
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        key = key.strip()
        if not equals or not key or not all(key.split(".")):
            example = ", for instance train.steps=100" if option == "--set" else ""
            raise ValueError(f"{option} {quoted(assignment)}: write it as key.subkey=value{example}")
        values[key] = read_value(text, f"{option} {quoted(assignment)}")
    return values


def read_value(text: str, name: str) -> Any:
    """Return one value in YAML 1.2, by a safe loader: 010 is ten; 1:30 and yes are texts.

    Raises:
        ValueError: if the text is not valid; the message begins with ``name``.
    """
    if len(text) > _MAX_TEXT:
        raise ValueError(f"{name} is longer than {_MAX_TEXT:,} characters, and so no settings")
    try:
        return YAML(typ="safe", pure=True).load(text)
    except MarkedYAMLError as error:
        raise ValueError(f"{name}: the value is not valid YAML: {_one_line(error)}") from None
    except RecursionError:
        raise ValueError(f"{name}: it is nested too deeply") from None
    except (ValueError, LookupError, AttributeError, TypeError, YAMLError) as error:  # an integer of 5,000 digits
        raise ValueError(f"{name}: the value cannot be read: {shorten(str(error))}") from None


def apply_overrides(values: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of nested ``values`` with dotted keys set; mappings on the way are made where they are missing.

    A key that itself contains dots (a module name) is found if it exists as a whole at its level.

    Raises:
        ValueError: if a key leads through something that is not a mapping.
    """
    result = dict(values)
    for dotted, value in overrides.items():
        result = _with_key(result, dotted, value, dotted)
    return result


def _with_key(values: Mapping[str, Any], key: str, value: Any, full_key: str) -> dict[str, Any]:
    """Return a copy of nested ``values`` with a dotted key set; ``full_key`` is for messages."""
    head, dot, rest = key.partition(".")
    if not dot or key in values:
        return {**values, key: value}
    inner = values.get(head)
    if inner is not None and not isinstance(inner, Mapping):
        raise ValueError(f"{quoted(full_key)}: {quoted(head)} is {quoted(inner)}, which has no settings of its own")
    return {**values, head: _with_key(inner or {}, rest, value, full_key)}


def without_key(values: Mapping[str, Any], dotted: str) -> dict[str, Any]:
    """Return a copy of nested ``values`` without a dotted key."""
    head, dot, rest = dotted.partition(".")
    inner = values.get(head)
    if dot and isinstance(inner, Mapping):
        return {**values, head: without_key(inner, rest)}
    return {key: value for key, value in values.items() if key != dotted}
