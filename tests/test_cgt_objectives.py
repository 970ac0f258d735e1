"""Every term of the CGT paper's losses against a loop over its indices, or against torch.distributions."""

import pytest
import torch

from relinear.compare.match import measure_size
from relinear.hf.training_loss import ModelWithObjective
from relinear.models.cgt import losses
from relinear.models.cgt.objective import (
    CGTObjective,
    auxiliary_loss,
    draw_splits,
    real_positions,
    rest_of,
)
from relinear.training import FitSettings, TrainSettings, fit
from tiny_models import make_cgt

B, T, E = 4, 6, 3


@pytest.fixture
def y():
    return torch.randn(B, T, E)


def unit(y):
    return y / y.norm(dim=-1, keepdim=True)


def test_continuity(y):
    zeta, n = torch.rand(T) + 0.1, unit(y)
    scaled = zeta[1:] / zeta[1:].mean()
    total = sum(scaled[s - 1] * (n[b, s] - n[b, s - 1]).pow(2).sum() for b in range(B) for s in range(1, T))
    torch.testing.assert_close(losses.continuity(y, zeta), total / (B * (T - 1)))
    assert losses.continuity(y[:, :1].expand(-1, T, -1)) < 1e-12


def test_decorrelation(y):
    zeta, n = torch.rand(T) + 0.1, unit(y)
    total = 0.0
    for s in range(T):
        for a in range(B):
            for b in range(B):
                total += zeta[s] / zeta.mean() * ((n[a, s] @ n[b, s]) - float(a == b)) ** 2
    torch.testing.assert_close(losses.decorrelation(y, zeta), total / (T * B * (B - 1)))
    assert losses.decorrelation(torch.eye(E)[:, None].expand(-1, T, -1)) < 1e-12
    assert losses.decorrelation(y[:1]) == 0


@pytest.mark.parametrize(
    "kernel", [losses.rbf_kernel(T, 0.3, 0.1), losses.exponential_kernel(T, 0.4), losses.estimation_kernel(T, 0.7)]
)
def test_kl_is_the_divergence_from_the_process(y, kernel):
    log_variance = torch.randn(B, T, E) * 0.3
    value = losses.gaussian_process_kl(y, log_variance, kernel, constants=True)
    prior = torch.distributions.MultivariateNormal(torch.zeros(T), kernel.float())
    total = sum(
        torch.distributions.kl_divergence(
            torch.distributions.MultivariateNormal(y[b, :, i], torch.diag(log_variance[b, :, i].exp())), prior
        )
        for b in range(B)
        for i in range(E)
    )
    torch.testing.assert_close(value, total / (B * T * E), rtol=1e-3, atol=1e-3)


def test_kl_is_equation_two(y):
    log_variance, kernel = torch.randn(B, T, E) * 0.3, losses.exponential_kernel(T, 0.5)
    inverse, sigma = torch.linalg.inv(kernel).float(), log_variance.exp()
    total = 0.0
    for b in range(B):
        for i in range(E):
            for s in range(T):
                total += 0.5 * (-sigma[b, s, i].log() + inverse[s, s] * sigma[b, s, i])
                total += sum(0.5 * inverse[s, t] * y[b, s, i] * y[b, t, i] for t in range(T))
    for reduction, terms in (("sum", 1), ("components", T), ("mean", T * E)):
        value = losses.gaussian_process_kl(y, log_variance, kernel, reduction=reduction)
        torch.testing.assert_close(value, total / (B * terms))
    torch.testing.assert_close(losses.gaussian_process_kl(y, log_variance, kernel), total / (B * T * E))
    objective = CGTObjective(kl=0.3, kernel="exponential", kernel_scale=0.5, kl_reduction="sum")
    torch.testing.assert_close(objective.regularizers(y, log_variance)["kl"], 0.3 * total / B)


def test_kernels_are_the_papers():
    for s in range(1, T + 1):
        for t in range(1, T + 1):
            rbf = 0.9 * torch.exp(torch.tensor(-((s - t) ** 2) / (2 * (0.3 * T) ** 2))) + 0.1 * float(s == t)
            assert losses.rbf_kernel(T, 0.3, 0.1)[s - 1, t - 1] == pytest.approx(rbf.item())
            assert losses.exponential_kernel(T, 0.3)[s - 1, t - 1] == pytest.approx(
                2.718281828 ** (-abs(s - t) / (0.3 * T))
            )
            assert losses.estimation_kernel(T, 0.5)[s - 1, t - 1] == pytest.approx(1 + 0.25 * min(s, t) / (s * t))


