"""Commands that docs, plans and READMEs of results print are taken as they stand, from the root of the repository.

They take hours, days and downloads; here each gets as far as its work, which is not begun.
"""

import importlib
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import relinear
from conftest import REPOSITORY, make_tiny_llama
from relinear.data.tokenizers import load_tokenizer
from relinear.settings.yaml_settings import read_yaml
from relinear_cli.main import main

PLANS = REPOSITORY / "results" / "plans"


def printed() -> list[str]:
    """Whole commands of claims and plans, each once."""
    pages = "\n".join(page.read_text(encoding="utf-8") for page in sorted((REPOSITORY / "docs").rglob("*.md")))
    found = re.findall(r"`((?:PYTHONPATH=\S+ )?(?:relinear [^`\n]*--(?:plan|recipe) |python results/)[^`\n]*)`", pages)
    found += [read_yaml(plan)["command"] for plan in PLANS.glob("*.yaml")]
    assert len(found) > 40
    return sorted({" ".join(command.partition(" (")[0].split()) for command in found})


COMPARISONS = [command for command in printed() if "relinear compare" in command or "--import" in command]
SCRIPTS = {command.split()[1]: command for command in printed() if command.startswith("python ")}


class Begun(ValueError):
    """What the command would do next is its work."""


@pytest.mark.parametrize("command", COMPARISONS, ids=lambda command: command[:60])
def test_comparisons_begin(command, monkeypatch, capfd):
    def begin(*_, **__):
        raise Begun("begun")

    monkeypatch.chdir(REPOSITORY)
    monkeypatch.setenv("RELINEAR_IMPORT", "")
    monkeypatch.setattr(importlib.import_module("relinear.compare.run"), "compare", begin)
    requirements = importlib.import_module("relinear.compare.requirements")  # they read the text
    monkeypatch.setattr(requirements, "compare_requirements", lambda *_, **__: {})
    words = shlex.split(command)
    if words[0].startswith("PYTHONPATH="):
        monkeypatch.syspath_prepend(words.pop(0).partition("=")[2])
    assert main(words[1:]) == 2
    assert capfd.readouterr().err == "error: begun\n"


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_have_the_options_that_are_printed(script):
    done = subprocess.run(
        [sys.executable, script, "--help"], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    for flag in re.findall(
        r" (--[a-z-]+)", " ".join(command for command in printed() if f"python {script}" in command)
    ):
        assert flag in done.stdout, f"{script} has no {flag}"


@pytest.mark.parametrize("script", sorted((REPOSITORY / "results").rglob("*.py")), ids=lambda path: path.stem)
def test_scripts_write_beside_no_record_unless_they_are_told(script: Path):
    text = script.read_text(encoding="utf-8")
    assert not re.search(r"default=(Path\(\"results/|HERE)", text)
    assert not re.search(r"HERE[^\n]*\.(write_text|open\(\"[aw])|write_json\(\(?HERE", text)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_script_prints_its_table_whatever_is_recorded(tmp_path):
    text = (REPOSITORY / "CONTRIBUTING.md").read_text(encoding="utf-8")
    for name in ("books/0.txt", "wikitext2/validation.txt", "wikitext2/test.txt", "ptb/test.txt"):
        (tmp_path / "data" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "data" / name).write_text(text * 3)
    (tmp_path / "data" / "lambada").mkdir()
    (tmp_path / "data" / "lambada" / "test.jsonl").write_text(json.dumps({"text": "a word and another word"}) + "\n")
    model = make_tiny_llama(vocab_size=258, hidden_size=64, max_position_embeddings=512)
    relinear.save_pretrained(model, tmp_path / "model", tokenizer=load_tokenizer("bytes"))
    command = [sys.executable, str(REPOSITORY / "results/rotor/smollm2.py"), "--model", "model", "--data", "data"]
    command += ["--layers", "1", "--projections", "q_proj", "--tokens", "512", "--epochs", "1", "--eval-tokens", "512"]
    first, second = (
        subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout for _ in range(2)
    )
    assert second.count("| q_proj | 1 |") == 7  # every row, although none was measured again
    assert first.endswith(second)
    assert (tmp_path / "runs" / "rotor" / "smollm2.md").read_text() in second
