"""Call the C++ kernels with tensors, whose shapes and dtypes are checked here, as C++ sees only addresses and sizes.

Compilers, autograd and dispatch modes do not see these calls: callers check ``unsupported_reason`` first.
"""

# Legend: N tokens, I in_features, O out_features, R rank or latent size, K blocks or groups, C context, S parts of a
# window with separate factors, of sizes L and R, o / i windows of its output / input

import ctypes
import functools
import struct
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from relinear.functional import rotor as reference
from relinear.kernels.native import build

_TYPES = {
    "half": ctypes.c_bool,
    "rounded": ctypes.c_bool,
    "threads": ctypes.c_int,
    "p": ctypes.c_void_p,
    "n": ctypes.c_int64,
    "f": ctypes.c_float,
}
#: name of a kernel -> types of its first arguments; then its addresses (p), sizes (n) and floats (f)
_KERNELS = {
    "modulate": ("half threads", "ppppppp nnnn"),
    "modulate_backward": ("half threads", "ppppppppp nnn"),
    "gate": ("half threads", "pppp nn"),
    "gated_product": ("threads", "ppppppp nnnn"),
    "gate_backward": ("half threads", "pppppp nn"),
    "hdpl_layer": ("half threads", "pppppppp nnnnn"),
    "ccl_layer": ("half threads", "ppp n ppp f"),
    "quantized_rows": ("half threads rounded", "pppppp nnnnn"),
    "quantized_weights": ("half threads", "pppp nnnnn"),
    "change_codes": ("", "ppppppp f nn"),
    "decoder_before": ("threads", "ppppppp f"),
    "decoder_after": ("threads", "pppp f"),
    "rotor_network": ("half threads", "pp n pp"),
    "rotor_network_backward": ("half threads", "pp n pp n pp"),
}
#: largest rank of gates
MAX_RANK = 16
#: bytes of weights that are unpacked at a time, few enough to stay in the cache
PORTION_BYTES = 1 << 22
#: rows up to which quantized weights are unpacked in registers, each time that they are read
MAX_ROWS_UNPACKED_IN_REGISTERS = {torch.float32: 32, torch.bfloat16: 8}
#: bits of quantized weights
SUPPORTED_BITS = (2, 3, 4, 5, 6, 8)
#: in the order of ``activations.h``
ACTIVATIONS = ("prelu", "gelu", "silu", "elu")


@functools.cache
def _kernel(name: str) -> Any:
    library = build.library()
    assert library is not None
    kernel = getattr(library, name)
    first, letters = _KERNELS[name]
    kernel.argtypes = [_TYPES[kind] for kind in (*first.split(), *letters.replace(" ", ""))]
    kernel.restype = None
    return kernel


def _address(tensor: Tensor | None) -> int:
    """Return the address of a tensor; 0 for None."""
    return 0 if tensor is None else tensor.data_ptr()


def _run_in_dtype(name: str, tensor: Tensor, *arguments: int) -> None:
    """Run a kernel for the dtype of ``tensor``, float32 or bfloat16, on as many threads as torch uses."""
    _kernel(name)(tensor.dtype == torch.bfloat16, torch.get_num_threads(), *arguments)


def _array(values: Iterable[int]) -> bytes:
    """Convert addresses, strides and sizes to a C array."""
    values = tuple(values)
    return struct.pack(f"{len(values)}q", *values)


#: dtypes of the first tensor in a layout
_FLOATS = (torch.float32, torch.bfloat16)
#: dtypes of the other tensors in a layout
_DTYPES = {"f32": torch.float32, "i32": torch.int32, "u8": torch.uint8}


