"""``ContextManager`` computes one causal context vector per token, once per forward, for all conditioned layers."""

# Legend: B batch, T tokens, C dim (context width), H width of the model's embeddings, S cached and new tokens together

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache, LinearAttentionLayer

from relinear.activations.shared_context import ContextOwner, conditioned_operators, decoder_for_context
from relinear.contract.attachment import AttachmentConfig, factory_kwargs_like
from relinear.contract.config import Count, register
from relinear.contract.input_checks import check_features
from relinear.deprecated import renamed_in_module
from relinear.functional.upcast import upcast
from relinear.hf.model_layout import is_checkpointing
from relinear.hf.vocabulary import check_table_fits
from relinear.kernels.context_manager import linear_recurrence
from relinear.settings.messages import quoted

GELU_GAIN = 1.534  # 1 / sqrt(E[gelu(z)^2]) for a standard normal z: keeps the variance through a hidden layer


class ContextState(LinearAttentionLayer):
    """The manager's recurrent state, of constant size, as one more layer of the model's cache.

    Beam search reorders it with the keys and values. It cannot be rolled back: ``crop`` raises an error.
    """

    def __init__(self) -> None:
        super().__init__()
        self.state: Tensor | None = None

    def set(self, state: Tensor) -> None:
        """Keep a copy of ``state`` (B, C) for the next call, so that a tensor of which it is a view can be freed."""
        self.state = state.clone(memory_format=torch.contiguous_format)

    def reset(self) -> None:
        """Forget the sequence: the next call starts from zero."""
        self.state = None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorder the rows of the batch as beam search does, or keep some of them."""
        if self.state is not None:
            self.state = self.state.index_select(0, beam_idx.to(self.state.device))

    batch_select_indices = reorder_cache

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row of the batch."""
        if self.state is not None:
            self.state = self.state.repeat_interleave(repeats, dim=0)

    @property
    def is_croppable(self) -> bool:
        """Return False: a recurrent state cannot be rolled back."""
        return False

    def activate_past_recording(self) -> None:
        """Raise an error: the caller would crop the cache next."""
        self.crop(0)

    def crop(self, tokens_to_remove: int) -> None:
        """Raise an error: after assisted decoding, or another crop, the state would include rejected tokens."""
        raise ValueError(
            "relinear.ContextManager cannot roll back its memory for assisted (speculative) decoding; generate without "
            "it, or use mixer='token'"
        )


