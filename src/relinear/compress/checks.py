"""What is refused before anything is computed: models, corpora and directories that compression cannot work on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from relinear.core.vocabulary import most_positions
from relinear.system.written import check_ours

__all__ = ["check_directory", "check_ids", "check_model_fits"]

#: what other work leaves in its directory, in which nothing is put beside it
OTHERS = (
    *("config.json", "run.json", "results.json", "scale.json", "distill.json", "sweep.json", "bench.json"),
    *("models.json", "analyze.json", "coordinates.json"),
)


def check_directory(folder: Path) -> None:
    """Raise ValueError if ``folder`` is no directory, or one of other work."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file; give a directory")
    found = next((name for name in OTHERS if (folder / name).exists()), None)
    if found is not None:
        raise ValueError(f"{folder} holds other work ({found}): give a directory of its own")
    check_ours(folder, "compress")


@torch.no_grad()
def check_model_fits(model: Any, sequence_length: int) -> None:
    """Raise ValueError unless ``model`` is a decoder whose weights are all there, for sequences of this length."""
    kind, config = type(model).__name__, getattr(model, "config", None)
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(f"{kind} has an encoder beside its decoder; decoders alone are compressed")
    longest = most_positions(model)
    if longest is not None and sequence_length > longest:
        raise ValueError(
            f"sequence_length={sequence_length} is more than the {longest} positions of {kind}; ask for at most as many"
        )
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise ValueError(f"{kind}: {name} has no values (it is on the meta device, or off-loaded); load the model")
        if not bool(torch.isfinite(parameter).all()):
            raise ValueError(f"{kind}: {name} holds values that are not finite, so there is nothing to fit to")


def check_ids(ids: Tensor, model: Any, what: str) -> None:
    """Raise ValueError unless token ids (N, T) are ones that ``model`` embeds."""
    entries = model.get_input_embeddings().weight.shape[0]
    if ids.is_floating_point() or ids.dtype == torch.bool:
        raise ValueError(f"{what}: token ids must be integers, got {str(ids.dtype).removeprefix('torch.')}")
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < entries:
        raise ValueError(
            f"{what} has token ids from {int(ids.min())} to {int(ids.max())}, and {type(model).__name__} embeds "
            f"0 to {entries - 1}: use the tokenizer of the model"
        )
