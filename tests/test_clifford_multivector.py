"""``clifford.Multivector`` against the ``clifford`` package and ``kingdon``, in every kind of signature."""

import copy
import functools
import pickle

import numpy as np
import pytest
import torch
from torch.autograd import gradcheck
from torch.func import vmap

from conftest import mostly_slow
from relinear.clifford import Algebra, Multivector, bivector_to_matrix, geometric_product

D = torch.float64
SIGNATURES = [(1, 0, 0), (3, 0, 0), (4, 0, 0), (5, 0, 0), (1, 3, 0), (0, 2, 0), (4, 1, 0), (3, 0, 1), (2, 1, 2)]
every_signature = pytest.mark.parametrize(
    "signature", mostly_slow(SIGNATURES, (3, 0, 0), (1, 3, 0), (3, 0, 1)), ids=str
)


def draw(algebra, *shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return algebra.multivector(torch.randn(*shape, 2**algebra.n, dtype=D, generator=generator))


def near(ours, theirs, tolerance=1e-10):
    found = ours.values if isinstance(ours, Multivector) else ours
    theirs = torch.as_tensor(theirs, dtype=D)
    torch.testing.assert_close(found, theirs, atol=tolerance * max(1.0, float(theirs.abs().max())), rtol=0)


@functools.cache
def layout(signature):
    return pytest.importorskip("clifford").Cl(*signature)[0]


OPERATIONS = {
    "+": (lambda a, b: a + b, lambda a, b: a + b),
    "-": (lambda a, b: a - b, lambda a, b: a - b),
    "*": (lambda a, b: a * b, lambda a, b: a * b),
    "^": (lambda a, b: a ^ b, lambda a, b: a ^ b),
    "|": (lambda a, b: a | b, lambda a, b: a | b),
    "&": (lambda a, b: a & b, lambda a, b: a.vee(b)),
    "left contraction": (lambda a, b: a.left_contraction(b), lambda a, b: a.lc(b)),
    "right contraction": (lambda a, b: a.right_contraction(b), lambda a, b: ~((~b).lc(~a))),
    "reverse": (lambda a, b: ~a, lambda a, b: ~a),
    "grade involution": (lambda a, b: a.grade_involution(), lambda a, b: a.gradeInvol()),
    "conjugate": (lambda a, b: a.conjugate(), lambda a, b: a.conjugate()),
    "dual": (lambda a, b: a.dual(), lambda a, b: a.dual()),
    "power": (lambda a, b: a**3, lambda a, b: a**3),
    "zeroth power": (lambda a, b: a**0, lambda a, b: a**0),
    "sandwich": (lambda a, b: a.sandwich(b), lambda a, b: a * b * ~a),
    "scalars": (lambda a, b: 1 - (2 * a + 3) / 4, lambda a, b: 1 - (2 * a + 3) / 4),
}


@every_signature
@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
def test_agrees_with_the_clifford_package(operation, signature):
    algebra = Algebra(*signature)
    a, b = draw(algebra, seed=1), draw(algebra, seed=2)
    theirs = (layout(signature).MultiVector(x.values.numpy()) for x in (a, b))
    ours, reference = operation
    near(ours(a, b), reference(*theirs).value)


@every_signature
def test_grades_norms_and_inverses_agree_with_the_clifford_package(signature):
    algebra = Algebra(*signature)
    a = draw(algebra, seed=3)
    theirs = layout(signature).MultiVector(a.values.numpy())
    for k in range(algebra.n + 1):
        near(a.grade(k), theirs(k).value)
        assert a.grade(k).grades() == {k}
    near(a.norm(), abs(theirs))
    near(a.squared_norm(), theirs.mag2())
    one = algebra.scalar(torch.ones((), dtype=D)).values
    near(a * a.inverse(), one, 1e-9)
    near(a.inverse() * a, one, 1e-9)
    near(a.inverse(), theirs.leftLaInv().value, 1e-9)
    near(a**-2, (a.inverse() * a.inverse()).values)
    near(2 / a, 2 * a.inverse().values)
    near(a.dual().undual(), a.values)
    near(a.undual().dual(), a.values)


@pytest.mark.parametrize("signature", [(3, 0, 0), (1, 3, 0), (3, 0, 1), (4, 1, 0)], ids=str)
def test_products_agree_with_kingdon(signature):
    kingdon = pytest.importorskip("kingdon", reason="kingdon is not installed")
    algebra, theirs = Algebra(*signature), kingdon.Algebra(*signature)
    a, b = draw(algebra, seed=1), draw(algebra, seed=2)
    names = ["e" if name == "1" else name for name in algebra.names]
    assert set(names) == set(theirs.canon2bin)

    def given(x):
        return theirs.multivector(dict(zip(names, x.values.tolist())))

    def taken(x):
        return [float(getattr(x, name)) for name in names]

    near(a * b, taken(given(a) * given(b)))
    near(a ^ b, taken(given(a) ^ given(b)))
    near(a.left_contraction(b), taken(given(a).lc(given(b))))
    near(a.right_contraction(b), taken(given(a).rc(given(b))))
    near(~a, taken(~given(a)))
    near(a.conjugate(), taken(given(a).conjugate()))
    near(a.grade_involution(), taken(given(a).involute()))


EVERY_SIGNATURE = [(3, 0, 0), (5, 0, 0), (2, 0, 1), (3, 0, 1), (1, 3, 0), (4, 1, 0), (2, 1, 2), (2, 4, 0), (0, 3, 0)]


def package_exp(b):
    """exp by the power series of a package's products, scaled and squared."""
    total = term = 1 + 0 * b
    for k in range(1, 24):
        term = term * (b / 2**8) / k
        total = total + term
    for _ in range(8):
        total = total * total
    return total


@pytest.mark.parametrize("signature", EVERY_SIGNATURE, ids=str)
def test_exponentials_agree_with_the_clifford_package(signature):
    algebra = Algebra(*signature)
    for x in (draw(algebra, seed=5), draw(algebra, seed=6).grade(2)):
        near(x.exp(), package_exp(layout(signature).MultiVector(x.values.numpy())).value)


@pytest.mark.parametrize("signature", EVERY_SIGNATURE, ids=str)
def test_logarithms_of_rotors_and_motors(signature):
    algebra = Algebra(*signature)
    beta = draw(algebra, 20, seed=7).grade(2)
    for size in (1e-9, 1e-3, 0.1, 0.5, 1.4):
        b = beta * (size / beta.values.norm(dim=-1))
        for dtype in (D, torch.float32):
            given = b.to(dtype)
            found = given.exp().log()
            assert found.values.dtype == dtype
            error = (found.values - given.values).norm(dim=-1).max() / size
            assert error < 1000 * torch.finfo(dtype).eps, (size, dtype)
    rotor = (beta * 0.5).exp()
    near(rotor.log().exp(), rotor.values, 1e-9)

    def from_bivector(values):
        return algebra.bivector(values).exp().log().bivector

    few = 0.3 * beta.bivector[:2]
    if algebra.n <= 4:
        assert gradcheck(from_bivector, (few[:1].clone().requires_grad_(),))
    torch.testing.assert_close(vmap(from_bivector)(few), few)


def test_screws_are_motors():
    """Turned about an axis and moved along it, at once as one after the other."""
    algebra = Algebra(3, 0, 1)
    e = algebra.blades

    def point(x, y, z):
        return (e.e1 - x * e.e0) ^ (e.e2 - y * e.e0) ^ (e.e3 - z * e.e0)

    turn, move = (torch.pi / 4 * e.e12).exp(), (0.5 * e.e03).exp()
    screw = (torch.pi / 4 * e.e12 + 0.5 * e.e03).exp()
    near((turn * move).to(D), screw.values.to(D), 1e-6)
    moved = screw.sandwich(point(1.0, 0.0, 0.0))
    moved = moved / moved["e123"]
    where = [-float(moved["e023"]), float(moved["e013"]), -float(moved["e012"])]
    assert abs(where[2]) == pytest.approx(1.0, abs=1e-6)
    np.testing.assert_allclose(np.abs(where[:2]), [0, 1], atol=1e-6)
    near(((0.5 * screw.log()).exp() ** 2).to(D), screw.values, 1e-5)


def test_what_is_no_rotor_has_no_logarithm_where_nothing_can_be_raised():
    algebra = Algebra(3, 0, 1)
    rotors = (0.4 * draw(algebra, 3, seed=1).grade(2)).exp().values
    rotors[1] *= 3
    found = vmap(lambda r: algebra.multivector(r).log().bivector)(rotors)
    assert found[1].isnan().all()
    torch.testing.assert_close(found[::2], algebra.multivector(rotors[::2]).log().bivector)


@pytest.mark.parametrize("signature", mostly_slow([(3, 0, 0), (2, 0, 1)], (2, 0, 1)), ids=str)
def test_compiles_without_a_break(signature):
    def function(x):
        algebra = Algebra(*signature)
        a, e = algebra.multivector(x), algebra.blades
        rotor = (0.1 * a.grade(2)).exp()
        found = rotor.sandwich(a) + (a ^ e["e12"]) + (a & a) + a.dual() + a.inverse()
        turned = algebra.scalar(a["e21"]) * rotor.log()
        return (found + turned).values + a.norm().unsqueeze(-1)

    torch._dynamo.reset()
    x = draw(Algebra(*signature), 3, seed=1).values
    compiled = torch.compile(function, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x), function(x))


