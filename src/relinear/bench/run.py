"""Run the benchmark of single layers, each repeat in its own process; write bench.json and its plot."""

import itertools
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import torch
from pydantic import AfterValidator, Field

from relinear.bench.operators import Mode, Pass, TimedCase, bench_case
from relinear.bench.report import draw_layers
from relinear.contract.config import worker_environment
from relinear.contract.operator import OperatorConfig
from relinear.kernels.native.build import compiler, library
from relinear.settings.base import PositiveInt, Settings, Threads
from relinear.system.allocator import tune_allocator
from relinear.system.files import write_json
from relinear.system.grouped import grouped
from relinear.system.progress import Progress, ProgressCallback, no_progress
from relinear.system.run_folder import RunFolder

#: every operator at the setting of its published figures; rotors as a plain sum and with their defaults
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


def parsed_by(parse: Callable[[str], Any]) -> AfterValidator:
    """Return a validator that checks that ``parse`` accepts a text, and keeps the text."""

    def check(text: str) -> str:
        parse(text)
        return text

    return AfterValidator(check)


Dtype = Literal["fp32", "bf16"]


class BenchSettings(Settings):
    """Settings of the benchmark of single layers.

    Attributes:
        operators: settings as in ``hdpl:rank=128,blocks=8``.
        shapes: "IN->OUT" or "INxOUT".
        tokens: of an input, such as 1,64,4096.
        dtypes: of the computation, "fp32" and "bf16".
        modes: of "eager" and "compiled".
        passes: of "forward" and "step" (with backward).
        rounds: how often each contender is timed.
        repeats: runs of the whole benchmark, each in its own process, so that rows say how much they vary.
        threads: of torch; all cores by default.
    """

    operators: tuple[Annotated[str, parsed_by(OperatorConfig.read)], ...] = DEFAULT_OPERATORS
    shapes: tuple[Annotated[str, parsed_by(_shape)], ...] = ("2048->2048", "512->2048", "512->1376")
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


def _measure(settings: BenchSettings) -> list[dict[str, Any]]:
    """Measure all of ``settings`` in this process; return the rows."""
    if settings.threads:
        torch.set_num_threads(settings.threads)
    # At the default limit of 8, a module compiled for a ninth shape runs uncompiled, and only the log says so.
    torch._dynamo.config.recompile_limit = 64
    # Calls with few tokens use native kernels only if they are built, and build none. Without this build the figures
    # would depend on the order of the cases.
    if compiler():
        library()
    shapes = map(_shape, settings.shapes)
    dtypes = [DTYPES[name] for name in settings.dtypes]
    combinations = itertools.product(shapes, dtypes, settings.modes, settings.passes, settings.tokens)
    cases = [TimedCase(*shape, tokens, dtype, mode, phase) for shape, dtype, mode, phase, tokens in combinations]
    operators = settings.parsed_operators()
    rows: list[dict[str, Any]] = []
    for number, case in enumerate(cases):
        print(f"{number}/{len(cases)}  {case}", flush=True)  # _measure_in_process reads it
        rows += bench_case(case, operators, rounds=settings.rounds)
    return rows


def _measure_in_process(settings: BenchSettings, on_progress: ProgressCallback) -> dict[str, Any]:
    """Run ``_measure`` in its own process, as the allocator's thresholds cannot be reset once they are set."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        command = [sys.executable, "-m", "relinear.bench.run", settings.model_dump_json(), str(out)]
        environment = {**os.environ, **worker_environment()}
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
        out_dir: where to write. A finished benchmark with the same settings there is renamed.
        overwrite: also rename a benchmark with other settings, and other files under the same names.
        on_progress: called before every case.

    Returns:
        the content of ``bench.json``: settings, machine, allocator, and a row for every contender in every case, with
        ``ratio`` (the median of its time over dense's in the same round; of several runs the median, with
        ``ratio_minimum`` and ``ratio_maximum``).

    Raises:
        ValueError: if ``out_dir`` has other files, or a benchmark with other settings; nothing has run then.
        OSError: if ``out_dir`` cannot be written to.
    """
    values = settings.model_dump(mode="json")
    folder = RunFolder(
        out_dir,
        task="bench",
        record="bench.json",
        names=("bench.png", "bench.svg"),
        earlier_records={"bench.json": ("settings", "machine", "roofline", "rows")},
        settings_of=lambda record: BenchSettings.upgraded(record.get("settings")),
    )
    record = folder.check(values, overwrite=overwrite)
    with folder.open(values, overwrite=overwrite or "rows" in (record or {})):
        runs = [_measure_in_process(settings, on_progress) for _ in range(settings.repeats)]
        result = folder.write(**runs[0] | {"rows": merge_runs([run["rows"] for run in runs])})
        for name in folder.names[1:]:
            folder.take(name)
        draw_layers(result, folder.path / "bench")
    return result


def merge_runs(runs: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Merge the rows of several runs of the same benchmark into one row per contender and case.

    It is the row of the run with the median ratio, plus ``ratio_minimum`` and ``ratio_maximum`` over the runs.
    """
    keys = ["contender", *(field.name for field in fields(TimedCase))]
    merged = []
    for rows in grouped((tuple(row[key] for key in keys), row) for run in runs for row in run).values():
        ratios: list[Any] = [row.get("ratio") for row in rows]
        if None in ratios:  # it could not be timed
            merged.append(rows[ratios.index(None)])
            continue
        median = rows[ratios.index(statistics.median_low(ratios))]
        merged.append(median | {"ratio_minimum": min(ratios), "ratio_maximum": max(ratios)})
    return merged


if __name__ == "__main__":
    _settings, _out = sys.argv[1:]
    _allocator = tune_allocator()
    write_json(_out, {"rows": _measure(BenchSettings.model_validate_json(_settings)), "allocator": _allocator})
