"""What several commands read from their arguments: operators, overrides, models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

__all__ = [
    "is_directory_of_model",
    "load_model",
    "operator_mapping",
    "parse_layers",
    "parse_operators",
    "prepare_process",
]


def prepare_process() -> None:
    """Ready a process that is going to compute: tune the allocator and say so."""
    import sys

    from transformers.utils.logging import disable_progress_bar

    from relinear.system.allocator import tune_allocator

    disable_progress_bar()  # of loading and writing weights: a flicker among our own

    thresholds = tune_allocator()
    if thresholds:
        stated = ", ".join(f"{name} {value:,} bytes" for name, value in thresholds.items())
        print(f"allocator: {stated}", file=sys.stderr)


def parse_operators(texts: list[str]) -> dict[str, dict[str, Any] | None]:
    """``PATTERN=KIND:KEY=VALUE`` texts as the mapping that recipes hold; a bare setting means "all-linear".

    Raises:
        ValueError: if a text has not this form, or a pattern comes twice.
    """
    from relinear.core.config import parse_setting

    mapping: dict[str, dict[str, Any] | None] = {}
    for text in texts:
        # The pattern ends at the first "=" unless that one belongs to the setting, as in "hdpl:rank=8".
        head, equals, rest = text.partition("=")
        bare = not equals or (
            ":" in head and not head.endswith(("(?", "(?:")) and head.partition(":")[0].isidentifier()
        )
        pattern, setting = ("all-linear", text) if bare else (head, rest)
        if pattern in mapping:
            raise ValueError(f"pattern {pattern!r} is given twice")
        mapping[pattern] = None if setting.strip().lower() in ("none", "dense") else parse_setting(setting)
    return mapping


def operator_mapping(texts: list[str]) -> dict[str, Any]:
    """The same texts as the mapping that ``replace_`` takes. Raises ValueError for unknown operators too."""
    from relinear.core.operator import OperatorConfig

    return {p: None if s is None else OperatorConfig.from_dict(s) for p, s in parse_operators(texts).items()}


def parse_layers(text: str | None) -> list[int] | None:
    """``"0,3,8-11"`` as a list of layer indices; None for all.

    Raises:
        ValueError: if a part is neither a number nor a range.
    """
    if text is None:
        return None
    indices: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        try:
            indices += range(int(first), int(last) + 1) if dash and first else [int(part)]
        except ValueError:
            raise ValueError(f"--layers {text!r}: {part.strip()!r} is neither a number nor a range like 4-11") from None
    return indices


def is_directory_of_model(name: str) -> bool:
    """Whether ``name`` looks like a path rather than a preset."""
    return Path(name).exists() or name.startswith((".", "/", "~")) or "/" in name


def load_model(name: str, overrides: dict[str, Any] | None = None, *, meta: bool = False) -> Any:
    """A preset or a saved model, in eval mode.

    Args:
        name: preset, directory or Hub name.
        overrides: fields of a preset's config.
        meta: build a preset without memory for its weights (to count, not to run).

    Raises:
        ValueError: if the preset is unknown, or overrides are given with a saved model.
    """
    import torch

    import relinear

    if is_directory_of_model(name):
        if overrides:
            raise ValueError(f"{name} is a saved model; only presets ({', '.join(relinear.preset_names())}) take --set")
        path = Path(name).expanduser()
        if not path.exists():
            _check_hub(name)
        return relinear.from_pretrained(path if path.exists() else name).eval()
    with torch.device("meta" if meta else "cpu"):
        return relinear.from_preset(name, **(overrides or {})).eval()


def _check_hub(name: str) -> None:
    """A name that is no path may be one of the Hub; without a network that would take a minute to find out."""
    from relinear.data.hub import hub_in_reach

    if name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise FileNotFoundError(f"{name}: no such directory")
    if not hub_in_reach():
        raise FileNotFoundError(f"{name}: no such directory, and the Hugging Face Hub cannot be reached")


def set_if_given(values: dict[str, Any]) -> dict[str, Any]:
    """The options that the user gave: those that are not None."""
    return {key: value for key, value in values.items() if value is not None}


def parse_seeds(text: str | None) -> list[int] | None:
    """``"0,1,2"`` as a list of integers; None for none. Raises ValueError if a part is no integer."""
    if text is None:
        return None
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"--seeds {text!r}: write them as 0,1,2") from None


def named_entries(settings: list[str]) -> dict[str, str]:
    """Entries named by the kind of their operator; by the whole setting where a kind comes several times.

    Raises:
        ValueError: if the same setting is given twice.
    """
    kinds = [setting.partition(":")[0].strip() for setting in settings]
    entries: dict[str, str] = {}
    for kind, setting in zip(kinds, settings, strict=True):
        name = kind if kinds.count(kind) == 1 else "-".join(part for part in _words(setting) if part)
        if name in entries:
            raise ValueError(f"the entry {setting!r} is given twice")
        entries[name] = setting
    return entries


def _words(setting: str) -> list[str]:
    """The parts of a setting with nothing in them that a folder's name should not have."""
    import re

    return re.split(r"[^A-Za-z0-9_.=+]+", setting)
