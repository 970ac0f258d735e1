"""Tensors and records on disk that carry a checksum, to which they are held when they are read."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from relinear.system.files import atomic_path, read_json, write_json
from relinear.system.text import cut

__all__ = ["load_tensors", "read_record", "save_tensors", "write_record"]

_CHECKSUM = "checksum"


def _digest(about: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256(json.dumps(dict(about), sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _refusal(path: Path, what: str) -> ValueError:
    return ValueError(
        f"{path} {what}, so nothing can be made of the statistics there: remove {path.parent} and start again, which "
        "measures them anew"
    )


def save_tensors(path: str | Path, tensors: Mapping[str, Tensor], about: Mapping[str, str] | None = None) -> None:
    """Write tensors and words on them as safetensors, atomically, with a checksum of both."""
    kept, words = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}, dict(about or {})
    with atomic_path(path) as temporary:
        save_file(kept, temporary, metadata=words | {_CHECKSUM: _digest(words, kept)})


def load_tensors(path: str | Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return what ``save_tensors`` wrote. Files of earlier versions have no checksum and are read as they are.

    Raises:
        ValueError: which names the file, if it is missing, cut off or changed.
    """
    path = Path(path)
    if not path.is_file():
        raise _refusal(path, "is missing")
    try:
        with safe_open(path, framework="pt") as file:
            tensors, words = {name: file.get_tensor(name) for name in file.keys()}, dict(file.metadata() or {})  # noqa: SIM118
    except (SafetensorError, ValueError, LookupError, RuntimeError, TypeError, AttributeError) as error:
        raise _refusal(path, f"is damaged ({type(error).__name__}: {cut(str(error))})") from error
    stated = words.pop(_CHECKSUM, None)
    if stated is not None and stated != _digest(words, tensors):
        raise _refusal(path, "has changed since it was written (its checksum differs)")
    return tensors, words


def write_record(path: str | Path, values: Mapping[str, Any]) -> None:
    """Write JSON values with their checksum, atomically."""
    write_json(path, dict(values) | {_CHECKSUM: _digest(json.loads(json.dumps(dict(values))), {})})


def read_record(path: str | Path) -> dict[str, Any]:
    """Return what ``write_record`` wrote. Raises ValueError, which names the file, if it is missing or changed."""
    path = Path(path)
    if not path.is_file():
        raise _refusal(path, "is missing")
    try:
        values = dict(read_json(path))
    except (ValueError, TypeError) as error:
        raise _refusal(path, f"is damaged ({cut(str(error))})") from error
    stated = values.pop(_CHECKSUM, None)
    if stated is not None and stated != _digest(values, {}):
        raise _refusal(path, "has changed since it was written (its checksum differs)")
    return values
