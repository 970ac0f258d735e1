"""Write tensors and records with checksums that are verified on reading."""

import contextlib
import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from relinear.system import files

_CHECKSUM = "checksum"


def save_tensors(path: str | Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors as safetensors, atomically, with their checksum."""
    on_cpu = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    with files.atomic_path(path) as temporary:
        save_file(on_cpu, temporary, metadata={_CHECKSUM: files.tensor_digest(on_cpu, {})})


@contextlib.contextmanager
def _damage_refused(path: Path) -> Iterator[None]:
    """Turn any error from reading ``path`` within the block into one ValueError that says what to do."""
    advice = f"remove {path.parent} and start again, which computes it anew"
    if not path.is_file():
        raise ValueError(f"{path} is missing; {advice}")
    with files.damaged_file_errors(path, "damaged", advice):
        yield


def _checked(about: dict[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return ``about`` without the checksum, after verifying it."""
    if about.pop(_CHECKSUM, None) != files.tensor_digest(tensors, about):
        raise ValueError("its checksum differs")
    return about


def load_tensors(path: str | Path) -> dict[str, Tensor]:
    """Return what ``save_tensors`` wrote.

    Raises:
        ValueError: which names the file, if it is missing, cut off or changed.
    """
    path = Path(path)
    with _damage_refused(path), safe_open(path, framework="pt") as stored:
        tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
        _checked(dict(stored.metadata() or {}), tensors)
        return tensors


class LayerStates:
    """Store the tensors between decoder layers on disk, batch by batch, by kind and the index of the next layer.

    Each is whole or not there, so that a killed process resumes at the last of them.

    Args:
        folder: directory of the calibration.
        count: number of batches.
    """

    def __init__(self, folder: Path, count: int) -> None:
        self.folder, self.count = folder, count

    def _path(self, kind: str, index: int) -> Path:
        return self.folder / f"{kind}-{index:04d}"

    def write(self, kind: str, index: int, batches: Iterable[Tensor]) -> None:
        """Write the batches as they are produced, one in memory at a time."""
        self.remove(kind, index)
        with files.atomic_directory(self._path(kind, index)) as temporary:
            for batch, states in enumerate(batches):
                save_tensors(temporary / f"{batch}.safetensors", {"states": states})

    def read(self, kind: str, index: int) -> Iterator[Tensor]:
        """Yield the batches."""
        for batch in range(self.count):
            yield load_tensors(self._path(kind, index) / f"{batch}.safetensors")["states"]

    def remove(self, kind: str, index: int) -> None:
        """Remove the batches, if they are there."""
        shutil.rmtree(self._path(kind, index), ignore_errors=True)

    def indices(self, kind: str) -> list[int]:
        """Return the indices of the layers before which batches of a kind are stored."""
        folders = self.folder.glob(f"{kind}-{'[0-9]' * 4}")
        return sorted(int(path.name[-4:]) for path in folders if len([*path.glob("*.safetensors")]) == self.count)


def write_record(path: str | Path, values: Mapping[str, Any]) -> None:
    """Write JSON values with their checksum, atomically."""
    files.write_json(path, dict(values) | {_CHECKSUM: files.tensor_digest({}, json.loads(json.dumps(dict(values))))})


def is_edited(path: Path) -> bool:
    """Return whether ``path`` exists and differs from what ``write_record`` wrote, as after an edit."""
    with contextlib.suppress(OSError, ValueError):
        read_record(path)
        return False
    return path.exists()


def read_record(path: str | Path) -> dict[str, Any]:
    """Return what ``write_record`` wrote. Raises ValueError, which names the file, if it is missing or changed."""
    path = Path(path)
    with _damage_refused(path):
        return _checked(dict(files.read_json(path)), {})
