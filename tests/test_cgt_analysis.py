"""The measurements on contexts, each against a value known in advance or computed another way."""

import json

import numpy as np
import pytest
import torch
from torch import nn

import relinear
from relinear.analysis import cgt_arithmetic, cgt_context, cgt_regression, cgt_specialized
from relinear.analysis.analyses import HeldOutText, Subject, analyze, applying, held_out_tokens
from relinear.data import DataSettings
from relinear.data.tasks import ArithmeticTask, RegressionTask, Samples
from relinear.data.tokenizers import byte_tokenizer
from relinear.pages.blocks import Chart, Table
from relinear_cli.main import main
from tiny_models import make_cgt


@pytest.fixture(scope="module")
def samples():
    return Samples(ArithmeticTask(tasks=2, examples=4, digits=1), 64)


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


def test_accuracy_counts_answer_symbols(samples):
    task, ids = samples.task, samples.batch(range(8))["input_ids"]
    assert cgt_arithmetic.answer_accuracy(Oracle(ids), task, ids)["dynamic"].unique().tolist() == [1.0]
    # One wrong symbol, the sign, in the last answer of every second task: 1 of 4 symbols x 4 answers, 1 of 4 answers.
    wrong = torch.zeros(task.length, dtype=torch.bool)
    wrong[task.length - 1 - 4 - 1] = True
    right = cgt_arithmetic.answer_accuracy(Oracle(ids, wrong), task, ids)["dynamic"].mean(0)
    assert right.tolist() == pytest.approx([15 / 16, 3 / 4])
    # Errors in the first half do not count.
    early = torch.arange(task.length) < 10
    assert cgt_arithmetic.answer_accuracy(Oracle(ids, early), task, ids)["dynamic"].min() == 1.0


def test_specialised_accuracy_is_the_specialised_models(samples):
    task, ids = samples.task, samples.batch(range(6))["input_ids"]
    model = make_cgt(vocab_size=16, n_positions=task.length)
    result = cgt_arithmetic.answer_accuracy(model, task, ids)["specialized"]
    right = []
    for row in ids:
        for start in (0, 36):
            stock = relinear.specialize(model, row[: start + 18])
            rest = row[start + 18 : start + 36]
            with torch.no_grad():
                guess = stock(rest[None]).logits[0, :-1].argmax(-1)
            right.append((guess == rest[1:])[task.answer_mask()[1:18]])
    assert result[:, 0].mean().item() == pytest.approx(torch.stack(right).float().mean().item())
    twins = cgt_arithmetic.answer_accuracy(model, task, ids[:1].expand(4, -1))
    assert torch.equal(twins["another"], twins["specialized"])
    with torch.no_grad():
        for modulator in model.modulators():
            modulator.left.mul_(100)  # so that answers follow y
    found = cgt_arithmetic.answer_accuracy(model, task, samples.batch(range(40))["input_ids"])
    assert not torch.equal(found["another"], found["specialized"])


def test_specialised_accuracy_with_the_examples_in_context(samples):
    """ "ctx" of Figure 9: the stock model that y at the middle makes, run over the task from its first example on."""
    task, ids = samples.task, samples.batch(range(6))["input_ids"]
    model = make_cgt(vocab_size=16, n_positions=task.length)
    result = cgt_arithmetic.answer_accuracy(model, task, ids)["specialized_ctx"].mean(0)
    right = []
    for row in ids:
        y = model.context(row[None])[0]
        for start in (0, 36):
            stock = relinear.specialize(model, context=y[start + 17])
            whole = row[start : start + 36]
            with torch.no_grad():
                guess = stock(whole[None]).logits[0, :-1].argmax(-1)
            for example in (2, 3):
                answer = slice(9 * example + 4, 9 * example + 8)
                right.append((guess[answer.start - 1 : answer.stop - 1] == whole[answer]).double())
    wanted = [torch.stack(right).mean().item(), torch.stack(right).amin(-1).mean().item()]
    assert result.tolist() == pytest.approx(wanted)


def test_probe_reads_anywhere_in_the_second_half(samples):
    task = samples.task
    y = torch.arange(task.length).float()[None, :, None].expand(40, -1, 2).contiguous()
    for number, start in enumerate((0, 36)):
        late = range(start + 18, start + 36)
        anywhere = cgt_arithmetic.probe_features(y, task)[:, number, 0].tolist()
        assert set(anywhere) <= set(late)
        assert len(set(anywhere)) > 10
        assert set(cgt_arithmetic.probe_features(y, task, "last")[:, number, 0].tolist()) == {late[-1]}
        assert set(cgt_arithmetic.probe_features(y, task, "average")[:, number, 0].tolist()) == {np.mean(late)}


