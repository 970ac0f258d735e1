"""Tables of results/speed/README.md: every figure is read from a record of ``relinear bench`` or of ``beside.py``."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import measured
from measured import machine, table

__all__ = ["PARTS"]

#: records of layers: every operator, and the network of rotors at small sizes
LAYERS, ROTORS, GATE, HELD, COMPILED, PEERS = (
    f"speed/bench{name}/bench.json" for name in ("", "-rotor", "-gate", "-avx512", "-compiled", "-peers")
)
#: records of whole models; of the first two also with torch's bfloat16 products in AVX-512, as before
MODELS = tuple(
    f"speed/{name}/models.json" for name in ("hdpl-67m", "llama-60m", "low-rank", "hdpl-67m-avx512", "llama-60m-avx512")
)
BESIDE = "speed/beside.json"

_DTYPES = {"float32": "fp32", "bfloat16": "bf16"}
_SQUARE, _WIDE, _SMALL = (2048, 2048), (512, 2048), (512, 512)
#: said of figures whose dense layers multiply bfloat16 as the processor of "before" does, which has no units for it
_HELD = ", products in AVX-512"


@dataclasses.dataclass(frozen=True)
class Figure:
    """A measured figure over its runs; ``low`` and ``high`` are the least and the most, or quartiles of rounds."""

    middle: float
    low: float | None = None
    high: float | None = None

    def __str__(self) -> str:
        spread = "" if self.low is None or self.high is None else f" ({_short(self.low)} to {_short(self.high)})"
        return _short(self.middle) + spread


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _record(name: str) -> dict[str, Any] | None:
    return measured.read(name) if (measured.RESULTS / name).is_file() else None


def _rows(name: str) -> list[dict[str, Any]]:
    """The rows of a record that were timed, dense layers left out; none where there is no record."""
    found = (_record(name) or {"rows": []})["rows"]
    return [
        {"phase": row.get("passed"), **row}  # as versions before called it
        for row in found
        if row["contender"] != "dense" and row.get("ratio") is not None
    ]


def _figure(row: Mapping[str, Any]) -> Figure:
    return Figure(row["ratio"], row.get("ratio_minimum"), row.get("ratio_maximum"))


# Targets


@dataclasses.dataclass(frozen=True)
class Aim:
    """A target of the project's own: what the figure was, what it should be, and how to find what it is now.

    Args:
        what: the case.
        before: as measured before, on another machine.
        wanted: the bound; None where there is only the figure.
        find: the figure, or None where no record has it.
        least: the bound is from below: larger is better.
        unit: behind the figures.
    """

    what: str
    before: str
    wanted: float | None
    find: Callable[[], Figure | None]
    least: bool = False
    unit: str = ""

    def row(self) -> list[str]:
        """Cells of the table."""
        now = self.find()
        bound = "–" if self.wanted is None else f"{'at least' if self.least else 'at most'} {self.wanted:g}{self.unit}"
        return [
            self.what,
            self.before,
            bound,
            "not recorded" if now is None else f"{now}{self.unit}",
            self.verdict(now),
        ]

    def verdict(self, now: Figure | None) -> str:
        """Whether the median, as it is printed, is within the bound."""
        if now is None or self.wanted is None:
            return "–"
        value = float(_short(now.middle))
        return "yes" if (value >= self.wanted if self.least else value <= self.wanted) else "**no**"


def _layer(
    contender: str, shape: tuple[int, int], dtype: str, phase: str, tokens: int, names: Sequence[str] = (LAYERS, ROTORS)
) -> Callable[[], Figure | None]:
    def find() -> Figure | None:
        for name in names:
            for row in _rows(name):
                case = (
                    row["contender"],
                    (row["in_features"], row["out_features"]),
                    row["dtype"],
                    row["phase"],
                    row["tokens"],
                )
                if case == (contender, shape, dtype, phase, tokens) and row["mode"] == "eager":
                    return _figure(row)
        return None

    return find


def _model(name: str, dtype: str, phase: str, batch: int) -> Callable[[], Figure | None]:
    def find() -> Figure | None:
        for row in (_record(name) or {"rows": []})["rows"]:
            case = row["dtype"], row.get("phase", row.get("passed")), row["batch_size"]
            if row["variant"] != "dense" and case == (dtype, phase, batch):
                return Figure(row["speedup"], row["speedup_low"], row["speedup_high"])
        return None

    return find


def _beside(key: str) -> Callable[[], Figure | None]:
    def find() -> Figure | None:
        values = (_record(BESIDE) or {}).get(key)
        return None if not values else Figure(statistics.median(values), min(values), max(values))

    return find


def _aims() -> list[Aim]:
    def rotor(shape: tuple[int, int], dtype: str, phase: str, tokens: int, before: str, wanted: float | None) -> Aim:
        what = f"`Rotor()`, {shape[0]} → {shape[1]}, {_DTYPES[dtype]}, {tokens:,} tokens, {phase}"
        return Aim(what, before, wanted, _layer("rotor", shape, dtype, phase, tokens))

    def half(shape: tuple[int, int], phase: str, before: str) -> list[Aim]:
        what = f"`Rotor()`, {shape[0]} → {shape[1]}, bf16, 4,096 tokens, {phase}"
        return [
            Aim(what + held, before, 1.5, _layer("rotor", shape, "bfloat16", phase, 4096, names))
            for held, names in ((_HELD, [HELD]), ("", [LAYERS]))
        ]

    aims = [
        rotor(_SQUARE, "float32", "forward", 4096, "1.92", 0.6),
        rotor(_SQUARE, "float32", "step", 4096, "2.03", 1.1),
        *half(_SQUARE, "forward", "4.3"),
        *half(_SQUARE, "step", "3.5"),
        *half(_WIDE, "forward", "6.0"),
        *half(_WIDE, "step", "4.0"),
    ]
    small = ((128, "22", 2, "30", 10), (256, "14", None, "15", None), (512, "7.5", 0.9, "8", 1.4))
    for width, forward, most, step, most_step in small:
        aims.append(rotor((width, width), "float32", "forward", 1024, forward, most))
        aims.append(rotor((width, width), "float32", "step", 1024, step, most_step))
    aims += [
        Aim("`compare --recipe quick`: rotor's training speed", "0.22", 0.6, _beside("quick_rotor_training"), True),
        Aim("rotor, backward of an expanded gradient to a contiguous one's", "2.3", 1.1, _beside("expanded_gradient")),
    ]
    for name in ("hdpl:rank=128,blocks=8", "ccl:rank=64,context_dim=64", "transponder:rank=8"):
        for dtype in _DTYPES:
            what = f"`{name}`, 512 → 512, {_DTYPES[dtype]}, one token, inference"
            aims.append(Aim(what, "2 to 4", 1.5, _layer(name, _SMALL, dtype, "forward", 1)))
    for name in ("low_rank:rank=64", "pivoted_low_rank:rank=64", "block_hadamard:blocks=8", "monarch"):
        what = f"`{name}`, 512 → 512, fp32, 64 tokens, step"
        aims.append(Aim(what, "structured form only", None, _layer(name, _SMALL, "float32", "step", 64)))
    hybrid, llama, low_rank, held_hybrid, held_llama = MODELS
    aims += [
        Aim(
            "`hdpl:rank=128,blocks=8`, 512 → 512, fp32, 4,096 tokens, step",
            "1.3",
            1.0,
            _layer("hdpl:rank=128,blocks=8", _SMALL, "float32", "step", 4096),
        ),
        Aim("`relinear --help`", "3 s", 0.5, _beside("help_seconds"), unit=" s"),
        Aim("`make demo`'s command", "6 min", 4, _beside("demo_minutes"), unit=" min"),
    ]
    trained = (("hdpl-67m with HDPL", "0.84", 1.0, 1, hybrid), ("llama-60m with Transponder", "0.77", 0.9, 4, llama))
    for (model, before, wanted, batch, own), held in zip(trained, (held_hybrid, held_llama), strict=True):
        for said, name in ((_HELD, held), ("", own)):
            what = f"{model}, training, bf16{said}: speed"
            aims.append(Aim(what, before, wanted, _model(name, "bfloat16", "step", batch), True))
    for dtype in _DTYPES:
        for batch in (1, 8):
            what = f"low-rank MLPs of half the parameters, decoding, batch {batch}, {_DTYPES[dtype]}: speed"
            aims.append(Aim(what, "–", 1.25, _model(low_rank, dtype, "decode", batch), True))
    return aims


def wanted() -> str:
    """The project's own targets, before and now."""
    now = "now (least to most of runs; whole models' training and decoding: quartiles of rounds)"
    return table(["case", "before", "target", now, "met"], [aim.row() for aim in _aims()])


