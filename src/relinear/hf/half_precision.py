"""Round a Hugging Face model to half precision (bfloat16), for a block or for good."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from relinear.contract.module_state import in_dtype


@contextlib.contextmanager
def at_half_precision(model: Any) -> Iterator[None]:
    """Hold wider parameters in bfloat16 within the block; afterwards they have their dtypes again, but are rounded.

    bfloat16, because it has float32's range.
    """
    config_dtype = model.config.dtype  # transformers changes it when the model is saved in the block
    wide = [p for p in model.parameters() if p.is_floating_point() and p.element_size() > 2]
    try:
        with in_dtype(wide, torch.bfloat16):
            yield
    finally:
        model.config.dtype = config_dtype


def round_to_half_(model: Any) -> None:
    """Round parameters to the values that they have when saved at half precision."""
    with at_half_precision(model):
        pass
