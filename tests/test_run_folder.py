"""Whose a folder of results is: nothing of others is lost, no harmless folder is refused, settings are held to."""

import contextlib
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import relinear
from conftest import make_tiny_llama, mostly_slow
from relinear.bench import run as bench
from relinear.data.tokenizers import load_tokenizer
from relinear.deprecated import overwriting
from relinear.pages.page import GENERATOR
from relinear.system.lock import exclusive
from relinear.system.run_folder import RunFolder, differences, set_aside
from relinear.training import fit, train
from relinear.training.fitting import remove_checkpoints
from relinear_cli.main import main
from train_helpers import FIT, FIT_DATA, Interrupt, dropout_model, stop_at

FIXTURES = Path(__file__).parent / "fixtures" / "v0.1"
MINE = "mine, and irreplaceable"
NAMES = ("model", "metrics.jsonl", "checkpoints")
EARLIER = ("status", "settings", "machine", "model", "data")
SETTINGS, OTHERS = {"steps": 3}, {"steps": 4}

ACTIONS = ("run", "run again", "other settings", "overwrite")
PAGE = Path(__file__).parents[1] / "results" / "reliability" / "folders.md"


def read_table() -> dict[str, list[str]]:
    """What the page says: state of a folder -> what comes of each of ``ACTIONS``."""
    _, _, *rows = [line for line in PAGE.read_text().splitlines() if line.startswith("|")]
    return {state: outcomes for state, *outcomes in ([cell.strip() for cell in row.split("|")[1:-1]] for row in rows)}


TABLE = read_table()


def run_folder(path: Path) -> RunFolder:
    return RunFolder(path, "train", "run.json", NAMES, earlier_records={"run.json": EARLIER}, may_differ=("threads",))


def work(path: Path, settings: dict, overwrite: bool = False, ends: bool = True) -> str:
    """What commands do in their folder."""
    folder = run_folder(path)
    folder.check(settings, overwrite=overwrite)
    with folder.open(settings, overwrite=overwrite) as record:
        assert folder.read(), "the record is there before any result"
        with (path / "metrics.jsonl").open("a") as file:
            file.write("a row of ours\n")
        if ends:
            model = folder.take("model")
            model.mkdir(exist_ok=True)
            (model / "config.json").write_text("ours")
        folder.write(status="done" if ends else "running")
        return "resumes" if record else "begins"


def put(path: Path, text: str = MINE) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def earlier_record(folder: Path, **more: Any) -> None:
    record = {key: {} for key in EARLIER} | {"status": "running"} | more
    put(folder / "run.json", json.dumps(record))
    put(folder / "metrics.jsonl", "a row of ours\n")


