"""One call on a machine with an NVIDIA GPU: are the kernels right, how fast are they, and what do two models train at.

``python tools/gpu.py --out results/gpu`` (``make gpu``) first checks all kernels and compiles whatever is
going to be timed, many processes at once and no longer than a third of the time; then it times every part in a process
of its own, which may fail or be cut off by itself. Every part writes its JSON after each row: what a call that is cut
off has found stays. ``--rehearse`` runs the same on a CPU, in Triton's interpreter, at sizes that say nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from relinear.system.files import read_json, write_json
from relinear.system.machine import describe_machine

__all__ = ["PARTS", "Plan", "run_parts"]

KINDS = ("transponder", "hdpl", "ccl", "cgt", "rotor", "rotor_step")
#: those whose tiles follow from the window
FIXED_TILES = ("rotor", "rotor_step")
#: n -> sizes of the left and the right factor and the blocks of a window of 2^n
SPINORS = {4: (8, 8, 1), 9: (16, 16, 2), 10: (32, 32, 1), 11: (64, 64, 1), 12: (128, 128, 1), 13: (64, 128, 1)}
#: name -> preset, operators by target, sequence length, batch size, learning rate
MODELS: dict[str, tuple[str, dict[str, str], int, int, float]] = {
    "hdpl-67m": ("hdpl-67m", {}, 512, 32, 8e-4),
    "hdpl-67m-hdpl": ("hdpl-67m", {r".*\.(q|k|v|gate|up)_proj": "hdpl:rank=128,blocks=8"}, 512, 32, 8e-4),
    "llama-60m": ("llama-60m", {}, 256, 128, 1e-3),
    "llama-60m-transponder": ("llama-60m", {"all-linear": "transponder"}, 256, 128, 1e-3),
}
PARTS = (*KINDS, *MODELS)
#: what a rehearsal changes of a model
TINY = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is measured.

    Args:
        device, dtype: where and in what the kernels run.
        widths, tokens: of the layers that are timed, square ones.
        rounds, seconds: of every timing, and for how long a contender repeats within a round.
        tiles: (ROWS, COLUMNS, STEP, warps, stages) that are tried.
        steps: most steps of a training, and the tokens of a batch are divided by ``shrink``.
    """

    device: str = "cuda"
    dtype: torch.dtype = torch.bfloat16
    checked: tuple[torch.dtype, ...] = (torch.float32, torch.float16, torch.bfloat16)
    # in the order of their importance, for a call that is cut off
    widths: tuple[int, ...] = (2048, 512, 4096, 1024, 8192)
    tokens: tuple[int, ...] = (4096, 1, 64, 65536)
    rounds: int = 5
    seconds: float = 0.01
    tiles: tuple[tuple[int, int, int, int, int], ...] = (
        (32, 128, 64, 4, 3),
        (64, 64, 32, 4, 4),
        (64, 128, 64, 4, 3),
        (128, 64, 32, 4, 4),
        (128, 128, 32, 4, 4),
        (128, 128, 64, 8, 3),
        (128, 256, 64, 8, 3),
    )
    tiled: tuple[tuple[int, int], ...] = ((4096, 4096), (1024, 4096))
    steps: int = 100_000
    shrink: int = 1

    def untimed(self) -> Plan:
        """The same once and without timing, which compiles all that this plan needs: beyond so many tokens nothing else
        is compiled, and many of these run on one GPU."""
        return dataclasses.replace(self, rounds=1, seconds=0.0, tokens=tuple(n for n in self.tokens if n <= 4096))

    @classmethod
    def rehearsal(cls) -> Plan:
        """The same on a CPU in seconds."""
        few: dict[str, Any] = {"widths": (16,), "tokens": (1, 5), "rounds": 2, "seconds": 0.0, "tiled": ((16, 5),)}
        kinds: dict[str, Any] = {"dtype": torch.float32, "checked": (torch.float16,)}
        return cls(device="cpu", **kinds, **few, tiles=((16, 32, 32, 4, 2),), steps=3, shrink=16)


class _Record:
    """A part's JSON, written anew with every row; with the checks that it has."""

    def __init__(self, path: Path) -> None:
        self.path = path
        rows = [row for row in read_json(path)["rows"] if row["what"] == "check"] if path.is_file() else []
        self.content: dict[str, Any] = {"machine": describe_machine(), "state": "cut off", "rows": rows}
        self.write()

    def add(self, row: dict[str, Any]) -> None:
        self.content["rows"].append(row)
        self.write()

    def write(self) -> None:
        write_json(self.path, self.content)


