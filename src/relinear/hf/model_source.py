"""Decide by its name whether a model is in a directory or on the Hugging Face Hub, without network access."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from relinear.settings.messages import did_you_mean, quoted

#: names of causal language models from before the Hub required an owner
_WITHOUT_OWNER = frozenset({"distilgpt2", "gpt2", "gpt2-large", "gpt2-medium", "gpt2-xl", "openai-gpt"})


def locate_checkpoint(name: Any, *, presets: Iterable[str] = (), cache_dir: Any = None) -> Literal["directory", "hub"]:
    """Return whether the model ``name`` is a directory or may be on the Hub; no network access.

    Args:
        name: what a user wrote.
        presets: names that are valid as well, for messages.
        cache_dir: the cache of the Hub's client, if not the default.

    Raises:
        ValueError: if it can be neither; names the nearest presets.
        FileNotFoundError: if it is written as a path and there is no such directory; names what is there.
        NotADirectoryError: if it is a file.
    """
    known = list(presets)
    if not isinstance(name, str) or not name.strip() or len(name) > 4096 or "\0" in name:
        expected = "a preset, a directory or a name of the Hub" if known else "a directory or a name of the Hub"
        raise ValueError(f"a model is named by {expected}, got {quoted(name)}")
    path = Path(name).expanduser()
    if exists(path):
        if not path.is_dir():
            raise NotADirectoryError(f"{name} is a file; give the directory that the model was saved to")
        return "directory"
    if is_path(name):
        raise FileNotFoundError(missing_directory_message(name))
    if "/" in name or name in _WITHOUT_OWNER or is_cached(name, cache_dir):
        return "hub"
    suggestion, kind = (f"; {did_you_mean(name, known)}", "neither a preset nor a") if known else ("", "not a")
    raise ValueError(
        f"unknown model {quoted(name)}{suggestion} (It is {kind} directory here. Names of the Hugging Face Hub have "
        "the form owner/name.)"
    )


def is_path(name: str) -> bool:
    """Return whether ``name`` looks like a path rather than a name on the Hub."""
    return name.startswith((".", "/", "~")) or name.count("/") > 1


def exists(path: Path) -> bool:
    """Return whether ``path`` exists; False for a name that is too long for a file."""
    try:
        return path.exists()
    except OSError:
        return False


def is_cached(name: str, cache_dir: Any = None) -> bool:
    """Return whether the cache of the Hub's client (``cache_dir``, or the default) has a model of this name."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        return isinstance(try_to_load_from_cache(name, "config.json", cache_dir=cache_dir), str)
    except HFValidationError:
        return False


def missing_directory_message(name: str) -> str:
    """Return the message for a missing path, with the nearest names in the last folder that exists."""
    path = Path(name).expanduser()
    folder = next((parent for parent in path.parents if exists(parent)), Path("."))
    missing_name = path.relative_to(folder).parts[0]
    folders = [child.name for child in folder.iterdir() if child.is_dir()] if folder.is_dir() else []
    folders.sort(key=lambda folder_name: (folder_name.startswith("."), folder_name))
    near = did_you_mean(missing_name, folders, limit=8) if folders else "it has no directories"
    return f"{quoted(name)[1:-1]}: no such directory; {folder.resolve()} has no {quoted(missing_name)}; {near}"
