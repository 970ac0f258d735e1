"""Whole models compiled: no graph break, nothing compiled again after the first step, the numbers of eager mode.

By ``aot_eager``, which takes the graphs and derivatives that Inductor takes and compiles no code; a few by Inductor.
"""

import contextlib
import copy
import functools
import importlib

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import CompileConfig, TrainerCallback

import relinear
from cases import CASES, model_with
from conftest import kinds_for_dense_models, make_tiny_gpt2, make_tiny_llama, mostly_slow
from relinear import contract, residual
from relinear.bench import models as bench_file
from relinear.bench.models import ModelBenchSettings, bench_models
from relinear.compare import speed as speed_file
from relinear.contract.auxiliary_losses import named_operators, operator_metrics
from relinear.models import heads  # noqa: F401  registers its kind
from relinear.models.cgt.objective import CGTObjective
from relinear.surgery.layer_bias import LayerBias
from relinear.training import FitSettings, fit
from relinear.training.fitting import compiled, set_gradient_checkpointing
from relinear.training.settings import TrainSettings
from tiny_models import make_cgt
from train_helpers import DATA, Tokens

fit_file = importlib.import_module("relinear.training.fitting")
BATCHES = torch.randint(96, (3, 2, 12), generator=torch.Generator().manual_seed(1))
#: of every operator the first case
KINDS = {case.config.kind: case for case in reversed(CASES)}
ATTACHED = {
    **kinds_for_dense_models(residual.ReZero),
    "layer_bias": lambda: LayerBias(layers=("lm_head",)),
}


def gpt2_with(case):
    torch.manual_seed(0)
    model = make_tiny_gpt2()
    if case.context_dim is not None:
        relinear.attach_(model, relinear.ContextManager(dim=case.context_dim))
    relinear.replace_(model, {"c_fc": case.config})
    return model


def attached(kind, make, target):
    """A tiny model with the attachment and an operator, which reads the context where that is what is attached."""
    torch.manual_seed(0)
    model, part = make(), ATTACHED[kind]()
    relinear.attach_(model, part)
    context = {"context_dim": part.dim} if kind == "context_manager" else None
    relinear.replace_(model, {target: relinear.CCL(rank=4, **context) if context else relinear.LowRank(rank=4)})
    return model


#: name -> makes a model
MODELS = {
    **{f"{case.name}": lambda case=case: model_with(case) for case in CASES},
    **{f"{kind}-gpt2": lambda case=case: gpt2_with(case) for kind, case in KINDS.items()},
    **{kind: lambda kind=kind: attached(kind, make_tiny_llama, "up_proj") for kind in ATTACHED},
    **{f"{kind}-gpt2": lambda kind=kind: attached(kind, make_tiny_gpt2, "c_fc") for kind in ATTACHED},
    "cgt": lambda: make_cgt(vocab_size=96),
    "cgt-variational": lambda: make_cgt(vocab_size=96, variational=True),
}


@contextlib.contextmanager
def layers(model, **options):
    """As ``fit`` does."""
    with compiled(model, **options):
        yield model


@contextlib.contextmanager
def whole(model, **options):
    """As users do, who are told of the first setting by docs/operators/ccl.md."""
    with torch._dynamo.config.patch(skip_fwd_side_effects_in_bwd_under_checkpoint=True):
        model.loss_type = "ForCausalLM"  # stock GPT-2 has none, and logs a warning that no compiler follows
        yield torch.compile(model, fullgraph=True, **options)


class Graphs(TrainerCallback):
    """How many graphs there were after every step, from a clean slate on."""

    def __init__(self):
        torch._dynamo.reset()
        counters.clear()
        self.found = []

    def count(self):
        self.found.append(counters["stats"]["unique_graphs"])

    def on_step_end(self, args, state, control, **kwargs):
        self.count()

    def check(self):
        """Something was compiled, all of it in the first step and as one graph each."""
        assert self.found[0] > 0
        assert self.found == self.found[:1] * len(self.found), "compiled again"
        assert not counters["graph_break"]
        assert counters["frames"]["ok"] == counters["frames"]["total"], "ran uncompiled"


