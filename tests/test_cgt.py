"""The Contextually Guided Transformer: one-way flow, causality, caches, checkpoints, losses."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

import relinear
from relinear.functional import cgt as reference
from relinear.kernels import cgt as fast
from tiny_models import make_cgt


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(1)
    return make_cgt()


@pytest.fixture
def ids():
    return torch.randint(0, 50, (2, 11))


@pytest.mark.parametrize("kind", ["tanh", "softmax"])
def test_fast_contraction_equals_reference(kind):
    m, r, d, e = 5, 3, 7, 4
    left, right = torch.randn(2, m, r, d, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(m, r, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(m, e, dtype=torch.float64), torch.randn(m, dtype=torch.float64)
    x = torch.randn(2, 6, d, dtype=torch.float64, requires_grad=True)
    for shape in [(2, 6, e), (2, 1, e), (e,)]:
        sigma = reference.mixing(torch.randn(shape, dtype=torch.float64), *weights, kind).requires_grad_()
        inputs = (x, sigma, left, right, bias)
        a, b = reference.modulate(*inputs), fast.modulate(*inputs)
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
        cotangent = torch.randn_like(a)
        for one, other in zip(torch.autograd.grad(a, inputs, cotangent), torch.autograd.grad(b, inputs, cotangent)):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)
    matrix, shift = reference.generated_map(sigma, left, right, bias)
    torch.testing.assert_close(x @ matrix.T + shift, a)


def test_modulation_is_the_papers_formula():
    """Loops over the indices of Section 3.1, with the templates as (dim x) x r and (dim x + 1) x r."""
    m, r, d = 3, 2, 4
    left, right, bias = torch.randn(m, r, d), torch.randn(m, r, d), torch.randn(m, r)
    sigma, x = torch.randn(m), torch.randn(d)
    big_l = sum(sigma[k] * left[k].T for k in range(m))
    big_r = sum(sigma[k] * torch.cat([right[k].T, bias[k][None]]) for k in range(m))
    extended = torch.cat([x, torch.ones(1)])
    expected = [
        x[i] + sum(big_l[i, k] * big_r[j, k] * extended[j] for j in range(d + 1) for k in range(r)) for i in range(d)
    ]
    torch.testing.assert_close(reference.modulate(x, sigma, left, right, bias), torch.stack(expected))


def test_moving_average_against_a_loop():
    y, start = torch.randn(2, 9, 3), torch.randn(2, 3)
    mask = torch.ones(2, 9)
    mask[1, :4] = 0
    used = reference.moving_average(y, start, 0.3, mask)
    for b in range(2):
        state = start[b]
        for t in range(9):
            state = 0.7 * state + 0.3 * y[b, t] if mask[b, t] else state
            torch.testing.assert_close(used[b, t], state, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(reference.moving_average(y, start, 0.0), start[:, None].expand_as(y))
    torch.testing.assert_close(reference.moving_average(y, start, 1.0), y)


def test_x_does_not_depend_on_y_below_the_context_layer(model, ids):
    """Changing every parameter of the y stream changes y but not one bit of x up to layer l."""
    other = copy.deepcopy(model)
    for name, parameter in other.named_parameters():
        if "context" in name:
            nn.init.normal_(parameter)
    with torch.no_grad():
        a = model(ids, output_hidden_states=True)
        b = other(ids, output_hidden_states=True)
    split = model.config.context_layer
    assert len(a.hidden_states) == model.config.n_layer + 1
    for layer in range(split + 1):
        assert torch.equal(a.hidden_states[layer], b.hidden_states[layer])
    assert not torch.allclose(a.context, b.context)
    assert not torch.allclose(a.hidden_states[split + 1], b.hidden_states[split + 1], atol=1e-3)


def test_y_reads_x(model, ids):
    """The other direction is open: x's first-layer MLP reaches the context."""
    other = copy.deepcopy(model)
    nn.init.normal_(other.transformer.h[0].mlp.c_fc.weight)
    assert not torch.allclose(model.context(ids), other.context(ids))


@pytest.mark.parametrize("mode", ["dynamic", "average"])
def test_causality(model, ids, mode):
    changed = ids.clone()
    changed[:, 6:] = (changed[:, 6:] + 1) % 50
    kwargs = {"frozen_context": torch.randn(2, 12), "context_rate": 0.2} if mode == "average" else {}
    with torch.no_grad():
        a, b = model(ids, **kwargs), model(changed, **kwargs)
    torch.testing.assert_close(a.logits[:, :6], b.logits[:, :6])
    torch.testing.assert_close(a.context[:, :6], b.context[:, :6])
    assert not torch.allclose(a.logits[:, 6:], b.logits[:, 6:], atol=1e-3)


