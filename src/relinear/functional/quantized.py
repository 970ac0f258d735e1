"""Pack and unpack integers of 2 to 8 bits, compute their values, and convert them to GGUF's blocks."""

# Legend: I in_features, O out_features, B bits, K = ceil(I / group) groups of a row

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

#: codes of a row that are packed together; the remainder of a row forms a shorter block
BLOCK = 64
#: values of the codes of llama.cpp's IQ4_NL, in units of the scale
IQ4_NL = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
#: inputs whose scales are whole multiples of one number in llama.cpp's K types
SUPER = 256


class KType(NamedTuple):
    """Describe one of llama.cpp's K types, Q2_K to Q6_K.

    Attributes:
        group: inputs that share a scale.
        symmetric: whether there are no offsets.
        bits: bits of the integer multiples that scales and offsets are.
        parts: what a block of ``SUPER`` weights stores, in this order: the codes' low bits (2 or 4), their high bits,
            the multiples, the units.
    """

    group: int
    symmetric: bool
    bits: int
    parts: tuple[str, ...]


#: bits of a code -> type
K_TYPES = {
    2: KType(16, False, 4, ("multiples", "low", "units")),
    3: KType(16, True, 6, ("high", "low", "multiples", "units")),
    4: KType(32, False, 6, ("units", "multiples", "low")),
    5: KType(32, False, 6, ("units", "multiples", "high", "low")),
    6: KType(16, True, 8, ("low", "high", "multiples", "units")),
}
#: sizes in bits of the planes into which codes are split, highest first: 3 bits are 2 and 1, 7 are 4, 2 and 1
_PLANES = (8, 4, 2, 1)


