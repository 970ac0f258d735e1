"""Calibrate: measure second moments of every layer's inputs and output gradients, one decoder layer at a time.

Forward, the hidden states between layers go to disk, and in the end the gradient of the last of them. Backward, each
layer is run again with gradients; its second moments are summed and yielded, and the gradient before the layer is
stored. Memory holds the model, one layer's activations for one batch, and that layer's moments, which are never
written. The disk holds states of at most twice the model's bytes, if tokens are few. Planning goes backward once,
fitting once more. Files are renamed into place when they are whole, so that a killed calibration resumes at its layer,
to the same bits.
"""

# Legend: B batch, N blocks, T tokens, D hidden size

import json
import math
import shutil
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from relinear.compression.budget import stored_bytes
from relinear.compression.layer_statistics import Statistics, StatisticsSums, add_products
from relinear.compression.layerwise import LayerByLayer
from relinear.compression.settings import CompressSettings
from relinear.compression.storage import LayerStates, load_tensors, read_record, save_tensors, write_record
from relinear.contract.calibration_statistics import CalibrationStatistics
from relinear.contract.module_state import frozen_parameters, observe_forwards
from relinear.distill.record import fingerprint_of
from relinear.surgery.tied import tied_head
from relinear.system.allocator import release_freed_memory
from relinear.system.files import remove_temporaries
from relinear.system.version import __version__

#: fields of a config that do not change what a model computes
_IRRELEVANT_FIELDS = ("transformers_version", "architectures", "dtype", "use_cache")

#: what a calibration writes in addition to its fingerprint
_FILES = ("loss.json", "head.safetensors", "candidates-*", "fit-*", "hidden-*", "gradient-*")

#: called with a stage (a key of ``run.STAGES``), how much of it is done, and how much there is
StageCallback = Callable[[str, int, int], None]


def model_fingerprint(model: Any, blocks: Tensor, names: list[str], settings: Mapping[str, Any]) -> str:
    """Return a hash of everything that decides a calibration's result, including the config."""
    config = {key: value for key, value in model.config.to_diff_dict().items() if key not in _IRRELEVANT_FIELDS}
    named = (part for pair in model.named_parameters() for part in pair)
    return fingerprint_of([names, dict(settings), json.dumps(config, sort_keys=True, default=str)], [blocks, *named])


def _write_or_check_fingerprint(folder: Path, key: str) -> None:
    path = folder / "fingerprint.json"
    if not path.is_file() and not any(leftover for pattern in _FILES for leftover in folder.glob(pattern)):
        write_record(path, {"fingerprint": key})
    elif read_record(path).get("fingerprint") != key:
        raise ValueError(
            f"{folder} holds the calibration of another model, corpus, set of layers, setting or version; give another "
            "directory, or start over with overwrite=True (--overwrite)"
        )


def states_on_disk(layers: int, stream: int, model_bytes: int) -> tuple[int, int]:
    """Return how many layers' states, of ``stream`` bytes each, stay on disk, and the most bytes of states there.

    As many as twice the model's bytes allow, but at least the square root of ``layers``. To them come the states
    between two that stay, and those of three layers that are being computed.
    """

    def on_disk(count: int) -> int:
        return (count + math.ceil(layers / count) + 3) * stream

    counts = range(layers, math.isqrt(layers), -1)
    count = next((n for n in counts if on_disk(n) <= 2 * model_bytes), math.isqrt(layers))
    return count, on_disk(count)


