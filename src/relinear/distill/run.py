"""Layer by layer: record, fit, replace, go on; killed, it goes on from the last decoder layer that it finished."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import hashlib
import itertools
import json
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from relinear.core.anatomy import layer_index
from relinear.core.modes import evaluating
from relinear.core.operator import Operator, OperatorConfig, is_linear
from relinear.core.vocabulary import check_tokenizer_fits
from relinear.distill.fit import Pairs, fit
from relinear.distill.logits import fit_logits, held_out_perplexity
from relinear.distill.record import record, token_blocks
from relinear.distill.report import DistillProgress, DistillReport, LayerFit
from relinear.distill.settings import DistillSettings
from relinear.surgery.checkpoint import save_pretrained
from relinear.surgery.plan import Plan, Replacement, plan
from relinear.surgery.select import matches
from relinear.surgery.states import flat_states, load_states_, place_
from relinear.system.files import atomic_path, fingerprint, read_json, write_json, writing
from relinear.system.lock import only_process_in

__all__ = ["distill_"]

OnProgress = Callable[[DistillProgress], None]


def _silent(progress: DistillProgress) -> None:
    return None


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
    resume: bool = True,
    on_progress: OnProgress = _silent,
) -> DistillReport:
    """Replace layers of a pretrained model by operators fitted to what the layers do on a corpus, in place.

    Decoder layer by decoder layer: the inputs of its targets are recorded with every earlier replacement active; each
    operator is fitted to the outputs that its layer gives for them (Adam, cosine schedule); the operators take their
    places; layers named by ``settings.retrain`` are trained again to give what they gave before.

    Args:
        model: any Hugging Face decoder (or a module that takes ``input_ids``); fitted in eval mode, after which
            every module has the mode that it had, and an operator that of the layer whose place it took.
        mapping, layers, exclude, filter_fn: which layers become what, as in ``replace_``.
        data: texts (``iter_texts``, a list, a generator), or tensors or mappings of token ids such as
            ``prepare_data(...).train``. Read no further than ``tokens + validation_tokens``.
        tokenizer: of the model, needed for texts; saved beside the model.
        settings: ``DistillSettings`` or a mapping of its fields.
        out_dir: where state, report and the finished model are kept; None keeps nothing.
        resume: go on from what an earlier call with the same arguments left in ``out_dir``; the result is bit for bit
            that of a call that was never interrupted (given the same machine and number of threads). False discards it.
        on_progress: called with a ``DistillProgress`` every so often.

    Returns:
        The report; its errors, and the perplexities of the model before and after, are on tokens that were recorded but
        not fitted on. A layer that ends worse than an output of zeros is warned of.

    Raises:
        ValueError: as ``replace_``; if the corpus is too short; if the tokenizer has ids that the model does not embed;
            if ``out_dir`` holds another distillation.
    """
    settings = DistillSettings.load(settings or {}, "distill settings")
    whole = plan(model, mapping, layers=layers, exclude=exclude, filter_fn=filter_fn)
    if not whole.replacements:
        raise ValueError("the mapping leaves every layer alone: there is nothing to distill")
    if tokenizer is not None:
        check_tokenizer_fits(tokenizer, model)
    length = settings.sequence_length
    train_blocks = settings.tokens // length
    held_out = settings.validation_tokens // length
    blocks = token_blocks(data, tokenizer, length, train_blocks + held_out)
    run = _Run(model, settings, blocks, train_blocks, None if out_dir is None else Path(out_dir), on_progress)
    groups = [
        list(group) for _, group in itertools.groupby(whole.replacements, key=lambda r: layer_index(model, r.name))
    ]
    with contextlib.nullcontext() if run.folder is None else only_process_in(run.folder):
        report = _carried_out(run, groups, whole, resume)
        if run.folder is not None:
            save_pretrained(model, run.folder / "model", tokenizer=tokenizer)
            write_json(run.folder / "report.json", report.to_dict())
    return report


def _carried_out(run: _Run, groups: list[list[Replacement]], whole: Plan, resume: bool) -> DistillReport:
    """Fit what an earlier call did not."""
    with evaluating(run.model):
        before = run.perplexity("before")
    done = run.restore(groups, whole, resume)
    with evaluating(run.model):
        for number, group in enumerate(groups[len(done) :], start=len(done)):
            done.append(run.layer(number, group))
            run.keep(number, group, done)
        after = run.perplexity("after")
    report = DistillReport(tuple(fit for fits in done for fit in fits), run.settings.loss, before, after)
    _warn_of_bad_fits(report)
    return report


def _warn_of_bad_fits(report: DistillReport) -> None:
    bad = [fit for fit in report.layers if fit.worse_than_zeros]
    if bad:
        warnings.warn(
            f"{len(bad)} of {len(report.layers)} layers were fitted worse than an output of zeros would be (error 1): "
            f"{', '.join(f'{fit.name} ({fit.error:.3g})' for fit in bad[:5])}{' ...' if len(bad) > 5 else ''}. Try "
            "more tokens or epochs, another learning_rate, a larger operator, or loss='mse'",
            stacklevel=4,
        )


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@dataclasses.dataclass
class _Run:
    model: nn.Module
    settings: DistillSettings
    blocks: Tensor
    train_blocks: int
    folder: Path | None
    on_progress: OnProgress
    #: size and hash of the weights of every layer that is done, by name of the file
    weights: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def train_tokens(self) -> int:
        return self.train_blocks * self.settings.sequence_length

    def perplexity(self, when: str) -> float | None:
        """Of the model as it now is, on the tokens held out."""
        told = self._told("evaluate", f"the model {when}")
        return held_out_perplexity(self.model, self.blocks[self.train_blocks :], self.settings.record_batch, told)

    # State on disk

    def fingerprint(self, whole: Plan, settings: Any) -> str:
        """Of everything that decides the result; ``settings`` as they are written down."""
        digest = hashlib.sha256()
        what = [[r.name, r.config.to_dict()] for r in whole.replacements]
        digest.update(json.dumps([settings, what], sort_keys=True).encode())
        digest.update(self.blocks.numpy().tobytes())
        for replacement in whole.replacements:
            for parameter in replacement.target.module.parameters():
                digest.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    def restore(self, groups: list[list[Replacement]], whole: Plan, resume: bool) -> list[list[LayerFit]]:
        """Put back what an earlier call finished; must see the model as it was at the start."""
        if self.folder is None:
            return []
        described = self.settings.model_dump(mode="json")
        self.mark = self.fingerprint(whole, described)
        state = self.folder / "distill.json"
        if not resume or not state.is_file():
            write_json(state, {"fingerprint": self.mark, "settings": described, "done": []})
            return []
        try:
            values = read_json(state)
            known, before = values["fingerprint"], values["settings"]
            done = [[LayerFit(**fit) for fit in fits] for fits in values["done"]]
            self.weights = dict(values.get("weights", {}))  # earlier versions did not note them
        except (ValueError, LookupError, TypeError) as error:
            raise ValueError(f"{state} is not the state of a distillation ({error}); choose another out_dir") from error
        # earlier versions had fewer settings: what they wrote decided their fingerprint
        if DistillSettings.completed(before) != described or known != self.fingerprint(whole, before):
            raise ValueError(
                f"{self.folder} holds a distillation of another model, mapping, corpus or setting; give another "
                "directory, or resume=False (--start-over) to discard it"
            )
        for number, group in enumerate(groups[: len(done)]):
            path = self._weights(number)
            if not path.is_file() or self.weights.get(path.name, fingerprint(path)) != fingerprint(path):
                raise ValueError(
                    f"{path} is missing or not what was written; restore it from a copy, or give resume=False "
                    "(--start-over) to discard the distillation"
                )
            weights = safetensors.torch.load_file(path)
            place_(self.model, group, weights)
            load_states_(self.model, self._retrained(group), weights)
        return done

    def _weights(self, number: int) -> Path:
        assert self.folder is not None
        return self.folder / "layers" / f"{number:04d}.safetensors"

    def keep(self, number: int, group: list[Replacement], done: list[list[LayerFit]]) -> None:
        """Write the layer's weights, then that it is done: a kill between the two repeats the layer."""
        if self.folder is None:
            return
        with writing(self._weights(number)), atomic_path(self._weights(number)) as path:
            safetensors.torch.save_file(flat_states(self._changed(group)), path)
        finished = [[dataclasses.asdict(fit) for fit in fits] for fits in done]
        self.weights[self._weights(number).name] = fingerprint(self._weights(number))
        values = {"fingerprint": self.mark, "settings": self.settings.model_dump(mode="json"), "done": finished}
        values["weights"] = self.weights
        write_json(self.folder / "distill.json", values)

    def _changed(self, group: list[Replacement]) -> dict[str, nn.Module]:
        """The operators of a group and the layers that are trained again after it."""
        return {r.name: self.model.get_submodule(r.name) for r in group} | self._retrained(group)

    def _retrained(self, group: list[Replacement]) -> dict[str, nn.Module]:
        pattern = self.settings.retrain
        if pattern is None:
            return {}
        index = layer_index(self.model, group[0].name)
        replaced = {r.name for r in group}
        found = {
            name: module
            for name, module in self.model.named_modules()
            if is_linear(module)
            and name not in replaced
            and matches(pattern, name)
            and layer_index(self.model, name) == index
        }
        if not found:
            raise ValueError(f"retrain={pattern!r} matches no linear layer beside those replaced near {group[0].name}")
        return found

    # One decoder layer

    def _told(self, phase: str, name: str) -> Callable[..., None]:
        def tell(done: int, total: int, loss: float | None = None) -> None:
            self.on_progress(DistillProgress(phase, name, done, total, loss))

        return tell

    def _record(self, modules: Mapping[str, nn.Module], **kw: Any):
        folder = None
        if self.settings.on_disk:
            folder = (self.folder or Path(".")) / "recorded"
        name = next(iter(modules)).rpartition(".")[0]
        told = self._told("record", name)
        return record(
            self.model, self.blocks, modules, batch=self.settings.record_batch, folder=folder, on_progress=told, **kw
        )

    def _fresh(self, replacement: Replacement, number: int, source: nn.Module) -> Operator:
        """A new operator, the same whenever it is asked for."""
        config, settings = replacement.config, self.settings
        key = hashlib.sha256(f"{settings.seed} {number} {replacement.name}".encode()).digest()
        init: Any = "from_weight" if settings.init == "auto" and config.fits_weight else "fresh"
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int.from_bytes(key[:4], "little"))
            if init == "from_weight":
                try:
                    return config.convert(source, init)
                except ValueError:  # only some shapes of some operators have a closed form
                    torch.manual_seed(int.from_bytes(key[:4], "little"))
            return config.convert(source, "fresh")

    def layer(self, number: int, group: list[Replacement]) -> list[LayerFit]:
        """Fit and replace the targets of one decoder layer."""
        retrained = self._retrained(group)
        wanted = {name: copy.deepcopy(module) for name, module in retrained.items()}
        before = {}
        if wanted:
            with self._record(retrained, outputs=retrained) as recording:
                before = {name: recording.inputs(name).clone() for name in wanted}
        fits = self._fit_logits(number, group) if self.settings.loss == "kl" else self._fit_outputs(number, group)
        return fits + [self._retrain(name, before.pop(name)) for name in wanted]

    def _fit_outputs(self, number: int, group: list[Replacement]) -> list[LayerFit]:
        settings, fits, operators = self.settings, [], {}
        dims = {r.name: r.config.context_dim for r in group if r.config.conditioned}  # type: ignore[attr-defined]
        with self._record({r.name: r.target.module for r in group}, context_dims=dims) as recording:
            for replacement in group:
                source = copy.deepcopy(replacement.target.module)
                operator = self._fresh(replacement, number, copy.deepcopy(source).float())
                inputs = recording.inputs(replacement.name)
                reference = next(source.parameters())

                @torch.no_grad()
                def outputs(rows, source=source, inputs=inputs, reference=reference) -> Tensor:
                    return source(inputs[rows].to(reference)).float()

                start, end = fit(
                    operator,
                    Pairs(inputs, outputs, recording.contexts(replacement.name)),
                    train_rows=self.train_tokens,
                    epochs=settings.epochs,
                    batch_size=settings.batch_size,
                    learning_rate=settings.learning_rate,
                    loss=settings.loss,
                    seed=settings.seed,
                    on_progress=self._told("fit", replacement.name),
                )
                operators[replacement.name] = operator
                fits.append(self._described(replacement, operator, start.relative, end.relative, end.cosine))
        place_(self.model, group, flat_states(operators))
        return fits

    def _fit_logits(self, number: int, group: list[Replacement]) -> list[LayerFit]:
        operators = {r.name: self._fresh(r, number, copy.deepcopy(r.target.module)) for r in group}
        everywhere = {name: operators[r.name] for r in group for name in (r.name, *r.target.aliases)}
        start, end = fit_logits(
            self.model,
            everywhere,
            self.blocks,
            train_blocks=self.train_blocks,
            epochs=self.settings.epochs,
            batch=max(1, min(self.settings.record_batch, self.settings.batch_size // self.settings.sequence_length)),
            learning_rate=self.settings.learning_rate,
            seed=self.settings.seed,
            on_progress=self._told("fit", group[0].name.rpartition(".")[0]),
        )
        fits = [self._described(r, operators[r.name], start, end, None) for r in group]
        place_(self.model, group, flat_states(operators))
        return fits

    @staticmethod
    def _described(replacement: Replacement, operator: Operator, start: float, end: float, cosine: float | None):
        before = _size(replacement.target.module)
        return LayerFit(replacement.name, str(replacement.config), _size(operator), before, start, end, cosine)

    def _retrain(self, name: str, wanted: Tensor) -> LayerFit:
        """Train one linear layer, behind the replacements, to give what it gave before them."""
        module = self.model.get_submodule(name)
        trained = copy.deepcopy(module).float()
        with self._record({name: module}) as recording:
            start, end = fit(
                trained,
                Pairs(recording.inputs(name), lambda rows: wanted[rows].float()),
                train_rows=self.train_tokens,
                epochs=self.settings.epochs,
                batch_size=self.settings.batch_size,
                learning_rate=self.settings.retrain_learning_rate,
                loss="mse",
                seed=self.settings.seed,
                on_progress=self._told("retrain", name),
            )
        module.load_state_dict(trained.state_dict())
        size = _size(module)
        return LayerFit(
            name, type(module).__name__, size, size, start.relative, end.relative, end.cosine, retrained=True
        )
