"""Faults from outside: a second process, SIGTERM, a full disk, a loss that explodes, values nested without end."""

import errno
import json
import multiprocessing
import os
import resource
import shutil
import signal
import sys
import time

import pytest
import torch

import relinear
from conftest import make_tiny_llama
from relinear.compare.run import compare
from relinear.data import DataSettings, iter_texts
from relinear.distill.run import distill_
from relinear.system import lock
from relinear.system.files import check_manifest, os_errors_named, read_json, write_manifest
from relinear.system.lock import exclusive
from relinear.system.signals import Terminated
from relinear.training import FitSettings, fit, train
from relinear_cli.main import main
from train_helpers import FIT, FIT_DATA, RUN, Tokens, dropout_model, run_settings

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs flock, fork and signals")


# Two processes on one directory


@pytest.fixture
def held(tmp_path, monkeypatch):
    """A directory that another process holds."""
    monkeypatch.setattr(lock, "_PATIENCE", 0.1)
    context = multiprocessing.get_context("fork")
    ready = context.Event()

    def hold():
        with exclusive(tmp_path / "out"):
            ready.set()
            time.sleep(100)

    process = context.Process(target=hold)
    process.start()
    assert ready.wait(100)
    yield tmp_path / "out", process
    process.kill()
    process.join()


@linux
def test_the_second_of_two_processes_is_refused(held, corpus):
    out, holder = held
    settings = run_settings(corpus, steps=2)
    recipe = {"entries": {"a": "dense"}, "train": {**RUN, "data": settings.data.model_dump()}, "speed": {"seconds": 0}}
    del recipe["train"]["operators"]
    works = {
        "train": lambda: train(settings, out),
        "compare": lambda: compare(recipe, out, workers=0),
        "distill": lambda: distill_(
            make_tiny_llama(),
            {"q_proj": relinear.LowRank(rank=2)},
            [torch.randint(96, (1, 256))],
            settings={"tokens": 128, "validation_tokens": 64, "sequence_length": 32},
            out_dir=out,
        ),
        "compress": lambda: relinear.compress(
            make_tiny_llama(),
            [torch.randint(96, (1, 512))],
            keep=0.9,
            settings={"tokens": 256, "sequence_length": 32},
            out_dir=out,
        ),
    }
    for name, work in works.items():
        with pytest.raises(ValueError, match=rf"another process is at work in .*out \(process {holder.pid} on "):
            work()
        assert [path.name for path in out.iterdir()] == [lock.LOCK], name


@linux
def test_a_killed_holder_leaves_nothing_behind(held):
    out, holder = held
    os.kill(holder.pid, signal.SIGKILL)
    holder.join()
    assert (out / lock.LOCK).exists()
    with exclusive(out):
        pass
    assert list(out.iterdir()) == []


@linux
def test_a_folder_that_cannot_be_made_is_not_tried_for_ever():
    with pytest.raises(FileNotFoundError, match="/proc/none"), exclusive("/proc/none/out", patience=0):
        pass


@linux
def test_folders_made_for_a_lock_go_again_where_nothing_came_into_them(tmp_path):
    with pytest.raises(ValueError, match="no use"), exclusive(tmp_path / "a" / "b"):
        raise ValueError("no use")
    assert list(tmp_path.iterdir()) == []


# SIGTERM


def terminate_at(step):
    def on_progress(progress):
        if progress.stage == "train" and progress.done == step:
            os.kill(os.getpid(), signal.SIGTERM)

    return on_progress


@linux
def test_sigterm_saves_and_the_run_goes_on_to_the_same_bits(tmp_path):
    whole = dropout_model()
    expected = fit(whole, FIT_DATA, FIT, out_dir=tmp_path / "whole")
    handler = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Terminated, match="checkpoint-5"):
        fit(dropout_model(), FIT_DATA, FIT, out_dir=tmp_path / "parts", on_progress=terminate_at(4))
    assert signal.getsignal(signal.SIGTERM) is handler
    resumed = dropout_model()
    result = fit(resumed, FIT_DATA, FIT, out_dir=tmp_path / "parts")
    assert result.validation_loss == expected.validation_loss
    for (name, one), other in zip(whole.named_parameters(), resumed.parameters(), strict=True):
        assert torch.equal(one, other), name


# A full disk


