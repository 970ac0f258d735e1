"""Read names, shapes and types of a checkpoint's tensors from the headers of its files."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open

from relinear.system.files import os_errors_named, read_json

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


class TensorSpec(NamedTuple):
    """Hold the shape and the kind of number ("floats", "integers") of a tensor in a checkpoint or a model."""

    shape: tuple[int, ...]
    kind: str

    @classmethod
    def of(cls, shape: Iterable[int], dtype: Any) -> "TensorSpec":
        """Return the spec of a shape and a ``dtype`` of torch or of a file: torch.bfloat16, BF16, F8_E4M3, I64 ..."""
        letter = str(dtype).removeprefix("torch.").lower().lstrip("b")[0]
        return cls(tuple(map(int, shape)), {"f": "floats", "c": "complex numbers"}.get(letter, "integers"))

    def fits(self, other: "TensorSpec", any_shape: bool) -> bool:
        """Return whether a stored tensor with this spec can be loaded into one with the spec ``other``."""
        return self.kind == other.kind and (any_shape or self.shape == other.shape)

    def __str__(self) -> str:
        return f"{self.shape} of {self.kind}"


def stored_specs(files: Iterable[str | Path]) -> dict[str, TensorSpec]:
    """Return the shapes and types of all tensors in the files, from their headers."""
    tensors: dict[str, TensorSpec] = {}
    for file in files:
        if not str(file).endswith(".safetensors"):
            raise ValueError(f"{file}: relinear loads weights from safetensors only")
        try:
            with os_errors_named(file), safe_open(file, "np") as stored:
                parts = {key: stored.get_slice(key) for key in stored.keys()}  # noqa: SIM118  it is not a mapping
                tensors |= {key: TensorSpec.of(part.get_shape(), part.get_dtype()) for key, part in parts.items()}
        except SafetensorError as error:
            raise ValueError(f"{file} is damaged or cut off ({error}); restore it from a copy") from error
    return tensors


def shards_of(directory: Path) -> list[str]:
    """Return the file names in a saved model's index; [] if there is no readable index."""
    try:
        names = set(read_json(directory / INDEX)["weight_map"].values())
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return []
    return sorted(name for name in names if isinstance(name, str) and name == Path(name).name)
