"""Run a benchmark, each repeat in its own process, and write JSON, a table and a plot."""

import itertools
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import torch
from pydantic import AfterValidator, Field

from relinear.bench.operators import Case, Mode, Pass, bench_case
from relinear.contract.config import worker_environment
from relinear.contract.operator import OperatorConfig
from relinear.contract.settings import PositiveInt, Settings, Threads
from relinear.kernels.native.build import compiler, library
from relinear.system.allocator import tune_allocator
from relinear.system.files import write_json
from relinear.system.grouped import grouped
from relinear.system.progress import Progress, ProgressCallback, no_progress
from relinear.system.run_folder import RunFolder

#: every operator at the setting that its figures are quoted for; rotors as a plain sum and by default
DEFAULT_OPERATORS = (
    "low_rank:rank=64",
    "pivoted_low_rank:rank=64",
    "block_hadamard:blocks=8",
    "monarch",
    "hdpl:rank=128,blocks=8",
    "ccl:rank=64,context_dim=64",
    "transponder:rank=8",
    "output_gate",
    "rotor:width=1,depth=0",
    "rotor",
    "quantized",
)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def _shape(text: str) -> tuple[int, int]:
    parts = text.replace("->", "x").split("x")
    if len(parts) != 2 or not all(part.strip().isdigit() and int(part) > 0 for part in parts):
        raise ValueError(f"shape {text!r}: write it as IN->OUT, such as 512->2048")
    return int(parts[0]), int(parts[1])


def read_by(read: Callable[[str], Any]) -> AfterValidator:
    """Check that ``read`` accepts a text, and keep the text."""
    return AfterValidator(lambda text: [text, read(text)][0])


Dtype = Literal["fp32", "bf16"]


class BenchSettings(Settings):
    """Settings of the benchmark of single layers.

    Attributes:
        operators: settings as in ``hdpl:rank=128,blocks=8``.
        shapes: "IN->OUT" or "INxOUT".
        tokens: of an input, such as 1,64,4096.
        dtypes: of the computation, "fp32" and "bf16".
        modes: of "eager" and "compiled".
        passes: of "forward" and "step".
        rounds: how often each contender takes its turn.
        repeats: runs of the whole bench, each in a process of its own, so that rows say how much they vary.
        threads: of torch; all cores by default.
    """

    operators: tuple[Annotated[str, read_by(OperatorConfig.read)], ...] = DEFAULT_OPERATORS
    shapes: tuple[Annotated[str, read_by(_shape)], ...] = ("2048->2048", "512->2048", "512->1376")
    tokens: tuple[PositiveInt, ...] = (1, 64, 4096)
    dtypes: tuple[Dtype, ...] = ("fp32", "bf16")
    modes: tuple[Mode, ...] = get_args(Mode)
    passes: tuple[Pass, ...] = get_args(Pass)
    rounds: int = Field(default=11, ge=3)
    repeats: int = Field(default=1, ge=1)
    threads: Threads | None = None

    def parsed_operators(self) -> list[tuple[str, OperatorConfig]]:
        """Return the operators as (name, config)."""
        return [(text, OperatorConfig.read(text)) for text in self.operators]


def _measure(settings: BenchSettings) -> dict[str, Any]:
    """Measure all of ``settings`` in this process."""
    if settings.threads:
        torch.set_num_threads(settings.threads)
    # At the default of 8 a module compiled for a ninth shape runs uncompiled, and says so only in the log.
    torch._dynamo.config.recompile_limit = 64
    # A few tokens take kernels that are there and do not ask for a build, so that figures would depend on the order.
    if compiler():
        library()
    dtypes = [DTYPES[name] for name in settings.dtypes]
    operators = settings.parsed_operators()
    rows: list[dict[str, Any]] = []
    every = itertools.product(map(_shape, settings.shapes), dtypes, settings.modes, settings.passes, settings.tokens)
    todo = [Case(*shape, tokens, dtype, mode, phase) for shape, dtype, mode, phase, tokens in every]
    for number, case in enumerate(todo):
        print(f"{number}/{len(todo)}  {case}", flush=True)  # read by _child
        rows += bench_case(case, operators, rounds=settings.rounds)
    return {"rows": rows}


