"""The atlas of a pretrained model: what every operator would cost in the place of every layer, at several sizes."""

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field
from torch import nn

from relinear.compress.budget import size_of
from relinear.compress.corpus import read_corpus
from relinear.compress.settings import CompressSettings
from relinear.compress.work import Work, check_ids, check_model, linear_layers
from relinear.core import plugins
from relinear.core.anatomy import layer_finder, model_name
from relinear.core.config import shown
from relinear.core.modes import evaluating
from relinear.core.moments import Moments
from relinear.core.operator import NotLinearError, OperatorConfig, dense_weight, linear_features
from relinear.core.settings import PositiveInt, Settings
from relinear.pages.blocks import Block, Cell, Chart, Row, Section, Table, Text
from relinear.pages.drawn import save_panels
from relinear.pages.figures import PALETTE, Axis, Guide, Panel, Series, colours
from relinear.pages.page import write_page
from relinear.pages.records import about, what_ran
from relinear.system.files import list_written, read_json, understood, write_json
from relinear.system.lock import only_process_in
from relinear.system.machine import circumstances
from relinear.system.written import LISTED, check_ours

RECORD = "atlas.json"


class AtlasSettings(Settings):
    """What an atlas looks at.

    Args:
        operators: as text, such as ``monarch:blocks=8``; None for all that can be fitted and save parameters.
        layers: decoder layers; None for all.
        shares: of a layer's parameters, at which operators are tried whose sizes are fitted one by one.
        steps: of the descent of such a fit, at most.
        tokens: of the corpus that the layers are measured on.
        sequence_length: tokens a block of the corpus.
    """

    operators: tuple[str, ...] | None = None
    layers: tuple[int, ...] | None = None
    shares: Annotated[tuple[Annotated[float, Field(gt=0, lt=1)], ...], Field(min_length=1)] = (0.125, 0.25, 0.5, 0.75)
    steps: PositiveInt = 5
    tokens: PositiveInt = 8192
    sequence_length: PositiveInt = 512


def default_operators() -> list[OperatorConfig]:
    """Return all operators, installed ones among them, that have a dense matrix and fewer parameters than it."""
    for name in plugins.offered("operator"):
        plugins.find("operator", name)
    made = []
    for _, known in sorted(OperatorConfig.kinds().items()):
        try:
            config = known()
        except (TypeError, ValueError):  # needs a setting
            continue
        if isinstance(config, OperatorConfig) and _is_candidate(config):
            made.append(config)
    return made


def _is_candidate(config: OperatorConfig) -> bool:
    """Whether it is fitted to a weight, has a dense matrix of its own, and is all in its floating-point parameters."""
    sizes = config.sizes(64, 64)
    if config.conditioned or not config.fits_weight or not sizes:
        return False
    operator = sizes[0].build(64, 64, bias=False)
    if any(buffer.element_size() == 1 for buffer in operator.buffers()):
        return False  # few bits for each weight: a count of parameters says nothing
    try:
        operator.to_dense()
    except NotLinearError:
        return False
    return True


