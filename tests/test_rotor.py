"""Rotor layers beyond the conformance suite: the paper's map, exact counts, windows, the cache of inference."""

import copy
import functools
import math

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

import relinear
from conftest import mostly_slow
from relinear import clifford
from relinear.contract.calibration_statistics import CalibrationStatistics
from relinear.contract.linear_layers import linear_of
from relinear.functional.rotor import branch_permutation, from_windows, to_windows
from relinear.operators.sandwich_sum import SandwichSum

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


@pytest.mark.parametrize("size", range(8, 33))
def test_spread_windows_start_at_equal_distances(size):
    x = torch.arange(float(size))
    windows = to_windows(x, 8, "spread")
    count = len(windows)
    assert windows[:, 0].tolist() == [i * size // count for i in range(count)]
    assert all((w.diff() % size == 1).all() for w in windows)
    torch.testing.assert_close(from_windows(windows, size, "spread"), x)
    reached = torch.stack([(windows == coordinate).any(-1).sum() for coordinate in range(size)])
    first = windows.clone()
    first[0] += 1
    mean = torch.where(torch.isin(x, windows[0]), 1 / reached, 0.0)
    torch.testing.assert_close(from_windows(first, size, "spread"), x + mean)


@pytest.mark.parametrize("terms", ["rotor", "multivector", "kronecker"])
@pytest.mark.parametrize("scale", [True, False])
def test_fresh_layers_keep_the_variance(terms, scale):
    """With a scale, or with general terms, the sum is normalised; every network ends at unit variance too."""
    if terms == "rotor" and not scale:
        pytest.skip("a plain sum of W rotors has variance W by its definition")
    settings = relinear.Rotor(depth=0, terms=terms, scale=scale, init_std=1.0)
    x = torch.randn(1024, 320)
    for size in (192, 320, 512):
        variance = settings.build(320, size, bias=False)(x).var().item()
        assert 0.4 < variance < 1.7, size


def test_an_unknown_or_impossible_setting_is_refused():
    for settings in ({"rotors": "triple"}, {"basis": "x"}, {"terms": "x"}, {"activation": "x"}, {"init_std": 0.0}):
        with pytest.raises(ValueError, match=next(iter(settings))):
            relinear.Rotor(**settings)
    with pytest.raises(ValueError, match="at least two"):
        relinear.Rotor().build(1, 8)


def test_settings_that_say_nothing_together_are_refused():
    for settings, match in [
        ({"depth": 0, "activate_entry": True}, "activate_entry=True .* depth"),
        ({"depth": 0, "residual": True}, "residual=True .* depth"),
        ({"depth": 0, "inner": "input"}, "inner='input' .* depth"),
        ({"inner": 48}, "power of two"),
        ({"inner": 8192}, "power of two"),
        ({"inner": "output"}, "inner"),
        ({"depth": 1, "permute_terms": True}, "permute_terms=True .* depth=1"),
        ({"power_iterations": 0}, "power_iterations"),
        ({"power_iterations": 3, "terms": "multivector"}, "power_iterations .*multivector"),
        ({"windows": "x"}, "windows"),
        ({"slopes": "x"}, "slopes"),
        ({"gains": "x"}, "gains"),
    ]:
        with pytest.raises(ValueError, match=match):
            relinear.Rotor(**settings)


# The authors' network, against one written anew with the ``clifford`` package

ACTIVATIONS = {
    "relu": torch.nn.ReLU(),
    "gelu": torch.nn.GELU(),
    "silu": torch.nn.SiLU(),
    "leaky_relu": torch.nn.LeakyReLU(0.01),
    "elu": torch.nn.ELU(),
}


@functools.cache
def layout(n):
    return pytest.importorskip("clifford").Cl(n)[0]


def packaged(coordinates, n, grade):
    """The vector (grade 1) or bivector (grade 2) of the package with these coordinates."""
    value = np.zeros(2**n)
    start = {1: 1, 2: 1 + n}[grade]
    value[start : start + len(coordinates)] = coordinates
    return layout(n).MultiVector(value)


def packaged_exp(beta, n):
    """By the power series, scaled and squared."""
    b = packaged(beta, n, 2)
    total = term = 1 + 0 * b
    for k in range(1, 22):
        term = term * (b / 2**6) / k
        total = total + term
    for _ in range(6):
        total = total * total
    return total


def packaged_sandwich(left, right, n):
    """The 2^n x 2^n matrix of x -> exp(left) x exp(right)~."""
    r, s = (packaged_exp(beta, n) for beta in (left, right))
    blades = np.eye(2**n)
    return torch.from_numpy(np.stack([(r * layout(n).MultiVector(blade) * ~s).value for blade in blades], axis=1))


def packaged_layer(state, name, x, out_features, branch=None):
    """Every pair of windows by its own sandwich and scale; the mean over all pairs that reach an output."""
    window = 2 ** int(math.log2(min(x.shape[-1], out_features)))
    left, right, scale = (state[f"{name}.{key}"][0].numpy() for key in ("left", "right", "scale"))
    n, in_features = window.bit_length() - 1, x.shape[-1]
    outputs, inputs = (-(-size // window) for size in (out_features, in_features))
    y, count = torch.zeros(len(x), out_features, dtype=D), torch.zeros(out_features, dtype=D)
    for o in range(outputs):
        to = (torch.arange(window) + o * out_features // outputs) % out_features
        for i in range(inputs):
            source = (torch.arange(window) + i * in_features // inputs) % in_features
            at = (o if branch is None else branch, i)
            y[:, to] += scale[at] * x[:, source] @ packaged_sandwich(left[at], right[at], n).T
            count[to] += 1
    return y / count


def authors_network(module, x):
    config, state = module.config, {k: v.detach() for k, v in module.state_dict().items()}
    inner = 2 ** int(math.log2(x.shape[-1])) if config.inner == "input" else config.inner
    activation = ACTIVATIONS.get(config.activation)
    if activation is None:
        activation = torch.nn.PReLU(dtype=D)
        activation.weight.data = state["slope"]
    norm = torch.nn.LayerNorm(inner, elementwise_affine=False, dtype=D)

    def after(y, permutation):
        return activation(norm(y[:, torch.from_numpy(permutation)]))

    y = after(
        packaged_layer(state, "entry", x, inner),
        branch_permutation(inner, 1, config.seed, config.depth),
    )
    if config.residual and x.shape == y.shape:
        y = y + x
    for step in range(config.depth):
        permutations = branch_permutation(inner, config.width, config.seed, step).reshape(config.width, inner)
        y = sum(
            state[f"hidden.{step}.mix"][branch]
            * after(
                packaged_layer(state, f"hidden.{step}.rotors", y, inner, branch),
                permutations[branch] - branch * inner,
            )
            for branch in range(config.width)
        )
    z = packaged_layer(state, "exit", y, module.out_features)
    if config.residual and z.shape == y.shape:
        z = z + y
    return z


@pytest.mark.parametrize("activation", ["prelu", *ACTIVATIONS])
@pytest.mark.parametrize(("shape", "residual"), [((11, 13), False), ((11, 8), True), ((8, 8), True)], ids=str)
@torch.no_grad()
def test_the_authors_network(activation, shape, residual):
    module = relinear.Rotor.authors(activation=activation, residual=residual).build(*shape, bias=False, dtype=D)
    for parameter in module.parameters():
        parameter.add_(torch.randn_like(parameter), alpha=0.3)
    x = torch.randn(5, shape[0], dtype=D)
    torch.testing.assert_close(module(x), authors_network(module, x), atol=1e-11, rtol=1e-11)


@pytest.mark.parametrize(
    ("shape", "inner"), [((17, 8), 16), ((5, 12), 4), ((6, 7), 8), ((9, 4), 4), ((16, 3), 2), ((3, 9), 16)], ids=str
)
@torch.no_grad()
def test_the_authors_network_is_as_wide_within_as_is_said(shape, inner):
    """Each rotor layer has the windows that fit into its own two sides, not into the whole network's."""
    fits = inner == 2 ** int(math.log2(shape[0]))
    config = relinear.Rotor.authors(residual=True) if fits else relinear.Rotor.authors(residual=True, inner=inner)
    module = config.build(*shape, bias=False, dtype=D)
    assert module.inner == inner
    for parameter in module.parameters():
        parameter.add_(torch.randn_like(parameter), alpha=0.3)
    x = torch.randn(5, shape[0], dtype=D)
    torch.testing.assert_close(module(x), authors_network(module, x), atol=1e-11, rtol=1e-11)


def test_keys_and_values_of_grouped_heads_keep_the_width_of_their_inputs_within():
    """The authors' networks from 2,048 to 512, with rotors of 2,048 within: 55 bivectors each, 36 at the way out."""
    module = relinear.Rotor.authors().build(2048, 512, bias=False, device="meta")
    assert sum(p.numel() for p in module.parameters()) == 7 * (110 + 1) + 4 * (72 + 1) + 2 * 3 + 1
    assert relinear.Rotor().build(2048, 512, bias=False, device="meta").inner == 512


def test_the_authors_network_starts_as_theirs():
    config = relinear.Rotor.authors()
    assert (config.depth, config.width, config.rotors, config.residual) == (2, 3, "double", False)
    module = config.build(2048, 2048, bias=False)
    assert sum(p.numel() for p in module.parameters()) == 8 * (110 + 1) + 2 * 3 + 1
    for name, parameter in module.named_parameters():
        if name.rpartition(".")[2] in ("scale", "mix"):
            assert (parameter == 1).all(), name
        elif name == "slope":
            assert parameter.item() == 0.25
        else:
            assert 0.8 < parameter.std() < 1.2, name
    assert relinear.Rotor.authors(width=1).width == 1


# The plain sum, and what it can become


def dimensions(config, size, terms):
    """Of the space that ``terms`` single terms fill, each drawn as the ones of a sum are."""
    with torch.no_grad():
        maps = [config.build(size, size, bias=False, dtype=D).to_dense().flatten() for _ in range(terms)]
    return torch.linalg.matrix_rank(torch.stack(maps), rtol=1e-9).item()


@pytest.mark.parametrize("size", mostly_slow([4, 8, 16], 4))
def test_a_plain_sum_of_rotors_never_becomes_a_general_matrix(size):
    one = relinear.Rotor(depth=0, width=1, init_std=1.0)
    assert dimensions(one, size, size**2 + 9) == size**2 // 4
    general = dimensions(one.replace(terms="multivector"), size, size**2 + 9)
    assert general == (size**2 // 2 if size == 8 else size**2)  # n = 3 is odd


@pytest.mark.parametrize("size", [4, 8])
def test_a_sum_of_permuted_terms_is_any_matrix(size):
    """Enough of its own terms fill all dimensions, so that a matrix is found by solving for the scales alone."""
    terms = size**2 + 16
    module = relinear.Rotor(depth=0, width=terms, permute_terms=True, scale=True, init_std=1.0)
    module = module.build(size, size, bias=False, dtype=D)
    wanted = torch.linalg.qr(torch.randn(size, size, dtype=D)).Q
    with torch.no_grad():
        maps = []
        for term in range(terms):
            module.entry.scale.zero_()[term] = 1
            maps.append(module.to_dense().flatten())
        basis = torch.stack(maps, dim=1)
        module.entry.scale.copy_(torch.linalg.lstsq(basis, wanted.reshape(-1, 1)).solution.reshape(-1, 1, 1))
    torch.testing.assert_close(module.to_dense(), wanted)
    x = torch.randn(5, size, dtype=D)
    torch.testing.assert_close(module(x), x @ wanted.T)


def test_permuted_terms_are_fitted_to_an_orthogonal_map_that_the_plain_sum_cannot_be():
    wanted = torch.linalg.qr(torch.randn(8, 8, dtype=D)).Q
    moments, errors = CalibrationStatistics.identity(8), []
    for permuted in (False, True):
        torch.manual_seed(1)
        config = relinear.Rotor(depth=0, width=16, scale=True, init_std=1.0, permute_terms=permuted)
        module = config.build(8, 8, bias=False, dtype=D).fit_to_calibration_(linear_of(wanted), moments, steps=500)
        errors.append(((module.to_dense() - wanted).norm() / wanted.norm()).item())
    assert errors[0] > 0.5
    assert errors[1] < 1e-4


# Algorithms 1 and 2 in place of the exponential


def packaged_parts(beta, vectors, iterations):
    """Algorithm 1 with one more step of Algorithm 2 a plane, in the terms of geometric algebra; (parts, vectors)."""
    n = vectors.shape[-1]

    def step(v, b):
        v = (v | b) | b
        return v / abs(v)

    def turned(b, v):
        for _ in range(iterations):
            v = step(v, b)
        return v

    whole = packaged(beta, n, 2)
    rest, found = whole, []
    for v in vectors:
        v = turned(rest, packaged(v, n, 1))
        found.append(v)
        rest = rest - (v ^ (v | rest))
    parts, rest = [], whole
    for v in found:
        v = step(v, rest)
        parts.append(v ^ (v | rest))
        rest = rest - parts[-1]
    return [*parts, rest], np.stack([v.value[1 : n + 1] for v in found])


@pytest.mark.parametrize("n", [4, 5, 6])
def test_few_power_iterations_give_the_rotors_of_algorithm_2(n):
    """Before it has converged, too; the next forward pass starts where this one ended."""
    config = relinear.Rotor(depth=0, width=1, basis="blade", power_iterations=2, init_std=1.0)
    module = config.build(2**n, 2**n, bias=False, dtype=D)
    x = torch.randn(3, 2**n, dtype=D)
    for _ in range(2):
        rotors = []
        for name in ("left", "right"):
            beta = getattr(module.entry, name)[0, 0, 0].detach().numpy()
            vectors = getattr(module.entry, f"{name}_vectors")[:, 0, 0, 0].clone().numpy()
            parts, vectors = packaged_parts(beta, vectors, 2)
            rotor = 1.0
            for b in parts:
                size = abs(b)
                rotor = rotor * (np.cos(size) + np.sin(size) / size * b)
            rotors.append((rotor, vectors))
        (r, _), (s, _) = rotors
        expected = np.stack([(r * layout(n).MultiVector(row) * ~s).value for row in x.numpy()])
        torch.testing.assert_close(module(x), torch.from_numpy(expected))
        for name, (_, vectors) in zip(("left", "right"), rotors):
            kept = getattr(module.entry, f"{name}_vectors")[:, 0, 0, 0]
            torch.testing.assert_close(kept, torch.from_numpy(vectors))


def separated(*counts, n):
    """Random bivectors whose planes have norms of 2.4, 1.2, 0.6 and so on: a power iteration tells them apart."""
    frame = torch.linalg.qr(torch.randn(*counts, n, n, dtype=D)).Q
    matrix = torch.zeros(n, n, dtype=D)
    for plane in range(n // 2):
        matrix[2 * plane, 2 * plane + 1] = 2.4 * 0.5**plane
    return clifford.bivector_from_matrix(frame @ (matrix - matrix.T) @ frame.mT)


@pytest.mark.parametrize("rotors", ["single", "double"])
@pytest.mark.parametrize("size", [4, 64, 192])
def test_power_iterations_from_a_warm_start_reach_the_exact_rotors(size, rotors):
    """Two a forward pass are few; over thirty passes they add up."""
    exact = relinear.Rotor(depth=0, width=2, rotors=rotors).build(size, size, dtype=D)
    with torch.no_grad():
        for parameter in exact.entry.parameters():
            parameter.copy_(separated(*exact.entry.counts, n=size.bit_length() - 1))
    module = relinear.Rotor(depth=0, width=2, rotors=rotors, power_iterations=2).build(size, size, dtype=D)
    missing, unknown = module.load_state_dict(exact.state_dict(), strict=False)
    assert not unknown
    assert all(name.endswith("_vectors") for name in missing)
    x = torch.randn(5, size, dtype=D)
    first = module(x)
    for _ in range(30):
        module.entry.factors()
    torch.testing.assert_close(module(x), exact(x), atol=1e-6, rtol=1e-6)
    assert size == 4 or (first - exact(x)).norm() > 1e-3 * first.norm()


def test_power_iterations_are_the_same_again_in_evaluation_and_after_loading():
    config = relinear.Rotor.authors(power_iterations=2)
    module = config.build(24, 40, dtype=D)
    x = torch.randn(5, 24, dtype=D, requires_grad=True)
    before = {k: v.clone() for k, v in module.state_dict().items() if k.endswith("_vectors")}
    assert len(before) == 2 * 4
    module.eval()
    with torch.no_grad():
        y = module(x)
        assert torch.equal(module(x), y)
    assert all(torch.equal(v, before[k]) for k, v in module.state_dict().items() if k in before)
    twin = config.build(24, 40, dtype=D).train()
    module.train()
    for _ in range(2):
        twin.load_state_dict(module.state_dict())
        results = [m(x).sum() for m in (module, twin)]
        assert results[0].item() == results[1].item()
    assert not all(torch.equal(v, before[k]) for k, v in module.state_dict().items() if k in before)


@pytest.mark.slow
def test_power_iterations_under_gradient_checkpointing():
    module = relinear.Rotor.authors(power_iterations=2).build(16, 16, dtype=D)
    twin = copy.deepcopy(module)
    x = torch.randn(5, 16, dtype=D)
    module(x).square().sum().backward()
    checkpoint(twin, x, use_reentrant=False).square().sum().backward()
    for (name, one), other in zip(module.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, msg=name)
    compiled = torch.compile(copy.deepcopy(module), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), module(x))


def counting(module: SandwichSum):
    """Count how often the module's factors are computed."""
    calls = []
    original = module.factors
    module.factors = lambda *given: calls.append(1) or original(*given)
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


def test_the_rotors_of_a_network_are_one_batch_of_exponentials_a_side(monkeypatch):
    module, x = relinear.Rotor(scale=True).build(32, 80).train(), torch.randn(3, 32)
    alone = [stage.factors() for stage in module._sums()]
    sides = []
    for name in ("left_factor", "right_factor"):
        made = getattr(clifford, name)
        monkeypatch.setattr(clifford, name, lambda beta, made=made: sides.append(len(beta)) or made(beta))
    together = [stage.factors(rotors) for stage, rotors in zip(module._sums(), module._rotors(x), strict=True)]
    assert sides == [10, 10]
    for one, other in zip(alone, together, strict=True):
        for mine, theirs in zip(one, other, strict=True):
            assert torch.allclose(mine, theirs, atol=1e-6)
    module(x).sum().backward()
    assert sides == [10] * 4
