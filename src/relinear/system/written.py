"""What relinear wrote, which alone it removes or replaces: known by a record that lies beside it.

A file may be replaced where its folder carries the record of the work that writes files of this name, and its content
is what the mark there notes. Anything else is somebody else's, and is refused by name before any work.
"""

import json
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import xxhash

#: in every directory that is written as a whole: lists what was written, as ``xxh128sum`` does (earlier versions: the
#: names, or nothing). Ends the names of what is not whole yet, too
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
CARD = "README.md"
#: in a model card: knows its other lines by their hash, which earlier versions did not
CARD_LINE = "<!-- Written by relinear; a card that was changed, or lacks this line, is never overwritten. -->"
_CARD_LINE = re.compile(r"<!-- Written by relinear(?: \(([0-9a-f]{16})\))?; a card [^>]* is never overwritten\. -->")
_FIT = ("metrics.jsonl", "block_losses.npy", "latent_moments.json", "checkpoints")
_RUNS = ("run.json", "results.json", "scale.json", "speed.json", "ngram*", "tuning", "runs", "budgets", "sizes")
_LOOKS = ("effective_rank", "gates", "top_tokens", "fingerprints", "modulators", "latents", "planes")
_STATE = (
    *("calibration", "plan.json", "frontier.json", "speed.json", "points.json", "fit-*", "heal-*", "proposed-*"),
    "plain",
)
_LINE = re.compile(r"(?:([0-9a-f]{32})  )?(.*)")
#: how a row of metrics begins, which a full disk may have cut
_ROW = b'{"step": '
#: files of a run that say themselves what they are, and how
_LOOSE = {"latent_moments.json": ('"latents"', '"decay"'), "block_losses.npy": ("NUMPY",)}
#: files of a checkpoint without which there is none
_WHOLE = {"config.json", "model.safetensors"}
#: in a record: name -> digest of what its work wrote beside it
LISTED = "written"
#: between words of a record that all have to be there
_AND = " & "
_RUN = '"settings" & "accumulation" & "learning_rate" & "optimizer"'
_PLAN = '"layers" & "parameters_before" & "nats"'
_WORKS = {
    "saved": _Work({MARK: _MARK_SAYS, "config.json": '"relinear'}, _CHECKPOINT),
    "streams": _Work({MARK: _MARK_SAYS}, ()),
    "index": _Work({MARK: _MARK_SAYS, "index.json": '"made_from"'}, ("index.json", "units.safetensors")),
    "fit": _Work({"metrics.jsonl": '"step" & "tokens"', "run.json": _RUN}, _FIT),
    "train": _Work({"run.json": _RUN}, ("run.json", "model", *_FIT)),
    "compare": _Work({"run.json": '"recipe" & "entries"'}, (*_RUNS, "plots", _PAGE)),
    "sweep": _Work({"sweep.json": '"parameters" & "trials"'}, ("sweep.json", "trials", "optuna.db", "optuna.journal")),
    "distill": _Work(
        {"distill.json": '"settings" & "fingerprint"'}, ("distill.json", "layers", "model", "report.json", _PAGE)
    ),
    "compress": _Work(
        {
            "calibration/fingerprint.json": '"fingerprint"',
            "plan.json": _PLAN,
            "proposed-plan.json": _PLAN,
            "speed.json": '"machine" & "conditions" & "rows"',
        },
        (*_STATE, "model", "model.gguf", "report.json", _PAGE),
    ),
    "analyze": _Work(
        {"analyze.json": '"model" & "control" & "sequences"'},
        ("analyze.json", *(f"{name}{end}" for name in _LOOKS for end in (".*", "_*")), _PAGE),
    ),
    "bench": _Work(
        {"bench.json": '"settings" & "rows" & "contender"'}, ("bench.json", "bench.png", "bench.svg", _PAGE)
    ),
    "models": _Work({"models.json": '"settings" & "rows" & "variant"'}, ("models.json", _PAGE)),
    "coordinates": _Work({"coordinates.json": '"base_width" & "parametrizations"'}, ("coordinates.*", _PAGE)),
}


def parts_of(folder: Path, work: str) -> Iterator[Path]:
    """Yield what is in ``folder`` under the names that a work writes, whoever wrote it."""
    for pattern in _WORKS[work].names:
        yield from sorted(folder.glob(pattern))
    if work == "saved" and is_own_card(folder / CARD):
        yield folder / CARD


def signed_card(text: str) -> str:
    """Return a model card that holds ``CARD_LINE`` so that ``is_own_card`` knows it."""
    return text.replace(CARD_LINE, CARD_LINE.replace(";", f" ({_short_digest(text)});"))


