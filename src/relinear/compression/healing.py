"""Healing: a compressed model is trained as a whole to give the logits of the original.

The teacher shares with the compressed model every matrix that is not trained (``original_copy``), so that healing
operators takes the weights that they replaced once more. Adam takes two values for each parameter that is trained.
"""

# Legend: N blocks, T tokens per block

import copy
import dataclasses
import itertools
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from relinear.compression.calibrate import fingerprint
from relinear.compression.checksums import load_tensors, read_record, save_tensors, write_record
from relinear.compression.settings import CompressSettings
from relinear.contract.auxiliary_losses import named_operators
from relinear.contract.objective import GuidedTraining
from relinear.hf.modes import evaluating
from relinear.surgery.states import own_parameters_
from relinear.training.distill import against
from relinear.training.fitting import fit_in_folder, remove_checkpoints
from relinear.training.settings import FitSettings

#: peak of the learning rate where the settings name none: a pretrained decoder's inputs have a few channels of enormous
#: size, and at 1e-4 Adam's first steps undo it
LEARNING_RATE = 3e-5
#: evaluations on the held-out part, beside the one before the first step
EVALUATIONS = 8
#: steps in which the learning rate rises, as a share of all
WARMUP = 0.1


@dataclasses.dataclass(frozen=True)
class HealReport:
    """The result of healing.

    what: "operators" or "all". tokens, steps: trained on. best_step: after which step the parameters are those
    that were kept; 0 where healing did not help. before, after: KL(original || model) on the held-out part, in nats a
    token.
    """

    what: str
    tokens: int
    steps: int
    best_step: int
    before: float
    after: float

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        return (
            f"healed ({self.what}) on {self.tokens:,} tokens in {self.steps} steps: divergence from the original "
            f"{self.before:.4f} -> {self.after:.4f} nats on held-out text (step {self.best_step})"
        )


def original_copy(model: nn.Module) -> Any:
    """``model`` as it is now, to be a teacher later: its modules are new, its matrices are shared, so take no memory.

    Operators may then replace layers of ``model``; the copy keeps the originals. Vectors are copied.
    """
    return copy.deepcopy(model, {id(p): p for p in model.parameters() if p.ndim > 1})


def heal(
    model: Any,
    teacher: Any,
    blocks: Tensor,
    held_out: Tensor,
    *,
    settings: CompressSettings | None = None,
    folder: str | Path | None = None,
    on_progress: Callable[[str, int, int], None] = lambda phase, done, total: None,
) -> HealReport:
    """Train ``model`` in place to give the logits of ``teacher``; what was best on the held-out part is kept.

    KL(teacher || model), Adam without weight decay, a warm-up and half a cosine down to 0. Killed, it resumes from its
    last checkpoint in ``folder``, to the same bits (on one thread).

    Args:
        model: a compressed decoder, in float32 or below; trained in float32, given back in its own dtype.
        teacher: the original, of the same vocabulary; may share parameters with ``model``. Given back as it was, with
            copies of those that were trained.
        blocks: token ids (N, T) to train on, in a random order, each once.
        held_out: token ids (N, T) that evaluate it.
        settings: ``heal``, ``heal_learning_rate``, ``heal_batch``, ``batch_size`` and ``seed`` of these.
        folder: of state and metrics; None keeps nothing.
        on_progress: called with "heal", steps done and in all.

    Raises:
        ValueError: if nothing is left to train, or there are fewer blocks than a step takes. NonFiniteLossError: (a
            ValueError) if training diverges.
    """
    options = settings or CompressSettings()
    if options.heal == "operators" and not any(True for _ in named_operators(model)):
        raise ValueError("heal='operators' trains the operators, and the plan has none; use heal='all'")
    if len(blocks) < options.heal_batch or not len(held_out):
        needed, got = f"{options.heal_batch} blocks (heal_batch)", f"{len(blocks)} and {len(held_out)}"
        raise ValueError(f"healing takes at least {needed} to train on and one that is held out, got {got}")
    with tempfile.TemporaryDirectory() if folder is None else nullcontext(folder) as home, _in_float32(model, teacher):
        return _Healing(model, teacher, blocks, held_out, options, Path(home), on_progress).run()


