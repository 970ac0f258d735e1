"""Objectives named in settings and on the command line: found, checked, minimised, resumed."""

import copy
import json

import pytest
import torch
from torch.nn.functional import cross_entropy, softmax

import relinear
from conftest import make_tiny_llama
from relinear.contract.objective import ObjectiveConfig
from relinear.settings.base import Settings
from relinear.training import FitSettings, TrainSettings, fit, read_metrics, train
from relinear.training.distill import Distill, divergence
from relinear_cli.main import main
from tiny_models import make_cgt
from train_helpers import Gradients, Interrupt, Padded, Tokens, probe_model, run_settings, stop_at

FIT = FitSettings(
    steps=1, batch_size=32, warmup_steps=0, dtype="float32", max_grad_norm=0, threads=1, device="cpu", log_every=1
)


@pytest.fixture
def teacher(tmp_path):
    torch.manual_seed(5)
    make_tiny_llama().save_pretrained(tmp_path / "teacher")
    return str(tmp_path / "teacher")


@pytest.fixture(scope="module")
def big_run(tmp_path_factory, corpus):
    """The directory of a run, to be the teacher of others with the same tokenizer."""
    folder = tmp_path_factory.mktemp("teacher") / "big"
    train(run_settings(corpus, steps=4, seed=7), folder)
    return str(folder)


def test_divergence_is_that_of_the_distributions_where_labels_count():
    torch.manual_seed(0)
    logits, wanted = torch.randn(2, 5, 7, requires_grad=True), torch.randn(2, 5, 7)
    labels = torch.randint(7, (2, 5))
    labels[0, 3:], labels[1, 0] = -100, -100
    expected = []
    for row, position in [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2), (1, 3)]:  # predictions of the labels after them
        p, q = (softmax(values[row, position] / 2.0, -1) for values in (wanted, logits))
        expected.append(4.0 * (p * (p / q).log()).sum())
    found = divergence(logits, wanted, labels, 2.0)
    torch.testing.assert_close(found, torch.stack(expected).mean())
    assert divergence(wanted, wanted, labels).abs() < 1e-6
    assert divergence(logits, wanted, torch.full_like(labels, -100)) == 0


def gradient(objective, **changes):
    model, seen = probe_model(dtype=torch.float32), Gradients()
    result = fit(model, Padded(), FIT.replace(**changes), objective=objective.prepare(model), callbacks=[seen])
    return {name.removeprefix("model."): value for name, value in seen.found.items()}, result