def test_frozen_context_reaches_only_the_upper_layers_and_skips_the_y_stream(model, ids):
    y = model.context(ids)
    with torch.no_grad():
        dynamic = model(ids)
        given = model(ids, frozen_context=y)
        frozen = model(ids, frozen_context=y[:, -1])
    torch.testing.assert_close(dynamic.logits, given.logits)
    torch.testing.assert_close(dynamic.logits[:, -1], frozen.logits[:, -1], atol=1.0, rtol=1.0)
    assert not torch.allclose(dynamic.logits, frozen.logits, atol=1e-3)
    assert frozen.context is None
    torch.testing.assert_close(dynamic.context, y)


@pytest.mark.parametrize("mode", ["dynamic", "frozen", "average"])
@pytest.mark.parametrize("beams", [1, 3])
def test_generate_with_cache_equals_without(model, ids, mode, beams):
    kwargs = {"max_new_tokens": 6, "num_beams": beams, "do_sample": False, "pad_token_id": 0}
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    if mode != "dynamic":
        kwargs["frozen_context"] = torch.randn(2, 12)
    if mode == "average":
        kwargs["context_rate"] = 0.3
    cached = model.generate(ids, attention_mask=mask, use_cache=True, **kwargs)
    plain = model.generate(ids, attention_mask=mask, use_cache=False, **kwargs)
    assert torch.equal(cached, plain)
    if beams == 1:
        alone = {key: value[1:] if isinstance(value, torch.Tensor) else value for key, value in kwargs.items()}
        assert torch.equal(model.generate(ids[1:, 4:], **alone)[0], plain[1, 4:])


@pytest.mark.parametrize("mode", ["dynamic", "average"])
def test_cache_in_chunks_gives_the_same_logits(model, ids, mode):
    kwargs = {"frozen_context": torch.randn(2, 12), "context_rate": 0.3} if mode == "average" else {}
    with torch.no_grad():
        whole = model(ids, **kwargs).logits
        first = model(ids[:, :4], use_cache=True, **kwargs)
        second = model(ids[:, 4:9], past_key_values=first.past_key_values, use_cache=True, **kwargs)
        third = model(ids[:, 9:], past_key_values=second.past_key_values, use_cache=True, **kwargs)
    torch.testing.assert_close(torch.cat([first.logits, second.logits, third.logits], 1), whole, rtol=1e-4, atol=1e-4)


def test_static_cache(model, ids):
    kwargs = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    static = model.generate(ids, cache_implementation="static", disable_compile=True, **kwargs)
    assert torch.equal(static, model.generate(ids, use_cache=False, **kwargs))


def test_cache_without_y_is_refused_for_a_dynamic_context(model, ids):
    with torch.no_grad():
        cache = model(ids, frozen_context=torch.randn(2, 12), use_cache=True).past_key_values
        with pytest.raises(ValueError, match="no memory"):
            model(ids[:, :1], past_key_values=cache, use_cache=True)


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"mixing": "softmax", "context_norm": False},
        {"context_layer": 0},
        {"context_layer": 3, "variational": True, "tie_word_embeddings": False},
    ],
)
def test_save_and_load(tmp_path, ids, overrides):
    model = make_cgt(**overrides)
    model.save_pretrained(tmp_path)
    torch.manual_seed(99)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert type(loaded) is relinear.CGTForCausalLM
    assert type(AutoConfig.from_pretrained(tmp_path)) is relinear.CGTConfig
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, model(ids).logits)


def test_gradient_checkpointing_gives_the_same_gradients(ids):
    model = make_cgt().train()
    other = copy.deepcopy(model)
    other.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for one in (model, other):
        (one(ids, labels=ids).loss + one(ids.flip(1), labels=ids, frozen_context=torch.ones(2, 12)).loss).backward()
    for (name, a), b in zip(model.named_parameters(), other.parameters()):
        assert a.grad is not None, name
        torch.testing.assert_close(a.grad, b.grad, msg=name)


def test_loss_counts_items_in_batch(model, ids):
    with torch.no_grad():
        mean = model(ids, labels=ids).loss
        share = model(ids, labels=ids, num_items_in_batch=torch.tensor(40)).loss
    torch.testing.assert_close(share, mean * 20 / 40)


