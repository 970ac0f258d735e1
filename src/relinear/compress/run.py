"""``compress``: calibrate, plan, fit, save."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from relinear.compress.allocate import Candidate
from relinear.compress.calibrate import Calibration, calibrate
from relinear.compress.export import export_plain
from relinear.compress.export_gguf import check_gguf, check_gguf_operators, export_gguf
from relinear.compress.heal import HealReport, check_heal, check_healable, heal, original_copy
from relinear.compress.in_order import fit_in_order, fit_without_order
from relinear.compress.neurons import NEURONS, Neurons
from relinear.compress.plan import CompressPlan, layer_candidates, make_plan
from relinear.compress.settings import CompressSettings
from relinear.core.anatomy import layer_index
from relinear.core.config import check_choice
from relinear.core.modes import evaluating
from relinear.core.operator import Operator, OperatorConfig, linear_features
from relinear.distill.record import token_blocks
from relinear.surgery.checkpoint import save_pretrained
from relinear.surgery.plan import Replacement, plan
from relinear.surgery.select import ALL_LINEAR
from relinear.surgery.states import flat_states, place_
from relinear.surgery.summary import module_parameters
from relinear.system.files import write_json
from relinear.system.lock import only_process_in

__all__ = ["CompressReport", "compress"]

#: told the phase ("forward", "backward", "candidates", "fit", "heal"), how much of it is done, and how much there is
OnProgress = Callable[[str, int, int], None]


def _silent(phase: str, done: int, total: int) -> None:
    return None


@dataclasses.dataclass(frozen=True)
class CompressReport:
    """What a compression did; printing it shows the plan by type of layer and the sizes.

    plan: what every layer became. parameters, parameters_before: of the whole model. calibration_loss: of the original
    on the calibration's tokens, nats a token. seconds: by phase, of this call. healing: None where there was none.
    """

    plan: CompressPlan
    parameters: int
    parameters_before: int
    calibration_tokens: int
    calibration_loss: float | None
    seconds: dict[str, float]
    healing: HealReport | None = None

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        layers = {name: layer.to_dict() for name, layer in self.plan.layers.items()}
        return {
            "parameters": self.parameters,
            "parameters_before": self.parameters_before,
            "calibration": {"tokens": self.calibration_tokens, "loss": self.calibration_loss},
            "predicted_nats": self.plan.nats,
            "layers": layers,
            "seconds": self.seconds,
            "healing": None if self.healing is None else self.healing.to_dict(),
        }

    def __str__(self) -> str:
        share = self.parameters / self.parameters_before
        text = f"{self.plan}\nwhole model: {self.parameters_before:,} -> {self.parameters:,} parameters ({share:.3f})"
        return text if self.healing is None else f"{text}\n{self.healing}"


def compress(
    model: Any,
    texts: Iterable[Any],
    *,
    keep: float | None = None,
    tokenizer: Any = None,
    targets: str | Iterable[str] = ALL_LINEAR,
    exclude: str | Iterable[str] | None = None,
    settings: CompressSettings | Mapping[str, Any] | None = None,
    plan_file: str | Path | None = None,
    plan_only: bool = False,
    out_dir: str | Path | None = None,
    export: Literal["plain", "gguf"] | None = None,
    on_progress: OnProgress = _silent,
) -> CompressReport:
    """Make a pretrained decoder smaller, in place: measure, decide what every layer becomes, fit it, save.

    Args:
        model: a Hugging Face decoder.
        texts: texts, conversations (lists of ``{"role", "content"}``, written by the tokenizer's chat template), or
            tensors or mappings of token ids, as for ``distill_``; read as far as needed.
        keep: share of the parameters to keep; a shorthand for the setting of this name.
        tokenizer: of the model, needed for texts; saved beside the model.
        targets, exclude: patterns of the linear layers that may be replaced; by default all but the head.
        settings: ``CompressSettings`` or a mapping of its fields.
        plan_file: a plan to carry out in place of one that is made here.
        plan_only: stop after the plan, the model as it was.
        export: "plain" also writes ``out_dir/plain``, a directory that loads without relinear (``export_plain``);
            "gguf" writes ``out_dir/model.gguf`` of a Llama without factors (``export_gguf``).
        out_dir: where statistics, plan, state, report and model are kept. Killed and called again with the same
            arguments, it goes on from where it was; another budget or menu uses the same statistics. None keeps
            nothing.
        on_progress: called with a phase, how much of it is done and how much there is.

    Raises:
        ValueError: if the budget cannot be met, the corpus is too short, the model is quantised or cannot be run layer
            by layer, or ``out_dir`` holds the work on another model, corpus or plan.
    """
    check_choice("export", export or "plain", ["plain", "gguf"])
    given = settings.model_dump() if isinstance(settings, CompressSettings) else dict(settings or {})
    chosen = CompressSettings.load(given if keep is None else given | {"keep": keep}, "compress settings")
    check_heal(chosen)
    if export == "gguf":
        check_gguf(model, tokenizer)
    with tempfile.TemporaryDirectory() if out_dir is None else only_process_in(out_dir) as folder, evaluating(model):
        job = _Job(model, _targets(model, targets, exclude), chosen, Path(folder), on_progress)
        given_plan = None if plan_file is None else job.read_plan(plan_file)
        blocks, further = _read(texts, tokenizer, chosen, plan_only)
        job.one_matrix_each = export == "gguf"
        report = job.run(blocks, further, given_plan, plan_only)
    if out_dir is not None and not plan_only:
        save_pretrained(model, Path(out_dir) / "model", tokenizer=tokenizer)
    if out_dir is not None and not plan_only and export == "plain":
        export_plain(model, Path(out_dir) / "plain", tokenizer=tokenizer)
    if out_dir is not None and not plan_only and export == "gguf":
        export_gguf(model, Path(out_dir) / "model.gguf", tokenizer=tokenizer)
    return report


def _read(texts: Iterable[Any], tokenizer: Any, settings: CompressSettings, plan_only: bool) -> tuple[Tensor, Tensor]:
    """Blocks (N, T) for calibration, and those behind them for healing."""
    count = settings.tokens // settings.sequence_length
    further = 0 if plan_only else settings.heal_blocks + settings.held_out_blocks
    what = "tokens plus heal_tokens and heal_held_out_tokens" if further else "tokens"
    blocks = token_blocks(texts, tokenizer, settings.sequence_length, count + further, what)
    return blocks[:count], blocks[count:]


class _Clock:
    """Seconds by phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.monotonic()

    def lap(self, phase: str) -> None:
        """The time since the last lap belongs to ``phase``."""
        now = time.monotonic()
        self.seconds[phase] = now - self._last
        self._last = now


def _targets(model: Any, targets: str | Iterable[str], exclude: Any) -> dict[str, nn.Module]:
    """The linear layers that may be replaced, by name."""
    if getattr(model, "is_quantized", False) or getattr(model, "quantization_method", None) is not None:
        raise ValueError(
            f"{type(model).__name__} is quantised; compress the model in floating point, then quantise the result"
        )
    patterns = [targets] if isinstance(targets, str) else list(targets)
    smallest = OperatorConfig.from_dict({"kind": "low_rank", "rank": 1})
    found = plan(model, dict.fromkeys(patterns, smallest), exclude=exclude).replacements
    return {r.name: r.target.module for r in found if not isinstance(r.target.module, Operator)}


class _Job:
    """One compression: what may be replaced, checked when made, and the steps."""

    def __init__(
        self,
        model: Any,
        modules: dict[str, nn.Module],
        settings: CompressSettings,
        folder: Path,
        on_progress: OnProgress,
    ) -> None:
        self.model, self.modules, self.settings, self.folder = model, modules, settings, folder
        self.on_progress = on_progress
        self.one_matrix_each = False
        self.menu = tuple(OperatorConfig.read(text) for text in settings.menu if text != NEURONS)
        self.by_layer: dict[int, dict[str, nn.Module]] = {}
        for name, module in modules.items():
            index = layer_index(model, name)
            if index is None:
                raise ValueError(
                    f"{name} lies outside of the decoder layers, which is all that is compressed: exclude it"
                )
            self.by_layer.setdefault(index, {})[name] = module
        widest = max(linear_features(module)[0] for module in modules.values())
        if settings.tokens < widest:
            raise ValueError(
                f"tokens={settings.tokens} are fewer than the widest layer has inputs, {widest:,}; use more"
            )
        self.neurons: Neurons | None = None
        if settings.menu == (NEURONS,):
            self.neurons = Neurons(model, modules)
            self.width = self.neurons.fitting_width(self._parameter_limit())

    def _parameter_limit(self) -> float:
        """How many parameters the layers that may be replaced may have."""
        layers = sum(module_parameters(module) for module in self.modules.values())
        whole = module_parameters(self.model)
        return self.settings.keep * (layers if self.settings.budget_of == "layers" else whole) - (
            0 if self.settings.budget_of == "layers" else whole - layers
        )

    def read_plan(self, path: str | Path) -> CompressPlan:
        """A plan from a file. Raises ValueError if it is none for this model and these targets."""
        if self.neurons is not None:
            raise ValueError("menu: neurons has one width for all layers, by the budget: it takes no plan")
        found = CompressPlan.load(path, self.model)
        strange = sorted(set(found.replaced) - set(self.modules))
        if strange:
            raise ValueError(f"{path} replaces {strange[0]}, which targets= and exclude= leave alone")
        return found

    def run(self, blocks: Tensor, further: Tensor, given_plan: CompressPlan | None, plan_only: bool) -> CompressReport:
        """Calibrate, plan and, unless ``plan_only``, fit and heal; what is kept goes to the folder as it is made."""
        clock = _Clock()
        before = module_parameters(self.model)
        calibration = calibrate(
            self.model,
            blocks,
            self.by_layer,
            self.folder / "calibration",
            batch=self.settings.batch_size,
            fisher=self.settings.fisher,
            on_layer=self.on_progress,
        )
        clock.lap("calibration")
        narrowed = None
        if self.neurons is not None:
            narrowed = self.neurons.fitted(calibration, self.width, partial(self.on_progress, "candidates"))
        whole = given_plan or self._plan(calibration, narrowed)
        whole.save(self.folder / "plan.json")
        clock.lap("plan")
        if self.one_matrix_each:
            check_gguf_operators(whole.replaced, {name: linear_features(m) for name, m in self.modules.items()})
        healing = None
        if not plan_only and (whole.replaced or narrowed):
            dense = [name for name in self.modules if name not in whole.replaced]
            if self.settings.heal_tokens:
                check_healable(self.settings, len(whole.replaced), len(dense))
            teacher = original_copy(self.model) if self.settings.heal_tokens else None
            if self.neurons is not None and narrowed is not None:
                self.neurons.apply_(narrowed)
            else:
                self._carry_out(blocks, calibration, whole)
            clock.lap("fit")
            if teacher is not None:
                healing = self._heal(teacher, further, dense)
                clock.lap("heal")
        after = whole.parameters + whole.others
        report = CompressReport(whole, after, before, calibration.tokens, calibration.loss, clock.seconds, healing)
        write_json(self.folder / "report.json", report.to_dict())
        return report

    def _plan(self, calibration: Calibration, narrowed: Mapping[str, Any] | None) -> CompressPlan:
        if self.neurons is not None and narrowed is not None:
            others = module_parameters(self.model) - sum(module_parameters(m) for m in self.modules.values())
            costs = {name: 0.5 * error for name, (_, _, error) in narrowed.items()} if self.settings.fisher else {}
            return self.neurons.plan(self.width, others, costs)
        candidates: dict[str, list[Candidate]] = {}
        for done, (name, module) in enumerate(self.modules.items(), start=1):
            candidates[name] = layer_candidates(module, name, calibration, self.menu)
            self.on_progress("candidates", done, len(self.modules))
        return make_plan(self.model, candidates, self.settings, weighed=self.settings.fisher)

    def _heal(self, teacher: Any, blocks: Tensor, dense: list[str]) -> HealReport:
        """Train the compressed model on ``blocks``, but for some, spread evenly over them, that judge."""
        judge = torch.linspace(0, len(blocks) - 1, self.settings.held_out_blocks).round().long()
        kept = torch.ones(len(blocks), dtype=torch.bool)
        kept[judge] = False
        return heal(
            self.model,
            teacher,
            blocks[kept],
            blocks[judge],
            settings=self.settings,
            dense=dense,
            folder=self.folder,
            on_progress=self.on_progress,
        )

    def _carry_out(self, blocks: Tensor, calibration: Calibration, whole: CompressPlan) -> None:
        """Fit the planned operators and put them into the model."""
        settings, mapping = self.settings, dict(whole.replaced)
        replacements = plan(self.model, mapping).replacements
        if not settings.anchor:
            fitted = fit_without_order(calibration, replacements, self.on_progress)
            place_(self.model, replacements, flat_states(fitted))
            return
        groups: dict[int, list[Replacement]] = {}
        for replacement in replacements:
            index = layer_index(self.model, replacement.name)
            assert index is not None  # checked when the job was made
            groups.setdefault(index, []).append(replacement)
        count = settings.anchor_tokens // settings.sequence_length
        refinement = {k: getattr(settings, k) for k in ("refine_steps", "refine_learning_rate", "seed")}
        kept = self._correctable(calibration, whole) if settings.correct_dense else {}
        what = [{name: config.to_dict() for name, config in mapping.items()}, count, refinement, kept]
        mark = hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:16]
        fit_in_order(
            self.model,
            blocks[:count],
            calibration,
            groups,
            self.folder / f"fit-{mark}",
            batch=settings.batch_size,
            kept=kept,
            on_layer=self.on_progress,
            **refinement,
        )

    def _correctable(self, calibration: Calibration, whole: CompressPlan) -> dict[int, list[str]]:
        """The layers that stay dense and may take other weights: theirs alone, with inputs that are known."""
        uses = Counter(id(p) for _, p in self.model.named_parameters(remove_duplicate=False))
        return {
            index: [
                name
                for name, module in modules.items()
                if name not in whole.replaced
                and calibration.counts[name] >= linear_features(module)[0]
                and all(uses[id(p)] == 1 for p in module.parameters())
            ]
            for index, modules in self.by_layer.items()
        }
