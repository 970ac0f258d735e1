"""What earlier versions wrote (``fixtures/``, by ``fixtures/make.py``) loads, resumes and is reported by this one."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoConfig

import relinear
from relinear.distill import run as distill_run
from relinear.training import read_metrics, train
from relinear.training import run as train_run
from relinear_cli.main import main

FIXTURES = Path(__file__).parent / "fixtures"
#: kinds that no version has had yet; the next one's fixtures have them
UNRELEASED = {"quantized", "separate_experts"}
VERSIONS = sorted(path.name for path in FIXTURES.glob("v*"))
CHECKPOINTS = sorted(path.relative_to(FIXTURES) for path in FIXTURES.glob("v*/checkpoints/*"))

every_version = pytest.mark.parametrize("version", VERSIONS)


@pytest.fixture(params=[False, True], ids=["now", "later"])
def later(request, monkeypatch):
    """As this version is, and as one that has a setting more: what was written without it still goes on."""
    if request.param:
        for module, name in ((train_run, "TrainSettings"), (distill_run, "DistillSettings")):
            settings = getattr(module, name)
            more = type(name, (settings,), {"__annotations__": {"added": int}, "added": 3, "__module__": __name__})
            monkeypatch.setattr(module, name, more)


@pytest.fixture
def work(tmp_path, monkeypatch):
    """Copies the work of a version to a folder that may be written to, and goes there."""

    def copy(version: str) -> Path:
        shutil.copytree(FIXTURES / version, tmp_path / version)
        monkeypatch.chdir(tmp_path / version)
        # a process for every run would take most of the time
        monkeypatch.setattr("relinear.compare.run.runs_at_once", lambda recipe: 0)
        return tmp_path / version

    return copy


def load(path: Path):
    """Either through transformers' own classes or, for models that those do not know, through the one that is named."""
    (name,) = AutoConfig.from_pretrained(path).architectures
    return getattr(relinear, name, relinear).from_pretrained(path)


@pytest.mark.parametrize("checkpoint", CHECKPOINTS, ids=str)
def test_checkpoints_give_the_logits_they_gave(checkpoint: Path) -> None:
    path = FIXTURES / checkpoint
    outputs = load_file(path.parents[1] / "outputs.safetensors")
    if path.name not in outputs:  # of a kind that came later
        outputs |= load_file(path.parents[1] / f"outputs-{path.name}.safetensors")
    model = load(path).eval()
    regression = getattr(model.config, "input_features", None) is not None
    with torch.no_grad():
        logits = model(outputs["vectors" if regression else "ids"]).logits
    torch.testing.assert_close(logits, outputs[path.name], rtol=1e-4, atol=1e-5)


@every_version
def test_every_kind_has_a_checkpoint(version: str) -> None:
    """Of the first version; later ones may leave out what they did not change."""
    text = "".join(path.read_text() for path in FIXTURES.glob("v*/checkpoints/*/config.json"))
    for family in (relinear.LowRank, relinear.residual.ReZero):
        own = {kind: c for kind, c in family.kinds().items() if c.__module__.startswith("relinear.")}
        assert not [kind for kind in own if f'"{kind}"' not in text and kind not in UNRELEASED]


@every_version
@pytest.mark.usefixtures("later")
def test_a_killed_run_goes_on_to_its_end(version: str, work) -> None:
    folder = work(version)
    settings = json.loads((folder / "run" / "run.json").read_text())["settings"]
    seen = []
    result = train(settings, "run", on_progress=lambda progress: seen.append(progress.done))
    assert min(seen) == 2  # it did not begin anew
    ends = json.loads((folder / "run-ends.json").read_text())
    assert result.validation_loss == pytest.approx(ends["validation_loss"], rel=1e-5)
    rows, before = read_metrics(folder / "run" / "metrics.jsonl"), ends["curve"]
    assert [row["step"] for row in rows] == [row["step"] for row in before]
    losses = [[row["validation_loss"] for row in r if row.get("validation_loss") is not None] for r in (rows, before)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@every_version
def test_a_comparison_is_reported_again(version: str, work, capsys) -> None:
    folder = work(version)
    before = (folder / "comparison" / "report.html").read_text()
    results = json.loads((folder / "comparison" / "results.json").read_text())
    assert main(["report", "comparison"]) == 0
    printed = capsys.readouterr().out
    after = (folder / "comparison" / "report.html").read_text()
    assert sorted(path.stem for path in (folder / "comparison" / "plots").glob("*.svg")) == [
        "curves",
        "pareto",
        "speeds",
    ]
    for entry in results["entries"]:
        mean = f"{entry['validation_loss']['mean']:.3f}"
        assert entry["name"] in printed
        assert mean in before
        assert mean in after


@pytest.fixture
def _no_plots(monkeypatch):
    monkeypatch.setattr("relinear.compare.report.save_panels", lambda panels, stem: None)


@every_version
@pytest.mark.usefixtures("_no_plots")
def test_a_comparison_that_ended_is_known_by_its_recipe(version: str, work) -> None:
    folder = work(version)
    written = (folder / "comparison" / "results.json").read_bytes()
    assert main(["compare", "--recipe", "recipe.yaml", "--out", "comparison"]) == 0
    assert (folder / "comparison" / "results.json").read_bytes() == written


@every_version
@pytest.mark.usefixtures("_no_plots")
def test_a_comparison_that_was_cut_off_goes_on(version: str, work) -> None:
    folder = work(version)
    before = json.loads((folder / "comparison" / "results.json").read_text())
    (folder / "comparison" / "results.json").unlink()
    entries = yaml.safe_load((folder / "recipe.yaml").read_text())["entries"]
    shutil.rmtree(folder / "comparison" / "runs" / list(entries)[-1] / "seed-1")
    assert main(["compare", "--recipe", "recipe.yaml", "--out", "comparison"]) == 0
    after = json.loads((folder / "comparison" / "results.json").read_text())
    for one, other in zip(before["entries"], after["entries"], strict=True):
        assert one["validation_loss"]["values"] == pytest.approx(other["validation_loss"]["values"], rel=1e-5)


@every_version
@pytest.mark.usefixtures("later")
def test_a_killed_distillation_goes_on_to_its_end(version: str, work) -> None:
    folder = work(version)
    given = load_file(folder / "distillation.safetensors")
    ids = load_file(folder / "outputs.safetensors")["ids"]
    settings = json.loads((folder / "distillation.json").read_text())
    model, fitted = relinear.from_pretrained(folder / "distillation-base").eval(), []
    relinear.distill_(
        model,
        {"q_proj": relinear.LowRank(rank=3)},
        given["blocks"],
        settings=settings,
        out_dir="distillation",
        on_progress=lambda progress: progress.stage == "evaluate" or fitted.append(progress.text.partition(" ")[2]),
    )
    assert all("layers.1." in name for name in fitted)  # it did not begin anew
    for again in (model, relinear.from_pretrained(folder / "distillation" / "model").eval()):
        with torch.no_grad():
            torch.testing.assert_close(again(ids).logits, given["logits"], rtol=1e-4, atol=1e-5)
