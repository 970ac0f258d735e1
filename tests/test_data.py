"""Corpora, splits, packing and the cache of tokens."""

import gzip
import json
import multiprocessing
import pickle
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import relinear.data.packing as packing
from relinear.data import DataSettings, iter_texts, prepare_data
from relinear.data.corpora import open_corpus


def words(start, count=40):
    return " ".join(f"word{i}" for i in range(start, start + count))


def settings(data, **changes):
    return DataSettings(data=str(data), **({"sequence_length": 16} | changes))


def texts(data, split="train", **changes):
    return list(iter_texts(settings(data, **changes), split))


def write_jsonl(path, rows, column="text"):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({column: row}) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture
def rows(tmp_path):
    return write_jsonl(tmp_path / "rows.jsonl", [words(i * 10) for i in range(100)])


@pytest.fixture(scope="module")
def stdlib(tmp_path_factory):
    return prepare_data(DataSettings(cache_dir=tmp_path_factory.mktemp("stdlib")))


# The standard library


def test_stdlib_is_there_and_divided_by_file(stdlib):
    train, validation = (set(iter_texts(DataSettings(), split)) for split in ("train", "validation"))
    import argparse
    import email.message

    for module in (argparse, email.message):
        assert Path(module.__file__).read_text() in train | validation
    assert not train & validation
    shares = {split: counts["characters"] for split, counts in stdlib.description["splits"].items()}
    assert 0.04 < shares["validation"] / sum(shares.values()) < 0.06


def test_stdlib_packs_bytes(stdlib):
    assert stdlib.vocab_size == 258
    block = stdlib.train[5]
    assert block["input_ids"].shape == (256,)
    assert block["input_ids"].dtype == torch.int64
    assert torch.equal(block["input_ids"], block["labels"])
    first = next(iter_texts(DataSettings(), "train"))
    start = stdlib.train.tokens[: len(first.encode()) + 1]
    assert bytes(start[:-1].astype(np.uint8)).decode() == first
    assert start[-1] == stdlib.tokenizer.eos_token_id
    assert len(stdlib.train) == len(stdlib.train.tokens) // 256
    assert stdlib.train.tokens.dtype == np.uint16


def test_the_seed_decides_what_is_held_out(rows):
    def held_out(seed):
        return texts(rows, "validation", seed=seed)

    assert held_out(0) == held_out(0)
    assert held_out(0) != held_out(1)


# Local files


def test_every_document_is_on_one_side(rows):
    train, validation = texts(rows), texts(rows, "validation")
    assert sorted(train + validation) == sorted(texts(rows, "all"))
    assert len(train + validation) == 100
    assert 3 <= len(validation) <= 7
    assert 15 <= len(texts(rows, "validation", validation_fraction=0.2)) <= 25


def test_copies_of_a_document_stay_together(tmp_path):
    path = write_jsonl(tmp_path / "rows.jsonl", [words(i % 20) for i in range(100)])
    for seed in range(5):
        train, validation = texts(path, seed=seed), texts(path, "validation", seed=seed)
        assert not set(train) & set(validation)
        assert len(train + validation) == 100


def test_given_splits_are_used_and_cleaned_of_each_other(tmp_path):
    write_jsonl(tmp_path / "train.jsonl", ["only train", "in validation", "in test", "in all", "only train"])
    write_jsonl(tmp_path / "validation.jsonl", ["in validation", "only validation", "in all\n"])
    write_jsonl(tmp_path / "test.jsonl", ["in test", "in all", "only test"])
    write_jsonl(tmp_path / "extra.jsonl", ["no split"])
    assert texts(tmp_path) == ["only train", "only train"]
    assert texts(tmp_path, "validation") == ["in validation", "only validation"]
    assert texts(tmp_path, "test") == ["in test", "in all", "only test"]


def test_validation_is_held_out_where_only_test_is_given(tmp_path):
    rows = [words(i) for i in range(30)]
    write_jsonl(tmp_path / "train-00000-of-00001.jsonl", rows)
    write_jsonl(tmp_path / "test" / "part.jsonl", rows[:10])
    train, validation = texts(tmp_path), texts(tmp_path, "validation", validation_fraction=0.1)
    assert validation
    assert not (set(train) | set(validation)) & set(rows[:10])
    assert set(train) | set(validation) <= set(rows)


