"""Rotor layers: sums of sandwiches r x s~ over windows of a vector, in the real spin representation (reference).

A window of V = 2^n coordinates is an element X of Cl(n). For rotors r and s the sandwich is A X B^T with two small
matrices (``relinear.clifford.spin``): A multiplies X, viewed as (L, M/L), from the left, and B^T multiplies X, viewed
as (M/R, R), from the right. General elements of the algebra (Lemma 1 of arXiv 2507.11688) and free Kronecker factors
act in the same way.
"""

# Legend: N tokens, I / O windows of the input / output, W terms, M coordinates that share a pair of factors (V, or V/2
# if the algebra has two blocks), S blocks of a window with separate factors, L and R sizes of the left and the right
# factor, V = 2^n window, P = n(n-1)/2 planes, J = n // 2 simple parts of a bivector

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from relinear import clifford
from relinear.clifford.decomposition import largest_part, power_step
from relinear.clifford.tables import device_table, take_last


def _elu(x: Tensor) -> Tensor:
    # under torch.compile, torch.nn.functional.elu returns a gradient with other strides than the compiler expects
    return torch.where(x > 0, x, torch.expm1(x.clamp(max=0)))


#: activation of branches by name: a function, the slope of a PReLU that does not learn, or None for one that learns
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor] | float | None] = {
    "prelu": None,
    "relu": 0.0,
    "gelu": torch.nn.functional.gelu,
    "silu": torch.nn.functional.silu,
    "leaky_relu": 0.01,
    "elu": _elu,
    "none": 1.0,
}


def window_size(in_features: int, out_features: int) -> int:
    """Return V, the largest power of two that fits into both sizes, at most 2^12."""
    return min(1 << (min(in_features, out_features).bit_length() - 1), 1 << 12)


