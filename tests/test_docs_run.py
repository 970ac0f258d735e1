"""Every block of Python and every ``relinear`` command of README and docs runs, as printed, on tiny models and texts.

A block that cannot (a network, a GPU, corpora, minutes) says so in a comment right above it,
``<!-- not run (network): why -->``, and is counted here, so that none is left out in silence. Sizes alone are cut.
"""

import html
import importlib
import inspect
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import yaml
from typer.main import get_command

import relinear
from conftest import REPOSITORY, make_tiny_llama
from relinear.compare.settings import CompareSettings
from relinear.data.tokenizers import load_tokenizer, vocabulary_size
from relinear_cli.main import COMMANDS, app, main

PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^(?:<!-- not run \((\w+)\): (.+?) -->\n)?```(\w*)[^\n]*\n(.*?)^```$", flags=re.S | re.M)
SHELL = ("sh", "bash", "console", "")
REASONS = ("network", "gpu", "corpora", "minutes")

#: blocks that are not run, by page and reason; change it together with the page
NOT_RUN: dict[str, Counter] = {
    "docs/data.md": Counter(network=4),
    "docs/families.md": Counter(minutes=1),
    "docs/cgt.md": Counter(minutes=2),
    "docs/recipes.md": Counter(minutes=2),
    "docs/speed.md": Counter(minutes=1),
    "docs/start/operator.md": Counter(network=2),
    "docs/tutorial.md": Counter(network=1),
    "README.md": Counter(network=2, minutes=1),
}

#: what a command is given where the block leaves it out, and what it is given last, so that it is done at once
DEFAULTS = {
    "compare": "--data books --model tiny",
    "train": "--data books --model tiny",
    "analyze": "--data books",
    "explore": "--data books",
}
CUTS = {
    "compare": [
        *("--steps", "1", "--seeds", "0", "--set", "speed.seconds=0.01", "--set", "speed.rounds=3"),
        *("--set", "train.warmup_steps=0", "--set", "train.batch_size=2", "--set", "train.data.sequence_length=32"),
        *("--set", "train.data.max_validation_tokens=256", "--set", "train.model_overrides={num_hidden_layers: 1}"),
    ],
    "train": ["--steps", "1"],
    "replicate": ["--dry-run"],
    "analyze": ["--sequences", "8", "--length", "64"],
    "explore": ["--sequences", "4", "--length", "32", "--effects", "1", "--static", "explored.html"],
    "bench": ["--rounds", "3"],
    "compress": ["--tokens", "512"],
    "distill": ["--tokens", "256", "--set", "validation_tokens=256"],
}
#: sizes that are cut in the text of a block before it runs
SMALLER = {
    "bpe:8000": "bpe:300",
    "steps=10_000": "steps=1",
    "steps=2000": "steps=1",
    "steps=500": "steps=1",
    ", warmup_steps=200": "",
    "layers=[12]": "layers=[1]",
    "--layers 12": "--layers 1",
    '"learning_rate": 0.05': '"learning_rate": 0.05, "tokens": 256, "validation_tokens": 256',
    "bits=4.5, tokenizer": 'bits=4.5, settings={"tokens": 512}, tokenizer',
    '{"steps": 300}': '{"steps": 1, "data": {"data": "books"}}',
    "2048x2048": "32x32",
    "1,4096": "1",
    "--tokens 4096": "--tokens 4",
    "rank=128,blocks=8": "rank=4,blocks=8",
    "llama-60m": "tiny",
    "replicate rotor --model models/smollm2": "replicate rotor",  # the paper's blocks do not fit the tiny model
    "--for llama.cpp --size 90MB": "--size 0.5",  # its tokenizer has bytes alone
    "--tune --seeds 0,1,2": "--tune --set tune.learning_rates=[0.001,0.002] --set tune.extensions=0"
    " --set tune.check_full_length=false",
    "--repeats 5": "--repeats 2 --shapes 32x32 --tokens 1 --dtypes fp32 --modes eager --passes forward",
    "/shared/": "shared/",
    'model="hdpl-67m"': 'model="tiny"',
    'data="stdlib"': 'data="books"',
    "--data stdlib": "--data books",
    'preset("gpt2-ccl-64", vocab_size=2048)': 'preset("gpt2-ccl-64", vocab_size=128, n_layer=2)',
    "n_layer=12, n_embd=224, n_head=14, context_layer=8": "n_layer=2, n_embd=28, n_head=2, context_layer=1",
}


def blocks(page: Path) -> list[tuple[str, str, str]]:
    """Reason for not running (or ""), language and text of every block."""
    return [(reason, language, text) for reason, _, language, text in BLOCK.findall(page.read_text(encoding="utf-8"))]


def is_run(language: str, text: str) -> bool:
    """Whether a block is something that a reader would run."""
    return language in ("python", "sh", "bash", "console") or (language == "" and "relinear " in text)


