"""Old names of hooks and settings: they work for one version, and warn."""

from importlib import import_module

import pytest
import torch

import relinear
import relinear.operators.low_rank
import relinear.surgery.fold
from conftest import make_tiny_llama
from relinear.activations import Activation, HasHookPoints, LatentOperator, Patch, intervene
from relinear.bench.run import BenchSettings
from relinear.contract import config as registry
from relinear.contract.calibration_statistics import CalibrationStatistics
from relinear.distill import DistillSettings
from relinear.hf.training_loss import ModelWithObjective
from relinear.testing import Case
from relinear.training import FitSettings, Progress, TrainSettings, fit
from train_helpers import FIT, FIT_DATA


def test_hooks_of_the_version_before_work_under_their_old_names_and_warn() -> None:
    with pytest.warns(DeprecationWarning, match="OldLinear.from_moments has a new name: fit_to_calibration_"):

        class OldLinear(type(relinear.LowRank(rank=2).build(4, 4))):
            def from_moments(self, linear, statistics):
                super().from_moments(linear, statistics)
                self.fitted_by_old_hook = True

    layer = OldLinear(relinear.LowRank(rank=2), 6, 5, bias=False, dtype=torch.float64)
    expected = relinear.LowRank(rank=2).build(6, 5, bias=False, dtype=torch.float64)
    linear = torch.nn.Linear(6, 5, bias=False, dtype=torch.float64)
    statistics = CalibrationStatistics.identity(6)
    with pytest.warns(DeprecationWarning, match="from_moments has a new name: fit_to_calibration_"):
        layer.from_moments(linear, statistics)
    expected.fit_to_calibration_(linear, statistics)
    assert layer.fitted_by_old_hook
    torch.testing.assert_close(layer.to_dense(), expected.to_dense())


def test_a_fit_of_a_weight_works_under_its_old_name_and_warns() -> None:
    with pytest.warns(DeprecationWarning, match="OldLinear.from_linear has a new name: fit_to_linear_"):

        class OldLinear(relinear.operators.low_rank.LowRankLinear):
            def from_linear(self, source):
                self.fitted_by_old_hook = True
                return super().from_linear(source)

    linear = torch.nn.Linear(6, 5)
    layer = OldLinear(relinear.LowRank(rank=2), 6, 5).fit_to_linear_(linear)
    expected = relinear.LowRank(rank=2).build(6, 5)
    with pytest.warns(DeprecationWarning, match="from_linear has a new name: fit_to_linear_"):
        assert expected.from_linear(linear) is expected
    assert layer.fitted_by_old_hook
    torch.testing.assert_close(layer.to_dense(), expected.to_dense())
    torch.testing.assert_close(layer.bias, linear.bias)


def test_statistics_have_their_moments_under_their_old_names_and_warn() -> None:
    statistics = CalibrationStatistics(torch.eye(3), torch.eye(2))
    with pytest.warns(DeprecationWarning, match="inputs has a new name: input_moment"):
        assert statistics.inputs is statistics.input_moment
    with pytest.warns(DeprecationWarning, match="outputs has a new name: gradient_moment"):
        assert statistics.outputs is statistics.gradient_moment


def test_an_operator_with_fixed_fans_has_their_roles_and_a_case_takes_exact() -> None:
    class OldFans(relinear.operators.low_rank.LowRankLinear):
        finite_fan_in = ()
        fixed_fan_in = ("up",)

    layer = OldFans(relinear.LowRank(rank=2), 6, 5, bias=False)
    with pytest.warns(DeprecationWarning, match="aux_losses has a new name: auxiliary_losses"):
        assert layer.aux_losses() == {}
    with pytest.warns(DeprecationWarning, match="FoldReport.left has a new name: skipped"):
        assert relinear.surgery.fold.FoldReport((), {"q_proj": "not linear"}, None).left == {"q_proj": "not linear"}
    with pytest.warns(DeprecationWarning, match="fixed_fan_in has a new name: finite_fan_in"):
        assert not layer.param_roles()["up"].fan_in_scales
    with pytest.warns(DeprecationWarning, match="lossless_config"):
        case = Case(config=layer.config, exact=relinear.LowRank(rank=16))
    assert case.lossless_config == relinear.LowRank(rank=16)


