"""GGUF files: read back by another program's reader, they give the same logits."""

import json
from contextlib import nullcontext

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

import relinear
from gguf_helpers import assert_same, llama, tokenizer_of
from relinear.compression import compress, export_gguf
from relinear.compression.gguf_tokenizer import _KNOWN
from relinear.data.tokenizers import byte_tokenizer
from tiny_models import make_family

gguf = pytest.importorskip("gguf")
SIZES = {"vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"}
SIZES |= {"num_key_value_heads", "max_position_embeddings", "initializer_range"}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_file_gives_the_same_logits(tied: bool, dtype, tmp_path) -> None:
    model = llama(tie_word_embeddings=tied).to(dtype)
    path = export_gguf(model, tmp_path / "model.gguf", tokenizer=tokenizer_of())
    wanted = llama(tie_word_embeddings=tied)
    wanted.load_state_dict(model.state_dict())
    assert_same(path, wanted)
    assert path.stat().st_size < 80_000 * dtype.itemsize // 2 + 40_000


def test_operators_of_one_matrix_are_exported(tmp_path) -> None:
    model = llama()
    relinear.replace_(model, {"q_proj": relinear.Monarch(blocks=4)})
    path = export_gguf(model, tmp_path / "model.gguf", tokenizer=tokenizer_of())
    assert isinstance(model.model.layers[0].self_attn.q_proj, relinear.Operator)
    assert_same(path, model)


@pytest.mark.parametrize(
    ("bits", "symmetric", "kind"),
    [
        (4, True, "IQ4_NL"),
        *((2, True, "Q4_0"), (3, True, "Q4_0"), (4, True, "Q4_0"), (5, True, "Q5_0"), (6, True, "Q8_0")),
        *((8, True, "Q8_0"), (2, False, "Q4_1"), (4, False, "Q4_1"), (5, False, "Q5_1")),
    ],
)
def test_integers_stay_integers(bits: int, symmetric: bool, kind: str, tmp_path) -> None:
    model = llama(hidden_size=64, intermediate_size=96)
    config = relinear.Quantized(bits=bits, symmetric=symmetric, levels="iq4_nl" if kind == "IQ4_NL" else "uniform")
    relinear.replace_(model, {r".*\.(q|k|down)_proj": config}, init="from_weight")
    down = model.model.layers[1].mlp.down_proj
    path = export_gguf(model, tmp_path / "model.gguf", tokenizer=tokenizer_of())
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    stored = tensors["blk.1.ffn_down.weight"]
    assert stored.tensor_type.name == kind == tensors["blk.0.attn_q.weight"].tensor_type.name
    assert tensors["blk.0.ffn_up.weight"].tensor_type.name == "F32"
    values = torch.from_numpy(gguf.dequantize(stored.data, stored.tensor_type))
    # codes and scales are as they were; an offset is rounded, within a share of its own size
    zero = 0 if symmetric else 2**bits * down.scales.abs().max() * 2.0**-11
    assert (values - down.to_dense()).abs().max() <= zero
    assert_same(path, model, atol=1e-5 if symmetric else 3e-2)


def test_a_plan_of_integers_becomes_blocks_mixed_by_layer(tmp_path) -> None:
    model = llama(hidden_size=64, intermediate_size=96)
    settings = {
        "tokens": 512,
        "sequence_length": 16,
        "candidates": ["quantized:symmetric=true"],
        "bits": 5.0,
        "reader": "llama.cpp",
        "evaluate": False,
        "self_sampled": False,
    }
    ids = [torch.randint(0, 320, (1024,), generator=torch.Generator().manual_seed(0))]
    compress(model, ids, settings=settings, tokenizer=tokenizer_of(), out_dir=tmp_path)
    bits = {op.config.bits for op in model.modules() if isinstance(op, relinear.Operator)}
    held = {{4: "Q4_0", 5: "Q5_0", 6: "Q8_0", 8: "Q8_0"}[max(4, size)] for size in bits}
    stored = gguf.GGUFReader(tmp_path / "model.gguf").tensors
    assert len(held) > 1
    assert {tensor.tensor_type.name for tensor in stored} == held | {"F32"}, "norms alone stay as they were"
    assert "F32" not in {t.tensor_type.name for t in stored if t.name in ("token_embd.weight", "output.weight")}
    assert_same(tmp_path / "model.gguf", model)


