"""Run a stock decoder one layer at a time, so that only one layer's activations are in memory.

A decoder layer takes hidden states and further arguments (positions, masks). Without padding, these depend only on the
shape of the batch. They are recorded once for each shape, in a pass in which every layer returns its input, and passed
to the layer again whenever it runs alone.
"""

# Legend: B batch, T tokens, D hidden size, V vocabulary, N = B * tokens of a piece

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from relinear.contract.linear_layers import replaced_layer
from relinear.contract.module_state import frozen_parameters, observe_forwards
from relinear.contract.numerics import rounding_bound
from relinear.distill.record import first_call
from relinear.hf.model_layout import decoder_layers

_Call = tuple[tuple, dict[str, Any]]

#: positions of a sequence whose logits are in memory at a time
HEAD_TOKENS = 32


class LayerByLayer:
    """Split a decoder into functions of hidden states: ``embed``, ``layer``, ``logits``.

    Args:
        model: a Hugging Face decoder in eval mode.

    Raises:
        ValueError: if its list of decoder layers is not found.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.layers = tuple(decoder_layers(model))
        self._calls: dict[tuple[int, ...], list[_Call]] = {}
        self._output: Any = None
        self._gives_few_logits = "logits_to_keep" in inspect.signature(model.forward).parameters

    def __len__(self) -> int:
        return len(self.layers)

    @torch.no_grad()
    def check(self, ids: Tensor) -> None:
        """Raise ValueError unless the parts in sequence give the model's logits for ``ids`` (B, T).

        If the model can return only the last positions, these are compared: they depend on all before them.
        """
        expected = self._run(ids, last=HEAD_TOKENS)
        bound = rounding_bound(self.model, expected)
        hidden = self.embed(ids)
        for index in range(len(self)):
            hidden = self.layer(index, hidden)
        at = slice(-expected.shape[1], None)
        error = float((expected - self.logits(hidden[:, at], ids[:, at])).abs().max())
        if not error <= bound:
            raise ValueError(
                f"{type(self.model).__name__} run layer by layer differs from the whole model by {error:.2g} in its "
                f"logits, and rounding explains {bound:.2g}: its layers take more from outside than hidden states and "
                "positions, which is not supported"
            )

    def _run(self, ids: Tensor, *, last: int | None = None) -> Tensor:
        """Return the model's logits (B, T, V); only those of the ``last`` positions if it can."""
        options = {} if last is None or not self._gives_few_logits else {"logits_to_keep": last}
        return self.model(input_ids=ids, use_cache=False, **options).logits

    def embed(self, ids: Tensor) -> Tensor:
        """Return the hidden states (B, T, D) that enter the first layer, for token ids (B, T)."""
        calls: list[_Call] = []
        entered: list[Tensor] = []
        if not self._calls:  # see once what layers return
            with torch.no_grad():
                first = first_call(self.layers[0], lambda: self._run(ids[:1, :2]))
            self._output = None if first is None else first[1]

        def hand_on(*args: Any, **kwargs: Any) -> Any:
            hidden, args = (args[0], args[1:]) if args else (kwargs.pop("hidden_states"), ())
            calls.append((args, kwargs))
            entered.append(hidden)
            return self._as_output(hidden)

        with self._replaced(hand_on):
            self._run(ids, last=1)
        if entered[0].ndim != 3 or entered[0].shape[:2] != ids.shape:
            raise ValueError(
                f"{type(self.model).__name__} cannot be run layer by layer: its layers take states of shape "
                f"{tuple(entered[0].shape)}, and (batch, tokens, width) is needed"
            )
        self._calls.setdefault(tuple(ids.shape), calls)
        return entered[0]

    def gradient_of_rows(self, ids: Tensor, gradient: Tensor) -> Tensor:
        """Return the gradient (B, T, I) of the embedding's rows, from that (B, T, D) of the first layer's input.

        Before the first layer, models may scale, normalise or project the rows.
        """
        table = self.model.get_input_embeddings()
        rows: list[Tensor] = []

        def as_leaf(name: str, module: nn.Module, args: tuple, output: Tensor) -> Tensor:
            rows.append(output.detach().requires_grad_())
            return rows[-1]

        with frozen_parameters(self.model), observe_forwards([("", table)], as_leaf), torch.enable_grad():
            (row_gradient,) = torch.autograd.grad(self.embed(ids), rows[0], gradient)
        return row_gradient * replaced_layer(table).row_scale

    def layer(self, index: int, hidden: Tensor) -> Tensor:
        """Return the output of layer ``index`` for hidden states (B, T, D) of a shape that ``embed`` has seen."""
        args, kwargs = self._calls[tuple(hidden.shape[:2])][index]
        output = self.layers[index](hidden, *args, **kwargs)
        return output[0] if isinstance(output, tuple | list) else output

    def logits(self, hidden: Tensor, ids: Tensor) -> Tensor:
        """Return logits (B, T, V) from the hidden states that leave the last layer; of ``ids`` the shape counts."""
        with self._replaced(lambda *args, **kwargs: self._as_output(hidden)):
            return self._run(ids)

    def next_tokens(self, hidden: Tensor, ids: Tensor) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
        """Yield logits from the hidden states (B, T, D) that leave the last layer, piece by piece.

        With a large vocabulary the logits need the most memory, and each depends on its own position only. Yields, for
        ``HEAD_TOKENS`` positions at a time: the positions, their hidden states (a leaf), the logits (N, V) in float32,
        and the text's next tokens (N).
        """
        last = ids.shape[1] - 1
        for start in range(0, last, HEAD_TOKENS):
            at = slice(start, min(start + HEAD_TOKENS, last))
            piece = hidden[:, at].detach().requires_grad_(torch.is_grad_enabled())
            logits = self.logits(piece, ids[:, at]).flatten(0, 1).float()
            yield at, piece, logits, ids[:, at.start + 1 : at.stop + 1].flatten()

    @contextlib.contextmanager
    def _replaced(self, forward: Callable) -> Iterator[None]:
        """Replace the forward of every layer by the given function within the block."""
        for layer in self.layers:
            layer.__dict__["forward"] = forward
        try:
            yield
        finally:
            for layer in self.layers:
                layer.__dict__.pop("forward", None)

    def _as_output(self, hidden: Tensor) -> Any:
        """Return a layer's output with its hidden states replaced by ``hidden``."""
        return type(self._output)([hidden, *self._output[1:]]) if isinstance(self._output, tuple | list) else hidden
