"""The measurements on contexts, each against a value known in advance or computed another way."""

import numpy as np
import pytest
import torch
from torch import nn
from transformers import GPT2Config

import relinear
from cgt_study import contexts, measures, plots
from cgt_study.baselines import PlainRegression
from cgt_study.tasks import ArithmeticTask, RegressionTask
from relinear.train import FitSettings, fit
from test_cgt import make_cgt


@pytest.fixture(scope="module")
def task():
    return ArithmeticTask(tasks=2, examples=4, digits=1, size=64)


class Oracle(nn.Module):
    """A "model" that knows a fixed batch by heart, and may be told to err in the second half of the examples."""

    def __init__(self, ids, wrong=None):
        super().__init__()
        self.ids, self.wrong = ids, wrong

    def forward(self, input_ids):
        following = torch.cat([self.ids[:, 1:], self.ids[:, :1]], 1)
        if self.wrong is not None:
            following = torch.where(self.wrong, (following + 1) % 16, following)
        return type("Output", (), {"logits": nn.functional.one_hot(following, 16).float()})


def test_accuracy_counts_answer_symbols(task):
    ids = task.batch(range(8))["input_ids"]
    assert measures.answer_accuracy(Oracle(ids), task, 8) == {"dynamic": measures.Accuracy(1.0, 1.0)}
    # One wrong symbol, the sign, in the last answer of every second task: 1 of 4 symbols x 4 answers, 1 of 4 answers.
    wrong = torch.zeros(task.length, dtype=torch.bool)
    wrong[task.length - 1 - 4 - 1] = True
    result = measures.answer_accuracy(Oracle(ids, wrong), task, 8)["dynamic"]
    assert result.symbols == pytest.approx(15 / 16)
    assert result.answers == pytest.approx(3 / 4)
    # Errors in the first half do not count.
    early = torch.arange(task.length) < 10
    assert measures.answer_accuracy(Oracle(ids, early), task, 8)["dynamic"].symbols == 1.0


def test_specialised_accuracy_is_the_specialised_models(task):
    model = make_cgt(vocab_size=16, n_positions=task.length)
    result = measures.answer_accuracy(model, task, 6)["specialized"]
    right = []
    for index in range(6):
        ids = task[index]["input_ids"]
        for start in (0, 36):
            stock = relinear.specialize(model, ids[: start + 18])
            rest = ids[start + 18 : start + 36]
            with torch.no_grad():
                guess = stock(rest[None]).logits[0, :-1].argmax(-1)
            right.append((guess == rest[1:])[task.answer_mask()[1:18]])
    assert result.symbols == pytest.approx(torch.stack(right).float().mean().item())


def test_specialised_accuracy_with_the_examples_in_context(task):
    """ "ctx" of Figure 9: the stock model that y at the middle makes, run over the task from its first example on."""
    model = make_cgt(vocab_size=16, n_positions=task.length)
    result = measures.answer_accuracy(model, task, 6)["specialized_ctx"]
    right = []
    for index in range(6):
        ids = task[index]["input_ids"]
        y = model.context(ids[None])[0]
        for start in (0, 36):
            stock = relinear.specialize(model, context=y[start + 17])
            whole = ids[start : start + 36]
            with torch.no_grad():
                guess = stock(whole[None]).logits[0, :-1].argmax(-1)
            for example in (2, 3):
                answer = slice(9 * example + 4, 9 * example + 8)
                right.append((guess[answer.start - 1 : answer.stop - 1] == whole[answer]).float())
    assert result.symbols == pytest.approx(torch.stack(right).mean().item())
    assert result.answers == pytest.approx(torch.stack(right).amin(-1).mean().item())


def test_probe_reads_anywhere_in_the_second_half(task):
    y = torch.arange(task.length).float()[None, :, None].expand(40, -1, 2).contiguous()
    for number, start in enumerate((0, 36)):
        late = range(start + 18, start + 36)
        anywhere = measures.probe_features(y, task)[:, number, 0].tolist()
        assert set(anywhere) <= set(late)
        assert len(set(anywhere)) > 10
        assert set(measures.probe_features(y, task, "last")[:, number, 0].tolist()) == {late[-1]}
        assert set(measures.probe_features(y, task, "average")[:, number, 0].tolist()) == {np.mean(late)}
    assert torch.equal(measures.probe_features(y, task, seed=3), measures.probe_features(y, task, seed=3))
    with pytest.raises(ValueError, match="where"):
        measures.probe_features(y, task, "first")


