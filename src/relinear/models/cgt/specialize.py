"""Specialise a CGT: fold the context of a prefix into the weights, which gives a stock GPT-2."""

# Legend: T tokens of the prefix, D width of x, E width of y, K outputs of a projection

import copy
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from relinear.contract.operator import NotLinearError, named_operators
from relinear.hf.attachments import attachments
from relinear.hf.stock_layer import to_stock_layer
from relinear.models.cgt.config import CGTRegressionConfig
from relinear.models.cgt.layers import Modulator
from relinear.models.cgt.model import CGTForCausalLM, CGTForRegression
from relinear.models.heads import ReadoutScale
from relinear.settings.messages import quoted


@torch.no_grad()
def specialize(
    model: CGTForCausalLM | CGTForRegression,
    prefix_ids: Tensor | Sequence[int] | None = None,
    *,
    context: Tensor | Sequence[float] | None = None,
    first_position: int = 0,
) -> Any:
    """Read ``prefix_ids`` once, freeze y at their end and fold every T(.; y); the result is a plain GPT-2.

    T(x) = A x + t follows a normalisation and precedes a projection W, b, which becomes W A, W t + b. Operators that
    replaced projections of the x stream are first converted to dense layers. The result has the x stream's width and no
    y stream; its logits are those of ``model(ids, frozen_context=y)``.

    Args:
        model: a ``CGTForCausalLM``, or a ``CGTForRegression``.
        prefix_ids: (T,) or (1, T), the tokens to read, as a tensor or a list; the vectors (T, F) or (1, T, F) of a
            regression model. Give these or ``context``.
        context: (E,) or (1, E), a y to use unchanged.
        first_position: position of the first token after the prefix. 0 (the auxiliary loss's default) starts again; the
            length of the prefix continues to count, which leaves that many positions fewer.

    Returns:
        A ``GPT2LMHeadModel`` that shares no storage with ``model`` and needs no relinear. For a ``CGTForRegression``,
        which has no stock class, a ``CGTForRegression`` with ``modulated=False`` and no y stream.

    Raises:
        ValueError: if the model is not a CGT with a head; the prefix is empty, a batch, too long, or has ids outside of
            the vocabulary; both or neither of prefix and context are given; no position remains; an operator in the x
            stream is not a plain matrix; or a part is attached that a stock GPT-2 does not have. (A ``ReadoutScale`` is
            folded into a head that is not tied.)

    Examples:
        >>> sizes = {"n_embd": 32, "n_head": 2, "context_size": 8, "context_heads": 2}
        >>> model = relinear.CGTForCausalLM(relinear.CGTConfig(vocab_size=64, n_layer=2, context_layer=1, **sizes))
        >>> type(relinear.specialize(model, torch.randint(64, (5,)))).__name__
        'GPT2LMHeadModel'
    """
    if not isinstance(model, CGTForCausalLM | CGTForRegression):
        raise ValueError(f"specialize takes a CGTForCausalLM or a CGTForRegression, got {type(model).__name__}")
    config = model.config
    if not 0 <= first_position < config.n_positions:
        raise ValueError(f"first_position={first_position} must lie in [0, n_positions={config.n_positions})")
    y = _context(model, prefix_ids, context)

    factor, changes = _readout_factor(model), {"n_positions": config.n_positions - first_position}
    state, tables = _stock_state(model), ["transformer.wpe.weight"]
    stock: Any
    if isinstance(model, CGTForRegression):
        changes |= {"modulated": False, "context_layer": 0, "variational": False}
        stock = CGTForRegression(CGTRegressionConfig.from_dict(config.to_dict() | changes))
        state = {name: value for name, value in model.state_dict().items() if name in stock.state_dict()} | state
        tables.append("transformer.context_wpe.weight")
    else:
        stock_keys = set(GPT2Config().to_dict()) - {"model_type", "architectures", "transformers_version"}
        settings = {key: value for key, value in config.to_dict().items() if key in stock_keys} | changes
        tied = config.tie_word_embeddings and factor == 1
        stock = GPT2LMHeadModel(GPT2Config(**settings | {"tie_word_embeddings": tied, "dtype": model.dtype}))
        state["lm_head.weight"] = factor * state["lm_head.weight"]
    stock.to(device=model.device, dtype=model.dtype)
    state |= {name: state[name][first_position:] for name in tables}
    blocks: Any = model.transformer.h
    for index, block in enumerate(blocks):
        if block.modulate_attn is not None:
            _fold(block.modulate_attn, y, state, f"transformer.h.{index}.attn.c_attn")
            _fold(block.modulate_mlp, y, state, f"transformer.h.{index}.mlp.c_fc")
    stock.load_state_dict(state, strict=True)
    if stock.can_generate():
        stock.generation_config = copy.deepcopy(model.generation_config)
    return stock.eval()


