"""The commands on tiny inputs, through the entry function."""

import functools
import importlib
import json
import pkgutil
import re
import shlex
import subprocess
import sys
import tomllib
import typing

import pytest
import typer

import relinear
from conftest import REPOSITORY, make_tiny_llama, mostly_slow
from relinear.bench import models
from relinear.bench.run import BenchSettings
from relinear.compare import speed
from relinear.compare.match import plan_comparison
from relinear.compare.recipe import BUNDLED, find_recipe, read_recipe
from relinear.compare.settings import CompareSettings
from relinear.compression import CompressSettings
from relinear.data.tokenizers import byte_tokenizer
from relinear.distill import DistillSettings
from relinear.settings.yaml_settings import apply_overrides, parse_overrides, read_yaml
from relinear.system.progress import Progress
from relinear.training import TrainSettings
from relinear_cli import progress
from relinear_cli.main import COMMANDS, app, command_of, main
from relinear_cli.options import named_entries, parse_layers, parse_operators


def test_help_of_every_command_shows_an_example(capfd):
    assert main(["--help"]) == 0
    listed = capfd.readouterr().out
    for name in COMMANDS:
        assert name in listed
        assert main([name, "--help"]) == 0
        assert re.search(rf"relinear {name}", capfd.readouterr().out.split("Example:")[1])


def test_help_shows_options_in_groups(capfd):
    for command, groups in (
        ("compress", ("Model", "Data", "Budget", "Output", "Speed")),
        ("train", ("Model", "Budget")),
        ("bench", ("Cases", "Speed")),
    ):
        assert main([command, "--help"]) == 0
        printed = capfd.readouterr().out
        assert [printed.count(f"─ {group} ─") for group in groups] == [1] * len(groups), printed
        assert printed.index(f"─ {groups[-1]} ─") < printed.index("─ More ─")
        assert "─ Options ─" not in printed
        assert "…" not in printed


#: options that ask for something more: where they are not given, there is none of it
ASKS_FOR_MORE = {
    *("replace", "attach", "exclude", "overrides", "operators", "recipe", "plan", "export", "evaluate_on", "retrain"),
    *("model", "check", "control", "static", "lambada", "max_tokens", "limit", "sizes", "csv", "latex"),
    "preregistration",
}
SAYS_WITHOUT = r"default|\belse\b|[Ii]n place of|leaves torch's choice|where no "


def options_in(printed):
    """Option -> what help says of it: its values, and the rest. A row's later lines have no name."""
    found = {}
    for line in printed.splitlines():
        cells = re.split(r" {2,}", line.strip("│ *"))
        if row := re.match(r"│ (?:[* ]  )?(--[a-z-]+)|╭", line):
            values, said = found.setdefault(row[1], ([], []))
        elif line[:1] != "│":
            continue
        said.append(cells[-1])
        values += cells if len(cells) == 1 else cells[:-1]
    return {name: [" ".join(part) for part in parts] for name, parts in found.items()}


#: command -> its settings, and the fields that have an option; the option is the last part of the name
FIELDS = {
    "train": (TrainSettings, "model data.data data.tokenizer steps batch_size learning_rate seed"),
    "distill": (DistillSettings, "tokens learning_rate seed"),
    "compress": (CompressSettings, "reader tokens heal_tokens evaluate"),
    "bench": (BenchSettings, "shapes tokens dtypes modes rounds repeats"),
}


def settings_defaults(command):
    """Option -> its default as the class of settings has it, as help shows it."""
    settings, names = FIELDS.get(command, (None, ""))
    found = {}
    for name in names.split():
        value = settings()
        for part in name.split("."):
            value = getattr(value, part)
        separator = ", " if name == "shapes" else ","
        found[part] = separator.join(map(str, value)) if isinstance(value, tuple) else value
    if command == "compare":
        run, recipe = settings_defaults("train"), CompareSettings(entries={"dense": None})
        found = {key: run[key] for key in ("model", "data", "steps")}
        found |= {"match": recipe.match.by, "seeds": ",".join(map(str, recipe.seeds))}
    return found


