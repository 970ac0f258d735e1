"""A token of a quantised model beside llama.cpp's, in turns on one machine, with the memory's bandwidth.

    g++ -O2 -std=c++17 -I LLAMA/include -I LLAMA/ggml/include results/speed/llama_decode.cpp -o llama_decode \\
        BUILD/src/libllama.a BUILD/ggml/src/libggml{,-cpu,-base}.a -fopenmp -lpthread -ldl
    python results/speed/decode.py round models/smollm2 --bits 8 --out runs/ours8      # and 4
    python results/speed/decode.py time runs/ours8 --program ./llama_decode --file q8_0.gguf --threads 1 \\
        >> results/speed/decode.txt

The files are llama.cpp's Q8_0 and Q4_0 of the same model, whose head is Q8_0 in both. Ours has as many bits, in groups
of 32 without zero points, and the embedding, which is the head, in 8. Milliseconds a token (the least of the rounds,
and their median): ``products``, of all layers in C++ and of the head, ``token``, a forward pass of the model and the
choice of the best logit, ``generate``, what 8 more tokens of ``model.generate`` take, ``apart``, a token without the
forward of whole decoder layers, and ``llama.cpp``.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import kl_div
from transformers import AutoModelForCausalLM

import relinear
from relinear.contract.inference import caching_for_inference
from relinear.system.machine import describe_machine
from relinear.system.timing import seconds_of

TOKENS = 8
PROMPT = [1, 504, 3575, 282, 4649, 314, 253, 1838]


def bandwidth() -> float:
    """Return gigabytes a second that a sum of 256 MB reads."""
    numbers = torch.ones(1 << 26)
    return numbers.nbytes / min(seconds_of(numbers.sum) for _ in range(3)) / 1e9


def save_rounded(path: str, bits: int, out: Path) -> None:
    """Write the model in so many bits."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    ours = {b: relinear.Quantized(bits=b, group=32, symmetric=True) for b in (bits, 8)}
    relinear.replace_(model, {"all-linear": ours[bits], "model.embed_tokens": ours[8]}, init="from_weight")
    relinear.save_pretrained(model, out)


def logits(model: torch.nn.Module, text: Tensor) -> Tensor:
    """Return the logits (T, V) of tokens that are read one by one."""
    past, found = None, []
    for token in text.split(1, 1):
        out = model(token, past_key_values=past, use_cache=True)
        past = out.past_key_values
        found.append(out.logits[0, -1])
    return torch.stack(found)


def products(model: torch.nn.Module) -> Callable[[], object]:
    """Return a function that runs what a token's layers and head run in C++."""
    layers = [layer.forward.cache.get("calls", layer.forward._compiled_calls) for layer in model.model.layers]
    x, config = torch.randn(1, 1, model.config.hidden_size), model.config
    at = model.model.rotary_emb(x, torch.tensor([[3]]))
    mixed = torch.randn(1, config.num_attention_heads, 1, config.head_dim)
    return lambda: ([(before(x, *at), after(x, mixed)) for before, after, _ in layers], model.lm_head(x))


def measured(model: torch.nn.Module, rival: subprocess.Popen, threads: int, rounds: int) -> dict[str, list[float]]:
    """Return milliseconds a token of every contender, round by round, and gigabytes a second of memory."""
    times: dict[str, list[float]] = {}
    ids, run = torch.tensor([PROMPT]), products(model)
    fused = [layer.forward for layer in model.model.layers]

    def add(name: str, seconds: float) -> None:
        times.setdefault(name, []).append(seconds * 1e3)

    def tokens(count: int) -> float:
        past, last = model(ids, use_cache=True).past_key_values, ids[:, -1:]
        start = time.perf_counter()
        for _ in range(count):
            last = model(last, past_key_values=past, use_cache=True).logits[:, -1:].argmax(-1)
        return (time.perf_counter() - start) / count

    def generated(count: int) -> float:
        limits = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False, "pad_token_id": 0}
        return seconds_of(lambda: model.generate(ids, attention_mask=torch.ones_like(ids), **limits))

    for _ in range(rounds):
        add("products", seconds_of(run))
        add("token", tokens(TOKENS))
        add("generate", (generated(2 + TOKENS) - generated(2)) / TOKENS)
        for layer in model.model.layers:
            del layer.forward
        add("apart", tokens(TOKENS))
        for layer, forward in zip(model.model.layers, fused, strict=True):
            layer.forward = forward
        rival.stdin.write(f"{threads} {TOKENS}\n")
        rival.stdin.flush()
        rival.stdout.readline()
        add("llama.cpp", float(rival.stdout.readline()) / 1e3)
        times.setdefault("GB/s", []).append(bandwidth())
    return times


@torch.no_grad()
def main() -> None:
    """Measure and print a line for every number of threads."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("task", choices=["round", "time"])
    parser.add_argument("model")
    parser.add_argument("--bits", type=int, default=8)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--program")
    parser.add_argument("--file")
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--rounds", type=int, default=9)
    given = parser.parse_args()
    if given.task == "round":
        return save_rounded(given.model, given.bits, given.out)
    name, ids = Path(given.model).name, torch.tensor([PROMPT])
    model = relinear.from_pretrained(given.model, dtype=torch.float32).eval()
    read = sum({t.data_ptr(): t.nbytes for t in model.state_dict().values()}.values())
    print(describe_machine(), flush=True)
    torch.set_num_threads(given.threads[0])
    with caching_for_inference(model):
        exact = logits(model, ids)
    rounded = logits(relinear.for_inference_(model), ids)
    error = (rounded - exact).norm() / exact.norm()
    nats = kl_div(rounded.log_softmax(-1), exact.log_softmax(-1), reduction="batchmean", log_target=True)
    print(f"{name}: rounded inputs move logits by {error:.4f} (relative), {nats:.5f} nats a token", flush=True)
    rival = subprocess.Popen([given.program, given.file], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    for threads in given.threads:
        torch.set_num_threads(threads)
        times = measured(model, rival, threads, given.rounds)
        speed, least = max(times.pop("GB/s")), {name: min(values) for name, values in times.items()}
        said = "  ".join(f"{key} {min(values):.1f} ({statistics.median(values):.1f})" for key, values in times.items())
        pairs = zip(times["token"], times["llama.cpp"], strict=True)
        ratio = statistics.median(ours / theirs for ours, theirs in pairs)
        print(
            f"{name}, {threads} threads, ms: {said}; token to llama.cpp {least['token'] / least['llama.cpp']:.2f} "
            f"({ratio:.2f}); products read {read / least['products'] / 1e6:.1f} GB/s, a sum {speed:.1f}",
            flush=True,
        )
    rival.stdin.close()
    return None


if __name__ == "__main__":
    main()