def test_a_folder_without_split_names_is_one_corpus_of_the_kind_that_takes_most_room(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "b.txt").write_text("text b")
    (tmp_path / "deep" / "a.md").write_text("text a, which is long")
    (tmp_path / "train-of-thought.html").write_text("no known kind")
    (tmp_path / ".hidden.txt").write_text("hidden")
    write_jsonl(tmp_path / "c.jsonl", ["x"])
    with pytest.warns(UserWarning, match=r"ignored in .*: c\.jsonl, train-of-thought\.html$"):
        assert texts(tmp_path, "all") == ["text b", "text a, which is long"]
    data = prepare_data(settings(tmp_path, sequence_length=2, validation_fraction=0.5))
    assert data.description["not_read"] == ["c.jsonl", "train-of-thought.html"]


@pytest.mark.parametrize("folder", ["data", "some-config", "."])
def test_a_downloaded_data_set_keeps_its_splits_and_its_card_is_no_text(tmp_path, folder):
    (tmp_path / "README.md").write_text("---\nlicense: mit\n---\nThe card.")
    (tmp_path / folder).mkdir(exist_ok=True)
    for split in ("train", "test"):
        rows = {"text": [f"{split} {i}" for i in range(3)]}
        pq.write_table(pa.table(rows), tmp_path / folder / f"{split}-00000-of-00001.parquet")
    with pytest.warns(UserWarning, match="ignored in .*: README.md"):
        assert open_corpus(settings(tmp_path)).splits == ("train", "validation", "test")
    assert set(texts(tmp_path) + texts(tmp_path, "validation")) == {"train 0", "train 1", "train 2"}
    assert texts(tmp_path, "test") == ["test 0", "test 1", "test 2"]


def test_a_card_may_say_what_the_data_are(tmp_path):
    for name in ("a", "b", "t"):
        write_jsonl(tmp_path / "data" / f"{name}.jsonl", [f"{name} 1", f"{name} 2"])
    files = "\n".join(
        f"  - split: {split}\n    path: data/{name}.jsonl" for split, name in [("train", "a"), ("test", "t")]
    )
    others = "- config_name: second\n  data_files: data/b.jsonl"
    (tmp_path / "README.md").write_text(f"---\nconfigs:\n- config_name: first\n  data_files:\n{files}\n{others}\n---\n")
    assert sorted(texts(f"{tmp_path}:first") + texts(f"{tmp_path}:first", "validation")) == ["a 1", "a 2"]
    assert texts(f"{tmp_path}:first", "test") == ["t 1", "t 2"]
    assert sorted(texts(f"{tmp_path}:second") + texts(f"{tmp_path}:second", "validation")) == ["b 1", "b 2"]
    for name in (tmp_path, f"{tmp_path}:third"):
        with pytest.raises(ValueError, match=r":NAME chooses a configuration.*'first', 'second'"):
            texts(name)


@pytest.mark.parametrize("name", ["ptb.{}.txt", "{}.txt", "{}-00000-of-00001.txt", "{}/a.txt", "wiki_{}_2.txt"])
def test_splits_are_named_by_files_and_folders(tmp_path, name):
    for split in ("train", "valid", "test"):
        path = tmp_path / name.format(split)
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"text of {split}")
    found = {split: texts(tmp_path, split) for split in open_corpus(settings(tmp_path)).splits}
    assert found == {"train": ["text of train"], "validation": ["text of valid"], "test": ["text of test"]}


def test_files_that_name_no_split_train_beside_a_test(tmp_path):
    for name in ("notes.txt", "testament.txt", "test.txt"):
        (tmp_path / name).write_text(f"the words of {name}")
    assert set(open_corpus(settings(tmp_path)).splits) == {"train", "validation", "test"}
    assert texts(tmp_path, "test") == ["the words of test.txt"]


def test_links_are_followed_and_may_go_in_a_circle(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "a.txt").write_text("text a")
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "b.txt").symlink_to(tmp_path / "elsewhere" / "a.txt")
    (tmp_path / "corpus" / "linked").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "corpus" / "again").symlink_to(tmp_path / "corpus")
    assert texts(tmp_path / "corpus", "all") == ["text a", "text a"]
    (tmp_path / "elsewhere" / "a.txt").write_text("text of another length")
    assert texts(tmp_path / "corpus", "all") == ["text of another length"] * 2


