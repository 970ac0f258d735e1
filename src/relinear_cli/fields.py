"""Settings that commands take, as help and wrong keys need them: from a file, as importing relinear takes seconds.

``make docs-cli`` writes the file anew (``python -m relinear_cli.fields``); a test holds it to the settings' classes.
"""

from __future__ import annotations

import difflib
import functools
import json
import typing
from pathlib import Path
from typing import Any

__all__ = ["check_keys", "described", "fields_of", "made"]

FILE = Path(__file__).with_name("fields.json")
#: command -> the settings whose fields its options and its --set name
_COMMANDS = {"train": "train", "sweep": "train", "compress": "compress", "distill": "distill"}
#: option -> field, where their names differ
_NAMES = {"batch": "speed_batch", "data": "data.data", "text_column": "data.text_column", "tokenizer": "data.tokenizer"}


@functools.cache
def _read() -> dict[str, dict[str, dict[str, Any]]]:
    found: dict[str, dict[str, dict[str, Any]]] = json.loads(FILE.read_text(encoding="utf-8"))
    return found


def fields_of(command: str) -> dict[str, dict[str, Any]]:
    """Return field -> {"default", "choices"} of a command's settings, inner ones as ``data.seed``; {} of none."""
    return _read().get(_COMMANDS.get(command, ""), {})


def described(command: str, option: str) -> dict[str, Any]:
    """Return what is known of the field that an option of a command sets; {} where it sets none."""
    fields = fields_of(command)
    return fields.get(option) or fields.get(_NAMES.get(option, "")) or {}


def check_keys(command: str, overrides: list[str]) -> None:
    """Raise ValueError for a ``--set KEY=VALUE`` whose key is no field of the command's settings, with the nearest."""
    fields = fields_of(command)
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


def made() -> dict[str, Any]:
    """Return what the file holds, from the settings' classes."""
    from relinear.compress import CompressSettings
    from relinear.distill import DistillSettings
    from relinear.train import TrainSettings

    classes = {"train": TrainSettings, "compress": CompressSettings, "distill": DistillSettings}
    return {name: dict(_fields(settings)) for name, settings in classes.items()}


def _fields(settings: Any, prefix: str = "") -> Any:
    from relinear.core.settings import Settings

    for name, field in settings.model_fields.items():
        default = field.get_default(call_default_factory=True)
        parts = (field.annotation, *typing.get_args(field.annotation))
        inner = next((part for part in parts if isinstance(part, type) and issubclass(part, Settings)), None)
        choices = parts[1:] if typing.get_origin(field.annotation) is typing.Literal else ()
        shown = default if default is None or isinstance(default, bool | int | float | str) else None
        yield prefix + name, {"default": shown, "choices": [*map(str, choices)]}
        if inner is not None:
            yield from _fields(inner, f"{prefix}{name}.")


if __name__ == "__main__":
    FILE.write_text(json.dumps(made(), indent=1).replace("\n   ", "").replace("\n  }", "}") + "\n", encoding="utf-8")
