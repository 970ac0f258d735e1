"""Kernels in C++ for CPUs, built at their first use (``build``); ``kernels.choice.against_native`` says where they run.

Where no C++ compiler is found, or building fails (one warning), or ``RELINEAR_COMPILE_KERNELS=0`` is in the environment
when they are first wanted, twins take torch's operations.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = [
    "FEWEST_CHAIN_WEIGHTS",
    "FEWEST_NATIVE_ENTRIES",
    "FEWEST_NETWORK_ENTRIES",
    "LARGEST_NATIVE_RANK",
    "MOST_FEW_ROWS",
    "kernels",
]

#: entries from which the kernels are used: below, an eager chain takes less time than a thread's start saves
FEWEST_NATIVE_ENTRIES = 1 << 17
#: the same for networks of rotors, of which torch's operations are many
FEWEST_NETWORK_ENTRIES = 1 << 13
#: the largest rank of gates that ``modulate`` takes
LARGEST_NATIVE_RANK = 16
#: rows up to which the kernels of ``few_rows.cpp`` are faster than torch's matrix products, and how many weights a
#: product of two matrices takes for that; measured by results/speed/few_rows.py
MOST_FEW_ROWS = {torch.float32: 8, torch.bfloat16: 1}
FEWEST_CHAIN_WEIGHTS = 1 << 17


def kernels() -> Any:
    """The kernels, as ``torch.ops`` (their C++ source says what each does); only where ``choice`` has nothing against
    them."""
    return torch.ops.relinear_cpu
