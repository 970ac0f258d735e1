"""What a model of fewer bits loses: tables and pictures of results/compress."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import svg
from measured import gap, low_rank_tables, mean, ranged, read, signed, table

__all__ = ["CHARTS", "EQUAL", "ROUNDED", "chart", "equal_bytes", "frontier_table", "turned_pairs", "turned_table"]

RECORD, EQUAL_BYTES, SPEEDS = "compress/frontier.jsonl", "compress-equal-bytes", "compress/speed_bits.json"
ROUNDING, ALLOCATION, LLAMA_CPP = "compress/rounding.jsonl", "compress/allocation.json", "compress/llama_cpp.jsonl"
GROUPS, TRAINED = "compress/groups_of_64.jsonl", "compress/trained.jsonl"
AS_IT_IS = "compress/as_it_is.jsonl"
#: of a picture of equal bytes: whose, the record, bits, nats at its right edge and between its lines
EQUAL = {
    EQUAL_BYTES: ("turned SmolLM2", ROUNDING, (4.25, 3.5), 0.5, 0.1),
    "compress-trained": ("a model that was never rounded", TRAINED, (4.375, 3.375, 2.375), 0.2, 0.05),
}
#: method -> what it is called
NAMES = {
    "nearest": "{} bits, to nearest",
    "minmax": "{} bits, to nearest, not clipped",
    "absmax": "{} bits, to nearest, no zero points, not clipped",
    "hqq": "{} bits, HQQ",
    "awq": "{} bits, AWQ",
    "llama.cpp": "llama.cpp, {}",
    "caldera": "CALDERA, {} bits",
    "embedding": "embedding and head alone in {} bits",
    "everything": "all layers, embedding and head in {} bits, to nearest",
    "gptq-order": "{} bits, GPTQ in order",
    "gptq": "{} bits, GPTQ",
    "uniform": "{} bits in all layers",
    "uniform-order": "{} bits, GPTQ + descent",
    "bits": "`compress --bits {}`",
    "bits-order": "planned bits, GPTQ in order",
    "integers": "the same, `--menu quantized`: {}",
    "in-order": "the same, `anchor=true`: {}",
    "heal": "`compress --bits {}`",
    "keep": "`compress --keep {}`",
}
#: of the record on rounding: the models, and which rows are held against which
TURNED = "smollm2-rotated"
MODELS = {TURNED: "turned", "smollm2": "as it is"}
RIVALS = (
    ("bits:4.25", "gptq:4@96"),
    ("bits:4.25", "gptq-order:4@96"),
    ("bits:3.5", "gptq:3@48"),
    ("bits:3.5", "gptq-order:3@48"),
    ("bits:3.0", "gptq-order:3@576"),
    ("bits:2.5", "gptq-order:2@48"),
    ("bits:4.25", "uniform-order:4@96"),
    ("bits:3.5", "uniform-order:3@48"),
    ("bits:4.25", "bits-order:4.25"),
    ("bits:3.5", "bits-order:3.5"),
    ("bits:4.25", "caldera:4.25"),
    ("bits:3.5", "caldera:3.5"),
    ("bits:2.5", "caldera:2.5"),
    ("bits:4.25", "awq:4@96"),
    ("bits:4.25", "llama.cpp:IQ3_S"),
    ("bits:4.25", "llama.cpp:IQ4_XS"),
    ("bits:4.5", "llama.cpp:Q4_0"),
    ("bits:4.5", "llama.cpp:Q3_K_M"),
    ("bits:4.5", "llama.cpp:Q4_1"),
    ("bits:5.5", "llama.cpp:Q4_K_M"),
    ("bits:6.0", "llama.cpp:Q5_K_M"),
    ("bits:8.0", "llama.cpp:Q6_K"),
    ("bits:8.25", "gptq-order:8@96"),
)
#: nats that a rival loses at least where a share of them is told
LEAST = 0.002
#: what is held against which over draws of calibration
DRAWS = {"bits:4.25": "gptq-order:4@96", "bits:3.5": "gptq-order:3@48"}
DRAWS_TRAINED = {"bits:4.375": "gptq-order:4@64", "bits:3.375": "gptq-order:3@64"}
#: what a picture of bits shows, and its names there
MOST = 1.0  # nats; what loses more is in the table alone
SHOWN = {"bits": "compress", "gptq-order": "GPTQ in order", "llama.cpp": "llama.cpp", "caldera": "CALDERA"}
OURS = ("uniform", "bits", "bits-order", "heal", "keep", "embedding", "everything")
#: of a picture of equal bytes: height of a row, where names end
ROW, LABELS = 24, 190
WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 540, 300, 56, 46, 30


def rows() -> list[dict[str, Any]]:
    """The rows of the first seed behind the original's."""
    return [row for row in read(RECORD) if row["row"] != "original" and row["seed"] == 0]


