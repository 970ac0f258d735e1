"""What compression goes by: excerpts that are spread, statistics that are whole, intervals, remarks."""

import random
import shutil

import pytest
import torch

import relinear
from compress_helpers import SETTINGS, calibrate, moments_of, tiny, tokens
from conftest import mostly_slow
from relinear.compression import CompressSettings, compress
from relinear.compression.corpus import read_corpus, read_elsewhere, with_sampled_text
from relinear.compression.evaluation import Predictions
from relinear.data.tokenizers import byte_tokenizer
from relinear.distill.record import token_blocks
from relinear.system.confidence import t_quantile
from tiny_models import starting_tokenizer

SHORT = CompressSettings(tokens=128, sequence_length=16, evaluation_tokens=96)


def texts(count: int, words: int = 400) -> list[str]:
    return [" ".join(f"{chr(97 + document % 26)}{word}" for word in range(words)) for document in range(count)]


def read(data, **more):
    return read_corpus(data, byte_tokenizer(), SHORT.replace(**more), False)


def test_excerpts_are_spread_over_documents_and_others_judge() -> None:
    found = read(texts(40))
    assert found.unseen
    assert len({e.document for e in found.excerpts}) == len(found.excerpts) == 8
    assert len({e.document for e in found.evaluation_excerpts}) == len(found.evaluation_excerpts) == 6
    assert not {e.document for e in found.evaluation_excerpts} & {e.document for e in found.excerpts}
    assert any(e.start for e in found.excerpts), "not the beginnings alone"
    words = byte_tokenizer().decode(found.blocks[0].tolist()).split()
    assert all(word[0] == chr(97 + found.excerpts[0].document % 26) for word in words[1:-1])


@pytest.mark.parametrize("data", [texts(40), texts(1, 300), texts(200, 3)])
def test_windows_begin_as_the_tokenizer_says(data) -> None:
    found = read_corpus(data, starting_tokenizer(), SHORT, False)
    for blocks in (found.blocks, found.evaluation, read_elsewhere({"far": data}, starting_tokenizer(), SHORT)["far"]):
        assert (blocks[:, 0] == 257).all()
        assert (blocks[:, 1:] != 257).all()
    assert (token_blocks(data, starting_tokenizer(), 16, 4)[:, 0] == 257).all()
    ids = [torch.arange(40) for _ in range(20)]  # token ids are their owner's
    assert 257 not in read_corpus(ids, starting_tokenizer(), SHORT, False).blocks
    assert 257 not in token_blocks(ids, starting_tokenizer(), 16, 4)


def test_excerpts_are_the_same_however_much_else_is_asked_for() -> None:
    found = read(texts(400))
    for more in ({"heal_tokens": 256}, {"evaluation_tokens": 160}):
        assert torch.equal(found.blocks, read(texts(400), **more).blocks)
    assert not torch.equal(found.blocks, read(texts(400), seed=1).blocks)
    healing = read(texts(400), heal_tokens=256).healing
    assert len(healing) == 16
    assert not {tuple(b) for b in healing.tolist()} & {tuple(b) for b in found.blocks.tolist()}


def test_one_document_is_spread_over_and_judged_on_its_other_half() -> None:
    found = read(texts(1, 4000))
    starts = [e.start for e in found.excerpts]
    assert found.unseen
    assert max(starts) - min(starts) > 16 * 8 * 20
    assert max(starts) < min(e.start for e in found.evaluation_excerpts)
    assert "evaluated on 6 windows of 1 document; intervals need 30 windows of 6 documents" in " ".join(found.remarks)
    elsewhere = read_elsewhere({"far": texts(9)}, byte_tokenizer(), SHORT)["far"]
    assert elsewhere.shape == (6, 16)


def test_short_documents_are_joined_and_a_corpus_without_a_rest_is_used_in_order() -> None:
    found = read(["ab cd ef"] * 200)
    assert found.blocks.shape == (8, 16)
    assert found.unseen
    whole = torch.arange(128)
    assert torch.equal(read([whole]).blocks.flatten(), whole)
    assert not read([whole]).unseen


