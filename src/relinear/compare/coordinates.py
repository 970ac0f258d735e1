"""How large activations are against the width of a model, over its first steps: whether a learning rate can transfer.

A model is built at several widths, all of heads of one size, in the standard and in the maximal update parametrisation,
and trained for a few steps on one batch. Where activations, or what training has added to them, grow or shrink with the
width, the rate that is best at one width is not at another.
"""

# Legend: B batch, T tokens, D width of the residual stream

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from relinear.core.anatomy import decoder_layers, paths
from relinear.core.modes import watching
from relinear.data import prepare_data
from relinear.models import preset_config, preset_names
from relinear.pages.blocks import Block, Cell, Chart, Row, Section, Table, Text
from relinear.pages.drawn import save_panels
from relinear.pages.figures import PALETTE, Axis, Panel, Series, blend
from relinear.pages.records import about, picture_of, read_values, what_ran
from relinear.system.text import columns
from relinear.train.optim import build_optimizer
from relinear.train.run import build_model
from relinear.train.settings import TrainSettings

PARAMETRIZATIONS = ("standard", "mup")
#: what is measured, in the order of a forward pass
KINDS = ("residual stream", "attention output", "MLP output", "logits")
#: the largest over the smallest activation of all widths, up to which it counts as flat
FLAT = 2.0


def check_coordinates(
    settings: TrainSettings,
    widths: Sequence[int],
    *,
    steps: int = 6,
    seeds: Sequence[int] = (0, 1, 2),
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Any]:
    """Activations of ``settings.model`` at several widths, over the first steps, in both parametrisations.

    Every step is on the same batch, at the full learning rate, in float32. The root mean square is over tokens and
    channels, and over the layers of a kind.

    Args:
        settings: of a preset with its operators; ``parametrization`` and ``seed`` are set here.
        widths: at least two, each a multiple of the size of a head.
        steps: optimiser steps.
        seeds: of the weights; the batch is the same.
        on_progress: told how many models of how many are done.

    Returns:
        ``parametrizations`` -> kind -> ``scale`` and ``change`` (since the start), each a list over widths of lists
        over steps 0, 1, ... (geometric means over seeds), and ``spread``: of the last step's scale the largest over the
        smallest; None where it has left the finite numbers. ``flat``: whether each parametrisation has no spread above
        ``FLAT``. Beside them what was asked.

    Raises:
        ValueError: if the model is no preset, a width has no whole number of heads, an operator cannot take one, or the
            text is too short for the batch.
    """
    widths = sorted(set(widths))
    if len(widths) < 2 or steps < 1 or not seeds:
        raise ValueError(f"expected at least two widths, one step and one seed, got {widths}, {steps} and {seeds}")
    models = {width: at_heads(settings.updated(dtype="float32", device="cpu"), width) for width in widths}
    data = prepare_data(settings.data)
    with torch.device("meta"):  # what cannot be built is said before anything is computed
        for sized in models.values():
            build_model(sized, data.vocab_size)
    if len(data.train) < settings.batch_size:
        there = f"{len(data.train)} sequences of {settings.data.sequence_length} tokens to train on"
        raise ValueError(f"the text has {there}, {settings.batch_size} are asked for; give more text, or ask for less")
    batch = torch.stack([data.train[index]["input_ids"] for index in range(settings.batch_size)])
    found: dict[str, Any] = {}
    total = len(PARAMETRIZATIONS) * len(widths) * len(seeds)
    for name in PARAMETRIZATIONS:
        runs: list[list[_Run]] = []
        for sized in models.values():
            runs.append([])
            for seed in seeds:
                one = sized.updated(parametrization=name, seed=seed)
                runs[-1].append(_run(build_model(one, data.vocab_size), one, batch, steps))
                on_progress(sum(map(len, runs)) + len(found) * len(widths) * len(seeds), total)
        found[name] = {kind: _summary(runs, kind) for kind in KINDS}
    return {
        "model": settings.model,
        "operators": settings.operators,
        "attachments": list(settings.attachments),
        "widths": widths,
        "base_width": settings.parametrization_base_width,
        "learning_rate": settings.learning_rate,
        "batch": list(batch.shape),
        "steps": steps,
        "seeds": list(seeds),
        "parametrizations": found,
        "flat": {name: is_flat(found[name]) for name in PARAMETRIZATIONS},
    }


def is_flat(kinds: Mapping[str, Mapping[str, Any]]) -> bool:
    """Return whether no kind of activation is more than ``FLAT`` times as large at one width as at another."""
    return all(kind["spread"] is not None and kind["spread"] <= FLAT for kind in kinds.values())


