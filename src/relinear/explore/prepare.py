"""A model on disk -> what the page is about: its sites, the texts, and the index, which is made once."""

import hashlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from relinear.analysis.tokens import HeldOutText, tokens_of
from relinear.core.vocabulary import check_length_fits, check_tokenizer_fits
from relinear.data import DataSettings
from relinear.data.cache import cache_folder, digest
from relinear.explore.subject import Subject
from relinear.explore.units import choose_sites, index_units, read_index
from relinear.system.own import check_own
from relinear.system.written import check_ours


def prepare_subject(
    name: str,
    model: Any,
    tokenizer: Any,
    *,
    data: DataSettings | None = None,
    sequences: int = 256,
    length: int = 64,
    wanted: Sequence[str] = (),
    folder: Path | None = None,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Subject:
    """Return the model with its index: the one that is kept, if it was made from the same things, else a new one.

    Args:
        name: the directory that the model was loaded from, or its name on the Hub.
        model, tokenizer: as loaded.
        data: where texts come from; the Python standard library by default.
        sequences, length: how many texts, and the tokens in each.
        wanted: names of sites (``choose_sites``).
        folder: where the index is kept; by default ``explore`` in the model's directory, or in the cache for a model
            that has none which can be written to.
        on_progress: called with the texts that are done and all of them while a new index is made.

    Raises:
        ValueError: if the tokenizer is not the model's, a site does not exist, or there is too little text.
        OSError: if the index cannot be written.
    """
    check_tokenizer_fits(tokenizer, model)
    check_length_fits(length, model)
    places = choose_sites(model, wanted)
    data = data or DataSettings()
    ids = tokens_of(HeldOutText(data, sequences, length), tokenizer)
    made_from = {
        "data": data.data,
        "weights": _weights(Path(name)),
        "sites": list(places),
        "texts": hashlib.sha256(ids.numpy().tobytes()).hexdigest(),
    }
    folder = folder or _usual_folder(name)
    index = read_index(folder, made_from)
    if index is None:
        check_ours(folder, "index")
        index = index_units(model, ids, places, made_from, on_progress)
        index.save(folder)
    return Subject(name, model, tokenizer, places, index)


def _usual_folder(name: str) -> Path:
    directory = Path(name)
    if directory.is_dir() and os.access(directory, os.W_OK):
        return directory / "explore"
    return check_own(cache_folder() / "explore" / digest([name]))


def _weights(directory: Path) -> list[list[Any]]:
    """What changes when another model is saved in the directory; nothing for a name."""
    files = sorted(path for path in directory.glob("*") if path.suffix in (".safetensors", ".json"))
    return [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in files]