def atlas(
    model: Any,
    texts: Iterable[Any] | Mapping[str, Iterable[Any]],
    *,
    tokenizer: Any = None,
    settings: AtlasSettings | None = None,
    out_dir: str | Path,
    on_progress: Callable[[str, int, int], None] = lambda phase, done, total: None,
) -> dict[str, Any]:
    """Return, for every linear layer of ``model``, the second-order cost of every operator at several sizes.

    The cost is 0.5 tr(G (W - W') A (W - W')^T) in nats a token, with W' the operator's best fit under the moments of
    the layer's inputs (A) and output gradients (G). The model is left as it is. Killed and called again with the same
    arguments, it goes on behind the last layer that is done.

    Args:
        model: a Hugging Face decoder.
        texts: as ``relinear.compress`` takes them.
        tokenizer: of the model, needed for texts.
        settings: what is looked at.
        out_dir: where the moments and ``atlas.json`` are kept.
        on_progress: called with a phase, how much of it is done and how much there is.

    Returns:
        What ``atlas.json`` holds: ``layers``, by name, with the ``depth``, ``type``, ``parameters``, ``nothing`` (the
        cost without the layer) and ``operators``: kind -> a list of ``setting``, ``parameters`` and ``nats``.

    Raises:
        ValueError: as ``relinear.compress``; if an operator does not fit or ``out_dir`` holds another atlas.
    """
    chosen = settings or AtlasSettings()
    menu = default_operators() if chosen.operators is None else [OperatorConfig.read(one) for one in chosen.operators]
    if wrong := [str(config) for config in menu if not _is_candidate(config)]:
        raise ValueError(f"{wrong[0]} cannot be in an atlas: it takes a linear map that is fitted to a weight")
    check_ours(out_dir, "atlas")
    find, modules = layer_finder(model), {}
    for name, module in linear_layers(model).items():
        if (index := find(name)) is not None and (chosen.layers is None or index in chosen.layers):
            modules[name] = module
    if not modules:
        raise ValueError(f"no decoder layer with linear layers is among layers={shown(chosen.layers)}")
    counted = CompressSettings(tokens=chosen.tokens, sequence_length=chosen.sequence_length, keep=0.5)
    check_model(model, counted.sequence_length)
    with only_process_in(out_dir) as folder, evaluating(model):
        work = Work(model, modules, counted, Path(folder), on_progress)
        record = _begin(work.folder, model, menu, chosen)
        blocks = read_corpus(texts, {}, tokenizer, counted, True).blocks
        check_ids(blocks, model, "the corpus")
        found = work.calibrate(blocks)
        record |= {"tokens": found.tokens, "loss": found.loss}
        names = [(depth, name, module) for depth, group in work.by_layer.items() for name, module in group.items()]
        for done, (depth, name, module) in enumerate(names):
            if name not in record["layers"] and found.knows(name, module):
                record["layers"][name] = _of_layer(depth, name, module, menu, found.moments(name), chosen)
                write_json(work.folder / RECORD, record)
            on_progress("atlas", done + 1, len(names))
        return record


def _begin(folder: Path, model: Any, menu: Sequence[OperatorConfig], settings: AtlasSettings) -> dict[str, Any]:
    """The record to go on with: what is there of this very atlas, or an empty one."""
    values = {"operators": [config.to_dict() for config in menu], "settings": settings.model_dump(mode="json")}
    about = json.loads(json.dumps(values))  # as it is read again
    path = folder / RECORD
    if path.is_file():
        with understood(path, "no record of an atlas", "give another directory"):
            there = read_json(path)
            same = {key: there[key] for key in about} == about and isinstance(there["layers"], dict)
        if not same:
            raise ValueError(f"{path} is an atlas with other operators or settings; give another directory")
        return {key: value for key, value in there.items() if key != LISTED}
    return {"model": model_name(model), **about, **circumstances(), "layers": {}}


def _of_layer(
    depth: int, name: str, module: nn.Module, menu: Sequence[OperatorConfig], moments: Moments, settings: AtlasSettings
) -> dict[str, Any]:
    """One layer's row of the record."""
    dense = size_of(module).parameters
    operators: dict[str, list[dict[str, Any]]] = {}
    for entry in menu:
        points = []
        for config, error in _curve(entry, module, moments, settings):
            count = size_of(module, config).parameters
            if count < dense:
                points.append({"setting": str(config), "parameters": count, "nats": 0.5 * error})
        operators[entry.kind] = sorted(points, key=lambda point: point["parameters"])
    return {
        "depth": depth,
        "type": name.rpartition(".")[2],
        "parameters": dense,
        "nothing": 0.5 * float(moments.error(dense_weight(module).detach().double())),
        "operators": operators,
    }


