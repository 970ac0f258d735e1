"""On a machine with an NVIDIA GPU: are the kernels right, do they beat what torch compiles, how fast are whole models.

``python tools/gpu.py`` (``make gpu``) runs for nine minutes at most and prints a verdict. All rows take longer than
that: the most important parts come first, and the most important rows in every part. Started again it goes on where it
was: rows that are there are not measured anew, as long as machine, versions and sources are the same. What is going to
be timed is compiled before, by many processes at once and no longer than a third of the time. ``--rehearse`` runs the
same on a CPU, in Triton's interpreter, at sizes that say nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import gc
import hashlib
import itertools
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import torch
from torch import Tensor, nn

from relinear.bench.run import DEFAULT_OPERATORS
from relinear.system.files import read_json, write_json
from relinear.system.machine import describe_machine

__all__ = ["PARTS", "Plan", "run_parts", "verdict"]

ROOT = Path(__file__).resolve().parents[1]
#: by the name of a part: operators as settings, and the modulator of CGT
OPERATORS = {re.sub(r"[^a-z0-9_]+", "-", setting): setting for setting in (*DEFAULT_OPERATORS, "cgt")}
#: name -> preset, operators by target, sequence length, batch size, learning rate
MODELS: dict[str, tuple[str, dict[str, str], int, int, float]] = {
    "hdpl-67m": ("hdpl-67m", {}, 512, 32, 8e-4),
    "hdpl-67m-hdpl": ("hdpl-67m", {r".*\.(q|k|v|gate|up)_proj": "hdpl:rank=128,blocks=8"}, 512, 32, 8e-4),
    "llama-60m": ("llama-60m", {}, 256, 128, 1e-3),
    "llama-60m-transponder": ("llama-60m", {"all-linear": "transponder"}, 256, 128, 1e-3),
    "llama-250m": ("llama-250m", {}, 256, 64, 1e-3),
    "llama-250m-transponder": ("llama-250m", {"all-linear": "transponder"}, 256, 64, 1e-3),
}
CHECK = "check"
#: what a compiled model's training speed is to be, relative to the plain model's
GOALS = {("hdpl-67m-hdpl", "hdpl-67m"): 0.95, ("llama-60m-transponder", "llama-60m"): 0.92}
_WITH_KERNEL = ("hdpl", "transponder", "rotor", "cgt")
#: in the order of importance: are kernels right, the goals, which kernel stays, the rest
PARTS = tuple(
    dict.fromkeys(
        [CHECK, *itertools.chain(*GOALS), *(p for p in OPERATORS if p.startswith(_WITH_KERNEL)), *OPERATORS, *MODELS]
    )
)
#: the least seconds that a part is started with: imports, what is compiled anew, and a few rows
LEAST = {part: 45.0 if part in MODELS else 20.0 for part in PARTS}
#: what a rehearsal changes of a model
TINY = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
#: a kernel stays, and a form is the faster one, where it takes a tenth less time
MARGIN = 0.9
#: how a process ends after an error that spoils the device for it: another one goes on behind that row
SPOILED = 3


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is measured.

    Args:
        device, dtype: where and in what layers run.
        checked: in what kernels are checked.
        samples: of a kernel that are checked in each; all by default.
        widths, tokens: of the layers that are timed, square ones; the most important ones first.
        rounds, seconds: of every timing, and for how long a contender repeats within a round; before come as many calls
            as ``warmup`` that are not timed.
        compilers: name -> options for torch.compile.
        steps: of a training; the first tenth is not timed.
        batches, new_tokens, decodings: of decoding; the fastest of so many counts.
        shrink: what batches and lengths of training are divided by.
    """

    device: str = "cuda"
    dtype: torch.dtype = torch.bfloat16
    checked: tuple[torch.dtype, ...] = (torch.float32, torch.float16, torch.bfloat16)
    samples: int | None = None
    widths: tuple[int, ...] = (2048, 512, 4096, 1024, 8192)
    tokens: tuple[int, ...] = (4096, 64, 65536)
    rounds: int = 5
    seconds: float = 0.01
    warmup: int = 2
    compilers: tuple[tuple[str, dict[str, Any]], ...] = (("compiled", {}), ("graphs", {"mode": "reduce-overhead"}))
    steps: int = 50
    batches: tuple[int, ...] = (1, 32)
    new_tokens: int = 64
    decodings: int = 5
    shrink: int = 1

    def untimed(self) -> Plan:
        """The same once and without timing, which compiles all that this plan needs: beyond so many tokens a GPU that
        many processes share has no memory."""
        few: dict[str, Any] = {"rounds": 1, "seconds": 0.0, "steps": 2, "decodings": 1}
        return dataclasses.replace(self, **few, tokens=tuple(n for n in self.tokens if n <= 4096))

    @classmethod
    def rehearsal(cls) -> Plan:
        """The same on a CPU in a minute or two: graphs are traced, and no code is made of them."""
        few: dict[str, Any] = {"widths": (64,), "tokens": (3,), "rounds": 1, "seconds": 0.0, "warmup": 1}
        few |= {"samples": 1, "batches": (1,), "new_tokens": 3, "decodings": 2, "steps": 2, "shrink": 32}
        traced = tuple((name, {"backend": "eager"}) for name, _ in cls.compilers)
        return cls(device="cpu", dtype=torch.float32, checked=(torch.float16,), **few, compilers=traced)


