"""The n-gram line of a comparison: what counting the same tokens comes to on the same validation blocks."""

import math
from pathlib import Path
from typing import Any

import numpy as np

from relinear.compare.settings import CompareSettings
from relinear.evaluate import KneserNey
from relinear.system.files import atomic_path
from relinear.train.trainer import SteadySampler

NGRAM, LOSSES = "ngram.json", "ngram_block_losses.npy"
# Beyond this the counts outgrow the memory of the machines that budgets of this size are trained on.
_MOST_TOKENS = 100_000_000


def count_ngrams(recipe: CompareSettings, data: Any, out_dir: Path) -> dict[str, Any]:
    """Return loss of a Kneser-Ney model on the blocks that a run of the recipe is evaluated on.

    It counts the blocks that the first seed's run trains on, each block once however often the run passes over it, and
    sees no more context than a model does: nothing from before a block.

    Args:
        recipe: gives the budget, the seed and the order.
        data: what ``prepare_data`` returned.
        out_dir: of the comparison, which gets the losses by block.

    Returns:
        order, tokens (counted), validation_loss, perplexity.
    """
    train, validation = data.train, data.validation
    length = train.sequence_length
    wanted = min(recipe.steps * recipe.train.batch_size * recipe.train.accumulation, len(train))
    wanted = max(1, min(wanted, _MOST_TOKENS // length))
    chosen = np.sort(np.fromiter(SteadySampler(len(train), wanted, recipe.seeds[0]), dtype=np.int64))
    blocks = np.asarray(train.tokens[: len(train) * length]).reshape(-1, length)[chosen]
    order = min(recipe.ngram_order or 1, length)
    while data.vocab_size**order >= 1 << 63:
        order -= 1
    held_out = np.asarray(validation.tokens[: len(validation) * length]).reshape(-1, length)
    losses = KneserNey(blocks, data.vocab_size, order).losses(held_out).mean(1)
    with atomic_path(out_dir / LOSSES) as temporary, temporary.open("wb") as file:
        np.save(file, losses.astype(np.float32), allow_pickle=False)
    loss = float(losses.mean())
    return {"order": order, "tokens": int(blocks.size), "validation_loss": loss, "perplexity": math.exp(loss)}
