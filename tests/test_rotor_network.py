"""The C++ kernel of a whole network of rotors against double precision, and which networks it takes."""

import copy
import ctypes
import functools
import sys

import pytest
import torch

import relinear
from relinear.functional import rotor as reference
from relinear.kernels import native, rotor
from relinear.kernels.implementations import Call
from relinear.kernels.native import build

#: relative in the Frobenius norm; what was rounded to bfloat16 is that of the inputs and gradients
TOLERANCES = {torch.float32: 2e-4, torch.bfloat16: 1e-2}

AUTHORS = {"windows": "spread", "activate_entry": True, "slopes": "shared", "gains": "ones", "scale": True}

every_network = pytest.mark.parametrize(
    ("settings", "inputs", "outputs", "tokens"),
    [
        ({}, 64, 64, 16),
        ({}, 24, 40, 33),
        ({}, 100, 72, 5),
        ({}, 128, 512, 17),
        ({}, 1025, 1024, 3),
        (AUTHORS | {"residual": True}, 100, 64, 19),
        (AUTHORS | {"inner": "input"}, 100, 40, 1),
        ({"windows": "spread", "residual": True}, 128, 128, 35),
        ({"inner": 256, "depth": 1, "width": 1}, 40, 100, 18),
        ({"activation": "relu", "permute": False}, 64, 96, 20),
        ({"activation": "leaky_relu", "normalize": False}, 64, 96, 20),
        ({"activation": "none", "rotors": "single", "depth": 3}, 64, 96, 20),
        ({"terms": "multivector", "width": 2}, 128, 130, 21),
        ({"terms": "kronecker", "slopes": "shared"}, 64, 150, 21),
        ({"activation": "gelu"}, 64, 72, 18),
        ({"activation": "silu", "normalize": False, "permute": False}, 100, 64, 5),
        ({"activation": "elu", "activate_entry": True}, 64, 64, 33),
        # every kind of numbers that the spin representation is made of
        ({"basis": "blade"}, 16, 16, 20),
        ({"basis": "blade", "rotors": "single"}, 36, 32, 17),
        ({"basis": "blade", "activation": "gelu"}, 64, 64, 3),
        ({"basis": "blade", "permute": False}, 128, 130, 33),
        ({"basis": "blade", "normalize": False}, 256, 256, 16),
        ({"basis": "blade", "width": 2}, 512, 512, 5),
        ({"basis": "blade", "depth": 1}, 1024, 1000, 2),
        ({"basis": "blade", "inner": 256, "depth": 1, "width": 1}, 40, 100, 18),
        ({"basis": "blade", "terms": "multivector"}, 64, 100, 21),
        ({"basis": "blade", "terms": "kronecker", "rotors": "double"}, 64, 64, 21),
        (AUTHORS | {"basis": "blade", "residual": True}, 100, 64, 19),
        (AUTHORS | {"basis": "blade", "residual": True, "inner": "input"}, 64, 128, 17),
        (AUTHORS | {"basis": "blade", "residual": True, "inner": 32}, 100, 32, 7),
    ],
    ids=str,
)


@pytest.fixture
def any_size(monkeypatch):
    monkeypatch.setattr(native, "MIN_NETWORK_ENTRIES", 1)
    if native.unsupported_reason(Call(torch.zeros(1)), fewest=1):
        pytest.skip("no C++ compiler, or RELINEAR_COMPILE_KERNELS=0")


@pytest.fixture
def calls(any_size, kernel_calls):
    """The names of kernels that were called."""
    return kernel_calls


def network(settings, inputs, outputs, dtype=torch.float32):
    torch.manual_seed(0)
    module = relinear.Rotor(**settings).build(inputs, outputs)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    return module.to(dtype)


def results(module, x, upstream):
    x = x.clone().requires_grad_()
    y = module(x)
    names = ["x", *(name for name, _ in module.named_parameters())]
    return {"y": y} | dict(zip(names, torch.autograd.grad(y, [x, *module.parameters()], upstream), strict=True))


