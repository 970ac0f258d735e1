"""What compressing Llama 2 would take: computed from measured rates and the command's own estimate, not run."""

from __future__ import annotations

import functools
from typing import Any

from estimate import MODELS, llama

from measured import read, table
from relinear.compression import CompressSettings
from relinear.compression.file_formats import FILE_FORMATS, budget_of
from relinear.compression.inputs import embedding_tables, linear_layers
from relinear.compression.requirements import disk_bytes, equivalent_tokens
from relinear.surgery.summary import summary

__all__ = ["in_page"]

#: of the models in the record: vocabulary and shape as in ``MODELS``, and a name
_VOCABULARY, _SMOLLM2, _SMALL = 49_152, (576, 1536, 30, 9, 3), "models/unrounded/model"
#: matrices in double precision: moments of two kinds of text and their mean, and what factors of the widest take
_SUMS, _FACTORS = 3, 3


@functools.cache
def _measured() -> dict[str, dict[str, Any]]:
    """The last row of each model on two threads."""
    return {row["model"]: row for row in read("compress/peaks.jsonl") if row["machine"]["threads"] == 2}


@functools.cache
def _rate() -> float:
    """FLOPs per second, of passes forward, by the larger model of the record."""
    row = _measured()["models/smollm2"]
    settings = CompressSettings(tokens=row["tokens"], evaluate=False)
    flops = summary(llama(_SMOLLM2, _VOCABULARY, tied=True)).flops_per_token
    return equivalent_tokens(settings) * flops / sum(row["seconds_by_phase"].values())


def _moments(shape: tuple[int, ...]) -> int:
    """Bytes of the moments of one decoder layer: inputs of attention, of its output, of the MLP, of its last layer."""
    width, inner, *_ = shape
    return 8 * (_SUMS * (3 * width**2 + inner**2) + _FACTORS * inner**2)


@functools.cache
def _working() -> float:
    """Bytes for each weight of the largest matrix, by what the larger model took beside its weights."""
    large = _measured()["models/smollm2"]
    beside = large["memory_bytes"] - 2 * large["bytes_before"] - _moments(_SMOLLM2)  # they ran in single precision
    return (beside - _base()) / (_VOCABULARY * _SMOLLM2[0])


def _base() -> float:
    """Bytes of the process and its libraries: no more than the small model's run took beside its weights."""
    small = _measured()[_SMALL]
    return small["memory_bytes"] - 2 * small["bytes_before"]


def _row(name: str) -> list[str]:
    model, settings = llama(MODELS[name]).half(), CompressSettings()  # weights are stored in half precision
    modules = linear_layers(model) | embedding_tables(model)
    file = budget_of(model, modules, settings).limit + FILE_FORMATS["relinear"].other_bytes(model, None, modules)
    most, original = disk_bytes(model, settings)
    largest = max(module.weight.numel() for module in modules.values())
    memory = _base() + original + _working() * largest + _moments(MODELS[name])
    hours = equivalent_tokens(settings) * summary(model).flops_per_token / _rate() / 3600
    return [
        f"Llama-2-{name}",
        *(f"{size / 1e9:,.1f}" for size in (original, file)),
        *(f"{n:,.0f}" for n in (most / 1e9, memory / 1e9, hours)),
    ]


def in_page() -> str:
    """The table."""
    head = ["model", "original (GB)", "file (GB)", "disk, most (GB)", "memory (GB)", "hours on two cores"]
    return table(head, [_row(name) for name in MODELS])
