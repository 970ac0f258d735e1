"""Synthetic tasks: the paper's text format, determinism, mixtures, and tasks as data of a run."""

import math
import re

import numpy as np
import pytest
import torch

import relinear
from relinear.data import DataSettings, iter_texts, prepare_data
from relinear.data.tasks import ArithmeticTask, MixtureTask, RegressionTask, Samples, TokenisedMixture, task_of
from relinear.data.tokenizers import encode
from relinear.training import train


def test_arithmetic_text_has_the_papers_format():
    task = ArithmeticTask(tasks=3)
    samples = Samples(task, 50)
    for index in range(50):
        drawn = samples.draw(index)
        text = task.text(drawn)
        assert len(text) == task.length == 3 * 4 * 15
        assert text.count("#") == 3
        for line, (a, b) in zip(text.rstrip("#").split("#"), drawn["coefficients"]):
            examples = line.split("|")
            assert len(examples) == 4
            for example in examples:
                x, y, sign, c = re.fullmatch(r"(\d{3})\*(\d{3})=([+-])(\d{5})", example).groups()
                assert int(sign + c) == int(np.trunc(a * int(x) + b * int(y)))
        assert drawn["coefficients"][:, 0].min() >= 0
        assert np.abs(drawn["coefficients"][:, 1]).max() < 10


def test_arithmetic_cuts_as_the_papers_example_does():
    task = ArithmeticTask()
    assert task.example(12, 23, 35) == "012*023=+00035"
    assert task.example(12, 23, int(0.5 * 12 - 1.5 * 23)) == "012*023=-00028"
    drawn = Samples(task).draw(0)
    printed = [int(answer) for answer in re.findall(r"=([+-]\d+)", task.text(drawn))]
    exact = [a * x + b * y for (a, b), pairs in zip(drawn["coefficients"], drawn["numbers"]) for x, y in pairs]
    assert printed == [math.trunc(value) for value in exact]
    assert any(value < 0 and value % 1 for value in exact)  # where the floor would be another


def test_arithmetic_masks():
    task = ArithmeticTask(tasks=2, examples=3, digits=2)
    samples = Samples(task, 5)
    ids = samples[0]["input_ids"]
    text = task.text(samples.draw(0))
    answers = "".join(np.array(list(text))[task.answer_mask().numpy()])
    assert re.fullmatch(r"([+-]\d{4}){6}", answers)
    assert task.example_numbers().bincount().tolist() == [24, 24, 24]
    assert samples.batch([0, 1, 2])["input_ids"].shape == (3, task.length)
    only = Samples(task.replace(answers_only=True))[0]["labels"]
    assert torch.equal(only != -100, task.answer_mask())
    assert torch.equal(only[only != -100], ids[task.answer_mask()])


@pytest.mark.parametrize("task", [ArithmeticTask(), RegressionTask()])
def test_items_depend_on_seed_split_and_index_alone(task):
    one, other = Samples(task, 9, seed=3), Samples(task, 9, seed=3)
    key = next(iter(one[0]))
    assert torch.equal(one[4][key], other[4][key])
    different = [Samples(task, 9, seed=4)[4][key], Samples(task, 9, seed=3, split="validation")[4][key], one[5][key]]
    assert not any(torch.equal(one[4][key], value) for value in different)
    assert one.checksum == other.checksum != Samples(task, 9, seed=4).checksum
    with pytest.raises(IndexError):
        one[9]


def test_regression_interleaves_x_and_y():
    samples = Samples(RegressionTask(inputs=5, outputs=2, pairs=7, layout="separate"))
    item, drawn = samples[1], samples.draw(1)
    assert item["vectors"].shape == (14, 7)
    torch.testing.assert_close(item["vectors"][0::2, :5], torch.from_numpy(drawn["x"]).float())
    torch.testing.assert_close(item["vectors"][1::2, 5:], torch.from_numpy(drawn["y"]).float())
    assert item["vectors"][0::2, 5:].abs().sum() == item["vectors"][1::2, :5].abs().sum() == 0
    torch.testing.assert_close(item["targets"][item["target_mask"]], item["vectors"][1::2, 5:])
    np.testing.assert_allclose(drawn["clean"], drawn["x"] @ drawn["u"].T + drawn["b"])
    assert np.std(drawn["y"] - drawn["clean"]) < 0.3


def test_regression_may_share_features():
    """Each of x and y from the first feature on, as vectors that are padded one by one."""
    samples = Samples(RegressionTask(inputs=5, outputs=2, pairs=7))
    item, drawn = samples[1], samples.draw(1)
    assert item["vectors"].shape == (14, 5)
    torch.testing.assert_close(item["vectors"][0::2], torch.from_numpy(drawn["x"]).float())
    torch.testing.assert_close(item["vectors"][1::2, :2], torch.from_numpy(drawn["y"]).float())
    assert item["vectors"][1::2, 2:].abs().sum() == 0


