"""Prefill and decoding of compressed models beside the original's, in turns in one process.

    python results/compress/speed.py models/smollm2 DIR [DIR ...] --threads 1 2 --out results/compress/speed_bits.json

Tokens a second are medians over rounds; ``ratio`` is compressed to original, with an interval over rounds. Models are
named by their folders; bytes are of what a checkpoint holds, floats at half precision.
"""

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

import relinear
from relinear.compression.budget import stored_bytes
from relinear.compression.evaluation import measure_speed
from relinear.system.files import write_json
from relinear.system.machine import describe_machine


@torch.no_grad()
def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("original")
    parser.add_argument("compressed", nargs="+")
    parser.add_argument("--batch", nargs="+", type=int, default=[1])
    parser.add_argument("--threads", nargs="+", type=int, default=[1])
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    original = AutoModelForCausalLM.from_pretrained(given.original, dtype=torch.float32).eval()
    whole, rows = stored_bytes(original), []
    for folder in given.compressed:
        compressed = relinear.from_pretrained(folder, dtype=torch.float32).eval()
        share = stored_bytes(compressed) / whole
        for threads in given.threads:
            torch.set_num_threads(threads)
            for batch in given.batch:
                found = measure_speed(original, compressed, batch)
                rows.append({"model": Path(folder).name, "threads": threads, "share_of_bytes": share} | found)
                ratios = {
                    what: "{ratio:.2f} ({ratio_low:.2f} to {ratio_high:.2f})".format_map(found[what])
                    for what in ("prefill", "decode")
                }
                print(Path(folder).name, f"{share:.3f} of the bytes, {threads} threads, batch {batch}:", ratios)
    write_json(given.out, {"machine": describe_machine(), "rows": rows})


if __name__ == "__main__":
    main()
