"""Compression refuses what it cannot work on, in words and before anything is computed or changed."""

import ast
import json
import re

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, BatchEncoding, T5Config

import relinear
from compress_helpers import LOW_RANK, SETTINGS, tiny, tokens
from relinear.compression import compress
from relinear.compression.corpus import read_corpus
from relinear.compression.settings import CompressSettings
from relinear.data.tokenizers import byte_tokenizer
from relinear_cli.main import main


def spoilt(value: float):
    model = tiny()
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 0] = value
    return model


def encoder_decoder():
    sizes = {"vocab_size": 50, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    return AutoModelForSeq2SeqLM.from_config(T5Config(**sizes))


def refused(model, ids, message: str, folder, **more) -> None:
    phases = []
    with pytest.raises(ValueError, match=message):
        compress(model, ids, out_dir=folder, on_progress=phases.append, **more)
    assert not phases
    assert not (folder / "calibration" / "moments-0000.safetensors").exists()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: spoilt(float("nan")), r"layers\.1\.mlp\.up_proj\.weight holds values that are not finite"),
        (lambda: spoilt(float("inf")), r"layers\.1\.mlp\.up_proj\.weight holds values that are not finite"),
        (lambda: tiny().to("meta"), "embed_tokens.weight has no values"),
        (encoder_decoder, "T5ForConditionalGeneration is an encoder-decoder; compress needs a causal language model"),
        (lambda: tiny().model, "LlamaModel returns no logits of each token; compress needs a causal language model"),
    ],
)
def test_models_that_cannot_be_compressed(make, message: str, tmp_path) -> None:
    refused(make(), tokens(), message, tmp_path, settings=SETTINGS)


def test_layers_outside_of_the_decoder_are_named_by_a_pattern_that_leaves_them_out(tmp_path) -> None:
    model = tiny()
    model.model.tower = torch.nn.ModuleList(torch.nn.ModuleDict({"fc": torch.nn.Linear(8, 8)}) for _ in range(5))
    model.layer = torch.nn.Linear(8, 8)
    message = r"model.tower.0.fc and 5 more lie outside of the decoder layers.* exclude=(.*)"
    with pytest.raises(ValueError, match=message) as raised:
        compress(model, tokens(), out_dir=tmp_path, settings=SETTINGS)
    excluded = ast.literal_eval(re.search(message, str(raised.value)).group(1))
    assert excluded == ["model.tower.*", "layer"]
    compress(model, tokens(), out_dir=tmp_path, settings=LOW_RANK, exclude=excluded, plan_only=True)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (tokens()[0] + 40, "token ids from 40 to 89, and LlamaForCausalLM embeds 0 to 49: use the tokenizer"),
        (tokens()[0] - 3, "token ids from -3 to 46"),
        (tokens()[0].float(), "token ids must be integers, got float32"),
    ],
)
def test_ids_that_the_model_does_not_know(ids, message: str, tmp_path) -> None:
    refused(tiny(), [ids], f"the corpus.*{message}", tmp_path, settings=SETTINGS)
    elsewhere = {"far": [ids]}
    settings = SETTINGS | {"evaluate": True}
    refused(tiny(), tokens(), f"far.*{message}", tmp_path, settings=settings, evaluate_on=elsewhere)


def test_corpora_in_turns_that_are_too_short_or_none(tmp_path) -> None:
    few = {"long": tokens(), "short": [torch.arange(40)]}
    message = r"short, one of 2 corpora in turns: the corpus has 40 tokens; 256 are to be recorded"
    refused(tiny(), few, message, tmp_path, settings=SETTINGS)
    refused(tiny(), {}, "texts is an empty mapping", tmp_path, settings=SETTINGS)
    rows = torch.arange(1024).view(16, 64) % 40
    for encoded in ({"input_ids": rows, "attention_mask": torch.ones_like(rows)}, BatchEncoding({"input_ids": rows})):
        refused(tiny(), encoded, "one mapping with input_ids", tmp_path, settings=SETTINGS)
    many = {str(i): tokens() for i in range(33)}
    refused(tiny(), many, "33 corpora in turns, and 32 blocks of sequence_length=16", tmp_path, settings=SETTINGS)


def test_sequences_longer_than_the_model_takes(tmp_path) -> None:
    settings = SETTINGS | {"sequence_length": 64}
    refused(
        tiny("gpt2"),
        tokens(),
        "texts of 64 tokens are too long for this model, which reads 32",
        tmp_path,
        settings=settings,
    )


def test_the_default_window_is_no_longer_than_the_model_reads(tmp_path) -> None:
    """A window that the user asked for is refused, by the command line too, and resuming finds the same settings."""
    model, out, settings = tiny("gpt2"), tmp_path / "out", LOW_RANK | {"tokens": 512}
    del settings["sequence_length"]
    for given in (settings, CompressSettings(**settings)):
        report = compress(model, tokens(), settings=given, out_dir=out, plan_only=True)
        assert report.settings["sequence_length"] == model.config.n_positions == 32
    relinear.save_pretrained(tiny("gpt2", 258), tmp_path / "model", tokenizer=byte_tokenizer())
    (tmp_path / "text.txt").write_text("Three words and a full stop. " * 400)
    command = ["compress", str(tmp_path / "model"), "--data", str(tmp_path / "text.txt"), "--dry-run"]
    command += ["--out", str(tmp_path / "none")]
    assert main(command) == 0
    assert main([*command, "--set", "sequence_length=64"]) == 2


