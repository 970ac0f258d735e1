"""Distil layer by layer: record, fit, replace; a killed run resumes after its last finished decoder layer."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import hashlib
import itertools
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from relinear.contract.module_state import eval_mode
from relinear.contract.operator import Operator, OperatorConfig, is_replaceable
from relinear.deprecated import overwriting
from relinear.distill.fit import (
    FitError,
    InModelFit,
    LayerSamples,
    improve,
    initialize_bias_,
    layer_objective,
    measure,
    swapped,
)
from relinear.distill.record import Recording, fingerprint_of, record, token_blocks
from relinear.distill.report import DistillReport, LayerFit
from relinear.distill.settings import DistillSettings
from relinear.evaluate.losses import batch_losses, perplexity_of
from relinear.hf.model_config import model_name
from relinear.hf.model_layout import layer_finder
from relinear.hf.next_token_check import check_predicts_next_token
from relinear.hf.peft_models import stock_name
from relinear.hf.vocabulary import check_tokenizer_fits
from relinear.settings.messages import warn_user
from relinear.settings.patterns import matches
from relinear.surgery.checkpoint import save_pretrained
from relinear.surgery.layer_bias import LayerBias
from relinear.surgery.plan import Plan, Replacement, attach_, plan
from relinear.surgery.states import flat_states, load_states_, replace_with_states_
from relinear.surgery.summary import module_parameters
from relinear.system.files import atomic_path, damaged_file_errors, fingerprint, write_json
from relinear.system.machine import provenance
from relinear.system.progress import Progress, ProgressCallback, no_progress
from relinear.system.run_folder import RunFolder
from relinear.system.text import some_names

_OVERWRITE = "overwrite=True (--overwrite)"


def distill_(
    model: nn.Module,
    mapping: Mapping[str, OperatorConfig | str | None],
    data: Iterable[Any],
    *,
    layers: Iterable[int] | int | None = None,
    exclude: str | Iterable[str] | None = None,
    filter_fn: Callable[[nn.Module, str], bool] | None = None,
    tokenizer: Any = None,
    settings: DistillSettings | Mapping[str, Any] | None = None,
    out_dir: str | Path | None = None,
    overwrite: bool = False,
    resume: bool | None = None,
    on_progress: ProgressCallback = no_progress,
) -> DistillReport:
    """Replace layers of a pretrained model, in place, by operators fitted to the layers' outputs on a corpus.

    For each decoder layer in order: record the inputs of its layers to replace, with all earlier replacements active;
    fit each operator to its layer's outputs for these inputs, or to those in the original model (Adam, cosine
    schedule); replace the layers; retrain the layers named by ``settings.retrain`` to return their earlier outputs.

    Args:
        model: any Hugging Face decoder (or a module that takes ``input_ids``). It runs in eval mode; afterwards every
            module has its earlier mode, and operators that of the layers they replaced.
        mapping, layers, exclude, filter_fn: which layers become what, as in ``replace_``.
        data: texts (``iter_texts``, a list, a generator), or tensors or mappings of token ids such as
            ``prepare_data(...).train``. Read no further than ``tokens + validation_tokens``.
        tokenizer: the model's tokenizer, needed for texts; saved with the model.
        settings: ``DistillSettings`` or a mapping of its fields.
        out_dir: directory for state, report and the finished model; None writes nothing.
        overwrite: start over, and rename existing results in ``out_dir``: ``model`` becomes ``model.<time>``. By
            default an earlier call with the same arguments is resumed. The result equals that of an uninterrupted call
            bit for bit (on the same machine with the same number of threads).
        resume: deprecated; ``resume=False`` is ``overwrite=True``.
        on_progress: called now and then with a ``Progress``: its ``stage`` is "evaluate", "record", "fit" or
            "retrain", its ``text`` says of which layer, and ``done`` counts blocks or steps.

    Returns:
        The report. Its errors, and the model's perplexities before and after, are on held-out tokens. A warning names
        layers that were fitted worse than an output of zeros.

    Raises:
        ValueError: as ``replace_``; if the model sees later tokens, or is an encoder-decoder; if the corpus is too
            short; if the tokenizer has ids that the model does not embed; if ``out_dir`` holds another distillation, or
            files of others under its names.

    Examples:
        >>> model, ids = relinear.from_preset("tiny"), torch.randint(258, (4, 256))
        >>> settings = {"tokens": 512, "validation_tokens": 256}
        >>> report = relinear.distill_(model, {"q_proj": relinear.Monarch()}, ids, layers=0, settings=settings)
        >>> report.layers[0].error < report.layers[0].start_error
        True
    """
    settings = DistillSettings.load(settings or {}, "distill settings")
    full_plan = plan(model, mapping, layers=layers, exclude=exclude, filter_fn=filter_fn)
    settings_json = settings.model_dump(mode="json")
    overwrite = overwriting(overwrite, resume)
    with contextlib.ExitStack() as stack:
        folder = RunFolder(
            stack.enter_context(tempfile.TemporaryDirectory()) if out_dir is None else out_dir,
            task="distill",
            record="distill.json",
            names=("layers", "recorded", "model", "report.json"),
            earlier_records={"distill.json": ("fingerprint", "settings", "done")},
            settings_of=lambda record: DistillSettings.upgraded(record.get("settings")),
        )
        folder.check(settings_json, overwrite=overwrite)
        if not full_plan.replacements:
            raise ValueError("the mapping leaves every layer alone: there is nothing to distill")
        if settings.bias:
            _check_biases(full_plan)
        if tokenizer is not None:
            check_tokenizer_fits(tokenizer, model)
        check_predicts_next_token(model, "distill_", needs_logits=settings.loss == "kl")
        length = settings.sequence_length
        train_blocks = settings.tokens // length
        blocks = token_blocks(data, tokenizer, length, train_blocks + settings.validation_tokens // length)
        layer_of = layer_finder(model)
        groups = [list(g) for _, g in itertools.groupby(full_plan.replacements, key=lambda r: layer_of(r.name))]
        distillation = Distillation(model, settings, blocks, train_blocks, folder, on_progress)
        for group in groups:  # both raise errors for impossible settings, before any work
            distillation.retrained(group)
            if settings.joint:
                _common_parent(group)

        earlier = stack.enter_context(folder.open(settings_json, overwrite=overwrite))
        with eval_mode(model):
            before = distillation.perplexity("before")
        if settings.bias:
            _add_biases_(model, full_plan)
        fits = distillation.restore(groups, full_plan, earlier)
        with eval_mode(model):
            for number, group in enumerate(groups[len(fits) :], start=len(fits)):
                fits.append(distillation.fit_decoder_layer(number, group))
                distillation.write_layer(number, group, fits)
            after = distillation.perplexity("after")
        report = DistillReport(tuple(itertools.chain(*fits)), settings.loss, before, after)
        _warn_of_poor_fits(report)
        if out_dir is not None:
            save_pretrained(model, folder.take("model"), tokenizer=tokenizer)
            facts = {"model": model_name(model), "settings": settings_json}
            write_json(folder.take("report.json"), report.to_dict() | facts | provenance())
    return report


def _warn_of_poor_fits(report: DistillReport) -> None:
    if poor := [fit for fit in report.layers if fit.worse_than_zeros]:
        warn_user(
            f"{len(poor)} of {len(report.layers)} layers were fitted worse than an output of zeros would be (error 1): "
            f"{some_names([f'{fit.name} ({fit.error:.3g})' for fit in poor], 5)}. Try more tokens or epochs, another "
            "learning_rate, a larger operator, or loss='mse'"
        )


def _check_biases(full_plan: Plan) -> None:
    """Raise ValueError if ``bias=True`` and a layer cannot get a bias."""
    for r in full_plan.replacements:
        if isinstance(r.target.module, Operator) and r.target.module.bias is None:
            raise ValueError(f"bias=True: {r.name} is an operator without a bias already; leave it out with exclude=")


def _add_biases_(model: nn.Module, full_plan: Plan) -> None:
    """Give every target without a bias a zero bias, so that its operator gets one."""
    targets = [r.target for r in full_plan.replacements if getattr(r.target.module, "bias", None) is None]
    if targets:
        attach_(model, LayerBias(layers=tuple(stock_name(target.name) for target in targets)))


def _saved_operators(full_plan: Plan, state: Mapping[str, Any]) -> list[Any] | None:
    """Return the settings of ``full_plan``'s operators as a saved state has them; None if it has other operators."""
    configs = [(r.name, r.config) for r in full_plan.replacements]
    # the first version did not save them
    stored = state.get("operators", [[name, config.to_dict()] for name, config in configs])
    try:
        known = [(name, OperatorConfig.from_dict(values, is_record=True)) for name, values in stored]
    except (ValueError, TypeError):
        return None
    return stored if known == configs else None


