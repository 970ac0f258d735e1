"""Compare the compressed model with the original: loss, agreement, repeated text.

The original is observed before the first layer is replaced.
"""

# Legend: N blocks, T tokens

from __future__ import annotations

import dataclasses
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

    repeated: share of 4-grams in its greedy continuations that occurred earlier in them; None without continuations.
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
        elsewhere: further token ids (N', T), by name.
        passages: number of passages that the model continues, to see whether it repeats itself.
        on_step: called with the numbers of steps done and of all steps, a block each.
    """
    other_texts = dict(elsewhere or {})
    windows = torch.cat([blocks, *other_texts.values()])
    steps = len(windows) + bool(passages)
    results = read(model, windows, lambda done: on_step(done, steps))
    sizes = [len(blocks), *map(len, other_texts.values())]
    reading, *others = map(Reading, results.losses.split(sizes), results.likeliest.split(sizes))
    repeated = None
    if passages:
        repeated = _repeated(model, windows, passages)
        on_step(steps, steps)
    return Observation(reading, dict(zip(other_texts, others, strict=True)), repeated)


@torch.no_grad()
def read(model: Any, blocks: Tensor, on_block: Callable[[int], None] = lambda done: None) -> Reading:
    """Return losses and likeliest tokens of ``model`` (in eval mode) on token ids (N, T)."""
    losses, likeliest = [], []
    for done, ids in enumerate(blocks.to(next(model.parameters()).device).split(1), 1):
        logits = model(input_ids=ids, use_cache=False).logits
        losses.append(float(token_losses(logits, ids).double().mean()))
        likeliest.append(logits[0, :-1].argmax(-1).cpu())
        on_block(done)
    return Reading(torch.tensor(losses, dtype=torch.float64), torch.stack(likeliest))


@torch.no_grad()
def _repeated(model: Any, blocks: Tensor, count: int) -> float:
    """Return the mean share of 4-grams in greedy continuations that occurred earlier in the same continuation.

    Of ``count`` passages, spread over the windows (N, T); several of each if there are few windows.
    """
    length = max(1, min(PASSAGE_TOKENS, blocks.shape[1] // 2))
    in_turns = blocks.unfold(1, length, length).transpose(0, 1).flatten(0, 1)  # the first of each window first
    passages = in_turns[:count].to(next(model.parameters()).device)
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