def _called(name: str) -> str:
    method, _, number = name.partition(":")
    bits, _, more = number.partition("@")
    told = f", healed on {int(more or 0):,} tokens" if method == "heal" else f", groups of {more}"
    return NAMES[method].format(bits) + (told if more else "")


def _name(row: dict[str, Any]) -> str:
    return _called(row["row"])


def frontier_table() -> str:
    """A row for each method; nats above the original, and how often greedy text repeats itself."""
    every = read(RECORD)
    original = next(row for row in every if row["row"] == "original")
    texts = list(original["loss"])
    lines = [
        ["original", f"{original['bits']:.2f}", *(f"{loss:.3f} nats" for loss in original["loss"].values())],
        ["the file it came in, Q4_1", "5.00", *["+0.000"] * len(texts)],
    ]
    lines = [[*line, f"{original['repeated']:.0%}"] for line in lines]
    for row in sorted(rows(), key=lambda row: -row["bits"]):
        over = [f"{row['against'][text]['nats']:+.3f} ± {row['against'][text]['interval']:.3f}" for text in texts]
        lines.append([_name(row), f"{row['bits']:.2f}", *over, f"{row['repeated']:.0%}"])
    return table(["", "bits a weight", *texts, "repeated 4-grams"], lines)


def _first_draw(record: str = ROUNDING) -> dict[tuple[str, str], dict[str, Any]]:
    """The rows of the record on rounding, by model and method."""
    return {(row["model"], row["row"]): row for row in read(record) if row["seed"] == 0}


def rounding_table() -> str:
    """Each method on both models: nats above the original, beside bits of equal bytes."""
    found = _first_draw()
    originals = {model: row["loss"] for (model, name), row in found.items() if name == "original"}
    columns = [(model, text) for model, losses in originals.items() for text in losses]
    lines = [["original", "16.00", *(f"{originals[model][text]:.3f} nats" for model, text in columns)]]
    methods = {name: row["bits"] for (_, name), row in found.items() if name != "original"}
    file = ["the file it came in, Q4_1", "5.00", *("" if model == TURNED else "+0.000" for model, _ in columns)]
    for name in sorted(methods, key=lambda name: (-round(methods[name], 1), _mean_rise(found, name))):
        over = [found.get((model, name), {}).get("against", {}).get(text) for model, text in columns]
        cells = ["" if at is None else f"{at['nats']:+.3f} ± {at['interval']:.3f}" for at in over]
        if methods[name] < 5 and file not in lines:
            lines.append(file)
        lines.append([_called(name), f"{methods[name]:.2f}", *cells])
    return table(["", "bits a weight", *(f"{MODELS[model]}, {text}" for model, text in columns)], lines)


def turned_pairs() -> list[list[dict[str, Any]]]:
    """Rows of the turned model at every size: `compress`, and its strongest rival."""
    pairs = sorted((pair for pair in RIVALS if pair[1].startswith("gptq-order")), reverse=True)
    return [[_first_draw()[TURNED, name] for name in pair] for pair in pairs]


def turned_table() -> str:
    """The turned model at every size: what `compress` loses, and its strongest rival."""
    texts = "wikitext2", "ptb"
    losses = _first_draw()[TURNED, "original"]["loss"]
    lines = [["original", "16.00", *(f"{losses[text]:.3f} nats" for text in texts)]]
    for row in itertools.chain(*turned_pairs()):
        over = [f"{signed(at['nats'], 3)} ± {at['interval']:.3f}" for at in (row["against"][text] for text in texts)]
        lines.append([_name(row).partition(", groups")[0], f"{row['bits']:.2f}", *over])
    return table(["", "bits a weight", *texts], lines)