def test_report_probes_each_place_with_samples_held_out(task):
    """The error of a least-squares fit on the first half of the samples, all of their tasks, at the drawn positions."""
    model = make_cgt(vocab_size=16, n_positions=task.length)
    report = measures.arithmetic_report(model, task, 60)
    assert set(report) == {"dynamic", "specialized", "specialized_ctx", "variation", "probe"}
    assert set(report["probe"]) == {"anywhere", "average", "last"}
    y = model.context(task.batch(range(60))["input_ids"])
    read = measures.probe_features(y, task).double().reshape(120, -1).numpy()
    hidden = np.concatenate([task.coefficients(index) for index in range(60)])
    x = (read - read[:60].mean(0)) / read[:60].std(0, ddof=1)
    t = (hidden - hidden[:60].mean(0)) / hidden[:60].std(0, ddof=1)
    fitted = np.linalg.lstsq(np.r_[x[:60], np.sqrt(0.06) * np.eye(12)], np.r_[t[:60], np.zeros((12, 2))], rcond=None)[0]
    error = np.square(x[60:] @ fitted - t[60:]).mean()
    assert report["probe"]["anywhere"]["error"] == pytest.approx(error, rel=1e-6)


def test_guessing_is_the_most_frequent_answer():
    """One digit, a in -5 .. 5 and b = 0: 0 if the number is 0, else one of eleven answers: 2 / 11 of 18.2 %."""
    whole = ArithmeticTask(tasks=1, digits=1, a_range=(-5, 5), b_range=(0, 0), integers=True, size=400)
    zeros = np.mean([whole.numbers(index)[..., 0] == 0 for index in range(400)])
    assert measures.guessing_accuracy(whole, 400) == pytest.approx(zeros + (1 - zeros) / 11)
    assert zeros + (1 - zeros) / 11 == pytest.approx(2 / 11, abs=0.02)
    # a in [0, 1) alone: A a falls evenly into A cells (0 is one more for A = 0).
    real = ArithmeticTask(tasks=1, digits=1, a_range=(0, 1), b_range=(0, 0), size=100)
    cells = np.maximum([real.numbers(index)[..., 0] for index in range(100)], 1)
    assert measures.guessing_accuracy(real, 100) == pytest.approx((1 / cells).mean(), abs=0.02)


def test_variation_is_equation_four():
    y = torch.randn(3, 10, 4)
    values = []
    for sample in y:
        delta = sample[2:] - sample[2:].mean(0)
        scaled = delta / delta.pow(2).sum(-1).mean().sqrt()
        values.append(np.mean([(scaled[s] - scaled[s - 1]).norm().item() for s in range(4, 8)]))
    assert measures.context_variation(y, slice(2, 6), slice(6, 10)) == pytest.approx(np.mean(values), rel=1e-5)
    assert measures.context_variation(torch.ones(2, 8, 3), slice(0, 4), slice(4, 8)) == 0


def test_probe_finds_what_is_linear_and_only_that():
    hidden = torch.randn(400, 2)
    y = hidden @ torch.randn(2, 6) + 0.01 * torch.randn(400, 6)
    good = measures.linear_probe(y, hidden)
    assert good.error < 0.01
    assert min(good.r2) > 0.98
    assert measures.linear_probe(torch.randn(400, 6), hidden).error > 0.8
    constant = measures.linear_probe(y, torch.cat([hidden[:, :1], torch.ones(400, 1)], 1))
    assert constant.truth.shape[1] == 1


def test_ridge_is_scikit_learns():
    linear_model = pytest.importorskip("sklearn.linear_model")
    task = RegressionTask(inputs=3, outputs=1, pairs=8, noise=0.5, size=4)
    errors = np.zeros(8)
    for index in range(4):
        drawn = task.sample(index)
        x = np.c_[drawn["x"], np.ones(8)]
        errors[0] += drawn["clean"][0].item() ** 2 / 4
        for n in range(1, 8):
            fit = linear_model.Ridge(alpha=0.25, fit_intercept=False).fit(x[:n], drawn["y"][:n])
            errors[n] += (fit.predict(x[n : n + 1]) - drawn["clean"][n]).item() ** 2 / 4
    np.testing.assert_allclose(measures.ridge_errors(task, 4), errors, rtol=1e-8)


