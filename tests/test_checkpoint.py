"""Checkpoints: the same logits bit for bit, and no directory that is half understood."""

import copy
import functools
import inspect
import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub import ModelCard
from huggingface_hub.errors import EntryNotFoundError
from peft import LoraConfig
from peft.tuners.lora.model import LoraModel
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
from transformers.quantizers.auto import AutoHfQuantizer

import relinear
from relinear.core.record import config_record
from relinear.data.tokenizers import load_tokenizer
from relinear.surgery.checkpoint import RelinearConfig
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
        relinear.residual_(model, method)
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
    with pytest.raises(ValueError, match=r"holds relinear operators.*torchao.*fold_"):
        AutoModelForCausalLM.from_pretrained(directory, config=quantizing)


def test_a_folder_of_weights_alone_still_takes_the_callers_config(tmp_path):
    model = llama()
    model.save_pretrained(tmp_path)
    (tmp_path / "config.json").unlink()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, config=model.config)
    assert torch.equal(loaded(IDS).logits, model(IDS).logits)


@pytest.mark.parametrize("settings", [BitsAndBytesConfig(load_in_8bit=True), QuantoConfig(weights="int8")])
def test_a_second_quantization_says_what_to_do(saved, settings):
    for load in (AutoModelForCausalLM.from_pretrained, relinear.from_pretrained):
        with pytest.raises(ValueError, match=r"holds relinear operators.*torchao.*fold_"):
            load(saved[1], quantization_config=settings)


def test_a_card_says_what_is_in_it_and_no_other_card_is_overwritten(saved, tmp_path):
    model, directory = saved
    card = (directory / "README.md").read_text()
    assert "| `LowRank(rank=4)` | 16 -> 16 | 2 |" in card
    assert f"{model.num_parameters():,} parameters" in card
    assert "trust_remote_code=True" in card
    assert "base_model" not in card
    relinear.residual_(model, "rezero")
    model.config._name_or_path = "org/name"
    model.save_pretrained(directory)
    assert "ReZero" in (directory / "README.md").read_text()
    assert "base_model: org/name" in (directory / "README.md").read_text()
    (directory / "README.md").write_text("mine")
    model.save_pretrained(directory)
    relinear.save_pretrained(model, directory)
    assert (directory / "README.md").read_text() == "mine"
    stock = tmp_path / "stock"
    llama().save_pretrained(stock)
    assert sorted(p.name for p in stock.iterdir()) == ["config.json", "generation_config.json", "model.safetensors"]


def test_a_folded_model_saved_over_itself_leaves_nothing_that_tells_of_operators(saved):
    model, directory = saved
    relinear.fold_(model, verbose=False)
    model.save_pretrained(directory)
    assert sorted(p.name for p in directory.iterdir()) == ["config.json", "generation_config.json", "model.safetensors"]
    assert torch.equal(AutoModelForCausalLM.from_pretrained(directory)(IDS).logits, model(IDS).logits)


def test_a_stock_model_leaves_the_card_and_the_loader_of_others_alone(tmp_path):
    for name in ("README.md", "configuration_relinear.py"):
        (tmp_path / name).write_text("mine")
    llama().save_pretrained(tmp_path)
    assert {(tmp_path / name).read_text() for name in ("README.md", "configuration_relinear.py")} == {"mine"}


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


@pytest.fixture
def hub(monkeypatch):
    """A Hub that has no card of the model yet: transformers then sends its template."""
    found = Hub()
    for module in ("transformers.utils.hub", "transformers.modeling_utils"):
        monkeypatch.setattr(f"{module}.hf_api", found)

    monkeypatch.setattr(ModelCard, "load", functools.partial(load_card, ModelCard.load))
    return found


def load_card(original, place, **kwargs):
    """``ModelCard.load``, of a file alone."""
    if Path(place).is_file():
        return original(place, **kwargs)
    raise EntryNotFoundError("the Hub has no card")


def pushes(model, folder):
    return (model.push_to_hub, lambda name: model.save_pretrained(folder / "pushed", push_to_hub=True))


def test_a_push_uploads_the_card_the_loader_and_the_record(saved, hub, tmp_path):
    model, directory = saved
    for push in pushes(model, tmp_path):
        hub.files.clear()
        push("org/name")
        assert hub.files.keys() == {p.name for p in directory.iterdir()}
        assert json.loads(hub.files["config.json"])["model_type"] == "relinear"
        assert "## Loading" in hub.files["README.md"]
        assert "| `LowRank(rank=4)` |" in hub.files["README.md"]