def make(state: str, folder: Path, settings: dict = SETTINGS, work: Callable[..., str] = work) -> None:
    """Put a folder into a state, by ``work`` where it is ours. What is not ours holds ``MINE``."""
    if state == "empty":
        folder.mkdir()
    elif state == "ours, killed before any result":
        work(folder, settings, ends=False)
        (folder / "metrics.jsonl").unlink()
    elif state == "ours, of 0.1":
        earlier_record(folder, settings=settings)
    elif state == "ours, of 0.2":
        earlier_record(folder, settings=settings, command="relinear train", date="2026-01-01", ranks=1)
    elif state.startswith("ours"):
        work(folder, settings, ends=state == "ours, ended")
        if state == "ours, with a model of others":
            put(folder / "model" / "config.json")
        elif state == "ours, with notes in it":
            put(folder / "notes.txt")
        elif state == "ours, of another task":
            put(folder / "run.json", (folder / "run.json").read_text().replace('"task": "train"', '"task": "compare"'))
        elif state == "ours, cut off":
            put(folder / "run.json", (folder / "run.json").read_text()[:-40])
    elif state == "run.json of another trainer":
        put(folder / "run.json", json.dumps({"settings": {"accumulation": 1}, "learning_rate": 1, "optimizer": MINE}))
    elif state == "run.json made by another":
        put(folder / "run.json", json.dumps({"made_by": MINE, "settings": settings}))
    elif state == "run.json that is a folder":
        put(folder / "run.json" / "mine.txt")
    elif state == "metrics.jsonl of others":
        put(folder / "metrics.jsonl")
    elif state == "a model of others":
        put(folder / "model" / "config.json")
    elif state == "checkpoints of others":
        put(folder / "checkpoints" / "checkpoint-500" / "model.safetensors")
    elif state == "a link of others named model":
        put(folder.parent / "elsewhere" / "model.safetensors")
        folder.mkdir()
        (folder / "model").symlink_to(folder.parent / "elsewhere")
    elif state == "results.json of others":
        put(folder / "results.json")
    elif state == "checkpoint-500 of Hugging Face":
        put(folder / "checkpoint-500" / "model.safetensors")
    elif state == "logs beside":
        for name in ("log.txt", "slurm-1.out", "wandb/run", ".gitkeep", "report.html"):
            put(folder / name)
    elif state == "a mount":
        (folder / "lost+found").mkdir(parents=True)
    elif state == "empty folders of our names":
        (folder / "model").mkdir(parents=True)
        (folder / "checkpoints").mkdir()
    elif state == "half a file of a killed process":
        put(folder / ".run.json.abcd1234.relinear", "half")
        put(folder / ".model.abcd1234.relinear" / "model.safetensors", "half")
    elif state == "a link to a folder":
        put(folder.parent / "disk" / "notes.txt")
        folder.symlink_to(folder.parent / "disk")
    elif state == "a link to what is not there":
        folder.symlink_to(folder.parent / "disk")
    elif state == "a file":
        put(folder)
    elif state == "below a file":
        put(folder.parent / "file")
    elif state in ("read-only", "in use"):
        put(folder / "notes.txt")
    else:
        assert state == "absent"


def treasures(folder: Path) -> int:
    return sum(
        MINE.encode() in path.read_bytes() for path in folder.rglob("*") if path.is_file() and not path.is_symlink()
    )


