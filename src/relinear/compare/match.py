"""Plan a comparison: search the rank, blocks or width that gives each entry the same parameters, FLOPs or bytes."""

import contextlib
import dataclasses
import json
import math
import warnings
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from relinear.compare.settings import CompareSettings
from relinear.contract.operator import OperatorConfig
from relinear.models import is_preset, preset_config
from relinear.surgery.packed import packed_bytes
from relinear.surgery.plan import plan
from relinear.surgery.summary import summary
from relinear.system.grouped import grouped
from relinear.training.run import build_model
from relinear.training.settings import TrainSettings

# largest factor by which operators, and widths, grow or shrink in the search
_MAX_FACTOR = 4096.0
_WIDTH_FACTOR = 8


@dataclasses.dataclass(frozen=True)
class ModelSize:
    """Size of a model.

    Attributes:
        parameters: number of parameters.
        flops: FLOPs of the forward pass for a token.
        bytes: size of the file of weights if it is stored in few bits, else 0.
        inactive_parameters: parameters that a token does not use, where tokens are routed.
        inactive_flops: FLOPs that routing saves a token.
    """

    parameters: int
    flops: int
    bytes: int = 0
    inactive_parameters: int = 0
    inactive_flops: int = 0

    def of(self, by: str) -> int:
        """Return the size that entries are matched ``by``."""
        return getattr(self, by)


@dataclasses.dataclass(frozen=True)
class SizedEntry:
    """An entry at its final size.

    Attributes:
        name: name of the entry.
        settings: training settings of the entry at this size.
        size: size of its model.
        size_mismatch: relative deviation from the target size; None if the entry was not matched.
        candidates: the entry in several bits, each at the width at which its file has the requested size.
    """

    name: str
    settings: TrainSettings
    size: ModelSize
    size_mismatch: float | None
    candidates: tuple["SizedEntry", ...] = ()


def skeleton(settings: TrainSettings, vocab_size: int | None) -> Any:
    """Return the model of ``settings`` with its operators. A preset is on the meta device: it has sizes, no weights.

    Raises:
        ValueError: if the model is unknown or cannot take the operators.
    """
    on_meta = torch.device("meta") if is_preset(settings.model) else contextlib.nullcontext()
    with on_meta, warnings.catch_warnings():  # of sizes that are only tried; what is trained warns of its own
        warnings.simplefilter("ignore")
        return build_model(settings, vocab_size)


def measure_size(settings: TrainSettings, vocab_size: int | None) -> ModelSize:
    """Return the parameters and the FLOPs per token of the model of ``settings``; builds it without weights."""
    model = skeleton(settings, vocab_size)
    table = summary(model)
    stored = packed_bytes(model, settings.bits) if settings.bits else 0
    return ModelSize(table.parameters, table.flops_per_token, stored, table.inactive_parameters, table.inactive_flops)


def resize_entry(
    settings: TrainSettings, vocab_size: int | None, *, by: str, target: int, resizing: str, tolerance: float, name: str
) -> SizedEntry:
    """Return an entry resized so that its model comes as near to ``target`` as it can.

    Args:
        settings: training settings of the entry, as written.
        vocab_size: size of the tokenizer's vocabulary.
        by: "parameters", "flops" or "bytes".
        target: the size to come near to.
        resizing: "operator" scales the operators through ``OperatorConfig.scaled``, "width" the model.
        tolerance: largest relative deviation allowed.
        name: name of the entry, for messages.

    Raises:
        ValueError: if no size comes within ``tolerance``; says how near it came and what else could be changed.
    """
    search = _SizeSearch(settings, vocab_size, by, target, name)
    if resizing == "operator":
        search.try_operator_scales()
    else:
        search.try_widths()
        if by == "bytes":
            search.try_mlp_widths(tolerance)
    best = search.nearest()[0]
    mismatch = best.size.of(by) / target - 1
    if abs(mismatch) > tolerance:
        advice = f"match.to={name} (its size as the target), or another resize"
        if by == "bytes":  # of which no entry keeps its own
            advice = "or give another --size"
        raise ValueError(
            f"{name}: no {'operator size' if resizing == 'operator' else 'model width'} gives {target:,} {by} within "
            f"{tolerance:.1%}; the nearest has {best.size.of(by):,} ({mismatch:+.1%}). "
            f"Set match.tolerance={math.ceil(100 * abs(mismatch)) / 100:g}, {advice}"
        )
    return best