@every_network
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_output_and_gradients(settings, inputs, outputs, tokens, dtype, calls):
    """Of strided inputs and expanded gradients, with memory that holds NaN until it is written."""
    module = network(settings, inputs, outputs, dtype)
    x = torch.randn(inputs, tokens).to(dtype).T
    upstream = torch.randn(1, outputs).to(dtype).expand(tokens, outputs)
    exact = results(copy.deepcopy(module).double(), x.double(), upstream.double())
    assert not calls
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        mine = results(module, x, upstream)
        with torch.no_grad():
            assert torch.equal(module.eval()(x), mine["y"])
    finally:
        torch.use_deterministic_algorithms(False)
    assert calls == ["rotor_network", "rotor_network_backward", "rotor_network"]
    for name, expected in exact.items():
        # a norm takes the gradient of a scale in front of it away, up to its epsilon: what is left is rounding
        error = (mine[name].double() - expected).norm()
        assert error <= TOLERANCES[dtype] * max(expected.norm(), 1.0), name


several = pytest.mark.parametrize("settings", [{}, {"basis": "blade", "activation": "gelu"}], ids=str)


@several
def test_the_same_bits_every_time_and_for_any_gradient_of_the_same_numbers(settings, calls):
    module, x = network(settings, 128, 96), torch.randn(150, 128)
    upstream = torch.randn(96).expand(150, 96)
    runs = [results(module, x, given) for given in (upstream, upstream, upstream.contiguous())]
    for other in runs[1:]:
        for name, value in runs[0].items():
            assert torch.equal(value, other[name]), name


@several
def test_a_token_is_the_same_whoever_its_neighbours_are(settings, calls):
    module, x = network(settings, 100, 72), torch.randn(41, 100)
    upstream = torch.randn(41, 72)
    together = results(module, x, upstream)
    for rows in (slice(0, 1), slice(7, 8), slice(3, 23), slice(30, 41)):
        alone = results(module, x[rows], upstream[rows])
        assert torch.equal(alone["y"], together["y"][rows])
        assert torch.equal(alone["x"], together["x"][rows])


@several
def test_a_token_that_is_not_a_number_stays_alone(settings, calls):
    module, x = network(settings, 64, 64), torch.randn(20, 64)
    upstream, others = torch.randn(20, 64), [at for at in range(20) if at != 5]
    expected = results(module, x, upstream)
    x[5, 3] = torch.nan
    found = results(module, x, upstream)
    for name in ("y", "x"):
        assert found[name][5].isnan().all()
        assert torch.equal(found[name][others], expected[name][others])


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="fills memory by glibc's means")
def test_nothing_is_read_before_it_is_written(calls):
    """Memory comes filled with bytes that are huge numbers; sums of squares of them are none."""
    perturb, fill = -6, getattr(ctypes.CDLL(None), "mallopt", None)
    if fill is None:
        pytest.skip("no glibc")
    authors = AUTHORS | {"residual": True}
    for settings, inputs, outputs in (({}, 24, 40), (authors, 40, 32), (authors | {"basis": "blade"}, 40, 32)):
        module, x, upstream = network(settings, inputs, outputs), torch.randn(19, inputs), torch.randn(19, outputs)
        expected = results(module, x, upstream)
        fill(perturb, 0x80)  # fresh memory holds 0x7f
        try:
            found = results(module, x, upstream)
        finally:
            fill(perturb, 0)
        for name, value in expected.items():
            assert torch.equal(found[name], value), name


@several
def test_no_tokens(settings, calls):
    """Too few for the kernel, which takes them all the same."""
    module = network(settings, 64, 32)
    assert module(torch.zeros(0, 64)).shape == (0, 32)
    assert not calls
    *tensors, settings = module._network_tensors()
    x = torch.zeros(0, 64, requires_grad=True)
    y = rotor._Network.apply(settings, tensors[2], x, *tensors[3:], module.bias, *tensors[0], *tensors[1])
    y.sum().backward()
    assert y.shape == (0, 32)
    assert not any(p.grad.any() for p in module.parameters())


@pytest.mark.parametrize(
    ("settings", "inputs"),
    [({"depth": 0}, 64), ({}, 6), ({"basis": "blade"}, 8)],
    ids=str,
)
def test_other_networks_take_torch_operations(settings, inputs, calls):
    module, x = network(settings, inputs, 64), torch.randn(3, inputs)
    assert module(x).shape == (3, 64)
    assert "rotor_network" not in calls


def test_compilers_and_transforms_see_every_operation(calls):
    module, x = network({}, 64, 64), torch.randn(3, 64)
    expected = module(x)
    calls.clear()
    torch.testing.assert_close(torch.vmap(module)(x), expected)
    _, tangent = torch.func.jvp(module, (x,), (x,))
    assert tangent.shape == x.shape
    assert not calls


