"""Reading and changing gates, contexts and outputs of layers, against the same computed by hand."""

import copy
import re

import pytest
import torch

import relinear
from conftest import make_tiny_gpt2, make_tiny_llama
from relinear import activations
from relinear.activations import hook_points, observe
from tiny_models import make_cgt

IDS = torch.randint(0, 96, (2, 7), generator=torch.Generator().manual_seed(3))


def with_ccl(**settings):
    model = make_tiny_gpt2()
    relinear.attach_(model, relinear.ContextManager(dim=8))
    relinear.replace_(model, {"mlp.c_fc": relinear.CCL(rank=6, context_dim=8, **settings)})
    return model


def with_modulators(**settings):
    model = make_tiny_llama()
    relinear.replace_(model, {"down_proj": relinear.Transponder(**settings)})
    relinear.attach_(model, relinear.PathTransponder(mlp=False))
    return model


def with_latents():
    model = make_tiny_llama()
    relinear.replace_(model, {"q_proj": relinear.HDPL(rank=6, blocks=4)})
    return model


def with_output_gates():
    model = make_tiny_llama()
    relinear.replace_(model, {"gate_proj": relinear.OutputGate()})
    relinear.attach_(model, relinear.residual.SDPAGate())
    return model


MODELS = {
    "ccl": with_ccl,
    "ccl-mixture": lambda: with_ccl(composition="remixing", templates=3),
    "ccl-basis": lambda: with_ccl(output_gate=False, norm=False),
    "modulators": with_modulators,
    "modulators-reference": lambda: with_modulators(phi="tanh", shared=False, biases=True),
    "cgt": lambda: make_cgt(vocab_size=96),
    "hdpl": with_latents,
    "output-gates": with_output_gates,
    "stock": make_tiny_llama,
}


@pytest.fixture(params=MODELS)
def model(request):
    torch.manual_seed(0)
    return MODELS[request.param]().eval()


@torch.no_grad()
def run(model, interventions=None):
    seen = {}
    points = hook_points(model, outputs=True)
    hooks, counts = [point.hooks for point in points.values()], counts_of_hooks(model)
    watched = observe(model, lambda name, latent: seen.update({name: latent.z.clone()}), points)
    with activations.intervene(model, interventions or {"lm_head.output": []}), watched:
        logits = model(IDS).logits
    assert [point.hooks for point in points.values()] == hooks
    assert all(after <= before for after, before in zip(counts_of_hooks(model), counts, strict=True))
    return logits, seen


def counts_of_hooks(model):
    """Of torch's; those that a copy inherits remove themselves."""
    return [len(hooks) for module in model.modules() for hooks in (module._forward_hooks, module._forward_pre_hooks)]


def test_reading_changes_nothing_and_sees_every_token(model) -> None:
    with torch.no_grad():
        before = model(IDS).logits
    logits, seen = run(model)
    torch.testing.assert_close(logits, before)  # kernels that run several layers at once give way
    points = hook_points(model, outputs=True)
    shapes = {name: tuple(value.shape) for name, value in seen.items()}
    assert shapes == {name: (*IDS.shape, site.size) for name, site in points.items()}
    with torch.no_grad(), observe(model, lambda name, latent: None, hook_points(model)):
        assert torch.equal(model(IDS).logits, before)


def test_putting_the_same_values_in_changes_nothing_and_others_do(model) -> None:
    before, seen = run(model)
    for name, value in seen.items():
        torch.testing.assert_close(run(model, {name: activations.Patch(value)})[0], before, rtol=1e-4, atol=1e-5)
        changed, then = run(model, {name: activations.Add(0.25)})
        torch.testing.assert_close(then[name], value + 0.25)
        assert not torch.equal(changed, before), name
    assert torch.equal(run(model)[0], before)


def test_gates_are_those_that_the_modules_say() -> None:
    model = with_ccl()
    said = {}
    for name, module in model.named_modules():
        if isinstance(module, relinear.Operator):
            module.register_forward_hook(lambda module, args, out, name=name: said.update({name: module.gates()}))
    seen = run(model)[1]
    gates = {name: value for name, value in seen.items() if name.endswith("_gate")}
    assert gates.keys() == {f"{name}.{part}_gate" for name, parts in said.items() for part in parts}
    for name, parts in said.items():
        for part, value in parts.items():
            torch.testing.assert_close(gates[f"{name}.{part}_gate"], value)


