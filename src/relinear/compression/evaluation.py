"""Compare the compressed model with the original: loss, agreement, repeated text.

What the original does is noted before the first layer is replaced.
"""

# Legend: N blocks, T tokens

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from relinear.evaluate.losses import token_losses
from relinear.hf.vocabulary import max_positions
from relinear.system.confidence import half_width

#: tokens of a passage that is continued, and of its continuation
PASSAGE_TOKENS, CONTINUED_TOKENS = 32, 64


@dataclasses.dataclass(frozen=True)
class Reading:
    """Hold results on token ids (N, T): losses of windows (N,) in nats per token, likeliest tokens (N, T - 1)."""

    losses: Tensor
    likeliest: Tensor

    @property
    def loss(self) -> float:
        """Return the mean over the windows."""
        return float(self.losses.mean())

    def against(self, original: Reading) -> dict[str, Any]:
        """Return both as JSON values; ``interval`` is half the width of the 95 % interval, paired over windows."""
        rise = self.losses - original.losses
        return {
            "tokens": self.likeliest.numel(),
            "windows": len(rise),
            "loss_before": original.loss,
            "loss": self.loss,
            "nats": self.loss - original.loss,
            "interval": half_width(rise.tolist()),
            "agreement": float((original.likeliest == self.likeliest).double().mean()),
        }


@dataclasses.dataclass(frozen=True)
class Observation:
    """Hold a model's results on tokens of the corpus, and on other texts by name.

    repeated: share of the 4-grams of its greedy continuations of passages that were there before; None without any.
    """

    reading: Reading
    elsewhere: dict[str, Reading]
    repeated: float | None = None


def observe(
    model: Any,
    blocks: Tensor,
    elsewhere: Mapping[str, Tensor] | None = None,
    passages: int = 0,
    on_step: Callable[[int, int], None] = lambda done, total: None,
) -> Observation:
    """Run ``model`` (in eval mode) on token ids (N, T), and let it continue passages of them.

    Args:
        elsewhere: further token ids, by name.
        passages: of these token ids, how many are continued to see whether the model repeats itself.
        on_step: called with how many blocks are done, and how many there are.
    """
    other_texts = dict(elsewhere or {})
    steps = len(blocks) + sum(map(len, other_texts.values())) + bool(passages)
    done = itertools.count(1)

    def count() -> None:
        on_step(next(done), steps)

    reading = read(model, blocks, count)
    readings = {name: read(model, other, count) for name, other in other_texts.items()}
    repeated = None
    if passages:
        beginnings = _passages(torch.cat([blocks, *other_texts.values()]), passages)
        repeated = _repeated(model, beginnings.to(next(model.parameters()).device))
        count()
    return Observation(reading, readings, repeated)


@torch.no_grad()
def read(model: Any, blocks: Tensor, on_block: Callable[[], None] = lambda: None) -> Reading:
    """Return losses and likeliest tokens of ``model`` (in eval mode) on token ids (N, T)."""
    losses, likeliest = [], []
    for ids in blocks.to(next(model.parameters()).device).split(1):
        logits = model(input_ids=ids, use_cache=False).logits
        losses.append(float(token_losses(logits, ids).double().mean()))
        likeliest.append(logits[0, :-1].argmax(-1).cpu())
        on_block()
    return Reading(torch.tensor(losses, dtype=torch.float64), torch.stack(likeliest))


def _passages(blocks: Tensor, count: int) -> Tensor:
    """Return ``count`` prompts (P, T'), spread over the windows; several of each if there are few windows."""
    length = max(1, min(PASSAGE_TOKENS, blocks.shape[1] // 2))
    return blocks.unfold(1, length, length).transpose(0, 1).flatten(0, 1)[:count]  # the first of each window first


@torch.no_grad()
def _repeated(model: Any, passages: Tensor) -> float:
    """Return the mean share of 4-grams in greedy continuations that occurred earlier in the same continuation."""
    stops = model.generation_config.eos_token_id
    ends = [] if stops is None else [stops] if isinstance(stops, int) else list(stops)
    continuations = model.generate(
        passages,
        attention_mask=torch.ones_like(passages),
        max_new_tokens=max(1, min(CONTINUED_TOKENS, (max_positions(model) or 1 << 30) - passages.shape[1])),
        do_sample=False,
        eos_token_id=ends or None,
        pad_token_id=ends[0] if ends else 0,
    )
    shares = []
    for ids in continuations[:, passages.shape[1] :].tolist():
        end = next((at for at, token in enumerate(ids) if token in ends), len(ids))
        runs = list(zip(*(ids[at:end] for at in range(4)), strict=False))
        shares += [1 - len(set(runs)) / len(runs)] if runs else []
    return sum(shares) / len(shares) if shares else 0.0


def compared(original: Observation, compressed: Observation, unseen: bool) -> dict[str, Any]:
    """Return both observations as JSON values.

    Args:
        unseen: whether calibration has not seen the tokens of the corpus that both ran on.
    """
    elsewhere = {name: reading.against(original.elsewhere[name]) for name, reading in compressed.elsewhere.items()}
    return compressed.reading.against(original.reading) | {
        "unseen": unseen,
        "elsewhere": elsewhere,
        "repeated_before": original.repeated,
        "repeated": compressed.repeated,
    }