def _mean_rise(found: dict[tuple[str, str], dict[str, Any]], name: str) -> float:
    rises = [at["nats"] for (_, row), values in found.items() if row == name for at in values["against"].values()]
    return sum(rises) / len(rises)


def rivals() -> str:
    """What one way loses as a share of another's loss at equal bytes, and the difference, paired over windows."""
    found, lines = _first_draw(), []
    texts = list(next(iter(found.values()))["loss"])
    for ours, theirs in RIVALS:
        for model in MODELS:
            if (model, ours) not in found or (model, theirs) not in found:
                continue
            a, b = found[model, ours], found[model, theirs]
            cells = []
            for text in texts:
                if text not in a["against"] or text not in b["against"]:
                    cells.append("")
                    continue
                mine, other = (row["against"][text]["nats"] for row in (a, b))
                if other < LEAST:  # both lose nothing
                    cells.append(gap(a["losses"][text], b["losses"][text], 4))
                else:
                    cells.append(f"{mine / other:.2f} ({gap(a['losses'][text], b['losses'][text])})")
            lines.append([_called(ours), _called(theirs), MODELS[model], *cells])
    return table(["", "beside", "model", *texts], lines)


def draws_table(record: str, model: str, pairs: Mapping[str, str], digits: int, texts: Sequence[str]) -> str:
    """Means over draws of calibration, and the difference to the strongest rival with its interval over draws.

    A share of the rival's loss is told where every draw loses something.
    """
    found: dict[str, list[dict[str, Any]]] = {}
    for row in read(record):
        if row["model"] == model and row["row"] in {*pairs, *pairs.values()}:
            found.setdefault(row["row"], []).append(row)
    lines = []
    for ours, theirs in pairs.items():
        both = {row["seed"]: row["against"] for row in found[theirs]}
        rows = [row for row in found[ours] if row["seed"] in both]
        cells = []
        for text in texts:
            mine, other = [row["against"][text]["nats"] for row in rows], [both[r["seed"]][text]["nats"] for r in rows]
            apart = gap(mine, other, digits)
            share = f"{mean(mine) / mean(other):.2f} ({apart})" if min(*mine, *other) > 0 else apart
            cells.append(f"{ranged(mine, digits)}; {share}")
        lines.append([_called(ours), _called(theirs), str(len(rows)), *cells])
    return table(["", "beside", "draws", *texts], lines)


def written_table() -> str:
    """What models write and complete: repeated 4-grams, and last words of LAMBADA's passages."""
    rows = [row for record in (ROUNDING, AS_IT_IS) for row in read(record) if row.get("lambada") is not None]
    lines = [
        [
            "original" if row["row"] == "original" else _called(row["row"]),
            MODELS[row["model"]],
            f"{row['bits']:.2f}",
            f"{row['lambada']:.1%}",
            f"{row['repeated']:.0%}",
        ]
        for row in rows
    ]
    return table(["", "model", "bits a weight", "LAMBADA, 500 passages", "repeated 4-grams"], lines)


def _before_and_after(earlier: str, after: dict[tuple[str, str], dict[str, Any]], *texts: str) -> list[list[str]]:
    """Budgets of an earlier record, predicted and lost now, and less than then; paired over windows."""
    lines = []
    for before in read(earlier):
        row = after.get((before["model"], before["row"]))
        if row is not None and before["seed"] == row["seed"]:
            lost = [f"+{row['against'][text]['nats']:.3f}" for text in texts]
            less = [gap(row["losses"][text], before["losses"][text]) for text in texts]
            predicted = f"{row['predicted']:.3f}, {before['predicted']:.3f}"
            cells = [f"{a} ({b})" for a, b in zip(lost, less, strict=True)]
            lines.append([f"{_name(row)}, {MODELS[row['model']]}", predicted, *cells])
    return lines


def drawn_table() -> str:
    """Budgets under moments at labels that the model draws, less the same at the text's labels."""
    rows = _before_and_after("compress/text_labels.jsonl", _first_draw(GROUPS), "wikitext2", "books")
    return table(["", "predicted: drawn, text's", "wikitext2 (less the text's)", "books (less the text's)"], rows)