@dataclasses.dataclass
class _SizeSearch:
    """Try sizes of an entry to come near ``target``; the arguments are those of ``resize_entry``."""

    settings: TrainSettings
    vocab_size: int | None
    by: str
    target: int
    name: str
    _tried: dict[str, SizedEntry] = dataclasses.field(default_factory=dict)

    def nearest(self) -> list[SizedEntry]:
        """Return what was tried, the nearest to the target first."""
        return sorted(self._tried.values(), key=lambda entry: abs(entry.size.of(self.by) - self.target))

    def _size(self, candidate: TrainSettings) -> int:
        """Return the size of the model of ``candidate``, built at most once."""
        key = json.dumps([candidate.operators, candidate.model_overrides], sort_keys=True)
        if key not in self._tried:
            size = measure_size(candidate, self.vocab_size)
            self._tried[key] = SizedEntry(self.name, candidate, size, size.of(self.by) / self.target - 1)
        return self._tried[key].size.of(self.by)

    def try_operator_scales(self) -> None:
        """Bisect over the scale of all operators; their sizes grow with it, in steps."""
        shapes = operator_shapes(self.settings, self.vocab_size)

        def size_at(scale: float) -> int:
            operators = scaled_operators(self.settings, shapes, scale, self.name)
            return self._size(self.settings.replace(operators=operators))

        low = high = 1.0
        while size_at(low) > self.target and low > 1 / _MAX_FACTOR:
            low /= 2
        while size_at(high) < self.target and high < _MAX_FACTOR:
            high *= 2
        for _ in range(24):  # beyond this, no rank below a million differs
            middle = math.sqrt(low * high)
            low, high = (middle, high) if size_at(middle) < self.target else (low, middle)

    def try_widths(self) -> None:
        """Bisect over widths of the model with the number of heads kept."""
        config = config_of_preset(self.settings, self.name)
        heads = config.num_attention_heads
        head_width = config.hidden_size // heads

        def first_that_fits(widths: list[int]) -> tuple[int, int] | None:
            for width in widths:
                with contextlib.suppress(ValueError):  # an operator in the model may not take this width
                    return width, self._size(at_width(self.settings, config, heads * width))
            return None

        widths = list(range(2 * max(1, round(head_width / _WIDTH_FACTOR / 2)), head_width * _WIDTH_FACTOR + 1, 2))
        while widths:
            lower, upper = widths[: len(widths) // 2], widths[len(widths) // 2 :]
            fitting = first_that_fits(upper)
            widths = lower
            if fitting is not None and fitting[1] <= self.target:
                widths = [width for width in upper if width > fitting[0]]
        if not self._tried:
            raise ValueError(f"{self.name}: its operators fit the model at no width")

    def try_mlp_widths(self, tolerance: float) -> None:
        """Try widths of the MLP, with which sizes grow evenly, at the nearest two until one is within ``tolerance``."""
        for entry in self.nearest()[:2]:
            config = config_of_preset(entry.settings, self.name)
            key = _mlp_width_key(config)
            width = getattr(config, key) or 4 * config.hidden_size

            def size_at(width: int, settings: TrainSettings = entry.settings, key: str = key) -> int:
                return self._size(settings.replace(model_overrides=dict(settings.model_overrides) | {key: width}))

            size = size_at(width)
            exact_width = width + width * (self.target - size) / (size_at(2 * width) - size)
            if exact_width > _WIDTH_FACTOR * width:
                continue
            for multiple in (32, 16, 8, 4, 2, 1):
                with contextlib.suppress(ValueError):  # an operator may not take this width
                    size = size_at(max(multiple, multiple * round(exact_width / multiple)))
                    if abs(size / self.target - 1) <= tolerance:
                        return


def operator_shapes(settings: TrainSettings, vocab_size: int | None) -> dict[str, list[tuple[int, int]]]:
    """Return the distinct (in, out) shapes of the layers that each pattern replaces."""
    replacements = plan(
        skeleton(settings.replace(operators={}), vocab_size),
        settings.operator_configs,
        layers=settings.layers,
        exclude=settings.exclude or None,
    ).replacements
    return grouped(dict.fromkeys((each.target.pattern, (each.in_features, each.out_features)) for each in replacements))


def scaled_operators(
    settings: TrainSettings, shapes: Mapping[str, list[tuple[int, int]]], scale: float, name: str
) -> dict[str, Any]:
    """Return ``settings.operators`` at ``scale`` times their sizes; an operator without a size stays unchanged.

    Args:
        settings: training settings of an entry.
        shapes: shapes of the layers by pattern, from ``operator_shapes``.
        scale: factor of the operators' sizes.
        name: name of the entry, for messages.
    """
    configs: Any = settings.operator_configs
    scaled = {
        pattern: _scaled_config(configs[pattern], shapes_of_pattern, scale, name).to_dict()
        for pattern, shapes_of_pattern in shapes.items()
    }
    return dict(settings.operators) | scaled


def _scaled_config(config: OperatorConfig, shapes: list[tuple[int, int]], scale: float, name: str) -> OperatorConfig:
    """Return the config at ``scale`` times its size that every layer of the pattern can take."""
    reasons = []
    for shape in shapes:
        if (candidate := config.scaled(*shape, scale)) is None:
            return config
        try:
            for other in shapes:
                candidate.check_shape(*other)
            return candidate
        except ValueError as error:
            reasons.append(str(error))
    raise ValueError(f"{name}: {config.kind} has no one size for all its layers: {reasons[-1]}")


def config_of_preset(settings: TrainSettings, name: str) -> Any:
    """Return the config of the model that an entry trains. Raises ValueError if it is not a preset."""
    if not is_preset(settings.model):
        raise ValueError(f"{name}: the width of {settings.model!r} cannot be changed, only that of presets")
    return preset_config(settings.model, **settings.model_overrides)


def at_width(settings: TrainSettings, config: Any, width: int) -> TrainSettings:
    """Return ``settings`` with the model, whose config is ``config``, at another width and its MLP in proportion."""
    overrides = dict(settings.model_overrides) | {"hidden_size": width}
    overrides.pop("n_embd", None)
    key = _mlp_width_key(config)
    if (mlp_width := getattr(config, key)) is not None:
        overrides[key] = max(8, 8 * round(mlp_width * width / config.hidden_size / 8))
    return settings.replace(model_overrides=overrides)


def _mlp_width_key(config: Any) -> str:
    """Return a config's name for the width of its MLP."""
    return "n_inner" if hasattr(config, "n_inner") else "intermediate_size"


# The whole comparison


def plan_comparison(recipe: CompareSettings, vocab_size: int | None) -> list[SizedEntry]:
    """Return every entry at the size at which it is trained.

    Args:
        recipe: recipe of the comparison.
        vocab_size: size of the tokenizer's vocabulary.

    Raises:
        ValueError: if a model cannot be built, or an entry cannot be matched within the tolerance.
    """
    match = recipe.match
    if match.by == "bytes":
        return [_sized_in_bytes(recipe, name, vocab_size) for name in recipe.entries]
    entries = [_sized_as_written(recipe, name, vocab_size) for name in recipe.entries]
    if match.by == "width":
        return entries
    if isinstance(match.to, int):
        return _entries_matched_to(recipe, entries, match.to, vocab_size)
    references = [entry for entry in entries if entry.name == match.to]
    if match.to is None:  # the first with operators whose size the others can have
        resizable = [entry for entry in entries if recipe.entries[entry.name].resizing != "fixed"]
        references = sorted(resizable, key=lambda entry: not entry.settings.operators)
    if not references:
        raise ValueError(f"match.by is {match.by!r}, but no entry can be resized: all are fixed or dense")
    errors: list[ValueError] = []
    for reference in references:
        try:
            return _entries_matched_to(recipe, entries, reference, vocab_size)
        except ValueError as error:
            errors.append(error)
    raise errors[0]


def _sized_as_written(recipe: CompareSettings, name: str, vocab_size: int | None) -> SizedEntry:
    """Return an entry at the size that it is written with."""
    settings = recipe.settings_of(name)
    try:
        return SizedEntry(name, settings, measure_size(settings, vocab_size), None)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def _entries_matched_to(
    recipe: CompareSettings, entries: list[SizedEntry], reference: SizedEntry | int, vocab_size: int | None
) -> list[SizedEntry]:
    """Return all entries, those that may be resized at the size of ``reference``, an entry or a number."""
    match = recipe.match
    results: list[SizedEntry] = []
    target = reference if isinstance(reference, int) else reference.size.of(match.by)
    resize = partial(resize_entry, vocab_size=vocab_size, by=match.by, target=target, tolerance=match.tolerance)
    for entry in entries:
        resizing = recipe.entries[entry.name].resizing
        if entry is reference:
            results.append(dataclasses.replace(entry, size_mismatch=0.0))
        elif resizing == "fixed":
            results.append(entry)
        else:
            results.append(resize(entry.settings, resizing=resizing, name=entry.name))
    return results


def _sized_in_bytes(recipe: CompareSettings, name: str, vocab_size: int | None) -> SizedEntry:
    """Return an entry in all bits for which some width (or scale of operators) gives a file of the requested size."""
    match: Any = recipe.match  # ``to`` is a number: several are a comparison each
    resize = partial(resize_entry, vocab_size=vocab_size, by="bytes", target=match.to, tolerance=match.tolerance)
    resizing = "operator" if recipe.entries[name].resize == "operator" else "width"
    candidates, errors = list[SizedEntry](), list[ValueError]()
    for bits in match.bits:
        settings = recipe.settings_of(name).replace(bits=bits)
        try:
            candidates.append(resize(settings, resizing=resizing, name=name))
        except ValueError as error:
            errors.append(error)
    if not candidates:
        raise errors[0]
    return dataclasses.replace(candidates[0], candidates=tuple(candidates))
