"""HDPL: the paper's numbers, its formulas against independent ones, and what its bound does to the gradient."""

import math

import pytest
import torch
from torch import nn
from torch.distributions import Normal, kl_divergence

import relinear
from relinear.compare.recipe import read_recipe
from relinear.compare.settings import CompareSettings
from relinear.functional.hdpl import bounded_kl, free_bits_kl, gaussian_kl, geometric_jsd, hdpl, hdpl_fit


def posterior(*shape, dtype=torch.float64):
    return torch.randn(*shape, dtype=dtype) * 1.5, torch.randn(*shape, dtype=dtype)


def test_parameters_are_those_of_the_paper() -> None:
    with torch.device("meta"):
        model = relinear.from_preset("hdpl-67m")
        assert sum(p.numel() for p in model.parameters()) == 67_113_472
        targets = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
        relinear.replace_(model, {name: relinear.HDPL(rank=128, blocks=8) for name in targets})
    assert sum(p.numel() for p in model.parameters()) == 62_531_072


def test_names_and_shapes_of_the_parameters() -> None:
    module = relinear.HDPL(rank=5, blocks=4).build(8, 12)
    assert {name: tuple(p.shape) for name, p in module.named_parameters()} == {
        "blocks": (4, 3, 2),
        "mu.weight": (5, 8),
        "mu.bias": (5,),
        "logvar.weight": (5, 8),
        "logvar.bias": (5,),
        "decoder.weight": (12, 5),
        "bias": (12,),
    }


