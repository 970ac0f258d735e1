"""Checkpoints: the same logits bit for bit, and no directory that is half understood."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM

import relinear
from test_surgery import IDS, LOW, gpt2, llama, replaced


@pytest.fixture
def saved(tmp_path):
    model = llama()
    relinear.replace_(model, {"q_proj": LOW, "up_proj": relinear.LowRank(rank=3)}, layers=[0, 2], init="from_weight")
    model.save_pretrained(tmp_path / "model")
    return model, tmp_path / "model"


def edit(directory, change):
    path = directory / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))


@pytest.mark.parametrize("make", [llama, gpt2], ids=["llama", "gpt2"])
@pytest.mark.parametrize("options", [{}, {"max_shard_size": "8KB"}], ids=["whole", "sharded"])
def test_round_trip_is_bit_for_bit(make, options, tmp_path):
    model = make()
    relinear.replace_(model, {"all-linear": LOW})
    model.save_pretrained(tmp_path, **options)
    torch.manual_seed(1)  # another seed: nothing may be drawn anew
    for load in (AutoModelForCausalLM.from_pretrained, relinear.from_pretrained):
        again = load(tmp_path)
        assert replaced(again) == replaced(model)
        assert torch.equal(again(IDS).logits, model(IDS).logits)


def test_bf16_round_trip(tmp_path, saved):
    model = AutoModelForCausalLM.from_pretrained(saved[1], dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "half")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "half", dtype=torch.bfloat16)
    assert again.model.layers[0].self_attn.q_proj.down.dtype == torch.bfloat16
    assert torch.equal(again(IDS).logits, model(IDS).logits)


def test_tied_heads_stay_tied(tmp_path):
    model = llama(tied=True)
    relinear.replace_(model, {"q_proj": LOW})
    model.save_pretrained(tmp_path)
    again = relinear.from_pretrained(tmp_path)
    assert again.lm_head.weight is again.model.embed_tokens.weight
    assert torch.equal(again(IDS).logits, model(IDS).logits)


def test_a_loaded_model_is_an_ordinary_model(saved):
    again = AutoModelForCausalLM.from_pretrained(saved[1])
    assert again.half().float().dtype == torch.float32  # a quantized model would refuse
    assert not getattr(again, "is_quantized", False)
    again.train()(IDS, labels=IDS).loss.backward()
    assert again.model.layers[0].self_attn.q_proj.down.grad is not None


def test_the_base_model_loads_from_the_head_models_checkpoint(saved):
    model, directory = saved
    base = AutoModel.from_pretrained(directory)
    assert len(replaced(base)) == 4
    assert torch.equal(base(IDS).last_hidden_state, model.model(IDS).last_hidden_state)


def test_surgery_on_the_inner_model_is_saved_with_the_outer(tmp_path):
    model = llama()
    relinear.replace_(model.model, {"q_proj": LOW})
    model.save_pretrained(tmp_path)
    assert torch.equal(relinear.from_pretrained(tmp_path)(IDS).logits, model(IDS).logits)


def test_a_folded_model_is_stock(saved, tmp_path):
    model, _ = saved
    relinear.fold_(model, verbose=False)
    model.save_pretrained(tmp_path / "stock")
    assert "quantization_config" not in json.loads((tmp_path / "stock" / "config.json").read_text())
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path / "stock")(IDS).logits, model(IDS).logits)


def drop(directory, key):
    tensors = load_file(directory / "model.safetensors")
    tensors.pop(key)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def add(directory, key):
    tensors = load_file(directory / "model.safetensors") | {key: torch.zeros(1)}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def cut(directory):
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def quantization(change):
    return lambda directory: edit(directory, lambda config: change(config["quantization_config"]))


def operator(name, setting):
    return quantization(lambda q: q["operators"].update({name: setting}))


Q = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d: drop(d, f"{Q}.down"), rf"missing {Q}\.down"),
        (lambda d: drop(d, "model.norm.weight"), r"missing model\.norm\.weight"),
        (lambda d: add(d, f"{Q}.scale"), rf"unknown {Q}\.scale"),
        (cut, "damaged or cut off"),
        (quantization(lambda q: q.update(format_version=99)), "format 99"),
        (quantization(lambda q: q.pop("operators")), r"missing keys \['operators'\]"),
        (quantization(lambda q: q.update(extra=1)), r"unknown keys \['extra'\]"),
        (operator(Q, LOW.to_dict() | {"kind": "lowrank"}), "unknown operator kind 'lowrank'; did you mean 'low_rank'"),
        (operator(Q, LOW.to_dict() | {"rnk": 2}), "unknown setting 'rnk'; did you mean 'rank'"),
        (operator("model.layers.9.self_attn.q_proj", LOW.to_dict()), "no linear layer there"),
        (lambda d: (d / "model.safetensors").rename(d / "pytorch_model.bin"), "safetensors"),
    ],
)
def test_damaged_checkpoints_are_refused(saved, damage, message):
    _, directory = saved
    damage(directory)
    with pytest.raises((ValueError, OSError), match=message):
        relinear.from_pretrained(directory)


@pytest.mark.parametrize("damage", [lambda d: drop(d, f"{Q}.down"), lambda d: add(d, f"{Q}.scale"), cut])
def test_auto_model_refuses_them_too(saved, damage):
    damage(saved[1])
    with pytest.raises(ValueError, match=r"missing|unknown|damaged"):
        AutoModelForCausalLM.from_pretrained(saved[1])


def test_a_record_that_was_lost_is_noticed(saved):
    _, directory = saved
    edit(directory, lambda config: config.pop("quantization_config"))
    with pytest.raises(ValueError, match=r"not fully rebuilt.*missing keys"):
        relinear.from_pretrained(directory)


def test_a_directory_without_a_model(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no config\.json"):
        relinear.from_pretrained(tmp_path)


def test_save_pretrained_is_all_or_nothing(saved, tmp_path, monkeypatch):
    model, _ = saved
    target = relinear.save_pretrained(model, tmp_path / "out")
    first = (target / "config.json").read_text()

    def fail(directory, **kwargs):
        (directory / "config.json").write_text("half")
        raise OSError("disk full")

    monkeypatch.setattr(model, "save_pretrained", fail)
    with pytest.raises(OSError, match="disk full"):
        relinear.save_pretrained(model, target)
    assert (target / "config.json").read_text() == first
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model", "out"]
    monkeypatch.undo()
    relinear.save_pretrained(model, target)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model", "out"]
    with pytest.raises(NotADirectoryError):
        relinear.save_pretrained(model, target / "config.json")
