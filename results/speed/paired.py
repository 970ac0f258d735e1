"""The default cases of ``relinear bench`` in two versions, in turns: time after to time before, and both to dense.

    python results/speed/paired.py BEFORE/src AFTER/src [--threads 1] [--rounds 5] [--tokens 1,64,4096]

Two processes, one a version, take the same case one after the other, round after round. On one thread processor time
is taken, which other work on the machine hardly changes; on several it is time on the clock.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time


def serve(threads: int) -> None:
    """Answer cases with seconds per call, one line of JSON each."""
    import torch

    import relinear
    from relinear.bench import operators as bench
    from relinear.contract.operator import OperatorConfig
    from relinear.kernels.native import build

    torch.set_num_threads(threads)
    relinear.system.allocator.tune_allocator()
    build.library()
    clock, run, values = time.process_time if threads == 1 else time.perf_counter, None, None
    for line in sys.stdin:
        asked = json.loads(line)
        if "case" in asked:
            name, *sizes, dtype, phase = asked["case"]
            case = (getattr(bench, "TimedCase", None) or bench.Case)(*sizes, getattr(torch, dtype), "eager", phase)
            torch.manual_seed(0)
            build_layer = torch.nn.Linear if name == "dense" else OperatorConfig.read(name).build
            module = build_layer(*sizes[:2], bias=False).to(case.dtype)
            values, run = bench._context_values([module], case.tokens), bench._call(module, case)
            asked = {"calls": 2}
        with bench._with_context(values, case.dtype):
            start = clock()
            for _ in range(asked["calls"]):
                run()
            print(json.dumps((clock() - start) / asked["calls"]), flush=True)


def main() -> None:
    """Print a line a case, and what became slower or faster."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("before")
    parser.add_argument("after")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.04)
    parser.add_argument("--operators", default="")
    parser.add_argument("--shapes", default="2048x2048,512x2048,512x1376")
    parser.add_argument("--tokens", default="1,64,4096")
    parser.add_argument("--dtypes", default="float32,bfloat16")
    args = parser.parse_args()
    from relinear.bench.run import DEFAULT_OPERATORS

    workers = []
    for source in (args.before, args.after):
        env = os.environ | {"PYTHONPATH": source, "OMP_NUM_THREADS": str(args.threads)}
        command = [sys.executable, __file__, "--serve", str(args.threads)]
        workers.append(subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))

    def ask(worker: subprocess.Popen, what: dict) -> float:
        print(json.dumps(what), file=worker.stdin, flush=True)
        return json.loads(worker.stdout.readline())

    ratios, dense = [], [0.0, 0.0]
    for shape in args.shapes.split(","):
        for dtype in args.dtypes.split(","):
            for phase in ("forward", "step"):
                for tokens in map(int, args.tokens.split(",")):
                    for name in ("dense", *(args.operators.split("+") if args.operators else DEFAULT_OPERATORS)):
                        case = [name, *map(int, shape.split("x")), tokens, dtype, phase]
                        for worker in workers:
                            ask(worker, {"case": case})
                        calls = max(1, round(args.seconds / max(ask(worker, {"calls": 1}) for worker in workers)))
                        times = [[ask(worker, {"calls": calls}) for worker in workers] for _ in range(args.rounds)]
                        ratio = statistics.median(after / before for before, after in times)
                        ratios.append((ratio, tokens, case))
                        best = [min(side) * 1e6 for side in zip(*times, strict=True)]
                        dense = best if name == "dense" else dense
                        print(f"{shape:>9} {dtype:8} {phase:7} {tokens:5} tokens  {name:28} "
                              f"{best[0]:10.0f} -> {best[1]:10.0f} us  {ratio:.2f}   of dense "
                              f"{best[0] / dense[0]:.2f} -> {best[1] / dense[1]:.2f}", flush=True)  # fmt: skip
    for tokens in sorted({tokens for _, tokens, _ in ratios}):
        of_tokens = [ratio for ratio, n, _ in ratios if n == tokens]
        print(f"# {tokens} tokens: median {statistics.median(of_tokens):.2f}, "
              f"slower by more than 5 % {sum(r > 1.05 for r in of_tokens)}, faster by more than 5 % "
              f"{sum(r < 0.95 for r in of_tokens)}, of {len(of_tokens)}")  # fmt: skip


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(int(sys.argv[2]))
    else:
        main()
