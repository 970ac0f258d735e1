"""Small models and what surgery did to them, for several files of tests."""

import torch

import relinear
from conftest import make_tiny_gpt2, make_tiny_llama
from relinear.operators.low_rank import LowRankLinear


def llama(**overrides):
    settings = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2}
    return make_tiny_llama(**settings | {"num_key_value_heads": 1, "vocab_size": 50} | overrides)


def gpt2(**overrides):
    return make_tiny_gpt2(n_embd=16, n_head=2, vocab_size=50, **overrides)


def replaced(model):
    return {name for name, module in model.named_modules() if isinstance(module, LowRankLinear)}


LOW = relinear.LowRank(rank=4)


IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