DATA = "cgt-arithmetic:tasks=2,examples=4,digits=1"


def test_report_probes_each_place_with_samples_held_out(samples):
    """The error of a least-squares fit on the first half of the samples, all of their tasks, at the drawn positions."""
    model, data = make_cgt(vocab_size=16, n_positions=samples.task.length), DataSettings(data=DATA)
    ids = held_out_tokens(HeldOutText(data, 60), None)
    subject = Subject(model, ids, data=data)
    drawn = subject.samples_of(ArithmeticTask)
    assert torch.equal(ids, drawn.batch(range(60))["input_ids"])
    numbers = cgt_arithmetic.run(subject)
    assert set(numbers["accuracy"]) == {"dynamic", "specialized", "specialized_ctx", "another"}
    read = cgt_arithmetic.probe_features(model.context(ids), samples.task).double().reshape(120, -1).numpy()
    hidden = np.concatenate([drawn.draw(index)["coefficients"] for index in range(60)])
    x = (read - read[:60].mean(0)) / read[:60].std(0, ddof=1)
    t = (hidden - hidden[:60].mean(0)) / hidden[:60].std(0, ddof=1)
    fitted = np.linalg.lstsq(np.r_[x[:60], np.sqrt(0.06) * np.eye(12)], np.r_[t[:60], np.zeros((12, 2))], rcond=None)[0]
    error = np.square(x[60:] @ fitted - t[60:]).mean()
    assert numbers["probe"]["anywhere"]["error"] == pytest.approx(error, rel=1e-6)


def test_guessing_is_the_most_frequent_answer():
    """One digit, a in -5 .. 5 and b = 0: 0 if the number is 0, else one of eleven answers: 2 / 11 of 18.2 %."""
    whole = Samples(ArithmeticTask(tasks=1, digits=1, a=(-5, 5), b=(0, 0), integers=True), 400)
    zeros = np.mean([whole.draw(index)["numbers"][..., 0] == 0 for index in range(400)])
    assert cgt_arithmetic.guessing_accuracy(whole, 400) == pytest.approx(zeros + (1 - zeros) / 11)
    assert zeros + (1 - zeros) / 11 == pytest.approx(2 / 11, abs=0.02)
    # a in [0, 1) alone: A a falls evenly into A cells (0 is one more for A = 0).
    real = Samples(ArithmeticTask(tasks=1, digits=1, a=(0, 1), b=(0, 0)), 100)
    cells = np.maximum([real.draw(index)["numbers"][..., 0] for index in range(100)], 1)
    assert cgt_arithmetic.guessing_accuracy(real, 100) == pytest.approx((1 / cells).mean(), abs=0.02)


def test_variation_is_equation_four():
    y = torch.randn(3, 10, 4)
    values = []
    for sample in y:
        delta = sample[2:] - sample[2:].mean(0)
        scaled = delta / delta.pow(2).sum(-1).mean().sqrt()
        values.append(np.mean([(scaled[s] - scaled[s - 1]).norm().item() for s in range(4, 8)]))
    assert cgt_context.context_variation(y, slice(2, 6), slice(6, 10)) == pytest.approx(np.mean(values), rel=1e-5)
    assert cgt_context.context_variation(torch.ones(2, 8, 3), slice(0, 4), slice(4, 8)) == 0


def test_probe_finds_what_is_linear_and_only_that():
    hidden = torch.randn(400, 2)
    y = hidden @ torch.randn(2, 6) + 0.01 * torch.randn(400, 6)
    good = cgt_arithmetic.linear_probe(y, hidden)
    assert good["error"] < 0.01
    assert min(good["r2"]) > 0.98
    assert cgt_arithmetic.linear_probe(torch.randn(400, 6), hidden)["error"] > 0.8
    constant = cgt_arithmetic.linear_probe(y, torch.cat([hidden[:, :1], torch.ones(400, 1)], 1))
    assert len(constant["truth"][0]) == 1


def test_ridge_is_scikit_learns():
    linear_model = pytest.importorskip("sklearn.linear_model")
    samples = Samples(RegressionTask(inputs=3, pairs=8, noise=0.5), 4)
    errors = np.zeros(8)
    for index in range(4):
        drawn = samples.draw(index)
        x = np.c_[drawn["x"], np.ones(8)]
        errors[0] += drawn["clean"][0].item() ** 2 / 4
        for n in range(1, 8):
            fit = linear_model.Ridge(alpha=0.25, fit_intercept=False).fit(x[:n], drawn["y"][:n])
            errors[n] += (fit.predict(x[n : n + 1]) - drawn["clean"][n]).item() ** 2 / 4
    np.testing.assert_allclose(cgt_regression.ridge_errors(samples), errors, rtol=1e-8)


