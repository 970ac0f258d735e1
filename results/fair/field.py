"""The operators of examples/operators, for commands that are given ``--import field``."""

import importlib
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "operators"
sys.path.append(str(FOLDER))
for _file in sorted((FOLDER / "relinear_examples").glob("[!_]*.py")):
    importlib.import_module(f"relinear_examples.{_file.stem}")
