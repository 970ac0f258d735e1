"""The C++ kernels as functions of tensors. What they take is checked here: C++ sees addresses and sizes.

No compiler, autograd or dispatch mode sees these calls: who calls them asks ``unsupported_reason`` first.
"""

# Legend: N tokens, I in_features, O out_features, R rank or latent size, K blocks, G width of gate features

import ctypes
import functools
import struct
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from relinear.kernels.native import build

_TYPES = {
    "half": ctypes.c_bool,
    "threads": ctypes.c_int,
    "p": ctypes.c_void_p,
    "n": ctypes.c_int64,
    "f": ctypes.c_float,
}
#: name -> what a kernel takes before its addresses (p), sizes (n) and numbers (f)
_KERNELS = {
    "modulate": ("half threads", "ppppppp nnnn"),
    "modulate_backward": ("half threads", "ppppppppp nnn"),
    "gate": ("half threads", "pppp nn"),
    "gate_backward": ("half threads", "pppppp nn"),
    "hdpl_layer": ("half threads", "pppppppp nnnnn"),
    "ccl_layer": ("half threads", "ppp n ppp f"),
    "quantized_rows": ("half threads", "pppppp nnnnn"),
    "quantized_bytes": ("half threads", "pppppp nnnnn"),
    "quantized_weights": ("half threads", "pppp nnnnn"),
    "change_codes": ("", "ppppppp f nn"),
    "decoder_before": ("threads", "ppppppp f"),
    "decoder_after": ("threads", "pppp f"),
    "rotor_network": ("half threads", "pp n pp"),
    "rotor_network_backward": ("half threads", "pp n pp n pp"),
    "places_below": ("", "p nn"),
}
#: most of a low rank that gates have
LARGEST_RANK = 16
#: bytes of weights that are made numbers at a time, which stay in the cache
PORTION_BYTES = 1 << 22
#: rows up to which integers are made numbers in registers, each time that they are read
FEW_ROWS = {torch.float32: 32, torch.bfloat16: 8}
#: bits of the integers
BITS = (2, 3, 4, 5, 6, 8)
#: in the order of ``activations.h``
ACTIVATIONS = ("prelu", "gelu", "silu", "elu")


@functools.cache
def _kernel(name: str) -> Any:
    library = build.library()
    assert library is not None
    kernel, (first, others) = getattr(library, name), _KERNELS[name]
    kernel.argtypes = [_TYPES[kind] for kind in (*first.split(), *others.replace(" ", ""))]
    kernel.restype = ctypes.c_bool if name == "places_below" else None
    return kernel


def _at(tensor: Tensor | None) -> int:
    """Where a tensor begins; 0 for none."""
    return 0 if tensor is None else tensor.data_ptr()


def _typed(name: str, of: Tensor, *arguments: int) -> None:
    """Run a kernel of float32 and bfloat16 numbers, those of ``of``, on as many threads as torch does."""
    _kernel(name)(of.dtype == torch.bfloat16, torch.get_num_threads(), *arguments)


def _numbers(values: Iterable[int]) -> bytes:
    """Addresses, strides and sizes as a C array."""
    values = tuple(values)
    return struct.pack(f"{len(values)}q", *values)


def _check(name: str, tensor: Tensor | None, dtype: torch.dtype, *shape: int) -> None:
    """Raise ValueError unless a tensor, or none, lies as a kernel takes it."""
    if tensor is None or (tensor.shape == shape and tensor.dtype == dtype and tensor.is_cpu and tensor.is_contiguous()):
        return
    raise ValueError(
        f"{name} must be a contiguous {dtype} tensor of shape {shape} on the CPU, got {tensor.dtype} "
        f"{tuple(tensor.shape)} on {tensor.device}"
    )


