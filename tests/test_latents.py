"""Reading, editing and aligning latents of a model."""

import copy
import json

import pytest
import torch
from transformers import Trainer, TrainingArguments

import relinear
from conftest import make_tiny_gpt2, make_tiny_llama
from relinear import activations
from relinear.activations.latent_recording import Activation, aggregated_posterior, latent_operators

IDS = torch.randint(0, 96, (2, 7), generator=torch.Generator().manual_seed(3))
Q0, Q1 = (f"model.layers.{i}.self_attn.q_proj" for i in (0, 1))


def make_model(**settings):
    torch.manual_seed(0)
    model = make_tiny_llama()
    relinear.replace_(model, {"q_proj": relinear.HDPL(rank=6, blocks=4, **settings)})
    for operator in latent_operators(model).values():
        torch.nn.init.normal_(operator.logvar.weight, std=0.1)
        torch.nn.init.normal_(operator.mu.bias)
    return model


@pytest.fixture
def model():
    return make_model()


def logits(model, **interventions):
    with torch.no_grad(), activations.intervene(model, interventions.pop("interventions", {})):
        return model(IDS).logits


def test_reading_changes_nothing(model) -> None:
    before = model(IDS).logits
    seen = {}
    module = model.get_submodule(Q1)
    handle = module.register_forward_hook(lambda m, args, out: seen.update(x=args[0], y=out))
    with activations.latents(model) as z:
        torch.testing.assert_close(model(IDS).logits, before)
        assert set(z) == {Q0, Q1}
    handle.remove()
    torch.testing.assert_close(z[Q1].mu, torch.nn.functional.linear(seen["x"], *module.mu()))
    torch.testing.assert_close(z[Q1].sigma, torch.exp(0.5 * torch.nn.functional.linear(seen["x"], *module.logvar())))
    assert torch.equal(z[Q1].z, z[Q1].mu)
    assert torch.equal(model(IDS).logits, before)
    model.train()
    with activations.latents(model) as z:
        model(IDS)
    assert not torch.equal(z[Q0].z, z[Q0].mu)


def test_missing_latents_are_named(model) -> None:
    with activations.latents(model) as z:
        with pytest.raises(KeyError, match="no forward has run"):
            z[Q0]
        model(IDS)
    with pytest.raises(KeyError, match="layers"):
        z["model.layers.0.self_attn.q"]
    block = activations.latents(model)
    with block:
        model(IDS)
    with block as z, pytest.raises(KeyError, match="no forward has run"):
        z[Q0]
    with pytest.raises(ValueError, match="no operator with a latent"), activations.latents(make_tiny_gpt2()):
        pass


def test_alignment_of_a_latent_that_does_not_vary_has_finite_gradients() -> None:
    model = make_tiny_llama()
    relinear.replace_(model, {"q_proj": relinear.HDPL(rank=4, blocks=4, noise=False)})
    with activations.latents(model) as one:
        model(IDS[:1, :1])
    activations.moment_alignment(
        one, {name: type(value)(*(part + 1 for part in value)) for name, value in one.items()}
    ).backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


def test_training_loss_is_the_same_while_reading(model) -> None:
    model.train()
    losses = []
    for reading in (False, True):
        torch.manual_seed(1)
        if reading:
            with activations.latents(model):
                losses.append(model(IDS, labels=IDS).loss)
        else:
            losses.append(model(IDS, labels=IDS).loss)
    assert torch.equal(*losses)