def _child(settings: BenchSettings, on_progress: ProgressCallback) -> dict[str, Any]:
    """Run ``_measure`` in a process of its own: thresholds of the allocator cannot be taken back once they are set."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        command = [sys.executable, "-m", "relinear.bench.run", settings.model_dump_json(), str(out)]
        # the profiler behind peak memory tells of every start and stop unless it is asked not to
        environment = {"KINETO_LOG_LEVEL": "99", **os.environ, **worker_environment()}
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if case := re.fullmatch(r"(\d+)/(\d+)  (.*)\n", line):
                    on_progress(Progress("timing layers", int(case[1]), int(case[2]), detail=case[3]))
        if process.returncode:
            raise RuntimeError(f"the benchmark's process ended with exit code {process.returncode}; see above")
        return json.loads(out.read_text(encoding="utf-8"))


def run_bench(
    settings: BenchSettings,
    out_dir: str | Path,
    *,
    overwrite: bool = False,
    on_progress: ProgressCallback = no_progress,
) -> dict[str, Any]:
    """Measure, and write ``bench.json`` and ``bench.png`` (and ``.svg``) into ``out_dir``.

    Args:
        settings: what to measure.
        out_dir: where to write. A benchmark with the same settings that has ended there is renamed.
        overwrite: rename one with other settings, too, and what else is in the way.
        on_progress: called before every case.

    Returns:
        what ``bench.json`` holds: settings, machine, allocator, and a row for every contender in every case,
        with ``ratio`` (time to dense in the same round, median; of several runs the median, with ``ratio_minimum`` and
        ``ratio_maximum``).

    Raises:
        ValueError: if ``out_dir`` holds something else, or a benchmark with other settings; nothing has run then.
        OSError: if ``out_dir`` cannot be written to.
    """
    stated = settings.model_dump(mode="json")
    folder = RunFolder(
        out_dir,
        task="bench",
        record="bench.json",
        names=("bench.png", "bench.svg"),
        earlier_records={"bench.json": ("settings", "machine", "roofline", "rows")},
        settings_of=lambda record: BenchSettings.upgraded(record.get("settings")),
    )
    record = folder.check(stated, overwrite=overwrite)
    with folder.open(stated, overwrite=overwrite or "rows" in (record or {})):
        return _run_in(folder, settings, on_progress)


def _run_in(folder: RunFolder, settings: BenchSettings, on_progress: ProgressCallback) -> dict[str, Any]:
    runs = [_child(settings, on_progress) for _ in range(settings.repeats)]
    result = folder.write(**runs[0] | {"rows": merge_runs([run["rows"] for run in runs])})
    from relinear.bench.report import draw_layers

    for name in folder.names[1:]:
        folder.take(name)
    draw_layers(result["rows"], folder.path / "bench")
    return result


def _about(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return (row["contender"], *(row[field.name] for field in fields(Case)))


def merge_runs(runs: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return one row a contender and case from the rows of several runs of the same benchmark.

    That of the run with the median ratio, with ``ratio_minimum`` and ``ratio_maximum`` over the runs beside ``ratio``.
    """
    merged = []
    for rows in grouped((_about(row), row) for run in runs for row in run).values():
        timed = [row for row in rows if row.get("ratio") is not None]
        if len(timed) < len(rows):
            merged.append(next(row for row in rows if row.get("ratio") is None))
            continue
        ratios = [row["ratio"] for row in timed]
        middle = next(row for row in timed if row["ratio"] == statistics.median_low(ratios))
        merged.append(middle | {"ratio_minimum": min(ratios), "ratio_maximum": max(ratios)})
    return merged


if __name__ == "__main__":
    _settings, _out = sys.argv[1:]
    _allocator = tune_allocator()
    write_json(_out, _measure(BenchSettings.model_validate_json(_settings)) | {"allocator": _allocator})
