"""What the arms of the plans cost: parameters, FLOPs per token, and time beside the reference arm, in turns.

    python results/costs.py [NAME ...]

Nothing is learnt: a run ends after two steps. CGT, the fits to SmolLM2 and HDPL's narrower control have their FLOPs
counted and are not timed. The record is --out (runs/costs.json), where what is not named stays; the gaps of
results/README.md stand beside it.
"""

import argparse
import functools
import itertools
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path += [str(HERE / folder) for folder in ("hdpl", "rotor")]

import dense_start  # noqa: E402, F401

import added  # noqa: E402, F401  operators of the plans
from biased import FITTED, FRESH  # noqa: E402
from relinear.compare import CompareSettings, compare  # noqa: E402
from relinear.compare.match import measure_size, plan_comparison  # noqa: E402
from relinear.compare.settings import read_preregistration  # noqa: E402
from relinear.system.files import read_json, write_json  # noqa: E402
from relinear.system.machine import describe_machine  # noqa: E402

#: a plan of each paper whose arms are a comparison's
PLANS = ("hdpl-5M", "transponder", "rotor")
#: a comparison without a plan
_UNPLANNED = "hdpl/budgets/runs.json"
#: outputs of the projections of SmolLM2-135M, whose inputs are so many
_PROJECTIONS, _WIDTH = {"q_proj": 576, "k_proj": 192, "v_proj": 192}, 576
#: costs are the same on any text, and this one is short
_TEXT = "data/shakespeare/input.txt"
_KEPT = ("parameters", "flops_per_token", "speed")


def costs(name: str) -> dict[str, dict]:
    """Arm -> parameters, FLOPs of a forward pass, and the speeds of training and inference over the reference's."""
    recipe = read_preregistration(HERE / "plans" / f"{name}.yaml").comparison.model_dump(
        mode="json", exclude_unset=True
    )
    train = recipe["train"]
    tokens = 2 * train["batch_size"] * train["data"]["sequence_length"]
    recipe = {key: value for key, value in recipe.items() if key not in ("tune", "budgets", "speed")}
    shorter = {"tokens": tokens, "seeds": [0]}
    shorter["train"] = train | {"data": train["data"] | {"data": _TEXT, "max_validation_tokens": tokens}}
    shorter["train"]["dtype"] = "float32"
    with tempfile.TemporaryDirectory() as folder:
        found = compare(CompareSettings.load(recipe | shorter, name), Path(folder) / "out")
    return {entry["name"]: {key: entry[key] for key in _KEPT} for entry in found["entries"]}


def _sized(parameters: int, flops: int) -> dict[str, int]:
    return {"parameters": parameters, "flops_per_token": flops}


def unplanned() -> dict[str, dict]:
    """Arm of a comparison without a plan -> parameters and FLOPs of a forward pass."""
    recipe = read_json(HERE / _UNPLANNED)["recipe"]
    del recipe["train"]["steps"]
    vocabulary = int(recipe["train"]["data"]["tokenizer"].partition(":")[2])
    found = plan_comparison(CompareSettings.load(recipe, _UNPLANNED), vocabulary)
    return {one.name: _sized(one.size.parameters, one.size.flops) for one in found}


def cgt() -> dict[str, dict]:
    """Arm of CGT's plan on texts -> parameters and FLOPs of a forward pass, without those of attention's scores."""
    recipe = read_preregistration(HERE / "plans" / "cgt-sources-anew.yaml").comparison
    sizes = {arm: measure_size(recipe.settings_of(arm), 258) for arm in recipe.entries}
    return {arm: _sized(size.parameters, size.flops) for arm, size in sizes.items()}


def fitted() -> dict[str, dict]:
    """Method and projection -> parameters and FLOPs of what takes the projection's place."""
    found = {}
    for (name, config), (projection, width) in itertools.product((FITTED | FRESH).items(), _PROJECTIONS.items()):
        layer = config.build(_WIDTH, width, device="meta")
        parameters = sum(one.numel() for one in layer.parameters())
        found[f"{name} in {projection}"] = _sized(parameters, layer.flops_per_token())
    return found


#: name in the record -> what makes it
_MADE: dict[str, Callable[[], dict[str, dict]]] = {
    **{name: functools.partial(costs, name) for name in PLANS},
    "hdpl-budgets": unplanned,
    "cgt": cgt,
    "fits": fitted,
}


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(_MADE))
    parser.add_argument("--out", type=Path, default=Path("runs/costs.json"), help="other entries in it stay")
    names, record = (options := parser.parse_args()).names, options.out
    found = {name: _MADE[name]() for name in names or _MADE}
    head = {"command": "python results/costs.py", "machine": describe_machine()}
    if names and record.is_file():
        head = read_json(record)
        head["machine"] = describe_machine() if {*names} & {*PLANS} else head["machine"]
    write_json(record, head | found)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
