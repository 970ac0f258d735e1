"""Compression: what calibration measures, how budgets are met, and that a killed run resumes."""

import copy
import json
import weakref
from importlib import import_module

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, LlamaConfig

import relinear
from compress_helpers import LOW_RANK, SETTINGS, calibrate, in_layers, moments_of, tiny, tokens
from conftest import mostly_slow
from relinear.compression import CompressSettings, compress, layerwise
from relinear.compression.budget import Candidate, allocate
from relinear.compression.calibrate import Calibration
from relinear.compression.plan import CompressPlan, LayerPlan
from tiny_models import make_family


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_the_loss_is_found_piece_by_piece(kind: str, monkeypatch) -> None:
    monkeypatch.setattr(layerwise, "HEAD_TOKENS", 5)
    model = tiny(kind)
    ids = tokens(32)[0].view(2, 16)
    layers = layerwise.LayerByLayer(model)
    seen = []
    model.lm_head.register_forward_hook(lambda module, args, logits: seen.append(logits.shape[1]))
    hidden = layers.embed(ids)
    assert seen.pop() == 1  # no logits where none are asked for
    for index in range(len(layers)):
        hidden = layers.layer(index, hidden).detach()
    hidden.requires_grad_()
    whole = F.cross_entropy(layers.logits(hidden, ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")
    (expected,) = torch.autograd.grad(whole, hidden)
    seen.clear()
    losses, grads = [], []
    for _, piece, logits, labels in layers.next_tokens(hidden, ids):
        losses.append(F.cross_entropy(logits, labels, reduction="sum"))
        grads += torch.autograd.grad(losses[-1], piece)
    assert seen == [5, 5, 5]
    torch.testing.assert_close(sum(losses), whole)
    torch.testing.assert_close(torch.cat(grads, 1), expected[:, :15])
    assert not expected[:, 15].any()


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_moments_are_those_of_the_whole_model_at_labels_that_it_draws(kind: str, tmp_path, monkeypatch) -> None:
    model = tiny(kind)
    blocks = tokens(128)[0].view(8, 16)
    draws, draw = [], torch.multinomial

    def noted(*args, **kwargs) -> torch.Tensor:
        draws.append(draw(*args, **kwargs))
        return draws[-1]

    monkeypatch.setattr(torch, "multinomial", noted)
    calibration = calibrate(model, blocks, tmp_path, batch=3)
    found = moments_of(calibration)
    wide = copy.deepcopy(model).double()
    inputs, outputs = {}, {}
    for name in found:

        def hook(module, args, output, name=name):
            inputs[name] = args[0].detach()
            output.requires_grad_(True).retain_grad()
            outputs[name] = output

        wide.get_submodule(name).register_forward_hook(hook)
    logits = wide(input_ids=blocks).logits
    logits = logits[:, :-1].flatten(0, 1)
    loss = F.cross_entropy(logits, blocks[:, 1:].flatten())
    drawn = F.cross_entropy(logits, torch.cat(draws).flatten(), reduction="none")
    drawn.sum().backward()
    assert calibration.loss == pytest.approx(float(loss.detach()), rel=1e-5)
    expected = torch.distributions.Categorical(logits=logits.detach()).entropy()
    drawn = drawn.detach()
    assert float((drawn - expected).mean().abs()) < 4 * float(drawn.std()) / len(drawn) ** 0.5
    assert calibration.tokens == 128
    assert found.keys() == {name for group in in_layers(model).values() for name in group}
    for name, moments in found.items():
        x, g = inputs[name].flatten(0, 1), outputs[name].grad.flatten(0, 1)
        assert moments.input_moment.dtype == torch.float64
        assert moments.tokens == 128
        for got, rows in ((moments.input_moment, x), (moments.gradient_moment, g)):
            wanted = rows.T @ rows / 128
            assert float((got - wanted).norm() / wanted.norm()) < 1e-4, name
    calibration.release()
    assert not list(tmp_path.glob("hidden-*")) + list(tmp_path.glob("gradient*"))


def test_calibration_holds_the_states_of_one_batch_however_many_there_are(tmp_path, monkeypatch) -> None:
    states, alive = [], []
    run = layerwise.LayerByLayer.layer

    def counted(self, index, hidden):
        states.extend((weakref.ref(hidden), weakref.ref(after := run(self, index, hidden))))
        alive.append(len({id(tensor) for ref in states if (tensor := ref()) is not None}))
        return after

    monkeypatch.setattr(layerwise.LayerByLayer, "layer", counted)
    most = []
    for count in (3, 12):
        model = tiny()
        blocks = tokens(16 * count)[0].view(count, 16)
        moments_of(calibrate(model, blocks, tmp_path / str(count), batch=1))
        most.append(max(alive))
        states.clear()
        alive.clear()
    assert most[0] == most[1] <= 4


@pytest.mark.parametrize("stored", mostly_slow([3, 2], 2))
def test_killed_calibration_resumes_to_the_same_bits(stored, tmp_path, monkeypatch) -> None:
    """Also if the states before the last layer do not stay on disk."""
    blocks, ran = tokens(128)[0].view(8, 16), []
    step = Calibration._gradients_before
    monkeypatch.setattr("relinear.compression.calibrate.states_on_disk", lambda *_: (stored, 0))
    monkeypatch.setattr(
        Calibration, "_gradients_before", lambda self, index, *more: ran.append(index) or step(self, index, *more)
    )

    def run(folder, stop_at=None):
        """What is made of each layer's moments; one that is killed is asked for no second time."""
        calls = []

        def told(phase, done, total):
            calls.append(phase)
            if len(calls) == stop_at:
                raise KeyboardInterrupt

        def made(statistics):
            moments = [
                (f"{name} {side}", getattr(s, side)) for name, s in statistics.items() for side in ("inputs", "outputs")
            ]
            return {name: moment.clone() for name, moment in moments}

        ran.clear()
        calibration = calibrate(tiny(), blocks, folder, batch=3, on_stage=told)
        return calibration.map_layers("fit", "all", made), calibration.loss

    whole, loss = run(tmp_path / "whole")
    assert ran == [2, 1, 0]
    for stop in range(1, 7):
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path / f"cut{stop}", stop)
        again, loss_again = run(tmp_path / f"cut{stop}")
        assert ran == list(range(min(2, 5 - stop), -1, -1)), "it goes on with the layer it was at"
        assert loss == loss_again
        assert whole.keys() == again.keys()
        assert all(torch.equal(again[name], value) for name, value in whole.items())


def test_states_take_at_most_twice_the_bytes_of_the_model(tmp_path, monkeypatch) -> None:
    model = make_family("llama", num_hidden_layers=8, vocab_size=50)
    bytes_of_model, most = sum(2 * p.numel() for p in model.parameters()), []  # as stored

    def told(*_):
        most.append(sum(path.stat().st_size for path in tmp_path.rglob("*.safetensors")))

    blocks = torch.randint(0, 50, (int(bytes_of_model / 5 / 4 / model.config.hidden_size / 16), 16))
    calibration = calibrate(model, blocks, tmp_path, on_stage=told)
    found = moments_of(calibration)
    assert len(most) == 16
    assert max(most) < 2.1 * bytes_of_model  # headers of safetensors among it
    calibration.release()
    assert not list(tmp_path.glob("hidden-*")) + list(tmp_path.glob("gradient*"))
    assert len(calibration._permanent) < 8
    monkeypatch.setattr("relinear.compression.calibrate.states_on_disk", lambda *_: (8, 0))
    for name, moments in moments_of(calibrate(model, blocks, tmp_path / "one")).items():
        assert torch.equal(found[name].input_moment, moments.input_moment)
        assert torch.equal(found[name].gradient_moment, moments.gradient_moment)


def test_what_a_killed_calibration_could_not_take_away_goes(tmp_path) -> None:
    unfinished = tmp_path / ".hidden-0001.abcd1234.relinear"
    unfinished.mkdir()
    for path in (unfinished / "0.safetensors", tmp_path / ".moments-0000.safetensors.abcd1234.relinear"):
        path.write_bytes(b"half")
    model = tiny()
    moments_of(calibrate(model, tokens(128)[0].view(8, 16), tmp_path))
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_several_corpora_calibrate_in_turns(tmp_path) -> None:
    first, second = tokens(512)[0].view(-1, 16), tokens(512)[0].flip(0).view(-1, 16)
    mixed = torch.stack([first, second], 1).flatten()
    found, settings = [], LOW_RANK | {"tokens": 512}
    for texts in ({"first": [first.flatten()], "second": [second.flatten()]}, [mixed]):
        folder = tmp_path / str(len(found))
        found.append(compress(tiny(), texts, settings=settings, out_dir=folder, plan_only=True).corpus)
    assert torch.equal(found[0].blocks, found[1].blocks)
    assert found[0].kinds == [0, 1] * 16


def test_a_plan_that_is_not_carried_out_leaves_a_models_own(tmp_path, monkeypatch) -> None:
    def files():
        return {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file() and path.name[0] != "."}

    compress(tiny(), tokens(), keep=0.8, settings=LOW_RANK, out_dir=tmp_path)
    before = files()
    proposed = compress(tiny(), tokens(), keep=0.5, settings=LOW_RANK, out_dir=tmp_path, plan_only=True)
    after = files()
    assert {name: after[name] for name in before} == before
    assert json.loads(after["proposed-report.json"])["parameters"] == proposed.parameters
    assert {"proposed-plan.json", "proposed-report.html"} <= after.keys()

    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(import_module("relinear.compression.run"), "fit_layers_", killed)
        with pytest.raises(KeyboardInterrupt):
            compress(tiny(), tokens(), keep=0.5, settings=LOW_RANK, out_dir=tmp_path)
    assert {name: files()[name] for name in before} == before
    compress(tiny(), tokens(), keep=0.5, settings=LOW_RANK, out_dir=tmp_path)
    assert files()["plan.json"] == after["proposed-plan.json"]
    for name in ("plan.json", "report.json"):  # of the model at 0.8, which is kept
        (renamed,) = tmp_path.glob(f"{name}.*")
        assert renamed.read_bytes() == before[name]
    assert len(list(tmp_path.glob("model.*"))) == 1


def test_calibration_keeps_one_layer_in_memory(tmp_path, monkeypatch) -> None:
    import gc

    from relinear.compression import calibrate as module

    kept: list[weakref.ref] = []

    class Watched(module.StatisticsSums):
        def __init__(self, **settings) -> None:
            super().__init__(**settings)
            kept.append(weakref.ref(self))

    monkeypatch.setattr(module, "StatisticsSums", Watched)
    model = tiny()
    calibrate(model, tokens(128)[0].view(8, 16), tmp_path).map_layers("candidates", "none", lambda statistics: {})
    gc.collect()
    assert kept
    assert not [ref for ref in kept if ref() is not None]


def test_second_order_estimate_predicts_the_loss_of_a_small_change(tmp_path) -> None:
    # With labels drawn from the model the estimate is that of the Fisher information, here one layer, slightly changed.
    model = tiny()
    torch.manual_seed(3)
    with torch.no_grad():
        ids = torch.randint(0, 50, (256, 1))
        for _ in range(15):
            probabilities = model(input_ids=ids).logits[:, -1].softmax(-1)
            ids = torch.cat([ids, torch.multinomial(probabilities, 1)], 1)
    found = moments_of(calibrate(model, ids, tmp_path, batch=64))
    name = "model.layers.0.mlp.down_proj"
    module = model.get_submodule(name)
    change = 0.1 * torch.randn_like(module.weight) * module.weight.std().detach()
    predicted = 0.5 * float(found[name].error(change.double()))
    with torch.no_grad():
        before = model(input_ids=ids).logits[:, :-1].log_softmax(-1)
        module.weight += change
        after = model(input_ids=ids).logits[:, :-1].log_softmax(-1)
    # divergence a token, of 15 predictions for 16 inputs
    measured = float(F.kl_div(after, before, log_target=True, reduction="none").sum(-1).mean()) * 15 / 16
    assert predicted == pytest.approx(measured, rel=0.35)


def candidates() -> dict[str, list[Candidate]]:
    low = relinear.LowRank
    return {
        "a": [Candidate(None, 100, 0.0)] + [Candidate(low(rank=r), 10 * r, 1.0 / r) for r in range(1, 10)],
        "b": [Candidate(None, 200, 0.0)] + [Candidate(low(rank=r), 20 * r, 5.0 / r) for r in range(1, 10)],
    }


@pytest.mark.parametrize("budget", [30, 60, 110, 170, 299, 300])
def test_allocation_is_the_best_there_is(budget: int) -> None:
    options = candidates()
    chosen = allocate(options, budget)
    assert sum(c.cost for c in chosen.values()) <= budget
    best = min(a.nats + b.nats for a in options["a"] for b in options["b"] if a.cost + b.cost <= budget)
    assert sum(c.nats for c in chosen.values()) == pytest.approx(best, rel=0.05)


def test_an_embedding_that_is_most_of_a_model_leaves_no_budget_unused() -> None:
    low = relinear.LowRank
    table = [Candidate(None, 1600, 0.0), Candidate(low(rank=4), 400, 0.3), Candidate(low(rank=3), 300, 1.6)]
    layer = [Candidate(low(rank=r), 10.0 * r, 0.25**r) for r in (8, 4, 3, 2)]
    chosen = allocate({"table": table} | {f"layer{n}": layer for n in range(10)}, 700.0)
    assert [chosen[name].config.rank for name in ("table", "layer0")] == [4, 3]  # not 3 and 4, by one price


def test_allocation_refuses_what_cannot_be_met() -> None:
    with pytest.raises(ValueError, match="the budget of 20 parameters cannot be met"):
        allocate(candidates(), 20)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_compressed_model_meets_its_budget_and_loads(kind: str, tmp_path) -> None:
    model = tiny(kind)
    before = sum(m.weight.numel() for g in in_layers(model).values() for m in g.values())
    report = compress(model, tokens(), keep=0.7, settings=SETTINGS, out_dir=tmp_path)
    after = sum(sum(p.numel() for k, p in m.named_parameters() if k != "bias") for m in report_layers(model, report))
    assert 0.6 * before < after <= 0.7 * before + 1000
    assert report.parameters == sum(p.numel() for p in model.parameters())
    loaded = relinear.from_pretrained(tmp_path / "model").eval()
    ids = tokens()[0][:32][None]
    with torch.no_grad():
        assert torch.allclose(loaded(input_ids=ids).logits, model(input_ids=ids).logits, atol=1e-5)
    assert "whole model:" in str(report)
    assert json.loads((tmp_path / "report.json").read_text())["parameters"] == report.parameters


def report_layers(model, report):
    return [model.get_submodule(name) for name in report.plan.layers]


def test_killed_fit_resumes_to_the_same_bits(tmp_path) -> None:
    def run(folder, stop_at=None):
        model, calls = tiny(), []

        def told(progress):
            calls.append(progress.stage)
            if progress.stage == "fit" and calls.count("fit") == stop_at:
                raise KeyboardInterrupt

        compress(model, tokens(), keep=0.6, settings=LOW_RANK, out_dir=folder, on_progress=told)
        return model

    whole = run(tmp_path / "whole").state_dict()
    for stop in (1, 3):
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path / str(stop), stop)
        again = run(tmp_path / str(stop)).state_dict()
        assert whole.keys() == again.keys()
        assert all(torch.equal(whole[key], again[key]) for key in whole)