def contents(folder: Path) -> dict[Path, bytes | None]:
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def refuse_files_in(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a folder be read-only for the superuser, too."""
    opened = os.open

    def refuses(path, flags, *rest, **options):
        if flags & os.O_CREAT and Path(os.fsdecode(path)).parent == folder:
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, flags, *rest, **options)

    monkeypatch.setattr("os.open", refuses)


def check_cell(state: str, action: str, tmp_path, monkeypatch, settings=SETTINGS, others=OTHERS, work=work) -> None:
    """Hold one cell of the page: what comes of it, and that nothing foreign is lost."""
    folder, expected = tmp_path / "out", TABLE[state][ACTIONS.index(action)]
    make(state, folder, settings, work)
    place = tmp_path / "file" / "out" if state == "below a file" else folder
    before = treasures(tmp_path)
    if state == "read-only":
        refuse_files_in(folder, monkeypatch)
    monkeypatch.setattr("relinear.system.lock._PATIENCE", 0.0)
    with exclusive(folder) if state == "in use" else contextlib.nullcontext():
        if action == "run again":
            with contextlib.suppress(ValueError, OSError):
                work(place, settings)
        there = contents(folder)
        try:
            outcome = work(place, others if action == "other settings" else settings, overwrite=action == "overwrite")
        except (ValueError, OSError) as refusal:
            outcome, said, after = "refused", str(refusal), contents(folder)
    assert outcome == expected
    assert treasures(tmp_path) == before
    if outcome == "refused":
        assert re.search("out|file", said)
        assert after == there
    else:
        assert run_folder(folder).read()["status"] == "done"
        assert MINE not in (folder / "model" / "config.json").read_text()
        assert not list(folder.glob("*.relinear"))


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("state", TABLE)
def test_every_state_of_a_folder(state, action, tmp_path, monkeypatch):
    check_cell(state, action, tmp_path, monkeypatch)


def test_the_page_has_every_state_and_its_counts():
    assert f"{len(TABLE)} states" in PAGE.read_text()
    assert {len(outcomes) for outcomes in TABLE.values()} == {len(ACTIONS)}


def test_records_of_earlier_versions_may_be_other_files(tmp_path):
    earlier = {"plan.json": ("format", "layers"), "calibration/fingerprint.json": ("fingerprint",)}
    how = {"earlier_records": earlier, "settings_of": lambda record: record.get("settings", {})}
    folder = RunFolder(tmp_path, "compress", "compress.json", ("plan.json", "calibration"), **how)
    put(tmp_path / "plan.json", json.dumps({"layers": [MINE], "title": "My house"}))
    with pytest.raises(ValueError, match=r"has plan\.json, and no record"):
        folder.check_ours()
    put(tmp_path / "calibration" / "fingerprint.json", json.dumps({"fingerprint": "0"}))
    assert folder.check_ours() == {}
    with folder.open({}):
        assert folder.read()["made_by"] == "relinear"


def test_the_record_says_who_made_it(tmp_path):
    work(tmp_path / "out", SETTINGS)
    record = json.loads((tmp_path / "out" / "run.json").read_text())
    assert (record["made_by"], record["task"], record["settings"]) == ("relinear", "train", SETTINGS)
    assert {"version", "command", "date", "machine"} < record.keys()


def test_settings_that_are_free_may_change(tmp_path):
    work(tmp_path, SETTINGS | {"threads": 1})
    assert work(tmp_path, SETTINGS | {"threads": 2}) == "resumes"


def test_differences_are_listed(tmp_path):
    before = {"steps": 3, "data": {"name": "a", "gone": 1}, "operators": {"q": 1, "k": 2}}
    now = {"steps": 3, "data": {"name": "b"}, "operators": {"k": 2, "q": 1}, "more": None}
    said = ["data.name: 'a' -> 'b'", "data.gone: 1 -> (gone)", "operators: order q, k -> k, q"]
    said.append("more: (not there) -> None")
    assert list(differences(before, now)) == said
    work(tmp_path, before)
    with pytest.raises(ValueError, match="with other settings") as refused:
        run_folder(tmp_path).check(now)
    assert all(line in str(refused.value) for line in said)
    many = {f"setting_{number}": number for number in range(30)}
    with pytest.raises(ValueError, match="and 23 more"):
        run_folder(tmp_path).check(many)


def test_an_error_before_any_result_leaves_no_folder(tmp_path):
    with pytest.raises(ZeroDivisionError), run_folder(tmp_path / "out").open(SETTINGS):
        raise ZeroDivisionError
    assert not (tmp_path / "out").exists()


def test_names_of_renamed_files_are_free(tmp_path):
    places = []
    for _ in range(3):
        put(tmp_path / "model" / "weights")
        places.append(set_aside(tmp_path / "model"))
    assert len({*places}) == 3
    assert treasures(tmp_path) == 3
    assert set_aside(tmp_path / "model") is None


def test_a_result_that_was_taken_is_replaced_when_the_run_goes_on(tmp_path):
    folder = run_folder(tmp_path)
    with folder.open(SETTINGS):
        put(folder.take("model") / "weights", "half")  # killed here
    with (again := run_folder(tmp_path)).open(SETTINGS):
        assert again.take("model") == tmp_path / "model"
    assert (tmp_path / "model" / "weights").read_text() == "half", "and not renamed"


def test_resume_is_the_older_opposite_of_overwrite():
    assert overwriting(True, None)
    with pytest.warns(DeprecationWarning, match="overwrite=True"):
        assert overwriting(False, False)
    with pytest.warns(DeprecationWarning, match="overwrite=True"):
        assert not overwriting(False, True)


# Commands and functions


SIZES = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


@pytest.fixture
def settings(tmp_path_factory):
    text = tmp_path_factory.mktemp("text") / "text.txt"
    text.write_text("some text " * 100)
    values = {"steps": 2, "batch_size": 1, "save_every": 1, "log_every": 1, "data": {"data": str(text)}}
    values["data"]["sequence_length"] = 16
    return values | {"model_overrides": SIZES, "threads": 1}


@pytest.mark.parametrize("action", mostly_slow(ACTIONS, "run", "overwrite"))
@pytest.mark.parametrize("state", mostly_slow(TABLE, "run.json of another trainer", "a model of others", "logs beside"))
def test_relinear_train_keeps_to_the_table(state, action, settings, tmp_path, monkeypatch, capfd):
    """By the command itself; ``train`` where it is stopped."""
    seen = []
    check = RunFolder.check

    def watched(folder, *arguments, **options):
        seen.append("resumes" if check(folder, *arguments, **options) else "begins")
        return check(folder, *arguments, **options)

    monkeypatch.setattr(RunFolder, "check", watched)

    def command(path, values, overwrite=False, ends=True):
        if not ends:

            def stop(progress):
                raise KeyboardInterrupt

            with pytest.raises(KeyboardInterrupt):
                train(values, path, on_progress=stop)
            return "begins"
        seen.clear()
        put(tmp_path / "settings.yaml", json.dumps(values))
        given = ["train", "--recipe", str(tmp_path / "settings.yaml"), "--out", str(path)]
        if main([*given, *["--overwrite"] * overwrite]) != 0:
            raise ValueError(capfd.readouterr().err)
        return seen[0]

    check_cell(state, action, tmp_path, monkeypatch, settings, settings | {"seed": 1}, command)


COMMANDS = {
    "train": (["train", "--out", "."], ["model", "checkpoints", "metrics.jsonl", "run.json", "block_losses.npy"]),
    "compare": (["compare", "--recipe", "quick", "--out", "."], ["run.json", "runs", "results.json", "tuning"]),
    "distill": (
        ["distill", "{model}", "-r", "k_proj=low_rank:rank=2", "--data", "{text}", "--out", "."],
        ["distill.json", "model", "report.json", "layers"],
    ),
    "compress": (
        ["compress", "{model}", "--keep", "0.9", "--data", "{text}", "--out", "."],
        ["compress.json", "calibration", "model", "model.gguf", "report.json", "plan.json"],
    ),
    "analyze": (["analyze", "{model}", "--data", "{text}", "--out", "."], ["analyze.json", "effective_rank.json"]),
    "bench": (["bench", "--out", "."], ["bench.json", "bench.png"]),
    "bench --model": (["bench", "--model", "tiny", "-o", "q_proj=low_rank:rank=2", "--out", "."], ["models.json"]),
    "explore": (["explore", "{model}", "--data", "{text}", "--index", ".", "--sequences", "2"], ["index.json"]),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    model = make_tiny_llama(vocab_size=260)
    relinear.replace_(model, {"q_proj": relinear.LowRank(rank=2)})
    folder = tmp_path_factory.mktemp("saved") / "model"
    return relinear.save_pretrained(model, folder, tokenizer=load_tokenizer("bytes"))


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_refuse_names_of_theirs_that_are_taken(command, saved, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    arguments, names = COMMANDS[command]
    places = {"{model}": str(saved), "{text}": str(FIXTURES / "text.txt")}
    arguments = [places.get(word, word) for word in arguments]
    for name in names:
        path = tmp_path / name
        put(path if path.suffix else path / "mine.txt")
        assert main(arguments) == 2
        printed, said = capfd.readouterr()
        assert f". has {name}, and no record" in said
        assert printed == "", "what it takes is measured after that"
        assert [entry.name for entry in tmp_path.iterdir()] == [name]
        assert treasures(tmp_path) == 1
        path.unlink() if path.is_file() else shutil.rmtree(path)
    (tmp_path / "taken").write_text("mine")
    assert main([{".": "taken"}.get(word, word) for word in arguments]) == 2
    assert capfd.readouterr().err.endswith("error: taken is a file; give a directory\n")


@pytest.mark.parametrize(
    "command",
    [
        ["report", "{run}", "--out"],
        ["explore", "{model}", "--data", "{text}", "--sequences", "2", "--static"],
    ],
)
def test_pages_replace_pages_alone(command, saved, tmp_path, monkeypatch, capfd):
    shutil.copytree(FIXTURES / "comparison", tmp_path / "run")
    page = tmp_path / "page.html"
    put(page, f"{MINE} – relinear")
    places = {"{model}": str(saved), "{run}": str(tmp_path / "run"), "{text}": str(FIXTURES / "text.txt")}
    arguments = [*(places.get(word, word) for word in command), str(page)]
    monkeypatch.setattr("relinear.explore.page.static_page", lambda *arguments: GENERATOR)
    assert main(arguments) == 2
    assert "page.html is not a page of relinear's" in capfd.readouterr().err
    assert main([*arguments, "--overwrite"]) == main(arguments) == 0
    assert treasures(tmp_path) == len(list(tmp_path.glob("page.html.*"))) == 1
    if command[0] == "report":
        put(tmp_path / "run" / "report.html")
        assert main(["report", str(tmp_path / "run")]) == 0
        assert treasures(tmp_path) == 2, "renamed: a command does not fail for its page"


def test_an_analysis_replaces_its_own_files_alone(saved, tmp_path, capfd):
    out = tmp_path / "out"
    command = ["analyze", str(saved), "--data", str(FIXTURES / "text.txt"), "--only", "effective_rank"]
    command += ["--out", str(out), "--sequences", "2", "--length"]
    put(out / "effective_rank.png")
    assert main([*command, "16"]) == main([*command, "16"]) == 0
    assert treasures(tmp_path) == len(list(out.glob("effective_rank.png.*"))) == 1
    assert main([*command, "8"]) == 2
    assert "length: 16 -> 8" in capfd.readouterr().err
    assert main([*command, "8", "--overwrite"]) == 0
    assert len(list(out.glob("effective_rank.json.*"))) == 1


def test_a_benchmark_that_has_ended_is_measured_again_and_renamed(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "_measure_in_process", lambda *arguments, **how: {"rows": []})
    monkeypatch.setattr(bench, "draw_layers", lambda values, stem: put(stem.with_suffix(".png"), "ours"))
    for number in range(3):
        bench.run_bench(bench.BenchSettings(), tmp_path)
        assert len(list(tmp_path.glob("bench.json.*"))) == len(list(tmp_path.glob("bench.png.*"))) == number
    with pytest.raises(ValueError, match="rounds: 11 -> 3"):
        bench.run_bench(bench.BenchSettings(rounds=3), tmp_path)
    bench.run_bench(bench.BenchSettings(rounds=3), tmp_path, overwrite=True)


def test_a_run_renames_what_was_put_under_its_names(settings, tmp_path):
    """A model, and a checkpoint of a later step, while it was at work."""

    def stop(progress):
        if progress.done == 1 and progress.stage == "save":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(settings, tmp_path, on_progress=stop)
    put(tmp_path / "model" / "model.safetensors")
    put(tmp_path / "checkpoints" / "checkpoint-500" / "model.safetensors")
    put(tmp_path / "checkpoints" / "checkpoint-2" / "model.safetensors")
    seen = []
    train(settings, tmp_path, on_progress=lambda progress: seen.append(progress.done))
    assert min(seen) == 1, "it went on from its own checkpoint"
    assert treasures(tmp_path) == 3
    assert (tmp_path / "model" / "config.json").is_file()


def test_starting_over_loses_nothing(settings, tmp_path, capsys):
    train(settings | {"keep_checkpoint": True}, tmp_path)
    put(tmp_path / "model" / "notes.txt")
    put(tmp_path / "checkpoints" / "mine.pt")
    weights = (tmp_path / "model" / "model.safetensors").read_bytes()
    (tmp_path / "settings.yaml").write_text(json.dumps(settings | {"seed": 1}))
    assert main(["train", "--recipe", str(tmp_path / "settings.yaml"), "--out", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert "seed: 0 -> 1" in said
    assert "or --overwrite, which renames what is there" in said
    assert main(["train", "--recipe", str(tmp_path / "settings.yaml"), "--out", str(tmp_path), "--overwrite"]) == 0
    assert treasures(tmp_path) == 2
    (aside,) = tmp_path.glob("model.*")
    assert (aside / "model.safetensors").read_bytes() == weights
    for name in ("run.json", "metrics.jsonl", "checkpoints", "block_losses.npy"):
        assert len(list(tmp_path.glob(f"{name}.*"))) == 1


def test_a_run_that_is_killed_while_it_renames_can_be_started_again(settings, tmp_path, monkeypatch):
    rename, done = Path.rename, False
    train(settings | {"keep_checkpoint": True}, tmp_path / "first")
    put(tmp_path / "first" / "model" / "notes.txt")
    for number in range(10):
        folder = shutil.copytree(tmp_path / "first", tmp_path / f"{number}")
        left = [number]

        def killed(path, *arguments, left=left, folder=folder):
            if path.parent == folder:
                left[0] -= 1
                if left[0] < 0:
                    raise KeyboardInterrupt
            return rename(path, *arguments)

        with monkeypatch.context() as patch:
            patch.setattr(Path, "rename", killed)
            try:
                train(settings | {"seed": 1}, folder, overwrite=True)
                done = True
            except KeyboardInterrupt:
                pass
        assert done or train(settings | {"seed": 1}, folder, overwrite=True).steps == 2
        assert treasures(folder) == 1
        if done:
            break
    assert number > 3


def test_a_run_does_not_rename_the_model_that_it_starts_from(settings, tmp_path):
    train(settings, tmp_path)
    start = {"model": str(tmp_path / "model"), "model_overrides": {}}
    with pytest.raises(ValueError, match="which the run starts from, would be renamed"):
        train(settings | start, tmp_path, overwrite=True)
    assert (tmp_path / "model" / "config.json").is_file()


def test_fit_that_overwrites_renames_checkpoints(tmp_path):
    with pytest.raises(Interrupt):
        fit(dropout_model(), FIT_DATA, FIT, out_dir=tmp_path, on_progress=stop_at(5))
    put(tmp_path / "checkpoints" / "checkpoint-500" / "weights")
    with pytest.raises(ValueError, match=r"seed: 0 -> 1"):
        fit(dropout_model(), FIT_DATA, FIT.replace(seed=1), out_dir=tmp_path)
    with pytest.raises(ValueError, match=r"batch_size: 4 -> 8"):  # of the same ranks: other batches
        fit(dropout_model(), FIT_DATA, FIT.replace(batch_size=8), out_dir=tmp_path)
    with pytest.warns(DeprecationWarning, match="overwrite=True"):
        fit(dropout_model(), FIT_DATA, FIT.replace(seed=1), out_dir=tmp_path, resume=False)
    (aside,) = tmp_path.glob("checkpoints.*")
    assert {path.name for path in aside.iterdir()} == {"checkpoint-3", "checkpoint-500"}
    assert treasures(tmp_path) == 1


def test_fit_refuses_checkpoints_of_others(tmp_path):
    put(tmp_path / "checkpoints" / "checkpoint-500" / "weights")
    with pytest.raises(ValueError, match=r"has checkpoints, and no record \(fit.json\) of relinear's fit"):
        fit(dropout_model(), FIT_DATA, FIT, out_dir=tmp_path)
    assert treasures(tmp_path) == 1


def test_checkpoints_of_others_beside_those_of_a_run_stay(tmp_path):
    for name in ("checkpoint-2", "checkpoint-4", ".partial"):
        put(tmp_path / name / "manifest.json", "{}")
    put(tmp_path / "checkpoint-500" / "weights")
    remove_checkpoints(tmp_path, keep="checkpoint-4")
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint-4", "checkpoint-500"}
    remove_checkpoints(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-500"]


def test_a_run_of_the_first_version_goes_on_with_its_record(tmp_path):
    shutil.copytree(FIXTURES / "run", tmp_path / "run")
    folder = run_folder(tmp_path / "run")
    settings = folder.read()["settings"]
    assert folder.check(settings) is not None
    with pytest.raises(ValueError, match=r"learning_rate: 0\.001 -> 0\.5"):
        folder.check(settings | {"learning_rate": 0.5})
