"""Estimate what a compression takes on this machine, before it starts."""

from __future__ import annotations

from typing import Any

import torch

from relinear.compression.budget import stored_bytes
from relinear.compression.calibrate import states_on_disk
from relinear.compression.evaluation import CONTINUED_TOKENS
from relinear.compression.settings import BUDGETS, CompressSettings
from relinear.hf.model_config import text_config
from relinear.hf.model_layout import decoder_layers
from relinear.surgery.summary import summary
from relinear.system.timing import duration, seconds_of

#: passes forward that tokens take: to calibrate and fit; in the original and the result; in a step of healing
_CALIBRATION_PASSES, _EVALUATION_PASSES, _HEALING_PASSES = 6, 3, 5
#: rounding takes as long as so many tokens of calibration
_ROUNDING_TOKENS = 4096
_TIMED_TOKENS = 256


def equivalent_tokens(settings: CompressSettings) -> int:
    """Return the number of tokens whose forward pass takes as long as the compression."""
    return (
        _CALIBRATION_PASSES * (settings.tokens + _ROUNDING_TOKENS)
        + _EVALUATION_PASSES * _evaluated(settings)
        + _HEALING_PASSES * settings.heal_tokens
    )


def disk_bytes(model: Any, settings: CompressSettings) -> tuple[int, int]:
    """Return bytes on disk: about the most while it runs, and the most that remain."""
    stream = settings.tokens * text_config(model).hidden_size * next(model.parameters()).element_size()
    original = stored_bytes(model)
    _, states = states_on_disk(len(decoder_layers(model)), stream, original)
    return states + original, original


def _evaluated(settings: CompressSettings) -> int:
    continued = settings.passages * CONTINUED_TOKENS if settings.evaluate else 0
    return settings.evaluation_blocks * settings.sequence_length + continued


@torch.no_grad()
def compress_requirements(model: Any, settings: CompressSettings) -> dict[str, str]:
    """Return what compressing ``model`` takes on this machine, by name: runs, parameters, tokens, time, disk.

    A pass forward is timed; it takes seconds.
    """
    table = summary(model)
    length = min(_TIMED_TOKENS, settings.sequence_length)
    ids = torch.zeros(1, length, dtype=torch.long, device=next(model.parameters()).device)
    seconds_of(lambda: model(input_ids=ids, use_cache=False))
    pace = seconds_of(lambda: model(input_ids=ids, use_cache=False)) / length
    evaluated, (most, after) = _evaluated(settings), disk_bytes(model, settings)
    budget = next(f"{name} {value}" for name in BUDGETS if (value := getattr(settings, name)))
    return {
        "runs": f"1, to {budget} for {settings.reader}",
        "parameters": f"{table.parameters:,} ({table.flops_per_token:,} FLOPs per token)",
        "tokens": f"{settings.tokens:,} to calibrate, {settings.heal_tokens:,} to heal, {evaluated:,} to evaluate",
        "time": f"{duration(equivalent_tokens(settings) * pace)}, by a pass timed now",
        "disk": f"about {most / 1e6:,.0f} MB while it runs, at most {after / 1e6:,.0f} MB after",
    }
