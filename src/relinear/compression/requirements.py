"""Estimate what a compression takes on this machine, before it starts."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from relinear.compression.budget import stored_bytes
from relinear.compression.calibrate import states_on_disk
from relinear.compression.candidates import SearchSpace
from relinear.compression.readers import READERS, budget_of
from relinear.compression.run import replaceable
from relinear.compression.settings import BUDGETS, CompressSettings
from relinear.compression.task import Task
from relinear.hf.model_layout import decoder_layers
from relinear.surgery.patterns import ALL_LINEAR
from relinear.surgery.separate_experts import separate_experts
from relinear.surgery.summary import summary
from relinear.system.timing import duration, seconds_of

#: passes forward that tokens take: to calibrate and fit; in the original and the result; in a step of healing
_CALIBRATED, _EVALUATED, _HEALED = 6, 3, 5
#: rounding takes as long as so many tokens of calibration
_ROUNDED = 4096
_TIMED = 256


def check_reachable(
    model: Any,
    settings: CompressSettings,
    tokenizer: Any = None,
    targets: str | Iterable[str] = ALL_LINEAR,
    exclude: str | Iterable[str] | None = None,
) -> None:
    """Raise ValueError if no choice meets the budget or the reader cannot run the model; arguments of ``compress``."""
    READERS[settings.reader].check(model, tokenizer)
    with separate_experts(model):
        task = Task(model, replaceable(model, settings, targets, exclude), settings, Path(), lambda *_: None)
        SearchSpace(task).check(budget_of(model, task.modules, settings, tokenizer))


@torch.no_grad()
def compress_requirements(model: Any, settings: CompressSettings) -> dict[str, str]:
    """Return what compressing ``model`` takes on this machine, by name: runs, parameters, tokens, time, disk.

    A pass forward is timed; it takes seconds.
    """
    table, length = summary(model), min(_TIMED, settings.sequence_length)
    ids = torch.zeros(1, length, dtype=torch.long, device=next(model.parameters()).device)
    seconds_of(lambda: model(input_ids=ids, use_cache=False))
    pace = seconds_of(lambda: model(input_ids=ids, use_cache=False)) / length
    evaluated = settings.evaluation_blocks * settings.sequence_length
    evaluated += settings.evaluate * settings.passages * 64
    passes = _CALIBRATED * (settings.tokens + _ROUNDED) + _EVALUATED * evaluated + _HEALED * settings.heal_tokens
    original = 2 * table.parameters
    stream = settings.tokens * model.config.get_text_config().hidden_size * next(model.parameters()).element_size()
    _, states = states_on_disk(len(decoder_layers(model)), stream, stored_bytes(model))
    budget = next(f"{name} {value}" for name in BUDGETS if (value := getattr(settings, name)))
    return {
        "runs": f"1, to {budget} for {settings.reader}",
        "parameters": f"{table.parameters:,} ({table.flops_per_token:,} FLOPs per token)",
        "tokens": f"{settings.tokens:,} to calibrate, {settings.heal_tokens:,} to heal, {evaluated:,} to evaluate",
        "time": f"{duration(passes * pace)}, by a pass timed now",
        "disk": f"about {(states + original) / 1e6:,.0f} MB while it runs, at most {original / 1e6:,.0f} MB after",
    }