def test_integers_that_no_block_holds_are_refused_by_name(tmp_path) -> None:
    for config, match in (
        (
            relinear.Quantized(bits=8),
            "of more than 5 bits with zero points; give candidates=quantized:symmetric=true",
        ),
        (relinear.Quantized(bits=4, group=16), "group must be multiples of 32"),
    ):
        model = llama(hidden_size=64)
        relinear.replace_(model, {"q_proj": config}, init="from_weight")
        with pytest.raises(ValueError, match=rf"layers\.0\.self_attn\.q_proj as .*{match}"):
            export_gguf(model, tmp_path / "model.gguf", tokenizer=tokenizer_of())
        assert not (tmp_path / "model.gguf").exists()


@pytest.mark.parametrize("digits", [True, False])
def test_the_tokenizer_is_in_the_file(digits: bool, tmp_path) -> None:
    tokenizer = tokenizer_of(digits)
    tokenizer.chat_template = "{{ messages }}"
    path = export_gguf(llama(), tmp_path / "model.gguf", tokenizer=tokenizer)
    fields = gguf.GGUFReader(path).fields

    def value(name: str):
        return fields[f"tokenizer.{name}"].contents()

    tokens = value("ggml.tokens")
    assert {token: number for number, token in enumerate(tokens) if not token.startswith("[unused")} == (
        tokenizer.get_vocab()
    )
    assert len(tokens) == 320
    assert value("ggml.model") == "gpt2"
    assert value("ggml.pre") == ("smollm" if digits else "gpt-2")
    assert value("ggml.eos_token_id") == tokenizer.eos_token_id
    assert tokens[value("ggml.eos_token_id")] == tokenizer.eos_token
    assert value("ggml.token_type")[tokenizer.eos_token_id] == gguf.TokenType.CONTROL
    assert value("chat_template") == "{{ messages }}"
    # every merge makes an entry of the vocabulary
    assert all(merge.replace(" ", "") in tokenizer.get_vocab() for merge in value("ggml.merges"))


def known(name: str):
    return next(entry for entry in _KNOWN if entry.get("pre", "SentencePiece") == name)


