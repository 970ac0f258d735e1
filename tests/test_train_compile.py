"""Compiled training is the same training, and leaves no trace in the model."""

import pytest
import torch
from safetensors.torch import load_file

from relinear.training import FitSettings, fit
from train_helpers import Tokens, probe_model

SETTINGS = FitSettings(
    steps=4,
    batch_size=4,
    accumulation=2,
    warmup_steps=0,
    dtype="float32",
    threads=1,
    device="cpu",
    log_every=1,
    save_every=2,
)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_compiled_training_is_the_same(tmp_path, kind, checkpointing):
    settings = SETTINGS.replace(gradient_checkpointing=checkpointing)
    rows, models = [], []
    for compile_ in (False, True):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        model = probe_model(kind, torch.float32)
        folder = tmp_path / str(compile_)
        data = (Tokens(), Tokens(samples=8, seed=1))
        rows.append(fit(model, data, settings.replace(compile=compile_), out_dir=folder).curve)
        models.append(model)
    assert torch._dynamo.utils.counters["frames"]["ok"] > 1  # a layer and the loss
    assert not torch._dynamo.utils.counters["graph_break"]
    for plain, compiled in zip(*rows, strict=True):
        assert plain.keys() == compiled.keys()
        for key in plain.keys() - {"tokens_per_second", "seconds"}:
            assert plain[key] == pytest.approx(compiled[key], rel=1e-4), (key, plain["step"])
    stored = load_file(tmp_path / "True" / "checkpoints" / "checkpoint-4" / "model.safetensors")
    assert set(stored) == set(models[0].state_dict())
    assert not any(module._compiled_call_impl for module in models[1].modules())
    assert "_loss_function" not in vars(models[1])
