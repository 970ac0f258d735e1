"""Prefill and decoding of compressed models beside the original's, in turns in one process.

    python results/compress/speed.py models/smollm2 DIR [DIR ...] --threads 1 2 --out results/compress/speed_bits.json

Tokens per second are medians over rounds; ``ratio`` is compressed to original, with an interval over rounds. Models are
named by their folders; bytes are of what a checkpoint holds, floats at half precision.
"""

import argparse
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import relinear
from relinear.compression.budget import stored_bytes
from relinear.contract.inference import caching_for_inference
from relinear.hf.vocabulary import max_positions, vocab_size_of
from relinear.system.files import write_json
from relinear.system.machine import describe_machine
from relinear.system.timing import Timing, interleave

#: seconds that the rounds of one measurement may take, about, and how many there are
SPEED_SECONDS, ROUNDS = 8.0, (3, 15)
PREFILL_TOKENS, DECODED_TOKENS = 128, 16


@torch.no_grad()
def measure_speed(original: Any, compressed: Any, batch: int, text: Tensor | None = None) -> dict[str, Any]:
    """Return tokens a second of prefill and of decoding, in turns.

    Args:
        original: a decoder.
        compressed: what became of it.
        batch: sequences at once.
        text: token ids (N, T) to run on; random ones by default.
    """
    with caching_for_inference(compressed):
        pass  # builds the kernels
    contenders = {"original": original, "compressed": compressed}
    longest = max_positions(compressed) or 1 << 30
    tokens = min(PREFILL_TOKENS, longest)
    if text is None:
        vocabulary = vocab_size_of(compressed.get_input_embeddings())
        text = torch.randint(vocabulary, (batch, tokens), generator=torch.Generator().manual_seed(0))
    ids = text[:, :tokens].repeat(-(-batch // len(text)), 1)[:batch].to(next(compressed.parameters()).device)
    decoded = max(1, min(DECODED_TOKENS, longest - 8))

    def prefill(one: Any) -> Callable[[], object]:
        return lambda: one(input_ids=ids, use_cache=False)

    def decode(one: Any) -> Callable[[], object]:
        limits = {"max_new_tokens": decoded, "min_new_tokens": decoded, "do_sample": False, "pad_token_id": 0}
        prompt = ids[:, :8]
        return lambda: one.generate(prompt, attention_mask=torch.ones_like(prompt), **limits)

    found: dict[str, Any] = {"batch": batch, "prefill_tokens": ids.shape[1], "decoded_tokens": decoded}
    for what, make, count in (("prefill", prefill, ids.shape[1]), ("decode", decode, decoded)):
        calls = {name: make(one) for name, one in contenders.items()}
        timings = _in_turns(calls)
        before, after = timings["original"], timings["compressed"]
        ratios = {name: getattr(before, name) for name in ("ratio", "ratio_low", "ratio_high")}
        found[what] = ratios | {"original_tokens_per_second": batch * count / before.seconds}
        found[what]["compressed_tokens_per_second"] = batch * count / after.seconds
    return found


def _in_turns(calls: Mapping[str, Callable[[], object]]) -> dict[str, Timing]:
    """Time calls in turns for about ``SPEED_SECONDS``, in as many ``ROUNDS`` as that allows."""
    start = time.perf_counter()
    for call in 2 * [*calls.values()]:
        call()
    rounds = max(ROUNDS[0], min(ROUNDS[1], int(2 * SPEED_SECONDS / (time.perf_counter() - start))))
    return interleave(calls, "compressed", rounds=rounds, min_seconds=0.0, warmup=1)


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
