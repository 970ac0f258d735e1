"""Residual methods against their papers' formulas, written out layer by layer on stock parts."""

import copy
import math
import warnings

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, GPTNeoXConfig, GPTNeoXForCausalLM, Qwen2Config, Qwen2ForCausalLM

import relinear
from conftest import make_tiny_gpt2, make_tiny_llama, mostly_slow

IDS = torch.randint(0, 96, (2, 17), generator=torch.Generator().manual_seed(3))
METHODS = ["deepnorm", "laurel_lr", "laurel_pa", "laurel_rw", "layernorm_scaling", "post_ln", "rezero", "sdpa_gate"]
LEARNING = [m for m in METHODS if m not in ("layernorm_scaling", "post_ln", "deepnorm")]


def make_tiny_qwen2():
    settings = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": None, "eos_token_id": None}
    return Qwen2ForCausalLM(Qwen2Config(**settings, **heads)).eval()


MAKERS = {"llama": make_tiny_llama, "qwen2": make_tiny_qwen2, "gpt2": make_tiny_gpt2}


def treated(make, method, noise=0.03):
    """A model with ``method`` in it, its norms, sites and projections all moved away from where they start."""
    model = make()
    relinear.attach_(model, method)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(noise * torch.randn_like(parameter))
    return model


def run_by_hand(stock, meet, norm_before=True, scale=lambda layer: 1.0, final_norm=True):
    """Logits of a Llama whose i-th residual connection is ``meet(i, streams, f)``; streams end with x_i."""
    body = stock.model
    x = body.embed_tokens(IDS)
    positions = body.rotary_emb(x, position_ids=torch.arange(IDS.shape[1])[None])
    streams = []
    for number, layer in enumerate(body.layers):
        parts = (
            (layer.input_layernorm, lambda h, layer=layer: layer.self_attn(h, position_embeddings=positions)[0]),
            (layer.post_attention_layernorm, layer.mlp),
        )
        for half, (norm, module) in enumerate(parts):
            streams.append(x)
            y = module(scale(number) * norm(x) if norm_before else x)
            x = meet(2 * number + half, streams, y, norm)
    return stock.lm_head(body.norm(x) if final_norm else x)


def sites(model):
    return [s for layer in model.model.layers for s in (layer.self_attn.relinear_residual, layer.mlp.relinear_residual)]