def test_numbers_of_numpy_lists_and_equality():
    algebra = Algebra(3)
    e = algebra.blades
    for two in (np.float64(2), np.float32(2), np.int64(2), torch.tensor(2.0)):
        for doubled in (two * e.e1, e.e1 * two):
            assert isinstance(doubled, Multivector)
            assert float(doubled["e1"]) == 2
        assert float((two + e.e1).scalar) == 2
    assert algebra.vector([1.0, 2.0, 3.0]) == e.e1 + 2 * e.e2 + 3 * e.e3
    assert algebra.bivector([1, 0, 0]) == e.e12
    assert algebra.multivector([1.0] + [0.0] * 7) == 1
    assert e.e1 != e.e2
    assert e.e1 != "e1"
    both = algebra.vector(torch.tensor([[1.0, 0, 0], [0, 1.0, 0]])) == e.e1
    assert both.tolist() == [True, False]
    assert pickle.loads(pickle.dumps(copy.deepcopy(e))).e12 == e.e12
    assert copy.deepcopy(2 * e.e12) == 2 * e.e12
    rows = algebra.multivector(torch.arange(16.0).view(2, 8))
    assert [row.shape for row in rows] == [(), ()]
    assert rows[..., torch.tensor([1])].shape == rows[[1]].shape == rows[torch.tensor([False, True])].shape == (1,)


