"""Wrong input of many kinds: one clear message on stderr, exit code 2, no traceback, nothing half-written."""

import json
import shutil

import pytest

from relinear.cli.main import main

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
def text(tmp_path_factory):
    """A file of text that tokenises at once."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("\n\n".join(f"paragraph {i} says {i * i} and {i % 7}" for i in range(400)))
    return path


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
    "unknown operator": (["inspect", "tiny", "-r", "q_proj=low_rnak:rank=4"], ["low_rnak", "low_rank"]),
    "unknown setting of an operator": (["inspect", "tiny", "-r", "q_proj=low_rank:rnak=4"], ["rnak", "rank"]),
    "operator text cut off": (["inspect", "tiny", "-r", "q_proj=low_rank:rank="], ["rank="]),
    "pattern without a match": (["inspect", "tiny", "-r", "qproj=low_rank:rank=4"], ["qproj", "q_proj"]),
    "layer that is not there": (["inspect", "tiny", "-r", "q_proj=low_rank:rank=4", "--layers", "99"], ["99"]),
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
    "seeds that are no numbers": (["compare", "-o", "dense", "--seeds", "one", "--out", "{out}"], ["one"]),
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
        ["below", "Not a directory"],
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
        ["below", "Not a directory"],
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
    "no such directory": (["eval", "{tmp}/nowhere"], ["nowhere"]),
    "evaluation without data": (["eval", "{saved}"], ["--data"]),
    "lambada without a file": (["eval", "{saved}", "--tasks", "lambada"], ["--lambada"]),
    "report of nothing": (["report", "{tmp}"], ["results.json"]),
    "empty range": (["sweep", "-p", "learning_rate=1..0.1", "--out", "{out}"], ["lower to a higher"]),
    "search of an unknown setting": (["sweep", "-p", "learnin_rate=0.1,0.2", "--out", "{out}"], ["learning_rate"]),
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
    return message


@pytest.mark.parametrize("case", CASES)
def test_one_message_and_nothing_written(case, tmp_path, text, saved, capfd, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
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
    "entries: {a: dense}\nentries: {b: dense}": ["entries", "twice"],
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
        (rename_operator, ["low_rnak", "low_rank"]),
        (newer_format, ["999"]),
        (lambda copy: (copy / "model.safetensors").unlink(), ["model.safetensors"]),
    ],
    ids=["cut off", "cut in the header", "broken config", "unknown operator", "newer format", "no weights"],
)
def test_damaged_checkpoints(change, words, saved, tmp_path, capfd):
    copy = damaged(saved, tmp_path, change)
    check(capfd, ["inspect", str(copy)], words)


def test_traceback_on_request(capfd, monkeypatch):
    monkeypatch.setenv("RELINEAR_TRACEBACK", "1")
    assert main(["inspect", "no-preset"]) == 2
    captured = capfd.readouterr()
    assert "Traceback" in captured.err
    assert "error: unknown preset" in captured.err


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
    import relinear.train

    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(relinear.train, "train", interrupt, raising=False)
    assert main(["train", "--data", str(text), "--out", str(tmp_path / "out")]) == 130
    assert "start the same command again" in capfd.readouterr().err
