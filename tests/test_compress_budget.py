"""Budgets of compression: parameters, bytes, FLOPs and time; plans that are slower; predictions corrected; reports."""

import json
import math
import re
from importlib import import_module

import pytest
import torch

import relinear
from relinear.compress import CompressSettings, compress, run, speed
from relinear.compress import plan as plan_file
from relinear.compress.beside import like_before, measure_speed, observe
from relinear.compress.budget import Budget, Candidate, budget_of
from relinear.compress.calibrate import calibrate
from relinear.compress.plan import (
    Correction,
    MeasuredPoint,
    choose_points,
    correct,
    corrections,
    layer_candidates,
    measure_points,
)
from relinear.compress.report import write_page
from relinear.compress.speed import SpeedConditions, SpeedTable, speed_table
from relinear.compress.work import Work
from relinear.core.operator import Operator, is_linear, linear_features
from relinear.surgery.summary import module_flops
from test_compress import in_layers, speeds, tiny, tokens

SETTINGS = {"tokens": 512, "sequence_length": 16, "anchor": False, "batch_size": 4, "evaluate": False}
SETTINGS |= {"anchor_tokens": 16, "menu": ("low_rank",), "allow_slower": True}
LOW = relinear.LowRank
CONDITIONS = SpeedConditions("decode", 1, 16)


def modules(model) -> dict[str, torch.nn.Module]:
    return {name: module for group in in_layers(model).values() for name, module in group.items()}


def by_flops(scale: float = 1e-6):
    """In place of measuring: dense layers take ``scale`` seconds a FLOP, operators twice that."""

    def measured(groups, wanted, conditions):
        return {
            shape: {
                c: scale * (2 * shape[0] * shape[1] if c is None else 4 * c.rank * sum(shape)) for c in wanted[shape]
            }
            for shape in groups
        }

    return measured


@pytest.mark.parametrize("keep", [0.5, 0.8])
@pytest.mark.parametrize("budget_of", ["layers", "model", "bytes", "flops"])
def test_budgets_are_met_and_spent(budget_of: str, keep: float, tmp_path) -> None:
    model = tiny()

    def cost() -> float:
        layers = modules(model).values()
        state = {t.data_ptr(): t for t in model.state_dict().values()}.values()
        return {
            "layers": lambda: sum(p.numel() for m in layers for p in m.parameters()),
            "model": lambda: sum(p.numel() for p in model.parameters()),
            "bytes": lambda: sum(t.numel() * min(t.element_size(), 2) for t in state),  # as saved, at half precision
            "flops": lambda: sum(module_flops(m) for m in layers),
        }[budget_of]()

    before = cost()
    report = compress(model, tokens(), keep=keep, settings=SETTINGS | {"budget_of": budget_of}, out_dir=tmp_path)
    assert 0.97 * keep * before < cost() <= keep * before
    assert json.loads((tmp_path / "report.json").read_text())["budget"]["unit"] == report.budget.unit


def test_flops_of_experts_count_by_the_tokens_that_reach_them() -> None:
    model = tiny()
    names = modules(model)
    settings = CompressSettings.load(SETTINGS | {"budget_of": "flops"})
    name = next(iter(names))
    whole = budget_of(model, names, settings)
    routed = budget_of(model, names, settings, use={name: 0.25})
    assert routed.cost(name, LOW(rank=3)) == 0.25 * whole.cost(name, LOW(rank=3))
    assert routed.whole == whole.whole - 0.75 * whole.cost(name, None)


@pytest.mark.parametrize("purpose", ["decode", "prefill"])
def test_a_speed_is_reached_by_the_table(purpose: str, tmp_path) -> None:
    model, conditions = tiny(), SpeedConditions(purpose, 3, 16)
    settings = SETTINGS | {"speed": 1.5, "speed_for": purpose, "speed_batch": 3, "allow_slower": False}
    table = speeds(model, conditions=conditions)
    report = compress(model, tokens(), settings=settings, speed_table=table, out_dir=tmp_path)
    assert 1.5 <= report.speed.ratio < 1.6
    assert report.speed.conditions == conditions
    # operators take twice the time a FLOP: what is replaced is below half of its size
    assert report.plan.replaced
    for name, config in report.plan.replaced.items():
        layer = report.plan.layers[name]
        assert layer.parameters < 0.5 * layer.parameters_before, (name, config)