@pytest.mark.parametrize("name", COMMANDS)
def test_help_shows_every_default_and_every_choice(name, capfd, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main([name, "--help"]) == 0
    printed = capfd.readouterr().out
    assert "…" not in printed
    shown = options_in(printed)
    hints = typing.get_type_hints(command_of(name), include_extras=True)
    defaults = settings_defaults(name)
    for one in typer.main.get_command(app).commands[name].params:
        if not one.opts[0].startswith("-") or one.name == "help":
            continue
        values, said = shown[next(flag for flag in one.opts if flag.startswith("--"))]
        kind = hints[one.name]
        kind = kind.__args__[0] if hasattr(kind, "__metadata__") else kind
        literal = next(
            (part for part in (kind, *typing.get_args(kind)) if typing.get_origin(part) is typing.Literal), None
        )
        choices = typing.get_args(literal)
        for choice in choices:
            assert re.search(rf"(?<!\w){re.escape(choice)}(?!\w)", values), f"{one.opts}: {choice} is not in {values!r}"
        if literal:
            assert main([name, one.opts[0], f"{choices[0]}x"]) == 2
            assert f"'{choices[0]}x' is not one of '{choices[0]}'" in capfd.readouterr().err
        default = defaults.get(one.name, one.default)
        if default is not None and default is not False:
            default = "--" if default is True else str(default)
            assert re.search(rf"default: \(?{re.escape(default)}", said), f"{one.opts}: no default in {said!r}"
        elif not (one.required or one.is_flag or one.name in ASKS_FOR_MORE):
            assert re.search(SAYS_WITHOUT, said), f"{one.opts}: {said!r} does not say what happens without it"


def test_help_takes_no_torch():
    program = "import sys; from relinear_cli.main import main; main(['train', '-h']); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)


def test_list_names_everything(capfd):
    assert main(["list"]) == 0
    printed = capfd.readouterr().out
    for said in (r"operators: .*block_hadamard, .*, transponder", r"recipes: ccl-claims, .*quick", r"presets: .*tiny"):
        assert re.search(said, printed)
    assert main(["list", "analyses"]) == 0
    assert re.search(r"^gates +How open", capfd.readouterr().out, re.MULTILINE)


def test_version(capfd):
    assert main(["--version"]) == 0
    assert capfd.readouterr().out.strip() == f"relinear {relinear.__version__}"


def test_the_entry_point_is_the_one_of_the_package(monkeypatch, capfd):
    monkeypatch.setattr(sys, "argv", ["relinear", "inspect", "no-preset"])
    scripts = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["scripts"]
    with pytest.raises(SystemExit) as ended:
        pkgutil.resolve_name(scripts["relinear"])()
    assert ended.value.code == 2
    assert capfd.readouterr().err.startswith("error: unknown model")


def test_recipes_are_found_by_name_in_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("quick", "quick.yaml", "recipes/quick", "recipes/quick.yaml"):
        assert find_recipe(name) == BUNDLED / "quick.yaml"
    (tmp_path / "quick").mkdir()  # a folder of that name is none
    assert find_recipe("quick") == BUNDLED / "quick.yaml"
    for folder, name in (
        (tmp_path / "recipes", "quick"),
        (tmp_path, "quick.yaml"),
        (tmp_path / "far", "far/quick.yaml"),
    ):
        folder.mkdir(exist_ok=True)
        (folder / "quick.yaml").write_text("entries: {mine: dense}")
        assert find_recipe(name).resolve() == folder / "quick.yaml"  # one's own comes first
    for name in ("quickly", "far/quick", "elsewhere/quick.yaml"):
        with pytest.raises(FileNotFoundError, match="did you mean 'quick'"):
            find_recipe(name)


@pytest.mark.parametrize("path", sorted(BUNDLED.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_recipe_is_valid(path):
    assert CompareSettings.load(read_recipe(path.stem), path.name).name == path.stem


def test_inspect_counts_what_replace_counts(capfd):
    arguments = ["inspect", "tiny", "-r", "all-linear=low_rank:rank=8", "-r", "lm_head=none", "--json"]
    assert main(arguments) == 0
    table = json.loads(capfd.readouterr().out)
    model = relinear.from_preset("tiny")
    expected = relinear.replace_(model, {"all-linear": relinear.LowRank(rank=8)})
    assert table["parameters"] == expected.parameters == sum(p.numel() for p in model.parameters())
    assert table["flops_per_token"] == expected.flops_per_token


def test_train_and_eval(capfd, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(f"paragraph {i} says {i * i} and {i % 7}" for i in range(400)))
    small = ["--set", "data.sequence_length=32", "--set", "data.max_validation_tokens=320", "--set", "threads=1"]
    small += ["--set", "model_overrides={hidden_size: 16, intermediate_size: 32, num_hidden_layers: 1}"]
    small += ["--data", str(text), "-r", "q_proj=low_rank:rank=2"]
    out = tmp_path / "run"
    assert main(["train", "--steps", "3", "--batch-size", "2", "--out", str(out), *small]) == 0
    printed = capfd.readouterr()
    record = json.loads((out / "run.json").read_text())
    assert f"{record['result']['perplexity']:.3f}" in printed.out
    assert "1 rank, 2 sequences per step (64 tokens)\n" in printed.err
    assert main(["report", str(out), "--out", str(tmp_path / "pages")]) == 0
    assert (tmp_path / "pages" / "report.html").is_file()
    capfd.readouterr()
    assert main(["eval", str(out), "--json"]) == 0
    measured = json.loads(capfd.readouterr().out)["perplexity"]
    assert measured["perplexity"] == pytest.approx(record["result"]["perplexity"], rel=0.02)  # bf16 against fp32


def test_evaluation_prints_json_or_fails(tmp_path, capfd, monkeypatch):
    model = relinear.from_preset("tiny", num_hidden_layers=1)
    model.model.norm.weight.data[0] = float("nan")
    relinear.save_pretrained(model, tmp_path / "model", tokenizer=byte_tokenizer())
    (tmp_path / "text.txt").write_text("some text " * 99)
    command = ["eval", str(tmp_path / "model"), "--data", str(tmp_path / "text.txt"), "--split", "all", "--json"]
    assert main(command) == 2
    printed = capfd.readouterr()
    assert not printed.out
    assert "model.norm.weight holds values that are not finite" in printed.err
    found = relinear.evaluate.Perplexity(800.0, float("inf"), 9)
    monkeypatch.setattr(relinear.evaluate, "perplexity", lambda *args, **options: found)
    assert main(command) == 0
    assert json.loads(capfd.readouterr().out, parse_constant=pytest.fail)["perplexity"]["perplexity"] is None


def test_the_size_of_an_operator_is_always_shown(capfd):
    assert main(["inspect", "tiny", "-r", "q_proj=low_rank", "-r", "k_proj=hdpl", "-r", "v_proj=monarch"]) == 0
    printed = capfd.readouterr().out
    for shown in ("LowRank(rank=64)", "HDPL(rank=128, blocks=8)", "Monarch(blocks=8)"):
        assert shown in printed
    assert str(relinear.Transponder(base=relinear.LowRank())) == "Transponder(base=LowRank(rank=64), rank=8)"


def printed_comparisons():
    """Every ``relinear compare`` with operators that documentation or help shows."""
    places = [*(REPOSITORY / "docs").rglob("*.md"), REPOSITORY / "README.md"]
    places += (REPOSITORY / "src" / "relinear_cli").glob("*.py")
    text = "\n".join(place.read_text(encoding="utf-8") for place in places)
    found = re.findall(r"relinear compare ([^\n`]*-o [^\n`]*)", text)
    assert len(found) >= 2
    written = {one.removesuffix('")').replace("{name}", "hdpl") for one in found}  # a command prints one of them
    return sorted(one for one in written if "scaled" not in one)  # which a reader of the tutorial writes


@pytest.mark.parametrize("arguments", mostly_slow(printed_comparisons(), printed_comparisons()[0]))
def test_printed_comparisons_can_be_sized(arguments, capfd, monkeypatch):
    """They get as far as sizes that match; nothing is trained."""
    sized = {}

    def compare(settings, out, **kwargs):
        sized.update({planned.name: planned for planned in plan_comparison(settings, 258)})
        raise ValueError("sized")

    monkeypatch.setattr(importlib.import_module("relinear.compare.run"), "compare", compare)
    monkeypatch.setattr("relinear.compare.requirements.compare_requirements", lambda *_, **__: {})
    assert main(["compare", *shlex.split(arguments)]) == 2
    assert "sized" in capfd.readouterr().err
    assert len(sized) >= 2


def test_operators_from_text():
    low_rank = {"kind": "low_rank", "rank": 8}
    assert parse_operators(["low_rank:rank=8"]) == {"all-linear": low_rank}
    assert parse_operators(["q_proj=low_rank:rank=8", "lm_head=none"]) == {"q_proj": low_rank, "lm_head": None}
    assert parse_operators(["lm_head=Dense"]) == {"lm_head": None}
    assert parse_operators([r".*\.(?:q|k)_proj=low_rank:rank=8"]) == {r".*\.(?:q|k)_proj": low_rank}
    assert parse_operators(["low_rank"]) == {"all-linear": {"kind": "low_rank"}}
    with pytest.raises(ValueError, match="twice"):
        parse_operators(["q_proj=low_rank", "q_proj=monarch"])


def test_layers_from_text():
    assert parse_layers("0,4-6,-1") == [0, 4, 5, 6, -1]
    assert parse_layers(None) is None


def test_what_a_recipe_says_of_entries_goes_with_them(monkeypatch, tmp_path, capfd):
    asked = []

    def compare(settings, *arguments, **how):
        asked.append(settings)
        raise ValueError("enough")

    monkeypatch.setattr(importlib.import_module("relinear.compare.run"), "compare", compare)
    monkeypatch.setattr("relinear.compare.requirements.compare_requirements", lambda *_, **__: {})
    two = ["-o", "dense", "-o", "hdpl:rank=16,blocks=8", "--out", str(tmp_path)]
    for name in ("quick", "hdpl-claims", "ccl-parameters"):
        assert main(["compare", "--recipe", name, *two]) == 2
        assert capfd.readouterr().err == "error: enough\n"
    assert main(["compare", "-o", "dense", "-o", "low_rank:rank=48", "--match", "parameters"]) == 2
    assert main(["compare", "--recipe", "quick", "--match", "parameters"]) == 2
    assert main(["compare", "-o", "Dense", "-o", "low_rank:rank=48", "--match", "parameters"]) == 2
    quick, claims, counted, equal, resized, spelled = asked
    assert spelled.entries["Dense"].resizing == "width"
    assert (quick.entries["dense"].resizing, resized.entries["dense"].resizing) == ("fixed", "width"), "by --match"
    assert (quick.match.by, quick.match.to) == ("parameters", None)
    assert (claims.match.to, claims.reference) == ("hdpl", "dense")
    assert counted.match.to == 983_168
    dense, low_rank = (planned.size.parameters for planned in plan_comparison(equal, 258))
    assert low_rank == 632_448, "operators are the target"
    assert dense == pytest.approx(low_rank, rel=0.02)


def test_entries_are_named_by_kind_or_by_setting():
    assert named_entries(["dense", "low_rank:rank=8"]) == {"dense": "dense", "low_rank": "low_rank:rank=8"}
    several = named_entries(["low_rank:rank=8", "low_rank:rank=16"])
    assert list(several) == ["low_rank-rank=8", "low_rank-rank=16"]


def test_overrides_are_typed_and_keep_dotted_keys():
    values = parse_overrides(["train.learning_rate=1e-3", "seeds=[1, 2]", "name=yes please"])
    assert values == {"train.learning_rate": 0.001, "seeds": [1, 2], "name": "yes please"}
    changed = apply_overrides({"train": {"steps": 1, "a.b": 2}}, {"train.steps": 5, "train.data.seed": 3, "x.y": 1})
    assert changed == {"train": {"steps": 5, "a.b": 2, "data": {"seed": 3}}, "x": {"y": 1}}
    assert apply_overrides({"m": {"a.b": 2}}, {"m.a.b": 3}) == {"m": {"a.b": 3}}


def test_yaml_numbers_without_a_point_are_numbers(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("rate: 1e-3\nother: 2E4\ntext: e3\n")
    assert read_yaml(path) == {"rate": 0.001, "other": 20000.0, "text": "e3"}


def test_bench_of_whole_models(capfd, tmp_path, monkeypatch):
    monkeypatch.setattr(models, "bench_models", functools.partial(models.bench_models, new_tokens=2))
    arguments = ["bench", "--model", "tiny", "-o", "ccl:rank=4", "-o", ".*q_proj=hdpl:rank=4,blocks=4", "--rounds", "2"]
    assert main([*arguments, "--sequence-length", "8", "--passes", "step", "--out", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "models.json").read_text())["rows"]
    assert [row["variant"] for row in rows] == ["dense", "ccl:rank=4", ".*q_proj=hdpl:rank=4,blocks=4"]
    assert rows[0]["speedup"] == 1
    assert all(row["tokens_per_second"] > 0 for row in rows)
    assert "decode" not in capfd.readouterr().out
    inference = ["--passes", "prefill,decode", "--inference-batches", "1,3", "--out", str(tmp_path / "inference")]
    assert main([*arguments[:5], "--rounds", "1", "--sequence-length", "8", *inference]) == 0
    rows = json.loads((tmp_path / "inference" / "models.json").read_text())["rows"]
    cases = [(row["phase"], row["batch_size"]) for row in rows if row["variant"] == "dense"]
    assert cases == [("prefill", 1), ("prefill", 3), ("decode", 1), ("decode", 3)]
    assert "batch 3" in (tmp_path / "inference" / "report.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--model", "tny", "-o", "transponder"], "unknown preset 'tny'"),
        (["--model", "tiny"], "at least one --operator"),
        (["--model", "tiny", "-o", "transponder", "--shapes", "2x2"], "--shapes is about single layers"),
        (["--sequence-length", "64"], "--sequence-length is about whole models: add --model"),
        (
            ["--model", "tiny", "-o", "transponder", "--passes", "forward"],
            "passes.0 must be one of 'step', 'prefill' or 'decode', got 'forward'",
        ),
        (["--model", "tiny", "-o", "nothing=transponder"], "nothing"),
    ],
)
def test_bench_of_whole_models_refuses(arguments, said, capfd, tmp_path):
    assert main(["bench", *arguments, "--out", str(tmp_path / "out")]) == 2
    assert said in capfd.readouterr().err
    assert not (tmp_path / "out").exists()


def test_progress_on_a_plain_terminal_says_how_far_and_how_long(monkeypatch, capsys):
    clock = iter([0.0, *(30.0 * number for number in range(20))])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    with progress.watch() as on_progress:
        for step in (0, 100, 200):
            left = 300 - step if step else None
            on_progress(Progress("dense", step, 200, "train", run=1, runs=4, seconds_left=left))
    first, middle, last = capsys.readouterr().err.splitlines()
    assert first == "dense 0/200  run 2 of 4"
    assert middle.endswith("about 3 min left")
    assert "200/200" in last
    with progress.watch() as on_progress:
        on_progress(Progress("timing layers", 0, 3, detail="256x256"))
        on_progress(Progress("timing layers", 2, 3, detail="512x512"))
    assert capsys.readouterr().err.splitlines() == [
        "timing layers 0/3  256x256",
        "timing layers 2/3  512x512  30 s left",
    ]


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_inspect_keeps_within_the_terminal(columns: int, monkeypatch, capsys) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    name = r".*\.self_attn\.q_proj=hdpl:rank=16,blocks=8,beta=0.01,bound=free_bits,free_nats=0.25"
    assert main(["inspect", "tiny", "--replace", name]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= columns
    text = " ".join(" ".join(lines).split())
    layers = "model.layers.{0..3}.self_attn.q_proj (x4)"
    for said in (layers, "free_nats=0.25", "32,896", "skipped: 90.9%", "output head"):
        assert said in text
    monkeypatch.delenv("COLUMNS")  # a pipe has no width
    assert main(["inspect", "tiny"]) == 0
    assert re.search(r"q_proj \(x4\) +Linear +128 -> 128 +65,536", capsys.readouterr().out)


def test_searches_beyond_their_grid_are_counted(tmp_path, monkeypatch, capsys) -> None:
    """The last run is the last that was counted: no run of n where n grows with every run."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("Once upon a time there were three words and a full stop. " * 300)
    monkeypatch.setattr("relinear.compare.run.runs_at_once", lambda recipe: 0)
    monkeypatch.setitem(speed._TIMED, "cpu", 1e8)  # operations of the step that is timed
    monkeypatch.setattr("relinear.compare.report.save_panels", lambda panels, stem: None)
    recipe = "-o dense --model tiny --data text.txt --steps 4 --seeds 0,1 --out run"
    sizes = "{hidden_size: 32, num_hidden_layers: 1, num_attention_heads: 2}"
    sets = ["--set", f"train.model_overrides={sizes}", "--set", "speed.seconds=0", "--set", "train.warmup_steps=0"]
    sets += ["--set", "tune={learning_rates: [1e-5, 2e-5], extensions: 1}", "--set", "train.batch_size=2"]
    sets += ["--set", "train.data.sequence_length=32"]
    assert main(["compare", *recipe.split(), *sets]) == 0
    told = re.findall(r"^(.*?) 0/\d+ .*run (\d+) of (\d+)", capsys.readouterr().err, flags=re.M)
    tuned = [runs for what, _, runs in told if what.startswith("tuning")]
    finals = [(int(run), int(runs)) for what, run, runs in told if "seed" in what]
    assert len(tuned) > 2  # the best lies at the edge
    assert [runs - run for run, runs in finals] == [1, 0]


@pytest.mark.parametrize(
    "command", ["compare -o dense -o low_rank:rank=4 --model tiny", "train --model tiny", "compress model"]
)
def test_a_dry_run_says_what_the_command_takes_and_stops(command, tmp_path, monkeypatch, capfd) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(speed._TIMED, "cpu", 1e8)  # operations of the step that is timed
    (tmp_path / "text.txt").write_text("Once upon a time there were three words and a full stop. " * 400)
    if command == "compress model":
        relinear.save_pretrained(make_tiny_llama(vocab_size=258), tmp_path / "model", tokenizer=byte_tokenizer())
    before = sorted(tmp_path.iterdir())
    assert main([*command.split(), "--data", "text.txt", "--dry-run"]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["runs", "parameters", "tokens", "time", "disk"]
    assert "FLOPs per token" in lines[1]
    assert re.search(r"about [\d,]+ (seconds|minutes|hours|days)", lines[3])
    assert sorted(tmp_path.iterdir()) == before
    if command == "compress model":
        assert main(["compress", "model", "--size", "90", "--data", "text.txt", "--dry-run"]) != 0
        printed = capfd.readouterr()
        assert "size=90, 90 bytes, is less than" in printed.err
        assert not printed.out
        assert main(["compress", "model", "--size", "20KB", "--data", "text.txt", "--dry-run"]) != 0
        assert re.search(r"size=20KB cannot be met: the smallest .* is size=0\.\d+MB", capfd.readouterr().err)