def test_patterns_and_names_that_look_like_patterns(tmp_path):
    for name in ("a[1].txt", "b.txt", "c.md"):
        (tmp_path / name).write_text(f"text {name}")
    assert texts(tmp_path / "*.txt", "all") == ["text a[1].txt", "text b.txt"]
    assert texts(tmp_path / "a[1].txt", "all") == ["text a[1].txt"]
    assert len(texts(tmp_path, "all")) == 3


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("rows.jsonl.gz", gzip.compress(b'{"text": "one"}\n{"text": "two"}\n', mtime=0)),
        ("rows.csv", b"id,text\n1,one\n2,\n3,two\n"),
        ("rows.tsv", b"id\ttext\n1\tone\n3\ttwo\n"),
        ("rows.json", b'[{"text": "one"}, {"text": "two"}]'),
    ],
)
def test_other_kinds_of_tables(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    for path in (tmp_path, tmp_path / name):
        assert texts(path, "all") == ["one", "two"]
        assert texts(path, "all", max_documents=1) == ["one"]


@pytest.mark.parametrize("first", [{"id": "a", "text": None}, {"id": "a"}, {"n": 1, "text": ""}])
def test_the_first_row_decides_nothing(tmp_path, first):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in (first, {"id": "b", "text": "one"}, {"text": "two"})))
    for changes in ({}, {"text_column": "text"}, {"max_documents": 3}):
        assert texts(path, "all", **changes) == ["one", "two"]


def test_nothing_is_left_beside_the_text(tmp_path, no_network):
    write_jsonl(tmp_path / "corpus" / "train.jsonl", ["one", "two"])
    assert set(texts(tmp_path / "corpus") + texts(tmp_path / "corpus", "validation")) == {"one", "two"}
    assert [path.name for path in (tmp_path / "corpus").rglob("*")] == ["train.jsonl"]


