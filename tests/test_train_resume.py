"""A run that was killed and started again ends exactly where the run that was not would have ended."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from conftest import mostly_slow
from relinear.hf.training_loss import ModelWithObjective
from relinear.models.cgt.objective import CGTObjective
from relinear.training import fit, read_metrics, read_result, train
from tiny_models import make_cgt
from train_helpers import FIT, FIT_DATA, Interrupt, dropout_model, run_settings, stop_at


def comparable(rows):
    timing = {"tokens_per_second", "seconds"}
    return [{key: value for key, value in row.items() if key not in timing} for row in rows]


@pytest.mark.parametrize("optimizer", mostly_slow(["adamw", "adam"], "adamw"))
@pytest.mark.parametrize("schedule", mostly_slow(["cosine", "onecycle"], "cosine"))
def test_resumed_run_is_the_same_run(tmp_path, optimizer, schedule):
    settings = FIT.replace(optimizer=optimizer, schedule=schedule)
    whole = dropout_model()
    expected = fit(whole, FIT_DATA, settings, out_dir=tmp_path / "whole")
    folder = tmp_path / "parts"
    for step in (5, 8):
        with pytest.raises(Interrupt):
            fit(dropout_model(), FIT_DATA, settings, out_dir=folder, on_progress=stop_at(step))
    (folder / "checkpoints" / ".partial" / "checkpoint-8").mkdir(parents=True)  # as if killed while writing
    resumed = dropout_model()
    torch.manual_seed(123)
    seen = []
    result = fit(resumed, FIT_DATA, settings, out_dir=folder, on_progress=lambda p: seen.append(p.done))
    assert min(seen) == 6  # it did not begin anew
    assert result.validation_loss == expected.validation_loss
    assert comparable(result.curve) == comparable(expected.curve)
    assert comparable(read_metrics(folder / "metrics.jsonl")) == comparable(expected.curve)
    for (name, one), other in zip(whole.named_parameters(), resumed.parameters(), strict=True):
        assert torch.equal(one, other), name


def test_a_module_around_a_model_with_tied_weights_resumes(tmp_path):
    def wrapped():
        torch.manual_seed(0)
        return ModelWithObjective(make_cgt(vocab_size=96, n_layer=2, context_layer=1), CGTObjective())

    whole, resumed = wrapped(), wrapped()
    expected = fit(whole, FIT_DATA, FIT, out_dir=tmp_path / "whole")
    with pytest.raises(Interrupt):
        fit(wrapped(), FIT_DATA, FIT, out_dir=tmp_path / "parts", on_progress=stop_at(5))
    assert fit(resumed, FIT_DATA, FIT, out_dir=tmp_path / "parts").validation_loss == expected.validation_loss
    for (name, one), other in zip(whole.named_parameters(), resumed.parameters(), strict=True):
        assert torch.equal(one, other), name


def test_checkpoints_hold_no_pickled_objects(tmp_path):
    with pytest.raises(Interrupt):
        fit(dropout_model(), FIT_DATA, FIT, out_dir=tmp_path, on_progress=stop_at(5))
    (checkpoint,) = (tmp_path / "checkpoints").iterdir()
    names = {path.name for path in checkpoint.iterdir()}
    assert checkpoint.name == "checkpoint-3"
    assert "training_args.bin" not in names
    for name in ("optimizer.pt", "scheduler.pt"):
        torch.load(checkpoint / name, weights_only=True)
    assert not any("_orig_mod" in key for key in load_file(checkpoint / "model.safetensors"))


def interrupted(folder):
    """A run that was cut off; the folder of its checkpoint."""
    with pytest.raises(Interrupt):
        fit(dropout_model(), FIT_DATA, FIT, out_dir=folder, on_progress=stop_at(5))
    return folder / "checkpoints" / "checkpoint-3"


def test_damaged_checkpoint_without_a_manifest_is_refused(tmp_path):
    checkpoint = interrupted(tmp_path)
    (checkpoint / "manifest.json").unlink()
    weights = checkpoint / "model.safetensors"
    state = load_file(weights)
    name = next(iter(state))
    taken = state.pop(name)
    save_file(state, weights, metadata={"format": "pt"})
    with pytest.warns(UserWarning, match="no manifest"), pytest.raises(ValueError, match="missing"):
        fit(dropout_model(), FIT_DATA, FIT, out_dir=tmp_path)
    optimizer = checkpoint / "optimizer.pt"
    content = optimizer.read_bytes()
    optimizer.write_bytes(content[:500])
    save_file(state | {name: taken}, weights, metadata={"format": "pt"})
    with pytest.warns(UserWarning, match="no manifest"), pytest.raises((RuntimeError, SafetensorError)):
        fit(dropout_model(), FIT_DATA, FIT, out_dir=tmp_path)
    optimizer.write_bytes(content)
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.warns(UserWarning, match="no manifest"), pytest.raises((RuntimeError, SafetensorError)):
        fit(dropout_model(), FIT_DATA, FIT, out_dir=tmp_path)


def test_every_part_of_a_checkpoint_is_held_to_its_manifest(tmp_path):
    checkpoint = interrupted(tmp_path)
    parts = sorted(path for path in checkpoint.iterdir() if path.name != "manifest.json")
    assert {"optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json"} < {path.name for path in parts}
    for part in parts:
        content = part.read_bytes()
        middle = len(content) // 2
        part.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
        with pytest.raises(ValueError, match=rf"{part.name} is damaged or was changed"):
            fit(dropout_model(), FIT_DATA, FIT, out_dir=tmp_path)
        part.unlink()
        with pytest.raises(ValueError, match=f"lacks {part.name}"):
            fit(dropout_model(), FIT_DATA, FIT, out_dir=tmp_path)
        part.write_bytes(content)
    assert fit(dropout_model(), FIT_DATA, FIT, out_dir=tmp_path).steps == FIT.steps


KILLED = """
import json, os, signal, sys
from relinear.training import train
def on_progress(progress):
    if progress.stage == "train" and progress.done == 8:
        os.kill(os.getpid(), signal.SIGKILL)
