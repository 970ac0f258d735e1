"""Checkpoints: the same logits bit for bit, and no directory that is half understood."""

import contextlib
import copy
import inspect
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from huggingface_hub import ModelCard
from peft import LoraConfig
from peft.tuners.lora.model import LoraModel
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    BitsAndBytesConfig,
    CLIPVisionConfig,
    GPTNeoXConfig,
    GraniteMoeConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    MixtralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    QuantoConfig,
    ViTConfig,
)

import relinear
from relinear.data.tokenizers import load_tokenizer
from surgery_helpers import IDS, LOW, gpt2, llama, replaced


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


def as_of_old(directory):
    """Undo what ``config.json`` says beyond the record, as checkpoints of relinear's first versions had it."""

    def change(config):
        config["model_type"] = config.pop("base_model_type")
        del config["auto_map"], config["transformers_weights"]

    edit(directory, change)
    (directory / "configuration_relinear.py").unlink()


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


SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
EXPERTS = SIZES | {"vocab_size": 50, "num_key_value_heads": 1, "num_local_experts": 2}
STORED_UNDER_OTHER_NAMES = {
    "gpt_neox": (AutoModelForCausalLM, GPTNeoXConfig(**SIZES, vocab_size=50)),
    "granitemoe": (AutoModelForCausalLM, GraniteMoeConfig(**EXPERTS)),
    "mixtral": (AutoModelForCausalLM, MixtralConfig(**EXPERTS)),
    "vit": (AutoModelForImageClassification, ViTConfig(**SIZES, image_size=16, patch_size=8)),
}


@pytest.mark.parametrize(
    ("kind", "method"), [*((kind, None) for kind in STORED_UNDER_OTHER_NAMES), ("mixtral", "rezero")]
)
def test_models_that_transformers_stores_under_other_names(kind, method, tmp_path):
    auto, config = STORED_UNDER_OTHER_NAMES[kind]
    model = auto.from_config(copy.deepcopy(config)).eval()
    relinear.replace_(model, {"all-linear": LOW})
    if method is not None:
        relinear.attach_(model, method)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.1)
    inputs = {"pixel_values": torch.randn(1, 3, 16, 16)} if kind == "vit" else {"input_ids": IDS}
    model.save_pretrained(tmp_path)
    for again in (auto.from_pretrained(tmp_path), relinear.from_pretrained(tmp_path, auto_class=auto)):
        assert torch.equal(again(**inputs).logits, model(**inputs).logits)
    drop(tmp_path, next(key for key in load_file(tmp_path / "model.safetensors") if key.endswith(".down")))
    with pytest.raises(ValueError, match="missing"):
        auto.from_pretrained(tmp_path)


def test_another_task_starts_a_fresh_head(saved):
    model, directory = saved
    again = AutoModelForSequenceClassification.from_pretrained(directory, num_labels=3)
    assert replaced(again) == replaced(model)
    assert again.score.weight.shape == (3, 16)
    assert 0.005 < again.score.weight.std() < 0.05  # drawn as transformers draws it
    assert torch.equal(again.model(IDS).last_hidden_state, model.model(IDS).last_hidden_state)
    with pytest.raises(ValueError, match=r"missing keys: score\.weight"):
        relinear.from_pretrained(directory, auto_class=AutoModelForSequenceClassification)


def test_another_task_leaves_out_the_operator_in_the_head(tmp_path):
    model = llama()
    relinear.replace_(model, {"lm_head": LOW, "q_proj": LOW})
    model.save_pretrained(tmp_path)
    for auto in (AutoModelForSequenceClassification, AutoModel):
        assert len(replaced(auto.from_pretrained(tmp_path))) == 3
    assert len(replaced(AutoModelForCausalLM.from_pretrained(tmp_path))) == 4


