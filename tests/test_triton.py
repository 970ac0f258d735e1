"""Triton kernels without a GPU: numbers in the interpreter, machine code from the compiler.

Both need a process of their own: whether kernels are interpreted is settled when triton is imported.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import mostly_slow

pytest.importorskip("triton")

HERE = Path(__file__).parent
INTERPRETED = ["triton_interpreted.py", "triton_selfcheck.py"]


def _run(arguments: list[str], **environment: str) -> str:
    path = os.pathsep.join([str(HERE.parent / "src"), str(HERE)])
    env = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"} | environment
    env.pop("PYTEST_ADDOPTS", None)
    done = subprocess.run([sys.executable, *arguments], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("marked", mostly_slow(["not slow", "slow"], "not slow"))
def test_kernels_in_the_interpreter(marked: str) -> None:
    files = [str(HERE / file) for file in INTERPRETED]
    out = _run(["-m", "pytest", "-p", "no:cacheprovider", "-m", marked, *files], TRITON_INTERPRET="1")
    assert "passed" in out
    assert "skipped" not in out


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("capability", [80, 90])
def test_kernels_compile_for_gpus(capability: int, dtype: str) -> None:
    assert "sm_" in _run([str(HERE / "triton_compile.py"), str(capability), dtype])
