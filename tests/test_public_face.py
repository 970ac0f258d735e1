"""What ``import relinear`` and ``relinear --help`` give, to people and to type checkers, and how little they import."""

import ast
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

import relinear
from relinear.deprecated import MOVED, MOVED_MODULES
from relinear_cli.main import COMMANDS

ROOT = Path(relinear.__file__).parent
CHECKPOINT = Path(__file__).parent / "fixtures" / "v0.1" / "checkpoints" / "low_rank"
HEAVY = ["relinear", "torch", "transformers", "numpy", "yaml", "matplotlib"]


def run(code: str, *arguments: str) -> str:
    """What a fresh process prints."""
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_type_checkers_see_the_names_that_are_there() -> None:
    tree = ast.parse((ROOT / "__init__.py").read_text(encoding="utf-8"))
    names = {
        alias.asname
        for n in tree.body
        if isinstance(n, ast.ImportFrom)
        for alias in n.names
        if alias.name == alias.asname
    }
    assert set(relinear.__all__) == names
    assert len(relinear.__all__) == len(names)
    assert set(dir(relinear)) >= names


FIRST = (
    *("replace_", "plan", "attach_", "fold_", "summary", "save_pretrained", "from_pretrained", "from_preset"),
    *("compress", "distill_", "train", "fit", "perplexity", "check_causality", "for_inference_", "specialize"),
    *("register", "Operator", "OperatorConfig"),
)


def test_what_most_programs_need_is_at_the_top() -> None:
    assert set(FIRST) | set(relinear.operators.__all__) <= set(relinear.__all__)
    for name in relinear.operators.__all__:
        assert getattr(relinear, name) is getattr(relinear.operators, name)
    rest = set(relinear.__all__) - set(FIRST) - set(relinear.operators.__all__)
    rooms = {name for name in rest if isinstance(getattr(relinear, name), ModuleType)}
    assert rooms == {"activations", "analysis", "clifford", "contract", "data", "evaluate", "residual"}
    assert rest - rooms == {"CGTConfig", "CGTForCausalLM", "CGTForRegression", "SavedConfig", "__version__"}


def test_authors_of_operators_find_what_they_need_in_one_room() -> None:
    names = "CalibrationStatistics Count NotLinearError Operator OperatorConfig ParamRole Wrapper WrapperConfig"
    assert {*names.split(), "check_divides", "register"} <= set(relinear.contract.__all__)


@pytest.mark.parametrize("name", sorted(MOVED))
def test_a_name_that_has_moved_is_found_with_a_warning(name: str) -> None:
    module, new = MOVED[name]
    with pytest.warns(
        DeprecationWarning, match=rf"relinear\.{name} has moved: from {re.escape(module)} import {new}$"
    ) as said:
        assert getattr(relinear, name) is getattr(import_module(module), new)
    assert said[0].filename == __file__
    assert name not in relinear.__all__


@pytest.mark.parametrize("name", sorted(MOVED_MODULES))
def test_a_module_that_has_moved_is_found_with_a_warning(name: str, monkeypatch) -> None:
    monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.warns(DeprecationWarning, match=rf"{re.escape(name)} has moved to {re.escape(MOVED_MODULES[name])}"):
        old = import_module(name)
    new = import_module(MOVED_MODULES[name])
    for public in (name for name in vars(new) if name[0] != "_"):
        assert getattr(old, public) is getattr(new, public)
    assert relinear.compress is import_module("relinear.compression").compress  # not hidden by a package


def test_an_operator_of_0_2_finds_what_it_imports() -> None:
    from relinear.core.moments import Moments, descend_

    assert Moments is relinear.contract.calibration_statistics.CalibrationStatistics
    assert descend_ is relinear.contract.calibration_statistics.fit_by_lbfgs_
    from relinear.core.latents import LatentOperator, Replace, observe

    assert Replace is relinear.activations.Patch
    assert (LatentOperator.__module__, observe.__name__) == ("relinear.activations.hooks", "observe")
    from relinear.core.objective import GuidedTraining

    assert GuidedTraining is relinear.hf.training_loss.ModelWithObjective
    from relinear.core.config import parse_setting

    assert parse_setting("hdpl:rank=8") == {"kind": "hdpl", "rank": 8}
    with pytest.raises(ImportError, match=r"relinear\.core\.nothing"):
        import_module("relinear.core.nothing")


