"""Operators in the hands of other programs: hooks, offloading, PEFT's adapters, quantisers."""

import copy
import warnings

import accelerate
import pytest
import torch
from torch import nn
from torch.nn.utils import prune
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

import relinear
from cases import CASES, Case, case_of_every_kind, every_case, model_with
from conftest import make_tiny_gpt2, make_tiny_llama, mostly_slow
from dist_ranks import without_noise
from relinear.contract.operator import named_operators

IDS = torch.randint(0, 96, (2, 7), generator=torch.Generator().manual_seed(3))
WITH_LOSSES = [case for case in CASES if case.name in ("hdpl", "transponder-on_hdpl")]


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return ((actual - expected).norm() / expected.norm()).item()


def trained_step(model: nn.Module) -> None:
    """One large step of everything that learns, all of which must have a gradient."""
    model.train()(input_ids=IDS, labels=IDS).loss.backward()
    learning = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert [name for name, p in learning.items() if p.grad is None] == []
    torch.optim.SGD(learning.values(), lr=0.5).step()
    model.eval()


@pytest.fixture
def lora():
    peft = pytest.importorskip("peft")

    def settings(*targets: str, **values):
        return peft.LoraConfig(target_modules=targets[0] if len(targets) == 1 else list(targets), r=2, **values)

    return settings


# What is a module to others is called


@every_case
def test_only_what_is_called_is_a_layer(case: Case) -> None:
    operator = case.config.build(*case.shapes[0])
    x = torch.randn(3, case.shapes[0][0])
    called = []
    for name, module in operator.named_modules():
        module.register_forward_hook(lambda *a, name=name: called.append(name))
    with relinear.activations.context(torch.randn(3, case.context_dim or 1)):
        operator(x)
    with_parameters = {name for name, module in operator.named_modules() if [*module.parameters(recurse=False)]}
    assert with_parameters <= set(called)
    layers = {name for name, module in operator.named_modules() if isinstance(module, nn.Linear | nn.LayerNorm)}
    assert all(name.rpartition(".")[2] == "base" for name in layers)


def test_hooks_on_the_base_of_a_transponder() -> None:
    layer = relinear.Transponder().build(16, 24).eval()
    x = torch.randn(5, 16)
    expected, doubled = layer(x), layer.modulator(x, 2 * layer.base(x))
    handle = layer.base.register_forward_hook(lambda module, args, y: 2 * y)
    torch.testing.assert_close(layer(x), doubled)
    handle.remove()
    handle = nn.modules.module.register_module_forward_hook(lambda m, args, y: 2 * y if m is layer.base else None)
    try:
        torch.testing.assert_close(layer(x), doubled)
    finally:
        handle.remove()
    seen = []
    layer.base.register_full_backward_hook(lambda module, to_x, to_y: seen.append(to_y[0].shape))
    layer(x).sum().backward()
    assert seen == [(5, 24)]
    torch.testing.assert_close(layer(x), expected)


def test_a_forward_in_place_of_the_base_runs() -> None:
    layer = relinear.Transponder().build(16, 24).eval()
    x = torch.randn(5, 16)
    doubled = layer.modulator(x, 2 * layer.base(x))
    stock = layer.base.forward
    layer.base.forward = lambda x: 2 * stock(x)  # type: ignore[method-assign]
    torch.testing.assert_close(layer(x), doubled)


def test_a_pruned_base_and_parametrised_parts() -> None:
    layer = relinear.Transponder(base=None).build(16, 24).eval()
    x = torch.randn(5, 16)
    prune.l1_unstructured(layer.base, "weight", 0.5)
    torch.testing.assert_close(layer(x), layer.modulator(x, x @ layer.base.weight.T + layer.base.bias))
    layer = relinear.HDPL(rank=6, blocks=4).build(16, 24).eval()
    expected = layer(x)
    nn.utils.parametrizations.weight_norm(layer.mu)
    torch.testing.assert_close(layer(x), expected)


# Offloading


