"""What results/ says, as numbers and as tables in Markdown: nothing on a generated page is typed by hand."""

from __future__ import annotations

import functools
import itertools
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from relinear.system.confidence import half_width

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "results"


@functools.cache
def read(name: str) -> Any:
    """results/NAME: JSON, or a list for JSON lines."""
    text = (RESULTS / name).read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()] if name.endswith(".jsonl") else json.loads(text)


# Statistics


def mean(values: Sequence[float]) -> float:
    """The mean."""
    return statistics.fmean(values)


def ranged(values: Sequence[float], digits: int = 3) -> str:
    """1.796 (1.774 to 1.808): the mean, and over several seeds the lowest and the highest."""
    text = f"{mean(values):.{digits}f}"
    return text if len(values) < 2 else f"{text} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def gap(ours: Sequence[float], theirs: Sequence[float], digits: int = 3, error: float = 0.0) -> str:
    """Ours less theirs, seed by seed: +0.012 [-0.004, +0.028]; without an interval where there is one seed.

    ``error``: of the held-out text, which widens the interval.
    """
    differences = [a - b for a, b in zip(ours, theirs, strict=True)]
    return with_interval({"mean": mean(differences), "values": differences, "standard_error": error}, digits)


def signed(value: float, digits: int) -> str:
    """+0.012, and +0.000 rather than -0.000."""
    return f"{round(value, digits) + 0.0:+.{digits}f}"


def every_command(name: str) -> tuple[str, ...]:
    """The command of results/NAME, and those whose runs have joined it later."""
    found = read(name)
    return (found["command"], *found.get("later", ()))


def commands(name: str) -> str:
    """The same as a block."""
    return "\n".join(f"    {one}" for one in every_command(name))


def less(ours: Mapping[Any, float], theirs: Mapping[Any, float]) -> dict[Any, float]:
    """Ours less theirs where both have a value, in order."""
    return {case: ours[case] - theirs[case] for case in sorted(ours.keys() & theirs.keys())}


def with_interval(found: Mapping[str, Any], digits: int = 3) -> str:
    """A recorded gap: -0.105 [-0.149, -0.062]; its mean alone where it is of one seed, or seeds were not kept.

    The interval is Student's t over the seeds, widened by the error of the held-out text.
    """
    text, half = signed(found["mean"], digits), half_width(found.get("values", ()))
    if half is None:
        return text
    half = math.hypot(half, 1.96 * (found.get("standard_error") or 0))
    return f"{text} [{signed(found['mean'] - half, digits)}, {signed(found['mean'] + half, digits)}]"


def spread(values: Sequence[float], digits: int = 3, sign: str = "+") -> str:
    """+0.031 ± 0.005: the mean, and over several seeds the sample standard deviation."""
    text = f"{mean(values):{sign}.{digits}f}"
    return text if len(values) < 2 else f"{text} ± {statistics.stdev(values):.{digits}f}"


def folded(summary: str, inside: str) -> str:
    """What a reader opens: tables behind a figure."""
    return f'<details markdown="1">\n<summary>{summary}</summary>\n\n{inside}\n\n</details>'


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", r"\|") for cell in line) + " |" for line in lines)


# Losses of comparisons


def losses(name: str) -> dict[str, list[float]]:
    """Entry -> validation loss of every seed, of results.json or of a record of runs by path."""
    found = read(name)
    if "entries" in found:
        return {entry["name"]: entry["validation_loss"]["values"] for entry in found["entries"]}
    runs = {key: run for key, run in found["runs"].items() if key.startswith("runs/")}
    entries = dict.fromkeys(key.split("/")[1] for key in runs)
    return {
        entry: [run["validation_loss"] for key, run in runs.items() if key.split("/")[1] == entry] for entry in entries
    }


def sizes(name: str) -> dict[str, int]:
    """Entry -> parameters."""
    found = read(name)
    if "entries" in found:
        return {entry["name"]: entry["parameters"] for entry in found["entries"]}
    return {key.split("/")[1]: run["parameters"] for key, run in found["runs"].items() if key.startswith("runs/")}


def losses_table(names: Sequence[str], entries: Sequence[str], reference: str) -> str:
    """Entries beside their reference: parameters, loss, gap with its interval. ``names``: files of one budget."""
    found = {entry: values for name in names for entry, values in losses(name).items()}
    counts = {entry: count for name in names for entry, count in sizes(name).items()}
    rows = []
    for entry in [reference, *entries]:
        over = "" if entry == reference else gap(found[entry], found[reference])
        rows.append([entry, f"{counts[entry]:,}", ranged(found[entry]), over])
    return table(["entry", "parameters", "validation loss (seeds)", f"gap to {reference} [95 %]"], rows)


# Speed of layers