def split(config):
    """A stock double-precision Llama and a twin of it that has the method, its sites drawn at random."""
    stock = make_tiny_llama(num_hidden_layers=3).double()
    model = copy.deepcopy(stock)
    relinear.attach_(model, config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "relinear" in name and ".norm." not in name:
                parameter.normal_(std=0.5)
    return stock, model


def close(model, expected):
    torch.testing.assert_close(model(IDS).logits, expected, rtol=1e-10, atol=1e-10)


def test_plain_residual_by_hand_is_the_stock_model():
    stock = make_tiny_llama().double()
    close(stock, run_by_hand(stock, lambda i, xs, y, norm: xs[-1] + y))


@pytest.mark.parametrize("keep_norms", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_rezero(shared, keep_norms):
    stock, model = split(relinear.residual.ReZero(shared=shared, keep_norms=keep_norms))
    alphas = [p for n, p in model.named_parameters() if n.endswith("alpha")]
    assert len(alphas) == (3 if shared else 6)
    alphas = [a for a in alphas for _ in range(2)] if shared else alphas
    close(model, run_by_hand(stock, lambda i, xs, y, norm: xs[-1] + alphas[i] * y, norm_before=keep_norms))


def test_a_model_that_another_method_has_quantized_is_refused_before_anything_changes():
    model = make_tiny_llama()
    model.config.quantization_config = {"quant_method": "bitsandbytes"}
    before = [name for name, _ in model.named_modules()]
    with pytest.raises(ValueError, match=r"quantized \(bitsandbytes\); dequantize it first"):
        relinear.attach_(model, "rezero")
    assert [name for name, _ in model.named_modules()] == before


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_rezero_starts_as_the_identity(make):
    model = make()
    relinear.attach_(model, "rezero")
    states = model(IDS, output_hidden_states=True).hidden_states  # the last one is behind the final norm
    assert all(torch.equal(state, states[0]) for state in states[:-1])


def test_layernorm_scaling():
    stock, model = split("layernorm_scaling")
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in stock.parameters())
    close(model, run_by_hand(stock, lambda i, xs, y, norm: xs[-1] + y, scale=lambda layer: 1 / math.sqrt(layer + 1)))


@pytest.mark.parametrize("final_norm", [False, True])
def test_post_ln(final_norm):
    stock, model = split(relinear.residual.PostLN(final_norm=final_norm))
    by_hand = run_by_hand(stock, lambda i, xs, y, norm: norm(xs[-1] + y), norm_before=False, final_norm=final_norm)
    close(model, by_hand)


def test_deepnorm_forward():
    stock, model = split(relinear.residual.DeepNorm(initialize=False))
    alpha = (2 * 3) ** 0.25
    close(
        model,
        run_by_hand(stock, lambda i, xs, y, norm: norm(alpha * xs[-1] + y), norm_before=False, final_norm=False),
    )


def test_deepnorm_initialisation():
    model = make_tiny_llama(hidden_size=256, intermediate_size=512, num_hidden_layers=2)
    relinear.attach_(model, "deepnorm")
    beta = (8 * 2) ** -0.25
    for name, weight in model.model.layers[1].named_parameters():
        if weight.ndim == 2:
            gain = 1.0 if "q_proj" in name or "k_proj" in name else beta
            assert weight.std().item() == pytest.approx(gain * math.sqrt(2 / sum(weight.shape)), rel=0.05), name
    gpt2 = make_tiny_gpt2(n_embd=256)
    relinear.attach_(gpt2, "deepnorm")
    attention = gpt2.transformer.h[0].attn.c_attn
    for part, gain in zip(attention.weight.chunk(3, dim=1), (1.0, 1.0, beta), strict=True):
        assert part.std().item() == pytest.approx(gain * math.sqrt(2 / 512), rel=0.05)
    assert not attention.bias.any()


def test_deepnorm_says_which_operators_it_did_not_draw():
    model = make_tiny_llama()
    relinear.replace_(model, {"q_proj": relinear.LowRank(rank=4), "v_proj": relinear.Transponder()})
    kept = model.model.layers[0].self_attn.q_proj.down.clone()
    inside = model.model.layers[0].self_attn.v_proj.base.weight.clone()
    with pytest.warns(UserWarning, match="LowRank"):
        relinear.attach_(model, "deepnorm")
    assert torch.equal(model.model.layers[0].self_attn.q_proj.down, kept)
    assert not torch.equal(model.model.layers[0].self_attn.v_proj.base.weight, inside)


@pytest.mark.parametrize("normalize", ["softmax", "sigmoid"])
def test_laurel_rw(normalize):
    stock, model = split(relinear.residual.LaurelRW(normalize=normalize))
    pairs = [torch.stack([site.weights.logits[0], site.weights.logits[1]]) for site in sites(model)]
    pairs = [2 * (torch.softmax(p, 0) if normalize == "softmax" else torch.sigmoid(p)) for p in pairs]
    close(model, run_by_hand(stock, lambda i, xs, y, norm: pairs[i][0] * y + pairs[i][1] * xs[-1]))


@pytest.mark.parametrize("weights", [False, True])
def test_laurel_lr(weights):
    stock, model = split(relinear.residual.LaurelLR(rank=5, weights=weights))
    parts = sites(model)

    def meet(i, xs, y, norm):
        alpha, beta = 2 * torch.softmax(parts[i].weights.logits, 0) if weights else (1, 1)
        matrix = parts[i].low_rank.up @ parts[i].low_rank.down
        return alpha * y + beta * (xs[-1] @ matrix.T + xs[-1])

    close(model, run_by_hand(stock, meet))


@pytest.mark.parametrize("rank", [None, 5])
@pytest.mark.parametrize("previous", [1, 3, 9])
def test_laurel_pa(rank, previous):
    stock, model = split(relinear.residual.LaurelPA(rank=rank, previous=previous))
    parts = sites(model)

    def meet(i, xs, y, norm):
        matrix = torch.eye(32).double() if rank is None else parts[i].low_rank.up @ parts[i].low_rank.down
        extra = sum(parts[i].gamma[j] * (xs[-1 - j] @ matrix.T) for j in range(min(previous, i + 1)))
        return y + xs[-1] + extra

    close(model, run_by_hand(stock, meet))


def test_laurel_starts_with_the_papers_matrices():
    model = make_tiny_llama()
    relinear.attach_(model, relinear.residual.LaurelLR(rank=5))
    down = sites(model)[0].low_rank.down
    for i in range(32):
        for j in range(5):
            assert down[j, i].item() == pytest.approx(1 / math.sqrt(5 * 32) if i % 5 == j else 0)


@pytest.mark.parametrize("method", ["laurel_rw", "laurel_lr", "laurel_pa", relinear.residual.LaurelPA(rank=None)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_methods_that_start_as_the_stock_model(make, method, dtype):
    model = make().to(dtype)
    before = model(IDS).logits
    relinear.attach_(model, method)
    assert torch.equal(model(IDS).logits, before)


@pytest.mark.parametrize("method", METHODS)
def test_models_decode_after_for_inference_as_before(method):
    """Some methods replace the norms that the fused decoder layer of quantized layers would read."""
    model = treated(make_tiny_llama, method)
    relinear.replace_(model, {"all-linear": relinear.Quantized()}, init="from_weight")
    ids = torch.arange(1, 9)[None]
    with torch.no_grad():
        expected = model(ids).logits
        relinear.for_inference_(model)
        past = model(ids[:, :-1], use_cache=True).past_key_values
        got = model(ids[:, -1:], past_key_values=past).logits
    assert (got - expected[:, -1:]).norm() < 0.02 * expected[:, -1:].norm()  # inputs are rounded to 8 bits


@pytest.mark.parametrize("targets", [["o_proj"], "all-linear"], ids=str)
def test_a_lora_on_what_a_gate_precedes_computes_what_its_merge_does(targets):
    peft = pytest.importorskip("peft")
    _, model = split(relinear.residual.SDPAGate())
    ids = torch.arange(14).view(2, 7) + 1
    with torch.no_grad():
        before = model(ids).logits
        adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=targets, r=2, init_lora_weights=False))
        expected = adapted.eval()(ids).logits
        assert (expected - before).abs().max() > 1e-3
        torch.testing.assert_close(copy.deepcopy(adapted).unload()(ids).logits, before)
        torch.testing.assert_close(adapted.merge_and_unload()(ids).logits, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("per", ["head", "channel"])
def test_sdpa_gate_closes_single_heads(per):
    stock, model = split(relinear.residual.SDPAGate(per=per))
    heads, channels = 4, 8
    weight = torch.zeros(heads if per == "head" else heads * channels, 32).double()
    for layer in model.model.layers:
        layer.self_attn.relinear_gate.weight.data.copy_(weight)
    halved = copy.deepcopy(stock)
    for layer in halved.model.layers:
        layer.self_attn.o_proj.weight.data.div_(2)
    close(model, halved(IDS).logits)
    # the gate reads the attention's input: one huge weight on it opens or shuts head 1 token by token
    gate = model.model.layers[0].self_attn.relinear_gate
    rows = slice(1, 2) if per == "head" else slice(channels, 2 * channels)
    gate.weight.data[rows, 0] = 1e6
    caught = {}
    model.model.layers[0].self_attn.register_forward_pre_hook(
        lambda m, a, k: caught.update(x=k["hidden_states"]), with_kwargs=True
    )
    model.model.layers[0].self_attn.o_proj.register_forward_pre_hook(lambda m, a: caught.update(y=a[0]))
    model(IDS)
    head = caught["y"].unflatten(-1, (heads, channels))[..., 1, :]
    shut = caught["x"][..., 0] < -1e-3
    assert shut.any()
    assert not head[shut].any()
    assert head[~shut].any()


def test_hooks_stay_when_a_projection_is_replaced(tmp_path):
    model = make_tiny_llama()
    relinear.attach_(model, relinear.residual.SDPAGate(per="channel"))
    before = model(IDS).logits
    relinear.replace_(model, {"o_proj": relinear.Transponder(init="identity")})
    assert torch.equal(model(IDS).logits, before)
    model.save_pretrained(tmp_path)
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path)(IDS).logits, before)
    relinear.fold_(model, IDS, verbose=False)
    torch.testing.assert_close(model(IDS).logits, before)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("make", mostly_slow(MAKERS.values(), make_tiny_llama), ids=MAKERS)
