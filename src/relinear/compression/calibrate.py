"""Calibration: second moments of every layer's inputs and output gradients, one decoder layer at a time.

Forward, the hidden states between layers go to disk; at the end stands the gradient for the last of them.
Backward, each layer is run again with gradients, its moments are summed and written, and the gradient for the layer
before it is kept. Memory holds the model, the activations of one layer for one batch and the moments of one layer. What
is on disk is whole (files and folders are renamed into place), so that a killed calibration goes on from the layer it
was at, to the same bits.
"""

# Legend: N blocks, T tokens, D hidden size, I in_features, O out_features

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from relinear.compression.checksums import Streams, load_tensors, read_record, save_tensors, write_record
from relinear.compression.layerwise import LayerByLayer
from relinear.contract.calibration_statistics import CalibrationStatistics
from relinear.contract.modes import frozen, watching
from relinear.contract.operator import OperatorConfig, linear_features
from relinear.distill.record import fingerprint_of
from relinear.system.allocator import release_freed_memory
from relinear.system.files import remove_temporaries
from relinear.system.version import __version__

#: of a config, what changes nothing that a model computes
_PASSING = ("transformers_version", "architectures", "dtype", "use_cache")

#: what a calibration leaves beside its fingerprint
_LEFT = ("calibration.json", "loss.json", "moments-*", "hidden-*", "gradient-*")

#: told the phase, how many decoder layers of it are done, and how many there are
OnLayer = Callable[[str, int, int], None]


class Calibration:
    """The moments that a calibration left in a folder, read layer by layer.

    tokens: how many were seen; loss: the model's mean loss on them in nats a token.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        values = read_record(self.folder / "calibration.json")
        self.tokens: int = values["tokens"]
        self.loss: float | None = values["loss"]
        self._where: dict[str, int] = values["layers"]
        self.counts: dict[str, int] = values["counts"]
        self._read: tuple[int, dict[str, Tensor], dict[str, str]] = -1, {}, {}

    @property
    def names(self) -> list[str]:
        """The linear layers that have moments, in the model's order."""
        return list(self._where)

    def knows(self, name: str, module: Any) -> bool:
        """Return whether the linear layer saw as many tokens as it has inputs: an expert may not, and says nothing."""
        return self.counts[name] >= linear_features(module)[0]

    def moments(self, name: str) -> CalibrationStatistics:
        """Return the moments of the linear layer ``name``."""
        tensors, about = self._layer(name)
        return CalibrationStatistics(tensors[f"inputs {about[name]}"], tensors.get(f"outputs {name}"))

    def candidate_errors(self, entry: OperatorConfig, name: str, module: Any) -> list[tuple[OperatorConfig, float]]:
        """Return the sizes of ``entry`` for a layer with their errors; found once, for they hang on no budget."""
        mark = hashlib.sha256(f"{__version__} {json.dumps(entry.to_dict(), sort_keys=True)}".encode()).hexdigest()
        path = self.folder / f"curves-{mark[:16]}" / f"{name}.json"
        if path.is_file():
            return [(OperatorConfig.from_dict(config), error) for config, error in read_record(path)["curve"]]
        curve = entry.candidate_errors(module, self.moments(name))
        write_record(path, {"curve": [[config.to_dict(), error] for config, error in curve]})
        return curve

    def _layer(self, name: str) -> tuple[dict[str, Tensor], dict[str, str]]:
        """What is kept of the decoder layer of ``name``; one is in memory at a time, and held to its checksum once."""
        index = self._where[name]
        if self._read[0] != index:
            self._read = index, *load_tensors(self.folder / _file(index))
        return self._read[1:]


def _file(index: int) -> str:
    return f"moments-{index:04d}.safetensors"


def fingerprint(model: Any, blocks: Tensor, names: list[str], settings: Mapping[str, Any]) -> str:
    """Of everything that decides a calibration's result, the config among it: equal weights may be read in two ways."""
    values = model.config.to_diff_dict() if hasattr(model, "config") else {}
    told = {key: value for key, value in values.items() if key not in _PASSING}
    named = (part for pair in model.named_parameters() for part in pair)
    return fingerprint_of([names, dict(settings), json.dumps(told, sort_keys=True, default=str)], [blocks, *named])


