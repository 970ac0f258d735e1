"""What somebody changed in a folder of relinear's is theirs from then on: the mark knows contents, not names alone."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import xxhash
from safetensors.torch import load_file, save_file

import relinear
from conftest import make_tiny_llama
from relinear.compress.checksums import write_record
from relinear.data.tokenizers import load_tokenizer
from relinear.system import files
from relinear.system.files import write_json
from relinear.system.written import _MARK_SAYS, check_ours, remove_written
from relinear.train import run as run_room
from relinear.train import train
from relinear.train.run import clear_run
from relinear_cli.main import main
from test_written import FIXTURES, snapshot

SETTINGS = {
    "model": "tiny",
    "data": {"data": str(FIXTURES / "text.txt"), "sequence_length": 16},
    "steps": 2,
    "batch_size": 2,
    "report_to": [],
}


def model_with(rank=2):
    model = make_tiny_llama(vocab_size=260)
    relinear.replace_(model, {"q_proj": relinear.LowRank(rank=rank)})
    return model


def by_stock(folder):
    """Another model in the place of ours, as a process without relinear writes it."""
    make_tiny_llama(vocab_size=260, num_hidden_layers=1).save_pretrained(folder.parent / "theirs")
    for path in (folder.parent / "theirs").iterdir():
        shutil.copy(path, folder)
    shutil.rmtree(folder.parent / "theirs")


def other_weights(folder):
    """Of the same size, and as old."""
    path = folder / "model.safetensors"
    before = path.stat()
    save_file({name: value + 1 for name, value in load_file(path).items()}, path, metadata={"format": "pt"})
    assert path.stat().st_size == before.st_size
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def other_config(folder):
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(text.replace("{", '{\n  "mine": true,', 1))


CHANGES = {
    "a stock model": (by_stock, "config.json"),
    "weights": (other_weights, "model.safetensors"),
    "config": (other_config, "config.json"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_save_refuses_what_somebody_changed(change, tmp_path):
    folder, (make, name) = tmp_path / "model", CHANGES[change]
    relinear.save_pretrained(model_with(), folder)
    relinear.save_pretrained(model_with(3), folder)
    make(folder)
    before = snapshot(tmp_path)
    for model in (model_with(), make_tiny_llama()):
        model.save_pretrained = lambda *args, **kwargs: pytest.fail("work")
        with pytest.raises(ValueError, match=rf"model/{name} would be replaced, and belongs to something else"):
            relinear.save_pretrained(model, folder)
    assert snapshot(tmp_path) == before
    remove_written(folder)
    assert (folder / name).read_bytes() == before[f"model/{name}"]
    with pytest.raises(ValueError, match=r" would be replaced"):
        relinear.save_pretrained(model_with(), folder)


@pytest.mark.parametrize("by", [relinear.save_pretrained, lambda model, folder: model.save_pretrained(folder)])
def test_a_card_with_notes_is_the_readers(by, tmp_path):
    by(model_with(), tmp_path)
    by(model_with(3), tmp_path)
    card = tmp_path / "README.md"
    assert "LowRank(rank=3" in card.read_text()
    card.write_text(card.read_text() + "\nAccuracy on my data: 0.93\n")
    before = card.read_bytes()
    for model in (model_with(), make_tiny_llama(vocab_size=260)):
        by(model, tmp_path)
        assert card.read_bytes() == before
    remove_written(tmp_path)
    assert card.read_bytes() == before


def test_a_changed_tokenizer_stays_or_is_refused(tmp_path):
    relinear.save_pretrained(model_with(), tmp_path, tokenizer=load_tokenizer("bytes"))
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"mine": 1}))
    before = path.read_bytes()
    relinear.save_pretrained(model_with(), tmp_path)
    with pytest.raises(ValueError, match=r"tokenizer_config\.json would be replaced"):
        relinear.save_pretrained(model_with(), tmp_path, tokenizer=load_tokenizer("bytes"))
    remove_written(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"tokenizer_config.json", ".relinear"}
    assert path.read_bytes() == before


def test_a_tokenizer_that_was_there_stays_its_owners(tmp_path):
    load_tokenizer("bytes").save_pretrained(tmp_path)
    before = snapshot(tmp_path)
    relinear.save_pretrained(model_with(), tmp_path, tokenizer=load_tokenizer("bytes"))
    remove_written(tmp_path)
    assert snapshot(tmp_path) == before


def test_copies_and_moves_stay_ours(tmp_path):
    relinear.save_pretrained(model_with(), tmp_path / "a", tokenizer=load_tokenizer("bytes"))
    shutil.copytree(tmp_path / "a", tmp_path / "b", copy_function=shutil.copyfile)
    for path in (tmp_path / "b").iterdir():
        os.utime(path, (1, 1))
    relinear.save_pretrained(make_tiny_llama(), tmp_path / "b", max_shard_size="5KB")
    assert not (tmp_path / "b" / "model.safetensors").exists()
    shutil.copytree(tmp_path / "b", tmp_path / "c")
    relinear.save_pretrained(model_with(), tmp_path / "c")
    assert not list((tmp_path / "c").glob("model-*"))


def test_what_transformers_writes_for_a_model_with_operators_is_ours(tmp_path):
    for name in ("model", "beside"):
        folder = tmp_path / name
        folder.mkdir()
        if name == "beside":
            (folder / "notes.txt").write_text("mine")
        relinear.save_pretrained(model_with(), folder)
        model_with(3).save_pretrained(folder)
        relinear.save_pretrained(model_with(2), folder)
        assert "rank=2" in (folder / "README.md").read_text()


NAMES = ["config.json", "configuration_relinear.py", "generation_config.json", "model.safetensors", "README.md"]


@pytest.mark.parametrize("lines", [[], NAMES])
def test_marks_of_earlier_versions_go_by_names(lines, tmp_path):
    relinear.save_pretrained(model_with(), tmp_path)
    (tmp_path / ".relinear").write_text("\n".join([_MARK_SAYS, *lines]) + "\n")
    other_config(tmp_path)
    relinear.save_pretrained(model_with(), tmp_path)
    mark = (tmp_path / ".relinear").read_text()
    assert f"{xxhash.xxh3_128_hexdigest((tmp_path / 'config.json').read_bytes())}  config.json\n" in mark
    (tmp_path / ".relinear").write_text("\n".join([_MARK_SAYS, *lines]) + "\n")
    remove_written(tmp_path)
    assert not tmp_path.exists()


def test_an_export_that_was_changed_stays(tmp_path):
    write_record(tmp_path / "plan.json", {"layers": {"q_proj": {"parameters_before": 4, "nats": 0.0}}})
    relinear.save_pretrained(make_tiny_llama(), tmp_path / "plain")
    other_config(tmp_path / "plain")
    from relinear.compress.work import check_directory

    with pytest.raises(ValueError, match=r"plain/config\.json would be replaced"):
        check_directory(tmp_path)


def test_the_index_of_explore_that_was_changed_stays(tmp_path):
    with files.atomic_directory(tmp_path / "explore", "index") as folder:
        write_json(folder / "index.json", {"made_from": {}})
    write_json(tmp_path / "explore" / "index.json", {"made_from": {"mine": 1}})
    with pytest.raises(ValueError, match=r"index\.json would be replaced"):
        check_ours(tmp_path / "explore", "index")


@pytest.mark.parametrize("change", ["a stock model", "weights"])
def test_training_refuses_before_any_work(change, tmp_path, monkeypatch, capfd):
    make, name = CHANGES[change]
    train(SETTINGS, tmp_path)
    make(tmp_path / "model")
    before = snapshot(tmp_path)
    assert train(SETTINGS, tmp_path).steps == 2, "nothing is to be done, and nothing replaced"
    monkeypatch.setattr(run_room, "prepare_data", lambda *args: pytest.fail("work"))
    with pytest.raises(ValueError, match=rf"model/{name} would be replaced"):
        train(SETTINGS, tmp_path, resume=False)
    assert snapshot(tmp_path) == before
    clear_run(tmp_path)
    assert (tmp_path / "model" / name).read_bytes() == before[f"model/{name}"]


TOKENIZER = {
    "train": ["train", "--model", "tiny", "--data", "{data}", "--set", "data.sequence_length=16", "--out", "."],
    "distill": ["distill", "{model}", "-r", "k_proj=low_rank:rank=2", "--data", "{data}", "--out", "."],
    "compress": ["compress", "{model}", "--keep", "0.9", "--data", "{data}", "--out", "."],
    "compress and export": [
        *["compress", "{model}", "--keep", "0.9", "--data", "{data}", "--export", "plain", "--out", "."]
    ],
    "specialize": ["specialize", "{cgt}", "--prefix-file", "{data}", "--out", "model"],
}


@pytest.mark.parametrize("command", TOKENIZER)
def test_a_tokenizer_of_others_is_refused_before_the_work(command, tmp_path, monkeypatch, capfd):
    """In a folder that is relinear's but for it."""
    from relinear.compress import run as compress_room
    from relinear.distill import run as distill_room
    from relinear.models.cgt import specialize as specialize_room

    source = tmp_path / "source"
    relinear.save_pretrained(make_tiny_llama(vocab_size=260), source / "model", tokenizer=load_tokenizer("bytes"))
    cgt = relinear.CGTForCausalLM(relinear.CGTConfig(vocab_size=260, n_layer=2, n_head=2, n_embd=16, context_layer=1))
    relinear.save_pretrained(cgt, source / "cgt", tokenizer=load_tokenizer("bytes"))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    record = {"train": "run.json", "distill": "distill.json", "specialize": ".nothing"}.get(command, "plan.json")
    folder = "plain" if "export" in command else "model"
    names = "settings fingerprint layers accumulation learning_rate optimizer parameters_before nats"
    values = dict.fromkeys(names.split(), 1)
    (write_record if record == "plan.json" else write_json)(Path(record), values | {"status": "running"})
    relinear.save_pretrained(make_tiny_llama(), folder)
    (Path(folder) / "tokenizer_config.json").write_text('{"mine": 1}')
    before = snapshot(tmp_path / "work")
    for room, name in [
        *[(run_room, "fit"), (run_room, "read_ended"), (distill_room, "token_blocks")],
        *[(compress_room, "read_corpus"), (specialize_room, "specialize")],
    ]:
        how = (lambda *args, **kwargs: None) if name == "read_ended" else lambda *args, **kwargs: pytest.fail("work")
        monkeypatch.setattr(room, name, how)
    places = {"{model}": source / "model", "{cgt}": source / "cgt", "{data}": FIXTURES / "text.txt"}
    assert main([str(places.get(word, word)) for word in TOKENIZER[command]]) == 2
    assert f"{folder}/tokenizer_config.json would be replaced, and belongs to something else" in capfd.readouterr().err
    assert snapshot(tmp_path / "work") == before