def _matrix(name: str, tensor: Tensor) -> tuple[int, int]:
    """The shape of a matrix that kernels take. Raises ValueError for others."""
    if tensor.ndim != 2 or tensor.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"{name} must be a float32 or bfloat16 matrix, got {tensor.dtype} {tuple(tensor.shape)}")
    rows, columns = tensor.shape
    _check(name, tensor, tensor.dtype, rows, columns)
    return rows, columns


def _rank(up: Tensor) -> int:
    if up.ndim != 2 or not 0 < up.shape[0] <= LARGEST_RANK:
        raise ValueError(f"up must be (R, O) with R of at most {LARGEST_RANK}, got {tuple(up.shape)}")
    return up.shape[0]


def modulate(
    out: Tensor, u: Tensor, z: Tensor, x: Tensor, down: Tensor, up: Tensor, scalar: Tensor | None = None
) -> None:
    """Write z (N, O) times its gates to ``out``, and u = A x (N, R), of x (N, I).

    The gates are 2 sigmoid(B phi) and 2 sigmoid(b phi), phi = sigmoid(u), with A ``down`` (R, I), B^T ``up`` (R, O) and
    b ``scalar`` (1, R), which may be missing; the last two in float32.
    """
    (rows, columns), (_, inputs), rank = _matrix("z", z), _matrix("x", x), _rank(up)
    for name, tensor, *shape in (("out", out, rows, columns), ("u", u, rows, rank), ("x", x, rows, inputs)):
        _check(name, tensor, z.dtype, *shape)
    _check("down", down, z.dtype, rank, inputs)
    _check("up", up, torch.float32, rank, columns)
    _check("scalar", scalar, torch.float32, 1, rank)
    _typed("modulate", z, *map(_at, (out, u, z, x, down, up, scalar)), rows, inputs, columns, rank)


def modulated_layer(
    weight: Tensor, bias: Tensor | None, down: Tensor, channel: Tensor, scalar: Tensor | None
) -> Callable[[Tensor], Tensor]:
    """``modulate`` of weight x + bias as a function of x (..., I), without a graph; ``channel`` is B (O, R)."""
    down, up = down.contiguous(), channel.T.contiguous()
    (outputs, inputs), rank, half = weight.shape, _rank(up), weight.dtype == torch.bfloat16
    _check("down", down, weight.dtype, rank, inputs)
    _check("up", up, torch.float32, rank, outputs)
    _check("scalar", scalar, torch.float32, 1, rank)
    run = _kernel("modulate")

    def layer(x: Tensor) -> Tensor:
        z, x = F.linear(x, weight, bias), x.contiguous()  # which refuses what does not fit
        z, count = z.contiguous(), x.numel() // inputs
        u, at = z.new_empty(count, rank), z.data_ptr()
        tensors = u.data_ptr(), at, x.data_ptr(), down.data_ptr(), up.data_ptr(), _at(scalar)
        run(half, torch.get_num_threads(), at, *tensors, count, inputs, outputs, rank)
        return z

    return layer


def modulate_backward(
    to_z: Tensor, to_hidden: Tensor, to_up: Tensor, total: Tensor, y: Tensor, grad: Tensor, hidden: Tensor, up, twice
) -> None:
    """Gradients of what ``modulate`` gave as y, from that of y.

    Writes those of z, of phi (``hidden``) through the channel gate, and the sums ``total`` (N, 1) of grad y; adds that
    of ``up``. ``twice`` (N, 1) is twice the scalar gate.
    """
    (rows, columns), rank = _matrix("y", y), _rank(up)
    for name, tensor in (("grad", grad), ("to_z", to_z)):
        _check(name, tensor, y.dtype, rows, columns)
    for name, tensor, *shape in (
        ("up", up, rank, columns), ("to_up", to_up, rank, columns), ("hidden", hidden, rows, rank),
        ("to_hidden", to_hidden, rows, rank), ("twice", twice, rows, 1), ("total", total, rows, 1),
    ):  # fmt: skip
        _check(name, tensor, torch.float32, *shape)
    arguments = to_z, to_hidden, to_up, total, y, grad, hidden, up, twice
    _typed("modulate_backward", y, *map(_at, arguments), rows, columns, rank)


