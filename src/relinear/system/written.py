"""What relinear wrote, which alone it removes or replaces: known by a record that lies beside it.

A file may be replaced where its folder carries the record of the work that writes files of this name. Anything else is
somebody else's, and is refused by name before any work.
"""

import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

#: in every directory that is written as a whole: lists what was written. Ends the names of what is not whole yet, too
MARK = ".relinear"
_MARK_SAYS = "relinear wrote this directory, and replaces what it wrote"
_PAGE = "report.html"
#: what pages, GGUF files and marks say near their start
_SIGNS = ("– relinear", "relinear.version", _MARK_SAYS)
_TEMPORARY = re.compile(rf"\..+\.[a-z0-9_]{{8}}\{MARK}")


class _Work(NamedTuple):
    """records: files that tell a folder of this work, with words in them. names: patterns of what it writes."""

    records: dict[str, str]
    names: tuple[str, ...]


_NUMBER = "[0-9]" * 5
_CHECKPOINT = (
    *("config.json", "generation_config.json", "model.safetensors", f"model-{_NUMBER}-of-{_NUMBER}.safetensors"),
    "model.safetensors.index.json",
    *("configuration_relinear.py", "modeling_factorized.py"),
)
_CARD = "Written by relinear"
_FIT = ("metrics.jsonl", "block_losses.npy", "latent_moments.json", "checkpoints")
_RUNS = ("run.json", "results.json", "scale.json", "speed.json", "ngram*", "tuning", "runs", "budgets", "sizes")
_LOOKS = ("effective_rank", "gates", "top_tokens", "fingerprints", "modulators", "latents", "planes")
_STATE = (
    *("calibration", "plan.json", "frontier.json", "speed.json", "points.json", "fit-*", "heal-*", "proposed-*"),
    "plain",
)
#: between words of a record that all have to be there
_AND = " & "
_RUN = '"settings" & "accumulation" & "learning_rate" & "optimizer"'
_WORKS = {
    "saved": _Work({MARK: _MARK_SAYS, "config.json": '"relinear', "README.md": _CARD}, _CHECKPOINT),
    "index": _Work({MARK: _MARK_SAYS, "index.json": '"made_from"'}, ("index.json", "units.safetensors")),
    "fit": _Work({"metrics.jsonl": '"step" & "tokens"', "run.json": _RUN}, _FIT),
    "train": _Work({"run.json": _RUN}, ("run.json", "model", *_FIT)),
    "compare": _Work({"run.json": '"recipe" & "entries"'}, (*_RUNS, "plots", _PAGE)),
    "sweep": _Work({"sweep.json": '"parameters"'}, ("sweep.json", "trials", "optuna.db", "optuna.journal")),
    "distill": _Work(
        {"distill.json": '"settings" & "fingerprint"'}, ("distill.json", "layers", "model", "report.json", _PAGE)
    ),
    "compress": _Work(
        {
            "calibration/fingerprint.json": '"fingerprint"',
            "plan.json": '"layers"',
            "proposed-plan.json": '"layers"',
            "speed.json": '"machine"',
        },
        (*_STATE, "model", "model.gguf", "report.json", _PAGE),
    ),
    "atlas": _Work(
        {"calibration/fingerprint.json": '"fingerprint"', "atlas.json": '"operators" & "layers"'},
        ("atlas.json", "calibration", "costs.*", "cheapest.*", _PAGE),
    ),
    "analyze": _Work({"analyze.json": '"model"'}, ("analyze.json", *(f"{name}*" for name in _LOOKS), _PAGE)),
    "bench": _Work({"bench.json": '"settings" & "rows"'}, ("bench.json", "bench.png", "bench.svg", _PAGE)),
    "models": _Work({"models.json": '"settings" & "rows"'}, ("models.json", _PAGE)),
    "coordinates": _Work({"coordinates.json": '"base_width"'}, ("coordinates.*", _PAGE)),
}


def parts_of(folder: Path, work: str) -> Iterator[Path]:
    """Yield what is in ``folder`` under the names that a work writes, whoever wrote it."""
    for pattern in _WORKS[work].names:
        yield from sorted(folder.glob(pattern))
    if work == "saved" and _says(folder / "README.md", _CARD):
        yield folder / "README.md"


