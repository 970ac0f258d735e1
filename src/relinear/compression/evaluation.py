"""Compare the compressed model with the original: loss, agreement, repeated text.

The original is evaluated before the first layer is replaced.
"""

# Legend: N blocks, T tokens

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from relinear.evaluate.losses import batch_losses
from relinear.hf.vocabulary import max_positions
from relinear.system.confidence import half_width

#: tokens of a passage that is continued, and of its continuation
PASSAGE_TOKENS, CONTINUED_TOKENS = 32, 64


@dataclasses.dataclass(frozen=True)
class Predictions:
    """What a model predicts on token ids (N, T).

    Attributes:
        losses: (N,) of each block, in nats per token.
        likeliest: (N, T - 1) the likeliest next tokens.
    """

    losses: Tensor
    likeliest: Tensor

    @property
    def loss(self) -> float:
        """Return the mean over the blocks."""
        return float(self.losses.mean())

    def compared_with(self, original: Predictions) -> dict[str, Any]:
        """Return both as JSON values; ``interval`` is half the width of the 95 % interval, paired over blocks."""
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
class Evaluation:
    """The evaluation of one model, the original or the compressed one.

    Attributes:
        predictions: on text of the corpus.
        elsewhere: on other texts, by name.
        repeated: share of 4-grams in its greedy continuations that occurred earlier in them; None without any.
    """

    predictions: Predictions
    elsewhere: dict[str, Predictions]
    repeated: float | None

    def compared_with(self, original: Evaluation, unseen: bool) -> dict[str, Any]:
        """Return both as JSON values; ``unseen``: whether calibration has not seen this text of the corpus."""
        return self.predictions.compared_with(original.predictions) | {
            "unseen": unseen,
            "elsewhere": {name: p.compared_with(original.elsewhere[name]) for name, p in self.elsewhere.items()},
            "repeated_before": original.repeated,
            "repeated": self.repeated,
        }


def evaluate(
    model: Any,
    blocks: Tensor,
    elsewhere: Mapping[str, Tensor] | None = None,
    passages: int = 0,
    on_step: Callable[[int, int], None] = lambda done, total: None,
) -> Evaluation:
    """Run ``model`` (in eval mode) on texts, and let it continue passages of them.

    Args:
        model: a Hugging Face decoder.
        blocks: token ids (N, T) of the corpus.
        elsewhere: further token ids (N', T), by name.
        passages: number of passages that the model continues, to see whether it repeats itself.
        on_step: called with the numbers of steps done and of all steps, a block each.
    """
    other_texts = dict(elsewhere or {})
    all_blocks = torch.cat([blocks, *other_texts.values()])
    steps = len(all_blocks) + bool(passages)
    results = predict(model, all_blocks, lambda done: on_step(done, steps))
    sizes = [len(blocks), *map(len, other_texts.values())]
    predictions, *others = map(Predictions, results.losses.split(sizes), results.likeliest.split(sizes))
    repeated = _repeated(model, all_blocks, passages) if passages else None
    on_step(steps, steps)
    return Evaluation(predictions, dict(zip(other_texts, others, strict=True)), repeated)


def predict(model: Any, blocks: Tensor, on_block: Callable[[int], None] = lambda done: None) -> Predictions:
    """Return the predictions of ``model`` (in eval mode) on token ids (N, T)."""
    block_losses, likeliest = [], []
    for done, (losses, logits) in enumerate(batch_losses(model, blocks, batch=1), 1):
        block_losses.append(float(losses.double().mean()))
        likeliest.append(logits[0, :-1].argmax(-1).cpu())
        on_block(done)
    return Predictions(torch.tensor(block_losses, dtype=torch.float64), torch.stack(likeliest))


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
