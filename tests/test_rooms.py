"""The layout of the package: which room may import which, one file an operator, no file left out."""

import ast
import functools
import graphlib
import importlib
import re
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

import relinear
from relinear.analysis.analyses import ANALYSES
from relinear.contract.operator import OperatorConfig

SOURCE = Path(relinear.__file__).parent

#: room -> the rooms it may import beside itself, in the order in which they stand on each other
_MODEL = {"settings", "contract", "hf", "activations"}
MAY_IMPORT = {
    "system": set(),
    "pages": {"system"},
    "clifford": set(),
    "functional": {"clifford"},
    "settings": {"system"},
    "contract": {"settings", "system"},
    "hf": {"settings", "contract"},
    "activations": {"settings", "contract", "hf"},
    "kernels": {"functional", "system"},
    "operators": _MODEL | {"functional", "clifford", "kernels", "system"},
    "residual": _MODEL,
    "surgery": _MODEL | {"functional", "system"},
    "models": _MODEL | {"functional", "kernels", "system"},
    "data": {"settings", "contract", "hf", "system"},
    "testing": _MODEL | {"operators", "surgery", "system"},
    "evaluate": {"settings", "contract", "hf", "data"},
    "distill": _MODEL | {"surgery", "data", "evaluate", "pages", "system"},
    "training": _MODEL | {"surgery", "models", "data", "evaluate", "pages", "system"},
    "compression": _MODEL | {"surgery", "distill", "data", "evaluate", "training", "pages", "system"},
    "analysis": _MODEL | {"clifford", "surgery", "data", "models", "evaluate", "training", "pages", "system"},
    "explore": _MODEL | {"surgery", "data", "models", "analysis", "pages", "system"},
    "bench": _MODEL | {"kernels", "operators", "surgery", "models", "training", "pages", "system"},
    "compare": _MODEL | {"surgery", "models", "data", "training", "distill", "analysis", "evaluate", "pages", "system"},
}


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def rooms_imported(path: Path) -> set[str]:
    """Rooms of relinear that a file imports, anywhere in it; "" for what the package has; the command is none."""
    found: set[str] = set()
    for node in ast.walk(tree_of(path)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide the room"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for package, room in ((*name.split("."), "")[:2] for name in names):
            if package == "relinear" and room != "deprecated":  # old names, which every room may know
                found.add(room if (SOURCE / room).is_dir() else "")
            elif package == "relinear_cli":
                found.add(package)
    return found


def test_every_folder_is_a_known_room() -> None:
    assert {path.parent.name for path in SOURCE.glob("*/__init__.py")} == set(MAY_IMPORT)


@pytest.mark.parametrize("room", sorted(MAY_IMPORT))
def test_room_imports_only_what_it_may(room: str) -> None:
    for path in sorted((SOURCE / room).rglob("*.py")):
        extra = rooms_imported(path) - MAY_IMPORT[room] - {room}
        assert not extra, f"{path.relative_to(SOURCE)} imports {sorted(extra)}"


def test_a_wrong_import_is_seen(tmp_path) -> None:
    file = tmp_path / "wrong.py"
    file.write_text(
        "def f():\n    from relinear_cli import main\n    import relinear.data.x\n"
        "    from relinear import HDPL, training\n"
    )
    assert rooms_imported(file) == {"relinear_cli", "data", "training", ""}


def test_rooms_stand_on_each_other_in_the_order_of_the_table() -> None:
    seen: set[str] = {""}
    for room, below in MAY_IMPORT.items():
        assert below <= seen, f"{room} stands below {sorted(below - seen)}"
        seen.add(room)


def module_name(path: Path) -> str:
    name = ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts)
    return name.removesuffix(".__init__")


def imported_by(path: Path, modules: set[str], functions: bool = False) -> set[str]:
    """Modules of relinear that a file imports: not for type checkers alone, in functions where that is asked for."""
    found: set[str] = set()
    waiting: list[ast.AST] = [tree_of(path)]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) and not functions:
            continue
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= (inner & modules) or {str(node.module)}
        waiting.extend(ast.iter_child_nodes(node))
    return found & modules


