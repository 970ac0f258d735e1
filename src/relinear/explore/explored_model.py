"""Hold a model with its index of units (``ExploredModel``), and compute the answers to the explore page's requests."""

# Legend: T tokens, R units of a hook point, V vocabulary

import contextlib
import dataclasses
import hashlib
import os
import random
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from relinear.activations.hooks import HookPoint, Intervention
from relinear.activations.interventions import intervene
from relinear.analysis.analyses import HeldOutText, held_out_tokens
from relinear.contract.module_state import eval_mode
from relinear.data import DataSettings
from relinear.data.tokenizers import encode, text_start
from relinear.explore.units import Index, choose_hook_points, index_folder, index_units, read_index, values_of
from relinear.hf.vocabulary import check_length_fits, check_tokenizer_fits, max_positions
from relinear.system.private_cache import cache_folder, check_all_private, check_private, digest
from relinear.system.progress import ProgressCallback, no_progress

#: the most tokens of a typed text
MAX_TOKENS = 512
#: the most units that a search returns
MAX_FOUND = 50
#: how many tokens of a distribution the page shows
SHOWN = 10


@dataclasses.dataclass(eq=False)
class ExploredModel:
    """A model, its tokenizer, its hook points and their index. Many threads may call its methods.

    Attributes:
        path: path of the model, for the code that the page shows.
        model: the model, in eval mode.
        tokenizer: the model's tokenizer.
        points: the hook points by name.
        index: the index of their units.
        lock: lock to hold while the model runs.
    """

    path: str
    model: Any
    tokenizer: Any
    points: Mapping[str, HookPoint]
    index: Index
    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock, init=False)
    _texts: dict[int, str] = dataclasses.field(default_factory=dict, init=False)

    # Text

    def token_text(self, token: int) -> str:
        """Return one token as text."""
        if token not in self._texts:
            self._texts[token] = self.tokenizer.decode([token])
        return self._texts[token]

    def tokens(self, ids: Iterable[int]) -> list[str]:
        """Return tokens as texts."""
        return [self.token_text(int(token)) for token in ids]

    def text(self, row: int) -> str:
        """Return a text of the corpus. Raises ValueError if the number is out of range."""
        if not 0 <= row < len(self.index.ids):
            raise ValueError(f"the corpus has texts 0 to {len(self.index.ids) - 1}, got {row}")
        return self.tokenizer.decode(self.index.ids[row])

    def encode(self, text: str, new: int = 0) -> Tensor:
        """Return token ids (T,) of ``text``. Raises ValueError for none, or if they and ``new`` tokens do not fit."""
        ids = encode(self.tokenizer, [text])[0]
        if not ids:
            raise ValueError("type some text first")
        ids = [*text_start(self.tokenizer), *ids]
        room = min(MAX_TOKENS, (max_positions(self.model) or MAX_TOKENS + new) - new)
        if len(ids) > room:
            raise ValueError(f"the text has {len(ids):,} tokens, there is room for {room:,}; shorten it")
        return torch.tensor(ids)

    # Units

    def control_of(self, point: str, unit: int, seed: int = 0) -> tuple[str, int] | None:
        """Return a random other unit of the same hook point, or of another point of its kind; None if there is none."""
        index, facts = self.index, self.index.facts(point)
        current = index.row(point, unit)
        candidates: list[int] = [row for row in range(facts.start, facts.start + facts.size) if row != current]
        if not candidates:
            same = [one for one in index.hook_points.values() if one.kind == facts.kind]
            candidates = [row for one in same for row in range(one.start, one.start + one.size) if row != current]
        return index.unit_at(random.Random(f"{point} {unit} {seed}").choice(candidates)) if candidates else None

    def overview(self) -> dict[str, Any]:
        """Return the model's description: hook points, texts, features."""
        texts, length = self.index.ids.shape
        return {
            "path": self.path,
            "class": type(self.model).__name__,
            "parameters": sum(parameter.numel() for parameter in self.model.parameters()),
            "hook_points": [dataclasses.asdict(point) for point in self.index.hook_points.values()],
            "texts": texts,
            "length": length,
            "prefixes": self.reads_prefixes(),
        }

    def units(self, point: str) -> list[dict[str, Any]]:
        """Summarise every unit of a hook point: mean, standard deviation, and the tokens at which it is highest."""
        rows = self.index.facts(point).rows
        mean, std = (self.index.tensors[name][rows].tolist() for name in ("mean", "std"))
        return [
            {"unit": unit, "mean": mean[unit], "std": std[unit], "tokens": self.tokens(t for t in tokens if t >= 0)}
            for unit, tokens in enumerate(self._highest_tokens(rows)[:, :3].tolist())
        ]

    def _highest_tokens(self, rows: slice) -> Tensor:
        """Return token ids (units, K) at which units are highest; -1 where there is no text."""
        texts, tokens = (self.index.tensors[f"most_{column}"][rows].long() for column in ("row", "token"))
        return self.index.ids.long()[texts.clamp_min(0), tokens].where(texts >= 0, torch.tensor(-1))

    def unit(self, point: str, unit: int) -> dict[str, Any]:
        """Return a unit's data: the texts in which it is highest and lowest, by token, and its histogram."""
        row, tensors = self.index.row(point, unit), self.index.tensors
        facts = self.index.facts(point)
        answer: dict[str, Any] = {"point": point, "unit": unit, "kind": facts.kind}
        for end in ("most", "least"):
            columns = (tensors[f"{end}_{column}"][row].tolist() for column in ("value", "row", "token"))
            answer[end] = [
                {"value": value, "row": text, "token": token, "tokens": self.tokens(self.index.ids[text].tolist())}
                for value, text, token in zip(*columns, strict=True)
                if text >= 0
            ]
        numbers = {name: float(tensors[name][row]) for name in ("low", "width", "mean", "std")}
        return answer | numbers | {"counts": tensors["counts"][row].tolist()}

    def search(self, query: str) -> list[dict[str, Any]]:
        """Return units at whose highest tokens ``query`` occurs, ignoring case, those with the most first."""
        query_text = query.strip().lower()
        if not query_text:
            raise ValueError("type a part of a token to look for")
        highest = self._highest_tokens(slice(None))
        known = highest[highest >= 0].unique()
        hits = [token for token in known.tolist() if query_text in self.token_text(token).lower()]
        counts = torch.isin(highest, torch.tensor(hits, dtype=torch.long)).sum(1)
        best = counts.sort(descending=True, stable=True).indices[:MAX_FOUND].tolist()
        rows: list[dict[str, Any]] = []
        for row in best:
            if counts[row]:
                point, unit = self.index.unit_at(row)
                texts = self.tokens(token for token in highest[row].tolist() if token in hits)
                once = list(dict.fromkeys(texts))
                rows.append({"point": point, "unit": unit, "count": int(counts[row]), "tokens": once})
        return rows

    # Methods that run the model

    def color(self, text: str, point: str, unit: int) -> dict[str, Any]:
        """Return a text's tokens with a unit's values, and the units of its hook point furthest from their means."""
        self.index.row(point, unit)
        ids = self.encode(text)
        with self.lock:
            values = values_of(self.model, ids, [point])[point]
        facts = self.index.facts(point)
        mean, std = (self.index.tensors[name][facts.rows] for name in ("mean", "std"))
        away = ((values - mean) / std.clamp_min(1e-9)).where(std > 0, torch.zeros(()))
        order = away.abs().topk(min(3, facts.size)).indices
        strongest = [
            [{"unit": u, "value": float(values[t, u]), "away": float(away[t, u])} for u in units]
            for t, units in enumerate(order.tolist())
        ]
        return {
            "tokens": self.tokens(ids.tolist()),
            "values": values[:, unit].tolist(),
            "moved": away.abs().mean(1).tolist(),
            "strongest": strongest,
        }

    @contextlib.contextmanager
    def _running(self, interventions: Mapping[str, Intervention]) -> Iterator[None]:
        """Run the model within the block in eval mode, without a graph, under the interventions."""
        intervened = intervene(self.model, interventions) if interventions else contextlib.nullcontext()
        with torch.no_grad(), eval_mode(self.model), intervened:
            yield

    def next_token_probabilities(self, ids: Tensor, interventions: Mapping[str, Intervention]) -> Tensor:
        """Return next-token probabilities (B, T, V) for ids (B, T). The caller holds ``lock``.

        Raises:
            ValueError: if they are not finite.
        """
        with self._running(interventions):
            logits = self.model(input_ids=ids.to(self.model.device), use_cache=False).logits
        probabilities = logits.float().cpu().softmax(-1)
        if not probabilities.isfinite().all():
            raise ValueError("the model's output is not finite; choose a smaller value")
        return probabilities

    def continued(self, ids: Tensor, new: int, interventions: Mapping[str, Intervention]) -> str:
        """Return the model's greedy continuation of ids (T,). The caller holds ``lock``."""
        inputs = ids[None].to(self.model.device)
        settings = {"max_new_tokens": new, "do_sample": False, "attention_mask": torch.ones_like(inputs)}
        with self._running(interventions):
            generated = self.model.generate(inputs, pad_token_id=self.padding(), **settings)
        return self.tokenizer.decode(generated[0, len(ids) :])

    def padding(self) -> int:
        """Return a padding id, so that ``generate`` does not print a warning."""
        ids = (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id, 0)
        return next(token for token in ids if token is not None)

    def next_token(self, text: str) -> dict[str, Any]:
        """Return the likeliest next tokens after ``text``."""
        ids = self.encode(text)
        with self.lock:
            probabilities = self.next_token_probabilities(ids[None], {})[0, -1]
        best = probabilities.topk(min(SHOWN, len(probabilities)))
        return {"tokens": self.tokens(best.indices.tolist()), "probabilities": best.values.tolist()}

    def reads_prefixes(self) -> bool:
        """Return whether the model turns a prefix into weights."""
        from relinear.models.cgt.config import CGTConfig

        return isinstance(self.model.config, CGTConfig)


