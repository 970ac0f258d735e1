"""Find the files of a checkpoint's weights, and read their headers."""

from collections.abc import Iterable
from pathlib import Path

from safetensors import SafetensorError, safe_open

from relinear.system.files import os_errors_named, read_json
from relinear.system.text import shorten

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


def count_tensors(files: Iterable[Path]) -> int:
    """Return the number of tensors in files of weights. Raises ValueError if a file is damaged."""
    count = 0
    for file in files:
        try:
            with os_errors_named(file), safe_open(file, "np") as stored:
                count += len(stored.keys())
        except SafetensorError as error:
            message = f"{file} is damaged or cut off ({shorten(str(error))}); restore it from a copy"
            raise ValueError(message) from error
    return count


def shards_of(directory: Path) -> list[str]:
    """Return the file names in a saved model's index; [] if there is no readable index."""
    try:
        names = set(read_json(directory / INDEX)["weight_map"].values())
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return []
    return sorted(name for name in names if isinstance(name, str) and name == Path(name).name)
