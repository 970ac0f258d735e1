"""Rotor layers beyond the conformance suite: the paper's map, exact counts, windows, the cache of inference."""

import copy

import pytest
import torch

import relinear
from relinear import clifford
from relinear.functional.rotor import from_windows, to_windows
from relinear.operators.rotor import SandwichSum

D = torch.float64


def test_blade_basis_is_the_sandwich_of_the_algebra():
    module = relinear.Rotor(width=2, depth=0, basis="blade").build(32, 32, bias=False, dtype=D)
    x = torch.randn(3, 32, dtype=D)
    left, right = module.entry.left[:, 0, 0], module.entry.right[:, 0, 0]
    expected = sum(clifford.sandwich(clifford.exp(a), x, clifford.exp(b)) for a, b in zip(left, right))
    torch.testing.assert_close(module(x), expected)
    single = relinear.Rotor(width=1, depth=0, basis="blade", rotors="single").build(64, 64, bias=False, dtype=D)
    x = torch.randn(3, 64, dtype=D)
    torch.testing.assert_close(single(x), clifford.sandwich(clifford.exp(single.entry.left[0, 0, 0]), x))


def test_blade_basis_of_general_terms_is_the_geometric_product():
    module = relinear.Rotor(width=2, depth=0, basis="blade", terms="multivector").build(16, 16, bias=False, dtype=D)
    x = torch.randn(3, 16, dtype=D)
    product = clifford.geometric_product
    pairs = zip(module.entry.left[:, 0, 0], module.entry.right[:, 0, 0])
    torch.testing.assert_close(module(x), sum(product(product(a, x), b) for a, b in pairs))


def test_the_bases_are_conjugate():
    spinor = relinear.Rotor(width=1, depth=0).build(128, 128, bias=False, dtype=D)
    blade = relinear.Rotor(width=1, depth=0, basis="blade").build(128, 128, bias=False, dtype=D)
    blade.load_state_dict(spinor.state_dict())
    x = torch.randn(3, 128, dtype=D)
    torch.testing.assert_close(clifford.to_spin(blade(x)), spinor(clifford.to_spin(x)))


@pytest.mark.parametrize("size", [64, 256, 512, 2048, 4096])
def test_a_single_term_is_orthogonal(size):
    module = relinear.Rotor(width=1, depth=0, init_std=1.0).build(size, size, bias=False, dtype=D)
    x = torch.randn(4, size, dtype=D)
    y = module(x)
    torch.testing.assert_close(y @ y.T, x @ x.T)
    assert (y - x).norm() > 0.1 * x.norm()


@pytest.mark.parametrize(
    ("settings", "shape", "count"),
    [
        ({"width": 1, "depth": 0, "rotors": "single"}, (2048, 2048), 55),
        ({"width": 1, "depth": 0}, (2048, 2048), 110),
        ({"width": 3, "depth": 0}, (2048, 2048), 330),
        ({"width": 1, "depth": 0}, (2048, 512), 4 * 2 * 36),  # four input windows of 512
        ({}, (2048, 2048), (1 + 2 * 3 + 1) * 110 + 2 * (3 + 3)),  # entry, two steps of three, exit; mixing and slopes
        ({"scale": True}, (2048, 2048), (1 + 2 * 3 + 1) * 111 + 2 * (3 + 3)),
        ({}, (576, 576), (2 + 2 * 3 + 2) * 2 * 36 + 2 * (3 + 3)),  # two windows of 512 on either side
        ({"width": 1, "depth": 0, "terms": "multivector"}, (2048, 2048), 2 * 2048),
        ({"width": 1, "depth": 0, "terms": "kronecker"}, (2048, 2048), 32**2 + 64**2),
    ],
)
def test_exact_parameter_counts(settings, shape, count):
    module = relinear.Rotor(**settings).build(*shape, bias=False, device="meta")
    assert sum(p.numel() for p in module.parameters()) == count


def test_windows_cover_every_coordinate_and_are_averaged():
    x = torch.arange(11.0)
    windows = to_windows(x, 8)
    assert windows.tolist() == [[0, 1, 2, 3, 4, 5, 6, 7], [8, 9, 10, 0, 1, 2, 3, 4]]
    torch.testing.assert_close(from_windows(windows, 11), x)
    other = windows.clone()
    other[1] += 2
    torch.testing.assert_close(from_windows(other, 11), x + torch.tensor([1.0] * 5 + [0] * 3 + [2] * 3))