@pytest.mark.parametrize("make", [llama, gpt2], ids=["llama", "gpt2"])
def test_checkpoints_of_the_first_versions_load(make, tmp_path):
    model = make()
    relinear.replace_(model, {"all-linear": LOW})
    model.save_pretrained(tmp_path)
    as_of_old(tmp_path)
    for load in (AutoModelForCausalLM.from_pretrained, type(model).from_pretrained, relinear.from_pretrained):
        assert torch.equal(load(tmp_path)(IDS).logits, model(IDS).logits)


def test_an_auto_map_of_somebody_else_stays(saved):
    model, directory = saved
    model.config.auto_map = {"AutoModel": "theirs.Model"}
    model.save_pretrained(directory)
    for load in (AutoModelForCausalLM.from_pretrained, type(model).from_pretrained):
        assert load(directory).config.auto_map == {"AutoModel": "theirs.Model"}


def test_the_config_in_memory_is_the_stock_one(saved):
    model, directory = saved
    assert type(AutoConfig.from_pretrained(directory)) is type(model.config)
    for load in (AutoModelForCausalLM.from_pretrained, type(model).from_pretrained):
        config = load(directory).config
        assert type(config) is type(model.config)
        assert not {"auto_map", "transformers_weights", "base_model_type"} & config.to_dict().keys()
        assert config.model_type == config.to_dict()["model_type"] == "llama"
        config.save_pretrained(directory)
        assert json.loads((directory / "config.json").read_text())["base_model_type"] == "llama"


@pytest.mark.parametrize("auto", [AutoModelForCausalLM, AutoModel, AutoModelForSequenceClassification])
def test_a_model_from_the_config_of_a_checkpoint_has_its_operators(saved, auto):
    model, directory = saved
    config = AutoConfig.from_pretrained(directory)
    fresh = auto.from_config(config, dtype=torch.bfloat16)
    assert len(replaced(fresh)) == len(replaced(model))
    assert {p.dtype for p in fresh.parameters()} == {torch.bfloat16}
    with torch.device("meta"):
        assert len(replaced(auto.from_config(config))) == len(replaced(model))


def own_config_of(model, **changes):
    """A stock config for a checkpoint of ``model``, as somebody writes one by hand."""
    values = {k: v for k, v in model.config.to_diff_dict().items() if k not in ("model_type", "quantization_config")}
    return type(model.config)(**values | changes)


@pytest.mark.parametrize(
    "load", [AutoModelForCausalLM.from_pretrained, relinear.from_pretrained, LlamaForCausalLM.from_pretrained]
)
def test_a_config_of_the_callers_own_does_not_hide_the_operators(saved, load):
    model, directory = saved
    config = own_config_of(model, use_cache=False)
    loaded = load(directory, config=config)
    assert torch.equal(loaded(IDS).logits, model(IDS).logits)
    assert not loaded.config.use_cache
    assert not hasattr(config, "quantization_config")


def test_a_config_of_another_model_with_operators_takes_the_record_of_the_checkpoint(saved):
    model, directory = saved
    other = llama()
    relinear.replace_(other, {"k_proj": LOW})
    loaded = AutoModelForCausalLM.from_pretrained(directory, config=other.config)
    assert torch.equal(loaded(IDS).logits, model(IDS).logits)


def test_a_config_by_a_name_is_read_and_one_that_quantizes_is_refused(saved, tmp_path):
    model, directory = saved
    own_config_of(model).save_pretrained(tmp_path / "config")
    for config in (directory, str(directory), str(tmp_path / "config")):
        loaded = LlamaForCausalLM.from_pretrained(directory, config=config)
        assert torch.equal(loaded(IDS).logits, model(IDS).logits)
    with pytest.raises(ValueError, match="knows nothing"):
        LlamaForCausalLM.from_pretrained(directory, config={"vocab_size": 8})
    quantizing = own_config_of(model, quantization_config=QuantoConfig(weights="int8"))
    with pytest.raises(ValueError, match=r"holds relinear operators.*torchao.*fold and save"):
        AutoModelForCausalLM.from_pretrained(directory, config=quantizing)


