"""Say which calls the Triton kernels for NVIDIA GPUs support; each operator's kernels are in a file.

Kernels are imported at the first call with a CUDA tensor. Every kernel is an opaque ``torch.library`` operator with a
fake implementation, and a backward if it is used in training, so that ``torch.compile(fullgraph=True)`` accepts it.
Tile sizes are not tuned.
"""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Callable

import torch
from torch import Tensor

from relinear.kernels.implementations import Call, environment_choice
from relinear.kernels.kernel_selfcheck import failed_check

#: where the kernels run
DEVICE = "cuda"

#: oldest GPUs for which the Triton kernels are compiled: their tensor cores support bfloat16 and TF32
OLDEST_CAPABILITY = (8, 0)

#: whether Triton kernels can be used; computed at import, as a compiler cannot trace a search for packages
HAS_TRITON = importlib.util.find_spec("triton") is not None and torch.version.hip is None

#: value of RELINEAR_TRITON -> ``MODE``
MODES = {"": "check", "1": "check", "check": "check", "force": "force", "0": "off", "off": "off"}

#: Triton kernels run once they are checked ("check"), unchecked ("force"), or never ("off")
MODE = environment_choice("RELINEAR_TRITON", os.environ.get("RELINEAR_TRITON", ""), MODES)


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
    """Return why an operator's Triton kernel does not run; "" if it does.

    It needs an NVIDIA GPU and half precision (of all tensors, or autocast's). It must be faster than torch for this
    size (results/gpu) and pass its check (``kernel_selfcheck``). ``RELINEAR_TRITON`` in the environment, read at
    import, is ``0`` for no kernels, or ``force`` for kernels without checks, also where they are slower.

    Args:
        call: the kernel's call.
        kind: the kernel's key in ``samples.SAMPLES``.
        tensors: number of leading arguments that must be in half precision.
        outputs: returns the number of outputs per row of the call.
        most: multiplications of a dense layer of this size, below which the kernel is faster.
        most_in_training: the same for a training step; ``most`` by default.
        training: whether the kernel has a backward pass.
    """
    if call.device != DEVICE:
        return "not on an NVIDIA GPU"
    reason = _inputs_unsupported(call, tensors)
    if reason:
        return reason
    if not HAS_TRITON:
        return "no triton for NVIDIA GPUs"
    if MODE == "off":
        return "RELINEAR_TRITON=0"
    if call.grad and not training:
        return "gradients are recorded"
    if MODE == "force":
        return ""
    bound = most if most_in_training is None or not call.grad else most_in_training
    if call.size * outputs(call) >= bound:
        return "products that torch's library computes faster"
    return failed_check(kind, str(call.x.device), call.dtype)


def _inputs_unsupported(call: Call, tensors: int) -> str:
    """Return why no Triton kernel supports the inputs; "" if some may."""
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
