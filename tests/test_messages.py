"""What users are told: wrong settings in their own words, losses of trained weights, patterns and texts without end."""

import errno
import http.client
import io
import json
import os
import re
import threading
import warnings

import pytest
import torch
from transformers import LlamaForCausalLM

import relinear
from conftest import make_tiny_llama
from relinear.compare.match import plan_comparison
from relinear.compare.settings import CompareSettings
from relinear.contract.operator import OperatorConfig
from relinear.explore import server as explore_server
from relinear.hf.model_source import missing_directory_message
from relinear.settings.patterns import check_patterns, matches
from relinear.settings.yaml_settings import read_value
from relinear.system.files import os_errors_named
from relinear.training import FitSettings, TrainSettings, fit
from relinear_cli.errors import is_user_error, one_message
from relinear_cli.main import main
from relinear_cli.terminal import wrapped


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["compress", "m", "--data", "d", "--keep", "80"], ["keep must be below 1", "got 80", "write 0.8"]),
        (["compress", "m", "--data", "d", "--keep", "80%"], ["--keep must be a valid number, got '80%'"]),
        (
            ["compare", "-o", "dense", "--match", "params"],
            ["--match: 'params' is not one of 'width', 'parameters', 'flops'"],
        ),
        (
            ["compress", "m", "--data", "stdlib", "--candidates", "foo"],
            ["unknown operator kind 'foo'; known: block_hadamard"],
        ),
        (["train", "--steps", "few"], ["--steps must be a valid integer, got 'few'"]),
        (["train", "--set", "lr=0.1"], ["unknown setting 'lr'", "did you mean 'learning_rate'?"]),
        (["train", "--seed", str(2**62)], ["seed must be below 4294967296"]),
        (["train", "--set", "betas=3"], ["betas must be a list, got 3"]),
        (
            ["train", "--set", "steps=0", "--set", "batch_size=0"],
            ["command line: 2 errors\n  steps must be above 0, got 0\n  batch"],
        ),
        (
            ["compare", "-o", "dense", "--set", "speed=false"],
            ["command line: speed must be a mapping of settings, got False"],
        ),
        (["compare", "-o", "dense", "--seeds", "-1"], ["command line: seeds.0 must be at least 0, got -1\n"]),
        (
            ["compare", "--recipe", "quick", "--seeds", "0", "--set", "tune.learning_rates=[x]"],
            ["error: command line: tune.learning_rates.0 must be a number, got 'x'\n"],
        ),
        (
            ["compare", "--recipe", "quick", "--seeds", "-1"],
            ["error: command line: seeds.0 must be at least 0, got -1\n"],
        ),
        (["compare", "-o", "dense", "--set", "seeds=[]"], ["seeds must be a list of at least 1, got []"]),
    ],
)
def test_wrong_settings_in_the_users_words(arguments, words, capfd):
    assert main(arguments) == 2
    message = capfd.readouterr().err
    assert message.count("\n") == 1 + message.count("\n  ")
    assert message.count("seeds") <= 2
    assert not re.search(r"Input should|unable to parse", message)
    for word in words:
        assert word in message


def test_train_names_the_part_with_the_wrong_value(tmp_path, capfd):
    recipe = tmp_path / "recipe.yaml"
    for part, steps in (("command line: betas must", 4), (f"{recipe}: steps must", 0)):
        recipe.write_text(f"steps: {steps}\n")
        assert main(["train", "--recipe", str(recipe), "--set", "betas=3"]) == 2
        assert capfd.readouterr().err.startswith(f"error: {part}")


