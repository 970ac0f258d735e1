"""Checkpoints of compressed-tensors: loaded by transformers without relinear, they hold the same integers."""

import importlib.util
import itertools
import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

import relinear
from conftest import WITHOUT_RELINEAR
from relinear.compression import compress, export_compressed_tensors
from relinear.data.tokenizers import load_tokenizer
from relinear.hf.half_precision import round_to_half_
from tiny_models import make_family

NEEDS_READER = pytest.mark.skipif(
    importlib.util.find_spec("compressed_tensors") is None,
    reason="reading needs compressed-tensors: pip install 'relinear[compressed]'",
)
READ = """
import sys
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
for directory in sys.argv[1:]:
    for dtype in ("float32", "bfloat16"):
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval()
        ids = torch.arange(3, 19)[None]
        found = {"logits": model(ids).logits.contiguous()}
        found["made"] = model.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0)
        found |= {n: m.weight.clone() for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
        save_file(found, f"{directory}/{dtype}")
"""
CONFIGS = {"llama": LlamaConfig, "qwen2": Qwen2Config}
SYMMETRIC = {
    r".*\.(q|k|v)_proj": relinear.Quantized(bits=4, group=32, symmetric=True),
    r".*\.(gate|up)_proj": relinear.Quantized(bits=8, group=64, symmetric=True),
    r".*\.o_proj": relinear.Quantized(bits=5, group=32, symmetric=True),
    r".*\.down_proj": relinear.Quantized(bits=3, group=256, symmetric=True),
}
ODD = {
    "embed_tokens": relinear.Quantized(bits=8),
    r".*\.q_proj": relinear.Quantized(bits=4, group=32, symmetric=True),
    r".*\.o_proj": relinear.Quantized(bits=4, group=48, symmetric=True),
    r".*\.v_proj": relinear.Quantized(bits=4, group=32, symmetric=True, levels="iq4_nl"),
    r".*\.0\..*\.k_proj": relinear.Quantized(bits=8, group=32),
    r".*\.up_proj": relinear.LowRank(rank=8),
}
OPERATORS = {"symmetric": SYMMETRIC, "odd": ODD}


def model_of(kind: str, operators: dict, **settings):
    """In single precision, its parameters rounded to half, as ``compress`` by bytes leaves them."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 260, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2}
    model = AutoModelForCausalLM.from_config(CONFIGS[kind](**sizes | settings)).eval()
    if operators:
        relinear.replace_(model, operators, init="from_weight")
    round_to_half_(model)
    return model


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> dict:
    """Models, folders, and what transformers reads: logits, tokens, matrices of layers."""
    made = {}
    for kind, operators in itertools.product(CONFIGS, OPERATORS):
        model = model_of(kind, OPERATORS[operators], tie_word_embeddings=operators == "odd")
        kept = {name: value.clone() for name, value in model.state_dict().items()}
        folder = tmp_path_factory.mktemp("packed") / f"{kind}-{operators}"
        export_compressed_tensors(model, folder, tokenizer=load_tokenizer("bytes"))
        assert all(torch.equal(value, kept[name]) for name, value in model.state_dict().items())
        made[kind, operators] = model, folder
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["", *(str(folder) for _, folder in made.values())])
        exec(READ, {})
    return {
        case: (model, folder, load_file(folder / "float32"), load_file(folder / "bfloat16"))
        for case, (model, folder) in made.items()
    }


def assert_same(found: dict, model, atol: float) -> None:
    ids = torch.arange(3, 19)[None]
    with torch.no_grad():
        assert torch.allclose(found["logits"], model(ids).logits, atol=atol)
        made = model.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0)
    assert torch.equal(found["made"], made)


def operators_of(model) -> dict:
    return {name: module for name, module in model.named_modules() if isinstance(module, relinear.Operator)}


@NEEDS_READER
@pytest.mark.parametrize("kind", CONFIGS)
def test_symmetric_integers_come_back_to_the_bit(kind: str, exported) -> None:
    model, folder, found, half = exported[kind, "symmetric"]
    described = json.loads((folder / "config.json").read_text())["quantization_config"]
    groups = {(g["weights"]["num_bits"], g["weights"]["group_size"]): g for g in described["config_groups"].values()}
    targets = {sizes: len(group["targets"]) for sizes, group in groups.items()}
    assert targets == {(4, 32): 6, (8, 64): 4, (8, 32): 2, (4, 128): 2}
    assert described["ignore"] == ["lm_head"], "what is not packed vLLM must be told"
    for name, operator in operators_of(model).items():
        assert torch.equal(half[name], operator.to_dense().bfloat16()), name
        assert torch.equal(found[name], operator.to_dense()), name
    assert_same(found, model, atol=1e-4)


@NEEDS_READER
@pytest.mark.slow
def test_a_process_without_relinear_reads_the_same(exported) -> None:
    folders = [str(folder) for _, folder, *_ in exported.values()]
    command = [sys.executable, "-c", WITHOUT_RELINEAR + READ, *folders]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, stdin=subprocess.DEVNULL)
    assert ran.returncode == 0, ran.stderr
    for _, folder, *found in exported.values():
        for before, dtype in zip(found, ("float32", "bfloat16"), strict=True):
            after = load_file(folder / dtype)
            assert before.keys() == after.keys()
            assert all(torch.equal(before[name], after[name]) for name in after)


@NEEDS_READER
@pytest.mark.parametrize("kind", CONFIGS)
def test_what_cannot_be_held_is_dense(kind: str, exported) -> None:
    model, folder, found, _ = exported[kind, "odd"]
    written = load_file(folder / "model.safetensors")
    assert written["model.layers.0.self_attn.o_proj.weight"].dtype == torch.bfloat16
    assert "model.layers.0.self_attn.q_proj.weight_packed" in written
    assert "lm_head.weight" not in written
    assert_same(found, model, atol=0.2)


def test_models_without_a_packed_form_are_refused(tmp_path) -> None:
    integers = relinear.Quantized(bits=4, group=16, symmetric=True)
    for family, operator, match in (
        ("llama", relinear.LowRank(rank=4), "and there is none"),
        ("gpt2", integers, "and there is none"),
        ("mixtral", integers, "cannot load MixtralForCausalLM"),
        ("falcon", integers, "cannot load FalconForCausalLM"),
        ("llama", relinear.HDPL(rank=4, blocks=2), "save the model with relinear"),
    ):
        model = make_family(family)
        relinear.replace_(model, {"all-linear": operator})
        with pytest.raises(ValueError, match=match):
            export_compressed_tensors(model, tmp_path / "packed")
        assert not (tmp_path / "packed").exists()


def test_compress_exports_integers(tmp_path) -> None:
    settings = {"tokens": 512, "sequence_length": 16, "bits": 5.0, "evaluate": False, "self_sampled": False}
    ids = [torch.randint(1, 260, (1024,), generator=torch.Generator().manual_seed(0))]
    settings["reader"] = "vllm"
    packing = settings | {"candidates": ["quantized:symmetric=true"]}
    compress(model_of("llama", {}), ids, settings=packing, out_dir=tmp_path)  # in types that need no other bits
    written = json.loads((tmp_path / "compressed-tensors" / "config.json").read_text())
    assert written["quantization_config"]["format"] == "pack-quantized"
