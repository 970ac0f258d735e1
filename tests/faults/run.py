"""Runs the faults: ``python -m faults.run --out results/faults.json`` from tests/. ``--sample 3`` takes some of them,
``--kinds`` one of each kind of call on each file (numbers in names count as one).

A command runs on tiny models in a child process in which the n-th call on a file below its folder fails: all from
there on (a full disk, which takes half of what was being written), or that one (a failing disk, reads too). It must end
with exit code 2 and one message that names the file, or do without; the same command then comes to what it comes to in
peace.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import errno
import gc
import hashlib
import importlib
import io
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

__all__ = ["run"]

SHIM = Path(__file__).with_name("shim.c")
WIDTH = '{"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}'
TRAIN = {
    "model_overrides": json.loads(WIDTH),
    "data": {"sequence_length": 16, "max_validation_tokens": 64},
    **{"steps": 2, "batch_size": 2, "save_every": 1, "log_every": 1, "dtype": "float32", "threads": 1, "device": "cpu"},
}
SPEED = {"speed": {"seconds": 0}}


def _arguments() -> dict[str, list[str]]:
    """Of every command, for a folder in which there are text.txt and what ``_prepare`` makes."""
    import yaml

    train = TRAIN | {"data": TRAIN["data"] | {"data": "text.txt", "cache_dir": "../cache"}}
    entries = {"a": "dense", "b": "low_rank:rank=4"}
    tune = {"tune": {"learning_rates": [1e-3, 4e-3], "extensions": 0}}
    recipes = {
        "train": TRAIN | {"data": TRAIN["data"] | {"data": "text.txt", "cache_dir": "cache"}},
        "sweep": train | {"save_model": False},
        "compare": {"entries": entries, "train": train, **SPEED},
        "tune": {"entries": {"a": "dense"}, "train": train, **SPEED, **tune},
        "scale": {"entries": entries, "train": train, **SPEED, "sizes": {"widths": [8, 16, 24, 32]}, "reference": "a"},
    }
    for name, values in recipes.items():
        Path(f"{name}.yaml").write_text(yaml.safe_dump(values))
    out = ["--out", "out"]
    sweep = ["sweep", "--recipe", "sweep.yaml", "-p", "learning_rate=1e-4..1e-2:log", "--trials", "2", *out]
    text = ["--data", "text.txt"]
    sizes = ["--set", "tokens=256", "--set", "sequence_length=32", "--set", "anchor_tokens=64"]
    healed = ["--set", "heal_tokens=128", "--set", "heal_batch=2", "--set", "heal_held_out_tokens=64"]
    return {
        "train": ["train", "--recipe", "train.yaml", "-r", "up_proj=low_rank:rank=4", *out],
        "compare": ["compare", "--recipe", "compare.yaml", *out],
        "compare --share": ["compare", "--recipe", "tune.yaml", "--share", *out],
        "tune": ["compare", "--recipe", "tune.yaml", *out],
        "sweep": sweep,
        "sweep --share": [*sweep, "--share"],
        "scale": ["scale", "scale.yaml", *out],
        "distill": [
            *("distill", "model", "-r", "v_proj=low_rank:rank=2", *text, *out, "--tokens", "128", "--epochs", "1"),
            *("--set", "validation_tokens=64", "--set", "sequence_length=32", "--threads", "1"),
        ],
        "compress": ["compress", "base", "--keep", "0.9", *text, *out, *sizes, "--export", "plain", "--no-evaluate"],
        "compress, healed": ["compress", "base", "--keep", "0.9", *text, *out, *sizes, *healed],
        "eval": ["eval", "model", *text],
        "analyze": ["analyze", "model", *text, "--sequences", "2", "--length", "16", *out],
        "bench": ["bench", "--model", "tiny", "--operator", "q_proj=low_rank:rank=2", "--rounds", "1", *out],
        "report": ["report", "run"],
        "specialize": ["specialize", "cgt", "--prefix-file", "prefix.txt", "--tokenizer", "bytes", *out],
        "check-coordinates": [
            *("check-coordinates", "tiny", "--widths", "32,64", "--steps", "1", "--seeds", "0", *text, *out),
            *("--set", "num_hidden_layers=1", "--sequences", "2", "--length", "8"),
        ],
        "inspect": ["inspect", "model"],
        "new": ["new", "operator", "my_circulant", *out],
    }


def _prepare() -> None:
    """Models, text, and a run that has ended, in the current folder. In a child: who has computed must not fork."""
    import torch

    import relinear
    from conftest import make_tiny_llama
    from relinear.data.tokenizers import load_tokenizer

    Path("text.txt").write_text("\n\n".join(f"paragraph {i} says {i * i} and {i % 7}" for i in range(60)))
    Path("prefix.txt").write_text("a prefix")
    tokenizer = load_tokenizer("bytes")
    torch.manual_seed(0)
    model = make_tiny_llama(vocab_size=260)
    relinear.save_pretrained(model, "base", tokenizer=tokenizer)
    relinear.replace_(model, {"q_proj": relinear.Transponder(rank=2)})
    relinear.save_pretrained(model, "model", tokenizer=tokenizer)
    sizes = {"vocab_size": 260, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}
    config = relinear.CGTConfig(**sizes, context_size=4, context_layer=1, context_heads=2)
    relinear.save_pretrained(relinear.CGTForCausalLM(config), "cgt")


def _warm_up(given: Path) -> None:
    """Read once, for every fork, what is found out about classes and fonts: most of a command's time otherwise.

    Collecting would copy every page that a fork shares. One thread, as set by ``run``, leaves none that a fork lacks.
    """
    from relinear_cli.main import main

    os.chdir(given)
    with contextlib.redirect_stdout(io.StringIO()):
        assert main(["inspect", "model"]) == main(["report", "run"]) == 0
    gc.collect()
    gc.freeze()


def _in_child(work: Any, *arguments: Any) -> tuple[int, str]:
    """Exit code, and what it wrote to stderr, of a function in a forked process."""
    with tempfile.TemporaryFile() as told:
        child = os.fork()
        if not child:
            code = 70
            try:
                os.dup2(told.fileno(), 2)
                os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
                code = work(*arguments) or 0
            except BaseException:
                import traceback

                traceback.print_exc()
            finally:
                with contextlib.suppress(Exception):
                    sys.stderr.flush()
                os._exit(code)
        _, status = os.waitpid(child, 0)
        told.seek(0)
        return os.waitstatus_to_exitcode(status), told.read().decode("utf-8", "replace")


def _attempt(
    folder: Path, arguments: list[str], number: int = 0, kind: int = 0
) -> tuple[int, str, dict[int, list[str]], list[str]]:
    """Exit code, stderr, calls that failed; at 0, where none is to, those on files that each kind of fault can meet."""
    noted = folder.with_name(f"{folder.name}.noted")

    def work() -> int:
        import relinear.compare.worker
        from relinear_cli.main import main

        # the process of a run would start anew each time
        relinear.compare.worker.Worker = lambda log: relinear.compare.worker.InProcess()
        os.chdir(folder)
        shim = ctypes.CDLL(None)
        shim.faults_failed.restype = shim.faults_noted.restype = ctypes.c_char_p
        full = kind == errno.ENOSPC
        before = set(sys.modules)
        shim.faults_arm(os.fsencode(folder), ctypes.c_long(number), kind, int(full), int(not full))
        code = main(arguments)
        calls, failed = shim.faults_noted().decode().splitlines(), shim.faults_failed().decode()
        shim.faults_arm(b"", ctypes.c_long(0), 0, 0, 0)
        noted.write_text(json.dumps([calls, failed.splitlines(), sorted(set(sys.modules) - before)]))
        return code

    code, told = _in_child(work)
    calls, failed, imported = json.loads(noted.read_text()) if noted.exists() else ([], [], [])
    noted.unlink(missing_ok=True)
    for name in imported if not number else ():  # once, for every later fork
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    writes = [call for call in calls if call.startswith("0")]
    return code, told, {errno.ENOSPC: writes, errno.EIO: calls}, failed


def _named(told: str, failed: list[str], folder: Path) -> bool:
    """Whether a message names the file of a call that failed, or the directory that it is a part of."""
    names = set()
    for call in failed:
        parts = Path(call.partition(" ")[2]).relative_to(folder).parts
        names |= {re.sub(r"^\.(.+?)\.[^.]{8}\.relinear$", r"\1", part) for part in parts[-3:] if part != "checkpoints"}
    return any(name in told for name in names or {folder.name})


def _kind(call: str) -> str:
    """Of a call on a file, whichever entry, run, step, layer or temporary name it is of."""
    temporary = r"(?<=\.)[a-z0-9_]{8}(?=/|$|\.relinear)|\.tmp\w{6}"
    return re.sub(rf"{temporary}|[^/]+(?=/seed)|\w+_proj|[0-9a-f]{{8,}}|\d+", "#", call)


def _bits(folder: Path) -> str:
    """A hash of the names and bytes of all files."""
    found = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        content = path.read_bytes() if path.is_file() else b""
        found.update(f"{path.relative_to(folder)} {len(content)}\0".encode() + content)
    return found.hexdigest()


def _wrong(
    folder: Path, arguments: list[str], number: int, kind: int, peace: dict[str, Any], after: dict[str, str]
) -> str:
    """What is wrong with a command at a fault and after it; "" if nothing.

    ``after`` has what the command came to from what earlier faults had left: many leave the same, or nothing.
    """
    code, told, _, calls = _attempt(folder, arguments, number, kind)
    failed = calls[0] if calls else "none"
    errors = [line for line in told.splitlines() if line.startswith("error: ")]
    if "Traceback" in told or code not in (0, 2) or len(errors) != (code == 2):
        return f"exit code {code} at {failed}: {told[-1500:]}"
    if code == 2 and calls and not _named(errors[0], calls, folder):
        return f"unnamed, at {failed}: {errors[0]}"
    left = _bits(folder)
    if left not in after:
        after[left] = _differs(folder, arguments, peace, code == 0)
    return after[left] and f"{after[left]}, after {failed}"


def _differs(folder: Path, arguments: list[str], peace: dict[str, Any], done: bool) -> str:
    """What is other than in peace where a command starts from a folder as it is; "" if nothing.

    What ``new`` has ``done`` it refuses to do again.
    """
    from kills.works import come_to

    code, told, *_ = (0, "") if done and arguments[0] == "new" else _attempt(folder, arguments)
    if code:
        return f"then exit code {code}: {told[-1500:]}"
    found = come_to(folder)
    different = sorted(key for key in peace.keys() | found.keys() if peace.get(key) != found.get(key))
    return f"then other results in {different}" if different else ""


def _what(name: str, kind: int, number: int) -> str:
    return f"{name}, {errno.errorcode[kind]} at call {number}"


def _read(record: Path) -> dict[str, str]:
    """What was tried -> what is wrong with it; a line for each, as several processes write them."""
    lines = record.read_text().splitlines() if record.exists() else []
    return {what: wrong for line in lines for what, wrong in json.loads(line).items()}


def _try(
    work: list[tuple[str, int, int]],
    given: Path,
    folder: Path,
    commands: dict[str, list[str]],
    peace: dict[str, Any],
    record: Path,
    deadline: float,
) -> None:
    """A process's share of the faults, until the deadline."""
    tried = _read(record)
    after: dict[str, dict[str, str]] = {}  # by command
    for name, kind, number in work:
        what = _what(name, kind, number)
        if what in tried or time.monotonic() > deadline:
            continue
        shutil.copytree(given, folder)
        wrong = _wrong(folder, commands[name], number, kind, peace[name], after.setdefault(name, {}))
        shutil.rmtree(folder)
        with record.open("a") as lines:
            lines.write(json.dumps({what: wrong}) + "\n")