def window_count(size: int, window: int) -> int:
    """Return how many windows of ``window`` coordinates cover ``size`` of them."""
    return -(-size // window)


def window_coordinates(size: int, window: int, spread: bool) -> np.ndarray:
    """Return the coordinate at every position of the windows of ``to_windows``: (count V,).

    ``spread`` stands for its layouts "spread" and "wrapped", as ``device_table`` takes numbers alone.
    """
    count = window_count(size, window)
    if not spread:
        return np.arange(count * window) % size
    starts = [i * size // count for i in range(count)]  # windows wrap round the end
    return np.concatenate([np.arange(start, start + window) % size for start in starts])


def coordinate_positions(size: int, window: int, spread: bool) -> np.ndarray:
    """Return for every coordinate the two positions, or one twice, that ``from_windows`` averages: (2 size,)."""
    coordinates = window_coordinates(size, window, spread)
    positions = [np.flatnonzero(coordinates == coordinate) for coordinate in range(size)]
    assert all(1 <= len(pair) <= 2 for pair in positions)
    return np.array([[pair[0] for pair in positions], [pair[-1] for pair in positions]]).ravel()


def window_tables(in_features: int, out_features: int, network: NetworkSettings, like: Tensor) -> list[Tensor | None]:
    """Return ``window_coordinates`` of a network's inputs and ``coordinate_positions`` of its outputs, as int32.

    None means that windows divide the size, so positions are coordinates. The tables are on the device of ``like``.
    """
    reads = writes = None
    spread = network.layout == "spread"
    first, last = network.window_sizes[0], network.window_sizes[-1]
    if in_features % first:
        reads = device_table(window_coordinates, (in_features, first, spread), like, torch.int32)
    if out_features % last:
        writes = device_table(coordinate_positions, (out_features, last, spread), like, torch.int32)
    return [reads, writes]


def basis_tables(network: NetworkSettings, like: Tensor) -> tuple[list[Tensor], list[Tensor], list[int], list[int]]:
    """Return the tables from blade to spin coordinates, one entry per layer; four empty lists in the spinor basis.

    Returns:
        From ``clifford.string_tables`` the blade of every Pauli string (V,) and its sign (V,); from
        ``clifford.spin_shape`` the number of rows and of components.
    """
    if network.basis == "spinor":
        return [], [], [], []
    dimensions = [window.bit_length() - 1 for window in network.window_sizes]
    shapes = [clifford.spin_shape(n) for n in dimensions]
    blades, signs = zip(*(clifford.string_tables(n, like)[:2] for n in dimensions), strict=True)
    return list(blades), list(signs), [shape.rows for shape in shapes], [shape.components for shape in shapes]


def to_windows(x: Tensor, window: int, layout: str = "wrapped") -> Tensor:
    """Return windows (..., count, V) of x (..., size).

    Args:
        layout: "wrapped": one after another, the last wrapping round to the beginning; "spread": at equal distances,
            window i starting at i size / count. Both are the same if ``window`` divides the size.
    """
    missing = -x.shape[-1] % window
    if missing and layout == "spread":
        x = take_last(x, device_table(window_coordinates, (x.shape[-1], window, 1), x))
    elif missing:
        x = torch.cat((x, x[..., :missing]), dim=-1)
    return x.unflatten(-1, (-1, window))


def from_windows(y: Tensor, size: int, layout: str = "wrapped") -> Tensor:
    """Return coordinates (..., size) of windows (..., count, V): each the mean over the windows that contain it."""
    window = y.shape[-1]
    y = y.flatten(-2)
    wrapped = y.shape[-1] - size
    if not wrapped:
        return y
    if layout == "spread":
        first, last = take_last(y, device_table(coordinate_positions, (size, window, 1), y)).chunk(2, dim=-1)
        return (first + last) / 2
    return torch.cat(((y[..., :wrapped] + y[..., size:]) / 2, y[..., wrapped:size]), dim=-1)


def branch_permutation(window: int, branches: int, seed: int, step: int) -> np.ndarray:
    """Return indices (branches * window,) that permute each of several adjacent branches in a fixed random order.

    numpy's legacy generator never changes its numbers, so that a seed in a checkpoint means the same everywhere.
    """
    generator = np.random.RandomState([seed, step])
    return np.concatenate([generator.permutation(window) + branch * window for branch in range(branches)])


def mixed_branches(
    x: Tensor, order: Tensor | None, slopes: Tensor, mix: Tensor, normalize: bool = True, activation: str = "prelu"
) -> Tensor:
    """Permute, normalise and activate branches and return their weighted sum, as between two layers of rotors.

    Args:
        x: (N, W, V), the outputs of W branches.
        order: (W V,) integers, from ``branch_permutation``; None for no permutation.
        slopes: (W,), or (1,) for all, slopes of the PReLU; other activations ignore them.
        mix: (W,), the weights of the sum.
        normalize: whether each branch is normalised (LayerNorm without parameters).
        activation: a key of ``ACTIVATIONS``.

    Returns:
        (N, V).
    """
    if normalize:  # before the permutation, on whose order LayerNorm does not depend
        x = torch.nn.functional.layer_norm(x, x.shape[-1:])
    if order is not None:
        x = take_last(x.flatten(1), order).unflatten(-1, x.shape[1:])
    curve = ACTIVATIONS[activation]
    x = curve(x) if callable(curve) else torch.nn.functional.prelu(x, slopes.to(x.dtype).expand(x.shape[1]))
    return torch.einsum("nwv,w->nv", x, mix.to(x.dtype))


def branch_orders(window: int, width: int, depth: int, activate_entry: bool, seed: int) -> np.ndarray:
    """Return the permutations of all B branches of a network's steps, as indices (B, V) within each branch.

    The step after the entry layer comes first; its number for ``branch_permutation`` is the last, ``depth``.
    """
    steps = [(depth, 1)] * activate_entry + [(step, width) for step in range(depth)]
    orders = [branch_permutation(window, branches, seed, step) for step, branches in steps]
    return np.concatenate(orders).reshape(-1, window) % window


def term_orders(window: int, terms: int, seed: int) -> np.ndarray:
    """Return a random order of a window's coordinates per term, as indices (terms V,); the first is not permuted."""
    orders = [np.arange(window)]
    orders += [np.random.RandomState([seed, 0, term]).permutation(window) for term in range(1, terms)]
    return np.concatenate(orders)


def sandwich_sum(x: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Return y_o = sum over terms w and input windows i of A_woi X_i B_woi^T.

    Args:
        x: (N, I, M).
        left: A, (W, O, I, L, L), which multiplies X viewed as (L, M/L).
        right: B, (W, O, I, R, R), which multiplies X viewed as (M/R, R).

    Returns:
        (N, O, M).
    """
    rows, columns = left.shape[-1], right.shape[-1]
    half = torch.einsum("nirc,woidc->nwoird", x.unflatten(-1, (-1, columns)), right)
    half = half.flatten(-2).unflatten(-1, (rows, -1))
    return torch.einsum("nwoilc,woikl->nokc", half, left).flatten(-2)


def shared_coordinates(window: int, left: Tensor, right: Tensor) -> int:
    """Return M, the number of a window's coordinates that share a pair of factors (..., S, L, L), (..., S, R, R)."""
    if left.shape[-1] * right.shape[-1] < window:  # two blocks with the same factors
        return window // clifford.spin_shape(window.bit_length() - 1).blocks
    return window // left.shape[-3]


def sandwich_windows(x: Tensor, left: Tensor, right: Tensor, basis: str = "spinor") -> Tensor:
    """Return ``sandwich_sum`` of whole windows, which may have several blocks, in the spinor or the blade basis.

    Args:
        x: (N, I, V).
        left, right: (W, O, I, S, L, L) and (W, O, I, S, R, R); S = 1 if all blocks of a window share their factors.
        basis: "blade": coordinates of blades, so that rotors act as in the paper; "spinor": coordinates of the spin
            representation. Both give the same family of maps, up to a fixed orthogonal change of basis.

    Returns:
        (N, O, V).
    """
    blocks = left.shape[3]
    if basis == "blade":
        x = clifford.to_spin(x)
    if blocks > 1:
        parts = x.unflatten(-1, (blocks, -1)).unbind(-2)
        pairs = zip(parts, left.unbind(3), right.unbind(3), strict=True)
        y = torch.stack([sandwich_sum(part, a, b) for part, a, b in pairs], dim=-2).flatten(-2)
    else:
        count = x.shape[-1] // shared_coordinates(x.shape[-1], left, right)
        tokens = x.unflatten(-1, (count, -1)).transpose(1, 2).flatten(0, 1)  # every part counts as a separate token
        y = sandwich_sum(tokens, left.squeeze(3), right.squeeze(3))
        y = y.unflatten(0, (-1, count)).transpose(1, 2).flatten(-2)
    return clifford.from_spin(y) if basis == "blade" else y


def rotor_layer(
    x: Tensor,
    left: Tensor,
    right: Tensor,
    out_features: int,
    window: int,
    basis: str = "spinor",
    product: Callable[..., Tensor] = sandwich_windows,
    layout: str = "wrapped",
    orders: Tensor | None = None,
) -> Tensor:
    """Split x into windows, apply ``sandwich_windows``, and merge the output windows.

    Args:
        x: (..., in_features).
        left, right, basis: as for ``sandwich_windows``.
        out_features: size of the result.
        window: V.
        product: ``sandwich_windows``, or its kernel.
        layout: layout of the windows, see ``to_windows``.
        orders: (W V,), the order in which each term reads a window (``term_orders``); None for the natural order.

    Returns:
        (..., out_features).
    """
    windows = to_windows(x.reshape(-1, x.shape[-1]), window, layout)
    if orders is not None:
        # a window in each term's order counts as a further input window, so that W terms become a sum of one term
        windows = take_last(windows, orders).unflatten(-1, (-1, window)).transpose(1, 2).flatten(1, 2)
        left, right = (factor.transpose(0, 1).flatten(1, 2).unsqueeze(0) for factor in (left, right))
    y = product(windows, left, right, basis)
    return from_windows(y, out_features, layout).reshape(*x.shape[:-1], out_features)


def rotor_step(
    x: Tensor,
    left: Tensor,
    right: Tensor,
    slopes: Tensor,
    mix: Tensor,
    seed: int | None,
    step: int = 0,
    basis: str = "spinor",
    normalize: bool = True,
    activation: str = "prelu",
) -> Tensor:
    """Apply a hidden step of a network: W sandwiches of one window, then ``mixed_branches``.

    Args:
        x: (N, V).
        left, right: (1, W, 1, S, L, L) and (1, W, 1, S, R, R), as for ``sandwich_windows``; each output window is a
            branch.
        slopes, mix, normalize, activation: as for ``mixed_branches``.
        seed, step: as for ``branch_permutation``; ``seed`` None for no permutation.
        basis: as for ``sandwich_windows``.

    Returns:
        (N, V).
    """
    branches = sandwich_windows(x.unsqueeze(1), left, right, basis)
    order = None if seed is None else step_order(x, left.shape[1], seed, step)
    return mixed_branches(branches, order, slopes, mix, normalize, activation)


def step_order(x: Tensor, branches: int, seed: int, step: int) -> Tensor:
    """Return ``branch_permutation`` of a step on the device of x (N, V), int32 (W V,)."""
    return device_table(branch_permutation, (x.shape[-1], branches, seed, step), x, torch.int32)


class NetworkSettings(NamedTuple):
    """Describe a network of rotor layers, without its parameters.

    Attributes:
        out_features: size of the result.
        window_sizes: V of every layer: entry, hidden ones, exit. The inner width is the V of the hidden layers.
        basis: as for ``rotor_layer``.
        layout: as for ``rotor_layer``.
        normalize: as for ``mixed_branches``.
        activate_entry: whether permutation, norm and activation follow the entry layer too.
        residual: whether the entry and the exit layer add their input if they have as many inputs as outputs.
        activation: as for ``mixed_branches``.
    """

    out_features: int
    window_sizes: tuple[int, ...]
    basis: str = "spinor"
    layout: str = "wrapped"
    normalize: bool = True
    activate_entry: bool = False
    residual: bool = False
    activation: str = "prelu"


def through_network(
    x: Tensor,
    entry: Callable[[Tensor], Tensor],
    hidden: Iterable[Callable[[Tensor], Tensor]],
    exit: Callable[[Tensor], Tensor],
    residual: bool,
) -> Tensor:
    """Run x through the layers of a network; with ``residual``, entry and exit add their input if sizes are equal."""
    y = entry(x)
    if residual and x.shape[-1] == y.shape[-1]:
        y = y + x
    for step in hidden:
        y = step(y)
    z = exit(y)
    return z + y if residual and z.shape[-1] == y.shape[-1] else z


def rotor_network(
    x: Tensor,
    left: Sequence[Tensor],
    right: Sequence[Tensor],
    orders: Tensor | None,
    slopes: Tensor,
    mix: Tensor,
    bias: Tensor | None,
    network: NetworkSettings,
) -> Tensor:
    """Run a network: layers of rotors with ``mixed_branches`` between them.

    The tensors of all steps' B branches are concatenated.

    Args:
        x: (N, in_features).
        left, right: factors of every layer, with its o output and i input windows: (o, i, S, L, L) and
            (o, i, S, R, R).
        orders: (B, V), from ``branch_orders``; None for no permutation.
        slopes, mix: (B,), as for ``mixed_branches``.
        bias: (out_features,), or None.
        network: the other settings.

    Returns:
        (N, out_features).
    """
    inner = network.window_sizes[1]
    branch_counts = [1] * network.activate_entry + [len(a) for a in left[1:-1]]
    step_tensors = _split_by_step(orders, slopes, mix, branch_counts)

    def layer(index: int, size: int, y: Tensor) -> Tensor:
        a, b = (factor[index].unsqueeze(0).to(y.dtype) for factor in (left, right))
        return rotor_layer(y, a, b, size, network.window_sizes[index], network.basis, layout=network.layout)

    def step(index: int, y: Tensor) -> Tensor:
        branches = layer(index, left[index].shape[0] * network.window_sizes[index], y).unflatten(-1, (-1, inner))
        return mixed_branches(branches, *next(step_tensors), network.normalize, network.activation)

    entry = functools.partial(step, 0) if network.activate_entry else functools.partial(layer, 0, inner)
    hidden = [functools.partial(step, index) for index in range(1, len(left) - 1)]
    exit = functools.partial(layer, len(left) - 1, network.out_features)
    z = through_network(x, entry, hidden, exit, network.residual)
    return z if bias is None else z + bias.to(z.dtype)


def _split_by_step(
    orders: Tensor | None, slopes: Tensor, mix: Tensor, counts: Sequence[int]
) -> Iterator[tuple[Tensor | None, Tensor, Tensor]]:
    """Split ``orders``, ``slopes`` and ``mix`` of a network into the arguments of ``mixed_branches`` of every step."""
    permutations: list[Tensor | None] = [None] * len(counts)
    if orders is not None:
        starts = orders.shape[1] * torch.arange(max(counts), device=orders.device)[:, None]
        permutations = [(order.long() + starts[: len(order)]).flatten() for order in orders.split(counts)]
    return zip(permutations, slopes.split(counts), mix.split(counts), strict=True)


@torch.no_grad()
def plane_vectors(beta: Tensor, vectors: Tensor, iterations: int) -> Tensor:
    """Turn vectors into the planes of bivectors by power iteration (Algorithm 2), the largest plane first.

    Args:
        beta: (..., P).
        vectors: initial values (J - 1, ..., n); the result for an earlier beta is a warm start.
        iterations: per plane.

    Returns:
        (J - 1, ..., n).
    """
    matrix, turned = clifford.bivector_to_matrix(beta), []
    for vector in vectors:
        for _ in range(iterations):
            vector = power_step(matrix, vector)
        turned.append(vector)
        matrix = matrix - largest_part(matrix, vector)
    return torch.stack(turned) if turned else vectors


def simple_parts(beta: Tensor, vectors: Tensor) -> Tensor:
    """Decompose bivectors into simple parts (J, ..., P): Algorithm 1 with one differentiable step of Algorithm 2.

    The parts sum to ``beta``. The last is the remainder, which is simple if the others have converged.

    Args:
        beta: (..., P).
        vectors: (J - 1, ..., n), from ``plane_vectors``.
    """
    matrix, parts = clifford.bivector_to_matrix(beta), []
    for vector in vectors:
        part = largest_part(matrix, power_step(matrix, vector))
        parts.append(part)
        matrix = matrix - part
    return clifford.bivector_from_matrix(torch.stack([*parts, matrix]))


def product_of_simple_rotors(parts: Tensor) -> tuple[Tensor, Tensor]:
    """Return the factors of the rotor that is the product of cos|b| + b sin|b| / |b| over simple parts b.

    Args:
        parts: (J, ..., P).

    Returns:
        (..., L, L) and (..., R, R), as ``clifford.left_factor`` and ``right_factor`` return them.
    """
    angle = torch.linalg.vector_norm(parts, dim=-1)[..., None, None]
    elements = clifford.to_spin(clifford.embed_bivector(parts))
    # even elements act in the same way on both blocks
    left = clifford.left_multiplication(elements)[..., 0, :, :]
    right = -clifford.right_multiplication(elements)[..., 0, :, :]
    eye = torch.eye(left.shape[-1], dtype=left.dtype, device=left.device)
    sinc = torch.sinc(angle / torch.pi)
    rotors = (torch.cos(angle) * eye + sinc * left, torch.cos(angle) * eye + sinc * right)
    first, second = (functools.reduce(torch.matmul, side.unbind(0)) for side in rotors)
    return first, second


def nearest_kronecker(weight: Tensor, rows: int, columns: int, terms: int) -> tuple[Tensor, Tensor]:
    """Return the best sum of Kronecker products in the Frobenius norm (Van Loan and Pitsianis 1993).

    Args:
        weight: (L R, L R).
        rows, columns: L and R.
        terms: W, at most min(L^2, R^2).

    Returns:
        left (W, L, L) and right (W, R, R), in float64: sum_w left_w (x) right_w is nearest to ``weight``.
    """
    blocks = weight.double().unflatten(1, (rows, columns)).unflatten(0, (rows, columns)).transpose(1, 2)
    u, s, vh = torch.linalg.svd(blocks.reshape(rows * rows, columns * columns), full_matrices=False)
    root = s[:terms].sqrt()
    return (u[:, :terms] * root).T.unflatten(1, (rows, rows)), (root[:, None] * vh[:terms]).unflatten(1, (columns, -1))
