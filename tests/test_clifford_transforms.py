"""Exponential, logarithm and decomposition under torch's transforms, and how precise and how often differentiable."""

import math

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.func import grad, hessian, jacfwd, jacrev, vmap

from conftest import mostly_slow
from relinear import clifford as cl

D = torch.float64

FUNCTIONS = {
    "exp": cl.exp,
    "log": lambda beta: cl.log(cl.exp(beta)),
    "decompose": cl.decompose,
    "left factor": cl.left_factor,
    "right factor": cl.right_factor,
}
every_function = pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)


def planes(n):
    return n * (n - 1) // 2


def draw(*shape, seed=0, dtype=D):
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def gradient(function, beta, weight):
    leaf = beta.clone().requires_grad_()
    return torch.autograd.grad((function(leaf) * weight).sum(), leaf)[0]


@pytest.mark.parametrize("n", [2, 4, 5, 6, 11])
@every_function
def test_vmap_of_values_and_gradients(function, n):
    beta = draw(4, planes(n), seed=n) / 2
    expected = function(beta)
    weight = draw(*expected.shape[1:], seed=1)
    torch.testing.assert_close(vmap(function)(beta), expected)
    mapped = vmap(grad(lambda b: (function(b) * weight).sum()))(beta)
    torch.testing.assert_close(mapped, gradient(function, beta, weight))


@pytest.mark.parametrize("n", [3, 4, 6])
@pytest.mark.parametrize("name", ["exp", "left factor"])
def test_forward_derivatives_and_hessians_of_exponentials(name, n):
    function, beta = FUNCTIONS[name], draw(planes(n), seed=n) / 2
    weight = draw(*function(beta).shape, seed=1)
    torch.testing.assert_close(jacfwd(function)(beta), jacrev(function)(beta))

    def total(b):
        return (function(b) * weight).sum()

    torch.testing.assert_close(hessian(total)(beta), torch.autograd.functional.hessian(total, beta))


@pytest.mark.parametrize("n", mostly_slow([3, 4, 6], 4))
@pytest.mark.parametrize("function", mostly_slow(FUNCTIONS.values(), cl.exp, cl.right_factor), ids=FUNCTIONS)
def test_compiles_without_a_break(function, n):
    torch._dynamo.reset()
    beta = draw(2, planes(n), seed=n) / 2
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    expected = function(beta)
    weight = draw(*expected.shape, seed=1)
    torch.testing.assert_close(compiled(beta), expected)
    torch.testing.assert_close(gradient(compiled, beta, weight), gradient(function, beta, weight))


@pytest.mark.parametrize("n", mostly_slow([3, 4, 6, 7], 3, 4))
def test_exponentials_are_differentiable_twice(n):
    weight = draw(2**n, 2, seed=1)
    for scale in (0.0, 1e-6, 0.3, 2.0):
        beta = (draw(planes(n), seed=n) * scale).requires_grad_()
        assert gradcheck(lambda b: cl.exp(b) @ weight, (beta,))
        assert gradgradcheck(lambda b: cl.exp(b) @ weight[:, 0], (beta,))
    many = draw(64, planes(n), seed=n)
    penalties = []
    for beta in (many, many[:1]):  # as many as have closed forms or a gradient by hand, and one
        leaf = beta.clone().requires_grad_()
        (first,) = torch.autograd.grad(cl.left_factor(leaf).sin().sum(), leaf, create_graph=True)
        penalties.append(torch.autograd.grad(first.square().sum(), leaf)[0][0])
    torch.testing.assert_close(*penalties)
    complex_beta = torch.complex(draw(planes(n), seed=n), draw(planes(n), seed=1)) / 2
    assert gradcheck(lambda b: cl.exp(b) @ weight.to(b.dtype), (complex_beta.requires_grad_(),))


@pytest.mark.parametrize("dtype", [torch.float32, D])
@pytest.mark.parametrize("n", [2, 3, 4, 5, 8, 12])
def test_log_near_one_is_as_precise_as_its_dtype(n, dtype):
    for size in (1e-12, 1e-6, 1e-4, 1e-3, 1e-2, 0.1):
        beta = draw(32, planes(n), seed=n, dtype=dtype)
        beta = beta * size / beta.norm(dim=-1, keepdim=True)
        error = (cl.log(cl.exp(beta)) - beta).norm(dim=-1) / size
        assert error.max() < 64 * torch.finfo(dtype).eps, size


@pytest.mark.parametrize("n", [4, 7, 12])
def test_log_of_planes_turned_by_anything(n):
    """Angles at, near and between the places where sines or cosines of planes meet."""
    special = torch.tensor([0, 1e-9, 1e-4, 0.1, math.pi / 4, math.pi / 4 + 1e-9, 1.4, math.pi / 2 - 1e-9, math.pi / 2])
    chosen = torch.randint(len(special), (200, n // 2), generator=torch.Generator().manual_seed(n))
    angles = special.to(D)[chosen]
    blocks = torch.zeros(200, n, n, dtype=D)
    for j in range(n // 2):
        blocks[:, 2 * j, 2 * j + 1] = angles[:, j]
    frame = torch.linalg.qr(draw(200, n, n, seed=n)).Q
    rotor = cl.exp(cl.bivector_from_matrix(frame @ (blocks - blocks.mT) @ frame.mT))
    for r in (rotor, -rotor):
        beta = cl.log(r)
        torch.testing.assert_close(cl.exp(beta), r, atol=1e-13, rtol=0)
        norms = cl.decompose(beta).norm(dim=-1)
        assert norms[:, 0].max() < math.pi + 1e-9
        assert norms[:, 1:].max() < math.pi / 2 + 1e-9


def test_what_is_no_rotor_is_nan_where_nothing_can_be_raised():
    rotor = cl.exp(draw(3, 10))
    rotor[1] *= 2
    with pytest.raises(ValueError, match="log needs rotors"):
        cl.log(rotor)
    found = vmap(cl.log)(rotor)
    assert found[1].isnan().all()
    torch.testing.assert_close(found[::2], cl.log(rotor[::2]))


def test_a_bivector_that_is_no_number_leaves_the_gradients_of_others_alone():
    beta = draw(3, 15)
    beta[1, 0] = math.nan
    found = gradient(cl.exp, beta, draw(64))
    torch.testing.assert_close(found[::2], gradient(cl.exp, beta[::2], draw(64)))
    assert found[1].isnan().any()