@pytest.fixture
def regression_model():
    sizes = {"n_layer": 3, "n_embd": 16, "n_head": 2, "context_layer": 2, "context_size": 8, "context_heads": 2}
    features = {"input_features": 3, "output_features": 2, "n_positions": 16, "initializer_range": 0.3}
    torch.manual_seed(0)
    return relinear.from_preset("cgt-regression", **sizes, **features).eval()


def test_regression_errors_of_frozen_and_dynamic_models(regression_model):
    samples = Samples(RegressionTask(inputs=3, outputs=2, pairs=6), 5)
    errors = cgt_regression.regression_errors(regression_model, samples, (2,))
    assert errors["dynamic"].shape == (6,)
    assert errors["frozen_2"].shape == (4,)
    with torch.no_grad():
        vectors = samples.batch(range(5))["vectors"]
        frozen = regression_model(vectors[:, 4:], frozen_context=regression_model.context(vectors)[:, 3]).logits[:, 0]
    clean = torch.from_numpy(np.stack([samples.draw(i)["clean"][2] for i in range(5)])).float()
    assert errors["frozen_2"][0] == pytest.approx((frozen - clean).square().mean().item(), rel=1e-5)


@pytest.mark.parametrize("first", [0, 4])
def test_a_regression_model_is_specialised_to_one_without_y(regression_model, first, tmp_path):
    vectors = torch.randn(2, 10, 3)
    plain = relinear.specialize(regression_model, vectors[0, :4], first_position=first)
    y = regression_model.context(vectors[:1, :4])[:, -1].expand(2, -1)
    where = torch.arange(first, first + 10)[None]
    with torch.no_grad():
        wanted = regression_model(vectors, frozen_context=y, position_ids=where).logits
        torch.testing.assert_close(plain(vectors).logits, wanted, rtol=1e-5, atol=1e-5)
        assert not any("modulate" in name or ".context." in name for name in plain.state_dict())
        plain.save_pretrained(tmp_path)
        torch.testing.assert_close(relinear.from_pretrained(tmp_path)(vectors).logits, plain(vectors).logits)
    with pytest.raises(ValueError, match="vectors of one sequence"):
        relinear.specialize(regression_model, torch.randn(3))


@pytest.mark.parametrize("token", ["=", "|"])
def test_task_vectors_are_transplanted(samples, token, tiny_gpt2):
    """A share for each layer, and the model is as it was."""
    ids = samples.batch(range(8))["input_ids"]
    with torch.no_grad():
        before = tiny_gpt2(ids).logits
        results = cgt_arithmetic.task_vector_accuracy(tiny_gpt2, samples.task, ids, token)
        assert len(results) == 2
        assert all(0 <= result <= 1 for result in results)
        assert torch.equal(tiny_gpt2(ids).logits, before)


def test_losses_on_the_second_half_are_the_models():
    model, ids = make_cgt(), torch.randint(0, 50, (3, 20))
    y = model.context(ids[:, :8])[:, -1]
    found = cgt_specialized.losses(model, ids[:, 8:], y, batch=2)
    assert found.shape == (3, 11)
    with torch.no_grad():
        mean = model(ids[:, 8:], labels=ids[:, 8:], frozen_context=y).loss
    assert found.mean().item() == pytest.approx(mean.item(), rel=1e-5)
    torch.testing.assert_close(
        cgt_specialized.losses(model, ids[:, 8:], y, 1.0), cgt_specialized.losses(model, ids[:, 8:])
    )


def test_a_constant_is_learned_and_the_model_is_not():
    model, ids = make_cgt(), torch.randint(0, 50, (24, 10))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    start = torch.zeros(12)
    learned = cgt_specialized.learned_constant(model, ids, start, steps=20)
    losses = [cgt_specialized.losses(model, ids, y.expand(24, -1)).mean() for y in (start, learned)]
    assert losses[1] < losses[0]
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_dot_products_and_spectrum():
    y = torch.cat([torch.ones(2, 3, 1) * torch.tensor([1.0, 0.0]), torch.ones(2, 4, 1) * torch.tensor([0.0, 2.0])], 1)
    expected = np.kron(np.eye(2), np.ones((4, 4)))[1:, 1:]
    np.testing.assert_allclose(cgt_context.dot_products(y), expected)
    wave = torch.sin(2 * torch.pi * 3 * torch.arange(24) / 24)[None, :, None]
    spectrum = cgt_context.spectrum(5 + wave)
    assert spectrum.argmax() == 3
    assert spectrum[3] == pytest.approx(1.0)


