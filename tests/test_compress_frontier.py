"""Budgets of bytes, and what the report says first."""

import dataclasses
import math

import pytest
import torch
from safetensors import safe_open

import relinear
from compress_helpers import SETTINGS, modules, tiny, tokens
from conftest import mostly_slow
from relinear.compression import compress, evaluation
from relinear.compression.budget import Candidate, stored_bytes
from relinear.compression.candidates import group_candidates
from relinear.compression.evaluation import evaluate
from relinear.compression.report import write_page
from relinear.contract.linear_layers import linear_features

LOW = {"candidates": ("low_rank",)}


def in_bits(model) -> float:
    layers = [*modules(model).values(), model.get_input_embeddings(), model.lm_head]
    return 8 * sum(stored_bytes(m) for m in layers) / sum(math.prod(linear_features(m)) for m in layers)


@pytest.mark.parametrize("budget", mostly_slow([{"bits": 9.0}, {"size": 0.7}], {"size": 0.7}))
def test_budgets_of_bytes_are_counted_and_saved_at_half_precision(budget: dict, tmp_path) -> None:
    model = tiny()
    before = stored_bytes(model)
    assert before == 2 * sum(t.numel() for t in model.state_dict().values()), "not 4 bytes, as they are in memory"
    settings = SETTINGS | budget | {"candidates": ["quantized"]}
    report = compress(model, tokens(), settings=settings, out_dir=tmp_path)
    if "bits" in budget:
        assert 8.7 < in_bits(model) <= 9
    else:
        assert stored_bytes(model) / before < 0.7
    assert (report.bytes_before, report.bytes) == (before, stored_bytes(model))
    assert all(p.dtype == torch.float32 for p in model.parameters())
    with safe_open(tmp_path / "model" / "model.safetensors", framework="pt") as file:
        saved = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert {value.dtype for value in saved.values() if value.is_floating_point()} == {torch.bfloat16}
    own = model.state_dict()
    assert all(torch.equal(own[name], value.to(own[name].dtype)) for name, value in saved.items()), "judged is saved"
    assert relinear.from_pretrained(tmp_path / "model").dtype == torch.bfloat16


def test_candidates_of_a_group_cost_less_than_its_dense_layers() -> None:
    points = [(3, 8.0), (1, 9.0), (2, 9.5), (4, 8.0), (5, 1.0), (9, 0.5)]
    budget = type("Ranks", (), {"cost": lambda self, name, config: 9.0 if config is None else config.rank})()
    found = group_candidates([("a", {relinear.LowRank(rank=rank): nats for rank, nats in points})], budget)
    assert found[0] == Candidate(None, 9.0, 0.0)
    assert sorted((c.cost, c.nats) for c in found[1:]) == sorted([(1, 9.0), (2, 9.5), (3, 8.0), (4, 8.0), (5, 1.0)])


def test_repeated_runs_of_four_tokens_are_counted() -> None:
    model, blocks = tiny(), tokens(64)[0].view(4, 16)
    given: list[torch.Tensor] = []

    def generate(ids, **settings):
        given.append(ids)
        assert not settings["do_sample"]
        loop, fresh = torch.tensor([11, 12, 13, 14] * 3 + [15, 16, 17, 18]), torch.arange(20, 36)
        return torch.cat([ids, torch.stack([(loop, fresh)[at % 2] for at in range(len(ids))])], 1)

    model.generate = generate
    found = evaluate(model, blocks, passages=6).repeated
    # of 13 runs of the loop 8 are distinct: four in turns, and four that lead out of it
    assert found == pytest.approx((1 - 8 / 13) / 2)
    passages = given[-1]
    assert passages.shape == (6, 8)
    assert torch.equal(passages[:4], blocks[:, :8]), "the beginning of every window before others"


