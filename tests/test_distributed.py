"""Two ranks (gloo, on the CPU) do what one process does: operators, attachments, FSDP2, other numbers of ranks."""

import json
import multiprocessing
import multiprocessing.connection
import os
import socket
import subprocess
import sys

import pytest
import torch

import relinear
from conftest import kinds_for_dense_models, mostly_slow
from dist_ranks import MODELS, PARTS, PLANNED, SETTINGS, SPLIT, built, one_step, run_rank, step_by_hand
from relinear.training import fit
from train_helpers import DATA, Tokens

pytestmark = [
    pytest.mark.skipif(not torch.distributed.is_available(), reason="no torch.distributed"),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="forks"),
    pytest.mark.timeout(900),  # for a machine that has other things to do
]


def launch(folder, tasks, ranks=2):
    """Run tasks of ``dist_ranks.py``, each with its parts; ranks are forked, as importing all again takes seconds."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    context, arguments = multiprocessing.get_context("fork"), (ranks, port, folder, tasks)
    running = {context.Process(target=run_rank, args=(rank, *arguments)) for rank in range(ranks)}
    for process in running:
        process.start()
    while running:
        multiprocessing.connection.wait([process.sentinel for process in running])
        ended = {process for process in running if process.exitcode is not None}
        running -= ended
        if any(process.exitcode for process in ended):  # the others would wait for it
            for process in running:
                process.kill()
            pytest.fail("\n".join(path.read_text() for path in sorted(folder.glob("rank-*.txt"))))


@pytest.fixture(scope="module")
def found(request, tmp_path_factory):
    """What two ranks came to with the parts that tests ask of a task by its name; one launch, as it takes seconds."""
    folder, tasks = tmp_path_factory.mktemp("ranks"), {"sharded": set(), "interrupted": set()}
    for test in request.session.items:
        if test.module is request.module and hasattr(test, "callspec"):
            for task, part in test.callspec.params.items():
                tasks.setdefault(task, set()).add(part)
    launch(folder, tasks)
    return folder


@pytest.mark.slow
def test_the_command_under_torchrun_is_one_run(tmp_path):
    (tmp_path / "text.txt").write_text("\n\n".join(f"paragraph {i} says {i * i}" for i in range(60)))
    settings = ["device=cpu", "batch_size=2", "dtype=float32", "data.sequence_length=16", "data.tokenizer=bytes"]
    settings += ["model_overrides.num_hidden_layers=1", "data.max_validation_tokens=64"]
    command = ["train", "--model", "tiny", "--data", "text.txt", "--steps", "2", "--out", "out"]
    command += [word for setting in settings for word in ("--set", setting)]
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--no-python"]
    code = f"from relinear_cli.main import main; raise SystemExit(main({command}))"
    environment = dict(os.environ, OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="", RELINEAR_CACHE=str(tmp_path / "cache"))
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    done = subprocess.run(
        [*start, sys.executable, "-c", code], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=850
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("validation loss") == 1, "one rank tells"
    record = json.loads((tmp_path / "out" / "run.json").read_text())
    assert (record["status"], record["ranks"]) == ("done", 2)


def test_every_operator_and_attachment_has_its_row():
    kinds = {"operator": set(), "attachment": set()}
    for mapping, attached in PARTS.values():
        kinds["operator"] |= {config.kind for config in mapping.values()}
        kinds["attachment"] |= {config.kind for config in attached}
    for name, family in {"operator": relinear.LowRank, "attachment": relinear.residual.ReZero}.items():
        assert kinds_for_dense_models(family).keys() == kinds[name], name


#: with losses and noise, with a context and what reads it, and with an objective of its own
@pytest.mark.parametrize("steps", mostly_slow(MODELS, "hdpl", "context", "cgt"))
def test_two_ranks_have_the_loss_and_the_gradients_of_one(steps, found):
    there = torch.load(found / "steps.pt", weights_only=True)[steps]
    here = one_step(steps, SETTINGS.replace(batch_size=8))
    assert there["losses"] == pytest.approx(here["losses"], rel=1e-5)
    assert there["gradients"].keys() == here["gradients"].keys()
    for name, gradient in here["gradients"].items():
        torch.testing.assert_close(there["gradients"][name], gradient, rtol=1e-4, atol=1e-7, msg=name)


def check_steps(there, model):
    """Losses, gradients and the parameters after two steps are those of the model on one rank."""
    losses, gradients = step_by_hand(model)
    assert there["losses"] == pytest.approx(losses, rel=1e-5)
    assert there["gradients"].keys() == gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(there["gradients"][name], gradient, rtol=1e-4, atol=1e-6, msg=name)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(there["saved"][name], value, rtol=1e-3, atol=1e-5, msg=name)


@pytest.mark.parametrize("fully", mostly_slow(PARTS, "hdpl"))
def test_sharded_models_have_the_losses_and_the_gradients_of_whole_ones(fully, found):
    there, model = torch.load(found / "fully.pt", weights_only=True)[fully], built(fully)
    check_steps(there, model)
    assert there["held"] < 0.6 * sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("split", mostly_slow(SPLIT, "hdpl"))
def test_split_operators_have_the_losses_and_the_gradients_of_whole_ones(split, found):
    there = torch.load(found / "split.pt", weights_only=True)[split]
    model = built(split)
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    inside = sum(size for name, size in sizes.items() if ".up_proj." in name)
    check_steps(there, model)
    if split in ("rotor", "quantized"):  # a few angles; codes that are packed
        assert there["operators"] == 0
    else:
        assert there["operators"] == 2
        assert sum(sizes.values()) - there["held"] > 0.35 * inside


@pytest.mark.parametrize("planned", mostly_slow(PLANNED, "context"))
def test_checkpoints_that_transformers_splits_have_the_losses_and_the_gradients_of_whole_ones(planned, found):
    there, model = torch.load(found / "planned.pt", weights_only=True)[planned], built(planned)
    for name, value in relinear.from_pretrained(found / f"{planned}-again").state_dict().items():
        assert torch.equal(value, model.state_dict()[name]), name
    check_steps(there, model)
    assert there["held"] < sum(parameter.numel() for parameter in model.parameters())


def test_a_sharded_checkpoint_becomes_one_file_and_back(found):
    ids = Tokens()[0]["input_ids"][None]
    single = relinear.from_pretrained(found / "single")
    sharded = torch.load(found / "sharded.pt", weights_only=True)
    with torch.no_grad():
        torch.testing.assert_close(single(ids).logits, sharded["logits"], rtol=1e-5, atol=1e-6)
    assert sharded["placements"] > 0  # the weights were shards indeed
    outside = {name for name, _ in single.named_parameters() if ".layers." not in name}
    assert {name for name in sharded["held"] if ".layers." not in name} == outside  # as the table of large models says
    for name, value in single.state_dict().items():
        assert torch.equal(value, sharded["back"][name]), name


def test_a_run_of_two_ranks_goes_on_in_one_process(found, tmp_path):
    settings = SETTINGS.replace(steps=6, batch_size=8, save_every=3)
    whole, resumed = built("context"), built("context")
    expected = fit(whole, (DATA["full"](), DATA["full"](seed=1)), settings, out_dir=tmp_path)
    result = fit(resumed, (DATA["full"](), DATA["full"](seed=1)), settings, out_dir=found / "interrupted")
    assert json.loads((found / "interrupted" / "before.json").read_text()) == 4  # where it was cut off
    assert result.validation_loss == pytest.approx(expected.validation_loss, rel=1e-4)
    for (name, one), other in zip(whole.named_parameters(), resumed.named_parameters(), strict=True):
        torch.testing.assert_close(one, other[1], rtol=1e-3, atol=1e-5, msg=name)
