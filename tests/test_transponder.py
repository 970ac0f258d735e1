"""Modulators: the formula, the twin, bit-for-bit identity, the paper's overheads, and PEFT beside them."""

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM

import relinear
from conftest import make_tiny_gpt2, make_tiny_llama
from relinear.core.operator import NotLinearError
from relinear.functional import transponder as reference
from relinear.kernels import transponder as fast
from relinear.kernels.cpu.portions import row_portions

I, O, R = 12, 10, 8
IDS = torch.randint(0, 96, (2, 17), generator=torch.Generator().manual_seed(3))


def tensors(rank=R, dtype=torch.float64, tokens=(3, 5)):
    generator = torch.Generator().manual_seed(1)
    shapes = {"z": (*tokens, O), "x": (*tokens, I), "down": (rank, I), "channel": (O, rank), "scalar": (1, rank)}
    drawn = {k: torch.randn(*s, generator=generator, dtype=torch.float64).to(dtype) for k, s in shapes.items()}
    drawn |= {"channel_alpha": torch.tensor([1.3], dtype=dtype), "scalar_alpha": torch.tensor([0.7], dtype=dtype)}
    return drawn


def test_reference_against_the_equations():
    t = {k: v.numpy() for k, v in tensors().items()}
    import numpy as np

    def sigmoid(a):
        return 1 / (1 + np.exp(-a))

    hidden = sigmoid(t["x"] @ t["down"].T)
    gates = [2 * sigmoid(t[f"{n}_alpha"] * (hidden @ t[n].T)) for n in ("channel", "scalar")]
    expected = torch.tensor(t["z"] * gates[0] * gates[1])
    torch.testing.assert_close(reference.modulate(**tensors()), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("rank", [1, 8, 32])
@pytest.mark.parametrize("left_out", [None, "channel", "scalar"])
@pytest.mark.parametrize("form", ["whole", "portions"])
def test_twin_is_the_reference_in_float64(rank, left_out, form, monkeypatch):
    monkeypatch.setattr(
        fast, "row_portions", lambda x, numbers=0: row_portions(x, 4 * O if form == "portions" else 999)
    )
    values = []
    for modulate in (reference.modulate, fast.modulate):
        t = {k: v.requires_grad_() for k, v in tensors(rank).items()}
        given = t | ({left_out: None} if left_out else {})
        out = modulate(**given)
        loss = (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)).sum()
        values.append([out, *torch.autograd.grad(loss, list(t.values()), allow_unused=True)])
    for mine, theirs in zip(*values, strict=True):
        if mine is None or theirs is None:
            assert mine is theirs
        else:
            torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-11)


def test_gradcheck():
    t = {k: v.requires_grad_() for k, v in tensors(rank=2, tokens=(3,)).items()}
    assert torch.autograd.gradcheck(lambda *args: fast.modulate(*args), tuple(t.values()))


def test_fast_form_keeps_no_gate_for_the_backward_pass():
    saved = []
    t = {k: v.requires_grad_() for k, v in tensors(tokens=(64,)).items()}
    with torch.autograd.graph.saved_tensors_hooks(lambda s: saved.append(s) or s, lambda s: s):
        y = fast.modulate(**t)
    outputs = {s.data_ptr() for s in saved if s.shape == (64, O)}
    assert outputs == {t["z"].data_ptr()}
    assert y.data_ptr() not in outputs  # which may be changed in place


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("portions", [False, True])
def test_the_linear_map_inside_gives_the_same_gradients(frozen, portions, monkeypatch):
    monkeypatch.setattr(fast, "row_portions", lambda x, numbers=0: row_portions(x, 4 * O if portions else 999))
    generator = torch.Generator().manual_seed(4)
    results = []
    for modulated_linear in (reference.modulated_linear, fast.modulated_linear):
        given = {k: v for k, v in tensors().items() if k != "z"}
        generator.manual_seed(4)
        for name, shape in (("weight", (O, I)), ("bias", (O,))):
            given[name] = torch.randn(*shape, generator=generator, dtype=torch.float64)
        leaves = [v.requires_grad_() for k, v in given.items() if not (frozen and k in ("weight", "bias"))]
        y = modulated_linear(**given)
        results.append([y, *torch.autograd.grad(y.square().sum(), leaves)])
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-11)


