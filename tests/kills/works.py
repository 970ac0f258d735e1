"""What is killed: tiny works of every command that keeps state, and what they come to, as JSON with hashes of bits."""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

import relinear
from conftest import make_tiny_llama
from relinear.compare.run import compare
from relinear.contract.operator import is_replaceable
from relinear.data.tokenizers import train_bpe
from relinear.distill.run import distill_
from relinear.training import TrainSettings, train, trainer  # noqa: F401

__all__ = ["COMPRESSIONS", "WORKS", "come_to"]

WIDTH = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
#: fields of results that tell of time, memory or place
_PASSING = {
    "tokens_per_second", "seconds", "peak_memory_bytes", "out_dir", "started", "finished", "command", "machine",
    "folder", "speed", "planned_speed", "verdict",
}  # fmt: skip


def settings(data: Path, **changes: Any) -> TrainSettings:
    return TrainSettings.load(
        {
            "model_overrides": WIDTH,
            "operators": {"up_proj": "low_rank:rank=4"},
            "data": {"data": str(data), "sequence_length": 16, "max_validation_tokens": 64},
            "steps": 6,
            "batch_size": 2,
            "save_every": 2,
            "eval_every": 3,
            "log_every": 1,
            "dtype": "float32",
            "threads": 1,
            "device": "cpu",
        }
        | changes
    )


def _train(data: Path, out: Path) -> None:
    train(settings(data), out)


def _compare(data: Path, out: Path) -> None:
    shared = settings(data, steps=3).model_dump(exclude_unset=True)
    del shared["operators"]
    recipe = {"entries": {"a": "dense", "b": "low_rank:rank=4"}, "train": shared, "speed": {"seconds": 0}}
    compare(recipe | {"tune": {"learning_rates": [1e-3, 4e-3], "extensions": 0}}, out, workers=0)


def _ids(count: int) -> list[torch.Tensor]:
    return list(torch.randint(96, (count, 32), generator=torch.Generator().manual_seed(3)))


def _model() -> Any:
    torch.manual_seed(0)
    return make_tiny_llama()


def _distill(data: Path, out: Path) -> None:
    chosen = {"tokens": 256, "validation_tokens": 64, "sequence_length": 32, "epochs": 1, "tokens_per_step": 64}
    distill_(_model(), {"q_proj": relinear.LowRank(rank=2)}, _ids(10), settings=chosen, out_dir=out)


def _compress(data: Path, out: Path) -> None:
    chosen = {"tokens": 256, "sequence_length": 32}
    relinear.compress(_model(), _ids(10), keep=0.8, settings=chosen, out_dir=out)


@functools.cache
def _tokenizer() -> Any:
    text = "The quick brown fox jumps over 123 lazy dogs. " * 20
    return train_bpe([text], 300, len(text))


def _compress_by(heal: bool, plan: str, reader: str, bits: float | None = None) -> Callable[[Path, Path], None]:
    """A compression with all that it keeps state of; its figures are compared, times are not waited for.

    With ``bits`` it is by bytes: integers, the embedding among them. The plan "proposed" is made by a second command,
    behind one that only plans.
    """
    operator = "low_rank:rank=4"
    chosen = {"tokens": 128, "sequence_length": 16, "batch_size": 4, "keep": 0.8}
    chosen |= {"candidates": [operator], "evaluation_tokens": 32}
    if bits is not None:
        del chosen["keep"], chosen["candidates"]
        chosen |= {"bits": bits, "reader": reader}
    if heal:
        chosen |= {"heal_tokens": 192, "heal_learning_rate": 1e-3}

    def work(data: Path, out: Path) -> None:
        torch.manual_seed(0)
        model, given = make_tiny_llama(vocab_size=320), {}
        shown = out.with_name(f"shown-{out.name}")
        if plan == "proposed" and not shown.exists():
            shared = {"tokenizer": _tokenizer(), "settings": chosen, "out_dir": out}
            relinear.compress(model, _ids(20), plan_only=True, **shared)
            shown.touch()
        if plan == "given":
            found = [
                name for name, module in model.named_modules() if is_replaceable(module) and "layers.1" not in name
            ]
            layers = {name: {"operator": operator} for name in found if name != "lm_head"}
            given["plan_file"] = out.with_name(f"plan-of-{out.name}.json")
            given["plan_file"].write_text(json.dumps({"layers": layers}))
        relinear.compress(model, _ids(20), tokenizer=_tokenizer(), settings=chosen, out_dir=out, **given)

    return work


def _save(data: Path, out: Path) -> None:
    """The same directory over and over: whenever it is looked at, it holds a whole model or none."""
    if (out / "model" / "config.json").exists():
        relinear.from_pretrained(out / "model")
    model = _model()
    relinear.replace_(model, {"q_proj": relinear.LowRank(rank=2)})
    for _ in range(4):
        relinear.save_pretrained(model, out / "model")
        relinear.from_pretrained(out / "model")


#: name -> function of a corpus and the directory of results
WORKS: dict[str, Callable[[Path, Path], None]] = {
    "train": _train,
    "compare": _compare,
    "distill": _distill,
    "compress": _compress,
    "save": _save,
}


_AXES = itertools.product((False, True), ("made", "given"))
#: every way of compressing: its axes in words -> as in ``WORKS``
COMPRESSIONS: dict[str, Callable[[Path, Path], None]] = {
    f"compress heal={heal} plan={plan}": _compress_by(heal, plan, "relinear") for heal, plan in _AXES
}


#: of integers: healed and not, two readers, the plan made at once or behind one that was proposed
_INTEGERS = itertools.product((True, False), ("proposed", "made"), ("relinear", "llama.cpp"))
COMPRESSIONS |= {
    f"compress bits=4.75 heal={heal} plan={plan} for={reader}": _compress_by(heal, plan, reader, bits=4.75)
    for heal, plan, reader in _INTEGERS
}


def come_to(out: Path) -> dict[str, Any]:
    """Every result and every bit of every model below ``out``, without what tells of time and place."""
    found: dict[str, Any] = {}
    for path in sorted(out.rglob("*")):
        name = path.relative_to(out)
        if any(part.startswith((".", "fit-")) or part == "calibration" for part in name.parts):  # no result
            continue
        if path.suffix == ".safetensors":
            digest = hashlib.sha256()
            for key, value in sorted(load_file(path).items()):
                digest.update(key.encode() + value.contiguous().view(torch.uint8).numpy().tobytes())
            found[str(name)] = digest.hexdigest()
        elif path.suffix == ".gguf":
            found[str(name)] = hashlib.sha256(path.read_bytes()).hexdigest()
        elif path.name in ("run.json", "results.json", "report.json", "plan.json"):
            found[str(name)] = _lasting(json.loads(path.read_text()))
        elif path.name == "metrics.jsonl":
            found[str(name)] = [_lasting(json.loads(line)) for line in path.read_text().splitlines()]
    return found


def _lasting(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _lasting(inner) for key, inner in value.items() if key not in _PASSING}
    return [_lasting(inner) for inner in value] if isinstance(value, list) else value