def test_estimation_kernel_is_the_covariance_of_running_means():
    rho = torch.randn(200_000, 1) + 0.8 * torch.randn(200_000, T)
    estimates = rho.cumsum(1) / torch.arange(1, T + 1)
    torch.testing.assert_close(torch.cov(estimates.T), losses.estimation_kernel(T, 0.8).float(), atol=0.02, rtol=0.02)


@pytest.mark.parametrize(
    ("make", "values"),
    [
        (losses.rbf_kernel, lambda d, scale: 0.03 * (d == 0) + 0.97 * torch.exp(-(d**2) / (2 * scale**2))),
        (losses.exponential_kernel, lambda d, scale: torch.exp(-d / scale)),
    ],
)
@pytest.mark.parametrize("scale", [2.0, 5.0])
def test_profile_of_a_uniform_prior_is_constant(make, values, scale):
    """kappa_2 by its definition (Appendix A.3), the ends out of account: K on a long ring, inverted there."""
    ring = 512
    distance = torch.arange(ring, dtype=torch.float64)
    row = values(torch.minimum(distance, ring - distance), scale)
    circulant = torch.stack([row.roll(s) for s in range(ring)])
    inverse = torch.linalg.inv(circulant)
    kappa = []
    for tau in (200.5, 201.5, 260.5, 300.5):
        deltas = torch.arange(1, 180, 2)
        first, second = (tau + deltas / 2).long(), (tau - deltas / 2).long()
        kappa.append((inverse[first, second] * deltas**2).sum())
    kappa = torch.stack(kappa)
    assert (kappa < 0).all()
    torch.testing.assert_close(kappa, kappa[:1].expand(4), rtol=1e-6, atol=1e-6)
    for length in (2, 20, 60):
        torch.testing.assert_close(losses.kernel_profile(make(length, scale / length)), torch.ones(length))


def test_profile_of_estimation_grows_as_a_square():
    """Anti-diagonals of K^-1 by loops; for Eq. 1 the inverse has three diagonals and zeta(s) = s (s - 1)."""
    length = 7
    inverse = torch.linalg.inv(losses.estimation_kernel(length, 0.8))
    steps = torch.zeros(length, dtype=torch.float64)
    for s in range(length):
        for t in range(length):
            whole, half = divmod(s + t, 2)
            share = -inverse[s, t] * (s - t) ** 2
            if half:
                steps[whole + 1] += share
            elif s != t:
                steps[whole] += share / 2
                steps[whole + 1] += share / 2
    steps[0] = steps[1]
    zeta = losses.kernel_profile(losses.estimation_kernel(length, 0.8))
    torch.testing.assert_close(zeta, (steps / steps.mean()).float())
    square = torch.tensor([2.0, 2, 6, 12, 20, 30, 42])
    torch.testing.assert_close(zeta, square / square.mean())


@pytest.mark.parametrize("kernel", ["rbf", "exponential", "estimation"])
def test_profile_of_a_prior_never_rewards_a_jump(kernel):
    weights = losses.kernel_profile(CGTObjective(kernel=kernel).prior(40))
    assert weights.min() > 0
    for at in range(1, 40):
        y = torch.eye(2)[(torch.arange(40) >= at).long()][None]
        assert losses.continuity(y, weights) > 0
    bent = torch.diag(torch.linspace(1, 9, 12, dtype=torch.float64))
    with pytest.raises(ValueError, match="reward jumps"):
        losses.kernel_profile(bent @ losses.rbf_kernel(12, 0.3) @ bent)
    with pytest.raises(ValueError, match="1 position"):
        losses.kernel_profile(torch.eye(1))


def test_gaussian_process_matching(y):
    kernel = losses.rbf_kernel(T, 0.3)
    mean = y.mean(0)
    total = sum(mean[s].pow(2).sum() for s in range(T)) / T
    for s in range(T):
        for t in range(T):
            for i in range(E):
                for j in range(E):
                    moment = ((y[:, s, i] - mean[s, i]) * (y[:, t, j] - mean[t, j])).mean()
                    total = total + (moment - kernel[s, t].float() * float(i == j)) ** 2 / T**2
    torch.testing.assert_close(losses.gaussian_process_matching(y, kernel), total)
    some = torch.tensor([0, 2, 5])
    torch.testing.assert_close(
        losses.gaussian_process_matching(y, kernel, some),
        losses.gaussian_process_matching(y[:, some], kernel[some][:, some]),
    )


def test_moment_matching(y):
    total = 0.0
    for s in range(T):
        mean = y[:, s].mean(0)
        deviation = y[:, s] - mean
        total += mean.pow(2).sum()
        for i in range(E):
            for j in range(E):
                total += ((deviation[:, i] * deviation[:, j]).mean() - float(i == j)) ** 2
    torch.testing.assert_close(losses.moment_matching(y), total / T)


