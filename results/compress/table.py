"""The table of methods.jsonl in Markdown: python results/compress/table.py results/compress/methods.jsonl"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from relinear.system.confidence import t_quantile

#: windows of a text, or groups of passages, in rows that do not tell: these hold 1.96 standard errors
WINDOWS = {"wikitext2": 10, "books": 6, "ptb": 4, "lambada": 10}


def over_dense(row: dict) -> dict[str, tuple[float, float]]:
    """By text: the loss above the original's, and half the width of Student's interval of 95 %."""
    if "windows" in row:
        return row["over_dense"]
    wider = {text: t_quantile(count - 1) / 1.96 for text, count in WINDOWS.items()}
    return {text: (over, half * wider[text]) for text, (over, half) in row["over_dense"].items()}


def cell(rows: list[dict], text: str) -> str:
    """The loss above the original's, with half the width of its interval; of several calibrations, all."""
    if not rows:
        return ""
    over, half = rows[0]["over_dense"][text]
    shown = f"{over:+.3f} ± {half:.3f}"
    if len(rows) > 1:
        shown += " (" + ", ".join(f"{value:.3f}" for value in sorted(row["over_dense"][text][0] for row in rows)) + ")"
    return shown


def label(row: dict) -> str:
    """A method, how long it healed where that is told, and the one text that it was calibrated on if not all."""
    alone = row.get("calibrated_on", [])
    longer = f", {row['heal_tokens']:,} tokens" if "heal_tokens" in row else ""
    return row["method"] + longer + (f", {alone[0]} alone" if len(alone) == 1 else "")


def tables(rows: Sequence[dict]) -> str:
    """A table for each text: methods down, budgets across."""
    originals: dict[str, float] = {}
    found: dict[tuple, dict[int, dict]] = {}
    for row in rows:
        if row["method"] == "dense":
            originals = row["loss"] | originals
            continue
        seen = found.setdefault((label(row), row["keep"]), {}).setdefault(row["skip"], {"over_dense": {}})
        seen.update(row, over_dense=seen["over_dense"] | over_dense(row))
    keeps = sorted({keep for _, keep in found if keep is not None}, reverse=True)
    lines = []
    for text, loss in originals.items():
        lines += [f"**{text}** (original {loss:.3f} nats)", ""]
        lines += ["| method | bits | " + " | ".join(f"{keep:g}" for keep in keeps) + " |"]
        lines += ["|" + " --- |" * (len(keeps) + 2)]
        for method in dict.fromkeys(method for method, _ in found):
            own = {
                keep: [rows[skip] for skip in sorted(rows) if text in rows[skip]["over_dense"]]
                for (name, keep), rows in found.items()
                if name == method
            }
            if not any(own.values()):
                continue
            bits = next(row for rows in own.values() for row in rows).get("bits", 16)
            cells = [cell(own.get(keep, []), text) for keep in keeps]
            if None in own:  # rounded, and nothing else
                cells = [f"all kept: {cell(own[None], text)}", *[""] * (len(keeps) - 1)]
            lines.append(f"| {method} | {bits:g} | " + " | ".join(cells) + " |")
        lines.append("")
    return "\n".join(lines).strip()


if __name__ == "__main__":
    print(tables([json.loads(line) for line in Path(sys.argv[1]).read_text(encoding="utf-8").splitlines()]))
