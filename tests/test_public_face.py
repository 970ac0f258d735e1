"""What ``import relinear`` and ``relinear --help`` give, to people and to type checkers, and how little they import."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import relinear
from conftest import mostly_slow
from relinear.cli.main import COMMANDS

ROOT = Path(relinear.__file__).parent
CHECKPOINT = Path(__file__).parent / "fixtures" / "v0.1" / "checkpoints" / "low_rank"
HEAVY = ["torch", "transformers", "numpy", "yaml", "matplotlib", "relinear.core", "relinear.registration"]
#: optional or slow: for those alone who use what needs them
OPTIONAL = ["matplotlib", "triton", "datasets", "sklearn", "optuna", "peft"]


def run(code: str, *arguments: str) -> str:
    """What a fresh process prints."""
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def seen_by_type_checkers() -> dict[str, str]:
    """name -> module, of the imports under TYPE_CHECKING; each in the form that exports it."""
    tree = ast.parse((ROOT / "__init__.py").read_text(encoding="utf-8"))
    (block,) = [n for n in tree.body if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING"]
    found = {}
    for node in block.body:
        assert isinstance(node, ast.ImportFrom)
        for alias in node.names:
            assert alias.asname == alias.name, f"write it as `import {alias.name} as {alias.name}`"
            found[alias.name] = f"relinear.{alias.name}" if node.module == "relinear" else node.module
    return found


def test_type_checkers_see_the_names_that_are_there() -> None:
    assert seen_by_type_checkers() == relinear._LAZY
    assert set(relinear.__all__) == {"__version__", *relinear._LAZY}
    for name in relinear.__all__:
        assert getattr(relinear, name) is not None
    assert set(dir(relinear)) >= set(relinear.__all__)


def test_every_operator_and_residual_method_is_public() -> None:
    for room in (relinear.operators, relinear.residual):
        assert set(room.__all__) <= set(relinear.__all__)
        for name in room.__all__:
            assert getattr(relinear, name) is getattr(room, name)


def test_what_a_stranger_needs_is_public() -> None:
    for name in ("Operator", "OperatorConfig", "AttachmentConfig", "register", "NotLinearError", "fit", "prepare_data"):
        assert name in relinear.__all__


def test_unknown_names_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        relinear.nothing  # noqa: B018
    assert not hasattr(relinear, "_nothing")


def test_import_takes_nothing_with_it() -> None:
    code = f"import sys, relinear; print([m for m in {HEAVY} if m in sys.modules], len(sys.modules) < 200)"
    assert run(code) == "[] True\n"


def test_first_use_takes_nothing_optional_with_it() -> None:
    # what transformers' own classes bring along is not ours: with torch 2.6 Triton is among it
    before = "import sys; from transformers import AutoModelForCausalLM, GPT2Config; before = set(sys.modules)"
    code = f"{before}; import relinear.registration; print([m for m in {OPTIONAL} if m in {{*sys.modules}} - before])"
    assert run(code) == "[]\n"


def test_help_version_and_completion_take_nothing_with_them() -> None:
    code = """
import contextlib, io, os, sys
from relinear.cli.main import main
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


