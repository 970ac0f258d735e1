"""The causality check finds leaks, where they are, and nothing in models that have none."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import pytest
import torch
from torch import nn

import relinear
from conftest import make_tiny_llama
from relinear.analysis.causality import CausalityError
from relinear.operators.context_manager import SharedContext


class MeanPooled(SharedContext):
    """The manager that would explain perplexities too good to be true: a mean over the whole sequence."""

    def forward(self, source, valid=None, state=None):
        context, state = super().forward(source, valid, state)
        return context.mean(1, keepdim=True).expand_as(context), state


@dataclasses.dataclass(frozen=True, kw_only=True)
class LeakingManager(relinear.ContextManager):
    kind: ClassVar[str] = "leaking_manager"

    def attach(self, model):
        table = model.get_input_embeddings()
        MeanPooled(self, table.num_embeddings, table.embedding_dim).eval().install(model.base_model)


class PeeksAhead(nn.Module):
    """Adds to token 5 what token 6 has."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        y = self.inner(x)
        return torch.cat([y[:, :5], y[:, 5:6] + y[:, 6:7], y[:, 6:]], dim=1)


def conditioned(manager):
    model = make_tiny_llama()
    relinear.attach_(model, manager)
    relinear.replace_(model, {"mlp.up_proj": relinear.CCL(rank=4, context_dim=8)})
    return model


@pytest.mark.parametrize("mixer", ["token", "ema", "gru"])
@pytest.mark.parametrize("source", ["tokens", "embeddings"])
def test_managers_are_causal(mixer: str, source: str) -> None:
    model = conditioned(relinear.ContextManager(dim=8, mixer=mixer, source=source)).train()
    report = relinear.check_causality(model)
    assert report.causal
    assert report.modules > 20
    assert model.training
    assert "causal" in str(report)


def test_stock_models_are_causal(tiny_model) -> None:
    assert relinear.check_causality(tiny_model).causal


def test_a_mean_pooled_manager_leaks() -> None:
    model = conditioned(LeakingManager(dim=8))
    with pytest.raises(CausalityError, match=r"'model\.relinear_context' at token 0") as caught:
        relinear.check_causality(model)
    report = caught.value.report
    assert (report.module, report.layer, report.position, report.source) == ("model.relinear_context", None, 0, 1)
    assert relinear.check_causality(model, raises=False).to_dict()["causal"] is False


@pytest.mark.parametrize("layer", [0, 1])
def test_the_layer_and_the_position_are_named(layer: int) -> None:
    model = make_tiny_llama()
    block = model.model.layers[layer]
    block.mlp = PeeksAhead(block.mlp)
    report = relinear.check_causality(model, raises=False)
    assert (report.module, report.layer, report.position, report.source) == (f"model.layers.{layer}.mlp", layer, 5, 6)


def test_inputs_and_noise_are_refused() -> None:
    model = make_tiny_llama()
    with pytest.raises(ValueError, match=r"shape \(1, T\)"):
        relinear.check_causality(model, torch.zeros(2, 4, dtype=torch.long))
    with pytest.raises(ValueError, match="no token embedding"):
        relinear.check_causality(nn.Linear(2, 2))
    model.model.norm.register_forward_hook(lambda m, a, y: y + torch.rand_like(y))
    with pytest.raises(ValueError, match="different outputs for equal inputs"):
        relinear.check_causality(model)


def test_inspect_reports_causality(tmp_path, capsys) -> None:
    from relinear_cli.main import main

    conditioned(relinear.ContextManager(dim=8, mixer="ema")).save_pretrained(tmp_path)
    assert main(["inspect", str(tmp_path), "--causality"]) == 0
    assert "causal: every suffix" in capsys.readouterr().out
