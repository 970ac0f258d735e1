"""An output head that shares its matrix with the embedding, where an operator takes the embedding's place."""

from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from torch import Tensor, nn

from relinear.core.drawn import swap_module
from relinear.core.operator import NotLinearError, Operator, OperatorConfig, embeds, linear_features, linear_of
from relinear.core.wrapper import WrapperConfig


class TiedHead(nn.Module):
    """y = x W^T with the matrix W (V, D) of the operator that embeds the tokens. It holds nothing itself."""

    def __init__(self, table: Operator) -> None:
        super().__init__()
        self._table = (table,)  # not as a submodule: it is saved, moved and counted at its own place

    @property
    def table(self) -> Operator:
        """The operator that embeds the tokens."""
        return self._table[0]

    def flops_per_token(self) -> int:
        """Of the product; looking up counts as nothing."""
        return self.table.flops_per_token()

    def forward(self, x: Tensor) -> Tensor:
        """(..., V) logits of (..., D)."""
        return self.table(x)


def check_rows(config: OperatorConfig, source: nn.Module, name: str) -> None:
    """Raise ValueError if ``source``, called ``name``, is an embedding, and ``config`` an operator without rows."""
    if not embeds(source):
        return
    with suppress(NotLinearError):
        if not config.conditioned and not isinstance(config, WrapperConfig):
            config.build(*linear_features(source), bias=False, device="meta").to_dense()
            return
    raise ValueError(
        f"{name} is an embedding, whose rows are looked up, and {config.kind} has no rows; give an operator "
        "with a dense matrix, such as quantized:bits=8"
    )


def tied_head(model: Any, table: nn.Module) -> Any:
    """Return the output head of ``model`` that shares the matrix of its embedding ``table``; None if none does."""
    getter = getattr(model, "get_output_embeddings", None)
    head = getter() if embeds(table) and callable(getter) else None
    if isinstance(head, TiedHead):
        return head if head.table is table else None
    if not isinstance(head, nn.Linear):
        return None
    names = {id(module): name for name, module in model.named_modules()}
    # on a skeleton that is about to be loaded they are not the same object yet, but will be
    stated = getattr(model, "all_tied_weights_keys", {}).get(f"{names[id(head)]}.weight")
    shared = any(head.weight is p for p in table.parameters())
    return head if shared or stated == f"{names.get(id(table))}.weight" else None


def swap_layer(model: Any, names: Iterable[str], source: nn.Module, target: Any) -> None:
    """``swap_module``; a head that is tied to ``source`` is tied to ``target``, too."""
    head = tied_head(model, source)
    swap_module(model, names, source, target)
    if head is None:
        return
    tied: Any = TiedHead(target)
    model._tied_weights_keys = {}
    if not isinstance(target, Operator):
        tied = linear_of(target.weight)
        tied.weight = target.weight
        del model._tied_weights_keys  # the class's again
    tied.train(head.training)
    swap_module(model, [name for name, module in model.named_modules() if module is head], head, tied)
    model.all_tied_weights_keys = model.get_expanded_tied_weights_keys(all_submodels=True)