def test_half_precision_takes_the_gates_in_float32():
    exact = reference.modulate(**tensors())
    for modulate in (reference.modulate, fast.modulate):
        out = modulate(**tensors(dtype=torch.bfloat16))
        assert out.dtype == torch.bfloat16
        torch.testing.assert_close(out.double(), exact, rtol=0.05, atol=0.02)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("make", [make_tiny_llama, make_tiny_gpt2])
def test_identity_leaves_logits_unchanged_bit_for_bit(make, dtype):
    model = make().to(dtype)
    before = model(IDS).logits
    relinear.replace_(model, {"all-linear": relinear.Transponder(init="identity")})
    relinear.attach_(model, relinear.PathTransponder(init="identity"))
    assert torch.equal(model(IDS).logits, before)
    for contextual in (True, False):  # the control without context starts at exactly 1 as well
        other = make().to(dtype)
        before = other(IDS).logits
        relinear.replace_(other, {"all-linear": relinear.Transponder(contextual=contextual, init="identity")})
        assert torch.equal(other(IDS).logits, before)


def test_identity_learns():
    model = make_tiny_llama().train()
    relinear.replace_(model, {"all-linear": relinear.Transponder(init="identity")})
    trained = relinear.train_only_(model, "modulator")
    assert trained == sum(p.numel() for n, p in model.named_parameters() if ".modulator." in n)
    model(IDS, labels=IDS).loss.backward()
    for name, parameter in model.named_parameters():
        assert (parameter.grad is not None) == (".modulator." in name)
        if name.endswith("channel_up"):
            assert parameter.grad.abs().max() > 0


SIZES = {"llama-60m": (1.08, 43.6), "llama-130m": (1.05, 63.3), "llama-250m": (1.02, 81.5)}


@pytest.mark.parametrize("preset", SIZES)
def test_overheads_of_the_paper(preset):
    for operator, printed, digits in (
        (relinear.Transponder(), SIZES[preset][0], 2),
        (relinear.OutputGate(), SIZES[preset][1], 1),
    ):
        with torch.device("meta"):
            model = relinear.from_preset(preset)
        before = sum(p.numel() for p in model.parameters())
        report = relinear.replace_(model, {"all-linear": operator})
        added = sum(p.numel() for p in model.parameters()) - before
        assert report.parameters - report.parameters_before == added
        # The printed figures count A and B. The curvatures are two numbers a projection: 336 of 3.6 million at 250m,
        # where they alone turn 1.0250 % into 1.0251 %.
        alphas = sum(p.numel() for name, p in model.named_parameters() if name.endswith("log_alpha"))
        assert alphas == (2 * 7 * len(model.model.layers) if isinstance(operator, relinear.Transponder) else 0)
        assert round(100 * (added - alphas) / before, digits) == printed


def test_variants_of_table_1_add_what_they_say():
    width, layers = 32, 2
    counts = {}
    for name, operator, path in (
        ("path-scalar", None, relinear.PathTransponder(channel=False)),
        ("path-channel", None, relinear.PathTransponder(scalar=False)),
        ("layer-scalar", relinear.Transponder(channel=False), None),
        ("layer-channel", relinear.Transponder(scalar=False), None),
        ("layer-channel-scalar", relinear.Transponder(), None),
    ):
        model = make_tiny_llama()
        before = sum(p.numel() for p in model.parameters())
        logits = model(IDS).logits
        if operator is not None:
            relinear.replace_(model, {"all-linear": operator})
        else:
            relinear.attach_(model, path)
        assert not torch.equal(model(IDS).logits, logits)
        counts[name] = sum(p.numel() for p in model.parameters()) - before
    assert counts["path-scalar"] == layers * 2 * (8 * width + 8 + 1)
    assert counts["path-channel"] == layers * 2 * (8 * width + 8 * width + 1)
    assert counts["layer-channel-scalar"] == counts["layer-channel"] + layers * 7 * (8 + 1)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("all", 14),
        ("attention", 8),
        ("mlp", 6),
        ("first", 7),
        ("last", 7),
        ("qk", 4),
        ("without_up_gate", 10),
    ],
)
def test_placements_of_table_5(name, expected):
    model = make_tiny_llama()
    relinear.replace_(model, **relinear.placement(name, relinear.Transponder()))
    found = [n for n, m in model.named_modules() if type(m).__name__ == "TransponderLinear"]
    assert len(found) == expected
    assert name not in ("first", "last") or {n.split(".")[2] for n in found} == {"0" if name == "first" else "1"}