def test_the_report_begins_with_the_verdict(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(evaluation, "CONTINUED_TOKENS", 8)
    settings = SETTINGS | LOW | {"evaluate": True, "evaluation_tokens": 64, "passages": 3}
    others = {"<other> text": [torch.arange(64) % 50]}
    report = compress(tiny(), tokens(1024), keep=0.5, settings=settings, out_dir=tmp_path, evaluate_on=others)
    assert str(report).startswith(report.verdict)
    share = f"{report.bytes / report.bytes_before:.2f}"
    assert f"{share} of the bytes, " in report.verdict
    assert " on text like yours" in report.verdict
    assert " on <other> text" in report.verdict
    found = report.evaluation | {"repeated_before": 0.15, "repeated": 0.16}
    for repeated, more in ((0.16, "16% of 4-grams (the original 15%)"), (0.15, "itself no more than the original")):
        alike = dataclasses.replace(report, evaluation=found | {"repeated": repeated}).verdict
        assert alike.endswith(f"repeats {more}")
    for nats, interval, said in (
        (-0.001, 0.0004, ", -0.001 nats on text like yours, "),
        (0.018, None, ", +0.02 nats on text like yours, "),
        (-0.001, 0.003, ", no difference in loss detected on text like yours (95 % interval -0.004 to +0.002 nats), "),
        (0.0003, 0.0001, ", less than 0.001 nats on text like yours, "),
        (
            0.0003,
            0.0004,
            ", no difference in loss detected on text like yours (95 % interval -0.0001 to +0.0007 nats), ",
        ),
    ):
        measured = found | {"nats": nats, "interval": interval}
        assert said in dataclasses.replace(report, evaluation=measured).verdict
    worse = dataclasses.replace(report, evaluation=found | {"repeated": 0.48}).verdict
    assert worse.startswith("Its greedy text repeats itself (48% of 4-grams, the original's 15%): ")
    assert "off by more than half" in " ".join(
        dataclasses.replace(report, evaluation=found | {"nats": 3.0, "interval": 0.1}).remarks
    )
    monkeypatch.setattr(type(report.plan), "nats", 0.0001)  # it is +0.000 in print, and the other +0.001
    alike = dataclasses.replace(report, evaluation=found | {"nats": 0.0014, "interval": None})
    assert "off by more than half" not in " ".join(alike.remarks)
    page = (tmp_path / "report.html").read_text()
    assert "&lt;other&gt; text" in page
    assert "LlamaForCausalLM" in page.partition("In figures")[0]
    assert "evaluated on 4 windows of 1 document" in page


@pytest.fixture(scope="module")
def in_five_bits(tmp_path_factory):
    """A model in integers, its report and where it is."""
    model, folder = tiny(), tmp_path_factory.mktemp("integers")
    return model, compress(model, tokens(), settings=SETTINGS | {"bits": 5.0}, out_dir=folder), folder


def test_integers_are_chosen_and_fitted(in_five_bits) -> None:
    model, report, folder = in_five_bits
    assert in_bits(model) <= 5
    kinds = {type(config).__name__ for config in report.plan.replaced.values()}
    assert "Quantized" in kinds
    loaded = relinear.from_pretrained(folder / "model").float()
    ids = tokens(16)[0][None]
    torch.testing.assert_close(loaded(ids).logits, model(ids).logits)


@pytest.mark.parametrize("integers", [True, False])
def test_a_report_counts_integers_in_bits_and_all_else_in_parameters(integers: bool, in_five_bits, tmp_path) -> None:
    if integers:
        model, report, _ = in_five_bits
    else:
        report = compress(model := tiny(), tokens(), settings=SETTINGS | {"keep": 0.7})
    each = {name: layer.bits for name, layer in report.plan.layers.items()}
    found = {name: 8 * stored_bytes(m) / (m.in_features * m.out_features) for name, m in modules(model).items()}
    assert {name: bits for name, bits in each.items() if name in found} == pytest.approx(found)
    told, values = str(report), report.to_dict()
    page = write_page(tmp_path / "page.html", values).read_text(encoding="utf-8")
    assert ("bits  predicted" in told, "kept  predicted" in told) == (integers, not integers)
    assert ("-> " in told and " parameters (" in told) == (not integers)
    assert (page.count("<th>bits per weight</th>"), page.count("<th>kept</th>")) == ((2, 0) if integers else (0, 2))
    for name, layer in report.plan.layers.items():
        share = f"{layer.bits:.2f}" if integers else f"{layer.parameters / layer.parameters_before:.3f}"
        assert f"<td>{name}</td><td>{layer.operator or 'dense'}</td>\n<td>{share}</td>" in page
