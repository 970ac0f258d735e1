"""Open the directory of a comparison, with the record of its recipe."""

import contextlib
import datetime
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from relinear.compare.match import SizedEntry
from relinear.compare.schema import FORMAT, RESULTS, SCALE
from relinear.compare.settings import CompareSettings
from relinear.data import PackedData
from relinear.system.files import os_errors_named
from relinear.system.run_folder import RunFolder
from relinear.training.fitting import BLOCK_LOSSES, training_device, training_dtype
from relinear.training.run import RUN, read_result
from relinear.training.settings import TrainSettings

SPEED, NGRAM = "speed.json", "ngram.json"
#: folders of the short runs and of the final runs
TUNING, RUNS = "tuning", "runs"


def seed_folder(out_dir: Path, entry: str, seed: int) -> Path:
    """Return the folder of an entry's final run on a seed."""
    return out_dir / RUNS / entry / f"seed-{seed}"


def read_losses(run: Path) -> np.ndarray:
    """Return a run's losses by held-out block; the single loss if an earlier version did not save them."""
    if not (run / BLOCK_LOSSES).is_file():
        return np.asarray([read_result(run).validation_loss])
    with os_errors_named(run / BLOCK_LOSSES):
        return np.load(run / BLOCK_LOSSES, allow_pickle=False)


def comparison_folder(out_dir: str | Path) -> RunFolder:
    """Return the folder of a comparison; a recipe's description may change, as no run depends on it."""
    return RunFolder(
        out_dir,
        task="compare",
        record=RUN,
        names=(RESULTS, SCALE, SPEED, NGRAM, TUNING, RUNS, "budgets", "sizes", "plots"),
        earlier_records={RUN: ("format", "recipe", "entries")},
        may_differ=("description",),
        settings_of=lambda record: CompareSettings.upgraded(recipe_of(record)),
    )


def recipe_of(record: Mapping[str, Any]) -> Any:
    """Return the recipe that ``run.json`` holds, also that of an earlier version."""
    return record.get("settings", record.get("recipe"))


@contextlib.contextmanager
def claimed_folder(
    recipe: CompareSettings,
    out_dir: Path,
    entries: list[SizedEntry],
    data: PackedData,
    overwrite: bool,
) -> Iterator[dict[str, Any]]:
    """Lock ``out_dir`` for ``recipe`` within the block; yield the record in ``run.json``, written if it is missing.

    Raises:
        ValueError: if another comparison is there, if it was begun with other text under the same name, or computes in
            another precision or on another kind of device than here: runs of both could not be compared.
    """
    folder = comparison_folder(out_dir)
    tokens = {"train": data.train.checksum, "validation": data.validation.checksum}
    with folder.open(recipe.model_dump(mode="json"), overwrite=overwrite) as record:
        if record is None or "entries" not in record:
            sizes = {
                entry.name: {
                    "parameters": entry.size.parameters,
                    "flops_per_token": entry.size.flops,
                    "size_mismatch": entry.size_mismatch,
                    "settings": entry.settings.model_dump(mode="json"),
                    "computed": _computed(entry.settings),
                }
                for entry in entries
            }
            record = folder.write(format=FORMAT, entries=sizes, tokens=tokens, started=now())
        else:
            _check_as_begun(out_dir, record, entries, tokens)
        yield record


def _check_as_begun(
    out_dir: Path, record: Mapping[str, Any], entries: list[SizedEntry], tokens: Mapping[str, int]
) -> None:
    """Refuse to resume on other text, precision or device; earlier versions did not record them."""
    if record.get("tokens", tokens) != tokens:
        raise ValueError(
            f"{out_dir} was begun on other text: files of train.data or its tokenizer have changed; restore them, or "
            "give another --out"
        )
    for entry in entries:
        before = record["entries"].get(entry.name, {}).get("computed")
        here = _computed(entry.settings)
        if before is not None and before != here:
            raise ValueError(
                f"{out_dir} was begun with {entry.name} in {before}, which would be {here} here; go on where that was, "
                "or give another --out with train.dtype and train.device written out"
            )


def _computed(settings: TrainSettings) -> str:
    """Return the precision and device of a run: "float32 on cpu"."""
    return f"{precision(settings)} on {training_device(settings).type}"


def precision(settings: TrainSettings) -> str:
    """Return the precision of a run on this machine, with "auto" resolved."""
    return str(training_dtype(settings, training_device(settings))).removeprefix("torch.")


def now() -> str:
    """Return the time, to the second, with its zone."""
    return datetime.datetime.now().astimezone().isoformat(timespec="seconds")