@pytest.mark.parametrize(
    ("intervention", "expected"),
    [
        (activations.Clamp(-0.1, 0.2), lambda z: z.clamp(-0.1, 0.2)),
        (activations.Clamp(maximum=torch.zeros(6)), lambda z: z.clamp(max=0)),
        (activations.Add([1.0] * 6, scale=2), lambda z: z + 2),
        (activations.Add(torch.ones(2, 7, 6)), lambda z: z + 1),
        (activations.Patch(0.5), lambda z: torch.full_like(z, 0.5)),
        (activations.Patch([3.0, 4.0], dims=[0, -1]), lambda z: torch.cat([z[..., :0] + 3, z], -1)),
        (activations.Patch(torch.linspace(0, 1, 6)), lambda z: torch.linspace(0, 1, 6).expand_as(z)),
        (activations.Patch(lambda latent: -latent.mu), lambda z: -z),
    ],
    ids=["clamp", "maximum", "add", "add_token", "replace", "replace_dims", "tensor", "function"],
)
def test_edits(model, intervention, expected) -> None:
    before = model(IDS).logits
    with activations.latents(model) as plain:
        model(IDS)
    with activations.latents(model) as edited, activations.intervene(model, {Q0: intervention}):
        after = model(IDS).logits
    if isinstance(intervention, activations.Patch) and intervention.dims:
        wanted = plain[Q0].z.clone()
        wanted[..., 0], wanted[..., -1] = 3, 4
    else:
        wanted = expected(plain[Q0].z)
    torch.testing.assert_close(edited[Q0].z, wanted)
    torch.testing.assert_close(edited[Q0].mu, plain[Q0].mu)
    assert not torch.allclose(after, before)
    assert torch.equal(model(IDS).logits, before)


def test_a_function_sees_the_dimensions_that_it_changes(model) -> None:
    negated = activations.Patch(lambda latent: -latent.mu, dims=[0, -1])
    with activations.latents(model) as edited, activations.intervene(model, {Q0: negated}):
        model(IDS)
    torch.testing.assert_close(edited[Q0].z[..., [0, -1]], -edited[Q0].mu[..., [0, -1]])
    torch.testing.assert_close(edited[Q0].z[..., 1:-1], edited[Q0].mu[..., 1:-1])


def test_inject_is_patch_and_warns(model) -> None:
    with pytest.warns(DeprecationWarning, match="Inject has a new name: Patch"):
        old = activations.Inject(torch.ones(6))
    expected = logits(model, interventions={Q0: activations.Patch(1.0)})
    assert torch.equal(logits(model, interventions={Q0: old}), expected)


def test_edits_reach_by_suffix_nest_and_end_with_an_error(model) -> None:
    before = logits(model)
    both = logits(model, interventions={"q_proj": activations.Patch(1.0)})
    assert torch.equal(both, logits(model, interventions={Q0: activations.Patch(1.0), Q1: [activations.Patch(1.0)]}))
    with (
        activations.intervene(model, {Q0: activations.Patch(1.0)}),
        activations.intervene(model, {Q0: activations.Add(1.0)}),
    ):
        nested = logits(model)
    chain = {Q0: [activations.Patch(1.0), activations.Add(1.0)]}
    assert torch.equal(nested, logits(model, interventions=chain))
    with pytest.raises(RuntimeError), activations.intervene(model, {Q0: activations.Patch(1.0)}):
        raise RuntimeError
    assert torch.equal(logits(model), before)


@pytest.mark.parametrize(
    ("interventions", "message"),
    [
        ({"k_proj": activations.Patch(0.0)}, r"did you mean 'k_proj\.output'"),
        ({"q_proj": activations.Patch([0.0] * 5)}, "must end in 6"),
        ({"q_proj": activations.Add(torch.zeros(2), dims=[0, 1, 2])}, "must end in 3"),
        ({"q_proj": activations.Add(1.0, dims=[6])}, "6 dimensions"),
        ({"q_proj": activations.Patch(torch.zeros(4))}, "must end in 6"),
        ({"q_proj": [1.0]}, "expected Clamp"),
    ],
)
def test_wrong_edits_are_refused_before_anything_changes(model, interventions, message) -> None:
    good = {Q0: activations.Patch(1.0)}
    with pytest.raises(ValueError, match=message), activations.intervene(model, good | interventions):
        pass
    assert all(operator.activation_hooks is None for operator in latent_operators(model).values())


