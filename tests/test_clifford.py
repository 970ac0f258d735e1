"""relinear.clifford against the ``clifford`` package, closed forms and numerical gradients."""

import functools
import math

import numpy as np
import pytest
import torch
from torch.autograd import gradcheck

from conftest import mostly_slow
from relinear import clifford as cl

D = torch.float64
DIMENSIONS = mostly_slow(range(2, 9), *range(2, 8))


def planes(n):
    return n * (n - 1) // 2


def draw(*shape, seed=0, dtype=D):
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def turned(n, angles, seed=0):
    """A bivector with the given plane angles in a random orthonormal frame."""
    matrix = torch.zeros(n, n, dtype=D)
    for j, angle in enumerate(angles):
        matrix[2 * j, 2 * j + 1], matrix[2 * j + 1, 2 * j] = angle, -angle
    frame = torch.linalg.qr(draw(n, n, seed=seed)).Q
    return cl.bivector_from_matrix(frame @ matrix @ frame.T)


@functools.cache
def layout(n):
    return pytest.importorskip("clifford").Cl(n)[0]


def theirs(x):
    return layout(cl.multivector_dimension(x)).MultiVector(x.numpy())


def series(b):
    """exp of a package multivector by its power series, scaled and squared."""
    total = term = 1 + 0 * b
    for k in range(1, 22):
        term = term * (b / 2**6) / k
        total = total + term
    for _ in range(6):
        total = total * total
    return total


@pytest.mark.parametrize("n", DIMENSIONS)
def test_agrees_with_the_clifford_package(n):
    a, b, c = draw(3, 2**n, seed=n)
    beta = draw(planes(n), seed=n + 100)
    checks = {
        "product": (cl.geometric_product(a, b), theirs(a) * theirs(b)),
        "reverse": (cl.reverse(a), ~theirs(a)),
        "sandwich": (cl.sandwich(a, b, c), theirs(a) * theirs(b) * ~theirs(c)),
        "own sandwich": (cl.sandwich(a, b), theirs(a) * theirs(b) * ~theirs(a)),
        "exp": (cl.exp(beta), series(theirs(cl.embed_bivector(beta)))),
    }
    for name, (ours, reference) in checks.items():
        scale = max(1.0, np.abs(reference.value).max())
        assert np.abs(ours.numpy() - reference.value).max() < 1e-10 * scale, name