def test_unknown_placement_names_the_nearest():
    with pytest.raises(ValueError, match="attention"):
        relinear.placement("attn", relinear.Transponder())


@pytest.mark.parametrize("rank", [2, 4, 8, 16, 32])
def test_hidden_sizes_of_table_6(rank):
    layer = relinear.Transponder(rank=rank).build(I, O)
    assert layer.modulator.down.shape == (rank, I)
    assert layer(torch.randn(2, 3, I)).shape == (2, 3, O)


def test_controls_of_table_4():
    static = relinear.Transponder(contextual=False).build(I, O)
    with torch.no_grad():
        static.modulator.channel_beta.normal_()
        static.modulator.scalar_beta.fill_(0.5)
    x = torch.randn(4, I)
    gate = 2 * torch.sigmoid(0.5 * static.modulator.channel_beta)
    torch.testing.assert_close(static(x), static.base(x) * gate)
    torch.testing.assert_close(x @ static.to_dense().T + static.dense_bias(), static(x))
    fixed = relinear.Transponder(learnable_alpha=False).build(I, O)
    assert not [name for name, _ in fixed.named_parameters() if "alpha" in name]
    assert fixed.modulator.alphas() == {"channel": 1.0, "scalar": 1.0}


def test_contextual_gates_are_no_linear_map_until_then_they_are_the_identity():
    with pytest.raises(NotLinearError, match="depend on the input"):
        relinear.Transponder().build(I, O).to_dense()
    layer = relinear.Transponder(init="identity").build(I, O)
    assert torch.equal(layer.to_dense(), layer.base.weight)


@pytest.mark.parametrize("make", [make_tiny_llama, make_tiny_gpt2])
def test_folding_identity_and_static_gates_gives_a_stock_model(make):
    model = make()
    before = model(IDS).logits
    relinear.replace_(model, {"all-linear": relinear.Transponder(init="identity")})
    report = relinear.fold_(model, IDS, verbose=False)
    assert not report.left
    assert torch.equal(model(IDS).logits, before)
    relinear.replace_(model, {"all-linear": relinear.Transponder(contextual=False)})
    for name, parameter in model.named_parameters():
        if name.endswith("channel_beta"):
            torch.nn.init.normal_(parameter)
    assert relinear.fold_(model, IDS, verbose=False).max_logit_difference < 1e-5
    relinear.replace_(model, {"all-linear": relinear.Transponder()})
    assert len(relinear.fold_(model, IDS, verbose=False).left) > 0


def test_on_another_operator_and_back_from_a_checkpoint(tmp_path):
    model = make_tiny_llama()
    relinear.replace_(model, {"q_proj": relinear.LowRank(rank=4)})
    relinear.replace_(  # base=None keeps what is there: the low-rank q_proj, and plain layers elsewhere
        model,
        {"q_proj": relinear.Transponder(), "mlp.up_proj": relinear.Transponder(base=relinear.LowRank(rank=5))},
    )
    assert model.model.layers[0].self_attn.q_proj.config.base == relinear.LowRank(rank=4)
    relinear.attach_(model, relinear.PathTransponder(mlp=False, layers=[-1]))
    model.save_pretrained(tmp_path)
    torch.manual_seed(7)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(again(IDS).logits, model(IDS).logits)
    assert type(again.model.layers[1].self_attn.q_proj.base).__name__ == "LowRankLinear"
    twin = copy.deepcopy(again)
    with torch.no_grad():
        twin.model.layers[1].self_attn.relinear_modulator.channel_up.add_(1)
    assert not torch.equal(twin(IDS).logits, again(IDS).logits)
    assert torch.equal(again(IDS).logits, model(IDS).logits)


