"""An operator in a package of its own, from ``relinear new`` on: it is installed by pip and found by its name alone."""

import importlib.util
import inspect
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from conftest import REPOSITORY
from relinear.contract import config as registry
from relinear_cli.main import main

NAME = "two_thin"
EXAMPLES = REPOSITORY / "examples" / "operators"
#: of those, operators that are no linear maps
WITHOUT_FIT = {"cola"}


def run(*words: object, path: Path, cwd: Path, seconds: float = 300) -> str:
    """What a program prints that sees relinear's source, and what is installed in ``path``."""
    done = subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": f"{REPOSITORY / 'src'}{os.pathsep}{path}", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=seconds,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def install(package: Path, target: Path) -> None:
    """Install the package in a folder with pip, from what is on this machine."""
    for needed in ("pip", "setuptools"):
        if importlib.util.find_spec(needed) is None:
            pytest.skip(f"{needed} is not installed")
    offline = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--disable-pip-version-check"]
    run("-m", "pip", "install", *offline, "--target", target, package, path=target, cwd=package)


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    """The package, as ``relinear new operator`` writes it."""
    folder = tmp_path_factory.mktemp("written") / NAME
    assert main(["new", "operator", NAME, "--out", str(folder)]) in (None, 0)
    return folder


@pytest.fixture(scope="module")
def installed(written, tmp_path_factory) -> Path:
    """A folder in which the package is installed, as in an environment."""
    target = tmp_path_factory.mktemp("environment")
    install(written, target)
    return target


@pytest.fixture
def imported(written, monkeypatch):
    """The package's tests as a dictionary of names, and after the test no trace of the package."""
    monkeypatch.syspath_prepend(str(written))
    monkeypatch.setitem(registry._REGISTRY, "operator", dict(registry._REGISTRY["operator"]))
    yield runpy.run_path(str(written / "tests" / f"test_{NAME}.py"))
    for module in [name for name in sys.modules if name.partition(".")[0] == f"relinear_{NAME}"]:
        del sys.modules[module]


def test_a_new_package_is_whole_and_its_operator_conforms(written, imported, tmp_path) -> None:
    files = {str(path.relative_to(written)) for path in written.rglob("*") if path.is_file()}
    source = {"relinear_two_thin/__init__.py", "relinear_two_thin/operator.py", "tests/test_two_thin.py"}
    assert source | {"pyproject.toml", "README.md", "compare.yaml"} <= files
    suite, places = imported["TestTwoThin"], {"case": imported["TestTwoThin"].cases[0], "tmp_path": tmp_path}
    ran = 0
    for name in (name for name in dir(suite) if name.startswith("test_") and "compiles" not in name):
        wanted = set(inspect.signature(getattr(suite, name)).parameters) - {"self"}
        if wanted <= set(places):
            getattr(suite(), name)(**{key: places[key] for key in wanted})
            ran += 1
    assert ran >= 15
    own = [value for name, value in imported.items() if name.startswith("test_")]
    assert len(own) == 2
    for test in own:
        test()
    check_style(written)


@pytest.mark.slow
def test_a_new_package_passes_its_tests_and_ours(written, installed, tmp_path) -> None:
    tests = tmp_path / "test_two_thin.py"  # away from the source: what is tested is what was installed
    tests.write_text((written / "tests" / tests.name).read_text())
    told = run(
        "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "not compiles", tests, path=installed, cwd=tmp_path
    )
    assert int(re.search(r"(\d+) passed", told)[1]) > 20


def check_style(package: Path) -> None:
    """Hold a package to the rules that its author may have."""
    ruff, rules = [sys.executable, "-m", "ruff"], ["--isolated", "--line-length", "120"]
    for check in (["check", "--select", "E,F,I,B"], ["format", "--check"]):
        assert subprocess.run([*ruff, *check, *rules, "."], cwd=package, check=False).returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["linear", "nonlinear", "routed"])
