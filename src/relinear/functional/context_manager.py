"""The memory of ``ContextManager``: a first-order linear recurrence over the tokens (reference)."""

# Legend: B batch, T tokens, D channels

import torch
from torch import Tensor


def linear_recurrence(decay: Tensor, value: Tensor, state: Tensor) -> Tensor:
    """Return s_t = decay_t * s_(t-1) + value_t, with s_(-1) = state, token by token.

    Args:
        decay: (B, T, D), or (D,) if it is the same at every token; in [0, 1].
        value: (B, T, D).
        state: (B, D), the state before the first token.

    Returns:
        (B, T, D), every s_t; the last one is the state for the next call.
    """
    decay = decay.expand_as(value)
    states = []
    for t in range(value.shape[1]):
        state = decay[:, t] * state + value[:, t]
        states.append(state)
    return torch.stack(states, dim=1)
