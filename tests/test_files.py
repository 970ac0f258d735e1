"""How files and folders are written: whole or not at all, through links, beside files of others."""

import json
import os
import shutil
from pathlib import Path

import torch

import relinear
from conftest import make_tiny_llama
from relinear.compression.storage import LayerStates
from relinear.system import files
from relinear.system.files import atomic_path, write_text
from relinear.system.lock import exclusive

FIXTURES = Path(__file__).parent / "fixtures" / "v0.1"


def test_a_model_is_saved_beside_files_of_others(tmp_path):
    project, model = tmp_path / "project", make_tiny_llama()
    (project / "src").mkdir(parents=True)
    for name in ("notes.txt", "tokenizer.json", "src/code.py"):
        (project / name).write_text("mine")
    project.chmod(0o700)
    for _ in range(2):  # over itself, too: a model without operators tells nothing of who saved it
        relinear.save_pretrained(model, project)
        assert [(project / name).read_text() for name in ("notes.txt", "tokenizer.json", "src/code.py")] == ["mine"] * 3
    relinear.replace_(model, {"q_proj": relinear.LowRank(rank=2)})
    relinear.save_pretrained(model, project, max_shard_size="5KB")
    assert len(list(project.glob("model-*.safetensors"))) > 1
    assert not (project / "model.safetensors").exists(), "of the model before"
    relinear.save_pretrained(model, project)
    assert not list(project.glob("model-*.safetensors"))
    assert (project / "notes.txt").read_text() == "mine"
    assert project.stat().st_mode & 0o777 == 0o700
    relinear.from_pretrained(project)
    assert [path.name for path in tmp_path.iterdir()] == ["project"]


def test_a_model_is_saved_where_the_process_stands(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for _ in range(2):
        relinear.save_pretrained(make_tiny_llama(), ".")
        assert Path.cwd() == tmp_path / "here", "and not in a folder that was removed"
        relinear.from_pretrained(".")


def test_saving_over_checkpoints_of_the_first_version(tmp_path):
    folder = tmp_path / "checkpoint"
    shutil.copytree(FIXTURES / "checkpoints" / "rotor", folder)
    relinear.save_pretrained(make_tiny_llama(), folder)
    relinear.from_pretrained(folder)
    assert not (folder / "configuration_relinear.py").exists()
    run = tmp_path / "run"  # its models without operators carry no mark of their own
    shutil.copytree(FIXTURES / "run", run)
    make_tiny_llama().save_pretrained(run / "model")
    relinear.save_pretrained(make_tiny_llama(), run / "model")


def test_a_file_that_is_a_link_stays_one(tmp_path):
    (tmp_path / "link.json").symlink_to(tmp_path / "real.json")
    write_text(tmp_path / "link.json", "{}")
    assert (tmp_path / "link.json").is_symlink()
    assert (tmp_path / "real.json").read_text() == "{}"


def test_states_between_layers_are_whole_or_not_there(tmp_path):
    states = LayerStates(tmp_path, 2)
    for index in (0, 3):
        states.write("hidden", index, [torch.ones(2), torch.zeros(2)])
    (tmp_path / "hidden-mine").mkdir()
    assert states.indices("hidden") == [0, 3]
    (tmp_path / "hidden-0003" / "0.safetensors").unlink()
    assert states.indices("hidden") == [0]
    states.write("hidden", 3, [torch.ones(2), torch.zeros(2)])
    assert states.indices("hidden") == [0, 3]
    for index in (0, 3):
        states.remove("hidden", index)
    assert {path.name for path in tmp_path.rglob("*")} == {"hidden-mine"}


def test_a_link_to_what_is_not_there_yet_becomes_a_folder_there(tmp_path):
    (tmp_path / "out").symlink_to(tmp_path / "disk" / "out")
    with exclusive(tmp_path / "out") as folder:
        write_text(folder / "a.txt", "a")
        write_text(folder / ".lock", "of a package manager")
    with exclusive(tmp_path / "out"):
        assert (tmp_path / "out" / ".lock").read_text() == "of a package manager"
    assert (tmp_path / "out" / ".lock").is_file()
    assert (tmp_path / "disk" / "out" / "a.txt").read_text() == "a"
    assert (tmp_path / "out").is_symlink()


def test_a_private_umask_holds_for_directories(tmp_path):
    before = os.umask(0o077)
    try:
        relinear.save_pretrained(make_tiny_llama(), tmp_path / "model")
    finally:
        os.umask(before)
    assert (tmp_path / "model").stat().st_mode & 0o777 == 0o700


def test_modes_and_mount_points(tmp_path, monkeypatch):
    (tmp_path / "secret").write_text("a")
    (tmp_path / "secret").chmod(0o600)
    with atomic_path(tmp_path / "secret") as temporary:
        temporary.write_text("b")
    assert (tmp_path / "secret").stat().st_mode & 0o777 == 0o600
    mount = tmp_path / "mount"
    mount.mkdir()
    number = mount.stat().st_ino
    monkeypatch.setattr(files.os.path, "ismount", lambda path: os.fspath(path) == os.fspath(mount))
    for _ in range(2):
        relinear.save_pretrained(make_tiny_llama(), mount)
    assert mount.stat().st_ino == number, "what is mounted cannot be renamed"
    assert "config.json" in json.dumps(sorted(os.listdir(mount)))
    relinear.from_pretrained(mount)
