"""Conversations as data: written by the tokenizer's chat template, never as JSON."""

import json

import pytest
import torch

import relinear
from relinear.data import DataSettings, iter_texts, prepare_data
from relinear.data.tokenizers import byte_tokenizer, encode_documents
from relinear.distill.record import token_blocks
from tiny_models import make_family

TEMPLATE = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{{ eos_token }}\n{% endfor %}"
OPEN = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}\n{% endfor %}"
MESSAGES = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Be\u00adcause ö."}]


def chat_tokenizer(template: str = TEMPLATE):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def ids_of(documents, tokenizer) -> list[int]:
    return [token for array in encode_documents(tokenizer, documents) for token in array.tolist()]


def wanted(text: str, end: int = 256) -> list[int]:
    """The ids that the byte tokenizer gives a text with its end token written as ``|``."""
    return [token for part in text.split("|") for token in [*part.encode(), end]][:-1]


@pytest.mark.parametrize("form", [MESSAGES, {"messages": MESSAGES}, tuple(MESSAGES)])
def test_the_template_writes_conversations(form) -> None:
    text = "[user]Why?|\n[assistant]Be\u00adcause ö.|\n"
    blocks = token_blocks([form, "plain", form], chat_tokenizer(), 1, len(wanted(text)) * 2 + 6)
    assert blocks.flatten().tolist() == [*wanted(text), *b"plain", 256, *wanted(text)]


def test_what_the_template_leaves_open_is_closed() -> None:
    text = "[user]Why?\n[assistant]Be\u00adcause ö.\n"
    blocks = token_blocks([MESSAGES], chat_tokenizer(OPEN), 1, len(text.encode()) + 1)
    assert blocks.flatten().tolist() == [*text.encode(), 256]


def rows(path, count: int = 40):
    lines = [{"id": f"{i}", "messages": [{"role": "user", "content": f"Number {i}?"}]} for i in range(count)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_files_with_a_column_of_messages(suffix: str, tmp_path) -> None:
    path = rows(tmp_path / "chats.jsonl", 3)
    if suffix == "parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        table = pa.Table.from_pylist([json.loads(line) for line in path.read_text().splitlines()])
        path.unlink()
        path = tmp_path / "chats.parquet"
        pq.write_table(table, path)
    settings = DataSettings(data=str(path))
    documents = list(iter_texts(settings, "all", conversations=True))
    expected = [token for i in range(3) for token in wanted(f"[user]Number {i}?|\n")]
    assert ids_of(documents, chat_tokenizer()) == expected
    assert list(iter_texts(settings.replace(text_column="id"), "all")) == ["0", "1", "2"]
    with pytest.raises(ValueError, match="holds conversations, which only compress, distill and training read"):
        list(iter_texts(settings, "all"))


def test_training_data_follow_the_template(tmp_path) -> None:
    path = rows(tmp_path / "chats.jsonl")
    found = []
    for number, template in enumerate((TEMPLATE, OPEN)):
        chat_tokenizer(template).save_pretrained(tmp_path / f"tokenizer{number}")
        settings = {"tokenizer": str(tmp_path / f"tokenizer{number}"), "sequence_length": 8}
        data = prepare_data(DataSettings(data=str(path), cache_dir=tmp_path / "cache", **settings))
        found.append(data.train.tokens.tolist())
    assert bytes(t for t in found[0] if t < 256).startswith(b"[user]Number ")
    assert found[0] != found[1]


def test_refusals(tmp_path) -> None:
    with pytest.raises(ValueError, match="has no chat template"):
        token_blocks([MESSAGES], byte_tokenizer(), 1, 4)
    with pytest.raises(ValueError, match=r"chat template refuses .*Why"):
        token_blocks([MESSAGES], chat_tokenizer("{{ raise_exception('no users') }}"), 1, 4)
    with pytest.raises(ValueError, match="goes on with"):
        token_blocks(["text", torch.arange(4)], chat_tokenizer(), 1, 40)
    settings = DataSettings(data=str(rows(tmp_path / "one.jsonl", 1)))
    with pytest.raises(ValueError, match="one conversation, which cannot be divided"):
        list(iter_texts(settings, "train", conversations=True))


def test_compression_and_healing_on_conversations(tmp_path) -> None:
    settings = {"tokens": 512, "sequence_length": 16, "heal_tokens": 256, "keep": 0.7, "candidates": ["low_rank"]}
    settings |= {"evaluation_tokens": 64, "passages": 2, "self_sampled": False}
    chats = [[{"role": "user", "content": f"What comes after {i}?"}] for i in range(60)]
    model = make_family("llama", vocab_size=260)
    report = relinear.compress(model, chats, tokenizer=chat_tokenizer(), settings=settings, out_dir=tmp_path)
    assert report.calibration_tokens == 512
    assert report.healing is not None