def groups_table() -> str:
    """Budgets with groups of 64 and of 256, less the same with groups of 64 alone."""
    texts = ("wikitext2", "books", "ptb")
    rows = _before_and_after(GROUPS, _first_draw(), *texts)
    return table(["", "predicted: both, 64", *(f"{text} (less 64 alone)" for text in texts)], rows)


def predictions_table() -> str:
    """What all layers of a type are predicted to lose at four bits, by labels, and what they lose."""
    heads = ["type", "at the text's labels", "at drawn labels", "drawn, tokens whole", "KL measured [nats a token]"]
    rows = [
        [
            f"`{row['type']}`",
            f"{row['given']['product']:.4f}",
            f"{row['sampled']['product']:.4f}",
            f"{row['sampled']['tokens']:.4f}",
            f"{row['kl']:.4f} ± {row['kl_interval']:.4f}",
        ]
        for row in read("compress/predictions.jsonl")
    ]
    return table(heads, rows)


def allocation_table() -> str:
    """Predicted nats of one number of bits for all layers and of bits by layer, and how far the latter could go."""
    lines = []
    for model, name in MODELS.items():
        if model in (found := read(ALLOCATION)):
            all_alike, by_layer = found[model]["uniform"]["4.375"], found[model]["by_layer"]["4.375"]
            bounds = [found[model]["bound_of_layers"], found[model]["bound_of_layers_and_rows"]]
            lines.append(
                [name, f"{all_alike:.3f}", f"{by_layer:.3f}", f"{by_layer / all_alike:.2f}", *map(str, bounds)]
            )
    return table(["model", "4.38 bits in all", "by layer", "share", "least by layer", "least by row"], lines)


@dataclasses.dataclass(frozen=True)
class Curve:
    """Points of a picture: across, and the row's nats with their interval; joined where there are several."""

    name: str
    ours: bool
    points: Sequence[tuple[float, Mapping[str, Any]]]


def _losses(record: str, model: str) -> dict[str, dict[str, Any]]:
    """The rows of a model in a record, first draw, by method."""
    return {name: row for (of, name), row in _first_draw(record).items() if of == model}


def _by_bits(text: str, record: str = ROUNDING, model: str = TURNED) -> list[Curve]:
    """A model's rows: nats against bits, methods of several sizes as lines."""
    found: dict[str, list[tuple[float, Mapping[str, Any]]]] = {}
    for name, row in _losses(record, model).items():
        method = name.partition(":")[0]
        if method in SHOWN and row.get("against", {}).get(text, {"nats": MOST})["nats"] < MOST:
            found.setdefault(method, []).append((row["bits"], row["against"][text]))
    return [Curve(SHOWN[method], method in OURS, sorted(points, key=_across)) for method, points in found.items()]


def _by_speed(text: str, speeds: str = SPEEDS, record: str = ROUNDING, model: str = TURNED) -> list[Curve]:
    """The same budgets: nats against decoding, times as fast as the original."""
    curves, losses = [Curve("original", False, [(1.0, {"nats": 0.0, "interval": 0.0})])], _losses(record, model)
    rows = read(speeds)["rows"]
    for threads in dict.fromkeys(row["threads"] for row in rows):
        for row in (row for row in rows if row["threads"] == threads):
            bits = row["model"].partition("-")[2]
            point = row["decode"]["ratio"], losses[f"bits:{bits}"]["against"][text]
            curves.append(Curve(f"{bits} bits" + ", 2 threads" * (threads == 2), True, [point]))
    return curves


def _across(point: tuple[float, Mapping[str, Any]]) -> float:
    return point[0]


class Chart(NamedTuple):
    """A picture of losses: whose, on which text, its curves, what stands across, where that begins and ends, ticks."""

    whose: str
    text: str
    curves: Callable[[str], list[Curve]]
    title: str
    span: tuple[float, float]
    ticks: Sequence[float]