def test_each_kind_of_text_has_moments_of_its_own(tmp_path) -> None:
    blocks, kinds = tokens(160)[0].view(10, 16), [0, 1] * 5
    both = moments_of(calibrate(tiny(), blocks, tmp_path / "both", kinds=kinds))
    alone = [moments_of(calibrate(tiny(), blocks[kind::2], tmp_path / str(kind))) for kind in (0, 1)]
    for name, found in both.items():
        assert len(found.input_moments_by_text) == 2
        for own, one in zip(found.input_moments_by_text, alone, strict=True):
            torch.testing.assert_close(own, one[name].input_moment, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(found.input_moment, sum(found.input_moments_by_text) / 2)
    mixed = read({"a": texts(40), "b": texts(40)})
    assert sorted(mixed.kinds) == [0] * 4 + [1] * 4
    assert "one kind of text" not in " ".join(mixed.remarks)
    assert "calibrated on one kind of text" in " ".join(read(texts(40)).remarks)


def test_text_of_one_kind_is_mixed_with_text_that_the_model_samples(tmp_path, monkeypatch) -> None:
    model, corpus = tiny(), read([tokens(256)[0]])
    mixed = with_sampled_text(corpus, model, tmp_path, seed=0)
    assert torch.equal(mixed.blocks[::2], corpus.blocks[::2])
    assert torch.equal(mixed.blocks[1::2, 0], corpus.blocks[1::2, 0])
    assert not torch.equal(mixed.blocks[1::2, 1:], corpus.blocks[1::2, 1:])
    assert mixed.kinds == [0, 1] * 4
    assert "calibrated on one kind of text" in " ".join(mixed.remarks)
    monkeypatch.setattr(model, "generate", None)  # what was written is kept
    again = with_sampled_text(corpus, model, tmp_path, seed=0)
    assert torch.equal(again.blocks, mixed.blocks)


@pytest.mark.parametrize("times", mostly_slow([20, 60], 20))
def test_statistics_that_have_changed_are_refused(times: int, tmp_path) -> None:
    blocks, good, bad = tokens(128)[0].view(8, 16), tmp_path / "good", tmp_path / "bad"

    def made(statistics):
        return {name: s.input_moment.clone() for name, s in statistics.items()}

    def killed(statistics):
        if "model.layers.1.mlp.up_proj" in statistics:
            raise KeyboardInterrupt
        return made(statistics)

    def told(folder) -> dict[str, torch.Tensor]:
        return calibrate(tiny(), blocks, folder).map_layers("fit", "all", made)

    with pytest.raises(KeyboardInterrupt):
        calibrate(tiny(), blocks, good).map_layers("fit", "all", killed)
    wanted = told(tmp_path / "whole")
    files = [path.relative_to(good) for path in sorted(good.rglob("*")) if path.is_file()]
    rng, refused = random.Random(0), 0
    for number in range(times):
        shutil.copytree(good, bad)
        path = bad / rng.choice(files)
        values = bytearray(path.read_bytes())
        match number % 5:
            case 0:
                path.write_bytes(values[: rng.randrange(len(values))])
            case 1:
                path.write_bytes(bytes(len(values)))
            case 2 if number % 2:
                path.unlink()
            case _:
                place = rng.randrange(len(values) if number % 2 else min(len(values), 300))
                values[place] ^= 1 << rng.randrange(8)
                path.write_bytes(values)
        try:
            found = told(bad)
        except ValueError as error:
            refused += 1
            said = str(error)
            assert str(bad) in said
        else:  # a flip in what says nothing, or in what is made anew
            assert all(torch.equal(found[name], value) for name, value in wanted.items()), (number, path)
        shutil.rmtree(bad)
    assert refused >= times // 3


@pytest.mark.parametrize("layer", [2, 1, 0])
def test_killed_while_a_layer_is_fitted_it_goes_on_with_that_layer(layer: int, tmp_path) -> None:
    blocks, made = tokens(128)[0].view(8, 16), list[str]()

    def make(statistics):
        made.append(next(iter(statistics)).split(".")[2])
        if made == [str(index) for index in (2, 1, 0) if index >= layer]:
            raise KeyboardInterrupt
        return {name: s.input_moment.clone() for name, s in statistics.items()}

    with pytest.raises(KeyboardInterrupt):
        calibrate(tiny(), blocks, tmp_path / "killed").map_layers("fit", "all", make)
    found = calibrate(tiny(), blocks, tmp_path / "killed").map_layers("fit", "all", make)
    assert made == [str(index) for index in (2, 1, 0) for _ in range(1 + (index == layer))]
    whole = calibrate(tiny(), blocks, tmp_path / "whole").map_layers("fit", "all", make)
    assert all(torch.equal(found[name], value) for name, value in whole.items())


def test_a_killed_calibration_without_its_fingerprint_is_refused(tmp_path) -> None:
    def die(phase: str, done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        moments_of(calibrate(tiny(), tokens(128)[0].view(8, 16), tmp_path, on_stage=die))
    (tmp_path / "fingerprint.json").unlink()
    with pytest.raises(ValueError, match=r"fingerprint\.json is missing"):
        calibrate(tiny(), tokens(128)[0].view(8, 16), tmp_path)


@pytest.mark.parametrize("times", mostly_slow([1, 4], 1))
def test_what_a_run_keeps_is_refused_or_made_anew_where_it_is_damaged(times: int, tmp_path) -> None:
    settings = SETTINGS | {"bits": 4.25, "heal_tokens": 128}
    good, bad, asked = tmp_path / "good", tmp_path / "bad", {"settings": settings, "targets": "down_proj"}

    def result(folder) -> tuple[tuple, dict]:
        model = tiny()
        report = compress(model, tokens(1024), out_dir=folder, **asked)
        told = report.plan.rows, report.healing
        return told, {name: value.clone() for name, value in model.state_dict().items()}

    told, values = result(good)
    shutil.rmtree(good / "model")  # what is asked about is all that a run goes on from
    files = sorted(path.relative_to(good) for path in good.rglob("*") if path.is_file() and path.parent != good)
    (healed,) = (path for path in files if path.name == "healed.safetensors")
    assert "loss.json" in {path.name for path in files}
    rng = random.Random(0)
    for number, file in enumerate(rng.sample(files * 3, 5 * times) + times * [healed]):
        shutil.copytree(good, bad)
        content = bytearray((bad / file).read_bytes())
        if number % 3 == 0:
            content = content[: rng.randrange(len(content))]
        else:
            content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        (bad / file).write_bytes(content)
        try:
            again, there = result(bad)
        except ValueError as error:
            said = str(error)
            assert str(bad) in said
        else:
            assert again == told, file
            assert all(torch.equal(there[name], value) for name, value in values.items()), file
        shutil.rmtree(bad)


def test_intervals_are_student_s() -> None:
    # table of the distribution, two-sided 95 %
    for freedom, wanted in {1: 12.706, 2: 4.303, 3: 3.182, 5: 2.571, 9: 2.262, 29: 2.045, 200: 1.972}.items():
        assert t_quantile(freedom) == pytest.approx(wanted, abs=5e-4)
    before, after = torch.tensor([3.0, 2.0, 1.0, 2.0]).double(), torch.tensor([3.2, 2.1, 1.4, 2.1]).double()
    likeliest = torch.zeros(4, 3)
    found = Predictions(after, likeliest).compared_with(Predictions(before, likeliest))
    assert found["nats"] == pytest.approx(0.2)
    assert found["interval"] == pytest.approx(3.18245 * (0.06 / 3) ** 0.5 / 2, rel=1e-5)  # squares of -0, 0.1, 0.2, 0.1
    assert (
        Predictions(after[:1], likeliest[:1]).compared_with(Predictions(before[:1], likeliest[:1]))["interval"] is None
    )


def test_a_model_that_is_compressed_already_is_refused(tmp_path) -> None:
    model = tiny()
    relinear.replace_(model, {"all-linear": relinear.LowRank(rank=2)})
    with pytest.raises(ValueError, match="are operators already, as after a compression"):
        compress(model, tokens(), keep=0.8, settings=SETTINGS)


def test_errors_of_sizes_are_found_once_a_directory(tmp_path, monkeypatch) -> None:
    asked: list[str] = []
    curve = relinear.LowRank.candidate_errors

    def counted(self, linear, moments, configs):
        asked.append(str(self))
        return curve(self, linear, moments, configs)

    monkeypatch.setattr(relinear.LowRank, "candidate_errors", counted)
    settings = SETTINGS | {"candidates": ("low_rank",)}
    first = compress(tiny(), tokens(), keep=0.6, settings=settings, out_dir=tmp_path, plan_only=True)
    assert len(asked) == 21
    again = compress(tiny(), tokens(), keep=0.6, settings=settings, out_dir=tmp_path, plan_only=True)
    other = compress(tiny(), tokens(), keep=0.7, settings=settings, out_dir=tmp_path, plan_only=True)
    assert len(asked) == 21
    assert again.plan == first.plan
    assert other.plan.nats < first.plan.nats