@pytest.mark.parametrize("method", [None, "laurel_pa", "rezero", "deepnorm", "sdpa_gate"])
def test_a_layer_on_disk(method: str | None, tmp_path) -> None:
    model = make_tiny_llama()
    relinear.attach_(model, relinear.ContextManager(dim=6, mixer="ema"))
    relinear.attach_(model, relinear.PathTransponder())
    relinear.replace_(model, {"up_proj": relinear.CCL(rank=5, context_dim=6), "down_proj": relinear.HDPL(rank=4)})
    relinear.replace_(model, {"q_proj": relinear.Transponder(), "o_proj": relinear.BlockHadamard()})
    if method is not None:
        relinear.attach_(model, method)
    expected = logits(model)
    relinear.save_pretrained(model, tmp_path / "model")
    places = {"lm_head": "cpu", "model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.layers.0": "cpu"}
    places |= {"model.layers.1": "disk", "model.norm": "cpu", "model.relinear_context": "disk"}
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", device_map=places, offload_folder=tmp_path / "offload"
    )
    assert all(parameter.is_meta for parameter in loaded.model.layers[1].parameters())
    assert relative(logits(loaded), expected) < 1e-6
    assert relative(logits(loaded), expected) < 1e-6


@pytest.mark.parametrize("variational", [False, True])
def test_an_offloaded_cgt(variational: bool) -> None:
    sizes = {"vocab_size": 96, "n_embd": 32, "n_head": 4, "n_positions": 64, "n_layer": 3, "context_layer": 1}
    model = relinear.CGTForCausalLM(relinear.CGTConfig(**sizes, variational=variational)).eval()
    expected = logits(model)
    accelerate.cpu_offload(model, torch.device("cpu"))
    assert relative(logits(model), expected) < 1e-6
    assert relative(logits(model), expected) < 1e-6


# Adapters


@case_of_every_kind
def test_adapters_on_all_linear_learn_and_merge(case: Case, lora) -> None:
    peft = pytest.importorskip("peft")
    base = model_with(case)
    inside = [name for name, _ in named_operators(base)]
    before = logits(base)
    model = peft.get_peft_model(base, lora("all-linear"))
    adapted = [name.partition(".lora_A")[0] for name, _ in model.named_parameters() if ".lora_A" in name]
    adapted = [name.removeprefix("base_model.model.") for name in adapted]
    assert len(adapted) >= 10
    assert all(n.endswith(".base") for n in adapted if n.startswith(tuple(f"{name}." for name in inside)))
    trained_step(model)
    trained = logits(model)
    assert relative(trained, before) > 1e-3
    assert relative(logits(model.merge_and_unload()), trained) < 1e-5


@case_of_every_kind
def test_adapters_beside_operators(case: Case, lora, tmp_path) -> None:
    peft = pytest.importorskip("peft")
    base = model_with(case)
    source, before = copy.deepcopy(base), logits(base)
    model = peft.get_peft_model(base, lora("q_proj", "up_proj")).eval()
    assert relative(logits(model), before) < 1e-6
    trained_step(model)
    assert all(name in str([n for n, _ in model.named_parameters()]) for name in ("q_proj.lora_A", "up_proj.lora_A"))
    trained = logits(model)
    assert relative(trained, before) > 1e-4
    model.save_pretrained(tmp_path)
    settings = peft.LoraConfig.from_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(source, tmp_path, config=settings)
    assert relative(logits(again), trained) < 1e-6
    with pytest.raises(ValueError, match="do not merge it"):
        model.merge_adapter()


@pytest.mark.parametrize("make", [make_tiny_llama, make_tiny_gpt2])
@pytest.mark.parametrize("way", ["merge_and_unload", "merge_adapter", "unmerge_adapter"])
def test_adapters_on_folded_operators_merge(make, way: str, lora) -> None:
    peft = pytest.importorskip("peft")
    model = make()
    relinear.replace_(model, {"all-linear": relinear.LowRank(rank=4)})
    targets = ("q_proj", "down_proj") if make is make_tiny_llama else ("c_attn", "mlp.c_proj")
    tuned = peft.get_peft_model(model, lora(*targets, init_lora_weights=False)).eval()
    expected = logits(tuned)
    relinear.fold_(tuned, verbose=False)
    if way == "merge_and_unload":
        tuned = tuned.merge_and_unload()
    else:
        tuned.merge_adapter()
    if way == "unmerge_adapter":
        tuned.unmerge_adapter()
    assert relative(logits(tuned), expected) < 1e-5