def test_a_folder_of_weights_alone_still_takes_the_callers_config(tmp_path):
    model = llama()
    model.save_pretrained(tmp_path)
    (tmp_path / "config.json").unlink()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, config=model.config)
    assert torch.equal(loaded(IDS).logits, model(IDS).logits)


def test_a_config_with_nan_is_refused(tmp_path):
    llama().save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"rms_norm_eps": float("nan")}))
    with pytest.raises(ValueError, match=r"config\.json: rms_norm_eps is NaN"):
        relinear.from_pretrained(tmp_path)


@pytest.mark.parametrize("settings", [BitsAndBytesConfig(load_in_8bit=True), QuantoConfig(weights="int8")])
def test_a_second_quantization_is_refused(saved, settings):
    for load in (AutoModelForCausalLM.from_pretrained, relinear.from_pretrained):
        with pytest.raises(ValueError, match="quantized with RelinearConfig"):
            load(saved[1], quantization_config=settings)


class Hub:
    """In place of the Hub: keeps what is committed."""

    def __init__(self):
        self.files = {}

    def __call__(self):
        return self

    def create_repo(self, repo_id, **kwargs):
        return SimpleNamespace(repo_id=repo_id)

    def create_commit(self, operations, **kwargs):
        self.files |= {step.path_in_repo: Path(step.path_or_fileobj).read_text("latin-1") for step in operations}


def test_a_push_uploads_the_loader_and_the_record(saved, monkeypatch):
    hub = Hub()
    for module in ("transformers.utils.hub", "transformers.modeling_utils"):
        monkeypatch.setattr(f"{module}.hf_api", hub)
        monkeypatch.setattr(f"{module}.create_and_tag_model_card", lambda *a, **k: ModelCard("---\n---\non the Hub"))
    saved[0].push_to_hub("org/name")
    assert hub.files.keys() == {p.name for p in saved[1].iterdir()} | {"README.md"}
    assert json.loads(hub.files["config.json"])["model_type"] == "relinear"


# Saving over what is there


def test_a_card_says_what_is_in_it_until_somebody_takes_it_over(tmp_path):
    model, card = replaced_llama(), tmp_path / "README.md"
    relinear.save_pretrained(model, tmp_path)
    assert "| `LowRank(rank=4)` | 16 -> 16 | " in card.read_text()
    assert f"{model.num_parameters():,} parameters" in card.read_text()
    assert "trust_remote_code=True" in card.read_text()
    assert "base_model" not in card.read_text()
    relinear.attach_(model, "rezero")
    model.config._name_or_path = "org/name"
    relinear.save_pretrained(model, tmp_path)
    assert "ReZero" in card.read_text()
    assert "base_model: org/name" in card.read_text()
    mine = "\n".join(line for line in card.read_text().splitlines() if "Written by relinear" not in line) + " by me"
    card.write_text(mine)
    for saved in (model, llama()):
        relinear.save_pretrained(saved, tmp_path)
        assert card.read_text() == mine
    card.unlink()
    card.mkdir()
    relinear.save_pretrained(model, tmp_path)
    assert card.is_dir()


@pytest.mark.parametrize("before", ["5KB", "5GB"])
@pytest.mark.parametrize("after", ["6KB", "5GB"])
def test_a_stock_model_saved_over_another_leaves_nothing_of_it(before, after, tmp_path):
    relinear.save_pretrained(replaced_llama(), tmp_path, max_shard_size=before)
    others = ("model-00001-of-00099.safetensors", "log.txt")
    for name in others:
        (tmp_path / name).write_text("mine")
    model = llama()
    relinear.save_pretrained(model, tmp_path, max_shard_size=after)
    relinear.save_pretrained(model, tmp_path / "fresh", max_shard_size=after)
    assert {p.name for p in tmp_path.iterdir()} == {p.name for p in (tmp_path / "fresh").iterdir()} | {*others, "fresh"}
    assert {(tmp_path / name).read_text() for name in others} == {"mine"}
    assert torch.equal(relinear.from_pretrained(tmp_path)(IDS).logits, model(IDS).logits)