def test_flops_are_those_of_the_section_on_cost() -> None:
    # two for a multiply-add: blocks I O / K, both encoders 2 R I, decoder R O
    module = relinear.HDPL(rank=5, blocks=4).build(8, 12)
    assert module.flops_per_token() == 2 * (8 * 12 // 4 + 2 * 5 * 8 + 5 * 12)


def test_forward_is_the_authors_form() -> None:
    # Algorithm 1 with the authors' grouped convolution, written with torch's own modules.
    module = relinear.HDPL(rank=5, blocks=4).build(8, 12, bias=False, dtype=torch.float64)
    nn.init.normal_(module.logvar.weight)
    x, noise = torch.randn(2, 6, 8, dtype=torch.float64), torch.randn(2, 6, 5, dtype=torch.float64)
    local = nn.functional.conv1d(x.transpose(1, 2), module.blocks.flatten(0, 1)[..., None], groups=4).transpose(1, 2)
    mu, logvar = (nn.functional.linear(x, *encoder()) for encoder in (module.mu, module.logvar))
    z = mu + torch.exp(0.5 * logvar) * noise
    expected = local + (z * torch.sigmoid(z)) @ module.decoder.weight.T
    encoders = (module.mu.weight, module.mu.bias, module.logvar.weight, module.logvar.bias)
    torch.testing.assert_close(hdpl(x, module.blocks, *encoders, module.decoder.weight, None, noise).y, expected)
    expected = local + nn.functional.silu(mu) @ module.decoder.weight.T
    torch.testing.assert_close(module.eval()(x), expected)


def test_kl_against_torch_distributions() -> None:
    mu, logvar = posterior(50)
    expected = kl_divergence(Normal(mu, torch.exp(0.5 * logvar)), Normal(0.0, 1.0))
    torch.testing.assert_close(gaussian_kl(mu, logvar), expected)


def test_geometric_jsd_against_its_definition() -> None:
    mu, logvar = posterior(200, 1)
    v = logvar.exp()
    mean = Normal(mu / (1 + v), (2 * v / (1 + v)).sqrt())
    halves = [kl_divergence(Normal(mu, v.sqrt()), mean), kl_divergence(Normal(torch.zeros_like(v), 1.0), mean)]
    torch.testing.assert_close(geometric_jsd(mu, logvar), sum(halves).squeeze(-1) / 2)


def test_geometric_jsd_against_numeric_integration() -> None:
    # From the densities alone: g is the normalised sqrt(p q), whatever family it belongs to.
    grid = torch.linspace(-40, 40, 400_001, dtype=torch.float64)
    for mu, logvar in [(0.0, 0.0), (1.3, 0.4), (-2.0, -1.5), (0.5, 2.0)]:
        mu, logvar = torch.tensor([mu]).double(), torch.tensor([logvar]).double()
        log_p = Normal(mu, torch.exp(0.5 * logvar)).log_prob(grid)
        log_q = Normal(torch.zeros_like(mu), 1.0).log_prob(grid)
        log_g = (log_p + log_q) / 2
        log_g = log_g - torch.trapezoid(log_g.exp(), grid).log()
        numeric = sum(torch.trapezoid(a.exp() * (a - log_g), grid) for a in (log_p, log_q)) / 2
        torch.testing.assert_close(geometric_jsd(mu, logvar), numeric, atol=1e-9, rtol=1e-9)


def test_geometric_jsd_stays_finite_where_the_variance_does() -> None:
    logvar = torch.tensor([[-60.0], [60.0]])
    assert torch.isfinite(geometric_jsd(torch.zeros(2, 1), logvar)).all()


def test_the_papers_bound_gives_no_gradient_where_it_clamps() -> None:
    mu, logvar = torch.full((2, 8), 2.0), torch.zeros(2, 8)
    mu[1] = 0.1
    mu.requires_grad_()
    loss, clamped = bounded_kl(gaussian_kl(mu, logvar).sum(-1))
    assert clamped.tolist() == [True, False]
    torch.testing.assert_close(loss[0].item(), math.log(2), atol=1e-6, rtol=0)
    loss.sum().backward()
    assert (mu.grad[0] == 0).all()
    assert (mu.grad[1] != 0).all()


def test_free_bits_give_a_gradient_above_the_threshold_only() -> None:
    mu = torch.tensor([[0.1, 2.0]], requires_grad=True)
    loss, share = free_bits_kl(gaussian_kl(mu, torch.zeros(1, 2)), free=0.5)
    loss.sum().backward()
    assert loss.item() == pytest.approx(0.5 + 2.0)
    assert share.item() == 0.5
    assert mu.grad.tolist() == [[0.0, 2.0]]


@pytest.mark.parametrize(("bound", "clamped"), [("clamp", 1.0), ("free_bits", None), ("geometric_jsd", 0.0)])
def test_share_of_clamped_tokens_and_who_regularises(bound: str, clamped: float | None) -> None:
    # At the paper's sizes on normalised inputs every token is clamped from the start: the regulariser is a constant.
    module = relinear.HDPL(rank=128, blocks=8, bound=bound).build(512, 512)
    module(torch.randn(64, 512))
    (gradient,) = torch.autograd.grad(module.auxiliary_losses()["latent"], module.mu.weight)
    assert (gradient.norm().item() == 0) == (bound == "clamp")
    share = module.metrics()["clamped"].item()
    assert share == clamped if clamped is not None else 0 < share < 0.5
    if bound == "clamp":
        torch.testing.assert_close(module.auxiliary_losses()["latent"].item(), 0.001 * math.log(2), atol=1e-8, rtol=0)


def test_accumulated_losses_are_the_mean_over_all_tokens() -> None:
    for bound in ("clamp", "free_bits", "geometric_jsd"):
        module = relinear.HDPL(rank=4, blocks=2, bound=bound).build(8, 8, dtype=torch.float64)
        x = torch.randn(12, 8, dtype=torch.float64)
        parts = []
        for part in (x[:4], x[4:8], x[8:]):
            module(part)
            parts.append(module.auxiliary_losses()["latent"])
        module(x)
        torch.testing.assert_close(module.auxiliary_losses()["latent"], sum(parts) / 3)


def test_initialisation() -> None:
    square = relinear.HDPL(rank=6, blocks=4).build(32, 32)
    assert (square.blocks - torch.eye(8)).abs().max() < 0.06
    assert (square.blocks - torch.eye(8)).std().item() == pytest.approx(0.01, rel=0.2)
    wide = relinear.HDPL(rank=6, blocks=4).build(16, 64)
    identity = torch.eye(4).expand(4, 4, 4)
    torch.testing.assert_close(wide.blocks.transpose(1, 2) @ wide.blocks, identity, atol=1e-5, rtol=0)
    torch.testing.assert_close(wide.mu.weight @ wide.mu.weight.T, torch.eye(6), atol=1e-5, rtol=0)
    torch.testing.assert_close(wide.decoder.weight.T @ wide.decoder.weight, torch.eye(6), atol=1e-5, rtol=0)
    assert not wide.logvar.weight.any()


def test_sizes_that_do_not_divide_name_the_ones_that_do() -> None:
    with pytest.raises(ValueError, match=r"blocks=8 does not divide .*possible values: 1, 2, 3, 6"):
        relinear.HDPL(blocks=8).build(12, 18)


@pytest.mark.parametrize("wrong", [{"rank": 0}, {"bound": "jsd"}, {"beta": -1.0}, {"free_nats": 0.1}, {"blocks": 2.5}])
def test_wrong_settings(wrong: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        relinear.HDPL(**wrong)


def test_fit_is_exactly_linear_at_any_scale() -> None:
    weight = nn.Linear(16, 24, dtype=torch.float64)
    module = relinear.HDPL(rank=9, blocks=4).build(16, 24, dtype=torch.float64).fit_to_linear_(weight).eval()
    x = torch.randn(50, 16, dtype=torch.float64)
    small, large = module(x) - weight.bias, module(1000 * x) - weight.bias
    torch.testing.assert_close(large, 1000 * small)
    local, down, up = hdpl_fit(weight.weight, 4, 4)
    torch.testing.assert_close(small, x @ (torch.block_diag(*local) + up @ down).T)


def test_fit_beats_its_parts_and_never_gets_worse() -> None:
    weight = torch.randn(24, 16, dtype=torch.float64)
    errors = []
    for sweeps in (0, 1, 4, 16, 64):
        local, down, up = hdpl_fit(weight, 4, 3, sweeps)
        errors.append((weight - torch.block_diag(*local) - up @ down).norm().item())
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < errors[0]
    s = torch.linalg.svdvals(weight - torch.block_diag(*hdpl_fit(weight, 4, 0)[0]))
    assert errors[-1] < s[3:].norm().item()


def test_training_stays_near_eval_after_a_fit() -> None:
    weight = nn.Linear(64, 64)
    module = relinear.HDPL(rank=64, blocks=4).build(64, 64).fit_to_linear_(weight)
    x = torch.randn(256, 64)
    noisy, quiet = module(x), module.eval()(x)
    assert (noisy - quiet).norm() < 0.05 * quiet.norm()


def test_noise_differs_between_forwards_and_not_between_seeds() -> None:
    module = relinear.HDPL(rank=4, blocks=2).build(8, 8)
    x = torch.randn(5, 8)
    torch.manual_seed(3)
    first, second = module(x), module(x)
    torch.manual_seed(3)
    assert torch.equal(module(x), first)
    assert not torch.equal(first, second)


def as_the_authors_start(layer: nn.Conv1d, square: bool) -> torch.Tensor:
    """The authors' initialisation of the block-diagonal path, with torch's own functions on a convolution."""
    if square:
        nn.init.dirac_(layer.weight)
        with torch.no_grad():
            layer.weight.add_(torch.randn_like(layer.weight), alpha=0.01)
    else:
        nn.init.orthogonal_(layer.weight)
    return layer.weight.detach()[..., 0]


@pytest.mark.parametrize(("inputs", "outputs"), [(64, 64), (32, 128), (64, 32)])
def test_the_authors_start_is_that_of_their_convolution(inputs: int, outputs: int) -> None:
    square = inputs == outputs
    theirs = as_the_authors_start(nn.Conv1d(inputs, outputs, 1, groups=8, bias=False), square).unflatten(0, (8, -1))
    ours = relinear.HDPL(rank=6, blocks=8, init="authors").build(inputs, outputs)
    for blocks in (theirs, ours.blocks.detach()):
        if square:
            first = torch.zeros(8, 8, 8)
            first[0] = torch.eye(8)
            assert (blocks - first).std().item() == pytest.approx(0.01, rel=0.2)
        else:
            whole = blocks.flatten(0, 1)
            torch.testing.assert_close(whole.T @ whole, torch.eye(inputs // 8), atol=1e-5, rtol=0)
    torch.testing.assert_close(ours.blocks.norm(), theirs.norm(), rtol=0.01, atol=0)
    # block-wise orthogonality is sqrt(8) larger wherever an output block is at least as large as an input block
    if outputs > inputs:
        text = relinear.HDPL(rank=6, blocks=8).build(inputs, outputs)
        assert (text.blocks.norm() / ours.blocks.norm()).item() == pytest.approx(8**0.5, rel=1e-5)


def test_the_authors_encoders_have_torchs_biases_and_no_variance_weight() -> None:
    module = relinear.HDPL(rank=512, blocks=4, init="authors").build(64, 96)
    for encoder in (module.mu, module.logvar):
        assert encoder.bias.abs().max().item() == pytest.approx(1 / 8, rel=0.05)
        assert abs(encoder.bias.mean().item()) < 0.02
    assert not module.logvar.weight.any()
    assert not module.bias.any()
    torch.testing.assert_close(module.mu.weight.T @ module.mu.weight, torch.eye(64), atol=1e-5, rtol=0)
    assert not relinear.HDPL(rank=6, blocks=4).build(64, 96).mu.bias.any()


def test_without_noise_it_is_two_deterministic_paths_and_no_regulariser() -> None:
    module = relinear.HDPL(rank=5, blocks=4, noise=False).build(8, 12, dtype=torch.float64)
    x = torch.randn(2, 6, 8, dtype=torch.float64, requires_grad=True)
    y = module(x)
    z = x @ module.mu.weight.T + module.mu.bias
    expected = x @ torch.block_diag(*module.blocks).T + (z * z.sigmoid()) @ module.decoder.weight.T + module.bias
    torch.testing.assert_close(y, expected)
    assert torch.equal(module.eval()(x), y)
    assert "logvar.weight" not in dict(module.named_parameters())
    leaves = [x, *module.parameters()]
    mine, theirs = (torch.autograd.grad(out.square().sum(), leaves) for out in (y, expected))
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other)
    module.train()(x)
    assert module.auxiliary_losses() == {}
    assert module.metrics() == {}


def test_without_noise_the_paths_are_those_of_eval_and_the_size_less_by_the_variance_encoder() -> None:
    with_noise = relinear.HDPL(rank=5, blocks=4).build(8, 12).eval()
    without = relinear.HDPL(rank=5, blocks=4, noise=False).build(8, 12)
    without.load_state_dict({k: v for k, v in with_noise.state_dict().items() if not k.startswith("logvar")})
    x = torch.randn(7, 8)
    torch.testing.assert_close(without(x), with_noise(x))
    targets = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
    with torch.device("meta"):
        model = relinear.from_preset("hdpl-67m")
        relinear.replace_(model, {name: relinear.HDPL(rank=128, blocks=8, noise=False) for name in targets})
    assert sum(p.numel() for p in model.parameters()) == 62_531_072 - 4 * 5 * 128 * (512 + 1)


def test_without_noise_latents_are_points_and_can_be_edited() -> None:
    model = nn.Sequential(relinear.HDPL(rank=4, blocks=2, noise=False).build(8, 8))
    x = torch.randn(3, 8)
    with relinear.activations.latents(model) as z:
        model(x)
    latent = z["0"]
    assert torch.equal(latent.z, latent.mu)
    assert not latent.sigma.any()
    with relinear.activations.intervene(model, {"0": relinear.activations.Patch(0.0)}):
        torch.testing.assert_close(model(x), x @ torch.block_diag(*model[0].blocks).T + model[0].bias)


def test_a_bound_needs_a_posterior() -> None:
    with pytest.raises(ValueError, match="needs noise=True"):
        relinear.HDPL(noise=False, bound="geometric_jsd")


def test_settings_written_before_there_was_a_choice_mean_what_they_meant() -> None:
    before = {"kind": "hdpl", "rank": 4, "blocks": 2, "beta": 0.001, "bound": "clamp", "free_nats": None}
    read = relinear.HDPL.from_dict(before, is_record=True)
    assert read == relinear.HDPL(rank=4, blocks=2, noise=True, init="blocks")


def test_the_authors_recipe_is_what_their_code_does() -> None:
    recipe = CompareSettings.load(read_recipe("hdpl-authors"))
    runs = {name: recipe.settings_of(name) for name in recipe.entries}
    tokens = {name: s.steps * s.batch_size * s.accumulation * s.data.sequence_length for name, s in runs.items()}
    assert tokens["baseline"] == tokens["hybrid"] == tokens["hybrid-no-noise"] == 163_840_000
    assert tokens["baseline-1b"] == tokens["hybrid-1b"] == 1_310_720_000
    for run in runs.values():
        assert (run.max_grad_norm, run.min_lr_ratio, run.decay_embeddings) == (0, 0, True)
        assert run.model_init == "torch"
        assert (run.learning_rate, run.warmup, run.weight_decay, run.betas) == (8e-4, 1000, 0.1, (0.9, 0.95))
    (operator,) = runs["hybrid"].operators.values()
    assert (operator["rank"], operator["blocks"], operator["beta"], operator["init"]) == (128, 8, 0.001, "authors")
    text = CompareSettings.load(read_recipe("hdpl")).settings_of("hybrid")
    assert text.steps * text.batch_size * text.accumulation * text.data.sequence_length == 1_310_720_000
    assert (text.min_lr_ratio, text.max_grad_norm, text.decay_embeddings) == (0.1, 1.0, False)
