"""What is known of the processor without torch: its name, its memory, what it computes in hardware."""

import functools
import os
import platform
from pathlib import Path
from typing import Any


@functools.cache
def cpu_facts() -> dict[str, str]:
    """What Linux says of the first processor, by name; nothing elsewhere."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    lines = (line.partition(":") for line in text.strip().partition("\n\n")[0].splitlines())
    return {name.strip(): value.strip() for name, _, value in lines}


def cpu_features() -> frozenset[str]:
    """The instruction sets of the processor as Linux names them (``avx2``, ``amx_bf16``, ...); empty elsewhere."""
    facts = cpu_facts()
    return frozenset((facts.get("flags") or facts.get("Features") or "").split())


def multiplies_bfloat16() -> bool:
    """Whether the processor multiplies bfloat16 matrices in hardware (AMX or AVX-512), not by emulation."""
    return bool(cpu_features() & {"amx_bf16", "avx512_bf16"}) or platform.machine() == "arm64"


def describe_processor() -> dict[str, Any]:
    """Its name, cores, vector extensions and memory as JSON values."""
    import psutil

    extensions = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
    return {
        "processor": cpu_facts().get("model name") or platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "extensions": [flag for flag in extensions if flag in cpu_features()],
        "memory_bytes": psutil.virtual_memory().total,
    }