@pytest.mark.parametrize("overwrite", [False, True])
def test_the_folder_of_the_model_itself_takes_no_results(overwrite: bool, tmp_path, capsys) -> None:
    relinear.save_pretrained(tiny("gpt2", 258), tmp_path / "run" / "model", tokenizer=byte_tokenizer())
    (tmp_path / "text.txt").write_text("Three words and a full stop. " * 400)
    there = sorted(tmp_path.rglob("*"))
    for out in ("run", "run/model", "run/../run/model"):
        model = relinear.from_pretrained(tmp_path / "run" / "model")
        message = "holds the model itself"
        refused(model, tokens(), message, tmp_path / out, settings=SETTINGS, overwrite=overwrite)
        command = [
            "compress",
            str(tmp_path / "run"),
            "--data",
            str(tmp_path / "text.txt"),
            "--out",
            str(tmp_path / out),
        ]
        assert main([*command, *["--overwrite"] * overwrite]) == 2
        assert message in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == there


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"layers": {}}, "names no layer"),
        ({"format": 99, "layers": {"model.layers.1.mlp.down_proj": {}}}, "format 1 is read, got 99"),
        *(
            ({"layers": {"model.layers.1.mlp.down_proj": {"operator": operator}}}, message)
            for operator, message in {
                "output_gate": "down_proj: .*only operators with a dense matrix can be fitted",
                "hdpl:rank=3,blocks=4": "down_proj: .*only operators with a dense matrix can be fitted",
                "ccl:rank=3,context_dim=4": "down_proj: .*reads a context",
            }.items()
        ),
    ],
)
def test_plans_that_cannot_be_carried_out(plan, message: str, tmp_path) -> None:
    path = tmp_path / "edited.json"
    path.write_text(json.dumps({"format": 1} | plan))
    refused(tiny(), tokens(), message, tmp_path, settings=SETTINGS, plan_file=path)


@pytest.mark.parametrize(
    "edit",
    [lambda text: text[:-3], lambda text: text.replace("checksum", "check").replace("low_rank", "rank"), str.upper],
)
def test_plans_that_were_edited_are_renamed(edit, tmp_path) -> None:
    compress(tiny(), tokens(), settings=LOW_RANK, out_dir=tmp_path, plan_only=True)
    path = tmp_path / "plan.json"
    path.write_text(edit(path.read_text()))
    there = path.read_bytes()
    compress(tiny(), tokens(), settings=LOW_RANK, out_dir=tmp_path, plan_only=True)
    (renamed,) = tmp_path.glob("plan.json.*")
    assert renamed.read_bytes() == there


def test_models_with_adapters(tmp_path) -> None:
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(tiny(), peft.LoraConfig(r=2, target_modules=["q_proj"]))
    refused(adapted, tokens(), "adapters of PEFT.*merge them first", tmp_path, settings=SETTINGS)


def test_conversations_that_are_none(tmp_path) -> None:
    refused(
        tiny(), [[{"role": "user"}]] * 50, "data must hold texts.*a conversation a list of", tmp_path, settings=SETTINGS
    )


def test_exports_without_a_directory() -> None:
    with pytest.raises(ValueError, match=r"writes model\.gguf into out_dir: give out_dir"):
        compress(tiny(), tokens(), settings=SETTINGS | {"reader": "llama.cpp"})


def test_tokens_of_which_whole_blocks_are_too_few(tmp_path) -> None:
    settings = SETTINGS | {"tokens": 71, "sequence_length": 24}  # 48 of them, and 64 inputs
    refused(
        tiny(),
        tokens(),
        "tokens=71 are 48 in whole blocks of sequence_length=24, fewer than",
        tmp_path,
        settings=settings,
    )


def test_plans_that_are_not_there(tmp_path) -> None:
    with pytest.raises(FileNotFoundError, match=r"none\.json"):
        compress(tiny(), tokens(), settings=SETTINGS, out_dir=tmp_path, plan_file=tmp_path / "none.json")


def test_padding_does_not_calibrate():
    tokenizer = byte_tokenizer()
    texts = [f"text number {number} of many" for number in range(200)]
    rows = [dict(tokenizer(text, padding="max_length", max_length=64, truncation=True)) for text in texts]
    kept = [[i for i, m in zip(row["input_ids"], row["attention_mask"], strict=True) if m] for row in rows]
    settings = CompressSettings(bits=4.5, tokens=1024, sequence_length=64, evaluate=False)
    padded, clean = (
        read_corpus(data, tokenizer, settings, plan_only=True).blocks
        for data in (rows, [{"input_ids": ids} for ids in kept])
    )
    assert torch.equal(padded, clean)