def test_profiles():
    for kind in ("constant", "linear", "quadratic", "second_half"):
        assert losses.profile(kind, 8).mean() == pytest.approx(1.0)
    torch.testing.assert_close(losses.profile("quadratic", 3), torch.tensor([1.0, 4.0, 9.0]) * 3 / 14)
    with pytest.raises(ValueError, match="profile"):
        losses.profile("cubic", 3)


def test_splits_leave_a_prefix_and_a_rest():
    drawn = torch.cat([draw_splits(64, 7) for _ in range(20)])
    assert set(drawn.tolist()) == set(range(1, 6))
    drawn = torch.cat([draw_splits(64, 7, horizon=3) for _ in range(20)])
    assert set(drawn.tolist()) == {1, 2, 3}
    assert set(draw_splits(64, 7, allowed=(2, 4, 6)).tolist()) == {2, 4}
    assert len(set(draw_splits(64, 7, shared=True).tolist())) == 1
    with pytest.raises(ValueError, match="horizon=9"):
        draw_splits(2, 7, horizon=9)


def test_splits_beyond_the_texts_are_refused_when_a_run_is_planned():
    CGTObjective(splits=(4, 9)).check_length(11)
    with pytest.raises(ValueError, match=r"texts of 11 tokens at 9: splits must lie in 1 \.\. 8"):
        CGTObjective(splits=(4, 9), horizon=2).check_length(11)
    data = {"data": "cgt-arithmetic:tasks=1,examples=4,digits=1"}
    settings = TrainSettings(model="cgt-arithmetic", objective="cgt:splits=[9,45]", data=data)
    with pytest.raises(ValueError, match=r"texts of 36 tokens at 45.*change objective\.splits or sequence_length"):
        measure_size(settings, 16)


@pytest.mark.parametrize("horizon", [None, 3])
@pytest.mark.parametrize("positions", ["restart", "continue"])
def test_auxiliary_loss_against_one_sequence_at_a_time(horizon, positions):
    model = make_cgt()
    ids = torch.randint(0, 50, (3, 9))
    splits = torch.tensor([2, 5, 4])
    context = model.context(ids)
    with torch.no_grad():
        loss = auxiliary_loss(
            model, {"input_ids": ids, "labels": ids}, context, splits, horizon=horizon, positions=positions
        )
        total, count = 0.0, 0
        for row, split in zip(ids, splits.tolist()):
            rest = row[None, split : None if horizon is None else split + horizon + 1]
            y = model.context(row[None, :split])[:, -1]
            start = split if positions == "continue" else 0
            where = torch.arange(start, start + rest.shape[1])[None]
            logits = model(rest, frozen_context=y, position_ids=where).logits[0, :-1]
            total += torch.nn.functional.cross_entropy(logits, rest[0, 1:], reduction="sum")
            count += rest.shape[1] - 1
    torch.testing.assert_close(loss, total / count, rtol=1e-4, atol=1e-4)


def test_rest_pads_with_positions_that_do_not_count():
    batch = {"vectors": torch.randn(2, 5, 3), "target_mask": torch.ones(2, 5, dtype=torch.bool)}
    rest, source = rest_of(batch, torch.tensor([1, 3]))
    assert rest["target_mask"].tolist() == [[True] * 4, [True, True, False, False]]
    assert source.tolist() == [[1, 2, 3, 4], [3, 4, 5, 6]]
    torch.testing.assert_close(rest["vectors"][1, :2], batch["vectors"][1, 3:])


def test_objective_is_equation_three():
    torch.manual_seed(5)
    model = make_cgt().train()
    ids = torch.randint(0, 50, (4, 9))
    batch = {"input_ids": ids, "labels": ids}
    objective = CGTObjective(eta=0.3, splits=(4,), continuity=0.08, decorrelation=0.04, moments=0.01, matching=0.02)
    loss, terms, output = objective(model, batch)
    assert set(terms) == {"ce", "aux", "continuity", "decorrelation", "moments", "matching"}
    plain = model(ids, labels=ids)
    aux = auxiliary_loss(model, batch, plain.context, torch.full((4,), 4))
    expected = 0.3 * plain.loss + 0.7 * aux + 0.08 * losses.continuity(plain.context)
    expected = expected + 0.04 * losses.decorrelation(plain.context) + 0.01 * losses.moment_matching(plain.context)
    torch.testing.assert_close(loss, expected + terms["matching"])
    loss.backward()
    # The prefix learns from the rest through y alone.
    assert model.transformer.context_wte.weight.grad.abs().sum() > 0
    assert output.logits.shape == (4, 9, 50)


