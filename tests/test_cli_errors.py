"""Wrong input of many kinds: one clear message on stderr, exit code 2, no traceback, nothing half-written."""

import json
import pickle
import shutil
import subprocess
import sys

import pytest
from typer.main import get_command

from conftest import mostly_slow
from relinear_cli.errors import exit_code
from relinear_cli.main import COMMANDS, _format_warning, app, main

# fast training: whoever gets as far as a step takes a few
SMALL = [
    "--set",
    "data.sequence_length=32",
    "--set",
    "data.max_validation_tokens=64",
    "--set",
    "model_overrides={hidden_size: 16, intermediate_size: 32, num_hidden_layers: 1, num_attention_heads: 2}",
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A saved model with operators in it."""
    import relinear
    from conftest import make_tiny_llama
    from relinear.data.tokenizers import byte_tokenizer

    model = make_tiny_llama(vocab_size=258)
    relinear.replace_(model, {"q_proj": relinear.LowRank(rank=2)})
    path = tmp_path_factory.mktemp("saved") / "model"
    relinear.save_pretrained(model, path, tokenizer=byte_tokenizer())
    return path


@pytest.fixture(scope="module")
def large_tokenizer(tmp_path_factory):
    """A saved tokenizer with more entries than the saved model embeds."""
    from relinear.data.tokenizers import train_bpe

    path = tmp_path_factory.mktemp("tokenizer")
    train_bpe(["many different words, " * 9, "some more of them " * 9], 280, 400).save_pretrained(path)
    return path


def files_below(path):
    return sorted(str(p.relative_to(path)) for p in path.rglob("*"))


def recipe(tmp_path, text):
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    return str(path)


#: what is wrong -> (arguments, words that the message must have). {text}, {out} and {tmp} are filled in.
CASES = {
    "unknown command": (["comprae"], ["No such command", "comprae"]),
    "unknown option": (["inspect", "tiny", "--colour"], ["--colour", "inspect --help"]),
    "missing argument": (["inspect"], ["MODEL"]),
    "nothing to compare": (["compare", "--out", "{out}"], ["--recipe", "--operator"]),
    "unknown operator": (["inspect", "tiny", "-r", "q_proj=low_rnak:rank=4"], ["low_rank", "list operators"]),
    "unknown setting of an operator": (["inspect", "tiny", "-r", "q_proj=low_rank:rnak=4"], ["rnak", "rank"]),
    "operator text cut off": (["inspect", "tiny", "-r", "q_proj=low_rank:rank="], ["rank="]),
    "pattern without a match": (["inspect", "tiny", "-r", "qproj=low_rank:rank=4"], ["qproj", "q_proj"]),
    "layer that is not there": (["inspect", "tiny", "-r", "q_proj=low_rank:rank=4", "--layers", "99"], ["99"]),
    "layers from the end": (["inspect", "tiny", "-r", "q_proj=low_rank:rank=4", "--layers", "0,1-0"], ["1-0", "range"]),
    "layers that are no numbers": (["inspect", "tiny", "-r", "q_proj=low_rank", "--layers", "first"], ["first"]),
    "rank too large": (["inspect", "tiny", "-r", "q_proj=low_rank:rank=4096"], ["4096", "128"]),
    "blocks that do not divide": (["inspect", "tiny", "-r", "q_proj=hdpl:rank=8,blocks=3"], ["blocks=3", "1, 2, 4"]),
    "unknown preset": (["inspect", "hdpl-67n"], ["hdpl-67n", "hdpl-67m"]),
    "unknown field of a preset": (["inspect", "tiny", "--set", "hidden_sise=64"], ["hidden_sise", "hidden_size"]),
    "impossible width": (["inspect", "tiny", "--set", "hidden_size=7"], ["hidden_size=7"]),
    "--set without a value": (["train", "--set", "steps", "--out", "{out}"], ["--set", "steps"]),
    "--set through a number": (["train", "--set", "steps=3", "--set", "steps.x=1", "--out", "{out}"], ["steps.x", "3"]),
    "unknown setting": (["train", "--set", "learning_rat=1", "--out", "{out}"], ["learning_rat", "learning_rate"]),
    "negative steps": (["train", "--steps", "-5", "--out", "{out}"], ["steps", "-5"]),
    "rate that is no number": (["train", "--set", "learning_rate=fast", "--out", "{out}"], ["learning_rate", "fast"]),
    "warm-up longer than the run": (["train", "--steps", "5", "--set", "warmup_steps=9", "--out", "{out}"], ["9", "5"]),
    "absent data": (["train", "--data", "{tmp}/nothing.txt", "--out", "{out}"], ["nothing.txt"]),
    "wrong tokenizer": (
        ["train", "--data", "{text}", "--tokenizer", "{tmp}/no-tokenizer", "--out", "{out}"],
        ["no-tokenizer"],
    ),
    "tokenizer too small": (["train", "--data", "{text}", "--tokenizer", "bpe:7", "--out", "{out}"], ["bpe:7", "258"]),
    "sequences longer than the model": (
        ["train", "--data", "{text}", "--set", "data.sequence_length=4096", "--out", "{out}"],
        ["4096"],
    ),
    "absent recipe": (["compare", "--recipe", "qiuck", "--out", "{out}"], ["qiuck", "quick"]),
    "unknown match": (["compare", "-o", "dense", "--match", "size", "--out", "{out}"], ["size", "parameters"]),
    "seeds that are no numbers": (["compare", "-o", "dense", "--seeds", "one", "--out", "{out}"], ["--seeds 'one'"]),
    "an entry twice": (["compare", "-o", "low_rank", "-o", "low_rank", "--out", "{out}"], ["low_rank", "twice"]),
    "a match that cannot be": (
        [
            "compare",
            "-o",
            "low_rank:rank=4",
            "-o",
            "hdpl:rank=4,blocks=1",
            "--match",
            "parameters",
            "--set",
            "match.to=low_rank",
            "--out",
            "{out}",
            "--data",
            "{text}",
            "--set",
            "train.data.sequence_length=32",
        ],
        ["hdpl", "within", "resize"],
    ),
    "out below a file": (
        ["train", "--data", "{text}", "--steps", "2", "--out", "{text}/below", *SMALL],
        ["is a file; give a directory"],
    ),
    "comparison below a file": (
        [
            "compare",
            "-o",
            "dense",
            "--data",
            "{text}",
            "--steps",
            "2",
            "--out",
            "{text}/below",
            "--set",
            "train.data.sequence_length=32",
        ],
        ["is a file; give a directory"],
    ),
    "NaN loss": (
        [
            "train",
            "--data",
            "{text}",
            "--steps",
            "40",
            "--learning-rate",
            "1e30",
            "--out",
            "{out}",
            *SMALL,
            "--set",
            "max_grad_norm=0",
            "--set",
            "warmup_steps=0",
            "--set",
            "schedule=constant",
        ],
        ["nan", "step", "learning_rate"],
    ),
    "no such directory": (["eval", "{tmp}/nowhere"], ["nowhere", "no such directory"]),
    "no such directory, with data": (["eval", "{tmp}/nowhere", "--data", "{text}"], ["nowhere", "no such directory"]),
    "no such run": (["eval", "nowhere", "--data", "{text}"], ["'nowhere'", "directory here"]),
    "a directory that is nearly there": (["eval", "{saved}/../modle", "--data", "{text}"], ["modle", "'model'"]),
    "a folder beside the model": (["eval", "{saved}/../..", "--data", "{text}"], ["no model to load"]),
    "a file in place of a model": (["eval", "{text}", "--data", "{text}"], ["text.txt", "directory"]),
    "evaluation of a preset": (["eval", "tiny", "--data", "{text}"], ["'tiny'", "directory here"]),
    "unknown model to train": (
        ["train", "--model", "tinyy", "--data", "{text}", "--out", "{out}"],
        ["did you mean 'tiny'"],
    ),
    "unknown model to compare": (
        ["compare", "-o", "low_rank:rank=4", "--model", "tinyy", "--data", "{text}", "--out", "{out}"],
        ["did you mean 'tiny'"],
    ),
    "unknown model to distil": (
        ["distill", "tiny", "-r", "q_proj=rotor", "--data", "{text}", "--out", "{out}"],
        ["'tiny'", "directory here"],
    ),
    "compression of a preset": (
        ["compress", "tiny", "--data", "{text}", "--out", "{out}"],
        ["'tiny'", "directory here"],
    ),
    "layers without operators": (["inspect", "tiny", "--layers", "1"], ["--layers is for --replace"]),
    "tokens that are no number": (["compare", "-o", "dense", "--tokens", "1X", "--out", "{out}"], ["20.5M"]),
    "unknown model to time": (
        ["bench", "--model", "tinyy", "-o", "low_rank", "--out", "{out}"],
        ["did you mean 'tiny'"],
    ),
    "unknown model to analyse": (["analyze", "tinyy", "--data", "{text}", "--out", "{out}"], ["did you mean 'tiny'"]),
    "layers without end": (["inspect", "tiny", "-r", "q_proj=low_rank", "--layers", "0-999999999999"], ["--layers"]),
    "a value nested without end": (["inspect", "tiny", "--set", "hidden_size=" + 3_000 * "["], ["nested"]),
    "a number of 5,000 digits": (["inspect", "tiny", "--set", "vocab_size=" + 5_000 * "9"], ["--set", "digits"]),
    "a pattern of 10,000 characters": (
        ["inspect", "tiny", "-r", f"{10_000 * 'x'}=low_rank"],
        ["matches no module"],
    ),
    "a model of 10,000 characters": (["inspect", 10_000 * "x"], ["directory"]),
    "a command of 10,000 characters": ([10_000 * "x"], ["No such command"]),
    "data of 10,000 characters": (["train", "--data", 10_000 * "x", "--out", "{out}"], ["File name too long"]),
    "an exclusion that leaves out nothing": (
        ["distill", "{saved}", "-r", "v_proj=rotor", "--exclude", "q_porj", "--data", "{text}", "--out", "{out}"],
        ["exclude=", "q_proj"],
    ),
    "evaluation without data": (["eval", "{saved}"], ["--data"]),
    "another tokenizer": (
        ["eval", "{saved}", "--data", "{text}", "--tokenizer", "{tmp}"],
        ["cannot load the tokenizer"],
    ),
    "lambada without a file": (["eval", "{saved}", "--tasks", "lambada"], ["--lambada"]),
    "report of nothing": (["report", "{tmp}"], ["results.json"]),
}


def check(capfd, arguments, words):
    code = main(arguments)
    captured = capfd.readouterr()
    assert code == 2, captured.err
    assert "Traceback" not in captured.err
    assert captured.out == ""
    messages = [line for line in captured.err.splitlines() if line.startswith("error: ")]
    assert len(messages) == 1, captured.err
    message = captured.err[captured.err.index("error: ") :]
    for word in words:
        assert word in message, f"{word!r} is not in {message!r}"
    assert len(message) < 2_500  # whatever was given
    return message


@pytest.mark.parametrize("case", mostly_slow(CASES, *(CASES.keys() - {"a value nested without end"})))
def test_one_message_and_nothing_written(case, tmp_path, text, saved, capfd, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    if case == "NaN loss":  # a run that begins says first what it takes
        monkeypatch.setattr("relinear.compare.requirements.training_requirements", lambda *_: {})
    arguments, words = CASES[case]
    out = tmp_path / "out"
    names = {"{text}": str(text), "{out}": str(out), "{tmp}": str(tmp_path), "{saved}": str(saved)}
    for name, value in names.items():
        arguments = [argument.replace(name, value) for argument in arguments]
    check(capfd, arguments, words)
    assert text.is_file()
    if case == "NaN loss":  # the run had begun: what it wrote says how it ended
        assert json.loads((out / "run.json").read_text())["status"] == "failed"
        assert not (out / "model").exists()
        assert not list(out.rglob("*.partial"))
    else:
        assert files_below(tmp_path) == []


#: contents of a recipe -> words that the message must have
RECIPES = {
    "entries: {a: dense\n  b: [": ["recipe.yaml", "line 2"],
    "- a list": ["mapping", "list"],
    "entries: {a: dense}\nentries: {b: dense}": ["line 2", 'duplicate key "entries"'],
    "entries: {a: dense}\nsede: [1]": ["sede", "seeds"],
    "entries: {}": ["entries"],
    "entries: {a: low_rank}\ntrain: {stepz: 5}": ["stepz", "steps"],
    "entries: {a: low_rank}\ntrain: {data: {tokeniser: bytes}}": ["tokeniser", "tokenizer"],
    "entries: {a: {operator: low_rank, sise: fixed}}": ["sise", "resize"],
    "entries: {a: {kind: low_rnak}}": ["entries.a", "low_rank"],
    "entries: {a: low_rank:rank=0}": ["entries.a", "rank"],
    "entries: {a/b: dense}": ["a/b"],
    "entries: {a: dense}\nmatch: {by: parameters, to: b}": ["match.to", "'b'"],
    "entries: {a: dense}\nseeds: [1, 1]": ["seeds", "twice"],
    "entries: {a: dense}\ntokens: 100\ntrain: {steps: 5}": ["tokens", "steps"],
    "entries: {a: dense}\ntune: {learning_rates: [0.1]}": ["learning_rates"],
    "entries: {a: !!python/object/apply:os.system [ls]}": ["YAML"],
}


@pytest.mark.parametrize("contents", RECIPES)
def test_wrong_recipes(contents, tmp_path, capfd):
    path = recipe(tmp_path, contents)
    check(capfd, ["compare", "--recipe", path, "--out", str(tmp_path / "out")], RECIPES[contents])
    assert files_below(tmp_path) == ["recipe.yaml"]


def damaged(saved, tmp_path, change):
    copy = tmp_path / "damaged"
    shutil.copytree(saved, copy)
    change(copy)
    return copy


def cut(copy):
    file = copy / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def cut_header(copy):
    file = copy / "model.safetensors"
    file.write_bytes(file.read_bytes()[:20])


def break_config(copy):
    (copy / "config.json").write_text('{"model_type": ')


def rename_operator(copy):
    file = copy / "config.json"
    file.write_text(file.read_text().replace('"low_rank"', '"low_rnak"'))


def newer_format(copy):
    file = copy / "config.json"
    file.write_text(file.read_text().replace('"format_version": 1', '"format_version": 999'))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (cut, ["model.safetensors"]),
        (cut_header, ["model.safetensors"]),
        (break_config, ["config.json"]),
        (rename_operator, ["low_rank", "list operators"]),
        (newer_format, ["999"]),
        (lambda copy: (copy / "model.safetensors").unlink(), ["model.safetensors"]),
    ],
    ids=["cut off", "cut in the header", "broken config", "unknown operator", "newer format", "no weights"],
)
def test_damaged_checkpoints(change, words, saved, tmp_path, capfd):
    copy = damaged(saved, tmp_path, change)
    check(capfd, ["inspect", str(copy)], words)


@pytest.mark.parametrize(
    "command", [["eval"], ["compress"], ["distill", "-r", "v_proj=low_rank"], ["analyze"], ["explore"]]
)
def test_a_model_without_its_tokenizer(command, saved, text, tmp_path, capfd):
    mute = tmp_path / "mute"
    shutil.copytree(saved, mute, ignore=shutil.ignore_patterns("tokenizer*"))
    check(
        capfd,
        [*command, str(mute), "--data", str(text)],
        [
            "(no tokenizer was saved there): it must be 'bytes', ",
            ", which must be reachable. Name the model's own with --tokenizer",
        ],
    )
    if command == ["eval"]:
        for given in ([str(saved)], [str(mute), "--tokenizer", "bytes"], [str(mute), "--tokenizer", str(saved)]):
            assert main(["eval", *given, "--data", str(text), "--split", "all", "--max-tokens", "512", "--json"]) == 0
        figures = capfd.readouterr().out.split("}\n}\n")
        assert figures[0] == figures[1] == figures[2] != ""


def with_tokenizer(saved, tokenizer, tmp_path):
    """The saved model beside a tokenizer that is not its own."""
    copy = tmp_path / "mixed"
    shutil.copytree(saved, copy)
    for file in tokenizer.iterdir():
        shutil.copy(file, copy)
    return str(copy)


@pytest.mark.parametrize(
    "arguments",
    [
        ["eval", "{mixed}", "--data", "{text}"],
        ["eval", "{mixed}", "--tasks", "lambada", "--lambada", "{text}"],
        ["distill", "{mixed}", "-r", "v_proj=rotor", "--data", "{text}", "--out", "{out}"],
        ["analyze", "{mixed}", "--data", "{text}", "--out", "{out}"],
        ["analyze", "{saved}", "--tokenizer", "{tokenizer}", "--data", "{text}", "--out", "{out}"],
    ],
    ids=lambda arguments: " ".join(arguments[:4]),
)
def test_a_tokenizer_that_does_not_fit(arguments, saved, large_tokenizer, text, tmp_path, capfd):
    mixed = with_tokenizer(saved, large_tokenizer, tmp_path)
    names = {"mixed": mixed, "saved": saved, "tokenizer": large_tokenizer, "text": text, "out": tmp_path / "out"}
    check(capfd, [argument.format(**names) for argument in arguments], ["tokenizer", "258"])
    assert not (tmp_path / "out").exists()


def test_an_unknown_model_is_refused_before_any_network(monkeypatch, capfd, text, tmp_path):
    import socket

    def fail(*args, **kwargs):
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket, "create_connection", fail)
    monkeypatch.setattr(socket.socket, "connect", fail)
    out = ["--data", str(text), "--out", str(tmp_path / "out")]
    for arguments in (
        ["inspect", "tinyy"],
        ["train", "--model", "tinyy", *out],
        ["distill", "tinyy", "-r", "q=rotor", *out],
    ):
        check(capfd, arguments, ["tinyy", "tiny"])


def test_a_pickle_as_weights_is_not_run(text, tmp_path, capfd):
    from conftest import make_tiny_llama

    make_tiny_llama(vocab_size=258).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with (tmp_path / "pytorch_model.bin").open("wb") as file:
        pickle.dump({"weight": print}, file)
    arguments = ["eval", str(tmp_path), "--data", str(text), "--tokenizer", "bytes"]
    check(capfd, arguments, ["a pickle with more than tensors", "safetensors"])


def test_a_rank_of_nothing_is_refused(text, tmp_path, capfd, monkeypatch):
    """It would train alone, and write nothing, as the first rank is to do."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    out = tmp_path / "out"
    check(capfd, ["train", "--data", str(text), "--out", str(out), *SMALL], ["RANK=1 is set without WORLD_SIZE"])
    assert not out.exists()


def test_a_missing_key_of_wandb_is_the_users(capfd):
    class UsageError(Exception):
        pass

    def train():
        raise UsageError("api_key not configured (no-tty)")

    assert exit_code(train) == 2
    assert capfd.readouterr().err == "error: UsageError: api_key not configured (no-tty)\n"


def test_traceback_on_request(capfd, monkeypatch):
    monkeypatch.setenv("RELINEAR_TRACEBACK", "1")
    assert main(["inspect", "no-preset"]) == 2
    captured = capfd.readouterr()
    assert "Traceback" in captured.err
    assert "error: unknown model" in captured.err


def test_our_own_faults_show_their_traceback(capfd, monkeypatch):
    import relinear

    def fail(*args, **kwargs):
        raise RuntimeError("a fault")

    monkeypatch.setattr(relinear, "summary", fail, raising=False)
    assert main(["inspect", "tiny"]) == 1
    captured = capfd.readouterr()
    assert "Traceback" in captured.err
    assert "fault of relinear" in captured.err


def test_interrupt_says_how_to_go_on(capfd, monkeypatch, text, tmp_path):
    import relinear.training

    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(relinear.training, "train", interrupt, raising=False)
    assert main(["train", "--data", str(text), "--out", str(tmp_path / "out")]) == 130
    assert "start the same command again" in capfd.readouterr().err


#: wrong input of every command, and a part of the message; {model}, {text}, {plan}, {recipe} and {others} are there
WRONG = {
    "train --set lr=0.1": "unknown setting 'lr'; did you mean 'learning_rate'?",
    "train --data ./no/such": "'./no/such' does not exist",
    "train -r all-linear=hdpl:rnk=3": "unknown setting 'rnk'; did you mean 'rank'?",
    "train -r q_prjo=low_rank": "pattern 'q_prjo' matches no module; did you mean 'q_proj'",
    "inspect gpt2-ccl-64 -r attn.c_atn=low_rank": "pattern 'attn.c_atn' matches no module; did you mean 'attn.c_attn'",
    "compare -o hdpl:rank=0": "rank must be at least 1, got 0",
    "compare --recipe {recipe}": "not valid YAML",
    "distill {model} --data {text} -r q_proj=nosuch": "unknown operator kind 'nosuch'",
    "compress {model} --data {text} --plan {plan}": "not a compression plan",
    "compare --preregistration {latin}": "latin.txt is not UTF-8 text",
    "train --data {others}/gone": "gone' does not exist.",  # a link that dangles does not stand for itself
    "inspect {cut}": "model.safetensors is damaged or cut off",
    "inspect {unknown}": "unknown operator kind 'low_rnak'",
    "eval nosuch": "unknown model 'nosuch'",
    "eval {model} --data {text} --limit 3": "--limit counts examples of other tasks",
    "eval {model} --text-column body": "--text-column needs --data",
    "eval {model} --tasks piqa --stride 4": "--stride is about the task perplexity",
    "compare -o dense --executor slurm --slurm mem": "--slurm 'mem': write it as key.subkey=value",
    "analyze {model} --out {others}": "has gates.json, and no record (analyze.json) of relinear's analyze",
    "bench --shapes x": "write it as IN->OUT",
    "bench --dtypes fp32,fp23": "dtypes.1 must be one of 'fp32' or 'bf16', got 'fp23'; did you mean 'fp32'",
    "distill {model} --data {text} -r q_proj=low_rank --layers first": "'first' is neither a number nor a range",
    "inspect ./no/such": "no such directory",
    "list nosuch": "there is no list of 'nosuch'; known: operators",
}
MORE = {
    "eval {model} --lambada {text}": "--lambada is the text of the task lambada: add --tasks lambada",
    "eval {model} --tasks lambada --lambada nosuch": "(JSON lines with a 'text'), got nosuch",
    "analyze {cut}": "model.safetensors is damaged or cut off",
    "train --model {cut} --data {text}": "model.safetensors is damaged or cut off",
    "compare --recipe .": ".: Is a directory",
    "train --model nosuch": "unknown model 'nosuch'",
    "train --objective distill:teacher=nosuch": "unknown model 'nosuch'",
    "train --attach nosuch": "unknown attachment kind 'nosuch'",
    "train --batch-size 10000000000": "batch_size must be at most 1,048,576",
    "train --recipe {recipe}": "not valid YAML",
    "train --out {others}": "has metrics.jsonl, and no record (run.json) of relinear's train",
    "compare -o low_rank --data ./no/such": "'./no/such' does not exist",
    "compare -o low_rank -o nosuch": "unknown operator kind 'nosuch'",
    "distill {model} -r q_proj=low_rank --data ./no/such": "'./no/such' does not exist",
    "compress nosuch --data {text}": "unknown model 'nosuch'",
    "compress {model} --data {text} --keep 80": "for 80 % write 0.8",
    "compress {model} --data {text} --candidates nosuch": "unknown operator kind 'nosuch'",
    "compress {model} --data {text} --for nosuch": "'nosuch' is not one of 'relinear', 'llama.cpp', 'vllm'",
    "eval {model} --data ./no/such": "'./no/such' does not exist",
    "eval {model} --data {text} --tokenizer /no/such": "cannot load the tokenizer '/no/such' (",
    "compress {model} --data {text} --tokenizer /no/such": "cannot load the tokenizer '/no/such' (",
    "distill {model} -r q_proj=low_rank --data {text} --tokenizer {others}": "(no tokenizer was saved there)",
    "analyze {model} --tokenizer {others}": "(no tokenizer was saved there)",
    "explore nosuch": "unknown model 'nosuch'",
    "bench --operator hdpl:rank=0": "rank must be at least 1",
    "inspect tiny -r all-linear=low_rank:rank=0": "rank must be at least 1",
    "train -r {long}=low_rank": "matches no module",
    "train --data {long}": "File name too long",
    "train --out {long}": "File name too long",
    "train --out {latin}/run": "latin.txt is a file; give a directory",
    "compare --recipe /dev/null": "/dev/null must hold a mapping of settings",
}


@pytest.mark.parametrize("table", [WRONG, pytest.param(MORE, marks=pytest.mark.slow)], ids=["each command", "more"])
def test_wrong_input_of_every_command(table, saved, text, tmp_path, monkeypatch, capfd):
    (tmp_path / "others").mkdir()
    for name in ("report.html", "run.json", "others/gates.json", "others/metrics.jsonl"):
        (tmp_path / name).write_text("[1")
    (tmp_path / "others" / "gone").symlink_to("nowhere")
    (tmp_path / "latin.txt").write_bytes(b"\xe9")
    places = {"model": saved, "text": text, "plan": tmp_path / "run.json", "recipe": tmp_path / "run.json"}
    for name, change in {"cut": cut, "unknown": rename_operator}.items():
        (tmp_path / name).mkdir()
        places[name] = damaged(saved, tmp_path / name, change)
    places |= {"latin": tmp_path / "latin.txt", "long": "x" * 5_000}
    monkeypatch.chdir(tmp_path)
    unexpected = []
    for line, wanted in table.items():
        code = main(line.format(**places, others=tmp_path / "others").split())
        said = capfd.readouterr().err
        if code != 2 or wanted not in said:
            unexpected.append(f"{line}: {said}")
    assert not unexpected, "".join(unexpected)


#: what typer checks: nothing of relinear is imported
AT_ONCE = {
    "train --steps x": "--steps must be a valid integer",
    "train --steps 0": "--steps must be greater than or equal to 1, got '0'",
    "train --threads 1025": "--threads must be less than or equal to 1024, got '1025'",
    "compare --match size": "'size' is not one of 'width', 'parameters', 'flops'",
    "compare --preregistration nosuch": "path 'nosuch' does not exist",
    "eval run --split nosuch": "'nosuch' is not one of 'train', 'validation', 'test', 'all'",
    "specialize . --prefix-file nosuch --out y": "path 'nosuch' does not exist",
    "report nosuch": "path 'nosuch' does not exist",
    "explore run --port 99999": "--port must be less than or equal to 65535",
    "comprae": "Did you mean 'compare'",
}


def test_wrong_options_are_refused_without_torch(tmp_path):
    program = (
        "import sys; from relinear_cli.main import main\n"
        "for line in sys.argv[1:]:\n"
        "    print('code', main(line.split()), 'torch' in sys.modules, file=sys.stderr)\n"
    )
    arguments = [sys.executable, "-c", program, *AT_ONCE]
    done = subprocess.run(arguments, capture_output=True, text=True, check=True, cwd=tmp_path)
    for line, said in zip(AT_ONCE, done.stderr.split("code ")[:-1], strict=True):
        assert AT_ONCE[line] in said, line
    assert [line for line in done.stderr.splitlines() if line.startswith("code")] == ["code 2 False"] * len(AT_ONCE)


@pytest.mark.parametrize("name", COMMANDS)
def test_an_empty_text_is_refused_by_every_option_of_every_command(name, tmp_path, monkeypatch, capfd):
    """The path of an empty name is the folder one is in, which would be written to."""
    monkeypatch.chdir(tmp_path)
    for one in get_command(app).commands[name].params:
        for flag in () if getattr(one, "is_flag", False) or one.name == "help" else one.opts:
            written = ([flag, ""], [flag, " "], *([[f"{flag}="]] if flag.startswith("--") else []))
            for given in written if one.name == "out" else written[:1]:
                given = given if flag.startswith("-") else given[1:]
                said = f"{flag if flag.startswith('-') else 'an argument'} must not be empty, got '"
                check(capfd, [name, *given], [said, "fill it in"])
    assert files_below(tmp_path) == []


def test_help_shows_the_defaults_and_choices_of_settings(capsys):
    assert main(["compress", "--help"]) in (None, 0)
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "default: (relinear)" in shown
    assert "default: (32768)" in shown


def test_a_warning_of_ours_is_one_line_without_its_place_in_the_source() -> None:
    assert _format_warning("not read: a.md", UserWarning, "corpora.py", 56, None) == "warning: not read: a.md\n"
    assert "corpora.py:56: DeprecationWarning" in _format_warning("old", DeprecationWarning, "corpora.py", 56, None)
