"""Synthetic tasks: the paper's text format, determinism, and mixtures."""

import math
import re

import numpy as np
import pytest
import torch

from cgt_study.tasks import ArithmeticTask, RegressionTask, TextMixture


def test_arithmetic_text_has_the_papers_format():
    task = ArithmeticTask(tasks=3, examples=4, digits=3, size=50)
    for index in range(50):
        text = task.text(index)
        assert len(text) == task.length == 3 * 4 * 15
        assert text.count("#") == 3
        for line, (a, b) in zip(text.rstrip("#").split("#"), task.coefficients(index)):
            examples = line.split("|")
            assert len(examples) == 4
            for example in examples:
                x, y, sign, c = re.fullmatch(r"(\d{3})\*(\d{3})=([+-])(\d{5})", example).groups()
                assert int(sign + c) == int(np.trunc(a * int(x) + b * int(y)))
        assert task.coefficients(index)[:, 0].min() >= 0
        assert np.abs(task.coefficients(index)[:, 1]).max() < 10


def test_arithmetic_cuts_as_the_papers_example_does():
    task = ArithmeticTask()
    assert task.example(12, 23, 35) == "012*023=+00035"
    assert task.example(12, 23, int(0.5 * 12 - 1.5 * 23)) == "012*023=-00028"
    printed = [int(answer) for answer in re.findall(r"=([+-]\d+)", task.text(0))]
    exact = [a * x + b * y for (a, b), pairs in zip(task.coefficients(0), task.numbers(0)) for x, y in pairs]
    assert printed == [math.trunc(value) for value in exact]
    assert any(value < 0 and value % 1 for value in exact)  # where the floor would be another


def test_arithmetic_masks():
    task = ArithmeticTask(tasks=2, examples=3, digits=2, size=5)
    ids = task[0]["input_ids"]
    assert task.decode(ids) == task.text(0)
    answers = task.decode(ids[task.answer_mask()])
    assert re.fullmatch(r"([+-]\d{4}){6}", answers)
    assert task.example_of().bincount().tolist() == [24, 24, 24]
    assert task.batch([0, 1, 2])["input_ids"].shape == (3, task.length)
    only = ArithmeticTask(tasks=2, examples=3, digits=2, size=5, answers_only=True)[0]["labels"]
    assert torch.equal(only != -100, task.answer_mask())
    assert torch.equal(only[only != -100], ids[task.answer_mask()])


def test_arithmetic_refuses_answers_that_do_not_fit():
    with pytest.raises(ValueError, match="digits"):
        ArithmeticTask(a_range=(0, 95), digits=2)


@pytest.mark.parametrize("make", [lambda **k: ArithmeticTask(size=9, **k), lambda **k: RegressionTask(size=9, **k)])
def test_items_depend_on_seed_split_and_index_alone(make):
    one, other = make(seed=3), make(seed=3)
    key = next(iter(one[0]))
    assert torch.equal(one[4][key], other[4][key])
    different = [make(seed=4)[4][key], make(seed=3, split="validation")[4][key], one[5][key]]
    assert not any(torch.equal(one[4][key], value) for value in different)
    with pytest.raises(IndexError):
        one[9]


def test_regression_interleaves_x_and_y():
    task = RegressionTask(inputs=5, outputs=2, pairs=7, noise=0.1, size=3)
    item, drawn = task[1], task.sample(1)
    assert item["vectors"].shape == (14, 7)
    torch.testing.assert_close(item["vectors"][0::2, :5], torch.from_numpy(drawn["x"]).float())
    torch.testing.assert_close(item["vectors"][1::2, 5:], torch.from_numpy(drawn["y"]).float())
    assert item["vectors"][0::2, 5:].abs().sum() == item["vectors"][1::2, :5].abs().sum() == 0
    torch.testing.assert_close(item["targets"][item["target_mask"]], item["vectors"][1::2, 5:])
    np.testing.assert_allclose(drawn["clean"], drawn["x"] @ drawn["u"].T + drawn["b"])
    assert np.std(drawn["y"] - drawn["clean"]) < 0.3


def test_regression_may_share_features():
    """Each of x and y from the first feature on, as vectors that are padded one by one."""
    task = RegressionTask(inputs=5, outputs=2, pairs=7, layout="shared", size=3)
    item, drawn = task[1], task.sample(1)
    assert item["vectors"].shape == (14, 5)
    torch.testing.assert_close(item["vectors"][0::2], torch.from_numpy(drawn["x"]).float())
    torch.testing.assert_close(item["vectors"][1::2, :2], torch.from_numpy(drawn["y"]).float())
    assert item["vectors"][1::2, 2:].abs().sum() == 0
    with pytest.raises(ValueError, match="layout"):
        RegressionTask(layout="stacked")


def test_mixture_joins_two_documents():
    documents = [np.full(40, 1), np.full(50, 2), np.full(5, 3), np.full(60, 4)]
    task = TextMixture(documents, length=32, start=10, finish=20, size=200)
    cuts = set()
    for index in range(200):
        ids, cut, sources = task.sample(index)
        assert len(ids) == 32
        assert ids[:cut].unique().tolist() == [documents[sources[0]][0]]
        assert ids[cut:].unique().tolist() == [documents[sources[1]][0]]
        assert 2 not in sources
        cuts.add(cut)
    assert cuts == set(range(10, 21))
    single = TextMixture(documents, length=32, start=10, finish=20, mixed=False)
    assert len(single[0]["input_ids"].unique()) == 1
    with pytest.raises(ValueError, match="two documents"):
        TextMixture(documents[:1], length=32, start=10, finish=20)
