"""What operators would cost in the place of the layers of a pretrained model: python results/atlas/atlas.py MODEL DATA

The cost is 0.5 tr(G (W - W') A (W - W')^T) in nats per token, with W' the operator's best fit under the second moments
of the layer's inputs (A) and output gradients (G). The model is left as it is. Killed and started again with the same
arguments, it goes on behind the last layer that is done. Prints its table; ``--out`` gets atlas.json and two figures.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

import relinear
from relinear.compression import CompressSettings
from relinear.compression.budget import size_of
from relinear.compression.calibrate import Calibration
from relinear.compression.corpus import read_corpus
from relinear.compression.inputs import by_decoder_layer, check_compressible, check_ids, linear_layers
from relinear.contract.calibration_statistics import CalibrationStatistics
from relinear.contract.linear_layers import dense_weight, linear_features
from relinear.contract.module_state import eval_mode
from relinear.contract.operator import OperatorConfig
from relinear.data import DataSettings, iter_texts
from relinear.data.tokenizers import load_tokenizer
from relinear.hf.model_config import model_name
from relinear.hf.model_layout import layer_finder
from relinear.pages.figures import PALETTE, Axis, Guide, Panel, Series, colors
from relinear.pages.matplotlib_figures import save_panels
from relinear.system.files import write_json
from relinear.system.machine import provenance
from relinear.system.text import columns

sys.path.append(str(Path(__file__).resolve().parents[1] / "compress"))
from saved_statistics import SavedStatistics

#: of a layer's parameters, at which operators are compared
HALF = 0.5


def measure(model: Any, texts: Any, tokenizer: Any, menu: Sequence[OperatorConfig], given: argparse.Namespace) -> dict:
    """Return the record: by layer its depth, type, parameters, the cost of no layer, and every operator's points."""
    counted = CompressSettings(tokens=given.tokens, sequence_length=given.sequence_length, keep=0.5)
    check_compressible(model, counted.sequence_length)
    find, modules = layer_finder(model), {}
    for name, module in linear_layers(model).items():
        if (index := find(name)) is not None and (given.layers is None or index in given.layers):
            modules[name] = module
    by_layer, path = by_decoder_layer(model, modules), given.out / "atlas.json"
    settings = {name: getattr(given, name) for name in ("layers", "shares", "steps", "tokens", "sequence_length")}
    stated = {"operators": [config.to_dict() for config in menu], "settings": settings}
    record = {"model": model_name(model), **stated, **provenance(), "layers": {}}
    if path.is_file():
        record = json.loads(path.read_text(encoding="utf-8"))
        if {key: record[key] for key in stated} != stated:
            raise SystemExit(f"{path} is an atlas with other operators or settings: give another --out")
    with eval_mode(model):
        blocks = read_corpus(texts, tokenizer, counted, True).blocks
        check_ids(blocks, model, "the corpus")
        measured = Calibration(model, blocks, by_layer, given.out / "calibration", counted)
        calibration = SavedStatistics.of(measured, given.out / "moments")
        record |= {"tokens": calibration.tokens, "loss": calibration.loss}
        for depth, group in by_layer.items():
            for name, module in group.items():
                if name not in record["layers"] and calibration.counts[name] >= linear_features(module)[0]:
                    moments = calibration.moments(name)
                    record["layers"][name] = _of_layer(depth, name, module, menu, moments, given)
                    write_json(path, record)
                    print(f"{name}: {len(record['layers'])} of {len(modules)}", flush=True)
    return record


def _of_layer(
    depth: int, name: str, module: nn.Module, menu: Sequence[OperatorConfig], moments: CalibrationStatistics, given: Any
) -> dict[str, Any]:
    """One layer's row of the record."""
    dense = size_of(module).parameters
    operators: dict[str, list[dict[str, Any]]] = {}
    for entry in menu:
        points = []
        for config, error in _curve(entry, module, moments, given):
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
    entry: OperatorConfig, module: nn.Module, moments: CalibrationStatistics, given: Any
) -> list[tuple[OperatorConfig, float]]:
    """Sizes and errors: all of them from one decomposition where there is such, else those nearest to the shares."""
    if type(entry).candidate_errors is not OperatorConfig.candidate_errors:
        return entry.candidate_errors(module, moments)
    dense = size_of(module).parameters
    sizes = {config: size_of(module, config).parameters for config in entry.candidates(*linear_features(module))}
    nearest = {min(sizes, key=lambda config: abs(sizes[config] - share * dense)) for share in given.shares if sizes}
    outputs = None if moments.gradient_moment is None else moments.gradient_moment.float()
    single = CalibrationStatistics(moments.input_moment.float(), outputs)  # half the time
    return [(config, config.fit_error(module, single, steps=given.steps)) for config in nearest]