def timed(kind: str) -> tuple[str, list[dict[str, Any]]]:
    """The record that times the operator as it comes, or else at some setting, and its eager rows there."""
    for exact in (True, False):
        for name in ("speed/bench/bench.json", "speed/bench-rotor/bench.json", "speed/bench-gate/bench.json"):
            rows = [row for row in read(name)["rows"] if not row["error"] and row["mode"] == "eager"]
            rows = [row for row in rows if (row["contender"] if exact else row["contender"].partition(":")[0]) == kind]
            if rows:  # earlier versions called the phase ``passed``
                return name, [{"phase": row.get("passed"), **row} for row in rows]
    return "", []


def faster(kind: str) -> str:
    """How often the layer is faster than dense."""
    rows = timed(kind)[1]
    return f"faster in {sum(row['ratio'] < 1 for row in rows)} of {len(rows)} cases"


def speed_table(kind: str) -> str:
    """Time of the layer relative to dense by shape and dtype; results/speed has ranges."""
    rows = timed(kind)[1]
    if not rows:
        return "Not timed."
    columns = [("forward", 1), ("forward", 4096), ("step", 1), ("step", 4096)]
    cells: dict[tuple[str, str], dict[tuple[str, int], str]] = {}
    for row in rows:
        case = cells.setdefault((f"{row['in_features']} → {row['out_features']}", row["dtype"]), {})
        case[row["phase"], row["tokens"]] = f"{row['ratio']:.2f}"
    lines = [[shape, dtype, *(found.get(column, "") for column in columns)] for (shape, dtype), found in cells.items()]
    head = [
        "shape",
        "dtype",
        *(f"{what}, {tokens:,} {'token' if tokens == 1 else 'tokens'}" for what, tokens in columns),
    ]
    said = f"Time relative to dense (`{rows[0]['contender']}`, eager). "
    return f"{said}Ranges, machine and command: [speed](../../results/speed/README.md).\n\n{table(head, lines)}"


def machine(values: Mapping[str, Any]) -> str:
    """The machine of a record in a sentence."""
    found = values["machine"]
    gpus = ", ".join(found["gpus"]) or "no GPU"
    held = f", oneDNN held to {found['onednn_max_cpu_isa']}" if "onednn_max_cpu_isa" in found else ""
    units = " with AMX" if "amx_bf16" in found.get("extensions", ()) else ""
    return f"Machine: {found['processor']}{units}, {found['threads']} threads, {gpus}, torch {found['torch']}{held}."


# Fits to SmolLM2's projections

METHODS = {
    "rotor, double": "double rotor",
    "rotor, single": "single rotor",
    "Lemma-1 terms, depth 0, 3 terms": "Lemma-1 terms",
    "block-Hadamard, 64 blocks": "block-Hadamard",
    "HDPL, rank 8, 8 blocks": "HDPL",
}


def fits(projection: str, layers: str, method: str) -> list[dict[str, Any]]:
    """Rows of results/rotor/smollm2.jsonl, a seed each."""
    wanted = {"projection": f"{projection}_proj", "layers": layers, "method": method}
    return [row for row in read("rotor/smollm2.jsonl") if wanted.items() <= row.items()]


def over_original(rows: Sequence[Mapping[str, Any]], text: str) -> list[float]:
    """Nats per token above the original model's, by seed."""
    original = next(row for row in read("rotor/smollm2.jsonl") if row["method"] == "original")
    return [row[text] - original[text] for row in rows]


def constant(projection: str, layer: str) -> float:
    """Fit error of the mean output alone."""
    name = f"model.layers.{layer}.self_attn.{projection}_proj"
    return next(row["error"] for row in read("rotor/constant.jsonl") if row["name"] == name)


def fits_table(methods: Sequence[str]) -> str:
    """For every method a table of projections: fit errors, what WikiText-2 loses, and parameters."""
    parts = [
        "One projection of SmolLM2-135M-Instruct replaced. Errors are relative squared errors on held-out tokens. "
        "Losses are nats per token above the original on WikiText-2 (mean ± standard deviation, three seeds). The "
        "constant is the mean output alone, without any matrix."
    ]
    head = ["projection", "error", "error of the constant", "loss", "parameters"]
    for method in methods:
        rows = []
        for layer, projection in itertools.product(("12", "20"), "qkv"):
            found = fits(projection, layer, method)
            error, loss = mean([row["error"] for row in found]), spread(over_original(found, "wikitext2"))
            cells = [f"{error:.3f}", f"{constant(projection, layer):.3f}", loss, f"{found[0]['parameters']:,}"]
            rows.append([f"{projection} of layer {layer}", *cells])
        parts += [f"**{METHODS.get(method, method)}**"] * (len(methods) > 1) + [table(head, rows)]
    return "\n\n".join([*parts, "Records and commands: [rotor](../../results/rotor/README.md)."])
