"""The table of methods.jsonl in Markdown: python results/compress/table.py results/compress/methods.jsonl"""

import json
import sys
from pathlib import Path


def cell(row: dict | None, text: str) -> str:
    """The loss above the original's, with half the width of its interval."""
    if row is None:
        return ""
    over, half = row["over_dense"][text]
    return f"{over:+.3f} ± {half:.3f}"


def main() -> None:
    """A table for each text: methods down, budgets across."""
    rows = [json.loads(line) for line in Path(sys.argv[1]).read_text(encoding="utf-8").splitlines()]
    dense = next(row for row in rows if row["method"] == "dense")
    found = {(row["method"], row["keep"], row["skip"]): row for row in rows if row["method"] != "dense"}
    keeps = sorted({keep for _, keep, _ in found if keep is not None}, reverse=True)
    for text, loss in dense["loss"].items():
        print(f"**{text}** (original {loss:.3f} nats)\n")
        print("| method | " + " | ".join(f"{keep:g}" for keep in keeps) + " |\n|" + " --- |" * (len(keeps) + 1))
        for method, skip in dict.fromkeys((method, skip) for method, _, skip in found):
            label = method if not skip else f"{method}, calibrated from document {skip} on"
            alone = found.get((method, None, skip))
            cells = [cell(found.get((method, keep, skip)), text) for keep in keeps]
            if alone is not None:  # no budget of ours: its stored bits a weight are stated
                cells = [f"{cell(alone, text)} at {alone['bits']:g} bits a weight", *[""] * (len(keeps) - 1)]
            print(f"| {label} | " + " | ".join(cells) + " |")
        print()


if __name__ == "__main__":
    main()
