"""Killed at any stage and started again, a compression leaves the same bytes."""

import json

import pytest
import torch

from conftest import mostly_slow
from relinear.compression import compress
from relinear.compression import run as stages
from relinear.data.tokenizers import byte_tokenizer
from relinear.system.progress import Progress, no_progress
from tiny_models import make_family

SETTINGS = {"tokens": 256, "sequence_length": 16, "batch_size": 4, "evaluate": False}
SETTINGS |= {"candidates": ["low_rank"], "self_sampled": False}
SETTINGS |= {"heal_tokens": 512, "heal_learning_rate": 3e-3}


class _Kill(BaseException):
    pass


def killing(stage: str):
    """A callback that ends the work in the middle of ``stage``."""

    def told(progress: Progress) -> None:
        if progress.stage == stage and 2 * progress.done >= progress.total:
            raise _Kill

    return told


def run(folder, on_progress=no_progress) -> dict[str, bytes]:
    """What the compression leaves in its two directories, by file."""
    ids = torch.randint(1, 260, (2048,), generator=torch.Generator().manual_seed(0))
    compress(
        make_family("llama", vocab_size=260),
        [ids],
        keep=0.7,
        settings=SETTINGS,
        tokenizer=byte_tokenizer(),
        out_dir=folder,
        on_progress=on_progress,
    )
    places = [folder / "model"]
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for place in places
        for path in place.rglob("*")
        if path.is_file()
    }


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> dict[str, bytes]:
    return run(tmp_path_factory.mktemp("whole"))


@pytest.mark.parametrize("stage", mostly_slow(["forward", "candidates", "fit", "heal"], "fit"))
def test_killed_while_it_computes(stage: str, whole, tmp_path) -> None:
    with pytest.raises(_Kill):
        run(tmp_path, killing(stage))
    assert not (tmp_path / "model").exists()
    assert run(tmp_path) == whole


def test_a_second_run_gives_the_same_and_heals_nothing_anew(whole, tmp_path) -> None:
    healed: list[int] = []

    def told(progress: Progress) -> None:
        if progress.stage == "heal":
            healed.append(progress.done)

    assert run(tmp_path) == whole
    figures = json.loads((tmp_path / "report.json").read_text())["healing"]
    assert run(tmp_path, told) == whole
    assert not healed
    assert json.loads((tmp_path / "report.json").read_text())["healing"] == figures


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["plan", "save"])
def test_killed_while_it_writes(stage: str, whole, tmp_path, monkeypatch) -> None:
    from transformers import LlamaForCausalLM

    saved = LlamaForCausalLM.save_pretrained

    def save_pretrained(model, folder, **kwargs):
        saved(model, folder, **kwargs)  # the files are there, the directory is not in its place yet
        raise _Kill

    def save_plan(*args, **kwargs):
        raise _Kill

    with monkeypatch.context() as patch:
        patch.setattr(LlamaForCausalLM, "save_pretrained", save_pretrained)
        if stage == "plan":
            patch.setattr(stages.CompressPlan, "save", save_plan)
        with pytest.raises(_Kill):
            run(tmp_path)
    assert not (tmp_path / "model").exists()
    assert run(tmp_path) == whole


INTEGERS = {"tokens": 256, "sequence_length": 16, "batch_size": 4, "bits": 4.25}
INTEGERS |= {"evaluation_tokens": 96, "candidates": ["quantized"]}


def integers(folder, on_progress=no_progress) -> dict[str, bytes]:
    """What integers of bits by layer leave: plan and model."""
    ids = torch.randint(1, 260, (2048,), generator=torch.Generator().manual_seed(0))
    model = make_family("llama", vocab_size=260)
    more = {"settings": INTEGERS, "tokenizer": byte_tokenizer(), "out_dir": folder, "on_progress": on_progress}
    compress(model, [ids], targets="down_proj", **more)
    found = [folder / "plan.json", *(path for path in (folder / "model").rglob("*") if path.is_file())]
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


@pytest.fixture(scope="module")
def whole_integers(tmp_path_factory) -> dict[str, bytes]:
    return integers(tmp_path_factory.mktemp("integers"))


@pytest.mark.parametrize("stage", mostly_slow(["forward", "candidates", "fit", "judging", "report"], "fit", "report"))
def test_integers_killed_in_every_stage(stage: str, whole_integers, tmp_path, monkeypatch) -> None:
    evaluated: list[int] = []
    evaluate = stages.evaluate

    def judged(*given, **named):
        evaluated.append(1)
        if len(evaluated) == 2:  # of the compressed model
            raise _Kill
        return evaluate(*given, **named)

    def reported(*given):
        raise _Kill

    with monkeypatch.context() as patch:
        if stage == "judging":
            patch.setattr(stages, "evaluate", judged)
        if stage == "report":
            patch.setattr(stages, "write_page", reported)
        with pytest.raises(_Kill):
            integers(tmp_path / "killed", killing(stage))
    # the report states the size of the file, so the model is there by then
    assert (tmp_path / "killed" / "model").exists() == (stage == "report")
    if stage in ("judging", "report"):
        assert list((tmp_path / "killed" / "calibration").glob("fit-*")), "fits are kept until the report is written"
    assert integers(tmp_path / "killed") == whole_integers


def test_everything_that_is_left_was_written(whole) -> None:
    names = {name.rpartition("/")[2] for name in whole}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= names


@pytest.mark.slow
def test_a_calibration_of_the_same_weights_under_another_config_is_refused(tmp_path) -> None:
    ids = torch.randint(1, 260, (2048,), generator=torch.Generator().manual_seed(0))
    run(tmp_path)
    other = make_family("llama", vocab_size=260)
    other.config.rms_norm_eps = 0.1
    with pytest.raises(ValueError, match="holds the calibration of another model"):
        compress(other, [ids], keep=0.7, settings=SETTINGS, out_dir=tmp_path)
