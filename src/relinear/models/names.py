"""What the name of a model means: a preset, a directory, or a model of the Hugging Face Hub. Asks no network."""

from __future__ import annotations

from os.path import isfile
from pathlib import Path
from typing import Literal

from relinear.core.config import nearest, shown
from relinear.models.presets import preset_names

__all__ = ["is_fetched", "missing_directory", "model_folder", "model_place"]

#: names of the Hub from before every model had an owner
_WITHOUT_OWNER = ("distilgpt2", "gpt2", "gpt2-large", "gpt2-medium", "gpt2-xl", "openai-gpt")


def model_place(name: str, *, presets: bool = True) -> Literal["preset", "directory", "hub"]:
    """Where the model ``name`` is to be had, as far as can be told without a network.

    Args:
        name: what a user wrote.
        presets: whether a preset would do.

    Raises:
        ValueError: if it can be none of the three; names the nearest presets.
        FileNotFoundError: if it is written as a path and there is no such directory; names what is there.
        NotADirectoryError: if it is a file.
    """
    if not isinstance(name, str) or not name.strip() or len(name) > 4096 or "\0" in name:
        raise ValueError(f"a model is named by a preset, a directory or a name of the Hub, got {shown(name)}")
    if presets and name in preset_names():
        return "preset"
    path = Path(name).expanduser()
    if _exists(path):
        if not path.is_dir():
            raise NotADirectoryError(f"{name} is a file; give the directory that the model was saved to")
        return "directory"
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise FileNotFoundError(missing_directory(name))
    if "/" in name or name in _WITHOUT_OWNER or is_fetched(name):
        return "hub"
    near, what = (f"; {nearest(name, preset_names())}", "no preset, ") if presets else ("", "")
    raise ValueError(
        f"unknown model {shown(name)}{near} (It is {what}no directory here, and names of the Hugging Face Hub have the "
        "form owner/name.)"
    )


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # a name that is too long for a file
        return False


def is_fetched(name: str) -> bool:
    """Whether the Hub's client has kept a model of this name."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        return isinstance(try_to_load_from_cache(name, "config.json"), str)
    except HFValidationError:
        return False


def missing_directory(name: str) -> str:
    """The message for a path where nothing is, with the nearest names in the last folder on the way that exists."""
    path = Path(name).expanduser()
    folder = next((parent for parent in path.parents if _exists(parent)), Path("."))
    wanted = path.relative_to(folder).parts[0]
    there = sorted(child.name for child in folder.iterdir() if child.is_dir()) if folder.is_dir() else []
    hint = f"in {folder} {nearest(wanted, there)}" if there else f"{folder} has no directories"
    return f"{shown(name)[1:-1]}: no such directory; {hint}"


def model_folder(name: str) -> str:
    """The folder of the model in the directory of a run (of ``train`` or ``distill``); any other name as it is."""
    path = Path(name).expanduser()
    inside = path / "model"
    # os.path: a name that is too long for a file is no error here
    return str(inside) if not isfile(path / "config.json") and isfile(inside / "config.json") else name