# Rows

#: what a row is of, and what finds the rest of it
Task = tuple[dict[str, Any], Callable[[], dict[str, Any]]]


@functools.cache
def _sources() -> str:
    """A digest of the library and of this file: figures of other sources are not those of these."""
    files = [*sorted((ROOT / "src").rglob("*.py")), Path(__file__)]
    return hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()[:16]


class _Record:
    """A part's JSON, written anew with every row; with the rows that earlier calls found."""

    def __init__(self, path: Path) -> None:
        self.path = path
        machine = describe_machine() | {"sources": _sources()}
        found = read_json(path) if path.is_file() else {}
        kept = found.get("rows", []) if _same(found.get("machine", {}), machine) else []
        self.content: dict[str, Any] = {"machine": machine, "state": "cut off", "rows": kept}
        self.write()

    def has(self, row: dict[str, Any]) -> bool:
        """Whether there is such a row; one that found no memory, which others may have taken, is wanted again."""
        found = (one for one in self.content["rows"] if row.items() <= one.items())
        return any("OutOfMemory" not in one.get("error", "") for one in found)

    def add(self, row: dict[str, Any]) -> None:
        """Keep a row, in place of one that failed."""
        names = row.keys() & {"what", "kind", "dtype", "given", "operator", "width", "tokens", "phase"}
        names |= row.keys() & {"model", "mode", "batch"}
        old = self.content["rows"]
        self.content["rows"] = [one for one in old if any(one.get(name) != row[name] for name in names)] + [row]
        self.write()

    def write(self) -> None:
        write_json(self.path, self.content)


def _same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(one.get(name) == other[name] for name in ("gpus", "processor", "torch", "sources"))