def _curve(
    entry: OperatorConfig, module: nn.Module, moments: Moments, settings: AtlasSettings
) -> list[tuple[OperatorConfig, float]]:
    """Sizes and errors: all of them from one decomposition where there is such, else those nearest to the shares."""
    if type(entry).error_curve is not OperatorConfig.error_curve:
        return entry.error_curve(module, moments)
    dense = size_of(module).parameters
    sizes = {config: size_of(module, config).parameters for config in entry.sizes(*linear_features(module))}
    nearest = {min(sizes, key=lambda config: abs(sizes[config] - share * dense)) for share in settings.shares if sizes}
    outputs = None if moments.outputs is None else moments.outputs.float()
    single = Moments(moments.inputs.float(), outputs)  # half the time
    return [(config, config.fit_error(module, single, steps=settings.steps)) for config in nearest]


# The page


#: of a layer's parameters, at which operators are held against each other
HALF = 0.5


def write_atlas(record: Mapping[str, Any], out: str | Path) -> list[Path]:
    """Write ``record``, the values of atlas.json, its figures and its page into ``out``; return the paths of these."""
    folder = Path(out)
    write_json(folder / RECORD, record)
    figures = [
        path
        for name, panels in (("costs", _costs(record)), ("cheapest", [_map(record)]))
        for path in save_panels(panels, folder / name)
    ]
    list_written(folder, "atlas")
    return [*figures, write_page(folder / "report.html", [atlas_section(record)])]


def atlas_section(record: Mapping[str, Any]) -> Section:
    """Return what a page says of ``record``, the values of atlas.json."""
    layers, best = record["layers"], cheapest(record)
    if not best:
        raise ValueError("no layer of this atlas has an operator with fewer parameters; name others with --operator")
    first, count = Counter(kind for kind, _ in best.values()).most_common(1)[0]
    said = f"At half the parameters {first} costs the least in {count} of {len(best)} layers of {record['model']}."
    dashed = "dashed: the dense layer's size, and the cost of no layer."
    blocks: list[Block] = [
        Text(said, lead=True),
        Chart("The cheapest operator at half a layer's parameters, by depth and type.", _map(record), stem="cheapest"),
        Text(
            "A cost is the predicted rise of the loss, in nats a token, if the best fit of an operator takes the place "
            "of one layer: 0.5 tr(G D A D^T), with D what the fit misses, A and G the second moments of the layer's "
            "inputs and of the gradients at its outputs.",
            soft=True,
        ),
        Text("Cost against parameters, mean over depth", heading=True),
        *(Chart(f"{panel.title}; {dashed}", panel, stem="costs", beside=True) for panel in _costs(record)),
        Text("All operators at half the parameters", heading=True),
        _table(record, best),
        Text(
            f"Moments of {record['tokens']:,} tokens. Between two sizes a cost is interpolated; an operator that has "
            "no size up to half is left out. Fits that are no closed form are descents of at most "
            f"{record['settings']['steps']} steps, and may be improved on.",
            soft=True,
        ),
    ]
    shown = {"layers": str(len(layers)), "model": record["model"]}
    note = about(record, record["model"])
    return Section("Atlas", "atlas", [*blocks, *what_ran(record, shown)], _colours(record), note)


def cheapest(record: Mapping[str, Any]) -> dict[str, tuple[str, float]]:
    """Return layer -> (kind, nats) of the operator that costs the least at half the parameters."""
    found = {}
    for name, layer in record["layers"].items():
        costs = {kind: at for kind, points in layer["operators"].items() if (at := _at_half(points, layer)) is not None}
        if costs:
            found[name] = min(costs.items(), key=lambda item: item[1])
    return found


def _at_half(points: Sequence[Mapping[str, Any]], layer: Mapping[str, Any]) -> float | None:
    """The cost at half the parameters, on a line of log cost between two sizes; of the largest where all are below."""
    wanted = HALF * layer["parameters"]
    below = [point for point in points if point["parameters"] <= wanted]
    above = [point for point in points if point["parameters"] > wanted]
    if not below:
        return None
    if not above:
        return below[-1]["nats"]
    low, high = below[-1], above[0]
    place = (wanted - low["parameters"]) / (high["parameters"] - low["parameters"])
    first, second = (math.log(max(point["nats"], 1e-300)) for point in (low, high))
    return math.exp(first + place * (second - first))


