"""Heal: train the operators of a compressed model to give the logits of the original.

The teacher shares every other matrix with the compressed model (``original_copy``), so that memory holds the replaced
weights once more. Adam adds two values for each parameter that is trained.
"""

# Legend: N blocks, T tokens per block

import copy
import dataclasses
import itertools
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from relinear.compression.calibrate import model_fingerprint
from relinear.compression.settings import CompressSettings
from relinear.compression.storage import load_tensors, save_tensors
from relinear.contract.module_state import eval_mode, frozen_parameters, in_dtype
from relinear.contract.operator import named_operators
from relinear.system.progress import Progress, ProgressCallback, no_progress
from relinear.training.distill import TeacherObjective
from relinear.training.fitting import fit_in_folder, remove_checkpoints
from relinear.training.settings import FitSettings

#: checkpoints
CHECKPOINTS = 8
#: steps in which the learning rate rises, as a share of all
WARMUP_RATIO = 0.1


@dataclasses.dataclass(frozen=True)
class HealReport:
    """Report the tokens and steps of a healing."""

    tokens: int
    steps: int

    def __str__(self) -> str:
        return f"healed on {self.tokens:,} tokens in {self.steps} step{'s' * (self.steps != 1)}"


def original_copy(model: nn.Module) -> Any:
    """Copy ``model`` as a later teacher: modules are new, matrices are shared and so take no memory.

    Operators may then replace layers of ``model``; the copy keeps the originals. Vectors are copied.
    """
    return copy.deepcopy(model, {id(p): p for p in model.parameters() if p.ndim > 1})


@torch.no_grad()
def heal(
    model: Any,
    teacher: Any,
    blocks: Tensor,
    *,
    settings: CompressSettings | None = None,
    folder: str | Path | None = None,
    on_progress: ProgressCallback = no_progress,
) -> HealReport:
    """Train the operators of ``model`` in place to give the logits of ``teacher``.

    KL(teacher || model), Adam without weight decay, a warm-up and half a cosine down to 0. Killed, it resumes from its
    last checkpoint in ``folder``, to the same bits (on one thread).

    Args:
        model: a compressed decoder, in float32 or below; trained in float32, returned in its own dtype.
        teacher: the original, of the same vocabulary; may share parameters with ``model``. Unchanged afterwards.
        blocks: token ids (N, T) to train on, in a random order, each once.
        settings: ``heal_learning_rate``, ``batch_size`` and ``seed`` of these.
        folder: directory for state and metrics; None stores nothing.
        on_progress: called with a ``Progress``, whose ``stage`` is "heal".

    Raises:
        ValueError: if there is no operator, or there are fewer blocks than a step takes. NonFiniteLossError: (a
            ValueError) if training diverges.
    """
    options = settings or CompressSettings()
    if not any(True for _ in named_operators(model)):
        raise ValueError("healing trains the operators, and the plan has none; leave out heal_tokens")
    if not (steps := len(blocks) // options.heal_batch):
        raise ValueError(f"healing takes at least {options.heal_batch} blocks, got {len(blocks)}")

    def report(progress: Progress) -> None:
        if progress.stage in ("train", "save"):
            on_progress(Progress("healing", progress.done, progress.total, "heal"))

    tensors = itertools.chain.from_iterable((*one.parameters(), *one.buffers()) for one in (model, teacher))
    with (
        tempfile.TemporaryDirectory() if folder is None else nullcontext(folder) as home,
        in_dtype((tensor for tensor in tensors if tensor.is_floating_point()), torch.float32),
        frozen_parameters(model),
        frozen_parameters(teacher),
    ):
        values = {name: getattr(options, name) for name in ("heal_learning_rate", "batch_size", "seed")}
        key = model_fingerprint(model, blocks, [model_fingerprint(teacher, blocks, [], {})], values)
        state = Path(home) / f"heal-{key[:16]}"
        state.mkdir(parents=True, exist_ok=True)
        for _, operator in named_operators(model):
            operator.requires_grad_(True)
        if not (healed := state / "healed.safetensors").is_file():
            samples = [{"input_ids": row, "labels": row} for row in blocks]
            fitting = _fit_settings(options, steps, next(model.parameters()).device)
            with eval_mode(model), torch.enable_grad():
                fit_in_folder(
                    model,
                    samples,
                    fitting,
                    objective=TeacherObjective(teacher, model),
                    out_dir=state,
                    on_progress=report,
                )
            save_tensors(healed, {name: p for name, p in model.named_parameters() if p.requires_grad})
        for name, value in load_tensors(healed).items():
            model.get_parameter(name).copy_(value)
        remove_checkpoints(state / "checkpoints")
        model.zero_grad()
    return HealReport(steps * options.heal_batch * blocks.shape[1], steps)


def _fit_settings(options: CompressSettings, steps: int, device: torch.device) -> FitSettings:
    return FitSettings(
        steps=steps,
        batch_size=options.batch_size,
        accumulation=options.heal_batch // options.batch_size,
        learning_rate=options.heal_learning_rate,
        warmup_steps=min(steps - 1, max(1, round(WARMUP_RATIO * steps))),
        min_lr_ratio=0.0,
        weight_decay=0.0,
        seed=options.seed,
        device="cpu" if device.type == "cpu" else "auto",
        log_every=min(10, max(1, steps // CHECKPOINTS)),
        save_every=max(1, steps // CHECKPOINTS),
    )
