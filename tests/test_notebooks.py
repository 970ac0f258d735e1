"""The notebooks run from top to bottom, with fewer steps, and what they keep are outputs of every cell."""

import json
import re

import matplotlib
import pytest

from conftest import REPOSITORY, mostly_slow
from relinear.contract import config as registry

NOTEBOOKS = sorted((REPOSITORY / "examples" / "notebooks").glob("*.ipynb"))


def code(notebook):
    """The code cells of a notebook."""
    return [cell for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]


@pytest.mark.parametrize("name", mostly_slow([path.stem for path in NOTEBOOKS], "look_inside"))
def test_a_notebook_runs(name, corpus, tmp_path, monkeypatch):
    notebook = next(path for path in NOTEBOOKS if path.stem == name)
    text = "\n\n".join("".join(cell["source"]) for cell in code(notebook))
    text, fewer = re.subn(r"^STEPS = \d+$", "STEPS = 2", text, flags=re.M)
    assert fewer == 1
    text = text.replace('"data": "stdlib"', f'"data": {str(corpus)!r}')  # which takes longer to read than the rest
    text = text.replace('"batch_size": 16', '"batch_size": 2')
    text = text.replace('"max_validation_tokens": 16384', '"max_validation_tokens": 2560')
    monkeypatch.setitem(registry._REGISTRY, "operator", dict(registry._REGISTRY["operator"]))
    monkeypatch.chdir(tmp_path)
    matplotlib.use("agg")
    exec(compile(text, str(notebook), "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_keeps_what_its_cells_print_and_draw(notebook):
    for cell in code(notebook):
        says = "print(" in "".join(cell["source"]) or "subplots(" in "".join(cell["source"])
        assert bool(cell["outputs"]) == says
        assert not [one for one in cell["outputs"] if one["output_type"] == "error"]
