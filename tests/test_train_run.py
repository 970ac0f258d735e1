"""What a run refuses, what it leaves behind, and how it ends when the loss does."""

import json
import math
import sys
from types import SimpleNamespace

import pytest
import torch

import relinear
from conftest import make_tiny_llama
from relinear import LowRank, from_pretrained, replace_
from relinear.system.files import tensor_digest
from relinear.training import FitSettings, NonFiniteLossError, fit, read_metrics, train
from relinear.training.run import build_model
from relinear.training.trainer import SteadySampler
from train_helpers import RUN, Tokens, run_settings

FIT = FitSettings(steps=4, batch_size=4, warmup_steps=0, threads=1, device="cpu", log_every=2)


class Poisoned(torch.nn.Module):
    """A model whose loss is NaN from the third training step on."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3))
        self.calls = 0

    def forward(self, input_ids, labels):
        self.calls += self.training
        return {"loss": self.weight.sum() * (math.nan if self.calls > 2 else 1.0)}


def test_nan_stops_the_run_and_says_what_to_try(tmp_path):
    model = Poisoned()
    with pytest.raises(NonFiniteLossError, match=r"training loss is nan at step 3 of 4.*learning_rate") as error:
        fit(model, Tokens(), FIT.replace(save_every=1), out_dir=tmp_path)
    assert isinstance(error.value, ValueError)
    assert torch.isfinite(model.weight).all()
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2]
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["checkpoint-2"]


def test_the_record_says_which_source_and_which_initial_values(tmp_path, corpus):
    digests = {}
    for name, changes in {"first": {}, "again": {"learning_rate": 0.02}, "other": {"seed": 1}}.items():
        settings = run_settings(corpus, steps=1, warmup_steps=0, **changes)
        train(settings, tmp_path / name)
        record = json.loads((tmp_path / name / "run.json").read_text())
        digests[name] = record["model"]["initial_sha256"]
        assert record["machine"]["relinear"] == relinear.__version__
    assert digests["first"] == digests["again"] != digests["other"]
    tokenizer_entries = from_pretrained(tmp_path / "first" / "model").config.vocab_size
    model = build_model(run_settings(corpus), tokenizer_entries)
    assert tensor_digest(model.state_dict()) == digests["first"]


def test_nan_in_a_whole_run(tmp_path, corpus):
    settings = run_settings(corpus, learning_rate=1e30, schedule="constant", warmup_steps=0, max_grad_norm=0.0)
    with pytest.raises(NonFiniteLossError):
        train(settings, tmp_path / "run")
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["status"] == "failed"
    assert "learning_rate" in record["error"]
    assert not (tmp_path / "run" / "model").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "tinny"}, "unknown model 'tinny'; did you mean 'tiny'"),
        ({"model": "./no/such", "model_overrides": {}}, "no such directory"),
        ({"operators": {"q_prj": "low_rank"}}, "q_proj"),
        ({"operators": {"q_proj": "low_rank:rank=500"}}, "rank=500"),
        ({"model_overrides": {"hidden": 3}}, "hidden"),
        (
            {"model_overrides": {"max_position_embeddings": 16}},
            "texts of 32 tokens are too long.* reads 16",
        ),
        ({"data": {"data": "/does/not/exist"}}, "/does/not/exist"),
    ],
)
def test_wrong_settings_leave_nothing_behind(tmp_path, corpus, changes, message):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        train(run_settings(corpus, **changes), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_model_of_a_run_is_trained_on(tmp_path, corpus, monkeypatch):
    first = train(run_settings(corpus, steps=30, learning_rate=1e-2), tmp_path / "one")
    assert first.perplexity < 0.7 * first.initial_perplexity
    model = from_pretrained(tmp_path / "one" / "model")
    assert type(model.model.layers[0].mlp.up_proj).__name__ == "LowRankLinear"
    assert model.config.use_cache
    further = run_settings(corpus, model=str(tmp_path / "one" / "model"), model_overrides={}, operators={}, steps=2)
    second = train(further, tmp_path / "two")
    assert second.initial_perplexity == pytest.approx(first.perplexity, rel=1e-3)
    monkeypatch.setattr("relinear.training.run.prepare_data", lambda settings: pytest.fail("read the data first"))
    with pytest.raises(ValueError, match="model_overrides needs a preset"):
        train(further.replace(model_overrides={"hidden_size": 8}), tmp_path / "three")


def test_vocabulary_must_hold_the_tokenizer(tmp_path, corpus):
    overrides = RUN["model_overrides"] | {"vocab_size": 100}
    with pytest.raises(ValueError, match="embeds 100"):
        train(run_settings(corpus, model_overrides=overrides), tmp_path / "run")


def test_fit_leaves_the_model_as_it_was_but_trained():
    model = make_tiny_llama()
    replace_(model, {"q_proj": LowRank(rank=4)})
    threads, rows = torch.get_num_threads(), []
    before = model.state_dict()["lm_head.weight"].clone()
    result = fit(model, Tokens(), FIT, on_progress=rows.append)
    assert torch.get_num_threads() == threads
    assert model.config.use_cache
    assert not model.training
    assert not torch.equal(before, model.state_dict()["lm_head.weight"])
    assert result.out_dir is None
    assert result.validation_loss is None
    assert [row.stage for row in rows] == ["prepare", "train", "train", "train", "train", "done"]
    assert result.peak_memory_bytes > 1 << 20
    assert result.flops_per_token > 0


class Writer:
    """What tensorboard's SummaryWriter is to the Trainer."""

    places: list[str | None] = []  # noqa: RUF012

    def __init__(self, log_dir=None):
        self.places.append(log_dir)

    def __getattr__(self, name):
        return lambda *args, **kwargs: None


def test_tensorboard_writes_below_the_run_and_is_named_by_a_text(tmp_path, monkeypatch):
    """Also the evaluation before the first step, which the Trainer would log in the working directory."""
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=Writer))
    monkeypatch.setattr("transformers.integrations.integration_utils.is_tensorboard_available", lambda: True)
    settings = FIT.replace(report_to="tensorboard")
    assert settings.report_to == ("tensorboard",)
    fit(make_tiny_llama(), (Tokens(), Tokens()), settings, out_dir=tmp_path / "run")
    assert set(Writer.places) == {str(tmp_path / "run" / "tensorboard")}


def test_a_reporter_without_its_package_is_said(monkeypatch):
    monkeypatch.setattr("transformers.integrations.integration_utils.is_wandb_available", lambda: False)
    with pytest.raises(ValueError, match=r"report_to=wandb: .*pip install wandb"):
        fit(make_tiny_llama(), Tokens(), FIT.replace(report_to="wandb"))


def test_fit_refuses():
    model = make_tiny_llama()
    with pytest.raises(ValueError, match="data must be"):
        fit(model, 3, FIT)
    with pytest.raises(ValueError, match="no samples"):
        fit(model, [], FIT)
    with pytest.raises(ValueError, match="no validation data"):
        fit(model, Tokens(), FIT.replace(eval_every=1))
    with pytest.raises(ValueError, match="no gradient checkpointing"):
        fit(Poisoned(), Tokens(), FIT.replace(gradient_checkpointing=True))


def test_orders_cover_the_data_and_depend_on_the_seed():
    orders = list(SteadySampler(10, 25, seed=1))
    assert len(orders) == 25
    assert sorted(orders[:10]) == sorted(orders[10:20]) == list(range(10))
    assert orders[:10] != orders[10:20]
    assert orders == list(SteadySampler(10, 25, seed=1))
    assert orders != list(SteadySampler(10, 25, seed=2))
