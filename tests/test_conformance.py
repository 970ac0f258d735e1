"""The same tests for every operator of ours: each row of ``cases.CASES``."""

import accelerate
import pytest
import torch

from cases import CASES, case_of_every_kind, model_with
from conftest import mostly_slow
from relinear.contract.operator import OperatorConfig
from relinear.kernels import native
from relinear.testing import Case, OperatorConformance
from relinear.testing.conformance import assert_close, assert_same_gradients, build, call, gradients, inputs


@pytest.fixture(autouse=True)
def _any_size(monkeypatch) -> None:
    """Small tensors take the implementations of large ones."""
    monkeypatch.setattr(native, "MIN_NATIVE_ENTRIES", 1)


class TestOperators(OperatorConformance):
    cases = CASES

    @pytest.mark.slow
    def test_compiles_as_one_graph(self, case: Case) -> None:
        super().test_compiles_as_one_graph(case)

    @pytest.mark.slow
    @pytest.mark.parametrize("mode", ["train", "eval"])
    def test_compiles_with_inductor(self, case: Case, mode: str) -> None:
        super().test_compiles_with_inductor(case, mode)

    def test_gradients_within_autocast(self, case: Case) -> None:
        """Also of a backward pass that runs within it, which recomputation and compilers do."""
        module, (x, context) = build(case), inputs(case)

        def summed(inside: bool) -> torch.Tensor:
            module.zero_grad()
            torch.manual_seed(2)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = call(module, x, context).float().square().sum()
                if inside:
                    loss.backward()
            if not inside:
                loss.backward()
            return torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None])

        assert_close(summed(True), summed(False), 1e-2)

    def test_autocast_leaves_double_precision(self, case: Case) -> None:
        """As it does in ``nn.Linear``."""
        module = build(case, dtype=torch.float64)
        x, context = inputs(case, dtype=torch.float64)

        def lowered(module, x, context):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return call(module, x, context)

        for mode in (True, False):
            module.train(mode)
            assert_close(lowered(module, x, context), call(module, x, context), 1e-12)
            exact = gradients(module, x, context)
            assert_same_gradients(gradients(module, x, context, lowered), exact, 1e-11)


@case_of_every_kind
@pytest.mark.parametrize("place", mostly_slow(["cpu", "disk"], "disk"))
def test_offloaded_weights(case: Case, place: str, tmp_path) -> None:
    """In a model whose weights are kept elsewhere."""
    model = model_with(case)
    ids = torch.randint(0, 96, (2, 7))
    with torch.no_grad():
        expected = model(ids).logits
        if place == "cpu":
            accelerate.cpu_offload(model, torch.device("cpu"))
        else:
            accelerate.disk_offload(model, tmp_path, torch.device("cpu"))
        assert all(parameter.is_meta for parameter in model.parameters())
        first, second = model(ids).logits, model(ids).logits
    assert_close(model(ids).logits.detach(), expected, 1e-6)  # outside of no_grad, as many call per model
    # one layer runs in another form here than with its weights in place: in one kernel or in two
    assert_close(first, expected, 1e-6)
    assert torch.equal(first, second)


def test_every_operator_has_a_row() -> None:
    kinds = {kind for kind, config in OperatorConfig.kinds().items() if config.__module__.startswith("relinear.")}
    assert kinds == {case.config.kind for case in CASES}
    assert len({case.name for case in CASES}) == len(CASES)


def test_a_wrong_count_of_flops_is_said_in_numbers(monkeypatch) -> None:
    case = next(case for case in CASES if case.config.kind == "low_rank")
    monkeypatch.setattr(case.config.module_class, "flops_per_token", lambda self: 3)
    with pytest.raises(AssertionError, match=r"flops_per_token\(\) says 3; the products of a forward pass take"):
        OperatorConformance().test_roles_and_cost(case)
    # of which a token takes a part, as it does of experts that are all computed
    monkeypatch.setattr(case.config.module_class, "inactive_per_token", lambda self: (0, 10_000))
    OperatorConformance().test_roles_and_cost(case)
