"""Compute the linear recurrence of ``functional.context_manager`` in about log2(tokens) steps."""

# Legend: B batch, T tokens, D channels, P parts of C tokens each

import torch
import torch.nn.functional as F
from torch import Tensor

#: most tokens for which a model exported with a dynamic length works (it raises an error for more)
MAX_EXPORTED_TOKENS = 1 << 17
#: tokens in a part; all parts of a sequence are computed at once, token by token
_PART = 8
#: elements B T D from which parts are faster: a pass over memory then takes longer than a call
MIN_IN_PARTS = 1 << 15
# torch 2.6 cannot distinguish an export from a compilation, so ``_exported`` runs in both
_is_exporting = getattr(torch.compiler, "is_exporting", torch.compiler.is_compiling)


def linear_recurrence(decay: Tensor, value: Tensor, state: Tensor) -> Tensor:
    """Compute ``functional.context_manager.linear_recurrence`` in few steps.

    It multiplies decays in [0, 1] and never divides by them, so results are accurate for sequences and time constants
    of any length.
    """
    tokens = value.shape[1]
    if _is_exporting() and (torch.compiler.is_dynamo_compiling() or isinstance(tokens, torch.SymInt)):
        return _exported(decay, value, state)
    if torch.compiler.is_compiling() or tokens <= _PART or value.numel() < MIN_IN_PARTS:
        return _by_doubling(decay, value, state)
    return _by_parts(decay, value, state)


def _by_doubling(decay: Tensor, value: Tensor, state: Tensor) -> Tensor:
    """Sum by doubling: after step k, s_t sums the last 2^k values."""
    tokens = value.shape[1]
    shared = decay.ndim == 1
    first = value[:, :1] + (decay if shared else decay[:, :1]) * state[:, None]
    total = torch.cat([first, value[:, 1:]], dim=1)
    step = 1
    while step < tokens:
        if torch.is_grad_enabled():
            total = total + decay * F.pad(total, (0, 0, step, 0))[:, :tokens]
        else:  # half the passes over memory, and the same bits
            total[:, step:] += (decay if shared else decay[:, step:]) * total[:, :-step]
        decay = decay * (decay if shared else F.pad(decay, (0, 0, step, 0), value=1.0)[:, :tokens])
        step *= 2
    return total


def _by_parts(decay: Tensor, value: Tensor, state: Tensor) -> Tensor:
    """Compute all parts at once, token by token from zero; then add the states of the parts before, by doubling."""
    batch, tokens, width = value.shape
    missing = -tokens % _PART

    def parts(x: Tensor, fill: float) -> tuple[Tensor, ...]:
        x = F.pad(x, (0, 0, 0, missing), value=fill) if missing else x
        return x.reshape(batch, -1, _PART, width).unbind(2)

    decays = (decay,) * _PART if decay.ndim == 1 else parts(decay, 1.0)
    values = parts(value, 0.0)
    # for each token of a part: its state, and the factor by which the state before the part has decayed
    states, remaining = [values[0]], [decays[0]]
    for next_decay, next_value in zip(decays[1:], values[1:], strict=True):
        states.append(torch.addcmul(next_value, next_decay, states[-1]))
        remaining.append(remaining[-1] * next_decay)
    ends = _by_doubling(remaining[-1], states[-1], state)
    before = torch.cat([state[:, None], ends[:, :-1]], dim=1)  # (B, P, D)
    total = torch.addcmul(torch.stack(states, 2), torch.stack(remaining, -2), before[:, :, None])
    return total.reshape(batch, -1, width)[:, :tokens]


def _exported(decay: Tensor, value: Tensor, state: Tensor) -> Tensor:
    """Compute the recurrence in a fixed number of steps, so that the exported graph runs for any number of tokens."""
    torch._check(value.shape[1] <= MAX_EXPORTED_TOKENS)
    decay = decay.expand_as(value)
    position = torch.arange(value.shape[1], device=value.device).unsqueeze(-1)
    total = torch.where(position == 0, value + decay * state[:, None], value)
    for step in (1 << k for k in range(MAX_EXPORTED_TOKENS.bit_length() - 1)):
        source = (position - step).clamp(min=0).squeeze(-1)
        total = total + decay * torch.where(position >= step, total.index_select(1, source), 0.0)
        decay = decay * torch.where(position >= step, decay.index_select(1, source), 1.0)
    return total
