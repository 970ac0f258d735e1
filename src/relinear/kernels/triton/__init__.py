"""Choose Triton kernels for NVIDIA GPUs, one file per operator, for the calls they support.

No kernel is imported before a CUDA tensor asks for it. Every kernel is an opaque ``torch.library`` operator with a
shape rule, and a backward if it is taken in training, so that it goes through ``torch.compile(fullgraph=True)``.
Tile sizes are untuned.
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
import os
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from relinear.kernels.implementations import Call, meant
from relinear.kernels.kernel_selfcheck import against_unseen

#: where the kernels run
DEVICE = "cuda"

#: the oldest GPU that the Triton kernels are compiled for: its tensor cores take bfloat16 and single precision
OLDEST_CAPABILITY = (8, 0)

#: whether there are Triton kernels to choose: settled once, as a compiler cannot look for packages
HAS_TRITON = importlib.util.find_spec("triton") is not None and torch.version.hip is None

#: values of RELINEAR_TRITON, and what they say of Triton kernels
TRITON_MODES = {"": "check", "1": "check", "check": "check", "force": "force", "0": "off", "off": "off"}


_triton_mode = meant("RELINEAR_TRITON", os.environ.get("RELINEAR_TRITON", ""), TRITON_MODES)


@contextlib.contextmanager
def triton_kernels(mode: str) -> Iterator[None]:
    """Use Triton kernels within the block once they are checked ("check"), unchecked ("force"), or never ("off").

    Raises:
        ValueError: for another mode.
    """
    global _triton_mode
    before, _triton_mode = _triton_mode, meant("RELINEAR_TRITON", mode, TRITON_MODES)
    try:
        yield
    finally:
        _triton_mode = before


def unsupported_reason(
    call: Call,
    kind: str,
    tensors: int,
    outputs: Callable[[Call], int],
    *,
    most: float = math.inf,
    most_in_training: float | None = None,
    training: bool = True,
) -> str:
    """Say why an operator's Triton kernel does not run: it needs an NVIDIA GPU and half precision (of all tensors, or
    autocast's), where it was faster (results/gpu) and has been seen to be right (``kernel_selfcheck``).

    ``RELINEAR_TRITON`` in the environment, read at import, is ``0`` for no kernels, or ``force`` for kernels that
    nobody has checked, also where they are slower.

    Args:
        call: of the kernel.
        kind: of the kernel, by which it is checked.
        tensors: how many of the arguments, from the first on, are to be in half precision.
        outputs: of a row of the call.
        most: multiplications of a dense layer below which it was.
        most_in_training: the same of a training step; ``most`` by default.
        training: whether it has a backward pass.
    """
    if call.device != DEVICE:
        return "not on an NVIDIA GPU"
    reason = _inputs_unsupported(call, tensors)
    if reason:
        return reason
    if not HAS_TRITON:
        return "no triton for NVIDIA GPUs"
    if _triton_mode == "off":
        return "RELINEAR_TRITON=0"
    if call.grad and not training:
        return "gradients are recorded"
    if _triton_mode == "force":
        return ""
    bound = most if most_in_training is None or not call.grad else most_in_training
    if call.size * outputs(call) >= bound:
        return "products that torch's library takes faster"
    return against_unseen(kind, str(call.x.device), call.dtype)


def _inputs_unsupported(call: Call, tensors: int) -> str:
    """Return why no Triton kernel, whatever it computes, takes the inputs."""
    if not call.size:
        return "no numbers"
    if call.transformed:
        return call.opaque
    dtypes = [t.dtype for t in call.arguments[:tensors] if isinstance(t, Tensor)]
    if call.autocast and torch.float64 not in dtypes:
        dtypes = [call.dtype]
    if dtypes[0] not in (torch.float16, torch.bfloat16) or any(dtype != dtypes[0] for dtype in dtypes):
        return "not all in one half precision"
    old = torch.cuda.get_device_capability(call.x.device) < OLDEST_CAPABILITY
    return "the GPU is older than compute capability 8.0" if old else ""
