"""Checkpoints in a few bits: every operator's matrices, read back as exactly the values that were stored."""

import json
import re

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

import relinear
from cases import CASES, model_with
from conftest import make_tiny_llama, mostly_slow
from relinear.surgery.packed import (
    SUFFIX,
    gradient_moments,
    pack_parameter,
    packed_bytes,
    packed_state,
    unpack_parameter,
)
from tiny_models import make_family


class Identity(torch.nn.Linear):
    """A layer whose loss is the sum of its outputs."""

    def forward(self, x):
        return {"loss": super().forward(x).sum()}


KINDS = list({case.config.kind: case for case in reversed(CASES)}.values())
#: thin matrices, blocks, rotors without any, and what is stored in integers already
SEVERAL = [case for case in KINDS if case.name in ("low_rank", "block_hadamard", "rotor", "quantized")]


def check_round_trip(model, folder, bits, load=relinear.from_pretrained, moments=None):
    """Saved and loaded, a model has the stored values to the last bit, in a file of the size that was foretold."""
    relinear.save_pretrained(model, folder, bits=bits, moments=moments)
    assert (folder / "model.safetensors").stat().st_size == packed_bytes(model, bits)
    stored, loaded = packed_state(model, bits, moments), load(folder)
    assert any(name.endswith(SUFFIX) for name in stored)
    found = loaded.state_dict()
    for name, value in stored.items():
        own = found[name.removesuffix(SUFFIX)]
        expected = unpack_parameter(value, bits, own.shape) if name.endswith(SUFFIX) else value.to(own.dtype)
        assert torch.equal(own, expected), name
    return loaded


@pytest.mark.parametrize("case", mostly_slow(KINDS, *SEVERAL), ids=lambda case: case.name)
def test_matrices_of_an_operator_come_back_as_they_were_stored(case, tmp_path) -> None:
    model = model_with(case)
    ids = torch.arange(7)[None]
    moments = gradient_moments(model, [{"input_ids": ids, "labels": ids}])
    assert moments.keys() >= {name.removesuffix(SUFFIX) for name in packed_state(model, 3) if name.endswith(SUFFIX)}
    loaded = check_round_trip(model, tmp_path / "model", 3, moments=moments)
    relinear.save_pretrained(loaded, tmp_path / "again")  # an ordinary model again, which is stored in floats
    again = relinear.from_pretrained(tmp_path / "again").state_dict()
    assert all(torch.equal(value, again[name]) for name, value in loaded.state_dict().items())