def tokenizer_like(entry, cut: str | None = None, splits: bool = True, byte: str = "<0x0A>"):
    """A tokenizer with settings that llama.cpp knows, and a small vocabulary of its own; ``cut`` in their place."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    settings = entry["settings"]
    units = sorted(pre_tokenizers.ByteLevel.alphabet())
    if settings.get("byte_fallback"):
        units = [byte, *(f"<0x{number:02X}>" for number in range(256) if number != 10), *"▁theand"]
    vocabulary = {token: at for at, token in enumerate(["<unk>", *units, "th", "he", "the", "an", "and"])}
    merges = [("t", "h"), ("h", "e"), ("th", "e"), ("t", "he"), ("a", "n"), ("an", "d")]
    described = json.loads(Tokenizer(models.BPE(vocabulary, [m for m in merges if splits or m[1] != "he"])).to_str())
    steps = [
        step | {"trim_offsets": True} if step["type"] == "ByteLevel" else step for step in settings["pre_tokenizers"]
    ]
    if cut is not None:
        steps[0] = steps[0] | {"pattern": {"Regex": cut}}
    described["normalizer"] = {"type": "Sequence", "normalizers": [*settings["normalizers"], {"type": "NFC"}]}
    described["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": steps}
    described["model"] |= {key: settings.get(key, False) for key in ("ignore_merges", "byte_fallback")}
    described["model"]["unk_token"] = "<unk>"
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(described)), unk_token="<unk>")


@pytest.mark.parametrize("entry", [pytest.param(e, id=f"{e.get('pre')}-{at}") for at, e in enumerate(_KNOWN)])
def test_tokenizers_that_llama_cpp_knows_are_told_by_their_settings(entry, tmp_path) -> None:
    tokenizer = tokenizer_like(entry)
    tokenizer.add_tokens(["<▁>"])
    fields = gguf.GGUFReader(export_gguf(llama(), tmp_path / "model.gguf", tokenizer=tokenizer)).fields
    said = {name.removeprefix("tokenizer.ggml."): field.contents() for name, field in fields.items()}
    kinds = dict(zip(said["tokens"], said["token_type"], strict=True))
    if "pre" in entry:
        assert (said["model"], said["pre"]) == ("gpt2", entry["pre"])
        assert said["merges"][:3] == ["t h", "h e", "th e"]
        assert kinds["<▁>"] == gguf.TokenType.USER_DEFINED
    else:
        assert (said["model"], said["add_space_prefix"]) == ("llama", entry["add_space_prefix"])
        scores = dict(zip(said["tokens"], said["scores"], strict=True))
        assert [scores[token] for token in ("th", "he", "the", "an", "and")] == [0, -1, -2, -3, -4]
        assert kinds["<0x0A>"] == gguf.TokenType.BYTE
        assert kinds["< >"] == gguf.TokenType.USER_DEFINED, "llama.cpp looks for it where spaces are spaces"


#: sizes of heads are those that transformers takes for granted where it reads these families' files
GEMMA = {"head_dim": 256, "sliding_window": 8}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        *(("mistral", {"sliding_window": 40}), ("qwen2", {"tie_word_embeddings": True}), ("qwen3", {"head_dim": 128})),
        ("phi3", {"pad_token_id": None}),
        *(("gemma2", GEMMA), ("gemma3_text", GEMMA | {"num_hidden_layers": 6})),
    ],
)
def test_other_families_give_the_same_logits(kind: str, settings, tmp_path) -> None:
    torch.manual_seed(0)
    sizes = {key: value for key, value in llama().config.to_dict().items() if key in SIZES}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **(sizes | settings))).eval()
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    path = export_gguf(model, tmp_path / "model.gguf", tokenizer=tokenizer_of())
    assert_same(path, model)
    fields = gguf.GGUFReader(path).fields
    architecture = fields["general.architecture"].contents()
    assert fields[f"{architecture}.context_length"].contents() == (40 if kind == "mistral" else 64)
    if kind == "gemma3_text":
        assert fields["gemma3.attention.sliding_window_pattern"].contents() == [True] * 5 + [False]


def test_a_name_that_makes_llama_cpp_look_for_tokens_is_changed(tmp_path) -> None:
    model, tokenizer = llama(), tokenizer_of()
    model.config._name_or_path = "models/Phi-3-mini"
    names = []
    for _ in range(2):
        fields = gguf.GGUFReader(export_gguf(model, tmp_path / "model.gguf", tokenizer=tokenizer)).fields
        names.append(fields["general.name"].contents())
        tokenizer.add_tokens(["<unk>", "<s>", "</s>"], special_tokens=True)
    assert names == ["phi-mini", "Phi-3-mini"]


def test_layers_without_positions_are_every_fourth(tmp_path) -> None:
    sizes = {key: value for key, value in llama().config.to_dict().items() if key in SIZES}
    sizes |= {"num_hidden_layers": 4, "pad_token_id": None}
    for pattern, allowed in (([1, 1, 1, 0], True), ([1, 0, 1, 0], False)):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("smollm3", **sizes, no_rope_layers=pattern))
        with nullcontext() if allowed else pytest.raises(ValueError, match="no_rope_layers other than every fourth"):
            export_gguf(model, tmp_path / "model.gguf", tokenizer=tokenizer_of())


def test_scaled_positions_are_in_the_file(tmp_path) -> None:
    for scaling in (LLAMA3 | {"original_max_position_embeddings": 16}, {"rope_type": "linear", "factor": 4.0}):
        model = llama(rope_parameters=scaling | {"rope_theta": 5000.0}, head_dim=16)
        path = export_gguf(model, tmp_path / "model.gguf", tokenizer=tokenizer_of())
        divisors = next(t.data for t in gguf.GGUFReader(path).tensors if t.name == "rope_freqs.weight")
        frequencies = 5000.0 ** -(torch.arange(8) / 8) / torch.from_numpy(divisors.copy())
        assert torch.allclose(frequencies, model.model.rotary_emb.inv_freq)


def with_template(single: str, token: str = "<|endoftext|>"):
    from tokenizers import processors

    tokenizer = tokenizer_of()
    pairs = [(token, tokenizer.convert_tokens_to_ids(token))]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=pairs)
    return tokenizer


def with_settings(**settings):
    tokenizer = tokenizer_of()
    for name, value in settings.items():
        setattr(tokenizer.backend_tokenizer.model, name, value)
    return tokenizer


def with_token(**flags):
    from tokenizers import AddedToken

    tokenizer = tokenizer_of()
    tokenizer.add_tokens([AddedToken("<mark>", **flags)])
    return tokenizer


def without_bytes():
    """A vocabulary that lacks most bytes, which all become the unknown token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE({"<unk>": 0, "a": 1, "b": 2, "ab": 3}, [("a", "b")], unk_token="<unk>"))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="<unk>")