def test_the_table_is_measured_once_a_machine_and_interpolated(tmp_path, monkeypatch) -> None:
    calls: list[int] = []
    measured = by_flops()

    def counted(*arguments):
        calls.append(1)
        return measured(*arguments)

    monkeypatch.setattr(speed, "_measure", counted)
    layers = list(modules(tiny()).values())
    shapes = {linear_features(m) for m in layers}
    configs = {shape: LOW(rank=1).sizes(*shape) for shape in shapes}
    path = tmp_path / "speed.json"

    def table(conditions=CONDITIONS) -> SpeedTable:
        return speed_table(layers, configs, conditions, path)

    first = table()
    assert table().rows == first.rows
    assert len(calls) == 1
    shape = max(shapes)
    assert len(first.rows[shape]) == 1 + speed.MEASURED_SIZES
    for config in configs[shape]:
        assert first.seconds(shape, config) == pytest.approx(4e-6 * config.rank * sum(shape))
    with pytest.raises(ValueError, match=r"has no Monarch.*\(64, 32\)"):
        first.seconds(shape, relinear.Monarch())
    table(SpeedConditions("prefill", 1, 16))
    table()
    assert len(calls) == 3  # one table a file
    values = json.loads(path.read_text())
    values["machine"]["threads"] = 99
    path.write_text(json.dumps(values))
    table()
    path.write_text("{")
    table()
    values = json.loads(path.read_text())
    values["rows"][0]["seconds"] *= 2
    path.write_text(json.dumps(values))
    assert table().rows == first.rows
    assert len(calls) == 6


@pytest.mark.parametrize("purpose", ["decode", "prefill"])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_tables_are_measured(purpose: str, kind: str, tmp_path) -> None:
    layers = list(modules(tiny(kind)).values())
    configs = {linear_features(m): [LOW(rank=2), LOW(rank=8), relinear.Monarch()] for m in layers}
    state = torch.random.get_rng_state()
    table = speed_table(layers, configs, SpeedConditions(purpose, 2, 16), tmp_path / "speed.json")
    assert torch.equal(state, torch.random.get_rng_state())
    for shape, wanted in configs.items():
        times = [table.seconds(shape, config) for config in (None, *wanted)]
        assert all(t > 0 for t in times)
        assert min(times[1:3]) <= table.seconds(shape, LOW(rank=4)) <= max(times[1:3])


def test_a_plan_that_is_slower_is_refused_before_anything_is_fitted(tmp_path) -> None:
    phases: list[str] = []
    model = tiny()

    def start(out=tmp_path, allow_slower=False, **more):
        phases.clear()
        settings = SETTINGS | {"allow_slower": allow_slower}
        told = lambda phase, done, total: phases.append(phase)  # noqa: E731
        compress(model, tokens(), settings=settings, out_dir=out, on_progress=told, speed_table=speeds(model), **more)

    figures = r"would run slower than the original: linear layers in decoding at batch 1.* -> .* ms, 0\.\d\d times"
    with pytest.raises(ValueError, match=figures):
        start(keep=0.9)
    assert "fit" not in phases
    assert not any(isinstance(m, Operator) for m in model.modules())
    assert (tmp_path / "plan.json").is_file()
    start(keep=0.9, plan_only=True)
    with pytest.raises(ValueError, match=figures):  # a plan that is given, before calibration
        start(tmp_path / "new", plan_file=tmp_path / "plan.json")
    assert phases == []
    assert not (tmp_path / "new").exists()
    start(keep=0.9, allow_slower=True)
    assert any(isinstance(m, Operator) for m in model.modules())


def test_layers_that_take_no_time_are_not_refused(tmp_path) -> None:
    model, settings = tiny(), SETTINGS | {"allow_slower": False}
    table = speeds(model, 1e-10)
    report = compress(model, tokens(), keep=0.9, settings=settings, speed_table=table, out_dir=tmp_path)
    assert report.speed.ratio < 1
    assert report.speed.before < run.LEAST_SECONDS


