"""The Contextually Guided Transformer: a GPT-2 that computes, from what it has read, weights of its upper layers."""

# Legend: B batch, T tokens, D width of x, E width of y, V vocabulary, F features

import dataclasses
import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForCausalLM, initialization
from transformers.cache_utils import Cache, DynamicCache
from transformers.generation import GenerationMixin
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import ModelOutput
from transformers.models.gpt2.modeling_gpt2 import GPT2PreTrainedModel
from transformers.utils import TransformersKwargs
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from relinear.activations.hooks import HasHookPoints
from relinear.contract.config import UnknownSettingError
from relinear.contract.module_state import eval_mode
from relinear.functional.cgt import moving_average
from relinear.models.cgt.config import CGTConfig, CGTRegressionConfig
from relinear.models.cgt.layers import CGTBlock, Modulator
from relinear.settings.messages import did_you_mean, quoted

#: arguments that transformers or its tokenizers pass to any model, and that a CGT ignores
_PASSED_ON = frozenset(
    {*TransformersKwargs.__annotations__, "cache_position", "shift_labels", "token_type_ids", "return_dict"}
)


@dataclasses.dataclass
class CGTOutput(ModelOutput):
    """Output of a CGT; fields that were not requested are None.

    Attributes:
        loss: scalar, if labels or targets were given.
        logits: (B, T, V), or the predictions (B, T, F) of a regression model.
        last_hidden_state: (B, T, D), for the bare model.
        past_key_values: the cache, with entries for the x layers, then for the y layers.
        context: (B, T, E), the y computed for each token (its mean in the VAE variant); None if it was given.
        context_log_variance: (B, T, E), for the VAE variant.
        context_sample: (B, T, E), the y that the VAE variant samples in training and the upper layers read.
        hidden_states: hidden states of the x stream, as in GPT-2.
        attentions: attentions of the x stream, as in GPT-2.
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    last_hidden_state: Tensor | None = None
    past_key_values: Cache | None = None
    context: Tensor | None = None
    context_log_variance: Tensor | None = None
    context_sample: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None


class CGTPreTrainedModel(GPT2PreTrainedModel):
    """Base of the CGT classes: initialisation and declarations for transformers."""

    config: CGTConfig
    config_class = CGTConfig
    _no_split_modules = ["CGTBlock"]  # noqa: RUF012  a list, as transformers expects it
    _can_record_outputs = {  # noqa: RUF012
        "hidden_states": OutputRecorder(CGTBlock, index=0),
        "attentions": OutputRecorder(CGTBlock, index=2),
    }

    def _initialize_weights(self, module: nn.Module, is_custom_code: bool = False) -> None:
        # For custom code transformers skips modules without direct parameters, and with them GPT-2's scaling of c_proj.
        # We draw with ``transformers.initialization``, which does not change loaded tensors.
        super()._initialize_weights(module)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, Modulator):
            # L(y), the inner product with R(y) and so the change of x do not depend on the number of templates: their
            # weights are of order one for tanh and of order 1 / M for softmax. Every factor has a gradient at once.
            templates, _, width = module.left.shape
            template_std = templates ** (-0.5 if module.mixing == "tanh" else 0.5)
            initialization.normal_(module.mix.weight, std=module.mix.weight.shape[-1] ** -0.5)
            initialization.zeros_(module.mix.bias)  # type: ignore[arg-type]
            initialization.normal_(module.left, std=template_std * self.config.initializer_range)
            initialization.normal_(module.right, std=template_std * width**-0.5)
            initialization.zeros_(module.right_bias)
        if isinstance(module, CGTModel) and module.context_log_variance is not None:
            initialization.zeros_(module.context_log_variance.weight)


class CGTModel(HasHookPoints, CGTPreTrainedModel):
    """Run the two-stream layers and the layers that the context modulates (CGT, Section 3.1 and Appendix B.1).

    Below layer l the x stream depends on x alone; y depends on both. From layer l on only x is processed, and every
    attention and every MLP reads T(LN(x); y). The names of the x stream's parameters are those of ``GPT2Model``. Hook
    point: ``context``, the y that the upper layers read.
    """

    hook_kind = "context"
    token_table_attribute = "context_wte"

    def __init__(self, config: CGTConfig):
        super().__init__(config)
        tokens = config.input_features is None
        self.wte: Any = nn.Embedding(config.vocab_size, config.n_embd) if tokens else None
        self.wpe = nn.Embedding(config.n_positions, config.n_embd)
        self.context_wte: Any = nn.Embedding(config.vocab_size, config.context_size) if tokens else None
        self.context_wpe = nn.Embedding(config.n_positions, config.context_size)
        self.drop = nn.Dropout(config.embd_pdrop)
        self.h = nn.ModuleList([CGTBlock(config, layer) for layer in range(config.n_layer)])
        self.ln_f = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        normed = config.context_norm
        self.context_ln = nn.LayerNorm(config.context_size, eps=config.layer_norm_epsilon) if normed else None
        variational = config.variational
        self.context_log_variance = nn.Linear(config.context_size, config.context_size) if variational else None
        self.gradient_checkpointing = False
        self.post_init()

    def hook_sizes(self) -> dict[str, int]:
        return {"context": self.config.context_size}

    def get_input_embeddings(self) -> nn.Module:
        return self.wte

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.wte = value

    def embed(
        self, input_ids: Tensor | None, inputs_embeds: Tensor | None, position_ids: Tensor, computes: bool
    ) -> tuple:
        """Return (x, y) before the first layer, for tokens or embeddings (B, T, D + E).

        Embeddings of x alone, (B, T, D), suffice if y is not computed (``computes``) or has no token embedding.
        """
        sizes = (self.config.n_embd, self.config.context_size)
        if inputs_embeds is None:
            x, y = self.wte(input_ids), self.context_wte(input_ids)
        elif inputs_embeds.shape[-1] == sum(sizes):
            x, y = inputs_embeds.split(sizes, -1)
        elif inputs_embeds.shape[-1] == sizes[0] and not (computes and self.context_wte is not None):
            x, y = inputs_embeds, 0.0
        else:
            raise ValueError(
                f"inputs_embeds must have {sum(sizes)} features, got shape {tuple(inputs_embeds.shape)}: each stream "
                "embeds a token for itself; give torch.cat([wte(ids), context_wte(ids)], -1) of the bare model's two "
                f"tables. With frozen_context the {sizes[0]} of wte will do"
            )
        y = self.context_wpe(position_ids) + y
        return self.drop(x + self.wpe(position_ids)), self.drop(y.expand(*x.shape[:2], -1))

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        frozen_context: Tensor | None = None,
        context_rate: float = 0.0,
        context_only: bool = False,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> CGTOutput:
        """Run as ``CGTForCausalLM.forward`` without the head; with ``context_only``, only the layers below l."""
        kwargs = {key: value for key, value in kwargs.items() if not key.startswith("output_")}
        _check_arguments(kwargs)
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds, not both and not neither")
        source = input_ids if inputs_embeds is None else inputs_embeds
        assert source is not None
        shape = source.shape[:2]
        self._check_context(frozen_context, context_rate, shape)
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        seen = 0 if past_key_values is None else past_key_values.get_seq_length()
        if position_ids is None:
            longest = self.config.n_positions - (seen if isinstance(seen, int) else 0)
            if shape[1] > longest:
                raise ValueError(
                    f"the input has {shape[1]} tokens and the cache {seen}; the model has n_positions="
                    f"{self.config.n_positions}: cut the text into windows"
                )
            position_ids = (torch.arange(shape[1], device=source.device) + seen).unsqueeze(0)
        computes = frozen_context is None or context_rate > 0
        if past_key_values is not None:
            self._extend_cache(past_key_values, seen, computes, context_rate)

        x, y = self.embed(input_ids, inputs_embeds, position_ids, computes)
        shared: dict[str, Any] = {"position_ids": position_ids, "past_key_values": past_key_values}
        mask = create_causal_mask(config=self.config, inputs_embeds=x, attention_mask=attention_mask, **shared)
        shared |= {"attention_mask": mask, **kwargs}
        split = self.config.context_layer
        y = y if computes else None
        for block in self.h[:split]:
            x, y, _ = block(x, y, **shared)

        log_variance = None
        if y is not None:
            y = y if self.context_ln is None else self.context_ln(y)
            if self.context_log_variance is not None:
                log_variance = self.context_log_variance(y)
        sampled_variance = log_variance if self.training and frozen_context is None else None
        if frozen_context is None:
            used = y if sampled_variance is None else y + torch.exp(0.5 * sampled_variance) * torch.randn_like(y)
        elif context_rate > 0:
            used = self._averaged(y, frozen_context, context_rate, attention_mask, past_key_values)
        else:
            used = frozen_context.to(self.wpe.weight.dtype)
            used = used.unsqueeze(1) if used.ndim == 2 else used
        used = self.hooked("context", used)
        if not context_only:
            for block in self.h[split:]:
                x, *_ = block(x, used, **shared)
            x = self.ln_f(x)
        return CGTOutput(
            last_hidden_state=x,
            past_key_values=past_key_values if use_cache else None,
            context=y,
            context_log_variance=log_variance,
            context_sample=None if sampled_variance is None else used,
        )

    def _check_context(self, frozen: Tensor | None, rate: float, shape: torch.Size) -> None:
        size = self.config.context_size
        if not 0.0 <= rate <= 1.0:
            raise ValueError(f"context_rate must lie in [0, 1], got {rate!r}")
        if frozen is None:
            if rate > 0:
                raise ValueError("context_rate updates a given context: pass the one to start from as frozen_context")
            return
        allowed = [(shape[0], size)] + ([] if rate > 0 else [(*shape, size)])
        if tuple(frozen.shape) not in allowed:
            raise ValueError(
                f"frozen_context must have shape {' or '.join(map(str, allowed))}, got {tuple(frozen.shape)}; "
                f"repeat one context for a batch with .expand({shape[0]}, -1)"
            )

    def _extend_cache(self, cache: Cache, seen: int, computes: bool, rate: float) -> None:
        """Add missing entries to the cache: for the y layers, and for the moving average of the context."""
        if rate > 0 and cache.is_compileable:
            raise ValueError("a moving average of the context needs a cache that grows: use the default (dynamic) one")
        # Caches without layers create them when they are filled.
        entries = self.config.n_layer + self.config.context_layer + int(rate > 0)
        if cache.layer_class_to_replicate is None:
            while len(cache.layers) < entries:
                like = cache.layers[0]
                sizes = {"max_cache_len": like.max_cache_len} if hasattr(like, "max_cache_len") else {}
                cache.layers.append(type(like)(**sizes))
        context_layers = cache.layers[self.config.n_layer : entries]
        if computes and any(int(layer.get_seq_length()) != int(seen) for layer in context_layers):
            raise ValueError(
                "this cache was filled with a frozen context, so the y stream has no memory of it; go on with "
                "frozen_context, or start again without a cache"
            )

    def _averaged(
        self, computed: Tensor, frozen: Tensor, rate: float, attention_mask: Tensor | None, cache: Cache | None
    ) -> Tensor:
        """Return the moving average of the computed context, which starts from the cache's average or ``frozen``."""
        length = computed.shape[1]
        mask = attention_mask[:, -length:] if attention_mask is not None and attention_mask.ndim == 2 else None
        slot = self.config.n_layer + self.config.context_layer
        layers = [] if cache is None else cache.layers
        if len(layers) > slot and layers[slot].get_seq_length():
            frozen = layers[slot].keys[:, 0, -1]
        used = moving_average(computed, frozen.to(computed.dtype), rate, mask)
        if cache is not None:
            # stored as the keys of one head, so that beam search reorders and ``crop`` shortens it like other entries
            cache.update(used.unsqueeze(1), used.new_zeros(used.shape[0], 1, length, 1), slot)
        return used