def sign(folder: Path, over: Path, work: str) -> None:
    """Leave the mark in ``folder``, which takes the place of ``over``: it lists what is there, and what stays."""
    staying = {part.name for part in _listed(over)} - {part.name for part in parts_of(over, work)}
    names = sorted({part.name for part in folder.iterdir()} | staying)
    (folder / MARK).write_text("\n".join([_MARK_SAYS, *names]) + "\n", encoding="utf-8")


def _listed(folder: Path) -> list[Path]:
    """What the mark in ``folder`` lists and is there; nothing where earlier versions listed nothing."""
    ours = _says(folder / MARK, _MARK_SAYS)
    lines = (folder / MARK).read_text(encoding="utf-8", errors="replace").splitlines() if ours else []
    return [folder / name for name in lines[1:] if name == Path(name).name and (folder / name).is_file()]


def remove_written(folder: Path) -> None:
    """Remove the model, or whatever else was written as a whole, from ``folder``; what others put there stays."""
    for part in (*parts_of(folder, "saved"), *_listed(folder), folder / MARK):  # config first: half loads as nothing
        part.unlink(missing_ok=True)
    with suppress(OSError):
        folder.rmdir()


def is_temporary(path: Path) -> bool:
    """Whether it is what ``atomic_path`` and ``atomic_directory`` write until that is whole."""
    return _TEMPORARY.fullmatch(path.name) is not None


def is_ours(folder: Path, work: str) -> bool:
    """Return whether ``folder`` carries a record of such a work, of this version or an earlier one."""
    return any(_says(folder / name, *words.split(_AND)) for name, words in _WORKS[work].records.items())


def replaceable(folder: Path, work: str) -> set[str]:
    """Return names in ``folder`` that a work may replace or remove: those in its mark; all where it lists none."""
    if not (is_saved(folder) or is_ours(folder, work)):
        return set()
    return {MARK, *(part.name for part in (_listed(folder) or folder.iterdir()))}


def check_ours(folder: str | Path, work: str) -> None:
    """Raise ValueError where a work would remove or replace in ``folder`` what relinear did not write, by its name.

    Args:
        folder: of the work; need not be there.
        work: the command's name; "fit" for training without the record of a run, "saved" for a checkpoint, "index" for
            that of ``explore``, "models" and "coordinates" for what is timed and checked.
    """
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file; give a directory")
    if MARK in _WORKS[work].records:
        check_signed(folder / MARK)
    ours = is_ours(folder, work)
    for path in parts_of(folder, work):
        if path.suffix in (".html", ".gguf"):
            check_signed(path)
        elif not ours and not _holds_nothing(path):
            raise not_ours(path)


def _holds_nothing(path: Path) -> bool:
    """Whether it is empty or holds nothing whole: what a process leaves that is killed before its first record."""
    if path.is_dir():
        return all(is_temporary(inner) and inner.is_file() for inner in path.iterdir())
    return path.is_file() and not path.stat().st_size


def is_saved(directory: Path) -> bool:
    """Whether relinear saved a model in ``directory``, or fills it; models without operators once had no mark."""
    works = [work for work in ("train", "distill", "compress") if directory.name in _WORKS[work].names]
    return is_ours(directory, "saved") or any(is_ours(directory.parent, work) for work in works)


def check_signed(path: str | Path) -> None:
    """Raise ValueError where ``path`` is there and does not say itself that relinear wrote it, as pages do."""
    if Path(path).exists() and not any(_says(Path(path), sign) for sign in _SIGNS):
        raise not_ours(Path(path))


def not_ours(path: Path) -> ValueError:
    """Return what is raised about a file, or a folder, that relinear did not write, or for other work."""
    return ValueError(
        f"{path} would be replaced, and belongs to something else; move it away, or give another directory"
    )


def _says(path: Path, *words: str) -> bool:
    """Whether it is a file that holds each of these words near its start, as records do."""
    try:
        text = path.open("rb").read(1 << 20).decode("utf-8", "replace") if path.is_file() else None
    except OSError:
        return False
    return text is not None and all(word in text for word in words)