def test_gates_of_one_are_the_layer_without_them() -> None:
    model = with_modulators()
    plain = copy.deepcopy(model)
    for name, module in list(plain.named_modules()):
        if name.endswith("modulator"):
            module.reset_parameters(identity=True)
    logits = run(model, {"channel": activations.Patch(1.0), "scalar": activations.Patch(1.0)})[0]
    torch.testing.assert_close(logits, run(plain)[0])


def test_a_gate_shuts_a_feature() -> None:
    model = with_ccl()
    cut = copy.deepcopy(model)
    cut.transformer.h[1].mlp.c_fc.mix.data[:, 4] = 0
    interventions = {"transformer.h.1.mlp.c_fc.basis_gate": activations.Clamp(maximum=0.0, dims=[4])}
    torch.testing.assert_close(run(model, interventions)[0], run(cut)[0])


def test_an_output_moves_as_by_its_bias() -> None:
    model = make_tiny_gpt2()
    shifted = copy.deepcopy(model)
    shifted.transformer.h[0].mlp.c_fc.bias.data[5] += 2
    moved = {"h.0.mlp.c_fc.output": activations.Add(2.0, dims=torch.tensor([5]))}
    torch.testing.assert_close(run(model, moved)[0], run(shifted)[0])


def test_a_copy_made_under_an_intervention_is_a_plain_model(model) -> None:
    before = run(model)[0]
    interventions = dict.fromkeys(hook_points(model, outputs=True), activations.Patch(0.0))
    with activations.intervene(model, interventions):
        twin = copy.deepcopy(model)
    assert torch.equal(run(twin)[0], before)
    assert torch.equal(run(model)[0], before)


def test_hooks_are_removed_if_one_of_them_cannot_be_set(monkeypatch) -> None:
    model = with_latents()
    points = hook_points(model, outputs=True)
    before = [point.hooks for point in points.values()]

    def fails(hook):
        raise RuntimeError("no hooks here")

    monkeypatch.setattr(list(points.values())[-1].module, "register_forward_hook", fails)
    with pytest.raises(RuntimeError, match="no hooks here"), observe(model, print, points):
        pass
    assert [point.hooks for point in points.values()] == before


def test_layers_are_not_replaced_within_a_block() -> None:
    model = with_latents().eval()
    planned = relinear.plan(model, {"v_proj": "low_rank:rank=4"}, init="from_weight")
    blocks = (
        activations.latents(model),
        observe(model, print, "v_proj.output"),
        activations.intervene(model, {"q_proj": activations.Patch(0.0)}),
    )
    for block in blocks:
        for surgery in (planned.apply_, lambda: relinear.fold_(model)):
            with block, pytest.raises(ValueError, match=r"q_proj has a hook|v_proj\.output has a hook"):
                surgery()
    planned.apply_()
    relinear.fold_(model, verbose=False)


def test_a_block_finds_its_points_when_it_begins_and_may_be_used_again() -> None:
    model = with_latents().eval()
    off = activations.intervene(model, {"o_proj.output": activations.Patch(0.0), "q_proj": activations.Patch(0.0)})
    before = model(IDS).logits
    relinear.replace_(model, {"o_proj": "pivoted_low_rank:rank=8", "q_proj": "hdpl:rank=6,blocks=4"}, init="fresh")
    for _ in range(2):
        with off, off:
            assert all((value == 0).all() for name in ("o_proj.output", "q_proj") for value in values_of(model, name))
    assert not any((value == 0).all() for value in values_of(model, "o_proj.output"))
    relinear.replace_(model, {"q_proj": "low_rank:rank=4"}, init="fresh")
    with pytest.raises(ValueError, match="is named 'q_proj'"), off:
        pass
    assert not before.equal(model(IDS).logits)


@torch.no_grad()
def values_of(model, name):
    seen = []
    with observe(model, lambda name, activation: seen.append(activation.z), name):
        model(IDS)
    return seen


