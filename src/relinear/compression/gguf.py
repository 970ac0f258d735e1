"""A model of stock Llama layers as one GGUF file, which llama.cpp and its kin run."""

import importlib.util
import json
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from tokenizers.pre_tokenizers import ByteLevel
from torch import Tensor

from relinear.compression.export import check_stock
from relinear.contract.auxiliary_losses import named_operators
from relinear.contract.folding import to_stock_layer
from relinear.system.files import atomic_path
from relinear.system.version import __version__

#: class and model type of what GGUF's architecture "llama" stands for here
_CLASS, _ARCHITECTURE = "LlamaForCausalLM", "llama"
_DIGITS = {"type": "Digits", "individual_digits": True}
#: settings of a BPE model that change what it does where they are set
_BPE_SETTINGS = ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback", "ignore_merges")
#: bytes that occur in no text, as BPE writes them
_NO_TEXT = set("ÀÁõö÷øùúûüýþÿ")
#: pre-tokenizers that are known to llama.cpp: how it calls them, and the steps before bytes
_PRE_TOKENIZERS: dict[str, list[dict[str, Any]]] = {"gpt-2": [], "smollm": [_DIGITS]}


def check_gguf(model: Any, tokenizer: Any) -> None:
    """Raise ValueError, or ImportError, unless ``export_gguf`` can write models like this one."""
    if importlib.util.find_spec("gguf") is None:
        raise ImportError("GGUF files need the package gguf: pip install 'relinear[gguf]'")
    if type(model).__name__ != _CLASS:
        raise ValueError(f"GGUF files are written of {_CLASS} alone, got {type(model).__name__}; relinear.fold_ it")
    check_stock(model)
    config = model.config
    unlike = {
        "attention_bias": bool(getattr(config, "attention_bias", False)),
        "mlp_bias": bool(getattr(config, "mlp_bias", False)),
        f"hidden_act={config.hidden_act}": config.hidden_act != "silu",
        f"rope_type={_rope(config).get('rope_type')}": _rope(config).get("rope_type", "default") != "default",
    }
    unsupported = [name for name, is_set in unlike.items() if is_set]
    if unsupported:
        raise ValueError(f"a GGUF file is not written of a Llama with {', '.join(unsupported)}; relinear.fold_ it")
    if tokenizer is None:
        raise ValueError("a GGUF file holds the tokenizer: give tokenizer=")
    _pre_tokenizer(tokenizer)
    _added_around(tokenizer)
    beyond = [token for token, number in tokenizer.get_vocab().items() if number >= config.vocab_size]
    if beyond:
        raise ValueError(
            f"the tokenizer has {len(beyond)} tokens beyond the {config.vocab_size} of the model, such as {beyond[0]!r}"
        )


def _rope(config: Any) -> dict[str, Any]:
    return getattr(config, "rope_parameters", None) or {}


