"""The linear recurrence in a number of steps that grows with log2 of the number of tokens."""

# Legend: B batch, T tokens, D channels

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["linear_recurrence"]


def linear_recurrence(decay: Tensor, value: Tensor, state: Tensor) -> Tensor:
    """``functional.context_manager.linear_recurrence`` by doubling: after step k, s_t sums the last 2^k values.

    Only products of decays in [0, 1] occur, never their inverse, so nothing over- or underflows to something wrong,
    however long the sequence and however short the memory.
    """
    shared = decay.ndim == 1
    first = value[:, :1] + (decay if shared else decay[:, :1]) * state[:, None]
    total = torch.cat([first, value[:, 1:]], dim=1)
    tokens, step = value.shape[1], 1
    while step < tokens:
        total = total + decay * F.pad(total, (0, 0, step, 0))[:, :tokens]
        if shared:
            decay = decay * decay
        else:
            decay = decay * F.pad(decay, (0, 0, step, 0), value=1.0)[:, :tokens]
        step *= 2
    return total
