"""Programs that know nothing of relinear, on a checkpoint with operators: refused without the flag, the same with it.

Each runs in processes of its own that do not import relinear; what is not installed is skipped (`make ecosystem`
installs all of it).
"""

import importlib.util
import os
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest

import relinear

OUTSIDE = SimpleNamespace(
    **runpy.run_path(str(Path(__file__).resolve().parents[1] / "results" / "ecosystem" / "outside_programs.py"))
)
#: program -> the package that it is
NEEDS = {"PEFT LoRA": "peft", "TRL SFTTrainer": "trl", "torchao": "torchao", "lm-eval": "lm_eval"}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("programs")
    OUTSIDE.make_checkpoint(folder / "model")
    source = str(Path(relinear.__file__).parents[1])
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([source, *filter(None, [os.environ.get("PYTHONPATH")])]),
        "HF_MODULES_CACHE": str(folder / "modules"),
        "HF_DATASETS_CACHE": str(folder / "datasets"),
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    return folder, environment


@pytest.mark.parametrize("program", ["lm-eval", *OUTSIDE.PROGRAMS])
def test_a_program_is_refused_without_the_flag_and_right_with_it(program, world):
    needed = NEEDS.get(program)
    if needed is not None and importlib.util.find_spec(needed) is None:
        pytest.skip(f"{needed} is not installed: make ecosystem")
    folder, environment = world
    runs = []
    for flag, known in OUTSIDE.WAYS:
        if program == "lm-eval":
            runs.append(OUTSIDE.lm_eval(folder / "model", folder, flag, environment, known=known))
        else:
            script = OUTSIDE.PROGRAMS[program][0]
            runs.append(OUTSIDE.script(script, folder / "model", flag, environment, known=known))
    found = OUTSIDE.row(program, "", *runs)
    assert found["refused_without_flag"], runs[0].stderr[-2000:]
    assert found["same"], found
    assert all(found.get(key, True) for key in ("learns", "reloads", "close")), found