@contextmanager
def _in_float32(model: nn.Module, teacher: nn.Module) -> Iterator[None]:
    """Both models in float32 within the block; afterwards they have their dtypes and flags back."""
    both = (model, teacher)
    before = [{name: (t.dtype, t.requires_grad) for name, t in _tensors(one)} for one in both]
    for one in both:
        if any(p.dtype != torch.float32 for p in one.parameters()):
            one.float()
    try:
        yield
    finally:
        for one, original in zip(both, before, strict=True):
            for name, tensor in _tensors(one):
                dtype, trained = original.get(name, (tensor.dtype, tensor.requires_grad))
                tensor.data = tensor.data.to(dtype)
                tensor.requires_grad_(trained)
        model.zero_grad()


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return itertools.chain(model.named_parameters(), model.named_buffers())


class _Evaluated(GuidedTraining):
    """A model with its objective, by which it is evaluated, too: the data need not be what the original is good at."""

    def forward(self, num_items_in_batch: Tensor | None = None, **batch: Tensor) -> dict[str, Any]:
        if self.training:
            return super().forward(num_items_in_batch, **batch)
        loss, _, output = self.objective(self.model, batch)
        return {"loss": loss, "logits": output.logits}


class _Healing:
    """One healing under way."""

    def __init__(self, model, teacher, blocks, held_out, settings, home, on_progress) -> None:
        self.model, self.teacher, self.blocks, self.held_out = model, teacher, blocks, held_out
        self.settings, self.on_progress = settings, on_progress
        names = ("heal", "heal_learning_rate", "heal_batch", "batch_size", "seed")
        marked = {name: getattr(settings, name) for name in names}
        both = torch.cat([blocks, held_out])
        origin = fingerprint(teacher, both, [], {})
        mark = fingerprint(model, both, [origin, str(len(blocks))], marked)
        self.folder = home / f"heal-{mark[:16]}"
        self.best = self.folder / "best.safetensors"
        self.steps = len(blocks) // settings.heal_batch

    def run(self) -> HealReport:
        self.folder.mkdir(parents=True, exist_ok=True)
        record = self.folder / "healed.json"
        self._mark_trained()
        if not record.is_file():
            write_record(record, self._train())
        report = HealReport(**read_record(record))
        self._take_best()
        remove_checkpoints(self.folder / "checkpoints")
        return report

    def _mark_trained(self) -> None:
        """Let those parameters train that are to; the teacher gets its own copies of them where it shares them."""
        self.model.requires_grad_(self.settings.heal == "all")
        for _, operator in named_operators(self.model):
            operator.requires_grad_(True)
        own_parameters_(self.teacher, self._trained().values())
        self.teacher.requires_grad_(False)

    def _trained(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def _train(self) -> dict[str, Any]:
        settings = self.settings
        batch = min(settings.batch_size, settings.heal_batch)
        interval = max(1, self.steps // EVALUATIONS)
        fit_settings = FitSettings(
            steps=self.steps,
            batch_size=batch,
            accumulation=settings.heal_batch // batch,
            learning_rate=settings.heal_learning_rate or LEARNING_RATE,
            warmup_steps=min(self.steps - 1, max(1, round(WARMUP * self.steps))),
            min_lr_ratio=0.0,
            weight_decay=0.0,
            seed=settings.seed,
            device="cpu" if next(self.model.parameters()).device.type == "cpu" else "auto",
            log_every=min(10, interval),
            eval_every=interval,
            save_every=interval,
            eval_batch_size=settings.batch_size,
        )
        samples = [[{"input_ids": row, "labels": row} for row in part] for part in (self.blocks, self.held_out)]
        evaluated = _Evaluated(self.model, against(self.teacher, self.model))
        with evaluating(self.model):
            result = fit_in_folder(
                evaluated, tuple(samples), fit_settings, out_dir=self.folder, on_progress=self._report_progress
            )
        step, loss = self._best_so_far()
        first = result.curve[0]["validation_loss"]
        tokens = self.steps * settings.heal_batch * self.blocks.shape[1]
        return HealReport(settings.heal, tokens, self.steps, step, first, loss).to_dict()

    def _report_progress(self, progress: Any) -> None:
        loss = progress.validation_loss
        if progress.stage == "evaluate" and loss < self._best_so_far()[1]:
            save_tensors(self.best, self._trained(), {"step": str(progress.done), "loss": repr(loss)})
        if progress.stage in ("train", "save"):
            self.on_progress("heal", progress.done, progress.total)

    def _best_so_far(self) -> tuple[int, float]:
        if not self.best.is_file():
            return -1, float("inf")
        _, about = load_tensors(self.best)
        return int(about["step"]), float(about["loss"])

    @torch.no_grad()
    def _take_best(self) -> None:
        values, _ = load_tensors(self.best)
        for name, parameter in self._trained().items():
            parameter.copy_(values[name])
