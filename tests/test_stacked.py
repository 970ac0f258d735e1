"""Many small runs at once: each is the run that it would be alone, and what has no stacked form is refused."""

import json

import numpy as np
import pytest
import torch

from relinear import from_pretrained
from relinear.compare.run import compare
from relinear.train import run as train_run
from relinear.train import stacked, train
from relinear.train.settings import TrainSettings
from relinear.train.trainer import NonFiniteLossError

LLAMA = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
CASES = {
    "dense": {},
    "aux": {"operators": {"up_proj": "hdpl:rank=4,blocks=2,noise=false"}, "schedule": "onecycle"},
    "metrics": {"operators": {"q_proj": "transponder"}, "optimizer": "adam", "max_grad_norm": 0.0},
    "context": {
        "model": "gpt2-ccl-64",
        "model_overrides": {"n_layer": 1},
        "operators": {"mlp.c_fc": "ccl:rank=8"},
        "attachments": [{"kind": "context_manager", "dim": 64}],
    },
}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("\n\n".join(f"paragraph {i} says {i * i} and {i % 7}" for i in range(600)))
    return path


@pytest.fixture
def taken(monkeypatch):
    """A stacked step takes as long as one run's, whatever the machine is doing."""
    timed = stacked.seconds_of
    monkeypatch.setattr(stacked, "seconds_of", lambda work: timed(work) * 0 + 1e-3)


def settings(text, **changes):
    values = {
        "model": "tiny",
        "model_overrides": LLAMA,
        "data": {"data": str(text), "sequence_length": 32, "max_validation_tokens": 640},
        "steps": 6,
        "batch_size": 4,
        "log_every": 2,
        "eval_every": 4,
        "eval_start_tokens": 200,
        "dtype": "float32",
        "threads": 1,
        "save_model": False,
    }
    return TrainSettings.load(values | changes)


def different(shared, folder, rates=(1e-3, 4e-3), spreads=(0.02, 0.05)):
    """Runs that differ in all that they may differ in."""
    return [
        (
            shared.updated(
                seed=seed,
                learning_rate=rate,
                warmup_ratio=0.1 + 0.2 * seed,
                model_overrides=shared.model_overrides | {"initializer_range": spread},
            ),
            folder / f"{rate:g}-{seed}",
        )
        for seed, (rate, spread) in enumerate(zip(rates, spreads, strict=True))
    ]


def read(folder):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return json.loads((folder / "run.json").read_text()), rows


@pytest.mark.parametrize("case", CASES)
def test_each_is_the_run_that_it_is_alone(case, text, tmp_path, taken):
    runs = different(settings(text, **CASES[case]), tmp_path / "stacked")
    assert stacked.train_stacked(runs)["runs"] == 2
    for each, folder in runs:
        alone = tmp_path / folder.name
        train(each, alone)
        (record, rows), (wanted, wanted_rows) = read(folder), read(alone)
        assert record.keys() - wanted.keys() == {"stacked"}
        own = {"stacked", "result"}
        assert {k: v for k, v in record.items() if k not in own} == {k: v for k, v in wanted.items() if k not in own}
        assert [list(row) for row in rows] == [list(row) for row in wanted_rows]
        for row, other in zip(rows, wanted_rows, strict=True):
            assert numbers(row) == pytest.approx(numbers(other), rel=2e-5, abs=1e-7)
        assert numbers(record["result"]) == pytest.approx(numbers(wanted["result"]), rel=2e-5, abs=1e-7)
        blocks = [np.load(place / "block_losses.npy") for place in (folder, alone)]
        np.testing.assert_allclose(*blocks, rtol=2e-5)
        assert train_run.read_ended(each, folder).validation_loss == record["result"]["validation_loss"]


def numbers(values):
    """What does not tell of time, memory or places."""
    apart = {"tokens_per_second", "seconds", "peak_memory_bytes", "out_dir"}
    flat = values | values.get("aux", {})
    return {key: value for key, value in flat.items() if key not in apart | {"aux"}}


def test_in_float64_gradients_are_those_of_a_run_alone(text, tmp_path, taken, monkeypatch):
    for room in (stacked, train_run):
        build = room.build_model
        monkeypatch.setattr(room, "build_model", lambda *given, build=build: build(*given).double())
    runs = different(settings(text, **CASES["context"]), tmp_path / "stacked")
    stacked.train_stacked(runs)
    for each, folder in runs:
        train(each, tmp_path / folder.name)
        norms = [
            [row["grad_norm"] for row in read(place)[1] if "grad_norm" in row]
            for place in (folder, tmp_path / folder.name)
        ]
        assert norms[0] == pytest.approx(norms[1], rel=1e-12)