def test_a_table_that_is_given_is_held_to_what_is_asked_for_before_calibration(tmp_path) -> None:
    def refused(message: str, table, **more) -> None:
        settings = SETTINGS | {"allow_slower": False} | more
        with pytest.raises(ValueError, match=message):
            compress(tiny(), tokens(), settings=settings, speed_table=table, out_dir=tmp_path / "out")
        assert not (tmp_path / "out").exists()

    table = speeds(tiny())
    (tmp_path / "kept.json").write_text(json.dumps(table.to_dict()))
    refused("is of decoding at batch 1, and decoding at batch 2 is asked for", tmp_path / "kept.json", speed_batch=2)
    refused(r"has no Monarch.* of \(in, out\) sizes", table, menu=("monarch:blocks=4",))
    refused(r"has no dense layer of \(in, out\) sizes", SpeedTable(CONDITIONS, {}))
    refused("speed_table must be SpeedTable or None, got 3", 3)
    for text in ("{", "[]", '{"rows": [], "conditions": {"a": 1}}', '{"rows": [{}], "conditions": 3}'):
        (tmp_path / "kept.json").write_text(text)
        refused("kept.json is no table of speeds", tmp_path / "kept.json")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"keep": 0.01}, r"keep=0.01 \(budget_of=layers\) cannot be met: of 27,648 parameters"),
        ({"keep": 0.01, "budget_of": "flops"}, "cannot be met: of 55,296 FLOPs a token"),
        ({"keep": 0.1, "budget_of": "model"}, r"of the model's 31,072 parameters is less than the 3,424 outside"),
        ({"keep": 0.13, "budget_of": "model"}, r"cannot be met: .* it allows 615, and .* take 2,784"),
        ({"keep": 0.01, "budget_of": "bytes"}, r"of the model's [\d,]+ bytes is less than the [\d,]+ outside"),
        ({"speed": 1000.0}, r"speed=1000.0 of decoding at batch 1 cannot be met"),
        ({"keep": 0.03, "fisher": False}, r"cannot be met: without fisher every layer keeps the same share, 0.030"),
        ({"keep": 0.5, "speed": 1.3}, "keep and speed are two budgets"),
        ({"budget_of": "flops", "speed": 1.3}, "and speed is no share"),
        ({"speed": 1.3, "fisher": False}, "speed takes fisher"),
        ({"speed": 0.5}, "speed must be above 1"),
        ({"budget_of": "watts"}, "budget_of must be one of 'layers', 'model', 'bytes' or 'flops'"),
        ({"measured_points": 2, "fisher": False}, "measured_points correct what fisher predicts"),
        ({"menu": ("monarch:blocks=40",)}, r"menu: Monarch\(blocks=40\) fits none of the layers.*\(32, 16\)"),
        ({"menu": ("neurons",), "speed": 1.3}, "menu: neurons meets budgets of parameters.* not speed"),
        ({"menu": ("neurons",), "measured_points": 1}, "menu: neurons leaves none"),
        ({"menu": ("hdpl:rank=2,blocks=2",)}, "menu: .*only operators with a dense matrix"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_computed(settings, message, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(speed, "_measure", by_flops())
    model, phases = tiny(), []
    with pytest.raises(ValueError, match=message):
        compress(
            model,
            tokens(),
            settings=SETTINGS | settings,
            out_dir=tmp_path / "out",
            on_progress=lambda phase, done, total: phases.append(phase),
        )
    assert set(phases) <= {"speed"}
    assert not (tmp_path / "out" / "calibration").exists()


def test_texts_to_judge_on_are_checked_before_anything_is_computed(tmp_path) -> None:
    def start(out, ids, **more):
        compress(tiny(), tokens(), settings=SETTINGS | more, out_dir=out, evaluate_on={"far": [ids]})

    with pytest.raises(ValueError, match="evaluate_on, far: the corpus has 3 tokens"):
        start(tmp_path / "a", torch.arange(3), evaluate=True)
    with pytest.raises(ValueError, match="evaluate=False leaves judging out"):
        start(tmp_path / "b", torch.arange(40))
    assert not list(tmp_path.rglob("calibration"))


def test_directories_of_other_work_are_refused(tmp_path) -> None:
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(ValueError, match=r"holds other work \(run.json\)"):
        compress(tiny(), tokens(), settings=SETTINGS, out_dir=tmp_path)
    with pytest.raises(ValueError, match="is a file"):
        compress(tiny(), tokens(), settings=SETTINGS, out_dir=tmp_path / "run.json")


def test_an_operator_is_offered_to_the_layers_that_it_fits(tmp_path) -> None:
    model = tiny()
    names = modules(model)
    calibration = calibrate(model, tokens()[0].view(32, 16), in_layers(model), tmp_path, batch=4, fisher=True)
    budget = budget_of(model, names, CompressSettings())
    menu = (relinear.Monarch(blocks=20, rank=1), LOW(rank=1))
    name = "model.layers.0.self_attn.k_proj"
    found = layer_candidates(names[name], name, calibration, menu, budget)
    assert {type(c.config) for c in found[1:]} == {LOW}


# Measured points


def calibrated(tmp_path, model):
    blocks = tokens(1024)[0].view(64, 16)
    calibration = calibrate(model, blocks[:32], in_layers(model), tmp_path / "c", batch=4, fisher=True)
    budget = budget_of(model, modules(model), CompressSettings())
    menu = (LOW(rank=1),)
    found = {n: layer_candidates(m, n, calibration, menu, budget) for n, m in modules(model).items()}
    return calibration, found, blocks[32:]


def test_points_are_the_loss_of_the_model_with_one_layer_replaced(tmp_path) -> None:
    model = tiny()
    calibration, candidates, blocks = calibrated(tmp_path, model)
    chosen = choose_points(candidates, 2)
    assert len(chosen) == 2 * 7
    before = dict(model.named_modules())
    settings = CompressSettings(tokens=512, sequence_length=16, anchor_tokens=512)
    work = Work(model, modules(model), settings, tmp_path, lambda *_: None)
    points = measure_points(work, blocks, calibration, chosen)
    assert before == dict(model.named_modules())

    def loss() -> float:
        with torch.no_grad():
            logits = model(input_ids=blocks).logits[:, :-1].flatten(0, 1)
        return float(torch.nn.functional.cross_entropy(logits, blocks[:, 1:].flatten()))

    start = loss()
    for (name, candidate), point in list(zip(chosen, points, strict=True))[::5]:
        source = model.get_submodule(name)
        parent, _, child = name.rpartition(".")
        operator = candidate.config.convert(source).from_moments(source, calibration.moments(name))
        setattr(model.get_submodule(parent), child, operator)
        assert point.measured == pytest.approx(loss() - start, abs=1e-5)
        assert (point.name, point.operator, point.predicted) == (name, candidate.config, candidate.nats)
        setattr(model.get_submodule(parent), child, source)


def points(kind: str, pairs) -> list[MeasuredPoint]:
    return [MeasuredPoint(f"layers.{i}.{kind}", LOW(rank=1), p, m) for i, (p, m) in enumerate(pairs)]


def test_corrections_find_factor_and_power() -> None:
    law = [(p, 0.5 * p**0.8) for p in (0.01, 0.03, 0.1, 0.2, 0.5, 1.0)]
    found = corrections(points("a", law) + points("b", [(0.1, 0.3), (0.1, 0.1)]) + points("c", [(0.1, -0.2)]))
    assert found["a"].power == pytest.approx(0.8)
    assert found["a"].factor == pytest.approx(0.5)
    assert found["b"] == Correction(pytest.approx(2.0), 1.0)
    assert found["c"].factor == pytest.approx(1 / 8)
    few = corrections(points("a", law[:5]))["a"]
    assert few == Correction(pytest.approx(sum(m for _, m in law[:5]) / sum(p for p, _ in law[:5])), 1.0)
    wild = corrections(points("a", [(0.1, 1e-9), (0.2, 1.0), (0.3, 1e3)] * 2))["a"]
    assert wild.power == 1.5
    assert math.isfinite(wild(0.2))


def test_corrections_change_the_candidates_of_their_type_alone() -> None:
    options = [Candidate(None, 10, 0.0), Candidate(LOW(rank=1), 5, 0.2)]
    got = correct({"l.a": options, "l.b": options}, {"a": Correction(3.0)})
    assert [c.nats for c in got["l.a"]] == [0.0, pytest.approx(0.6)]
    assert got["l.b"] == options


@pytest.mark.slow
def test_measured_points_change_the_plan_and_are_kept(tmp_path, monkeypatch) -> None:
    def factors(found):
        return {"down_proj": Correction(100.0)}

    phases: list[str] = []

    def start(out, **more):
        settings = SETTINGS | {"allow_slower": True} | more
        told = lambda phase, done, total: phases.append(phase)  # noqa: E731
        return compress(tiny(), tokens(1024), settings=settings, out_dir=out, plan_only=True, on_progress=told)

    def kept(report) -> float:
        layers = [layer for name, layer in report.plan.layers.items() if name.endswith("down_proj")]
        return sum(layer.parameters for layer in layers)

    plain = start(tmp_path)
    measured = start(tmp_path, measured_points=3)
    assert len(measured.points) == 3 * 7
    written = json.loads((tmp_path / "report.json").read_text())["points"]
    assert [p["measured"] for p in written] == [p.measured for p in measured.points]
    assert measured.plan.nats != plain.plan.nats
    monkeypatch.setattr(plan_file, "corrections", factors)
    phases.clear()
    again = start(tmp_path, measured_points=3)
    assert "points" not in phases
    assert again.points == measured.points
    assert kept(again) > kept(plain)


# Beside the original


def evaluated(tmp_path, count: int = 1024, **more):
    model = tiny()
    settings = SETTINGS | {"evaluate": True, "evaluation_tokens": 64, "allow_slower": True} | more
    others = {"<other>": [torch.arange(40) % 50]}
    report = compress(model, tokens(count), keep=0.5, settings=settings, out_dir=tmp_path, evaluate_on=others)
    return model, report


def test_the_report_holds_what_was_measured(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(import_module("relinear.compress.beside"), "SPEED_SECONDS", 0.1)
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


def test_narrower_models_are_judged_too(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(import_module("relinear.compress.beside"), "SPEED_SECONDS", 0.1)
    model, report = evaluated(tmp_path, menu=("neurons",))
    assert model.config.intermediate_size < 64
    assert report.evaluation["nats"] != 0
    assert (tmp_path / "report.html").is_file()


def test_a_corpus_without_a_rest_is_judged_on_what_was_seen_and_says_so(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(import_module("relinear.compress.beside"), "SPEED_SECONDS", 0.1)
    _, report = evaluated(tmp_path, 512)
    assert report.evaluation["unseen"] is False
    assert "tokens of the calibration" in str(report)
    assert "they flatter" in (tmp_path / "report.html").read_text()


class Words:
    """A tokenizer of numbers, with an end and a chat."""

    eos_token_id = 7
    chat_template = None

    def __call__(self, text, **kwargs):
        return {"input_ids": [int(word) for word in text.split()]}

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
    monkeypatch.setattr(import_module("relinear.compress.beside"), "SPEED_SECONDS", 0.1)
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
    monkeypatch.setattr(import_module("relinear.compress.beside"), "SPEED_SECONDS", 0.1)
    _, report = evaluated(tmp_path, measured_points=2)
    page = (tmp_path / "report.html").read_text()
    assert page.count("<rect") == len(report.plan.layers)
    for name, config in list(report.plan.replaced.items())[:3]:
        assert f"{name}: {config}" in page
    assert report.points
    assert all(page.count(point.name) > 1 for point in report.points)  # in the plan and in the table
    assert page.count('aria-label="Single layers tried') == 1
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


def test_the_page_of_a_plan_alone_and_of_one_without_gradients(tmp_path) -> None:
    compress(tiny(), tokens(), settings=SETTINGS, out_dir=tmp_path / "a", plan_only=True)
    assert "Nothing was evaluated" in (tmp_path / "a" / "report.html").read_text()
    settings = SETTINGS | {"fisher": False, "allow_slower": True}
    report = compress(tiny(), tokens(), keep=0.6, settings=settings, out_dir=tmp_path / "b")
    assert "Nothing is predicted of the whole plan" in (tmp_path / "b" / "report.html").read_text()
    assert isinstance(report.budget, Budget)


def test_every_operator_names_sizes_that_fit() -> None:
    assert LOW(rank=1).sizes(64, 32)[-1].rank * 96 < 64 * 32
    assert relinear.Monarch(blocks=20).sizes(32, 16) == []
    assert [c.rank for c in relinear.PivotedLowRank(rank=1).sizes(64, 32)][-1] == 30
    assert relinear.Monarch(blocks=4).sizes(32, 16) == [relinear.Monarch(blocks=4)]
    assert is_linear(LOW(rank=1).sizes(4096, 4096)[0].build(4096, 4096, device="meta"))


def test_speed_is_told_before_calibration_and_measured_again_before_a_refusal(tmp_path, monkeypatch) -> None:
    measured: list[float] = []

    def loaded(groups, wanted, conditions):
        measured.append(9.0 if len(measured) < slow else 0.4)
        return {shape: {c: 1e-2 if c is None else measured[-1] * 1e-2 for c in wanted[shape]} for shape in groups}

    monkeypatch.setattr(speed, "_measure", loaded)
    settings, slow = SETTINGS | {"allow_slower": False}, 1
    phases: list[str] = []

    def start(out):
        measured.clear()
        told = lambda phase, done, total: phases.append(phase)  # noqa: E731
        with pytest.warns(UserWarning, match="the same share of every layer would be slower than the original"):
            compress(tiny(), tokens(), keep=0.5, settings=settings, out_dir=out, on_progress=told)

    start(tmp_path / "once")
    assert len(measured) == 2
    slow = 2
    with pytest.raises(ValueError, match=r"would run slower than the original.*speed\.json, measured twice on this"):
        start(tmp_path / "twice")
    assert (tmp_path / "twice" / "plan.json").is_file()
