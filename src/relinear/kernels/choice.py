"""Which form an operator runs in: every question is here, every measured bound beside the kernel that it is of.

A twin (a function of ``kernels`` with the name and the signature of its reference in ``functional``) has several forms:
the reference itself, torch's operations in another order or in portions, kernels in Triton or C++, a dense matrix.
A question ``against_...`` returns what speaks against a form, in words, and "" where it runs.

The logger ``relinear.forms``, set to DEBUG itself, tells what was chosen and what spoke against the rest, once a shape;
``RELINEAR_LOG=forms`` in the environment, read at import, prints it to stderr.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import logging
import math
import os
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.autograd import forward_ad

from relinear.kernels import native
from relinear.kernels.cpu import compiled, epilogue
from relinear.kernels.first_check import against_unseen
from relinear.kernels.native import build

__all__ = [
    "LARGEST_COMPOSED",
    "LARGEST_DENSE",
    "against_compiling",
    "against_few_rows",
    "against_gated_products",
    "against_native",
    "against_native_branches",
    "against_native_gates",
    "against_native_kl",
    "against_native_layer",
    "against_native_network",
    "against_native_product",
    "against_native_sample",
    "against_opaque",
    "against_portions",
    "against_rows",
    "against_transposed_copy",
    "against_triton",
    "dense_cost",
    "factored_cost",
    "is_plain",
    "is_traced",
    "is_transformed",
    "prefers_composed",
    "prefers_dense",
    "prefers_dense_to",
    "step_kind",
    "took",
    "triton_kernels",
]

FORMS = logging.getLogger("relinear.forms")
_told: set[tuple] = set()


def _log_as_asked(asked: str) -> None:
    """Obey RELINEAR_LOG: nothing, or ``forms``.

    Raises:
        ValueError: it is anything else.
    """
    if asked in ("", "0"):
        return
    if asked != "forms":
        raise ValueError(
            f"RELINEAR_LOG={asked!r} in the environment, expected 'forms' (or nothing): change or unset it"
        )
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
    FORMS.addHandler(handler)
    FORMS.setLevel(logging.DEBUG)
    FORMS.propagate = False


_log_as_asked(os.environ.get("RELINEAR_LOG", ""))


def took(part: str, form: str, x: Tensor, **against: str) -> None:
    """Log, where that is wanted, the form that was chosen; nothing inside compilers, which would break their graph.

    Args:
        part: the operator, or the part of it, that was asked about.
        form: what runs.
        x: what was asked with: its shape, dtype and device are told, and each is told of once.
        against: the other forms and what spoke against them; "" says nothing.
    """
    # the logger's own level, without its parents': asked in every forward pass, it may take no time
    if torch.compiler.is_compiling() or not FORMS.level or not FORMS.isEnabledFor(logging.DEBUG):
        return
    shape = " x ".join(str(size) for size in x.shape) or "a number"
    _tell(part, form, f"{shape}, {str(x.dtype).removeprefix('torch.')}, {x.device.type}", against)


def _tell(part: str, form: str, given: str, against: dict[str, str]) -> None:
    line = part, given, form, *against.items()
    if line not in _told:
        _told.add(line)
        reasons = "".join(f"; not {name}: {reason}" for name, reason in against.items() if reason)
        FORMS.debug("%s (%s): %s%s", part, given, form, reasons)


def is_transformed(*tensors: Tensor | None) -> bool:
    """Whether torch interprets operations rather than runs them: inside ``torch.func``'s transforms (``vmap``, ``jvp``,
    ``grad``, ...), with derivatives in forward mode, or where a gradient stands for many (``is_grads_batched``).

    A kernel that does not consist of torch's operations would not be seen there. Compilers ask the kernels themselves.
    """
    if torch.compiler.is_compiling():
        return False
    return (
        torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
        or any(t is not None and torch._C._functorch.is_legacy_batchedtensor(t) for t in tensors)
    )


#: classes of tensors that are nothing but numbers
PLAIN = (Tensor, torch.nn.Parameter)


def is_traced(x: Tensor) -> bool:
    """Whether operations on x are seen or replaced by others: compilers, dispatch modes, classes of tensors."""
    return torch.compiler.is_compiling() or type(x) not in PLAIN or bool(torch._C._len_torch_dispatch_stack())


def is_plain(x: Tensor) -> bool:
    """Whether x is a tensor on a CPU, outside of tracing, fake tensors and dispatch modes."""
    return x.device.type == "cpu" and not is_traced(x)


def against_opaque() -> str:
    """Against whatever torch cannot see every operation of: inside ``torch.compile``, which fuses torch's operations
    with their surroundings, and where ``is_transformed``. The reference runs there."""
    if torch.compiler.is_compiling():
        return "torch.compile fuses the reference"
    return "torch.func or a derivative in forward mode" if is_transformed() else ""


#: the oldest GPU that the Triton kernels are compiled for: its tensor cores take bfloat16 and single precision
OLDEST_CAPABILITY = (8, 0)


#: whether there are Triton kernels to choose: settled once, as a compiler cannot look for packages
HAS_TRITON = importlib.util.find_spec("triton") is not None and torch.version.hip is None

#: values of RELINEAR_TRITON, and what they say of Triton kernels
TRITON_MODES = {"": "check", "1": "check", "check": "check", "force": "force", "0": "off", "off": "off"}


def _triton_as_asked(asked: str) -> str:
    """What RELINEAR_TRITON says.

    Raises:
        ValueError: it is none of ``TRITON_MODES``.
    """
    if asked not in TRITON_MODES:
        known = ", ".join(repr(mode) for mode in TRITON_MODES if mode)
        raise ValueError(f"RELINEAR_TRITON={asked!r} in the environment, expected one of {known}: change or unset it")
    return TRITON_MODES[asked]


_triton_mode = _triton_as_asked(os.environ.get("RELINEAR_TRITON", ""))


@contextlib.contextmanager
def triton_kernels(mode: str) -> Iterator[None]:
    """Within the block Triton kernels are used once checked ("check"), unchecked ("force"), or never ("off").

    Raises:
        ValueError: for another mode.
    """
    global _triton_mode
    before, _triton_mode = _triton_mode, _triton_as_asked(mode)
    try:
        yield
    finally:
        _triton_mode = before


@dataclasses.dataclass(frozen=True)
class _Faster:
    """Where a Triton kernel was the faster form: from ``fewest`` numbers of x on, and below so many multiplications of
    a dense layer in inference and in training."""

    fewest: int = 0
    inference: float = math.inf
    training: float = math.inf


#: kind -> as measured on an H100 in bfloat16 (results/gpu): the library's products are faster than a kernel's, which
#: shows where they take most of the time
_FASTER = {
    "transponder": _Faster(inference=2**36, training=2**39),
    "hdpl": _Faster(inference=2**41, training=2**41),
    "ccl": _Faster(fewest=2**26),
    "rotor": _Faster(inference=2**40),
}


def _against_time(kind: str, x: Tensor, outputs: int) -> str:
    faster = _FASTER.get(kind, _Faster())
    if x.numel() < faster.fewest:
        return "too few numbers"
    most = faster.training if torch.is_grad_enabled() else faster.inference
    return "" if x.numel() * outputs < most else "products that torch's library takes faster"


def against_triton(kind: str, x: Tensor, *others: Tensor | None, outputs: int) -> str:
    """Against the Triton kernel of an operator (its kind) for x, its parameters and so many outputs.

    On NVIDIA GPUs alone, in half precision (that of all tensors, or autocast's), where it was the faster form, and
    where the kernel has been seen to be right (``first_check``). ``RELINEAR_TRITON`` in the environment, read at
    import, is ``0`` for no kernels, or ``force`` for kernels that nobody has checked, also where they are slower.
    """
    if not HAS_TRITON:
        return "no triton for NVIDIA GPUs"
    if _triton_mode == "off":
        return "RELINEAR_TRITON=0"
    reason = _against_inputs(x, *others)
    if reason or _triton_mode == "force":
        return reason
    reason = _against_time(kind, x, outputs)
    if reason:
        return reason
    autocast = torch.is_autocast_enabled("cuda")
    return against_unseen(kind, str(x.device), torch.get_autocast_dtype("cuda") if autocast else x.dtype)


def _against_inputs(x: Tensor, *others: Tensor | None) -> str:
    """Against any Triton kernel for tensors like these, whatever they hold."""
    if x.device.type != "cuda":
        return "not on an NVIDIA GPU"
    if not x.numel():
        return "no numbers"
    if is_transformed():
        return "torch.func or a derivative in forward mode"
    given = [t.dtype for t in (x, *others) if t is not None]
    if torch.is_autocast_enabled("cuda") and torch.float64 not in given:
        given = [torch.get_autocast_dtype("cuda")]
    if given[0] not in (torch.float16, torch.bfloat16) or any(dtype != given[0] for dtype in given):
        return "not all in one half precision"
    old = torch.cuda.get_device_capability(x.device) < OLDEST_CAPABILITY
    return "the GPU is older than compute capability 8.0" if old else ""


def step_kind(window: int) -> str:
    """The name by which the Triton kernel of a hidden step over such a window is checked: factors of 64 numbers and
    more by themselves, as compilers take their products in other ways."""
    return "rotor_step" if window < 2048 else "rotor_step_2048" if window < 4096 else "rotor_step_4096"


def against_native(x: Tensor, fewest: int | None = None, may_build: bool = True) -> str:
    """Against C++ kernels for tensors like x: for large plain ones in float32 or bfloat16, where they can be built.

    Args:
        x: any tensor.
        fewest: entries of x; ``native.FEWEST_NATIVE_ENTRIES`` by default.
        may_build: also where the kernels are not there yet.
    """
    if x.numel() < (native.FEWEST_NATIVE_ENTRIES if fewest is None else fewest):
        return "too few entries"
    if x.dtype not in (torch.float32, torch.bfloat16):
        return "neither float32 nor bfloat16"
    if not is_plain(x):
        return "no plain tensor on a CPU"
    if not build.has_compiler():
        return "no C++ compiler, or RELINEAR_COMPILE_KERNELS=0"
    if not (may_build or build.is_built()):
        return "not worth building the kernels"
    return "" if build.is_loaded() else "the kernels could not be built"


def against_native_product(x: Tensor, depth: int, deepest: float, fewest_tokens: int = 0) -> str:
    """Against a C++ kernel that sums two products: it copies their weights, and multiplies long sums more slowly.

    Args:
        x: (N, M).
        depth: inputs of an output, of both products together.
        deepest: the most of them that it is faster for.
        fewest_tokens: N from which it is.
    """
    if x.dtype != torch.float32:
        return "not in float32"
    if x.shape[0] < fewest_tokens:
        return "too few tokens"
    return "sums that are too long" if depth > deepest else against_native(x)


def against_native_branches(x: Tensor, order: Tensor | None, slopes: Tensor, mix: Tensor) -> str:
    """Against the C++ kernel between the rotors of a network, for branches x (N, W, V)."""
    if order is None or order.dtype != torch.int32:
        return "no permutation in 32-bit integers"
    if not (is_plain(slopes) and is_plain(mix)):
        return "no plain parameters on a CPU"
    return against_opaque() or against_native(x)


def against_native_network(x: Tensor, factors: Sequence[int]) -> str:
    """Against the C++ kernel of a whole network of rotors, for inputs x (N, I) and factors of such sizes.

    Training keeps to one form, whatever has been built; in inference a few tokens take what is there.
    """
    if any(size % 8 for size in factors):
        return "factors of sizes not divisible by 8"
    reason = against_opaque() or against_native(x, native.FEWEST_NETWORK_ENTRIES)
    if reason and not torch.is_grad_enabled():
        reason = against_opaque() or against_native(x, fewest=1, may_build=False)
    return reason


def against_native_sample(x: Tensor, noise: Tensor) -> str:
    """Against the C++ kernel of a latent's sample, in a layer with inputs x."""
    return "noise not in float32" if noise.dtype != torch.float32 else against_native(x)


def against_native_kl(mu: Tensor, logvar: Tensor, fewest: int) -> str:
    """Against the C++ kernel of a token's KL, for so many entries of mu (N, R) at least."""
    reason = against_native(mu, fewest)
    return reason or ("" if mu.stride(1) == 1 and mu.stride() == logvar.stride() else "rows of several layouts")


def against_native_gates(y: Tensor, channel: Tensor, *others: Tensor) -> str:
    """Against the C++ kernels of a modulator's gates of y (N, O), with ``channel`` (O, R) and others in y's dtype."""
    if channel.shape[1] > native.LARGEST_NATIVE_RANK:
        return "too large a rank"
    reason = against_native(y)
    return reason or ("several dtypes" if any(other.dtype != y.dtype for other in others) else "")


def against_native_layer(
    x: Tensor,
    weight: Tensor,
    down: Tensor,
    channel: Tensor,
    channel_alpha: Tensor | float,
    scalar_alpha: Tensor | float,
) -> str:
    """Against one call for a layer and its gates, as Python's part counts for one token: inference, alphas inside B.

    A few tokens are not worth a build. They are asked for here alone, outside of autograd's functions, where gradients
    are off in training, too: training keeps to one form, whatever has been built.
    """
    if torch.is_grad_enabled():
        return "gradients are recorded"
    if channel.shape[1] > native.LARGEST_NATIVE_RANK:
        return "too large a rank"
    reason = against_native(x) and against_native(x, fewest=1, may_build=False)
    if reason:
        return reason
    if not is_plain(weight):
        return "no plain weight on a CPU"
    if not (x.dtype == weight.dtype == down.dtype and channel.dtype == torch.float32):
        return "several dtypes"
    if isinstance(channel_alpha, Tensor) or isinstance(scalar_alpha, Tensor) or not channel_alpha == scalar_alpha == 1:
        return "alphas are not folded into B"
    return "autocast" if torch.is_autocast_enabled("cpu") else ""


def against_few_rows(x: Tensor, *parameters: Tensor | None, order: Tensor | None = None, fewest: int = 0) -> str:
    """Against one C++ kernel for all that an operator does with a few rows x (..., I): inference alone.

    A few rows are not worth a build: ``relinear.for_inference_`` has the kernels built.

    Args:
        x: inputs.
        parameters: matrices, biases and whatever else is to be plain, contiguous and of x's dtype.
        order: of the inputs, in 32-bit integers.
        fewest: numbers that the parameters hold at least.
    """
    reason = against_rows(x) or against_native(x, fewest=1, may_build=False)
    if reason:
        return reason
    weights, dtype = 0, x.dtype
    for p in parameters:  # a loop, not a generator: this is asked for every token
        if p is None:
            continue
        if p.dtype != dtype or not p.is_cpu or type(p) not in PLAIN or not p.is_contiguous():
            return "no plain parameters of the inputs' dtype on a CPU"
        weights += p.numel()
    if weights < fewest:
        return "too few weights"
    if order is not None and not (order.dtype == torch.int32 and is_plain(order)):
        return "no order in 32-bit integers on a CPU"
    return ""


def against_rows(x: Tensor) -> str:
    """Against any kernel for a few rows x (..., I), whatever its parameters.

    Spelt out, not called: this is asked for every token by every layer.
    """
    if torch.is_grad_enabled():
        return "gradients are recorded"
    if torch.compiler.is_compiling() or type(x) not in PLAIN or torch._C._len_torch_dispatch_stack():
        return "operations are traced"  # a program for any number of rows would become one for a few
    if not 0 < x.numel() <= native.MOST_FEW_ROWS.get(x.dtype, 0) * x.shape[-1]:
        return "too many rows, or none"
    if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        return "torch.func or a derivative in forward mode"
    if not x.is_cpu or torch._C._functorch.is_legacy_batchedtensor(x):
        return "no plain tensor on a CPU"
    return "autocast" if torch.is_autocast_enabled("cpu") else ""


def against_compiling(x: Tensor) -> str:
    """Against compiling a function of tensors like x: for large plain ones, where there is a compiler."""
    if x.numel() < compiled.FEWEST_COMPILED_ENTRIES:
        return "too few entries"
    if not is_plain(x):
        return "no plain tensor on a CPU"
    if torch._dynamo.config.disable:
        return "torch's compiler is disabled"
    return "" if build.has_compiler() else "no C++ compiler, or RELINEAR_COMPILE_KERNELS=0"


def against_transposed_copy(grad: Tensor, x: Tensor) -> str:
    """Against the copy of a transposed matrix before the product grad^T x, which is faster in bfloat16 alone."""
    return against_compiling(grad) if grad.dtype == x.dtype == torch.bfloat16 else "not in bfloat16"


def against_gated_products(x: Tensor, entries: int) -> str:
    """Against the products of ``cpu.epilogue`` for inputs like x (N, I) and a result of so many entries."""
    if x.dtype != torch.bfloat16:
        return "not in bfloat16"
    if entries < epilogue.FEWEST_GATED_ENTRIES:
        return "too few entries"
    if not is_plain(x):
        return "no plain tensor on a CPU"
    return "" if epilogue.has_bfloat16_products() else "oneDNN has no bfloat16 on this processor"


def against_portions(x: Tensor, fewest: int) -> str:
    """Against taking x some rows at a time, computed again in the backward pass: for so many entries at least."""
    if x.numel() < fewest:
        return "too few entries"
    return against_opaque() or ("" if is_plain(x) else "no plain tensor on a CPU")


#: kind -> dtype -> (tokens up to which, largest square layer, in features, that is faster dense), fewest tokens first.
#: Measured by results/speed/dense_or_structured.py on two AVX-512/AMX cores, at rank 64 and the default blocks; kinds
#: and dtypes without an entry are never made dense. Layers that are not square lose more, hence 1024 in bfloat16.
LARGEST_DENSE: dict[str, dict[torch.dtype, tuple[tuple[float, int], ...]]] = {
    # these two have a kernel for a few rows (results/speed/few_rows.py)
    "low_rank": {
        torch.float32: ((8, 256),),
        torch.bfloat16: ((1, 256), (8, 512), (math.inf, 256)),
    },
    "pivoted_low_rank": {
        torch.float32: ((8, 256),),
        torch.bfloat16: ((1, 256), (8, 576), (math.inf, 256)),
    },
    "block_hadamard": {
        torch.float32: ((8, 1024), (math.inf, 256)),
        torch.bfloat16: ((128, 2048), (math.inf, 1024)),
    },
    "monarch": {
        torch.float32: ((8, 1024), (math.inf, 256)),
        torch.bfloat16: ((math.inf, 1024),),
    },
}


def prefers_dense(kind: str, in_features: int, out_features: int, dtype: torch.dtype, tokens: int) -> bool:
    """Whether an operator of this kind and size is faster through its dense matrix in inference on a CPU."""
    limits = (limit for most, limit in LARGEST_DENSE.get(kind, {}).get(dtype, ()) if tokens <= most)
    dense = in_features * out_features <= next(limits, 0) ** 2
    return _took_dense(dense, kind, in_features, out_features, dtype, tokens)


#: kind -> dtype -> (tokens from which on, largest square layer, in features, whose training step is faster through a
#: dense matrix that is composed for it), most tokens first. Measured by the same script on two AVX-512 cores without
#: AMX; of the operators that the table above has, plain low-rank layers are never composed.
LARGEST_COMPOSED: dict[str, dict[torch.dtype, tuple[tuple[float, float], ...]]] = {
    "pivoted_low_rank": {torch.float32: ((2048, 0), (0, 64)), torch.bfloat16: ((0, 128),)},
    "block_hadamard": {torch.float32: ((0, 128),), torch.bfloat16: ((0, 256),)},
    "monarch": {torch.float32: ((4096, 256), (0, 128)), torch.bfloat16: ((2048, 512), (0, 256))},
}


def prefers_composed(kind: str, in_features: int, out_features: int, x: Tensor) -> bool:
    """Whether a training step on x (..., I) is faster through a dense matrix composed for it, on a CPU.

    One product then takes the place of several, in both directions, and gradients go on through the composition, which
    costs as much for many tokens as for few. Never where operations are seen or replaced by others.
    """
    if not torch.is_grad_enabled():
        return False
    dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else x.dtype
    limits = LARGEST_COMPOSED.get(kind, {}).get(dtype, ())
    if not limits or not is_plain(x) or is_transformed(x):
        return False
    tokens = x.numel() // in_features
    largest = next((size for fewest, size in limits if tokens >= fewest), 0)
    dense = in_features * out_features <= largest**2
    return _took_dense(dense, kind, in_features, out_features, dtype, tokens, "training")


def prefers_dense_to(
    factored: float, kind: str, in_features: int, out_features: int, dtype: torch.dtype, tokens: int, tiled: bool
) -> bool:
    """Whether a dense matrix is faster than what costs ``factored``, of ``factored_cost``; ``tiled`` as there."""
    dense = dense_cost(in_features, out_features, tokens, dtype.itemsize, tiled) < factored
    return _took_dense(dense, kind, in_features, out_features, dtype, tokens)


def _took_dense(
    dense: bool,
    kind: str,
    in_features: int,
    out_features: int,
    dtype: torch.dtype,
    tokens: int,
    phase: str = "inference",
) -> bool:
    if FORMS.level and FORMS.isEnabledFor(logging.DEBUG):
        form, other = ("dense matrix", "structured") if dense else ("structured", "dense matrix")
        given = f"{in_features} -> {out_features}, some {tokens} tokens, {str(dtype).removeprefix('torch.')}"
        _tell(f"{kind} in {phase}", form, given, {other: "slower by what was measured"})
    return dense


#: FLOPs a microsecond that a CPU multiplies at, without and with tiles for half precision
RATE, TILED_RATE = 4e5, 2e6


def dense_cost(in_features: int, out_features: int, tokens: int, itemsize: int, tiled: bool) -> float:
    """Of a dense product on a CPU, in microseconds: an estimate from rates measured on two AVX-512/AMX cores.

    Only the ratio to ``factored_cost`` matters. A large matrix has to be read for few tokens.

    Args:
        itemsize: bytes of a number.
        tiled: whether the processor multiplies these numbers on tiles (bfloat16 with AMX).
    """
    stored = in_features * out_features * itemsize
    single = tokens == 1 and stored >= 1 << 19
    read = stored / ((4e4 if single else 2.8e4) if tiled else 9e4 if stored < 1 << 23 else 5e4)
    return max(2 * in_features * out_features * tokens / (TILED_RATE if tiled else RATE), read)


def factored_cost(
    in_features: int, out_features: int, factor: int, pairs: int, flops: int, blade: bool, tokens: int, tiled: bool
) -> float:
    """Of a sum of sandwiches, as ``dense_cost``.

    Small factors use a processor badly, and worse the faster it multiplies large ones.

    Args:
        factor: the smaller size of the factors.
        pairs: sandwiches.
        flops: of a token.
        blade: whether the basis is changed before and after.
    """
    waste = 1 + 400 / factor if tiled else 1 + 50 / factor + 500 / factor**2
    calls = 20 + 26 * (pairs - 1)
    basis = 40 + 0.01 * (in_features + out_features) * tokens if blade else 0
    return flops * waste * tokens / (TILED_RATE if tiled else RATE) + calls + basis