def test_names_of_blades():
    assert Algebra(3).names == ("1", "e1", "e2", "e3", "e12", "e13", "e23", "e123")
    assert Algebra(2, 0, 1).names == ("1", "e0", "e1", "e2", "e01", "e02", "e12", "e012")
    e = Algebra(3).blades
    assert list(e) == list(Algebra(3).names)
    assert "e12" in dir(e)
    torch.testing.assert_close((e.e1 * e.e2).values, e["e12"].values)
    assert repr(1 + 2 * e.e12 - 0.5 * e.e3) == "1 + -0.5 e3 + 2 e12"
    mixed = Algebra(3).multivector({"1": 2.0, "e12": torch.arange(4.0)})
    assert mixed.shape == (4,)
    assert mixed["e12"].tolist() == [0, 1, 2, 3]
    assert mixed[1]["e12"] == 1
    assert e.e31 == -e.e13
    assert e.e231 == e.e312 == e.e123
    assert float((2 * e.e13)["e31"]) == -2
    assert Algebra(3).multivector({"e31": 3.0}) == -3 * e.e13
    assert Algebra(3, 0, 1).blades.e021 == -Algebra(3, 0, 1).blades.e012
    for name in ("e11", "e14", "12", "e", "x12", ""):
        assert name not in e
    squares = [float((blade * blade).scalar) for name, blade in Algebra(1, 2, 1).blades.items() if len(name) == 2]
    assert squares == [0, 1, -1, -1]


def test_rotors_turn_and_mirrors_reflect():
    algebra = Algebra(4)
    beta = torch.randn(7, 6, dtype=D, generator=torch.Generator().manual_seed(1)) / 2
    rotor, x = algebra.bivector(beta).exp(), algebra.vector(torch.eye(4, dtype=D))
    turned = torch.stack([rotor.sandwich(x[i]).vector for i in range(4)], dim=-1)
    torch.testing.assert_close(turned, torch.linalg.matrix_exp(2 * bivector_to_matrix(beta)))
    torch.testing.assert_close(rotor.log().bivector, beta)
    parts = algebra.bivector(beta).decompose()
    torch.testing.assert_close(sum(part.values for part in parts), algebra.bivector(beta).values)
    near(parts[0] ^ parts[0], torch.zeros(7, 16, dtype=D))
    mirror = algebra.vector(torch.tensor([3.0, 4.0, 0.0, 0.0], dtype=D))
    unit = mirror.vector / 5
    householder = torch.eye(4, dtype=D) - 2 * unit[:, None] * unit
    torch.testing.assert_close(x.reflect(mirror).vector, householder)


def test_projective_and_conformal_geometry():
    e = Algebra(3, 0, 1).blades  # planes are vectors: where two meet, and the point of three
    x, y, z = e.e1 - 2 * e.e0, e.e2 - 3 * e.e0, e.e3 - 5 * e.e0
    point = x ^ y ^ z
    point = point / point["e123"]
    np.testing.assert_allclose([float(point[name]) for name in ("e023", "e013", "e012")], [-2, 3, -5])
    line = point & (e.e1 ^ e.e2 ^ e.e3)  # joined with the origin
    assert line.grades() == {2}
    np.testing.assert_allclose([float(line[name]) for name in ("e23", "e13", "e12")], [-2, 3, -5])
    c = Algebra(4, 1).blades
    infinity, origin = c.e4 + c.e5, (c.e5 - c.e4) / 2

    def up(x, y, z):
        v = x * c.e1 + y * c.e2 + z * c.e3
        return origin + v + 0.5 * (v * v).scalar * infinity

    distance = -2 * (up(1.0, 2.0, 3.0) | up(4.0, 2.0, -1.0)).scalar
    torch.testing.assert_close(distance, torch.tensor(25.0))