def test_a_compiled_model_runs_the_hooks_of_outputs_within_the_block_alone() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(torch.nn.Sequential(torch.nn.Linear(2, 2)), backend="eager", fullgraph=True)
    x = torch.ones(2)
    before = compiled(x)
    with activations.intervene(compiled, {"0.output": activations.Patch(7.0)}):
        assert (compiled(x) == 7).all()
    assert torch.equal(compiled(x), before)


def test_a_replaced_embedding_has_its_width() -> None:
    model = make_tiny_llama(tie_word_embeddings=True).eval()
    relinear.replace_(model, {"embed_tokens": "quantized:bits=8"}, init="from_weight")
    width = model.config.hidden_size
    before = model(IDS).logits
    with activations.intervene(model, {"embed_tokens.output": activations.Add(torch.zeros(width))}):
        assert torch.equal(model(IDS).logits, before)
    with pytest.raises(ValueError, match=f"must end in {width}"):
        activations.intervene(model, {"embed_tokens.output": activations.Add(torch.zeros(model.config.vocab_size))})


@pytest.mark.parametrize(
    ("name", "nearest"),
    {
        "o_poj.output": "did you mean 'o_proj.output'",
        "oproj.output": "did you mean 'o_proj.output'",
        "o_proj": "did you mean 'o_proj.output'?",
        "self_attn.o_proj": "did you mean 'self_attn.o_proj.output'?",
        "q_porj": "did you mean 'q_proj",
        "nothing_like_it": "known: q_proj, output, self_attn.q_proj, q_proj.output",
    }.items(),
)
def test_names_that_are_unknown_have_the_nearest(name, nearest) -> None:
    with pytest.raises(ValueError, match=re.escape(f"no latent, gate or layer output is named '{name}'; ") + ".*") as e:
        observe(with_latents(), print, name)
    assert nearest in str(e.value)


def test_a_full_name_is_that_point_alone() -> None:
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(2, 2), "b": torch.nn.ModuleDict({"a": torch.nn.Linear(2, 2)})})
    seen = []
    with observe(model, lambda name, activation: seen.append(name), ["a.output"]):
        model["b"]["a"](model["a"](torch.ones(2)))
    assert seen == ["a.output"]


def test_patterns_are_those_of_replace() -> None:
    model = with_latents()
    with activations.intervene(model, {r".*layers\.1\..*o_proj\.output": activations.Patch(0.0)}):
        assert [bool((value == 0).all()) for value in values_of(model, "o_proj.output")] == [False, True]


def test_points_of_an_adapted_model_have_the_names_of_a_stock_model() -> None:
    from peft import LoraConfig, get_peft_model

    model = with_latents()
    names = list(hook_points(model, outputs=True))
    adapted = get_peft_model(model, LoraConfig(target_modules=["q_proj", "o_proj"], init_lora_weights=False))
    points = hook_points(adapted, outputs=True)
    assert sorted(points) == sorted(names)
    layer = adapted.base_model.model.model.layers[0].self_attn.o_proj
    outputs = []
    handle = layer.register_forward_hook(lambda module, args, output: outputs.append(output))
    assert torch.equal(values_of(adapted, "layers.0.self_attn.o_proj.output")[0], outputs[0])  # with the adapter's part
    handle.remove()
    with activations.intervene(adapted, {"o_proj.output": activations.Patch(0.0), "q_proj": activations.Patch(0.0)}):
        assert all((value == 0).all() for name in ("o_proj.output", "q_proj") for value in values_of(adapted, name))


def test_a_copy_that_peft_trains_is_the_point() -> None:
    from peft import LoraConfig, get_peft_model

    model = with_modulators()
    names = list(hook_points(model, outputs=True))
    settings = LoraConfig(target_modules=["o_proj"], modules_to_save=["modulator"])
    adapted = get_peft_model(model, settings)
    assert sorted(hook_points(adapted, outputs=True)) == sorted(names)
    before = adapted(IDS).logits
    with activations.intervene(adapted, {"modulator.channel": activations.Patch(0.0)}):
        assert not torch.equal(adapted(IDS).logits, before)
        with adapted.disable_adapter():
            assert torch.equal(adapted(IDS).logits, before)  # of the original module, which the block does not hook
    with adapted.disable_adapter(), activations.intervene(adapted, {"modulator.channel": activations.Patch(0.0)}):
        assert not torch.equal(adapted(IDS).logits, before)


