"""Convert half precision to float32, in which the references compute what rounding would spoil."""

import torch
from torch import Tensor


def upcast(x: Tensor) -> Tensor:
    """Return x in float32 if it has less precision, else x itself."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
