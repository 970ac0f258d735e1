"""What `relinear compress` takes: time by phase, peak memory of the process, most bytes on disk in its folder.

    python results/compress/peaks.py --out results/compress/peaks.jsonl -- models/smollm2 --for llama.cpp --size 91MB \\
        --data TEXT --data TEXT --tokens 8192 --set sequence_length=256 --no-evaluate --out runs/peaks

A fresh process runs the command behind ``--`` as it stands; its folder is looked at five times a second.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

from relinear.system.machine import provenance


def bytes_in(folder: Path) -> int:
    """Bytes of a folder's files, some of which may go away meanwhile."""
    total = 0
    for where, _, names in os.walk(folder):  # which passes over folders that went away
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += (Path(where) / name).stat().st_size
    return total


def main() -> None:
    """Run the command, and write a row."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("command", nargs="+")
    given = parser.parse_args()
    folder = Path(given.command[given.command.index("--out") + 1])
    start, most = time.monotonic(), 0
    process = subprocess.Popen([Path(sys.executable).with_name("relinear"), "compress", *given.command])
    while process.poll() is None:
        most = max(most, bytes_in(folder))
        time.sleep(0.2)
    if process.returncode:
        raise SystemExit(process.returncode)
    used, report = resource.getrusage(resource.RUSAGE_CHILDREN), json.loads((folder / "report.json").read_text())
    row = {"model": given.command[0], "bytes_before": report["bytes_before"], "tokens": report["settings"]["tokens"]}
    row |= {"seconds": time.monotonic() - start, "processor_seconds": used.ru_utime + used.ru_stime}
    row |= {"seconds_by_phase": report["seconds"], "memory_bytes": 1024 * used.ru_maxrss, "disk_bytes": most}
    row |= {"made_bytes": bytes_in(folder), "waiting_threads": os.environ.get("OMP_WAIT_POLICY", "default")}
    row |= {"threads": os.environ.get("OMP_NUM_THREADS")}
    with given.out.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row | provenance()) + "\n")
    print(row)


if __name__ == "__main__":
    main()
