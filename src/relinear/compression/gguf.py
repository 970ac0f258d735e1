"""Export a model of stock layers as a GGUF file for llama.cpp."""

import importlib.util
import re
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from relinear.compression.export import check_stock
from relinear.compression.gguf_tokenizer import tokenizer_fields
from relinear.contract.operator import named_operators
from relinear.hf.model_config import loaded_from
from relinear.hf.stock_layer import to_stock_layer
from relinear.system.files import atomic_path
from relinear.system.version import __version__

#: classes of models that llama.cpp runs, and what GGUF calls their architectures
_ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "SmolLM3ForCausalLM": "smollm3",
    "Olmo2ForCausalLM": "olmo2",
    "Phi3ForCausalLM": "phi3",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
}
#: tokens without which llama.cpp does not load a model called Phi 3
_PHI_3 = {"<unk>", "<s>", "</s>", "<|endoftext|>"}
#: rotary positions that a Llama's file holds as divisors of its frequencies
_SCALED_ROPE = ("llama3", "linear")


def check_gguf(model: Any, tokenizer: Any) -> dict[str, Any]:
    """Return a file's fields about the tokenizer.

    Raises:
        ValueError: unless ``export_gguf`` can write models like this one. ImportError: without the package gguf.
    """
    if importlib.util.find_spec("gguf") is None:
        raise ImportError("GGUF files need the package gguf: pip install 'relinear[gguf]'")
    config = model.config
    architecture = _ARCHITECTURES.get(type(model).__name__, "")
    if not architecture:
        raise ValueError(
            f"GGUF files are written of {', '.join(_ARCHITECTURES)}, got {type(model).__name__}; call "
            "relinear.fold_(model) and convert it by llama.cpp's own script"
        )
    check_stock(model)
    gemma = architecture.startswith("gemma")
    size = _head_size(config)
    activation = config.hidden_activation if gemma else config.hidden_act
    softcapping = getattr(config, "attn_logit_softcapping", None)
    ropes = {_rope(config, kind).get("rope_type", "default") for kind in ("full", "sliding")}
    ropes -= {"default", *(_SCALED_ROPE if architecture == "llama" else ())}
    fourth = [layer % 4 != 3 for layer in range(config.num_hidden_layers)]
    differences = {
        "attention_bias": bool(getattr(config, "attention_bias", False)),
        "mlp_bias": bool(getattr(config, "mlp_bias", False)),
        f"the activation {activation}": activation != ("gelu_pytorch_tanh" if gemma else "silu"),
        f"rope_type={', '.join(sorted(ropes))}": bool(ropes),
        "no_rope_layers other than every fourth": getattr(config, "no_rope_layers", fourth) != fourth,
        "partial_rotary_factor": _rope(config).get("partial_rotary_factor", 1.0) != 1.0,
        "query_pre_attn_scalar": getattr(config, "query_pre_attn_scalar", size) != size,
        f"attn_logit_softcapping={softcapping}": (softcapping is None) == (architecture == "gemma2"),
        "bidirectional attention": bool(getattr(config, "use_bidirectional_attention", False)),
    }
    unsupported = [name for name, is_set in differences.items() if is_set]
    if unsupported:
        raise ValueError(
            f"a GGUF file is not written of a {type(model).__name__} with {', '.join(unsupported)}; "
            "call relinear.fold_(model)"
        )
    return tokenizer_fields(tokenizer, config.vocab_size)


def _rope(config: Any, kind: str = "full") -> dict[str, Any]:
    """Return how positions are rotated in layers of full or sliding attention."""
    parameters = getattr(config, "rope_parameters", None) or {}
    return parameters.get(f"{kind}_attention", parameters)