def _checked_sizes(layout: str, *tensors: Tensor | None, **sizes: int) -> dict[str, int]:
    """Check that tensors are contiguous on the CPU and agree in sizes; return the sizes by letter.

    Args:
        layout: name and shape of each tensor, with letters as in an einsum, "x:NI bias:O"; then the dtype if it is not
            that of the first tensor, "up:RO:f32".
        tensors: the tensors in this order; optional ones may be None, but not the first.
        sizes: known sizes by letter.

    Raises:
        ValueError: a tensor does not fit the layout, or the first is neither float32 nor bfloat16.
    """
    first = tensors[0]
    sizes = {"1": 1} | sizes
    assert first is not None
    for part, tensor in zip(layout.split(), tensors, strict=True):
        name, letters, *other = part.split(":")
        if tensor is None:
            continue
        dtype = _DTYPES[other[0]] if other else first.dtype
        fits = tensor.ndim == len(letters)
        fits = fits and all(sizes.setdefault(letter, n) == n for letter, n in zip(letters, tensor.shape))
        if not (fits and tensor.dtype == dtype and tensor.is_cpu and tensor.is_contiguous()):
            shape = ", ".join(str(sizes.get(letter, letter)) for letter in letters)
            raise ValueError(
                f"{name} must be a contiguous {dtype} tensor of shape ({shape}) on the CPU, got {tensor.dtype} "
                f"{tuple(tensor.shape)} on {tensor.device}"
            )
    if first.dtype not in _FLOATS:
        raise ValueError(f"{layout.partition(':')[0]} must be float32 or bfloat16, got {first.dtype}")
    return sizes


def _run(name: str, layout: str, tensors: Sequence[Tensor | None], counts: str) -> None:
    """Run a kernel on ``tensors``, which ``layout`` describes, and the sizes of the letters ``counts``."""
    sizes = _checked_sizes(layout, *tensors)
    assert tensors[0] is not None
    assert sizes.get("R", 0) <= MAX_RANK
    _run_in_dtype(name, tensors[0], *map(_address, tensors), *(sizes[letter] for letter in counts))


def modulate(
    out: Tensor, u: Tensor, z: Tensor, x: Tensor, down: Tensor, up: Tensor, scalar: Tensor | None = None
) -> None:
    """Write z (N, O) times its gates to ``out``, and A x (N, R) to ``u``, for x (N, I).

    The gates are 2 sigmoid(B phi) and 2 sigmoid(b phi) with phi = sigmoid(u). A is ``down`` (R, I), B^T is ``up``
    (R, O), and b is ``scalar`` (1, R) or None; the last two are in float32.
    """
    layout = "out:NO u:NR z:NO x:NI down:RI up:RO:f32 scalar:1R:f32"
    _run("modulate", layout, (out, u, z, x, down, up, scalar), "NIOR")


def modulated_layer(
    weight: Tensor, bias: Tensor | None, down: Tensor, channel: Tensor, scalar: Tensor | None
) -> Callable[[Tensor], Tensor]:
    """Return ``modulate`` of weight x + bias as a function of x (..., I), without a graph; ``channel`` is B (O, R)."""
    down, up = down.contiguous(), channel.T.contiguous()
    sizes = _checked_sizes("down:RI up:RO:f32 scalar:1R:f32", down, up, scalar)
    inputs, outputs, rank = sizes["I"], sizes["O"], sizes["R"]
    assert rank <= MAX_RANK
    run = _kernel("modulate")
    half = weight.dtype == torch.bfloat16

    def layer(x: Tensor) -> Tensor:
        z = F.linear(x, weight, bias)  # raises if sizes do not fit
        x = x.contiguous()
        z = z.contiguous()
        count = x.numel() // inputs
        u = z.new_empty(count, rank)
        out = z.data_ptr()  # the gated output overwrites z
        tensors = u.data_ptr(), out, x.data_ptr(), down.data_ptr(), up.data_ptr(), _address(scalar)
        run(half, torch.get_num_threads(), out, *tensors, count, inputs, outputs, rank)
        return z

    return layer


def modulate_backward(
    to_z: Tensor, to_hidden: Tensor, to_up: Tensor, total: Tensor, y: Tensor, grad: Tensor, hidden: Tensor, up, twice
) -> None:
    """Compute the gradients of ``modulate`` from ``grad``, that of its result y.

    Writes the gradients of z and, through the channel gate, of phi (``hidden``), and the sums ``total`` (N, 1) of
    grad * y over channels. Adds the gradient of ``up``. ``twice`` (N, 1) is twice the scalar gate.
    """
    layout = "to_z:NO to_hidden:NR:f32 to_up:RO:f32 total:N1:f32 y:NO grad:NO hidden:NR:f32 up:RO:f32 twice:N1:f32"
    _run("modulate_backward", layout, (to_z, to_hidden, to_up, total, y, grad, hidden, up, twice), "NOR")


