"""What a Contextually Guided Transformer costs, and what specialising it saves; results are checked, then timed."""

# Legend: B batch, T tokens, D width of x, E width of y

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.models.gpt2.modeling_gpt2 import GPT2MLP

from relinear.functional import cgt as reference
from relinear.models.cgt.config import CGTConfig
from relinear.models.cgt.layers import Modulator
from relinear.models.cgt.model import CGTForCausalLM
from relinear.models.cgt.specialize import specialize
from relinear.system.timing import Timing, interleave

__all__ = ["modulation_cost", "prefix_cost", "specialized_speed"]


def _row(timing: Timing, **more: Any) -> dict[str, Any]:
    spread = {"ratio_low": timing.ratio_low, "ratio_high": timing.ratio_high}
    return more | {"seconds": timing.seconds, "ratio": timing.ratio} | spread


@torch.no_grad()
def modulation_cost(
    width: int, *, tokens: int = 4096, context_size: int = 64, rank: int = 4, templates: int = 16, rounds: int = 15
) -> dict[str, Any]:
    """Forward time of T(x; y), template shares included, relative to GPT-2's MLP that follows it (fp32).

    ``ratio`` is to the MLP; ``reference_ratio`` is that of the form that builds L(y) and R(y) for each token.
    """
    config = CGTConfig(n_embd=width, n_head=1, context_size=context_size, context_heads=1, rank=rank,
                       templates=templates)  # fmt: skip
    modulator, mlp = Modulator(config).eval(), GPT2MLP(4 * width, config).eval()
    for parameter in modulator.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    x, y = torch.randn(1, tokens, width), torch.randn(1, tokens, context_size)

    def readable() -> torch.Tensor:
        return reference.modulate(x, modulator.shares(y), modulator.left, modulator.right, modulator.right_bias)

    torch.testing.assert_close(modulator(x, y), readable(), rtol=1e-3, atol=1e-3)
    times = interleave({"mlp": lambda: mlp(x), "T": lambda: modulator(x, y)}, "mlp", rounds=rounds)
    slow = interleave({"mlp": lambda: mlp(x), "T": readable}, "mlp", rounds=max(2, rounds // 4))
    return _row(times["T"], width=width, tokens=tokens, reference_ratio=slow["T"].ratio)


def _model(width: int, layers: int, positions: int, vocabulary: int) -> CGTForCausalLM:
    heads = max(1, width // 64)
    return CGTForCausalLM(
        CGTConfig(
            vocab_size=vocabulary,
            n_positions=positions,
            n_embd=width,
            n_head=heads,
            n_layer=layers,
            context_layer=2 * layers // 3,
            context_size=128,
            context_heads=2,
            bos_token_id=None,
            eos_token_id=None,
        )
    ).eval()


@torch.no_grad()
def specialized_speed(
    width: int = 768, layers: int = 6, *, batch: int = 1, tokens: int = 512, vocabulary: int = 8000, rounds: int = 15
) -> dict[str, dict[str, Any]]:
    """Forward time of the specialised model, and of the CGT with its context computed or frozen, against a stock GPT-2.

    ``speed`` is tokens per second relative to a freshly built ``GPT2LMHeadModel`` of the same width.
    """
    model = _model(width, layers, tokens, vocabulary)
    ids = torch.randint(0, vocabulary, (batch, tokens))
    stock = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=vocabulary,
            n_positions=tokens,
            n_embd=width,
            n_head=model.config.n_head,
            n_layer=layers,
            bos_token_id=None,
            eos_token_id=None,
        )
    ).eval()
    specialized = specialize(model, ids[0, :16])
    y = model.context(ids[:1, :16])[:, -1].expand(batch, -1)
    torch.testing.assert_close(
        specialized(ids, use_cache=False).logits, model(ids, frozen_context=y, use_cache=False).logits,
        rtol=1e-4, atol=1e-4,
    )  # fmt: skip
    calls = {
        "stock": lambda: stock(ids, use_cache=False),
        "specialized": lambda: specialized(ids, use_cache=False),
        "frozen": lambda: model(ids, frozen_context=y, use_cache=False),
        "dynamic": lambda: model(ids, use_cache=False),
    }
    times = interleave(calls, "stock", rounds=rounds)
    return {name: _row(timing, speed=1 / timing.ratio) for name, timing in times.items()}


def _go_on(model: Any, cache: Any, ids: torch.Tensor) -> None:
    """Read further tokens after what the cache holds, and leave the cache as it was."""
    model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
    cache.crop(-ids.shape[1])


@torch.no_grad()
def prefix_cost(
    width: int = 768,
    layers: int = 6,
    *,
    prefixes: Sequence[int] = (64, 256, 1024),
    query: int = 64,
    vocabulary: int = 8000,
    rounds: int = 9,
) -> list[dict[str, Any]]:
    """What a prefix costs with every query: the specialised model against the same CGT with the prefix in its cache.

    Returns, for each prefix length: seconds to read the prefix once; seconds for a query of ``query`` tokens and for
    one more token, by the CGT that holds the prefix in its cache (``cached_``) and by the specialised GPT-2
    (``specialized_``); ``_saved``, the share of the time saved; and the bytes of the prefix's cache.
    """
    model: Any = _model(width, layers, max(prefixes) + query + 1, vocabulary)
    rows = []
    for length in prefixes:
        prefix = torch.randint(0, vocabulary, (1, length))
        ids = torch.randint(0, vocabulary, (1, query))
        specialized: Any = specialize(model, prefix)
        cache = model(prefix, use_cache=True, logits_to_keep=1).past_key_values
        own = specialized(ids, use_cache=True).past_key_values
        size = sum(t.numel() * t.element_size() for layer in cache.layers for t in (layer.keys, layer.values))

        once = partial(model, prefix, use_cache=True, logits_to_keep=1)
        reads = interleave({"read": once}, "read", rounds=max(3, rounds // 3))
        alone = partial(specialized, ids, use_cache=True, logits_to_keep=1)
        queries = interleave(
            {"cached": partial(_go_on, model, cache, ids), "specialized": alone}, "cached", rounds=rounds
        )
        tokens = interleave(
            {
                "cached": partial(_go_on, model, cache, ids[:, :1]),
                "specialized": partial(_go_on, specialized, own, ids[:, :1]),
            },
            "cached",
            rounds=rounds,
        )
        rows.append(
            {
                "prefix": length,
                "read_seconds": reads["read"].seconds,
                "cached_query_seconds": queries["cached"].seconds,
                "specialized_query_seconds": queries["specialized"].seconds,
                "query_saved": 1 - queries["specialized"].ratio,
                "cached_token_seconds": tokens["cached"].seconds,
                "specialized_token_seconds": tokens["specialized"].seconds,
                "token_saved": 1 - tokens["specialized"].ratio,
                "cache_bytes": size,
            }
        )
    return rows
