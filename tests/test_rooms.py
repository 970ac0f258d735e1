"""The layout of the package: which room may import which, one file an operator, and a light ``import relinear``."""

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import relinear
from relinear.core.operator import OperatorConfig

SOURCE = Path(relinear.__file__).parent

#: room -> the rooms it may import beside itself, in the order in which they stand on each other
MAY_IMPORT = {
    "system": set(),
    "clifford": set(),
    "core": {"system"},
    "functional": {"clifford"},
    "kernels": {"functional", "system"},
    "operators": {"core", "functional", "clifford", "kernels", "system"},
    "residual": {"core"},
    "surgery": {"core", "system"},
    "models": {"core", "functional", "kernels"},
    "data": {"core", "system"},
    "evaluate": {"core"},
    "distill": {"core", "surgery", "data", "system"},
    "compress": {"core", "surgery", "distill", "system"},
    "train": {"core", "surgery", "models", "data", "system"},
    "analysis": {"core", "surgery", "data", "models", "system"},
    "compare": {"core", "surgery", "models", "data", "train", "analysis", "system"},
}
MAY_IMPORT["bench"] = set(MAY_IMPORT)
MAY_IMPORT["cli"] = {*MAY_IMPORT, ""}  # "" is the package itself, as a user imports it

#: what a plain `import relinear` must leave alone: heavy, optional, or both
HEAVY = ["matplotlib", "triton", "datasets", "sklearn", "optuna", "peft"]


def rooms_imported(path: Path) -> set[str]:
    """Rooms of relinear that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide the room"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        found |= {f"{name}.".split(".")[1] for name in names if name.split(".")[0] == "relinear"}
    return found - {"__version__"}


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
        "def f():\n    from relinear.cli import main\n    import relinear.data.x\n    from relinear import train\n"
    )
    assert rooms_imported(file) == {"cli", "data", "train"}


def test_an_operator_has_the_name_of_its_files() -> None:
    own = {kind: c for kind, c in OperatorConfig.kinds().items() if c.__module__.startswith("relinear.")}
    assert own
    for kind, config in own.items():
        assert config.__module__ == f"relinear.operators.{kind}"
        assert (SOURCE / "functional" / f"{kind}.py").is_file()


def test_every_file_is_in_the_wheel() -> None:
    settings = tomllib.loads((SOURCE.parents[1] / "pyproject.toml").read_text())
    patterns = settings["tool"]["setuptools"]["package-data"]["relinear"]
    for pattern in patterns:
        assert list(SOURCE.glob(pattern)), f"package-data names {pattern}, which matches nothing"
    named = {path for pattern in patterns for path in SOURCE.glob(pattern)}
    files = {path for path in SOURCE.rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    assert {path for path in files if path.suffix != ".py"} == named
    assert {path.parent for path in files if path.suffix == ".py"} <= {p.parent for p in SOURCE.rglob("__init__.py")}


def test_import_is_light() -> None:
    code = f"import sys, relinear; sys.exit(' '.join(m for m in {HEAVY} if m in sys.modules) or 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"import relinear imported {done.stderr}"