def test_an_operator_with_an_adapter_inside_is_not_folded(lora) -> None:
    peft = pytest.importorskip("peft")
    model = make_tiny_llama()
    relinear.replace_(model, {"up_proj": relinear.Transponder(), "q_proj": relinear.LowRank(rank=4)})
    tuned = peft.get_peft_model(model, lora(r".*up_proj\.base", init_lora_weights=False)).eval()
    expected = logits(tuned)
    report = relinear.fold_(tuned, verbose=False)
    assert all(name.endswith("q_proj") for name in report.folded)
    assert {"it contains an adapter; merge that first"} == set(report.skipped.values())
    assert relative(logits(tuned.merge_and_unload()), expected) < 1e-5


def test_adapters_keep_the_operators_dtype_losses_and_roles(lora) -> None:
    peft = pytest.importorskip("peft")
    model = make_tiny_llama().bfloat16()
    relinear.replace_(model, {"up_proj": relinear.Transponder(base=relinear.HDPL(rank=6, beta=0.5))})
    roles = model.model.layers[0].mlp.up_proj.param_roles()
    settings = lora(r".*up_proj\.base")
    model = peft.get_peft_model(model, settings, autocast_adapter_dtype=False).train()
    assert all(p.dtype == torch.bfloat16 for p in model.parameters())
    model(input_ids=IDS)
    assert len(relinear.contract.auxiliary_losses_of(model)) == 2
    wrapped = model.base_model.model.model.layers[0].mlp.up_proj.param_roles()
    named = {name.replace(".base_layer", ""): role for name, role in wrapped.items()}
    assert {name: role for name, role in named.items() if "lora_" not in name} == roles


@pytest.mark.parametrize("kept", [False, True], ids=["adapter", "modules_to_save"])
def test_terms_of_an_adapted_base_leave_padding_out(lora, kept: bool) -> None:
    peft = pytest.importorskip("peft")
    model = make_tiny_llama()
    operator = relinear.HDPL(rank=6, blocks=4, beta=0.5, bound="free_bits")
    relinear.replace_(model, {"up_proj": relinear.Transponder(base=operator)})
    stock = copy.deepcopy(model).train()
    settings = lora(".*q_proj", modules_to_save=["up_proj.base"]) if kept else lora(r".*up_proj\.base")
    adapted = peft.get_peft_model(model, settings).train()
    labels = IDS.clone()
    labels[0, 3:] = -100
    losses = []
    for each in (stock, adapted):
        torch.manual_seed(0)
        losses.append(each(input_ids=IDS, labels=labels).loss)
        assert len(relinear.contract.auxiliary_losses_of(each)) == 2
    torch.testing.assert_close(losses[1], losses[0])


@case_of_every_kind
def test_a_plain_configuration_of_adapters_names_operators(case: Case, lora, tmp_path) -> None:
    peft = pytest.importorskip("peft")
    base = model_with(case)
    source, before = copy.deepcopy(base), logits(base)
    model = peft.get_peft_model(base, lora("q_proj", "up_proj")).eval()
    assert relative(logits(model), before) < 1e-6
    trained_step(model)
    trained = logits(model)
    assert relative(trained, before) > 1e-4
    model.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(source, tmp_path)
    assert relative(logits(again), trained) < 1e-6
    assert sum(isinstance(module, relinear.Operator) for module in again.modules()) >= 4


def test_an_activated_adapter_works_from_its_tokens_on(lora) -> None:
    peft = pytest.importorskip("peft")
    model = make_tiny_llama()
    relinear.replace_(model, {"up_proj": relinear.LowRank(rank=4)})
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    before = model(ids).logits
    settings = lora(".*up_proj", alora_invocation_tokens=[8], init_lora_weights=False, task_type="CAUSAL_LM")
    difference = (peft.get_peft_model(model, settings).eval()(input_ids=ids).logits - before).abs().amax(-1)[0]
    assert (difference[:3] < 1e-6).all()
    assert (difference[3:] > 1e-5).all()