def test_with_operators_through_a_checkpoint_a_copy_and_a_cache(make, method, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = treated(make, method)
    relinear.replace_(model, {"all-linear": relinear.Transponder()})
    relinear.attach_(model, relinear.PathTransponder())
    logits = model(IDS).logits
    model.save_pretrained(tmp_path)
    torch.manual_seed(5)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(again(IDS).logits, logits)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert torch.equal(twin(IDS).logits, logits)  # a copy shares nothing with what it was copied from
    first = twin(IDS[:, :9], use_cache=True)
    second = twin(IDS[:, 9:], past_key_values=first.past_key_values, use_cache=True)
    torch.testing.assert_close(torch.cat([first.logits, second.logits], 1), logits, rtol=1e-4, atol=1e-6)
    ends = {"pad_token_id": 0, "eos_token_id": 0}
    written = [twin.generate(IDS[:, :5], max_new_tokens=6, do_sample=False, use_cache=c, **ends) for c in (True, False)]
    assert torch.equal(*written)


@pytest.mark.parametrize("method", METHODS)
def test_gradients_survive_checkpointing_with_two_forwards_before_the_backward(method):
    model = treated(lambda: make_tiny_llama(num_hidden_layers=3), method).train()
    twin = copy.deepcopy(model)
    twin.gradient_checkpointing_enable({"use_reentrant": False})
    for m in (model, twin):
        first, second = (m(ids, labels=ids).loss for ids in (IDS, IDS.flip(1)))
        (2 * first + second).backward()
    for (name, mine), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert mine.grad is not None, name
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-5, atol=1e-7)