def test_no_import_goes_in_a_circle() -> None:
    paths = {module_name(path): path for path in SOURCE.rglob("*.py")}
    graph = {name: imported_by(path, set(paths)) for name, path in paths.items()}
    list(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError, which names the circle


def test_no_function_hides_a_module_of_its_name() -> None:
    """``import relinear.compression.layerwise as layerwise`` gives the module, whatever was imported before."""
    for path in sorted(SOURCE.rglob("*.py")):
        name = module_name(path)
        parent, _, stem = name.rpartition(".")
        if parent and not name.startswith("relinear.kernels.triton"):
            there = getattr(importlib.import_module(parent), stem, None)
            assert there is None or isinstance(there, ModuleType), f"{name} is hidden by {there}"


def test_kernels_import_in_no_circle_inside_functions_either() -> None:
    paths = {module_name(path): path for path in (SOURCE / "kernels").rglob("*.py")}
    graph = {name: imported_by(path, set(paths), functions=True) for name, path in paths.items()}
    assert "relinear.kernels.triton.hdpl" in graph["relinear.kernels.hdpl"]
    list(graphlib.TopologicalSorter(graph).static_order())


def test_kernels_show_twins_and_the_choice_between_their_forms() -> None:
    """A file has the kernels of that of its name in ``functional``; what else there is serves them all."""
    stems = {path.stem for path in (SOURCE / "kernels").glob("*.py")} - {
        "__init__",
        "implementations",
        "kernel_selfcheck",
        "autograd",
        "dense",
        "products",
    }
    assert stems <= {path.stem for path in (SOURCE / "functional").glob("*.py")}
    folders = {path.parent.name for path in (SOURCE / "kernels").glob("*/__init__.py")}
    assert folders == {"native", "triton"}


def test_contributing_shows_every_room() -> None:
    section = (
        (SOURCE.parents[1] / "CONTRIBUTING.md").read_text(encoding="utf-8").split("## The rooms")[1].split("\n## ")[0]
    )
    first = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    assert sorted(name for cell in first for name in re.findall(r"`(\w+)/`", cell)) == sorted(
        [*MAY_IMPORT, "relinear_cli"]
    )


def test_an_operator_has_the_name_of_its_files() -> None:
    own = {kind: c for kind, c in OperatorConfig.kinds().items() if c.__module__.startswith("relinear.")}
    assert own
    for kind, config in own.items():
        assert config.__module__ == f"relinear.operators.{kind}"
        assert (SOURCE / "functional" / f"{kind}.py").is_file()


def test_an_analysis_is_the_file_of_its_name() -> None:
    assert [name for name in ANALYSES if not (SOURCE / "analysis" / f"{name}.py").is_file()] == []
    for path in (SOURCE / "analysis").glob("*.py"):
        functions = {n.name for n in tree_of(path).body if isinstance(n, ast.FunctionDef)}
        assert (functions >= {"applies", "run"}) == (path.stem in ANALYSES), path


def test_every_file_is_in_the_wheel() -> None:
    settings = tomllib.loads((SOURCE.parents[1] / "pyproject.toml").read_text())
    patterns = settings["tool"]["setuptools"]["package-data"]["relinear"]
    for pattern in patterns:
        assert list(SOURCE.glob(pattern)), f"package-data names {pattern}, which matches nothing"
    named = {path for pattern in patterns for path in SOURCE.glob(pattern)}
    files = {path for path in SOURCE.rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    assert {path for path in files if path.suffix != ".py"} == named
    assert {path.parent for path in files if path.suffix == ".py"} <= {p.parent for p in SOURCE.rglob("__init__.py")}


def test_a_name_is_public_by_having_no_underscore() -> None:
    """Said once: other files import none that has one, and lists of names are of what gathers those of other files."""
    paths = {module_name(path): tree_of(path) for path in SOURCE.rglob("*.py")}
    past = [
        f"{name} imports {alias.name} of {node.module}"
        for name, tree in paths.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("relinear")
        for alias in node.names
        if alias.name.startswith("_") and alias.name != "__version__"
    ]
    assert past == []
    assigned = [(n, node) for n, tree in paths.items() for node in tree.body if isinstance(node, ast.Assign)]
    lists = [name for name, node in assigned if "__all__" in map(ast.unparse, node.targets)]
    assert set(lists) <= {module_name(path) for path in SOURCE.rglob("__init__.py")}