@pytest.mark.parametrize(
    "intervention",
    [
        activations.Patch(torch.zeros(2, 5, 6)),
        activations.Clamp(torch.ones(3, 1, 1, 6)),
        activations.Clamp(maximum=torch.ones(3, 1, 1, 6)),
    ],
    ids=["patch", "minimum", "maximum"],
)
def test_values_that_do_not_fit_the_tokens_are_refused(model, intervention) -> None:
    interventions = {Q0: intervention}
    with activations.intervene(model, interventions), pytest.raises(ValueError, match="do not broadcast"):
        model(IDS)


def test_gradients_reach_an_injected_latent(model) -> None:
    source = torch.zeros(6, requires_grad=True)
    with activations.intervene(model, {Q0: activations.Patch(source)}):
        loss = model(IDS, labels=IDS).loss
    loss.backward()
    assert source.grad.abs().sum() > 0
    assert model.get_submodule(Q0).mu.weight.grad is None


def test_generation_under_an_intervention(model) -> None:
    with activations.intervene(model, {"q_proj": activations.Patch(0.0)}):
        cached = model.generate(IDS, max_new_tokens=4, do_sample=False)
        plain = model.generate(IDS, max_new_tokens=4, do_sample=False, use_cache=False)
    assert torch.equal(cached, plain)


def test_gradient_checkpointing(model) -> None:
    model.train()
    twin = copy.deepcopy(model)
    twin.gradient_checkpointing_enable({"use_reentrant": False})
    with pytest.raises(ValueError, match="gradient checkpointing"), activations.intervene(twin, {}):
        pass
    gradients = []
    for each in (model, twin):
        torch.manual_seed(1)
        with activations.latents(each) as z:
            each(IDS)
        seen = z[Q1]
        (seen.z.square().sum() + seen.sigma.sum()).backward()
        assert z[Q1] is seen  # the recomputation is no second reading
        gradients.append([p.grad for p in each.parameters() if p.grad is not None])
    assert len(gradients[0]) == len(gradients[1])
    for mine, theirs in zip(*gradients):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.slow
def test_compiled_models(model) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    interventions = {Q0: activations.Add(torch.ones(6))}
    with torch.no_grad():
        before = compiled(IDS).logits
        with activations.latents(compiled) as z:
            compiled(IDS)
        with activations.latents(model) as expected:
            model(IDS)
        assert set(z) == set(expected)
        torch.testing.assert_close(z[Q1].sigma, expected[Q1].sigma)
        with activations.intervene(compiled, interventions):
            after = compiled(IDS).logits
        torch.testing.assert_close(after, logits(model, interventions=interventions))
        assert not torch.allclose(after, before)
        torch.testing.assert_close(compiled(IDS).logits, before)


def test_a_copy_made_while_reading_is_a_plain_model(model) -> None:
    with activations.intervene(model, {Q0: activations.Patch(0.0)}):
        twin = copy.deepcopy(model)
    assert torch.equal(twin(IDS).logits, model(IDS).logits)


def test_moments_of_the_mixture() -> None:
    mu, sigma = torch.randn(3, 4, 2), torch.rand(3, 4, 2) + 0.5
    mean, std = aggregated_posterior(Activation(mu, mu, 2 * sigma.log()))
    torch.manual_seed(0)
    draws = (mu + sigma * torch.randn(50_000, 3, 4, 2)).flatten(0, -2)
    torch.testing.assert_close(mean, draws.mean(0), atol=1e-2, rtol=0)
    torch.testing.assert_close(std, draws.std(0), atol=1e-2, rtol=0)