def test_spaces_beside_special_tokens_are_warned_about(tmp_path) -> None:
    with pytest.warns(UserWarning, match=r"keeps spaces beside special tokens.* \(rstrip of '<mark>'\)"):
        export_gguf(llama(), tmp_path / "model.gguf", tokenizer=with_token(rstrip=True, special=True))


@pytest.mark.parametrize("single", ["$A", "<|endoftext|> $A", "$A <|endoftext|>", "<|endoftext|> $A <|endoftext|>"])
def test_the_file_says_what_stands_around_a_text(single: str, tmp_path) -> None:
    path = export_gguf(llama(), tmp_path / "model.gguf", tokenizer=with_template(single))
    fields = gguf.GGUFReader(path).fields
    said = tuple(fields[f"tokenizer.ggml.add_{end}_token"].contents() for end in ("bos", "eos"))
    assert said == (single.startswith("<"), single.endswith(">"))


def test_templates_of_several_names_are_in_the_file(tmp_path) -> None:
    tokenizer = tokenizer_of()
    tokenizer.chat_template = {"default": "{{ messages }}", "tool_use": "{{ tools }}"}
    fields = gguf.GGUFReader(export_gguf(llama(), tmp_path / "model.gguf", tokenizer=tokenizer)).fields
    assert fields["tokenizer.chat_template"].contents() == "{{ messages }}"
    assert fields["tokenizer.chat_template.tool_use"].contents() == "{{ tools }}"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: with_template("a $A", "a"), "makes .* of a text whose tokens are"),
        (
            lambda: with_settings(dropout=0.1),
            "knows no tokenizer with these settings: type=BPE, dropout=0.1 after ByteLevel",
        ),
        (lambda: with_settings(ignore_merges=True), "settings: type=BPE, ignore_merges=True after ByteLevel"),
        (lambda: with_settings(byte_fallback=True), "knows no tokenizer with these settings"),
        (lambda: tokenizer_like(known("qwen2"), cut="[a-z]+"), "knows no tokenizer with these settings"),
        (lambda: tokenizer_like(known("SentencePiece"), byte="\n"), "has bytes without a token"),
        (lambda: tokenizer_like(known("SentencePiece"), splits=False), "merges are not those of a SentencePiece"),
        (lambda: with_token(lstrip=True), "has lstrip of '<mark>'"),
        (
            lambda: with_token(single_word=True, rstrip=True),
            "has rstrip of '<mark>', single_word of '<mark>', which no GGUF",
        ),
        (without_bytes, "has bytes without a token"),
    ],
)
def test_what_a_file_cannot_say_of_a_tokenizer_is_refused(make, message: str, tmp_path) -> None:
    with pytest.raises(ValueError, match=message):
        export_gguf(llama(), tmp_path / "model.gguf", tokenizer=make())
    assert not list(tmp_path.iterdir())


def test_a_tokenizer_of_a_larger_vocabulary_is_refused(tmp_path) -> None:
    with pytest.raises(ValueError, match="tokens beyond the 280 of the model"):
        export_gguf(llama(vocab_size=280), tmp_path / "model.gguf", tokenizer=tokenizer_of())


def test_refusals_before_anything_is_computed(tmp_path) -> None:
    settings = {"tokens": 256, "sequence_length": 16, "self_sampled": False, "reader": "llama.cpp"}
    ids = [torch.randint(0, 320, (256,), generator=torch.Generator().manual_seed(0))]

    def refused(match: str, model, tokenizer, **further):
        with pytest.raises(ValueError, match=match):
            compress(model, ids, settings=settings | further, tokenizer=tokenizer, out_dir=tmp_path)
        assert not (tmp_path / "model.gguf").exists()
        assert not (tmp_path / "model").exists()
        assert not (tmp_path / "calibration").exists()

    refused("stores floats", llama(), tokenizer_of(), candidates=["low_rank"])
    refused("bits=4.25 cannot be met", llama(hidden_size=64), tokenizer_of(), bits=4.25)
    refused("needs a fast tokenizer", llama(), None)
    refused("knows no tokenizer with these settings.*Compress without --for", llama(), byte_tokenizer())
    refused("attention_bias", llama(attention_bias=True), tokenizer_of())
    refused("rope_type=yarn", llama(rope_parameters={"rope_type": "yarn", "factor": 2.0}), tokenizer_of())
    refused("of LlamaForCausalLM, .*got GPT2LMHeadModel", make_family("gpt2"), tokenizer_of())