def _head_size(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def header_bytes(model: Any, tokenizer: Any) -> int:
    """Return an upper bound of the bytes before the tensors in ``model``'s file."""
    with tempfile.TemporaryDirectory() as folder:
        writer = _new_writer(path := Path(folder) / "header.gguf", model, check_gguf(model, tokenizer), tokenizer)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        return path.stat().st_size + sum(len(name) + 64 for name, _ in model.named_parameters())


@torch.no_grad()
def export_gguf(model: Any, path: str | Path, *, tokenizer: Any) -> Path:
    """Write ``model`` and its tokenizer as a GGUF file, all of it or nothing; weights keep their precision.

    Args:
        model: a Llama, Mistral, Qwen 2 or 3, SmolLM3, OLMo 2, Phi 3, Gemma 2 or 3 without images. ``Quantized``
            layers stay integers, other operators with one dense matrix become it.
        path: the file to write.
        tokenizer: of the model: byte-level BPE as llama.cpp knows it by name, or SentencePiece's BPE.

    Raises:
        ValueError: if the model or the tokenizer is one that these files, or this writer, cannot express.
        ImportError: without the package gguf.
    """
    fields = check_gguf(model, tokenizer)
    operators = dict(named_operators(model))
    inside = tuple(f"{name}." for name in operators)
    values = {name: value for name, value in model.named_parameters() if not name.startswith(inside)}
    for name, operator in operators.items():
        try:
            if hasattr(operator, "gguf_type"):
                operator.gguf_type()
            elif len(operator.dense_chain()) > 1:
                raise ValueError("a GGUF file cannot store a product of matrices as a layer; use relinear.fold_(model)")
            values |= {f"{name}.{part}": value for part, value in to_stock_layer(operator).named_parameters()}
        except ValueError as error:
            raise ValueError(f"{name} as {operator.config}: {error}") from error
    with atomic_path(path) as temporary:
        writer = _new_writer(temporary, model, fields, tokenizer)
        _write_tensors(writer, model.config, values, operators)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return Path(path)


def _new_writer(path: Path, model: Any, fields: dict[str, Any], tokenizer: Any) -> Any:
    """Return the writer of a file, with everything but the tensors."""
    from gguf import GGUFWriter

    writer = GGUFWriter(path, _ARCHITECTURES[type(model).__name__])
    writer.add_string("relinear.version", __version__)
    name = Path(loaded_from(model) or "model").name
    if _PHI_3 - {*fields["tokens"]}:
        name = re.sub("(?i)phi-?3", "phi", name)
    writer.add_name(name)
    _write_config(writer, model.config)
    add = {str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32, list: writer.add_array}
    for name, value in fields.items():
        add[type(value)](f"tokenizer.ggml.{name}", value)
    template = tokenizer.chat_template
    if isinstance(template, dict):  # several, by name; "default" is the one that programs take
        template = [{"name": name, "template": text} for name, text in template.items()]
    if template:
        writer.add_chat_template(template)
    return writer


def _write_config(writer: Any, config: Any) -> None:
    size = _head_size(config)
    window = config.to_dict().get("sliding_window")
    length = config.max_position_embeddings
    if writer.arch.startswith("gemma"):
        writer.add_sliding_window(window)
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
        writer.add_rope_freq_base_swa(float(_rope(config, "sliding")["rope_theta"]))
        for name in ("attn_logit_softcapping", "final_logit_softcapping"):
            if (value := getattr(config, name)) is not None:
                getattr(writer, f"add_{name}")(value)
    elif window is not None:  # llama.cpp attends to all tokens here; up to the window's length that is the same
        length = min(length, window)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(length)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(size)
    writer.add_value_length(size)
    writer.add_rope_dimension_count(size)
    writer.add_rope_freq_base(float(_rope(config).get("rope_theta", 10000.0)))
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)


def _write_tensors(writer: Any, config: Any, values: dict[str, Tensor], operators: dict[str, Any]) -> None:
    """Write every parameter of the folded model; ``operators`` that support GGUF's blocks are written as blocks."""
    from gguf import GGML_QUANT_VERSION, MODEL_ARCH, GGMLQuantizationType, LlamaFileType, get_tensor_name_map
    from gguf.quants import quantize

    names = get_tensor_name_map(MODEL_ARCH[writer.arch.upper()], config.num_hidden_layers)
    kinds = {torch.float16: GGMLQuantizationType.F16, torch.bfloat16: GGMLQuantizationType.BF16}
    types = Counter[Any]()
    for name, value in values.items():  # a tied head is the embedding, and not written again
        gguf_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if gguf_name is None:
            raise ValueError(f"{name} has no place in a GGUF file of {writer.arch}; call relinear.fold_(model)")
        kind = kinds.get(value.dtype, GGMLQuantizationType.F32) if value.ndim > 1 else GGMLQuantizationType.F32
        operator = operators.get(name.removesuffix(".weight"))
        in_blocks = hasattr(operator, "gguf_rows")
        if in_blocks:
            kind = GGMLQuantizationType[operator.gguf_type()]
        rows = operator.gguf_rows().cpu() if in_blocks else value.detach().float().cpu()
        if writer.arch in ("llama", "smollm3"):
            rows = _interleaved(name, rows, config)
        elif writer.arch.startswith("gemma") and name.endswith("norm.weight"):
            rows = rows + 1  # which Gemma adds as it runs
        data = rows.contiguous().numpy()
        if value.ndim > 1:
            types[kind] += value.numel()
        writer.add_tensor(gguf_name, data if in_blocks else quantize(data, kind), raw_dtype=kind)
    if (scaled := _rope(config).get("rope_type")) in _SCALED_ROPE:
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        frequencies, _ = ROPE_INIT_FUNCTIONS[scaled](config, torch.device("cpu"))
        plain = _rope(config)["rope_theta"] ** -(torch.arange(len(frequencies)) / len(frequencies))
        writer.add_tensor("rope_freqs.weight", (plain / frequencies).float().numpy())
    main_type = types.most_common(1)[0][0].name
    writer.add_file_type(next(file_type for file_type in LlamaFileType if main_type in file_type.name))
    writer.add_quantization_version(GGML_QUANT_VERSION)


def _interleaved(name: str, weight: Tensor, config: Any) -> Tensor:
    """Reorder query and key rows for GGUF's rotary embedding, which pairs neighbours, not halves of a head."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
    if heads is None:
        return weight
    return weight.view(heads, 2, -1, weight.shape[-1]).transpose(1, 2).reshape(weight.shape)
