"""Tiny models of the families that surgery is tested on, built from their configs with random weights."""

from __future__ import annotations

from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForSeq2SeqLM

__all__ = [
    "ENCODER_DECODERS",
    "FAMILIES",
    "LAYERS",
    "MORE_DECODERS",
    "VOCABULARY",
    "make_cgt",
    "make_family",
    "starting_tokenizer",
]

VOCABULARY, WIDTH, LAYERS, HEADS = 96, 32, 2, 4

_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
_GROUPED = {"num_key_value_heads": 2}
_HEAD_DIM = _GROUPED | {"head_dim": 8}
_EXPERTS = _GROUPED | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}

#: model type of a decoder -> settings beside the common ones
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_inner": 64},
    "llama": _GROUPED,
    "mistral": _GROUPED,
    "qwen2": _GROUPED,
    "qwen3": _HEAD_DIM,
    "gemma": _HEAD_DIM,
    "gemma2": _HEAD_DIM,
    "gemma3_text": _HEAD_DIM,
    "olmo": _GROUPED,
    "olmo2": _GROUPED,
    "granite": _GROUPED,
    "smollm3": _GROUPED,
    "phi": _GROUPED,
    "phi3": _GROUPED,
    "cohere": _GROUPED,
    "stablelm": _GROUPED,
    "starcoder2": _GROUPED,
    "gpt_neox": {},
    "gptj": {"rotary_dim": 4},
    "gpt_neo": {
        "attention_types": [[["global", "local"], 1]],
        "window_size": 8,
        "num_layers": LAYERS,
        "num_heads": HEADS,
    },
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": WIDTH},
    "bloom": {"n_head": HEADS, "n_layer": LAYERS},
    "falcon": {},
    "mpt": {"d_model": WIDTH, "n_heads": HEADS, "n_layers": LAYERS},
    "codegen": {"rotary_dim": 4},
    "gpt_bigcode": {},
    "mixtral": _GROUPED | {"num_local_experts": 4},
    "qwen2_moe": _EXPERTS | {"shared_expert_intermediate_size": 16},
    "qwen3_moe": _EXPERTS | {"head_dim": 8},
    "olmoe": _EXPERTS,
    "mamba": {"state_size": 8},
    "glm": _HEAD_DIM,
    "glm4": _HEAD_DIM,
    "ministral": _HEAD_DIM,
    "nemotron": _GROUPED,
    "persimmon": {},
    "xglm": {"d_model": WIDTH, "num_layers": LAYERS, "attention_heads": HEADS, "ffn_dim": 64},
    "biogpt": {},
}

#: decoders that the table of families runs beside those
MORE_DECODERS: dict[str, dict[str, Any]] = {
    "granitemoe": _GROUPED | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt_oss": _HEAD_DIM | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "phimoe": _GROUPED | {"num_local_experts": 4},
    "mamba2": {"state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 1},
    "falcon_mamba": {"state_size": 8},
    "rwkv": {},
    "lfm2": _GROUPED,
    "cohere2": _GROUPED,
    "helium": _HEAD_DIM,
    "arcee": _GROUPED,
    "seed_oss": _HEAD_DIM,
    "exaone4": _GROUPED,
    "olmo3": _GROUPED,
    "apertus": _GROUPED,
    "ernie4_5": _HEAD_DIM,
    "hunyuan_v1_dense": _HEAD_DIM,
    "diffllama": _GROUPED,
    "bitnet": _GROUPED,
}
#: model type of an encoder and decoder -> settings beside the common ones
ENCODER_DECODERS: dict[str, dict[str, Any]] = {
    "t5": {"d_model": WIDTH, "d_ff": 64, "d_kv": 8, "num_layers": LAYERS, "num_heads": HEADS}
    | {"pad_token_id": 0, "decoder_start_token_id": 0},
}


def make_family(kind: str, **settings: Any) -> Any:
    """A tiny model of the family with random weights from seed 0, in evaluation mode; ``settings`` go to its config."""
    torch.manual_seed(0)
    config = CONFIG_MAPPING[kind](**(_COMMON | (FAMILIES | MORE_DECODERS | ENCODER_DECODERS)[kind] | settings))
    for key, value in config.to_dict().items():
        if "drop" in key and isinstance(value, float):  # two runs in training mode must agree
            setattr(config, key, 0.0)
    auto = AutoModelForSeq2SeqLM if kind in ENCODER_DECODERS else AutoModelForCausalLM
    return auto.from_config(config).eval()


def starting_tokenizer() -> Any:
    """Bytes as ids, and the token 257 before every text, as Llama's and Gemma's tokenizers put one."""
    from tokenizers import processors

    from relinear.data.tokenizers import PAD, byte_tokenizer

    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{PAD} $A", special_tokens=[(PAD, 257)]
    )
    return tokenizer


def make_cgt(**overrides):
    """A four-layer CGT of width 24 with a context of 12 from layer 2 on, in eval mode, no parameter at a zero."""
    import relinear

    settings = {
        "vocab_size": 50,
        "n_positions": 64,
        "n_embd": 24,
        "n_layer": 4,
        "n_head": 3,
        "context_layer": 2,
        "context_size": 12,
        "context_heads": 2,
        "rank": 2,
        "templates": 5,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    model = relinear.CGTForCausalLM(relinear.CGTConfig(**(settings | overrides)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()