def test_every_parameter_learns_from_the_first_step():
    torch.manual_seed(0)
    model = relinear.CGTForCausalLM(make_cgt().config)
    ids = torch.randint(0, 50, (2, 9))
    model(ids, labels=ids).loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().max() > 1e-9, name


def test_variational_form_draws_in_training_only(ids):
    model = make_cgt(variational=True)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, model(ids).logits)
        model.train()
        assert not torch.allclose(model(ids).logits, model(ids).logits)
        assert model(ids).context_log_variance.shape == (2, 11, 12)
        model.transformer.context_log_variance.bias.fill_(2.0)
        found = model(ids)
        drawn = (found.context_sample - found.context) * torch.exp(-0.5 * found.context_log_variance)
    assert drawn.square().mean().item() == pytest.approx(1, abs=0.35)  # of 264 draws: four standard deviations


def test_compiles_without_graph_breaks(ids):
    model = make_cgt(n_layer=2, context_layer=1)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(ids, use_cache=False).logits, model(ids, use_cache=False).logits)


def test_resizing_the_vocabulary_resizes_both_streams(tmp_path, ids):
    model = make_cgt()
    before = model(ids).logits
    model.resize_token_embeddings(60)
    torch.testing.assert_close(model(ids).logits[..., :50], before)
    longer = torch.full((1, 4), 59)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(loaded(longer).logits, model(longer).logits)


def test_the_bare_model_resizes_both_streams_too(ids):
    model = make_cgt().transformer
    with torch.no_grad():
        before = model(ids).last_hidden_state
        model.resize_token_embeddings(60)
        assert torch.equal(model(ids).last_hidden_state, before)
        assert model(torch.full((1, 4), 59)).last_hidden_state.shape == (1, 4, 24)


def test_attentions_are_those_of_x(ids):
    """One for every layer, of x's own heads; from layer l on as in the GPT-2 that is left after specialisation."""
    model = make_cgt(attn_implementation="eager", n_head=3, context_heads=2)
    with torch.no_grad():
        whole = model(ids, output_attentions=True, output_hidden_states=True)
        frozen = model(ids, frozen_context=torch.ones(2, 12), output_attentions=True).attentions
    assert [tuple(weights.shape) for weights in whole.attentions] == [(2, 3, ids.shape[1], ids.shape[1])] * 4
    assert len(whole.hidden_states) == 5
    for layer in (0, 1):  # x reads nothing of y there
        assert torch.equal(whole.attentions[layer], frozen[layer])


def test_embeddings_in_place_of_tokens_need_a_part_for_each_stream(model, ids):
    bare, frozen = model.transformer, torch.ones(2, 12)
    both = torch.cat([bare.wte(ids), bare.context_wte(ids)], -1)
    with torch.no_grad():
        assert torch.equal(model(inputs_embeds=both).logits, model(ids).logits)
        assert torch.equal(
            model(inputs_embeds=bare.wte(ids), frozen_context=frozen).logits, model(ids, frozen_context=frozen).logits
        )
        for given in ({}, {"frozen_context": frozen, "context_rate": 0.5}):
            with pytest.raises(ValueError, match=r"36 features, got shape \(2, \d+, 24\).*context_wte"):
                model(inputs_embeds=bare.wte(ids), **given)


def test_an_argument_of_another_class_is_named_as_such(model, ids):
    with pytest.raises(ValueError, match="no argument 'labels'; it is one of CGTForCausalLM"):
        model.transformer(ids, labels=ids)
    with pytest.raises(ValueError, match="no argument 'label'; did you mean 'labels'"):
        model(ids, label=ids)


def test_labels_that_are_shifted_already_are_honoured(model, ids):
    shifted = torch.nn.functional.pad(ids, (0, 1), value=-100)[:, 1:].contiguous()
    assert torch.equal(model(ids, labels=torch.zeros_like(ids), shift_labels=shifted).loss, model(ids, labels=ids).loss)


def test_a_configuration_comes_back_as_it_was(tmp_path):
    config = make_cgt().config
    config.save_pretrained(tmp_path)
    assert relinear.CGTConfig.from_pretrained(tmp_path).to_dict() == config.to_dict()
    config.auto_map = {"AutoModel": "theirs.Model"}
    config.save_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).auto_map == config.auto_map


def test_bfloat16_and_autocast_are_close(model, ids):
    with torch.no_grad():
        wanted = model(ids).logits
        with torch.autocast("cpu", torch.bfloat16):
            assert (model(ids).logits - wanted).norm() < 0.05 * wanted.norm()
        half = copy.deepcopy(model).to(torch.bfloat16)
        assert half(ids).logits.dtype == torch.bfloat16
        assert (half(ids, frozen_context=model.context(ids)[:, -1]).logits.float()).isfinite().all()
        assert (half(ids).logits - wanted).norm() < 0.05 * wanted.norm()


