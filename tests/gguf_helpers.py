"""Small Llamas and their GGUF files, for the tests of exports."""

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from relinear.data.tokenizers import train_bpe

TEXT = "The quick brown fox jumps over 123 lazy dogs, and then 45 more. "


def tokenizer_of(digits: bool = False):
    tokenizer = train_bpe([TEXT * 20], 300, len(TEXT) * 20)
    if digits:
        from tokenizers import pre_tokenizers

        steps = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    return tokenizer


def llama(**settings):
    torch.manual_seed(0)
    config = {"vocab_size": 320, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config |= {"num_attention_heads": 4, "num_key_value_heads": 2, "rope_theta": 5000.0, "max_position_embeddings": 64}
    config |= {"initializer_range": 0.2}
    return AutoModelForCausalLM.from_config(LlamaConfig(**(config | settings))).eval()


def read(path):
    return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()


def assert_same(path, model, atol: float = 1e-5) -> None:
    """In double precision: float32 sums of the file's dense layers differ by more than the file does."""
    ids = torch.arange(3, 19)[None]
    with torch.no_grad():
        assert torch.allclose(
            read(path).double()(input_ids=ids).logits, model.double()(input_ids=ids).logits, atol=atol
        )
