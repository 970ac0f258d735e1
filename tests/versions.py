"""Lowest, pinned and newest versions of torch and transformers: an environment and a short set of tests for each.

    python3.11 tests/versions.py

writes ``results/versions.json`` and the table of ``results/ecosystem/README.md``; with ``--set`` the rows of the other
sets stay as they are. Environments are kept in ``.venv-versions/``. What the index does not have is said in its row.
Standard library alone.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
HOME = ROOT / ".venv-versions"
RECORD, PAGE = ROOT / "results" / "versions.json", ROOT / "results" / "ecosystem" / "README.md"
MARKS = ("<!-- versions -->", "<!-- end of versions -->")
PACKAGES = ("torch", "transformers")
#: surgery, checkpoints here and elsewhere, imports, every operator, training, losses, context, other tools
TESTS = ["surgery", "checkpoint", "checkpoint_elsewhere", "public_face", "properties", "train_run", "train_optim",
         "aux_losses", "context_exactness", "outside_tools"]  # fmt: skip
#: compilers take most of a set's time and are not what differs
WITHOUT = "not inductor and not compile"


def wanted() -> dict[str, dict[str, str]]:
    """Requirements of the sets, by package; an empty one is the newest."""
    written = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    pinned = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), flags=re.M))
    lowest = {name: re.search(r">=([\d.]+)", line)[1] for name in PACKAGES for line in written if line.startswith(name)}
    both = {"lowest": lowest, "pinned": {name: pinned[name] for name in PACKAGES}}
    return {kind: {n: f"=={v}" for n, v in found.items()} for kind, found in both.items()} | {
        "newest": dict.fromkeys(PACKAGES, "")
    }


def install(kind: str, versions: dict[str, str]) -> str:
    """Make the environment of a set; what was wrong, or nothing."""
    python = HOME / kind / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(HOME / kind)], check=True)
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    fixed = [f"{name}{version}" for name, version in versions.items()]
    pinned = ["-c", "constraints.txt"] if kind == "pinned" else []
    upgrade = ["--upgrade"] if kind == "newest" else []
    # torch first: of the same version pip then leaves the build that is there
    steps = [fixed[:1], [*fixed, "-e", ".[peft]", "pytest", "pytest-timeout", "hypothesis", "clifford", "optuna"]]
    for step in steps:
        done = subprocess.run([*pip, *upgrade, *pinned, *step], cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
            return (lines or done.stderr.splitlines() or ["pip failed"])[-1]
    return ""


def tried(kind: str, versions: dict[str, str], tests: list[str]) -> dict[str, Any]:
    """The record of a set."""
    wrong = install(kind, versions)
    asked = {name: version.removeprefix("==") or "newest" for name, version in versions.items()}
    if wrong:
        return {"set": kind, "asked": asked, "not_installed": wrong}
    python = str(HOME / kind / "bin" / "python")
    code = f"import json, importlib as i; print(json.dumps({{n: i.import_module(n).__version__ for n in {PACKAGES}}}))"
    seen = json.loads(subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout)
    files = [f"tests/test_{name}.py" for name in tests]
    done = subprocess.run(
        [python, "-m", "pytest", "-k", WITHOUT, "-p", "no:cacheprovider", *files],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    counts = {what: int(n) for n, what in re.findall(r"(\d+) (passed|failed|skipped|errors?)\b", done.stdout[-2_000:])}
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, flags=re.M)
    return {"set": kind, "asked": asked, "seen": seen, "counts": counts, "failed": failed}


def table(rows: list[dict[str, Any]]) -> str:
    """What was seen, in Markdown."""
    lines = ["| set | torch | transformers | date | passed | skipped | failed |",
             "| --- | --- | --- | --- | ---: | ---: | ---: |"]  # fmt: skip
    for row in rows:
        cells = [row["set"], *(row.get("seen", row["asked"])[name] for name in PACKAGES), row["date"]]
        if "not_installed" not in row:
            counts = row["counts"]
            failed = sum(counts.get(what, 0) for what in ("failed", "error", "errors"))
            cells += [counts.get("passed", 0), counts.get("skipped", 0), failed]
        else:
            cells += ["", "", "not run"]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    for row in rows:
        if "not_installed" in row:
            lines += ["", f"{row['set'].capitalize()}: pip said `{row['not_installed']}`"]
        elif row["failed"]:
            lines += ["", f"{row['set'].capitalize()}: failed", "", *(f"- `{name}`" for name in row["failed"])]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--set", action="append", choices=list(wanted()), help="some of the sets; all by default")
    given = parser.parse_args()
    kept = {row["set"]: row for row in json.loads(RECORD.read_text())} if RECORD.exists() else {}
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    for kind, versions in wanted().items():
        if kind in (given.set or wanted()):
            kept[kind] = tried(kind, versions, TESTS) | {"date": date}
    rows = [kept[kind] for kind in wanted() if kind in kept]
    RECORD.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    before, first, rest = PAGE.read_text(encoding="utf-8").partition(MARKS[0])
    after = rest.partition(MARKS[1])[2]
    PAGE.write_text(f"{before}{first}\n{table(rows)}\n{MARKS[1]}{after}", encoding="utf-8")
    print(table(rows))
    sys.exit(1 if any(row.get("failed") for row in rows) else 0)


if __name__ == "__main__":
    main()
