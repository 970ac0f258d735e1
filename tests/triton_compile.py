"""Compiles Triton kernels to machine code without a GPU: every launch is recorded with its arguments and compiled.

Run by ``test_triton.py`` in a process of its own, as a program: it prints one line a launch.
"""

from __future__ import annotations

import sys

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from triton_cases import CASES, draw

#: shared memory that a block may use on every GPU since sm_80 (sm_86 and sm_89 have the least)
LEAST_SHARED = 99 * 1024
TYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.int32: "i32", torch.int64: "i64"}
OPTIONS = ("num_warps", "num_stages")


def compile_launch(function: JITFunction, args: tuple, kwargs: dict, capability: int) -> None:
    options = {name: kwargs.pop(name) for name in OPTIONS if name in kwargs}
    given = dict(zip(function.arg_names, args, strict=False)) | kwargs
    signature, constants, attributes = {}, {}, {}
    for index, parameter in enumerate(function.params):
        value = given[parameter.name]
        aligned = isinstance(value, Tensor) or (isinstance(value, int) and value % 16 == 0)
        if parameter.is_constexpr or value is None or (isinstance(value, int) and value == 1):
            signature[parameter.name], constants[parameter.name] = "constexpr", value
        elif isinstance(value, Tensor):
            signature[parameter.name] = f"*{TYPES[value.dtype]}"
        else:
            signature[parameter.name] = "fp32" if isinstance(value, float) else "i32"
        if aligned and signature[parameter.name] != "constexpr":
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(function, signature, constants, attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    shared = compiled.metadata.shared
    print(f"{function.__name__} sm_{capability} {next(s for s in signature.values() if s[0] == '*')}: {shared} bytes")
    assert compiled.asm["cubin"]
    assert shared <= LEAST_SHARED, f"{function.__name__} needs {shared} bytes of shared memory"


def main(capability: int, dtype: torch.dtype, names: list[str]) -> None:
    seen = set()

    def record(self, *args, grid, warmup, **kwargs):
        key = self.__name__, str([(type(a), getattr(a, "dtype", a)) for a in args]), str(kwargs)
        if key not in seen:
            seen.add(key)
            compile_launch(self, args, kwargs, capability)

    JITFunction.run = record
    for case in CASES:
        for shapes in case.large if case.name in names or not names else ():
            given = draw(shapes, dtype)
            results = case.fast(*(t.requires_grad_(case.training) if isinstance(t, Tensor) else t for t in given))
            results = results if isinstance(results, tuple) else (results,)
            if case.training:
                sum(r.sum() for r in results if r is not None).backward()
    assert seen


if __name__ == "__main__":
    main(int(sys.argv[1]), getattr(torch, sys.argv[2]), sys.argv[3:])
