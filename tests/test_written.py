"""What relinear did not write stays: every command and function refuses to replace it, by name, before any work."""

import errno
import io
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import relinear
from conftest import make_tiny_llama
from relinear.bench import run as bench
from relinear.compare.run import _Comparison
from relinear.compress.checksums import Streams
from relinear.compress.plan import CompressPlan, LayerPlan
from relinear.compress.work import check_directory
from relinear.data.tokenizers import load_tokenizer
from relinear.system import files
from relinear.system.files import atomic_path, list_written, write_json, write_text
from relinear.system.lock import only_process_in
from relinear.system.written import _MARK_SAYS, check_ours, digest_of, record_of
from relinear.train.settings import TrainSettings
from relinear_cli.main import main

FIXTURES = Path(__file__).parent / "fixtures" / "v0.1"


def snapshot(folder):
    """Every file below, with its content; links as links."""
    found = {}
    for path in sorted(folder.rglob("*")):
        kind = path.readlink() if path.is_symlink() else path.read_bytes() if path.is_file() else None
        found[str(path.relative_to(folder))] = kind
    return found


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    model = make_tiny_llama(vocab_size=260)
    relinear.replace_(model, {"q_proj": relinear.LowRank(rank=2)})
    folder = tmp_path_factory.mktemp("saved") / "model"
    return relinear.save_pretrained(model, folder, tokenizer=load_tokenizer("bytes"))


