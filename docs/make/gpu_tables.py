"""Tables of results/gpu/README.md, from the records of ``make gpu``: of its first version, and in ``compiled``."""

from __future__ import annotations

import importlib.util
import statistics
import sys
from collections.abc import Callable, Mapping
from typing import Any

import measured
from measured import table

__all__ = ["PARTS", "peak", "share"]

_KERNELS = ("transponder", "hdpl", "ccl", "cgt", "rotor", "rotor_step")
#: kernel -> the phases in which it still runs
_KEPT = {
    "transponder": ("forward", "step"),
    "hdpl": ("forward", "step"),
    "ccl": (),
    "cgt": ("forward",),
    "rotor": ("forward",),
    "rotor_step": ("forward", "step"),
}
#: model -> the one that it is held against
_MODELS = {"hdpl-67m-hdpl": "hdpl-67m", "llama-60m-transponder": "llama-60m"}
#: tokens that stand for what is bound by launches, and for what is not
_TOKENS = (64, 4096, 65536)


def _rows(part: str, what: str) -> list[dict[str, Any]]:
    return [row for row in measured.read(f"gpu/{part}.json")["rows"] if row["what"] == what]


def _number(row: Mapping[str, Any], name: str) -> float:
    return float(row.get(name, "nan"))  # what is not finite stands there in words


def machine() -> str:
    """The device and the versions."""
    found = measured.read("gpu/hdpl.json")["machine"]
    ended = measured.read("gpu/run.json")
    return (
        f"{found['gpus'][0]}, {found['cores']} processors of {found['processor']}, torch {found['torch']}; "
        f"{ended['minutes']:g} minutes in all, {ended['prepared']:.0f} s of them for checks and compilation."
    )


def checks() -> str:
    """The largest error of each kernel by dtype."""
    rows = []
    for kind in _KERNELS:
        line = [f"`{kind}`"]
        for dtype in ("float32", "float16", "bfloat16"):
            found = [row for row in _rows(kind, "check") if row["dtype"] == f"torch.{dtype}"]
            wrong = sum(not row["right"] for row in found)
            finite = [_number(row, "relative_error") for row in found if row["right"]]
            line.append(f"{max(finite):.1e}" + (f", **{wrong} of {len(found)} wrong**" if wrong else ""))
        rows.append(line)
    return table(["kernel", "float32", "float16", "bfloat16"], rows)


def times() -> str:
    """Torch's form and the kernel against a dense layer."""
    rows = []
    for kind in _KERNELS:
        found = {(row["tokens"], row["width"], row["phase"]): row for row in _rows(kind, "time")}
        for tokens in _TOKENS:
            for width in sorted({width for _, width, _ in found}):
                line = [f"`{kind}`", f"{tokens:,}", str(width)]
                for phase in ("forward", "step"):
                    row = found[tokens, width, phase]
                    wrong = " (wrong)" if row["relative_error"] == "nan" else ""
                    line.append(f"{1e3 * row['dense_seconds']:.2f}")
                    line.append(f"{row['torch_ratio']:.2f}")
                    line.append(f"{row['kernel_ratio']:.2f}{wrong}")
                rows.append(line)
    ratios = ["torch's", "kernel"]
    return table(
        ["operator", "tokens", "width", "forward: dense, ms", *ratios, "step: dense, ms", *ratios],
        rows,
    )


def tiles() -> str:
    """What the best of the tiles gains, by kernel."""
    rows = []
    for kind in _KERNELS:
        for width in sorted({row["width"] for row in _rows(kind, "tile")}):
            found = [row for row in _rows(kind, "tile") if row["width"] == width and "ratio" in row]
            best = min(found, key=lambda row: row["ratio"])
            tile = " x ".join(str(size) for size in best["tile"][:3])
            middle = statistics.median(row["ratio"] for row in found)
            rows.append([f"`{kind}`", str(width), tile, f"{best['ratio']:.2f}", f"{middle:.2f}"])
    heads = ["kernel", "width", "best tile (rows x columns x depth)", "its step to the built-in one's", "the median's"]
    return table(heads, rows)


def share(name: str) -> float:
    """Tokens a second of a model with its operators, relative to the plain one's."""
    ours, theirs = (_rows(part, "training")[-1]["tokens_per_second"] for part in (name, _MODELS[name]))
    return ours / theirs


def peak(name: str) -> float:
    """Peak memory of a model's training, in GB."""
    return _rows(name, "training")[-1]["peak_bytes"] / 1e9


def models() -> str:
    """Speed and memory of training, and the loss of the last step that both models took."""
    rows = []
    for name, plain in _MODELS.items():
        ours, theirs = _rows(name, "training"), _rows(plain, "training")
        shared = min(ours[-1]["step"], theirs[-1]["step"])
        for label, found in ((plain, theirs), (name, ours)):
            at = next(row for row in reversed(found) if row["step"] <= shared)
            speed, relative = found[-1]["tokens_per_second"], share(name) if found is ours else 1.0
            memory = f"{peak(label):.1f}"
            rows.append(
                [f"`{label}`", f"{speed:,.0f}", f"{relative:.2f}", memory, str(at["step"]), f"{at['loss']:.2f}"]
            )
    heads = ["model", "tokens a second", "relative", "peak memory, GB", "steps", "training loss there"]
    return table(heads, rows)


def kept() -> str:
    """Where each kernel took a tenth less time than torch's operations, both in eager mode."""
    rows = []
    for kind in _KERNELS:
        line = [f"`{kind}`"]
        for phase in ("forward", "step"):
            found = [row for row in _rows(kind, "time") if row["phase"] == phase and row["relative_error"] != "nan"]
            ratios = [row["kernel_ratio"] / row["torch_ratio"] for row in found]
            won = [ratio for ratio in ratios if ratio < 0.9]
            line += [f"{len(won)} of {len(found)}", f"{statistics.median(won):.2f}" if won else ""]
        rows.append([*line, " and ".join(_KEPT[kind]) or "nothing"])
    heads = ["kernel", "forward: rows", "median there", "step: rows", "median there", "stays for"]
    return table(heads, rows)


def verdict() -> str:
    """What the call that compiles has found so far, as it prints it."""
    path = measured.ROOT / "tools" / "gpu.py"
    spec = importlib.util.spec_from_file_location("gpu_call", path)
    assert spec is not None
    assert spec.loader is not None
    call = importlib.util.module_from_spec(spec)
    sys.modules["gpu_call"] = call  # dataclasses look their module up
    spec.loader.exec_module(call)
    lines = [line.partition(": ") for line in call.verdict(measured.RESULTS / "gpu" / "compiled")]
    return table(["what", "found"], [[what, found] for what, _, found in lines])


PARTS: dict[str, Callable[[], str]] = {
    "machine": machine,
    "checks": checks,
    "times": times,
    "tiles": tiles,
    "models": models,
    "kept": kept,
    "verdict": verdict,
}
