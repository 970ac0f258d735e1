"""Healing: a compressed model comes nearer to its original; killed, it resumes to the same bits."""

import copy

import pytest
import torch
from torch.nn import functional as F

import relinear
from conftest import mostly_slow
from relinear.compression import CompressSettings, compress, heal
from relinear.compression.healing import original_copy
from relinear.system.progress import Progress
from tiny_models import VOCABULARY, make_family

SETTINGS = {"tokens": 256, "sequence_length": 16, "batch_size": 4, "candidates": ["low_rank"], "self_sampled": False}
HEALED = SETTINGS | {"heal_tokens": 4096, "heal_learning_rate": 3e-3}


def tokens(count: int = 8192) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(1, VOCABULARY, (count,), generator=generator).cumsum(0) % VOCABULARY]


def pretrained(kind: str = "llama"):
    """A tiny model that is sure of its predictions."""
    model = make_family(kind)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4)
    return model


def divergence(model, original) -> float:
    ids = tokens()[0][-512:].view(32, 16)
    with torch.no_grad():
        wanted, got = (m(input_ids=ids).logits.log_softmax(-1) for m in (original, model))
    return float(F.kl_div(got, wanted, log_target=True, reduction="none").sum(-1).mean())


@pytest.mark.parametrize("kind", mostly_slow(["llama", "gpt2"], "llama"))
def test_healing_brings_the_model_nearer_to_the_original(kind: str, tmp_path) -> None:
    original = pretrained(kind)
    before, after = copy.deepcopy(original), copy.deepcopy(original)
    compress(before, tokens(), keep=0.6, settings=SETTINGS)
    flags = {name: p.requires_grad for name, p in before.named_parameters()}
    settings = HEALED | {"heal_tokens": 2048, "heal_learning_rate": 2e-3}
    report = compress(after, tokens(), keep=0.6, settings=settings, out_dir=tmp_path)
    assert divergence(after, original) < 0.9 * divergence(before, original)
    assert report.healing.steps == 32
    assert {name: p.requires_grad for name, p in after.named_parameters()} == flags
    assert not any(p.grad is not None for p in after.parameters())
    assert {n: p.shape for n, p in after.named_parameters()} == {n: p.shape for n, p in before.named_parameters()}
    changed = {n for n, p in after.named_parameters() if not torch.equal(p, before.get_parameter(n))}
    replaced = tuple(f"{name}." for name in report.plan.replaced)
    assert any(name.startswith(replaced) for name in changed)
    assert all(name.startswith(replaced) for name in changed)
    loaded = relinear.from_pretrained(tmp_path / "model").eval()
    ids = tokens()[0][None, :16]
    with torch.no_grad():
        assert torch.allclose(loaded(input_ids=ids).logits, after.eval()(input_ids=ids).logits, atol=1e-5)
    assert "healed on 2,048 tokens in 32 steps" in str(report)


@pytest.mark.slow
def test_killed_healing_resumes_to_the_same_bits(tmp_path) -> None:
    def run(folder, stop_at=None):
        model = pretrained()

        def told(progress):
            if progress.stage == "heal" and progress.done == stop_at:
                raise KeyboardInterrupt

        settings = HEALED | {"heal_tokens": 1024}
        compress(model, tokens(), keep=0.6, settings=settings, out_dir=folder, on_progress=told)
        return model.state_dict()

    whole = run(tmp_path / "whole")
    for stop in (1, 7, 16):
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path / str(stop), stop)
        again = run(tmp_path / str(stop))
        assert whole.keys() == again.keys()
        assert all(torch.equal(whole[key], again[key]) for key in whole), stop
    assert not list(tmp_path.rglob("checkpoints"))


def test_the_teacher_takes_no_memory_until_it_must() -> None:
    model = pretrained()
    teacher = original_copy(model)
    shared = {id(p) for p in model.parameters()} & {id(p) for p in teacher.parameters()}
    assert shared == {id(p) for p in model.parameters() if p.ndim > 1}
    relinear.replace_(model, {"mlp.down_proj": relinear.LowRank(rank=4)}, init="from_weight")
    assert all(type(m) is not relinear.LowRank for m in teacher.modules())
    ids = tokens()[0][None, :16]
    wanted = teacher(input_ids=ids).logits
    blocks = tokens(64 * 16)[0].view(64, 16)
    shown: list[Progress] = []
    heal(model, teacher, blocks, settings=CompressSettings.load(HEALED), on_progress=shown.append)
    assert {(progress.text, progress.stage) for progress in shown} == {("healing", "heal")}
    assert shown[-1].done == shown[-1].total == 16
    assert torch.equal(wanted, teacher(input_ids=ids).logits)


@pytest.mark.slow
def test_half_precision_is_healed_in_full_and_given_back() -> None:
    model = pretrained().bfloat16()
    settings = HEALED | {"heal_tokens": 1024, "heal_learning_rate": 2e-4}
    assert compress(model, tokens(), keep=0.6, settings=settings).healing.steps == 16
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"heal_tokens": 63}, "less than one step of 4 blocks of sequence_length=16"),
        ({"heal_tokens": 100_000}, "tokens plus heal_tokens"),
    ],
)
def test_refusals_before_anything_is_computed(settings: dict, message: str, tmp_path) -> None:
    with pytest.raises(ValueError, match=message):
        compress(pretrained(), tokens(), settings=SETTINGS | {"keep": 0.6} | settings, out_dir=tmp_path)
    assert not list(tmp_path.iterdir())


def test_plans_that_leave_nothing_to_train_are_refused() -> None:
    with pytest.raises(ValueError, match="trains the operators, and the plan has none"):
        heal(pretrained(), pretrained(), tokens(1024)[0].view(64, 16))


def test_the_teacher_is_given_back_as_it_was() -> None:
    model = pretrained().bfloat16()
    teacher = original_copy(model)
    teacher.get_parameter("model.layers.0.mlp.up_proj.weight").requires_grad_(False)
    relinear.replace_(model, {"mlp.down_proj": relinear.LowRank(rank=4)}, init="from_weight")
    before = {name: (value.dtype, value.clone()) for name, value in teacher.named_buffers()}
    before |= {name: (p.dtype, p.detach().clone()) for name, p in teacher.named_parameters()}
    flags = {name: p.requires_grad for name, p in teacher.named_parameters()}
    blocks = tokens(64 * 16)[0].view(64, 16)
    heal(model, teacher, blocks, settings=CompressSettings.load(HEALED))
    after = dict(teacher.named_buffers()) | dict(teacher.named_parameters())
    assert {name: value.dtype for name, value in after.items()} == {name: dtype for name, (dtype, _) in before.items()}
    assert all(torch.equal(value, before[name][1]) for name, value in after.items())
    assert {name: p.requires_grad for name, p in teacher.named_parameters()} == flags
    assert {b.dtype for b in model.buffers()} == {b.dtype for b in teacher.buffers()}
