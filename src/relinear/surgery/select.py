"""Which modules a mapping means: PEFT's rules for names, plus layers, exclusions and a filter."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch import nn

from relinear.core.config import layer_indices, shown
from relinear.core.operator import Operator, is_linear

__all__ = ["ALL_LINEAR", "Target", "check_patterns", "is_tied", "layer_index", "matches", "select_targets"]

ALL_LINEAR = "all-linear"
OWN_PREFIX = "relinear_"  # submodules that an attachment adds
_PLAIN = re.compile(r"[\w.\-]+")
_LONGEST_NAME = 200  # of a pattern that is compared with names
_HEADS = frozenset({"lm_head", "score", "classifier", "embed_out", "qa_outputs"})


@dataclasses.dataclass(frozen=True)
class Target:
    """A module to replace: its first name, every other name it goes by, and the pattern that chose it."""

    name: str
    aliases: tuple[str, ...]
    module: nn.Module
    pattern: str


def matches(pattern: str, name: str) -> bool:
    """PEFT's rule: a plain key is an exact or dotted-suffix name, anything else a regular expression in full."""
    if _PLAIN.fullmatch(pattern):
        return name == pattern or name.endswith(f".{pattern}")
    return re.fullmatch(pattern, name) is not None


def layer_index(model: nn.Module, name: str) -> int | None:
    """Index of the decoder layer that ``name`` lies in: its place in the outermost ModuleList above it, or None."""
    module = model
    for part in name.split("."):
        if isinstance(module, nn.ModuleList):
            return int(part)
        module = getattr(module, part)
    return None


def _named_aliases(model: nn.Module) -> dict[int, tuple[nn.Module, list[str]]]:
    """Every module outside operators and attachments, with all the names it goes by."""
    found: dict[int, tuple[nn.Module, list[str]]] = {}

    def walk(module: nn.Module, prefix: str) -> None:
        found.setdefault(id(module), (module, []))[1].append(prefix)
        if isinstance(module, Operator):
            return
        for name, child in module._modules.items():
            if child is not None and not name.startswith(OWN_PREFIX):
                walk(child, f"{prefix}.{name}" if prefix else name)

    walk(model, "")
    return found


def _heads(model: Any) -> set[int]:
    """Identities of the output heads that "all-linear" leaves out."""
    getter = getattr(model, "get_output_embeddings", None)
    head = getter() if callable(getter) else None
    heads = {id(child) for name, child in model.named_children() if name in _HEADS}
    return heads | ({id(head)} if head is not None else set())


def is_tied(model: nn.Module, module: nn.Module) -> str | None:
    """Name of another parameter slot that shares memory with ``module``'s parameters (a tied embedding), or None."""
    own = {id(p) for p in module.parameters()}
    inside = {id(m) for m in module.modules()}
    for name, other in model.named_modules():
        if id(other) in inside:
            continue
        for key, parameter in other._parameters.items():
            if parameter is not None and id(parameter) in own:
                return f"{name}.{key}" if name else key
    return None


def check_patterns(patterns: Iterable[Any]) -> None:
    """Raise ValueError for a pattern that is no text, empty, or no valid regular expression."""
    for pattern in patterns:
        if not isinstance(pattern, str) or not pattern:
            raise ValueError(f"a pattern must be a non-empty string, got {shown(pattern)}")
        if pattern != ALL_LINEAR and not _PLAIN.fullmatch(pattern):
            try:
                re.compile(pattern)
            except (re.error, RecursionError, OverflowError) as error:
                raise ValueError(f"pattern {shown(pattern)} is no valid regular expression: {error}") from error


def _check_layers(model: nn.Module, layers: Iterable[int] | int | None, names: Iterable[str]) -> set[int] | None:
    if layers is None:
        return None
    wanted = layer_indices(layers)
    known = {index for name in names if name and (index := layer_index(model, name)) is not None}
    if not known:
        raise ValueError("layers= was given, but the model has no list of decoder layers")
    count = max(known) + 1
    for index in wanted:
        if not -count <= index < count:
            raise ValueError(f"layer {index!r} does not exist: the model has {count} layers (0 to {count - 1})")
    return {index % count for index in wanted}