@pytest.mark.parametrize("bits", mostly_slow([2, 5, 8], 5))
@pytest.mark.parametrize("tied", [True, False])
def test_a_model_without_operators_loads_as_any_other(bits, tied, tmp_path) -> None:
    model = make_tiny_llama(tie_word_embeddings=tied)
    loaded = check_round_trip(model, tmp_path / "model", bits, AutoModelForCausalLM.from_pretrained)
    assert type(loaded) is type(model)
    assert loaded.config.tie_word_embeddings == (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
    missed = (loaded.lm_head.weight - model.lm_head.weight).norm() / model.lm_head.weight.norm()
    assert missed < 1.5 / 2**bits  # a range of five deviations, in 2^B steps, each missed by 1 / sqrt(12) of it
    assert all(parameter.is_contiguous() for parameter in loaded.parameters())
    relinear.save_pretrained(loaded, tmp_path / "floats")  # transformers views tied weights as flat


def test_moments_of_gradients_are_those_of_inputs_and_lower_the_loss_of_rounding() -> None:
    """Where what comes back is the same for all, they are the second moment of what enters."""
    layer = Identity(16, 4)
    samples = [{"x": torch.randn(1, 16)} for _ in range(5)]
    moments = gradient_moments(layer, samples)["weight"]
    inputs = torch.cat([sample["x"] for sample in samples])
    assert torch.allclose(moments, 4 * (inputs.T @ inputs)[None], atol=1e-5)
    x = torch.randn(256, 16) @ torch.randn(16, 64)  # correlated, as inputs are
    weight = torch.randn(3, 32, 64)
    rounded = [
        unpack_parameter(pack_parameter(weight, 3, m), 3, weight.shape) for m in (None, (x.T @ x).expand(3, -1, -1))
    ]
    nearest, made_up = (((value - weight) @ x.T).norm() for value in rounded)
    assert made_up < 0.7 * nearest
    assert torch.equal(pack_parameter(weight, 3, torch.zeros(3, 64, 64)), pack_parameter(weight, 3))


@pytest.mark.parametrize("kind", ["gpt2", "mixtral"])
def test_weights_that_transformers_stores_in_parts_or_under_other_names(kind, tmp_path) -> None:
    check_round_trip(make_family(kind), tmp_path / "model", 4)


def test_shards_and_dtypes(tmp_path) -> None:
    model = make_tiny_llama()
    relinear.save_pretrained(model, tmp_path, bits=4, max_shard_size="5KB")
    assert (tmp_path / "model.safetensors.index.json").is_file()
    whole, half = relinear.from_pretrained(tmp_path), relinear.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert all(torch.equal(a.bfloat16(), b) for a, b in zip(whole.parameters(), half.parameters(), strict=True))


def test_a_few_numbers_stay_at_16_bits() -> None:
    model = make_tiny_llama()
    relinear.replace_(model, {"q_proj": relinear.Rotor(), "k_proj": relinear.Transponder(rank=1)})
    state = packed_state(model, 4)
    packed = {name for name in state if name.endswith(SUFFIX)}
    assert not any("rotors" in name or "norm" in name for name in packed)
    assert "model.layers.0.self_attn.k_proj.base.weight.packed" in packed
    assert {value.dtype for name, value in state.items() if name not in packed} == {torch.float16}


def test_what_cannot_be_stored_in_bits_is_refused_before_anything_is_written(tmp_path) -> None:
    model = make_tiny_llama()
    for bits, said in ((9, "bits must be at most 8, got 9"), (4.0, r"bits must be a whole number, got 4\.0")):
        with pytest.raises(ValueError, match=said):
            relinear.save_pretrained(model, tmp_path / "model", bits=bits)
    lora, added = LoraConfig(target_modules=["q_proj"]), make_tiny_llama()
    added.add_adapter(lora)
    with pytest.raises(ValueError, match=r"moments= needs bits="):
        relinear.save_pretrained(model, tmp_path / "model", moments={})
    for adapted in (get_peft_model(make_tiny_llama(), lora), added):
        with pytest.raises(ValueError, match="merge it first"):
            relinear.save_pretrained(adapted, tmp_path / "model", bits=4)
    for name, value in (("model.norm.weight", torch.inf), ("model.layers.0.self_attn.q_proj.weight", torch.nan)):
        torch.nn.init.constant_(model.get_parameter(name), value)
        with pytest.raises(ValueError, match=f"{re.escape(name)} holds values that are not finite"):
            relinear.save_pretrained(model, tmp_path / "model", bits=4)
    assert not (tmp_path / "model").exists()


def test_a_damaged_record_of_bits_is_refused(tmp_path) -> None:
    model = make_tiny_llama()
    relinear.replace_(model, {"q_proj": relinear.LowRank(rank=4)})
    relinear.save_pretrained(model, tmp_path, bits=4)
    path = tmp_path / "config.json"
    for record, said in (
        ({"bits": 4, "group": 32}, "packed must be like"),
        ({"bits": 5, "group": 64}, "no model can be built"),
    ):
        text = re.sub(r'"packed": \{[^}]*\}', f'"packed": {json.dumps(record)}', path.read_text())
        path.write_text(text)
        with pytest.raises(ValueError, match=said):
            relinear.from_pretrained(tmp_path)