def test_gradient_reaches_the_prefix_through_y_only():
    model = make_cgt()
    ids = torch.randint(0, 50, (2, 9))
    context = model(ids).context
    splits = torch.tensor([3, 3])
    loss = auxiliary_loss(model, {"input_ids": ids, "labels": ids}, context, splits)
    (grad,) = torch.autograd.grad(loss, context)
    assert grad[:, 2].abs().sum() > 0
    assert grad[:, :2].abs().sum() == 0
    assert grad[:, 3:].abs().sum() == 0


def test_variational_objective():
    model = make_cgt(variational=True, context_norm=False).train()
    ids = torch.randint(0, 50, (4, 9))
    for kernel in ("rbf", "exponential", "estimation"):
        _, terms, _ = CGTObjective(kl=0.1, kernel=kernel)(model, {"input_ids": ids, "labels": ids})
        assert torch.isfinite(terms["kl"])
    with pytest.raises(ValueError, match="variational"):
        CGTObjective(kl=0.1)(make_cgt().train(), {"input_ids": ids, "labels": ids})
    with pytest.raises(ValueError, match="eta"):
        CGTObjective(eta=1.5)


def test_variational_auxiliary_loss_freezes_the_drawn_context():
    """One sequence at a time, with y as it was drawn for the main loss (Figure 1b, Appendix A.1)."""
    model = make_cgt(variational=True, context_norm=False).train()
    ids = torch.randint(0, 50, (3, 9))
    batch = {"input_ids": ids, "labels": ids}
    for choice in ("sample", "mean"):
        _, terms, output = CGTObjective(eta=0.4, splits=(4,), aux_context=choice)(model, batch)
        assert (output.context_sample - output.context).abs().max() > 0.1
        again = model(ids, frozen_context=output.context_sample)
        torch.testing.assert_close(again.logits, output.logits)
        y = output.context_sample if choice == "sample" else output.context
        alone = [model(row[None, 4:], labels=row[None, 4:], frozen_context=v[None, 3]).loss for row, v in zip(ids, y)]
        torch.testing.assert_close(terms["aux"], 0.6 * torch.stack(alone).mean())
    assert model.eval()(ids).context_sample is None


def test_accumulated_micro_batches_give_the_gradient_of_one_batch():
    model = make_cgt().train()
    guided = ModelWithObjective(model, CGTObjective(splits=(4,), continuity=0.1)).train()
    ids = torch.randint(0, 50, (4, 9))
    guided(input_ids=ids, labels=ids)["loss"].backward()
    whole = model.transformer.wpe.weight.grad.clone()
    model.zero_grad()
    for half in ids.split(2):
        guided(input_ids=half, labels=half, num_items_in_batch=torch.tensor(32))["loss"].backward()
    torch.testing.assert_close(model.transformer.wpe.weight.grad, whole)


REAL = torch.tensor([[True] * 6, [True] * 4 + [False] * 2, [True] * 3 + [False] * 3, [True] * 5 + [False]])


def test_padding_is_left_out_of_what_looks_at_one_sample(y):
    """The value of a padded batch is the average of those of the sequences without their padding."""
    log_variance, kernel = torch.randn(B, T, E), losses.rbf_kernel(T, 0.3)
    shares = torch.tensor([5, 3, 0, 4])

    def alone(b):
        n = int(REAL[b].sum())
        kl = losses.gaussian_process_kl(y[b : b + 1, :n], log_variance[b : b + 1, :n], kernel[:n, :n], constants=True)
        return torch.stack([losses.continuity(y[b : b + 1, :n]), kl])

    each = torch.stack([alone(b) for b in range(B)], 1).double()
    noisy = torch.where(REAL.unsqueeze(-1), y, 1e3)
    for given, weights in ((None, torch.ones(B)), (shares, shares)):
        expected = (each * weights).sum(1) / weights.sum()
        marks = {"real": REAL, "shares": given}
        found = losses.continuity(noisy, **marks)
        kl = losses.gaussian_process_kl(noisy, log_variance, kernel, constants=True, **marks)
        torch.testing.assert_close(torch.stack([found, kl]).double(), expected, rtol=1e-3, atol=1e-3)


