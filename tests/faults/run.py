"""Runs the faults: ``python -m faults.run --out results/faults.json`` from tests/. ``--sample 3`` takes some of them,
``--kinds`` one of each kind of call on each file (numbers in names count as one).

A command runs on tiny models, and at each call on a file below its folder a child is forked in which that call fails:
all from there on (a full disk, which takes half of what was being written), or that one (a failing disk, reads too).
The child must end with exit code 2 and one message that names the file, or do without; the same command then comes to
what it comes to in peace, from each different state that children leave.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import errno
import fcntl
import gc
import hashlib
import importlib
import io
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
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
#: seconds that a command may take
_PATIENCE = 120
SPEED = {"speed": {"seconds": 0}}


def _arguments() -> dict[str, list[str]]:
    """Of every command, for a folder in which there are text.txt and what ``_prepare`` makes."""
    import yaml

    train = TRAIN | {"data": TRAIN["data"] | {"data": "text.txt", "cache_dir": "../cache"}}
    entries = {"a": "dense", "b": "low_rank:rank=4"}
    tune = {"tune": {"learning_rates": [1e-3, 4e-3], "extensions": 0}}
    recipes = {
        "train": TRAIN | {"data": TRAIN["data"] | {"data": "text.txt", "cache_dir": "cache"}},
        "compare": {"entries": entries, "train": train, **SPEED},
        "tune": {"entries": {"a": "dense"}, "train": train, **SPEED, **tune},
        "scale": {
            "entries": {"a": "dense"},
            "train": train,
            **SPEED,
            "widths": [8, 16, 24, 32],
            "reference": "a",
        },
    }
    for name, values in recipes.items():
        Path(f"{name}.yaml").write_text(yaml.safe_dump(values))
    out = ["--out", "out"]
    text = ["--data", "text.txt"]
    sizes = ["--set", "tokens=256", "--set", "sequence_length=32"]
    healed = ["--set", "heal_tokens=128"]
    return {
        "train": ["train", "--recipe", "train.yaml", "-r", "up_proj=low_rank:rank=4", *out],
        "compare": ["compare", "--recipe", "compare.yaml", *out],
        "tune": ["compare", "--recipe", "tune.yaml", *out],
        "compare, widths": ["compare", "--recipe", "scale.yaml", *out],
        "distill": [
            *("distill", "model", "-r", "v_proj=low_rank:rank=2", *text, *out, "--tokens", "128", "--set", "epochs=1"),
            *("--set", "validation_tokens=64", "--set", "sequence_length=32", "--threads", "1"),
        ],
        "compress": ["compress", "base", "--keep", "0.9", *text, *out, *sizes, "--no-evaluate"],
        "compress, healed": ["compress", "base", "--keep", "0.9", *text, *out, *sizes, *healed],
        "eval": ["eval", "model", *text],
        "analyze": ["analyze", "model", *text, "--sequences", "2", "--length", "16", *out],
        "bench": ["bench", "--model", "tiny", "--operator", "q_proj=low_rank:rank=2", "--rounds", "1", *out],
        "report": ["report", "run"],
        "specialize": ["specialize", "cgt", "--prefix-file", "prefix.txt", "--tokenizer", "bytes", *out],
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
                traceback.print_exc()
            finally:
                with contextlib.suppress(Exception):
                    sys.stderr.flush()
                os._exit(code)
        _, status = os.waitpid(child, 0)
        told.seek(0)
        return os.waitstatus_to_exitcode(status), told.read().decode("utf-8", "replace")


def _armed(shim: Any, folder: Path, number: int, kind: int) -> None:
    """Let the shim fail the ``number``-th call: a full disk stays so and meets writes alone, a failing one all once."""
    full = kind == errno.ENOSPC
    shim.faults_arm(os.fsencode(folder), ctypes.c_long(number), kind, int(full), int(not full))


def _noted(folder: Path) -> Path:
    """Where a process leaves what it has seen of its calls."""
    return folder.with_name(f"{folder.name}.noted")


def _command(folder: Path, arguments: list[str], number: int = 0, kind: int = 0, each: Any = None) -> int:
    """Exit code of a command, in this process, whose calls that are seen are left beside the folder."""
    import relinear.compare.run
    from relinear_cli.main import main

    relinear.compare.run.runs_at_once = lambda recipe: 0  # in this process
    os.chdir(folder)
    shim = ctypes.CDLL(None)
    shim.faults_failed.restype = shim.faults_noted.restype = ctypes.c_char_p
    before = set(sys.modules)
    shim.faults_each(each)
    if each is None:
        signal.alarm(_PATIENCE)
    _armed(shim, folder, number, kind)
    code = main(arguments)
    calls, failed = shim.faults_noted().decode().splitlines(), shim.faults_failed().decode()
    shim.faults_arm(b"", ctypes.c_long(0), 0, 0, 0)
    _noted(folder).write_text(json.dumps([calls, failed.splitlines(), sorted(set(sys.modules) - before)]))
    return code


def _read_noted(folder: Path) -> list[list[str]]:
    """Calls, those that failed, modules that were imported; once."""
    noted = _noted(folder)
    found = json.loads(noted.read_text()) if noted.exists() else [[], [], []]
    noted.unlink(missing_ok=True)
    return found


def _attempt(
    folder: Path, arguments: list[str], number: int = 0, kind: int = 0
) -> tuple[int, str, dict[int, list[str]], list[str]]:
    """Exit code, stderr, calls that failed; at 0, where none is to, those on files that each kind of fault can meet."""
    code, told = _in_child(_command, folder, arguments, number, kind)
    calls, failed, imported = _read_noted(folder)
    for name in imported if not number else ():  # once, for every later fork
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    writes = [call for call in calls if call.startswith("0")]
    return code, told, {errno.ENOSPC: writes, errno.EIO: calls}, failed


class _Kept:
    """The files of a folder and of the caches beside it, and where this process stands in those that it has open.

    A child that has met a fault changes both. Files are put back under their own inodes: this process has them open.
    """

    def __init__(self, folder: Path, beside: Path) -> None:
        self.roots, self.beside = (folder, folder.with_name("cache")), beside
        self.files: dict[Path, tuple[Path, os.stat_result, bytes]] = {}
        self.directories = {path for path in self._all() if path.is_dir() and not path.is_symlink()}
        beside.mkdir()
        for number, path in enumerate(self._all()):
            if path in self.directories:
                continue
            os.link(path, beside / str(number), follow_symlinks=False)
            content = b"" if path.is_symlink() else path.read_bytes()
            self.files[path] = (beside / str(number), path.lstat(), content)
        self.places = {}
        for link in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):
                if str(link.readlink()).startswith(f"{folder.parent}{os.sep}"):
                    self.places[int(link.name)] = os.lseek(int(link.name), 0, os.SEEK_CUR)
        self.locks = self._locks()

    def _all(self) -> list[Path]:
        return sorted(path for root in self.roots for path in root.rglob("*"))

    def _locks(self) -> list[tuple[int, int, int, int]]:
        """(descriptor, kind, start, length) of the records that this process has locked: a child has them not."""
        found = []
        self.flocks: list[int] = []  # belong to an open file, which a child shares
        inodes = {os.fstat(number).st_ino: number for number in self.places}
        for line in Path("/proc/locks").read_text().splitlines():
            words = line.split()
            inode = int(words[5].rpartition(":")[2]) if len(words) == 8 else 0
            if words[1] == "FLOCK" and words[4] == str(os.getpid()) and inode in inodes:
                self.flocks.append(inodes[inode])
            elif words[1] == "POSIX" and words[4] == str(os.getpid()) and inode in inodes:
                start = int(words[6])
                length = 0 if words[7] == "EOF" else int(words[7]) - start + 1
                kind = fcntl.LOCK_EX if words[3] == "WRITE" else fcntl.LOCK_SH
                found.append((inodes[inode], kind, start, length))
        return found

    def lock(self, locked: bool, opened: bool = False) -> None:
        """Lock these records, or let go of them; in a child by files that it has ``opened`` itself."""
        for number in self.flocks:
            if opened:
                own = os.open(f"/proc/self/fd/{number}", fcntl.fcntl(number, fcntl.F_GETFL))
                os.dup2(own, number, inheritable=False)
                os.close(own)
            fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB if locked else fcntl.LOCK_UN)
        for number, kind, start, length in self.locks:
            fcntl.lockf(number, kind | fcntl.LOCK_NB if locked else fcntl.LOCK_UN, length, start)

    def restore(self) -> None:
        """Put everything back."""
        for path in reversed(self._all()):
            if path.is_dir() and not path.is_symlink():
                if path not in self.directories:
                    path.rmdir()
            elif path not in self.files or path.lstat().st_ino != self.files[path][1].st_ino:
                path.unlink()
        for path in sorted(self.directories):
            path.mkdir(exist_ok=True)
        for path, (own, before, content) in self.files.items():
            if not own.is_symlink() and own.read_bytes() != content:
                with own.open("r+b") as file:
                    file.write(content)
                    file.truncate()
                os.utime(own, ns=(before.st_atime_ns, before.st_mtime_ns))
            if not os.path.lexists(path):
                os.link(own, path, follow_symlinks=False)
        for number, place in self.places.items():
            os.lseek(number, place, os.SEEK_SET)
        shutil.rmtree(self.beside)
        self.lock(True)


class _Each:
    """Whether a call is to fail, asked at each of a command's: a child meets the fault, this process goes on.

    So a command comes to its n-th call once, not once for every fault.

    Attributes:
        chosen: numbers of calls.
        found: number -> what is wrong at once ("" if nothing), and the state that was left.
        states: hash of what was left -> whether the command had done its work.
    """

    def __init__(self, folder: Path, states: Path, chosen: set[int], deadline: float) -> None:
        self.folder, self.kept_in, self.chosen, self.deadline = folder, states, chosen, deadline
        self.found: dict[int, tuple[str, str]] = {}
        self.states: dict[str, bool] = {}

    def __call__(self, number: int) -> int:
        if number not in self.chosen or time.monotonic() > self.deadline:
            return 0
        assert threading.current_thread() is threading.main_thread()
        kept = _Kept(self.folder, self.folder.with_name(f"{self.folder.name}.kept"))
        with tempfile.TemporaryFile() as told:
            kept.lock(False)
            child = os.fork()
            if not child:
                kept.lock(True, opened=True)
                os.dup2(told.fileno(), 2)
                signal.alarm(_PATIENCE)
                return 1
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            told.seek(0)
            text = told.read().decode("utf-8", "replace")
        failed = _read_noted(self.folder)[1]
        left = _bits(self.folder)
        self.found[number] = _misbehaved(self.folder, code, text, failed), left
        if left not in self.states:
            self.states[left] = code == 0
            shutil.copytree(self.folder, self.kept_in / left, symlinks=True)
        kept.restore()
        return 0


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


def _misbehaved(folder: Path, code: int, told: str, calls: list[str]) -> str:
    """What is wrong with how a command ended at a fault; "" if nothing."""
    failed = calls[0] if calls else "none"
    errors = [line for line in told.splitlines() if line.startswith("error: ")]
    if "Traceback" in told or code not in (0, 2) or len(errors) != (code == 2):
        return f"exit code {code} at {failed}: {told[-1500:]}"
    if code == 2 and calls and not _named(errors[0], calls, folder):
        return f"unnamed, at {failed}: {errors[0]}"
    return ""


def _wrong(folder: Path, arguments: list[str], number: int, kind: int, peace: dict[str, Any]) -> str:
    """What is wrong with a command, begun anew, at a fault and after it; "" if nothing."""
    code, told, _, calls = _attempt(folder, arguments, number, kind)
    wrong = _misbehaved(folder, code, told, calls) or _differs(folder, arguments, peace, code == 0)
    return wrong and f"{wrong}, after {calls[0] if calls else 'none'}"


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
    name: str, kind: int, chosen: set[int], given: Path, folder: Path, arguments: list[str], peace: dict[str, Any],
    record: Path, deadline: float,
) -> None:  # fmt: skip
    """The faults of a kind at some calls of a command, which runs once; of what they leave each state is tried once.

    Whatever is wrong is tried again by a command that begins anew and meets that fault alone, which decides.
    """
    done = _read(record)
    chosen = {number for number in chosen if _what(name, kind, number) not in done}
    states = folder.with_name(f"{folder.name}.states")
    shutil.copytree(given, folder)
    states.mkdir()
    each = _Each(folder, states, chosen, deadline)
    ask = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_long)(each)

    def work() -> int:
        own = os.getpid()
        code = _command(folder, arguments, 0, kind, ask)
        if os.getpid() == own:  # the children of ``each`` end here, too
            _noted(folder).write_text(json.dumps([sorted(each.found.items()), each.states, []]))
        return code

    code, told = _in_child(work)
    assert code == 0, f"{name}, whose children met the faults: exit code {code}: {told[-1500:]}"
    found, left, _ = _read_noted(folder)
    after = {}
    for state, ended in left.items():
        shutil.rmtree(folder)
        (states / state).rename(folder)
        after[state] = _differs(folder, arguments, peace, ended)
    lines = {}
    for number, (wrong, state) in found:
        if wrong or after[state]:
            shutil.rmtree(folder)
            shutil.copytree(given, folder)
            wrong = _wrong(folder, arguments, number, kind, peace)
        lines[_what(name, kind, number)] = wrong
    with record.open("a") as file:
        file.write(json.dumps(lines) + "\n")
    shutil.rmtree(folder)
    shutil.rmtree(states)


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

    With ``out`` what was tried is kept beside it until all is, and the next run goes on.
    """
    import torch

    import relinear.compare.run
    import relinear.compression
    import relinear.training.trainer  # noqa: F401  imported once, for every fork
    import relinear_cli.main  # noqa: F401
    from kills.works import come_to

    torch.set_num_threads(1)
    counts: dict[str, dict[str, int]] = {}
    peace: dict[str, Any] = {}
    work: list[tuple[str, int, set[int]]] = []
    begun = time.monotonic()
    deadline = begun + 60 * minutes
    memory = Path("/dev/shm")  # where synchronising takes no time
    with tempfile.TemporaryDirectory(prefix="faults-", dir=memory if memory.is_dir() else None) as home_name:
        home = Path(home_name)
        record = out.with_suffix(".tried") if out else home / "tried"
        given, folder = home / "given", home / "attempt"
        given.mkdir()
        os.environ["RELINEAR_CACHE"] = str(home / "cache")  # "../cache" of recipes, too
        os.chdir(given)
        code, told = _in_child(_prepare)
        assert code == 0, told[-3000:]
        commands = _arguments()
        code, told, *_ = _attempt(given, [*commands["train"][:-1], "run"])
        assert code == 0, told[-3000:]
        shutil.rmtree(given / "cache", ignore_errors=True)
        (home / "cache").mkdir(exist_ok=True)  # not every command fills it
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
                work.append((name, kind, set(chosen)))
        _warm_up(given)
        work.sort(key=lambda one: len(one[2]))
        children = []
        for part in range(processes):
            if not (child := os.fork()):
                code = 1
                try:
                    own = home / f"part{part}"
                    shutil.copytree(home / "cache", own / "cache", symlinks=True)
                    os.environ["RELINEAR_CACHE"] = str(own / "cache")
                    for name, kind, chosen in work[part::processes]:
                        attempt = own / "attempt"
                        _try(name, kind, chosen, given, attempt, commands[name], peace[name], record, deadline)
                    code = 0
                except BaseException:
                    traceback.print_exc()
                finally:
                    os._exit(code)
            children.append(child)
        ended = [os.waitpid(child, 0)[1] for child in children]
        assert not any(ended), f"a process ended early: {ended}"
        tried = _read(record)
        for name, kind, chosen in work:
            counts[name][errno.errorcode[kind]] += sum(_what(name, kind, number) in tried for number in chosen)
        os.chdir("/")
    if len(tried) >= sum(len(chosen) for *_, chosen in work):
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