def test_mixture_joins_two_documents():
    documents = [np.full(40, 1), np.full(50, 2), np.full(5, 3), np.full(60, 4)]
    task = MixtureTask(start=0.3, finish=0.6)
    samples = Samples(TokenisedMixture(task, 32, (tuple(documents),)))
    cuts = set()
    for index in range(200):
        drawn = samples.draw(index)
        ids, cut = drawn["ids"], drawn["boundary"]
        assert len(ids) == 32
        parts = set(ids[:cut]), set(ids[cut:])
        assert [len(part) for part in parts] == [1, 1]
        assert not parts[0] & parts[1]
        assert 3 not in parts[0] | parts[1]  # too short
        cuts.add(cut)
    assert cuts == set(range(10, 20))
    assert (
        len(Samples(TokenisedMixture(task.replace(single=True), 32, (tuple(documents),)))[0]["input_ids"].unique()) == 1
    )
    both = Samples(TokenisedMixture(task, 32, (tuple(documents[:2]), tuple(documents[3:]))))
    share = np.mean([4 in both.draw(index)["ids"][:5] for index in range(400)])
    assert 0.4 < share < 0.6  # a source of one document is as often drawn as one of two
    with pytest.raises(ValueError, match="two documents"):
        TokenisedMixture(task, 32, (tuple(documents[:1]),))


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ("cgt-arithmetics", "unknown task 'cgt-arithmetics'; did you mean 'cgt-arithmetic'"),
        ("cgt-arithmetic:digit=2", "unknown setting 'digit'; did you mean 'digits'"),
        ("cgt-arithmetic:a=3", "a must be a list, got 3"),
        ("cgt-arithmetic:a=[5,-5]", "a: give the lower number first"),
        ("cgt-arithmetic:digits=2,a=[0,95]", "answers of more than 4 digits"),
        ("cgt-regression:layout=stacked", "layout must be one of 'shared' or 'separate'"),
        ("cgt-mixture:start=0.9", "must satisfy 0 < start"),
    ],
)
def test_what_is_no_task_is_refused(data, said):
    with pytest.raises(ValueError, match=said):
        DataSettings.load({"data": data})


def test_a_task_decides_tokenizer_and_length():
    settings = DataSettings(data="cgt-arithmetic:digits=1")
    assert (settings.tokenizer, settings.sequence_length) == ("symbols", 4 * 4 * 9)
    assert settings.replace(seed=1).sequence_length == 144
    with pytest.raises(ValueError, match="tokenizer is 'symbols' for this task, got 'bytes'; omit it"):
        DataSettings.load({"data": "cgt-arithmetic", "tokenizer": "bytes"})
    assert task_of("stdlib") is None


def test_arithmetic_is_text_of_its_tokenizer():
    settings = DataSettings(data="cgt-arithmetic:tasks=2", max_validation_tokens=700)
    data = prepare_data(settings)
    text = next(iter_texts(settings, "validation"))
    ids = data.validation[0]["input_ids"]
    assert encode(data.tokenizer, [text])[0] == ids.tolist()
    assert data.tokenizer.decode(ids) == text
    assert (data.vocab_size, len(data.validation)) == (16, 5)


def test_mixtures_are_of_the_sources_documents(tmp_path):
    for name, letter in (("one", "a"), ("two", "b")):
        (tmp_path / f"{name}.txt").write_text("\n\n".join([letter * 30] * 40))
    data = f"cgt-mixture:of={tmp_path}/one.txt+{tmp_path}/two.txt"
    settings = {"data": data, "sequence_length": 32, "max_validation_tokens": 64, "cache_dir": tmp_path / "cache"}
    prepared = prepare_data(settings)
    assert {
        len(set("ab") & set(prepared.tokenizer.decode(item["input_ids"])))
        for item in map(prepared.train.__getitem__, range(8))
    } == {2}
    assert "a" in next(iter_texts(DataSettings(**settings), "validation"))
    with pytest.raises(ValueError, match="trained on one corpus"):
        prepare_data(settings | {"tokenizer": "bpe:300"})


TINY = {"n_layer": 2, "n_embd": 16, "n_head": 2, "context_layer": 1, "context_size": 8, "context_heads": 2}
RUNS = {
    "cgt-arithmetic": ("cgt-arithmetic:tasks=1,digits=1,answers_only=true", {}),
    "cgt-regression": ("cgt-regression:inputs=2,pairs=6", {"input_features": 2}),
}


@pytest.mark.parametrize("model", RUNS)
def test_a_run_trains_on_a_task_and_is_found_again(model, tmp_path):
    data, sizes = RUNS[model]
    settings = {
        "model": model,
        "model_overrides": TINY | sizes,
        "objective": "cgt:eta=0.5",
        "data": {"data": data, "max_validation_tokens": 120},
        **{"steps": 3, "batch_size": 4, "warmup_steps": 1, "dtype": "float32"},
    }
    result = train(settings, tmp_path)
    assert math.isfinite(result.validation_loss)
    assert result.tokens_per_second > 0
    assert type(relinear.from_pretrained(tmp_path / "model")).__name__.startswith("CGTFor")
    other = "cgt-regression" if model == "cgt-arithmetic" else "cgt-arithmetic"
    with pytest.raises(ValueError, match=r"are (tokens|vectors), but model=.* reads (vectors|tokens)"):
        train(settings | {"data": {"data": RUNS[other][0]}}, tmp_path / "other")


def test_t_at_the_identity_is_gpt2():
    """With its x stream's weights, whatever y is."""
    torch.manual_seed(0)
    model = relinear.from_preset("cgt-arithmetic", **TINY, modulated=False).eval()
    gpt2 = relinear.from_preset("gpt2-cgt", **{key: TINY[key] for key in ("n_layer", "n_embd", "n_head")}).eval()
    gpt2.load_state_dict({key: value for key, value in model.state_dict().items() if "context" not in key})
    ids = torch.randint(16, (2, 12))
    torch.testing.assert_close(model(ids).logits, gpt2(ids).logits)
    torch.testing.assert_close(relinear.specialize(model, ids[0])(ids).logits, gpt2(ids).logits)
