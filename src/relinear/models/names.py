"""What the name of a model means: a preset, a directory, or a model of the Hugging Face Hub. Asks no network."""

from __future__ import annotations

from os.path import isfile
from pathlib import Path
from typing import Literal

from relinear.core.places import saved_place
from relinear.models.presets import preset_names

__all__ = ["model_folder", "model_place"]


def model_place(name: str, *, presets: bool = True) -> Literal["preset", "directory", "hub"]:
    """Return where the model ``name`` is to be had, as far as can be told without a network.

    Args:
        name: what a user wrote.
        presets: whether a preset would do.

    Raises:
        ValueError, FileNotFoundError, NotADirectoryError: as ``core.places.saved_place``, if it can be none of these.
    """
    known = preset_names() if presets else []
    return "preset" if isinstance(name, str) and name in known else saved_place(name, presets=known)


def model_folder(name: str) -> str:
    """The folder of the model in the directory of a run (of ``train`` or ``distill``); any other name as it is."""
    path = Path(name).expanduser()
    inside = path / "model"
    # os.path: a name that is too long for a file is no error here
    return str(inside) if not isfile(path / "config.json") and isfile(inside / "config.json") else name