def is_own_card(card: Path | str) -> bool:
    """Whether a model card, a file or its text, is as relinear wrote it; one that somebody added to is theirs."""
    if isinstance(card, Path):
        card = _read(card).decode("utf-8", "replace")
    line = _CARD_LINE.search(card)
    return line is not None and line[1] in (None, _short_digest(card.replace(line[0], CARD_LINE)))


def _short_digest(text: str) -> str:
    return xxhash.xxh3_64_hexdigest(text.encode())


def digest_of(path: Path) -> str:
    """Return XXH3, 128 bits, of a file, or of such a list of what is below a folder.

    It takes a tenth of the time of writing the file, which SHA-256 doubles; nobody is to be kept from forging a mark.
    """
    digest = xxhash.xxh3_128()
    if path.is_dir():
        inside = {str(part.relative_to(path)): {digest_of(part)} for part in path.rglob("*") if part.is_file()}
        digest.update(_as_text(inside).encode())
    elif path.is_file():
        for part in _parts_in(path, 1 << 20):
            digest.update(part)
    return digest.hexdigest()


def _parts_in(path: Path, size: int) -> Iterator[bytes]:
    """Yield what is in a file, so many bytes at a time; what is raised where it cannot be read has its name."""
    try:
        with path.open("rb") as file:
            while part := file.read(size):
                yield part
    except OSError as error:
        error.filename = str(path)
        raise


def _read(path: Path, most: int = -1) -> bytes:
    """What is in a file, or its beginning; nothing where there is none."""
    return next(_parts_in(path, most), b"") if path.is_file() else b""


def sign(folder: Path, over: Path, work: str, ours: set[str]) -> str:
    """Leave the mark in ``folder``, which takes the place of ``over``: it notes what is there, and what stays.

    Args:
        folder, over, work: as in ``atomic_directory``. ours: names in ``over`` that may be replaced; what others have
            there under a name in ``folder`` is the same or is refused, and remains theirs.

    Returns:
        The mark for as long as files are replaced one by one: it knows them before and after, wherever that ends.
    """
    there = {part.name for part in over.iterdir()} if over.exists() else set()
    fresh = {part.name for part in folder.iterdir()} - (there - ours)
    going = {part.name for part in parts_of(over, work)} & ours - fresh
    before = noted_in(over)
    # states between layers are large, and have checksums of their own
    noted = {name: {digest_of(folder / name)} if work != "streams" else {""} for name in fresh}
    both = {name: {""} for name in going | fresh & there} | before
    both |= {name: noted[name] | both.get(name, set()) for name in fresh}
    noted |= {name: digests for name, digests in before.items() if name in there - going - fresh}
    (folder / MARK).write_text(as_mark(noted), encoding="utf-8")
    return as_mark(both)


def as_mark(noted: Mapping[str, set[str]]) -> str:
    """Return the text of a mark that lists contents by name."""
    return f"{_MARK_SAYS}\n{_as_text(noted)}"


def _as_text(noted: Mapping[str, set[str]]) -> str:
    rows = [f"{digest}  {name}\n" if digest else f"{name}\n" for name in sorted(noted) for digest in noted[name]]
    return "".join(rows)


def noted_in(folder: Path) -> dict[str, set[str]]:
    """Return what the mark in ``folder`` lists: by name which contents are relinear's, "" for whatever is there."""
    ours, noted = _says(folder / MARK, _MARK_SAYS), dict[str, set[str]]()
    lines = _read(folder / MARK).decode("utf-8", "replace").splitlines() if ours else []
    for digest, name in (match.groups("") for line in lines[1:] if (match := _LINE.fullmatch(line))):
        if name == Path(name).name and name != "..":  # nothing outside of the folder
            noted.setdefault(name, set()).add(digest)
    return noted


def remove_written(folder: Path) -> None:
    """Remove from ``folder`` what was written as a whole, a model say, and is as it was; what is others' stays."""
    ours, noted = replaceable(folder, "saved"), noted_in(folder)
    names = [part.name for part in parts_of(folder, "saved")]  # config first: half loads as nothing
    for name in (*names, *noted.keys() - {*names}):
        if name in ours:
            remove(folder / name)
    left = {part.name for part in parts_of(folder, "saved")} | {name for name in noted if (folder / name).exists()}
    if MARK in ours and left <= {MARK}:  # last: it tells whose the others are
        remove(folder / MARK)
    with suppress(OSError):
        folder.rmdir()