def test_blocks_may_end_in_any_order() -> None:
    model = with_latents().eval()
    names = {"q_proj": activations.Add(1.0)}
    before = model(IDS).logits
    first, second = activations.intervene(model, names), activations.intervene(model, names)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    with activations.intervene(model, names):
        twice = model(IDS).logits
    once = model(IDS).logits
    second.__exit__(None, None, None)
    assert model(IDS).logits.equal(before)
    assert not once.equal(before)
    assert not twice.equal(once)


def test_blocks_on_outputs_of_a_compiled_model_may_end_in_any_order() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(torch.nn.Sequential(torch.nn.Linear(2, 2)), backend="eager", fullgraph=True)
    x = torch.ones(2)
    before = compiled(x)
    first, second = (activations.intervene(compiled, {"0.output": activations.Add(n)}) for n in (1.0, 2.0))
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    torch.testing.assert_close(compiled(x), before + 2)
    second.__exit__(None, None, None)
    assert compiled(x).equal(before)
    assert torch._dynamo.eval_frame._stance.stance == "default"


class Misnamed(activations.HasHookPoints, torch.nn.Module):
    def __init__(self, declared):
        super().__init__()
        self.declared = declared

    def hook_sizes(self):
        return {self.declared: 2}

    def forward(self, x):
        return self.hooked("gate", x)


def test_declared_and_used_names_agree() -> None:
    for name in ("output", "a.b"):
        with pytest.raises(ValueError, match="hook_sizes"):
            hook_points(Misnamed(name))
    model = torch.nn.Sequential(Misnamed("gaet"))
    with (
        activations.intervene(model, {"gaet": activations.Patch(0.0)}),
        pytest.raises(ValueError, match="hook_sizes has no 'gate' of size 2"),
    ):
        model(torch.ones(2))


def test_a_copy_made_in_a_block_becomes_a_plain_layer() -> None:
    model = make_tiny_llama().eval()
    with activations.intervene(model, {"o_proj.output": activations.Patch(0.0)}):
        copied = copy.deepcopy(model)
    assert torch.equal(copied(IDS).logits, model(IDS).logits)
    assert not any(module._forward_hooks for module in copied.modules() if isinstance(module, torch.nn.Linear))


def test_gradient_checkpointing_is_noticed_in_a_model_within_another() -> None:
    model = with_latents().train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    outer = torch.nn.ModuleDict({"model": model})
    with pytest.raises(ValueError, match="gradient checkpointing"):
        activations.intervene(outer, {"q_proj": activations.Patch(0.0)})
    block = activations.intervene(outer.eval(), {"q_proj": activations.Patch(0.0)})
    outer.train()
    with pytest.raises(ValueError, match="gradient checkpointing"), block:
        pass
    block = activations.intervene(model.eval(), {"q_proj": activations.Patch(0.0)})
    with block:
        model.train()
        with pytest.raises(ValueError, match="gradient checkpointing"):
            model(IDS)


class Own(activations.Intervention):
    def __init__(self, value):
        self.value = value

    def apply(self, activation):
        return self.value


def test_copies_and_pickles_made_in_a_block_are_plain_models(tmp_path) -> None:
    model = with_latents().train()
    with activations.intervene(model, {"q_proj": activations.Add(torch.ones(6))}):
        copied = copy.deepcopy(model)
        torch.save(model, tmp_path / "model.pt")
    for other in (copied, torch.load(tmp_path / "model.pt", weights_only=False)):
        other.gradient_checkpointing_enable({"use_reentrant": False})
        other(IDS)


def test_an_intervention_compiles_in_one_graph() -> None:
    torch._dynamo.reset()
    model = with_latents().eval()
    layer = torch.compile(model.model.layers[0].self_attn.q_proj, backend="eager", fullgraph=True)
    x = torch.randn(1, 3, 32)
    for value in (torch.zeros(6), [0.0] * 6):
        with activations.intervene(model, {"layers.0.self_attn.q_proj": activations.Patch(value)}):
            torch.testing.assert_close(layer(x), model.model.layers[0].self_attn.q_proj(x))


class InPlace(activations.Intervention):
    def apply(self, activation):
        activation.z[..., 0] = 100.0
        return activation.z