train(json.loads(sys.argv[1]), sys.argv[2], on_progress=on_progress)
"""


@pytest.mark.slow
def test_killed_run_continues_to_the_same_result(tmp_path, corpus):
    settings = run_settings(corpus)
    expected = train(settings, tmp_path / "whole")
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(path for path in sys.path if path))
    command = [sys.executable, "-c", KILLED, json.dumps(settings.model_dump(mode="json")), str(tmp_path / "killed")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert json.loads((tmp_path / "killed" / "run.json").read_text())["status"] == "running"
    assert read_result(tmp_path / "killed") is None
    seen = []
    result = train(settings, tmp_path / "killed", on_progress=lambda p: seen.append(p.done))
    assert min(seen) == 5
    assert result.validation_loss == expected.validation_loss
    assert comparable(result.curve) == comparable(expected.curve)
    weights = [load_file(tmp_path / name / "model" / "model.safetensors") for name in ("whole", "killed")]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])
    assert not (tmp_path / "killed" / "checkpoints").exists()


def test_finished_run_returns_its_result_and_refuses_other_settings(tmp_path, corpus):
    settings = run_settings(corpus, steps=3, save_every=0)
    first = train(settings, tmp_path)
    assert train(settings, tmp_path, on_progress=pytest.fail) == first
    assert train(settings.replace(threads=None), tmp_path) == first
    with pytest.raises(ValueError, match=r"other settings.*:\n  learning_rate: 0\.001 -> 0\.002$"):
        train(settings.replace(learning_rate=0.002), tmp_path)
    again = train(settings.replace(learning_rate=0.002), tmp_path, overwrite=True)
    assert again.validation_loss != first.validation_loss
    left = ["block_losses.npy", "metrics.jsonl", "model", "run.json"]
    there = sorted(path.name for path in Path(tmp_path).iterdir())
    assert [name for name in there if name in left] == left
    assert [name.partition(".2")[0] for name in there if name not in left] == left


def test_another_number_of_ranks_must_keep_the_sequences_of_a_step(tmp_path, corpus, monkeypatch):
    settings = run_settings(corpus, batch_size=4)

    def killed(progress):
        if progress.stage == "train" and progress.done == 8:
            raise Interrupt

    with pytest.raises(Interrupt):
        train(settings, tmp_path, on_progress=killed)
    record = json.loads((tmp_path / "run.json").read_text())
    assert record["ranks"] == 1
    (tmp_path / "run.json").write_text(json.dumps(record | {"ranks": 2}))  # as if two had begun it
    with pytest.raises(ValueError, match="2 ranks with 8 sequences in a step, and this would be 1 with 4"):
        train(settings, tmp_path)
    assert train(settings.replace(batch_size=8, accumulation=1), tmp_path).steps == settings.steps