def _with_notes(folder):
    relinear.save_pretrained(model_with(), folder, tokenizer=load_tokenizer("bytes"))
    (folder / "notes.txt").write_text("mine")


@pytest.mark.parametrize("old", ["", "names", "no mark"])
def test_a_crash_between_two_files_does_not_lock_the_folder(old, tmp_path, monkeypatch):
    """Beside files of others a model is put in place file by file; every one of them may be the last."""
    removals = {"unlink": Path.unlink, "replace": Path.replace}
    for number in range(100):
        folder = tmp_path / f"{number}"
        _with_notes(folder)
        if old:
            (folder / ".relinear").unlink()
        if old == "names":
            (folder / ".relinear").write_text("\n".join([_MARK_SAYS, *NAMES]) + "\n")
        model, left = make_tiny_llama(vocab_size=260), [number]

        def crash(name, path, *args, folder=folder, left=left, **kwargs):
            at = Path(args[0]) if args else path
            if at.parent == folder and not at.name.startswith(".0"):
                left[0] -= 1
                if left[0] < 0:
                    raise KeyboardInterrupt
            return removals[name](path, *args, **kwargs)

        with monkeypatch.context() as patch:
            for name in removals:
                patch.setattr(Path, name, lambda *args, name=name, **kwargs: crash(name, *args, **kwargs))
            try:
                relinear.save_pretrained(model, folder, max_shard_size="100KB")
                done = True
            except KeyboardInterrupt:
                done = False
        relinear.save_pretrained(model, folder, max_shard_size="100KB")
        relinear.from_pretrained(folder)
        assert (folder / "notes.txt").read_text() == "mine"
        remove_written(folder)
        kept = {"notes.txt"} | ({"tokenizer.json", "tokenizer_config.json"} if old else set())
        assert {path.name for path in folder.iterdir()} >= kept
        if done:
            break
    assert number > 5