def gate(out: Tensor, value: Tensor, logits: Tensor, bias: Tensor) -> None:
    """Write value * sigmoid(logits + bias) (N, O) to ``out``."""
    _run("gate", "out:NO value:NO logits:NO bias:O", (out, value, logits, bias), "NO")


def gated_product(
    out: Tensor, h: Tensor, mix: Tensor, bias: Tensor | None, features: Tensor, weight: Tensor, offset: Tensor
) -> None:
    """Write (mix h + bias) * sigmoid(weight features + offset) (N, O) to ``out``, all in float32.

    The sizes are h (N, R), ``mix`` (O, R), ``features`` (N, C) and ``weight`` (O, C).
    """
    tensors = out, h, mix, bias, features, weight, offset
    sizes = _checked_sizes("out:NO:f32 h:NR mix:OR bias:O features:NC weight:OC offset:O", *tensors)
    counts = (sizes[letter] for letter in "NORC")
    _kernel("gated_product")(torch.get_num_threads(), *map(_address, tensors), *counts)


def gate_backward(to_value: Tensor, logits: Tensor, to_bias: Tensor, y: Tensor, grad: Tensor, bias: Tensor) -> None:
    """Write the gradient of value, overwrite ``logits`` by theirs, and add the sums of both to ``to_bias`` (2, O)."""
    layout = "to_value:NO logits:NO to_bias:2O:f32 y:NO grad:NO bias:O"
    _run("gate_backward", layout, (to_value, logits, to_bias, y, grad, bias), "NO")


def _contiguous_rows(x: Tensor, like: Tensor, inputs: int) -> Tensor:
    """Return x (..., I), contiguous. Raises ValueError unless it has the layer's dtype and size."""
    if x.dtype != like.dtype or x.shape[-1] != inputs:
        raise ValueError(f"x must be {like.dtype} of {inputs} features, got {x.dtype} {tuple(x.shape)}")
    return x.contiguous()