def _readout_factor(model: Any) -> float:
    unsupported = [attached for attached in attachments(model) if not isinstance(attached, ReadoutScale)]
    if unsupported:
        raise ValueError(f"the model has {unsupported[0].kind} attached, which a stock GPT-2 cannot express")
    return math.prod(attached.factor for attached in attachments(model) if isinstance(attached, ReadoutScale))


def _context(model: Any, prefix_ids: Any, context: Any) -> Tensor:
    if (prefix_ids is None) == (context is None):
        raise ValueError("give either prefix_ids or context, not both and not neither")
    if context is not None:
        y, size = torch.as_tensor(context, device=model.device), model.config.context_size
        if y.shape not in ((size,), (1, size)):
            raise ValueError(f"context must have shape ({size},) or (1, {size}), got {tuple(y.shape)}")
        return y.reshape(-1)
    if isinstance(model, CGTForRegression):
        vectors = torch.as_tensor(prefix_ids, device=model.device)
        if vectors.ndim not in (2, 3) or not vectors.numel() or vectors.shape[:-2] not in ((), (1,)):
            shape = tuple(vectors.shape)
            raise ValueError(f"prefix_ids must be vectors of one sequence, (T, F) or (1, T, F), got shape {shape}")
        return model.context(vectors.reshape(1, *vectors.shape[-2:]))[0, -1]
    return model.context(_token_ids(model, prefix_ids))[0, -1]


def _token_ids(model: Any, prefix_ids: Any) -> Tensor:
    """Return the prefix as (1, T). Raises ValueError if it is not one row of token ids."""
    try:
        ids = torch.as_tensor(prefix_ids, device=model.device)
    except (TypeError, ValueError, RuntimeError):
        ids = torch.empty(0)
    is_row = ids.numel() > 0 and ids.shape in ((ids.numel(),), (1, ids.numel()))
    is_whole = not ids.is_floating_point() and ids.dtype != torch.bool
    if not (is_row and is_whole and 0 <= ids.min() <= ids.max() < model.config.vocab_size):
        below = f"whole numbers below vocab_size={model.config.vocab_size}"
        raise ValueError(f"prefix_ids must be {below}, (T,) or (1, T), got {quoted(prefix_ids)}")
    return ids.reshape(1, -1).long()


def _stock_state(model: Any) -> dict[str, Tensor]:
    """Return parameters of the x stream by GPT-2's names; operators are converted to matrices."""
    state = {name: value for name, value in model.state_dict().items() if _is_stock(name)}
    for name, operator in named_operators(model):
        if not _is_stock(name):
            continue
        try:
            plain = to_stock_layer(operator)
        except NotLinearError as error:
            raise ValueError(f"{name} cannot become a layer of a stock GPT-2: {error}") from error
        state = {key: value for key, value in state.items() if not key.startswith(f"{name}.")}
        state |= {f"{name}.{key}": value for key, value in plain.state_dict().items()}
    return state


def _is_stock(name: str) -> bool:
    """Return whether a parameter belongs to the x stream, whose names are GPT-2's."""
    return "context" not in name and "modulate_" not in name


def _fold(modulator: Modulator, y: Tensor, state: dict[str, Tensor], name: str) -> None:
    """Fold T(.; y) into the Conv1D ``name``: its weight (D, K) becomes A^T W, its bias W^T t + b."""
    matrix, shift = modulator.affine(y)
    weight = state[f"{name}.weight"]
    wide = weight.to(matrix.dtype)
    state[f"{name}.weight"] = (matrix.T @ wide).to(weight.dtype)
    state[f"{name}.bias"] = (shift @ wide + state[f"{name}.bias"].to(matrix.dtype)).to(weight.dtype)