def test_a_run_that_is_killed_while_it_is_cleared_can_be_started_again(tmp_path, monkeypatch):
    whole = tmp_path / "whole"
    train(SETTINGS | {"keep_checkpoint": True}, whole)
    (whole / "model" / "notes.txt").write_text("mine")
    (whole / "checkpoints" / "mine.pt").write_text("mine")
    unlink, ended = Path.unlink, False
    for number in range(100):
        folder = tmp_path / f"{number}"
        shutil.copytree(whole, folder)
        left = [number]

        def crash(path, *args, left=left, folder=folder, **kwargs):
            if path.is_relative_to(folder) and not path.name.startswith("."):
                left[0] -= 1
                if left[0] < 0:
                    raise KeyboardInterrupt
            return unlink(path, *args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(Path, "unlink", crash)
            patch.setattr(run_room, "fit", lambda *args, **kwargs: (_ for _ in ()).throw(SystemError))
            try:
                train(SETTINGS | {"seed": 1}, folder, resume=False)
            except SystemError:
                ended = True
            except KeyboardInterrupt:
                pass
        result = train(SETTINGS | {"seed": 1}, folder, resume=False)
        assert result.steps == 2
        assert (folder / "model" / "config.json").is_file()
        assert (folder / "model" / "notes.txt").read_text() == "mine"
        shutil.rmtree(folder)
        if ended:
            break
    assert number > 5


def test_a_run_that_was_half_cleared_has_not_ended(tmp_path, monkeypatch):
    train(SETTINGS | {"seed": 1}, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(run_room, "remove_written", lambda folder: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            train(SETTINGS, tmp_path, resume=False)
    assert run_room.read_result(tmp_path) is None
    result = train(SETTINGS, tmp_path)
    anew = train(SETTINGS, tmp_path / "anew")
    assert result.validation_loss == anew.validation_loss
    assert len(result.curve) == len(anew.curve)


KILLED = """
import sys, relinear, torch
from transformers import LlamaConfig, LlamaForCausalLM
model = LlamaForCausalLM(LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                                     num_attention_heads=2))
print("ready", flush=True)
while True:
    relinear.save_pretrained(model, sys.argv[1], max_shard_size="20KB")
    relinear.save_pretrained(model, sys.argv[1])
"""


def test_what_others_put_beside_a_trained_model_outlives_a_run_that_starts_over(tmp_path):
    train(SETTINGS, tmp_path)
    theirs = tmp_path / "model" / "model-00001-of-00002.safetensors"
    theirs.write_bytes(b"weights of others")
    train(SETTINGS, tmp_path, resume=False)
    assert theirs.read_bytes() == b"weights of others"
    assert (tmp_path / "model" / "model.safetensors").is_file()
    train(SETTINGS | {"steps": 3}, tmp_path, resume=False)
    assert theirs.is_file()


@pytest.mark.slow
def test_saves_that_are_killed_leave_a_folder_that_can_be_saved_to(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    for moment in torch.linspace(0.0, 0.4, 8).tolist():
        child = subprocess.Popen([sys.executable, "-c", KILLED, folder], stdout=subprocess.PIPE)
        assert child.stdout.readline() == b"ready\n"
        with pytest.raises(subprocess.TimeoutExpired):
            child.wait(0.1 + moment)
        child.send_signal(signal.SIGKILL)
        child.wait()
        relinear.save_pretrained(make_tiny_llama(), folder)
        relinear.from_pretrained(folder)
        assert (folder / "notes.txt").read_text() == "mine"
