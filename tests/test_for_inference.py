"""No forward pass computes from weights of earlier, and ``for_inference_`` keeps what it says, as long as it says."""

from __future__ import annotations

import copy
import functools
import io
from concurrent.futures import ThreadPoolExecutor

import accelerate
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

import relinear
from cases import CASES, case_of_every_kind, every_case
from conftest import make_tiny_llama, mostly_slow
from relinear.contract.inference import CachingModule, caching_for_inference
from relinear.testing.conformance import assert_close, build, call, in_context, inputs

TOLERANCE = 1e-5
#: with a context and without one
COMPILED = [case for case in CASES if case.name in ("ccl", "hdpl")]


class Rows(list, torch.utils.data.Dataset):
    """A data set of the rows in a list."""


@torch.no_grad()
def infer(module: nn.Module, case, leading=(5,)) -> Tensor:
    return call(module, *inputs(case, leading))


@torch.no_grad()
def expected(module: nn.Module, case, leading=(5,)) -> Tensor:
    """What a layer says that has just been made and given these weights."""
    fresh = case.config.build(module.in_features, module.out_features).eval()
    fresh.load_state_dict(module.state_dict())
    return call(fresh, *inputs(case, leading))


def backward(module: nn.Module, case) -> None:
    call(module, *inputs(case)).square().mean().backward()


def stepping(make):
    def change(module, case):
        optimizer = make(module.parameters())
        backward(module, case)
        optimizer.step()
        return module

    return change


def write_data(module, case):
    for parameter in module.parameters():
        parameter.data.mul_(1.7)
    return module


def times(factor, state):
    """Weights scaled; indices, such as the order of inputs, as they are."""
    return {name: factor * value if value.is_floating_point() else value for name, value in state.items()}


def load_assigned(module, case):
    module.load_state_dict(times(1.5, module.state_dict()), assign=True)
    return module


def load_averages(module, case):
    """The averages of ``AveragedModel``, written over the weights as EMA classes do it (``copy_to``)."""
    average = AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    average.update_parameters(module)  # the first takes the weights over
    average.update_parameters(write_data(copy.deepcopy(module), case))
    for parameter, mean in zip(module.parameters(), average.module.parameters(), strict=True):
        parameter.data.copy_(mean.data)
    return module


CHANGES = {
    "fused": stepping(lambda parameters: torch.optim.AdamW(parameters, lr=0.1, fused=True)),
    "foreach": stepping(lambda parameters: torch.optim.AdamW(parameters, lr=0.1, foreach=True)),
    "fused_sgd": stepping(lambda parameters: torch.optim.SGD(parameters, lr=10.0, fused=True)),
    "sgd": stepping(lambda parameters: torch.optim.SGD(parameters, lr=10.0)),
    "data": write_data,
    "assign": load_assigned,
    "ema": load_averages,
}

#: of each way to change weights one: in place and unseen by autograd, in place, by other tensors
every_change = pytest.mark.parametrize("change", mostly_slow(CHANGES, "fused", "data", "assign"))


@every_case
@pytest.mark.parametrize("change", mostly_slow([*CHANGES, *(f"train {name}" for name in CHANGES)], "fused"))
def test_inference_after_a_change_of_weights(case, change) -> None:
    module = build(case).eval()
    before = {leading: infer(module, case, leading) for leading in ((5,), (1,), (5,))}
    name = change.removeprefix("train ")
    CHANGES[name](module.train(change != name), case).eval()
    for leading, earlier in before.items():
        now = infer(module, case, leading)
        assert_close(now, expected(module, case, leading), TOLERANCE)
        assert (now - earlier).norm() > 1e-3 * earlier.norm()


