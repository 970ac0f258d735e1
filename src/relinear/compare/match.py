"""Plan a comparison: search the rank, blocks or width that gives each entry the same parameters, FLOPs or bytes."""

import contextlib
import dataclasses
import json
import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from relinear.compare.settings import CompareSettings
from relinear.contract.operator import OperatorConfig
from relinear.models import preset_config, preset_names
from relinear.surgery.packed import packed_bytes
from relinear.surgery.plan import plan
from relinear.surgery.summary import summary
from relinear.system.progress import Progress, ProgressCallback, no_progress
from relinear.training.run import build_model
from relinear.training.settings import TrainSettings

# A size may grow or shrink by this factor in the search.
_LARGEST_FACTOR = 4096.0
_WIDTH_FACTOR = 8


@dataclasses.dataclass(frozen=True)
class ModelSize:
    """Hold a model's parameters and forward FLOPs per token, and its file's bytes if it is stored in few bits.

    inactive_*: what one token does not use of the parameters, and the FLOPs that it is spared, where tokens are routed.
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
class Planned:
    """Hold an entry at its final size. size_mismatch: from the target of matching; None if it was not matched.

    candidates: the entry in several bits, each at the width that makes its file as large as asked.
    """

    name: str
    settings: TrainSettings
    size: ModelSize
    size_mismatch: float | None
    candidates: tuple["Planned", ...] = ()


def skeleton(settings: TrainSettings, vocab_size: int | None) -> Any:
    """Return the model of ``settings`` with its operators. A preset is on the meta device: it has sizes, no weights.

    Raises:
        ValueError: if the model is unknown or cannot take the operators.
    """
    on_meta = torch.device("meta") if settings.model in preset_names() else contextlib.nullcontext()
    with on_meta, warnings.catch_warnings():  # of sizes that are only tried; what is trained warns of its own
        warnings.simplefilter("ignore")
        return build_model(settings, vocab_size)


def measure_size(settings: TrainSettings, vocab_size: int | None) -> ModelSize:
    """Return parameters and FLOPs a token of the model of ``settings``; builds it without weights."""
    model = skeleton(settings, vocab_size)
    table = summary(model)
    stored = packed_bytes(model, settings.bits) if settings.bits else 0
    return ModelSize(table.parameters, table.flops_per_token, stored, table.inactive_parameters, table.inactive_flops)


def matched(
    settings: TrainSettings, vocab_size: int | None, *, by: str, target: int, resizing: str, tolerance: float, name: str
) -> Planned:
    """Return an entry resized so that its model comes as near to ``target`` as it can.

    Args:
        settings: as written.
        vocab_size: of the tokenizer.
        by: "parameters", "flops" or "bytes".
        target: how many of them.
        resizing: "operator" scales the operators through ``OperatorConfig.scaled``, "width" the model.
        tolerance: largest relative deviation allowed.
        name: of the entry, for messages.

    Raises:
        ValueError: if no size comes within ``tolerance``; says how near it came and what else could be changed.
    """
    tried: dict[str, Planned] = {}

    def measure(candidate: TrainSettings) -> float:
        key = json.dumps([candidate.operators, candidate.model_overrides], sort_keys=True)
        if key not in tried:
            size = measure_size(candidate, vocab_size)
            tried[key] = Planned(name, candidate, size, size.of(by) / target - 1)
        return tried[key].size.of(by)

    if resizing == "operator":
        _try_operator_scales(settings, vocab_size, measure, target, name)
    else:
        _try_widths(settings, measure, target, name, tolerance if by == "bytes" else None)
    best = min(tried.values(), key=lambda planned: abs(planned.size.of(by) - target))
    mismatch = best.size.of(by) / target - 1
    if abs(mismatch) > tolerance:
        by_width = ", resize: width" * (resizing == "operator")
        advice = f"match.to={name} (its size as the target){by_width} or resize: fixed"
        if by == "bytes":  # of which no entry keeps its own
            advice = f"give another --size{by_width}"
        raise ValueError(
            f"{name}: no {'operator size' if resizing == 'operator' else 'model width'} gives {target:,} {by} within "
            f"{tolerance:.1%}; the nearest has {best.size.of(by):,} ({mismatch:+.1%}). "
            f"Set match.tolerance={math.ceil(100 * abs(mismatch)) / 100:g}, {advice}"
        )
    return best


def _try_operator_scales(
    settings: TrainSettings, vocab_size: int | None, measure: Callable[[TrainSettings], float], target: int, name: str
) -> None:
    """Bisect over the scale of all operators; their sizes grow with it, in steps."""
    shapes = operator_shapes(settings, vocab_size)

    def size_at(scale: float) -> float:
        return measure(settings.replace(operators=scaled_operators(settings, shapes, scale, name)))

    low = high = 1.0
    while size_at(low) > target and low > 1 / _LARGEST_FACTOR:
        low /= 2
    while size_at(high) < target and high < _LARGEST_FACTOR:
        high *= 2
    for _ in range(24):  # beyond this, no rank below a million differs
        middle = math.sqrt(low * high)
        low, high = (middle, high) if size_at(middle) < target else (low, middle)


def operator_shapes(settings: TrainSettings, vocab_size: int | None) -> dict[str, list[tuple[int, int]]]:
    """Return the distinct (in, out) shapes of the layers that each pattern replaces."""
    replacements = plan(
        skeleton(settings.replace(operators={}), vocab_size),
        settings.operator_configs,
        layers=settings.layers,
        exclude=settings.exclude or None,
    ).replacements
    shapes: dict[str, list[tuple[int, int]]] = {}
    for replacement in replacements:
        shape = (replacement.in_features, replacement.out_features)
        shapes_of_pattern = shapes.setdefault(replacement.target.pattern, [])
        if shape not in shapes_of_pattern:
            shapes_of_pattern.append(shape)
    return shapes


def scaled_operators(
    settings: TrainSettings, shapes: Mapping[str, list[tuple[int, int]]], scale: float, name: str
) -> dict[str, Any]:
    """Return ``settings.operators`` at ``scale`` times their sizes; an operator without a size stays unchanged.

    Args:
        shapes: from ``operator_shapes``. name: of the entry, for messages.
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