BITS, FASTER = "bits a weight, scales included", "decoding, times as fast as the original"
IN_BITS, IN_SPEED = ((1.0, 9.0), range(2, 10)), ((0.8, 3.6), (1, 1.5, 2, 2.5, 3))
_TRAINED = {"record": TRAINED, "model": "trained"}
CHARTS = {
    "compress-frontier": Chart("turned SmolLM2", "wikitext2", _by_bits, BITS, *IN_BITS),
    "compress-speed": Chart("turned SmolLM2", "wikitext2", _by_speed, FASTER, *IN_SPEED),
    "compress-as-it-is-frontier": Chart(
        "SmolLM2 as it is", "wikitext2", functools.partial(_by_bits, model="smollm2"), BITS, *IN_BITS
    ),
    "compress-as-it-is-speed": Chart(
        "SmolLM2 as it is",
        "wikitext2",
        functools.partial(_by_speed, speeds="compress/speed_bits_as_it_is.json", model="smollm2"),
        FASTER,
        *IN_SPEED,
    ),
    "compress-trained-frontier": Chart(
        "a model that was never rounded", "books", functools.partial(_by_bits, **_TRAINED), BITS, *IN_BITS
    ),
    "compress-trained-speed": Chart(
        "a model that was never rounded",
        "books",
        functools.partial(_by_speed, speeds="compress/speed_trained.json", **_TRAINED),
        FASTER,
        *IN_SPEED,
    ),
}


def chart(theme: str, which: str) -> str:
    """The SVG: loss on a text against bits a weight, or against speed."""
    ink, soft, line, ours, theirs = svg.THEMES[theme]
    _, text, found, title, (low, high), ticks = CHARTS[which]
    curves = found(text)
    top = max(at["nats"] + at["interval"] for curve in curves for _, at in curve.points)

    def place(x: float, y: float) -> tuple[float, float]:
        across = LEFT + (x - low) / (high - low) * (WIDTH - LEFT - 20)
        return across, HEIGHT - BOTTOM - max(0.0, y) / top * (HEIGHT - BOTTOM - TOP)

    parts = [svg.text(LEFT, 16, f"nats a token above the original, {text}", soft, "start")]
    step = next(each for each in (0.02, 0.05, 0.2) if top < 7 * each or each == 0.2)
    for tick in [step * index for index in range(int(top / step) + 1)]:
        y = place(low, tick)[1]
        parts.append(svg.line(LEFT, y, WIDTH - 20, y, line, 1))
        parts.append(svg.text(LEFT - 8, y + 4, f"{tick:.{2 if step < 0.1 else 1}f}", soft, "end"))
    parts += [svg.text(place(tick, 0)[0], HEIGHT - BOTTOM + 18, f"{tick:g}", soft) for tick in ticks]
    parts.append(svg.text((LEFT + WIDTH) / 2, HEIGHT - 8, title, soft))
    for curve in curves:
        colour = ours if curve.ours else theirs
        places = [place(x, at["nats"]) for x, at in curve.points]
        parts += [svg.line(*here, *there, colour, 1.2) for here, there in itertools.pairwise(places)]
        for x, at in curve.points:
            (across, up), (_, down) = (place(x, at["nats"] + sign * at["interval"]) for sign in (1, -1))
            parts += [svg.line(across, up, across, down, colour, 2.4), svg.circle(*place(x, at["nats"]), colour)]
        (x, y), *more = places
        left = curve.ours and "threads" not in curve.name
        lowest = curve.ours and curve.points[0][1]["nats"] < LEAST
        down = 4 if lowest or (left and more) else -4 if curve.ours else -8 if more else -16
        parts.append(svg.text(x - 10 if left else x + 10, y + down, curve.name, ink, "end" if left else "start"))
    return svg.whole(WIDTH, HEIGHT, _described(which), parts)


def _described(which: str) -> str:
    whose, text, curves, title, *_ = CHARTS[which]
    told = [f"{c.name} " + ", ".join(f"{signed(at['nats'], 3)} at {x:.2f}" for x, at in c.points) for c in curves(text)]
    return f"Nats a token above the original on {text}, {whose}, against {title}: {'; '.join(told)}."


def charts_in_page(*which: str) -> str:
    """Pictures in a page of results/, in light and in dark."""
    return "\n\n".join(svg.themed(f"../../docs/pictures/{one}", _described(one)) for one in which)