def hdpl_layer(
    blocks: Tensor, encoder: Tensor, encoder_bias: Tensor, decoder: Tensor, bias: Tensor | None
) -> Callable[[Tensor, bool], tuple[Tensor, Any]]:
    """Return HDPL without noise as a function of a few rows x (..., I) and of whether to return z: (y, z or None)."""
    groups, block_outputs, block_inputs = blocks.shape
    inputs = groups * block_inputs
    outputs = groups * block_outputs
    half = blocks.dtype == torch.bfloat16
    layout = "blocks:KGD encoder:RI encoder_bias:R decoder:OR bias:O"
    rank = _checked_sizes(layout, blocks, encoder, encoder_bias, decoder, bias, I=inputs, O=outputs)["R"]
    run, sizes = _kernel("hdpl_layer"), (inputs, rank, outputs, groups)

    def layer(x: Tensor, with_latent: bool) -> tuple[Tensor, Any]:
        rows = _contiguous_rows(x, blocks, inputs)
        leading = x.shape[:-1]
        y = x.new_empty((*leading, outputs))
        z = x.new_empty((*leading, rank)) if with_latent else None
        data = y.data_ptr(), _address(z), rows.data_ptr(), blocks.data_ptr()
        weights = encoder.data_ptr(), encoder_bias.data_ptr(), decoder.data_ptr(), _address(bias)
        run(half, torch.get_num_threads(), *data, *weights, x.numel() // inputs, *sizes)
        return y, z

    return layer


def ccl_layer(
    context: int, trunk: Sequence[Tensor], basis: Tensor, mix: Tensor, bias, gain, offset, *gates_and_settings: Any
) -> Callable[[Tensor, Tensor | None], Tensor]:
    """Return a CCL layer as a function of a few rows x (..., I) and their context (..., ``context``).

    Args:
        context: width of the context.
        trunk: weights and biases of the gate network's hidden layers, in turn.
        basis, mix, bias, gain, offset: as in ``functional.ccl.ccl``; gain and offset are the norm's.
        gates_and_settings: weight and bias of the basis gate and of the output gate, whether the bias is gated, and the
            norm's eps.
    """
    *gates, gate_bias, eps = gates_and_settings
    width, parameters = context, (basis, mix, bias, gain, offset, *gates)
    for pair in zip(trunk[::2], trunk[1::2], strict=True):
        width = _checked_sizes("trunk:OI trunk:O", *pair, I=width)["O"]
    layout = "basis:RI mix:OR bias:O gain:R offset:R basis_gate:RC basis_gate:R output_gate:OC output_gate:O"
    shape = _checked_sizes(layout, *parameters, C=width)
    if not context and any(gate is not None for gate in gates):
        raise ValueError("gates need a context")
    inputs, outputs = shape["I"], shape["O"]
    run = _kernel("ccl_layer")
    half = basis.dtype == torch.bfloat16
    sizes = inputs, context, len(trunk) // 2, shape["R"], outputs, gate_bias
    widths = _array(map(len, trunk[::2]))

    def layer(x: Tensor, features: Tensor | None) -> Tensor:
        rows = _contiguous_rows(x, basis, inputs)
        count = x.numel() // inputs
        features = None if features is None else _contiguous_rows(features, basis, context)
        if (0 if features is None else features.numel()) != count * context:
            raise ValueError(f"a context of {context} features must have as many rows as x, {count}")
        y = x.new_empty((*x.shape[:-1], outputs))
        numbers = _array((*sizes, *map(_address, parameters)))
        first = y.data_ptr(), rows.data_ptr(), _address(features), count
        run(half, torch.get_num_threads(), *first, numbers, _array(map(_address, trunk)), widths, eps)
        return y

    return layer


def _check_packed(inputs: int, codes: Tensor, scales: Tensor, zeros, bits: int, group: int, bias) -> tuple[int, Any]:
    """Return the number of outputs and the dtype of scales; raise ValueError as ``quantized_layer`` does."""
    if inputs % 64 or group % 32 or group <= 0 or bits not in SUPPORTED_BITS:
        needed = f"multiples of 64 and 32, {SUPPORTED_BITS}"
        raise ValueError(f"inputs, group and bits must be {needed}: {inputs}, {group}, {bits}")
    layout, groups = "scales:OK codes:OW:u8 zeros:OK:u8 bias:O", -(-inputs // group)
    return _checked_sizes(layout, scales, codes, zeros, bias, K=groups, W=inputs // 8 * bits)["O"], scales.dtype


def quantized_layer(
    inputs: int,
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    bits: int,
    group: int,
    bias: Tensor | None,
    *,
    rounded: bool = False,
) -> Callable[[Tensor], Tensor]:
    """Return ``functional.quantized.quantized`` as a function of x (..., inputs) in the scales' dtype, without a graph.

    If ``rounded``, a few rows x are rounded to 8 bits, with a scale for every 32 inputs.

    Raises:
        ValueError: unless the number of inputs is a multiple of 64, and that of a group a multiple of 32.
    """
    outputs, dtype = _check_packed(inputs, codes, scales, zeros, bits, group, bias)
    half = dtype == torch.bfloat16
    most_rows = MAX_ROWS_UNPACKED_IN_REGISTERS[dtype]
    of_few = _kernel("quantized_rows")
    most = max(1, PORTION_BYTES // (inputs * 4))

    def layer(x: Tensor) -> Tensor:
        rows = _contiguous_rows(x, scales, inputs)
        count = x.numel() // inputs
        threads = torch.get_num_threads()
        y = x.new_empty((*x.shape[:-1], outputs))
        grid = codes.data_ptr(), scales.data_ptr(), _address(zeros)
        if count <= most_rows:
            arguments = y.data_ptr(), rows.data_ptr(), *grid, _address(bias)
            of_few(half, threads, rounded, *arguments, count, inputs, outputs, bits, group)
            return y
        buffer = x.new_empty(min(most, outputs), inputs)
        rows = rows.view(count, inputs)
        into = y.view(count, outputs)
        for first in range(0, outputs, most):
            part = slice(first, min(first + most, outputs))
            weight = buffer[: part.stop - first]
            _kernel("quantized_weights")(
                half, threads, _address(weight), *grid, first, len(weight), inputs, bits, group
            )
            if bias is None:
                torch.mm(rows, weight.T, out=into[:, part])
            else:
                torch.addmm(bias[part], rows, weight.T, out=into[:, part])
        return y

    return layer


def decoder_layer(
    matrices: Sequence[tuple[Any, ...]], norms: Sequence[Tensor], size: int, eps: float
) -> tuple[Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]], Callable[[Tensor, Tensor], Tensor]]:
    """Return a decoder layer for one token x (1, 1, I) in float32 as two functions: before attention, and after it.

    The first takes x, cosines and sines (1, 1, size) and returns query (1, shared, H / shared, size), key and value
    (1, shared, 1, size), where H heads use ``shared`` keys and values. The second takes x and attention's output.

    Args:
        matrices: arguments of ``quantized_layer`` for query, key, value, output, gate, up and down.
        norms: weights of both norms.
        size: size of a head.
        eps: added to the norms' variances.
    """
    numbers, outputs = [], []
    for inputs, codes, scales, zeros, bits, group, bias in matrices:
        outputs.append(_check_packed(inputs, codes, scales, zeros, bits, group, bias)[0])
        _checked_sizes("scales:OK:f32", scales)
        numbers += [*map(_address, (codes, scales, zeros, bias)), inputs, outputs[-1], bits, group]
    width, queries, keys, inner = matrices[0][0], outputs[0], outputs[1], outputs[4]
    fits = [m[0] for m in matrices] == [width, width, width, queries, width, width, inner]
    fits = fits and outputs == [queries, keys, keys, width, inner, inner, width]
    if not fits or queries % keys or keys % size or size % 2:
        raise ValueError(f"matrices of {outputs} outputs do not fit into a decoder layer with heads of {size}")
    _checked_sizes("norm:W:f32 norm:W:f32", *norms, W=width)
    shared, sharing = keys // size, queries // keys
    layer = _array((*numbers, *map(_address, norms), shared * sharing, shared, size))
    first, second = _kernel("decoder_before"), _kernel("decoder_after")

    def before(x: Tensor, cosine: Tensor, sine: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        _checked_sizes("cosines:11S:f32 sines:11S:f32", cosine, sine, S=size)
        query, key = x.new_empty(1, shared, sharing, size), x.new_empty(1, shared, 1, size)
        value = torch.empty_like(key)
        tensors = query, key, value, x, cosine, sine
        first(torch.get_num_threads(), *map(Tensor.data_ptr, tensors), layer, eps)
        return query, key, value

    def after(x: Tensor, mixed: Tensor) -> Tensor:
        out = torch.empty_like(x)
        mixed = mixed.contiguous()
        second(torch.get_num_threads(), out.data_ptr(), x.data_ptr(), mixed.data_ptr(), layer, eps)
        return out

    return before, after


def change_codes(
    values: Tensor, codes: Tensor, weighted: Tensor, outputs: Tensor, scale, zero, top, moment, parts
) -> None:
    """Compute ``functional.rounding.change_codes`` of contiguous vectors in float32."""
    tensors = values, codes, weighted, outputs, scale, zero, top
    _checked_sizes("values:O codes:O weighted:O outputs:OO scale:O zero:O top:O", *tensors)
    _kernel("change_codes")(*map(_address, tensors), moment, len(values), parts)


class Network:
    """Describe a network of rotor layers to C++; the memory of its tensors must not move.

    Args:
        in_features: size of the inputs.
        left, right, orders, slopes, mix, network: as for ``functional.rotor.rotor_network``, in single precision.

    Raises:
        ValueError: shapes do not fit.
    """

    def __init__(
        self,
        in_features: int,
        left: Sequence[Tensor],
        right: Sequence[Tensor],
        orders: Tensor | None,
        slopes: Tensor,
        mix: Tensor,
        network: reference.NetworkSettings,
    ) -> None:
        self.in_features, self.out_features = in_features, network.out_features
        windows = network.window_sizes
        inner = windows[1]
        entry = inner // windows[0], reference.window_count(in_features, windows[0])
        exit = reference.window_count(network.out_features, windows[-1]), inner // windows[-1]
        counts = [entry, *((len(factor), 1) for factor in left[1:-1]), exit]
        if counts != [factor.shape[:2] for factor in left] or {*windows[1:-1]} != {inner}:
            raise ValueError(f"layers of {len(left)} windows {windows} must have {counts} output and input windows")
        branches = network.activate_entry + sum(len(factor) for factor in left[1:-1])
        _checked_sizes("slopes:B mix:B orders:BV:i32", slopes, mix, orders, B=branches, V=inner)
        reads, writes = reference.window_tables(in_features, network.out_features, network, slopes)
        blades, signs, *spins = reference.basis_tables(network, slopes)
        tables = [*zip(blades, signs, *spins, strict=True)] or [(None, None, 0, 0)] * len(left)
        layers = zip(left, right, windows, tables, strict=True)
        self.layers = _array(number for a, b, window, table in layers for number in _layer(a, b, window, *table))
        self.tensors = *left, *right, orders, slopes, mix, reads, writes, *blades, *signs  # C++ has their addresses
        curve = network.activation if callable(reference.ACTIVATIONS[network.activation]) else "prelu"
        flags = network.residual, network.activate_entry, bool(blades)
        self.head = in_features, network.out_features, _address(reads), _address(writes), *flags
        self.tail = network.normalize, ACTIVATIONS.index(curve), *map(_address, (orders, slopes, mix)), len(left)
        self.gradients = 2 * branches + sum(factor.numel() for factor in (*left, *right))

    def description(self, bias: Tensor | None) -> tuple[Any, Any]:
        """Return the C++ structures: ``Description``, and every ``Layer``."""
        return _array((*self.head, _address(bias), *self.tail)), self.layers


def _layer(a: Tensor, b: Tensor, window: int, blade, sign, rows: int, components: int) -> tuple[int, ...]:
    """Describe a layer to C++: factors (o, i, S, L, L) and (o, i, S, R, R), and tables of its coordinates."""
    sizes = _checked_sizes("left:oiSLL right:oiSRR", a, b)
    outputs, inputs, separate, left, right = (sizes[letter] for letter in "oiSLR")
    shared = reference.shared_coordinates(window, a, b)
    if left % 8 or right % 8 or shared % left or shared % right or separate not in (1, window // shared):
        raise ValueError(f"factors of sizes {left} and {right}, divisible by 8, must divide {shared} coordinates")
    spin = window // (rows * rows * components) if rows else 0, rows, components, _address(blade), _address(sign)
    return outputs, inputs, separate, left, right, window, window // shared, _address(a), _address(b), *spin


def rotor_network(y: Tensor, x: Tensor, network: Network, bias: Tensor | None) -> None:
    """Write the network of x (N, in_features) to y (N, out_features)."""
    sizes = _checked_sizes("y:NO x:NI bias:O:f32", y, x, bias, I=network.in_features, O=network.out_features)
    _run_in_dtype("rotor_network", x, _address(y), _address(x), sizes["N"], *network.description(bias))


def rotor_network_backward(to_x: Tensor | None, sums: Tensor, grad: Tensor, x: Tensor, network: Network) -> None:
    """Write the gradient of x and, as one row of ``sums`` per thread, parts of those of factors, slopes and mix."""
    known_sizes = {"I": network.in_features, "O": network.out_features, "G": network.gradients}
    sizes = _checked_sizes("grad:NO x:NI to_x:NI sums:SG:f32", grad, x, to_x, sums, **known_sizes)
    arguments = _address(to_x), _address(sums), sizes["S"], _address(grad), _address(x), sizes["N"]
    _run_in_dtype("rotor_network_backward", x, *arguments, *network.description(None))
