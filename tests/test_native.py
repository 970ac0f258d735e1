"""The C++ kernels against double precision: odd sizes, strided gradients, extreme numbers; and life without them."""

import copy
import ctypes
import functools
import platform
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
import transformers

import relinear
from cases import ccl_results
from relinear.functional import hdpl as functional_hdpl
from relinear.functional import rounding
from relinear.functional import transponder as reference
from relinear.kernels import autograd, block_diagonal, hdpl, native, quantized, transponder
from relinear.kernels.implementations import Call
from relinear.kernels.native import build

#: of bfloat16 outputs and of single-precision ones, relative in the Frobenius norm
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2}


@pytest.fixture
def any_size(monkeypatch):
    monkeypatch.setattr(native, "MIN_NATIVE_ENTRIES", 1)
    monkeypatch.setattr(block_diagonal, "MIN_SLICED", 1)
    if native.unsupported_reason(Call(torch.zeros(1))):
        pytest.skip("no C++ compiler, or RELINEAR_COMPILE_KERNELS=0")


@pytest.fixture
def few_rows(any_size, kernel_calls, monkeypatch):
    """The kernels for a few rows at any size; a list of their calls."""
    monkeypatch.setattr(native, "MAX_ROWS_FUSED", {torch.float32: 8, torch.bfloat16: 8})
    return kernel_calls


def close(mine, exact, dtype, roundings=1):
    """``roundings``: of bfloat16 numbers one after another, as in a product and what is gated after it."""
    allowed = roundings * TOLERANCES[dtype] * exact.double().norm() + 1e-9
    assert (mine.double() - exact.double()).norm() <= allowed