def equal_bytes(theme: str, which: str = EQUAL_BYTES) -> str:
    """The SVG: loss of a model by method at equal bytes, on the first text."""
    ink, soft, line, ours, theirs = svg.THEMES[theme]
    groups, (*_, edge, step) = _at_equal_bytes(which), EQUAL[which]
    text = next(iter(groups[0][1][0]["against"]))
    height, right = TOP + sum(ROW * (len(found) + 1) for _, found in groups) + BOTTOM, WIDTH - 60
    parts = [svg.text(LABELS, 16, f"nats a token above the original, {text}", soft, "start")]

    def across(nats: float) -> float:
        return LABELS + max(0.0, min(nats, edge)) / edge * (right - LABELS)

    for tick in range(round(edge / step) + 1):
        x = across(tick * step)
        parts += [svg.line(x, TOP, x, height - BOTTOM, line, 1)]
        parts += [svg.text(x, height - BOTTOM + 18, f"{tick * step:.2g}" if tick else "0", soft)]
    y = TOP
    for bits, found in groups:
        y += ROW
        parts.append(svg.text(8, y - 6, f"{bits:g} bits a weight", soft, "start", 600))
        for row in found:
            y += ROW
            colour = ours if row["row"].partition(":")[0] in OURS else theirs
            nats, half = (row["against"][text][key] for key in ("nats", "interval"))
            name = _called(row["row"]).partition(", groups")[0].replace("`", "")
            parts.append(svg.text(LABELS - 10, y - 6, name, ink, "end"))
            if nats <= edge:
                parts.append(svg.line(across(nats - half), y - 10, across(nats + half), y - 10, colour, 2.4))
                parts.append(svg.circle(across(nats), y - 10, colour))
            parts.append(svg.text(WIDTH - 8, y - 6, f"{nats:+.3f}", ink if nats <= edge else theirs, "end"))
    return svg.whole(WIDTH, height, _equal_bytes_described(which), parts)


def _at_equal_bytes(which: str) -> list[tuple[float, list[dict[str, Any]]]]:
    """Rows by bits, the least loss first."""
    _, record, sizes, *_ = EQUAL[which]
    (model, *_), groups = dict.fromkeys(row["model"] for row in read(record)), []
    found = [row for row in _losses(record, model).values() if row["row"].partition(":")[0] not in ("original", "heal")]
    text = next(iter(found[0]["against"]))
    for bits in sizes:  # in eighths
        rows = [row for row in found if round(8 * row["bits"]) == 8 * bits]
        groups.append((bits, sorted(rows, key=lambda row: row["against"][text]["nats"])))
    return groups


def _equal_bytes_described(which: str) -> str:
    told = []
    for bits, found in _at_equal_bytes(which):
        nats = [
            (_called(row["row"]).replace("`", ""), next(iter(row["against"].values()))["nats"]) for row in found[:2]
        ]
        told.append(f"at {bits:g} bits a weight " + ", ".join(f"{name} {value:+.3f}" for name, value in nats))
    return f"Nats a token above the original, {EQUAL[which][0]}, the best two of each size: {'; '.join(told)}."


def at_equal_bytes_in_page(folder: str = "pictures", which: str = EQUAL_BYTES) -> str:
    """A picture of equal bytes in a page."""
    return svg.themed(f"{folder}/{which}", _equal_bytes_described(which))


def trained_table() -> str:
    """Each method on the model that was never rounded: nats above the original."""
    rows = [row for row in read(TRAINED) if row["seed"] == 0]
    (original,), others = rows[:1], sorted(rows[1:], key=lambda row: -round(8 * row["bits"]))
    texts = list(original["loss"])
    lines = [["original", "16.00", *(f"{original['loss'][text]:.3f} nats" for text in texts)]]
    for row in others:
        over = [f"{row['against'][text]['nats']:+.4f} ± {row['against'][text]['interval']:.4f}" for text in texts]
        lines.append([_called(row["row"]), f"{row['bits']:.2f}", *over])
    lines = [[*line, f"{row['repeated']:.0%}"] for line, row in zip(lines, [original, *others], strict=True)]
    return table(["", "bits a weight", *texts, "repeated 4-grams"], lines)