def steps(model, run, after_each, lowered=False):
    """Losses, auxiliary losses and metrics of a few steps, and the parameters after them."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    rows = []
    for ids in BATCHES:
        torch.manual_seed(5)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=lowered):
            loss = run(input_ids=ids, labels=ids, use_cache=False).loss
        recorded = {**contract.auxiliary_losses_of(model), **operator_metrics(model)}
        rows.append(torch.stack([loss, *recorded.values()]))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        after_each()
    return [row.detach() for row in rows], [parameter.detach() for parameter in model.parameters()]


def check_steps(name, how, checkpointed, tolerance, lowered=False, **options):
    graphs, model = Graphs(), MODELS[name]().train()
    if checkpointed:
        set_gradient_checkpointing(model, True)
    expected = steps(twin := copy.deepcopy(model), twin, lambda: None, lowered)
    with how(model, **options) as run:
        got = steps(model, run, graphs.count, lowered)
    graphs.check()
    if how is whole:  # a second one where the hook of the whole model has losses or metrics to average
        assert graphs.found[0] == 1 + any(operator.has_auxiliary() for _, operator in named_operators(model))
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.slow  # in the fast tests a run of hdpl, which has noise and losses, is compiled below
@pytest.mark.parametrize("name", MODELS)
def test_training_steps_are_the_same_graphs(name):
    check_steps(name, layers, True, 1e-4, backend="aot_eager")


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_training_steps_under_autocast(name):
    check_steps(name, layers, False, 5e-2, lowered=True, backend="aot_eager")


@pytest.mark.slow
def test_a_whole_model_without_losses_is_one_graph():
    check_steps("transponder", whole, False, 1e-4, backend="aot_eager")


@pytest.mark.slow
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("how", [layers, whole])
@pytest.mark.parametrize("name", MODELS)
def test_training_steps_are_the_same_graphs_in_every_combination(name, how, checkpointed):
    check_steps(name, how, checkpointed, 1e-4, backend="aot_eager")


@pytest.mark.slow
@pytest.mark.parametrize("how", [layers, whole])
@pytest.mark.parametrize("name", ["hdpl", "ccl", "transponder-gpt2", "rotor", "laurel_pa", "cgt"])
def test_inductor_takes_the_same_steps(name, how):
    with torch._inductor.config.patch(fallback_random=True):  # else it draws numbers of its own, as for dropout
        check_steps(name, how, True, 1e-3)


#: the fast one is traced and not taken apart, which takes as long again
DECODED = [("ccl", "eager"), *(pytest.param(name, "aot_eager", marks=pytest.mark.slow) for name in MODELS)]


@pytest.mark.parametrize(("name", "backend"), DECODED)
def test_decoding_with_a_static_cache_is_one_graph(name, backend):
    graphs, model = Graphs(), MODELS[name]().eval()
    relinear.for_inference_(model)
    compilation = CompileConfig(backend=backend, mode=None, fullgraph=True)
    compilation._compile_all_devices = True
    settings = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    for ids in BATCHES:
        expected = model.generate(ids, **settings)
        got = model.generate(ids, cache_implementation="static", compile_config=compilation, **settings)
        assert torch.equal(got, expected)
        graphs.count()
    graphs.check()
    assert graphs.found[0] == 1


#: name -> the model, the objective, the data
RUNS = {
    "hdpl": ("hdpl", None, "padded"),
    "ccl": ("ccl", None, "padded"),
    "cgt": ("cgt", CGTObjective(continuity=0.1), "full"),
    "cgt-variational": ("cgt-variational", CGTObjective(kl=0.1, matching=0.1), "full"),
}


@pytest.mark.parametrize("run", mostly_slow(list(RUNS), "hdpl"))
def test_a_run_compiles_in_its_first_step(run, monkeypatch):
    """With all that happens around a step: micro-batches, padding, metrics, logs, evaluations, objectives."""
    monkeypatch.setattr(fit_file, "compiled", lambda model, how: compiled(model, how, backend="aot_eager"))
    name, objective, data = RUNS[run]
    settings = FitSettings(
        steps=5, batch_size=4, accumulation=2, warmup_steps=0, dtype="float32", threads=1, device="cpu",
        log_every=1, eval_every=2, gradient_checkpointing=True,
    )  # fmt: skip
    curves, stock = [], MODELS[name]()
    for compile_ in (False, True):
        graphs, given = Graphs(), (DATA[data](), Tokens(samples=8, seed=1))
        changed = settings.replace(compile=compile_)
        curves.append(fit(copy.deepcopy(stock), given, changed, objective=objective, callbacks=[graphs]).curve)
    graphs.check()
    for plain, other in zip(*curves, strict=True):
        assert plain.keys() == other.keys()
        for key in plain.keys() - {"tokens_per_second", "seconds"}:
            assert other[key] == pytest.approx(plain[key], rel=1e-4), (key, plain["step"])


@pytest.mark.slow
def test_speeds_of_a_compiled_comparison_are_measured_after_all_is_compiled(monkeypatch):
    monkeypatch.setattr(speed_file, "compiled", lambda model, how: compiled(model, how, backend="aot_eager"))
    plain = TrainSettings(
        model="tiny", model_overrides={"num_hidden_layers": 1}, data={"sequence_length": 8}, compile=True,
        batch_size=2, dtype="float32", threads=1, device="cpu",
    )  # fmt: skip
    settings = {"dense": plain, "hdpl": plain.replace(operators={"up_proj": {"kind": "hdpl", "rank": 4, "blocks": 4}})}
    graphs = Graphs()
    counted = functools.partial(speed_file.interleave, on_round=lambda done: graphs.count())
    monkeypatch.setattr(speed_file, "interleave", counted)
    speed_file.measure_speed(settings, "dense", 96, 0.1, 3)
    graphs.check()
    assert len(graphs.found) == 6  # three rounds of training, three of inference


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["step", "decode"])
def test_benchmarked_models_have_no_graph_break(phase, monkeypatch):
    """GPT-2 as a whole has one: it logs a warning."""
    monkeypatch.setattr(bench_file, "through_compiler", lambda model, how: compiled(model, how, backend="aot_eager"))
    graphs, sizes = Graphs(), {"n_embd": 8, "n_head": 2, "n_layer": 1, "vocab_size": 96, "n_positions": 512}
    settings = ModelBenchSettings(preset="gpt2-ccl-64", rounds=1)
    monkeypatch.setattr(bench_file, "from_preset", functools.partial(relinear.from_preset, **sizes))
    found = bench_models(settings, {}, phase, 1, compiled=True, new_tokens=4)
    graphs.count()
    graphs.check()
    assert found[0]["compiled"]
