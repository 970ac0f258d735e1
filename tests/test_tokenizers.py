"""The tokenizers are real ones: they come back from a folder, lose nothing and do not depend on chance."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import relinear.data.tokenizers as tokenizers
from relinear.data import DataSettings, iter_texts, prepare_data
from relinear.data.tokenizers import (
    byte_tokenizer,
    encode,
    encode_documents,
    load_tokenizer,
    separator_id,
    text_start,
    train_bpe,
    windows,
)
from tiny_models import starting_tokenizer


@pytest.fixture(scope="module")
def as_bytes():
    return byte_tokenizer()


@pytest.fixture(scope="module")
def documents():
    return [text for _, text in zip(range(20), iter_texts(DataSettings(), "train"), strict=False)]


@pytest.fixture(scope="module")
def bpe(documents):
    return train_bpe(documents, 600, sum(map(len, documents)))


@given(text=st.text(st.characters(exclude_categories=("Cs",)), max_size=80))
def test_an_id_is_a_byte(as_bytes, text):
    ids = as_bytes(text)["input_ids"]
    assert bytes(ids) == text.encode()
    assert as_bytes.decode(ids) == text


def test_byte_specials(as_bytes):
    assert len(as_bytes) == 258
    assert (as_bytes.bos_token_id, as_bytes.eos_token_id, as_bytes.pad_token_id) == (256, 256, 257)
    assert as_bytes("a<|endoftext|>b")["input_ids"] == [97, 256, 98]
    assert as_bytes.decode([97, 256, 98], skip_special_tokens=True) == "ab"
    batch = as_bytes(["a", "bcd"], padding=True)
    assert batch["input_ids"][0].count(257) == 2


@pytest.mark.parametrize("name", ["as_bytes", "bpe"])
def test_saved_and_loaded(name, request, tmp_path):
    tokenizer = request.getfixturevalue(name)
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    text = "def f(x):\n    return 'ünï — 中文' # 🙂\n"
    assert loaded(text)["input_ids"] == tokenizer(text)["input_ids"]
    assert loaded.decode(loaded(text)["input_ids"]) == text
    assert loaded.eos_token_id == tokenizer.eos_token_id
    assert len(loaded) == len(tokenizer)


def test_bytes_in_bulk_are_what_the_tokenizer_gives(as_bytes):
    texts = ["plain", "ünï 🙂", "", "with <|endoftext|> inside", "<|pad|>"]
    for text in texts:
        (array,) = encode_documents(as_bytes, [text])
        assert array.tolist() == [*as_bytes(text)["input_ids"], 256]
    together = np.concatenate(list(encode_documents(as_bytes, texts)))
    assert together.tolist() == [i for text in texts for i in [*as_bytes(text)["input_ids"], 256]]


def test_bpe_has_the_size_asked_for_and_shortens(bpe, documents):
    assert len(bpe) == 600
    text = documents[0]
    ids = bpe(text)["input_ids"]
    assert bpe.decode(ids) == text
    assert len(ids) < 0.6 * len(text)


def test_bpe_is_deterministic(bpe, documents):
    again = train_bpe(documents, 600, sum(map(len, documents)))
    assert again.backend_tokenizer.to_str() == bpe.backend_tokenizer.to_str()


def test_bpe_of_a_large_corpus_sees_a_share_of_every_document(monkeypatch):
    monkeypatch.setattr(tokenizers, "_TRAINING_CHARACTERS", 1000)
    texts = [letter * 1000 for letter in "abcdefgh"]
    tokenizer = train_bpe(texts, 300, 8000)
    assert all(letter * 2 in tokenizer.get_vocab() for letter in "abcdefgh")


def test_bpe_in_bulk_is_what_the_tokenizer_gives(bpe, documents):
    together = np.concatenate(list(encode_documents(bpe, documents)))
    expected = [i for text in documents for i in [*bpe(text)["input_ids"], bpe.eos_token_id]]
    assert together.tolist() == expected


def test_a_tokenizers_truncation_and_padding_are_not_ours(bpe, documents, tmp_path):
    whole = [ids.tolist() for ids in encode_documents(bpe, documents[:3])]
    bpe(documents[:3], truncation=True, max_length=8, padding="max_length")
    set_to = bpe.backend_tokenizer.truncation, bpe.backend_tokenizer.padding
    assert all(set_to)
    try:
        assert [ids.tolist() for ids in encode_documents(bpe, documents[:3])] == whole
        assert (bpe.backend_tokenizer.truncation, bpe.backend_tokenizer.padding) == set_to
        bpe.save_pretrained(tmp_path / "saved")
    finally:
        bpe.backend_tokenizer.no_truncation()
        bpe.backend_tokenizer.no_padding()
    settings = DataSettings(tokenizer=str(tmp_path / "saved"), max_documents=20, cache_dir=tmp_path)
    assert len(prepare_data(settings).train.tokens) > 1000


def test_lone_surrogates_become_question_marks(as_bytes, bpe):
    for tokenizer in (as_bytes, bpe):
        broken, mended = (
            np.concatenate(list(encode_documents(tokenizer, [text]))).tolist() for text in ("a \ud83d", "a ?")
        )
        assert broken == mended == [*encode(tokenizer, ["a \ud83d"])[0], tokenizer.eos_token_id]


def test_what_a_tokenizer_puts_before_a_text():
    tokenizer = starting_tokenizer()
    tokenizer("text", truncation=True, max_length=2)
    assert text_start(tokenizer) == [257]
    assert text_start(byte_tokenizer()) == []


@pytest.mark.parametrize(
    ("ids", "start", "cut"),
    [
        (range(7), [], [[0, 1, 2], [3, 4, 5]]),
        (range(7), [9], [[9, 0, 1], [9, 2, 3], [9, 4, 5]]),
        ([9, 0, 1, 2, 3, 9, 4, 5], [9], [[9, 0, 1], [9, 2, 3], [9, 4, 5]]),
        ([0], [9], []),
    ],
)
def test_windows_begin_with_the_start(ids, start, cut):
    assert [window for _, _, window in windows(list(ids), start, 3)] == cut


def test_a_start_that_fills_a_window_is_refused():
    with pytest.raises(ValueError, match="puts 2 tokens before every text"):
        list(windows([1, 2, 3], [8, 9], 2))


def test_long_documents_are_cut_behind_a_line(monkeypatch, as_bytes, bpe):
    text = "".join(f"line {i}\n" for i in range(500)) + "x" * 1000
    monkeypatch.setattr(tokenizers, "_BATCH_CHARACTERS", 300)
    assert all(piece.endswith("\n") for piece in list(tokenizers._pieces(text))[:10])
    assert "".join(tokenizers._pieces(text)) == text
    for tokenizer in (as_bytes, bpe):
        ids = np.concatenate(list(encode_documents(tokenizer, [text, "next"])))
        assert tokenizer.decode(ids) == f"{text}<|endoftext|>next<|endoftext|>"
        assert (ids == tokenizer.eos_token_id).sum() == 2


def test_a_trained_tokenizer_comes_from_the_training_split(tmp_path):
    for split, word in (("train", "aaaa"), ("validation", "zzzz")):
        (tmp_path / f"{split}.txt").write_text(" ".join([word] * 100))
    data = prepare_data(DataSettings(data=str(tmp_path), tokenizer="bpe:300", sequence_length=4))
    vocabulary = data.tokenizer.get_vocab()
    assert "aaaa" in vocabulary
    assert "zz" not in vocabulary
    assert data.vocab_size == len(data.tokenizer) < 300


def test_any_tokenizer_of_a_folder(tmp_path, bpe):
    bpe.save_pretrained(tmp_path / "saved")
    data = prepare_data(DataSettings(tokenizer=str(tmp_path / "saved"), max_documents=20))
    assert data.vocab_size == 600
    assert (
        data.tokenizer.decode(data.train[0]["input_ids"])
        == next(iter_texts(DataSettings(max_documents=20)))[: len(data.tokenizer.decode(data.train[0]["input_ids"]))]
    )


def test_a_large_vocabulary_takes_four_bytes_a_token(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(70_000)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w1").save_pretrained(tmp_path / "large")
    (tmp_path / "text.txt").write_text("w69999 and w65536 " * 40)
    data = prepare_data(
        DataSettings(data=str(tmp_path / "text.txt"), tokenizer=str(tmp_path / "large"), sequence_length=4)
    )
    assert data.vocab_size == 70_000
    assert data.train.tokens.dtype == np.uint32
    assert data.train[0]["input_ids"].tolist() == [69_999, 0, 65_536, 69_999]


def test_wrong_tokenizers(tmp_path, as_bytes, monkeypatch):
    with pytest.raises(ValueError, match=r"cannot load the tokenizer '.*none'"):
        load_tokenizer(str(tmp_path / "none"))
    monkeypatch.setattr(tokenizers, "hub_in_reach", lambda: False)
    with pytest.raises(ValueError, match=r"cannot load the tokenizer 'nobody/none'"):
        load_tokenizer("nobody/none")
    for name, reason in {
        "nobody/none": "",
        "nobody": "",
        str(tmp_path / "none"): "",
        "./none": "",
        "a/b/none": "",
        "bpe:800": "a newly trained one would have other tokens",
        str(tmp_path): "no tokenizer was saved there",
        __file__: "no tokenizer was saved there",
    }.items():
        with pytest.raises(ValueError, match=rf"cannot load the tokenizer '.*' \({reason}.*\): it must be 'bytes'"):
            load_tokenizer(name)
    silent = byte_tokenizer()
    silent.eos_token = silent.bos_token = silent.pad_token = None
    with pytest.raises(ValueError, match="no end-of-text token to separate documents"):
        separator_id(silent)