def modulated_arguments(tokens, inputs, outputs, rank, scalar):
    generator = torch.Generator().manual_seed(0)
    shapes = (tokens, inputs), (outputs, inputs), (outputs,), (rank, inputs), (outputs, rank), (1, rank)
    drawn = [torch.randn(*shape, generator=generator) for shape in shapes]
    drawn[1], drawn[3] = drawn[1] / inputs**0.5, drawn[3] / inputs**0.5
    return [*drawn[:5], drawn[5] if scalar else None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scalar", [True, False], ids=["both-gates", "channel-gate"])
@pytest.mark.parametrize("rank", [1, 4, 7, 16])
@pytest.mark.parametrize(("tokens", "inputs", "outputs"), [(37, 24, 40), (1, 3, 1), (50, 70, 1030)])
@pytest.mark.parametrize("portion", [400, autograd.BACKWARD_PORTION], ids=["portions", "whole"])
def test_modulated_output_and_gradients(portion, tokens, inputs, outputs, rank, scalar, dtype, any_size, monkeypatch):
    monkeypatch.setattr(autograd, "BACKWARD_PORTION", portion)
    drawn = modulated_arguments(tokens, inputs, outputs, rank, scalar)
    given = [t.to(dtype) for t in drawn[:4]] + drawn[4:]
    exact = [None if t is None else t.double().requires_grad_() for t in given]
    given = [None if t is None else t.requires_grad_() for t in given]
    upstream = torch.randn(1, outputs).to(dtype).expand(tokens, outputs)  # strided
    results = []
    for layer, tensors in ((transponder.modulated_linear, given), (reference.modulated_linear, exact)):
        y = layer(*tensors)
        leaves = [t for t in tensors if t is not None]
        results.append([y, *torch.autograd.grad(y, leaves, upstream.to(y.dtype))])
    for mine, theirs in zip(*results, strict=True):
        close(mine, theirs, dtype, roundings=2)


@pytest.mark.parametrize("portion", [400, autograd.BACKWARD_PORTION], ids=["portions", "whole"])
def test_gradients_of_a_modulated_layer_whose_weight_is_frozen(portion, any_size, monkeypatch):
    monkeypatch.setattr(autograd, "BACKWARD_PORTION", portion)
    drawn, results = modulated_arguments(37, 24, 40, 8, True), []
    for layer, dtype in ((transponder.modulated_linear, torch.float32), (reference.modulated_linear, torch.float64)):
        given = [t.to(dtype).requires_grad_(at not in (1, 2)) for at, t in enumerate(drawn)]
        y = layer(*given)
        results.append([y, *torch.autograd.grad(y.square().sum(), [t for t in given if t.requires_grad])])
    for mine, theirs in zip(*results, strict=True):
        close(mine, theirs, torch.float32)


def test_a_modulated_layer_keeps_no_gate_for_the_backward_pass(any_size):
    saved = []
    given = [t.requires_grad_() for t in modulated_arguments(64, 24, 40, 8, True)]
    with torch.autograd.graph.saved_tensors_hooks(lambda s: saved.append(s) or s, lambda s: s):
        y = transponder.modulated_linear(*given)
    assert {s.data_ptr() for s in saved if s.shape == (64, 40)} == {y.data_ptr()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("leading", [(1,), (2, 3), ()])
@pytest.mark.parametrize("settings", [{}, {"scalar": False}, {"learnable_alpha": False, "rank": 3}], ids=str)
@torch.no_grad()
def test_modulated_layers_in_inference(settings, leading, dtype, any_size, kernel_calls):
    """One call for layer and gates: exact, and the layer's own bits where the gates are 1."""
    x = torch.randn(*leading, 24, dtype=dtype)
    module = relinear.Transponder(**settings).build(24, 40).to(dtype).eval()
    exact = copy.deepcopy(module).double()
    y = module(x)
    close(y, exact(x.double()), dtype)
    kernel_calls.clear()
    module(x)
    assert kernel_calls
    module.neutralize()
    assert torch.equal(module(x), module.base(x))


def test_a_few_tokens_do_not_ask_for_a_build(monkeypatch):
    monkeypatch.setattr(build, "_was_built", lambda: False)
    monkeypatch.setattr(build, "library", functools.cache(lambda: pytest.fail("built")))
    assert (
        native.unsupported_reason(Call(torch.zeros(8)), fewest=1, may_build=False) == "not worth building the kernels"
    )
    x = torch.randn(1, 24)
    assert relinear.Transponder().build(24, 40).eval()(x).shape == (1, 40)


@pytest.mark.filterwarnings("ignore:.*torch.jit")
@torch.no_grad()
def test_a_traced_layer_computes_from_its_inputs(any_size):
    """Numbers that a kernel wrote would be constants there."""
    layer = relinear.for_inference_(relinear.HDPL(rank=4, blocks=4).build(64, 40).eval())
    x = torch.randn(1, 64)
    traced = torch.jit.trace(layer, torch.zeros(1, 64), check_trace=False)
    close(traced(x), layer(x), torch.float32)


def test_training_on_few_tokens_keeps_to_one_form(any_size, kernel_calls, monkeypatch):
    """Whether kernels have been built must not change a run that goes on after a kill."""
    monkeypatch.setattr(native, "MIN_NATIVE_ENTRIES", 1 << 17)
    relinear.Transponder().build(24, 40)(torch.randn(3, 24)).sum().backward()
    assert not kernel_calls


def test_the_kernels_are_what_runs(any_size, kernel_calls):
    """Modulated and CCL layers reach the kernels, forward and backward."""
    relinear.Transponder(rank=4).build(24, 40)(torch.randn(37, 24)).sum().backward()
    with relinear.activations.context(torch.randn(37, 6)):
        relinear.CCL(rank=8, context_dim=6).build(24, 40)(torch.randn(37, 24)).sum().backward()
    expected = {"modulate", "modulate_backward", "gated_product", "gate_backward"}
    assert set(kernel_calls) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ccl_output_and_gradients(dtype, any_size):
    results = ccl_results((torch.float64, dtype), 24, 41)
    for exact, mine in zip(*results, strict=True):
        assert (mine.double() - exact).norm() <= (5e-2 if dtype == torch.bfloat16 else 1e-5) * exact.norm() + 1e-6


def hdpl_arguments(tokens, blocks, inputs, outputs, rank, noisy, bias):
    generator = torch.Generator().manual_seed(tokens)

    def draw(*shape):
        return torch.randn(*shape, generator=generator)

    given = [draw(tokens, inputs), draw(blocks, outputs // blocks, inputs // blocks)]
    for _ in range(2):
        given += [draw(rank, inputs) / inputs**0.5, draw(rank)]
    return [*given, draw(outputs, rank), draw(outputs) if bias else None, draw(tokens, rank) if noisy else None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("tokens", "blocks", "inputs", "outputs", "rank", "noisy", "bias"),
    [
        (101, 4, 24, 40, 7, True, True),
        (1, 1, 3, 1, 1, True, False),
        (6, 2, 10, 132, 65, False, True),
        (200, 3, 201, 330, 70, True, False),
    ],
)
def test_hdpl_output_and_gradients(tokens, blocks, inputs, outputs, rank, noisy, bias, dtype, any_size):
    drawn = hdpl_arguments(tokens, blocks, inputs, outputs, rank, noisy, bias)
    upstream = torch.randn(1, outputs).to(dtype).expand(tokens, outputs)  # strided
    results = []
    for function, wide in ((hdpl.hdpl, dtype), (functional_hdpl.hdpl, torch.float64)):
        tensors = [None if t is None else t.to(dtype).to(wide).requires_grad_() for t in drawn[:-1]]
        noise = None if drawn[-1] is None else drawn[-1].to(torch.promote_types(wide, torch.float32))
        y, z, mu, logvar = function(*tensors, noise)
        outer = [y, z, mu] + ([logvar] if noisy else [])
        loss = (y * upstream.to(y.dtype)).sum()
        if noisy:
            loss = loss + functional_hdpl.bounded_kl(functional_hdpl.gaussian_kl(mu, logvar).sum(-1), 5.0)[0].mean()
        leaves = [t for i, t in enumerate(tensors) if t is not None and (noisy or i not in (4, 5))]
        results.append(outer + list(torch.autograd.grad(loss, leaves)))
    for mine, theirs in zip(*results, strict=True):
        limit = 4 * TOLERANCES[dtype] if dtype == torch.bfloat16 else TOLERANCES[dtype]
        assert (mine.double() - theirs).norm() <= limit * theirs.norm() + 1e-6


@pytest.mark.parametrize("config", [relinear.HDPL(rank=4, blocks=2), relinear.CCL(rank=4, context_dim=6)], ids=str)
def test_parameters_may_be_strided(config, any_size):
    layer, x, context = config.build(16, 24), torch.randn(5, 16), torch.randn(5, 6)
    strided = copy.deepcopy(layer)
    for part in strided.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                part._parameters[name] = torch.nn.Parameter(torch.stack([parameter.detach()] * 2, -1)[..., 0])
    results = []
    for module in (layer, strided):
        with relinear.activations.context(context):
            torch.manual_seed(0)
            y = module(x)
        y.square().sum().backward()
        results.append([y, *(p.grad for p in module.parameters())])
    for mine, theirs in zip(*results, strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None:
            close(mine, theirs, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("settings", [{"blocks": 4}, {"blocks": 1, "bound": "free_bits"}], ids=str)
@pytest.mark.parametrize(("leading", "inputs", "outputs", "bias"), [((1,), 36, 44, True), ((2, 3), 20, 24, False)])
@torch.no_grad()
def test_a_few_rows_of_hdpl(settings, leading, inputs, outputs, bias, dtype, few_rows):
    layer = relinear.HDPL(rank=13, **settings).build(inputs, outputs, bias=bias).to(dtype).eval()
    for parameter in layer.parameters():
        parameter.normal_(std=0.3)
    given = [*layer.mu(), None, None, layer.decoder()[0], layer.bias]
    x = torch.randn(*leading, 2 * inputs, dtype=dtype)[..., ::2]
    exact = functional_hdpl.hdpl(*(None if t is None else t.double() for t in (x, layer.blocks, *given)))
    got = hdpl.hdpl(x, layer.blocks, *given)
    assert few_rows
    assert got.logvar is None
    for mine, theirs in zip(got[:3], exact[:3], strict=True):
        assert mine.shape == theirs.shape
        close(mine, theirs, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bits", native.calls.SUPPORTED_BITS)
@torch.no_grad()
def test_integers_are_read_as_they_are_packed(bits, dtype, few_rows):
    """Few rows and many, against double precision; groups of half a block, of blocks, and longer than a row."""
    for inputs, group, outputs, rows, symmetric in (
        (576, 64, 9, 1, False),
        (128, 32, 7, 6, True),
        (64, 1024, 5, 40, False),
    ):
        layer = relinear.Quantized(bits=bits, group=group, symmetric=symmetric).build(inputs, outputs).to(dtype)
        layer.scales.normal_()
        layer.bias.normal_()
        if not symmetric:
            layer.zeros.random_(0, 256)
        x = torch.randn(2, rows, 2 * inputs, dtype=dtype)[..., ::2]
        y = layer(x)
        assert y.shape == (2, rows, outputs)
        close(y, copy.deepcopy(layer).double()(x.double()), dtype)
    assert len(few_rows) == 3
    with torch.enable_grad():
        layer(x).sum().backward()
    layer(x[..., :0, :])
    relinear.Quantized(bits=bits, group=20).build(40, 3)(torch.randn(1, 40))
    assert len(few_rows) == 3  # gradients, no rows, and sizes that fill no block


def rounded_to_bytes(x):
    parts = x.double().unflatten(-1, (-1, 32))
    steps = parts.abs().amax(-1, keepdim=True) / 127
    return ((parts / steps).round() * steps).nan_to_num().flatten(-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bits", native.calls.SUPPORTED_BITS)
@torch.no_grad()
def test_integers_times_inputs_that_are_rounded_to_bytes(bits, dtype, few_rows):
    """Promised to stay, a few rows through integers are what rounding of inputs explains; elsewhere they are exact."""
    for inputs, group, outputs, symmetric in ((576, 64, 9, False), (128, 32, 7, True), (192, 96, 5, False)):
        layer = relinear.Quantized(bits=bits, group=group, symmetric=symmetric).build(inputs, outputs).to(dtype).eval()
        layer.scales.normal_()
        layer.bias.normal_()
        if not symmetric:
            layer.zeros.random_(0, 256)
        x = torch.randn(2, 1, inputs, dtype=dtype)
        x[0, 0, :32] = 0
        exact, whole = copy.deepcopy(layer).double(), torch.nn.functional.linear
        weight, bias = exact.to_dense(), exact.bias
        with relinear.contract.inference.caching_for_inference(layer):
            close(layer(x), whole(x.double(), weight, bias), dtype)
        relinear.for_inference_(layer)
        close(layer(x), whole(rounded_to_bytes(x), weight, bias), dtype)
        assert 0 < (layer(x).double() - whole(x.double(), weight, bias)).norm() < 0.02 * (x.norm() * weight.norm())
        x[1, 0, 5] = torch.nan
        assert layer(x)[1].isnan().all()
        assert layer(x)[0].isfinite().all()


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="names processors of x86")
@pytest.mark.parametrize("processor", ["x86-64", "haswell", "skylake-avx512"])
def test_bytes_are_multiplied_alike_without_instructions_of_new_processors(processor, few_rows, monkeypatch, tmp_path):
    known = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    if {"haswell": "avx2", "skylake-avx512": "avx512bw"}.get(processor, "") not in known:
        pytest.skip("this processor is older")
    library, source = tmp_path / "kernels.so", next(path for path in build.SOURCES if path.stem == "quantized")
    flags = [f"-march={processor}" if flag == build.NATIVE else flag for flag in build.FLAGS]
    subprocess.run([build.compiler(), *flags, "-shared", source, "-o", library], check=True)
    loaded = ctypes.CDLL(str(library))
    monkeypatch.setattr(build, "library", lambda: loaded)
    native.calls._kernel.cache_clear()
    try:
        for bits in native.calls.SUPPORTED_BITS:
            test_integers_times_inputs_that_are_rounded_to_bytes(bits, torch.float32, few_rows)
    finally:
        native.calls._kernel.cache_clear()


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@torch.no_grad()
def test_a_token_through_quantized_decoder_layers_is_two_calls_a_layer(cache, any_size):
    """The tokens are those of the layers' own forward, which hooks, copies and the promise's end go back to."""
    sizes = {"hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    config = transformers.LlamaConfig(vocab_size=90, num_hidden_layers=2, max_position_embeddings=64, **sizes)
    model = transformers.LlamaForCausalLM(config).eval()
    relinear.replace_(model, {"all-linear": relinear.Quantized(bits=4)}, init="from_weight")
    ids, calls = torch.tensor([[0, 0, 3, 4]]), []
    limits = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    limits |= {"attention_mask": (ids != 0).long(), "cache_implementation": cache}
    layer = relinear.for_inference_(model).model.layers[1]
    compiled = layer.forward.cache.get("calls", layer.forward._compiled_calls)
    counted = compiled._replace(before_attention=lambda *given: calls.append(1) or compiled.before_attention(*given))
    layer.forward.cache._state[2]["calls"] = counted
    tokens = model.generate(ids, **limits)
    assert len(calls) == 11
    hook = layer.mlp.up_proj.register_forward_hook(lambda *args: None)
    assert torch.equal(model.generate(ids, **limits), tokens)
    hook.remove()
    copy.deepcopy(model).generate(ids, **limits)
    model.train().eval().generate(ids, **limits)
    with relinear.contract.inference.caching_for_inference(model):
        model.generate(ids, **limits)
    layer.mlp.up_proj = torch.nn.Linear(128, 192)
    model.generate(ids, **limits)
    relinear.for_inference_(model).generate(ids, **limits)
    assert len(calls) == 11


@pytest.mark.parametrize("moment", [True, False], ids=["both", "inputs"])
def test_codes_change_as_in_the_reference(moment, few_rows):
    generator = torch.Generator().manual_seed(0)
    weight, x, g = (torch.randn(*shape, generator=generator) for shape in ((70, 40), (90, 40), (200, 70)))
    grid = rounding.nearest_grid(weight, 3, 16, False)
    moments = rounding.shrunk(x.T @ x / 90, 0.05), rounding.shrunk(g.T @ g / 200, 0.5) if moment else None
    start = rounding.round_to_nearest(weight, grid, 16)
    change = quantized.code_changer(weight)
    mine, theirs = (
        rounding.coordinate_descent(weight, start, grid, 16, *moments, **k) for k in ({"change": change}, {})
    )
    assert few_rows
    assert torch.equal(mine, theirs)
    assert not torch.equal(mine, start)
    assert quantized.code_changer(weight.double()) is rounding.change_codes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "settings", [{}, {"gate_bias": False}, {"norm": False}, {"basis_gate": False}, {"output_gate": False}], ids=str
)
@pytest.mark.parametrize(("leading", "inputs", "outputs", "bias"), [((1,), 37, 43, True), ((2, 3), 20, 24, False)])
@torch.no_grad()
def test_a_few_rows_of_ccl(settings, leading, inputs, outputs, bias, dtype, few_rows):
    layer = relinear.CCL(rank=13, context_dim=6, **settings).build(inputs, outputs, bias=bias).to(dtype)
    for parameter in layer.parameters():
        parameter.normal_(std=0.5)
    relinear.for_inference_(layer)
    x, context = torch.randn(*leading, inputs, dtype=dtype), torch.randn(*leading, 6, dtype=dtype)
    with relinear.activations.context(context):
        y = layer(x)
    assert few_rows
    exact = copy.deepcopy(layer).double()
    with relinear.activations.context(context.double()):
        theirs = exact(x.double())
    assert y.shape == (*leading, outputs)
    close(y, theirs, dtype)


PREPARED = [
    relinear.HDPL(rank=13, blocks=4),
    relinear.HDPL(rank=5, blocks=1, noise=False),
    relinear.CCL(rank=13, context_dim=6),
    relinear.CCL(rank=13, context_dim=6, gate_bias=False, norm=False, gate_depth=2, gate_width=9),
    relinear.CCL(rank=13, context_dim=6, basis_gate=False, gate_depth=0),
    relinear.CCL(rank=13, context_dim=6, basis_gate=False, output_gate=False),
    relinear.Transponder(rank=5),
    relinear.Transponder(scalar=False),
]
every_prepared = pytest.mark.parametrize("config", PREPARED, ids=str)


def drawn_layer(config, inputs=36, outputs=44, bias=True):
    layer = config.build(inputs, outputs, bias=bias).eval()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(std=0.3)
    return layer


def of_rows(layer, x, context=None):
    """What the layer says of x in inference, with a context of its own for every token by default."""
    if context is None:
        context = torch.randn(*x.shape[:-1], 6, generator=torch.Generator().manual_seed(1))
    with torch.no_grad(), relinear.activations.context(context.to(x.dtype)):
        return layer(x)


@pytest.fixture
def whole_layers(few_rows, monkeypatch):
    """Names of the kernels that are called without asking about parameters again."""
    called = []

    def recorded(name, kernel):
        def run(*parameters):
            layer = kernel(*parameters)
            if sys._getframe(1).f_code.co_name != "prepare_few_rows":
                return layer
            return lambda *given: called.append(name) or layer(*given)

        return run

    for name in ("modulated_layer", "hdpl_layer", "ccl_layer"):
        monkeypatch.setattr(native.calls, name, recorded(name, getattr(native.calls, name)))
    return called


@every_prepared
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("leading", "bias"), [((1,), True), ((), False), ((2, 3), True)])
def test_a_layer_with_weights_that_stay_is_one_call(config, leading, bias, dtype, whole_layers):
    layer = drawn_layer(config, bias=bias).to(dtype)
    exact = copy.deepcopy(layer).double()
    x = torch.randn(*leading, 2 * 36)[..., ::2].to(dtype)  # strided
    relinear.for_inference_(layer)
    for turn in (1, 2):
        y = of_rows(layer, x)
        assert len(whole_layers) == turn
        assert y.shape == (*leading, 44)
        assert y.dtype == dtype
        close(y, of_rows(exact, x.double()), dtype)


@every_prepared
def test_a_prepared_layer_reads_no_memory_that_nobody_wrote(config, whole_layers):
    layer, x = relinear.for_inference_(drawn_layer(config)), torch.randn(3, 36)
    want = of_rows(layer, x)
    torch.use_deterministic_algorithms(True)  # fills new tensors with NaN
    try:
        assert torch.equal(of_rows(layer, x), want)
    finally:
        torch.use_deterministic_algorithms(False)
    assert len(whole_layers) == 2


@every_prepared
def test_a_row_without_numbers_spoils_no_other_of_a_prepared_layer(config, whole_layers):
    layer, x = relinear.for_inference_(drawn_layer(config)), torch.randn(3, 36)
    alone = of_rows(layer, x)
    x[1] = torch.nan
    y = of_rows(layer, x)
    assert torch.equal(y[[0, 2]], alone[[0, 2]])
    assert y[1].isnan().all()
    assert whole_layers


@every_prepared
@pytest.mark.parametrize("rows", [0, 9], ids=["no-rows", "many"])
def test_other_numbers_of_rows_run_as_usual(config, rows, whole_layers):
    layer, x = relinear.for_inference_(drawn_layer(config)), torch.randn(rows, 36)
    y = of_rows(layer, x)
    assert y.shape == (rows, 44)
    close(y, of_rows(copy.deepcopy(layer).double(), x.double()), torch.float32)
    assert not whole_layers


def hooked(layer):
    for part in layer.modules():
        if part is not layer:
            part.register_forward_hook(lambda module, args, result: None)


def of_another_forward(layer):
    for part in layer.modules():
        if part is not layer:
            part.forward = part.forward


def of_another_class(layer):
    for part in layer.modules():
        if part is not layer:
            part.__class__ = type("Shadow", (type(part),), {})


def training(layer):
    for part in layer.modules():
        part.training = part is not layer


def unpromised(layer):
    for part in layer.children():
        relinear.for_inference_(part, False)
    relinear.for_inference_(layer, False)


CHANGES = [hooked, of_another_forward, of_another_class, training, unpromised]


@every_prepared
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_what_is_put_into_a_prepared_layer_is_not_passed_over(config, change, whole_layers):
    layer, x = relinear.for_inference_(drawn_layer(config)), torch.randn(3, 36)
    want = of_rows(layer, x)
    whole_layers.clear()
    change(layer)
    has_parts = any(True for _ in layer.children())
    torch.testing.assert_close(of_rows(layer, x), want)
    assert not whole_layers or not has_parts


@every_prepared
def test_hooks_of_parts_run_once_a_call_from_the_first_on(config, whole_layers):
    layer, calls = relinear.for_inference_(drawn_layer(config)), []
    for part in layer.children():
        part.register_forward_hook(lambda module, args, result: calls.append(module))
    of_rows(layer, torch.randn(3, 36))
    first = len(calls)
    of_rows(layer, torch.randn(3, 36))
    assert len(calls) == 2 * first


class Switched(torch.nn.Module):
    """In the place of parameters: what it gives depends on more than numbers of its own."""

    def __init__(self, part):
        super().__init__()
        self.part, self.factor = part, 1.0

    def forward(self):
        weight, bias = self.part()
        return self.factor * weight, bias


@pytest.mark.parametrize("first", ["put in", "promised"])
def test_a_part_that_computes_its_parameters_is_asked_at_every_call(first, whole_layers):
    layer, x = drawn_layer(PREPARED[0]), torch.randn(3, 36)
    if first == "promised":
        of_rows(relinear.for_inference_(layer), x)
    layer.mu = Switched(layer.mu).eval()
    relinear.for_inference_(layer)
    before = of_rows(layer, x)
    layer.mu.factor = 2.0
    assert not torch.allclose(of_rows(layer, x), before)


@every_prepared
def test_a_prepared_layer_under_autocast_and_with_gradients(config, whole_layers):
    layer, x = relinear.for_inference_(drawn_layer(config)), torch.randn(3, 36)
    of_rows(layer, x)
    whole_layers.clear()
    with torch.autocast("cpu", torch.bfloat16):
        of_rows(layer, x)
    with relinear.activations.context(torch.randn(3, 6)):
        layer(x).sum().backward()
    assert not whole_layers
    assert next(layer.parameters()).grad is not None


def test_a_modulator_alone_in_training_is_computed_from_its_parameters(whole_layers):
    layer, x = relinear.for_inference_(drawn_layer(relinear.Transponder())), torch.randn(3, 36)
    of_rows(layer, x)
    layer.modulator.train()
    layer.modulator.channel_up.data.mul_(2)
    close(of_rows(layer, x), of_rows(copy.deepcopy(layer).double(), x.double()), torch.float32)


def test_edits_reach_a_prepared_layer(whole_layers):
    layer, x = relinear.for_inference_(drawn_layer(PREPARED[0])), torch.randn(3, 36)
    model = torch.nn.Sequential(layer)
    want = of_rows(model, x)
    with relinear.activations.intervene(model, {"0": relinear.activations.Patch(0.0)}):
        assert not torch.allclose(of_rows(model, x), want)
    with relinear.activations.latents(model) as found:
        torch.testing.assert_close(of_rows(model, x), want)
    assert found["0"].mu.shape == (3, 13)
    assert torch.equal(of_rows(model, x), want)


@torch.no_grad()
def test_a_context_that_sequences_share_is_not_the_kernels(few_rows):
    layer = relinear.for_inference_(relinear.CCL(rank=13, context_dim=6).build(20, 24))
    x, context = torch.randn(2, 3, 20), torch.randn(1, 3, 6)
    with relinear.activations.context(context):
        y = layer(x)
    with relinear.activations.context(context.expand(2, 3, 6)):
        close(y, layer(x), torch.float32)


@pytest.mark.parametrize("sizes", [(7, 5, 3, 2), (1, 16, 4, 4), (300, 130, 64, 17), (1000, 63, 1, 1)])
@pytest.mark.parametrize("has_bias", [True, False], ids=["bias", "no_bias"])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_gated_product_is_that_of_torch(sizes, has_bias, threads, any_size) -> None:
    rows, outputs, rank, width = sizes
    shapes = (rows, rank), (outputs, rank), (outputs,), (rows, width), (outputs, width), (outputs,)
    h, mix, bias, features, weight, offset = (torch.randn(shape, dtype=torch.float64) for shape in shapes)
    y = h @ mix.T + (bias if has_bias else 0)
    expected = y * torch.sigmoid(features @ weight.T + offset)
    given = [value.float() for value in (h, mix, bias, features, weight, offset)]
    given[2] = given[2] if has_bias else None
    out, before = torch.full((rows, outputs), torch.nan), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        native.calls.gated_product(out, *given)
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match=r"out must be a contiguous torch\.float32"):
        native.calls.gated_product(out.bfloat16(), *given)


def test_sigmoid_of_extreme_numbers(any_size):
    logits = torch.tensor([[-1e38, -87.5, -30.0, -1e-8, 0.0, 1e-8, 30.0, 1e38, torch.inf, -torch.inf, torch.nan]])
    ones, zeros = torch.ones_like(logits), torch.zeros(logits.shape[1])
    out = torch.empty_like(logits)
    native.calls.gate(out, ones, logits, zeros)
    torch.testing.assert_close(out, torch.sigmoid(logits), rtol=1e-6, atol=1e-37, equal_nan=True)
    near = torch.linspace(-90, 90, 20001)[None]
    out = torch.empty_like(near)
    native.calls.gate(out, torch.ones_like(near), near, torch.zeros(near.shape[1]))
    torch.testing.assert_close(out.double(), torch.sigmoid(near.double()), rtol=3e-7, atol=1e-37)


def test_bfloat16_is_rounded_to_nearest_and_keeps_what_is_not_a_number(any_size):
    values = torch.randn(1, 4096).bfloat16()
    values[0, :3] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    logits = torch.zeros_like(values)
    out = torch.empty_like(values)
    native.calls.gate(out, values, logits, torch.full((4096,), 0.25).bfloat16())
    expected = (values.double() * torch.sigmoid(torch.tensor(0.25).double())).bfloat16()
    torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bias": torch.zeros(3)}, "bias must be a contiguous"),
        ({"value": torch.zeros(4, 5).double()}, "value must be a contiguous"),
        ({"out": torch.empty(4, 5).double()}, "must be a contiguous torch.float64"),
        ({"logits": torch.zeros(5, 4).T}, "logits must be a contiguous"),
    ],
)
def test_wrong_tensors_are_refused(change, message, any_size):
    given = {"out": torch.empty(4, 5), "value": torch.zeros(4, 5), "logits": torch.zeros(4, 5), "bias": torch.zeros(5)}
    with pytest.raises(ValueError, match=message):
        native.calls.gate(*(given | change).values())


def test_small_and_other_tensors_take_torch_operations():
    assert native.unsupported_reason(Call(torch.zeros(native.MIN_NATIVE_ENTRIES - 1)))
    assert native.unsupported_reason(Call(torch.zeros(native.MIN_NATIVE_ENTRIES, dtype=torch.float64)))
    assert native.unsupported_reason(Call(torch.zeros(native.MIN_NATIVE_ENTRIES, device="meta")))


@pytest.fixture
def as_at_first_use(monkeypatch):
    """What is settled once a process is asked anew, and again afterwards."""
    settled = (build.compiler, build.library, build._was_built)
    for each in settled:
        each.cache_clear()
    yield monkeypatch
    for each in settled:
        each.cache_clear()


def reason_for_large_tensors():
    return native.unsupported_reason(Call(torch.zeros(native.MIN_NATIVE_ENTRIES)))


def test_a_broken_compiler_means_torch_operations_and_a_warning(as_at_first_use, tmp_path):
    broken = tmp_path / "g++"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    as_at_first_use.setenv("CXX", str(broken))
    as_at_first_use.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "cache"))
    with pytest.warns(UserWarning, match="RELINEAR_COMPILE_KERNELS=0"):
        assert reason_for_large_tensors() == "the kernels could not be built"


@pytest.mark.parametrize("off", ["0", "off"])
def test_the_kernels_can_be_turned_off(off, as_at_first_use, tmp_path):
    as_at_first_use.setenv("RELINEAR_COMPILE_KERNELS", off)
    as_at_first_use.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert reason_for_large_tensors() == "no C++ compiler, or RELINEAR_COMPILE_KERNELS=0"
    assert not list(tmp_path.iterdir())


def test_a_wrong_wish_for_kernels_is_refused(monkeypatch):
    monkeypatch.setenv("RELINEAR_COMPILE_KERNELS", "never")
    with pytest.raises(ValueError, match=r"RELINEAR_COMPILE_KERNELS='never' .* expected one of '1', 'on'"):
        build.compiler.__wrapped__()