@every_signature
def test_batches_gradients_and_maps(signature):
    algebra = Algebra(*signature)
    a, b = draw(algebra, 3, 1, seed=1), draw(algebra, 2, seed=2)
    for function in (Multivector.__mul__, Multivector.__xor__, Multivector.__and__, Multivector.left_contraction):
        found = function(a, b)
        assert found.shape == (3, 2)
        torch.testing.assert_close(found.values[2, 1], function(a[2, 0], b[1]).values)

        def of_values(x, y, function=function):
            return function(algebra.multivector(x), algebra.multivector(y)).values

        assert gradcheck(of_values, (a.values[:1].requires_grad_(), b.values.requires_grad_()))
        mapped = vmap(of_values, in_dims=(None, 0))(a.values[0, 0], b.values)
        torch.testing.assert_close(mapped, function(a[0, 0], b).values)
    assert gradcheck(
        lambda x: algebra.multivector(x).inverse().values, (draw(algebra, seed=4).values.requires_grad_(),)
    )


@pytest.mark.parametrize("n", [5, 6])
def test_the_product_is_that_of_tensors_where_it_may_be(n):
    algebra = Algebra(n)
    a, b = draw(algebra, seed=1), draw(algebra, seed=2)
    near(a * b, geometric_product(a.values, b.values))


def test_every_dtype_and_device_of_scalars():
    e = Algebra(3).blades
    for dtype in (torch.bfloat16, torch.float16, D, torch.complex64):
        a = (e.e1 + e.e23).to(dtype)
        for result in (a * a, a ^ a, a.inverse(), a.dual()):
            assert result.values.dtype == dtype
        assert (a + 1).values.dtype == (2 * a).values.dtype == dtype
    scaled = torch.arange(3.0) * e.e1
    assert scaled.shape == (3,)
    assert scaled["e1"].tolist() == [0, 1, 2]
    assert (1 + torch.arange(3.0) * e.e1)["1"].tolist() == [1, 1, 1]
    assert Multivector(torch.arange(8), Algebra(3)).values.dtype == torch.get_default_dtype()


def test_wrong_inputs_are_refused():
    e = Algebra(3, 0, 1).blades
    with pytest.raises(ValueError, match="1 to 6"):
        Algebra(4, 3)
    with pytest.raises(ValueError, match="1 to 6"):
        Algebra(3, -1)
    with pytest.raises(ValueError, match="8 coordinates"):
        Algebra(3).multivector(torch.zeros(4))
    with pytest.raises(ValueError, match="3 coordinates"):
        Algebra(3).vector(torch.zeros(4))
    with pytest.raises(ValueError, match="3 coordinates"):
        Algebra(3).bivector(torch.zeros(4))
    with pytest.raises(ValueError, match="different algebras"):
        e.e1 * Algebra(4).blades.e1
    with pytest.raises(ValueError, match="without an inverse"):
        e.e0.inverse()
    with pytest.raises(ValueError, match="without an inverse"):
        Algebra(3).blades.e1 / (1 + Algebra(3).blades.e1)
    with pytest.raises(ValueError, match="vectors all square to 1"):
        e.e12.decompose()
    with pytest.raises(ValueError, match="bivectors"):
        Algebra(3).blades.e1.decompose()
    minus_one = Algebra(3, 0, 1).scalar(-1.0)
    boost = -(0.3 * Algebra(1, 1).blades.e12).exp()
    for rotor in (2 * e.e12, e.e1, 1 + e.e1, minus_one, boost, e.e12 * float("nan")):
        with pytest.raises(ValueError, match="log needs rotors"):
            rotor.log()
    with pytest.raises(ValueError, match="real rotor"):
        (1j * e.e12).log()
    for wanted in ((), (5,), (-1,)):
        with pytest.raises(ValueError, match="grades 0 to 4"):
            e.e1.grade(*wanted)
    batch = Algebra(3).multivector(torch.zeros(8, 8))
    for index in ((slice(None), 0), (0, 0)):  # of the batch: not of the coordinates, which are as many here
        with pytest.raises(IndexError, match="too many indices"):
            batch[index]
    with pytest.raises(IndexError, match="names of their blades"):
        e.e1[0]
    with pytest.raises(AttributeError, match="no blade 'e4'"):
        getattr(Algebra(3).blades, "e4")  # noqa: B009
    with pytest.raises(KeyError):
        Algebra(3).blades.e1["e4"]
    for function in (lambda: e.e1 * "x", lambda: e.e1**0.5, lambda: "x" ^ e.e1, lambda: e.e1 & 2):
        with pytest.raises(TypeError):
            function()