class Calibration:
    """Compute statistics of ``targets`` over ``blocks``.

    Statistics are never stored; what ``map_layers`` makes of them is.

    Args:
        model: a Hugging Face decoder in eval mode.
        blocks: token ids (N, T).
        targets: index of a decoder layer -> name -> linear layer in it; at -1 embedding and head.
        folder: directory of the calibration; one model, corpus and set of targets each. An unfinished one resumes.
        settings: ``batch_size`` of these, and ``seed`` for the next tokens that the model draws; gradients are those of
            their summed log-likelihood.
        kinds: for each block, the number of its kind of text; one kind by default.
        on_stage: called after every decoder layer.

    Raises:
        ValueError: if ``folder`` holds another calibration, or the layers take no states (B, T, D).
    """

    def __init__(
        self,
        model: Any,
        blocks: Tensor,
        targets: Mapping[int, Mapping[str, nn.Module]],
        folder: Path,
        settings: CompressSettings,
        kinds: Sequence[int] = (),
        on_stage: StageCallback = lambda stage, done, total: None,
    ) -> None:
        self.model, self.targets, self.folder, self.on_stage = model, targets, folder, on_stage
        names = [name for group in targets.values() for name in group]
        kinds = list(kinds) or [0] * len(blocks)
        batch, self.seed = settings.batch_size, settings.seed
        key = model_fingerprint(model, blocks, names, {"batch": batch, "labels": self.seed, "kinds": kinds})
        _write_or_check_fingerprint(self.folder, key)
        remove_temporaries(self.folder)
        blocks = blocks.to(next(model.parameters()).device)
        of_block = torch.tensor(kinds)
        pairs = [(kind, part) for kind in sorted({*kinds}) for part in blocks[of_block == kind].split(batch)]
        #: the kind of text of each batch, and its token ids
        self.kinds, self.batches = zip(*pairs, strict=True)
        self.tokens = blocks.numel()
        self.layers = LayerByLayer(model)
        self.states = LayerStates(self.folder, len(self.batches))
        #: the layers whose states stay on disk; those of the others are computed again
        self._permanent: frozenset[int] = frozenset()

    @property
    def loss(self) -> float:
        """Return the model's mean loss on the tokens, in nats per token."""
        if not (self.folder / "loss.json").is_file():
            self._prepare()
        return read_record(self.folder / "loss.json")["loss"]

    def map_layers(
        self,
        stage: str,
        inputs: Any,
        make: Callable[[Statistics], Mapping[str, Tensor]],
        diagonal: bool = False,
    ) -> dict:
        """Apply ``make`` to the statistics of every decoder layer; return all tensors in one mapping.

        They are stored in the folder and computed once for the same ``stage``, ``inputs`` and version of relinear.

        Args:
            stage: reported with the progress; names the folder.
            inputs: JSON values, of all that ``make`` depends on.
            make: statistics by name -> tensors by names that are unique.
            diagonal: whether ``make`` needs only the diagonal of the gradients' second moments.
        """
        key = fingerprint_of([__version__, inputs], [])[:16]
        folder = self.folder / f"{stage}-{key}"
        files = {index: folder / f"{index:04d}.safetensors" for index in self.targets}
        if not all(path.is_file() for path in files.values()):
            finished = {index for index, path in files.items() if path.is_file()}
            for index, statistics in self._backward(stage, f"gradient-{key}", finished, diagonal):
                folder.mkdir(exist_ok=True)
                save_tensors(files[index], make(statistics))
        return {name: value for path in files.values() for name, value in load_tensors(path).items()}

    def release(self) -> None:
        """Remove states and fits; the errors of candidates stay."""
        for pattern in ("gradient*", "fit-*", "hidden-*"):
            for path in self.folder.glob(pattern):
                shutil.rmtree(path)

    def _prepare(self) -> None:
        """Compute the hidden states, and the gradient at the last of them, unless they are on disk."""
        if not self._permanent:
            for part in {part.shape: part for part in self.batches}.values():
                states = self.layers.embed(part)  # notes the arguments of the layers for this shape
            stream = self.tokens * states.shape[-1] * states.element_size()
            total = len(self.layers)
            count, _ = states_on_disk(total, stream, stored_bytes(self.model))
            self._permanent = frozenset(total * at // count for at in range(count))
            release_freed_memory()  # of reading texts, and of the model run as a whole
        has_states = 0 in self.states.indices("hidden") and self.states.indices("gradient") == [len(self.layers)]
        if not (has_states and (self.folder / "loss.json").is_file()):
            self._forward()
            self.states.write("gradient", len(self.layers), self._gradients_of_loss())
            self.states.remove("hidden", len(self.layers))
            release_freed_memory()

    @torch.no_grad()
    def _forward(self) -> None:
        """Write the hidden states before layers, and those behind the last one."""
        indices = self.states.indices("hidden")
        total = len(self.layers)
        if 0 not in indices:
            self.states.write("hidden", 0, (self.layers.embed(part) for part in self.batches))
        for index in range(indices[-1] if indices else 0, total):
            self._ensure_hidden(index + 1)
            if index not in self._permanent:
                self.states.remove("hidden", index)
            release_freed_memory()
            self.on_stage("forward", index + 1, total)

    @torch.no_grad()
    def _ensure_hidden(self, index: int) -> None:
        """Compute the hidden states before layer ``index`` unless they are on disk."""
        for before in range(max(at for at in self.states.indices("hidden") if at <= index), index):
            states = self.states.read("hidden", before)
            self.states.write("hidden", before + 1, (self.layers.layer(before, part) for part in states))

    def _gradients_of_loss(self) -> Iterator[Tensor]:
        """Yield the gradients at the last hidden states, batch by batch; then write the loss and the head's statistics.

        The gradients are those at labels that the model draws, as Fisher's information has them: at the text's labels
        they overrate what an error costs (results/compress).
        """
        generator = torch.Generator(self.batches[0].device).manual_seed(self.seed)
        losses: list[float] = []
        inputs: dict[str, Tensor] = {}
        head = self.model.get_output_embeddings()
        heads = [] if head is None else [("inputs", head)]
        variances: Any = 0.0

        def on_head(name: str, module: nn.Module, args: tuple, output: Any) -> None:
            add_products(inputs, name, args[0])

        for ids, states in zip(self.batches, self.states.read("hidden", len(self.layers)), strict=True):
            grad = torch.zeros_like(states)
            with frozen_parameters(self.model), observe_forwards(heads, on_head), torch.enable_grad():
                for at, piece, logits, labels in self.layers.next_tokens(states, ids):
                    losses.append(float(F.cross_entropy(logits.detach(), labels, reduction="sum")))
                    probabilities = logits.detach().softmax(-1)
                    sampled_labels = torch.multinomial(probabilities, 1, generator=generator).flatten()
                    variances = variances + (probabilities * (1 - probabilities)).sum(0)
                    (grad[:, at],) = torch.autograd.grad(
                        F.cross_entropy(logits, sampled_labels, reduction="sum"), piece
                    )
            yield grad
        count = sum(ids[:, 1:].numel() for ids in self.batches)
        means = {name: value / count for name, value in (inputs | {"outputs": variances}).items()}
        save_tensors(self.folder / "head.safetensors", means)
        write_record(self.folder / "loss.json", {"loss": sum(losses) / count})

    def _backward(
        self, stage: str, gradient: str, finished: Container[int], diagonal: bool
    ) -> Iterator[tuple[int, Statistics]]:
        """Yield every decoder layer of the targets, the last one first, and the statistics of its linear layers.

        On disk as layer ``index`` is yielded: hidden states before it, and states of the kind ``gradient`` at
        ``index + 1`` and ``index``. Those behind it are removed when the next layer is requested: a killed walk repeats
        the last layer.
        """
        self._prepare()
        total = len(self.layers)
        indices = self.states.indices(gradient)
        lowest = max(0, min(self.targets))
        remaining = indices[-1] if indices else total
        if remaining == total - 1 and remaining in self.targets and remaining not in finished:
            remaining = total  # killed before the last layer was finished: its gradients are those of the loss
        for index in reversed(range(lowest, remaining)):
            self._ensure_hidden(index)
            sums = StatisticsSums(diagonal=diagonal)
            group = self.targets.get(index, {})
            with frozen_parameters(self.model), observe_forwards(group.items(), sums.on_forward):
                gradients = self.states.read("gradient" if index + 1 == total else gradient, index + 1)
                self.states.write(gradient, index, self._gradients_before(index, gradients, sums))
            # An input's graph holds the hooks of the outputs before it, and with them the sums: a circle that Python's
            # collector does not see.
            sums.new_pass()
            if group:
                yield index, sums.statistics(group, self.tokens)
            self.states.remove(gradient, index + 1)
            if index not in self._permanent:
                self.states.remove("hidden", index)
            release_freed_memory()
            self.on_stage(stage, total - index, total)
        if -1 in self.targets:
            yield -1, self._table_statistics(gradient)
        self.states.remove(gradient, lowest)

    def _table_statistics(self, gradient: str) -> Statistics:
        """Return the statistics of embedding and head.

        The variances of the head's outputs also serve as the frequencies of tokens in the embedding.
        """
        head = load_tensors(self.folder / "head.safetensors")
        pairs = zip(self.batches, self.states.read(gradient, 0), strict=True)
        gradients = (self.layers.gradient_of_rows(ids, grad) for ids, grad in pairs)
        squares = sum(grad.double().square().sum((0, 1)) for grad in gradients) / self.tokens
        statistics = {}
        table = self.model.get_input_embeddings()
        for name, module in self.targets[-1].items():
            inputs = squares.diag() if module is table else torch.zeros_like(head["inputs"])
            if module is not table or tied_head(self.model, table) is not None:
                inputs = inputs + head["inputs"]
            statistics[name] = CalibrationStatistics(inputs, head["outputs"], self.tokens)
        return statistics

    def _gradients_before(self, index: int, gradients: Iterator[Tensor], sums: StatisticsSums) -> Iterator[Tensor]:
        """Yield the gradients at the input of layer ``index``, batch by batch, from those behind it."""
        for kind, states, gradient in zip(self.kinds, self.states.read("hidden", index), gradients, strict=True):
            sums.new_pass()
            sums.kind = kind
            states.requires_grad_(True)
            with torch.enable_grad():
                output = self.layers.layer(index, states)
                (grad,) = torch.autograd.grad(output, states, gradient)
            yield grad