def at_heads(settings: TrainSettings, width: int) -> TrainSettings:
    """``settings`` with a preset at another width: heads of the same size, an MLP in proportion.

    Raises:
        ValueError: if the model is no preset, the width is no multiple of a head's size, or its heads cannot share keys
            and values as those of the preset do.
    """
    if settings.model not in preset_names():
        known = ", ".join(preset_names())
        raise ValueError(f"{settings.model!r} has the one width it was saved with; give a preset ({known})")
    config = preset_config(settings.model, **settings.model_overrides)
    head = config.hidden_size // config.num_attention_heads
    if width < head or width % head:
        raise ValueError(
            f"width {width} is no multiple of {head}, the size of a head of {settings.model}; give such widths, or "
            "another number of heads (num_attention_heads)"
        )
    own = {config.attribute_map.get(key, key): value for key, value in settings.model_overrides.items()}
    sizes = {"hidden_size": width, "num_attention_heads": width // head}
    inner = "n_inner" if hasattr(config, "n_inner") else "intermediate_size"
    if getattr(config, inner) is not None:
        sizes[inner] = round(getattr(config, inner) * width / config.hidden_size)
    groups = getattr(config, "num_key_value_heads", None)
    if groups is not None:
        sizes["num_key_value_heads"] = shared = max(1, groups * width // config.hidden_size)
        if width // head % shared:
            raise ValueError(
                f"width {width} has {width // head} heads, which {shared} heads of keys and values cannot serve "
                f"(num_key_value_heads={groups} at width {config.hidden_size}); give another width"
            )
    return settings.updated(model_overrides=own | {config.attribute_map.get(k, k): v for k, v in sizes.items()})


#: by kind, a list over steps of (scale, change since the start)
_Run = dict[str, list[tuple[float, float]]]


def _run(model: Any, settings: TrainSettings, batch: Tensor, steps: int) -> _Run:
    """Train on ``batch`` (B, T) and note activations before every step and after the last."""
    torch.manual_seed(settings.seed)  # of noise that operators draw
    optimizer = build_optimizer(model.train(), settings)
    model.config.use_cache = False
    with _recording(model) as recorded:
        start: dict[str, list[Tensor]] = {}
        noted: _Run = {kind: [] for kind in KINDS}
        for step in range(steps + 1):
            recorded.clear()
            output = model(input_ids=batch, labels=batch)
            recorded["logits"] = [output.logits.detach()]
            start = start or dict(recorded)
            for kind in KINDS:
                changes = [now - before for now, before in zip(recorded[kind], start[kind], strict=True)]
                noted[kind].append((_rms(recorded[kind]), _rms(changes)))
            if step < steps:
                optimizer.zero_grad()
                output.loss.backward()
                if settings.max_grad_norm:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), settings.max_grad_norm)
                optimizer.step()
    return noted


@contextlib.contextmanager
def _recording(model: nn.Module) -> Iterator[dict[str, list[Tensor]]]:
    """What layers and sub-blocks return while a ``with`` block runs, by kind, in order."""
    found: dict[str, list[Tensor]] = {}

    def note(kind: str, module: nn.Module, args: Any, output: Any) -> None:
        value = output[0] if isinstance(output, tuple) else output
        found.setdefault(kind, []).append(value.detach())

    modules = [(KINDS[0], layer) for layer in decoder_layers(model)]
    modules += [(KINDS[1] if path.role == "attention" else KINDS[2], path.module) for path in paths(model)]
    with watching(modules, note):
        yield found


def _rms(values: Sequence[Tensor]) -> float:
    return math.sqrt(sum(float(value.square().mean()) for value in values) / len(values))


def _summary(runs: Sequence[Sequence[_Run]], kind: str) -> dict[str, Any]:
    """Of the runs of every width (of every seed): geometric means over seeds, and the spread over widths."""
    scale, change = (
        [
            [_mean([step[place] for step in steps]) for steps in zip(*(run[kind] for run in seeds), strict=True)]
            for seeds in runs
        ]
        for place in (0, 1)
    )
    return {"scale": scale, "change": change, "spread": _spread([steps[-1] for steps in scale])}


def _mean(values: Sequence[float]) -> float | None:
    """The geometric mean, None where training has left the finite numbers."""
    if not all(map(math.isfinite, values)):
        return None
    return math.exp(sum(map(math.log, values)) / len(values)) if min(values) > 0 else 0.0