def by_llama_cpp() -> str:
    """How many of ten prompts llama.cpp continues as transformers does, token by token."""
    lines = []
    for row in read(LLAMA_CPP):
        weights = ", ".join(f"{kind} {count}" for kind, count in sorted(row["types"].items()))
        same = sum(prompt["same"] for prompt in row["rows"])
        tokens = sum(prompt["tokens"] for prompt in row["rows"])
        inputs = "eight bits" if row.get("inputs_rounded") else "as they are"
        lines.append([weights, inputs, f"{row['prompts_alike']} of {len(row['rows'])}", f"{same} of {tokens}"])
    return table(["matrices in the file", "inputs in transformers", "prompts alike", "tokens before they part"], lines)


def exports_table() -> str:
    """Each export as a program without relinear reads it: size, logits, texts, speed."""
    lines = []
    for row in read("compress/exports.jsonl"):
        speed, written = row["tokens_per_second"], row["integers"].rpartition(", ")[2]
        said = [
            f"{row['bytes'] / 1e6:.1f} MB",
            f"{row['logits']:.4f}",
            f"{row['spread']:.1f}",
            f"{row['greedy']} of 10",
        ]
        lines.append(
            [f"{row['export']}, {written}", row["read_by"], *said, f"{speed['export'] / speed['relinear']:.2f}"]
        )
    head = ["export", "read by", "size", "logits off by", "their spread", "texts alike", "speed, relinear = 1"]
    return table(head, lines)


def speeds(told: str) -> str:
    """Decoding and prefill of rounded models, times as fast as the original; ``told``: how a ratio is written."""
    times: dict[str, list[str]] = {}
    for row in read(SPEEDS)["rows"]:
        line = times.setdefault(row["model"].partition("-")[2], [])
        line += [told.format_map(row[what]) for what in ("decode", "prefill")]
    lines = [[bits, one, two, prompt] for bits, (one, prompt, two, _) in times.items()]
    return table(["bits", "a token, 1 thread", "2 threads", "a prompt of 128"], lines)


def costs() -> str:
    """The turned model by bits: what `compress` loses on a text of its calibration's kind and on another, and speed."""
    found, texts = _first_draw(), ("wikitext2", "ptb")
    faster = {r["model"].partition("-")[2]: r["decode"]["ratio"] for r in read(SPEEDS)["rows"] if r["threads"] == 2}
    lines = []
    for bits in ("8.25", "5.5", "4.25", "3.5", "3.0"):
        over = [found[TURNED, f"bits:{bits}"]["against"][text] for text in texts]
        cells = [f"{signed(at['nats'], 3)} ± {at['interval']:.3f}" for at in over]
        lines.append([bits, *cells, f"{faster[bits]:.1f}" if bits in faster else "–"])
    return table(["`--bits`", "WikiText-2, nats", "PTB, nats", "times as fast"], lines)


ROUNDED = {
    "costs": costs,
    "speeds": functools.partial(speeds, "{ratio:.2f}"),
    "speeds_ranged": functools.partial(speeds, "{ratio:.2f} ({ratio_low:.2f} to {ratio_high:.2f})"),
    "rounding": rounding_table,
    "rivals": rivals,
    "equal_bytes": at_equal_bytes_in_page,
    "speed_picture": functools.partial(charts_in_page, "compress-speed"),
    "as_it_is_pictures": functools.partial(charts_in_page, "compress-as-it-is-frontier", "compress-as-it-is-speed"),
    "trained_pictures": functools.partial(charts_in_page, "compress-trained-frontier", "compress-trained-speed"),
    "allocation": allocation_table,
    "predictions": predictions_table,
    "drawn_labels": drawn_table,
    "groups": groups_table,
    "draws": functools.partial(draws_table, ROUNDING, "smollm2-rotated", DRAWS, 3, ("wikitext2", "books", "ptb")),
    "trained": trained_table,
    "trained_picture": functools.partial(at_equal_bytes_in_page, "../../docs/pictures", "compress-trained"),
    "trained_draws": functools.partial(draws_table, TRAINED, "trained", DRAWS_TRAINED, 4, ("books", "wikitext2")),
    "written": written_table,
    "llama": by_llama_cpp,
    "exports": exports_table,
    "low_rank": low_rank_tables,
}
