"""Tensor parallelism: split the parameters of operators over ranks (``Operator.tensor_parallel``)."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from relinear.contract.auxiliary_mixin import AuxiliaryLossMixin
from relinear.contract.operator import Operator, named_operators


def tensor_parallel_plan(model: nn.Module) -> dict[str, ParallelStyle]:
    """Return a style for every operator, for ``torch.distributed.tensor.parallel.parallelize_module``.

    Operators with nothing to split are left out: rotors (all ranks need their few angles) and ``Quantized`` (its codes
    are a buffer).
    """
    return {
        name: OperatorParallel() for name, operator in named_operators(model) if next(split_parameters(operator), None)
    }


def plan_for_transformers_(model: Any) -> None:
    """Set the ``tp_plan`` of ``from_pretrained`` to split only the operators; other layers are whole on every rank."""
    from transformers.distributed import tensor_parallel as transformers_parallel

    class Style(transformers_parallel.TensorParallelLayer):  # a name in the plan may match layers that are no operators
        def install_forward(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
            return OperatorParallel()._apply(module, mesh) if isinstance(module, Operator) else module

    transformers_parallel.ALL_PARALLEL_STYLES.register("relinear", Style())  # type: ignore[arg-type]
    names = map(transformers_parallel.replace_layer_number_by_wildcard, tensor_parallel_plan(model))
    model._tp_plan = dict.fromkeys(names, "relinear")


def split_parameters(operator: nn.Module) -> Iterator[tuple[str, int]]:
    """Yield name and dimension of every split parameter of ``operator``, and of operators inside it."""
    for prefix, part in operator.named_modules():
        for key, dim in getattr(part, "tensor_parallel", {}).items():
            for name, parameter in part.named_parameters():
                if (name == key or name.startswith(f"{key}.")) and parameter.ndim > dim:
                    yield f"{prefix}.{name}" if prefix else name, dim


class OperatorParallel(ParallelStyle):
    """Split an operator by ``Operator.tensor_parallel``: parameters become ``DTensor``s, inputs and outputs stay whole.

    A size that the number of ranks does not divide is not split. Use the same seed on all ranks of the mesh, so that
    noise is the same on each.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        ranks = device_mesh.size()
        split = dict(split_parameters(module))
        for name, parameter in list(module.named_parameters()):
            dim = split.get(name)
            even = dim is not None and parameter.shape[dim] % ranks == 0
            placement = Shard(dim) if even and dim is not None else Replicate()
            owner, _, leaf = name.rpartition(".")
            source = None if parameter.is_meta else 0
            shards = distribute_tensor(parameter.detach(), device_mesh, [placement], src_data_rank=source)
            module.get_submodule(owner).register_parameter(leaf, nn.Parameter(shards, parameter.requires_grad))
        module.forward = functools.partial(_run, module, module.forward, device_mesh)  # type: ignore[method-assign]
        return module


def _run(module: nn.Module, forward: Callable[[Tensor], Tensor], mesh: DeviceMesh, x: Tensor) -> Tensor:
    """Run ``forward`` on a replicated tensor; the output and the recorded losses are replicated, too."""
    with _Replicated(mesh):
        y = forward(DTensor.from_local(x, mesh, [Replicate()], run_check=False))
    for part in module.modules():
        if isinstance(part, AuxiliaryLossMixin):
            recorded = part._auxiliary_losses, part._metrics
            part._auxiliary_losses, part._metrics = tree_map_only(DTensor, _local, recorded)
    return _local(y)


def _local(value: Any) -> Tensor:
    return value.redistribute(value.device_mesh, [Replicate()]).to_local()


class _Replicated(TorchFunctionMode):
    """Treat plain tensors in operations with a ``DTensor`` (contexts, noise, constants) as replicated.

    This is a ``TorchFunctionMode``, above autograd, so that it holds for the backward pass, too.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.mesh = mesh

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        arguments = (args, kwargs or {})
        if any(isinstance(value, DTensor) for value in tree_leaves(arguments)):
            arguments = tree_map_only(torch.Tensor, self._replicated, arguments)
        return func(*arguments[0], **arguments[1])

    def _replicated(self, value: Tensor) -> Tensor:
        if isinstance(value, DTensor):
            return value
        return DTensor.from_local(value, self.mesh, [Replicate()], run_check=False)