@pytest.mark.parametrize("make", [with_latents, with_ccl, with_modulators])
def test_an_intervention_may_change_values_in_place(make) -> None:
    model = make().eval()
    for name in hook_points(model):
        with activations.intervene(model, {name: InPlace()}):
            in_place = run(model)[0]
        put = activations.Patch(100.0, dims=[0])
        torch.testing.assert_close(run(model, {name: put})[0], in_place)


def test_prompt_tuning_keeps_the_names() -> None:
    from peft import PromptTuningConfig, get_peft_model

    model = with_latents().train()
    names = list(hook_points(model, outputs=True))
    adapted = get_peft_model(model, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
    assert list(hook_points(adapted, outputs=True)) == names
    adapted(IDS, labels=IDS)
    assert {name.partition("/")[0] for name in relinear.contract.auxiliary_losses_of(adapted)} == set(
        hook_points(adapted)
    )


@pytest.mark.parametrize(
    "value", [None, torch.zeros(3), torch.zeros(2, 7, 32).double()], ids=["nothing", "other_shape", "other_dtype"]
)
def test_what_an_intervention_returns_is_checked(value) -> None:
    model = make_tiny_llama()
    with (
        activations.intervene(model, {"o_proj.output": Own(value)}),
        pytest.raises(ValueError, match=r"Own\.apply must"),
    ):
        model(IDS)


def test_wrong_arguments_are_refused_in_a_sentence() -> None:
    model = make_tiny_llama()
    wrong = {
        "hook_points takes a model": lambda: hook_points("x"),
        "observe takes a model": lambda: observe(hook_points(model), print),
        "observe takes a function": lambda: observe(model, "o_proj.output"),
        "no operator with a latent.*o_proj.output": lambda: observe(model, print),
        "non-empty string, got 5": lambda: observe(model, print, 5),
        "number.* got 'a'": lambda: activations.Add("a"),
        "number.* got None": lambda: activations.Add(None),
        "number.*, got 'a'": lambda: activations.Clamp("a", 1),
        "at most the maximum": lambda: activations.Clamp(1, -1),
        "nan": lambda: activations.Clamp(float("nan"), 1),
        "minimum=tensor": lambda: activations.Clamp(torch.ones(4), torch.zeros(4)),
        "real number": lambda: activations.Add(1j),
        "minimum": lambda: activations.Clamp(),
        r"mask\.nonzero": lambda: activations.Patch(0.0, dims=[True, False]),
        r"nonzero\(\)": lambda: activations.Patch(0.0, dims=torch.tensor([True, False])),
        "must be indices": lambda: activations.Patch(0.0, dims=[0.5]),
        "must be different indices": lambda: activations.intervene(
            model, {"o_proj.output": activations.Add(1.0, dims=[0, -32])}
        ),
    }
    for message, call in wrong.items():
        with pytest.raises(ValueError, match=message):
            call()
    wrong_function = activations.Patch(lambda activation: None)
    with activations.intervene(model, {"o_proj.output": wrong_function}), pytest.raises(ValueError, match="got None"):
        model(IDS)


def test_edits_of_gates_nest_reach_generation_and_are_refused_where_wrong() -> None:
    model = with_modulators()
    name = "model.layers.0.mlp.down_proj.modulator.channel"
    with (
        activations.intervene(model, {name: activations.Patch(1.0)}),
        activations.intervene(model, {name: activations.Add(0.5)}),
    ):
        seen = run(model)[1]
        cached = model.generate(IDS, max_new_tokens=4, do_sample=False)
        plain = model.generate(IDS, max_new_tokens=4, do_sample=False, use_cache=False)
    assert (seen[name] == 1.5).all()
    assert torch.equal(cached, plain)
    wrong = {
        "down_proj.modulator.chanel": "channel",
        "down_proj.outputs": "known|mean",
        "down_proj.modulator.channel": "must end in 32",
    }
    for pattern, message in wrong.items():
        with pytest.raises(ValueError, match=message):
            activations.intervene(model, {pattern: activations.Patch([0.0] * 3)})
    with pytest.raises(ValueError, match=r"q_proj\.output"):
        activations.intervene(make_tiny_llama(), {"q_proj": activations.Patch(0.0)})