def test_a_run_that_diverges_holds_up_no_other(text, tmp_path, taken):
    shared = settings(text, optimizer="adam", max_grad_norm=0.0, schedule="constant", warmup_steps=0)
    runs = [(shared.updated(learning_rate=rate), tmp_path / f"{rate:g}") for rate in (1e-3, 1e9)]
    stacked.train_stacked(runs)
    assert train(runs[0][0], tmp_path / "alone").validation_loss == pytest.approx(
        read(runs[0][1])[0]["result"]["validation_loss"], rel=1e-6
    )
    record, rows = read(runs[1][1])
    assert (record["status"], record["diverged"]) == ("failed", True)
    assert "at step 2" in record["error"]
    assert train_run.read_outcome(runs[1][1]) == float("inf")
    assert [row["step"] for row in rows] == [0]
    with pytest.raises(NonFiniteLossError, match="at step 2"):
        train(runs[1][0], tmp_path / "alone-too")


def test_models_are_saved_each_by_itself(text, tmp_path, taken):
    runs = different(settings(text, save_model=True, operators={"up_proj": "low_rank:rank=2"}), tmp_path / "stacked")
    stacked.train_stacked(runs)
    for each, folder in runs:
        train(each, tmp_path / folder.name)
        model, other = (from_pretrained(place / "model") for place in (folder, tmp_path / folder.name))
        ids = torch.arange(32).reshape(1, -1)
        torch.testing.assert_close(model(ids).logits, other(ids).logits, rtol=1e-4, atol=1e-5)
    sizes = [(folder / "model" / "model.safetensors").stat().st_size for _, folder in runs]
    assert sizes[0] == (tmp_path / runs[0][1].name / "model" / "model.safetensors").stat().st_size


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"dtype": "bfloat16"}, "dtype='bfloat16'"),
        ({"accumulation": 2}, "accumulation=2"),
        ({"compile": True}, "compile=True"),
        ({"operators": {"up_proj": "hdpl:rank=4,blocks=2"}}, "random"),
        ({"model_overrides": LLAMA | {"attention_dropout": 0.1}}, "random"),
    ],
)
def test_what_has_no_stacked_form_is_refused(changes, said, text, tmp_path, taken):
    assert said in stacked.train_stacked(different(settings(text, **changes), tmp_path / "stacked"))["refused"]
    assert not (tmp_path / "stacked").exists()


@pytest.mark.parametrize(("bound", "said"), [("_MEASURING", "work, not the start"), ("_LONGEST", "nothing kept")])
def test_long_stacks_are_refused(bound, said, text, tmp_path, taken, monkeypatch):
    monkeypatch.setattr(stacked, bound, 1e-4)
    assert said in stacked.train_stacked(different(settings(text), tmp_path / "stacked"))["refused"]


def test_the_slower_way_is_refused(text, tmp_path, monkeypatch):
    monkeypatch.setattr(stacked, "seconds_of", lambda work: 1.0 if work.__name__ == "_one" else 2.0)
    assert "one by one 2 s" in stacked.train_stacked(different(settings(text), tmp_path / "stacked"))["refused"]


def test_a_comparison_at_once_is_the_comparison(text, tmp_path, taken):
    train = settings(text).model_dump(exclude_unset=True) | {"steps": 8}
    recipe = {
        "entries": {"dense": "dense", "hdpl": "hdpl:rank=4,blocks=2"},
        "train": train,
        "seeds": [0, 1, 2],
        "tune": {"learning_rates": [1e-3, 4e-3], "fraction": 0.5, "extensions": 0},
        "speed": {"seconds": 0},
    }
    told = []
    at_once = compare(recipe, tmp_path / "at-once", isolate=False, parallel="auto", on_event=told.append)
    usual = compare(recipe, tmp_path / "usual", isolate=False)
    for own, other in zip(at_once["entries"], usual["entries"], strict=True):
        assert own["learning_rate"] == other["learning_rate"]
        assert own["validation_loss"]["values"] == pytest.approx(other["validation_loss"]["values"], rel=1e-5)
    assert [[run.get("stacked") for run in entry["runs"]] for entry in at_once["entries"]] == [[3] * 3, [None] * 3]
    assert any("at once" in note and note.endswith("for dense.") for note in at_once["notes"])
    assert any("one run after the other" in event.what and "random" in event.what for event in told)
    with pytest.raises(ValueError, match="give one of them"):
        compare(recipe, tmp_path / "shared", shared=True, parallel="auto")