@pytest.mark.parametrize("by", [relinear.save_pretrained, PreTrainedModel.save_pretrained])
def test_files_that_links_lead_to_are_left_alone(by, tmp_path):
    """As in the Hub's cache, where a snapshot is a folder of links."""
    relinear.save_pretrained(replaced_llama(), tmp_path / "store")
    before = {path.name: path.read_bytes() for path in (tmp_path / "store").iterdir()}
    (tmp_path / "snapshot").mkdir()
    for name in before:
        (tmp_path / "snapshot" / name).symlink_to(tmp_path / "store" / name)
    (tmp_path / "link").symlink_to(tmp_path / "snapshot")
    model = replaced_llama()
    relinear.attach_(model, "rezero")
    by(model, tmp_path / "link")
    assert {path.name: path.read_bytes() for path in (tmp_path / "store").iterdir()} == before
    assert torch.equal(relinear.from_pretrained(tmp_path / "snapshot")(IDS).logits, model(IDS).logits)
    assert (tmp_path / "link").is_symlink()


@pytest.mark.parametrize("size", ["5GB", "20KB"])
def test_a_save_that_is_killed_leaves_a_whole_model_or_none(size, tmp_path, monkeypatch):
    """Files are put in place one by one; every one of them may be the last."""
    steps = {"unlink": Path.unlink, "replace": Path.replace}
    old, new = replaced_llama(), llama()
    wanted = {"old": old(IDS).logits, "new": new(IDS).logits}
    for count in range(100):
        folder, left = tmp_path / f"{count}", [count]
        relinear.save_pretrained(old, folder)

        def kill(name, path, *args, folder=folder, left=left, **kwargs):
            if folder in (path.parent, Path(args[0]).parent if args else None):
                left[0] -= 1
                if left[0] < 0:
                    raise KeyboardInterrupt
            return steps[name](path, *args, **kwargs)

        with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
            for name in steps:
                patch.setattr(Path, name, lambda *args, name=name, **kwargs: kill(name, *args, **kwargs))
            relinear.save_pretrained(new, folder, max_shard_size=size)
        is_old = left[0] < 0 and count == 0
        if (folder / "config.json").exists():
            logits = relinear.from_pretrained(folder)(IDS).logits
            assert torch.equal(logits, wanted["old" if is_old else "new"])
        if left[0] >= 0:
            break
        relinear.save_pretrained(new, folder)
        assert torch.equal(relinear.from_pretrained(folder)(IDS).logits, wanted["new"])
    assert count > 3


# Loading what others left in the folder


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("consolidated.safetensors", b"version https://git-lfs.github.com/spec/v1\n"),
        ("model.fp16.safetensors", b"\x10\0\0\0\0\0\0\0{"),
        ("model-00001-of-00009.safetensors", b""),
        ("adapter_model.safetensors", b"{"),
        ("trainer_state.json", None),
    ],
)
def test_files_that_loading_does_not_read_are_no_obstacle(name, content, saved):
    model, directory = saved
    (directory / name).mkdir() if content is None else (directory / name).write_bytes(content)
    assert torch.equal(relinear.from_pretrained(directory)(IDS).logits, model(IDS).logits)


def test_a_shard_that_is_cut_off_is_refused(tmp_path):
    relinear.save_pretrained(llama(), tmp_path, max_shard_size="20KB")
    shard = sorted(tmp_path.glob("model-*"))[1]
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(ValueError, match=rf"{shard.name} is damaged or cut off"):
        relinear.from_pretrained(tmp_path)


@pytest.mark.parametrize("setting", [{"num_experts": 16384}, {"moe_ff": 10**9}, {"num_mtp_layers": 5000}])
def test_settings_that_a_model_does_not_use_are_no_obstacle(setting, saved):
    model, directory = saved
    edit(directory, lambda config: config.update(setting))
    assert torch.equal(relinear.from_pretrained(directory)(IDS).logits, model(IDS).logits)


