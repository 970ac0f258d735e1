"""Collect what a comparison at equal file size has found: ``python results/bytes/collect.py runs/bytes``.

Of every size that has ended, by entry: losses of the stored models by seed, the gap to dense, bits, bytes, parameters,
and the trials that chose.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from relinear.compare.folder import recipe_of
from relinear.system.files import read_json

KEPT = ("name", "parameters", "flops_per_token", "learning_rate", "tuning", "validation_loss", "gap", "stored")


def main(folder: Path) -> None:
    """Print the record of ``folder``, a comparison at one size of the file or at several."""
    record = read_json(folder / "run.json")
    ended = [read_json(path) for path in folder.glob("sizes/*/results.json")] or [read_json(folder / "results.json")]
    sizes = [
        {"bytes": one["match"]["target"], "entries": [{key: entry[key] for key in KEPT} for entry in one["entries"]]}
        for one in ended
    ]
    sizes.sort(key=lambda size: size["bytes"])
    made = {key: record[key] for key in ("command", "date", "machine")} | {"recipe": recipe_of(record)}
    json.dump(made | {"sizes": sizes}, sys.stdout, indent=1)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