def test_a_push_leaves_the_card_that_somebody_wrote(saved, hub, tmp_path, monkeypatch):
    model, _ = saved
    (tmp_path / "pushed").mkdir()
    (tmp_path / "pushed" / "README.md").write_text("mine")
    model.save_pretrained(tmp_path / "pushed", push_to_hub=True)
    assert hub.files["README.md"] == (tmp_path / "pushed" / "README.md").read_text() == "mine"
    for module in ("transformers.utils.hub", "transformers.modeling_utils"):
        monkeypatch.setattr(f"{module}.create_and_tag_model_card", lambda *a, **k: ModelCard("---\n---\non the Hub"))
    for push in pushes(model, tmp_path / "elsewhere"):
        push("org/name")
        assert hub.files["README.md"].endswith("on the Hub")


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


def special(name):
    """A pipe in place of a file: whoever opens it to read waits for ever."""

    def damage(directory):
        (directory / name).unlink()
        os.mkfifo(directory / name)

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
            rf"does not fit.*of another shape or kind {Q}\.down \(4, 16\) of floats for \(8, 16\) of floats",
        ),
        (integers(Q), rf"does not fit.* {Q}\.down \(4, 16\) of integers for \(4, 16\) of floats"),
        (integers("model.embed_tokens"), r"not floats: model\.embed_tokens\.weight"),
        (special("model.safetensors"), r"model\.safetensors is a directory, a pipe, .* where a file is expected"),
        (special("config.json"), r"config\.json is a directory, a pipe, .* where a file is expected"),
        (quantization(lambda q: q.update(format_version=True)), "format True"),
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


@pytest.mark.parametrize("damage", [lambda d: drop(d, f"{Q}.down"), lambda d: add(d, f"{Q}.scale"), cut, integers(Q)])
def test_auto_model_refuses_them_too(saved, damage):
    damage(saved[1])
    with pytest.raises(ValueError, match=r"missing|unknown|damaged|of integers"):
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


def test_what_is_no_file_is_not_read_as_a_card(saved):
    model, directory = saved
    (directory / "README.md").unlink()
    (directory / "README.md").mkdir()  # a pipe would be read for ever
    model.save_pretrained(directory)
    assert (directory / "README.md").is_dir()


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
    "change", [lambda m: relinear.replace_(m, {"q_proj": LOW}), lambda m: relinear.residual_(m, "rezero")]
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


def test_operators_of_a_part_with_a_config_of_its_own_are_saved_with_the_whole(tmp_path):
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
    record = RelinearConfig(**config_record(model.config))
    lora = LoraModel(torch.nn.Sequential(torch.nn.Linear(4, 4)), LoraConfig(target_modules=["0"]), "default")
    target = {"adapter_name": "other", "target": torch.nn.Linear(4, 4), "r": 2, "lora_alpha": 2}
    sizes = {"new_num_tokens": 60, "pad_to_multiple_of": None, "mean_resizing": False}
    both = {"quantization_config": record, "quantization_config_from_args": None}
    pushed = {"working_dir": folder, "repo_id": "org/name", "files_timestamps": {}}
    return {
        (PreTrainedConfig, "to_json_file"): (model.config, {"json_file_path": folder / "a.json", "use_diff": True}),
        (AutoHfQuantizer, "merge_quantization_configs"): (AutoHfQuantizer, both),
        (PreTrainedModel, "save_pretrained"): (model, {"save_directory": folder, "is_main_process": True}),
        (PreTrainedModel, "_upload_modified_files"): (model, pushed),
        (PreTrainedModel, "_from_config"): (type(model), {"config": model.config}),
        (PreTrainedModel, "from_pretrained"): (type(model), {"pretrained_model_name_or_path": directory}),
        (PreTrainedModel, "_resize_token_embeddings"): (model, sizes),
        (PreTrainedModel, "_initialize_weights"): (model, {"module": model.lm_head, "is_custom_code": False}),
        (LoraModel, "_create_new_module"): (lora, {"lora_config": LoraConfig(), **target}),
    }


def test_what_is_wrapped_is_called_by_the_names_of_the_original(saved, hub, tmp_path):
    calls = calls_by_name(*saved, tmp_path)
    owners = {owner for owner, _ in calls}
    assert calls.keys() == {(o, n) for o in owners for n in vars(o) if hasattr(getattr(o, n), "_relinear_original")}
    for (owner, name), (called, arguments) in calls.items():
        original = getattr(owner, name)._relinear_original
        wrapped = inspect.getattr_static(owner, name)
        assert inspect.signature(getattr(wrapped, "__func__", wrapped)) == inspect.signature(original)
        getattr(called, name)(**arguments)
    assert {"config.json", "README.md"} <= hub.files.keys()