def commands(text: str, language: str) -> list[list[str]]:
    """The commands of a block, without comments, prompts and output."""
    lines = text.replace("\\\n", " ").splitlines()
    if language == "console":
        lines = [line[2:] for line in lines if line.startswith("$ ")]
    return [found for line in lines if (found := shlex.split(line, comments=True))]


@pytest.fixture(scope="session")
def world(tmp_path_factory) -> Path:
    """A folder with the files and models that the pages speak of, each of them tiny."""
    root = tmp_path_factory.mktemp("world")
    text = (REPOSITORY / "CONTRIBUTING.md").read_text(encoding="utf-8")
    (root / "books").mkdir()
    paragraphs = text.split("\n\n")
    for number in range(4):
        (root / "books" / f"{number}.txt").write_text("\n\n".join(paragraphs[number::4]))
    for name in ("notes.md", "README.md", "LICENSE", "wikitext2/test.txt", "my_texts/one.txt"):
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text(text)
    (root / "prompt.txt").write_text("Once upon a time")
    (root / "lambada").mkdir()
    (root / "lambada" / "test.jsonl").write_text(json.dumps({"text": "a word and another word"}) + "\n")
    (root / "reviews.jsonl").write_text("\n".join(json.dumps({"body": one}) for one in paragraphs))
    tokenizer = load_tokenizer("bytes")
    size = {"vocab_size": vocabulary_size(tokenizer), "max_position_embeddings": 2048, "hidden_size": 64}
    relinear.save_pretrained(make_tiny_llama(**size), root / "models" / "smollm2", tokenizer=tokenizer)
    relinear.save_pretrained(make_tiny_llama(**size), root / "runs" / "big", tokenizer=tokenizer)
    for name, gates in (("ccl", True), ("static", False)):
        model = make_tiny_llama(**size)
        relinear.attach_(model, relinear.ContextManager())
        relinear.replace_(model, {"up_proj": relinear.CCL(rank=4, basis_gate=gates, output_gate=gates)})
        relinear.save_pretrained(model, root / "runs" / name / "model", tokenizer=tokenizer)
    config = relinear.CGTConfig(
        vocab_size=size["vocab_size"], n_layer=2, n_embd=16, n_head=2, context_layer=1, context_size=8, context_heads=2
    )
    relinear.save_pretrained(relinear.CGTForCausalLM(config), root / "runs" / "cgt" / "model", tokenizer=tokenizer)
    return root


def run_shell(text: str, language: str) -> None:
    """Run a block of commands in this process."""
    for words in commands(text, language):
        if words[0] == "llama-cli":  # talks, and is no part of relinear
            continue
        assert words[0] == "relinear", f"only relinear's commands run; mark the block: {words}"
        name, *given = words[1:]
        done = main([name, *shlex.split(DEFAULTS.get(name, "")), *given, *CUTS.get(name, [])])
        assert done in (0, None), words


#: pages whose blocks take half a minute to minutes even when they are cut
LONG = [
    f"docs/{name}.md"
    for name in (
        *("cli", "compare", "compress", "data", "distributed", "explore", "speed", "training"),
        *("start/compress", "start/operator"),
    )
]


def named(page: Path) -> str:
    return str(page.relative_to(REPOSITORY))


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(p, id=named(p), marks=[pytest.mark.slow, pytest.mark.timeout(1800)] if named(p) in LONG else [])
        for p in PAGES
    ],
)
def test_blocks_run(page: Path, world: Path, tmp_path, monkeypatch) -> None:
    here = tmp_path / "here"
    shutil.copytree(world, here)
    monkeypatch.chdir(here)
    # a process for every run would take most of the time
    monkeypatch.setattr("relinear.compare.run.runs_at_once", lambda recipe: 0)
    namespace: dict = {"__name__": "__main__"}
    for reason, language, text in blocks(page):
        if reason or not is_run(language, text):
            continue
        for large, small in SMALLER.items():
            text = text.replace(large, small)
        if language == "python":
            exec(compile(text, str(page), "exec"), namespace)
        else:
            run_shell(text, language)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_readme_prints_what_it_says(smollm2, tmp_path, monkeypatch, capsys) -> None:
    """The same numbers before and after on any machine, rounded as they are printed."""
    ((_, _, block),) = [b for b in blocks(REPOSITORY / "README.md") if b[1] == "python"]
    printed = "".join(f"{said}\n" for said in re.findall(r"^print\(.*  # (.*)$", block, flags=re.M))
    assert printed
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "smollm2").symlink_to(smollm2)
    shutil.copy(REPOSITORY / "LICENSE", tmp_path)
    monkeypatch.chdir(tmp_path)
    exec(compile(block, "README.md", "exec"), {})
    assert capsys.readouterr().out == printed


