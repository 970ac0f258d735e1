"""Families of decoders through compression: compress, save, load in another process, the same logits, generate."""

import json
import subprocess
import sys

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

import relinear
from conftest import mostly_slow
from relinear.compression import compress
from relinear.compression.layerwise import LayerByLayer
from relinear_cli.main import main
from tiny_models import VOCABULARY, make_family

WANTED = [
    "llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "gpt2", "gpt_neox", "opt", "olmo2",
    "mixtral", "smollm3", "bloom", "gptj", "falcon",
]  # fmt: skip
SETTINGS = {"tokens": 256, "sequence_length": 16, "batch_size": 4, "evaluate": False, "self_sampled": False}
#: of a model whose experts are out of reach
ATTENTION = r".*\.Wqkv"

ELSEWHERE = """
import json, sys
import torch
import relinear
from transformers import AutoModelForCausalLM
found = {}
for directory in sys.argv[1:]:
    model = AutoModelForCausalLM.from_pretrained(directory).eval()
    ids = torch.arange(1, 13)[None]
    with torch.no_grad():
        logits = model(input_ids=ids).logits
        made = model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0)
    found[directory] = [logits.tolist(), made.tolist()]
print(json.dumps(found))
"""


#: families that are healed, too
HEALED = {"qwen2", "gpt_neox"}


def tokens(count: int = 256) -> list[torch.Tensor]:
    return [torch.randint(1, VOCABULARY, (count,), generator=torch.Generator().manual_seed(0))]


def run(kind: str, folder) -> tuple:
    torch.manual_seed(0)
    model = make_family(kind).eval()
    healing = {"heal_learning_rate": 1e-4, "heal_tokens": 512, "candidates": ["low_rank"]} if kind in HEALED else {}
    report = compress(model, tokens(1024), keep=0.7, settings=SETTINGS | healing, out_dir=folder)
    ids = torch.arange(1, 13)[None]
    with torch.no_grad():
        logits = model(input_ids=ids).logits
        made = model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0)
    return report, logits, made


@pytest.mark.slow
def test_families_are_compressed_and_come_back(tmp_path) -> None:
    results = {}
    for kind in WANTED:
        report, *results[str(tmp_path / kind / "model")] = run(kind, tmp_path / kind)
        assert report.plan.replaced, kind
        assert report.plan.parameters <= 0.7 * report.plan.parameters_before, kind
        assert (kind in HEALED) == (report.healing is not None), kind
    ran = subprocess.run([sys.executable, "-c", ELSEWHERE, *results], capture_output=True, text=True, timeout=280)
    assert ran.returncode == 0, ran.stderr[-3000:]
    found = json.loads(ran.stdout.splitlines()[-1])
    for directory, (logits, made) in results.items():
        assert torch.allclose(torch.tensor(found[directory][0]), logits, atol=1e-4), directory
        assert found[directory][1] == made.tolist(), directory


@pytest.mark.parametrize("kind", mostly_slow(["phi3", "gpt2", "gemma3_text"], "phi3"))
def test_families_are_judged(kind: str, tmp_path) -> None:
    settings = SETTINGS | {"evaluate": True, "evaluation_tokens": 16}
    report = compress(make_family(kind).eval(), tokens(), keep=0.7, settings=settings, out_dir=tmp_path)
    assert report.evaluation["tokens"] > 0


def test_experts_of_an_own_layout_are_left_and_said_so(tmp_path, capsys) -> None:
    sizes = {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 64, "vocab_size": VOCABULARY}
    attention = {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8}
    config = transformers.DbrxConfig(**sizes, ffn_config={"ffn_hidden_size": 64}, attn_config=attention)
    model = AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(ValueError, match=r"% of the parameters of DbrxForCausalLM are out of reach: 2 DbrxExpertGLU"):
        compress(model, tokens(), settings=SETTINGS, out_dir=tmp_path)
    assert not list(tmp_path.iterdir())
    relinear.save_pretrained(model, folder := str(tmp_path / "original"))
    window = ["--tokenizer", "bytes", "--set", "sequence_length=16"]
    assert main(["compress", folder, *window, "--out", str(tmp_path / "none")]) == 2
    printed = capsys.readouterr()
    assert "are out of reach" in printed.err
    assert not printed.out, "time and disk are told of what can be"
    report = compress(model, tokens(), keep=0.7, targets=ATTENTION, settings=SETTINGS, out_dir=tmp_path)
    said = "2 DbrxExpertGLU such as transformer.blocks.0.ffn.experts.mlp (held as parameters, no nn.Linear)"
    assert said in report.out_of_reach
    assert f"not replaced: {said}" in str(report)
    assert said in (tmp_path / "report.html").read_text()
    assert said in json.loads((tmp_path / "report.json").read_text())["out_of_reach"]


def test_quantized_models_are_refused(tmp_path) -> None:
    model = make_family("llama")
    model.config.quantization_config = {"quant_method": "gptq"}
    with pytest.raises(ValueError, match=r"the model is quantized \(gptq\); dequantize it first"):
        compress(model, tokens(), settings=SETTINGS, out_dir=tmp_path)
    assert not any(isinstance(m, relinear.Operator) for m in model.modules())


DECODER = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
DECODER |= {"num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1, "attn_layer_indices": [1]}
NESTED = {"vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 0}
NESTED |= {"laurel_rank": 4, "altup_num_inputs": 2, "layer_types": ["sliding_attention", "full_attention"]}
NESTED |= {"activation_sparsity_pattern": [0.0, 0.0], "sliding_window": 8, "intermediate_size": [64, 64]}


@pytest.mark.parametrize(
    "config",
    [
        transformers.OpenAIGPTConfig(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=64),
        pytest.param(transformers.BambaConfig(**DECODER, **MAMBA, intermediate_size=64), marks=pytest.mark.slow),
    ],
    ids=["a list", "a pair"],
)
def test_layers_may_return_more_than_their_states(config, tmp_path) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    report = compress(model, tokens(), keep=0.7, settings=SETTINGS, out_dir=tmp_path)
    assert report.plan.replaced


def test_layers_without_states_of_tokens_are_refused_before_any_work(tmp_path) -> None:
    model = transformers.Gemma3nForCausalLM(transformers.Gemma3nTextConfig(**DECODER | NESTED)).eval()
    with pytest.raises(ValueError, match=r"layer by layer: its layers take states of shape \(2, 1, 16, 32\)"):
        compress(model, tokens(), keep=0.7, targets="q_proj", settings=SETTINGS, out_dir=tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("dtype", "fits"), [(torch.bfloat16, True), (torch.float32, False)])
def test_layers_and_the_whole_model_are_compared_at_the_precision_of_the_model(dtype, fits, monkeypatch) -> None:
    model, ids = make_family("gemma3_text").eval().to(dtype), tokens(32)[0][None]
    logits = LayerByLayer.logits

    def rounded(self, hidden, ids):
        """As if it were summed in another order: a step of bfloat16 at the largest logit."""
        found = logits(self, hidden, ids)
        return found + 2**-8 * found.abs().max()

    monkeypatch.setattr(LayerByLayer, "logits", rounded)
    if fits:
        LayerByLayer(model).check(ids)
    else:
        with pytest.raises(ValueError, match=r"differs from the whole model by .*, and rounding explains"):
            LayerByLayer(model).check(ids)
