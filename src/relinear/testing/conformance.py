"""Define ``OperatorConformance``: the same pytest tests for every operator, parametrised by cases."""

# Legend: I in, O out, T tokens

import contextlib
import copy
import json
from collections.abc import Sequence
from typing import Any, ClassVar

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode
from transformers.pytorch_utils import Conv1D

from relinear.activations.hooks import hook_points, observe
from relinear.activations.interventions import Add, intervene
from relinear.activations.shared_context import context as activations_context
from relinear.contract.operator import NotLinearError, Operator, OperatorConfig
from relinear.surgery.summary import module_inactive
from relinear.testing.case import Case

LEADING = [(), (1, 1), (2, 3), (2, 1, 3)]


def build(case: Case, shape=None, *, seed=0, dtype=torch.float32, bias=True, config=None) -> Operator:
    """Return the case's operator with all parameters changed at random, as an initial zero would hide errors."""
    torch.manual_seed(seed)
    in_features, out_features = shape or case.shapes[0]
    module = (config or case.config).build(in_features, out_features, bias=bias, dtype=dtype)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return module


def inputs(case: Case, leading=(5,), shape=None, *, seed=1, dtype=torch.float32) -> tuple[Tensor, Tensor | None]:
    """Return an input x (*leading, I) and its context (*leading, context_dim); None if the case reads no context."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*leading, (shape or case.shapes[0])[0], generator=generator, dtype=dtype)
    if case.context_dim is None:
        return x, None
    return x, torch.randn(*leading, case.context_dim, generator=generator, dtype=dtype)


def in_context(context: Tensor | None) -> Any:
    """Return a ``with`` block in which operators read ``context``."""
    return contextlib.nullcontext() if context is None else activations_context(context)


def call(module: nn.Module, x: Tensor, context: Tensor | None = None, *, seed=2) -> Tensor:
    """Return the output of a forward pass with fixed noise."""
    torch.manual_seed(seed)
    with in_context(context):
        return module(x)


def gradients(module: nn.Module, x: Tensor, context: Tensor | None, run=call) -> dict[str, Tensor | None]:
    """Return the gradients of a loss (of outputs and auxiliary losses) for the input and every parameter."""
    module.zero_grad()
    x = x.clone().requires_grad_()
    y = run(module, x, context)
    # Positive, so that nothing cancels in sums, and exact in every dtype.
    weight = torch.linspace(0.5, 1.5, y.numel()).bfloat16().to(y.dtype).view(y.shape)
    loss = (y * weight).sum() + sum(value.to(y.dtype) for value in module.auxiliary_losses().values())
    loss.backward()
    return {"input": x.grad} | {name: p.grad for name, p in module.named_parameters()}


def assert_close(actual, expected, tolerance: float) -> None:
    """Check the relative error in the Frobenius norm."""
    assert actual.shape == expected.shape
    scale = expected.double().norm().item()
    assert (actual.double() - expected.double()).norm().item() <= tolerance * max(scale, 1e-3)


def assert_same_gradients(actual: dict, expected: dict, tolerance: float) -> None:
    """Check that the same parameters have gradients, and that these are close."""
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        assert (actual[name] is None) == (gradient is None), name
        if gradient is not None:
            assert_close(actual[name], gradient, tolerance)


def target(shape: tuple[int, int], kind: str = "Linear", dtype=torch.float64) -> nn.Module:
    """Return a layer to be replaced: nn.Linear, or the same map as GPT-2's Conv1D."""
    torch.manual_seed(5)
    linear = nn.Linear(*shape, dtype=dtype)
    if kind == "Linear":
        return linear
    conv = Conv1D(shape[1], shape[0]).to(dtype)
    with torch.no_grad():
        conv.weight.copy_(linear.weight.T)
        conv.bias.copy_(linear.bias)
    return conv


def fit_error(case: Case, module: Operator, linear: nn.Module) -> float:
    """Return the relative error of the outputs against those of ``linear``."""
    x, context = inputs(case, (256,), (module.in_features, module.out_features), dtype=torch.float64)
    with torch.no_grad():
        y = linear(x)
        return ((call(module.eval(), x, context) - y).norm() / y.norm()).item()


