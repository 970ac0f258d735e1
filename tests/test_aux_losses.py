"""Auxiliary losses: added once, scaled as the cross-entropy is, and never stale."""

import copy
import dataclasses
from typing import ClassVar

import pytest
import torch

import relinear
from relinear.core.config import Config, register
from relinear.core.operator import OperatorConfig
from relinear.operators.low_rank import LowRank, LowRankLinear
from test_surgery import IDS, llama


class PenalisedLinear(LowRankLinear):
    """A low-rank layer with the mean squared output as its auxiliary loss."""

    def forward(self, x):
        y = super().forward(x)
        if self.training:
            self._aux_losses = {"energy": 0.1 * y.float().square().mean()}
        return y


@dataclasses.dataclass(frozen=True, kw_only=True)
class Penalised(LowRank):
    kind: ClassVar[str] = "penalised_for_test"
    module_class = PenalisedLinear


@pytest.fixture
def model():
    model = llama().train()
    relinear.replace_(model, {"up_proj": Penalised(rank=4)}, layers=[0, 1])
    return model


BATCH = torch.arange(4 * 9).reshape(4, 9) % 50


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_the_loss_is_cross_entropy_plus_the_terms(model):
    loss = model(IDS, labels=IDS).loss
    terms = relinear.aux_losses(model)
    assert set(terms) == {f"model.layers.{i}.mlp.up_proj/energy" for i in (0, 1)}
    logits = model(IDS).logits
    plain = torch.nn.functional.cross_entropy(logits[0, :-1], IDS[0, 1:])
    torch.testing.assert_close(loss, plain + sum(terms.values()))
    assert isinstance(model(IDS, labels=IDS, return_dict=False)[0], torch.Tensor)
    torch.testing.assert_close(model(IDS, labels=IDS, return_dict=False)[0], loss)


def test_absent_in_eval_and_in_generate(model):
    model.eval()
    assert relinear.aux_losses(model) == {}
    logits = model(IDS).logits
    plain = torch.nn.functional.cross_entropy(logits[0, :-1], IDS[0, 1:])
    torch.testing.assert_close(model(IDS, labels=IDS).loss, plain)
    model.generate(IDS, max_new_tokens=2, do_sample=False)
    assert relinear.aux_losses(model) == {}


@pytest.mark.parametrize("checkpointing", [False, True])
def test_accumulation_gives_the_gradient_of_the_whole_batch(model, checkpointing):
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    parts = copy.deepcopy(model)
    total = torch.tensor(BATCH[:, 1:].numel())
    model(BATCH, labels=BATCH, num_items_in_batch=total).loss.backward()
    for part in BATCH.split(1):
        parts(part, labels=part, num_items_in_batch=total).loss.backward()
    whole, accumulated = gradients(model), gradients(parts)
    assert set(whole) == set(accumulated)
    for name in whole:
        torch.testing.assert_close(accumulated[name], whole[name], atol=1e-6, rtol=1e-4)


def test_two_forwards_before_one_backward_under_checkpointing(model):
    plain = copy.deepcopy(model)
    (plain(BATCH[:2], labels=BATCH[:2]).loss + plain(BATCH[2:], labels=BATCH[2:]).loss).backward()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    (model(BATCH[:2], labels=BATCH[:2]).loss + model(BATCH[2:], labels=BATCH[2:]).loss).backward()
    for name, gradient in gradients(plain).items():
        torch.testing.assert_close(gradients(model)[name], gradient, atol=1e-6, rtol=1e-4)


def test_reentrant_checkpointing_is_refused(model):
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model.enable_input_require_grads()
    with pytest.raises(ValueError, match="reentrant"):
        model(IDS, labels=IDS)


def test_a_skipped_layer_leaves_no_stale_loss(model):
    model(IDS, labels=IDS).loss.backward()
    model.model.layers[1].mlp.forward = lambda x: x
    loss = model(IDS, labels=IDS).loss
    assert set(relinear.aux_losses(model)) == {"model.layers.0.mlp.up_proj/energy"}
    loss.backward()


def test_deepcopy_after_a_training_forward(model):
    model(IDS, labels=IDS)
    other = copy.deepcopy(model)
    assert relinear.aux_losses(other) == {}
    torch.testing.assert_close(other(IDS, labels=IDS).loss, model(IDS, labels=IDS).loss)


def test_fullgraph_compile(model):
    eager = copy.deepcopy(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    loss = compiled(IDS, labels=IDS).loss
    torch.testing.assert_close(loss, eager(IDS, labels=IDS).loss)
    loss.backward()
    assert len(relinear.aux_losses(model)) == 2


def test_a_kind_is_registered_once():
    register(LowRank)
    with pytest.raises(ValueError, match="already registered"):

        @register
        @dataclasses.dataclass(frozen=True, kw_only=True)
        class Other(OperatorConfig):
            kind: ClassVar[str] = "low_rank"

    assert Config.from_dict is not OperatorConfig.from_dict