def test_a_published_generation_config_that_transformers_warns_of_is_saved(tmp_path):
    llama(vocab_size=300).save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.6, "top_p": 0.9}')
    tokenizer = load_tokenizer("bytes")
    model = relinear.from_pretrained(tmp_path)
    relinear.save_pretrained(model, tmp_path / "again", tokenizer=tokenizer)
    written = json.loads((tmp_path / "again" / "generation_config.json").read_text())
    assert (written["temperature"], written["eos_token_id"]) == (0.6, tokenizer.eos_token_id)


def test_what_ends_and_pads_a_text_comes_from_the_tokenizer(tmp_path):
    tokenizer = load_tokenizer("bytes")
    tokenizer.pad_token = tokenizer.eos_token
    model = llama(vocab_size=300, eos_token_id=2, pad_token_id=7)
    relinear.replace_(model, {"q_proj": LOW})
    again = relinear.from_pretrained(relinear.save_pretrained(model, tmp_path / "model", tokenizer=tokenizer))
    for settings in (again.config, again.generation_config):
        assert (settings.eos_token_id, settings.pad_token_id) == (tokenizer.eos_token_id, tokenizer.eos_token_id)
    again.config.eos_token_id = again.generation_config.eos_token_id = 5  # of a pretrained model it stays
    third = relinear.from_pretrained(relinear.save_pretrained(again, tmp_path / "model", tokenizer=tokenizer))
    assert third.config.eos_token_id == third.generation_config.eos_token_id == 5


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


def integers(name):
    def damage(directory):
        tensors = load_file(directory / "model.safetensors")
        whole = {key: value.to(torch.int8) if key.startswith(name) else value for key, value in tensors.items()}
        save_file(whole, directory / "model.safetensors", metadata={"format": "pt"})

    return damage


def quantization(change):
    return lambda directory: edit(directory, lambda config: change(config["quantization_config"]))


def operator(name, setting):
    return quantization(lambda q: q["operators"].update({name: setting}))


Q = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d: drop(d, f"{Q}.down"), rf"missing {Q}\.down"),
        (lambda d: drop(d, "model.norm.weight"), r"missing keys: model\.norm\.weight"),
        (lambda d: add(d, f"{Q}.scale"), rf"unknown {Q}\.scale"),
        (
            operator(Q, LOW.to_dict() | {"rank": 8}),
            "ignore_mismatched_sizes",
        ),
        (integers(Q), rf"integers for floats.* {Q}\.down"),
        (integers("model.embed_tokens"), r"integers for floats.* model\.embed_tokens\.weight"),
        (quantization(lambda q: q.update(format_version=True)), "format True"),
        (cut, "damaged or cut off"),
        (quantization(lambda q: q.update(format_version=99)), "format 99"),
        (quantization(lambda q: q.pop("operators")), "its keys must be .* got"),
        (quantization(lambda q: q.update(extra=1)), "its keys must be .*'extra'"),
        (operator(Q, LOW.to_dict() | {"kind": "lowrank"}), "unknown operator kind 'lowrank'; did you mean 'low_rank'"),
        (operator(Q, LOW.to_dict() | {"rnk": 2}), "unknown setting 'rnk'; did you mean 'rank'"),
        (operator("model.layers.9.self_attn.q_proj", LOW.to_dict()), "no linear layer there"),
        (lambda d: (d / "model.safetensors").rename(d / "pytorch_model.bin"), "safetensors only"),
    ],
)
def test_damaged_checkpoints_are_refused(saved, damage, message):
    _, directory = saved
    damage(directory)
    with pytest.raises((ValueError, OSError), match=message):
        relinear.from_pretrained(directory)


