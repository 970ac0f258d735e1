"""GGUF files of tiny random models, one family each, read by llama.cpp: token ids and logits beside transformers'.

    python results/compress/gguf_families.py --program ./llama_files --vocabularies LLAMA/models \\
        --out results/compress/gguf_families.json

``llama_files`` is built as ``llama_files.py`` says. Every tokenizer has the settings of public ones of its kind, as
they stand in their tokenizer.json, and a vocabulary that is trained here, so that nothing is fetched. ``text`` holds
what tokenizers part over: digits, contractions, capitals, Chinese, Arabic, emoji, runs of spaces and of line ends. Of
every family's model a file in full precision is written, by ``export_gguf``, and one in eight bits, by ``relinear
compress --for llama.cpp`` from a directory as a user has it; both give logits here and there. ``LLAMA/models`` holds
vocabularies of public models, texts, and what the models' own tokenizers make of them.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy
import torch
from gguf import GGUFReader, TokenType
from tokenizers import AddedToken, Tokenizer, decoders, models, processors, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

import relinear
from relinear.compression import export_gguf
from relinear.compression.gguf_tokenizer import _KNOWN
from relinear.system.machine import provenance
from relinear_cli.main import main as relinear_command

TEXT = (
    "Hello World! It's what we'VE got: they'll say I'm 'fine', don't they? "
    "3.14159 and 1234567890, 42, 7th, ½ ٣٤ x2y3\n\n\n"
    "def f(x):\n    return  x**2   # two   spaces\t\ttabs\r\n\r\n"
    "CamelCaseWords iPhone HTTPServer naïve café Straße\n"
    "我想在apple工作1314151天～ 日本語のテキスト 한국어 텍스트\n"
    "🚀 (normal) 😶‍🌫️ ✅ 🦙🦙 مرحبا بالعالم Привет, мир\n"
    "$100 a_b-c/d\\e ------======= '''''' ```` !!!??? ...   \n   end"
)
#: where programs part more often than elsewhere
APART = {
    "a first space": "  two spaces first",
    "special tokens": "<s>special</s> <tool>call<tool> it",
    "capitals inside words outside ASCII": "ПриветМир ÉcoleÉté",
    "combining marks": "हिन्दी नमस्ते ไทยที่ e\u0301",
}
SIZES = {
    "vocab_size": 1536,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 64}
GEMMA = {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 16}
#: a family: type of its config, settings, and the number of its tokenizer among the known ones
FAMILIES: dict[str, tuple[str, dict[str, Any], str]] = {
    "Llama 2, TinyLlama": ("llama", {}, "SentencePiece, Metaspace first"),
    "Llama 3": ("llama", {"rope_parameters": LLAMA3, "head_dim": 32}, "llama-bpe"),
    "a Llama of linear positions": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0}}, "smollm"),
    "SmolLM2": ("llama", {"tie_word_embeddings": True}, "smollm"),
    "SmolLM3": ("smollm3", {"tie_word_embeddings": True}, "dbrx"),
    "Mistral 7B": ("mistral", {"sliding_window": 256}, "SentencePiece, Prepend Replace"),
    "Mistral Nemo": ("mistral", {"sliding_window": None, "head_dim": 32}, "tekken"),
    "Qwen 2, 2.5": ("qwen2", {"tie_word_embeddings": True}, "qwen2"),
    "Qwen 3": ("qwen3", {"head_dim": 32}, "qwen2"),
    "OLMo 2": ("olmo2", {}, "dbrx"),
    "Phi 3, 4": ("phi3", {}, "dbrx"),
    "Gemma 2": ("gemma2", GEMMA, "SentencePiece, Replace Split"),
    "Gemma 3": ("gemma3_text", GEMMA, "SentencePiece, Replace Split"),
}


#: public vocabularies that llama.cpp is tested with, and which tokenizer is theirs
VOCABULARIES = {
    "llama-spm": "SentencePiece, Prepend Replace",
    "gpt-2": "gpt-2",
    "llama-bpe": "llama-bpe",
    "qwen2": "qwen2",
    "deepseek-llm": "deepseek-llm",
    "deepseek-coder": "deepseek-coder",
    "falcon": "falcon",
    "starcoder": "smollm",
    "command-r": "smollm",
}


def corpus() -> list[str]:
    """Return what the vocabularies are trained on."""
    return [TEXT, *APART.values()] * 4 + [Path(json.__file__).read_text(encoding="utf-8"), Path(__file__).read_text()]


def name_of(known: dict[str, Any]) -> str:
    """Return llama.cpp's name of a tokenizer, or the steps of one of SentencePiece's kind."""
    steps = known["settings"]["normalizers"] + known["settings"]["pre_tokenizers"]
    details = [" ".join(filter(None, (step["type"], step.get("prepend_scheme")))) for step in steps]
    return known.get("pre") or "SentencePiece, " + " ".join(details)


def tokenizer_of(known: dict[str, Any]) -> PreTrainedTokenizerFast:
    """Return a tokenizer with settings of the table and a vocabulary of its own."""
    byte_level, settings = "pre" in known, known["settings"]
    backend = Tokenizer(models.BPE(unk_token=None if byte_level else "<unk>", byte_fallback=not byte_level))
    described = json.loads(backend.to_str())
    steps = [
        step | {"trim_offsets": True} if step["type"] == "ByteLevel" else step for step in settings["pre_tokenizers"]
    ]
    described["normalizer"] = {"type": "Sequence", "normalizers": settings["normalizers"]}
    described["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": steps}
    special = ["<unk>", "<s>", "</s>"]
    if byte_level:
        described["model"]["ignore_merges"] = settings.get("ignore_merges", False)
        described["decoder"] = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
        backend = Tokenizer.from_str(json.dumps(described))
        from tokenizers.pre_tokenizers import ByteLevel

        alphabet = ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=1400, special_tokens=special, initial_alphabet=alphabet)
        backend.train_from_iterator(corpus(), trainer)
    else:
        backend = Tokenizer.from_str(json.dumps(described | {"decoder": None}))
        trainer = trainers.BpeTrainer(vocab_size=1100, limit_alphabet=90, max_token_length=12)
        backend.train_from_iterator((line for text in corpus() for line in text.splitlines()), trainer)
        learned = [t for t, _ in sorted(backend.get_vocab().items(), key=lambda pair: pair[1])]
        tokens = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), *learned]
        vocabulary = {token: number for number, token in enumerate(dict.fromkeys(tokens))}
        made = [token for token in vocabulary if token not in tokens[: len(special) + 256]]
        splits = ((token[:at], token[at:]) for token in made for at in range(1, len(token)))
        merges = [pair for pair in splits if pair[0] in vocabulary and pair[1] in vocabulary]
        described["model"] |= {"vocab": vocabulary, "merges": merges, "unk_token": "<unk>", "fuse_unk": True}
        backend = Tokenizer.from_str(json.dumps(described))
        backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
        backend.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    backend.add_tokens([AddedToken("<tool>", normalized=False)])
    template = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    backend.post_processor = template
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def public_tokenizer(file: Path, known: dict[str, Any]) -> PreTrainedTokenizerFast:
    """Return a tokenizer with settings of the table and the vocabulary of a GGUF file."""
    fields, settings = GGUFReader(file).fields, known["settings"]
    tokens, kinds = (fields[f"tokenizer.ggml.{name}"].contents() for name in ("tokens", "token_type"))
    numbers = {token: number for number, token in enumerate(tokens)}
    if "pre" in known:
        vocabulary = {token: number for token, number in numbers.items() if kinds[number] == TokenType.NORMAL}
        merges = [tuple(pair.split(" ")) for pair in fields["tokenizer.ggml.merges"].contents()]
    else:
        scores, vocabulary = fields["tokenizer.ggml.scores"].contents(), numbers
        made = sorted((n for n in numbers.values() if kinds[n] == TokenType.NORMAL), key=lambda n: -scores[n])
        splits = ((tokens[n][:at], tokens[n][at:]) for n in made for at in range(1, len(tokens[n])))
        merges = [pair for pair in splits if pair[0] in vocabulary and pair[1] in vocabulary]
    backend = Tokenizer(models.BPE(vocabulary, merges, byte_fallback="pre" not in known))
    described = json.loads(backend.to_str())
    steps = [
        step | {"trim_offsets": True} if step["type"] == "ByteLevel" else step for step in settings["pre_tokenizers"]
    ]
    described["normalizer"] = {"type": "Sequence", "normalizers": settings["normalizers"]}
    described["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": steps}
    described["model"] |= {"ignore_merges": settings.get("ignore_merges", False)}
    backend = Tokenizer.from_str(json.dumps(described))
    for token, kind in zip(tokens, kinds, strict=True):
        if kind in (TokenType.CONTROL, TokenType.USER_DEFINED):
            backend.add_tokens([AddedToken(token, normalized=False, special=kind == TokenType.CONTROL)])
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def published(file: Path, tokenizer: Any, program: str, work: Path) -> dict[str, int]:
    """Return how many of a vocabulary's texts have the published ids, by the tokenizer, and in a file of ours."""
    texts = Path(f"{file}.inp").read_text(encoding="utf-8").split("\n__ggml_vocab_test__\n")
    wanted = [[int(number) for number in line.split()] for line in Path(f"{file}.out").read_text().split("\n")]
    sizes = {"vocab_size": len(tokenizer), "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    model = export_gguf(model_of("llama", sizes), work / "model.gguf", tokenizer=tokenizer)
    pairs = list(zip(texts, wanted, strict=False))
    return {
        "texts": len(pairs),
        "by the tokenizer": sum(tokenizer(text)["input_ids"] == ids for text, ids in pairs),
        "in a file of ours": sum(ids_in_llama_cpp(program, model, text, work) == ids for text, ids in pairs),
    }


def model_of(kind: str, settings: dict[str, Any]) -> Any:
    """Return a random model, its norms and biases random, too."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **(SIZES | settings), bos_token_id=1, eos_token_id=2, pad_token_id=None)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += 0.2 * torch.randn_like(parameter)
    return model


def run(program: str, *arguments: Any) -> str:
    """Return what the program prints."""
    return subprocess.run([program, *map(str, arguments)], check=True, capture_output=True, text=True).stdout


def ids_in_llama_cpp(program: str, file: Path, text: str, work: Path) -> list[int]:
    """Return llama.cpp's token ids of a text."""
    (work / "text").write_bytes(text.encode())
    return [int(number) for number in run(program, "tokens", file, work / "text").split()]


def divergence(program: str, file: Path, model: Any, ids: list[int], work: Path) -> float:
    """Return the mean KL divergence, in nats, of llama.cpp's next tokens from those of the model here."""
    numpy.array(ids, dtype=numpy.int32).tofile(work / "ids")
    run(program, "logits", work / "ids", work / "logits", file)
    found = torch.from_numpy(numpy.fromfile(work / "logits", dtype=numpy.float32)).view(len(ids), -1)
    with torch.no_grad():
        wanted = model(input_ids=torch.tensor([ids])).logits[0].float().log_softmax(-1)
    return float((wanted.exp() * (wanted - found.log_softmax(-1))).sum(-1).mean())


def main() -> None:
    """Write what both say of every tokenizer and every family."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--program", required=True)
    parser.add_argument("--vocabularies", required=True)
    parser.add_argument("--out", required=True)
    given = parser.parse_args()
    known = {name_of(entry): entry for entry in _KNOWN}
    tokenizers, vocabularies, families = {}, {}, {}
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        (work / "data.txt").write_text("\n\n".join(corpus()), encoding="utf-8")
        for name, entry in known.items():
            tokenizer = tokenizer_of(entry)
            file = export_gguf(model_of("llama", {}), work / "model.gguf", tokenizer=tokenizer)
            same = {
                what: ids_in_llama_cpp(given.program, file, text, work) == tokenizer(text)["input_ids"]
                for what, text in {"text": TEXT, **APART}.items()
            }
            tokenizers[name] = same
            print(name, same, flush=True)
        for name, like in VOCABULARIES.items():
            file = Path(given.vocabularies) / f"ggml-vocab-{name}.gguf"
            vocabularies[name] = published(file, public_tokenizer(file, known[like]), given.program, work)
            print(name, vocabularies[name], flush=True)
        for family, (kind, settings, name) in FAMILIES.items():
            model, tokenizer = model_of(kind, settings), tokenizer_of(known[name])
            source, out = work / f"{family} source", work / f"{family} out"
            model.save_pretrained(source)
            tokenizer.save_pretrained(source)
            ids = tokenizer(TEXT)["input_ids"]
            file = export_gguf(model, work / "model.gguf", tokenizer=tokenizer)
            nats = {"tokenizer": name, "full precision": divergence(given.program, file, model, ids, work)}
            options = ["--tokens", "256", "--bits", "8.6", "--set", "sequence_length=32", "--no-evaluate", "--out", out]
            options += ["--for", "llama.cpp", "--data", work / "data.txt"]
            if relinear_command(["compress", str(source), *map(str, options)]):
                raise SystemExit(f"{family} is refused")
            rounded = relinear.from_pretrained(str(out / "model"))
            nats["eight bits, by the command"] = divergence(given.program, out / "model.gguf", rounded, ids, work)
            nats["ids"] = ids_in_llama_cpp(given.program, out / "model.gguf", TEXT, work) == ids
            families[family] = nats
            print(family, nats, flush=True)
    record = {"tokenizers": tokenizers, "vocabularies": vocabularies, "families": families, **provenance()}
    Path(given.out).write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