@pytest.mark.parametrize(
    "first",
    mostly_slow(
        [
            "import relinear, transformers",
            "import transformers, relinear",
            "import torch, relinear; relinear.HDPL",
            "import relinear.surgery.checkpoint",
            "import relinear.models.cgt",
            "import relinear.operators.context_manager",
            "import relinear.cli.main; import relinear.train.settings",
            "import relinear.data; relinear.data.DataSettings",
            "from relinear.train import fit",
            "from relinear.distill import distill_; import relinear; assert relinear.distill_ is distill_",
        ],
        "import transformers, relinear",
        "from relinear.train import fit",
    ),
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


@pytest.mark.parametrize(
    "first",
    mostly_slow(
        ["import relinear, transformers", "import transformers.modeling_utils, relinear"],
        "import relinear, transformers",
    ),
)
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


def test_kinds_are_known_to_whoever_asks_first() -> None:
    code = "from relinear.core.config import Config\nfrom relinear.core.operator import OperatorConfig\n"
    assert "hdpl" in run(code + "print(*OperatorConfig.kinds())").split()


def test_rooms_are_attributes() -> None:
    assert run("import relinear; print(relinear.operators.hdpl.HDPL is relinear.HDPL)") == "True\n"


def test_work_that_fails_fails_the_import_and_is_tried_again(tmp_path) -> None:
    package = tmp_path / "package_of_rooms"
    for folder in (package, package / "room", package / "light"):
        folder.mkdir()
        (folder / "__init__.py").write_text("")
    (tmp_path / "stands_beside.py").write_text("")
    code = """
import sys
from relinear.first_use import on_first_use
tries = []
def work():
    tries.append(len(tries))
    import package_of_rooms.room  # what it imports does not ask for it again
    if len(tries) == 1:
        raise ValueError("not yet")
sys.path.insert(0, sys.argv[1])
on_first_use("package_of_rooms", ("light",), "stands_beside", work)
import package_of_rooms.light
assert tries == []
try:
    import package_of_rooms.no_room
except ModuleNotFoundError:
    pass
assert tries == []
try:
    import package_of_rooms.room
except ValueError:
    pass
else:
    raise AssertionError
assert tries == [0]
import package_of_rooms.room
assert tries == [0, 1]
import package_of_rooms.light, package_of_rooms.room
assert tries == [0, 1]
"""
    run(code, str(tmp_path))


REGISTERED = "\nfrom transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING as known\nprint('relinear' in known)"


@pytest.mark.parametrize(
    "name",
    mostly_slow(["transformers", "relinear.surgery", "relinear.operators.rotor", "relinear.no_room"], "transformers"),
)
def test_looking_for_a_module_without_importing_it_changes_nothing(name: str) -> None:
    """As ``is_transformers_available`` of accelerate, datasets and many others does."""
    code = f"import relinear, importlib.util\nimportlib.util.find_spec({name!r})\nimport transformers"
    assert run(code + REGISTERED) == "True\n"


@pytest.mark.slow
def test_reloading_the_package_before_its_first_use() -> None:
    code = "import relinear, importlib\nimportlib.reload(relinear)\nimportlib.reload(relinear)\nrelinear.LowRank"
    assert run(code + REGISTERED + "\nimportlib.reload(relinear).LowRank") == "True\n"


@pytest.mark.slow
def test_modules_keep_their_own_loaders() -> None:
    code = "import relinear.surgery, sys, transformers, transformers.modeling_utils as models\n"
    code += "for m in (relinear.surgery, transformers, models):\n"
    code += "    print(type(m.__spec__.loader).__name__)\n"
    code += "print(all(f.is_done for f in sys.meta_path if getattr(f, 'beside', None) in sys.modules))"
    assert run(code).split() == ["SourceFileLoader"] * 3 + ["True"]


@pytest.mark.slow
def test_first_use_in_several_threads() -> None:
    code = """
import threading, relinear
failed = []
def use(name):
    try:
        getattr(relinear, name)
    except BaseException as error:
        failed.append(error)
threads = [threading.Thread(target=use, args=(name,)) for name in relinear.__all__]
[t.start() for t in threads]
[t.join() for t in threads]
print(failed)
"""
    assert run(code + REGISTERED) == "[]\nTrue\n"


#: what others do to the ways of importing
OTHERS = {
    "a finder of the old protocol": """
class Old:
    def find_module(self, name, path=None):
        return None
sys.meta_path.insert(0, Old())
""",
    "a finder that looks through all the others": """
class Through:
    depth = 0
    def find_spec(self, name, path=None, target=None):
        if name != "transformers":
            return None
        Through.depth += 1
        assert Through.depth < 20, "for ever"
        for finder in sys.meta_path:
            spec = None if finder is self or not hasattr(finder, "find_spec") else finder.find_spec(name, path, target)
            if spec is not None:
                return spec
sys.meta_path.insert(0, Through())
""",
    "the package imported twice": """
for name in [name for name in sys.modules if name.partition(".")[0] == "relinear"]:
    del sys.modules[name]
import relinear
""",
    "finders taken away": "sys.meta_path[:] = [f for f in sys.meta_path if isinstance(f, type)]",
    "specs copied": "import copy, importlib.util\ncopy.deepcopy(importlib.util.find_spec('relinear.surgery').loader)",
}


@pytest.mark.parametrize("done", OTHERS.values(), ids=OTHERS)
@pytest.mark.parametrize("place", mostly_slow(["before", "after"], "after"))
def test_first_use_beside_other_finders(done: str, place: str) -> None:
    steps = ["import relinear", done] if place == "after" else [done, "import relinear"]
    code = "import sys\n" + "\n".join(steps) + "\nrelinear.LowRank\nimport transformers.modeling_utils as models\n"
    code += "print(hasattr(models.PreTrainedModel.save_pretrained, '_relinear_original'))"
    assert run(code + REGISTERED).split() == ["True", "True"]


def test_imports_in_other_threads_find_their_modules_while_the_first_use_ends(tmp_path) -> None:
    for number in range(400):
        (tmp_path / f"one_of_many_{number}.py").write_text("")
    code = """
import importlib, sys, threading, types
from relinear.first_use import on_first_use
sys.path.insert(0, sys.argv[1])
sys.setswitchinterval(1e-6)
failed = []
def others(share):
    for number in range(share, 400, 4):
        try:
            importlib.import_module(f"one_of_many_{number}")
        except ImportError as error:
            failed.append(error)
threads = [threading.Thread(target=others, args=(share,)) for share in range(4)]
[t.start() for t in threads]
for number in range(200):
    name = f"beside_{number}"
    open(f"{sys.argv[1]}/{name}.py", "w").close()
    importlib.invalidate_caches()
    on_first_use(f"package_{number}", (), name, lambda: None)
    importlib.import_module(name)
[t.join() for t in threads]
print(len(failed))
"""
    assert run(code, str(tmp_path)) == "0\n"