@pytest.mark.parametrize("damage", [lambda d: drop(d, f"{Q}.down"), lambda d: add(d, f"{Q}.scale"), cut, integers(Q)])
def test_auto_model_refuses_them_too(saved, damage):
    damage(saved[1])
    with pytest.raises((ValueError, SafetensorError), match=r"missing|unknown|deserializing|integers for floats"):
        AutoModelForCausalLM.from_pretrained(saved[1])


def test_a_record_that_was_lost_is_noticed(saved):
    _, directory = saved
    edit(directory, lambda config: config.pop("quantization_config"))
    for load in (AutoModelForCausalLM.from_pretrained, relinear.from_pretrained):
        with pytest.raises(ValueError, match="lost its record"):
            load(directory)
    as_of_old(directory)
    with pytest.raises(ValueError, match=r"not fully rebuilt.*missing keys"):
        relinear.from_pretrained(directory)


@pytest.mark.parametrize("kind", ["T5ForConditionalGeneration", "LlamaForSequenceClassification", "LlamaModel"])
def test_checkpoints_of_other_tasks_are_refused_by_their_class(tmp_path, kind):
    sizes = {"vocab_size": 96, "hidden_size": 32, "num_attention_heads": 4, "d_ff": 64, "d_kv": 8, "num_layers": 1}
    sizes |= {"num_hidden_layers": 1, "intermediate_size": 64}
    cls = getattr(transformers, kind)
    model = cls(cls.config_class(**sizes))
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"holds a {kind}, which is not a causal language model") as raised:
        relinear.from_pretrained(tmp_path)
    assert len(str(raised.value)) < 300
    assert type(relinear.from_pretrained(tmp_path, auto_class=cls)) is cls


def test_ranges_without_an_end_load(tmp_path):
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_heads": 4, "head_dim": 16}
    model = transformers.Mamba2ForCausalLM(transformers.Mamba2Config(**sizes, n_groups=1, state_size=8))
    assert model.config.time_step_limit[1] == float("inf")
    model.save_pretrained(tmp_path)
    relinear.from_pretrained(tmp_path)


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


def replaced_llama():
    model = llama()
    relinear.replace_(model, {"q_proj": LOW})
    return model


@pytest.mark.parametrize(
    "change", [lambda m: relinear.replace_(m, {"q_proj": LOW}), lambda m: relinear.attach_(m, "rezero")]
)
def test_a_model_with_operators_leaves_others_of_its_config_alone(change, tmp_path):
    config = llama().config
    changed, before = AutoModelForCausalLM.from_config(config), AutoModelForCausalLM.from_config(config)
    change(changed)
    after = AutoModelForCausalLM.from_config(config)
    assert not hasattr(config, "quantization_config")
    for stock in (before, after):
        assert not any(isinstance(m, relinear.Operator) for m in stock.modules())
        stock.save_pretrained(tmp_path)
        assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path)(IDS).logits, stock.eval()(IDS).logits)
    assert changed.config is changed.model.config
    assert changed.config is changed.model.layers[0].self_attn.config


def test_a_folded_model_leaves_others_of_its_config_alone(tmp_path):
    model = replaced_llama()
    other = AutoModelForCausalLM.from_config(model.config).eval()
    relinear.fold_(model)
    other.save_pretrained(tmp_path)
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path)(IDS).logits, other(IDS).logits)


def test_a_stock_model_made_by_its_class_from_the_config_of_another_is_saved_as_what_it_is(tmp_path):
    model = replaced_llama()
    stock = type(model)(model.config).eval()
    stock.save_pretrained(tmp_path)
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path)(IDS).logits, stock(IDS).logits)
    assert stock.config is model.config
    assert hasattr(model.config, "quantization_config")


def test_operators_of_a_part_are_saved_with_the_whole(tmp_path):
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    vision = CLIPVisionConfig(**sizes, image_size=8, patch_size=4, projection_dim=32)
    text = LlamaConfig(**sizes, num_key_value_heads=4, vocab_size=100)
    model = AutoModelForImageTextToText.from_config(LlavaConfig(vision_config=vision, text_config=text)).eval()
    relinear.replace_(model.model.language_model, {"q_proj": LOW})
    model.save_pretrained(tmp_path)
    again = AutoModelForImageTextToText.from_pretrained(tmp_path)
    assert torch.equal(again(input_ids=IDS).logits, model(input_ids=IDS).logits)