def test_check_causality_accepts_it(model):
    assert relinear.check_causality(model).causal


def test_regression_reads_vectors():
    settings = relinear.CGTConfig(
        n_embd=16,
        n_head=2,
        n_layer=3,
        n_positions=32,
        context_layer=2,
        context_size=8,
        context_heads=2,
        templates=3,
        rank=2,
        input_features=5,
        output_features=1,
    )
    model = relinear.CGTForRegression(settings)
    vectors, targets = torch.randn(2, 10, 5), torch.randn(2, 10, 1)
    mask = torch.arange(10) % 2 == 0
    output = model(vectors, targets, mask.expand(2, 10))
    assert output.logits.shape == (2, 10, 1)
    torch.testing.assert_close(output.loss, (output.logits - targets)[:, mask].square().mean())
    assert model.context(vectors).shape == (2, 10, 8)
    output.loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize(
    ("bad", "word"),
    [
        ({"context_layer": 4}, "context_layer"),
        ({"context_heads": 5}, "context_heads"),
        ({"mixing": "relu"}, "mixing"),
        ({"rank": 0}, "rank"),
    ],
)
def test_bad_settings_are_refused(bad, word):
    with pytest.raises(ValueError, match=word):
        make_cgt(**bad)


def test_bad_contexts_are_refused(model, ids):
    with pytest.raises(ValueError, match="frozen_context"):
        model(ids, frozen_context=torch.randn(12))
    with pytest.raises(ValueError, match="context_rate"):
        model(ids, context_rate=0.1)


def test_summary_counts_every_product_of_the_generated_operators():
    model = make_cgt()
    modulator, tokens = model.modulators()[0], 64
    x, y = torch.randn(1, tokens, 24), torch.randn(1, tokens, 12)
    with FlopCounterMode(display=False) as counter:
        modulator(x, y)
    scaling = 2 * 5 * 2  # the columns times the shares, before and after they are mixed
    assert modulator.flops_per_token() == counter.get_total_flops() / tokens + scaling
    rows = [row for row in relinear.summary(model).rows if row.operator == "Modulator"]
    assert len(rows) == 4
    for row in rows:
        assert row.flops_per_token == modulator.flops_per_token()
        assert row.parameters == sum(p.numel() for p in modulator.parameters())
    assert relinear.summary(model).parameters == sum(p.numel() for p in model.parameters())


def make_regression(**overrides):
    settings = {
        "n_positions": 16,
        "n_embd": 8,
        "n_layer": 2,
        "n_head": 2,
        "context_layer": 1,
        "context_size": 4,
        "context_heads": 2,
        "input_features": 3,
        "output_features": 1,
    }
    return relinear.CGTForRegression(relinear.CGTConfig(**(settings | overrides))).eval()


def test_padded_vectors_enter_with_zeros_to_the_width_of_the_model(tmp_path):
    """As in Section 4.1: x starts from the vector, zeros after it and its position; y from its position alone."""
    model, vectors = make_regression(vector_input="padded"), torch.randn(2, 6, 3)
    assert not any("vector_in" in name for name in model.state_dict())
    start = torch.zeros(2, 6, 12)
    start[..., :3] = vectors
    seen = {}
    model.transformer.h[0].register_forward_pre_hook(lambda module, args: seen.update(x=args[0], y=args[1]))
    with torch.no_grad():
        found = model(vectors=vectors).logits
        torch.testing.assert_close(seen["x"], start[..., :8] + model.transformer.wpe.weight[:6])
        torch.testing.assert_close(seen["y"], model.transformer.context_wpe.weight[:6].expand(2, -1, -1))
        torch.testing.assert_close(found, model.head(model.transformer(inputs_embeds=start).last_hidden_state))
        model.save_pretrained(tmp_path)
        loaded = relinear.CGTForRegression.from_pretrained(tmp_path)
        torch.testing.assert_close(loaded(vectors=vectors).logits, found)
    with pytest.raises(ValueError, match="cannot be padded"):
        make_regression(vector_input="padded", input_features=9)
    with pytest.raises(ValueError, match="vector_input"):
        make_regression(vector_input="zeros")


def test_settings_without_a_way_in_mean_the_learned_one():
    """Checkpoints of before the choice say nothing of it."""
    old = make_regression().config.to_dict()
    del old["vector_input"]
    model = relinear.CGTForRegression(relinear.CGTConfig.from_dict(old))
    assert isinstance(model.vector_in, nn.Linear)


