"""What this machine can do at best, measured: matrix products and copies. An operator's floor follows from it."""

import dataclasses

import torch

from relinear.system.timing import interleave


@dataclasses.dataclass(frozen=True)
class Roofline:
    """Rates of one device and dtype.

    gemm: FLOP/s of a large square matrix product.
    copy: bytes/s of a large copy, reads and writes both counted.
    """

    dtype: str
    gemm: float
    copy: float

    def floor_seconds(self, flops: float, bytes_moved: float) -> float:
        """Return the least time for this many FLOPs and bytes: whichever of the two takes longer."""
        return max(flops / self.gemm, bytes_moved / self.copy)


@torch.no_grad()
def measure_roofline(dtype: torch.dtype, device: torch.device | str = "cpu", size: int = 2048) -> Roofline:
    """Measure both rates with inputs that are not zero (zeros can be faster, and denormals slower)."""
    a = torch.randn(size, size, device=device, dtype=dtype)
    b = torch.randn(size, size, device=device, dtype=dtype)
    out = torch.empty_like(a)
    big = torch.randn(64 * 2**20 // a.element_size(), device=device).to(dtype)
    target = torch.empty_like(big)
    timings = interleave(
        {"gemm": lambda: torch.mm(a, b, out=out), "copy": lambda: target.copy_(big)}, "gemm", rounds=7, min_seconds=0.1
    )
    moved = 2 * big.numel() * big.element_size()
    return Roofline(
        str(dtype).removeprefix("torch."), 2 * size**3 / timings["gemm"].seconds, moved / timings["copy"].seconds
    )