@pytest.mark.slow  # one in training is among the fast ones of test_compiled_models.py
@pytest.mark.parametrize("method", METHODS)
def test_compiles_in_one_graph(method):
    model = treated(make_tiny_llama, method)
    torch._dynamo.reset()
    compiled = torch.compile(copy.deepcopy(model), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(IDS).logits, model(IDS).logits)


@pytest.mark.parametrize("method", METHODS)
def test_future_tokens_change_nothing(method):
    model = treated(make_tiny_llama, method).double()
    other = IDS.clone()
    other[:, 11:] = (other[:, 11:] + 1) % 96
    torch.testing.assert_close(model(other).logits[:, :11], model(IDS).logits[:, :11], rtol=1e-12, atol=1e-12)
    assert not torch.equal(model(other).logits[:, 11], model(IDS).logits[:, 11])


@pytest.mark.parametrize("config", [relinear.residual.PostLN(), relinear.residual.DeepNorm(initialize=False)])
def test_half_precision_sums_cost_two_roundings(config):
    model = make_tiny_llama(num_hidden_layers=1).to(torch.bfloat16)
    relinear.attach_(model, config)
    site = model.model.layers[0].self_attn.relinear_residual
    x, y = (torch.randn(64, 32, dtype=torch.bfloat16) for _ in range(2))
    wanted = site.norm(torch.add(y, x, alpha=site.alpha))
    error = (x + site(x, y) - wanted).float().abs()
    rounding = 2**-8  # bfloat16 keeps 8 bits
    assert (error <= rounding * (2 * wanted.float().abs() + x.float().abs()) * 1.01).all()