def test_regression_errors_of_frozen_and_dynamic_models():
    config = relinear.CGTConfig(
        n_embd=16, n_head=2, n_layer=2, n_positions=16, context_layer=1, context_size=8, context_heads=2, templates=2,
        input_features=3, output_features=1,
    )  # fmt: skip
    model = relinear.CGTForRegression(config).eval()
    task = RegressionTask(inputs=2, outputs=1, pairs=6, size=5)
    errors = measures.regression_errors(model, task, (2,), 5)
    assert errors["dynamic"].shape == (6,)
    assert errors["frozen_2"].shape == (4,)
    with torch.no_grad():
        vectors = task.batch(range(5))["vectors"]
        frozen = model(vectors[:, 4:], frozen_context=model.context(vectors)[:, 3]).logits[:, 0, 0]
    clean = torch.tensor([task.sample(i)["clean"][2, 0] for i in range(5)]).float()
    assert errors["frozen_2"][0] == pytest.approx((frozen - clean).square().mean().item(), rel=1e-5)


@pytest.mark.parametrize("vector_input", ["learned", "padded"])
def test_plain_baseline_of_regression(vector_input):
    """What GPT-2 gives for the embedded vectors, read out; it learns, and is measured like a CGT."""
    config = GPT2Config(n_embd=16, n_head=2, n_layer=2, n_positions=12, vocab_size=1)
    task = RegressionTask(inputs=2, outputs=1, pairs=6, size=64)
    plain = PlainRegression(config, 3, 1, vector_input).eval()
    batch = task.batch(range(4))
    with torch.no_grad():
        found = plain(**batch)
        start = torch.cat([batch["vectors"], torch.zeros(4, 12, 13)], -1)
        start = start if plain.vector_in is None else plain.vector_in(batch["vectors"])
        hidden = plain.transformer(inputs_embeds=start).last_hidden_state
        torch.testing.assert_close(found.logits, plain.head(hidden))
        error = (found.logits[:, 0::2] - batch["vectors"][:, 1::2, 2:]).square().mean()
        torch.testing.assert_close(found.loss, error)
    settings = FitSettings(steps=8, batch_size=8, learning_rate=1e-2, dtype="float32", device="cpu", log_every=1)
    curve = fit(plain, task, settings).curve
    assert curve[-1]["loss"] < curve[0]["loss"]
    errors = measures.regression_errors(plain, task, (), 5)
    assert errors["dynamic"].shape == (6,)
    with pytest.raises(ValueError, match="padded"):
        PlainRegression(config, 17, 1, "padded")


@pytest.mark.parametrize("token", ["=", "|"])
def test_task_vectors_are_transplanted(task, token, tiny_gpt2):
    ids = task.batch(range(4))["input_ids"]
    with torch.no_grad():
        before = tiny_gpt2(ids).logits
        results = measures.task_vector_accuracy(tiny_gpt2, task, token, 8)
        assert len(results) == 2
        assert all(0 <= result.answers <= result.symbols <= 1 for result in results)
        assert torch.equal(tiny_gpt2(ids).logits, before)
        vector = torch.randn(4, tiny_gpt2.config.n_embd)
        after = measures._transplanted(tiny_gpt2, tiny_gpt2.transformer.h[-1], ids, vector, 3)
        torch.testing.assert_close(after[:, 3], tiny_gpt2.lm_head(tiny_gpt2.transformer.ln_f(vector)))
        torch.testing.assert_close(after[:, :3], before[:, :3])
    with pytest.raises(ValueError, match="token"):
        measures.task_vector_accuracy(tiny_gpt2, task, "*", 8)


def test_losses_by_position():
    model, ids = make_cgt(), torch.randint(0, 50, (3, 20))
    losses = contexts.losses_by_position(model, ids, 8, baseline=model)
    assert all(values.shape == (11,) for values in losses.values())
    np.testing.assert_allclose(losses["baseline"], losses["dynamic"])
    with torch.no_grad():
        mean = model(ids[:, 8:], labels=ids[:, 8:], frozen_context=model.context(ids[:, :8])[:, -1]).loss
    assert losses["specialized"].mean() == pytest.approx(mean.item(), rel=1e-5)
    frozen = contexts.losses_by_position(model, ids, 8, rate=0.0)
    np.testing.assert_allclose(frozen["average"], frozen["specialized"])
    control = contexts.losses_by_position(model, ids, 8, others=ids[:, :8])
    np.testing.assert_array_equal(control["shuffled"], control["specialized"])
    other = contexts.losses_by_position(model, ids, 8, others=ids.roll(1, 0)[:, :8])
    assert not np.allclose(other["shuffled"], other["specialized"])