def test_a_missing_directory_names_few_others(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in (".hidden", *(f"folder{number}" for number in range(12))):
        (tmp_path / name).mkdir()
    assert missing_directory_message("models/x").startswith(
        f"models/x: no such directory; {tmp_path} has no 'models'; known: f"
    )
    assert missing_directory_message("models/x").endswith("folder5 and 5 more")
    assert missing_directory_message("foldr3/x").endswith("did you mean 'folder3' or 'folder9' or 'folder8'?")


@pytest.mark.parametrize(("text", "name"), [("transponder:phi=none", "phi"), ("rotor:activation=none", "activation")])
def test_none_is_a_word_where_a_setting_takes_words(text, name):
    assert getattr(OperatorConfig.read(text), name) == "none"
    assert OperatorConfig.read("hdpl:free_nats=none").free_nats is None
    assert OperatorConfig.read("hdpl:beta=.5").beta == 0.5  # as in YAML
    assert OperatorConfig.read("transponder:base=low_rank") == relinear.Transponder(base=relinear.LowRank())
    assert relinear.Transponder(base="low_rank:rank=4").base.rank == 4


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "out/report.html"),
        RuntimeError("PytorchStreamWriter failed writing file data/0: file write failed"),
    ],
)
def test_a_full_disk_is_told_in_one_form(error):
    with pytest.raises(OSError) as caught, os_errors_named("out/report.html"):
        raise error
    assert re.fullmatch(r"out/report.html: No space left on device.*; .* Free space .*", one_message(caught.value))


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: you tried to"),
    ],
)
def test_memory_that_runs_out_is_no_fault_of_relinear(error):
    assert is_user_error(error)
    assert one_message(error).startswith("out of memory: take a lower batch size")


def test_the_command_line_names_its_own_option():
    assert (
        one_message(ValueError("or start over with overwrite=True (--overwrite)")) == "or start over with --overwrite"
    )


def test_a_missing_argument_of_a_wrapped_function_names_it():
    with pytest.raises(TypeError, match=r"from_pretrained\(\) missing 1 required positional argument"):
        LlamaForCausalLM.from_pretrained()


@pytest.mark.parametrize(
    "entries", [("low_rank:rank=4", "hdpl:rank=4,blocks=1"), ("hdpl:rank=4,blocks=1", "low_rank:rank=4")]
)
def test_sizes_are_matched_whichever_entry_comes_first(entries):
    named = dict(zip(("first", "second"), entries, strict=True))
    train = {"model": "tiny", "model_overrides": {"num_hidden_layers": 1}}
    recipe = CompareSettings.load({"entries": named, "match": "parameters", "train": train})
    planned = plan_comparison(recipe, 258)
    (reference,) = (p for p in planned if p.size_mismatch == 0)
    assert named[reference.name].startswith("hdpl")
    assert all(abs(p.size.parameters / reference.size.parameters - 1) <= recipe.match.tolerance for p in planned)


def test_trained_weights_are_not_discarded_without_a_word(tmp_path):
    make_tiny_llama().save_pretrained(tmp_path)
    model = relinear.from_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="discards the trained weights of 2 layers"):
        report = relinear.replace_(model, {"q_proj": relinear.LowRank(rank=2)})
    assert "note: init='fresh' discards" in str(report)
    with pytest.warns(UserWarning, match="discards the trained weights of 2 layers"):  # of what is wrapped
        relinear.replace_(model, {"o_proj": relinear.Transponder(rank=2, base=relinear.LowRank(rank=2))})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        relinear.replace_(model, {"k_proj": relinear.LowRank(rank=2)}, init="from_weight")
        relinear.replace_(model, {"v_proj": relinear.Transponder(rank=2)})
        relinear.replace_(make_tiny_llama(), {"q_proj": relinear.LowRank(rank=2)})


def test_operators_larger_than_their_layers_are_remarked_upon():
    with pytest.warns(UserWarning, match=r"rank=999.* times as many"):
        report = relinear.replace_(make_tiny_llama(), {"q_proj": relinear.HDPL(rank=999, blocks=1)})
    assert "times as many" in str(report)


@pytest.mark.parametrize(
    "pattern",
    [
        r".*\.(q|k)_proj",
        r"model\.layers\.[0-3]\..*",
        r"(?i)MODEL.*Q_PROJ",
        r"(?!.*mlp).*proj",
        r".*(?<=q)_proj",
        r"(\w+\.){2,4}?\w+",
        r"(?:model\.layers\.(\d+)\.)?.{3,}",
        r"[^m].*|.*_proj$",
        r"\bmodel\b.*[qk]_proj",
        r"(?s:model.+)(?i:Q)_proj",
    ],
)
def test_patterns_match_as_pythons_do(pattern):
    check_patterns([pattern])
    names = [name for name, _ in make_tiny_llama().named_modules()]
    found = [name for name in names if matches(pattern, name)]
    assert found == [name for name in names if re.fullmatch(pattern, name)]
    assert found


@pytest.mark.parametrize("pattern", ["(a", "[z-a]", "*"])
def test_patterns_that_are_not_taken(pattern):
    with pytest.raises(ValueError, match="pattern"):
        check_patterns([pattern])