def cheapest(record: Mapping[str, Any]) -> dict[str, tuple[str, float]]:
    """Return layer -> (kind, nats) of the operator that costs the least at half the parameters."""
    best = {}
    for name, layer in record["layers"].items():
        costs = {kind: at for kind, points in layer["operators"].items() if (at := _at_half(points, layer)) is not None}
        if costs:
            best[name] = min(costs.items(), key=lambda item: item[1])
    return best


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


def table(record: Mapping[str, Any]) -> str:
    """Return a row for each operator, the cheapest in most layers first."""
    wins = Counter(kind for kind, _ in cheapest(record).values())
    rows = []
    for entry in record["operators"]:
        kind = entry["kind"]
        costs = [_at_half(layer["operators"][kind], layer) for layer in record["layers"].values()]
        known = [cost for cost in costs if cost is not None]
        rows.append((-wins[kind], sum(known), (kind, str(wins[kind]), f"{sum(known):.4g}", str(len(known)))))
    head = ("at half the parameters", "layers it is cheapest in", "nats in all", "layers it fits")
    return columns([head, *(row for *_, row in sorted(rows))])


# Figures


def _colors(record: Mapping[str, Any]) -> dict[str, str]:
    return colors([one["kind"] for one in record["operators"]])


def _number(place: int) -> int:
    """Of the marker: entries that share a colour, which there are eight of, differ in it."""
    return place + place // len(PALETTE)


def _types(record: Mapping[str, Any]) -> list[str]:
    return list(dict.fromkeys(layer["type"] for layer in record["layers"].values()))


def depths_panel(record: Mapping[str, Any]) -> Panel:
    """Depth by type, in the colour of the cheapest operator."""
    best, layers = cheapest(record), record["layers"]
    rows = {kind: place for place, kind in enumerate(_types(record))}
    series = []
    for number, (kind, color) in enumerate(_colors(record).items()):
        own = sorted((rows[layers[n]["type"]], layers[n]["depth"], n) for n in best if best[n][0] == kind)
        if own:
            place: dict[str, Any] = {"x": [depth for _, depth, _ in own], "y": [layers[n]["type"] for _, _, n in own]}
            look: dict[str, Any] = {"number": _number(number), "mode": "points", "size": 14}
            series.append(Series(name=kind, color=color, **place, **look))
    title = series[0].name if len(series) == 1 else ""  # a single entry has no legend
    ticks = {depth: str(depth) for depth in sorted({layer["depth"] for layer in layers.values()})}
    return Panel(series, Axis(title="decoder layer", ticks=ticks), Axis(rows=True), title=title)


def cost_panels(record: Mapping[str, Any]) -> list[Panel]:
    """A panel a type of layer: mean cost over depth by the share of its parameters, a line per operator."""
    panels = []
    for wanted in _types(record):
        layers = [layer for layer in record["layers"].values() if layer["type"] == wanted]
        dense, series = layers[0]["parameters"], []
        for number, (kind, color) in enumerate(_colors(record).items()):
            sums = Counter[int]()
            for layer in layers:
                for point in layer["operators"][kind]:
                    sums[point["parameters"]] += point["nats"] / len(layers)
            if sums:
                x, y = zip(*sorted(sums.items()), strict=True)
                shares = [count / dense for count in x]
                series.append(Series(name=kind, color=color, number=_number(number), x=shares, y=y))
        nothing = sum(layer["nothing"] for layer in layers) / len(layers)
        values = [value for one in series for value in one.y if value > 0] + [nothing]
        bounds = min(values) / 1.5, max(values) * 1.5
        bottom = Axis(title="share of parameters", bounds=(0, 1.02))
        axes = bottom, Axis(title="nats per token", log=True, bounds=bounds)
        panels.append(Panel(series, *axes, [Guide(x=1, text="dense"), Guide(y=nothing)], wanted))
    return panels


def _numbers(kind: type) -> Any:
    return lambda text: [kind(part) for part in text.split(",")]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the table, draw the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("data")
    parser.add_argument(
        "-o", "--operator", action="append", required=True, help="Such as low_rank or monarch:blocks=8."
    )
    parser.add_argument("--layers", type=_numbers(int), help="Decoder layers, such as 0,15,29; by default all.")
    parser.add_argument("--shares", type=_numbers(float), default=[0.25, 0.5], help="Of parameters, for descents.")
    parser.add_argument("--steps", type=int, default=5, help="Of a descent, at most.")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--sequence-length", type=int, default=512)
    parser.add_argument("--out", type=Path, default=Path("runs/atlas"))
    given = parser.parse_args(arguments)
    menu = [OperatorConfig.read(text) for text in given.operator]
    given.out.mkdir(parents=True, exist_ok=True)
    model = relinear.from_pretrained(given.model).float()
    texts = iter_texts(DataSettings(data=given.data), "train")
    record = measure(model, texts, load_tokenizer(given.model), menu, given)
    for name, panels in (("costs", cost_panels(record)), ("cheapest", [depths_panel(record)])):
        save_panels(panels, given.out / name)
    print(table(record))


if __name__ == "__main__":
    main()