def remove(path: Path) -> None:
    """Remove a file, a link or a folder with all that is in it."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def is_temporary(path: Path) -> bool:
    """Whether it is what ``atomic_path`` and ``atomic_directory`` write until that is whole."""
    return _TEMPORARY.fullmatch(path.name) is not None


def is_ours(folder: Path, work: str) -> bool:
    """Return whether ``folder`` carries a record of such a work, of this version or an earlier one."""
    return any(_says(folder / name, *words.split(_AND)) for name, words in _WORKS[work].records.items())


def replaceable(folder: Path, work: str) -> set[str]:
    """Return names in ``folder`` that a work may replace or remove: what is as its mark notes; all where it notes none.

    A card tells itself whether it is as it was.
    """
    if not (is_saved(folder) or is_ours(folder, work)):
        return set()
    noted, card = noted_in(folder), {CARD} if is_own_card(folder / CARD) else set()
    there = {name for name in noted.keys() - {CARD} if (folder / name).exists()}
    as_noted = {name for name in there if "" in noted[name] or digest_of(folder / name) in noted[name]}
    return {MARK} | card | (as_noted if noted else {part.name for part in folder.glob("*")})


def check_ours(folder: str | Path, work: str) -> set[str]:
    """Return ``replaceable``; raise ValueError where a work would replace in ``folder`` what relinear did not write.

    Args:
        folder: of the work; need not be there.
        work: the command's name; "fit" for training without the record of a run, "saved" for a checkpoint, "index" for
            that of ``explore``, "models" and "coordinates" for what is timed and checked.
    """
    folder = Path(folder)
    there = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    if not there.is_dir():
        raise ValueError(f"{there} is a file; give a directory")
    if MARK in _WORKS[work].records:
        check_signed(folder / MARK)
    ours = is_saved(folder) if work == "saved" else is_ours(folder, work)
    noted = noted_in(folder) if MARK in _WORKS[work].records else {}
    free = replaceable(folder, work)
    changed = (noted.keys() | _WHOLE) - free - {CARD} if noted else set()
    listed = _listed_in(folder, work)
    for path in parts_of(folder, work):
        if path.suffix in (".html", ".gguf"):
            check_signed(path)
        elif path.name in changed or not (ours or _holds_nothing(path)) or _is_unlisted(path, work, listed):
            raise not_ours(path)
    return free


def is_listed(path: Path, work: str) -> bool:
    """Whether it is a file that a record lists: no record, nor a page, which says itself whose it is."""
    return path.is_file() and path.suffix != ".html" and path.name not in _WORKS[work].records


def _is_unlisted(path: Path, work: str, listed: Mapping[str, str]) -> bool:
    """Whether a record lists files, and not this one as it is."""
    return bool(listed) and is_listed(path, work) and digest_of(path) != listed.get(path.name)


def record_of(work: str) -> str:
    """Return the name of the record of a work that has one."""
    return next(reversed(_WORKS[work].records))


def _listed_in(folder: Path, work: str) -> dict[str, str]:
    """What the record in ``folder`` lists; nothing where a process was killed since, or an earlier version wrote it."""
    with suppress(OSError, ValueError, AttributeError, RecursionError):
        listed = json.loads((folder / record_of(work)).read_text(encoding="utf-8")).get(LISTED)
        return listed if isinstance(listed, dict) else {}
    return {}


def check_loose(folder: Path) -> None:
    """Raise ValueError where a file of a run that no mark notes is not as ``train`` writes it: it would be removed."""
    for name, signs in _LOOSE.items():
        if (folder / name).is_file() and not _says(folder / name, *signs):
            raise not_ours(folder / name)
    if not all(map(_begins_a_row, _read(folder / "metrics.jsonl").splitlines())):
        raise not_ours(folder / "metrics.jsonl")


def _begins_a_row(line: bytes) -> bool:
    """Whether it is of metrics, whole or cut."""
    return _ROW.startswith(line[: len(_ROW)])


def _holds_nothing(path: Path) -> bool:
    """Whether it is empty or holds nothing whole: what a process leaves that is killed before its first record."""
    if path.is_dir():
        return all(is_temporary(inner) and inner.is_file() for inner in path.iterdir())
    begun = _read(path, 1 << 12)
    return path.is_file() and b"\n" not in begun and not begun.endswith(b"}") and _begins_a_row(begun)


def is_saved(directory: Path) -> bool:
    """Whether relinear saved a model in ``directory``, or fills it; models without operators once had no mark."""
    works = ("train", "distill", "compress") if directory.name == "model" else ()
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
    text = ""
    with suppress(OSError):
        text = _read(path, 1 << 20).decode("utf-8", "replace")
    return bool(text) and all(word in text for word in words)