def test_from_weight_reproduces_the_source():
    model = make_tiny_llama()
    before = model(IDS).logits
    relinear.replace_(model, {"all-linear": relinear.Transponder()}, init="from_weight")
    assert torch.equal(model(IDS).logits, before)


@pytest.mark.parametrize("settings", [{"rank": 0}, {"init": "zero"}, {"channel": False, "scalar": False}, {"base": 3}])
def test_bad_settings_are_refused(settings):
    with pytest.raises(ValueError, match=r"rank|init|channel|base"):
        relinear.Transponder(**settings)


def test_paths_twice_or_out_of_range_are_refused():
    model = make_tiny_llama()
    with pytest.raises(ValueError, match="out of range"):
        relinear.attach_(model, relinear.PathTransponder(layers=[2]))
    relinear.attach_(model, relinear.PathTransponder())
    with pytest.raises(ValueError, match="already"):
        relinear.attach_(model, relinear.PathTransponder())


def test_checkpointing_and_compile_see_the_same_gates():
    model = make_tiny_llama().train()
    relinear.replace_(model, {"all-linear": relinear.Transponder()})
    relinear.attach_(model, relinear.PathTransponder())
    twin = copy.deepcopy(model)
    twin.gradient_checkpointing_enable({"use_reentrant": False})
    compiled = torch.compile(copy.deepcopy(model), backend="aot_eager", fullgraph=True)
    for other in (twin, compiled):
        model.zero_grad()
        losses = [m(IDS, labels=IDS).loss for m in (model, other)]
        for loss in losses:
            loss.backward()
        torch.testing.assert_close(*losses)
        for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-6)


def test_beside_lora_on_one_model(tmp_path):
    peft = pytest.importorskip("peft")
    base = make_tiny_llama()
    relinear.replace_(base, {"all-linear": relinear.Transponder(init="identity")})
    relinear.attach_(base, relinear.PathTransponder(init="identity"))
    before = base(IDS).logits
    source = copy.deepcopy(base)
    config = peft.LoraConfig(target_modules=["q_proj.base", "v_proj.base"], modules_to_save=["modulator"], r=4)
    model = peft.get_peft_model(base, config)
    assert torch.equal(model(IDS).logits, before)
    names = {n for n, p in model.named_parameters() if p.requires_grad}
    assert {".".join(n.split(".")[-2:]) for n in names} >= {"default.weight", "default.channel_up", "default.down"}
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    model.train()(IDS, labels=IDS).loss.backward()
    for parameter in (p for p in model.parameters() if p.requires_grad):
        assert parameter.grad is not None  # the wrapped copies are the ones in use, on paths too
    optimizer.step()
    model.eval()
    trained = model(IDS).logits
    assert not torch.equal(trained, before)
    model.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(source, tmp_path)
    assert torch.equal(again(IDS).logits, trained)


def test_output_gate_is_qius_formula():
    layer = relinear.OutputGate().build(I, O)
    x = torch.randn(4, I)
    expected = layer.base(x) * torch.sigmoid(x @ layer.gate.weight.T)
    torch.testing.assert_close(layer(x), expected)
    with pytest.raises(NotLinearError):
        layer.to_dense()


@pytest.mark.slow
def test_identity_on_a_real_pretrained_model(smollm2):
    ids = torch.arange(100, 164)[None]
    for dtype in (torch.float32, torch.bfloat16):
        model = relinear.from_pretrained(smollm2, dtype=dtype)
        before = model(ids).logits
        relinear.replace_(model, {"all-linear": relinear.Transponder(init="identity")})
        relinear.attach_(model, relinear.PathTransponder(init="identity"))
        assert torch.equal(model(ids).logits, before)
