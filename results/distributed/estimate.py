"""On paper: what Llamas of 7B and 70B take in memory and communication, dense and with each operator in all layers.

    python results/distributed/estimate.py

writes the table of ``docs/distributed.md``. Models are built without weights (meta device); nothing is measured.
"""

# Legend: P parameters, N GPUs

from __future__ import annotations

import dataclasses
import re
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import relinear
from relinear.contract.operator import OperatorConfig, named_operators
from relinear.surgery.parallel import split_parameters, tensor_parallel_plan

DOCS = Path(__file__).resolve().parents[2] / "docs" / "distributed.md"
#: of the models that are called so: width, width of the MLP, layers, heads, heads of keys and values
MODELS = {"7B": (4096, 11008, 32, 32, 32), "70B": (8192, 28672, 80, 64, 8)}
VOCABULARY, CONTEXT = 32_000, 256
#: settings that fit the layers of both
OPERATORS: dict[str, OperatorConfig | None] = {
    "dense": None,
    "low_rank": relinear.LowRank(rank=1024),
    "pivoted_low_rank": relinear.PivotedLowRank(rank=1024),
    "block_hadamard": relinear.BlockHadamard(),
    "monarch": relinear.Monarch(blocks=16),
    "hdpl": relinear.HDPL(rank=512, blocks=16),
    "ccl": relinear.CCL(rank=1024, context_dim=CONTEXT),
    "transponder": relinear.Transponder(rank=8),
    "output_gate": relinear.OutputGate(),
    "rotor": relinear.Rotor(),
}
#: bytes a parameter: weights, gradients and Adam's two values in float32
STATES = 16
#: bytes of a number that is summed over ranks, and the tokens of a step
HALF, TOKENS = 2, 4096
#: bytes a parameter that a rank sends in a step, but for the factor (N - 1) / N. DDP: a ring of float32 gradients there
#: and back; FSDP2: weights in bfloat16 before the forward and the backward pass, and gradients in float32
DDP_SENT, FSDP_SENT = 8, 8
#: bytes a parameter of a layer that FSDP2 has whole: weights in bfloat16, for this layer and the next, and gradients
WHOLE = 2 * 2 + 4
#: likewise of what lies outside the decoder layers (embedding, head, last norm, context): FSDP2 gathers it once,
#: as the forward pass starts, and lets go of it and of its gradients as the backward pass ends
ROOT = 2 + 4


@dataclasses.dataclass(frozen=True)
class Size:
    """Of a model: parameters, those of one decoder layer and of none, forward FLOPs a token of its linear layers.

    Under tensor parallelism: parameters that are split, and numbers per token that are summed over ranks in a step.
    """

    parameters: int
    layer: int
    root: int
    flops: int
    split: int
    summed: int

    def sharded_bytes(self, ranks: int) -> float:
        """What a rank holds under FSDP2, but for activations."""
        return STATES * self.parameters / ranks + WHOLE * self.layer + ROOT * self.root

    def sent_bytes(self, ranks: int) -> float:
        """What a rank sends in a step, under FSDP2 as under DDP."""
        return FSDP_SENT * self.parameters * (ranks - 1) / ranks

    def split_bytes(self, ranks: int) -> float:
        """What a rank holds under tensor parallelism, but for activations."""
        return STATES * (self.parameters - self.split * (ranks - 1) / ranks)

    def summed_bytes(self, ranks: int, tokens: int) -> float:
        """What a rank sends at most in a step of so many tokens under tensor parallelism: a ring there and back."""
        return 2 * HALF * self.summed * tokens * (ranks - 1) / ranks


def size_of(model: str, operator: OperatorConfig | None) -> Size:
    """From models of one and of two layers: further ones are alike."""
    one, two = (_built(model, operator, layers) for layers in (1, 2))
    layers = MODELS[model][2]
    return Size(*(a + (layers - 1) * (b - a) for a, b in zip(one, two, strict=True)))


def llama(shape: tuple[int, ...], vocabulary: int = VOCABULARY, tied: bool = False) -> LlamaForCausalLM:
    """A Llama of a shape as in ``MODELS``, without memory for its weights."""
    width, inner, layers, heads, shared = shape
    config = LlamaConfig(vocab_size=vocabulary, hidden_size=width, intermediate_size=inner, num_hidden_layers=layers,
                         num_attention_heads=heads, num_key_value_heads=shared, tie_word_embeddings=tied)  # fmt: skip
    with torch.device("meta"):
        return LlamaForCausalLM(config)


def _built(model: str, operator: OperatorConfig | None, layers: int) -> tuple[int, ...]:
    width, inner, _, *heads = MODELS[model]
    built = llama((width, inner, layers, *heads))
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the head, which all-linear leaves
        if operator is not None:
            if operator.conditioned:
                relinear.attach_(built, relinear.ContextManager(dim=CONTEXT))
            relinear.replace_(built, {"all-linear": operator})
    found = relinear.summary(built)
    layer = sum(parameter.numel() for parameter in built.model.layers[0].parameters())
    return found.parameters, layer, found.parameters - layers * layer, found.flops_per_token, *_split(built)


def _split(model: LlamaForCausalLM) -> tuple[int, int]:
    """Parameters that tensor parallelism splits, and numbers per token that ranks sum in a step."""
    if not any(True for _ in named_operators(model)):  # as everybody splits a dense one: two sums forward, two backward
        weights = sum(p.numel() for layer in model.model.layers for p in layer.parameters() if p.ndim == 2)
        return weights, 4 * model.config.hidden_size * len(model.model.layers)
    operators = [model.get_submodule(name) for name in tensor_parallel_plan(model)]
    weights = sum(op.get_parameter(name).numel() for op in operators for name, _ in split_parameters(op))
    return weights, sum(op.in_features + op.out_features for op in operators)


def table() -> str:
    """In Markdown."""
    return "\n".join(_lines())


def _lines() -> Iterator[str]:
    yield "| model | layers | parameters (G) | FLOPs per token (G) | a rank holds (GB) | it sends (GB) |"
    yield "| --- | --- | ---: | ---: | ---: | ---: |"
    sizes: dict[tuple[str, str], Size] = {}
    for model in MODELS:
        for name, operator in OPERATORS.items():
            size = sizes[model, name] = size_of(model, operator)
            cells = [f"{size.parameters / 1e9:.2f}", f"{size.flops / 1e9:.1f}"]
            cells += [f"{amount / 1e9:,.1f}" for amount in (size.sharded_bytes(8), size.sent_bytes(8))]
            yield f"| {model} | {f'`{operator}`' if operator else name} | {' | '.join(cells)} |"
    yield from ("", "| model | layers | split: a rank holds (GB) | it sends (GB) |", "| --- | --- | ---: | ---: |")
    for (model, name), size in sizes.items():
        cells = [f"{amount / 1e9:,.1f}" for amount in (size.split_bytes(8), size.summed_bytes(8, TOKENS))]
        yield f"| {model} | {name} | {' | '.join(cells)} |"


def main() -> None:
    """Write the table, and print it."""
    print(table())
    text = DOCS.read_text(encoding="utf-8")
    marked = f"<!-- estimate -->\n{table()}\n<!-- end -->"
    DOCS.write_text(re.sub(r"<!-- estimate -->.*?<!-- end -->", lambda _: marked, text, flags=re.S))


if __name__ == "__main__":
    main()
