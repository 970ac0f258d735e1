"""Compressed models at equal file size: GGUF files beside llama.cpp's for the README, losses for its page."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import measured
import svg
from measured import signed
from relinear.system.confidence import half_width

__all__ = ["PICTURES", "alt", "picture"]

WIDTH, LEFT, RIGHT, STEP, TOP = 400, 130, 108, 24, 40


@dataclasses.dataclass(frozen=True)
class Rows:
    """Rows under headings, each a label and a row of the record of ``model``; a bar longer than ``most`` is cut.

    Rows of "smollm2-rotated" are losses (``rounding.jsonl``), of "unrounded" KL divergences (``judged.jsonl``).
    """

    groups: Sequence[tuple[str, Sequence[tuple[str, str]]]]
    most: float
    tick: float
    model: str = "smollm2-rotated"
    shown: str = "nats per token above the original: less is better"
    said: str = "Loss above the original in nats per token, rotated SmolLM2-135M on WikiText-2"
    decimals: int = 3


_AT_4, _AT_3 = "170 MB", "160 MB"
#: llama.cpp's mixtures of which the README shows the size
_SIZES = {"Q3_K_M": 3276096, "IQ4_XS": 3512128, "Q4_K_M": 3777856, "Q5_K_M": 4310336}
PICTURES = {
    "compress-file-size": Rows(
        [
            (f"{bytes / 1e6:.1f} MB", [("relinear", f"relinear:{size}"), (f"llama.cpp, {size}", f"llama.cpp:{size}")])
            for size, bytes in _SIZES.items()
        ],
        0.0058,
        0.002,
        "unrounded",
        "KL divergence in nats, 5.8 M-parameter Llama: less is better",
        "KL divergence from the original in nats, a Llama of 5.8 M parameters, GGUF files of equal size",
        5,
    ),
    "compress-equal-bytes": Rows(
        [
            (
                _AT_4,
                [
                    ("compress", "bits:4.25"),
                    ("GPTQ, planned bits", "bits-order:4.25"),
                    ("GPTQ in order", "gptq-order:4@96"),
                    ("GPTQ", "gptq:4@96"),
                    ("CALDERA", "caldera:4.25"),
                    ("GPTQ and descent", "uniform-order:4@96"),
                    ("AWQ", "awq:4@96"),
                    ("llama.cpp, IQ3_S", "llama.cpp:IQ3_S"),
                    ("HQQ", "hqq:4@96"),
                    ("to nearest", "nearest:4@96"),
                ],
            ),
            (
                _AT_3,
                [
                    ("compress", "bits:3.5"),
                    ("GPTQ, planned bits", "bits-order:3.5"),
                    ("CALDERA", "caldera:3.5"),
                    ("GPTQ and descent", "uniform-order:3@48"),
                    ("GPTQ in order", "gptq-order:3@48"),
                    ("GPTQ", "gptq:3@48"),
                    ("to nearest", "nearest:3@48"),
                    ("HQQ", "hqq:3@48"),
                ],
            ),
        ],
        0.53,
        0.2,
    ),
}


def _found(row: str, model: str) -> tuple[float, float, int]:
    """What a row measured, half its interval, and the file's bytes: seed 0."""
    if model == "unrounded":
        by, at = row.split(":")
        wanted = {"model": model, "by": by, "at": at}
        record = next(one for one in measured.read("compress/judged.jsonl") if wanted.items() <= one.items())
        windows = record["texts"]["books"]["kl"]
        return sum(windows) / len(windows), half_width(windows), record["bytes"]
    wanted = {"row": row, "model": model, "seed": 0}
    record = next(one for one in measured.read("compress/rounding.jsonl") if wanted.items() <= one.items())
    return record["against"]["wikitext2"]["nats"], record["against"]["wikitext2"]["interval"], record["bytes"]


def picture(theme: str, name: str) -> str:
    """The SVG: a bar a row with its interval of 95 %, ours in its own colour."""
    ink, soft, grid, ours, _ = svg.THEMES[theme]
    rows = PICTURES[name]
    lines = sum(2 + len(group) for _, group in rows.groups) - 1
    bottom = TOP + STEP * lines

    def at(nats: float) -> float:
        return LEFT + min(nats, rows.most) / rows.most * (WIDTH - LEFT - RIGHT)

    parts = [svg.text(0, 16, rows.shown, soft, "start")]
    for tick in range(int(rows.most / rows.tick) + 1):
        x = at(tick * rows.tick)
        parts += [svg.line(x, TOP - 14, x, bottom, grid, 1)]
        parts += [svg.text(x, bottom + 18, svg.number(tick * rows.tick, "g"), soft)]
    y = TOP
    for heading, group in rows.groups:
        parts.append(svg.text(0, y, heading, ink, "start", weight=600))
        for label, row in group:
            y += STEP
            nats, half, _ = _found(row, rows.model)
            color = ours if label.startswith(("relinear", "compress")) else soft
            width = max(1.0, at(nats) - LEFT)
            parts.append(svg.text(LEFT - 6, y + 4, label, ink, "end"))
            parts.append(f'<rect x="{LEFT}" y="{y - 7}" width="{width:.1f}" height="14" fill="{color}"/>')
            parts.append(svg.line(at(max(0.0, nats - half)), y, at(nats + half), y, ink, 1.6))
            parts.append(svg.text(WIDTH, y + 4, _number(rows, nats) + f" ± {half:.{rows.decimals}f}", ink, "end"))
        y += 2 * STEP
    return svg.whole(WIDTH, bottom + 28, alt(name), parts)


def alt(name: str) -> str:
    """What the picture shows in words: of each size the best two, or all where they are few."""
    rows = PICTURES[name]
    groups = [
        f"{heading}: " + ", ".join(f"{label} {_number(rows, _found(row, rows.model)[0])}" for label, row in group[:3])
        for heading, group in rows.groups
    ]
    return f"{rows.said}. {'; '.join(groups)}."


def _number(rows: Rows, value: float) -> str:
    """A difference has a sign, a divergence none."""
    return f"{value:.{rows.decimals}f}" if rows.model == "unrounded" else signed(value, rows.decimals)
