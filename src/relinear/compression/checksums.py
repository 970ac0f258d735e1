"""Write tensors and records with checksums that are verified on reading."""

import contextlib
import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from relinear.system.files import atomic_directory, atomic_path, read_json, tensor_digest, write_json
from relinear.system.text import shorten

_CHECKSUM = "checksum"


def _refusal(path: Path, problem: str) -> ValueError:
    return ValueError(
        f"{path} {problem}, so its statistics cannot be used: remove {path.parent} and start again, which measures "
        "them anew"
    )


def save_tensors(path: str | Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors as safetensors, atomically, with their checksum."""
    on_cpu = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    with atomic_path(path) as temporary:
        save_file(on_cpu, temporary, metadata={_CHECKSUM: tensor_digest(on_cpu, {})})


@contextlib.contextmanager
def _whole(path: Path) -> Iterator[None]:
    """Turn any error while ``path`` is read within the block into one ValueError."""
    if not path.is_file():
        raise _refusal(path, "is missing")
    try:
        yield
    except (SafetensorError, ValueError, LookupError, RuntimeError, TypeError, AttributeError) as error:
        raise _refusal(path, f"is damaged ({type(error).__name__}: {shorten(str(error))})") from error


def _checked(path: Path, about: dict[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return ``about`` without the checksum, after verifying it."""
    if about.pop(_CHECKSUM, None) != tensor_digest(tensors, about):
        raise _refusal(path, "has changed since it was written (its checksum differs)")
    return about


def load_tensors(path: str | Path) -> dict[str, Tensor]:
    """Return what ``save_tensors`` wrote.

    Raises:
        ValueError: which names the file, if it is missing, cut off or changed.
    """
    path = Path(path)
    with _whole(path), safe_open(path, framework="pt") as file:
        tensors, metadata = {name: file.get_tensor(name) for name in file.keys()}, dict(file.metadata() or {})  # noqa: SIM118
    _checked(path, metadata, tensors)
    return tensors


class Streams:
    """Store the tensors between decoder layers on disk, batch by batch, by kind and the index of the next layer.

    Each is whole or not there, so that a killed process goes on from the last of them.

    Args:
        folder: where they are kept.
        count: of batches.
    """

    def __init__(self, folder: Path, count: int) -> None:
        self.folder, self.count = folder, count

    def _place(self, kind: str, index: int) -> Path:
        return self.folder / f"{kind}-{index:04d}"

    def write(self, kind: str, index: int, batches: Iterable[Tensor]) -> None:
        """Write the batches as they are produced, one in memory at a time."""
        self.remove(kind, index)
        with atomic_directory(self._place(kind, index)) as temporary:
            for batch, states in enumerate(batches):
                save_tensors(temporary / f"{batch}.safetensors", {"states": states})

    def read(self, kind: str, index: int) -> Iterator[Tensor]:
        """Yield the batches."""
        for batch in range(self.count):
            yield load_tensors(self._place(kind, index) / f"{batch}.safetensors")["states"]

    def remove(self, kind: str, index: int) -> None:
        """Remove the batches, if they are there."""
        shutil.rmtree(self._place(kind, index), ignore_errors=True)

    def indices(self, kind: str) -> list[int]:
        """Return the indices of the layers before which batches of a kind are stored."""
        folders = self.folder.glob(f"{kind}-{'[0-9]' * 4}")
        return sorted(int(path.name[-4:]) for path in folders if len([*path.glob("*.safetensors")]) == self.count)


def write_record(path: str | Path, values: Mapping[str, Any]) -> None:
    """Write JSON values with their checksum, atomically."""
    write_json(path, dict(values) | {_CHECKSUM: tensor_digest({}, json.loads(json.dumps(dict(values))))})


def is_edited(path: Path) -> bool:
    """Return whether ``path`` exists and differs from what ``write_record`` wrote, as after an edit."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        values = dict(read_json(path))
        return values.pop(_CHECKSUM, None) != tensor_digest({}, values)
    return path.exists()


def read_record(path: str | Path) -> dict[str, Any]:
    """Return what ``write_record`` wrote. Raises ValueError, which names the file, if it is missing or changed."""
    path = Path(path)
    with _whole(path):
        values = dict(read_json(path))
    return _checked(path, values, {})
