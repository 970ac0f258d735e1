"""Which form of an operator's arithmetic is the faster one: one small table, measured."""

from __future__ import annotations

import torch

__all__ = ["LARGEST_DENSE", "prefers_dense"]

FEW_TOKENS = 8

#: kind -> dtype -> (largest square layer, in features, that is faster dense for few tokens, the same for many tokens).
#: Measured with `relinear bench` on two AVX-512/AMX cores; kinds and dtypes without an entry are never made dense.
LARGEST_DENSE: dict[str, dict[torch.dtype, tuple[int, int]]] = {
    "low_rank": {torch.float32: (512, 128), torch.bfloat16: (512, 256)},
    "block_hadamard": {torch.float32: (2048, 768), torch.bfloat16: (2048, 2048)},
    "monarch": {torch.float32: (2048, 512), torch.bfloat16: (2048, 2048)},
}


def prefers_dense(kind: str, in_features: int, out_features: int, dtype: torch.dtype, tokens: int) -> bool:
    """Whether an operator of this kind and size is faster through its dense matrix in inference on a CPU."""
    few, many = LARGEST_DENSE.get(kind, {}).get(dtype, (0, 0))
    limit = few if tokens <= FEW_TOKENS else many
    return in_features * out_features <= limit * limit