class _CGTWithHead(CGTPreTrainedModel):
    """Base of the CGT models with a head, for language and for regression."""

    transformer: CGTModel

    @torch.no_grad()
    def context(self, *args: Tensor, **kwargs: Any) -> Tensor:
        """Return y at layer l for every token, (B, T, E), in eval mode; layers above l are not computed.

        It takes the inputs of ``forward``. ``model.context(ids)[:, -1]`` is the context to freeze after ``ids``.
        """
        with eval_mode(self):
            y = self._bare(*args, context_only=True, use_cache=False, **kwargs).context
        assert y is not None
        return y

    def _bare(self, *args: Any, **kwargs: Any) -> CGTOutput:
        return self.transformer(*args, **kwargs)

    def modulators(self) -> list[Modulator]:
        """Return the generated operators T^kappa, kappa = 1 .. 2 (L - l), in the order in which they are applied."""
        return [module for module in self.modules() if isinstance(module, Modulator)]


class CGTForCausalLM(_CGTWithHead, GenerationMixin):
    """Predict the next token with a CGT; its head on the x stream is tied to the token embedding, as in GPT-2.

    ``model(input_ids)`` takes token ids (B, T), T at most ``n_positions``. It returns ``logits`` (B, T, V) and
    ``context`` (B, T, E), and with ``labels`` (B, T) the ``loss``, in nats per token. A ``frozen_context`` (B, E)
    replaces the computed one. ``forward`` lists the other inputs.

    Args:
        config: sizes and settings; ``input_features`` must be None.

    Raises:
        ValueError: if ``config`` has ``input_features``. A call raises it for an unknown argument, a shape that does
            not fit, or a cache without y if y has to be computed.

    Examples:
        >>> sizes = {"n_embd": 32, "n_head": 2, "context_size": 8, "context_heads": 2}
        >>> config = relinear.CGTConfig(vocab_size=64, n_layer=2, context_layer=1, **sizes)
        >>> relinear.CGTForCausalLM(config)(torch.randint(64, (1, 8))).logits.shape
        torch.Size([1, 8, 64])
    """

    _tied_weights_keys = {"lm_head.weight": "transformer.wte.weight"}  # noqa: RUF012

    def __init__(self, config: CGTConfig):
        super().__init__(config)
        if config.input_features is not None:
            raise ValueError("a language model reads tokens: leave input_features None, or use CGTForRegression")
        self.transformer = CGTModel(config)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        frozen_context: Tensor | None = None,
        context_rate: float = 0.0,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CGTOutput:
        """Return next-token logits, with the context computed for each token, frozen, or a moving average.

        Args:
            input_ids: (B, T).
            past_key_values, attention_mask, use_cache, logits_to_keep: as in GPT-2.
            position_ids: (B, T) or (1, T); by default they continue those of the cache, or start at 0.
            inputs_embeds: (B, T, D + E), of both streams; (B, T, D), of x alone, with a frozen context.
            frozen_context: (B, E), a y that modulates every token instead of the computed one; the y stream is then not
                computed. Or (B, T, E), one per token.
            context_rate: gamma of the moving average used_i = (1 - gamma) used_{i-1} + gamma y_i, which starts from
                ``frozen_context``; 0 keeps it frozen.
            labels: (B, T), which the model shifts; -100 is ignored. ``num_items_in_batch`` works as in other HF models.

        Raises:
            ValueError: for an unknown argument, a shape that does not fit, or a cache without y if y must be computed.
        """
        outputs = self.transformer(
            input_ids,
            past_key_values=past_key_values,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            frozen_context=frozen_context,
            context_rate=context_rate,
            use_cache=use_cache,
            **kwargs,
        )
        logits = self.lm_head(_at(outputs.last_hidden_state, logits_to_keep))
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, vocab_size=self.config.vocab_size, **kwargs)
        return _with_head(outputs, loss, logits)