@pytest.mark.parametrize("page", ["docs/compare.md", "docs/recipes.md"])
def test_recipes_that_are_shown_are_recipes(page: str) -> None:
    (text,) = [text for _, language, text in blocks(REPOSITORY / page) if language == "yaml"]
    given = yaml.safe_load(text)
    assert CompareSettings.load({"entries": {"dense": "dense"}} | given, page).reference == given["reference"]


#: arguments with which every example is done at once
EXAMPLES = {
    "ccl_from_pretrained": "models/smollm2 books --rank 4 --steps 1 --validation-tokens 512",
    "fit_pretrained": "models/smollm2 notes.md --ranks 8 --max-tokens 256 --out folded",
    "search_settings": "notes.md --trials 2 --steps 1",
    "specialize_cgt": "books --steps 1 --width 16",
    "train_modulators": "models/smollm2 books --steps 1",
}


@pytest.mark.parametrize("name", sorted(path.stem for path in (REPOSITORY / "examples").glob("*.py")))
def test_examples_run_and_are_short(name: str, world: Path, tmp_path, monkeypatch) -> None:
    script = REPOSITORY / "examples" / f"{name}.py"
    assert len(script.read_text(encoding="utf-8").splitlines()) <= 60
    shutil.copytree(world, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(sys, "argv", [str(script), *EXAMPLES[name].split()])
    runpy.run_path(str(script), run_name="__main__")


@pytest.mark.slow
def test_the_site_is_built_without_a_warning(tmp_path) -> None:
    pytest.importorskip("mkdocs", reason="the extra `docs` is not installed")
    pytest.importorskip("mkdocstrings", reason="the extra `docs` is not installed")
    pytest.importorskip("latex2mathml", reason="the extra `docs` is not installed")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")],
        cwd=REPOSITORY,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stdout + done.stderr
    for name in {*relinear.__all__} - {"__version__"}:
        page = (tmp_path / "site" / "reference" / f"{name}.html").read_text(encoding="utf-8")
        assert "<em>required</em>" not in page, name  # said of fields with defaults, which are in no signature
        text = re.sub("<[^>]+>", "", page)
        said = (inspect.getdoc(getattr(relinear, name)) or "").split("\n")[0].split("``")[0].strip()
        assert said[:40] in html.unescape(text), name
    for name in COMMANDS:
        assert f"relinear {name}" in (tmp_path / "site" / "commands" / f"{name}.html").read_text(encoding="utf-8")
    for path in (tmp_path / "site").rglob("*.html"):
        cells = re.findall("<td[^>]*>(.*?)</td>", path.read_text(encoding="utf-8"), flags=re.S)
        assert max((len(re.sub("<[^>]+>", "", cell).split()) for cell in cells), default=0) <= 25, path
    page = (tmp_path / "site" / "operators" / "hdpl.html").read_text(encoding="utf-8")
    assert "</math>" in page
    assert "$$" not in page


def test_a_block_is_run_or_read_or_no_program() -> None:
    """No language but these: a program in another fence would be run by nobody."""
    known = {"python", "sh", "bash", "console", "yaml", "text", ""}
    assert {language for page in PAGES for _, language, _ in blocks(page)} <= known
    yaml_pages = {named(page) for page in PAGES for _, language, _ in blocks(page) if language == "yaml"}
    assert yaml_pages == {"docs/compare.md", "docs/recipes.md"}


def test_blocks_that_do_not_run_are_counted() -> None:
    found = {str(page.relative_to(REPOSITORY)): Counter(r for r, *_ in blocks(page) if r) for page in PAGES}
    assert {name: reasons for name, reasons in found.items() if reasons} == NOT_RUN
    assert {reason for reasons in found.values() for reason in reasons} <= set(REASONS)


def test_no_mark_and_no_cut_is_left_over() -> None:
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert text.count("<!-- not run") == sum(sum(counts.values()) for counts in NOT_RUN.values())
    for large in SMALLER:
        assert large in text, f"nothing is that large any more: {large}"


def test_what_is_made_of_commands_and_settings_is_up_to_date(monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(REPOSITORY / "docs" / "make"))
    commands = importlib.import_module("commands")
    page = (REPOSITORY / "docs" / "cli.md").read_text(encoding="utf-8")
    assert page == commands.markdown(), "run `make docs-cli`"
    for name in COMMANDS:
        assert f"\n## relinear {name}\n" in page


@pytest.mark.parametrize("name", COMMANDS)
def test_the_page_of_commands_has_the_options_that_there_are(name: str) -> None:
    parameters = get_command(app).commands[name].params
    known = {flag for one in parameters for flag in (*one.opts, *one.secondary_opts) if flag.startswith("-")}
    page = (REPOSITORY / "docs" / "cli.md").read_text(encoding="utf-8")
    section = page.partition(f"\n## relinear {name}\n")[2].partition("\n## ")[0]
    shown = re.findall(r"^\| `(-.+?)` \|", section, flags=re.M)
    assert {word.strip(",") for row in shown for word in row.split() if word.startswith("-")} == known
