"""``relinear bench``: operators against dense layers on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["command"]


def command(
    out: Annotated[Path, typer.Option(help="Directory for bench.json and bench.png.")] = Path("runs/bench"),
    operators: Annotated[
        list[str] | None, typer.Option("--operator", "-o", metavar="KIND:KEY=VALUE", help="May be repeated.")
    ] = None,
    shapes: Annotated[str | None, typer.Option(help="Such as 2048->2048,512->2048.")] = None,
    tokens: Annotated[str | None, typer.Option(help="Such as 1,64,4096.")] = None,
    dtypes: Annotated[str | None, typer.Option(help="fp32, bf16 or both.")] = None,
    modes: Annotated[str | None, typer.Option(help="eager, compiled or both.")] = None,
    passes: Annotated[str | None, typer.Option(help="forward, step or both.")] = None,
    peers: Annotated[bool, typer.Option(help="Also time named peers (PEFT's adapters, published forms).")] = True,
    untuned: Annotated[bool, typer.Option(help="Also time without the allocator's thresholds raised.")] = True,
    rounds: Annotated[int | None, typer.Option(help="How often each contender takes its turn.")] = None,
    threads: Annotated[int | None, typer.Option(help="Threads of torch; all cores by default.")] = None,
) -> None:
    """Time layers against dense nn.Linear, taking turns in one process; figures are ratios of time, below 1 is faster.

    A contender whose output is off is reported and not timed. In brackets: without the allocator's thresholds raised.

    **Example:** `relinear bench --operator hdpl:rank=128 --shapes 2048x2048 --tokens 1,4096 --dtypes fp32`
    """
    from relinear.bench.run import BenchSettings, run_bench, table
    from relinear.cli.options import set_if_given

    def split(text: str | None) -> tuple[str, ...] | None:
        return None if text is None else tuple(part.strip() for part in text.split(","))

    settings = BenchSettings.model_validate(
        set_if_given(
            {
                "operators": tuple(operators) if operators else None,
                "shapes": split(shapes),
                "tokens": split(tokens),
                "dtypes": split(dtypes),
                "modes": split(modes),
                "passes": split(passes),
                "rounds": rounds,
                "threads": threads,
            }
        )
        | {"peers": peers, "untuned": untuned}
    )
    from rich.console import Console
    from rich.table import Table

    console = Console(stderr=True)
    with console.status("measuring the machine") as status:
        result = run_bench(settings, out, report=status.update)
    header, *lines = table(result["rows"])
    shown = Table(*header, box=None, header_style="bold")
    for line in lines:
        shown.add_row(*line)
    Console(width=max(Console().width, 110)).print(shown)
    failed = {
        f"not timed: {row['contender']}, {row['in_features']} -> {row['out_features']}, {row['dtype']}: {row['error']}"
        for row in result["rows"]
        if row["error"]
    }
    print("\n".join(sorted(failed)))
    roofs = ", ".join(
        f"{r['dtype']} {r['gemm'] / 1e9:.0f} GFLOP/s, {r['copy'] / 1e9:.1f} GB/s" for r in result["roofline"]
    )
    print(f"machine: {roofs}; allocator: {result['allocator'] or 'untouched'}")
    print(f"written: {out / 'bench.json'}, {out / 'bench.png'}")