def _pre_tokenizer(tokenizer: Any) -> str:
    """llama.cpp's name of how the tokenizer cuts text before its merges."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ValueError("a GGUF file is written of a fast tokenizer alone; load it by AutoTokenizer")
    described = json.loads(backend.to_str())
    bpe, pre = described["model"], described["pre_tokenizer"] or {}
    steps = list(pre.get("pretokenizers", [pre]))
    last = steps.pop() if steps else {}
    plain = last.get("type") == "ByteLevel" and last.get("use_regex", True) and not last.get("add_prefix_space", True)
    name = next((name for name, wanted in _PRE_TOKENIZERS.items() if steps == wanted), None)
    if bpe.get("type") != "BPE" or described["normalizer"] or not plain or name is None:
        raise ValueError(
            "a GGUF file is written with byte-level BPE tokenizers that cut text as GPT-2's or SmolLM's does, and this "
            "one is another; relinear.fold_ the model and convert it by llama.cpp's own script"
        )
    decoder, letters = described["decoder"] or {}, set(ByteLevel.alphabet()) - _NO_TEXT
    unlike = {
        **{f"{key}={bpe.get(key)!r}": bool(bpe.get(key)) for key in _BPE_SETTINGS},
        # which it turns into unk_token, and llama.cpp leaves out
        "bytes without a token": bool(bpe.get("unk_token") and letters - set(bpe["vocab"])),
        f"the decoder {decoder.get('type')}": decoder.get("type") != "ByteLevel",
    }
    for token in described["added_tokens"]:
        flags = [key for key in ("lstrip", "rstrip", "single_word") if token[key]]
        unlike[f"{', '.join(flags)} of {token['content']!r}"] = bool(flags)
    unsupported = [what for what, is_set in unlike.items() if is_set]
    if unsupported:
        raise ValueError(
            f"the tokenizer has {'; '.join(unsupported)}, which a GGUF file cannot express; relinear.fold_ the model"
        )
    return name


def _added_around(tokenizer: Any) -> tuple[bool, bool]:
    """Return whether the tokenizer puts its BOS before a text and its EOS behind it: what it does, not says."""
    ids = tokenizer("a", truncation=False)["input_ids"]
    plain = tokenizer("a", truncation=False, add_special_tokens=False)["input_ids"]
    bos, eos = [tokenizer.bos_token_id], [tokenizer.eos_token_id]
    for before, after in ((False, False), (True, False), (False, True), (True, True)):
        if ids == bos * before + plain + eos * after:
            return before, after
    raise ValueError(
        f"the tokenizer makes {ids} of a text whose tokens are {plain}. A GGUF file can only say that the BOS token "
        f"({bos[0]}) stands before a text and the EOS token ({eos[0]}) behind it; relinear.fold_ the model"
    )


def header_bytes(model: Any, tokenizer: Any) -> int:
    """Return bytes at most of what stands before the tensors of ``model``'s file."""
    from gguf import GGUFWriter

    with tempfile.TemporaryDirectory() as folder:
        writer = GGUFWriter(path := Path(folder) / "header.gguf", _ARCHITECTURE)
        _write_config(writer, model.config)
        _write_tokenizer(writer, tokenizer, model.config.vocab_size)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        return path.stat().st_size + sum(len(name) + 64 for name, _ in model.named_parameters())


@torch.no_grad()
def export_gguf(model: Any, path: str | Path, *, tokenizer: Any) -> Path:
    """Write ``model`` and its tokenizer as a GGUF file, all of it or nothing; weights keep their precision.

    Args:
        model: a ``LlamaForCausalLM``. ``Quantized`` layers stay integers, other
            operators with one dense matrix become it.
        path: the file to write.
        tokenizer: of the model: byte-level BPE.

    Raises:
        ValueError: if the model or the tokenizer is one that these files, or this writer, cannot express.
        ImportError: without the package gguf.
    """
    check_gguf(model, tokenizer)
    operators = dict(named_operators(model))
    for name, operator in operators.items():
        try:
            if hasattr(operator, "gguf_type"):
                operator.gguf_type()
            elif len(operator.dense_chain()) > 1:
                raise ValueError("no layer of a GGUF file is a product of matrices; relinear.fold_ it")
        except ValueError as error:
            raise ValueError(f"{name} as {operator.config}: {error}") from error
    inside = tuple(f"{name}." for name in operators)
    values = {name: value for name, value in model.named_parameters() if not name.startswith(inside)}
    for name, operator in operators.items():
        values |= {f"{name}.{part}": value for part, value in to_stock_layer(operator).named_parameters()}
    from gguf import GGUFWriter

    with atomic_path(path) as temporary:
        writer = GGUFWriter(temporary, _ARCHITECTURE)
        _write_config(writer, model.config)
        _write_tokenizer(writer, tokenizer, model.config.vocab_size)
        _write_tensors(writer, model.config, values, operators)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return Path(path)