def _common_parent(group: list[Replacement]) -> str:
    """Return the name of the nearest module that holds all targets of a group."""
    parents = [r.name.split(".")[:-1] for r in group]
    common = itertools.takewhile(lambda parts: len(set(parts)) == 1, zip(*parents, strict=False))
    parent = ".".join(parts[0] for parts in common)
    if not parent:
        names = ", ".join(r.name for r in group)
        raise ValueError(f"joint=True: no module inside the model holds {names}; exclude those without a common parent")
    return parent


@dataclasses.dataclass
class Distillation:
    """Fit decoder layers one after another, and save and restore the state on disk.

    Attributes:
        model: the model, which is changed in place.
        settings: settings of the distillation.
        blocks: token ids (N, T).
        train_blocks: number of blocks to fit on; the others are held out.
        folder: the folder of the state.
        on_progress: as for ``distill_``.
        originals: copies of the layers that were replaced or trained again, under all their names, for the target
            "original".
        weights: name of a finished layer's file of weights -> the file's size and hash.
        identity: entries of the record that identify the distillation: its fingerprint and its operators' settings.
    """

    model: nn.Module
    settings: DistillSettings
    blocks: Tensor
    train_blocks: int
    folder: RunFolder
    on_progress: ProgressCallback
    originals: dict[str, nn.Module] = dataclasses.field(default_factory=dict)
    weights: dict[str, Any] = dataclasses.field(default_factory=dict)
    identity: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def train_tokens(self) -> int:
        return self.train_blocks * self.settings.sequence_length

    def perplexity(self, when: str) -> float | None:
        """Return the model's perplexity in eval mode on the held-out tokens, without the first of each block.

        None if it returns no logits.
        """
        report = self._reporting("evaluate", f"the model {when}")
        blocks = self.blocks[self.train_blocks :]
        total, done = 0.0, 0
        for losses, _ in batch_losses(self.model, blocks, self.settings.record_batch):
            total += float(losses.double().sum())
            done += len(losses)
            report(done, len(blocks))
        return perplexity_of(total / blocks[:, 1:].numel()) if done else None

    # State on disk

    def fingerprint(self, full_plan: Plan, settings: Any, operators: list) -> str:
        """Return a hash of everything that decides the result; ``settings`` and ``operators`` as saved."""
        parameters = [p for r in full_plan.replacements for p in r.target.module.parameters()]
        return fingerprint_of([settings, operators], [self.blocks, *parameters])

    def restore(
        self, groups: list[list[Replacement]], full_plan: Plan, earlier: Mapping[str, Any] | None
    ) -> list[list[LayerFit]]:
        """Restore the layers that an earlier call finished; ``model`` must not have been changed yet."""
        settings = self.settings.model_dump(mode="json")
        operators = [[r.name, r.config.to_dict()] for r in full_plan.replacements]
        digest = self.fingerprint(full_plan, settings, operators)
        self.identity = {"fingerprint": digest, "operators": operators}
        if earlier is None or "fingerprint" not in earlier:
            self._write_record([])
            return []
        with damaged_file_errors(self.folder.record_path, "not the state of a distillation", "choose another out_dir"):
            done = [[LayerFit(**fit) for fit in fits] for fits in earlier["done"]]
            self.weights = dict(earlier.get("weights", {}))  # the first versions did not record them
        # hashed with the settings as they were saved, as earlier versions had fewer
        saved = _saved_operators(full_plan, earlier)
        if saved is None or earlier["fingerprint"] != self.fingerprint(full_plan, earlier["settings"], saved):
            other_work = "a distillation of another model, mapping or corpus"
            raise ValueError(f"{self.folder.path} holds {other_work}; give another, or start over with {_OVERWRITE}")
        for number, group in enumerate(groups[: len(done)]):
            path = self._weights_path(number)
            if not path.is_file() or self.weights.get(path.name, fingerprint(path)) != fingerprint(path):
                advice = f"restore it from a copy, or start over with {_OVERWRITE}"
                raise ValueError(f"{path} is missing or not what was written; {advice}")
            self.originals.update(self._copies(group))
            weights = safetensors.torch.load_file(path)
            replace_with_states_(self.model, group, weights)
            load_states_(self.model, self.retrained(group), weights)
        self._write_record(done)
        return done

    def _write_record(self, done: list[list[LayerFit]]) -> None:
        finished = [[dataclasses.asdict(fit) for fit in fits] for fits in done]
        self.folder.write(**self.identity, done=finished, weights=self.weights)

    def _weights_path(self, number: int) -> Path:
        return self.folder.path / "layers" / f"{number:04d}.safetensors"

    def write_layer(self, number: int, group: list[Replacement], done: list[list[LayerFit]]) -> None:
        """Write the layer's weights, then record it as done; a kill between the two repeats the layer."""
        with atomic_path(self._weights_path(number)) as path:
            safetensors.torch.save_file(flat_states(self._changed(group)), path)
        self.weights[self._weights_path(number).name] = fingerprint(self._weights_path(number))
        self._write_record(done)

    def _changed(self, group: list[Replacement]) -> dict[str, nn.Module]:
        """Return the operators of a group and the layers that are trained again after it."""
        return {r.name: self.model.get_submodule(r.name) for r in group} | self.retrained(group)

    def retrained(self, group: list[Replacement]) -> dict[str, nn.Module]:
        """Return the layers to train again after a group was replaced, by name; raise ValueError if none match."""
        pattern = self.settings.retrain
        if pattern is None:
            return {}
        layer_of = layer_finder(self.model)
        replaced = {r.name for r in group}
        modules = {
            name: module
            for name, module in self.model.named_modules()
            if is_replaceable(module)
            and name not in replaced
            and matches(pattern, name)
            and layer_of(name) == layer_of(group[0].name)
        }
        if not modules:
            raise ValueError(
                f"retrain={pattern!r} matches no linear layer other than those replaced near {group[0].name}"
            )
        return modules

    # One decoder layer

    def _reporting(self, stage: str, name: str) -> Callable[..., None]:
        def report(done: int, total: int, loss: float | None = None) -> None:
            self.on_progress(Progress(f"{stage} {name}", done, total, stage, loss=loss))

        return report

    def _record_activations(self, modules: Mapping[str, nn.Module], **kw: Any):
        folder = self.folder.path / "recorded" if self.settings.on_disk else None
        report = self._reporting("record", next(iter(modules)).rpartition(".")[0])
        return record(
            self.model, self.blocks, modules, batch=self.settings.record_batch, folder=folder, on_block=report, **kw
        )

    def fit_decoder_layer(self, number: int, group: list[Replacement]) -> list[LayerFit]:
        """Fit and replace the targets of one decoder layer."""
        retrained = self.retrained(group)
        copies = self._copies(group)
        before = {}
        if retrained:
            with swapped(self.model, self.originals), self._record_activations(retrained, outputs=True) as recording:
                before = {name: recording.values(name).clone() for name in retrained}
        fits = self._fit(number, group)
        fits += [self._retrain(name, before.pop(name)) for name in retrained]
        self.originals.update(copies)
        return fits

    def _copies(self, group: list[Replacement]) -> dict[str, nn.Module]:
        """Copy the modules that a group changes, if the target needs them: name -> copy, with aliases."""
        if self.settings.target != "original":
            return {}
        changed = {id(module): copy.deepcopy(module) for module in self._changed(group).values()}
        modules = self.model.named_modules(remove_duplicate=False)
        return {name: changed[id(module)] for name, module in modules if id(module) in changed}

    @contextlib.contextmanager
    def _samples(self, group: list[Replacement]) -> Iterator[dict[str, LayerSamples]]:
        """Record and return the inputs and the target outputs of each layer of a group, by name."""
        modules = {r.name: r.target.module for r in group}
        dims = {r.name: r.config.context_dim for r in group if r.config.conditioned}  # type: ignore[attr-defined]
        with contextlib.ExitStack() as stack:
            recording = stack.enter_context(self._record_activations(modules, context_dims=dims))
            original_outputs = None
            if self.originals:
                with swapped(self.model, self.originals):
                    original_outputs = stack.enter_context(self._record_activations(modules, outputs=True))
            yield {name: _layer_samples(name, module, recording, original_outputs) for name, module in modules.items()}

    def _new_operator(self, replacement: Replacement, number: int, samples: LayerSamples | None) -> Operator:
        """Return a new operator; its random numbers depend only on seed and layer. With ``bias``, set its bias."""
        config, settings = replacement.config, self.settings
        source = copy.deepcopy(replacement.target.module)
        source = source if settings.loss == "kl" else source.float()
        key = hashlib.sha256(f"{settings.seed} {number} {replacement.name}".encode()).digest()
        operator = None
        with torch.random.fork_rng(devices=[]):
            if settings.init == "auto" and config.fits_weight:
                torch.manual_seed(int.from_bytes(key[:4], "little"))
                with contextlib.suppress(ValueError):  # only some shapes of some operators have a closed form
                    operator = config.convert(source, "from_weight")
            fitted = operator is not None
            if operator is None:
                torch.manual_seed(int.from_bytes(key[:4], "little"))
                operator = config.convert(source, "fresh")
        if samples is not None and settings.bias:
            initialize_bias_(operator, samples, slice(0, self.train_tokens), fitted=fitted)
        return operator

    def _fit(self, number: int, group: list[Replacement]) -> list[LayerFit]:
        """Fit a decoder layer's operators, each to its layer's outputs or all to the logits; replace the layers."""
        settings = self.settings
        by_logits = settings.loss == "kl"
        joint: dict[str, Any] = {}
        nothing: contextlib.AbstractContextManager[dict[str, LayerSamples]] = contextlib.nullcontext({})
        with nothing if by_logits and not settings.bias else self._samples(group) as samples:
            operators = {r.name: self._new_operator(r, number, samples.get(r.name)) for r in group}
            batch = max(1, min(settings.record_batch, settings.tokens_per_step // settings.sequence_length))
            by_name = {name: operators[r.name] for r in group for name in (r.name, *r.target.aliases)}
            in_model = InModelFit(self.model, by_name, self.originals, self.blocks, self.train_blocks, batch)
            if by_logits:
                report = self._reporting("fit", group[0].name.rpartition(".")[0])
                errors = dict.fromkeys(operators, in_model.improve(in_model.logits_objective(), settings, report))
            else:
                errors = {
                    name: self._improve_layer("fit", name, operator, samples[name], settings.loss)
                    for name, operator in operators.items()
                }
            if settings.joint:  # then together, to the outputs of the nearest module that holds them all
                holder = _common_parent(group)
                objective = in_model.output_objective(holder, settings.loss)
                before, after = in_model.improve(objective, settings, self._reporting("fit", holder))
                joint = {"joint_start_error": before.relative, "joint_error": after.relative}
                held_out = slice(self.train_tokens, self.blocks.numel())
                errors = {n: (errors[n][0], measure(operators[n], samples[n], held_out)) for n in operators}
        fits = []
        for r in group:
            counts = module_parameters(operators[r.name]), module_parameters(r.target.module)
            initial, end = errors[r.name]
            fits.append(LayerFit(r.name, str(r.config), *counts, initial.relative, end.relative, end.cosine, **joint))
        replace_with_states_(self.model, group, flat_states(operators))
        return fits

    def _improve_layer(
        self, stage: str, name: str, module: nn.Module, samples: LayerSamples, loss: str
    ) -> tuple[FitError, FitError]:
        """Train one module on recorded tokens."""
        settings = self.settings
        objective = layer_objective(module, samples, self.train_tokens, loss)
        rate = settings.retrain_learning_rate if stage == "retrain" else settings.learning_rate
        return improve([module], objective, settings, settings.tokens_per_step, rate, self._reporting(stage, name))

    def _retrain(self, name: str, target_outputs: Tensor) -> LayerFit:
        """Train one linear layer towards its outputs before the replacements."""
        module = self.model.get_submodule(name)
        trained = copy.deepcopy(module).float()
        with self._record_activations({name: module}) as recording:
            samples = LayerSamples(recording.values(name), lambda rows: target_outputs[rows].float())
            initial, end = self._improve_layer("retrain", name, trained, samples, "mse")
        module.load_state_dict(trained.state_dict())
        kind = type(module).__name__
        size = module_parameters(module)
        return LayerFit(name, kind, size, size, initial.relative, end.relative, end.cosine, retrained=True)


def _layer_samples(
    name: str, module: nn.Module, recording: Recording, original_outputs: Recording | None
) -> LayerSamples:
    """Return the recorded inputs of a layer with its outputs for them, or with those in the original model."""
    inputs, contexts = recording.values(name), recording.contexts(name)
    if original_outputs is not None:
        target_outputs = original_outputs.values(name)
        return LayerSamples(inputs, lambda rows: target_outputs[rows].float(), contexts)
    source = copy.deepcopy(module)
    reference = next(source.parameters())

    @torch.no_grad()
    def outputs(rows: Tensor | slice) -> Tensor:
        return source(inputs[rows].to(reference)).float()

    return LayerSamples(inputs, outputs, contexts)
