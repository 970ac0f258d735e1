"""Choose the implementation of a kernel: the first one that supports the call runs.

A kernel has the name and the signature of its reference in ``functional``, and several implementations: Triton, C++,
torch's operations in another order, or the reference itself. Each says which calls it does not support, and why.
``RELINEAR_LOG=kernels`` in the environment (or the logger ``relinear.kernels`` at DEBUG) logs once per shape which one
runs, and why those before it do not.
"""

import functools
import inspect
import logging
import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad

from relinear.system.machine import fast_bfloat16

Kernel = TypeVar("Kernel", bound=Callable[..., Any])
Meaning = TypeVar("Meaning")

LOG = logging.getLogger("relinear.kernels")
_logged: set[tuple] = set()

#: tensor classes without custom behaviour
PLAIN = (Tensor, torch.nn.Parameter)


def environment_choice(variable: str, value: str, meanings: Mapping[str, Meaning]) -> Meaning:
    """Return the meaning of ``value``, the value of an environment variable, or "" if it is not set.

    Raises:
        ValueError: if it is not a key of ``meanings``.
    """
    if value not in meanings:
        choices = ", ".join(repr(choice) for choice in meanings if choice)
        raise ValueError(f"{variable}={value!r} in the environment, expected one of {choices}: change or unset it")
    return meanings[value]


if environment_choice(
    "RELINEAR_LOG", os.environ.get("RELINEAR_LOG", ""), {"": False, "0": False, "kernels": True, "forms": True}
):
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
    LOG.addHandler(handler)
    LOG.setLevel(logging.DEBUG)
    LOG.propagate = False


class Call:
    """Describe one call of a kernel to its implementations; attributes are computed when read, as few are needed.

    Attributes:
        arguments: the kernel's arguments, in order.
        x: the first argument.
        device: type of x's device.
        size: number of elements of x.
        autocast: whether autocast is on, so that products may run in another dtype than x's.
        dtype: the dtype in which products of x run.
        grad: whether gradients are recorded.
        compiled: whether a compiler is tracing, which fuses torch's operations with those around them.
        emulated: whether x is in bfloat16 on a processor without it, where products take longer than in float32.
        transformed: ``is_transformed``.
        opaque: why operations that torch cannot see are not allowed: compilers, or ``transformed``; "" if they are.
        plain: ``is_untraced_cpu``.
    """

    def __init__(self, *arguments: Any) -> None:
        x: Tensor = arguments[0]
        self.arguments, self.x = arguments, x
        self.device = "cpu" if x.is_cpu else x.device.type  # ``is_cpu`` is faster than ``device``
        self.size = x.numel()
        self.compiled = torch.compiler.is_compiling()

    @property
    def autocast(self) -> bool:
        return self.device != "meta" and torch.is_autocast_enabled(self.device)

    @property
    def dtype(self) -> torch.dtype:
        lowers = self.autocast and self.x.dtype != torch.float64
        return torch.get_autocast_dtype(self.device) if lowers else self.x.dtype

    @property
    def grad(self) -> bool:
        return torch.is_grad_enabled()

    @property
    def emulated(self) -> bool:
        return self.x.dtype == torch.bfloat16 and self.device == "cpu" and not (self.compiled or fast_bfloat16())

    @property
    def transformed(self) -> bool:
        return is_transformed(self.x)

    @property
    def plain(self) -> bool:
        return self.device == "cpu" and not is_traced(self.x)

    @property
    def opaque(self) -> str:
        if self.compiled:
            return "torch.compile fuses the reference"
        return "torch.func or a derivative in forward mode" if is_transformed(self.x) else ""

    @property
    def rows(self) -> int:
        """Return the number of rows of x (..., I)."""
        return self.size // self.x.shape[-1] if self.size else 0


class Implementation(NamedTuple):
    """One way to compute a kernel.

    Attributes:
        name: shown in the log.
        unsupported_reason: returns "" if ``run`` supports the call, else why not.
        run: takes the kernel's arguments.
    """

    name: str
    unsupported_reason: Callable[[Call], str]
    run: Callable[..., Any]


def dispatch(*implementations: Implementation, otherwise: str = "torch's operations") -> Callable[[Kernel], Kernel]:
    """Decorate a kernel: the first implementation that supports the call runs, or the decorated function itself.

    Args:
        implementations: tried in this order.
        otherwise: the name of the decorated function in the log.
    """

    def decorate(kernel: Kernel) -> Kernel:
        signature = inspect.signature(kernel)
        last = Implementation(otherwise, lambda call: "", kernel)
        count = len(signature.parameters)
        part = " ".join(dict.fromkeys((kernel.__module__.rpartition(".")[2], kernel.__name__.strip("_"))))

        @functools.wraps(kernel)
        def run(*arguments: Any, **keywords: Any) -> Any:
            if len(arguments) != count:
                call_of_kernel = signature.bind(*arguments, **keywords)
                call_of_kernel.apply_defaults()
                arguments = call_of_kernel.args
            call, chosen = Call(*arguments), last
            for implementation in implementations:
                if not implementation.unsupported_reason(call):
                    chosen = implementation
                    break
            # not ``isEnabledFor``, which also asks parent loggers: every forward pass runs this
            if not call.compiled and LOG.level:
                before = implementations[: implementations.index(chosen)] if chosen is not last else implementations
                log_choice(part, chosen.name, shape_of(call.x), {i.name: i.unsupported_reason(call) for i in before})
            return chosen.run(*arguments)

        return cast("Kernel", run)

    return decorate


def shape_of(x: Tensor) -> str:
    """Format shape, dtype and device of x for the log."""
    shape = " x ".join(str(size) for size in x.shape) or "a number"
    return f"{shape}, {str(x.dtype).removeprefix('torch.')}, {x.device.type}"


def log_choice(kernel: str, implementation: str, shape: str, unsupported: dict[str, str]) -> None:
    """Log once, if logging is on, the implementation of ``kernel`` that runs and why others do not."""
    line = kernel, shape, implementation, *unsupported.items()
    if LOG.level and line not in _logged and LOG.isEnabledFor(logging.DEBUG):
        _logged.add(line)
        reasons = "".join(f"; not {name}: {reason}" for name, reason in unsupported.items() if reason)
        LOG.debug("%s (%s): %s%s", kernel, shape, implementation, reasons)


def is_transformed(*tensors: Tensor | None) -> bool:
    """Return whether torch transforms operations, which no kernel outside of torch supports.

    Transforms are ``torch.func`` (``vmap``, ``jvp``, ``grad``, ...), derivatives in forward mode, and batches of
    gradients (``is_grads_batched``). Compilers are handled by the kernels.
    """
    if torch.compiler.is_compiling():
        return False
    if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        return True
    for tensor in tensors:  # noqa: SIM110  # a generator costs a call per tensor, in every backward pass
        if tensor is not None and torch._C._functorch.is_legacy_batchedtensor(tensor):
            return True
    return False


def is_traced(x: Tensor) -> bool:
    """Return whether a compiler, a dispatch mode or a tensor subclass sees or replaces operations on x."""
    if torch.compiler.is_compiling() or type(x) not in PLAIN:
        return True
    return bool(torch._C._len_torch_dispatch_stack()) or torch._C._get_tracing_state() is not None


def is_untraced_cpu(x: Tensor) -> bool:
    """Return whether x is a tensor on a CPU, outside of tracing, fake tensors and dispatch modes."""
    return x.device.type == "cpu" and not is_traced(x)
