"""A grid of 24 small runs stacked and one by one: the largest difference of losses, and the processor time of each.

    python results/speed/stacked.py TEXT --out results/speed/stacked.json

Runs of one architecture differ in seed, rate and initialisation: two layers, bytes, one thread. Both ways train and
evaluate all of them in this process; preparing the text is in neither.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from relinear.system.files import write_json
from relinear.system.machine import command_line, describe_machine
from relinear.train import TrainSettings, train
from relinear.train.stacked import train_stacked

HERE = Path(__file__).resolve().parent
SEEDS, RATES, STARTS = range(4), (0.004, 0.008, 0.016), (0.05, 0.1)
CASES = {
    "dense": {},
    "low_rank:rank=4": {"operators": {"all-linear": "low_rank:rank=4"}},
    "ccl:rank=16": {
        "operators": {"all-linear": "ccl:rank=16"},
        "attachments": [{"kind": "context_manager", "dim": 64}],
    },
    "rotor": {"operators": {r".*\.self_attn\.[qkv]_proj": "rotor"}},
}


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    """What it returns, and the processor's seconds."""
    start = time.process_time()
    return work(), time.process_time() - start


def losses(folders: list[Path]) -> list[float]:
    """Validation losses at the end of runs."""
    return [json.loads((folder / "run.json").read_text())["result"]["validation_loss"] for folder in folders]


def measured(case: dict[str, Any], text: Path, width: int, steps: int, folder: Path) -> dict[str, Any]:
    """One architecture both ways."""
    shared = TrainSettings.model_validate(
        {
            "model": "tiny",
            "model_overrides": {"hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": 2},
            "data": {"data": str(text), "tokenizer": "bytes", "sequence_length": 64, "max_validation_tokens": 8192},
            **{"batch_size": 8, "steps": steps, "eval_every": 0, "threads": 1, "device": "cpu"},
            **{"dtype": "float32", "save_model": False},
            **case,
        }
    )
    grid = [(seed, rate, start) for seed in SEEDS for rate in RATES for start in STARTS]
    runs = []
    for number, (seed, rate, start) in enumerate(grid):
        overrides = shared.model_overrides | {"initializer_range": start}
        own = shared.updated(seed=seed, learning_rate=rate, model_overrides=overrides)
        runs.append((own, folder / f"stacked-{number}"))
    alone = [folder / f"alone-{number}" for number in range(len(runs))]
    train(runs[0][0].updated(steps=2), folder / "once")  # the text is prepared, and kernels are built
    told, stacked = timed(lambda: train_stacked(runs))
    if "refused" in told:
        return {"runs": len(runs), "width": width, "refused": told["refused"]}
    _, apart = timed(lambda: [train(own, place) for (own, _), place in zip(runs, alone, strict=True)])
    pairs = zip(losses([place for _, place in runs]), losses(alone), strict=True)
    apart_by = [abs(one - other) for one, other in pairs]
    worst = apart_by.index(max(apart_by))
    return {
        **{"runs": len(runs), "width": width, "steps": steps, "stacked_seconds": stacked, "alone_seconds": apart},
        **{"ratio": apart / stacked, "largest_difference": apart_by[worst], "of": grid[worst]},
        "median_difference": statistics.median(apart_by),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path)
    parser.add_argument("--widths", type=int, nargs="+", default=(32, 64))
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--out", type=Path, default=HERE / "stacked.json")
    given = parser.parse_args()
    rows = []
    for name, case in CASES.items():
        for width in given.widths:
            with tempfile.TemporaryDirectory() as folder:
                rows.append({"entry": name} | measured(case, given.text, width, given.steps, Path(folder)))
            print(json.dumps(rows[-1]), flush=True)
    write_json(given.out, {"command": command_line(), "machine": describe_machine(), "rows": rows})


if __name__ == "__main__":
    main()
