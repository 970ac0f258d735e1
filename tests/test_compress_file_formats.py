"""The program that will run the model decides what layers become, and what the bytes are."""

import functools
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, OPTConfig

import relinear
from compress_helpers import SETTINGS
from conftest import mostly_slow
from gguf_helpers import assert_same, llama, tokenizer_of
from relinear.compression import CompressSettings, compress
from relinear.compression.budget import Candidate, stored_bytes
from relinear.compression.candidates import group_candidates
from relinear.compression.file_formats import FILE_FORMATS
from relinear.compression.layerwise import LayerByLayer
from relinear.compression.report import CompressReport
from relinear.contract.calibration_statistics import CalibrationStatistics
from relinear.functional import rounding
from tiny_models import make_family

gguf = pytest.importorskip("gguf")
FILES = {"relinear": "model/model.safetensors", "llama.cpp": "model.gguf"}
FILES["vllm"] = "compressed-tensors/model.safetensors"


def small(tied: bool = True, layers: int = 2):
    sizes = {"hidden_size": 64, "intermediate_size": 256, "vocab_size": 640, "num_hidden_layers": layers}
    return llama(**sizes, tie_word_embeddings=tied)


def carried_out(reader: str, folder, model, **asked):
    ids = [torch.randint(0, 320, (2048,), generator=torch.Generator().manual_seed(0))]
    settings = SETTINGS | {"reader": reader} | asked
    report = compress(model, ids, settings=settings, tokenizer=tokenizer_of(), out_dir=folder)
    return report, folder / FILES[reader]


#: reader, whether tables are tied, size
ASKED = [("relinear", True, 0.4), ("llama.cpp", True, "125kB"), ("llama.cpp", False, 0.5), ("vllm", True, 0.6)]


class Sized(NamedTuple):
    """A compression for a reader, and what it was made of."""

    model: torch.nn.Module
    report: CompressReport
    folder: Path
    asked: float
    statistics: list[CalibrationStatistics]
    configs: set[relinear.Quantized]


@pytest.fixture(scope="module")
def sized(tmp_path_factory):
    """What is asked -> what came of it, once for all tests."""

    @functools.cache
    def make(reader: str, tied: bool, size) -> Sized:
        statistics, configs, candidate_errors = [], set(), relinear.Quantized.candidate_errors

        def noted(self, linear, found, candidates):
            statistics.append(found)
            configs.update(candidates)
            return candidate_errors(self, linear, found, candidates)

        model, folder = small(tied), tmp_path_factory.mktemp("sized")
        asked = CompressSettings(size=size).bytes_of(stored_bytes(model))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(relinear.Quantized, "candidate_errors", noted)
            patch.setattr(rounding, "_PARTS", 1)  # rounds worse, and several times as fast
            report, _ = carried_out(reader, folder, model, size=size)
        return Sized(model, report, folder, asked, statistics, configs)

    return make


@pytest.mark.parametrize(
    ("reader", "tied", "size"), [pytest.param(*row, marks=() if row[1] else pytest.mark.slow) for row in ASKED]
)
def test_the_file_is_as_large_as_asked(reader: str, tied: bool, size, sized) -> None:
    model, report, folder, asked, *_ = sized(reader, tied, size)
    file = folder / FILES[reader]
    # what stands around tensors is bounded from above, which shows in a small file alone
    assert 0.94 * asked < file.stat().st_size <= asked
    assert report.file_bytes == file.stat().st_size > report.bytes
    said = f"{report.file}, {report.file_bytes / 1e6:,.1f} MB"
    assert f"on disk: {said}" in str(report)
    assert f"On disk {said.replace(',', ' takes', 1)}." in (folder / "report.html").read_text()
    assert len({layer.bits for layer in report.plan.layers.values()}) > 1
    assert ("model.embed_tokens" in report.plan.layers) == (reader != "vllm")
    if reader == "llama.cpp":
        stored = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(file).tensors}
        k_types = {kind for name, kind in stored.items() if kind.endswith("_K")}
        assert {name.split(".")[-2] for name, kind in stored.items() if kind in k_types} == {"ffn_down"}, "256 inputs"
        assert set(stored.values()) - k_types <= {"Q4_0", "IQ4_NL", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "F32"}
        assert stored["token_embd.weight"] != "F32"
        assert ("output.weight" in stored) == (not tied)
        assert_same(file, model, atol=3e-2)
    ids = torch.arange(16)[None]
    if reader == "vllm":
        loaded = AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32).eval()
        torch.testing.assert_close(loaded(ids).logits, model(ids).logits, atol=1e-3, rtol=0)
    else:
        loaded = relinear.from_pretrained(folder / "model", dtype=torch.float32).eval()
        torch.testing.assert_close(loaded(ids).logits, model.float()(ids).logits, atol=1e-4, rtol=0)