def _colours(record: Mapping[str, Any]) -> dict[str, str]:
    return colours([one["kind"] for one in record["operators"]])


def _number(place: int) -> int:
    """Of the marker: entries that share a colour, which there are eight of, differ in it."""
    return place + place // len(PALETTE)


def _types(record: Mapping[str, Any]) -> list[str]:
    return list(dict.fromkeys(layer["type"] for layer in record["layers"].values()))


def _map(record: Mapping[str, Any]) -> Panel:
    """Depth by type, in the colour of the cheapest operator."""
    best, layers = cheapest(record), record["layers"]
    rows = {kind: place for place, kind in enumerate(_types(record))}
    shown = []
    for number, (kind, colour) in enumerate(_colours(record).items()):
        own = sorted((rows[layers[n]["type"]], layers[n]["depth"], n) for n in best if best[n][0] == kind)
        if own:
            place: dict[str, Any] = {"x": [depth for _, depth, _ in own], "y": [layers[n]["type"] for _, _, n in own]}
            texts = [f"{name}: {kind}, {best[name][1]:.3g} nats" for _, _, name in own]
            look: dict[str, Any] = {"number": _number(number), "mode": "points", "size": 14}
            shown.append(Series(name=kind, colour=colour, texts=texts, **place, **look))
    depths = sorted({layer["depth"] for layer in layers.values()})
    title = shown[0].name if len(shown) == 1 else ""  # a single entry has no legend
    bottom = Axis(title="decoder layer", ticks={depth: str(depth) for depth in depths})
    return Panel(shown, bottom, Axis(rows=True), title=title)


def _costs(record: Mapping[str, Any]) -> list[Panel]:
    """A panel a type of layer: mean cost over depth by the share of its parameters, a line an operator."""
    panels = []
    for wanted in _types(record):
        layers = [layer for layer in record["layers"].values() if layer["type"] == wanted]
        dense, shown = layers[0]["parameters"], []
        for number, (kind, colour) in enumerate(_colours(record).items()):
            sums = Counter[int]()
            for layer in layers:
                for point in layer["operators"][kind]:
                    sums[point["parameters"]] += point["nats"] / len(layers)
            if sums:
                x, y = zip(*sorted(sums.items()), strict=True)
                shares = [count / dense for count in x]
                shown.append(Series(name=kind, colour=colour, number=_number(number), x=shares, y=y))
        nothing = sum(layer["nothing"] for layer in layers) / len(layers)
        seen = [value for series in shown for value in series.y if value > 0] + [nothing]
        bounds = min(seen) / 1.5, max(seen) * 1.5
        axes = Axis(title="share of parameters", bounds=(0, 1.02)), Axis(title="nats a token", log=True, bounds=bounds)
        panels.append(Panel(shown, *axes, [Guide(x=1, text="dense"), Guide(y=nothing)], wanted))
    return panels


def _table(record: Mapping[str, Any], best: Mapping[str, tuple[str, float]]) -> Table:
    """An operator a row, the cheapest in most layers first."""
    wins = Counter(kind for kind, _ in best.values())
    rows = []
    for kind, colour in _colours(record).items():
        costs = [_at_half(layer["operators"][kind], layer) for layer in record["layers"].values()]
        known = [cost for cost in costs if cost is not None]
        types = Counter(record["layers"][name]["type"] for name, (first, _) in best.items() if first == kind)
        total = Cell.of(sum(known) if known else None, ".4g")
        where = ", ".join(f"{name} {count}" for name, count in types.items())
        cells: list[Cell | str] = [kind, Cell.of(wins[kind], "d"), total, Cell.of(len(known), "d"), where]
        rows.append(Row(cells, kind, colour))
    rows.sort(key=lambda row: (-(row.shown[1].value or 0), row.shown[2].value or math.inf))
    return Table(["operator", "layers it is cheapest in", "nats in all", "layers it fits", "where"], rows, words=(0, 4))