def test_a_step_against_a_teacher_is_that_of_plain_autograd_however_it_is_divided(teacher):
    """The loss counts padding nowhere, and operators' own auxiliary losses once."""
    objective = Distill(teacher=teacher, temperature=2.0, cross_entropy=0.25)
    model, data = probe_model(dtype=torch.float32).train(), Padded()
    big = relinear.from_pretrained(teacher).eval()
    from relinear.training.trainer import SteadySampler

    samples = [data[i] for i in SteadySampler(len(data), 32, 0)]
    ids, labels = (torch.stack([sample[name] for sample in samples]) for name in ("input_ids", "labels"))
    output = model(input_ids=ids, labels=labels)
    aux = sum(relinear.contract.auxiliary_losses_of(model).values())
    ce = cross_entropy(output.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    with torch.no_grad():
        wanted = big(input_ids=ids).logits
    (0.25 * ce + 0.75 * divergence(output.logits, wanted, labels, 2.0) + aux).backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    for changes in ({}, {"batch_size": 8, "accumulation": 4}, {"gradient_checkpointing": True}):
        found, result = gradient(objective, **changes)
        assert found.keys() == expected.keys()
        for name in found:
            torch.testing.assert_close(found[name], expected[name], rtol=1e-3, atol=1e-6)
        assert {"aux/kl", "aux/energy"} <= set(result.aux)
        assert result.curve[-1]["cross_entropy"] == pytest.approx(0.25 * ce.item(), rel=1e-3)


def test_training_comes_nearer_to_the_teacher_and_leaves_it_alone(teacher):
    model, data = make_tiny_llama(), Tokens()
    objective = Distill(teacher=teacher).prepare(model)
    before = copy.deepcopy(objective.teacher.state_dict())
    result = fit(model, data, FIT.replace(steps=30, learning_rate=3e-3), objective=objective)
    assert result.curve[-1]["aux/kl"] < 0.5 * result.curve[0]["aux/kl"]
    assert all(torch.equal(value, before[name]) for name, value in objective.teacher.state_dict().items())
    assert not any("teacher" in name for name in model.state_dict())


def test_a_killed_run_with_an_objective_goes_on_to_the_same_end(tmp_path, corpus, big_run):
    settings = run_settings(corpus, objective=f"distill:teacher={big_run},temperature=2", save_every=2, steps=6)
    assert settings.objective == {
        "kind": "distill", "teacher": big_run, "temperature": 2, "cross_entropy": 0.0,
    }  # fmt: skip
    whole = train(settings, tmp_path / "whole")
    with pytest.raises(Interrupt):
        train(settings, tmp_path / "parts", on_progress=stop_at(5))
    resumed = train(settings, tmp_path / "parts")
    assert resumed.validation_loss == whole.validation_loss
    rows = [[row.get("aux/kl") for row in read_metrics(r.out_dir / "metrics.jsonl")] for r in (whole, resumed)]
    assert rows[0] == rows[1]
    one, other = (relinear.from_pretrained(r.out_dir / "model").state_dict() for r in (whole, resumed))
    assert all(torch.equal(value, other[name]) for name, value in one.items())
    with pytest.raises(ValueError, match="objective"):
        train(settings.replace(objective=None), tmp_path / "parts")


def test_the_command_line_takes_an_objective(tmp_path, corpus, big_run, capsys):
    (tmp_path / "run.yaml").write_text(json.dumps(run_settings(corpus, steps=2).model_dump(mode="json")))
    arguments = ["train", "--recipe", str(tmp_path / "run.yaml"), "--out"]
    assert main([*arguments, str(tmp_path / "out"), "--objective", f"distill:teacher={big_run}"]) == 0
    assert "aux/kl" in capsys.readouterr().out
    assert json.loads((tmp_path / "out" / "run.json").read_text())["settings"]["objective"]["teacher"] == big_run
    for wrong, message in {
        "distil:teacher=x": "did you mean 'distill'",
        "distill:teacher=./nowhere": "no such directory",
        "distill:teacher=tiny": "tiny",
        "distill:teacher=x,cross_entropy=1": "cross_entropy must be below 1",
        "distill:teacher=x,temperature=0": "temperature must be above 0",
        "cgt:eta=half": "eta",
        "cgt": "trains a CGT",
    }.items():
        assert main([*arguments, str(tmp_path / "other"), "--objective", wrong]) == 2, wrong
        assert message in capsys.readouterr().err, wrong
        assert not (tmp_path / "other").exists()


def test_teachers_of_another_vocabulary_are_refused(teacher):
    with pytest.raises(ValueError, match=r"has 96 tokens, the model 50"):
        Distill(teacher=teacher).prepare(make_cgt(vocab_size=50))


def test_a_cgt_is_trained_on_its_objective_by_name(tmp_path, corpus):
    make_cgt(vocab_size=300, n_positions=64).save_pretrained(tmp_path / "cgt")
    settings = run_settings(
        corpus, model=str(tmp_path / "cgt"), model_overrides={}, operators={}, objective="cgt:eta=0.5,continuity=0.1"
    )
    result = train(settings, tmp_path / "run")
    assert {"aux/aux", "aux/continuity"} <= set(result.aux)
    assert isinstance(relinear.from_pretrained(tmp_path / "run" / "model"), relinear.CGTForCausalLM)


def test_objectives_are_settings_like_any_other():
    assert {"cgt", "distill"} <= set(ObjectiveConfig.kinds())
    for setting in ("cgt:eta=0.25,splits=[2,4]", "distill:teacher=there"):
        config = ObjectiveConfig.read(setting)
        assert ObjectiveConfig.read(config.to_dict()) == config
        assert TrainSettings(objective=setting).objective_config == config


class Before(Settings):
    rate: float = 0.5


class Now(Settings):
    rate: float = 0.25
    extra: tuple[int, ...] = (3,)


def test_settings_of_earlier_versions_are_completed_with_defaults():
    saved = Before().model_dump(mode="json")
    assert Now.upgraded(saved) == {"rate": 0.5, "extra": [3]}  # what was written holds, though the default changed
    for strange in ({"rate": 0.5, "gone": 1}, None, 3):
        assert Now.upgraded(strange) == strange