def _spread(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return max(known) / min(known) if len(known) == len(values) and min(known) > 0 else None


# The table, the figure and the page


FILE = "coordinates.json"
_STEM = "coordinates"
#: colours of the first and the last step
_EARLY, _LATE = (0xC9, 0xD9, 0x4B), (0x44, 0x0A, 0x54)
_PAGE_COLOURS = dict(zip(PARAMETRIZATIONS, PALETTE[1::-1], strict=True))
_HOW_TO_READ = (
    "The root mean square of what each kind of module returns, over tokens and channels, at every width: flat lines "
    "mean that a learning rate serves all widths. The factor is the largest over the smallest after the last step. In "
    "the maximal update parametrisation the logits of a fresh model fall with the root of the width, by design."
)


def coordinates_text(found: Mapping[str, Any]) -> str:
    """Return a line for every kind of activation, and what follows for each parametrisation."""
    first, last, shown = found["widths"][0], found["widths"][-1], _table(found)
    lines = [f"largest / smallest of widths {first} to {last}, last step"]
    lines.append(columns([shown.head, *([cell.text for cell in row.shown] for row in shown.rows)]))
    return "\n".join([*lines, *(f"{name}: {_verdict(found, name)}" for name in PARAMETRIZATIONS)])


def _table(found: Mapping[str, Any]) -> Table:
    rows = []
    for kind in KINDS:
        spreads = [found["parametrizations"][name][kind]["spread"] for name in PARAMETRIZATIONS]
        rows.append(Row([kind, *(Cell(_factor(spread), spread) for spread in spreads)]))
    return Table(["activation", *(f"{name}: factor" for name in PARAMETRIZATIONS)], rows)


def _verdict(found: Mapping[str, Any], name: str) -> str:
    grown = found["widths"][-1] / found["widths"][0]
    over = f"over {grown:g} times the width"
    if found["flat"][name]:
        return f"flat within a factor of {FLAT:g} {over}"
    kinds = found["parametrizations"][name]
    worst = max(KINDS, key=lambda kind: kinds[kind]["spread"] or math.inf)
    return f"not flat {over}: {worst} by a factor of {_factor(kinds[worst]['spread'])}"


def _factor(spread: float | None) -> str:
    return "beyond numbers" if spread is None else f"{spread:.2f}"


def write_plot(found: Mapping[str, Any], out: str | Path) -> None:
    """``coordinates.png`` and ``.svg`` in ``out``: a row a parametrisation, a panel a kind, a line a step."""
    save_panels([_steps(found, name, kind) for name in PARAMETRIZATIONS for kind in KINDS], Path(out) / _STEM)


def _steps(found: Mapping[str, Any], name: str, kind: str) -> Panel:
    values, shown = found["parametrizations"][name][kind], []
    for step in range(found["steps"] + 1):
        shade = blend(_EARLY, _LATE, step / found["steps"])
        heights = [math.nan if scale[step] is None else scale[step] for scale in values["scale"]]
        shown.append(Series(name=f"step {step}", colour=shade, x=found["widths"], y=heights, size=5))
    return Panel(shown, *_axes(found["widths"]), title=f"{name}: {kind} (factor {_factor(values['spread'])})")


def _axes(widths: Sequence[int]) -> tuple[Axis, Axis]:
    ticks = {float(width): f"{width}" for width in widths}
    return Axis(title="width", log=True, ticks=ticks), Axis(title="root mean square", log=True)


def coordinates_section(directory: Path) -> Section:
    """What a page says of the check in ``directory``. Raises as ``read_values``; LookupError for a damaged file."""
    found = read_values(directory / FILE)
    said = "; ".join(f"{name}: {_verdict(found, name)}" for name in PARAMETRIZATIONS)
    blocks: list[Block] = [
        Text(f"{said}.", lead=True),
        *(_figure(found, kind) for kind in KINDS),
        Text(_HOW_TO_READ, soft=True),
        _table(found),
        Chart("All steps: a row a parametrisation, a line a step.", image=picture_of(directory / _STEM)),
        *what_ran(found, {"operators": str(found["operators"] or "none"), "base width": str(found["base_width"])}),
    ]
    return Section(f"Coordinates of {found['model']}", "check-coordinates", blocks, _PAGE_COLOURS, about(found))


def _figure(found: Mapping[str, Any], kind: str) -> Chart:
    shown = []
    for number, name in enumerate(PARAMETRIZATIONS):
        heights = [scale[-1] for scale in found["parametrizations"][name][kind]["scale"]]
        shown.append(Series(name=name, colour=_PAGE_COLOURS[name], number=number, x=found["widths"], y=heights))
    return Chart(f"{kind.capitalize()} at step {found['steps']}.", Panel(shown, *_axes(found["widths"])), beside=True)
