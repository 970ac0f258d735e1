"""Budgets of compression: parameters, bytes and FLOPs; reports."""

import json
import re

import pytest
import torch

import relinear
from compress_helpers import modules, tiny, tokens
from relinear.compression import CompressSettings, compress
from relinear.compression.budget import Budget
from relinear.compression.report import write_page
from relinear.contract.operator import is_replaceable

SETTINGS = {"tokens": 512, "sequence_length": 16, "batch_size": 4, "candidates": ("low_rank",)}
SETTINGS |= {"evaluate": False, "self_sampled": False}
LOW = relinear.LowRank


@pytest.mark.parametrize("keep", [0.5, 0.8])
def test_budgets_are_met_and_spent(keep: float, tmp_path) -> None:
    model = tiny()

    def cost() -> float:
        return sum(p.numel() for m in modules(model).values() for p in m.parameters())

    before = cost()
    report = compress(model, tokens(), keep=keep, settings=SETTINGS, out_dir=tmp_path)
    assert 0.97 * keep * before < cost() <= keep * before
    assert json.loads((tmp_path / "report.json").read_text())["budget"]["unit"] == report.budget.unit


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"keep": 0.01}, r"keep=0.01 cannot be met: the smallest .* is keep=0\.\d+; ask for that"),
        ({"keep": 0.5, "bits": 4}, "keep and bits are 2 budgets"),
        (
            {"bits": 4, "candidates": ("low_rank:rank=1",)},
            r"LowRank\(rank=1\) stores floats.*give candidates=quantized",
        ),
        (
            {"keep": 0.5, "candidates": ("quantized",)},
            r"Quantized\(.*\) stores integers, but keep counts parameters",
        ),
        ({"keep": 0.5, "candidates": ("neurons",)}, "neurons"),
        (
            {"keep": 0.5, "candidates": ("monarch:blocks=40",)},
            r"Monarch\(blocks=40\) fits none of the layers.*\(32, 16\)",
        ),
        ({"keep": 0.5, "candidates": ("hdpl:rank=2,blocks=2",)}, "only operators with a dense matrix"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_computed(settings, message, tmp_path) -> None:
    model, phases = tiny(), []
    with pytest.raises(ValueError, match=message):
        compress(
            model,
            tokens(),
            settings=SETTINGS | settings,
            out_dir=tmp_path / "out",
            on_progress=lambda progress: phases.append(progress.stage),
        )
    assert not phases
    assert not (tmp_path / "out" / "calibration").exists()


def test_texts_to_judge_on_are_checked_before_anything_is_computed(tmp_path) -> None:
    def start(out, ids, **more):
        compress(tiny(), tokens(), keep=0.8, settings=SETTINGS | more, out_dir=out, evaluate_on={"far": [ids]})

    with pytest.raises(ValueError, match="evaluate_on, far: the corpus has 3 tokens"):
        start(tmp_path / "a", torch.arange(3), evaluate=True)
    with pytest.raises(ValueError, match="evaluate=False leaves that out"):
        start(tmp_path / "b", torch.arange(40))
    assert not list(tmp_path.rglob("calibration"))


def test_directories_of_other_work_are_refused(tmp_path) -> None:
    (tmp_path / "plan.json").write_text("{}")
    with pytest.raises(ValueError, match=r"has plan.json, and no record \(compress.json\) of relinear's compress"):
        compress(tiny(), tokens(), settings=SETTINGS, out_dir=tmp_path)
    with pytest.raises(ValueError, match="is a file"):
        compress(tiny(), tokens(), settings=SETTINGS, out_dir=tmp_path / "plan.json")


def test_an_operator_is_offered_to_the_layers_that_it_fits(tmp_path) -> None:
    settings = SETTINGS | {"candidates": ("monarch:blocks=20", "low_rank:rank=1")}
    asked = {"targets": r".*\.[qk]_proj", "settings": settings, "out_dir": tmp_path}
    plan = compress(tiny(), tokens(), keep=0.5, plan_only=True, **asked).plan
    kinds = {name: type(layer.operator) for name, layer in plan.layers.items() if ".k_proj" in name}
    assert set(kinds.values()) <= {LOW, type(None)}


# Beside the original


def evaluated(tmp_path, count: int = 1024, **more):
    model = tiny()
    settings = SETTINGS | {"evaluate": True, "evaluation_tokens": 64} | more
    others = {"<other>": [torch.arange(40) % 50]}
    report = compress(model, tokens(count), keep=0.5, settings=settings, out_dir=tmp_path, evaluate_on=others)
    return model, report


@pytest.fixture(scope="module")
def judged(tmp_path_factory):
    """A compressed model, its report and where they are."""
    folder = tmp_path_factory.mktemp("judged")
    return *evaluated(folder), folder


def test_the_report_holds_what_was_measured(judged) -> None:
    original = tiny()
    model, report, folder = judged
    found = json.loads((folder / "report.json").read_text())["evaluation"]
    assert found == report.evaluation
    assert len(report.corpus.evaluation_excerpts) == 4
    assert not {e.start for e in report.corpus.evaluation_excerpts} & {e.start for e in report.corpus.excerpts}
    blocks = torch.stack([tokens(1024)[0][e.start : e.start + 16] for e in report.corpus.evaluation_excerpts])
    with torch.no_grad():
        wanted, got = (m(input_ids=blocks).logits[:, :-1] for m in (original, model))
    losses = [float(torch.nn.functional.cross_entropy(x.flatten(0, 1), blocks[:, 1:].flatten())) for x in (wanted, got)]
    assert [found["loss_before"], found["loss"]] == pytest.approx(losses, abs=1e-4)
    assert found["nats"] == pytest.approx(losses[1] - losses[0], abs=2e-4)
    assert found["agreement"] == pytest.approx(float((wanted.argmax(-1) == got.argmax(-1)).float().mean()))
    other = torch.arange(32).view(2, 16)
    with torch.no_grad():
        losses = [m(input_ids=other, labels=other).loss for m in (original, model)]
    assert found["elsewhere"]["<other>"]["nats"] == pytest.approx(float(losses[1] - losses[0]), abs=2e-4)
    assert found["elsewhere"]["<other>"]["tokens"] == 30
    assert found["unseen"]
    assert found["tokens"] == 60
    assert report.peak_memory_bytes > 0
    for part in ("unseen text of the corpus", "next token as the original's", "<other>"):
        assert part in str(report)


def test_a_corpus_without_a_rest_is_judged_on_what_was_seen_and_says_so(tmp_path) -> None:
    _, report = evaluated(tmp_path, 512)
    assert report.evaluation["unseen"] is False
    assert "text of the calibration" in str(report)
    assert "the true loss is higher" in (tmp_path / "report.html").read_text()


# The page


def test_the_page_shows_the_plan_and_is_safe(judged, tmp_path) -> None:
    _, report, folder = judged
    page = (folder / "report.html").read_text()
    for name, layer in report.plan.layers.items():
        assert f"<tr><td>{name}</td><td>{layer.operator or 'dense'}</td>" in page
    assert not re.search(r"""(?:src|href)="(?!data:)|@import|url\(""", page)  # nothing is fetched
    values = report.to_dict()
    values["model"] = "<script>alert(1)</script>"
    write_page(tmp_path / "again.html", values)
    again = (tmp_path / "again.html").read_text()
    assert "<script>alert" not in again
    assert "<other>" not in again
    assert "on &lt;other&gt;: perplexity" in again
    assert again.count("&lt;script&gt;") == 2


def test_the_page_of_a_plan_alone(tmp_path) -> None:
    report = compress(tiny(), tokens(), keep=0.8, settings=SETTINGS, out_dir=tmp_path / "a", plan_only=True)
    assert "The model was not evaluated" in (tmp_path / "a" / "report.html").read_text()
    assert isinstance(report.budget, Budget)


def test_every_operator_names_sizes_that_fit() -> None:
    assert LOW(rank=1).candidates(64, 32)[-1].rank * 96 < 64 * 32
    assert relinear.Monarch(blocks=20).candidates(32, 16) == []
    assert [c.rank for c in relinear.PivotedLowRank(rank=1).candidates(64, 32)][-1] == 30
    assert relinear.Monarch(blocks=4).candidates(32, 16) == [relinear.Monarch(blocks=4)]
    assert is_replaceable(LOW(rank=1).candidates(4096, 4096)[0].build(4096, 4096, device="meta"))


def test_the_candidates_are_read_under_the_key_of_0_2() -> None:
    with pytest.warns(DeprecationWarning, match="menu has a new name: candidates"):
        settings = CompressSettings.load({"menu": ["low_rank"], "bits": 4})
    assert settings.candidates == ("low_rank",)
    with pytest.raises(ValueError, match="unknown setting 'menu'"):
        CompressSettings.load({"menu": ["low_rank"], "candidates": ["low_rank"]})