def calls_by_name(model, directory, folder):
    """Everything that is wrapped of transformers and PEFT: (class, name) -> object, all that it is called with."""
    lora = LoraModel(torch.nn.Sequential(torch.nn.Linear(4, 4)), LoraConfig(target_modules=["0"]), "default")
    target = {"adapter_name": "other", "target": torch.nn.Linear(4, 4), "r": 2, "lora_alpha": 2}
    sizes = {"new_num_tokens": 60, "pad_to_multiple_of": None, "mean_resizing": False}
    return {
        (PreTrainedConfig, "to_json_file"): (model.config, {"json_file_path": folder / "a.json", "use_diff": True}),
        (PreTrainedModel, "save_pretrained"): (model, {"save_directory": folder, "is_main_process": True}),
        (PreTrainedModel, "_from_config"): (type(model), {"config": model.config}),
        (PreTrainedModel, "from_pretrained"): (type(model), {"pretrained_model_name_or_path": directory}),
        (PreTrainedModel, "_resize_token_embeddings"): (model, sizes),
        (PreTrainedModel, "_initialize_weights"): (model, {"module": model.lm_head, "is_custom_code": False}),
        (LoraModel, "_create_new_module"): (lora, {"lora_config": LoraConfig(), **target}),
    }


def test_what_is_wrapped_is_called_by_the_names_of_the_original(saved, tmp_path):
    calls = calls_by_name(*saved, tmp_path)
    owners = {owner for owner, _ in calls}
    assert calls.keys() == {(o, n) for o in owners for n in vars(o) if hasattr(getattr(o, n), "_relinear_original")}
    for (owner, name), (called, arguments) in calls.items():
        original = getattr(owner, name)._relinear_original
        wrapped = inspect.getattr_static(owner, name)
        assert inspect.signature(getattr(wrapped, "__func__", wrapped)) == inspect.signature(original)
        getattr(called, name)(**arguments)


#: what is wrapped -> the test that fails without
SHOWN_BY = {
    (
        PreTrainedConfig,
        "to_json_file",
    ): "checkpoint_elsewhere::without_the_flag_every_way_of_loading_is_refused_and_with_it_the_logits_are_the_same",
    (PreTrainedModel, "save_pretrained"): "checkpoint::operators_of_a_part_are_saved_with_the_whole",
    (PreTrainedModel, "_from_config"): "checkpoint::a_model_from_the_config_of_a_checkpoint_has_its_operators",
    (PreTrainedModel, "from_pretrained"): "checkpoint::a_config_of_the_callers_own_does_not_hide_the_operators",
    (PreTrainedModel, "_resize_token_embeddings"): "vocabulary::all_parts_follow_the_vocabulary",
    (PreTrainedModel, "_initialize_weights"): "initial_values::parts_made_on_meta_are_initialised_with_the_model",
    (LoraModel, "_create_new_module"): "outside_tools::adapters_on_folded_operators_merge",
}


def test_the_page_names_all_that_is_wrapped_and_tests_show_why(saved, tmp_path):
    root = Path(__file__).parents[1]
    text = (root / "docs" / "ecosystem.md").read_text(encoding="utf-8").split("## What is wrapped")[1].split("\n## ")[0]
    said = {tuple(found) for found in re.findall(r"(?m)^\| `(\w+)\.(\w+)` \|", text)}
    assert said == {(owner.__name__, name) for owner, name in SHOWN_BY}
    assert SHOWN_BY.keys() == calls_by_name(*saved, tmp_path).keys()
    for file, test in (place.split("::") for place in SHOWN_BY.values()):
        assert f"def test_{test}(" in (root / "tests" / f"test_{file}.py").read_text(encoding="utf-8")