def group_count(in_features: int, group: int) -> int:
    """Return K, the number of groups in a row; the last may be shorter."""
    return -(-in_features // group)


def packed_width(in_features: int, bits: int) -> int:
    """Return the bytes of a row of codes: 8 codes take ``bits`` bytes, and rows are padded to a multiple of 8."""
    return -(-in_features // 8) * bits


def _blocks(width: int) -> list[tuple[int, int]]:
    """Divide a row of ``width`` codes, a multiple of 8, into blocks; return pairs (number of blocks, codes in each)."""
    whole, rest = divmod(width, BLOCK)
    return [(count, size) for count, size in ((whole, BLOCK), (1, rest)) if count and size]


def pack(codes: Tensor, bits: int) -> Tensor:
    """Return codes (O, I), integers below 2^B, as bytes (O, ceil(I / 8) B).

    A block of n codes is stored as planes of 8, 4, 2 or 1 bits, one after another, whose sizes add up to B. A byte of a
    plane of p bits holds codes that are n p / 8 apart, the first in its lowest bits. A byte of a plane of single bits
    holds 8 neighbours.
    """
    codes = torch.nn.functional.pad(codes.to(torch.uint8), (0, -codes.shape[1] % 8))
    packed, start = [], 0
    for count, size in _blocks(codes.shape[1]):
        block = codes[:, start : start + count * size].unflatten(1, (count, size))
        start += count * size
        shift = bits
        planes = []
        for plane in (p for p in _PLANES if bits & p):
            shift -= plane
            field = (block >> shift) & ((1 << plane) - 1)
            parts = field.unflatten(2, (-1, 8)).mT if plane == 1 else field.unflatten(2, (8 // plane, -1))
            shifts = torch.arange(0, 8, plane, dtype=torch.uint8, device=codes.device)
            planes.append((parts << shifts[:, None]).sum(2, dtype=torch.uint8))
        packed.append(torch.cat(planes, 2).flatten(1))
    return torch.cat(packed, 1)


def unpack(packed: Tensor, bits: int, in_features: int) -> Tensor:
    """Return the codes (O, I) that were packed into ``packed``, as uint8."""
    rows, start = [], 0
    for count, size in _blocks(-(-in_features // 8) * 8):
        block = packed[:, start : start + count * size * bits // 8].unflatten(1, (count, -1))
        start += count * size * bits // 8
        offset = 0
        codes = 0
        for plane in (p for p in _PLANES if bits & p):
            plane_bytes = block[:, :, offset : offset + size * plane // 8]
            offset += size * plane // 8
            shifts = torch.arange(0, 8, plane, dtype=torch.uint8, device=packed.device)
            parts = (plane_bytes.unsqueeze(2) >> shifts[:, None]) & ((1 << plane) - 1)
            codes = (codes << plane) | (parts.mT if plane == 1 else parts).flatten(2)
        rows.append(codes.flatten(1))  # type: ignore[attr-defined]
    return torch.cat(rows, 1)[:, :in_features]


def dequantized(
    packed: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    bits: int,
    group: int,
    in_features: int,
    levels: Tensor | None = None,
) -> Tensor:
    """Return the matrix (O, I) in the scales' dtype: scale times (code - zero point), in every group.

    Zero points are in steps of 2^(B - 8), so that a byte represents fractions of a code. In these steps all differences
    are whole numbers below 2^8, which are exact in bfloat16, too.

    Args:
        packed: bytes (O, ceil(I / 8) B), from ``pack``.
        scales: (O, K), of either sign.
        zeros: (O, K) uint8; None for 128, the middle.
        bits: B, 2 to 8.
        group: neighbouring inputs that share a scale.
        in_features: I.
        levels: values of the codes, in units of the scale; None for whole numbers minus the zero point.
    """
    codes = unpack(packed, bits, in_features)
    steps = codes.to(torch.int16) << (8 - bits) if levels is None else levels[codes.int()]
    width = scales.shape[1] * group
    steps = torch.nn.functional.pad(steps, (0, width - in_features)).unflatten(1, (-1, group))
    unit = scales
    if levels is None:
        steps = steps - (128 if zeros is None else zeros.to(torch.int16).unsqueeze(2))
        unit = scales * 2.0 ** (bits - 8)
    return (steps.to(scales.dtype) * unit.unsqueeze(2)).flatten(1)[:, :in_features]


def gguf_rows(packed: Tensor, scales: Tensor, zeros: Tensor | None, bits: int, group: int, in_features: int) -> Tensor:
    """Return the rows (O, bytes) of ``dequantized``'s matrix in GGUF's blocks of 32 inputs, with unchanged codes.

    Without zero points the blocks are Q4_0 (or IQ4_NL), Q5_0 or Q8_0, the smallest that holds B bits. With zero points
    they are Q4_1 or Q5_1, which add an offset, -scale zero. Scales and offsets are rounded to half precision.
    """
    blocks = in_features // 32
    codes = unpack(packed, bits, in_features).to(torch.int16).unflatten(1, (blocks, 32))

    def per_block(values: Tensor) -> Tensor:
        return values.float().repeat_interleave(group // 32, 1)[:, :blocks, None]

    stored_bits = next(width for width in (4, 5, 8) if bits <= width)
    parts = [per_block(scales).half().view(torch.uint8)]
    if zeros is None:
        codes += (2 ** (stored_bits - 1) if stored_bits < 8 else 0) - 2 ** (bits - 1)
    else:
        parts.append((per_block(zeros) * per_block(scales) * -(2.0 ** (bits - 8))).half().view(torch.uint8))
    if stored_bits == 5:
        shifts = torch.arange(8, dtype=torch.int16, device=codes.device)
        parts.append(((codes >> 4).unflatten(2, (4, 8)) << shifts).sum(3).to(torch.uint8))
    low, high = (codes & 15).split(16, 2)
    parts.append(codes.to(torch.int8).view(torch.uint8) if stored_bits == 8 else (low | high << 4).to(torch.uint8))
    return torch.cat(parts, 2).flatten(1)


def k_dequantized(
    packed: Tensor, units: Tensor, multiples: Tensor, offsets: Tensor | None, bits: int, in_features: int
) -> Tensor:
    """Return the matrix (O, I) of a K type, computed in float32 as llama.cpp does, in the dtype of ``units``.

    Args:
        packed: bytes (O, I B / 8), from ``pack``.
        units: (O, U) of scales, U = I / ``SUPER``; with offsets (O, 2 U), the units of offsets after those of scales.
        multiples: (O, K) bytes, the scales in their units; if these have a sign, plus half of the range.
        offsets: (O, K) bytes, in their units; None if the middle code means zero.
        bits: B, a key of ``K_TYPES``.
        in_features: I.
    """
    kind = K_TYPES[bits]
    wide = torch.promote_types(units.dtype, torch.float32)
    codes = unpack(packed, bits, in_features).to(wide).unflatten(1, (-1, kind.group))
    group_units = units.to(wide).repeat_interleave(SUPER // kind.group, 1)
    groups = multiples.shape[1]
    middle = 2.0 ** (kind.bits - 1) if kind.symmetric else 0.0
    scales = (group_units[:, :groups] * (multiples - middle)).unsqueeze(2)
    if offsets is None:
        values = (codes - 2.0 ** (bits - 1)) * scales
    else:
        values = codes * scales - (group_units[:, groups:] * offsets).unsqueeze(2)
    return values.flatten(1).to(units.dtype)


def gguf_k_rows(packed: Tensor, units: Tensor, multiples: Tensor, offsets: Tensor | None, bits: int) -> Tensor:
    """Return the rows (O, bytes) of ``k_dequantized``'s matrix in the blocks of its K type, with unchanged codes."""
    kind = K_TYPES[bits]
    blocks = multiples.shape[1] * K_TYPES[bits].group // SUPER
    codes = unpack(packed, bits, blocks * SUPER).unflatten(1, (blocks, SUPER))
    scale, *offset = (t.unflatten(1, (blocks, -1)) for t in (multiples, offsets) if t is not None)

    def fields(values: Tensor, width: int, stride: int) -> Tensor:
        """Pack the lowest ``width`` bits of values that are ``stride`` apart into bytes, the first one lowest."""
        parts = (values & (1 << width) - 1).unflatten(2, (-1, 8 // width, stride))
        shifts = torch.arange(0, 8, width, dtype=torch.uint8, device=values.device)
        return (parts << shifts[:, None]).sum(3, dtype=torch.uint8).flatten(2)

    low = 4 if bits >= 4 else 2
    parts = {
        "low": fields(codes, low, 64 if bits == 6 else 32),
        "high": fields(codes >> low, max(1, bits - low), 32),
        "units": torch.stack(units.half().split(blocks, 1), 2).view(torch.uint8),
    }
    if bits == 2:
        parts["multiples"] = scale | offset[0] << 4
    elif bits == 3:
        parts["multiples"] = torch.cat([fields(scale, 4, 8), fields(scale >> 4, 2, 4)], 2)
    elif bits == 6:
        parts["multiples"] = scale ^ 128  # in two's complement
    else:
        both = torch.stack([scale, offset[0]], 2)
        first, last = both.split(4, 3)
        parts["multiples"] = torch.cat([(first | last >> 4 << 6).flatten(2), fields(last.flatten(2), 4, 4)], 2)
    return torch.cat([parts[part] for part in kind.parts], 2).flatten(1)


def words(codes: Tensor, bits: int) -> Tensor:
    """Return codes (O, I) below 2^B, B being 4 or 8, as int32 (O, ceil(I B / 32)), the first in the lowest bits."""
    codes = torch.nn.functional.pad(codes.to(torch.uint8), (0, -codes.shape[1] % (32 // bits)))
    packed = codes if bits == 8 else codes[:, ::2] | codes[:, 1::2] << 4
    return packed.flatten().view(torch.int32).unflatten(0, (len(codes), -1))


def quantized(
    x: Tensor, packed: Tensor, scales: Tensor, zeros: Tensor | None, bits: int, group: int, bias: Tensor | None = None
) -> Tensor:
    """Return y = x W^T + bias with the matrix W of ``dequantized``.

    Args:
        x: (..., I).
        packed, scales, zeros, bits, group: as for ``dequantized``.
        bias: (O,) or None.
    """
    weight = dequantized(packed, scales, zeros, bits, group, x.shape[-1])
    return torch.nn.functional.linear(x, weight, bias)
