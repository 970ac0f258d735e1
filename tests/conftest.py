"""Fixtures that every test may use: seeds, tiny models, corpora and the real pretrained model where they are."""

import functools
import gc
import inspect
import os
import shutil
from pathlib import Path

import pytest
import torch

# what the package clifford compiles at every use takes longer than what it then computes; before it is imported
os.environ.setdefault("NUMBA_DISABLE_JIT", "1")

REPOSITORY = Path(__file__).resolve().parents[1]

#: the head of a program in which there is no relinear
WITHOUT_RELINEAR = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "relinear":
            raise ImportError("there is no relinear here")
sys.meta_path.insert(0, Blocked())
"""


def mostly_slow(values, *fast):
    """Parameters of a test of which all but ``fast`` run in the slow tests alone."""
    return [value if value in fast else pytest.param(value, marks=pytest.mark.slow) for value in values]


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Keep the garbage collector from what is imported: it would run 1,900 times now, and in every run of a trainer."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture
def kernel_calls(monkeypatch):
    """The names of the C++ kernels that were called, in order."""
    from relinear.kernels.native import calls

    names = []

    def recorded(name, kernel):
        def run(*arguments, **options):
            names.append(name)
            return kernel(*arguments, **options)

        return run

    for name, kernel in inspect.getmembers(calls, inspect.isfunction):
        if kernel.__module__ == calls.__name__ and not name.startswith("_"):
            monkeypatch.setattr(calls, name, recorded(name, kernel))
    return names


@pytest.fixture(autouse=True, scope="session")
def _environment(tmp_path_factory):
    """Tokenised data of the tests goes to a folder of the test run, never to the user's cache; figures are blank."""
    from matplotlib.figure import Figure

    save, blank = Figure.savefig, Figure(figsize=(1, 1))

    @functools.wraps(save)
    def save_blank(figure, file, *, format=None, **options):
        save(blank, file, format=format)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "savefig", save_blank)
        patch.setenv("RELINEAR_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.delenv("COLUMNS", raising=False)  # tables have the width of a pipe, whatever the terminal's is
        patch.setattr("accelerate.utils.memory.clear_device_cache", lambda **options: None)  # collects garbage
        patch.setattr("os.fsync", lambda handle: None)  # no test cuts the power, and every run waits dozens of times
        for backend in (torch.cuda, torch.xpu):
            if not backend.is_available():  # every seed would be kept for it with the whole stack, in milliseconds
                patch.setattr(backend, "manual_seed_all", lambda seed: None)
        yield


@pytest.fixture
def drawn(monkeypatch):
    """Draw what is saved as SVG; the same figure as PNG, which takes as long again, stays blank."""
    from matplotlib.figure import Figure

    save_blank = Figure.savefig

    def save(figure, file, *, format=None, **options):
        save_format = save_blank if format == "png" else save_blank.__wrapped__
        save_format(figure, file, format=format, **options)

    monkeypatch.setattr(Figure, "savefig", save)


@pytest.fixture(scope="session")
def corpora() -> Path:
    """The folder of real text (books/, wikitext2/, ptb/, lambada/, shakespeare/)."""
    named = os.environ.get("RELINEAR_TEST_DATA")
    folder = Path(named) if named else REPOSITORY.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"no corpora at {folder}; set RELINEAR_TEST_DATA to a folder that has them")
    return folder


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The folder of SmolLM2-135M-Instruct that `make smollm2` fills."""
    named = os.environ.get("RELINEAR_SMOLLM2")
    folder = Path(named) if named else REPOSITORY / "models" / "smollm2"
    if not (folder / "config.json").is_file():
        pytest.skip(f"no SmolLM2 at {folder}; run `make smollm2`, or set RELINEAR_SMOLLM2")
    return folder


def make_tiny_llama(*, tied: bool = False, **overrides):
    """A two-layer Llama of width 32 with grouped keys and values, about 30,000 parameters, in eval mode."""
    from transformers import LlamaConfig, LlamaForCausalLM

    settings = {
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "bos_token_id": None,
        "eos_token_id": None,
        "tie_word_embeddings": tied,
    }
    return LlamaForCausalLM(LlamaConfig(**(settings | overrides))).eval()


def kinds_for_dense_models(family: type) -> dict[str, type]:
    """Our configs of a family by kind, but for experts, which are taken apart in models that have some."""
    kinds = {kind: cls for kind, cls in family.kinds().items() if cls.__module__.startswith("relinear.")}
    kinds.pop("separate_experts", None)  # registered once its module is imported; test_separate_experts
    return kinds


def make_tiny_gpt2(*, tied: bool = False, **overrides):
    """A two-layer GPT-2 of width 32 (Conv1D layers), about 30,000 parameters, no dropout, in eval mode."""
    from transformers import GPT2Config, GPT2LMHeadModel

    settings = {
        "vocab_size": 96,
        "n_positions": 128,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "bos_token_id": None,
        "eos_token_id": None,
        "tie_word_embeddings": tied,
    }
    return GPT2LMHeadModel(GPT2Config(**(settings | overrides))).eval()


@pytest.fixture
def tiny_llama():
    return make_tiny_llama()


@pytest.fixture
def tiny_llama_tied():
    return make_tiny_llama(tied=True)


@pytest.fixture
def tiny_gpt2():
    return make_tiny_gpt2()


@pytest.fixture
def tiny_gpt2_tied():
    return make_tiny_gpt2(tied=True)


@pytest.fixture(params=["llama", "llama-tied", "gpt2", "gpt2-tied"])
def tiny_model(request):
    """Each of the four tiny models in turn."""
    kind, _, tied = request.param.partition("-")
    return {"llama": make_tiny_llama, "gpt2": make_tiny_gpt2}[kind](tied=bool(tied))


@pytest.fixture(scope="module")
def browser():
    """A browser without windows, for tests of pages."""
    api = pytest.importorskip("playwright.sync_api", reason="no browser: `make browser` sets one up")
    found = shutil.which("chromium") or shutil.which("google-chrome")
    with api.sync_playwright() as playwright:
        try:
            opened = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        except api.Error as error:
            pytest.skip(f"no browser: `make browser` sets one up ({str(error).splitlines()[0]})")
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A file of text that tokenises at once."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("\n\n".join(f"paragraph {i} says {i * i} and {i % 7}" for i in range(600)))
    return path


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    for number in range(20):
        (folder / f"{number}.txt").write_text(f"The {number}th text says {number * 7} times: hello, world. " * 30)
    return folder