class Scaled(nn.Module):
    """A parametrisation whose result depends on what is no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("factor", torch.ones(1))

    def forward(self, weight: Tensor) -> Tensor:
        return weight * self.factor


@every_case
def test_inference_after_a_change_of_what_stands_in_for_parameters(case) -> None:
    """Masks and parametrisations have values that are no parameters."""
    module, scaled = build(case).eval(), build(case).eval()
    for part in list(scaled.modules()):
        for name in [name for name, parameter in part._parameters.items() if parameter is not None]:
            parametrize.register_parametrization(part, name, Scaled())
    assert_close(infer(scaled, case), infer(module, case), TOLERANCE)
    for _, factor in scaled.named_buffers():
        if factor.is_floating_point():
            factor.fill_(1.7)
    assert_close(infer(scaled, case), infer(write_data(module, case), case), TOLERANCE)


@every_case
def test_gradients_of_a_network_that_computes_the_weights(case) -> None:
    module, computed = build(case).eval().requires_grad_(False), build(case).eval()
    factor = torch.ones((), requires_grad=True)
    for part in list(computed.modules()):
        for name in [name for name, parameter in part._parameters.items() if parameter is not None]:
            value = getattr(part, name).detach()
            delattr(part, name)
            setattr(part, name, factor * value)
    call(computed, *inputs(case)).square().sum().backward()

    def output(factor):
        given = {name: factor * parameter for name, parameter in module.named_parameters()}
        x, context = inputs(case)
        return call(functools.partial(torch.func.functional_call, module, given), x, context).square().sum()

    assert_close(factor.grad, torch.func.grad(output)(torch.ones(())), 1e-4)


@every_case
def test_inference_of_an_average_of_weights(case) -> None:
    module = build(case).eval()
    average = AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(0.5)).eval()
    average.update_parameters(module)
    infer(average.module, case)
    average.update_parameters(write_data(module, case))
    assert_close(infer(average.module, case), expected(average.module, case), TOLERANCE)


def trained(case, run) -> tuple[list[float], dict[str, Tensor]]:
    """The losses of some steps, each through ``run(module, x)``, and the weights after them."""
    module = build(case).train()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.02, fused=True)
    x, context = inputs(case)
    losses = []
    for seed in range(4):
        torch.manual_seed(seed)
        with in_context(context):
            loss = run(module, x.clone().requires_grad_()).square().mean()
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, module.state_dict()


@case_of_every_kind
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non_reentrant"])
def test_training_under_checkpointing(case, reentrant: bool) -> None:
    plain, weights = trained(case, lambda module, x: module(x))
    losses, found = trained(case, lambda module, x: checkpoint(module, x, use_reentrant=reentrant))
    assert losses == pytest.approx(plain, rel=1e-5)
    assert len(set(losses)) == len(losses)
    for name, value in weights.items():
        assert_close(found[name], value, 1e-4)


# Kept, because the user asked for it


def caching(module: nn.Module) -> list[CachingModule]:
    return [m for m in module.modules() if isinstance(m, CachingModule)]


def keeps(module: nn.Module) -> bool:
    return any(m.parameter_cache is not None for m in caching(module))


@every_case
def test_the_same_outputs_while_weights_are_promised(case) -> None:
    for leading in [(1,), (5,), (2, 3)]:
        module = build(case).eval()
        want = infer(module, case, leading)
        assert relinear.for_inference_(module) is module
        for _ in range(2):
            assert_close(infer(module, case, leading), want, TOLERANCE)
        assert_close(call(module, *inputs(case, leading)).detach(), want, TOLERANCE)


def end_by_training(module: nn.Module) -> None:
    module.train()
    assert not keeps(module)
    module.eval()


ENDS = {"train": end_by_training, "False": lambda module: relinear.for_inference_(module, False)}


@every_case
@pytest.mark.parametrize(
    "end", mostly_slow([f"{end} {name}" for end in ENDS for name in CHANGES], "train data", "False fused")
)
def test_the_promise_ends(case, end) -> None:
    module = relinear.for_inference_(build(case))
    infer(module, case)
    end, _, name = end.partition(" ")
    ENDS[end](module)
    assert not keeps(module)
    CHANGES[name](module, case)
    assert_close(infer(module, case), expected(module, case), TOLERANCE)


@case_of_every_kind
@every_change
def test_another_call_after_a_change(case, change) -> None:
    module = relinear.for_inference_(build(case))
    infer(module, case)
    relinear.for_inference_(CHANGES[change](module, case))
    assert_close(infer(module, case), expected(module, case), TOLERANCE)


@case_of_every_kind
@pytest.mark.parametrize("promised", [True, False])
def test_a_part_that_takes_the_place_of_another_is_what_runs(case, promised) -> None:
    module, other = build(case).eval(), write_data(build(case).eval(), case)
    if promised:
        relinear.for_inference_(module)
    for name, part in other.named_children():
        for leading in ((1,), (5,)):
            infer(module, case, leading)
        setattr(module, name, part)
        for leading in ((1,), (5,)):
            assert_close(infer(module, case, leading), infer(copy.deepcopy(module), case, leading), TOLERANCE)


@every_case
def test_a_bias_that_was_added_is_added(case) -> None:
    module = relinear.for_inference_(build(case, bias=False))
    before = infer(module, case, (1,))
    biased = getattr(module, "base", module)
    biased.bias = nn.Parameter(torch.ones(module.out_features))
    assert_close(infer(module, case, (1,)), infer(copy.deepcopy(module), case, (1,)), TOLERANCE)
    assert not torch.allclose(infer(module, case, (1,)), before)


@case_of_every_kind
def test_nothing_is_kept_of_a_parametrisation(case) -> None:
    """Neither while it is there, as it may depend on what is no parameter, nor afterwards."""
    module = relinear.for_inference_(build(case))
    before = {leading: infer(module, case, leading) for leading in ((1,), (5,))}
    given = [(part, name) for part in module.modules() for name, p in part._parameters.items() if p is not None]
    for part, name in given:
        parametrize.register_parametrization(part, name, Scaled())
    for leading, want in before.items():
        assert_close(infer(module, case, leading), want, TOLERANCE)
    for key, factor in module.named_buffers():
        if key.endswith(".factor"):
            factor.fill_(1.7)
    changed = write_data(build(case).eval(), case)
    for leading in before:
        assert_close(infer(module, case, leading), infer(changed, case, leading), TOLERANCE)
    for part, name in given:
        parametrize.remove_parametrizations(part, name, leave_parametrized=False)
    for leading, want in before.items():
        assert_close(infer(module, case, leading), want, TOLERANCE)


@every_case
def test_gradients_are_those_of_the_weights_as_they_are(case) -> None:
    module = relinear.for_inference_(build(case))
    infer(module, case)
    write_data(module, case)
    assert_close(call(module, *inputs(case)).detach(), expected(module, case), TOLERANCE)


@every_case
def test_other_parameters_for_one_call(case) -> None:
    module = relinear.for_inference_(build(case))
    x, context = inputs(case)
    want = infer(module, case)
    others = times(1.3, module.state_dict())
    fresh = case.config.build(module.in_features, module.out_features).eval()
    fresh.load_state_dict(others)
    with torch.no_grad(), in_context(context):
        for _ in range(2):
            assert_close(torch.func.functional_call(module, others, (x,)), infer(fresh, case), TOLERANCE)
            assert_close(module(x), want, TOLERANCE)


@pytest.mark.parametrize("case", mostly_slow(CASES, *COMPILED), ids=lambda case: case.name)
def test_compiled(case) -> None:
    torch.compiler.reset()  # rows share code, and there is a limit on how often one function is compiled
    module = relinear.for_inference_(build(case))
    want = infer(module, case)
    assert_close(infer(torch.compile(module, fullgraph=True, backend="eager"), case), want, TOLERANCE)


@case_of_every_kind
def test_copies_and_files_hold_nothing_of_it(case, tmp_path) -> None:
    module = build(case).eval()
    names = set(module.state_dict())
    buffer = io.BytesIO()
    torch.save(module, buffer)
    size = len(buffer.getvalue())
    relinear.for_inference_(module)
    infer(module, case)
    assert set(module.state_dict()) == names
    buffer = io.BytesIO()
    torch.save(module, buffer)
    assert len(buffer.getvalue()) <= size + 256
    buffer.seek(0)
    for other in (copy.deepcopy(module), torch.load(buffer, weights_only=False)):
        assert not keeps(other)
        write_data(other, case)
        assert_close(infer(other, case), expected(other, case), TOLERANCE)
    assert_close(infer(module, case), expected(module, case), TOLERANCE)


@case_of_every_kind
@pytest.mark.parametrize("promised", mostly_slow([True, False], True))
def test_threads_share_a_model(case, promised: bool) -> None:
    module = build(case).eval()
    leadings = [(1,), (5,), (2, 3), (40,)]
    want = {leading: infer(module, case, leading) for leading in leadings}

    def work(turn: int) -> None:
        for step in range(12):
            leading = leadings[(turn + step) % len(leadings)]
            assert_close(infer(module, case, leading), want[leading], TOLERANCE)

    with ThreadPoolExecutor(4) as pool:
        for _ in range(3):
            relinear.for_inference_(module, promised)
            list(pool.map(work, range(4)))


def test_a_part_of_a_model_goes_back_to_training() -> None:
    model = make_tiny_llama()
    relinear.replace_(model, {"q_proj": relinear.LowRank(rank=4)}, init="fresh")
    relinear.for_inference_(model)
    first, second = (layer.self_attn.q_proj for layer in model.model.layers)
    first.train()
    assert not keeps(first)
    assert keeps(second)


def test_code_that_owns_the_weights_leaves_things_as_they_were() -> None:
    module = relinear.Rotor().build(16, 16)
    with caching_for_inference(module):
        assert keeps(module)
        assert module.training
    assert not keeps(module)
    relinear.for_inference_(module)
    with caching_for_inference(module):
        pass
    assert keeps(module)


def test_perplexity_keeps_and_forgets() -> None:
    model = make_tiny_llama()
    relinear.replace_(model, {"q_proj": relinear.LowRank(rank=4)}, init="fresh")
    ids = torch.randint(96, (24,))
    data = Rows([{"input_ids": ids, "labels": ids}])
    during = []
    model.register_forward_pre_hook(lambda module, args: during.append(keeps(module)))
    before = relinear.perplexity(model, data)
    assert during == [False, False, True]  # the check that it predicts next tokens comes first
    assert not keeps(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, fused=True)
    model(input_ids=ids[None], labels=ids[None]).loss.backward()
    optimizer.step()
    after = relinear.perplexity(model, data)
    assert after.loss == pytest.approx(model(input_ids=ids[None], labels=ids[None]).loss.item(), rel=1e-4)
    assert after.loss != before.loss


def test_only_modules() -> None:
    with pytest.raises(ValueError, match="takes a model"):
        relinear.for_inference_({})


@pytest.mark.parametrize("first", ["offloaded", "promised"])
@pytest.mark.parametrize("config", [relinear.LowRank(rank=4), relinear.Rotor(depth=0, width=1)], ids=lambda c: c.kind)
def test_offloaded_models(first, config) -> None:
    model = make_tiny_llama()
    relinear.replace_(model, {"q_proj": config}, init="fresh")
    ids = torch.randint(96, (2, 7))
    with torch.no_grad():
        want = model(ids).logits
        if first == "promised":
            relinear.for_inference_(model)
            model(ids)
        accelerate.cpu_offload(model, execution_device="cpu")
        if first == "offloaded":
            relinear.for_inference_(model)
            assert not keeps(model)
        for _ in range(2):
            torch.testing.assert_close(model(ids).logits, want)


@every_case
def test_on_meta_nothing_is_kept(case) -> None:
    with torch.device("meta"):
        module = case.config.build(*case.shapes[0])
    assert not keeps(relinear.for_inference_(module))