class _Average(nn.Module):
    """Compute exponential moving averages with one learnt time constant per channel, in tokens."""

    def __init__(self, config: ContextManager, **kw: Any) -> None:
        super().__init__()
        self.timescales = config.timescales
        self.log_timescale = nn.Parameter(torch.empty(config.dim, **kw))

    def reset_parameters(self) -> None:
        channels = self.log_timescale.numel()
        values = [math.log(self.timescales[i % len(self.timescales)]) for i in range(channels)]
        with torch.no_grad():
            self.log_timescale.copy_(torch.tensor(values))

    def forward(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Return (decay (C,), value (B, T, C)) of the recurrence, in float32 at least."""
        rate = torch.exp(-upcast(self.log_timescale))
        return torch.exp(-rate), -torch.expm1(-rate) * upcast(features)

    def flops_per_token(self) -> int:
        return 3 * self.log_timescale.numel()


class _GatedUnit(nn.Module):
    """Apply a minimal gated recurrent unit (Feng et al. 2024), whose gate reads only the token: a parallel scan."""

    def __init__(self, config: ContextManager, **kw: Any) -> None:
        super().__init__()
        self.gate = nn.Linear(config.dim, config.dim, **kw)
        self.candidate = nn.Linear(config.dim, config.dim, **kw)

    def reset_parameters(self) -> None:
        self.gate.reset_parameters()
        self.candidate.reset_parameters()

    def forward(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Return (decay (B, T, C), value (B, T, C)) of the recurrence, in float32 at least."""
        gate = torch.sigmoid(upcast(self.gate(features)))
        return 1 - gate, gate * torch.tanh(upcast(self.candidate(features)))

    def flops_per_token(self) -> int:
        return 4 * self.gate.in_features**2 + 4 * self.gate.in_features


_MEMORIES: dict[str, type[_Average | _GatedUnit]] = {"ema": _Average, "gru": _GatedUnit}


class ContextNetwork(ContextOwner):
    """Compute the context of ``ContextManager`` from a token and a memory of the tokens before it, by a small MLP.

    c_t = MLP(LayerNorm([e_t, s_t])) with the token's features e_t and the memory's state s_t after token t. With
    mixer="token" there is no s_t. The state is kept in float32, or in float64 for a model in float64.
    """

    token_table_attribute = "embedding"
    finite_fan_in = ("memory", "hidden", "output")
    finite_fan_out = ("projection", "memory", "hidden", "output")

    def __init__(self, config: ContextManager, vocabulary: int, hidden: int, **kw: Any) -> None:
        super().__init__()
        self.config = config
        self.context_dim = dim = config.dim
        self.embedding = nn.Embedding(vocabulary, dim, **kw) if config.source == "tokens" else None
        self.projection = nn.Linear(hidden, dim, bias=False, **kw) if config.source == "embeddings" else None
        self.memory = _MEMORIES[config.mixer](config, **kw) if config.mixer in _MEMORIES else None
        width = dim if self.memory is None else 2 * dim
        self.norm = nn.LayerNorm(width, **kw)
        self.hidden = nn.Linear(width, dim, **kw)
        self.output = nn.Linear(dim, dim, **kw)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw features of unit variance and an MLP that keeps it, so that a fresh context has unit variance."""
        for part in (self.embedding, self.projection, self.memory, self.norm):
            if part is not None:
                part.reset_parameters()
        for layer, gain in ((self.hidden, 1.0), (self.output, GELU_GAIN)):
            nn.init.normal_(layer.weight, std=gain / math.sqrt(layer.in_features))
            nn.init.zeros_(layer.bias)

    def flops_per_token(self) -> int:
        """Return the floating-point operations per token (a multiply-add counts as two, a look-up as none)."""
        linear = [m for m in (self.projection, self.hidden, self.output) if m is not None]
        flops = sum(2 * m.in_features * m.out_features for m in linear)
        return flops + (0 if self.memory is None else self.memory.flops_per_token())

    def forward(
        self, source: Tensor, valid: Tensor | None = None, state: Tensor | None = None, starts: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the context and the new state.

        Args:
            source: token ids (B, T), or embeddings (B, T, H), as ``config.source`` says.
            valid: (B, T) False at padding, which must not enter the memory; None if there is no padding.
            state: (B, C) after the previous tokens; None before the first token.
            starts: (B, T) or (1, T) True where a document begins, and the memory of the one before is dropped.

        Returns:
            context (B, T, C), and the state (B, C) in at least float32, or None without a memory.
        """
        features = self._features(source)
        if self.memory is not None:
            decay, value = self.memory(features)
            if starts is not None:
                decay = torch.where(starts[..., None], 0.0, decay).expand_as(value)
            if valid is not None:
                decay = torch.where(valid[..., None], decay, 1.0)
                value = torch.where(valid[..., None], value, 0.0)
            initial = value.new_zeros(value.shape[0], value.shape[2]) if state is None else state
            states = linear_recurrence(decay, value, initial)
            features = torch.cat([features, states.to(features.dtype)], dim=-1)
            state = states[:, -1]
        return self.output(F.gelu(self.hidden(self.norm(features)))), state

    def _features(self, source: Tensor) -> Tensor:
        """Return e_t (B, T, C) of token ids (B, T) or embeddings (B, T, H)."""
        if self.embedding is None:
            assert self.projection is not None
            check_features(source, self.projection.in_features, self)
            return self.projection(source)
        if not isinstance(source, Tensor) or source.is_floating_point() or source.is_complex():
            got = source.dtype if isinstance(source, Tensor) else quoted(source)
            raise ValueError(f"{type(self).__name__}, {self.config}: expected token ids (integers), got {got}")
        return self.embedding(source)

    def contexts(self, decoder: Any, inputs: dict[str, Any]) -> Tensor:
        """Return the context for the decoder's arguments; the state is read from and written to its cache."""
        source = self._source(decoder, inputs)
        if self.memory is None:
            return self(source)[0]
        cache = _cache(decoder, inputs)
        layer = None if cache is None else _state_layer(cache, decoder)
        valid = _valid_tokens(inputs.get("attention_mask"), source.shape[1], cache)
        context, state = self(source, valid, None if layer is None else layer.state, _starts(inputs))
        if layer is not None and state is not None:
            layer.set(state)
        return context

    def _source(self, decoder: Any, inputs: dict[str, Any]) -> Tensor:
        tokens, embeddings = inputs.get("input_ids"), inputs.get("inputs_embeds")
        if self.embedding is None:
            return decoder.get_input_embeddings()(tokens) if embeddings is None else embeddings
        if tokens is None:
            raise ValueError(
                "ContextManager(source='tokens') needs input_ids; with inputs_embeds use source='embeddings'"
            )
        check_table_fits(self.embedding, decoder, "ContextManager")
        return tokens

    def extra_repr(self) -> str:
        return str(self.config)


def _cache(decoder: Any, inputs: dict[str, Any]) -> Any:
    """Return the call's cache; made here rather than by the model, so that the context's state can be stored in it."""
    if is_checkpointing(decoder):
        return None  # the model drops its cache as well
    cache = inputs.get("past_key_values")
    use_cache = inputs.get("use_cache")
    if cache is None and (decoder.config.use_cache if use_cache is None else use_cache):
        cache = inputs["past_key_values"] = DynamicCache(config=decoder.config)
    return cache


def _state_layer(cache: Any, decoder: Any) -> ContextState:
    """Return the cache's layer with the state; append one to a new cache."""
    for layer in cache.layers:
        if isinstance(layer, ContextState):
            return layer
    # A cache that makes layers on demand finds them by index, so the state must come after all of them.
    while cache.layer_class_to_replicate is not None and len(cache.layers) < decoder.config.num_hidden_layers:
        cache.layers.append(cache.layer_class_to_replicate())
    length = cache.get_seq_length()
    if isinstance(length, int) and length > 0:
        raise ValueError(f"the cache holds {length} tokens that relinear.ContextManager has not seen; start without it")
    layer = ContextState()
    cache.layers.append(layer)
    return layer


def _starts(inputs: dict[str, Any]) -> Tensor | None:
    """Return True at tokens of position 0, if positions are given: the first of every document packed into a row."""
    positions = inputs.get("position_ids")
    return positions == 0 if isinstance(positions, Tensor) and positions.ndim == 2 else None


def _valid_tokens(mask: Any, tokens: int, cache: Any) -> Tensor | None:
    """Return (B, T) bool from any attention mask that models take: (B, S), (B, 1, T, S), or several by kind."""
    if isinstance(mask, dict):
        mask = next((m for m in mask.values() if m is not None), None)
    if mask is None:
        return None
    if mask.ndim == 2:
        return mask[:, -tokens:] != 0
    if mask.ndim == 4:
        # A token that may not attend to itself is padding. Additive masks have 0 where attention is allowed.
        past = 0 if cache is None else cache.get_seq_length()
        positions = torch.arange(tokens, device=mask.device)
        diagonal = mask[:, 0, positions, positions + past]
        return diagonal if mask.dtype == torch.bool else diagonal == 0
    shape = tuple(mask.shape)
    raise ValueError(f"relinear.ContextManager needs an attention mask of shape (batch, tokens), got {shape}")


@register
class ContextManager(AttachmentConfig):
    """Give every token one causal context, shared by all conditioned layers: ``relinear.attach_(model, this)``.

    The paper (CCL, Section 3.1) does not specify the manager; its parameter count implies a separate token embedding.
    By construction, c_t depends on tokens 0..t only.

    Args:
        dim: C, the width of the context; the ``context_dim`` of the layers that read it.
        source: "tokens": a separate token embedding; "embeddings": a projection of the model's input embeddings, which
            works with ``inputs_embeds`` and has H * C parameters instead of vocabulary * C.
        mixer: "token": only the current token, no state; "ema": also moving averages over the past at several learnt
            time scales; "gru": also a minimal gated recurrent unit. Both memories are computed in parallel over a
            sequence, and as a recurrence with a state of constant size (in the model's cache) when decoding.
        timescales: initial time constants of "ema", in tokens, assigned to the channels in turn.

    With a memory, padding (attention_mask 0) does not enter the state. Documents packed into one row start with an
    empty memory if ``position_ids`` start from 0 in each, as packing collators set them. Assisted decoding raises an
    error.

    Examples:
        >>> model = relinear.from_preset("tiny")
        >>> relinear.attach_(model, relinear.ContextManager(dim=16, mixer="ema"))
        >>> _ = relinear.replace_(model, {"up_proj": relinear.CCL(rank=8, context_dim=16)})
        >>> relinear.check_causality(model, tokens=8).causal
        True
    """

    kind = "context_manager"

    dim: Count = 64
    source: Literal["tokens", "embeddings"] = "tokens"
    mixer: Literal["token", "ema", "gru"] = "token"
    timescales: Annotated[tuple[Annotated[float, Field(gt=0)], ...], Field(min_length=1)] = (2.0, 8.0, 32.0, 128.0)

    def check(self, model: nn.Module) -> None:
        """Raise ValueError if the context cannot be right in ``model``, or a layer in it expects another width."""
        decoder_for_context(model)
        for name, operator in conditioned_operators(model).items():
            if operator.config.context_dim != self.dim:
                raise ValueError(
                    f"{name} was built for context_dim={operator.config.context_dim}, and the ContextManager has "
                    f"dim={self.dim}; make them equal"
                )

    def attach(self, model: nn.Module) -> None:
        """Register ``relinear_context`` on the decoder, on the embedding's device and in its dtype."""
        decoder = decoder_for_context(model)
        table = decoder.get_input_embeddings()
        width = getattr(table, "embedding_dim", 0) or table.in_features
        owner = ContextNetwork(self, table.num_embeddings, width, **factory_kwargs_like(table))
        owner.train(decoder.training).install(decoder)


__getattr__ = renamed_in_module(__name__, SharedContext=ContextNetwork)