def _no_match(pattern: str, found: Iterable[tuple[nn.Module, list[str]]]) -> ValueError:
    modules = {name: module for module, names in found for name in names if name}
    hit = next((name for name in modules if matches(pattern, name)), None) if pattern != ALL_LINEAR else None
    if hit is not None:
        return ValueError(
            f"pattern {shown(pattern)} matches {hit!r}, a {type(modules[hit]).__name__}, which cannot be replaced: "
            "only nn.Linear, GPT-2's Conv1D and relinear operators can (not their subclasses)"
        )
    linear = sorted({part for name, module in modules.items() if is_linear(module) for part in _suffixes(name)})
    known = [*linear, ALL_LINEAR] if linear and pattern != ALL_LINEAR else linear
    close = difflib.get_close_matches(pattern[:_LONGEST_NAME], known, n=3, cutoff=0.3) or linear[:8]
    return ValueError(
        f"pattern {shown(pattern)} matches no module; nearest: {', '.join(close) or 'none, no linear layer'}"
    )


def _patterns(exclude: Any) -> list[str]:
    """``exclude=`` as a list of patterns. Raises ValueError where it is neither a pattern nor several."""
    if exclude is None or isinstance(exclude, str):
        return [] if exclude is None else [exclude]
    if not isinstance(exclude, Iterable):
        raise ValueError(f"exclude= takes a pattern or a list of patterns, got {shown(exclude)}")
    return list(exclude)


def _check_excluded(model: nn.Module, excluded: list[str], found: Iterable[tuple[nn.Module, list[str]]]) -> None:
    """Refuse an ``exclude=`` that leaves out nothing: a name that is not there, or of a module around the layers."""
    for pattern in excluded:
        named = model.named_modules(remove_duplicate=False)
        hits = {name: module for name, module in named if name and matches(pattern, name)}
        if not hits:
            raise ValueError(f"exclude= {_no_match(pattern, found)}")
        if any(is_linear(module) for module in hits.values()):
            continue
        around = [name for name, module in hits.items() if any(is_linear(child) for child in module.modules())]
        if around:
            plain = _PLAIN.fullmatch(pattern) is not None
            inside = rf".*\b{re.escape(pattern)}\..*" if plain else rf"({pattern})\..*"
            raise ValueError(
                f"exclude={shown(pattern)} names {around[0]!r} and not the layers in it, so it would leave out none; "
                f"to leave out all of them write exclude={shown(inside)}"
            )


def _suffixes(name: str) -> Iterator[str]:
    parts = name.split(".")
    for start in range(len(parts)):
        if not parts[start].isdigit():
            yield ".".join(parts[start:])


def select_targets(
    model: nn.Module,
    mapping: Mapping[str, Any],
    *,
    layers: Iterable[int] | int | None = None,
    exclude: str | Iterable[str] | None = None,
    filter_fn: Callable[[nn.Module, str], bool] | None = None,
) -> list[Target]:
    """The modules that ``mapping`` means, in the model's order, each once with all its names.

    Raises:
        ValueError: for a pattern that is malformed or matches nothing, a layer that does not exist, or no target left.
    """
    check_patterns(mapping)
    found = _named_aliases(model)
    heads = _heads(model)
    excluded = _patterns(exclude)
    check_patterns(excluded)
    _check_excluded(model, excluded, found.values())
    if filter_fn is not None and not callable(filter_fn):
        raise ValueError(f"filter_fn must be a function of (module, name), got {shown(filter_fn)}")
    wanted_layers = _check_layers(model, layers, (name for _, names in found.values() for name in names))
    used: set[str] = set()
    chosen: list[Target] = []
    for module, names in found.values():
        if not is_linear(module):
            continue
        hits = [
            p
            for p in mapping
            if (id(module) not in heads if p == ALL_LINEAR else any(matches(p, name) for name in names))
        ]
        used.update(hits)
        if (
            not hits
            or any(matches(p, name) for p in excluded for name in names)
            or (wanted_layers is not None and not any(layer_index(model, n) in wanted_layers for n in names if n))
            or (filter_fn is not None and not filter_fn(module, names[0]))
        ):
            continue
        chosen.append(Target(names[0], tuple(names[1:]), module, hits[0]))
    for pattern in mapping:
        if pattern not in used:
            raise _no_match(pattern, found.values())
    if not chosen:
        raise ValueError("every matching module was left out by layers=, exclude= or filter_fn=: nothing to replace")
    return chosen