class CGTForRegression(_CGTWithHead):
    """Predict vectors from vectors with a CGT, for in-context regression (CGT, Section 4.1).

    ``model(vectors)`` takes (B, T, input_features) and returns predictions, ``logits``, (B, T, output_features). With
    ``targets`` of this shape it also returns the ``loss``, their mean squared error.

    With ``vector_input="padded"`` a vector is embedded as in the paper: it is padded with zeros to the width of the
    embedding, so the x stream starts from it and the y stream from its position alone. By default this linear map is
    learnt, one for both streams. It is initialised at the scale of the position embeddings, as GPT-2's token embedding
    is. With a larger scale, as that of padded vectors, the positions, which pair each x with its y, would hardly count.
    The read-out, which the paper does not describe, is learnt in both cases.

    Args:
        config: sizes and settings, including ``input_features`` and ``output_features``.

    Raises:
        ValueError: if ``config`` lacks one of the two. A call raises it for an unknown argument or a shape that does
            not fit.

    Examples:
        >>> sizes = {"n_embd": 32, "n_head": 2, "context_size": 8, "context_heads": 2}
        >>> config = relinear.CGTConfig(n_layer=2, context_layer=1, input_features=3, output_features=1, **sizes)
        >>> relinear.CGTForRegression(config)(torch.randn(1, 8, 3)).logits.shape
        torch.Size([1, 8, 1])
    """

    config_class = CGTRegressionConfig

    def __init__(self, config: CGTConfig):
        if type(config) is CGTConfig:  # under its own type a saved model is found again
            config = CGTRegressionConfig.from_dict(config.to_dict() | {"model_type": CGTRegressionConfig.model_type})
        super().__init__(config)
        if config.input_features is None or config.output_features is None:
            raise ValueError(
                f"CGTForRegression needs input_features and output_features, got {config.input_features!r} and "
                f"{config.output_features!r}"
            )
        self.transformer = CGTModel(config)
        width = config.n_embd + config.context_size
        self.vector_in = nn.Linear(config.input_features, width) if config.vector_input == "learned" else None
        self.head = nn.Linear(config.n_embd, config.output_features)
        self.post_init()

    def _bare(self, vectors: Tensor, **kwargs: Any) -> CGTOutput:
        if vectors.ndim != 3 or vectors.shape[-1] != self.config.input_features:
            raise ValueError(f"vectors must be (B, T, {self.config.input_features}), got {tuple(vectors.shape)}")
        if self.vector_in is not None:
            return self.transformer(inputs_embeds=self.vector_in(vectors), **kwargs)
        missing = self.config.n_embd + self.config.context_size - vectors.shape[-1]
        padded = nn.functional.pad(vectors, (0, missing)).to(self.transformer.wpe.weight.dtype)
        return self.transformer(inputs_embeds=padded, **kwargs)

    @can_return_tuple
    def forward(
        self, vectors: Tensor, targets: Tensor | None = None, target_mask: Tensor | None = None, **kwargs: Any
    ) -> CGTOutput:
        """Return predictions (in ``logits``) for every position and their mean squared error.

        Args:
            vectors: (B, T, input_features).
            targets: (B, T, output_features), for each position what it should predict.
            target_mask: (B, T), nonzero where the prediction counts; None counts all.
            kwargs: ``attention_mask``, ``position_ids``, ``frozen_context``, ``context_rate``, ``past_key_values``,
                ``use_cache`` as in ``CGTForCausalLM``.
        """
        outputs = self._bare(vectors, **kwargs)
        predictions = self.head(outputs.last_hidden_state)
        loss = None if targets is None else squared_error(predictions, targets, target_mask)
        return _with_head(outputs, loss, predictions)


