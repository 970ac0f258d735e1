"""A small comparison, its text and what its runs lost, for several files of tests."""

from relinear.compare.tune import Trials
from relinear.system.files import write_json
from relinear.training import TrainResult
from relinear.training.run import read_final_loss

VOCABULARY = 258


WIDTH = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}


def small(text, **changes):
    """A comparison of three entries that takes a second or two."""
    train = {
        "model": "tiny",
        "model_overrides": WIDTH,
        "data": {"data": str(text), "sequence_length": 32, "max_validation_tokens": 320},
        "steps": 4,
        "batch_size": 2,
        "eval_every": 2,
        "save_every": 0,  # no checkpoint but where a test resumes from one
        "dtype": "float32",
        "threads": 1,
    }
    recipe = {
        "name": "small",
        "entries": {"dense": "dense", "low_rank": "low_rank:rank=4", "hdpl": "hdpl:rank=4,blocks=8"},
        "train": train,
        "seeds": [0, 1],
        "match": "parameters",
        "speed": {"seconds": 0},
    }
    return recipe | changes


def losses(results):
    return {e["name"]: [run["validation_loss"] for run in e["runs"]] for e in results["entries"]}


def trials_in(folder, evaluate, prefix=""):
    """Trials whose runs come to what ``evaluate`` says (None where one diverges), and leave what runs leave."""
    return Trials(folder, lambda rate, spread, place: (lambda: evaluate(rate, spread), place), prefix)


def made(runs):
    """What executes the runs of ``trials_in``, unless they have ended."""
    for evaluate, place in runs:
        if read_final_loss(place) is None:
            loss = evaluate()
            result = TrainResult(loss, None, None, 0, 0, None, 0, {}, 1, None, []).to_dict()
            ended = {"status": "done", "result": result} if loss is not None else {"status": "failed", "diverged": True}
            write_json(place / "run.json", {"settings": {}} | ended)
    return [read_final_loss(place) for _, place in runs]
