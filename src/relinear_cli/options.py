"""Define options that several commands share, and parse the operators, overrides and models in their arguments."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import typer

if TYPE_CHECKING:
    from relinear.data import DataSettings
    from relinear.settings.base import Settings

Chosen = TypeVar("Chosen", bound="Settings")

Replace = Annotated[
    list[str] | None,
    typer.Option("--replace", "-r", metavar="PATTERN=KIND:KEY=VALUE", help="Replace layers."),
]
ReplaceLayers = Annotated[str | None, typer.Option(help="For --replace, such as 0,4-11; by default all.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Start over; existing results in --out are renamed.")]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Print the cost (runs, parameters, tokens, time, disk) and stop.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Exclude = Annotated[list[str] | None, typer.Option(help="Pattern of layers to leave alone.")]
PretrainedModel = Annotated[str, typer.Argument(metavar="MODEL", help="Directory of a saved model, or a Hub name.")]
TextColumn = Annotated[str | None, typer.Option(help="Column of text in tables and Hub data; by default `text`.")]
Tokenizer = Annotated[
    str | None, typer.Option(help="`bytes`, or a tokenizer's folder or Hub name; by default the model's own.")
]
_SPLITS = "<train | validation | test | all>"  # with spaces, at which help wraps it
Split = Annotated[
    Literal["train", "validation", "test", "all"], typer.Option(metavar=_SPLITS, help="Split of the corpus.")
]
Threads = Annotated[int | None, typer.Option(min=1, max=1024, metavar="N", help="CPU threads.", show_default="torch's")]
TrainingModel = Annotated[
    str | None, typer.Option(help="A preset, the directory of a saved model, or a Hub name.", show_default="tiny")
]
TrainingData = Annotated[
    str | None, typer.Option(help="`stdlib`, a file or folder, a Hub name, or a task.", show_default="stdlib")
]
Compile = Annotated[
    bool | None, typer.Option("--compile", help="Use `torch.compile`: a minute at first, then faster steps.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Any other setting, by its name in a recipe; may be repeated."),
]
Workers = Annotated[
    int | None, typer.Option(min=1, max=4096, help="Parallel runs.", show_default="one per core; jobs: 256")
]
Executor = Annotated[
    str | None,
    typer.Option(help="`slurm`, or the address of a Dask scheduler: `tcp://HOST:8786`.", show_default="this machine"),
]
Slurm = Annotated[
    list[str] | None,
    typer.Option(
        metavar="KEY=VALUE",
        help="A parameter of submitit, such as timeout_min=240; may be repeated.",
        show_default="submitit's",
    ),
]


def options_among(options: Mapping[str, Any], settings: type[Settings]) -> dict[str, Any]:
    """Return a command's ``options`` (its ``locals()``) whose name is one of the ``settings``."""
    return {name: value for name, value in options.items() if name in settings.model_fields}


def chosen_settings(options: Mapping[str, Any], overrides: list[str] | None) -> dict[str, Any]:
    """Return the settings that the user chose, by name: options that are not None, and those of ``--set``.

    Raises:
        ValueError: if one of ``--set`` is not KEY=VALUE.
    """
    from relinear.settings.yaml_settings import parse_overrides

    chosen = {name: value for name, value in options.items() if value is not None and value != []}
    return chosen | parse_overrides(overrides or [])


def load_changed(settings: type[Chosen], recipe: str | None, values: dict[str, Any], changed: dict[str, Any]) -> Chosen:
    """Return the checked settings ``changed``; an error names the recipe if its own ``values`` are wrong.

    Args:
        settings: their class.
        recipe: by name or file; None if there is none.
        values: of the recipe.
        changed: these with the changes of the command line.

    Raises:
        ValueError: for wrong settings.
    """
    try:
        return settings.load(changed, "command line")
    except ValueError:
        if recipe is not None:
            settings.load(values, recipe)
        raise


def prepare_process(
    threads: int | None = None, *, models: Iterable[str] = (), texts: Iterable[DataSettings] = (), presets: bool = True
) -> None:
    """Prepare a process that computes: check that its models and texts exist, set its threads, tune the allocator.

    Raises:
        ValueError, OSError: for models (which may be ``presets``) and texts that do not exist.
    """
    import torch
    from transformers.utils.logging import disable_progress_bar

    from relinear.data.corpora import open_corpus
    from relinear.models import model_folder
    from relinear.system.allocator import tune_allocator

    for name in models:
        find_model(model_folder(name), presets=presets)
    for text in texts:
        open_corpus(text)
    if threads is not None:
        torch.set_num_threads(threads)
    disable_progress_bar()  # those of loading and writing weights would disturb ours

    tune_allocator()


def parse_operators(texts: list[str]) -> dict[str, dict[str, Any] | None]:
    """Return ``PATTERN=KIND:KEY=VALUE`` texts as the mapping of a recipe; a bare setting means "all-linear".

    Raises:
        ValueError: if a text does not have this format, or if a pattern occurs twice.
    """
    from relinear.settings.config_text import keeps_layer, parse_config_text
    from relinear.settings.messages import quoted

    mapping: dict[str, dict[str, Any] | None] = {}
    for text in texts:
        # The pattern ends at the first "=", unless that belongs to the setting, as in "hdpl:rank=8".
        head, equals, rest = text.partition("=")
        bare = not equals or (
            ":" in head and not head.endswith(("(?", "(?:")) and head.partition(":")[0].isidentifier()
        )
        pattern, setting = ("all-linear", text) if bare else (head, rest)
        if pattern in mapping:
            raise ValueError(f"pattern {quoted(pattern)} is given twice")
        mapping[pattern] = None if keeps_layer(setting) else parse_config_text(setting)
    return mapping


