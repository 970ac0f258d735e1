"""Where a model's layers are, in which one a name lies, and what a context or a path-level part can be put on."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import relinear
from conftest import make_tiny_llama, mostly_slow
from relinear.contract.operator import is_replaceable
from relinear.hf.model_layout import decoder_layers, layer_finder
from relinear.hf.sub_blocks import sub_blocks
from tiny_models import FAMILIES, LAYERS, VOCABULARY, make_family

IDS = torch.randint(0, VOCABULARY, (2, 7), generator=torch.Generator().manual_seed(1))
MANAGER = relinear.ContextManager(dim=8)
LAYER = relinear.CCL(rank=4, context_dim=8)
#: without attention in their layers
STATE_SPACE = {"mamba"}
#: layers that do not hand keyword arguments on to their attention
SWALLOWING = {"stablelm", "nemotron", "gptj", "gpt_neo", "bloom", "falcon", "mpt", "codegen"}
PARALLEL = {"gpt_neox", "gptj", "falcon", "phi", "cohere", "codegen"}
SANDWICH = {"gemma2", "gemma3_text", "olmo2", "glm4"}
#: classes that add the stream by themselves, and layers whose MLP is no module
NO_PATHS = {"bloom", "mpt", "opt", "xglm", "biogpt", "mamba"}
#: one of each kind of layer above, with experts, and one that is none of them
FEW = ("llama", "gpt2", "gpt_neox", "gptj", "gemma3_text", "opt", "cohere", "olmoe")


def wrapped(model):
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], r=2, init_lora_weights=False))


def linear_names(model) -> list[str]:
    return [name for name, module in model.named_modules() if is_replaceable(module)]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_its_layers_and_names_lie_in_them(family: str) -> None:
    model = make_family(family)
    layers = decoder_layers(model)
    assert len(layers) == LAYERS
    find = layer_finder(model)
    names = {id(module): name for name, module in model.named_modules()}
    for index, layer in enumerate(layers):
        prefix = names[id(layer)]
        assert find(prefix) == index
        assert {find(f"{prefix}.{name}") for name, _ in layer.named_modules() if name} == {index}
    outside = [name for name, _ in model.named_modules() if name and not any(f".{i}" in name for i in range(LAYERS))]
    assert {find(name) for name in outside} == {None}


def test_a_peft_model_has_the_layers_of_the_model_inside() -> None:
    model = make_tiny_llama()
    inside = decoder_layers(model)
    peft_model = wrapped(model)
    assert decoder_layers(peft_model) == inside
    assert layer_finder(peft_model)("base_model.model.model.layers.1.self_attn.q_proj.base_layer") == 1
    assert layer_finder(peft_model)("base_model.model.lm_head") is None


class Staged(nn.Module):
    """Layers in two lists inside a list, and a list of something else before them."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList([nn.ModuleList([nn.Linear(2, 2)]) for _ in range(2)])
        self.stages = nn.ModuleList([nn.ModuleList([nn.Linear(4, 4) for _ in range(2)]) for _ in range(2)])


def test_lists_of_lists_are_counted_through() -> None:
    model = Staged()
    assert [layer_finder(model)(f"stages.{i}.{j}") for i in range(2) for j in range(2)] == [0, 1, 2, 3]
    table = relinear.replace_(model.stages, {"all-linear": relinear.LowRank(rank=2)}, layers=[2])
    assert [row.name for row in table.rows if "LowRank" in row.operator] == ["1.0"]


def test_layers_of_a_model_of_several_are_the_language_models() -> None:
    """A vision tower beside the decoder has layers of its own, which ``layers=`` does not mean."""
    model = make_tiny_llama()
    model.tower = nn.Module()
    model.tower.blocks = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])
    assert layer_finder(model)("tower.blocks.0") is None
    assert layer_finder(model)("model.layers.1.mlp") == 1


def test_experts_in_lists_do_not_hide_the_layers() -> None:
    """Two experts in each of two layers: the lists are of one length, the layers are the outermost."""
    model = make_tiny_llama(num_hidden_layers=2)
    for layer in model.model.layers:
        layer.mlp.experts = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
    assert decoder_layers(model) == tuple(model.model.layers)
    assert layer_finder(model)("model.layers.1.mlp.experts.0") == 1


# A context


def conditioned(model):
    """``model`` with a manager and conditioned layers in every decoder layer, all weights moved from their start."""
    relinear.attach_(model, MANAGER)
    inside = [name for name in linear_names(model) if layer_finder(model)(name) is not None]
    flattened = {"gate", "router", "shared_expert", "shared_expert_gate", "fc1", "fc2"}  # tokens in one row
    targets = {name: LAYER for name in inside if not flattened & set(name.split("."))}
    relinear.replace_(model, targets)
    return model