def _try_widths(
    settings: TrainSettings,
    measure: Callable[[TrainSettings], float],
    target: int,
    name: str,
    tolerance: float | None = None,
) -> None:
    """Bisect over widths with the number of heads kept.

    With ``tolerance`` the MLP's width is changed, too, where the model's width has too coarse steps.
    """
    config = config_of_preset(settings, name)
    heads = config.num_attention_heads
    head_width = config.hidden_size // heads
    sizes: dict[int, float] = {}  # by the width of a head

    def first_that_fits(widths: Iterable[int]) -> int | None:
        for width in widths:
            with contextlib.suppress(ValueError):  # an operator in the model may not take this width
                sizes[width] = measure(at_width(settings, config, heads * width))
                return width
        return None

    widths = list(range(2 * max(1, round(head_width / _WIDTH_FACTOR / 2)), head_width * _WIDTH_FACTOR + 1, 2))
    while widths:
        lower, upper = widths[: len(widths) // 2], widths[len(widths) // 2 :]
        width = first_that_fits(upper)
        widths = lower if width is None or sizes[width] > target else [other for other in upper if other > width]
    if tolerance is not None:
        nearest = sorted(sizes, key=lambda width: abs(sizes[width] - target))[:2]
        any(_try_mlp_widths(at_width(settings, config, heads * n), measure, target, tolerance) for n in nearest)


def _try_mlp_widths(
    settings: TrainSettings, measure: Callable[[TrainSettings], float], target: int, tolerance: float
) -> bool:
    """Try widths of the MLP, with which sizes grow evenly: the roundest within ``tolerance``. Return if one is."""
    config = config_of_preset(settings, "")
    key, width = _mlp_width_key(config), getattr(config, _mlp_width_key(config)) or 4 * config.hidden_size

    def size_at(value: int) -> float:
        return measure(settings.replace(model_overrides=dict(settings.model_overrides) | {key: value}))

    size = size_at(width)
    exact_width = width + width * (target - size) / (size_at(2 * width) - size)
    for multiple in (32, 16, 8, 4, 2, 1):
        with contextlib.suppress(ValueError):  # an operator may not take this width
            if abs(size_at(max(multiple, multiple * round(exact_width / multiple))) / target - 1) <= tolerance:
                return True
    return False


def config_of_preset(settings: TrainSettings, name: str) -> Any:
    """Return the config of the model that an entry trains. Raises ValueError if it is not a preset."""
    if settings.model not in preset_names():
        raise ValueError(f"{name}: the width of {settings.model!r} cannot be changed, only that of presets")
    return preset_config(settings.model, **settings.model_overrides)


def at_width(settings: TrainSettings, config: Any, width: int) -> TrainSettings:
    """Return ``settings`` with the model at another width, to which its MLP is scaled; ``config`` is the model's."""
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


def plan_comparison(
    recipe: CompareSettings, vocab_size: int | None, on_progress: ProgressCallback = no_progress
) -> list[Planned]:
    """Return every entry at the size at which it is trained.

    Args:
        recipe: what to compare.
        vocab_size: of the tokenizer.
        on_progress: called before each entry is sized.

    Raises:
        ValueError: if a model cannot be built, or an entry cannot be matched within the tolerance.
    """
    if recipe.match.by == "bytes":
        return [_planned_in_bytes(recipe, name, vocab_size, on_progress) for name in recipe.entries]
    planned = [_planned_as_written(recipe, name, vocab_size, on_progress) for name in recipe.entries]
    if recipe.match.by == "width":
        return planned
    if isinstance(recipe.match.to, int):
        return _matched_to(recipe, planned, recipe.match.to, vocab_size, on_progress)
    resizable = [entry for entry in planned if recipe.entries[entry.name].resizing != "fixed"]
    references = [entry for entry in planned if entry.name == recipe.match.to]
    references = references or sorted(resizable, key=lambda entry: not entry.settings.operators)
    if not references:
        raise ValueError(f"match.by is {recipe.match.by!r}, but no entry can be resized: all are fixed or dense")
    errors: list[ValueError] = []
    for reference in references:  # the first whose size the others can have
        try:
            return _matched_to(recipe, planned, reference, vocab_size, on_progress)
        except ValueError as error:
            errors.append(error)
    raise errors[0]


def _planned_as_written(
    recipe: CompareSettings, name: str, vocab_size: int | None, on_progress: ProgressCallback
) -> Planned:
    """Return an entry at the size that it is written with."""
    on_progress(Progress(f"sizing {name}", stage="match"))
    settings = recipe.settings_of(name)
    try:
        return Planned(name, settings, measure_size(settings, vocab_size), None)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def _matched_to(
    recipe: CompareSettings,
    planned: list[Planned],
    reference: Planned | int,
    vocab_size: int | None,
    on_progress: ProgressCallback,
) -> list[Planned]:
    """Return every entry that may be resized at the size of ``reference``, one of them or a number."""
    match = recipe.match
    target = reference if isinstance(reference, int) else reference.size.of(match.by)

    def resized(entry: Planned) -> Planned:
        resizing = recipe.entries[entry.name].resizing
        if entry is reference:
            return dataclasses.replace(entry, size_mismatch=0.0)
        if resizing == "fixed":
            return entry
        on_progress(Progress(f"matching {entry.name} by {match.by}", stage="match"))
        requested: Any = {"by": match.by, "target": target, "tolerance": match.tolerance, "name": entry.name}
        return matched(entry.settings, vocab_size, resizing=resizing, **requested)

    return [resized(entry) for entry in planned]


def _planned_in_bytes(
    recipe: CompareSettings, name: str, vocab_size: int | None, on_progress: ProgressCallback
) -> Planned:
    """Return an entry in all bits for which some width (or scale of operators) gives a file of the requested size."""
    match, settings = recipe.match, recipe.settings_of(name)
    resizing = "operator" if recipe.entries[name].resize == "operator" else "width"
    candidates, errors = list[Planned](), list[ValueError]()
    requested: Any = {"by": "bytes", "target": match.to, "tolerance": match.tolerance, "name": name}
    for bits in match.bits:
        on_progress(Progress(f"sizing {name} in {bits} bits", stage="match"))
        try:
            candidates.append(matched(settings.replace(bits=bits), vocab_size, resizing=resizing, **requested))
        except ValueError as error:
            errors.append(error)
    if not candidates:
        raise errors[0]
    return dataclasses.replace(candidates[0], candidates=tuple(candidates))