@pytest.mark.parametrize("n", DIMENSIONS)
def test_parts_commute_are_simple_and_multiply_to_the_rotor(n):
    beta = draw(planes(n), seed=n)
    parts = cl.decompose(beta)
    assert parts.shape == (n // 2, planes(n))
    torch.testing.assert_close(parts.sum(0), beta, atol=1e-12, rtol=0)
    norms = parts.norm(dim=-1)
    assert (norms[:-1] >= norms[1:]).all()
    blades = [theirs(cl.embed_bivector(part)) for part in parts]
    product = 1 + 0 * theirs(cl.exp(beta))
    for i, blade in enumerate(blades):
        square = blade * blade
        assert np.abs((square - square.value[0]).value).max() < 1e-10
        product = product * (math.cos(norms[i]) + math.sin(norms[i]) / float(norms[i]) * blade)
        for other in blades[:i]:
            assert np.abs((blade * other - other * blade).value).max() < 1e-10
    assert np.abs(product.value - cl.exp(beta).numpy()).max() < 1e-10


@pytest.mark.parametrize("n", range(1, 13))
def test_spin_representation(n):
    """The sandwich is A X B^T, the map orthogonal, for every n; general elements act where the signature is (n, 0)."""
    shape = cl.spin_shape(n)
    assert math.prod(shape) == 2**n
    x, left, right = draw(2, 2**n, seed=n), draw(planes(n), seed=n + 1), draw(planes(n), seed=n + 2)
    spin = cl.to_spin(x)
    torch.testing.assert_close(spin.norm(dim=-1), x.norm(dim=-1))
    torch.testing.assert_close(cl.from_spin(spin), x)

    def act(a, b):
        blocks, rows, components, columns = shape
        half = spin.view(2, blocks, rows, -1) @ b.mT
        return cl.from_spin((a @ half.reshape(2, blocks, rows * components, columns)).reshape(2, -1))

    expected = cl.sandwich(cl.exp(left), x, cl.exp(right))
    torch.testing.assert_close(act(cl.left_factor(left), cl.right_factor(right)), expected, atol=1e-11, rtol=0)
    if n % 8 < 5:
        a, b = draw(2, 2**n, seed=n + 3) / 2 ** (n / 2)
        ours = act(cl.left_multiplication(cl.to_spin(a)), cl.right_multiplication(cl.to_spin(b)))
        torch.testing.assert_close(ours, cl.geometric_product(cl.geometric_product(a, x), b), atol=1e-11, rtol=0)


@pytest.mark.parametrize("n", mostly_slow([1, 2, 3, 4, 5], 1, 2, 3, 4))
def test_gradients_of_products(n):
    a, b = draw(1, 2**n, seed=1).requires_grad_(), draw(2, 2**n, seed=2).requires_grad_()
    assert gradcheck(cl.geometric_product, (a, b))
    assert gradcheck(cl.sandwich, (a, b, b))
    assert gradcheck(cl.reverse, (a,))
    assert gradcheck(cl.to_spin, (a,))
    assert gradcheck(cl.from_spin, (a,))
    beta = draw(planes(n), seed=3).requires_grad_()
    assert gradcheck(cl.exp, (beta,))
    assert gradcheck(cl.left_factor, (beta,))
    assert gradcheck(cl.right_factor, (beta,))
    assert gradcheck(cl.exp, (torch.zeros(planes(n), dtype=D, requires_grad=True),))
    assert gradcheck(cl.geometric_product, (a.detach() + 0.3j * a.detach(), b))


@pytest.mark.parametrize("n", mostly_slow([2, 3, 4, 5, 6], 2, 3, 4))
def test_gradients_of_decompose_and_log(n):
    beta, weights = draw(planes(n), seed=n).requires_grad_(), draw(2**n, seed=n + 1)
    assert gradcheck(cl.decompose, (beta,))
    assert gradcheck(lambda r: cl.log(r) @ weights[: planes(n)], (cl.exp(beta.detach()).requires_grad_(),))
    degenerate = {
        "no plane at all": torch.zeros(planes(n), dtype=D),
        "all planes equal": turned(n, [0.7] * (n // 2)),
        "one plane, the rest zero": turned(n, [0.7]),
        "two planes equal, the rest zero": turned(n, [0.7] * min(2, n // 2)),
    }
    for name, case in degenerate.items():
        case.requires_grad_()
        assert gradcheck(lambda b: cl.exp(cl.decompose(b).sum(-2)) @ weights, (case,)), name
        assert gradcheck(lambda b: cl.log(cl.exp(b)), (case,)), name


def self_dual_split(beta):
    """The two simple parts in Cl(4), in closed form: by the self-dual and the anti-self-dual half."""
    dual = torch.stack([beta[..., 5], -beta[..., 4], beta[..., 3], beta[..., 2], -beta[..., 1], beta[..., 0]], -1)
    plus, minus = (beta + dual) / 2, (beta - dual) / 2
    p, m = plus.norm(dim=-1, keepdim=True), minus.norm(dim=-1, keepdim=True)
    return torch.stack([(p + m) / 2 * (plus / p + minus / m), (p - m) / 2 * (plus / p - minus / m)], -2)


@pytest.mark.parametrize("function", [lambda b: cl.decompose(b), lambda b: cl.log(cl.exp(b))], ids=["parts", "log"])
def test_second_derivatives_of_decompose_and_log_are_refused(function):
    beta = torch.randn(6, dtype=torch.float64, requires_grad=True)
    (first,) = torch.autograd.grad(function(beta.tanh()).sum(), beta, create_graph=True)
    with pytest.raises(RuntimeError, match="first derivatives only"):
        torch.autograd.grad(first.square().sum(), beta)


@pytest.mark.parametrize(("gap", "value", "gradient"), [(1.0, 1e-13, 1e-13), (1e-3, 1e-11, 1e-11), (1e-6, 1e-8, 1e-8)])
def test_decompose_near_repeated_planes(gap, value, gradient):
    """Errors of the single parts grow as eps / gap (their conditioning); those of the exponential do not grow."""
    beta = torch.stack([turned(4, [1 + gap, 1.0], seed=seed) for seed in range(10)])
    weights = draw(10, 2, 6, seed=1)
    ours, reference = beta.clone().requires_grad_(), beta.clone().requires_grad_()
    parts, expected = cl.decompose(ours), self_dual_split(reference)
    torch.testing.assert_close(parts, expected, atol=value, rtol=0)
    (got,) = torch.autograd.grad((parts * weights).sum(), ours)
    (wanted,) = torch.autograd.grad((expected * weights).sum(), reference)
    assert ((got - wanted).norm(dim=-1) / wanted.norm(dim=-1)).max() < gradient


@pytest.mark.parametrize("gap", [1.0, 1e-3, 1e-6, 0.0])
@pytest.mark.parametrize("n", [4, 7, 11])
def test_the_exponential_of_the_sum_is_exact_at_every_gap(n, gap):
    beta = turned(n, [1 + gap, *[1.0] * (n // 2 - 1)], seed=n)
    weights = draw(2**n, seed=1)
    through, direct = beta.clone().requires_grad_(), beta.clone().requires_grad_()
    got, wanted = cl.exp(cl.decompose(through).sum(-2)), cl.exp(direct)
    torch.testing.assert_close(got, wanted, atol=1e-13, rtol=0)
    (got,) = torch.autograd.grad((got * weights).sum(), through)
    (wanted,) = torch.autograd.grad((wanted * weights).sum(), direct)
    assert (got - wanted).norm() / wanted.norm() < 1e-13


def test_power_iteration_reproduces_the_value_but_not_the_gradient():
    """Algorithms 1 and 2 of the paper: the bias of the gradient that the documentation states."""
    medians = {}
    for n in (3, 6, 8):
        angles = 1 + torch.arange(n // 2, dtype=D)
        beta = torch.stack([turned(n, angles, seed=seed) for seed in range(64)])
        weights = draw(64, n // 2, planes(n), seed=1)
        gradients = []
        for method in ("spectral", "power_iteration"):
            leaf = beta.clone().requires_grad_()
            parts = cl.decompose(leaf, method=method)
            gradients.append(torch.autograd.grad((parts * weights).sum(), leaf)[0])
        torch.testing.assert_close(parts.detach(), cl.decompose(beta), atol=1e-9, rtol=0)
        medians[n] = float(((gradients[1] - gradients[0]).norm(dim=-1) / gradients[0].norm(dim=-1)).median())
    assert medians[3] < 1e-12  # one plane: nothing is left out
    assert 0.1 < medians[6] < medians[8] < 0.7


@pytest.mark.parametrize("n", range(1, 13))
def test_log_inverts_exp(n):
    small = draw(4, planes(n), seed=n) * (0.5 / n)
    torch.testing.assert_close(cl.log(cl.exp(small)), small, atol=1e-12, rtol=0)
    if n == 1:
        return
    far = cl.exp(3 * draw(4, planes(n), seed=n))
    halves = cl.exp(turned(n, [math.pi / 2] * (n // 2)))
    minus_one = cl.exp(turned(n, [math.pi]))
    for rotor in (far, halves, minus_one, -far):
        torch.testing.assert_close(cl.exp(cl.log(rotor)), rotor, atol=1e-12, rtol=0)


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.complex32, torch.complex64])
def test_every_dtype(dtype):
    n = 5
    a, b, beta = draw(2**n, seed=1), draw(2**n, seed=2), draw(planes(n), seed=3) / 2
    tolerance = {torch.float16: 3e-2, torch.bfloat16: 2e-1, torch.complex32: 3e-2}.get(dtype, 1e-5)

    def near(ours, exact):
        assert ours.dtype == dtype
        wide = torch.complex128 if dtype.is_complex else D
        torch.testing.assert_close(ours.to(wide), exact.to(wide), atol=tolerance, rtol=tolerance)

    near(cl.geometric_product(a.to(dtype), b.to(dtype)), cl.geometric_product(a, b))
    near(cl.sandwich(a.to(dtype), b.to(dtype)), cl.sandwich(a, b))
    near(cl.exp(beta.to(dtype)), cl.exp(beta))
    near(cl.reverse(a.to(dtype)), cl.reverse(a))
    near(cl.from_spin(cl.to_spin(a.to(dtype))), a)
    if not dtype.is_complex:
        parts = cl.decompose(beta.to(dtype))
        near(parts[0] + parts[1], beta)
        near(cl.exp(cl.log(cl.exp(beta.to(dtype)))), cl.exp(beta))


def test_exponentials_of_complex_bivectors_are_normalised():
    rotor = cl.exp(torch.complex(draw(3, 15, seed=1), draw(3, 15, seed=2)))
    one = cl.geometric_product(rotor, cl.reverse(rotor))
    torch.testing.assert_close(one[..., 0], torch.ones(3, dtype=one.dtype))


def test_batches_broadcast_and_memory_stays_small():
    a, b = draw(3, 1, 4096), draw(5, 4096, seed=1)
    product = cl.geometric_product(a, b)
    assert product.shape == (3, 5, 4096)
    torch.testing.assert_close(product[1, 2], cl.geometric_product(a[1, 0], b[2]), atol=1e-9, rtol=0)
    assert cl.exp(torch.zeros(2, 0, 66, dtype=D)).shape == (2, 0, 4096)


def test_wrong_inputs_are_refused():
    with pytest.raises(ValueError, match="2\\^n"):
        cl.geometric_product(torch.zeros(3), torch.zeros(4))
    with pytest.raises(ValueError, match="different algebras"):
        cl.geometric_product(torch.zeros(8), torch.zeros(4))
    with pytest.raises(ValueError, match=r"n\(n-1\)/2"):
        cl.exp(torch.zeros(4))
    with pytest.raises(ValueError, match="method"):
        cl.decompose(torch.zeros(6), method="magic")
    with pytest.raises(ValueError, match="real bivector"):
        cl.decompose(torch.zeros(6, dtype=torch.complex64))
    with pytest.raises(ValueError, match="log needs rotors"):
        cl.log(torch.full((8,), 2.0))
    with pytest.raises(ValueError, match="no logarithm"):
        cl.log(torch.tensor([-1.0, 0.0]))
    with pytest.raises(ValueError, match="real rotor"):
        cl.log(torch.zeros(8, dtype=torch.complex64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("norm", [1e-4, 3e-3, 0.01, 0.03, 0.05, 0.1, 0.3, 0.7, 1.0])
def test_exp_of_one_bivector_is_as_precise_as_its_dtype(norm, dtype):
    beta = draw(planes(3), seed=4)
    beta = (beta * norm / beta.norm()).to(dtype)
    exact = beta.double()
    expected = torch.zeros(8, dtype=D)
    expected[0], expected[4:7] = torch.cos(exact.norm()), torch.sin(exact.norm()) / exact.norm() * exact
    for shape in ((), (1,), (3,)):
        found = cl.exp(beta.expand(*shape, -1))
        assert (found.double() - expected).abs().max() <= 4 * torch.finfo(dtype).eps
        factors = torch.stack([f(beta.expand(*shape, -1)) for f in (cl.left_factor, cl.right_factor)])
        gram = factors @ factors.mT - torch.eye(factors.shape[-1], dtype=dtype)
        assert gram.abs().max() <= 8 * torch.finfo(dtype).eps
    several, one = (beta.expand(*shape, -1).clone().requires_grad_() for shape in ((2,), ()))
    weight = draw(8, seed=5, dtype=dtype)
    gradients = [torch.autograd.grad((cl.exp(b) * weight).sum(), b)[0] for b in (several, one)]
    assert (gradients[0][0] - gradients[1]).abs().max() <= 8 * torch.finfo(dtype).eps


@pytest.mark.parametrize("method", ["spectral", "power_iteration"])
def test_one_bivector_that_is_no_number_leaves_the_others_alone(method):
    beta = draw(4, planes(5), seed=6)
    broken = beta.clone()
    broken[1, 2], broken[3, 0] = math.nan, math.inf
    broken.requires_grad_()
    found = cl.decompose(broken, method=method)
    assert found[[1, 3]].isnan().all()
    torch.testing.assert_close(found[[0, 2]], cl.decompose(beta, method=method)[[0, 2]])
    found[[0, 2]].abs().square().sum().backward()
    assert broken.grad[[0, 2]].isfinite().all()
    assert (broken.grad[[1, 3]] == 0).all()