def test_plan_can_be_edited_and_given_back(tmp_path) -> None:
    model = tiny()
    compress(model, tokens(), keep=0.8, settings=LOW_RANK, out_dir=tmp_path, plan_only=True)
    assert not any(isinstance(m, relinear.contract.operator.Operator) for m in model.modules())
    values = json.loads((tmp_path / "plan.json").read_text())
    name = "model.layers.1.mlp.down_proj"
    for layer in values["layers"].values():
        layer["operator"] = None
    values["layers"][name]["operator"] = "low_rank:rank=5"
    edited = tmp_path / "edited.json"
    edited.write_text(json.dumps(values))
    report = compress(model, tokens(), keep=0.8, settings=LOW_RANK, out_dir=tmp_path, plan_file=edited)
    assert list(report.plan.replaced) == [name]
    assert model.get_submodule(name).config == relinear.LowRank(rank=5)
    assert report.plan.layers[name].nats is None  # what was predicted is of another rank
    assert {layer.nats for other, layer in report.plan.layers.items() if other != name} == {0.0}
    assert report.plan.nats is None
    values["layers"][name] = LayerPlan.of(tiny().get_submodule(name), relinear.Quantized(bits=8), 0.1).to_dict()
    edited.write_text(json.dumps(values))
    assert CompressPlan.load(edited, tiny()).layers[name].nats == 0.1
    values["layers"][name]["operator"] |= {"bits": 2}  # as many scales, and other losses
    edited.write_text(json.dumps(values))
    assert CompressPlan.load(edited, tiny()).layers[name].nats is None
    values["layers"]["model.layers.9.mlp.down_proj"] = {"operator": None}
    edited.write_text(json.dumps(values))
    with pytest.raises(ValueError, match=r"no linear layer 'model\.layers\.9\.mlp\.down_proj'"):
        CompressPlan.load(edited, tiny())


