"""Options of commands from the fields of their settings: name, type, default, choices, and what they are.

Importing relinear takes seconds, so they are read from a file, which ``make docs-cli`` writes anew
(``docs/make/commands.py``). A test holds it to the settings' classes, and to the names of what can be listed.
"""

import difflib
import functools
import inspect
import json
import operator
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

FILE = Path(__file__).with_name("fields.json")
#: type of a field -> that of its option: lists are given several times, numbers and words with commas
_TYPES: dict[str, Any] = {
    "bool": bool,
    "int": int,
    "float": float,
    "text": str,
    "texts": list[str],
    "integers": str,
    "numbers": str,
    "words": str,
}
#: type of a field that is given with commas -> that of its parts
_PARTS: dict[str, Callable[[str], Any]] = {"integers": int, "numbers": float, "words": str.strip}


def from_settings(settings: str, *fields: str, **named: str) -> Callable[[Callable], Callable]:
    """Decorate a command that takes ``given``: it gets an option for each of these fields of its settings, and --set.

    ``given`` is then what the user said of any field, by the field's name. Wrong names are refused before relinear is
    imported.

    Args:
        settings: whose fields: a key of the file.
        fields: such as ``steps`` and ``data.tokenizer``; the option has the last part of the name.
        named: option -> field, where the option has another name.
    """
    options = {field.rpartition(".")[2]: field for field in fields} | named

    def decorate(command: Callable) -> Callable:
        hints = typing.get_type_hints(command, include_extras=True)
        parameters = []
        for name, parameter in inspect.signature(command).parameters.items():
            if name == "given":
                known = fields_of(settings)
                parameters += [_option(option, known[field]) for option, field in options.items()]
            else:
                parameters.append(parameter.replace(kind=parameter.KEYWORD_ONLY, annotation=hints[name]))
        parameters.append(_parameter("overrides", list[str], "--set", metavar="KEY=VALUE", help=_ANY))

        @functools.wraps(command)
        def run(**values: Any) -> None:
            said = {field: values.pop(option) for option, field in options.items()}
            overrides = values.pop("overrides") or []
            check_keys(settings, overrides)
            from relinear.compare.recipe import parse_overrides
            from relinear_cli.options import parse_numbers

            for option, field in options.items():
                if kind := _PARTS.get(fields_of(settings)[field]["type"]):
                    said[field] = parse_numbers(f"--{option}", said[field], kind)
            given = {field: value for field, value in said.items() if value is not None and value != []}
            command(**values, given=given | parse_overrides(overrides))

        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return run

    return decorate


_ANY = "Any other setting, by its name in a recipe; may be repeated."


def _option(name: str, field: dict[str, Any]) -> inspect.Parameter:
    """The option of one field: where the user does not give it, it says nothing."""
    default, choices, flag = field["default"], field["choices"], f"--{name.replace('_', '-')}"
    flags = [flag] if field["type"] == "bool" and default is False else []
    shown = flag if default is True else default is not None and default is not False and str(default)
    kind = operator.getitem(Literal, tuple(choices)) if field["type"] == "text" and choices else _TYPES[field["type"]]
    several = f"<{'|'.join(choices)}>,..." if field["type"] == "words" else None
    return _parameter(name, kind, *flags, help=field["help"], show_default=shown, metavar=several)


def _parameter(name: str, kind: Any, *flags: str, **described: Any) -> inspect.Parameter:
    annotation = Annotated[kind | None, typer.Option(*flags, **described)]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


@functools.cache
def _read() -> dict[str, dict[str, dict[str, Any]]]:
    found: dict[str, dict[str, dict[str, Any]]] = json.loads(FILE.read_text(encoding="utf-8"))
    return found


def fields_of(settings: str) -> dict[str, dict[str, Any]]:
    """Return field -> {"type", "default", "choices", "help"}, inner ones as ``data.seed``; {} of no settings."""
    return _read().get(settings, {})


def own_names(what: str) -> list[str]:
    """Return the names of relinear's own operators, presets or whatever else ``relinear list`` knows."""
    return [*_read()["names"][what]]


def check_keys(settings: str, overrides: Sequence[str]) -> None:
    """Raise ValueError for a ``--set KEY=VALUE`` whose key is no field of these settings, with the nearest."""
    fields = fields_of(settings)
    groups = {name.rpartition(".")[0] for name in fields}
    for text in overrides if fields else ():
        key = text.partition("=")[0].strip()
        parts = key.split(".")
        # what stands behind a field that is no group of settings is for the settings themselves to judge
        if any(".".join(parts[:count]) in set(fields) - groups for count in range(1, len(parts))) or key in fields:
            continue
        short = [name for name in fields if key.lower() == "".join(word[:1] for word in name.split("_"))]
        close = short or difflib.get_close_matches(key[:200], fields, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(map(repr, close))}?" if close else f"known: {', '.join(fields)}"
        raise ValueError(f"--set: unknown setting {key[:200]!r}; {hint}")