def _measured(row: dict[str, Any], work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The row with what ``work`` found, or with how it failed."""
    torch._dynamo.reset()
    try:
        found = work()
    except Exception as error:  # whatever a driver or compiler raises: the other rows are still wanted
        found = {"error": _said_by(error)}
    gc.collect()
    if torch.cuda.is_available() and not _spoils(found.get("error", "")):
        torch.cuda.empty_cache()
    return row | {name: _finite(value) for name, value in found.items()}


def _said_by(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300] if lines else ''}"


def _spoils(error: str) -> bool:
    """Whether nothing more can run on the device in this process."""
    return "CUDA error" in error


def _finite(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _next_step() -> None:
    """What was computed by a CUDA graph before may be overwritten from now on."""
    if torch.cuda.is_available():
        torch.compiler.cudagraph_mark_step_begin()


# Kernels


def _check_tasks(plan: Plan) -> Iterator[Task]:
    """Every kernel against its reference in double precision, a hidden step over 2,048 numbers among them."""
    from relinear.kernels.kernel_selfcheck import TOLERANCES
    from relinear.kernels.triton.samples import SAMPLES, largest_error

    for dtype, (kind, sample) in itertools.product(plan.checked, SAMPLES.items()):
        for given in sample.given[: plan.samples]:

            def check(sample: Any = sample, dtype: torch.dtype = dtype, given: tuple = given) -> dict[str, Any]:
                error = largest_error(sample, given, dtype, plan.device)
                return {"relative_error": error, "right": error <= TOLERANCES[dtype]}

            yield {"what": "check", "kind": kind, "dtype": str(dtype), "given": str(given)}, check


class _Modulator(nn.Module):
    """CGT's T(x; y) with the templates' shares of every token as a constant."""

    def __init__(self, width: int, tokens: int) -> None:
        super().__init__()
        from relinear.kernels.triton.samples import cgt_arguments, draw

        _, shares, *factors = draw(cgt_arguments((tokens,), (tokens,), width, 16, 4), torch.float32)
        self.register_buffer("shares", shares)
        self.factors = nn.ParameterList(factors)

    def forward(self, x: Tensor) -> Tensor:
        from relinear.kernels.cgt import modulate

        return modulate(x, self.shares, *self.factors)


def _layer(setting: str, tokens: int, width: int) -> tuple[nn.Module, int | None]:
    """The operator as a square layer, and the width of the context that it reads."""
    from relinear.contract.operator import OperatorConfig

    if setting == "cgt":
        return _Modulator(width, tokens), None
    config: Any = OperatorConfig.read(setting)
    return config.build(width, width, bias=False), config.context_dim if config.conditioned else None


@contextlib.contextmanager
def _launches() -> Iterator[list[str]]:
    """The names of the kernels that are launched by eager calls within the block."""
    from relinear.kernels.triton.samples import SAMPLES

    launched: list[str] = []
    with contextlib.ExitStack() as stack:
        for module, name in {(sample.module, sample.function) for sample in SAMPLES.values()}:
            kernel = getattr(module, name)

            def told(*given: Any, kernel: Callable = kernel, name: str = name) -> Any:
                launched.append(name)
                return kernel(*given)

            stack.enter_context(mock.patch.object(module, name, told))
        yield launched


def _on_device(plan: Plan) -> contextlib.AbstractContextManager:
    """Kernels run on the plan's device: on a CPU whatever they are given."""
    from relinear.kernels import triton

    if plan.device != "cpu":
        return contextlib.nullcontext()
    return mock.patch.multiple(triton, DEVICE="cpu", _inputs_unsupported=lambda *given: "")


def _timing(setting: str, tokens: int, width: int, step: bool, plan: Plan) -> dict[str, Any]:
    """Of one layer in every form: seconds, and ratios to a dense layer in eager mode."""
    from relinear.activations.shared_context import context
    from relinear.kernels import triton
    from relinear.system.timing import interleave

    torch.manual_seed(0)
    layer, read = _layer(setting, tokens, width)
    dense = nn.Linear(width, width, bias=False)
    modules = {"dense": dense.to(plan.device, plan.dtype), "torch": layer.to(plan.device, plan.dtype)}
    x = torch.randn(tokens, width, device=plan.device, dtype=plan.dtype, requires_grad=step)
    upstream = torch.randn_like(x, requires_grad=False)
    values = None if read is None else torch.randn(tokens, read, device=plan.device, dtype=plan.dtype)

    def call(module: nn.Module, asked: str, options: dict[str, Any] | None) -> Callable[[], Tensor]:
        leaves = [x, *module.parameters()]
        run = module if options is None else torch.compile(module, dynamic=False, **options)

        def once() -> Tensor:
            _next_step()
            given = contextlib.nullcontext() if values is None else context(values)
            with given, torch.set_grad_enabled(step), mock.patch.object(triton, "MODE", triton.MODES[asked]):
                y = run(x)
            if step:
                torch.autograd.grad(y, leaves, upstream, allow_unused=True)
            return y.detach()

        return once

    for module in modules.values():
        module.train(step)
    calls = {name: call(module, "off", None) for name, module in modules.items()}
    compilers = dict(plan.compilers)
    calls["dense_graphs"] = call(modules["dense"], "off", compilers["graphs"])
    calls |= {name: call(layer, "off", options) for name, options in compilers.items()}
    calls["triton"] = call(layer, "force", None)
    with _on_device(plan):
        with _launches() as launched:
            torch.manual_seed(1)
            actual = calls["triton"]().double()
        torch.manual_seed(1)
        expected = calls["torch"]().double()
        found: dict[str, Any] = {"kernels": sorted(set(launched))}
        if launched:
            found["relative_error"] = float((actual - expected).norm() / expected.norm().clamp_min(1e-30))
            calls["triton_graphs"] = call(layer, "force", compilers["graphs"])
        else:
            del calls["triton"]
        del actual, expected
        failed: dict[str, str] = {}
        for name in calls.keys() - {"dense"}:
            try:
                calls[name]()
            except Exception as error:  # of one compiler: the others' times are still wanted
                if _spoils(failed_with := _said_by(error)):
                    raise
                failed[name] = failed_with
        calls = {name: once for name, once in calls.items() if name not in failed}
        times = interleave(calls, "dense", rounds=plan.rounds, min_seconds=plan.seconds, warmup=plan.warmup)
    found |= {"failed": failed} if failed else {}
    found["flops"] = layer.flops_per_token() if hasattr(layer, "flops_per_token") else 8 * 64 * width
    return found | {
        f"{name}_{part}": getattr(timing, part) for name, timing in times.items() for part in ("seconds", "ratio")
    }


def _time_tasks(setting: str, plan: Plan) -> Iterator[Task]:
    for tokens, width, phase in itertools.product(plan.tokens, plan.widths, ("forward", "step")):
        row = {"what": "time", "operator": setting, "dtype": str(plan.dtype)}
        row |= {"width": width, "tokens": tokens, "phase": phase}
        yield row, functools.partial(_timing, setting, tokens, width, phase == "step", plan)


# Models


@functools.cache
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


def _model(name: str, plan: Plan) -> Any:
    from relinear.models import from_preset
    from relinear.surgery.plan import replace_

    preset, operators, *_ = MODELS[name]
    torch.manual_seed(0)
    model = from_preset(preset, **(TINY if plan.shrink > 1 else {}))
    if operators:
        replace_(model, operators, init="fresh")
    return model.to(plan.device)


def _training(name: str, mode: str, plan: Plan) -> dict[str, Any]:
    """Steps as ``relinear train`` does them, auxiliary losses included, of which the first tenth is not timed."""
    from relinear.training.fitting import compiled

    _, _, length, batch, rate = MODELS[name]
    batch, length = max(1, batch // plan.shrink), max(8, length // plan.shrink)
    model, text = _model(name, plan).train(), _text(1 if plan.shrink > 1 else 16)
    options = dict(plan.compilers).get(mode, {})
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.1)
    generator = torch.Generator().manual_seed(1)
    losses, started, timed = [], 0.0, plan.steps - max(1, plan.steps // 10)
    if plan.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    with compiled(model, mode != "eager", **options):
        for step in range(plan.steps):
            if step == plan.steps - timed:
                losses, started = [float(losses[-1])], time.monotonic()  # reading a loss waits for the device
            at = torch.randint(len(text) - length, (batch, 1), generator=generator) + torch.arange(length)
            ids = text[at].long().to(plan.device)
            _next_step()
            with torch.autocast(plan.device, torch.bfloat16):
                loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            losses.append(loss.detach().clone())
    found = {"loss": float(losses[-1]), "steps": plan.steps, "tokens_a_step": batch * length}
    found["tokens_per_second"] = timed * batch * length / (time.monotonic() - started)
    if plan.device == "cuda":
        found["peak_bytes"] = torch.cuda.max_memory_allocated()
    return found


@functools.cache
def _bandwidth(device: str) -> float:
    """Bytes per second that a copy reads and writes."""
    size = 1 << (30 if device == "cuda" else 20)
    source, target = (torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2))
    best = math.inf
    for _ in range(10):
        start = time.perf_counter()
        target.copy_(source)
        if device == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return 2 * size / best


def _decoding(name: str, mode: str, batch: int, plan: Plan) -> dict[str, Any]:
    """Greedy, from a prompt of 8 tokens on: tokens per second, and time to that of reading all weights once a token."""
    from transformers import CompileConfig

    import relinear

    model = relinear.for_inference_(_model(name, plan).to(plan.dtype).eval())
    model.generation_config.eos_token_id = None
    ids = torch.randint(200, (batch, 8), generator=torch.Generator().manual_seed(0)).to(plan.device)
    wanted: dict[str, Any] = {"max_new_tokens": plan.new_tokens, "min_new_tokens": plan.new_tokens, "do_sample": False}
    if mode != "eager":
        options = {"mode": None} | dict(plan.compilers)[mode]
        wanted |= {"cache_implementation": "static", "compile_config": CompileConfig(fullgraph=True, **options)}
        wanted["compile_config"]._compile_all_devices = True
    best = math.inf
    for _ in range(plan.decodings):  # the first ones compile, and record graphs
        start = time.perf_counter()
        model.generate(ids, pad_token_id=0, **wanted).cpu()
        best = min(best, time.perf_counter() - start)
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    embedding = model.get_input_embeddings().weight
    if embedding is not model.get_output_embeddings().weight:  # of which a token reads a row
        weights -= embedding.numel() * embedding.element_size()
    seconds = best / plan.new_tokens
    return {"tokens_per_second": batch / seconds, "to_floor": seconds / (weights / _bandwidth(plan.device))}


def _model_tasks(name: str, plan: Plan) -> Iterator[Task]:
    modes = [compiler for compiler, _ in reversed(plan.compilers)] + ["eager"]
    for mode in modes:
        yield {"what": "training", "model": name, "mode": mode}, functools.partial(_training, name, mode, plan)
    for mode, batch in itertools.product((modes[0], "eager"), plan.batches):
        row = {"what": "decoding", "model": name, "mode": mode, "batch": batch}
        yield row, functools.partial(_decoding, name, mode, batch, plan)


# The call


def _tasks(part: str, plan: Plan) -> Iterator[Task]:
    if part == CHECK:
        return _check_tasks(plan)
    return _time_tasks(OPERATORS[part], plan) if part in OPERATORS else _model_tasks(part, plan)


def _prepare_part(part: str, out: Path, number: int, count: int, plan: Plan) -> None:
    """The ``number``-th of ``count`` shares of the rows that are lacking, each done once for what it compiles; checks
    are recorded.
    """
    path = out / f"{part}.json"
    if part == CHECK:
        _run_part(part, out, math.inf, plan)
        return
    record = _Record(path) if path.is_file() else None
    compiled = [task for task in _tasks(part, plan.untimed()) if task[0].get("mode") != "eager"]
    lacking = [task for task in compiled if record is None or not record.has(task[0])]
    share = math.ceil(len(lacking) / count)  # in one piece: what is timed first is compiled first
    for row, work in lacking[number * share :][:share]:
        _measured(row, work)


def _run_part(part: str, out: Path, seconds: float, plan: Plan) -> None:
    """The rows that are lacking, until they end or the time does."""
    end = time.monotonic() + seconds
    record = _Record(out / f"{part}.json")
    for row, work in _tasks(part, plan):
        if record.has(row):
            continue
        if time.monotonic() > end:
            record.content["state"] = "out of time"
            break
        record.add(found := _measured(row, work))
        if _spoils(found.get("error", "")):
            sys.exit(SPOILED)
    else:
        record.content["state"] = "complete"
    record.write()


def _state(part: str, out: Path) -> str:
    path = out / f"{part}.json"
    found = read_json(path) if path.is_file() else {}
    same = found and _same(found["machine"], describe_machine() | {"sources": _sources()})
    return found["state"] if same else "not run"


def _command(*given: Any) -> list[str]:
    return [sys.executable, __file__, "child", *map(str, given)]


def _prepare(out: Path, parts: Sequence[str], seconds: float, environment: dict[str, str], rehearse: int = 0) -> float:
    """Checks and compilation in as many processes at once as there are processors; how long it took. What is not
    compiled by then is compiled when it is timed, in a warm-up. The models of a goal take turns: memory is for so many.
    """
    start, slices = time.monotonic(), 4
    waiting = [(CHECK, 0, 1)] * (CHECK in parts)
    pairs = [",".join(model for model in pair if model in parts) for pair in GOALS]
    waiting += [(pair, 0, 1) for pair in pairs if pair]
    waiting += [(part, n, slices) for n in range(slices) for part in parts if part in OPERATORS]
    running: list[subprocess.Popen] = []
    while (waiting or running) and time.monotonic() - start < seconds:
        while waiting and len(running) < (os.cpu_count() or 1):
            part, number, count = waiting.pop(0)
            command = _command("prepare", part, out, number, count, rehearse)
            running.append(subprocess.Popen(command, env=environment))
        time.sleep(0.2)
        running = [process for process in running if process.poll() is None]
    for process in running:
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
    """Run the parts that are not complete, each in a process of its own with an equal share of the time that is left.

    A part is given ``LEAST`` at least: where that is too much for all, the last ones wait for the next call.

    A rehearsal, whose parts take less time than the start of a process, is one process.

    Args:
        out: folder for a JSON file a part, and for ``run.json``: how each part ended.
        minutes: that everything takes at most.
        rehearse: on a CPU and in the interpreter.
        parts: of ``PARTS``.
        report: is told how each part ended, and what follows from all.

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
    todo = [part for part in parts if _state(part, out) != "complete"]
    prepared = 0.0 if rehearse else round(_prepare(out, todo, 20 * minutes, environment), 1)
    report(f"checks and compilation ended after {prepared} s")
    ended |= {part: {"state": "complete", "seconds": prepared} for part in todo if _state(part, out) == "complete"}
    todo = [part for part in todo if part not in ended]
    groups = [todo] * bool(todo) if rehearse else [[part] for part in todo]
    for number, group in enumerate(groups):
        start = time.monotonic()
        left, least = end - start, 0.0 if rehearse else LEAST[group[0]]
        if left < least:
            continue
        share = min(left, max(left / (len(groups) - number), least))
        # a part ends by itself, between two rows, before it is ended
        command = _command("time", ",".join(group), out, 0.8 * share, int(rehearse))
        failed = ""
        try:
            code = subprocess.run(command, env=environment, timeout=share, check=False).returncode
            failed = f"failed with exit code {code}" if code else ""
            if code == SPOILED:
                groups.append(group)
        except subprocess.TimeoutExpired:
            pass  # the state of a part that has not ended by itself is "cut off"
        seconds = round(time.monotonic() - start, 1)
        for part in group:
            state = _state(part, out)
            ended[part] = {"state": state if state == "complete" else failed or state, "seconds": seconds}
            report(f"{part}: {ended[part]['state']} after {seconds} s, {out / part}.json")
        write_json(out / "run.json", {"rehearsal": rehearse, "minutes": minutes, "prepared": prepared, "parts": ended})
    for line in verdict(out):
        report(line)
    left = [part for part in parts if _state(part, out) != "complete"]
    report(f"not complete: {', '.join(left)}; the same command goes on" if left else "every part is complete")
    return ended


# What follows


def _rows(part: str, out: Path, what: str = "", failed: bool = False) -> list[dict[str, Any]]:
    path = out / f"{part}.json"
    found = read_json(path)["rows"] if path.is_file() else []
    return [row for row in found if what in ("", row["what"]) and ("error" in row) == failed]


def _fastest(row: dict[str, Any], *names: str) -> float:
    return min(row.get(f"{name}_seconds", math.inf) for name in names)


def _kernel_lines(out: Path) -> Iterator[str]:
    """Where each kernel, eager or in a CUDA graph, takes a tenth less time than the best that torch compiles."""
    for part, setting in OPERATORS.items():
        for phase in ("forward", "step"):
            found = [row for row in _rows(part, out, "time") if row["phase"] == phase]
            timed = [row for row in found if "triton_seconds" in row]
            if not timed:
                why = "no kernel" if found else "not run"
                yield f"{setting}, {phase}: {why}"
                continue
            won = [
                f"{row['tokens']} x {row['width']}"
                for row in timed
                if _fastest(row, "triton", "triton_graphs") < MARGIN * _fastest(row, "compiled", "graphs", "torch")
            ]
            said = f"stays for {', '.join(won)}" if won else "goes"
            kernels = ", ".join(timed[0]["kernels"])
            yield f"{setting}, {phase}: the kernel of {kernels} {said} ({len(won)} of {len(timed)} rows)"


def _layer_lines(out: Path) -> Iterator[str]:
    """Layers with fewer than half of dense's FLOPs that are not faster than it where they are large."""
    rows = [row for part in OPERATORS for row in _rows(part, out, "time")]
    large = [row for row in rows if row["tokens"] >= 4096 and row["width"] >= 2048 and row["flops"] < row["width"] ** 2]
    slow = [
        f"{row['operator']} {row['tokens']} x {row['width']} {row['phase']}"
        for row in large
        if min(value for name, value in row.items() if name.endswith("_seconds") and not name.startswith("dense"))
        >= _fastest(row, "dense", "dense_graphs")
    ]
    said = "not run" if not large else f"missed by {', '.join(slow)}" if slow else f"met by {len(large)} rows"
    yield f"faster than dense with half of its FLOPs: {said}"


def _best(name: str, out: Path, what: str = "training", **fields: Any) -> dict[str, Any] | None:
    """The fastest compiled row of a model."""
    found = [row for row in _rows(name, out, what) if row["mode"] != "eager" and fields.items() <= row.items()]
    return max(found, key=lambda row: row["tokens_per_second"], default=None)


def _said(value: float | None, goal: float, most: bool = False) -> str:
    if value is None:
        return f"not run (goal {goal})"
    return f"{value:.2f}, {'met' if (value <= goal if most else value >= goal) else 'missed'} (goal {goal})"


def verdict(out: Path) -> list[str]:
    """Return what the records in ``out`` say, a line a finding: which kernels stay, and which goals are met."""
    lines = [*_kernel_lines(out), *_layer_lines(out)]
    checks = _rows(CHECK, out, "check")
    wrong = sorted({f"{row['kind']} in {row['dtype']}" for row in checks if not row["right"]})
    failed = [row for part in PARTS for row in _rows(part, out, failed=True)]
    if failed:
        last = failed[-1]
        lines.insert(
            0, f"{len(failed)} rows failed, the last of {last.get('operator', last.get('model'))}: {last['error']}"
        )
    lines.insert(0, f"kernels that are wrong: {', '.join(wrong) or ('none' if checks else 'not run')}")
    for (ours, plain), goal in GOALS.items():
        one, other = _best(ours, out), _best(plain, out)
        speed = one["tokens_per_second"] / other["tokens_per_second"] if one and other else None
        lines.append(f"{ours}, training, compiled, to {plain}: {_said(speed, goal)}")
        peak = one["peak_bytes"] / other["peak_bytes"] if one and other and "peak_bytes" in one else None
        lines.append(f"{ours}, peak memory to {plain}: {_said(peak, 1.0, most=True)}")
    for name in MODELS:
        row = _best(name, out, "decoding", batch=1)
        lines.append(f"{name}, decoding to its bytes: {_said(row and row['to_floor'], 1.05, most=True)}")
    return lines


def _child() -> None:
    what, parts, out, *numbers, rehearse = sys.argv[2:]
    plan = Plan.rehearsal() if rehearse == "1" else Plan()
    if what == "prepare":
        for part in parts.split(","):
            _prepare_part(part, Path(out), int(numbers[0]), int(numbers[1]), plan)
        return
    started = psutil.Process().create_time()  # imports are part of the time
    for part in parts.split(","):
        _run_part(part, Path(out), started + float(numbers[0]) - time.time(), plan)


def _main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "gpu" / "compiled")
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
