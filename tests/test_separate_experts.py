"""Experts that transformers holds as one tensor: taken apart, compressed, saved, loaded elsewhere, fused again."""

import json
import subprocess
import sys

import pytest
import torch
import transformers
from safetensors import safe_open

import relinear
from relinear.compression import compress
from relinear.compression.export import export_compressed_tensors
from relinear.compression.layer_statistics import StatisticsSums, shrunk_to_peers
from relinear.contract.calibration_statistics import CalibrationStatistics
from relinear.hf.attachments import attachments
from relinear.surgery.separate_experts import ExpertLayers, fuse_experts_, separate_experts
from tiny_models import VOCABULARY, make_family

KINDS = ["mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss"]
SETTINGS = {"tokens": 256, "sequence_length": 16, "batch_size": 8, "evaluate": False, "self_sampled": False}
IDS = torch.arange(1, 24)[None]

ELSEWHERE = """
import json, sys
import torch
import relinear
ids = torch.arange(1, 24)[None]
with torch.no_grad():
    models = {folder: relinear.from_pretrained(folder, dtype=torch.float32).eval() for folder in sys.argv[1:]}
    print(json.dumps({folder: model(ids).logits.tolist() for folder, model in models.items()}))
"""


def made(kind: str):
    torch.manual_seed(0)
    model = make_family(kind).eval()
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1 or "bias" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    return model


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


def tokens() -> list[torch.Tensor]:
    return [torch.randint(1, VOCABULARY, (1024,), generator=torch.Generator().manual_seed(0))]


@pytest.mark.parametrize("kind", KINDS)
def test_apart_they_compute_what_transformers_does_and_go_back(kind: str) -> None:
    model = made(kind)
    model.set_experts_implementation("eager")
    before, state = logits(model), {name: value.clone() for name, value in model.state_dict().items()}
    with separate_experts(model):
        assert not any("experts" in name and value.ndim > 2 for name, value in model.named_parameters())
        assert "separate_experts" in str(model.config.quantization_config)
        torch.testing.assert_close(logits(model), before, rtol=0, atol=2e-6)
    assert all(torch.equal(value, state.pop(name)) for name, value in model.state_dict().items())
    assert not state
    assert torch.equal(logits(model), before)
    assert not hasattr(model.config, "quantization_config")


def test_in_eight_bits_they_compute_nearly_the_same_and_fold_into_a_stock_model(tmp_path) -> None:
    model = made("gpt_oss")
    before = logits(model)
    relinear.attach_(model, "separate_experts")
    relinear.replace_(model, {r".*experts\..*": "quantized:bits=8,group=16"}, init="from_weight")
    differences = (logits(model) - before).abs().amax(-1)  # a token between two experts may go to the other one
    assert differences.quantile(0.9) < 0.02 * before.abs().max()
    fuse_experts_(model)
    assert any(isinstance(module, ExpertLayers) for module in model.modules())  # operators are no tensor
    after = logits(model)
    relinear.fold_(model, verbose=False)
    model.save_pretrained(tmp_path)
    stock = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert not any(type(module).__module__.startswith("relinear") for module in stock.modules())
    torch.testing.assert_close(logits(stock), after, rtol=0, atol=1e-5)