class Sums:
    """Sums of x x^T in float64 by name; inputs that are one tensor are summed once."""

    def __init__(self) -> None:
        self.inputs: dict[str, Tensor] = {}
        self.outputs: dict[str, Tensor] = {}
        self.shared: dict[str, str] = {}
        self.counts: dict[str, int] = {}
        self._seen: list[tuple[Tensor, str]] = []

    def new_pass(self) -> None:
        """Forget the tensors of the pass before, whose memory may be used again."""
        self._seen.clear()

    def add_inputs(self, name: str, x: Tensor) -> None:
        """Add inputs (..., I) of the layer ``name``."""
        owner = next((key for tensor, key in self._seen if tensor is x), name)
        self.shared[name] = owner
        self.counts[name] = self.counts.get(name, 0) + x[..., 0].numel()
        if owner == name:
            self._seen.append((x, name))
            _add(self.inputs, name, x)

    def means(self) -> dict[str, Tensor]:
        """Means over the tokens that each layer saw, in the place of the sums."""
        both = {"inputs": self.inputs, "outputs": self.outputs}
        sums = ((kind, name, total) for kind, totals in both.items() for name, total in totals.items())
        return {f"{kind} {name}": total.div_(max(1, self.counts[name])) for kind, name, total in sums}


def _add(sums: dict[str, Tensor], name: str, values: Tensor) -> None:
    rows = values.detach().reshape(-1, values.shape[-1]).float()
    product = rows.T @ rows
    if name in sums:
        sums[name] += product
    else:
        sums[name] = product.double()


def calibrate(
    model: Any,
    blocks: Tensor,
    targets: Mapping[int, Mapping[str, nn.Module]],
    folder: str | Path,
    *,
    batch: int,
    fisher: bool,
    seed: int = 0,
    on_layer: OnLayer = lambda phase, done, total: None,
) -> Calibration:
    """CalibrationStatistics of ``targets`` over ``blocks``, kept in ``folder``; goes on from what is there.

    Args:
        model: in eval mode.
        blocks: token ids (N, T).
        targets: index of a decoder layer -> name -> linear layer in it.
        folder: of the calibration; one model, corpus and set of targets each.
        batch: blocks a pass.
        fisher: also the moments of the gradients, at the targets' outputs, of the summed log-likelihood of next tokens
            that the model draws.
        seed: of these draws.

    Raises:
        ValueError: if ``folder`` holds another calibration, or the layers take no states (B, T, D).
    """
    folder = Path(folder)
    names = [name for group in targets.values() for name in group]
    _claim(folder, fingerprint(model, blocks, names, {"fisher": fisher, "batch": batch, "labels": seed}))
    if (folder / "calibration.json").is_file():
        return Calibration(folder)
    with frozen(model):
        _Calibrating(model, blocks, targets, folder, batch, fisher, seed, on_layer).run()
    return Calibration(folder)


def _claim(folder: Path, mark: str) -> None:
    path = folder / "fingerprint.json"
    if not path.is_file() and not any(found for pattern in _LEFT for found in folder.glob(pattern)):
        write_record(path, {"fingerprint": mark})
    elif read_record(path).get("fingerprint") != mark:
        what = "the calibration of another model, corpus, setting or version"
        raise ValueError(
            f"{folder} holds {what}; give another directory, or start over with overwrite=True (--overwrite)"
        )


