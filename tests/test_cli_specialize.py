"""``relinear specialize`` end to end, and its refusals."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2LMHeadModel

from relinear.data.tokenizers import load_tokenizer, vocabulary_size
from relinear_cli.main import main
from tiny_models import make_cgt


def test_specialize_command(tmp_path, capsys, tiny_gpt2):
    tokenizer = load_tokenizer("bytes")
    model = make_cgt(vocab_size=vocabulary_size(tokenizer))
    model.save_pretrained(tmp_path / "cgt")
    tokenizer.save_pretrained(tmp_path / "cgt")
    (tmp_path / "prefix.txt").write_text("A prefix to keep.")
    arguments = ["specialize", str(tmp_path / "cgt"), "--prefix-file", str(tmp_path / "prefix.txt")]
    assert main([*arguments, "--out", str(tmp_path / "out")]) == 0
    difference = float(capsys.readouterr().out.split()[-1])
    assert difference < 1e-5
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert type(stock) is GPT2LMHeadModel
    ids = torch.tensor([AutoTokenizer.from_pretrained(tmp_path / "out")(" Then more")["input_ids"]])
    y = model.context(torch.tensor([tokenizer("A prefix to keep.")["input_ids"]]))[:, -1]
    with torch.no_grad():
        torch.testing.assert_close(stock(ids).logits, model(ids, frozen_context=y).logits, atol=1e-5, rtol=1e-5)

    before = (tmp_path / "cgt" / "model.safetensors").read_bytes()
    assert main([*arguments, "--out", str(tmp_path / "cgt")]) == 2
    assert "is the model that is read" in capsys.readouterr().err
    assert (tmp_path / "cgt" / "model.safetensors").read_bytes() == before

    assert main([*arguments, "--out", str(tmp_path / "on"), "--first-position", "-1"]) == 0
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "on").config.n_positions == 64 - 17
    tiny_gpt2.save_pretrained(tmp_path / "gpt2")
    assert main(["specialize", str(tmp_path / "gpt2"), *arguments[2:], "--out", str(tmp_path / "x")]) == 2
    assert "CGT" in capsys.readouterr().err


@pytest.mark.parametrize("missing", ["model", "prefix"])
def test_missing_files(tmp_path, capsys, missing):
    if missing == "prefix":
        make_cgt().save_pretrained(tmp_path / "cgt")
    code = main(["specialize", str(tmp_path / "cgt"), "--prefix-file", str(tmp_path / "p"), "--tokenizer", "bytes",
                 "--out", str(tmp_path / "o")])  # fmt: skip
    assert code == 2
    assert str(tmp_path) in capsys.readouterr().err
