"""Build the wheel, install it into an empty environment, and run README's first example there: ``make wheel``.

The example runs in an empty folder with nothing of this checkout but the model that it loads and the licence that it
reads. What it prints has to be what README says.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MODEL = "models/smollm2"


def example() -> tuple[str, str]:
    """Return README's first block of Python, and what it says that this prints."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    code = re.search(r"^```python\n(.*?)^```", text, flags=re.S | re.M)[1]
    return code, "".join(f"{said}\n" for said in re.findall(r"^print\(.*  # (.*)$", code, flags=re.M))


def main() -> int:
    """Print how long each step took; return the exit status."""
    if not (ROOT / MODEL).exists():
        print(f"{MODEL} is missing: run `make smollm2` first", file=sys.stderr)
        return 2
    code, printed = example()
    torch = re.search(r"^torch==.*$", (ROOT / "constraints.txt").read_text(), flags=re.M)[0]
    pip = ["bin/python", "-m", "pip", "--quiet", "--disable-pip-version-check"]
    with tempfile.TemporaryDirectory(prefix="wheel-") as name:
        home = Path(name)

        def step(what: str, *command: str, **more: object) -> str:
            began = time.perf_counter()
            done = subprocess.run(command, cwd=home, check=True, text=True, stdout=subprocess.PIPE, **more)
            print(f"{what}: {time.perf_counter() - began:.0f} s", flush=True)
            return done.stdout

        step("environment", sys.executable, "-m", "venv", name)
        step("torch", *pip, "install", torch)
        step("wheel", *pip, "wheel", "--no-deps", "--wheel-dir", ".", str(ROOT))
        (wheel,) = home.glob("relinear-*.whl")
        step(f"install {wheel.name}", *pip, "install", "-c", str(ROOT / "constraints.txt"), str(wheel))
        step("relinear doctor", "bin/relinear", "doctor")
        (home / "models").mkdir()
        (home / MODEL).symlink_to((ROOT / MODEL).resolve())
        (home / "LICENSE").write_bytes((ROOT / "LICENSE").read_bytes())
        found = step("README's first example", "bin/python", "-c", code)
        print(found, end="")
        return int(found != printed)


if __name__ == "__main__":
    sys.exit(main())