def plain_cgt(state, config, ids):
    """A CGT written down from Section 3.1 and Appendix B.1 with matrices alone: (logits, y) of one sequence (T,)."""

    def weights(name):
        return state[f"{name}.weight"], state[f"{name}.bias"]

    def normal(x, name):
        gain, shift = weights(name)
        centered = x - x.mean(-1, keepdim=True)
        return gain * centered / (centered.square().mean(-1, keepdim=True) + 1e-5).sqrt() + shift

    def affine(x, name):
        matrix, shift = weights(name)
        return x @ matrix + shift

    def attention(x, name, heads):
        rows = []
        parts = [part.chunk(heads, -1) for part in affine(x, f"{name}.c_attn").chunk(3, -1)]
        for query, key, value in zip(*parts, strict=True):
            scores = query @ key.T / key.shape[-1] ** 0.5
            scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf)
            rows.append(scores.softmax(-1) @ value)
        return affine(torch.cat(rows, -1), f"{name}.c_proj")

    def mlp(x, name):
        inner = affine(x, f"{name}.c_fc")
        gelu = 0.5 * inner * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (inner + 0.044715 * inner**3)))
        return affine(gelu, f"{name}.c_proj")

    def operator(x, y, name):
        sigma = torch.tanh(y @ state[f"{name}.mix.weight"].T + state[f"{name}.mix.bias"])
        left = torch.einsum("tm,mkd->tdk", sigma, state[f"{name}.left"])
        right = torch.einsum("tm,mkd->tdk", sigma, state[f"{name}.right"])
        last = torch.einsum("tm,mk->tk", sigma, state[f"{name}.right_bias"])
        right = torch.cat([right, last[:, None]], 1)  # (T, dim x + 1, r)
        extended = torch.cat([x, torch.ones(len(x), 1)], 1)
        return x + torch.einsum("tik,tjk,tj->ti", left, right, extended)

    where = torch.arange(len(ids))
    x = state["transformer.wte.weight"][ids] + state["transformer.wpe.weight"][where]
    y = state["transformer.context_wte.weight"][ids] + state["transformer.context_wpe.weight"][where]
    for layer in range(config.context_layer):
        h, c = f"transformer.h.{layer}", f"transformer.h.{layer}.context"
        n = normal(x, f"{h}.ln_1")
        y = y + attention(torch.cat([n, normal(y, f"{c}.ln_1")], -1), f"{c}.attn", config.context_heads)
        x = x + attention(n, f"{h}.attn", config.n_head)
        n = normal(x, f"{h}.ln_2")
        y = y + mlp(torch.cat([n, normal(y, f"{c}.ln_2")], -1), f"{c}.mlp")
        x = x + mlp(n, f"{h}.mlp")
    y = normal(y, "transformer.context_ln")
    for layer in range(config.context_layer, config.n_layer):
        h = f"transformer.h.{layer}"
        x = x + attention(operator(normal(x, f"{h}.ln_1"), y, f"{h}.modulate_attn"), f"{h}.attn", config.n_head)
        x = x + mlp(operator(normal(x, f"{h}.ln_2"), y, f"{h}.modulate_mlp"), f"{h}.mlp")
    return normal(x, "transformer.ln_f") @ state["lm_head.weight"].T, y


def test_model_is_the_papers_equations(model, ids):
    with torch.no_grad():
        found = model(ids)
        for row, logits, context in zip(ids, found.logits, found.context, strict=True):
            wanted, y = plain_cgt(model.state_dict(), model.config, row)
            torch.testing.assert_close(context, y, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-4)


def test_logits_where_they_are_wanted() -> None:
    model = make_cgt().eval()
    ids = torch.randint(0, model.config.vocab_size, (2, 7), generator=torch.Generator().manual_seed(0))
    whole = model(ids).logits
    mask = torch.zeros(2, 7, dtype=torch.bool)
    mask[0, 2] = mask[1, 5] = True
    wanted = {0: whole, 2: whole[:, -2:]}
    for positions, expected in [
        *wanted.items(),
        (torch.tensor([1, 4]), whole[:, [1, 4]]),
        (torch.tensor([[1], [4]]), torch.stack([whole[0, 1:2], whole[1, 4:5]])),
        (mask, torch.stack([whole[0, 2], whole[1, 5]])),
    ]:
        torch.testing.assert_close(model(ids, logits_to_keep=positions).logits, expected)