# Layers


def _of(name: str) -> str:
    """The command of a record, its runs and its machine."""
    found = measured.read(name)
    settings = found["settings"]
    count = settings.get("repeats", 1)
    runs = f"{count} runs of the whole command" if count > 1 else "a single run"
    command = f"    {found['command']}\n\n" if "command" in found else f"{_by_settings(settings)} "
    rates = ", ".join(f"{one['gemm'] / 1e9:,.0f} GFLOP/s in {one['dtype']}" for one in found["roofline"])
    said = f"{runs.capitalize()}, {settings['rounds']} rounds each. {machine(found)} A large product: {rates}."
    return command + said


def _by_settings(settings: Mapping[str, Any]) -> str:
    """What a record without a command says of how it was made."""
    operators = "".join(f" -o {one}" for one in settings["operators"])
    lists = "".join(
        f" --{name} {','.join(map(str, settings[name]))}" for name in ("shapes", "tokens", "dtypes", "modes")
    )
    more = f" --rounds {settings['rounds']} --no-peers --no-untuned"
    return f"The command was not recorded; by the settings it was `relinear bench{operators}{lists}{more}`."


def _table_of(rows: Sequence[Mapping[str, Any]]) -> str:
    """A line a shape, dtype and layer; a column a pass and number of tokens."""
    columns = sorted({(row["phase"], row["tokens"]) for row in rows})
    lines: dict[tuple[str, str, str], dict[tuple[str, int], str]] = {}
    for row in rows:
        shape = f"{row['in_features']} → {row['out_features']}"
        line = lines.setdefault((shape, _DTYPES[row["dtype"]], f"`{row['contender']}`"), {})
        line[row["phase"], row["tokens"]] = str(_figure(row))
    head = ["shape", "dtype", "layer", *(f"{phase}, {tokens:,}" for phase, tokens in columns)]
    return table(head, [[*key, *(line.get(column, "") for column in columns)] for key, line in lines.items()])