@pytest.mark.parametrize("terms", ["rotor", "multivector", "kronecker"])
@pytest.mark.parametrize("scale", [True, False])
def test_fresh_layers_keep_the_variance(terms, scale):
    """With a scale, or with general terms, the sum is normalised; every network ends at unit variance too."""
    if terms == "rotor" and not scale:
        pytest.skip("a plain sum of W rotors has variance W by its definition")
    settings = relinear.Rotor(depth=0, terms=terms, scale=scale, init_std=1.0)
    x = torch.randn(4096, 320)
    for size in (192, 320, 512):
        variance = settings.build(320, size, bias=False)(x).var().item()
        assert 0.4 < variance < 1.7, size


def test_an_unknown_or_impossible_setting_is_refused():
    for settings in ({"rotors": "triple"}, {"basis": "x"}, {"terms": "x"}, {"activation": "x"}, {"init_std": 0.0}):
        with pytest.raises(ValueError, match=next(iter(settings))):
            relinear.Rotor(**settings)
    with pytest.raises(ValueError, match="at least two"):
        relinear.Rotor().build(1, 8)


def counting(module: SandwichSum):
    """Count how often the module's factors are computed."""
    calls = []
    original = module.factors
    module.factors = lambda: calls.append(1) or original()
    return calls


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [32, 1024])
def test_inference_computes_factors_once_until_a_parameter_changes(dtype, size):
    module = relinear.Rotor(width=1, depth=0).build(size, size, dtype=dtype).eval()
    calls = counting(module.entry)
    x = torch.randn(3, size, dtype=dtype)
    graph = module(x).detach()
    assert len(calls) == 1
    with torch.no_grad():
        first = module(x)
        module(x)
        assert len(calls) == 2
        tolerance = 1e-5 if dtype == torch.float32 else 3e-2
        torch.testing.assert_close(first, graph, atol=tolerance, rtol=tolerance)
        module.entry.left.add_(0.5)
        changed = module(x)
        assert len(calls) == 3
        assert (changed - first).norm() > 0.05 * first.norm()
        module.train().eval()
        module(x)
        assert len(calls) == 4
        torch.testing.assert_close(copy.deepcopy(module)(x), changed)
        module.load_state_dict({k: v + 1 for k, v in module.state_dict().items()})
        assert (module(x) - changed).norm() > 0.05 * first.norm()
        count = len(calls)
        module.entry.left.data = module.entry.left.data.clone() - 1  # as a move to another device does
        module(x)
        assert len(calls) == count + 1
    with torch.inference_mode():
        module(x)
    module(x).sum().backward()  # what inference cached must not leak into a graph
    assert torch.isfinite(module.entry.left.grad).all()


def test_no_wide_matrix_is_built_in_training(monkeypatch):
    module = relinear.Rotor(width=1, depth=0).build(2048, 2048, bias=False)
    largest = 0
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                largest = max(largest, out.numel())
            return out

    with Watch():
        module(torch.randn(2, 2048)).sum().backward()
    assert largest <= 55 * 64 * 64  # the generators of the rotors; a 2048 x 2048 matrix has twenty times as many


@pytest.mark.parametrize("shape", [(16, 16), (24, 40), (8, 17)], ids=str)
@pytest.mark.parametrize("settings", [{"width": 2}, {"width": 1, "basis": "blade"}, {"terms": "kronecker"}], ids=str)
def test_gradients_that_are_expanded(settings, shape):
    """``y.sum()`` and ``y.mean(0)`` hand on gradients with strides of zero, ``y.T`` transposed ones."""
    module = relinear.Rotor(depth=0, **settings).build(*shape, dtype=D)
    x = torch.randn(600, shape[0], dtype=D, requires_grad=True)
    column, row = torch.randn(600, 1, dtype=D), torch.randn(shape[1], dtype=D)
    wanted = [x, *module.parameters()]
    for grad in (
        torch.ones((), dtype=D).expand(600, shape[1]),
        column.expand(-1, shape[1]),
        row.expand(600, -1),
        torch.randn(shape[1], 600, dtype=D).T,
    ):
        found = torch.autograd.grad(module(x), wanted, grad)
        expected = torch.autograd.grad(module(x), wanted, grad.clone(memory_format=torch.contiguous_format))
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other)


def test_batched_products_of_an_expanded_gradient_are_contiguous(monkeypatch):
    given = []
    bmm = torch.bmm
    monkeypatch.setattr(torch, "bmm", lambda *a, **k: given.append([m.stride() for m in a]) or bmm(*a, **k))
    y = relinear.Rotor(depth=0, width=2).build(64, 64)(torch.randn(7, 64))
    given.clear()
    y.sum().backward()
    assert len(given) == 4  # two products a term
    assert all(0 not in strides[-2:] for pair in given for strides in pair)