def test_padding_is_left_out_of_statistics_of_the_batch(y):
    zeta, n, kernel = torch.rand(T) + 0.1, unit(y), losses.rbf_kernel(T, 0.3).float()
    total = weight = pairs = 0.0
    process, moments, identity = torch.zeros(()), torch.zeros(()), torch.eye(E)
    for s in range(T):
        there = [b for b in range(B) if REAL[b, s]]
        mean = y[there, s].mean(0)
        process, moments = process + mean.square().sum() / T, moments + mean.square().sum() / T
        deviation = y[there, s] - mean
        moments = moments + (deviation.T @ deviation / len(there) - identity).square().sum() / T
        for a in there:
            total += sum(zeta[s] * (n[a, s] @ n[b, s]) ** 2 for b in there if b != a)
            weight += zeta[s] * (len(there) - 1)
    squares = torch.zeros(())
    for s in range(T):
        for t in range(T):
            both = [b for b in range(B) if REAL[b, s] and REAL[b, t]]
            first, second = (y[both, at] - y[REAL[:, at], at].mean(0) for at in (s, t))
            squares, pairs = (
                squares + (first.T @ second / len(both) - kernel[s, t] * identity).square().sum(),
                pairs + 1,
            )
    noisy = torch.where(REAL.unsqueeze(-1), y, 1e3)
    torch.testing.assert_close(losses.decorrelation(noisy, zeta, real=REAL), total / weight)
    torch.testing.assert_close(losses.moment_matching(noisy, real=REAL), moments)
    torch.testing.assert_close(losses.gaussian_process_matching(noisy, kernel, real=REAL), process + squares / pairs)
    everything = torch.ones(B, T, dtype=torch.bool)
    for name in ("decorrelation", "moment_matching", "continuity"):
        measure = getattr(losses, name)
        torch.testing.assert_close(measure(y, real=everything), measure(y))


def padded(ids):
    """Labels of sequences that end after 9, 7, 6 and 8 tokens; the last has a prompt of three."""
    labels = ids.clone()
    labels[1, 7:] = labels[2, 6:] = labels[3, 8:] = labels[3, :3] = -100
    return labels


def test_padding_is_told_from_a_prompt():
    labels = padded(torch.ones(4, 9, dtype=torch.long))
    assert real_positions({"labels": labels}).sum(1).tolist() == [9, 7, 6, 8]
    mask = torch.ones(4, 9)
    mask[0, :2] = 0
    assert real_positions({"labels": labels, "attention_mask": mask}).sum(1).tolist() == [7, 9, 9, 9]
    assert real_positions({"labels": labels[:1]}) is None
    assert real_positions({"vectors": torch.randn(2, 3, 4)}) is None


@pytest.mark.parametrize("variational", [False, True])
def test_accumulation_with_padding_gives_the_regularisers_of_one_batch(variational):
    model = make_cgt(variational=variational, context_norm=False).train()
    objective = CGTObjective(eta=1.0, continuity=0.5, profile="linear", kl=0.5 * variational)
    guided = ModelWithObjective(model, objective).train()
    ids = torch.randint(0, 50, (4, 9))
    labels = padded(ids)
    total = (labels[:, 1:] != -100).sum()

    def gradient(*sizes):
        model.zero_grad()
        for part, wanted in zip(ids.split(sizes), labels.split(sizes), strict=True):
            output = model(part, labels=wanted)
            terms = objective.regularizers(output.context, output.context_log_variance, {"labels": wanted})
            (sum(terms.values()) * (wanted[:, 1:] != -100).sum() / total).backward()
        return model.transformer.context_wpe.weight.grad.clone()

    torch.testing.assert_close(gradient(1, 3), gradient(4), rtol=1e-4, atol=1e-6)
    changed = torch.where(real_positions({"labels": labels}), ids, 7)
    guided(input_ids=ids, labels=labels)
    before = guided.terms
    torch.manual_seed(3)
    guided(input_ids=changed, labels=labels)
    names = {"continuity", "kl"} & set(before)
    assert all(torch.allclose(before[name], guided.terms[name], rtol=1e-4) for name in names)


def test_a_run_states_the_loss_of_the_objective():
    """Trainer counts the targets of a wrapped model as it counts those of the model itself."""
    model = make_cgt()
    ids = torch.randint(0, 50, (4, 9))
    labels = padded(ids)
    data = [{"input_ids": row, "labels": wanted} for row, wanted in zip(ids, labels, strict=True)]
    objective = CGTObjective(eta=1.0, continuity=0.3)
    with torch.no_grad():
        expected, _, _ = objective(model, {"input_ids": ids, "labels": labels})
    settings = FitSettings(steps=1, batch_size=2, accumulation=2, dtype="float32", device="cpu", log_every=1)
    result = fit(ModelWithObjective(model, objective), data, settings)
    assert result.curve[-1]["loss"] == pytest.approx(float(expected), rel=1e-5)