def test_a_plan_of_bytes_needs_diagonals_of_gradients_and_only_types_that_its_reader_stores(sized) -> None:
    *_, found, configs = sized(*ASKED[1])
    assert found
    assert all(statistics.gradient_moment.ndim == 1 and statistics.input_moment.ndim == 2 for statistics in found)
    asked = {(config.bits, config.symmetric, config.levels) for config in configs if config.levels != "k"}
    uniform = {
        (bits, symmetric, "uniform") for bits, symmetric in ((4, True), (5, True), (8, True), (4, False), (5, False))
    }
    assert asked == uniform | {(4, True, "iq4_nl")}


def test_vllm_reads_layers_that_it_fuses_in_one_scheme(sized) -> None:
    report = sized(*ASKED[3]).report
    chosen = {name: layer.operator for name, layer in report.plan.layers.items()}
    for layer in range(2):
        prefix = f"model.layers.{layer}"
        assert len({chosen[f"{prefix}.self_attn.{part}_proj"] for part in "qkv"}) == 1
        assert len({chosen[f"{prefix}.mlp.{part}_proj"] for part in ("gate", "up")}) == 1
    assert {config.bits for config in chosen.values() if config} <= {4, 8}
    assert len(set(chosen.values())) > 1
    names = ["a.q_proj", "a.k_proj", "a.v_proj", "a.o_proj", "b.gate_proj", "b.up_proj"]
    assert FILE_FORMATS["vllm"].groups(names) == {"a.qkv": names[:3], "a.o_proj": ["a.o_proj"], "b.gate_up": names[4:]}
    assert FILE_FORMATS["llama.cpp"].groups(names) == {name: [name] for name in names}


def test_layers_that_become_the_same_add_up() -> None:
    small, large = relinear.Quantized(bits=4), relinear.Quantized(bits=8)
    budget = type("Bytes", (), {"cost": lambda self, name, config: 16 if config is None else config.bits})()
    found = group_candidates([("a", {small: 1.0, large: 0.25}), ("b", {small: 2.0, large: 0.5})], budget)
    assert found == [Candidate(None, 32, 0.0), Candidate(small, 8, 3.0), Candidate(large, 16, 0.75)]
    assert group_candidates([("a", {small: 1.0}), ("b", {})], budget) == [Candidate(None, 32, 0.0)]


