"""Add a second token embedding to the MLPs' inputs: the baseline for layers that are gated by such an embedding."""

# Legend: B batch, T tokens, D width of the residual stream, C dim of the embedding

from typing import Any

from torch import Tensor, nn

from relinear.activations.shared_context import (
    ContextOwner,
    conditioned_operators,
    current_context,
    decoder_for_context,
)
from relinear.contract.attachment import AttachmentConfig, factory_kwargs_like
from relinear.contract.config import Count, NonNegative, register
from relinear.hf.model_config import text_config
from relinear.hf.sub_blocks import sub_blocks
from relinear.hf.vocabulary import check_table_fits


class _Table(ContextOwner):
    """Compute the second embedding from ``embedding`` (V, C) and, unless C = D, ``projection`` (D, C)."""

    token_table_attribute = "embedding"
    finite_fan_in = ("projection",)

    def __init__(self, vocabulary: int, dim: int, width: int, std: float, **kw: Any) -> None:
        super().__init__()
        self.context_dim, self.std = width, std
        self.embedding = nn.Embedding(vocabulary, dim, **kw)
        self.projection = None if dim == width else nn.Linear(dim, width, bias=False, **kw)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw entries of standard deviation ``std``, and a projection that keeps it."""
        nn.init.normal_(self.embedding.weight, std=self.std)
        if self.projection is not None:
            nn.init.normal_(self.projection.weight, std=self.projection.in_features**-0.5)

    def flops_per_token(self) -> int:
        """Return the FLOPs per token of the projection; the lookup is free."""
        return 0 if self.projection is None else 2 * self.projection.weight.numel()

    def forward(self, ids: Tensor) -> Tensor:
        """Return the vectors (B, T, D) of token ids (B, T)."""
        vectors = self.embedding(ids)
        return vectors if self.projection is None else self.projection(vectors)

    def contexts(self, decoder: Any, inputs: dict[str, Any]) -> Tensor:
        """Return the vectors for the MLPs, from the arguments of the decoder."""
        ids = inputs.get("input_ids")
        if ids is None:
            raise ValueError("a second embedding needs input_ids and got inputs_embeds; give the model token ids")
        check_table_fits(self.embedding, decoder, "second embedding")
        return self(ids)


def add_embedding(mlp: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Add the second embedding of each token to an MLP's input; a forward pre-hook."""
    x = args[0]
    return (x + current_context(x, x.shape[-1], SecondEmbedding.kind).to(x.dtype), *args[1:])


@register
class SecondEmbedding(AttachmentConfig):
    """Add a second, learnt embedding e_t of token t to every MLP's input: mlp(norm(x) + W e_t).

    It is the same in every layer. It gives a dense model the information that CCL's default context gives to gates: the
    token itself, not passed through the residual stream. So if CCL is better than this model, its gates are the reason.
    It is passed to layers as CCL's context is, so a model has either this or a ``ContextManager``.

    Args:
        dim: C, width of the embedding; by default the model's width, and then there is no W.
        std: initial standard deviation of e_t; by default that of the model (``initializer_range``).

    Examples:
        >>> model = relinear.from_preset("tiny")
        >>> relinear.attach_(model, relinear.residual.SecondEmbedding(dim=16))
        >>> model(torch.randint(258, (1, 8))).logits.shape
        torch.Size([1, 8, 258])
    """

    kind = "second_embedding"

    dim: Count | None = None
    std: NonNegative | None = None

    def check(self, model: nn.Module) -> None:
        """Raise ValueError if the embedding cannot be passed to the MLPs of ``model``."""
        decoder_for_context(model)
        sub_blocks(model)
        for name, operator in conditioned_operators(model).items():
            raise ValueError(
                f"{name} ({operator.config.kind}) reads a context: attach a ContextManager, not a second embedding"
            )

    def attach(self, model: nn.Module) -> None:
        decoder: Any = decoder_for_context(model)
        table = decoder.get_input_embeddings()
        width = text_config(model).hidden_size
        std = getattr(model.config, "initializer_range", 0.02) if self.std is None else self.std
        owner = _Table(table.num_embeddings, self.dim or width, width, std, **factory_kwargs_like(table))
        owner.train(decoder.training).requires_grad_(next(table.parameters()).requires_grad).install(decoder)
        for block in sub_blocks(model):
            if block.role == "mlp":
                block.module.register_forward_pre_hook(add_embedding)