def squared_error(predictions: Tensor, targets: Tensor, target_mask: Tensor | None) -> Tensor:
    """Return the mean squared error of predictions (B, T, F) where ``target_mask`` (B, T) is set; None is all."""
    errors = (predictions - targets).square().mean(-1)
    weights = torch.ones_like(errors) if target_mask is None else (target_mask != 0).to(errors.dtype)
    return (errors * weights).sum() / weights.sum().clamp(min=1)


def _check_arguments(kwargs: dict[str, Any]) -> None:
    """Raise an error for arguments that no layer reads: a misspelt ``frozen_context`` would be ignored silently."""
    for name, value in kwargs.items():
        if value is not None and name not in _PASSED_ON and not name.startswith("relinear_"):
            takes = {c.__name__: inspect.signature(c.forward).parameters for c in (CGTForCausalLM, CGTForRegression)}
            owners = [owner for owner, names in takes.items() if name in names]
            known = {argument for names in takes.values() for argument in names} - {"self", "kwargs"}
            hint = f"it is one of {owners[0]}" if owners else did_you_mean(name, sorted(known))
            raise UnknownSettingError(f"this CGT takes no argument {quoted(name)}; {hint}")


def _with_head(outputs: CGTOutput, loss: Tensor | None, logits: Tensor) -> CGTOutput:
    remaining = {name: value for name, value in outputs.items() if name != "last_hidden_state"}
    return CGTOutput(loss=loss, logits=logits, **remaining)


AutoModel.register(CGTConfig, CGTModel)
AutoModelForCausalLM.register(CGTConfig, CGTForCausalLM)
AutoModelForCausalLM.register(CGTRegressionConfig, CGTForRegression)  # the one class that relinear looks models up in


def _at(hidden: Tensor, positions: int | Tensor) -> Tensor:
    """Return ``hidden`` (B, T, D) at the positions whose logits are wanted, as in transformers.

    ``positions`` is the number of last positions (0 for all), positions (K,) for all samples, positions (B, K) for each
    sample, or a mask (B, T), for which the result is flat.
    """
    if isinstance(positions, int):
        return hidden[:, -positions:]
    if positions.ndim == 1:
        return hidden[:, positions]
    if positions.dtype == torch.bool:
        return hidden[positions]
    return hidden.take_along_dim(positions[..., None], 1)