# From a model on disk


def load_explored_model(
    name: str,
    model: Any,
    tokenizer: Any,
    *,
    data: DataSettings | None = None,
    sequences: int = 256,
    length: int = 64,
    patterns: Sequence[str] = (),
    folder: Path | None = None,
    on_progress: ProgressCallback = no_progress,
) -> ExploredModel:
    """Return the model with its index: the saved one if it was built from the same inputs, else a new one.

    Args:
        name: the directory that the model was loaded from, or its name on the Hub.
        model, tokenizer: as loaded.
        data: the source of texts; the Python standard library by default.
        sequences, length: number of texts, and the tokens in each.
        patterns: names of hook points, as for ``choose_hook_points``.
        folder: folder of the index; by default ``explore`` in the model's directory, or a folder in the cache if the
            model has no directory to which only this user can write.
        on_progress: called with the number of indexed texts while a new index is built.

    Raises:
        ValueError: if the tokenizer is not the model's, a hook point does not exist, or there is too little text.
        OSError: if the index cannot be written.
    """
    check_tokenizer_fits(tokenizer, model)
    check_length_fits(length, model)
    points = choose_hook_points(model, patterns)
    data = data or DataSettings()
    ids = held_out_tokens(HeldOutText(data, sequences, length), tokenizer)
    made_from = {
        "data": data.data,
        "weights": _file_keys(Path(name)),
        "hook_points": list(points),
        "texts": hashlib.sha256(ids.numpy().tobytes()).hexdigest(),
    }
    folder = folder or _default_folder(name)
    index = read_index(folder, made_from)
    if index is None:
        index_folder(folder).check_ours()
        index = index_units(model, ids, points, made_from, on_progress)
        index.save(folder)
    return ExploredModel(name, model, tokenizer, points, index)


def _default_folder(name: str) -> Path:
    directory = Path(name)
    with contextlib.suppress(PermissionError):  # the folder of a model that several people share
        if directory.is_dir() and os.access(directory, os.W_OK):
            check_all_private(directory / "explore")
            return directory / "explore"
    return check_private(cache_folder() / "explore" / digest([name]))


def _file_keys(directory: Path) -> list[list[Any]]:
    """Return name, size and time of every file in the model's directory; empty for a Hub name."""
    files = sorted(path for path in directory.glob("*") if path.suffix in (".safetensors", ".json"))
    return [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in files]
