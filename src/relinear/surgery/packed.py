"""Store every matrix of a checkpoint, of any operator, as integers of a few bits, and load it as floats."""

# Legend: S matrices of a stack, O rows, I inputs, B bits, K groups of a row

from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any

import torch
from safetensors.torch import save
from torch import Tensor, nn
from transformers.core_model_loading import ConversionOps

from relinear.contract.config import IntRange, check_value
from relinear.contract.input_checks import check_finite
from relinear.contract.module_state import eval_mode
from relinear.contract.operator import named_operators
from relinear.functional.quantized import dequantized, group_count, pack, packed_width
from relinear.functional.rounding import gptq, nearest_grid, round_to_nearest, shrunk
from relinear.hf.peft_models import unwrapped

#: neighbouring inputs that share a scale and a zero point
GROUP = 64
#: suffix of the tensor with a parameter's integers, scales and zero points; one tensor, as each name takes 100 bytes
SUFFIX = ".packed"
#: share by which moments are shrunk towards their diagonals
_SHRINKAGE = 0.05
#: bytes of a file that is not built in memory to learn its size, as a search of sizes meets models far too large
_MAX_BUILT_BYTES = 2**30


def packed_shape(shape: tuple[int, ...], bits: int) -> tuple[int, int]:
    """Return the shape (rows, bytes) of a stored parameter (..., O, I): each row has codes, K scales, K zero points."""
    return torch.Size(shape[:-1]).numel(), packed_width(shape[-1], bits) + 3 * group_count(shape[-1], GROUP)


