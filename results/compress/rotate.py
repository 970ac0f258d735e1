"""A model of the same function whose weights lie on no grid: its residual stream, and its heads' values, are turned.

    python results/compress/rotate.py models/smollm2 --out models/smollm2-rotated

The gains of the norms go into the matrices that follow them, which the function allows; then one random orthogonal
matrix turns the residual stream (embedding, inputs of q, k, v, gate, up, outputs of o and down, head), and one more in
every head of keys and values turns what v writes and o reads. The head is no longer tied to the embedding. Logits
stay within 1e-3 in float32, or nothing is written.

It is a control for the grid that weights came from, and for that alone: turning spreads outliers, too, which is why
QuaRot (Ashkboos et al., 2404.00456) rounds in turned coordinates.
"""

from __future__ import annotations

import argparse
import copy
from pathlib import Path

import torch
from torch import Tensor, nn

import relinear
from relinear.data.tokenizers import load_tokenizer

CLOSE = 1e-3


def orthogonal(size: int, generator: torch.Generator) -> Tensor:
    """A random orthogonal matrix in float64."""
    return torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64)).Q


@torch.no_grad()
def rotated(model: nn.Module, seed: int) -> nn.Module:
    """A turned copy of a Llama without biases."""
    config = copy.deepcopy(model.config)
    config.tie_word_embeddings = False
    turned = type(model)(config).eval()
    turned.load_state_dict(model.state_dict())
    generator = torch.Generator().manual_seed(seed)
    stream = orthogonal(config.hidden_size, generator)

    def change_(linear: nn.Module, *, gains: Tensor | None = None, inputs=None, outputs=None) -> None:
        weight = linear.weight.double()
        weight = weight if gains is None else weight * gains.double()
        weight = weight if inputs is None else weight @ inputs
        linear.weight.copy_(weight if outputs is None else outputs.T @ weight)

    heads, groups = config.num_attention_heads, config.num_key_value_heads
    for layer in turned.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        each = [orthogonal(config.head_dim, generator) for _ in range(groups)]
        values = torch.block_diag(*each)
        read = torch.block_diag(*[each[head // (heads // groups)] for head in range(heads)])
        before, between = layer.input_layernorm.weight, layer.post_attention_layernorm.weight
        for linear in (attention.q_proj, attention.k_proj):
            change_(linear, gains=before, inputs=stream)
        change_(attention.v_proj, gains=before, inputs=stream, outputs=values)
        change_(attention.o_proj, inputs=read, outputs=stream)
        for linear in (mlp.gate_proj, mlp.up_proj):
            change_(linear, gains=between, inputs=stream)
        change_(mlp.down_proj, outputs=stream)
        before.fill_(1)
        between.fill_(1)
    change_(turned.lm_head, gains=turned.model.norm.weight, inputs=stream)
    turned.model.norm.weight.fill_(1)
    change_(turned.model.embed_tokens, inputs=stream)
    return turned


@torch.no_grad()
def distance(one: nn.Module, other: nn.Module) -> float:
    """The largest difference of logits on random tokens."""
    ids = torch.randint(one.config.vocab_size, (2, 64), generator=torch.Generator().manual_seed(0))
    return float((one(input_ids=ids).logits - other(input_ids=ids).logits).abs().max())


def main() -> None:
    """Turn a model, hold it to the original's logits, and save it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    model = relinear.from_pretrained(given.model).float().eval()
    turned = rotated(model, given.seed)
    found = distance(model, turned)
    if not found < CLOSE:
        raise SystemExit(f"the turned model's logits differ by {found:.2g}; nothing is written")
    turned.save_pretrained(given.out)
    load_tokenizer(given.model).save_pretrained(given.out)
    print(f"largest difference of logits: {found:.2g}")


if __name__ == "__main__":
    main()
