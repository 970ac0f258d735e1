"""The menu entry ``neurons``: stock models with narrower MLPs, fitted by least squares."""

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM

from conftest import mostly_slow
from relinear.compress import CompressSettings, compress
from relinear.compress.neurons import Neurons, fewer_neurons
from relinear.compress.work import Work
from relinear.core.moments import Moments
from relinear.core.operator import Operator
from tiny_models import VOCABULARY, make_family

SETTINGS = {"tokens": 512, "sequence_length": 16, "anchor_tokens": 512, "batch_size": 4, "menu": ["neurons"]}


def tokens(count: int = 512) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(1, VOCABULARY, (count,), generator=generator)]


def moments_of(count: int = 24, outputs: int = 8) -> tuple[torch.Tensor, Moments]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(400, count, generator=generator) @ torch.randn(count, count, generator=generator)
    g = torch.randn(400, outputs, generator=generator) @ torch.randn(outputs, outputs, generator=generator)
    weight = torch.randn(outputs, count, generator=generator).double()
    return weight, Moments((x.T @ x).double() / 400, (g.T @ g).double() / 400)


def test_kept_neurons_are_read_by_least_squares() -> None:
    weight, moments = moments_of()
    kept, fitted, error = fewer_neurons(weight, moments, 16)
    assert kept.tolist() == sorted(set(kept.tolist()))
    a = moments.inputs + 1e-4 * moments.inputs.diagonal().mean() * torch.eye(24, dtype=torch.float64)
    wanted = weight @ a[:, kept] @ torch.linalg.inv(a[kept][:, kept])
    assert torch.allclose(fitted, wanted, atol=1e-8)
    difference = weight.clone()
    difference[:, kept] -= fitted
    assert error == pytest.approx(float(moments.error(difference)))
    plain = weight.clone()
    plain[:, kept] = 0
    assert error < 0.9 * float(moments.error(plain))


def test_the_choice_beats_chance_and_magnitude() -> None:
    weight, moments = moments_of()
    _, _, error = fewer_neurons(weight, moments, 12)

    def of(kept: torch.Tensor) -> float:
        chosen = moments.inputs[kept][:, kept]
        fitted = weight @ moments.inputs[:, kept] @ torch.linalg.inv(chosen)
        difference = weight.clone()
        difference[:, kept] -= fitted
        return float(moments.error(difference))

    generator = torch.Generator().manual_seed(1)
    chance = [of(torch.randperm(24, generator=generator)[:12]) for _ in range(50)]
    assert error < min(chance)
    assert error < of((weight.square().sum(0) * moments.inputs.diagonal()).argsort(descending=True)[:12])


def test_all_neurons_and_redundant_ones_cost_nothing() -> None:
    weight, moments = moments_of()
    kept, fitted, error = fewer_neurons(weight, moments, 24)
    assert kept.tolist() == list(range(24))
    assert torch.allclose(fitted, weight)
    assert error < 1e-12
    doubled = torch.cat([torch.eye(24), torch.eye(24)]).double()
    moments = Moments(doubled @ moments.inputs @ doubled.T, moments.outputs)  # singular: each neuron stands there twice
    weight = torch.cat([weight, weight], 1)
    _, _, error = fewer_neurons(weight, moments, 24)
    assert error < 1e-3 * float(moments.error(weight))


@pytest.mark.parametrize(
    "kind", mostly_slow(["llama", "gpt2", "phi3", "gpt_neox", "opt", "gemma2", "qwen2"], "llama", "gpt2", "phi3")
)
@pytest.mark.parametrize("fisher", mostly_slow([True, False], True))
def test_the_result_is_a_stock_checkpoint(kind: str, fisher: bool, tmp_path) -> None:
    original = make_family(kind)
    model = copy.deepcopy(original)
    report = compress(
        model, tokens(), keep=0.8, settings=SETTINGS | {"fisher": fisher}, out_dir=tmp_path, export="plain"
    )
    assert not any(isinstance(m, Operator) for m in model.modules())
    assert report.parameters == sum(p.numel() for p in model.parameters())
    assert 0.6 * report.plan.parameters_before < report.plan.parameters <= 0.8 * report.plan.parameters_before
    assert (report.plan.nats is not None) == fisher
    ids = tokens()[0][None, :16]
    for name in ("model", "plain"):
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / name, trust_remote_code=False).eval()
        assert type(loaded) is type(original)
        assert not (tmp_path / name / "modeling_factorized.py").exists()
        with torch.no_grad():
            assert torch.allclose(loaded(input_ids=ids).logits, model(input_ids=ids).logits, atol=1e-5)


def test_the_widest_that_meets_the_budget_is_chosen(tmp_path) -> None:
    model = make_family("llama")
    modules = {n: m for n, m in model.model.layers.named_modules(prefix="model.layers") if type(m) is torch.nn.Linear}
    neurons = Neurons(Work(model, modules, CompressSettings(menu=("neurons",)), tmp_path, lambda *_: None))
    whole = sum(m.weight.numel() for m in modules.values())
    each = 2 * 3 * 32
    assert neurons.width == 64
    assert neurons.setting == "intermediate_size"
    assert neurons.fitting_width(whole) == 64
    assert neurons.fitting_width(whole - 1) == 56
    assert neurons.fitting_width(whole - 8 * each) == 56
    assert neurons.fitting_width(whole - 8 * each - 1) == 48
    with pytest.raises(ValueError, match="cannot be met by fewer neurons"):
        neurons.fitting_width(whole - 57 * each)


def test_budget_of_the_whole_model(tmp_path) -> None:
    model = make_family("llama")
    before = sum(p.numel() for p in model.parameters())
    compress(model, tokens(), keep=0.85, settings=SETTINGS | {"budget_of": "model"}, out_dir=tmp_path)
    assert 0.75 * before < sum(p.numel() for p in model.parameters()) <= 0.85 * before


@pytest.mark.slow
def test_narrowed_models_are_healed(tmp_path) -> None:
    settings = SETTINGS | {"heal_tokens": 1024, "heal_held_out_tokens": 128, "heal": "lora"}
    model = make_family("llama")
    with torch.no_grad():  # weights of an untrained model are so small that nothing is lost with neurons
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4)
    report = compress(model, tokens(4096), keep=0.7, settings=settings, out_dir=tmp_path)
    assert report.healing.after < report.healing.before
    AutoModelForCausalLM.from_pretrained(tmp_path / "model")


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
def test_families_that_cannot_be_narrowed_say_so(kind: str) -> None:
    with pytest.raises(ValueError, match=r"neurons: .*use another menu"):
        compress(make_family(kind), tokens(), settings=SETTINGS)


def test_refusals(tmp_path) -> None:
    with pytest.raises(ValueError, match="it stands alone"):
        compress(make_family("llama"), tokens(), settings=SETTINGS | {"menu": ["neurons", "low_rank"]})
    with pytest.raises(ValueError, match="leaves no operators to heal"):
        compress(make_family("llama"), tokens(), settings=SETTINGS | {"heal_tokens": 64})
    with pytest.raises(ValueError, match="must be among the targets"):
        compress(make_family("llama"), tokens(), settings=SETTINGS, exclude="model.layers.1.mlp.down_proj")
    with pytest.raises(ValueError, match="it takes no plan"):
        compress(make_family("llama"), tokens(), settings=SETTINGS, plan_file=tmp_path / "plan.json")
