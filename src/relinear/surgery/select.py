"""Select the modules that patterns match, with PEFT's rules for names, layers, exclusions and a filter."""

import dataclasses
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch import nn

from relinear.contract.attachment import PART_PREFIX
from relinear.contract.linear_layers import is_embedding
from relinear.contract.operator import Operator, is_replaceable
from relinear.hf.model_layout import existing_layer_indices, layer_finder, output_head
from relinear.hf.peft_models import is_added_by_peft, stock_name, unwrapped
from relinear.settings.messages import did_you_mean, quoted
from relinear.settings.patterns import ALL_LINEAR, check_patterns, is_name, listed, matches

#: parameter -> the modules that hold it, with the parameter's name there
ParameterHolders = dict[nn.Parameter, list[tuple[str, nn.Module]]]

OUTPUT_HEAD = "output head"
READ_ELSEWHERE = "their weight is read from outside"
#: "parent class.layer" of transformers layers whose parent reads their weight without calling them
_READ_BY_PARENT = re.compile(
    r".*(ActDense\.(wo|fc2)|(Mixer|MambaLayer)\.(dt|x|out)_proj|Indexer\.weights_proj)"
    r"|RwkvSelfAttention\.output|RwkvFeedForward\.value|.*Mamba2?ForCausalLM\.lm_head"
)
_HEADS = frozenset({"lm_head", "score", "classifier", "embed_out", "qa_outputs"})


@dataclasses.dataclass(frozen=True)
class Target:
    """A module to replace.

    Attributes:
        name: its first name in the model.
        aliases: its other names.
        module: the module itself.
        pattern: the one that matched it.
    """

    name: str
    aliases: tuple[str, ...]
    module: nn.Module
    pattern: str


def _modules_with_names(model: nn.Module) -> dict[int, tuple[nn.Module, list[str]]]:
    """Return every module outside of operators, attachments and PEFT's adapters, with all its names."""
    modules: dict[int, tuple[nn.Module, list[str]]] = {}

    def walk(module: nn.Module, prefix: str) -> None:
        modules.setdefault(id(module), (module, []))[1].append(prefix)
        if isinstance(module, Operator):
            return
        for name, child in module._modules.items():
            if child is not None and not name.startswith(PART_PREFIX) and not is_added_by_peft(module, name):
                walk(child, f"{prefix}.{name}" if prefix else name)

    walk(model, "")
    return modules


def output_head_ids(model: Any) -> set[int]:
    """Return the ids of the output heads, which "all-linear" leaves out."""
    known_heads = {id(child) for name, child in unwrapped(model).named_children() if name in _HEADS}
    return known_heads | {id(output_head(model))}


def _embedding(model: Any) -> Any:
    """Return the model's token embedding, or the operator that replaces it; None if there is none."""
    getter = getattr(unwrapped(model), "get_input_embeddings", None)
    try:
        table = getter() if callable(getter) else None
    except NotImplementedError:  # a model that does not read tokens
        return None
    return table if is_embedding(table) or isinstance(table, Operator) else None


def reader_of_weight(model: nn.Module, name: str) -> str | None:
    """Return the parent's class if it reads ``.weight`` of the layer ``name``, which operators lack; else None."""
    parent, _, child = name.rpartition(".")
    class_name = type(model.get_submodule(parent)).__name__
    return class_name if _READ_BY_PARENT.fullmatch(f"{class_name}.{child}") else None


def parameter_holders(model: nn.Module) -> ParameterHolders:
    """Return the modules of ``model`` that hold each parameter."""
    holders: ParameterHolders = {}
    for name, module in model.named_modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                holders.setdefault(parameter, []).append((f"{name}.{key}" if name else key, module))
    return holders


def parameter_tied_to(holders: ParameterHolders, module: nn.Module, head: Any = None) -> str | None:
    """Return the name of a parameter outside of ``module`` and ``head`` tied to ``module``'s; None if there is none."""
    inside = {head, *module.modules()}
    tied = (name for parameter in module.parameters() for name, other in holders[parameter] if other not in inside)
    return next(tied, None)


def _wanted_layers(layer_of: Callable[[str], int | None], layers: Any, names: Iterable[str]) -> set[int] | None:
    """Return the argument ``layers`` as a set of indices; None for all layers."""
    if layers is None:
        return None
    present = {index for name in names if name and (index := layer_of(name)) is not None}
    if not present:
        raise ValueError("layers= was given, but the model has no list of decoder layers")
    return set(existing_layer_indices(layers, max(present) + 1))


def _no_match(pattern: str, named_modules: Iterable[tuple[nn.Module, list[str]]]) -> ValueError:
    modules = {name: module for module, names in named_modules for name in names if name}
    hit = next((name for name in modules if matches(pattern, name)), None) if pattern != ALL_LINEAR else None
    if hit is not None:
        return ValueError(
            f"pattern {quoted(pattern)} matches {hit!r}, a {type(modules[hit]).__name__}, which cannot be replaced: "
            "only nn.Linear, GPT-2's Conv1D and relinear operators can (not their subclasses)"
        )
    linear = sorted({part for name, module in modules.items() if is_replaceable(module) for part in _suffixes(name)})
    if not linear:
        return ValueError(f"pattern {quoted(pattern)} matches no module; the model has no linear layer")
    known = linear if pattern == ALL_LINEAR else [*linear, ALL_LINEAR]
    hint = did_you_mean(pattern, known, limit=8, cutoff=0.3)
    return ValueError(f"pattern {quoted(pattern)} matches no module; {hint}")


