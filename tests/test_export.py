"""A compressed model in programs that have never seen relinear."""

import json
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

import relinear
from conftest import WITHOUT_RELINEAR, mostly_slow
from relinear.compression import export_plain
from relinear.data.tokenizers import load_tokenizer
from tiny_models import make_family

ALONE = (
    WITHOUT_RELINEAR
    + """
import json
import torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1]).eval()
ids = torch.arange(3, 13)[None]
made = model.generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=0)
print(json.dumps({"logits": model(ids).logits.tolist(), "made": made.tolist(), "class": type(model).__name__}))
"""
)

MODELS = {
    "llama": LlamaConfig(
        vocab_size=260,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        tie_word_embeddings=True,
    ),
    "gpt2": GPT2Config(vocab_size=260, n_embd=32, n_layer=2, n_head=2, n_positions=64),
}


def model_of(kind: str, operator=None):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(MODELS[kind]).eval()
    pattern = r".*\.(q_proj|up_proj|c_attn|c_fc)"
    relinear.replace_(model, {pattern: operator or relinear.LowRank(rank=5)})
    return model


def alone(directory) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", ALONE, str(directory)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, stdin=subprocess.DEVNULL)


@pytest.mark.parametrize("kind", mostly_slow(MODELS, "llama"))
def test_loads_and_generates_without_relinear(kind: str, tmp_path) -> None:
    model = model_of(kind)
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    export_plain(model, tmp_path / "plain", tokenizer=load_tokenizer("bytes"))
    assert all(torch.equal(value, kept[name]) for name, value in model.state_dict().items())
    ids = torch.arange(3, 13)[None]
    with torch.no_grad():
        wanted, made = model(ids).logits, model.generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=0)
    ran = alone(tmp_path / "plain")
    assert ran.returncode == 0, ran.stderr
    got = json.loads(ran.stdout)
    assert torch.allclose(torch.tensor(got["logits"]), wanted, atol=1e-5)
    assert got["made"] == made.tolist()
    assert got["class"] == type(model).__name__


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt_neox", "mixtral", "qwen3_moe"])
def test_weights_that_transformers_stores_under_older_names_come_back(family: str, tmp_path) -> None:
    model = make_family(family)
    relinear.replace_(model, {r".*(o_proj|attention\.dense)": relinear.LowRank(rank=5)})
    export_plain(model, tmp_path / "plain")
    ran = alone(tmp_path / "plain")
    assert ran.returncode == 0, ran.stderr
    with torch.no_grad():
        wanted = model(torch.arange(3, 13)[None]).logits
    assert torch.allclose(torch.tensor(json.loads(ran.stdout)["logits"]), wanted, atol=1e-5)


def test_what_has_no_matrix_is_refused_by_name(tmp_path) -> None:
    model = model_of("llama", relinear.HDPL(rank=4, blocks=2))
    with pytest.raises(ValueError, match=r"model\.layers\.0\.self_attn\.q_proj: .*save the model with relinear"):
        export_plain(model, tmp_path / "plain")
    assert not (tmp_path / "plain").exists()
