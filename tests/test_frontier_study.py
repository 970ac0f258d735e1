"""The comparison at equal bytes of results/compress: its rows and ``compress`` see one calibration."""

import importlib
import json
import sys

import pytest

from conftest import REPOSITORY, mostly_slow
from gguf_helpers import llama, tokenizer_of


@pytest.mark.parametrize("tied", mostly_slow([True, False], True))
def test_rows_of_the_layers_alone_share_a_calibration_of_two_corpora(tied: bool, tmp_path, monkeypatch) -> None:
    pytest.importorskip("numba")
    monkeypatch.syspath_prepend(str(REPOSITORY / "results" / "compress"))
    study = importlib.import_module("frontier")
    model = llama(max_position_embeddings=512, tie_word_embeddings=tied, num_hidden_layers=1)
    model.save_pretrained(tmp_path / "model")
    tokenizer_of().save_pretrained(tmp_path / "model")
    texts = []
    for corpus in "ab":
        (tmp_path / corpus).mkdir()
        texts.append(tmp_path / corpus / "text.txt")
        texts[-1].write_text(" ".join(f"{corpus}{n * n % 97} word {n}" for n in range(4000)))
    words = [tmp_path / "model", "--calibrate", *texts, "--evaluate", f"a={texts[0]}", "--window", 32, "--windows", 2]
    words += ["--passages", 0, "--tokens", 1024, "--rows", "uniform:4", "bits:5.0", "--state", tmp_path / "state"]
    monkeypatch.setattr(sys, "argv", ["frontier.py", *map(str, words), "--out", str(tmp_path / "rows.jsonl")])
    study.main()
    rows = {row["row"]: row for row in map(json.loads, (tmp_path / "rows.jsonl").read_text().splitlines())}
    assert rows["bits:5.0"]["bits"] == pytest.approx(5.0, abs=0.1)
