"""On paper: what Llamas of 7B and 70B take in memory and communication, dense and with each operator in all layers.

    python results/distributed/estimate.py

writes the table of ``docs/distributed.md``. Models are built without weights (meta device); nothing is measured.
"""

# Legend: P parameters, U parameters of one decoder layer, N GPUs

from __future__ import annotations

import dataclasses
import re
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import relinear
from relinear.core.operator import OperatorConfig

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
#: bytes a parameter that a rank sends in a step, but for the factor (N - 1) / N. DDP: a ring of float32 gradients there
#: and back; FSDP2: weights in bfloat16 before the forward and the backward pass, and gradients in float32
DDP_SENT, FSDP_SENT = 8, 8
#: bytes a parameter of a layer that FSDP2 has whole: weights in bfloat16, for this layer and the next, and gradients
WHOLE = 2 * 2 + 4


@dataclasses.dataclass(frozen=True)
class Size:
    """Of a model: parameters, those of one decoder layer, forward FLOPs a token of its linear layers."""

    parameters: int
    layer: int
    flops: int

    def sharded_bytes(self, ranks: int) -> float:
        """What a rank holds under FSDP2, but for activations."""
        return STATES * self.parameters / ranks + WHOLE * self.layer

    def sent_bytes(self, ranks: int) -> float:
        """What a rank sends in a step, under FSDP2 as under DDP."""
        return FSDP_SENT * self.parameters * (ranks - 1) / ranks


def size_of(model: str, operator: OperatorConfig | None) -> Size:
    """From models of one and of two layers: further ones are alike."""
    one, two = (_built(model, operator, layers) for layers in (1, 2))
    layers = MODELS[model][2]
    each = two.parameters - one.parameters
    flops = two.flops_per_token - one.flops_per_token
    return Size(one.parameters + (layers - 1) * each, each, one.flops_per_token + (layers - 1) * flops)


def _built(model: str, operator: OperatorConfig | None, layers: int) -> relinear.surgery.summary.Summary:
    width, inner, _, heads, shared = MODELS[model]
    config = LlamaConfig(vocab_size=VOCABULARY, hidden_size=width, intermediate_size=inner, num_hidden_layers=layers,
                         num_attention_heads=heads, num_key_value_heads=shared)  # fmt: skip
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the head, which all-linear leaves
        built = LlamaForCausalLM(config)
        if operator is not None:
            if operator.conditioned:
                relinear.attach_(built, relinear.ContextManager(dim=CONTEXT))
            relinear.replace_(built, {"all-linear": operator})
    return relinear.summary(built)


def table() -> str:
    """In Markdown."""
    return "\n".join(_lines())


def _lines() -> Iterator[str]:
    yield "| model | layers | parameters | FLOPs a token | one GPU | FSDP2, 8 | FSDP2, 64 | sent a step, 8 |"
    yield "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |"
    for model in MODELS:
        for name, operator in OPERATORS.items():
            size = size_of(model, operator)
            memory = [STATES * size.parameters, size.sharded_bytes(8), size.sharded_bytes(64)]
            cells = [f"{size.parameters / 1e9:.2f} G", f"{size.flops / 1e9:.1f} G"]
            cells += [f"{amount / 1e9:,.1f} GB" for amount in (*memory, size.sent_bytes(8))]
            yield f"| {model} | {f'`{operator}`' if operator else name} | {' | '.join(cells)} |"


def main() -> None:
    """Write the table."""
    text = DOCS.read_text(encoding="utf-8")
    marked = f"<!-- estimate -->\n{table()}\n<!-- end -->"
    DOCS.write_text(re.sub(r"<!-- estimate -->.*?<!-- end -->", lambda _: marked, text, flags=re.S))


if __name__ == "__main__":
    main()