def operator_mapping(texts: list[str]) -> dict[str, Any]:
    """Return such texts as a mapping for ``replace_``. Raises ValueError, also for unknown operators."""
    from relinear.contract.operator import OperatorConfig

    return {p: None if s is None else OperatorConfig.from_dict(s) for p, s in parse_operators(texts).items()}


def parse_layers(text: str | None) -> list[int] | None:
    """Return ``"0,3,8-11"`` as a list of layer indices; None for all.

    Raises:
        ValueError: if a part is neither a number nor a range.
    """
    from relinear.settings.messages import quoted

    if text is None:
        return None
    indices: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(-?\d{1,4})(?:-(\d{1,4}))?", part.strip())
        layers = range(int(match[1]), int(match[2] or match[1]) + 1) if match else range(0)
        if not layers:  # also for a range whose end is before its start
            setting = f"--layers {quoted(text)}: {quoted(part.strip())}"
            raise ValueError(f"{setting} is neither a number nor a range like 4-11")
        indices += layers
    return indices


def load_model(name: str, overrides: dict[str, Any] | None = None, *, meta: bool = False, presets: bool = True) -> Any:
    """Return a preset or a saved model, in eval mode.

    Args:
        name: preset, directory or Hub name.
        overrides: fields of a preset's config.
        meta: build a preset without memory for its weights (to count parameters, not to run).
        presets: False if an untrained model would make no sense.

    Raises:
        ValueError: if there is no such model, or if a saved model has overrides.
        OSError: if the name is that of a directory, and there is none.
    """
    import torch

    import relinear
    from relinear.models import model_folder

    name = model_folder(name)
    if find_model(name, presets=presets) == "preset":
        with torch.device("meta" if meta else "cpu"):
            return relinear.from_preset(name, **(overrides or {})).eval()
    if overrides:
        raise ValueError(
            f"{name} is a saved model; only presets ({', '.join(relinear.models.preset_names())}) take --set"
        )
    path = Path(name).expanduser()
    return relinear.from_pretrained(path if path.exists() else name).eval()


def load_model_tokenizer(model: str, tokenizer: str | None, *, separates: bool = True) -> Any:
    """Return the tokenizer that the user named, or the model's; ``separates`` as in ``load_tokenizer``.

    Raises:
        ValueError: if there is none; the message says how to name one.
    """
    from relinear.data.tokenizers import load_tokenizer
    from relinear.models import model_folder

    folder = model_folder(model)
    try:
        return load_tokenizer(tokenizer or folder, separates=separates)
    except ValueError as error:
        if tokenizer:
            raise
        raise ValueError(f"{error}. Name the model's own with --tokenizer") from error


def find_model(name: str, *, presets: bool = True) -> str:
    """Return the model's source, from ``locate_model``; raise for a damaged directory, or a Hub name while offline."""
    from relinear.data.sources import hub_in_reach
    from relinear.hf.model_source import is_cached, missing_directory_message
    from relinear.models import locate_model
    from relinear.surgery.checkpoint import check_files

    source = locate_model(name, presets=presets)
    if source == "directory":
        check_files(Path(name).expanduser())
    if source == "hub" and not is_cached(name) and not hub_in_reach():
        raise FileNotFoundError(f"{missing_directory_message(name)}; and the Hugging Face Hub cannot be reached")
    return source


def execution(
    workers: int | None, executor: str | None, slurm: list[str] | None, partition: str | None = None
) -> dict[str, Any]:
    """Return ``compare``'s arguments for where runs execute. Raises ValueError for SLURM settings without SLURM."""
    from relinear.settings.yaml_settings import parse_overrides

    jobs = parse_overrides(slurm or [], "--slurm") | ({} if partition is None else {"slurm_partition": partition})
    if jobs and executor != "slurm":
        raise ValueError("--partition and --slurm need --executor slurm")
    return {"workers": workers, "executor": executor, "slurm": jobs}


def refuse(values: dict[str, Any], reason: str) -> None:
    """Raise ValueError with ``reason`` for the first option of ``values`` (by parameter) that was written."""
    if written := [name for name, value in values.items() if value is not None]:
        raise ValueError(f"--{written[0].replace('_', '-')} {reason}")


def parse_names(text: str | None) -> list[str]:
    """Return ``"a, b"`` as ["a", "b"]; None and empty texts are an empty list."""
    return [name.strip() for name in (text or "").split(",") if name.strip()]


def parse_numbers(option: str, text: str | None) -> list[int] | None:
    """Parse ``"0,1,2"``, the value of ``option``, into a list; None stays None. Raises ValueError for other texts."""
    from relinear.settings.messages import quoted

    try:
        return None if text is None else [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"{option} {quoted(text)}: write them as 0,1,2") from None


def named_entries(settings: list[str]) -> dict[str, str]:
    """Return name -> setting of entries; the name is the operator's kind, or the whole setting if a kind repeats.

    Raises:
        ValueError: if the same setting is given twice.
    """
    from relinear.settings.messages import quoted

    kinds = [setting.partition(":")[0].strip() for setting in settings]
    entries: dict[str, str] = {}
    for kind, setting in zip(kinds, settings, strict=True):
        words = re.split(r"[^A-Za-z0-9_.=+]+", setting)  # only characters that suit a folder's name
        name = kind if kinds.count(kind) == 1 else "-".join(filter(None, words))
        if name in entries:
            raise ValueError(f"the entry {quoted(setting)} is given twice")
        entries[name] = setting
    return entries
