"""Checkpoints in programs that do not import relinear: refused, or with their loader the same logits; never wrong."""

import inspect
import json
import os
import runpy
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from transformers.dynamic_module_utils import check_imports

import relinear
from conftest import make_tiny_gpt2, make_tiny_llama, mostly_slow
from relinear.data.tokenizers import load_tokenizer
from relinear.hf.config_record import LOADER
from surgery_helpers import IDS, LOW


class Hidden:
    """An import finder for which there is no relinear."""

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "relinear":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


#: optional or slow: for those alone who use what needs them; what transformers and PEFT bring along is not ours
OPTIONAL = ["matplotlib", "triton", "datasets", "sklearn", "optuna"]
HIDDEN = f"{inspect.getsource(Hidden)}\nsys.meta_path.insert(0, Hidden())\n"


def elsewhere(code, folder, *, installed=True):
    """Run ``code`` in a process of its own that has not imported relinear (nor can it, unless ``installed``)."""
    head = "import sys, torch\n" + ("" if installed else HIDDEN)
    source = Path(relinear.__file__).parents[1]
    environment = os.environ | {
        "PYTHONPATH": str(source),
        "HF_MODULES_CACHE": str(folder / "modules"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.run(
        [sys.executable, "-c", head + textwrap.dedent(code)],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@pytest.fixture(
    scope="module", params=mostly_slow([make_tiny_llama, make_tiny_gpt2], make_tiny_gpt2), ids=["llama", "gpt2"]
)
def saved(request, tmp_path_factory):
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("elsewhere")
    model = request.param(vocab_size=300)
    relinear.replace_(model, {"all-linear": LOW})
    relinear.attach_(model, "rezero")
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.1)
    relinear.save_pretrained(model, folder / "model", tokenizer=load_tokenizer("bytes"))
    torch.save(model(IDS).logits, folder / "logits.pt")
    return folder


def refused(saved) -> str:
    """Code that loads in every way without the flag."""
    return f"""
        import transformers
        folder = {str(saved / "model")!r}
        architecture = {type_of(saved)!r}
        ways = [getattr(transformers, name).from_pretrained for name in
                ("AutoConfig", "AutoModel", "AutoModelForCausalLM", "AutoModelForSequenceClassification", architecture)]
        ways.append(lambda folder: transformers.pipeline("text-generation", model=folder))
        for number, load in enumerate(ways):
            try:
                load(folder)
            except Exception as error:
                assert "trust_remote_code=True" in str(error), (number, error)
            else:
                raise AssertionError(number)
        assert "relinear" not in sys.modules
        print("refused", len(ways))
        """


def type_of(saved):
    return json.loads((saved / "model" / "config.json").read_text())["architectures"][0]


@pytest.fixture(scope="module")
def ran(saved):
    """A process that imports relinear in a child of its own, loads in every way without the flag, and with it."""
    return elsewhere(
        f"""
        import os, peft
        from transformers import AutoModelForCausalLM
        if (child := os.fork()) == 0:
            before = {{*sys.modules}}
            import relinear
            brought = sorted({set(OPTIONAL)} & {{*sys.modules}} - before)
            model = AutoModelForCausalLM.from_pretrained({str(saved / "model")!r})
            types = {{type(module).__name__ for module in model.modules()}}
            print("imported", brought, "LowRankLinear" in types, flush=True)
            os._exit(0)
        os.waitpid(child, 0)
        """
        + refused(saved)
        + f"""
        from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer, pipeline
        model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
        assert type(model).__name__ == {type_of(saved)!r} and type(model.config).__module__.startswith("transformers.")
        ids = torch.tensor({IDS.tolist()})
        assert torch.equal(model(ids).logits, torch.load({str(saved / "logits.pt")!r}))
        assert model.generate(ids, max_new_tokens=3, do_sample=False).shape[1] > ids.shape[1]
        AutoModel.from_pretrained(folder, trust_remote_code=True)
        pipe = pipeline("text-generation", model=folder, trust_remote_code=True)
        print("wrote", pipe("two words", max_new_tokens=4, do_sample=False)[0]["generated_text"] is not None)
        """,
        saved,
    )


def test_without_the_flag_every_way_of_loading_is_refused_and_with_it_the_logits_are_the_same(ran):
    assert "refused 6" in ran.stdout, ran.stderr
    assert "wrote True" in ran.stdout, ran.stderr


def test_imported_after_transformers_relinear_loads_it_and_brings_nothing_optional(ran):
    assert "imported [] True" in ran.stdout, ran.stderr


@pytest.mark.slow
def test_a_config_read_before_anything_else_builds_the_operators(saved, tmp_path):
    """In a process of its own: what transformers' models need is only imported with the first record."""
    config = json.loads((saved / "model" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": config["base_model_type"]}))  # as of old
    ran = elsewhere(
        f"""
        import relinear
        from transformers import AutoConfig, AutoModelForCausalLM
        for folder in ({str(saved / "model")!r}, {str(tmp_path)!r}):
            config = AutoConfig.from_pretrained(folder)
            model = AutoModelForCausalLM.from_config(config)
            print("operators", sum(hasattr(m, "to_dense") for m in model.modules()) > 0)
        """,
        tmp_path,
    )
    assert ran.stdout.count("operators True") == 2, ran.stderr


def test_without_the_package_the_loader_says_what_to_install(saved, monkeypatch):
    """By the check that transformers makes before it runs the file; below in a process of its own."""
    monkeypatch.delitem(sys.modules, "relinear")
    monkeypatch.setattr(sys, "meta_path", [Hidden(), *sys.meta_path])
    with pytest.raises(ImportError, match="pip install relinear"):
        check_imports(saved / "model" / f"{LOADER}.py")


@pytest.mark.slow
def test_without_the_package_the_tokenizer_loads_and_the_flag_says_what_to_install(saved):
    ran = elsewhere(
        f"""
        from transformers import AutoModelForCausalLM, AutoTokenizer
        print(AutoTokenizer.from_pretrained({str(saved / "model")!r})("ab").input_ids)
        AutoModelForCausalLM.from_pretrained({str(saved / "model")!r}, trust_remote_code=True)
        """,
        saved,
        installed=False,
    )
    expected = load_tokenizer("bytes")("ab").input_ids
    assert str(expected) in ran.stdout, ran.stderr
    assert ran.returncode
    assert "pip install relinear" in ran.stderr


@pytest.mark.slow
def test_without_the_package_every_way_of_loading_is_refused(saved):
    ran = elsewhere(refused(saved), saved, installed=False)
    assert "refused 6" in ran.stdout, ran.stderr


@pytest.mark.slow
def test_a_cgt_of_relinears_own_loads_with_the_flag(tmp_path):
    config = relinear.CGTConfig(vocab_size=40, n_positions=32, n_embd=16, n_layer=2, n_head=2, context_layer=1,
                                context_size=8, context_heads=2, rank=2, templates=2)  # fmt: skip
    model = relinear.CGTForCausalLM(config).eval()
    model.save_pretrained(tmp_path / "cgt")
    torch.save(model(IDS).logits, tmp_path / "logits.pt")
    ran = elsewhere(
        f"""
        from transformers import AutoModelForCausalLM
        try:
            AutoModelForCausalLM.from_pretrained({str(tmp_path / "cgt")!r})
        except Exception as error:
            print("refused", "trust_remote_code=True" in str(error))
        model = AutoModelForCausalLM.from_pretrained({str(tmp_path / "cgt")!r}, trust_remote_code=True)
        found = model(torch.tensor({IDS.tolist()})).logits
        print("same", torch.equal(found, torch.load({str(tmp_path / "logits.pt")!r})))
        """,
        tmp_path,
    )
    assert "refused True" in ran.stdout, ran.stderr
    assert "same True" in ran.stdout, ran.stderr


def test_the_table_of_outside_programs_is_the_one_that_was_measured():
    root = Path(__file__).resolve().parents[1]
    folder = root / "results" / "ecosystem"
    rows = json.loads((folder / "outside_programs.json").read_text())["programs"]
    assert all(row["refused_without_flag"] and row["same"] for row in rows)
    table = runpy.run_path(str(folder / "outside_programs.py"))["table"](rows)
    assert table in (root / "docs" / "ecosystem.md").read_text(encoding="utf-8")