def gradients(model, ids) -> list[torch.Tensor]:
    """Gradients of two forwards before one backward."""
    model.zero_grad()
    first, second = (model(x, labels=x, use_cache=False).loss for x in (ids, ids.flip(1)))
    (2 * first + second).backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("family", mostly_slow(sorted(set(FAMILIES) - STATE_SPACE), *FEW))
def test_a_context_reaches_every_family(family: str) -> None:
    model = make_family(family)
    model = conditioned(model)
    logits = model(IDS).logits
    other = IDS.clone()
    other[:, 5:] = (other[:, 5:] + 1) % VOCABULARY
    torch.testing.assert_close(model(other).logits[:, :5], logits[:, :5])
    model.train()
    plain = gradients(model, IDS)
    assert all(p.grad is not None for n, p in model.named_parameters() if "relinear_context" in n)
    twin = copy.deepcopy(model)
    twin.gradient_checkpointing_enable({"use_reentrant": False})
    if family in SWALLOWING:
        with pytest.raises(ValueError, match="does not pass keyword arguments on"):
            gradients(twin, IDS)
    else:
        for mine, theirs in zip(plain, gradients(twin, IDS), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("family", ["gptj", "bloom", "opt", "stablelm"])
def test_generation_with_and_without_a_cache(family: str) -> None:
    model = conditioned(make_family(family))
    settings = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(*(model.generate(IDS[:, :3], use_cache=cache, **settings) for cache in (True, False)))


def test_a_layer_that_sees_flattened_tokens_says_so() -> None:
    model = make_family("opt")
    relinear.attach_(model, MANAGER)
    relinear.replace_(model, {"fc1": LAYER})
    with pytest.raises(ValueError, match="sees flattened or routed tokens"):
        model(IDS)


@pytest.mark.filterwarnings("ignore:.*PEFT")
def test_a_context_on_a_peft_model_is_that_of_the_model_inside() -> None:
    plain = make_tiny_llama()
    outer = wrapped(plain)
    relinear.attach_(outer, MANAGER)
    relinear.replace_(outer, {"up_proj": LAYER})
    assert isinstance(plain.model.relinear_context, nn.Module)
    assert torch.equal(outer(IDS).logits, plain(IDS).logits)
    assert plain.config.quantization_config["attachments"][0]["kind"] == "context_manager"


def test_state_space_layers_get_no_context_and_that_is_said_at_once() -> None:
    with pytest.raises(ValueError, match=r"MambaBlock.*must have one attention, .*; it has 0"):
        relinear.attach_(make_family("mamba"), MANAGER)


# Parts on whole sub-blocks


@pytest.mark.parametrize("family", mostly_slow(FAMILIES, *FEW))
def test_a_path_level_gate_is_right_or_refused(family: str) -> None:
    """Right: gates at the constant 2 double what attention and MLP add to the stream, as doubled projections do."""
    model = make_family(family)
    if family in NO_PATHS | SANDWICH:
        with pytest.raises(ValueError, match=r"layer 0 \("):
            relinear.attach_(model, relinear.PathTransponder())
        return
    stock = copy.deepcopy(model)
    relinear.attach_(model, relinear.PathTransponder(init="identity"))
    torch.testing.assert_close(model(IDS).logits, stock(IDS).logits)
    for path in sub_blocks(stock, plain=False):
        path.module.register_forward_hook(double)
    for path in sub_blocks(model, plain=False):
        path.module.relinear_modulator.register_forward_hook(lambda module, args, output: 2 * output)
    torch.testing.assert_close(model(IDS).logits, stock(IDS).logits)
    model.train()
    model(IDS, labels=IDS).loss.backward()
    assert all(p.grad is not None for n, p in model.named_parameters() if "relinear_modulator" in n)


def double(module, args, output):
    return (2 * output[0], *output[1:]) if isinstance(output, tuple) else 2 * output


@pytest.mark.parametrize("method", ["laurel_pa", "laurel_rw", "post_ln"])
@pytest.mark.parametrize("family", mostly_slow(FAMILIES, *FEW))
def test_residual_methods_work_or_are_refused_when_they_are_attached(family: str, method: str) -> None:
    model = make_family(family)
    if family in NO_PATHS | SANDWICH | PARALLEL:
        before = {name for name, _ in model.named_modules()}
        with pytest.raises(ValueError, match=r"layer 0 \("):
            relinear.attach_(model, method)
        assert {name for name, _ in model.named_modules()} == before
        return
    relinear.attach_(model, method)
    model.train()
    loss = model(IDS, labels=IDS, use_cache=False).loss
    loss.backward()
    assert all(p.grad is not None for n, p in model.named_parameters() if "relinear_residual" in n)