class OperatorConformance:
    """Test what every operator must do: subclass it as ``Test...`` in a test file and set its ``cases``.

    Add a case for each variant that takes another path through the code. Compiling with inductor takes the longest by
    far; ``pytest -k "not inductor"`` skips it.
    """

    cases: ClassVar[Sequence[Case]] = ()

    def pytest_generate_tests(self, metafunc: Any) -> None:
        if "case" in metafunc.fixturenames:
            metafunc.parametrize("case", self.cases, ids=lambda case: case.name)

    @pytest.fixture(autouse=True)
    def _seed(self) -> None:
        torch.manual_seed(0)

    # The map itself

    @pytest.mark.parametrize("bias", [True, False], ids=["bias", "no_bias"])
    def test_forward_equals_its_dense_matrix(self, case: Case, bias: bool) -> None:
        for shape in case.shapes:
            module = build(case, shape, dtype=torch.float64, bias=bias).eval()
            x, context = inputs(case, (3, 2), shape, dtype=torch.float64)
            if not case.linear:
                with pytest.raises(NotLinearError), in_context(context):
                    module.to_dense()
                continue
            with in_context(context):
                dense, offset = module.to_dense(), module.dense_bias()
            assert dense.shape[-2:] == shape[::-1]
            expected = (dense @ x.unsqueeze(-1)).squeeze(-1)
            assert_close(call(module, x, context), expected if offset is None else expected + offset, 1e-12)
            if not bias and context is None:  # as the embedding of tokens
                ids = torch.tensor([[0], [shape[1] - 1]])
                assert_close(module.rows(ids), dense[ids], 1e-12)

    @pytest.mark.parametrize("mode", ["train", "eval"])
    def test_any_leading_shape(self, case: Case, mode: str) -> None:
        module = build(case, dtype=torch.float64).train(mode == "train")
        for leading in LEADING:
            x, context = inputs(case, leading, dtype=torch.float64)
            y = call(module, x, context)
            assert y.shape == (*leading, module.out_features)
            assert y.dtype == x.dtype
            assert torch.isfinite(y).all()
            flat = call(
                module, x.reshape(-1, x.shape[-1]), None if context is None else context.reshape(-1, context.shape[-1])
            )
            assert_close(y.reshape(flat.shape), flat, 1e-12)

    def test_no_tokens(self, case: Case) -> None:
        module = build(case).eval()
        x, context = inputs(case, (2, 0))
        assert call(module, x, context).shape == (2, 0, module.out_features)

    def test_strided_input(self, case: Case) -> None:
        module = build(case, dtype=torch.float64)
        x, context = inputs(case, (4, 6), dtype=torch.float64)
        strided = x.transpose(0, 1).contiguous().transpose(0, 1)
        assert not strided.is_contiguous()
        assert_close(call(module, strided, context), call(module, x, context), 1e-12)

    def test_tokens_do_not_see_the_future(self, case: Case) -> None:
        module = build(case, dtype=torch.float64)
        x, context = inputs(case, (2, 6), dtype=torch.float64)
        before = call(module, x, context)
        x[:, 4:] += 1
        if context is not None:
            context[:, 4:] -= 1
        after = call(module, x, context)
        assert_close(after[:, :4], before[:, :4], 1e-12)
        assert not torch.allclose(after[:, 4:], before[:, 4:])

    def test_eval_is_deterministic_and_free_of_losses(self, case: Case) -> None:
        module = build(case)
        x, context = inputs(case)
        call(module, x, context)
        module.eval()
        assert torch.equal(call(module, x, context, seed=3), call(module, x, context, seed=4))
        assert module.auxiliary_losses() == {}

    def test_training_losses_and_metrics_are_scalars(self, case: Case) -> None:
        module = build(case)
        for leading in [(2, 5), (3,)]:
            x, context = inputs(case, leading)
            call(module, x, context)
            for name, value in module.auxiliary_losses().items():
                assert value.shape == (), name
                assert value.requires_grad, name
            for name, value in module.metrics().items():
                assert value.shape == (), name
                assert not value.requires_grad, name

    @pytest.mark.parametrize("mode", ["train", "eval"])
    def test_hook_points_are_read_and_changed(self, case: Case, mode: str) -> None:
        module = build(case).train(mode == "train")
        points = hook_points(module)
        assert all("." not in point.name and point.name != "output" for point in points.values())
        x, context = inputs(case, (2, 5))
        y = call(module, x, context)
        seen: dict[str, Tensor] = {}
        with observe(module, lambda name, activation: seen.update({name: activation.z}), points):
            assert_close(call(module, x, context), y, 1e-5)
        assert {name: tuple(z.shape) for name, z in seen.items()} == {n: (2, 5, p.size) for n, p in points.items()}
        for name in points:
            with intervene(module, {name: Add(0.25)}):
                assert not torch.equal(call(module, x, context), y), f"an intervention on {name} changes nothing"

    # Gradients and precision

    @pytest.mark.parametrize("mode", ["train", "eval"])
    def test_gradients_against_finite_differences(self, case: Case, mode: str) -> None:
        module = build(case, dtype=torch.float64).train(mode == "train")
        x, context = inputs(case, (3,), dtype=torch.float64)
        names = [name for name, _ in module.named_parameters()]

        def function(x, context, *parameters):
            torch.manual_seed(0)
            with in_context(context):
                y = torch.func.functional_call(module, dict(zip(names, parameters)), (x,))
            return (y, *module.auxiliary_losses().values())

        leaves = [
            None if t is None else t.detach().clone().requires_grad_() for t in (x, context, *module.parameters())
        ]
        assert torch.autograd.gradcheck(function, leaves, fast_mode=True)  # type: ignore[arg-type]  # None: no context

    def test_bfloat16_against_float32(self, case: Case) -> None:
        low = build(case).eval().bfloat16()
        high = copy.deepcopy(low).float()
        x, context = inputs(case, (4, 8))
        x, context = x.bfloat16(), None if context is None else context.bfloat16()
        expected = call(high, x.float(), None if context is None else context.float())
        y = call(low, x, context)
        assert y.dtype == torch.bfloat16
        assert_close(y, expected, case.bf16_tolerance)
        gradient = gradients(low, x, context)
        assert all(g is None or g.dtype == torch.bfloat16 for g in gradient.values())
        exact = gradients(high, x.float(), None if context is None else context.float())
        assert_same_gradients(gradient, exact, case.bf16_tolerance)

    def test_autocast(self, case: Case) -> None:
        module = build(case).eval()
        x, context = inputs(case, (4, 8))

        def run(module, x, context):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return call(module, x, context)

        assert_close(run(module, x, context), call(module, x, context), case.bf16_tolerance)
        module.train()
        assert all(g is None or g.dtype == torch.float32 for g in gradients(module, x, context, run).values())

    def test_checkpointing_keeps_the_gradients(self, case: Case) -> None:
        module = build(case, dtype=torch.float64)
        x, context = inputs(case, (2, 5), dtype=torch.float64)

        def twice(module, x, context):
            return call(module, x, context) + call(module, 2 * x, context)

        def recomputed(module, x, context):
            def block(x, context):
                return call(module, x, context)

            first = checkpoint(block, x, context, use_reentrant=False)
            return first + checkpoint(block, 2 * x, context, use_reentrant=False)

        assert_same_gradients(gradients(module, x, context, recomputed), gradients(module, x, context, twice), 1e-12)

    def test_compiles_as_one_graph(self, case: Case) -> None:
        torch._dynamo.reset()
        module = build(case)
        compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
        x, context = inputs(case, (2, 5))

        def run(module, x, context):
            with in_context(context):
                torch.manual_seed(2)
                return compiled(x)

        expected, losses = gradients(module, x, context), module.auxiliary_losses()
        assert_same_gradients(gradients(module, x, context, run), expected, 1e-5)
        assert module.auxiliary_losses().keys() == losses.keys()
        for name, value in losses.items():
            assert_close(module.auxiliary_losses()[name], value, 1e-5)

    @pytest.mark.parametrize("mode", ["train", "eval"])
    def test_compiles_with_inductor(self, case: Case, mode: str) -> None:
        torch._dynamo.reset()
        module = build(case).train(mode == "train")
        x, context = inputs(case, (2, 5))
        compiled = torch.compile(module, fullgraph=True)
        if mode == "eval":
            with torch.no_grad(), in_context(context):
                assert_close(compiled(x), module(x), 1e-4)
            return
        with in_context(context):
            y = compiled(x)
        (y.sum() + sum(module.auxiliary_losses().values())).backward()
        for name, parameter in module.named_parameters():
            assert parameter.grad is None or torch.isfinite(parameter.grad).all(), name

    # State

    def test_saved_weights_load_into_another_seed(self, case: Case, tmp_path) -> None:
        saved, loaded = build(case, seed=0).eval(), build(case, seed=1).eval()
        safetensors.torch.save_file(saved.state_dict(), tmp_path / "operator.safetensors")
        loaded.load_state_dict(safetensors.torch.load_file(tmp_path / "operator.safetensors"), strict=True)
        x, context = inputs(case)
        assert torch.equal(call(loaded, x, context), call(saved, x, context))

    def test_deepcopy_after_a_training_forward(self, case: Case) -> None:
        module = build(case)
        x, context = inputs(case)
        call(module, x, context)
        copied = copy.deepcopy(module)
        assert copied.auxiliary_losses() == {}
        assert all(torch.equal(a, b) for a, b in zip(copied.state_dict().values(), module.state_dict().values()))
        assert torch.equal(call(copied.eval(), x, context), call(module.eval(), x, context))

    def test_meta_device(self, case: Case) -> None:
        shape = case.shapes[0]
        module = case.config.build(*shape, device="meta")
        assert all(tensor.is_meta for tensor in (*module.parameters(), *module.buffers()))
        module.to_empty(device="cpu")
        with torch.no_grad():
            for tensor in (*module.parameters(), *module.buffers()):
                tensor.fill_(float("nan") if tensor.is_floating_point() else 77)
        direct = case.config.build(*shape)
        for operator in (module, direct):
            torch.manual_seed(0)
            operator.reset_parameters()
        for name, value in direct.state_dict().items():
            assert torch.equal(module.state_dict()[name], value), name
        x, context = inputs(case)
        assert torch.equal(call(module, x, context), call(direct, x, context))

    def test_config_round_trip(self, case: Case) -> None:
        values = json.loads(json.dumps(case.config.to_dict()))
        assert OperatorConfig.from_dict(values) == case.config
        first = next((key for key in values if key != "kind"), "kind")
        with pytest.raises(ValueError, match=first):
            OperatorConfig.from_dict(values | {first + "_": 1})

    def test_roles_and_cost(self, case: Case) -> None:
        for shape in case.shapes:
            module = build(case, shape).eval()
            roles = module.param_roles()
            assert roles.keys() == {name for name, _ in module.named_parameters()}
            assert all(role.lr_multiplier > 0 and (role.fan_in is None or role.fan_in > 0) for role in roles.values())
            x, context = inputs(case, (64,), shape)
            with FlopCounterMode(display=False) as counter:
                call(module, x, context)
            counted = counter.get_total_flops() / 64
            # The counter sees products only, and another implementation may need a few more or less than the formula.
            # A forward pass of an operator that routes may compute every part, or only those that a token uses.
            stated, inactive = module.flops_per_token(), module_inactive(module)[1]
            message = f"flops_per_token() says {stated:,}; the products of a forward pass take {counted:,.0f} a token"
            message += f", and inactive_per_token() explains {inactive:,} of them"
            assert stated <= 2 * counted + 64 * sum(shape), message
            assert 0.5 * counted <= stated + inactive, message

    def test_scaled_is_a_valid_setting(self, case: Case) -> None:
        for shape in case.shapes:
            for scale in (0.5, 1.0, 2.0):
                scaled = case.config.scaled(*shape, scale)
                if scaled is not None:
                    assert type(scaled) is type(case.config)
                    scaled.build(*shape)

    # Replacing a layer

    def test_fit_of_a_weight(self, case: Case) -> None:
        for shape in case.shapes:
            linear = target(shape)
            torch.manual_seed(0)
            module = case.config.build(*shape, dtype=torch.float64)
            if not case.config.fits_weight:
                with pytest.raises(ValueError, match="distill"):
                    module.fit_to_linear_(linear)
                continue
            fresh = fit_error(case, module, linear)
            assert module.fit_to_linear_(linear) is module
            fitted = fit_error(case, module, linear)
            assert fitted <= fresh
            assert fitted < 1
            torch.manual_seed(0)
            from_conv = case.config.build(*shape, dtype=torch.float64).fit_to_linear_(target(shape, "Conv1D"))
            assert abs(fit_error(case, from_conv, linear) - fitted) < 1e-8
            with pytest.raises(ValueError, match="size"):
                module.fit_to_linear_(nn.Linear(shape[0] + 1, shape[1], dtype=torch.float64))
            if case.lossless_config is not None:
                exact = case.lossless_config.build(*shape, dtype=torch.float64).fit_to_linear_(linear)
                assert fit_error(case, exact, linear) <= case.exact_tolerance

    @pytest.mark.parametrize("kind", ["Linear", "Conv1D"])
    def test_conversion_keeps_dtype_mode_and_requires_grad(self, case: Case, kind: str) -> None:
        shape = case.shapes[0]
        source = target(shape, kind, torch.bfloat16).eval().requires_grad_(False)
        for init in ("fresh", "from_weight") if case.config.fits_weight else ("fresh",):
            operator = case.config.convert(source, init)
            assert (operator.in_features, operator.out_features) == shape
            assert not operator.training
            assert all(p.dtype == torch.bfloat16 and not p.requires_grad for p in operator.parameters())
            assert operator.bias is not None
        assert case.config.convert(nn.Linear(*shape, bias=False)).bias is None
