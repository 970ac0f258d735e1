"""Budgets of compression: parameters, bytes and FLOPs; reports."""

import json
import re
from importlib import import_module

import pytest
import torch

import relinear
from compress_helpers import modules, tiny, tokens
from relinear.compression import CompressSettings, compress
from relinear.compression.budget import Budget
from relinear.compression.evaluation import like_before, measure_speed, observe
from relinear.compression.report import write_page
from relinear.contract.operator import Operator, is_linear, linear_features

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
        ({"keep": 0.01}, r"keep=0.01 cannot be met: of 27,648 parameters"),
        ({"keep": 0.5, "bits": 4}, "keep and bits are 2 budgets"),
        (
            {"bits": 4, "candidates": ("low_rank:rank=1",)},
            r"LowRank\(rank=1\) stores no integers.*give candidates=quantized",
        ),
        (
            {"keep": 0.5, "candidates": ("quantized",)},
            r"Quantized\(.*\) stores integers, which a count of parameters leaves out",
        ),
        ({"keep": 0.5, "candidates": ("neurons",)}, "neurons"),
        (
            {"keep": 0.5, "candidates": ("monarch:blocks=40",)},
            r"Monarch\(blocks=40\) fits none of the layers.*\(32, 16\)",
        ),
        ({"keep": 0.5, "candidates": ("hdpl:rank=2,blocks=2",)}, "candidates: .*only operators with a dense matrix"),
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
    plan = compress(tiny(), tokens(), keep=0.5, settings=settings, out_dir=tmp_path, plan_only=True).plan
    kinds = {name: type(layer.operator) for name, layer in plan.layers.items() if ".k_proj" in name}
    assert set(kinds.values()) <= {LOW, type(None)}


# Beside the original


def evaluated(tmp_path, count: int = 1024, **more):
    model = tiny()
    settings = SETTINGS | {"evaluate": True, "evaluation_tokens": 64} | more
    others = {"<other>": [torch.arange(40) % 50]}
    report = compress(model, tokens(count), keep=0.5, settings=settings, out_dir=tmp_path, evaluate_on=others)
    return model, report