def gradient_moments(model: nn.Module, samples: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return the sum of G^T G (S, I, I) over samples for every matrix (..., O, I), by name; G is a sample's gradient.

    For y = x W^T the gradient is a sum of products of output gradients and inputs, so G^T G is a second moment of the
    inputs, weighted by their effect on the loss. It works for a matrix of any operator. (It is the right factor of
    Shampoo, Gupta et al. 2018.)

    Args:
        model: returns ``loss`` for a sample.
        samples: batches, each of which is one sample.
    """
    matrices = {name: p for name, p in model.named_parameters() if p.ndim > 1 and p.requires_grad}
    moments = {n: torch.zeros(p[..., 0, 0].numel(), *p.shape[-1:] * 2, device=p.device) for n, p in matrices.items()}
    with eval_mode(model), torch.enable_grad():
        for sample in samples:
            gradients = torch.autograd.grad(model(**sample)["loss"], list(matrices.values()), allow_unused=True)
            for moment, gradient in zip(moments.values(), gradients, strict=True):
                if gradient is not None:
                    stack = gradient.reshape(-1, *gradient.shape[-2:]).float()
                    moment += stack.mT @ stack
    return moments


@torch.no_grad()
def pack_parameter(value: Tensor, bits: int, moments: Tensor | None = None) -> Tensor:
    """Round a parameter (..., O, I) to 2^B values per group, and return it as bytes (rows, bytes).

    Args:
        value: the parameter, of finite numbers.
        bits: B.
        moments: (S, I, I), with which GPTQ lets errors compensate each other; None rounds to nearest.
    """
    if moments is not None and value.ndim > 2:
        matrices = zip(value.reshape(-1, *value.shape[-2:]), moments, strict=True)
        return torch.cat([pack_parameter(matrix, bits, moment[None]) for matrix, moment in matrices])
    rows = value.float().flatten(0, -2)
    # a matrix that only training uses has no gradient, so its moments are zero
    moment = None if moments is None or not bool(moments.any()) else shrunk(moments[0], _SHRINKAGE)
    grid = nearest_grid(rows, bits, GROUP, symmetric=False, importance=None if moment is None else moment.diagonal())
    codes = round_to_nearest(rows, grid, GROUP) if moment is None else gptq(rows, grid, GROUP, moment)
    scales, zeros = grid.scale.bfloat16().view(torch.uint8), (grid.zero * 2 ** (8 - bits)).to(torch.uint8)
    return torch.cat([pack(codes, bits), scales, zeros], 1)


def unpack_parameter(stored: Tensor, bits: int, shape: tuple[int, ...]) -> Tensor:
    """Return the parameter of ``shape`` in float32, which represents its values exactly."""
    inputs, groups = shape[-1], group_count(shape[-1], GROUP)
    codes, scales, zeros = stored.split([packed_width(inputs, bits), 2 * groups, groups], 1)
    scales = scales.clone(memory_format=torch.contiguous_format).view(torch.bfloat16).float()  # a view needs contiguity
    return dequantized(codes, scales, zeros, bits, GROUP, inputs).contiguous().view(shape)


def _checkpoint_tensors(model: nn.Module, bits: int) -> Iterator[tuple[str, Tensor, bool]]:
    """Yield (name, value, whether to pack it) for the tensors of a checkpoint, tied parameters once.

    Matrices and stacks of matrices are packed, except operators' parameters without a fan-in (bivectors, gains) and
    those that would not become smaller.
    """
    tied = getattr(model, "all_tied_weights_keys", {})
    named = sorted(model.named_parameters(remove_duplicate=False), key=lambda item: item[0] in tied)
    first = {parameter: name for name, parameter in reversed(named)}
    names = set(first.values())
    without_fan_in = {
        f"{name}.{key}"
        for name, operator in named_operators(model)
        for key, role in operator.param_roles().items()
        if role.fan_in is None
    }
    state = model.state_dict()
    for name in state.keys() - ({name for name, _ in named} - names):
        value = state[name]
        is_matrix = name in names - without_fan_in and value.is_floating_point() and value.ndim > 1
        yield name, value, is_matrix and packed_shape(value.shape, bits)[1] < 2 * value.shape[-1]


def packed_state(model: nn.Module, bits: int, moments: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint of ``model`` in ``bits`` bits; floats that are not packed have 16 bits.

    ``moments`` come from ``gradient_moments``; matrices without moments are rounded to nearest.

    Raises:
        ValueError: if a weight is NaN or infinite, with its name.
    """
    check_finite(model)
    state: dict[str, Tensor] = {}
    for name, value, is_packed in _checkpoint_tensors(model, bits):
        moment = (moments or {}).get(name)
        state |= {name + SUFFIX: pack_parameter(value, bits, moment)} if is_packed else {name: _half(value)}
    return state


def _half(value: Tensor) -> Tensor:
    """Return ``value`` in float16, or in bfloat16, which is coarser, if it exceeds float16's range."""
    if not value.is_floating_point() or value.element_size() <= 2:
        return value
    half = value.half()
    return half if value.is_meta or bool(torch.isfinite(half).all()) else value.bfloat16()


def packed_bytes(model: nn.Module, bits: int) -> int:
    """Return the size in bytes of ``model.safetensors`` in ``bits`` bits; ``model`` may be on the meta device.

    From ``_MAX_BUILT_BYTES`` on, the size is without the header, which is small then.
    """
    empty = {}
    for name, value, is_packed in _checkpoint_tensors(model, bits):
        shape, dtype = (packed_shape(value.shape, bits), torch.uint8) if is_packed else (value.shape, None)
        dtype = dtype or _half(value.to("meta")).dtype
        empty[name + SUFFIX * is_packed] = torch.empty(shape, dtype=dtype, device="meta")
    if (size := sum(tensor.nbytes for tensor in empty.values())) >= _MAX_BUILT_BYTES:
        return size
    return len(save({name: torch.empty_like(tensor, device="cpu") for name, tensor in empty.items()}, {"format": "pt"}))


class Unpack(ConversionOps):
    """Unpack parameters while transformers loads a checkpoint.

    Args:
        bits: bits of the packed integers.
    """

    def __init__(self, bits: int) -> None:
        self.bits = bits

    def convert(self, input_dict: Any, *patterns: Any, full_layer_name: str = "", model: Any = None, **kw: Any) -> Any:
        """Return the one parameter in ``input_dict`` under its full name, in its dtype in ``model``."""
        ((stored,),) = input_dict.values()
        parameter = model.get_parameter(full_layer_name)
        return {full_layer_name: unpack_parameter(stored, self.bits, parameter.shape).to(parameter.dtype)}


def check_packable(model: Any, bits: Any) -> None:
    """Raise ValueError unless ``bits`` is 2 to 8, or if ``model`` is a PEFT model, which only saves its adapter."""
    check_value("bits", bits, Annotated[int, IntRange(2, 8)])
    if unwrapped(model) is not model or getattr(model, "_hf_peft_config_loaded", False):  # by model.add_adapter
        raise ValueError("bits= stores a whole model, but a PEFT model saves only its adapter: merge it first")