def test_unknown_names_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        relinear.nothing  # noqa: B018
    assert not hasattr(relinear, "_nothing")


def test_help_version_and_completion_take_nothing_with_them() -> None:
    code = """
import contextlib, io, os, sys
from relinear_cli.main import main
for arguments in [["--help"], ["--version"], *([name, "--help"] for name in sys.argv[2:])]:
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        assert main(arguments) == 0
    assert shown.getvalue()
os.environ |= {"_RELINEAR_COMPLETE": "complete_bash", "COMP_WORDS": "relinear co", "COMP_CWORD": "1"}
with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()) as shown:
    main([])
assert "compare" in shown.getvalue().split(), shown.getvalue()
print([m for m in sys.argv[1].split(",") if m in sys.modules], len(sys.modules) < 600)
"""
    assert run(code, ",".join(HEAVY), *COMMANDS) == "[] True\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    "first",
    [
        "import relinear, transformers",
        "import torch, relinear; relinear.HDPL",
        "import relinear.surgery.checkpoint",
        "import relinear.models.cgt",
        "import relinear.operators.context_manager",
        "import relinear_cli.main; import relinear.training.settings",
        "import relinear.data; relinear.data.DataSettings",
        "from relinear.training import fit",
        "from relinear.distill import distill_; import relinear; assert relinear.distill_ is distill_",
    ],
)
def test_checkpoints_load_whatever_was_imported_first(first: str) -> None:
    code = f"""
{first}
import sys
from transformers import AutoConfig, AutoModelForCausalLM
print(type(AutoModelForCausalLM.from_pretrained(sys.argv[1]).model.layers[0].self_attn.q_proj).__name__)
print(AutoConfig.for_model("relinear_cgt").model_type)
"""
    assert run(code, str(CHECKPOINT)).split() == ["LowRankLinear", "relinear_cgt"]


@pytest.mark.slow
@pytest.mark.parametrize("first", ["import relinear, transformers", "import transformers.modeling_utils, relinear"])
def test_a_config_of_the_callers_own_is_seen_through_by_the_first_load(first: str) -> None:
    code = f"""
{first}
import json, pathlib, sys
from transformers import AutoModelForCausalLM, LlamaConfig
values = json.loads((pathlib.Path(sys.argv[1]) / "config.json").read_text())
beyond = ("quantization_config", "model_type", "base_model_type", "auto_map", "transformers_weights")
config = LlamaConfig(**{{key: value for key, value in values.items() if key not in beyond}})
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], config=config)
print(type(model.model.layers[0].self_attn.q_proj).__name__)
"""
    assert run(code, str(CHECKPOINT)) == "LowRankLinear\n"


@pytest.mark.slow
def test_kinds_are_known_to_whoever_asks_first() -> None:
    code = "from relinear.contract.config import Config\nfrom relinear.contract.operator import OperatorConfig\n"
    assert "hdpl" in run(code + "print(*OperatorConfig.kinds())").split()


@pytest.mark.slow
def test_rooms_are_attributes() -> None:
    assert run("import relinear; print(relinear.operators.hdpl.HDPL is relinear.HDPL)") == "True\n"


REGISTERED = "\nfrom transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING as known\nprint('relinear' in known)"


@pytest.mark.slow
def test_reloading_the_package() -> None:
    code = "import relinear, importlib\nimportlib.reload(relinear)\nimportlib.reload(relinear)\nrelinear.LowRank"
    assert run(code + REGISTERED + "\nimportlib.reload(relinear).LowRank") == "True\n"


def test_the_version_is_one_and_the_changelog_speaks_of_it() -> None:
    repository = Path(__file__).parents[1]
    text = (repository / "CHANGELOG.md").read_text(encoding="utf-8")
    released = re.findall(r"(?m)^## (\S+) \(", text)[0]
    if "\n## Unreleased\n" in text:
        assert relinear.__version__.endswith(".dev0")
        assert relinear.__version__ > released
    else:
        assert relinear.__version__ == released
    assert f"\nversion: {released}\n" in (repository / "CITATION.cff").read_text(encoding="utf-8")
    assert max(map(len, text.splitlines())) <= 120
    section = text.split(f"\n## {released} ")[1].split("\n## ")[0]
    assert len(re.sub(r"(?m)^(-|#+) ", "", section).split()) <= 900
    assert set(re.findall(r"(?m)^### (.*)", text)) <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