def test_the_report_holds_what_was_measured(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(import_module("relinear.compression.evaluation"), "SPEED_SECONDS", 0.1)
    original = tiny()
    model, report = evaluated(tmp_path)
    found = json.loads((tmp_path / "report.json").read_text())["evaluation"]
    assert found == report.evaluation
    assert len(report.corpus.judged) == 4
    assert not {e.start for e in report.corpus.judged} & {e.start for e in report.corpus.excerpts}
    blocks = torch.stack([tokens(1024)[0][e.start : e.start + 16] for e in report.corpus.judged])
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
    for what in ("prefill", "decode"):
        assert found["speed"][what]["ratio_low"] <= found["speed"][what]["ratio"] <= found["speed"][what]["ratio_high"]
        assert found["speed"][what]["compressed_tokens_per_second"] > 0
    assert report.peak_memory_bytes > 0
    for part in ("tokens that calibration has not seen", "next token as the original's", "times the original's speed"):
        assert part in str(report)


def test_a_corpus_without_a_rest_is_judged_on_what_was_seen_and_says_so(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(import_module("relinear.compression.evaluation"), "SPEED_SECONDS", 0.1)
    _, report = evaluated(tmp_path, 512)
    assert report.evaluation["unseen"] is False
    assert "tokens of the calibration" in str(report)
    assert "they flatter" in (tmp_path / "report.html").read_text()


class Words:
    """A tokenizer of numbers, with an end and a chat."""

    eos_token_id = 7
    chat_template = None

    def __call__(self, text, **kwargs):
        if isinstance(text, list):
            return {"input_ids": [self(one)["input_ids"] for one in text]}
        return {"input_ids": [int(word) for word in text.split() if word.isdigit()]}

    def decode(self, ids, skip_special_tokens=True):
        return " ".join(map(str, ids))

    def apply_chat_template(self, turns, **kwargs):
        return f"1 {turns[0]['content']} 2"


def test_samples_end_where_the_model_ends_them() -> None:
    model, tokenizer = tiny(), Words()
    seen: list[list[int]] = []
    generate = model.generate

    def ends(ids, **settings):
        seen.append(ids[0].tolist())
        assert 7 in settings["eos_token_id"]
        tail = [5, 7] if len(seen) == 1 else [5] * settings["max_new_tokens"]
        return torch.cat([ids, torch.tensor([tail])], 1)

    model.generate = ends
    blocks = tokens(64)[0].view(4, 16)
    found = observe(model, blocks, tokenizer, ["3 4", "9"], 6).samples
    assert [(s.text, s.tokens, s.ended) for s in found] == [("5", 2, True), ("5 5 5 5 5 5", 6, False)]
    assert seen == [[3, 4], [9]]
    tokenizer.chat_template = "a template"
    observe(model, blocks, tokenizer, ["3 4"], 6)
    assert seen[-1] == [1, 3, 4, 2]
    model.generate = generate
    alone = observe(model, blocks, None, ["no tokenizer"], 3).samples
    assert [s.prompt for s in alone] == [" ".join(map(str, row[:8].tolist())) for row in blocks[:2]]
    assert all(re.fullmatch(r"\d+ \d+ \d+", s.text) for s in alone)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_stand_ins_have_the_original_layers_and_share_all_else(kind: str) -> None:
    model = tiny(kind)
    name = next(n for n in modules(model) if n.endswith(("down_proj", "c_proj")))
    originals = modules(tiny(kind))
    shapes = {n: (type(m), linear_features(m)) for n, m in originals.items()}
    relinear.replace_(model, {name: LOW(rank=2)})
    twin = like_before(model, {n: m.to("meta") for n, m in originals.items()})
    assert {n: (type(m), linear_features(m)) for n, m in modules(twin).items()} == shapes
    own = {n: p for n, p in twin.named_parameters() if p is not dict(model.named_parameters()).get(n)}
    assert {n.rpartition(".")[0] for n in own} == {name}
    ids = tokens(32)[0].view(2, 16)
    assert twin(input_ids=ids).logits.shape == model(input_ids=ids).logits.shape
    assert isinstance(model.get_submodule(name), Operator)


def test_speeds_are_those_of_the_batch_asked_for(monkeypatch) -> None:
    monkeypatch.setattr(import_module("relinear.compression.evaluation"), "SPEED_SECONDS", 0.1)
    model = tiny()
    shapes: set[tuple[int, ...]] = set()
    model.register_forward_pre_hook(
        lambda module, args, kwargs: shapes.add(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    found = measure_speed(model, model, 3)
    assert found["batch"] == 3
    assert (3, found["prefill_tokens"]) in shapes
    assert (3, 1) in shapes


# The page


def test_the_page_shows_the_plan_and_is_safe(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(import_module("relinear.compression.evaluation"), "SPEED_SECONDS", 0.1)
    _, report = evaluated(tmp_path)
    page = (tmp_path / "report.html").read_text()
    assert page.count("<rect") == len(report.plan.layers)
    for name, config in list(report.plan.replaced.items())[:3]:
        assert f"{name}: {config}" in page
    assert not re.search(r"""(?:src|href)="(?!data:)|@import|url\(""", page)  # nothing is fetched
    values = report.to_dict()
    sample = values["evaluation"]["samples"][0]
    sample["prompt"] = sample["compressed"]["text"] = "<script>alert(1)</script>"
    write_page(tmp_path / "again.html", values)
    again = (tmp_path / "again.html").read_text()
    assert "<script>alert" not in again
    assert "<other>" not in again
    assert "on &lt;other&gt;: perplexity" in again
    assert again.count("&lt;script&gt;") == 2


def test_the_page_of_a_plan_alone(tmp_path) -> None:
    report = compress(tiny(), tokens(), keep=0.8, settings=SETTINGS, out_dir=tmp_path / "a", plan_only=True)
    assert "Nothing was evaluated" in (tmp_path / "a" / "report.html").read_text()
    assert isinstance(report.budget, Budget)


def test_every_operator_names_sizes_that_fit() -> None:
    assert LOW(rank=1).candidates(64, 32)[-1].rank * 96 < 64 * 32
    assert relinear.Monarch(blocks=20).candidates(32, 16) == []
    assert [c.rank for c in relinear.PivotedLowRank(rank=1).candidates(64, 32)][-1] == 30
    assert relinear.Monarch(blocks=4).candidates(32, 16) == [relinear.Monarch(blocks=4)]
    assert is_linear(LOW(rank=1).candidates(4096, 4096)[0].build(4096, 4096, device="meta"))


def test_the_candidates_are_read_under_the_key_of_0_2() -> None:
    with pytest.warns(DeprecationWarning, match="menu has a new name: candidates"):
        settings = CompressSettings.load({"menu": ["low_rank"], "bits": 4})
    assert settings.candidates == ("low_rank",)
    with pytest.raises(ValueError, match="unknown setting 'menu'"):
        CompressSettings.load({"menu": ["low_rank"], "candidates": ["low_rank"]})