def test_dot_products_and_spectrum():
    y = torch.cat([torch.ones(2, 3, 1) * torch.tensor([1.0, 0.0]), torch.ones(2, 4, 1) * torch.tensor([0.0, 2.0])], 1)
    expected = np.kron(np.eye(2), np.ones((4, 4)))[1:, 1:]
    np.testing.assert_allclose(contexts.dot_products(y), expected)
    wave = torch.sin(2 * torch.pi * 3 * torch.arange(24) / 24)[None, :, None]
    spectrum = contexts.spectrum(5 + wave)
    assert spectrum.argmax() == 3
    assert spectrum[3] == pytest.approx(1.0)


def test_clustering_scores():
    pytest.importorskip("sklearn")
    centres, labels = np.eye(3).repeat(10, 0), np.arange(3).repeat(10)
    close = centres + 0.01 * np.random.default_rng(0).standard_normal(centres.shape)
    good = contexts.clustering_scores(close, labels)
    assert good["silhouette"] > 0.9
    assert good["neighbours"] == 1.0
    assert good["chance"] == pytest.approx(9 / 29)
    mixed = contexts.clustering_scores(close, np.arange(30) % 3)
    assert mixed["silhouette"] < 0.1
    assert mixed["neighbours"] < 0.7  # a text is no neighbour of itself
    assert contexts.embed_2d(close).shape == (30, 2)


def test_token_shifts():
    model, ids = make_cgt(), torch.randint(0, 50, (2, 6))
    own, other = torch.randn(2, 12)
    shifts = contexts.token_shifts(model, ids, own, other, top=5)
    with torch.no_grad():
        rise = sum(
            sign * model(ids, frozen_context=y.expand(2, -1)).logits for sign, y in ((1, other), (-1, own))
        ).mean((0, 1))
    assert shifts[0][0] == int(rise.argmax())
    assert shifts[0][1] == pytest.approx((rise.max() - rise.mean()).item(), rel=1e-4)
    assert [value for _, value in shifts] == sorted((value for _, value in shifts), reverse=True)


def test_figures(tmp_path):
    from relinear.pages.matplotlib_figures import save_figure

    accuracy = {"symbols": 0.9, "answers": 0.5}
    rows = {
        "baseline": [{"dynamic": accuracy}],
        "CGT": [{"dynamic": accuracy, "specialized": accuracy, "specialized_ctx": accuracy}] * 2,
    }
    random = np.random.default_rng(0)
    figures = {
        "regression": plots.regression_figure({"dynamic": np.ones(9), "frozen_4": np.ones(5)}, np.ones(9), noise=0.1),
        "accuracy": plots.accuracy_figure(rows),
        "probe": plots.probe_figure(random.random((20, 2)), random.random((20, 2))),
        "maps": plots.dot_product_figure({"a": np.eye(5), "b": np.eye(5)}, [2]),
        "context": plots.context_figure(random.random((30, 6)), [10]),
        "position": plots.position_figure({"dynamic": np.ones(40), "specialized": np.ones(40)}),
        "clusters": plots.clusters_figure(random.random((12, 2)), [0, 1, 2] * 4, ["x", "y", "z"], "title"),
        "spectrum": plots.spectrum_figure({"a": random.random(9)}),
    }
    for name, figure in figures.items():
        assert all(path.stat().st_size > 1000 for path in save_figure(figure, tmp_path / name))


def test_figure_of_the_context_draws_the_components_that_vary_most():
    y = np.random.default_rng(0).normal(size=(30, 6)) * [1, 5, 2, 6, 3, 4]
    figure = plots.context_figure(y, boundaries=[10, 20], components=4)
    curves = [line.get_ydata() for line in figure.axes[0].lines]
    for curve, component in zip(curves[:4], (3, 1, 5, 4), strict=True):
        np.testing.assert_array_equal(curve, y[:, component])
    assert [line.get_xdata()[0] for line in figure.axes[0].lines[4:]] == [9.5, 19.5]


def test_measuring_leaves_every_module_in_its_mode():
    """Studies measure while they train: what was frozen in evaluation mode stays there, what trains goes on."""
    task = ArithmeticTask(tasks=1, examples=2, digits=1, size=2)
    model = make_cgt(vocab_size=16, n_positions=task.length).train()
    plain = make_cgt(vocab_size=16).train()
    model.transformer.drop.eval()
    modes = [module.training for module in model.modules()]
    ids = torch.randint(16, (2, 12))
    measures.answer_accuracy(model, task, 2)
    contexts.losses_by_position(model, ids, 6, baseline=plain)
    contexts.token_shifts(model, ids, *torch.randn(2, model.config.context_size), top=3)
    assert [module.training for module in model.modules()] == modes
    assert plain.training
