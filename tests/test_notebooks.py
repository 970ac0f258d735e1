"""The notebooks run from top to bottom, with fewer steps, and what they keep are outputs of every cell."""

import json
import os
import re
import subprocess
import sys

import pytest

from conftest import REPOSITORY, mostly_slow

NOTEBOOKS = sorted((REPOSITORY / "examples" / "notebooks").glob("*.ipynb"))


def code(notebook):
    """The code cells of a notebook."""
    return [cell for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]


@pytest.mark.parametrize("name", mostly_slow([path.stem for path in NOTEBOOKS], "look_inside"))
def test_a_notebook_runs(name, tmp_path):
    notebook = next(path for path in NOTEBOOKS if path.stem == name)
    text = "\n\n".join("".join(cell["source"]) for cell in code(notebook))
    text, fewer = re.subn(r"^STEPS = \d+$", "STEPS = 2", text, flags=re.M)
    assert fewer == 1
    environment = dict(os.environ, MPLBACKEND="agg", OMP_NUM_THREADS="1", RELINEAR_CACHE=str(tmp_path / "cache"))
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    done = subprocess.run(
        [sys.executable, "-c", text], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_keeps_what_its_cells_print_and_draw(notebook):
    for cell in code(notebook):
        says = "print(" in "".join(cell["source"]) or "subplots(" in "".join(cell["source"])
        assert bool(cell["outputs"]) == says
        assert not [one for one in cell["outputs"] if one["output_type"] == "error"]