@pytest.fixture
def full_disk():
    """No file may grow beyond a size: writes fail as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


@linux
@pytest.mark.usefixtures("full_disk")
def test_a_full_disk_is_an_error_in_words(tmp_path, capfd, corpus):
    arguments = ["train", "--data", str(corpus), "--steps", "2", "--out", str(tmp_path / "out"), "--threads", "1"]
    sizes = json.dumps(RUN["model_overrides"])
    arguments += ["--set", "save_every=1", "--set", "data.sequence_length=32", "--set", f"model_overrides={sizes}"]
    assert main([*arguments, "--set", f"data.cache_dir={tmp_path / 'cache'}"]) == 2
    told = capfd.readouterr().err
    assert "Traceback" not in told
    assert "error: " in told
    assert not list((tmp_path / "out").rglob("checkpoint-*"))
    assert not list((tmp_path / "out").rglob(".partial"))


def test_what_libraries_say_of_a_full_disk():
    said = "Error while serializing: I/O error: No space left on device (os error 28)"
    with pytest.raises(OSError, match="No space left on device") as caught, os_errors_named("some/file"):
        raise RuntimeError(said)
    assert caught.value.errno == errno.ENOSPC
    with pytest.raises(OSError, match=r"No space left on device .*data/0") as caught, os_errors_named("some/file"):
        raise RuntimeError("[enforce fail at inline_container.cc:858] . PytorchStreamWriter failed writing file data/0")
    assert caught.value.errno == errno.ENOSPC
    with pytest.raises(RuntimeError, match="another fault"), os_errors_named("some/file"):
        raise RuntimeError("another fault")


@pytest.mark.parametrize(("phase", "step"), [("train", 2), ("evaluate", 4), ("save", 4)])
def test_a_directory_that_is_gone_ends_the_run(tmp_path, phase, step):
    out = tmp_path / "out"

    def take_away(progress):
        if progress.stage == phase and progress.done >= step:
            shutil.rmtree(out, ignore_errors=True)

    with pytest.raises(FileNotFoundError, match=r"removed or became unreachable during the run: '.*out'"):
        fit(dropout_model(), FIT_DATA, FIT, out_dir=out, on_progress=take_away)
    assert not (out / "checkpoints").exists()


# Losses


def test_a_loss_that_is_not_finite_names_the_last_good_checkpoint(tmp_path):
    settings = FitSettings(steps=40, batch_size=2, save_every=2, warmup_steps=0, device="cpu", threads=1)
    settings = settings.replace(dtype="float32", max_grad_norm=0, learning_rate=1e-3)
    model = make_tiny_llama()

    def spoil(progress):
        if progress.stage == "train" and progress.done == 5:
            model.lm_head.weight.data[0] = float("nan")

    with pytest.raises(ValueError, match=r"the last good checkpoint is .*checkpoint-4"):
        fit(model, Tokens(), settings, out_dir=tmp_path, on_progress=spoil)


def test_a_loss_that_explodes_ends_the_run():
    settings = FitSettings(steps=40, batch_size=2, device="cpu", threads=1, dtype="float32", log_every=1)
    model = make_tiny_llama()

    def spoil(progress):
        if progress.stage == "train" and progress.done == 5:
            model.lm_head.weight.data *= 1e6

    with pytest.raises(ValueError, match=r"the training loss has grown from 4\.\d+ to .*no checkpoint was written"):
        fit(model, Tokens(), settings, on_progress=spoil)


# Files


def test_values_nested_without_end(tmp_path):
    deep = "[" * 100_000
    (tmp_path / "data.jsonl").write_text(json.dumps({"text": "a"}) + '\n{"text": ' + deep + "\n")
    (tmp_path / "other.json").write_text(deep)
    with pytest.raises(ValueError, match=r"data\.jsonl cannot be read: .*depth"):
        list(iter_texts(DataSettings(data=str(tmp_path / "data.jsonl"), cache_dir=tmp_path / "cache"), "all"))
    with pytest.raises(ValueError, match=r"other\.json is not valid JSON"):
        read_json(tmp_path / "other.json")


def test_changed_weights_of_a_distillation_are_refused(tmp_path):
    def distill():
        torch.manual_seed(0)
        ids = [torch.randint(96, (1, 256))]
        settings = {"tokens": 128, "validation_tokens": 64, "sequence_length": 32, "epochs": 1}
        return distill_(
            make_tiny_llama(), {"q_proj": relinear.LowRank(rank=2)}, ids, settings=settings, out_dir=tmp_path
        )

    distill()
    path = tmp_path / "layers" / "0001.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(ValueError, match=r"0001\.safetensors is missing or not what was written"):
        distill()
    path.unlink()
    with pytest.raises(ValueError, match=r"0001\.safetensors is missing or not what was written"):
        distill()


def test_a_manifest_that_is_damaged_is_refused(tmp_path):
    (tmp_path / "a").write_text("a")
    assert check_manifest(tmp_path) is None
    write_manifest(tmp_path, world_size=1)
    assert check_manifest(tmp_path)["world_size"] == 1
    for content in ("", "{}", '{"files": {}}', '{"files": 3}', "[]"):
        (tmp_path / "manifest.json").write_text(content)
        with pytest.raises(ValueError, match="manifest"):
            check_manifest(tmp_path)


# Values that no model has


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    model = make_tiny_llama()
    relinear.replace_(model, {"q_proj": relinear.LowRank(rank=2)})
    return relinear.save_pretrained(model, tmp_path_factory.mktemp("saved") / "model")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_size", 10**15),
        ("vocab_size", 10**9),
        ("num_hidden_layers", 10**7),
        ("hidden_size", {}),
        ("mlp_bias", {"a": 1}),
        ("rope_parameters", [[]]),
        ("auto_map", {"AutoConfig": {}}),
        ("__class__", "x"),
        ("base_model_type", []),
        ("quantization_config", 3),
        ("quantization_config", {"quant_method": "relinear", "format_version": [[]], "operators": 3}),
    ],
)
def test_values_of_a_config_that_no_model_has(saved, tmp_path, key, value, capfd):
    import shutil

    shutil.copytree(saved, tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    assert main(["inspect", str(tmp_path / "model")]) in (0, 2)
    told = capfd.readouterr().err
    assert "Traceback" not in told
    assert len(told) < 3_000


def test_sizes_beyond_the_machine_are_judged_before_they_are_taken(corpus, tmp_path):
    sizes = {"hidden_size": 2**20, "intermediate_size": 2**21, "num_hidden_layers": 2}
    with pytest.raises(ValueError, match=r"this machine has|no model has"):
        train(run_settings(corpus, model_overrides=sizes), tmp_path / "out")
    with pytest.raises(ValueError, match="no model has"):
        train(run_settings(corpus, model_overrides={"num_hidden_layers": 10**9}), tmp_path / "out")
    assert not (tmp_path / "out").exists()