def test_a_plan_for_other_layers_is_refused(tmp_path) -> None:
    compress(tiny(), tokens(), keep=0.8, settings=LOW_RANK, out_dir=tmp_path, plan_only=True)
    with pytest.raises(ValueError, match="which targets= and exclude= leave alone"):
        compress(
            tiny(),
            tokens(),
            keep=0.8,
            settings=LOW_RANK,
            targets="q_proj",
            plan_file=tmp_path / "plan.json",
            out_dir=tmp_path / "b",
        )
    with pytest.raises(ValueError, match="lm_head lies outside of the decoder layers"):
        compress(tiny(), tokens(), keep=0.8, settings=LOW_RANK, targets="lm_head", out_dir=tmp_path / "c")


def test_nothing_is_kept_where_no_directory_is_given() -> None:
    model = tiny().train()
    report = compress(model, tokens(), keep=0.7, settings=LOW_RANK)
    assert report.parameters == sum(p.numel() for p in model.parameters())
    assert all(module.training for module in model.modules())


def test_experts_of_their_own_and_one_without_tokens(tmp_path) -> None:
    class Experts(torch.nn.Module):
        """Two routed experts as plain layers, and one that no token reaches."""

        def __init__(self) -> None:
            super().__init__()
            self.experts = torch.nn.ModuleList(torch.nn.Linear(32, 32) for _ in range(3))

        def forward(self, x):
            y, flat = torch.zeros_like(x), x.flatten(0, 1)
            first = flat[:, 0] > 0
            out = torch.zeros_like(flat)
            out[first], out[~first] = self.experts[0](flat[first]), self.experts[1](flat[~first])
            return y + out.view_as(x)

    model = tiny()
    model.model.layers[1].mlp = Experts()
    report = compress(model, tokens(), keep=0.6, settings=LOW_RANK, out_dir=tmp_path)
    plans = {name: layer for name, layer in report.plan.layers.items() if ".experts." in name}
    assert plans["model.layers.1.mlp.experts.2"].operator is None
    assert plans["model.layers.1.mlp.experts.0"].operator is not None