def _with_owners(name: str) -> Iterator[str]:
    """Yield the names of the modules that contain the module ``name``, and ``name``."""
    return itertools.accumulate(name.split("."), "{}.{}".format)


def _suffixes(name: str) -> Iterator[str]:
    """Yield the dotted suffixes of a name that do not begin with a number."""
    parts = name.split(".")
    for start in range(len(parts)):
        if not parts[start].isdigit():
            yield ".".join(parts[start:])


@dataclasses.dataclass(frozen=True)
class _Selection:
    """Match a model's modules with the arguments of ``select_targets``, which are checked."""

    model: nn.Module
    mapping: Mapping[str, Any]
    layers: set[int] | None
    excluded: list[str]
    filter_fn: Callable[[nn.Module, str], bool] | None
    head_ids: set[int]
    embedding: Any
    layer_of: Callable[[str], int | None]

    def matching_patterns(self, module: nn.Module, names: list[str]) -> list[str]:
        """Return the patterns that match ``module``; those for linear layers do not match an embedding."""
        if module is self.embedding:
            patterns = [p for p in self.mapping if p != ALL_LINEAR and is_name(p)]
        else:
            patterns = list(self.mapping)
        is_head = id(module) in self.head_ids
        aliases = _with_stock_names(names)
        return [p for p in patterns if (not is_head if p == ALL_LINEAR else any(matches(p, name) for name in aliases))]

    def reason_to_skip(self, module: nn.Module, names: list[str], hits: list[str]) -> str | None:
        """Return why ``module``, which the patterns ``hits`` match, is left alone; None if it is a target."""
        name = names[0]
        if not hits:
            return OUTPUT_HEAD if id(module) in self.head_ids else "no pattern names them"
        owners = [owner for alias in _with_stock_names(names) for owner in _with_owners(alias)]
        if any(matches(pattern, owner) for pattern in self.excluded for owner in owners):
            return "exclude="
        if self.layers is not None and not any(self.layer_of(alias) in self.layers for alias in names if alias):
            return "layers="
        if self.filter_fn is not None and not self.filter_fn(module, name):
            return "filter_fn="
        reader = reader_of_weight(self.model, name) if hits[0] == ALL_LINEAR and name else None
        return f"{READ_ELSEWHERE} ({reader})" if reader else None


def _with_stock_names(names: list[str]) -> list[str]:
    """Return ``names``, each followed by its name in a model without PEFT."""
    return [alias for name in names for alias in dict.fromkeys((name, stock_name(name)))]


def select_targets(
    model: nn.Module,
    mapping: Mapping[str, Any],
    *,
    layers: Iterable[int] | int | None = None,
    exclude: str | Iterable[str] | None = None,
    filter_fn: Callable[[nn.Module, str], bool] | None = None,
) -> tuple[list[Target], dict[str, str]]:
    """Return the modules that ``mapping`` matches, in the model's order, and why other linear layers are left alone.

    Raises:
        ValueError: for a pattern that is malformed or matches nothing, a layer that does not exist, or if no module
            remains.
    """
    check_patterns(mapping)
    modules = _modules_with_names(model)
    excluded = [] if exclude is None else listed(exclude, "exclude= takes a pattern or a list of patterns")
    all_names = [name for name, _ in model.named_modules(remove_duplicate=False) if name]
    for pattern in excluded:
        if not any(matches(pattern, name) for name in all_names):
            raise ValueError(f"exclude= {_no_match(pattern, modules.values())}")
    if filter_fn is not None and not callable(filter_fn):
        raise ValueError(f"filter_fn must be a function of (module, name), got {quoted(filter_fn)}")
    layer_of = layer_finder(model)
    wanted_layers = _wanted_layers(layer_of, layers, (name for _, names in modules.values() for name in names))
    embedding = _embedding(model)
    selection = _Selection(
        model, mapping, wanted_layers, excluded, filter_fn, output_head_ids(model), embedding, layer_of
    )
    used: set[str] = set()
    chosen: list[Target] = []
    skipped: dict[str, str] = {}
    for module, names in modules.values():
        if not is_replaceable(module) and module is not embedding:
            continue
        hits = selection.matching_patterns(module, names)
        used.update(hits)
        reason = selection.reason_to_skip(module, names, hits)
        if reason is None:
            chosen.append(Target(names[0], tuple(names[1:]), module, hits[0]))
        elif hits or module is not embedding:
            skipped[names[0]] = reason
    for pattern in mapping:
        if pattern not in used:
            raise _no_match(pattern, modules.values())
    if not chosen:
        raise ValueError("every matching module was left out by layers=, exclude= or filter_fn=: nothing to replace")
    return chosen, skipped