def gate(out: Tensor, value: Tensor, logits: Tensor, bias: Tensor) -> None:
    """Write value * sigmoid(logits + bias) (N, O) to ``out``."""
    rows, columns = _matrix("value", value)
    _check("out", out, value.dtype, rows, columns)
    _check("logits", logits, value.dtype, rows, columns)
    _check("bias", bias, value.dtype, columns)
    _typed("gate", value, *map(_at, (out, value, logits, bias)), rows, columns)


def gate_backward(to_value: Tensor, logits: Tensor, to_bias: Tensor, y: Tensor, grad: Tensor, bias: Tensor) -> None:
    """Write the gradients of value and, over ``logits``, of logits; add their sums over rows to ``to_bias`` (2, O)."""
    rows, columns = _matrix("y", y)
    for name, tensor in (("grad", grad), ("to_value", to_value), ("logits", logits)):
        _check(name, tensor, y.dtype, rows, columns)
    _check("bias", bias, y.dtype, columns)
    _check("to_bias", to_bias, torch.float32, 2, columns)
    _typed("gate_backward", y, *map(_at, (to_value, logits, to_bias, y, grad, bias)), rows, columns)


def _contiguous_rows(x: Tensor, like: Tensor, inputs: int) -> Tensor:
    """x (..., I), contiguous. Raises ValueError unless it is of the layer's dtype and size."""
    if x.dtype != like.dtype or x.shape[-1] != inputs:
        raise ValueError(f"x must be {like.dtype} of {inputs} features, got {x.dtype} {tuple(x.shape)}")
    return x.contiguous()


