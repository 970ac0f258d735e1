"""Where a token's time goes in a model of integers: layers, other operations, the loop that generates.

    python results/compress/token_profile.py models/smollm2 --threads 2 --out results/compress/token_profile.json

All linear layers in four bits and the embedding in eight, to nearest. Milliseconds per token, the least of several
rounds; those of operations are a profiler's, which takes time itself.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function
from transformers import AutoModelForCausalLM

import relinear
from relinear.operators.quantized import QuantizedLinear
from relinear.system.files import write_json
from relinear.system.machine import describe_machine
from relinear.system.timing import seconds_of

TOKENS, ROUNDS = 16, 8


def least(call: Callable[[], object]) -> float:
    """Milliseconds of a call."""
    return 1e3 * min(seconds_of(call) for _ in range(ROUNDS))


@torch.no_grad()
def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    model, original = (AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32).eval() for _ in range(2))
    ends = {"model.embed_tokens": relinear.Quantized(bits=8, symmetric=True)}
    relinear.replace_(model, {"all-linear": relinear.Quantized(bits=4)} | ends, init="from_weight")
    relinear.for_inference_(model)
    ids = torch.randint(1000, (1, 8), generator=torch.Generator().manual_seed(0))
    limits = {"max_new_tokens": TOKENS, "min_new_tokens": TOKENS, "do_sample": False, "pad_token_id": 0}

    def generated(one) -> float:
        return least(lambda: one.generate(ids, attention_mask=torch.ones_like(ids), **limits)) / TOKENS

    found = {"original": generated(original), "token": generated(model)}
    past = model(ids, use_cache=True).past_key_values

    def step() -> object:
        return model(ids[:, :1], past_key_values=past, use_cache=True)

    found["forward_pass"] = least(step)
    for layer in model.modules():
        if isinstance(layer, QuantizedLinear):
            layer.forward = record_function("integers")(layer.forward)
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        for _ in range(ROUNDS):
            step()
    taken = {event.key: event.self_cpu_time_total / 1e3 / ROUNDS for event in seen.key_averages()}
    found["integer_layers"] = taken.pop("integers")
    found["other_operations"] = sum(taken.values())
    print(found)
    write_json(given.out, {"milliseconds": found, "machine": describe_machine()})


if __name__ == "__main__":
    main()
