"""The gradient of an optimiser step does not depend on how the step is divided or recomputed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from relinear.training import FitSettings, fit
from relinear.training.trainer import SteadySampler
from train_helpers import DATA, TARGETS, Gradients, Tokens, probe_model

SETTINGS = FitSettings(
    steps=1, batch_size=32, warmup_steps=0, dtype="float32", max_grad_norm=0, threads=1, device="cpu", log_every=1
)


def assert_same(found, expected, name):
    # Hugging Face computes the cross entropy in float32, whatever the model's dtype.
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-7, msg=lambda text: f"{name}: {text}")


def gradient(kind, data="full", **changes):
    model, seen = probe_model(kind), Gradients()
    result = fit(model, DATA[data](), SETTINGS.replace(**changes), callbacks=[seen])
    return seen.found, result


def by_hand(kind, source="full"):
    """One big batch through plain autograd: cross entropy and auxiliary terms written out."""
    model = probe_model(kind).train()
    data = DATA[source]()
    samples = [data[i] for i in SteadySampler(len(data), 32, 0)]
    ids, labels = (torch.stack([sample[name] for sample in samples]) for name in ("input_ids", "labels"))
    energies = []
    for module in model.modules():
        if hasattr(module, "auxiliary_losses"):
            module.register_forward_hook(lambda m, args, y: energies.append(y[:, :-1][labels[:, 1:] != -100]))
    logits = model(input_ids=ids).logits
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    loss = loss + sum(0.1 * y.square().mean() for y in energies)
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters()}, loss.item()


@pytest.mark.parametrize(
    ("kind", "data"),
    [
        pytest.param("llama", "full", marks=pytest.mark.slow),
        pytest.param("gpt2", "full", marks=pytest.mark.slow),
        ("llama", "padded"),
    ],
)
def test_division_of_a_step_changes_nothing(kind, data):
    expected, loss = by_hand(kind, data)
    variants = {
        "plain": {},
        "accumulated": {"batch_size": 8, "accumulation": 4},
        "checkpointed": {"gradient_checkpointing": True},
        "both": {"batch_size": 8, "accumulation": 4, "gradient_checkpointing": True},
    }
    for name, changes in variants.items():
        found, result = gradient(kind, data, **changes)
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            assert_same(found[key], value, f"{name}, {key}")
        row = result.curve[0]
        assert row["loss"] == pytest.approx(loss, rel=1e-6)
        assert row["cross_entropy"] + row["aux/energy"] == pytest.approx(loss, rel=1e-6)
        assert row["aux/energy"] > 0
        assert row["metric/energy"] > 0


def test_auxiliary_loss_has_a_gradient_of_its_own():
    """The test above would pass for a loss without the auxiliary term in both places; this one would not."""
    with_aux, _ = gradient("llama")
    model = probe_model("llama").train()
    for module in model.modules():
        if hasattr(module, "auxiliary_losses"):
            module.auxiliary_losses = dict
    seen = Gradients()
    fit(model, Tokens(), SETTINGS, callbacks=[seen])
    name = f"model.layers.0.mlp.{TARGETS['llama']}.up"
    assert (with_aux[name] - seen.found[name]).abs().max() > 1e-4


def run_ranks(folder, task, data, settings):
    """Two ranks of ``train_ranks.py`` on this machine."""
    environment = dict(os.environ, OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    script = Path(__file__).with_name("train_ranks.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    done = subprocess.run(
        [*command, str(folder), task, data, json.dumps(settings.model_dump(mode="json"))],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("data", ["full", "padded"])
def test_two_ranks_give_the_gradient_of_one(tmp_path, data):
    expected, _ = gradient("llama", data)
    for changes in ({"batch_size": 16}, {"batch_size": 4, "accumulation": 4}):
        run_ranks(tmp_path, "gradients", data, SETTINGS.replace(**changes))
        found = torch.load(tmp_path / "gradients.pt", weights_only=True)
        for key, value in expected.items():
            assert_same(found[key], value, key)


@pytest.mark.slow
def test_every_rank_draws_its_own_noise_and_resumes_it(tmp_path):
    settings = SETTINGS.replace(steps=6, batch_size=4, save_every=3, seed=2)
    run_ranks(tmp_path, "noise", "full", settings)
    ranks = [torch.load(tmp_path / f"noise_{rank}.pt", weights_only=True) for rank in (0, 1)]
    data = Tokens()
    order = [data[i]["input_ids"] for i in SteadySampler(len(data), 6 * 8, settings.seed)]
    for kind in ("latents", "splits"):
        first, second = (rank[f"{kind}/whole"] for rank in ranks)
        assert len(first["noise"]) == len(second["noise"]) == 6 * (2 if kind == "latents" else 1)
        same = [torch.equal(a, b) for a, b in zip(first["noise"], second["noise"], strict=True)]
        assert sum(same) <= (0 if kind == "latents" else 1)  # few numbers may coincide where few are possible
        batches = [batch for pair in zip(first["batches"], second["batches"], strict=True) for batch in pair]
        assert torch.equal(torch.cat(batches), torch.stack(order))
        for rank in ranks:
            whole, resumed = rank[f"{kind}/whole"], rank[f"{kind}/resumed"]
            later = whole["noise"][len(whole["noise"]) // 2 :]
            assert len(resumed["noise"]) == len(later)
            assert all(torch.equal(a, b) for a, b in zip(resumed["noise"], later, strict=True))
            assert all(torch.equal(a, b) for a, b in zip(whole["batches"], resumed["batches"], strict=True))
            for name, weight in whole["weights"].items():
                assert torch.equal(weight, resumed["weights"][name]), name
                assert torch.equal(weight, ranks[0][f"{kind}/whole"]["weights"][name]), name