def _write_config(writer: Any, config: Any) -> None:
    writer.add_string("relinear.version", __version__)
    heads = config.num_attention_heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // heads
    writer.add_name(Path(getattr(config, "_name_or_path", "") or "model").name)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_size)
    writer.add_value_length(head_size)
    writer.add_rope_dimension_count(head_size)
    writer.add_rope_freq_base(float(_rope(config).get("rope_theta", 10000.0)))
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)


def _write_tokenizer(writer: Any, tokenizer: Any, entries: int) -> None:
    from gguf import TokenType

    described = json.loads(tokenizer.backend_tokenizer.to_str())
    added = {token["id"]: token for token in described["added_tokens"]}
    names = {number: token for token, number in tokenizer.get_vocab().items()}
    kinds = []
    for number in range(entries):
        kind = TokenType.NORMAL if number in names else TokenType.UNUSED
        if number in added:
            kind = TokenType.CONTROL if added[number]["special"] else TokenType.USER_DEFINED
        kinds.append(kind)
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in described["model"]["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(_pre_tokenizer(tokenizer))
    writer.add_token_list([names.get(number, f"[unused{number}]") for number in range(entries)])
    writer.add_token_types(kinds)
    writer.add_token_merges(merges)
    for name in ("bos", "eos", "pad", "unk"):
        number = getattr(tokenizer, f"{name}_token_id")
        if number is not None:
            getattr(writer, f"add_{name}_token_id")(number)
    before, after = _added_around(tokenizer)
    writer.add_add_bos_token(before)
    writer.add_add_eos_token(after)
    template = tokenizer.chat_template
    if isinstance(template, dict):  # several, by name; "default" is the one that programs take
        template = [{"name": name, "template": text} for name, text in template.items()]
    if template:
        writer.add_chat_template(template)


def _write_tensors(writer: Any, config: Any, values: dict[str, Tensor], operators: dict[str, Any]) -> None:
    """Every parameter of the folded model by name; those of ``operators`` that know GGUF's blocks as blocks."""
    from gguf import GGML_QUANT_VERSION, MODEL_ARCH, GGMLQuantizationType, LlamaFileType, get_tensor_name_map
    from gguf.quants import quantize

    names = get_tensor_name_map(MODEL_ARCH.LLAMA, config.num_hidden_layers)
    kinds = {torch.float16: GGMLQuantizationType.F16, torch.bfloat16: GGMLQuantizationType.BF16}
    types = Counter[Any]()
    for name, value in values.items():  # a tied head is the embedding, and not written again
        gguf_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if gguf_name is None:
            raise ValueError(f"{name} has no place in a GGUF file of a Llama; relinear.fold_ the model")
        kind = kinds.get(value.dtype, GGMLQuantizationType.F32) if value.ndim > 1 else GGMLQuantizationType.F32
        operator = operators.get(name.removesuffix(".weight"))
        if hasattr(operator, "gguf_rows"):
            kind = GGMLQuantizationType[operator.gguf_type()]
            data = _interleaved(name, operator.gguf_rows().cpu(), config).contiguous().numpy()
        else:
            rows = _interleaved(name, value.detach().float().cpu(), config).contiguous().numpy()
            data = quantize(rows, kind)
        if value.ndim > 1:
            types[kind] += value.numel()
        writer.add_tensor(gguf_name, data, raw_dtype=kind)
    main_type = types.most_common(1)[0][0].name
    writer.add_file_type(next(file_type for file_type in LlamaFileType if main_type in file_type.name))
    writer.add_quantization_version(GGML_QUANT_VERSION)


def _interleaved(name: str, weight: Tensor, config: Any) -> Tensor:
    """Query and key rows as rotary positions pair them in GGUF: neighbours, not halves of a head."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
    if heads is None:
        return weight
    return weight.view(heads, 2, -1, weight.shape[-1]).transpose(1, 2).reshape(weight.shape)