@pytest.fixture
def no_network(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("the network was asked")

    for name in ("connect", "connect_ex"):
        monkeypatch.setattr(f"socket.socket.{name}", refuse)
    monkeypatch.setattr("socket.getaddrinfo", refuse)


def test_what_datasets_says_is_not_printed(tmp_path, capfd):
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n{"text"\n')
    with pytest.raises(ValueError, match=r"rows\.jsonl': JSON parse error"):
        texts(tmp_path, "all")
    assert capfd.readouterr() == ("", "")


def test_a_single_text_is_cut_in_two_at_a_paragraph(tmp_path):
    path = tmp_path / "book.txt"
    path.write_text("\n\n".join(words(i) for i in range(50)))
    (train,), (validation,) = texts(path, validation_fraction=0.1), texts(path, "validation", validation_fraction=0.1)
    assert train + validation == path.read_text()
    assert train.endswith("\n\n")
    assert len(validation) / len(train + validation) == pytest.approx(0.1, abs=0.02)


def test_a_single_text_without_any_break_is_cut_where_it_must(tmp_path):
    path = tmp_path / "long.txt"
    path.write_text("x" * 1000)
    assert [len(text) for split in ("train", "validation") for text in texts(path, split)] == [950, 50]


def test_two_documents_are_never_both_held_out(tmp_path):
    path = write_jsonl(tmp_path / "two.jsonl", [words(0, 10), words(5, 500)])
    assert texts(path, "validation") == [words(0, 10)]
    assert texts(path) == [words(5, 500)]


@pytest.mark.parametrize(
    "type_", [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())]
)
def test_parquet(tmp_path, type_):
    table = pa.table({"title": ["a", "b"], "body": pa.array([words(0), None], type_), "text": ["t1", "t2"]})
    pq.write_table(table, tmp_path / "rows.parquet")
    assert texts(tmp_path / "rows.parquet", "all") == ["t1", "t2"]
    assert texts(tmp_path / "rows.parquet", "all", text_column="body") == [words(0)]


def test_the_only_column_of_strings_is_taken(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"id": 1, "content": "abc"}\n\n{"id": 2, "content": null}\n')
    assert texts(path, "all") == ["abc"]


def test_max_documents_reads_the_first(rows):
    assert texts(rows, "all", max_documents=7) == [words(i * 10) for i in range(7)]


def test_byte_order_marks_are_left_out(tmp_path):
    (tmp_path / "bom.txt").write_bytes(b"\xef\xbb\xbfwith mark")
    assert texts(tmp_path, "all") == ["with mark"]


# The Hub


@pytest.fixture
def hub(monkeypatch):
    """Stands in for the Hub: keeps what was asked, and answers with data sets in memory."""
    import datasets

    asked = []
    parts = {"train": [words(i) for i in range(30)], "validation": [words(100)]}

    def load_dataset(name, config=None, streaming=False):
        asked.append((name, config, streaming))
        if name == "nobody/broken":
            raise ValueError("BuilderConfig 'x' not found. Available: ['y']\nmore")
        loaded = {split: datasets.Dataset.from_dict({"text": rows}) for split, rows in parts.items()}
        if name == "nobody/odd":
            return {"everything": loaded["train"]}
        return {split: part.to_iterable_dataset() if streaming else part for split, part in loaded.items()}

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr("relinear.data.sources.hub_in_reach", lambda: True)
    return asked


def test_hub_data_by_name_and_config(hub):
    assert texts("nobody/some:config") == [words(i) for i in range(30)]
    assert texts("nobody/some", "validation") == [words(100)]
    assert hub == [("nobody/some", "config", False), ("nobody/some", None, False)]
    assert prepare_data(settings("nobody/some")).description["splits"]["train"]["documents"] == 30


def test_a_part_of_hub_data_is_streamed_once(hub, tmp_path):
    for _ in range(2):
        assert texts("nobody/some", max_documents=3, cache_dir=tmp_path) == [words(i) for i in range(3)]
    assert hub == [("nobody/some", None, True)]


def test_the_hub_out_of_reach_is_one_error(monkeypatch):
    monkeypatch.setattr("relinear.data.sources.hub_in_reach", lambda: False)
    with pytest.raises(ValueError, match=r"'nobody/some' is not a local file.*cannot be reached"):
        texts("nobody/some")


@pytest.mark.parametrize(
    ("name", "said"),
    [("nobody/broken", r"BuilderConfig 'x' not found. Available: \['y'\] more\. "), ("nobody/odd", "everything")],
)
def test_wrong_hub_data(hub, name, said):
    with pytest.raises(ValueError, match=said):
        texts(name)


# Packing and the cache


def test_blocks_are_the_documents_end_to_end(rows):
    data = prepare_data(settings(rows))
    expected = b"".join(text.encode() + b"\0" for text in texts(rows))
    stream = np.concatenate([data.train[i]["input_ids"].numpy() for i in range(len(data.train))])
    assert bytes(np.where(stream == 256, 0, stream).astype(np.uint8)) == expected[: len(stream)]
    assert len(expected) - len(stream) < 16
    counts = data.description["splits"]["train"]
    assert counts == {
        "documents": len(texts(rows)),
        "characters": len(expected) - len(texts(rows)),
        "bytes": len(expected) - len(texts(rows)),
        "tokens": len(expected),
    }


def test_blocks_are_indexed_like_a_list(rows):
    data = prepare_data(settings(rows)).train
    assert torch.equal(data[-1]["input_ids"], data[len(data) - 1]["input_ids"])
    for index in (len(data), -len(data) - 1):
        with pytest.raises(IndexError):
            data[index]
    block = data[0]
    block["labels"][0] = -100
    assert (block["input_ids"] >= 0).all()


def test_max_validation_tokens(rows):
    whole = prepare_data(settings(rows)).validation
    some = prepare_data(settings(rows, max_validation_tokens=50)).validation
    assert len(some) == 3 < len(whole)
    assert torch.equal(some[2]["input_ids"], whole[2]["input_ids"])


def test_workers_and_pickles_do_not_carry_the_tokens(stdlib):
    assert len(pickle.dumps(stdlib.train)) < 1000
    loader = torch.utils.data.DataLoader(stdlib.train, batch_size=4, num_workers=1)
    assert torch.equal(next(iter(loader))["input_ids"][3], stdlib.train[3]["input_ids"])


@pytest.fixture
def builds(monkeypatch):
    """How often documents were tokenised."""
    calls = []
    encode = packing.encode_documents

    def counting(*args):
        calls.append(1)
        return encode(*args)

    monkeypatch.setattr(packing, "encode_documents", counting)
    return calls


def test_the_cache_is_used_until_something_changes(rows, tmp_path, builds):
    def prepare(**changes):
        before = len(builds)
        prepare_data(settings(rows, cache_dir=tmp_path / "cache", **changes))
        return len(builds) > before

    assert prepare()
    assert not prepare()
    assert not prepare(sequence_length=8, max_validation_tokens=32)
    for changes in ({"seed": 1}, {"validation_fraction": 0.1}, {"max_documents": 50}, {"tokenizer": "bpe:300"}):
        assert prepare(**changes)
        assert not prepare(**changes)
    with rows.open("a") as file:
        file.write(json.dumps({"text": "one more"}) + "\n")
    assert prepare()


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove", "manifest", "empty"])
def test_a_damaged_entry_is_built_again(rows, tmp_path, builds, damage):
    def prepare():
        return prepare_data(settings(rows, cache_dir=tmp_path / "cache")).train

    data = prepare()
    expected = data.tokens.copy()
    manifest = data.path.parent / "manifest.json"
    if damage == "flip":
        content = bytearray(data.path.read_bytes())
        content[-3] ^= 1
        data.path.write_bytes(content)
    elif damage == "truncate":
        data.path.write_bytes(data.path.read_bytes()[:-10])
    elif damage == "remove":
        data.path.unlink()
    elif damage == "manifest":
        manifest.write_text(manifest.read_text()[:-20])
    else:
        manifest.write_text("")
    assert np.array_equal(prepare().tokens, expected)
    assert len(builds) == 4
    assert [path.name for path in (tmp_path / "cache" / "tokens").iterdir() if path.name.startswith(".")] == []


def test_an_entry_that_fails_leaves_nothing(rows, tmp_path, monkeypatch):
    def fail(*_):
        raise RuntimeError("killed")

    monkeypatch.setattr(packing, "encode_documents", fail)
    with pytest.raises(RuntimeError):
        prepare_data(settings(rows, cache_dir=tmp_path / "cache"))
    assert list((tmp_path / "cache" / "tokens").iterdir()) == []
    monkeypatch.undo()
    assert len(prepare_data(settings(rows, cache_dir=tmp_path / "cache")).train)


def _prepare_in_a_process(path, cache):
    return prepare_data(DataSettings(data=path, cache_dir=cache, sequence_length=16)).train.tokens.sum()


@pytest.mark.slow
def test_processes_may_ask_for_one_entry_at_once(rows, tmp_path):
    with multiprocessing.get_context("spawn").Pool(3) as pool:
        sums = pool.starmap(_prepare_in_a_process, [(str(rows), tmp_path / "cache")] * 3)
    assert len(set(sums)) == 1
    assert len([path for path in (tmp_path / "cache" / "tokens").iterdir() if not path.suffix]) == 1  # but the lock


def test_the_cache_folder(rows, tmp_path, monkeypatch):
    monkeypatch.setenv("RELINEAR_CACHE", str(tmp_path / "named"))
    assert prepare_data(settings(rows)).train.path.is_relative_to(tmp_path / "named")
    monkeypatch.delenv("RELINEAR_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert prepare_data(settings(rows)).train.path.is_relative_to(tmp_path / "home" / ".cache" / "relinear")


def test_progress_is_told(rows, tmp_path):
    told = []
    prepare_data(settings(rows, cache_dir=tmp_path / "cache", tokenizer="bpe:300"), on_progress=told.append)
    assert [progress.text for progress in told] == [
        "training the tokenizer",
        "tokenising train",
        "tokenising validation",
    ]
    assert told[1].done == sum(map(len, texts(rows)))


# Wrong input


@pytest.mark.parametrize(
    ("content", "changes", "said"),
    [
        ({"rows.jsonl": '{"body": "a", "title": "b"}\n'}, {}, r"no column 'text'.*body, title"),
        ({"rows.jsonl": '{"body": "a", "n": 1}\n'}, {"text_column": "bdy"}, r"no column 'bdy'.*columns of text: body"),
        (
            {"rows.jsonl": '{"body": "a", "n": 1}\n'},
            {"text_column": "n"},
            r"column 'n' has no text.*columns of text: body",
        ),
        ({"rows.jsonl": '{"text": "a", "id": "b"}\n{"text": 1, "id": "c"}\n'}, {}, r"column 'text' has no text"),
        ({"rows.jsonl": '{"text": "a"}\n{"text"\n'}, {}, r"rows\.jsonl': JSON parse error.* row 1"),
        ({"rows.jsonl": b'{"text": "\xff"}\n'}, {}, r"'text' has text that is not UTF-8"),
        ({"rows.jsonl": '{"text": "a\\ud800b"}\n'}, {}, r"rows\.jsonl': .*surrogate"),
        ({"rows.parquet": b"PAR1 nothing"}, {}, r"rows\.parquet'.*not a parquet file"),
        ({"a.txt": b"\xff\xfe\x00"}, {}, r"a\.txt cannot be read"),
        ({"a.txt": ""}, {}, r"has no text"),
        ({"a.txt": " \n "}, {}, r"has no text"),
        ({"a.txt": "short"}, {}, r"train split .* has 6 tokens, too few for one sequence of 16"),
        ({"a.txt": words(0)}, {"validation_fraction": 0.01}, r"validation split .* raise validation_fraction"),
        ({"a.txt": words(0, 400)}, {"max_validation_tokens": 3}, r"max_validation_tokens=3 is less than"),
        ({"a.html": "<p>"}, {}, r"no file can be read \(a\.html\); known: \.txt, "),
        ({"validation.txt": "a", "test.txt": "b"}, {}, r"no 'train' split; it has validation, test"),
        ({"train.txt": "same text", "test.txt": "same text"}, {}, r"every training document .* in its test split"),
        ({"train.txt": "same text", "validation.txt": "same text"}, {}, r"train split .* has 0 tokens"),
    ],
)
def test_wrong_text_is_one_clear_error(tmp_path, content, changes, said):
    folder = tmp_path / "corpus"
    folder.mkdir()
    for name, value in content.items():
        (folder / name).write_bytes(value if isinstance(value, bytes) else value.encode())
    with pytest.raises(ValueError, match=said):
        prepare_data(settings(folder, **changes))


def test_wrong_places(tmp_path):
    (tmp_path / "books").mkdir()
    (tmp_path / "page.html").write_text("<p>")
    with pytest.raises(ValueError, match=r"did you mean '.*/books'"):
        texts(tmp_path / "boks")
    with pytest.raises(ValueError, match=r"did you mean 'stdlib'"):
        texts("stdlb")
    with pytest.raises(ValueError, match=r"^'/nonexistent' does not exist\."):
        texts("/nonexistent")
    with pytest.raises(ValueError, match=r"no file can be read \(page\.html\)"):
        texts(tmp_path / "page.html")


def test_a_compressed_file_without_a_format_is_left_out(tmp_path):
    for name in ("a.txt", "dump.gz"):
        (tmp_path / name).write_text(f"text {name}")
    with pytest.warns(UserWarning, match=r"dump\.gz"):
        assert texts(tmp_path, "all") == ["text a.txt"]
    with pytest.raises(ValueError, match=r"no file can be read \(dump\.gz\)"):
        texts(tmp_path / "dump.gz")


def test_wrong_split(rows):
    with pytest.raises(ValueError, match=r"no 'test' split; it has train, validation, all"):
        texts(rows, "test")


def test_a_cache_that_cannot_be_written(rows, tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(OSError, match="set cache_dir or RELINEAR_CACHE"):
        prepare_data(settings(rows, cache_dir=tmp_path / "file"))


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"tokeniser": "bytes"}, "did you mean 'tokenizer'"),
        ({"sequence_length": 1}, "sequence_length"),
        ({"validation_fraction": 0}, "validation_fraction"),
        ({"validation_fraction": 0.9}, "validation_fraction"),
        ({"max_documents": 0}, "max_documents"),
        ({"tokenizer": "bpe:100"}, "at least 258"),
        ({"tokenizer": "bpe:99999999999"}, "at most 10,000,000"),
        ({"tokenizer": "bpe:many"}, "for instance bpe:8000"),
        ({"tokenizer": " "}, "tokenizer must be"),
        ({"data": ""}, "data"),
    ],
)
def test_wrong_settings(values, said):
    with pytest.raises(ValueError, match=said):
        DataSettings.load(values)


# Real text


def test_books_are_used_as_they_are_divided(corpora):
    rows = pq.read_table(corpora / "books" / "validation.parquet", columns=["text"])["text"].to_pylist()
    assert texts(corpora / "books", "validation") == rows


@pytest.mark.slow
def test_books_pack_within_memory_and_time(corpora, tmp_path):
    data = prepare_data(settings(corpora / "books", cache_dir=tmp_path, tokenizer="bpe:8000", sequence_length=1024))
    assert data.vocab_size == 8000
    counts = data.description["splits"]
    assert counts["train"]["documents"] == 269
    assert 3.5 < counts["validation"]["characters"] / counts["validation"]["tokens"] < 5