def test_taken_apart_in_the_base_model_they_fold_in_the_whole() -> None:
    model = made("mixtral")
    relinear.attach_(model.model, "separate_experts")
    relinear.replace_(model, {"q_proj": relinear.LowRank(rank=4)}, init="from_weight")
    before = logits(model)
    relinear.fold_(model, verbose=False)
    assert attachments(model) == attachments(model.model) == ()
    assert not any(isinstance(module, ExpertLayers) for module in model.modules())
    assert not hasattr(model.config, "quantization_config")
    torch.testing.assert_close(logits(model), before, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_compressed_with_their_experts_they_come_back_elsewhere(tmp_path) -> None:
    expected = {}
    for kind in ("mixtral", "qwen2_moe", "gpt_oss"):
        model, folder = made(kind), tmp_path / kind
        exclude = r".*experts\.1\..*" if kind == "qwen2_moe" else None  # some stay as they are
        report = compress(model, tokens(), bits=5, exclude=exclude, settings=SETTINGS, out_dir=folder)
        experts = [name for name in report.plan.replaced if ".experts." in name]
        assert len(experts) == 2 * 2 * (3 if exclude else 4), experts
        assert report.parameters_before == sum(p.numel() for p in made(kind).parameters())
        with safe_open(folder / "model" / "model.safetensors", "pt") as file:
            stored = sum(file.get_tensor(key).nbytes for key in file.keys())  # noqa: SIM118  it is no mapping
        assert abs(stored - report.bytes) < 0.01 * report.bytes
        expected[str(folder / "model")] = logits(model)
    ran = subprocess.run([sys.executable, "-c", ELSEWHERE, *expected], capture_output=True, text=True, timeout=200)
    assert ran.returncode == 0, ran.stderr[-2000:]
    for folder, values in json.loads(ran.stdout.splitlines()[-1]).items():
        torch.testing.assert_close(torch.tensor(values), expected[folder], rtol=0, atol=1e-5)


def test_a_plan_alone_and_a_refusal_leave_them_one_tensor(tmp_path) -> None:
    model = made("mixtral")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    settings = SETTINGS | {"candidates": ["quantized:group=16"]}
    report = compress(model, tokens(), bits=5, settings=settings, plan_only=True)
    assert any(".experts." in name for name in report.plan.replaced)
    with pytest.raises(ValueError, match="cannot be met"):
        compress(model, tokens(), bits=1, settings=SETTINGS, out_dir=tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert all(torch.equal(value, before.pop(name)) for name, value in model.state_dict().items())
    assert not before


def test_readers_that_take_no_experts_refuse_before_any_work(tmp_path) -> None:
    for reader, said in (("vllm", "transformers cannot load Mixtral"), ("llama.cpp", "got MixtralForCausalLM")):
        with pytest.raises(ValueError, match=said):
            compress(made("mixtral"), tokens(), settings=SETTINGS | {"reader": reader}, out_dir=tmp_path / "out")
    assert not (tmp_path / "out").exists()
    model = made("mixtral")
    relinear.attach_(model, "separate_experts")
    with pytest.raises(ValueError, match="transformers cannot load Mixtral"):
        export_compressed_tensors(model, tmp_path / "out")


def test_models_without_such_experts_are_refused() -> None:
    with pytest.raises(ValueError, match="no module of LlamaForCausalLM holds experts"):
        relinear.attach_(make_family("llama"), "separate_experts")


def test_an_expert_counts_by_the_tokens_that_reach_it() -> None:
    sums, layer, x = StatisticsSums(), torch.nn.Linear(2, 3), torch.randn(4, 2)
    sums.add_inputs("expert", x)
    sums.outputs["expert"] = torch.eye(3).double()
    found = sums.statistics({"expert": layer}, tokens=8)["expert"]
    torch.testing.assert_close(found.input_moment, (x.T @ x).double() / 4)
    torch.testing.assert_close(found.gradient_moment, torch.eye(3).double() / 8)


def test_experts_that_see_few_tokens_are_drawn_to_the_others() -> None:
    def seen(size: float, tokens: int) -> CalibrationStatistics:
        return CalibrationStatistics(size * torch.eye(4).double(), size * torch.eye(2).double(), tokens)

    names = [f"layers.0.experts.{number}.up_proj" for number in range(3)]
    given = dict(zip(names, [seen(1, 6), seen(5, 2), CalibrationStatistics.identity(4, tokens=0)], strict=True))
    found = shrunk_to_peers(given | {"layers.0.gate": seen(3, 1)})
    means = torch.eye(4).double() * (6 * 1 + 2 * 5) / 8, torch.eye(2).double() * (1 + 5) / 3
    assert found[names[0]] is given[names[0]]
    torch.testing.assert_close(found[names[1]].input_moment, 0.5 * means[0] + 0.5 * 5 * torch.eye(4).double())
    torch.testing.assert_close(found[names[1]].gradient_moment, 0.5 * means[1] + 0.5 * 5 * torch.eye(2).double())
    torch.testing.assert_close((found[names[2]].input_moment, found[names[2]].gradient_moment), means)
    assert found[names[2]].tokens == 4
    assert found["layers.0.gate"].tokens == 1  # it has no peers