def test_packages_of_every_kind_pass_their_tests(kind, tmp_path) -> None:
    package = tmp_path / f"some_{kind}"
    assert main(["new", "operator", package.name, "--kind", kind, "--out", str(package)]) in (None, 0)
    told = run("-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "not inductor", path=package, cwd=package)
    assert int(re.search(r"(\d+) passed", told)[1]) > 20
    check_style(package)


def relinear(words: str, path: Path, cwd: Path) -> str:
    """What a command prints, in a process of its own, which nobody told of the package."""
    return run("-c", "from relinear_cli.main import run; run()", *shlex.split(words), path=path, cwd=cwd)


LOAD = """
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained("runs/own/model", trust_remote_code=True)
print(type(model.model.layers[0].self_attn.q_proj).__module__)
"""


@pytest.mark.slow  # a process for every command, and one for every run of the comparison
@pytest.mark.timeout(900)
def test_every_command_knows_an_installed_operator(written, installed, tmp_path) -> None:
    """From looking at it to what is trained, compared, timed, compressed, saved and loaded again."""
    (tmp_path / "books").mkdir()
    text = (REPOSITORY / "CONTRIBUTING.md").read_text(encoding="utf-8")
    for part in range(3):
        (tmp_path / "books" / f"{part}.txt").write_text("\n\n".join(text.split("\n\n")[part::3]))

    def command(words: str) -> str:
        return relinear(words, installed, tmp_path)

    assert "[relinear-two-thin 0.1.0]" in command("list operators two_thin")
    assert "TwoThin(rank=4)" in command("inspect tiny --replace q_proj=two_thin:rank=4")
    train = "train --model tiny --steps 2 --batch-size 2 --data books"
    command(f"{train} --replace all-linear=two_thin:rank=4 --out runs/own")
    command(f"{train} --out runs/dense")
    little = (
        "--steps 2 --seeds 0 --data books --set speed.seconds=0.01 --set speed.rounds=3 --set train.warmup_steps=0 "
        "--set train.batch_size=2 --set 'train.model_overrides={num_hidden_layers: 1}'"
    )
    command(f"compare --recipe {written}/compare.yaml {little} --out runs/compare")
    entries = json.loads((tmp_path / "runs" / "compare" / "results.json").read_text())["entries"]
    assert [entry["name"] for entry in entries] == ["dense", "two_thin", "low_rank"]
    assert "Comparison: two_thin" in (tmp_path / "runs" / "compare" / "report.html").read_text(encoding="utf-8")
    one = "--shapes 32x32 --tokens 1 --dtypes fp32 --modes eager --passes forward --rounds 3"
    assert "two_thin:rank=4" in command(f"bench --operator two_thin:rank=4 {one} --out runs/bench")
    small = "--keep 0.8 --tokens 512"
    command(f"compress runs/dense/model --data books --candidates two_thin {small} --out runs/small")
    command("report runs/own runs/compare runs/bench runs/small --out all.html")
    assert "two_thin" in (tmp_path / "all.html").read_text(encoding="utf-8")
    assert "TwoThin" in command("inspect runs/small/model")
    for saved in ("runs/own", "runs/small/model"):
        assert "loss" in command(f"eval {saved} --data books --split all")
    assert run("-c", LOAD, path=installed, cwd=tmp_path).strip() == "relinear_two_thin.operator"


@pytest.fixture(scope="module")
def examples(tmp_path_factory) -> Path:
    """A folder in which the package of examples is installed."""
    here = tmp_path_factory.mktemp("examples")
    package = here / "operators"  # pip builds in it
    shutil.copytree(EXAMPLES, package, ignore=shutil.ignore_patterns("build", "*.egg-info", "__pycache__"))
    install(package, here / "environment")
    return here / "environment"


FITS = """
import torch
from relinear import OperatorConfig
from relinear.contract.calibration_statistics import CalibrationStatistics
from relinear.contract.linear_layers import linear_of
from relinear.contract import plugins

torch.manual_seed(0)
weight = torch.randn(48, 32, dtype=torch.float64)
inputs, outputs = torch.randn(99, 32).double() * torch.arange(1, 33), torch.randn(99, 48).double()
moments = CalibrationStatistics(inputs.T @ inputs / 99, outputs.T @ outputs / 99)
linear = linear_of(weight)
for kind in sorted(plugins.entry_points("operator")):
    config = OperatorConfig.read(kind)
    if config.fits_weight:
        first = config.candidates(32, 48)[0]
        plain = first.build(32, 48, bias=False, dtype=torch.float64).fit_to_linear_(linear).to_dense().detach()
        error = first.fit_error(linear, moments, steps=20)
        print(kind, error < 0.98 * float(moments.error(weight - plain)))
many = OperatorConfig.read("kronecker")
print("kronecker", [found for found, _ in many.candidate_errors(linear, moments)] == many.candidates(32, 48))
"""


@pytest.mark.slow
def test_the_examples_are_installed_listed_and_fitted_under_moments(examples, tmp_path) -> None:
    kinds = set(
        tomllib.loads((EXAMPLES / "pyproject.toml").read_text())["project"]["entry-points"]["relinear.operators"]
    )
    assert kinds == {path.stem for path in (EXAMPLES / "relinear_examples").glob("*.py")} - {"__init__", "structured"}
    listed = relinear("list operators", examples, tmp_path)
    assert {line.split()[0] for line in listed.splitlines() if "[relinear-operators-examples 0.1.0]" in line} == kinds
    lines = [line.split() for line in run("-c", FITS, path=examples, cwd=tmp_path).splitlines()]
    assert {kind for kind, *_ in lines} | WITHOUT_FIT == kinds
    assert [kind for kind, *gains in lines if gains != ["True"]] == []


@pytest.mark.slow
@pytest.mark.parametrize("chosen", ["not compiles", "compiles"])
def test_the_examples_pass_their_tests(chosen, examples, tmp_path) -> None:
    shutil.copy(EXAMPLES / "tests" / "test_examples.py", tmp_path)
    words = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", chosen, "test_examples.py")
    assert " passed" in run(*words, path=examples, cwd=tmp_path)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["operatr", "mine"], "'operatr' is not one of 'operator'"),
        (["operator", "Mine"], "'Mine' is not a name of an operator"),
        (["operator", "../mine"], "is not a name of an operator"),
        (["operator", "lambda"], "'lambda' is not a name of an operator"),
        (["operator", "none"], "'none' is not a name of an operator"),
        (["operator", "tensor"], "'tensor' is not a name of an operator"),
        (["operator", "cli"], "the package relinear_cli is installed already"),
        (["operator", "low_rank"], "there is an operator 'low_rank' already"),
        (["operator", "mine", "--out", "there"], "there exists already"),
        (["operator", "mine", "--out", "nowhere/mine"], "there is no directory"),
    ],
)
def test_what_cannot_be_written_is_refused(words, told, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    assert main(["new", *words]) == 2
    assert told in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["there"]