def run(
    sample: int | None = None,
    seed: int = 0,
    names: list[str] | None = None,
    minutes: float = 1e9,
    kinds: bool = False,
    out: Path | None = None,
    processes: int = 1,
) -> dict[str, Any]:
    """Faults at ``sample`` calls of every command, at one of each kind, or at all; counts, and what went wrong.

    In an order drawn over all commands. With ``out`` what was tried is kept beside it
    until all is, and the next run goes on.
    """
    import torch

    import relinear.compare.run
    import relinear.compress
    import relinear.train.trainer  # noqa: F401  imported once, for every fork
    import relinear_cli.main  # noqa: F401
    from kills.works import come_to

    torch.set_num_threads(1)
    counts: dict[str, dict[str, int]] = {}
    peace: dict[str, Any] = {}
    work: list[tuple[str, int, int]] = []
    begun = time.monotonic()
    deadline = begun + 60 * minutes
    memory = Path("/dev/shm")  # where synchronising takes no time
    with tempfile.TemporaryDirectory(prefix="faults-", dir=memory if memory.is_dir() else None) as home_name:
        home = Path(home_name)
        record = out.with_suffix(".tried") if out else home / "tried"
        given, folder = home / "given", home / "attempt"
        given.mkdir()
        os.environ["RELINEAR_CACHE"] = str(home / "cache")
        os.chdir(given)
        code, told = _in_child(_prepare)
        assert code == 0, told[-3000:]
        commands = _arguments()
        code, told, *_ = _attempt(given, [*commands["train"][:-1], "run"])
        assert code == 0, told[-3000:]
        shutil.rmtree(given / "cache")
        for name in names or list(commands):
            shutil.copytree(given, folder)
            code, told, calls, _ = _attempt(folder, commands[name])
            assert code == 0, f"{name}, in peace: exit code {code}: {told[-1500:]}"
            peace[name] = come_to(folder)
            shutil.rmtree(folder)
            counts[name] = {}
            for kind in (errno.ENOSPC, errno.EIO):
                rng = random.Random(f"{seed} {name} {kind}")
                alike: dict[str, list[int]] = {}
                for number, call in enumerate(calls[kind], 1):
                    alike.setdefault(_kind(call) if kinds else str(number), []).append(number)
                chosen = [rng.choice(numbers) for numbers in alike.values()]
                if sample is not None:
                    chosen = rng.sample(chosen, min(sample, len(chosen)))
                counts[name] |= {f"{errno.errorcode[kind]} calls": len(calls[kind]), errno.errorcode[kind]: 0}
                if kinds:
                    counts[name][f"{errno.errorcode[kind]} kinds of call"] = len(alike)
                work += [(name, kind, number) for number in chosen]
        _warm_up(given)
        random.Random(seed).shuffle(work)
        children = []
        for part in range(processes):
            if not (child := os.fork()):
                code = 1
                try:
                    _try(work[part::processes], given, home / f"attempt{part}", commands, peace, record, deadline)
                    code = 0
                finally:
                    os._exit(code)
            children.append(child)
        ended = [os.waitpid(child, 0)[1] for child in children]
        assert not any(ended), f"a process ended early: {ended}"
        tried = _read(record)
        for name, kind, number in work:
            counts[name][errno.errorcode[kind]] += _what(name, kind, number) in tried
        os.chdir("/")
    if len(tried) >= len(work):
        record.unlink(missing_ok=True)
    return {
        "seed": seed,
        "sample": sample,
        "faults": sum(count["ENOSPC"] + count["EIO"] for count in counts.values()),
        "seconds": round(time.monotonic() - begun, 1),
        "by_command": counts,
        "failures": [f"{what}: {wrong}" for what, wrong in tried.items() if wrong],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sample", type=int, help="calls of every command; all by default")
    parser.add_argument("--kinds", action="store_true", help="one of each kind of call on each file")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--command", action="append", help="of the commands; all by default")
    parser.add_argument("--minutes", type=float, default=1e9, help="begin nothing after so many")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if not hasattr(ctypes.CDLL(None), "faults_arm"):
        with tempfile.TemporaryDirectory() as folder:
            shim = Path(folder) / "shim.so"
            subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", shim, SHIM, "-ldl"], check=True)
            again = [sys.executable, "-m", "faults.run", *sys.argv[1:]]
            sys.exit(subprocess.run(again, env=os.environ | {"LD_PRELOAD": str(shim)}, check=False).returncode)
    out = given.out and given.out.resolve()
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
    found = run(given.sample, given.seed, given.command, given.minutes, given.kinds, out, given.processes)
    text = json.dumps(found, indent=1)
    if out:
        out.write_text(text + "\n")
    print(text)
    sys.exit(1 if found["failures"] else 0)


if __name__ == "__main__":
    main()