@pytest.mark.parametrize("tied", mostly_slow([True, False], False))
def test_the_table_is_weighed_by_lookup_and_by_head(tied: bool) -> None:
    """What rounding embedding and head is predicted to cost is the rise of the loss, about."""
    model, ids = small(tied, 1), torch.randint(0, 640, (64, 16), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        before = model(ids).logits[:, :-1].log_softmax(-1)
    settings = SETTINGS | {"bits": 4.6, "candidates": ["quantized:group=32"], "tokens": 1024}
    report = compress(model, [ids.flatten()], settings=settings, plan_only=True)
    tables = {name: layer for name, layer in report.plan.layers.items() if "layers" not in name}
    assert len(tables) == 2 - tied
    mapping = {name: layer.operator for name, layer in tables.items()}
    relinear.replace_(model, mapping, init="from_weight")
    with torch.no_grad():
        after = model(ids).logits[:, :-1].log_softmax(-1)
    measured = float((before.exp() * (before - after)).sum(-1).mean())
    predicted = sum(layer.nats for layer in tables.values())
    assert 0.4 * measured < predicted < 2.5 * measured


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"keep": 0.5, "reader": "vllm"}, "files for vllm .* cannot store low-rank layers: give bits or size"),
        (
            {"size": "9 parsecs"},
            "size must be bytes, such as 90MB, or a share of the original, .* got 9 parsecs",
        ),
        *(({"size": size}, "size must be bytes") for size in (0, 1, 1.5, "1.5", "250.5", "0.5B")),
        ({"size": "9MB", "bits": 4.5}, "bits and size are 2 budgets: give one of them"),
        ({"bits": 4, "reader": "ollama"}, "reader"),
    ],
)
def test_sizes_and_readers_that_are_none(settings, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CompressSettings.load(settings)
    for text, expected in (
        ("90MB", 9e7),
        (90_000_000, 9e7),
        ("1.5 GiB", 1.5 * 2**30),
        ("90000000", 9e7),
        (9e7, 9e7),
        (0.3, 300.0),
        ("2kB", 2000),
        ("2KB", 2000),
    ):
        assert CompressSettings(size=text).bytes_of(1000) == expected


def test_a_budget_takes_the_place_of_the_default_one() -> None:
    settings = CompressSettings(tokens=2048)
    assert settings.bits == 4.5
    assert settings.replace(size="90MB").bits is None
    assert settings.replace(keep=0.5).model_fields_set == {"tokens", "keep"}


def test_a_size_that_all_else_exceeds_is_refused_before_any_work(tmp_path) -> None:
    with pytest.raises(ValueError, match=r"size=1kB, 1,000 bytes, is less than .* all else takes .* llama"):
        carried_out("llama.cpp", tmp_path, small(), size="1kB")
    assert not (tmp_path / "calibration").exists()


def test_a_size_that_needs_no_compression_is_refused_before_any_work(tmp_path) -> None:
    for reader in ("relinear", "llama.cpp"):
        with pytest.raises(ValueError, match=r"size=9MB is met by the model as it is, size=0\.\d+MB: ask for less"):
            carried_out(reader, tmp_path, small(), size="9MB")
    assert not (tmp_path / "calibration").exists()


def test_a_plan_that_is_given_is_counted_in_the_readers_bytes(sized, tmp_path) -> None:
    """Q4_1 takes 5 bits, where relinear stores the same integers in 4.75."""
    reader, _, size = ASKED[1]
    _, made, folder, *_ = sized(*ASKED[1])
    ids = [torch.randint(0, 320, (2048,), generator=torch.Generator().manual_seed(0))]
    plan = {"plan_file": folder / "plan.json", "out_dir": tmp_path / "again", "tokenizer": tokenizer_of()}
    settings = SETTINGS | {"reader": reader, "size": size}
    again = compress(small(), ids, settings=settings, plan_only=True, **plan)
    assert (again.bytes, again.plan.nats) == (made.bytes, pytest.approx(made.plan.nats))
    with pytest.raises(ValueError, match=r"replaces model\.embed_tokens, .*; embedding and head need a budget of bits"):
        compress(small(), ids, keep=0.9, settings=SETTINGS, **plan)


def test_what_vllm_cannot_read_is_refused_before_any_work(tmp_path) -> None:
    model = make_family("mixtral")
    settings = SETTINGS | {"reader": "vllm", "bits": 9.0}
    with pytest.raises(ValueError, match="cannot load MixtralForCausalLM from compressed-tensors"):
        compress(model, [torch.arange(2048) % 50], targets=r".*_proj", settings=settings, out_dir=tmp_path)
    assert not (tmp_path / "calibration").exists()


def scaling(family: str):
    """A tiny model that does something to its rows before the first layer."""
    sizes = {"vocab_size": 256, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "head_dim": 8}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True, "pad_token_id": 0}
    config = {
        "gemma3": lambda: transformers.Gemma3TextConfig(**sizes),
        "granite": lambda: transformers.GraniteConfig(**sizes, embedding_multiplier=12.0),
        "opt": lambda: OPTConfig(
            vocab_size=256,
            hidden_size=32,
            ffn_dim=64,
            num_hidden_layers=1,
            num_attention_heads=4,
            word_embed_proj_dim=16,
        ),
    }[family]()
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("family", ["gemma3", "granite", "opt"])
def test_rows_are_priced_where_they_are_looked_up(family: str) -> None:
    layers, ids = LayerByLayer(model := scaling(family)), torch.arange(2, 26).view(2, 12)  # no token twice, no padding
    states = layers.embed(ids)
    gradient = torch.randn(states.shape, generator=torch.Generator().manual_seed(0))
    (whole,) = torch.autograd.grad(states, model.get_input_embeddings().weight, gradient)
    torch.testing.assert_close(layers.gradient_of_rows(ids, gradient), whole[ids])


@pytest.mark.parametrize("family", mostly_slow(["gemma3", "granite", "opt"], "granite"))
def test_an_embedding_takes_part_whatever_is_done_to_its_rows(family: str, tmp_path) -> None:
    model, ids = scaling(family), torch.arange(48)[None]
    table, outside = type(model.get_input_embeddings()), ["project_in", "project_out"] if family == "opt" else None
    texts = [torch.randint(0, 256, (2048,), generator=torch.Generator().manual_seed(0))]
    report = compress(model, texts, settings=SETTINGS | {"bits": 5.0}, exclude=outside, out_dir=tmp_path)
    assert any(name.endswith("embed_tokens") and layer.operator for name, layer in report.plan.layers.items())
    logits = model.float()(ids).logits
    loaded = relinear.from_pretrained(tmp_path / "model", dtype=torch.float32).eval()
    torch.testing.assert_close(loaded(ids).logits, logits, atol=1e-5, rtol=0)
    relinear.fold_(loaded, verbose=False)
    assert type(loaded.get_input_embeddings()) is table
    torch.testing.assert_close(loaded(ids).logits, logits, atol=1e-4, rtol=0)