def test_another_budget_uses_the_same_statistics(tmp_path) -> None:
    phases: list[str] = []
    for keep in (0.8, 0.6):
        phases.clear()
        compress(
            tiny(),
            tokens(),
            keep=keep,
            settings=LOW_RANK,
            out_dir=tmp_path,
            on_progress=lambda progress: phases.append(progress.stage),
        )
    assert "candidates" not in phases
    assert "fit" in phases


def test_each_layer_is_told_and_fitted_alike(tmp_path) -> None:
    phases, models = [], []
    for folder in ("one", "one", "other"):  # again in the same place: nothing is left that changes the result
        model = tiny()
        compress(
            model,
            tokens(),
            keep=0.6,
            settings=LOW_RANK,
            out_dir=tmp_path / folder,
            on_progress=lambda now: phases.append((now.stage, now.done == now.total)),
        )
        models.append(model.state_dict())
    assert phases.count(("fit", True)) == 3
    for other in models[1:]:
        assert all(torch.equal(value, other[key]) for key, value in models[0].items())


def test_refusals(tmp_path) -> None:
    with pytest.raises(ValueError, match="keep"):
        compress(tiny(), tokens(), keep=1.5, settings=LOW_RANK, out_dir=tmp_path / "a")
    with pytest.raises(ValueError, match="the corpus has 100 tokens; 512 are to be recorded"):
        compress(tiny(), tokens(100), settings=SETTINGS, out_dir=tmp_path / "b")
    with pytest.raises(ValueError, match="fewer than the widest layer has inputs, 64"):
        compress(tiny(), tokens(), settings=SETTINGS | {"tokens": 32}, out_dir=tmp_path / "c")
    with pytest.raises(ValueError, match="unknown setting 'tokenz'; did you mean 'tokens'"):
        CompressSettings.load({"tokenz": 3})
    compress(tiny(), tokens(), settings=LOW_RANK, out_dir=tmp_path / "d", plan_only=True)
    with pytest.raises(ValueError, match="another model, corpus, set of layers, setting or version"):
        compress(tiny("gpt2"), tokens(), settings=LOW_RANK, out_dir=tmp_path / "d", plan_only=True)
    with pytest.raises(ValueError, match="cannot be met"):
        compress(tiny(), tokens(), keep=0.01, settings=LOW_RANK, out_dir=tmp_path / "d", plan_only=True)