@several
def test_second_derivatives_are_those_of_the_reference(settings, calls):
    module, x = network(settings, 32, 32), torch.randn(3, 32)

    def penalty(of, x):
        (grad,) = torch.autograd.grad(of(x.requires_grad_()).square().sum(), x, create_graph=True)
        return torch.autograd.grad(grad.square().sum(), [x, of.entry.left, of.bias])

    exact = penalty(copy.deepcopy(module).double(), x.double())
    for mine, expected in zip(penalty(module, x.clone()), exact, strict=True):
        assert (mine.double() - expected).norm() <= 1e-3 * expected.norm()


def test_parameters_that_change_are_seen_in_inference(calls):
    module, x = network({}, 64, 64).eval(), torch.randn(3, 64)
    with torch.no_grad():
        first = module(x)
        assert torch.equal(module(x), first)
        for parameter in (module.hidden[0].mix, module.exit.left, module.bias):
            parameter.data += 0.1  # no version counts this
            assert not torch.equal(module(x), first)
            first = module(x)
    assert copy.deepcopy(module)._comparing_cache is None


@pytest.mark.parametrize("n", [2, 6, 7, 8, 9, 10])
def test_both_sides_are_one_batch_of_the_same_exponentials(n):
    """Where the spin representation is real."""
    beta = torch.randn(3, n * (n - 1) // 2, dtype=torch.float64)
    assert relinear.clifford.spin_shape(n).components == 1
    torch.testing.assert_close(relinear.clifford.left_factor(beta), relinear.clifford.right_factor(beta))


def test_autocast(calls):
    module, x = network({}, 64, 64), torch.randn(5, 64)
    with torch.autocast("cpu", torch.bfloat16):
        y = module(x)
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert calls == ["rotor_network", "rotor_network_backward"]
    assert (y.float() - module(x)).norm() <= 2e-2 * y.float().norm()


def test_a_few_tokens_in_inference_take_what_is_built_and_training_keeps_to_one_form(calls, monkeypatch):
    monkeypatch.setattr(native, "MIN_NETWORK_ENTRIES", 1 << 13)
    module, x = network({}, 64, 64), torch.randn(3, 64)
    module(x).sum().backward()
    assert not calls
    with torch.no_grad():
        module(x)
    assert calls == ["rotor_network"]
    monkeypatch.setattr(build, "is_built", lambda: False)
    monkeypatch.setattr(build, "library", functools.cache(lambda: pytest.fail("built")))
    with torch.no_grad():
        module(x)
    assert calls == ["rotor_network"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(3, 64, dtype=torch.float64)}, "x must be a contiguous torch.float32"),
        ({"slopes": torch.zeros(5)}, "slopes must be"),
        ({"orders": torch.zeros(5, 64, dtype=torch.int32)}, "orders must be"),
        ({"left": [torch.zeros(branches, 1, 1, 4, 4) for branches in (1, 3, 3, 1)]}, "divisible by 8"),
        ({"left": [torch.zeros(branches, 1, 1, 8, 8) for branches in (1, 3, 3, 2)]}, "output and input windows"),
        ({"y": torch.zeros(3, 60)}, "y must be"),
    ],
    ids=str,
)
def test_what_the_kernel_refuses(change, message, any_size):
    *tensors, settings = network({}, 64, 64)._network_tensors()
    names = ("left", "right", "orders", "slopes", "mix")
    given = dict(zip(names, tensors, strict=True)) | {"y": torch.zeros(3, 64), "x": torch.zeros(3, 64)} | change

    def run():
        of_layers = native.calls.Network(64, *(given[name] for name in names), settings)
        native.calls.rotor_network(given["y"], given["x"], of_layers, None)

    with pytest.raises(ValueError, match=message):
        run()


@pytest.mark.parametrize("layout", ["wrapped", "spread"])
@pytest.mark.parametrize(("size", "window"), [(64, 64), (100, 64), (72, 16), (9, 8)])
def test_tables_of_windows_are_the_windows(size, window, layout):
    x = torch.randn(2, size)
    at = torch.from_numpy(reference.window_coordinates(size, window, layout == "spread"))
    windows = reference.to_windows(x, window, layout)
    assert torch.equal(x[:, at], windows.flatten(1))
    first, last = torch.from_numpy(reference.coordinate_positions(size, window, layout == "spread")).chunk(2)
    y = torch.randn_like(windows)
    mean = (y.flatten(1)[:, first] + y.flatten(1)[:, last]) / 2
    torch.testing.assert_close(mean, reference.from_windows(y, size, layout))