def test_adapters_that_an_operator_cannot_take(lora) -> None:
    peft = pytest.importorskip("peft")
    for values, words in (({"use_dora": True}, "use_dora"), ({"init_lora_weights": "pissa"}, "init_lora_weights")):
        model = make_tiny_llama()
        relinear.replace_(model, {"up_proj": relinear.LowRank(rank=4)})
        with pytest.raises(ValueError, match=f"{words}.*LowRankLinear has none"):
            peft.get_peft_model(model, lora("up_proj", "down_proj", **values))


@pytest.mark.parametrize("source", ["tokens", "embeddings"])
def test_a_saved_context_manager_learns(source: str, lora, tmp_path) -> None:
    peft = pytest.importorskip("peft")
    base = make_tiny_llama()
    relinear.attach_(base, relinear.ContextManager(dim=6, mixer="gru", source=source))
    relinear.replace_(base, {"up_proj": relinear.CCL(rank=5, context_dim=6)})
    stock, before = copy.deepcopy(base), logits(base)
    model = peft.get_peft_model(base, lora("q_proj", "embed_tokens", modules_to_save=["relinear_context"]))
    trained_step(model)
    trained = logits(model)
    assert relative(trained, before) > 1e-3
    with model.disable_adapter():
        assert torch.equal(logits(model), before)
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(peft.PeftModel.from_pretrained(stock, tmp_path)), trained)
    assert relative(logits(model.merge_and_unload()), trained) < 1e-5


# Quantisers


@case_of_every_kind
def test_dynamic_quantisation(case: Case) -> None:
    model = model_with(case)
    expected = logits(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch advises torchao
        quantized = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
    # inputs of 256 rounded to bytes move a stock model three times as far as inputs of 32
    assert 0 < relative(logits(quantized), expected) < (0.5 if case.shapes[0][0] >= 256 else 0.25)


@case_of_every_kind
def test_torchao_int8(case: Case) -> None:
    quantization = pytest.importorskip("torchao.quantization")
    for settings in (quantization.Int8WeightOnlyConfig(), quantization.Int8DynamicActivationInt8WeightConfig()):
        model = model_with(case)
        expected = logits(model)
        quantization.quantize_(model, settings)
        assert 0 < relative(logits(model), expected) < 0.05


# Exporters


@pytest.mark.slow
@every_case
def test_a_model_is_exported_for_any_number_of_tokens(case: Case) -> None:
    model = model_with(case)
    with torch.no_grad():  # inference, where kernels for a few rows stand by
        program = torch.export.export(
            model,
            (),
            {"input_ids": IDS, "use_cache": False},
            dynamic_shapes={"input_ids": {1: torch.export.Dim("tokens", min=2, max=64)}, "use_cache": None},
        )
    longer = torch.randint(0, 96, (2, 33), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        found = program.module()(input_ids=longer, use_cache=False).logits
        assert relative(found, model(input_ids=longer, use_cache=False).logits) < 1e-5


# The stock Trainer


@pytest.mark.parametrize("case", mostly_slow(CASES, *WITH_LOSSES), ids=lambda case: case.name)
def test_the_stock_trainer_takes_auxiliary_losses(case: Case, tmp_path, monkeypatch) -> None:
    """Accumulation included: the same gradients as one batch, so the same weights after a step of plain descent."""
    rows = [{"input_ids": row, "labels": row} for row in torch.cat([IDS, IDS.flip(0) + 1]) % 96]
    weights = []
    for batch, accumulation in ((4, 1), (2, 2)):
        model = model_with(case)
        settings = TrainingArguments(
            str(tmp_path),
            max_steps=1,
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=accumulation,
            optim="sgd",
            learning_rate=0.1,
            use_cpu=True,
            report_to="none",
            save_strategy="no",
            max_grad_norm=0.0,
        )
        with monkeypatch.context() as patch:
            patch.setattr(torch, "randn", without_noise)
            Trainer(model, settings, train_dataset=rows).train()
        weights.append(model.state_dict())
    for name, value in weights[0].items():
        torch.testing.assert_close(weights[1][name], value, rtol=1e-4, atol=1e-5, msg=name)
