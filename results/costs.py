"""What the arms of the plans cost: parameters, FLOPs a token, and time beside the reference arm, in turns.

    python results/costs.py

Nothing is learnt: a run ends after two steps. The record is results/costs.json; the gaps of results/README.md stand
beside it.
"""

import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path += [str(HERE / "hdpl"), str(HERE / "rotor")]

import added  # noqa: E402, F401  operators of the plans
import dense_start  # noqa: E402, F401

from relinear.compare import CompareSettings, compare  # noqa: E402
from relinear.compare.settings import planned  # noqa: E402
from relinear.system.files import write_json  # noqa: E402
from relinear.system.machine import describe_machine  # noqa: E402

#: a plan of each paper whose arms are a comparison's
PLANS = ("hdpl-5M", "transponder", "rotor")
#: costs are the same on any text, and this one is short
_TEXT = "data/shakespeare/input.txt"
_KEPT = ("parameters", "flops_per_token", "speed")


def costs(name: str) -> dict[str, dict]:
    """Arm -> parameters, FLOPs of a forward pass, and the speeds of training and inference over the reference's."""
    recipe = planned(HERE / "plans" / f"{name}.yaml").model_dump(mode="json", exclude_unset=True)
    train = recipe["train"]
    tokens = 2 * train["batch_size"] * train["data"]["sequence_length"]
    recipe = {key: value for key, value in recipe.items() if key not in ("tune", "budgets", "speed")}
    shorter = {"tokens": tokens, "seeds": [0]}
    shorter["train"] = train | {"data": train["data"] | {"data": _TEXT, "max_validation_tokens": tokens}}
    shorter["train"]["dtype"] = "float32"
    with tempfile.TemporaryDirectory() as folder:
        found = compare(CompareSettings.load(recipe | shorter, name), Path(folder) / "out")
    return {entry["name"]: {key: entry[key] for key in _KEPT} for entry in found["entries"]}


def main() -> None:
    """Measure and write."""
    found = {name: costs(name) for name in PLANS}
    write_json(HERE / "costs.json", {"command": "python results/costs.py", "machine": describe_machine()} | found)


if __name__ == "__main__":
    main()