def layers() -> str:
    """Every operator of the main record, and the rotors at small sizes."""
    parts = []
    for name in (LAYERS, ROTORS, GATE, HELD):
        rows = [row for row in _rows(name) if row["mode"] == "eager" and ":" + row["contender"] not in _peers(name)]
        if rows:
            parts += [_of(name), _table_of(rows)]
    return "\n\n".join(parts)


def _peers(name: str) -> set[str]:
    """Contenders of a record that are no operators, with a colon in front."""
    settings = measured.read(name)["settings"]
    return {":" + row["contender"] for row in _rows(name) if row["contender"] not in settings["operators"]}


def noise() -> str:
    """How far the least and the most of a ratio's runs lie apart, over all cases of a record."""
    lines = []
    for name in (LAYERS, ROTORS):
        rows = [row for row in _rows(name) if row.get("ratio_minimum")]
        for tokens in sorted({row["tokens"] for row in rows}):
            apart = [
                (row["ratio_maximum"] - row["ratio_minimum"]) / row["ratio"] for row in rows if row["tokens"] == tokens
            ]
            cuts = statistics.quantiles(apart, n=10, method="inclusive") if len(apart) > 1 else apart * 9
            cells = (f"{value:.0%}".replace("%", " %") for value in (cuts[4], cuts[8], max(apart)))
            lines.append([f"`{name.split('/')[1]}`", f"{tokens:,}", str(len(apart)), *cells])
    if not lines:
        return "The record holds a single run, which does not say how its figures vary."
    head = ["record", "tokens", "ratios", "half of them vary by at most", "nine of ten", "all"]
    return table(head, lines)


def memory() -> str:
    """Memory of a training step relative to dense, with the most tokens."""
    rows = [row for row in _rows(LAYERS) if row.get("memory_ratio") and row["mode"] == "eager"]
    rows = [row for row in rows if ":" + row["contender"] not in _peers(LAYERS)]
    most = max(row["tokens"] for row in rows)
    cells: dict[str, dict[tuple[str, str], str]] = {}
    for row in rows:
        if row["tokens"] == most:
            case = f"{row['in_features']} → {row['out_features']}", _DTYPES[row["dtype"]]
            cells.setdefault(row["contender"], {})[case] = f"{row['memory_ratio']:.2f}"
    columns = list(dict.fromkeys(case for line in cells.values() for case in line))
    head = [f"{most:,} tokens", *(", ".join(column) for column in columns)]
    return table(head, [[f"`{name}`", *(line.get(c, "") for c in columns)] for name, line in cells.items()])


def others() -> str:
    """Peers, and layers that are compiled."""
    parts = []
    named = PEERS if _record(PEERS) else LAYERS
    rows = [row for row in _rows(named) if ":" + row["contender"] in _peers(named)]
    rows = [row for row in rows if (row["in_features"], row["out_features"]) == _SQUARE and row["dtype"] == "float32"]
    if rows:
        parts += ["**Peers**, eager: " + _of(named), _table_of(rows)]
    if _record(COMPILED):
        rows = [row for row in _rows(COMPILED) if row["mode"] == "compiled"]
        parts += ["**Compiled** layers against a compiled dense one: " + _of(COMPILED), _table_of(rows)]
    return "\n\n".join(parts)


# Whole models


def models() -> str:
    """Speeds of whole models, a table a record."""
    lines, commands = [], []
    for name in MODELS:
        found = _record(name)
        if found is None:
            continue
        preset = found["rows"][0]["preset"]
        commands.append(
            f"`{found['command']}`. {machine(found)}" if "command" in found else f"{preset}: {machine(found)}"
        )
        for row in found["rows"]:
            if row["variant"] != "dense":
                speed = Figure(row["speedup"], row["speedup_low"], row["speedup_high"])
                case = _DTYPES[row["dtype"]], row.get("phase", row.get("passed")), str(row["batch_size"])
                lines.append(
                    [row["preset"], f"`{row['variant']}`", *case, f"{row['tokens_per_second']:,.0f}", str(speed)]
                )
    head = ["model", "with", "dtype", "pass", "batch", "tokens a second", "speed (quartiles of rounds)"]
    return "\n\n".join([table(head, lines), *commands])


PARTS: dict[str, Callable[[], str]] = {
    "wanted": wanted,
    "layers": layers,
    "noise": noise,
    "memory": memory,
    "others": others,
    "models": models,
}