def test_alignment_is_the_wasserstein_distance_and_trains(model) -> None:
    torch.manual_seed(5)
    other = make_tiny_llama()
    relinear.replace_(other, {"q_proj": relinear.HDPL(rank=6, blocks=4)})
    with pytest.raises(ValueError, match="no latents were recorded"), pytest.warns(DeprecationWarning, match="latents"):
        activations.moment_alignment(model, other)
    with activations.latents(model) as a, activations.latents(other) as b:
        model(IDS)
        with torch.no_grad():
            other(IDS)
        with pytest.warns(DeprecationWarning, match="a model works in this version only"):
            loss = activations.moment_alignment(model, other)
        assert activations.moment_alignment(a, a).item() == 0
    expected = []
    for name in (Q0, Q1):
        (m, s), (n, t) = aggregated_posterior(a[name]), aggregated_posterior(b[name])
        expected.append(((m - n) ** 2 + (s - t) ** 2).mean())
    torch.testing.assert_close(loss, sum(expected) / 2)
    torch.testing.assert_close(activations.moment_alignment(a, b, names={Q0: Q0}), expected[0])
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(20):
        with activations.latents(model) as a:
            model(IDS)
        aligned = activations.moment_alignment(a, b)
        optimizer.zero_grad()
        aligned.backward()
        optimizer.step()
    assert aligned < 0.5 * loss
    with pytest.raises(ValueError, match="no latent"):
        activations.moment_alignment(a, b, names={Q0: "q_proj"})
    with pytest.raises(ValueError, match="yields"):
        activations.moment_alignment([1], [1])
    with pytest.raises(ValueError, match="differently"):
        activations.moment_alignment(a, {Q0: b[Q0]})


def train(model, folder, *, steps, callbacks, resume=None):
    data = [{"input_ids": row, "labels": row} for row in torch.randint(0, 96, (16, 8))]
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=2,
        save_steps=2,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        learning_rate=1e-3,
    )
    Trainer(model, arguments, train_dataset=data, callbacks=callbacks).train(resume_from_checkpoint=resume)


def test_running_moments_survive_a_resume(tmp_path) -> None:
    whole = relinear.training.LatentMoments(every=1)
    train(make_model(), tmp_path / "whole", steps=4, callbacks=[whole])
    read = relinear.training.read_moments(tmp_path / "whole")
    assert set(read) == {Q0, Q1}
    torch.testing.assert_close(read[Q0].std, whole.moments()[Q0].std)

    folder = tmp_path / "parts"
    train(make_model(), folder, steps=4, callbacks=[relinear.training.LatentMoments(every=1)])
    resumed = relinear.training.LatentMoments(every=1)
    torch.manual_seed(9)
    train(make_model(), folder, steps=4, callbacks=[resumed], resume=str(folder / "checkpoint-2"))
    assert resumed._sums[Q0]["tokens"] == whole._sums[Q0]["tokens"]
    torch.testing.assert_close(resumed.moments()[Q0].mean, whole.moments()[Q0].mean, atol=1e-4, rtol=1e-4)
    content = json.loads((folder / "latent_moments.json").read_text())
    assert content["latents"][Q0]["sums"]["tokens"] == pytest.approx(16 * (1 + 0.99 + 0.99**2 + 0.99**3))
    (folder / "latent_moments.json").write_text("{}")
    with pytest.raises(ValueError, match="not a file of latent moments"):
        relinear.training.read_moments(folder)


def test_running_moments_of_a_relinear_run(tmp_path) -> None:
    from relinear.training import FitSettings, fit

    data = [{"input_ids": row, "labels": row} for row in torch.randint(0, 96, (8, 8))]
    callback = relinear.training.LatentMoments(every=2)
    model = make_model()
    fit(model, data, FitSettings(steps=3, batch_size=2), out_dir=tmp_path / "run", callbacks=[callback])
    assert set(relinear.training.read_moments(tmp_path / "run")) == {Q0, Q1}
    assert callback._sums[Q0]["tokens"] == pytest.approx(2 * 8 * (1 + 0.99))
    assert all(operator.activation_hooks is None for operator in latent_operators(model).values())
