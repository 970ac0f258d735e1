"""``relinear new``: write a package with a small operator, as a starting point for an operator of your own."""

import keyword
import re
from importlib.util import find_spec
from pathlib import Path
from string import Template
from typing import Literal

import typer

from relinear_cli.list import listed

_TEMPLATES = Path(__file__).with_name("template")
#: file of the package -> the template it is made from
_FILES = {
    "pyproject.toml": "pyproject.txt",
    "README.md": "readme.txt",
    "compare.yaml": "compare.txt",
    "relinear_$name/__init__.py": "init.txt",
    "relinear_$name/operator.py": "operator_$kind.txt",
    "tests/test_$name.py": "test_$kind.txt",
}
#: names of classes that the operator's code uses
_OTHER_CLASSES = ("ClassVar", "Operator", "OperatorConfig", "Self", "Tensor")


def command(
    what: Literal["operator"] = typer.Argument(metavar="WHAT", help="What to write."),
    name: str = typer.Argument(help="Its name in settings, such as `block_circulant`."),
    kind: Literal["linear", "nonlinear", "routed"] = typer.Option(
        "linear", help="Kind of operator; a routed one sends tokens to experts."
    ),
    out: Path | None = typer.Option(None, help="The folder to create; by default NAME."),
) -> None:
    """Write a package with an operator of your own: the operator, its tests, its entry point. They pass as written.

    It is a small low-rank layer, one with an activation inside, or top-k low-rank experts with a balance loss. Change
    its formula, and install it with `pip install -e NAME`: every command then knows it by its name.

    **Example:** `relinear new operator block_circulant`

    **Example:** `relinear new operator my_experts --kind routed`
    """
    from relinear.system.files import atomic_directory

    camel = "".join(part.capitalize() for part in name.split("_"))
    bad = camel in _OTHER_CLASSES or keyword.iskeyword(camel) or keyword.iskeyword(name)
    if bad or not re.fullmatch(r"[a-z][a-z0-9_]{0,38}[a-z0-9]", name):
        raise ValueError(f"{name!r} is not a name of an operator; one is like block_circulant, or low_rank2")
    folder = out or Path(name)
    if folder.exists() or folder.is_symlink():
        raise ValueError(f"{folder} exists already; choose another with --out, or another name")
    if not folder.absolute().parent.is_dir():
        raise ValueError(f"there is no directory {folder.absolute().parent} to put {folder.name} in")
    if find_spec(f"relinear_{name}") is not None:
        raise ValueError(f"the package relinear_{name} is installed already; choose another name")
    if name in listed("operators"):
        raise ValueError(f"there is an operator {name!r} already, see `relinear list operators {name}`; choose another")
    words = {"name": name, "dashed": name.replace("_", "-"), "Name": camel, "kind": kind}
    words["by"] = "flops" if kind == "routed" else "parameters"
    with atomic_directory(folder) as made:
        for path, template in _FILES.items():
            file = made / Template(path).substitute(words)
            file.parent.mkdir(parents=True, exist_ok=True)
            text = (_TEMPLATES / Template(template).substitute(words)).read_text(encoding="utf-8")
            file.write_text(Template(text).substitute(words), encoding="utf-8")
    print(f"written: {folder}/relinear_{name}/operator.py and what belongs to it. Next:\n")
    print(f"pip install -e {folder}\npytest {folder} -k 'not inductor'")
    print(f"relinear compare --recipe {folder}/compare.yaml --out runs/{name}")