def test_with_lora_and_modules_to_save(tmp_path):
    peft = pytest.importorskip("peft")
    for method in LEARNING:
        base = treated(make_tiny_llama, method)
        relinear.replace_(base, {"up_proj": relinear.Transponder()})
        source = copy.deepcopy(base)
        part = "relinear_gate" if method == "sdpa_gate" else "relinear_residual"
        config = peft.LoraConfig(target_modules=["q_proj", "up_proj.base"], modules_to_save=[part, "modulator"], r=2)
        model = peft.get_peft_model(base, config).train()
        model(IDS, labels=IDS).loss.backward()
        trained = [p for p in model.parameters() if p.requires_grad]
        assert all(p.grad is not None for p in trained)
        torch.optim.SGD(trained, lr=0.5).step()
        logits = model.eval()(IDS).logits
        model.save_pretrained(tmp_path / method)
        again = peft.PeftModel.from_pretrained(source, tmp_path / method)
        assert torch.equal(again(IDS).logits, logits)


def test_refusals_name_what_to_do():
    model = make_tiny_llama()
    with pytest.raises(ValueError, match="rezero"):
        relinear.attach_(model, "rezro")
    with pytest.raises(ValueError, match="at most 32"):
        relinear.attach_(model, relinear.residual.LaurelLR(rank=64))
    relinear.attach_(model, "post_ln")
    with pytest.raises(ValueError, match="already has the residual method PostLN"):
        relinear.attach_(model, "laurel_rw")
    config = GPTNeoXConfig(
        vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
    )
    parallel = GPTNeoXForCausalLM(config)
    before = {name for name, _ in parallel.named_modules()}
    with pytest.raises(ValueError, match="pre-norm layer"):
        relinear.attach_(parallel, "rezero")
    assert {name for name, _ in parallel.named_modules()} == before
    with pytest.raises(ValueError, match="no config"):
        relinear.attach_(torch.nn.Linear(2, 2), "rezero")


@pytest.mark.parametrize(
    ("config", "pointwise"),
    [
        (relinear.residual.LaurelRW(), 3),
        (relinear.residual.LaurelLR(rank=4), 1),
        (relinear.residual.LaurelLR(rank=4, weights=True), 5),
        (relinear.residual.LaurelPA(rank=4, previous=2), None),
        (relinear.residual.LaurelPA(rank=None, previous=2), None),
    ],
    ids=str,
)
def test_laurel_states_its_flops(config, pointwise):
    """The products that torch counts, and the pointwise operations of the formula."""
    stock = make_tiny_llama()
    plain = relinear.summary(stock)
    model = copy.deepcopy(stock)
    relinear.attach_(model, config)
    table = relinear.summary(model)
    with FlopCounterMode(display=False) as stock_counter:
        stock(IDS)
    with FlopCounterMode(display=False) as counter:
        model(IDS)
    products = (counter.get_total_flops() - stock_counter.get_total_flops()) // IDS.numel()
    width, connections = 32, 4
    if pointwise is None:  # the weighted sum of one stream, then of two, and adding h of it
        rest = width * (2 * (1 + 2 * (connections - 1)) + connections * (config.rank is not None))
    else:
        rest = pointwise * width * connections
    assert table.flops_per_token - plain.flops_per_token == products + rest > 0
    assert "LaurelPreviousResidual" in str(table) if pointwise is None else "LaurelResidual" in str(table)