@pytest.mark.slow
def test_command_line(tmp_path, capsys) -> None:
    from relinear.data.tokenizers import load_tokenizer
    from relinear_cli.main import main

    text = tmp_path / "text.txt"
    text.write_text("A line of text that is not like the others: %d.\n" * 200)
    model = AutoModelForCausalLM.from_config(
        LlamaConfig(vocab_size=260, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
    )
    relinear.save_pretrained(model, tmp_path / "model", tokenizer=load_tokenizer("bytes"))
    arguments = ["compress", str(tmp_path / "model"), "--data", str(text), "--split", "all", "--keep", "0.7"]
    arguments += ["--out", str(tmp_path / "out"), "--tokens", "512"]
    arguments += ["--set", "sequence_length=32"]
    assert main([*arguments, "--plan-only"]) == 0
    printed = capsys.readouterr().out
    assert "predicted nats" in printed
    assert "plan:" in printed
    assert not (tmp_path / "out" / "model").exists()
    assert main(arguments) == 0
    loaded = relinear.from_pretrained(tmp_path / "out" / "model")
    assert any(isinstance(m, relinear.contract.operator.Operator) for m in loaded.modules())
    rows = tmp_path / "elsewhere" / "test.jsonl"
    rows.parent.mkdir()
    rows.write_text("".join(json.dumps({"body": f"Row {i}. " * 9, "kind": "row"}) + "\n" for i in range(9)))
    (tmp_path / "elsewhere" / "train.jsonl").write_text(rows.read_text().replace("Row", "Other"))
    elsewhere = ["--evaluate-on", str(rows.parent), "--text-column", "body", "--set", "evaluation_tokens=32"]
    assert main([*arguments, *elsewhere]) == 0
    assert str(rows.parent) in capsys.readouterr().out
    assert main([*arguments, "--keep", "7"]) == 2
    assert "keep" in capsys.readouterr().err
    calibrated_on = arguments[arguments.index("--data") + 1]
    assert main([*arguments, "--evaluate-on", calibrated_on]) == 2
    assert f"--evaluate-on {calibrated_on} is the text of --data" in capsys.readouterr().err


def test_the_function_and_its_room_go_by_one_name() -> None:
    assert callable(relinear.compress)