class _Calibrating:
    """One calibration under way."""

    def __init__(self, model, blocks, targets, folder, batch, fisher, seed, on_layer) -> None:
        self.model, self.targets, self.folder, self.on_layer = model, targets, folder, on_layer
        self.parts = blocks.to(next(model.parameters()).device).split(batch)
        self.tokens = blocks.numel()
        self.fisher, self.seed = fisher, seed
        self.layers = LayerByLayer(model)
        self.streams = Streams(folder, len(self.parts))
        self.loss_record = folder / "loss.json"

    def run(self) -> None:
        last = max(self.targets)
        remove_temporaries(self.folder)
        for part in {part.shape: part for part in self.parts}.values():
            self.layers.embed(part)  # notes the arguments of the layers for this shape
        release_freed_memory()  # of reading texts, and of the model run as a whole
        loss = None
        self._forward(last)
        if self.fisher:
            loss = self._loss()
            self._backward()
        where = {name: index for index, group in self.targets.items() for name in group}
        counts: dict[str, int] = {}
        for index in self.targets:
            counts |= json.loads(load_tensors(self.folder / _file(index))[1]["counts"])
        found = {"tokens": self.tokens, "loss": loss, "layers": where, "counts": counts}
        write_record(self.folder / "calibration.json", found)
        for kind in ("hidden", "gradient"):
            for index in self.streams.indices(kind):
                self.streams.remove(kind, index)

    @torch.no_grad()
    def _forward(self, last: int) -> None:
        """Hidden states before each layer; where gradients are not wanted, the moments of inputs on the way."""
        if self._has_loss:
            return
        total = len(self.layers) if self.fisher else last + 1
        there = self.streams.indices("hidden")
        if not there:
            self.streams.write("hidden", 0, (self.layers.embed(part) for part in self.parts))
        for index in range(there[-1] if there else 0, total):
            sums = Sums()
            with watched({} if self.fisher else self.targets.get(index, {}), sums, gradients=False):
                self.streams.write("hidden", index + 1, self._after(index, sums))
            if not self.fisher:
                self.streams.remove("hidden", index)
            release_freed_memory()
            self.on_layer("forward", index + 1, total)

    def _after(self, index: int, sums: Sums) -> Iterator[Tensor]:
        """The hidden states behind layer ``index``, batch by batch; with the last of them its moments are kept."""
        for states in self.streams.read("hidden", index):
            sums.new_pass()
            yield self.layers.layer(index, states)
        if not self.fisher:
            self._keep(index, sums)

    @property
    def _has_loss(self) -> bool:
        return self.loss_record.is_file() and bool(self.streams.indices("gradient"))

    def _loss(self) -> float:
        """The model's mean loss on the text; the gradients at the last hidden states go to disk."""
        if not self._has_loss:
            losses: list[float] = []
            self.streams.write("gradient", len(self.layers), self._gradients_of_loss(losses))
            count = sum(ids[:, 1:].numel() for ids in self.parts)
            write_record(self.loss_record, {"loss": sum(losses) / count})
            release_freed_memory()
        return read_record(self.loss_record)["loss"]

    def _gradients_of_loss(self, losses: list[float]) -> Iterator[Tensor]:
        """The gradients at the last hidden states, batch by batch; the summed losses of pieces go into ``losses``.

        The gradients are those at labels that the model draws, as Fisher's information has them: at the text's labels
        their moments overrate what an error costs (results/compress).
        """
        draws = torch.Generator(self.parts[0].device).manual_seed(self.seed)
        for ids, states in zip(self.parts, self.streams.read("hidden", len(self.layers)), strict=True):
            grad = torch.zeros_like(states)
            with torch.enable_grad():
                for at, piece, logits, labels in self.layers.next_tokens(states, ids):
                    losses.append(float(F.cross_entropy(logits.detach(), labels, reduction="sum")))
                    drawn = torch.multinomial(logits.detach().softmax(-1), 1, generator=draws).flatten()
                    (grad[:, at],) = torch.autograd.grad(F.cross_entropy(logits, drawn, reduction="sum"), piece)
            yield grad

    def _backward(self) -> None:
        total = len(self.layers)
        for index in reversed(range(self.streams.indices("gradient")[0])):
            sums = Sums()
            with watched(self.targets.get(index, {}), sums, gradients=True):
                self.streams.write("gradient", index, self._before(index, sums))
            self.streams.remove("gradient", index + 1)
            self.streams.remove("hidden", index)
            release_freed_memory()
            self.on_layer("backward", total - index, total)

    def _before(self, index: int, sums: Sums) -> Iterator[Tensor]:
        """The gradients at the input of layer ``index``, batch by batch; with the last its moments are kept.

        Before these gradients take their place on disk, that is: a killed calibration goes on behind them.
        """
        for states, gradient in zip(
            self.streams.read("hidden", index), self.streams.read("gradient", index + 1), strict=True
        ):
            sums.new_pass()
            states.requires_grad_(True)
            with torch.enable_grad():
                output = self.layers.layer(index, states)
                (grad,) = torch.autograd.grad(output, states, gradient)
            yield grad
        self._keep(index, sums)

    def _keep(self, index: int, sums: Sums) -> None:
        if index not in self.targets:
            return
        counts = dict.fromkeys(self.targets[index], 0) | sums.counts  # an expert may have seen no token
        save_tensors(self.folder / _file(index), sums.means(), dict(sums.shared) | {"counts": json.dumps(counts)})


@contextlib.contextmanager
def watched(modules: Mapping[str, nn.Module], sums: Sums, *, gradients: bool) -> Iterator[None]:
    """Within the block, what passes through ``modules`` is added to ``sums``."""

    def seen(name: str, module: nn.Module, args: tuple, output: Tensor) -> None:
        sums.add_inputs(name, args[0])
        if gradients and output.requires_grad:
            output.register_hook(lambda grad: _add(sums.outputs, name, grad))

    with watching(modules.items(), seen):
        yield
    # An input's graph holds the hooks of the outputs before it, and with them the sums: a circle that no collector of
    # Python's sees.
    sums.new_pass()