def test_neighbours_and_their_chance(monkeypatch):
    close = torch.eye(3).repeat_interleave(10, 0) + 0.01 * torch.randn(30, 3)
    share, chance = cgt_context.neighbors(close, [index // 10 for index in range(30)])
    assert share == 1.0
    assert chance == pytest.approx(9 / 29)
    assert cgt_context.neighbors(close, [index % 3 for index in range(30)])[0] < 0.8  # a text is no neighbour of itself
    monkeypatch.setattr(cgt_context, "find_spec", lambda name: None)
    points, how = cgt_context.embedded(close)
    assert (tuple(points.shape), how) == ((30, 2), "PCA")
    apart = torch.cdist(points, points)
    assert apart[:10, :10].max() < apart[:10, 10:].min()


def test_token_shifts():
    model, ids = make_cgt(), torch.randint(0, 50, (2, 6))
    own, other = torch.randn(2, 12), torch.randn(12)
    shifts = cgt_specialized.token_shifts(model, ids, own, other, top=5)
    with torch.no_grad():
        before, after = (model(ids, frozen_context=y).logits for y in (own, other.expand(2, -1)))
    rise = (after - before).mean((0, 1))
    assert shifts[0][0] == int(rise.argmax())
    assert shifts[0][1] == pytest.approx((rise.max() - rise.mean()).item(), rel=1e-4)
    assert [value for _, value in shifts] == sorted((value for _, value in shifts), reverse=True)


def test_texts_of_two_sources_are_told_apart_in_the_analyses(tmp_path):
    for name, letters in (("one", "ab"), ("two", "yz")):
        (tmp_path / f"{name}.txt").write_text("\n\n".join([letters * 20] * 60))
    data = DataSettings(data=f"cgt-mixture:of={tmp_path}/one.txt+{tmp_path}/two.txt", validation_fraction=0.5)
    torch.manual_seed(0)
    model = make_cgt(vocab_size=258)
    ids = held_out_tokens(HeldOutText(data, 12, 24), byte_tokenizer())
    assert [bool((row == ord("a")).any()) for row in ids] == [True, False] * 6
    subject = Subject(model, ids, byte_tokenizer(), data=data, control=make_cgt(vocab_size=258))
    assert applying(model) == ["cgt_context", "cgt_specialized"]
    found = analyze(subject, tmp_path / "out")
    context, specialized = (found[name] for name in ("cgt_context", "cgt_specialized"))
    assert 0.9 < context["neighbours"] <= 1.0
    assert context["chance"] == pytest.approx(5 / 11)
    assert specialized["texts"] == 6
    assert len(specialized["less_computed"]) == 6
    assert set(specialized["shifts"]) == set(subject.sources)
    assert (tmp_path / "out" / "cgt_sources.svg").is_file()
    for module in (cgt_context, cgt_specialized):
        kinds = {
            type(block)
            for block in module.blocks(
                json.loads((tmp_path / "out" / f"{module.__name__.split('.')[-1]}.json").read_text())
            )
        }
        assert {Chart, Table} <= kinds


def test_analyze_finds_the_measures_of_a_task(tmp_path, capsys, regression_model):
    regression_model.save_pretrained(tmp_path / "model")
    asked = ["--data", "cgt-regression:inputs=3,outputs=2,pairs=7", "--sequences", "8", "--out", str(tmp_path / "look")]
    assert main(["analyze", str(tmp_path / "model"), *asked]) == 0
    numbers = json.loads((tmp_path / "look" / "cgt_regression.json").read_text())
    assert [len(values) for values in numbers["errors"].values()] == [7, 2]
    assert "frozen / computed" in capsys.readouterr().out


def test_measures_of_a_task_refuse_text():
    subject = Subject(make_cgt(vocab_size=16), torch.zeros(2, 8, dtype=torch.long))
    with pytest.raises(ValueError, match=r"needs samples of the task that the model knows: --data cgt-arithmetic"):
        cgt_arithmetic.run(subject)


def test_measuring_leaves_every_module_in_its_mode(samples):
    """Studies measure while they train: what was frozen in evaluation mode stays there, what trains goes on."""
    model = make_cgt(vocab_size=16, n_positions=samples.task.length).train()
    model.transformer.drop.eval()
    modes = [module.training for module in model.modules()]
    ids = samples.batch(range(2))["input_ids"]
    cgt_arithmetic.answer_accuracy(model, samples.task, ids)
    cgt_specialized.losses(model, ids)
    cgt_specialized.token_shifts(model, ids, torch.randn(2, 12), torch.randn(12), top=3)
    assert [module.training for module in model.modules()] == modes