def _measured(row: dict[str, Any], work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The row with what ``work`` found, or with how it failed."""
    try:
        found = work()
    except Exception as error:  # whatever a driver or compiler raises: the other rows are still wanted
        lines = str(error).strip().splitlines()
        found = {"error": f"{type(error).__name__}: {lines[0][:300] if lines else ''}"}
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return row | {name: _finite(value) for name, value in found.items()}


def _finite(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


# Kernels


def _arguments(kind: str, tokens: int, width: int) -> tuple:
    """An argument list of a square layer, at the settings that figures are quoted for."""
    from relinear.kernels.triton import samples

    if kind in FIXED_TILES:
        n = width.bit_length() - 1
        left, right, blocks = SPINORS[n]
        if kind == "rotor":
            return samples.rotor_arguments(tokens, n, left, right, blocks=blocks, basis="spinor")
        return samples.rotor_step_arguments(tokens, n, left, right, 3, blocks=blocks, basis="spinor")
    if kind == "cgt":
        return samples.cgt_arguments((tokens,), (tokens,), width, 16, 4)
    small = width < 512
    settings = {"transponder": (8,), "hdpl": (2, 4) if small else (8, 128), "ccl": (4, 4) if small else (64, 64)}
    build: Any = getattr(samples, f"{kind}_arguments")
    return build(tokens, width, width, *settings[kind])


def _forms(kind: str, given: list, x: Tensor, weight: Tensor, step: bool) -> dict[str, Callable[[], Any]]:
    """dense, the operator in torch's operations, and its kernel: calls that do the work once."""
    from relinear.kernels.triton import triton_kernels
    from relinear.kernels.triton.samples import SAMPLES

    sample = SAMPLES[kind]
    twin = getattr(import_module(sample.reference.__module__.replace("functional", "kernels")), sample.function)

    def torch_form(*given: Any) -> Any:
        with triton_kernels("off"):
            return twin(*given)

    forms = {"dense": (torch.nn.functional.linear, [x, weight]), "torch": (torch_form, given)}
    # what has no backward pass is torch's in training
    forms["kernel"] = (sample.fast if sample.training or not step else twin, given)

    def call(function: Callable, given: list) -> Callable[[], Any]:
        leaves = [a for a in given if isinstance(a, Tensor)]

        def run() -> Any:
            with torch.set_grad_enabled(step):
                results = function(*given)
            y = results[0] if isinstance(results, tuple) else results
            if step:
                torch.autograd.grad(y, leaves, torch.ones_like(y), allow_unused=True)
            return y.detach()

        return run

    return {name: call(*form) for name, form in forms.items()}


def _inputs(kind: str, tokens: int, width: int, plan: Plan) -> tuple[list, Tensor, Tensor]:
    from relinear.kernels.triton.samples import draw

    generator = torch.Generator(plan.device).manual_seed(0)  # a CPU would take seconds for so many numbers
    given = draw(_arguments(kind, tokens, width), plan.dtype, plan.device, generator)
    x, weight = draw(((tokens, width), (width, width)), plan.dtype, plan.device, generator)
    for tensor in (*given, x, weight):
        if isinstance(tensor, Tensor):
            tensor.requires_grad_()
    return given, x, weight


def _timing(kind: str, tokens: int, width: int, step: bool, plan: Plan) -> dict[str, Any]:
    from relinear.system.timing import interleave

    forms = _forms(kind, *_inputs(kind, tokens, width, plan), step)
    expected, actual = forms["torch"]().double(), forms["kernel"]().double()
    error = float((actual - expected).norm() / expected.norm().clamp_min(1e-30))
    del expected, actual
    times = interleave(forms, "dense", rounds=plan.rounds, min_seconds=plan.seconds)
    return {"relative_error": error} | {
        f"{name}_{part}": getattr(timing, part) for name, timing in times.items() for part in ("seconds", "ratio")
    }


def _tile_timing(kind: str, tokens: int, width: int, tile: Sequence[int], plan: Plan) -> dict[str, Any]:
    """A step (of a kernel for inference: its forward pass) with a tile against the built-in sizes, in turn."""
    from relinear.kernels.triton.samples import SAMPLES
    from relinear.kernels.triton.tiles import trying
    from relinear.system.timing import interleave

    run = _forms(kind, *_inputs(kind, tokens, width, plan), SAMPLES[kind].training)["kernel"]

    def tried() -> Any:
        with trying(*tile):
            return run()

    found = interleave({"default": run, "tried": tried}, "default", rounds=plan.rounds, min_seconds=plan.seconds)
    return {"seconds": found["tried"].seconds, "ratio": found["tried"].ratio}


def _check_rows(kind: str, plan: Plan) -> Iterator[dict[str, Any]]:
    """A kernel against its reference in double precision."""
    from relinear.kernels.first_check import TOLERANCES
    from relinear.kernels.triton.samples import SAMPLES, largest_error

    name = SAMPLES[kind].function
    samples = [(sample, given) for sample in SAMPLES.values() if sample.function == name for given in sample.given]
    for dtype, (sample, given) in itertools.product(plan.checked, samples):

        def check(sample: Any = sample, dtype: torch.dtype = dtype, given: tuple = given) -> dict[str, Any]:
            error = largest_error(sample, given, dtype, plan.device)
            return {"relative_error": error, "right": error <= TOLERANCES[dtype]}

        yield _measured({"what": "check", "kind": kind, "dtype": str(dtype), "given": str(given)}, check)


def _time_rows(kind: str, plan: Plan) -> Iterator[dict[str, Any]]:
    for tokens, width, phase in itertools.product(plan.tokens, plan.widths, ("forward", "step")):
        row = {"what": "time", "kind": kind, "dtype": str(plan.dtype), "width": width, "tokens": tokens, "phase": phase}
        yield _measured(row, lambda t=tokens, w=width, s=phase == "step": _timing(kind, t, w, s, plan))  # type: ignore[misc]


def _tile_rows(kind: str, plan: Plan) -> Iterator[dict[str, Any]]:
    if kind in FIXED_TILES:
        return
    for (width, tokens), tile in itertools.product(plan.tiled, plan.tiles):
        row = {"what": "tile", "kind": kind, "width": width, "tokens": tokens, "tile": list(tile)}
        yield _measured(row, lambda t=tokens, w=width, tile=tile: _tile_timing(kind, t, w, tile, plan))  # type: ignore[misc]


# Models


def _text(megabytes: int = 16) -> Tensor:
    """Bytes of the standard library's source text, as tokens."""
    from relinear.data.corpora import iter_texts
    from relinear.data.settings import DataSettings

    text = bytearray()
    for document in iter_texts(DataSettings(data="stdlib")):
        text += document.encode()
        if len(text) >= megabytes << 20:
            break
    return torch.frombuffer(text, dtype=torch.uint8)


def _training_rows(name: str, plan: Plan) -> Iterator[dict[str, Any]]:
    """Training of one model for as long as rows are taken: one every tenth step. The loss has auxiliary ones in it."""
    from relinear.core.config import parse_setting
    from relinear.core.operator import OperatorConfig
    from relinear.models import from_preset
    from relinear.surgery.plan import replace_

    preset, operators, length, batch, rate = MODELS[name]
    batch = max(1, batch // plan.shrink)
    length = max(8, length // plan.shrink)
    torch.manual_seed(0)
    model = from_preset(preset, **(TINY if plan.shrink > 1 else {}))
    if operators:
        mapping = {target: OperatorConfig.from_dict(parse_setting(text)) for target, text in operators.items()}
        replace_(model, mapping, init="fresh")
    model.to(plan.device).train()
    text = _text(1 if plan.shrink > 1 else 16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.1)
    warmup, started, counted = 100, 0.0, 0
    generator = torch.Generator().manual_seed(1)
    for step in range(plan.steps):
        at = torch.randint(len(text) - length, (batch, 1), generator=generator) + torch.arange(length)
        ids = text[at].long().to(plan.device)
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, (step + 1) / warmup)
        with torch.autocast(plan.device, torch.bfloat16):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 10 == 0 or step + 1 == plan.steps:
            value, now = float(loss.detach()), time.monotonic()  # reading the loss waits for the device
            row = {
                "what": "training",
                "model": name,
                "step": step + 1,
                "loss": _finite(value),
                "tokens_a_step": ids.numel(),
            }
            if counted:  # without the first row, in which kernels compile
                row["tokens_per_second"] = (step - counted) * ids.numel() / (now - started)
            else:
                started, counted = now, step or 1
            if plan.device == "cuda":
                row["peak_bytes"] = torch.cuda.max_memory_allocated()
            yield row


# The call


#: what is done of a kernel's rows, by the name of a stage
STAGES: dict[str, Callable[[str, Plan], Iterator[dict[str, Any]]]] = {
    "check": _check_rows,
    "time": _time_rows,
    "tile": _tile_rows,
}


def _run_stage(kind: str, stage: str, out: Path, plan: Plan) -> None:
    """Checks, recorded; or all that a later stage times, done once for what it compiles."""
    if stage != "check":
        for _ in STAGES[stage](kind, plan.untimed()):
            pass
        return
    record = _Record(out / f"{kind}.json")
    for row in STAGES[stage](kind, plan):
        record.add(row)


def _run_part(part: str, out: Path, seconds: float, plan: Plan) -> None:
    """Rows until they end or the time does."""
    end = time.monotonic() + seconds
    record = _Record(out / f"{part}.json")
    checked = bool(record.content["rows"])
    names = [name for name in STAGES if not (name == "check" and checked)]
    timed = itertools.chain.from_iterable(STAGES[name](part, plan) for name in names)
    rows = timed if part in KINDS else _training_rows(part, plan)
    for row in rows:
        record.add(row)
        if time.monotonic() > end:
            record.content["state"] = "out of time"
            break
    else:
        record.content["state"] = "complete"
    record.write()


def _command(*given: Any) -> list[str]:
    return [sys.executable, __file__, "child", *map(str, given)]


def _prepare(out: Path, parts: Sequence[str], seconds: float, environment: dict[str, str]) -> float:
    """Every stage of every kernel in a process of its own, as many at once as there are processors; how long it took.
    What is not compiled by then is compiled when it is timed, in a warm-up."""
    start = time.monotonic()
    rehearse = int("TRITON_INTERPRET" in environment)
    waiting = [(part, stage) for stage in STAGES for part in parts if part in KINDS]
    running: dict[tuple[str, str], subprocess.Popen] = {}
    while (waiting or running) and time.monotonic() - start < seconds:
        while waiting and len(running) < (os.cpu_count() or 1):
            part, stage = waiting.pop(0)
            command = _command("prepare", part, stage, out, rehearse)
            running[part, stage] = subprocess.Popen(command, env=environment)
        time.sleep(0.2)
        running = {name: process for name, process in running.items() if process.poll() is None}
    for process in running.values():
        process.kill()
        process.wait()
    return time.monotonic() - start


def run_parts(
    out: Path,
    *,
    minutes: float = 9.0,
    rehearse: bool = False,
    parts: Sequence[str] = PARTS,
    report: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Run parts, each in a process of its own with an equal share of the time that is left.

    Args:
        out: folder for a JSON file a part, and for ``run.json``: how each part ended.
        minutes: that everything takes at most.
        rehearse: on a CPU and in the interpreter.
        parts: of ``PARTS``.
        report: is told how each part ended.

    Raises:
        ValueError: there is no GPU and this is no rehearsal, or no time, or no such part; nothing has run then.
    """
    unknown = [part for part in parts if part not in PARTS]
    if unknown:
        raise ValueError(f"unknown part {unknown[0]!r}; choose from {', '.join(PARTS)}")
    if not minutes > 0:
        raise ValueError(f"minutes must be positive, got {minutes}")
    if not rehearse and not torch.cuda.is_available():
        raise ValueError("no NVIDIA GPU that torch can use is here; rehearse without one: make gpu REHEARSE=1")
    out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + 60 * minutes
    ended: dict[str, Any] = {}
    environment = os.environ | ({"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""} if rehearse else {})
    for part in parts:
        (out / f"{part}.json").unlink(missing_ok=True)  # of an earlier call
    prepared = round(_prepare(out, parts, 20 * minutes, environment), 1)
    report(f"checks and compilation ended after {prepared} s")
    for number, part in enumerate(parts):
        start = time.monotonic()
        share = (end - start) / (len(parts) - number)
        # a part ends by itself, between two rows, before it is ended
        command = _command("time", part, out, 0.8 * share, int(rehearse))
        try:
            code = subprocess.run(command, env=environment, timeout=share, check=False).returncode
            state = "ended" if code == 0 else f"failed with exit code {code}"
        except subprocess.TimeoutExpired:
            state = "cut off"
        ended[part] = {"state": state, "seconds": round(time.monotonic() - start, 1)}
        write_json(out / "run.json", {"rehearsal": rehearse, "minutes": minutes, "prepared": prepared, "parts": ended})
        report(f"{part}: {state} after {ended[part]['seconds']} s, {out / part}.json")
    return ended


def _child() -> None:
    what, *given, rehearse = sys.argv[2:]
    plan = Plan.rehearsal() if rehearse == "1" else Plan()
    if what == "prepare":
        kind, stage, out = given
        _run_stage(kind, stage, Path(out), plan)
    else:
        part, out, seconds = given
        imports = time.time() - psutil.Process().create_time()  # which the part's time counts
        _run_part(part, Path(out), float(seconds) - imports, plan)


def _main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--out", type=Path, default=Path("results/gpu"))
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("--parts", nargs="+", default=list(PARTS), help=", ".join(PARTS))
    given = parser.parse_args()
    try:
        ended = run_parts(given.out, minutes=given.minutes, rehearse=given.rehearse, parts=given.parts)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    return int(any(part["state"].startswith("failed") for part in ended.values()))


if __name__ == "__main__":
    sys.exit(_child() if sys.argv[1:2] == ["child"] else _main())
