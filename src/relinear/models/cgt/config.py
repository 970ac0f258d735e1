"""Settings of the Contextually Guided Transformer."""

import dataclasses
from collections.abc import Iterable
from typing import Annotated, Any

from transformers import AutoConfig, GPT2Config

from relinear.contract.config import Count, IntRange, UnknownSettingError, check_choice, check_value
from relinear.hf.config_record import without_loader
from relinear.settings.messages import did_you_mean, quoted

#: further keywords that any transformers configuration accepts, or that earlier versions wrote
_OF_TRANSFORMERS = frozenset(
    (
        *("attn_implementation", "auto_map", "experts_implementation", "gradient_checkpointing", "is_decoder"),
        *("model_type", "n_ctx", "name_or_path", "num_labels", "output_attentions", "per_layer_config"),
        *("quantization_config", "task_specific_params", "tokenizer_class", "torch_dtype"),
    )
)


class CGTConfig(GPT2Config):
    """Hold the settings of a CGT: a GPT-2 whose upper layers are modulated by a context.

    The GPT-2 of width ``n_embd`` is the x stream; the context is the y stream.

    All fields of ``transformers.GPT2Config`` describe the x stream, so that a specialised model is a GPT-2 with the
    same settings. Dropout is 0 by default, as in the paper.

    Args:
        context_layer: l, the number of layers that carry both streams; the n_layer - l layers above are modulated. At
            least 0 (the context is then the token's embedding) and less than n_layer.
        context_size: width of the y stream, dim y.
        context_heads: attention heads of the y stream; must divide ``context_size``.
        context_inner: width of the y stream's MLP (default 4 dim y).
        rank: r of the generated change of weights.
        templates: M, the number of template pairs per generated operator.
        mixing: ``tanh`` or ``softmax``, the non-linearity that computes template weights from the context.
        context_norm: whether y passes a LayerNorm when it is read at layer l. The paper does not say. By default it
            does: a pre-LN stream grows with depth, and every pre-LN model normalises it before using it.
        modulated: False keeps T at the identity, as a baseline: y is computed and has no effect.
        variational: the VAE variant (Appendix A.1): y is sampled in training and is its mean in evaluation.
        input_features, output_features: for ``CGTForRegression``: sizes of the vectors that replace tokens
            and of the predictions. None for language models.
        vector_input: how vectors enter a ``CGTForRegression``: ``learned``, by a linear map, or ``padded`` with zeros
            to the model's width, as in the paper.

    Raises:
        ValueError: for an unknown keyword (names the nearest), if a size is not positive, does not divide, or the layer
            lies outside the model.

    Examples:
        >>> sizes = {"n_embd": 32, "n_head": 2, "context_size": 8, "context_heads": 2}
        >>> config = relinear.CGTConfig(n_layer=2, context_layer=1, **sizes)
        >>> config.rank, config.templates
        (4, 16)
    """

    model_type = "relinear_cgt"

    resid_pdrop: float | int = 0.0
    embd_pdrop: float | int = 0.0
    attn_pdrop: float | int = 0.0
    context_layer: int = 8
    context_size: int = 128
    context_heads: int = 8
    context_inner: int | None = None
    rank: int = 4
    templates: int = 16
    mixing: str = "tanh"
    context_norm: bool = True
    modulated: bool = True
    variational: bool = False
    input_features: int | None = None
    output_features: int | None = None
    vector_input: str = "learned"

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Read a saved configuration; like transformers, keep entries that are not fields of this class."""
        values = without_loader(config_dict)
        foreign = set(cls._unknown(values))
        made = super().from_dict({k: v for k, v in values.items() if k not in foreign}, **kwargs)
        config = made[0] if isinstance(made, tuple) else made
        for key in foreign:
            setattr(config, key, values[key])
        return made

    @classmethod
    def _unknown(cls, names: Iterable[str]) -> list[str]:
        from transformers import GenerationConfig

        fields = {field.name for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
        known = {*fields, *cls.attribute_map, *_OF_TRANSFORMERS}
        unknown = [name for name in names if name not in known and not name.startswith("_")]
        # Earlier transformers wrote settings of generation into configurations; transformers ignores them now.
        return [name for name in unknown if name not in GenerationConfig().to_dict()] if unknown else []

    def __post_init__(self, **kwargs: Any) -> None:
        for key in self._unknown(kwargs):
            fields = sorted(field.name for field in dataclasses.fields(type(self)))  # type: ignore[arg-type]
            raise UnknownSettingError(f"CGTConfig: unknown setting {quoted(key)}; {did_you_mean(key, fields)}")
        for key in [key for key in kwargs if key in self.attribute_map]:
            setattr(self, key, kwargs.pop(key))  # before the checks, which use the fields' main names
        for name in ("n_layer", "n_embd", "n_head", "context_size", "context_heads", "rank", "templates"):
            check_value(name, getattr(self, name), Count)
        for name in ("context_inner", "input_features", "output_features"):
            check_value(name, getattr(self, name), Count | None)
        check_choice("mixing", self.mixing, ("tanh", "softmax"))
        check_choice("vector_input", self.vector_input, ("learned", "padded"))
        if self.vector_input == "padded" and (self.input_features or 0) > self.n_embd:
            raise ValueError(
                f"input_features={self.input_features} cannot be padded to the x stream's n_embd={self.n_embd}; make "
                'n_embd at least as large, or use vector_input="learned"'
            )
        check_value("context_layer", self.context_layer, Annotated[int, IntRange(0, self.n_layer - 1)])
        for heads, size in (("n_head", "n_embd"), ("context_heads", "context_size")):
            if getattr(self, size) % getattr(self, heads):
                raise ValueError(f"{heads}={getattr(self, heads)} does not divide {size}={getattr(self, size)}")
        super().__post_init__(**kwargs)


class CGTRegressionConfig(CGTConfig):
    """Settings of a ``CGTForRegression``; its ``model_type`` lets presets and Auto classes find that class."""

    model_type = "relinear_cgt_regression"

    input_features: int | None = 16
    output_features: int | None = 1


for config in (CGTConfig, CGTRegressionConfig):
    AutoConfig.register(config.model_type, config)