@pytest.mark.parametrize("text", ["[" * 1_000, "[" + "a," * 200_000 + "]"])
def test_texts_without_end_are_refused_early(text):
    with pytest.raises(ValueError, match=r"nested too deeply|longer than 100,000 characters"):
        read_value(text, "settings.yaml")


class _Validation(torch.utils.data.Dataset):
    def __init__(self, blocks):
        self.read, self.blocks = set(), blocks

    def __len__(self):
        return self.blocks

    def __getitem__(self, index):
        self.read.add(index)
        ids = torch.arange(9) % 7
        return {"input_ids": ids, "labels": ids}


def test_the_first_evaluation_is_bounded(tmp_path):
    assert TrainSettings().eval_start_tokens == 65_536
    validation, seen = _Validation(40), []
    settings = FitSettings(steps=1, batch_size=2, eval_start_tokens=32, save_every=0)

    def on_progress(progress):
        if not seen and progress.stage == "evaluate":
            seen.append(len(validation.read))

    result = fit(make_tiny_llama(), (_Validation(4), validation), settings, on_progress=on_progress)
    assert seen[0] <= 6  # two batches, and one that is read ahead
    assert len(validation.read) == 40
    assert result.initial_perplexity is not None


def test_a_long_evaluation_says_how_far_it_is(monkeypatch):
    monkeypatch.setattr("relinear.training.trainer._REPORT_AFTER_S", -1.0)
    told = []
    settings = FitSettings(steps=1, batch_size=2, eval_start_tokens=32, save_every=0)
    fit(make_tiny_llama(), (_Validation(4), _Validation(40)), settings, on_progress=told.append)
    batches = [(p.done, p.total) for p in told if p.text == "evaluating"]
    assert batches[:2] == [(1, 2), (1, 20)]
    assert batches[-1] == (19, 20)


@pytest.fixture
def address(monkeypatch):
    monkeypatch.setattr(explore_server, "live_page", lambda overviews: "<html></html>")

    def echo(subject, text: "str", value: "float"):
        return [text, value]

    server = explore_server.make_server([], "127.0.0.1", 0)
    server.models = [None]  # whom `echo` does not ask
    monkeypatch.setitem(explore_server._ROUTES, ("POST", "/api/echo"), echo)
    with server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address
        server.shutdown()


@pytest.mark.parametrize(
    ("values", "said"),
    [('{"text": "\\ud800", "value": 1}', "text"), ('{"text": "a", "value": 1%s}' % ("0" * 400), "value")],
)
def test_texts_and_numbers_that_are_none(address, values, said, capfd):
    connection = http.client.HTTPConnection(*address, timeout=60)
    connection.request("POST", "/api/echo", values, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    assert (answer.status, said in json.loads(answer.read())["error"]) == (400, True)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("error", [ConnectionResetError, BrokenPipeError, TimeoutError])
def test_clients_that_have_gone_are_none_of_the_terminals_business(address, error, monkeypatch, capfd):
    def gone(handler, status, value):
        raise error

    monkeypatch.setattr(explore_server._Handler, "_send_json", gone)
    connection = http.client.HTTPConnection(*address, timeout=60)
    connection.request("POST", "/api/gone", "{}", {"Content-Type": "application/json"})
    with pytest.raises(http.client.RemoteDisconnected):
        connection.getresponse()
    assert capfd.readouterr().err == ""


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("columns", [60, 80, 300])
def test_a_refusal_keeps_within_the_terminal(columns, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    terminal, pipe = _Terminal(), io.StringIO()
    for stream in (terminal, pipe):
        with monkeypatch.context() as patched:
            patched.setattr("sys.stderr", stream)
            assert main(["train", "--set", "foo=1"]) == 2
    assert pipe.getvalue().count("\n") == 1
    lines = terminal.getvalue().splitlines()
    assert len(lines) > 3
    assert max(map(len, lines)) <= min(columns, 100)
    assert " ".join(terminal.getvalue().split()) == pipe.getvalue().strip()


def test_paths_and_lists_of_faults_stay_whole_on_a_terminal(monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    path = f"/{'some-folder/' * 7}file"
    shown = wrapped(f"error: 2 errors\n  {path}: is not there, and nothing else is either, here or there", _Terminal())
    assert shown.splitlines()[:2] == ["error: 2 errors", f"  {path}:"]
    assert shown.splitlines()[2].startswith("    is not there")