def test_settings_of_the_version_before_load_under_their_old_names_and_warn() -> None:
    with pytest.warns(DeprecationWarning, match="model_start has a new name: model_init"):
        assert TrainSettings.load({"model_start": "torch"}).model_init == "torch"
    with pytest.warns(DeprecationWarning, match="batch_size has a new name: tokens_per_step"):
        assert DistillSettings.load({"batch_size": 64}).tokens_per_step == 64
    with pytest.warns(DeprecationWarning, match="TrainSettings.updated has a new name: replace"):
        assert TrainSettings().updated(steps=3).steps == 3
    recorded = FitSettings().model_dump(mode="json")
    assert FitSettings.upgraded(recorded | {"fan_in_base": None, "save_model": False}) == recorded
    with pytest.warns(DeprecationWarning, match="FitSettings has no save_model any more, which had no effect"):
        assert FitSettings(save_model=False) == FitSettings()
    with pytest.raises(ValueError, match="fan_in_base was removed; use parametrization='mup'"):
        TrainSettings(fan_in_base=512)
    recorded = BenchSettings().model_dump(mode="json")
    assert BenchSettings.upgraded(recorded | {"peers": True, "untuned": False}) == recorded


def test_a_module_with_taps_is_read_through_its_hooks() -> None:
    class OldGate(HasHookPoints, torch.nn.Module):
        def tap_sizes(self):
            return {"gate": 3}

        def forward(self, x):
            return self._tapped("gate", x)

    module = torch.nn.Sequential(OldGate())
    with intervene(module, {"gate": Patch(1.0)}), pytest.warns(DeprecationWarning, match="_tapped has a new name"):
        assert torch.equal(module(torch.zeros(2, 3)), torch.ones(2, 3))


def test_an_operator_with_a_latent_tap_is_read_through_it() -> None:
    class OldLatent(type(relinear.LowRank(rank=2).build(4, 4)), LatentOperator):
        latent_size = 2

        def forward(self, x):
            z = x @ self.down.T
            return (z if self._latent_tap is None else self._latent_tap(Activation(z, z, z))) @ self.up.T

    module = torch.nn.Sequential(OldLatent(relinear.LowRank(rank=2), 4, 4, bias=False))
    with (
        intervene(module, {"0": Patch(0.0)}),
        pytest.warns(DeprecationWarning, match=r'_latent_tap .*: hooked\("latent"'),
    ):
        assert not module(torch.ones(1, 4)).any()


def test_progress_has_the_names_of_the_version_before() -> None:
    progress = Progress("training", 3, 10, "train")
    with pytest.warns(DeprecationWarning, match="Progress.step has a new name: done"):
        assert (progress.step, progress.steps, progress.phase, progress.what) == (3, 10, "train", "training")


def test_a_callback_of_progress_may_be_none_as_before() -> None:
    assert fit(make_tiny_llama(), FIT_DATA, FIT, on_progress=None).steps == FIT.steps


def test_the_sizes_of_an_operator_are_its_candidates() -> None:
    with pytest.warns(DeprecationWarning, match="LowRank.sizes has a new name: candidates"):
        assert relinear.LowRank(rank=4).sizes(64, 32) == relinear.LowRank(rank=4).candidates(64, 32)


def test_an_attachment_with_for_part_is_asked_by_it(monkeypatch) -> None:
    monkeypatch.setitem(registry._REGISTRY, "attachment", dict(registry._REGISTRY["attachment"]))
    with pytest.warns(DeprecationWarning, match="OldBias.for_part has a new name: for_model"):

        @relinear.register
        class OldBias(relinear.contract.AttachmentConfig):
            kind = "old_bias"

            def for_part(self, model):
                return None

    assert OldBias().for_model(make_tiny_llama()) is None


@pytest.mark.parametrize("module", ["relinear.models.cgt", "relinear.models.cgt.objective"])
def test_a_model_with_an_objective_is_found_under_its_name_of_before(module: str) -> None:
    with pytest.warns(DeprecationWarning, match="GuidedTraining has a new name: .*ModelWithObjective"):
        assert import_module(module).GuidedTraining is ModelWithObjective
    assert not hasattr(import_module(module), "Nothing")


def test_keywords_of_0_2_work_and_warn() -> None:
    model = make_tiny_llama()
    with pytest.warns(DeprecationWarning, match=r"attach_\(method=\) has a new name"):
        relinear.attach_(model, method="rezero")
    with pytest.warns(DeprecationWarning, match=r"intervene\(edits=\) has a new name"):
        block = intervene(model, edits={"o_proj.output": Patch(0.0)})
    with block:
        assert torch.isfinite(model(torch.zeros(1, 3, dtype=torch.long)).logits).all()