COMMANDS = {
    "compare": (["compare", "--recipe", "quick", "--out", "."], ["run.json", "runs", "report.html"]),
    "distill": (
        ["distill", "{model}", "-r", "k_proj=low_rank:rank=2", "--data", "{data}", "--out", "."],
        ["model", "report.json", "layers"],
    ),
    "compress": (
        ["compress", "{model}", "--keep", "0.9", "--data", "{data}", "--out", "."],
        ["model", "plain", "plan.json"],
    ),
    "analyze": (["analyze", "{model}", "--out", "."], ["gates.json", "report.html"]),
    "bench": (["bench", "--out", "."], ["bench.json", "bench.png"]),
    "report": (["report", str(FIXTURES / "run"), "--out", "page.html"], ["page.html"]),
    "explore": (["explore", "{model}", "--static", "page.html"], ["page.html"]),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_refuse_what_is_not_theirs(command, saved, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    arguments, names = COMMANDS[command]
    places = {"{model}": str(saved), "{data}": str(FIXTURES / "text.txt")}
    arguments = [places.get(word, word) for word in arguments]
    for name in names:
        path = tmp_path / name
        path.write_text('{"mine": 1}') if path.suffix else (path.mkdir(), (path / "mine.txt").write_text("mine"))
        before = snapshot(tmp_path)
        assert main(arguments) == 2
        told = capfd.readouterr().err
        assert f"{name} would be replaced" in told
        assert "Traceback" not in told
        assert snapshot(tmp_path) == before
        path.unlink() if path.is_file() else shutil.rmtree(path)


@pytest.mark.parametrize("command", [name for name, (arguments, _) in COMMANDS.items() if arguments[-1] == "."])
def test_a_file_is_no_directory(command, saved, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").write_text("mine")
    places = {"{model}": str(saved), "{data}": str(FIXTURES / "text.txt"), ".": "taken"}
    assert main([places.get(word, word) for word in COMMANDS[command][0]]) == 2
    assert capfd.readouterr().err.endswith("error: taken is a file; give a directory\n")
    assert (tmp_path / "taken").read_text() == "mine"


def test_bench_follows_a_link_to_what_is_not_there_yet(tmp_path, monkeypatch):
    (tmp_path / "out").symlink_to(tmp_path / "disk")
    monkeypatch.setattr(bench, "_child", lambda *arguments, **how: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        bench.run_bench(bench.BenchSettings(), tmp_path / "out")
    assert (tmp_path / "disk").is_dir()


@pytest.mark.parametrize(("work", "name"), [("compress", "calibration")])
def test_what_a_killed_process_leaves_before_its_first_record_is_in_nobodys_way(tmp_path, work, name):
    with atomic_path(tmp_path / name / "fingerprint.json") as temporary:
        temporary.write_text("half")
        check_ours(tmp_path, work)
    with pytest.raises(ValueError, match=f"{name} would be replaced"):
        check_ours(tmp_path, work)
    (tmp_path / name / "fingerprint.json").rename(tmp_path / name / ".env.template")
    with pytest.raises(ValueError, match=f"{name} would be replaced"):
        check_ours(tmp_path, work)


@pytest.mark.parametrize(
    ("folder", "work"),
    [("comparison", "compare"), ("distillation", "distill")]
    + [(f"checkpoints/{name}", "saved") for name in ("rotor", "cgt", "second_embedding")],
)
def test_directories_of_the_first_version_are_ours(folder, work):
    check_ours(FIXTURES / folder, work)


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


def test_a_run_at_a_rate_that_was_given_up_leaves_what_others_put_there(tmp_path):
    folder, settings = tmp_path / "runs" / "dense" / "seed-0", TrainSettings(learning_rate=0.1)
    for path, values in {folder / "run.json": {"settings": {"learning_rate": 1.0}}, folder / "mine.json": {}}.items():
        write_json(path, values)
    write_json(tmp_path / "tuning" / "dense" / "diverged.json", [1.0])
    comparison = _Comparison.__new__(_Comparison)
    comparison.out_dir, comparison.recipe = tmp_path, SimpleNamespace(seeds=[0])
    comparison._run = lambda *arguments: {}
    comparison._final_piece("dense", SimpleNamespace(settings=settings), 0).do()
    assert sorted(path.name[:9] for path in folder.iterdir()) == ["mine.json", "run.json."]


def test_a_file_that_is_a_link_stays_one(tmp_path):
    (tmp_path / "link.json").symlink_to(tmp_path / "real.json")
    write_text(tmp_path / "link.json", "{}")
    assert (tmp_path / "link.json").is_symlink()
    assert (tmp_path / "real.json").read_text() == "{}"


def test_states_between_layers_are_whole_or_not_there(tmp_path):
    streams = Streams(tmp_path, 2)
    for index in (0, 3):
        streams.write("hidden", index, [torch.ones(2), torch.zeros(2)])
    (tmp_path / "hidden-mine").mkdir()
    assert streams.indices("hidden") == [0, 3]
    (tmp_path / "hidden-0003" / "0.safetensors").unlink()
    assert streams.indices("hidden") == [0]
    streams.write("hidden", 3, [torch.ones(2), torch.zeros(2)])
    assert streams.indices("hidden") == [0, 3]
    for index in (0, 3):
        streams.remove("hidden", index)
    assert {path.name for path in tmp_path.rglob("*")} == {"hidden-mine"}


def test_a_link_to_what_is_not_there_yet_becomes_a_folder_there(tmp_path):
    (tmp_path / "out").symlink_to(tmp_path / "disk" / "out")
    with only_process_in(tmp_path / "out") as folder:
        write_text(folder / "a.txt", "a")
        write_text(folder / ".lock", "of a package manager")
    with only_process_in(tmp_path / "out"):
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


def test_a_model_of_others_beside_a_compression_of_ours_stays(tmp_path):
    CompressPlan({"q_proj": LayerPlan(None, 4, 4, 0.0)}, 0).save(tmp_path / "plan.json")
    check_directory(tmp_path)
    (tmp_path / "model.gguf").write_bytes(b"GGUF of another program")
    with pytest.raises(ValueError, match=r"model\.gguf would be replaced, and belongs to something else"):
        check_directory(tmp_path)


def test_a_plan_that_was_edited_is_given_as_plan_or_stays(tmp_path):
    path = tmp_path / "plan.json"
    CompressPlan({"q_proj": LayerPlan(None, 4, 4, 0.0)}, 0).save(path)
    check_directory(tmp_path)
    write_json(path, json.loads(path.read_text()) | {"others": 1})
    with pytest.raises(ValueError, match=r"plan\.json was edited, and would be replaced: give it as --plan"):
        check_directory(tmp_path)
    with pytest.raises(ValueError, match="was edited"):
        check_directory(tmp_path, tmp_path / "another.json")
    check_directory(tmp_path, path)
    with pytest.raises(ValueError, match="was edited"):  # the proposal would be put there
        check_directory(tmp_path, proposes=True)
    (tmp_path / "model").mkdir()
    check_directory(tmp_path, proposes=True)
    path.rename(tmp_path / "proposed-plan.json")
    with pytest.raises(ValueError, match=r"proposed-plan\.json was edited"):
        check_directory(tmp_path, proposes=True)
    check_directory(tmp_path, tmp_path / "proposed-plan.json")


def test_a_plan_of_an_earlier_version_is_compared_with_its_report(tmp_path):
    plan = {"layers": {"q_proj": {"operator": None, "parameters": 4, "parameters_before": 4, "nats": 0.0}}}
    for name in ("plan", "proposed-plan"):
        write_json(tmp_path / f"{name}.json", plan)
        with pytest.raises(ValueError, match="was edited"):
            check_directory(tmp_path)
        write_json(tmp_path / f"{name.replace('plan', 'report')}.json", plan | {"model": "a"})
        check_directory(tmp_path)
    write_json(tmp_path / "plan.json", {"layers": {"q_proj": {"operator": "low_rank:rank=4"}}})
    with pytest.raises(ValueError, match="was edited"):
        check_directory(tmp_path)


@pytest.mark.parametrize(
    ("work", "name", "theirs"),
    [
        ("compress", "speed.json", {"machine": "lathe"}),
        ("compress", "plan.json", {"layers": [{"name": "ground floor"}], "title": "My house"}),
        ("bench", "bench.json", {"settings": {}, "rows": [1]}),
        ("models", "models.json", {"settings": {}, "rows": [1]}),
        ("coordinates", "coordinates.json", {"base_width": 3}),
        ("analyze", "analyze.json", {"model": "mine"}),
        ("sweep", "sweep.json", {"parameters": [1]}),
    ],
)
def test_a_word_in_a_file_does_not_make_a_folder_ours(work, name, theirs, tmp_path):
    write_json(tmp_path / name, theirs)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"mine": 1}')
    with pytest.raises(ValueError, match=f"{name} would be replaced"):
        check_ours(tmp_path, work)
    with pytest.raises(ValueError, match=r"config\.json would be replaced"):
        check_ours(tmp_path / "model", "saved")


def test_an_analysis_replaces_its_own_files_alone(saved, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    command = ["analyze", str(saved), "--data", str(FIXTURES / "text.txt"), "--only", "effective_rank", "--out", "out"]
    command += ["--sequences", "2", "--length", "16"]
    out = tmp_path / "out"
    assert main(command) == main(command) == 0
    (out / "gates-mine.png").write_text("mine")  # under none of its names
    assert main(command) == 0
    for name in ("effective_rank.png", "gates.png"):  # changed, and of nobody who is listed
        before = (out / name).read_bytes() if (out / name).exists() else None
        (out / name).write_text("mine")
        there = snapshot(out)
        capfd.readouterr()
        assert main(command) == 2
        assert f"{name} would be replaced" in capfd.readouterr().err
        assert snapshot(out) == there
        (out / name).write_bytes(before) if before else (out / name).unlink()
    record = json.loads((out / "analyze.json").read_text())
    assert {*record.pop("written")} == {f"effective_rank.{end}" for end in ("json", "png", "svg")}
    write_json(out / "analyze.json", record)  # as a killed one leaves it, and earlier versions
    (out / "effective_rank.json").write_text("cut")
    assert main(command) == 0
    assert (out / "gates-mine.png").read_text() == "mine"


@pytest.mark.parametrize(
    ("work", "record", "name"),
    [
        ("bench", '{"settings": {}, "rows": [{"contender": "hdpl"}]}', "bench.svg"),
        ("coordinates", '{"base_width": 8, "parametrizations": {}}', "coordinates.png"),
    ],
)
def test_a_record_lists_what_its_work_wrote(work, record, name, tmp_path):
    (tmp_path / record_of(work)).write_text(record)
    (tmp_path / name).write_text("figure")
    check_ours(tmp_path, work)  # an earlier version's
    list_written(tmp_path, work)
    check_ours(tmp_path, work)
    (tmp_path / name).write_text("mine")
    with pytest.raises(ValueError, match=f"{name} would be replaced"):
        check_ours(tmp_path, work)


def test_a_mark_that_a_failing_disk_does_not_give_is_named(tmp_path, monkeypatch):
    (tmp_path / ".relinear").write_text(_MARK_SAYS)

    class Failing(io.BytesIO):
        def read(self, size=-1):
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(Path, "open", lambda path, *arguments, **how: Failing())
    with pytest.raises(OSError, match="Input/output error") as caught:
        digest_of(tmp_path / ".relinear")
    assert caught.value.filename == str(tmp_path / ".relinear")