def hdpl_layer(
    blocks: Tensor, encoder: Tensor, encoder_bias: Tensor, decoder: Tensor, bias: Tensor | None
) -> Callable[[Tensor, bool], tuple[Tensor, Tensor | None]]:
    """HDPL without noise as a function of a few rows x (..., I) and of whether z is wanted beside y: (y, z or None)."""
    if blocks.ndim != 3 or decoder.ndim != 2 or not blocks.shape[1]:
        shapes = f"{tuple(blocks.shape)} and {tuple(decoder.shape)}"
        raise ValueError(f"blocks and decoder must be of 3 and 2 dimensions, got {shapes}")
    (groups, own, depth), rank, dtype = blocks.shape, decoder.shape[1], blocks.dtype
    inputs, outputs, half = groups * depth, groups * own, dtype == torch.bfloat16
    _check("blocks", blocks, dtype, groups, own, depth)
    _check("encoder", encoder, dtype, rank, inputs)
    _check("encoder_bias", encoder_bias, dtype, rank)
    _check("decoder", decoder, dtype, outputs, rank)
    _check("bias", bias, dtype, outputs)
    run, sizes = _kernel("hdpl_layer"), (inputs, rank, outputs, groups)

    def layer(x: Tensor, with_latent: bool) -> tuple[Tensor, Tensor | None]:
        rows, leading = _contiguous_rows(x, blocks, inputs), x.shape[:-1]
        y, z = x.new_empty((*leading, outputs)), x.new_empty((*leading, rank)) if with_latent else None
        tensors = y.data_ptr(), _at(z), rows.data_ptr(), blocks.data_ptr(), encoder.data_ptr()
        more = encoder_bias.data_ptr(), decoder.data_ptr(), _at(bias)
        run(half, torch.get_num_threads(), *tensors, *more, x.numel() // inputs, *sizes)
        return y, z

    return layer


def ccl_layer(
    context: int, trunk: Sequence[Tensor], basis: Tensor, mix: Tensor, bias, gain, offset, *others: Any
) -> Callable[[Tensor, Tensor | None], Tensor]:
    """A CCL layer as a function of a few rows x (..., I) and their context (..., ``context``), None without gates.

    Args:
        context: features.
        trunk: weights and biases of the gate network's hidden layers by turns.
        basis, mix, bias, gain, offset: as in ``functional.ccl.ccl``, the norm's after the bias.
        others: weight and bias of the basis' gate, of the output's; whether the bias is gated, and eps of the norm.
    """
    *gates, gate_bias, eps = others
    if basis.ndim != 2 or mix.ndim != 2 or len(trunk) % 2 or any(weight.ndim != 2 for weight in trunk[::2]):
        raise ValueError("basis, mix and what is in a trunk must be matrices, the last with a bias each")
    width, (rank, inputs), outputs, dtype = context, basis.shape, len(mix), basis.dtype
    for weight, of_weight in zip(trunk[::2], trunk[1::2], strict=True):
        _check("trunk", weight, dtype, len(weight), width)
        _check("trunk", of_weight, dtype, width := len(weight))
    _check("basis", basis, dtype, rank, inputs)
    _check("mix", mix, dtype, outputs, rank)
    for name, tensor, size in (("bias", bias, outputs), ("gain", gain, rank), ("offset", offset, rank)):
        _check(name, tensor, dtype, size)
    for name, (weight, of_weight), size in (("basis_gate", gates[:2], rank), ("output_gate", gates[2:], outputs)):
        _check(name, weight, dtype, size, width)
        _check(name, of_weight, dtype, size)
        if weight is not None and not context:
            raise ValueError("gates need a context")
    half, run, parameters = dtype == torch.bfloat16, _kernel("ccl_layer"), (basis, mix, bias, gain, offset, *gates)
    sizes, widths = (inputs, context, len(trunk) // 2, rank, outputs, gate_bias), _numbers(map(len, trunk[::2]))

    def layer(x: Tensor, features: Tensor | None) -> Tensor:
        rows, count = _contiguous_rows(x, basis, inputs), x.numel() // inputs
        features = None if features is None else _contiguous_rows(features, basis, context)
        if (0 if features is None else features.numel()) != count * context:
            raise ValueError(f"a context of {context} features must have as many rows as x, {count}")
        y, numbers = x.new_empty((*x.shape[:-1], outputs)), _numbers((*sizes, *map(_at, parameters)))
        at = y.data_ptr(), rows.data_ptr(), _at(features), count
        run(half, torch.get_num_threads(), *at, numbers, _numbers(map(_at, trunk)), widths, eps)
        return y

    return layer


def _check_packed(inputs: int, codes: Tensor, scales: Tensor, zeros, bits: int, group: int, bias) -> tuple[int, Any]:
    """Outputs of packed integers, and the dtype of their scales. Raises ValueError as ``quantized_layer`` does."""
    if inputs % 64 or group % 32 or group <= 0 or bits not in BITS:
        raise ValueError(f"inputs, group and bits must be multiples of 64 and 32, {BITS}: {inputs}, {group}, {bits}")
    outputs, dtype = scales.shape[0], scales.dtype
    _check("scales", scales, dtype, outputs, -(-inputs // group))
    _check("codes", codes, torch.uint8, outputs, inputs // 8 * bits)
    _check("zeros", zeros, torch.uint8, *scales.shape)
    _check("bias", bias, dtype, outputs)
    return outputs, dtype


def quantized_layer(
    inputs: int,
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    bits: int,
    group: int,
    bias: Tensor | None,
    rounded: bool = False,
) -> Callable[[Tensor], Tensor]:
    """``functional.quantized.quantized`` as a function of x (..., inputs) in the scales' dtype, without a graph.

    Where ``rounded``, a few rows x are rounded to 8 bits, 32 inputs to a scale.

    Raises ValueError unless inputs are a multiple of 64, a group's of 32.
    """
    outputs, dtype = _check_packed(inputs, codes, scales, zeros, bits, group, bias)
    half, most_rows = dtype == torch.bfloat16, FEW_ROWS[dtype]
    of_few = _kernel("quantized_bytes" if rounded else "quantized_rows")
    most = max(1, PORTION_BYTES // (inputs * 4))

    def layer(x: Tensor) -> Tensor:
        rows, count, threads = _contiguous_rows(x, scales, inputs), x.numel() // inputs, torch.get_num_threads()
        y, grid = x.new_empty((*x.shape[:-1], outputs)), (codes.data_ptr(), scales.data_ptr(), _at(zeros))
        if count <= most_rows:
            arguments = y.data_ptr(), rows.data_ptr(), *grid, _at(bias)
            of_few(half, threads, *arguments, count, inputs, outputs, bits, group)
            return y
        written, rows, into = x.new_empty(min(most, outputs), inputs), rows.view(count, inputs), y.view(count, outputs)
        for first in range(0, outputs, most):
            part = slice(first, min(first + most, outputs))
            weight = written[: part.stop - first]
            _kernel("quantized_weights")(half, threads, _at(weight), *grid, first, len(weight), inputs, bits, group)
            if bias is None:
                torch.mm(rows, weight.T, out=into[:, part])
            else:
                torch.addmm(bias[part], rows, weight.T, out=into[:, part])
        return y

    return layer


def decoder_layer(
    matrices: Sequence[tuple[Any, ...]], norms: Sequence[Tensor], size: int, eps: float
) -> tuple[Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]], Callable[[Tensor, Tensor], Tensor]]:
    """A decoder layer of one token x (1, 1, I) in float32: what is before attention, and what follows.

    The first takes x, cosines and sines (1, 1, size) and returns query (1, shared, H / shared, size), key and value
    (1, shared, 1, size); the second takes x and what attention made of the query.

    Args:
        matrices: arguments of ``quantized_layer`` of query, key, value, output, gate, up and down.
        norms: weights of both norms.
        size: of a head.
        eps: of the norms.
    """
    numbers, outputs = [], []
    for inputs, codes, scales, zeros, bits, group, bias in matrices:
        outputs.append(_check_packed(inputs, codes, scales, zeros, bits, group, bias)[0])
        _check("scales", scales, torch.float32, *scales.shape)
        numbers += [*map(_at, (codes, scales, zeros, bias)), inputs, outputs[-1], bits, group]
    width, read, kept, inner = matrices[0][0], outputs[0], outputs[1], outputs[4]
    fits = [m[0] for m in matrices] == [width, width, width, read, width, width, inner]
    if not fits or outputs != [read, kept, kept, width, inner, inner, width] or read % kept or kept % size or size % 2:
        raise ValueError(f"matrices of {outputs} outputs do not fit into a decoder layer with heads of {size}")
    for norm in norms:
        _check("norm", norm, torch.float32, width)
    shared, sharing = kept // size, read // kept
    layer = _numbers((*numbers, *map(_at, norms), shared * sharing, shared, size))
    first, second = _kernel("decoder_before"), _kernel("decoder_after")

    def before(x: Tensor, cosine: Tensor, sine: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        _check("cosines", cosine, torch.float32, 1, 1, size)
        _check("sines", sine, torch.float32, 1, 1, size)
        query, key = x.new_empty(1, shared, sharing, size), x.new_empty(1, shared, 1, size)
        value = torch.empty_like(key)
        at = query.data_ptr(), key.data_ptr(), value.data_ptr(), x.data_ptr(), cosine.data_ptr(), sine.data_ptr()
        first(torch.get_num_threads(), *at, layer, eps)
        return query, key, value

    def after(x: Tensor, mixed: Tensor) -> Tensor:
        out, mixed = torch.empty_like(x), mixed.contiguous()
        second(torch.get_num_threads(), out.data_ptr(), x.data_ptr(), mixed.data_ptr(), layer, eps)
        return out

    return before, after


def change_codes(values: Tensor, codes: Tensor, pull: Tensor, outputs: Tensor, scale, zero, top, own, parts) -> None:
    """``functional.rounding.change_codes`` of contiguous vectors in float32."""
    count = values.numel()
    for tensor in (values, codes, pull, scale, zero, top):
        _check("a vector", tensor, torch.float32, count)
    _check("outputs", outputs, torch.float32, count, count)
    arguments = values, codes, pull, outputs, scale, zero, top
    _kernel("change_codes")(*map(_at, arguments), own, count, parts)


class Network:
    """Check and return the arguments of ``rotor_network`` other than its inputs.

    Args:
        in_features, out_features: sizes of inputs and results.
        left, right: factors of every layer: entry, hidden ones, exit.
        windows, parts: of every layer, its coordinates and how many share no factors.
        blades, signs, rows, components: of every layer, ``reference.basis_tables``; none in spin coordinates.
        orders: int32, for every branch and coordinate; without numbers where coordinates stay.
        slopes, mix: of every branch.
        reads, writes: ``reference.window_tables``.
        normalize, after_entry, residual, activation: as in ``reference.NetworkSettings``.

    Raises:
        ValueError: shapes, dtypes or places do not fit.
    """

    def __init__(
        self, in_features: int, out_features: int, left: Sequence[Tensor], right: Sequence[Tensor], windows, parts,
        blades: Sequence[Tensor], signs: Sequence[Tensor], rows, components, orders: Tensor, slopes: Tensor,
        mix: Tensor, reads: Tensor | None, writes: Tensor | None, normalize: bool, after_entry: bool, residual: bool,
        activation: str,
    ) -> None:  # fmt: skip
        count = len(left)
        if count < 2 or not len(right) == len(windows) == len(parts) == count:
            raise ValueError("a network has an entry and an exit, and windows and parts of each layer")
        turned = count if blades else 0
        if not len(blades) == len(signs) == len(rows) == len(components) == turned:
            raise ValueError("every layer has tables of its coordinates, or none")
        sizes = [_layer(*arguments) for arguments in zip(left, right, windows, parts, strict=True)]
        spins = [_spin(*arguments) for arguments in zip(windows[:turned], blades, signs, rows, components, strict=True)]
        spins, tables = spins or [(0, 0, 0)] * count, [*map(list, zip(blades, signs, strict=True))] or [[]] * count
        self.tensors = [*left, *right, *blades, *signs]  # whose addresses are in ``layers``
        self.layers = _numbers(
            number
            for size, *factors, spin, table in zip(sizes, left, right, spins, tables, strict=True)
            for number in (*size, *map(_at, factors), *spin, *map(_at, table or (None, None)))
        )
        (entries, entry_inputs), (exits, exit_inputs) = left[0].shape[:2], left[-1].shape[:2]
        inner, read, places = entries * windows[0], entry_inputs * windows[0], exits * windows[-1]
        _check_places("reads", reads, read, in_features)
        _check_places("writes", writes, 2 * out_features, places)
        if reads is None and read != in_features:
            raise ValueError("the entry needs reads")
        if writes is None and places != out_features:
            raise ValueError("the exit needs writes")
        if exit_inputs * windows[-1] != inner:
            raise ValueError(f"the exit must read {inner} coordinates")
        for factor, window in zip(left[1:-1], windows[1:-1], strict=True):
            if factor.shape[1] != 1 or window != inner:
                raise ValueError(f"hidden layers must act on {inner} coordinates")
        branches = after_entry + sum(len(factor) for factor in left[1:-1])
        _check("slopes", slopes, torch.float32, branches)
        _check("mix", mix, torch.float32, branches)
        if orders.numel():
            _check_places("orders", orders, branches * inner, inner)
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation must be prelu, gelu, silu or elu, got {activation}")
        self.out_features, self.in_features, self.count = out_features, in_features, count
        self.places, self.numbers = (reads, writes), (orders if orders.numel() else None, slopes, mix)
        self.flags = residual, after_entry, turned > 0
        self.settings = normalize, ACTIVATIONS.index(activation)
        self.gradients = 2 * branches + sum(factor.numel() for factor in (*left, *right))

    def description(self, bias: Tensor | None) -> tuple[Any, Any]:
        """Return its C++ form: ``Description``, and every ``Layer``."""
        _check("bias", bias, torch.float32, self.out_features)
        head = self.in_features, self.out_features, *map(_at, self.places), *self.flags, _at(bias), *self.settings
        return _numbers((*head, *map(_at, self.numbers), self.count)), self.layers


def _layer(left: Tensor, right: Tensor, window: int, parts: int) -> tuple[int, ...]:
    """The sizes of a layer with factors (o, i, S, L, L) and (o, i, S, R, R)."""
    if left.ndim != 5 or right.ndim != 5:
        shapes = f"{tuple(left.shape)} and {tuple(right.shape)}"
        raise ValueError(f"factors must be (o, i, S, L, L) and (o, i, S, R, R), got {shapes}")
    outputs, inputs, own, rows, _ = left.shape
    columns = right.shape[3]
    _check("left", left, torch.float32, outputs, inputs, own, rows, rows)
    _check("right", right, torch.float32, outputs, inputs, own, columns, columns)
    if not rows or not columns or rows % 8 or columns % 8:
        raise ValueError(f"factors must have sizes divisible by 8, got {rows} and {columns}")
    shared = window // parts if parts > 0 else 0
    if own not in (1, parts) or shared * parts != window or shared % rows or shared % columns:
        raise ValueError(f"factors of sizes {rows} and {columns} do not divide {parts} parts of a window of {window}")
    return outputs, inputs, own, rows, columns, window, parts


def _spin(window: int, blades: Tensor, signs: Tensor, rows: int, components: int) -> tuple[int, int, int]:
    """Blocks, rows and components of a layer's coordinates."""
    block = rows * rows * components
    if not 0 < rows <= 64 or rows & (rows - 1) or components <= 0 or window not in (block, 2 * block):
        raise ValueError(f"a window of {window} coordinates has no {rows} rows and columns of {components} components")
    _check_places("blades", blades, window, window)
    _check("signs", signs, torch.float32, window)
    return window // block, rows, components


def _check_places(name: str, places: Tensor | None, count: int, end: int) -> None:
    """Raise ValueError unless all places are below ``end``: they may come from a file, and memory is read there."""
    _check(name, places, torch.int32, count)
    if places is not None and not _kernel("places_below")(_at(places), count, end):
        raise ValueError(f"{name} must hold places below {end}")


def rotor_network(y: Tensor, x: Tensor, network: Network, bias: Tensor | None) -> None:
    """Write the network of x (N, in_features) to y (N, out_features)."""
    rows, _ = _matrix("x", x)
    _check("x", x, x.dtype, rows, network.in_features)
    _check("y", y, x.dtype, rows, network.out_features)
    _typed("rotor_network", x, _at(y), _at(x), rows, *network.description(bias))


def rotor_network_backward(to_x: Tensor | None, sums: Tensor, grad: Tensor, x: Tensor, network: Network) -> None:
    """Write gradients from that of the result: of x, and to ``sums`` (shares, numbers) of factors, slopes and mix."""
    rows, _ = _matrix("x", x)
    _check("x", x, x.dtype, rows, network.in_features)
    _check("grad", grad, x.dtype, rows, network.out_features)
    _check("to_x", to_x, x.dtype, *x.shape)
    if sums.ndim != 2 or not len(sums):
        raise ValueError(f"sums must be (shares, numbers), got {tuple(sums.shape)}")
    _check("sums", sums, torch.float32, len(sums), network.gradients)
    arguments = _at(to_x), _at(sums), len(sums), _at(grad), _at(x), rows
    _typed("rotor_network_backward", x, *arguments, *network.description(None))
