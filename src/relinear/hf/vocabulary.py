"""Check that a model and its parts have an embedding for every token and position."""

from typing import Any

from torch import nn

from relinear.hf.model_config import text_config


def token_tables(model: nn.Module) -> list[nn.Embedding]:
    """Return the token embeddings of attached parts, in the attributes that ``token_table_attribute`` of a part names.

    Raises:
        ValueError: if an adapter wraps one, so that it cannot be resized.
    """
    names = [(module, getattr(module, "token_table_attribute", None)) for module in model.modules()]
    tables = [getattr(module, name) for module, name in names if isinstance(name, str)]
    for table in tables:
        if table is not None and not isinstance(table, nn.Embedding):
            raise ValueError(f"a {type(table).__name__} wraps a token embedding; merge or unload it first")
    return [table for table in tables if table is not None]


def vocab_size_of(table: Any) -> int:
    """Return the number of tokens of an embedding, or of an adapter around one."""
    return getattr(table, "num_embeddings", None) or table.weight.shape[0]


def check_table_fits(table: nn.Embedding, model: Any, owner: str) -> None:
    """Raise ValueError if ``model`` has more tokens than ``table``, the token embedding of its ``owner``."""
    vocab_size = vocab_size_of(model.get_input_embeddings())
    if vocab_size > table.num_embeddings:
        raise ValueError(
            f"the model's vocabulary has grown to {vocab_size}, the {owner} knows {table.num_embeddings} tokens; "
            "resize it by model.resize_token_embeddings, which resizes both"
        )


def check_tokenizer_fits(tokenizer: Any, model: Any) -> None:
    """Raise ValueError if ``tokenizer`` can return ids that ``model`` has no embedding for.

    Special tokens other than end-of-text are ignored: many tokenizers have a padding token that their model never sees.
    """
    embeddings = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
    entries = getattr(embeddings, "num_embeddings", None)
    if entries is None or not hasattr(tokenizer, "get_vocab"):
        return  # not a Hugging Face tokenizer or embedding: nothing to check
    special = set(tokenizer.all_special_ids) - {tokenizer.eos_token_id}
    ids = [index for index in tokenizer.get_vocab().values() if index not in special]
    if ids and max(ids) >= entries:
        name = getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
        raise ValueError(
            f"the tokenizer {name!r} has {len(tokenizer)} entries, the model embeds {entries}: it is not "
            "this model's tokenizer; give the one that the model was trained with"
        )


def max_positions(model: Any) -> int | None:
    """Return the maximum sequence length of ``model`` according to its config; None if there is no limit."""
    positions = getattr(text_config(model), "max_position_embeddings", None)
    return positions if isinstance(positions, int) and positions > 0 else None


def check_length_fits(length: int, model: Any) -> None:
    """Raise ValueError if ``length`` tokens exceed the maximum sequence length of ``model``."""
    positions = max_positions(model)
    if positions is not None and length > positions:
        more = "lower sequence_length, or build the model with a larger max_position_embeddings"
        raise ValueError(f"texts of {length} tokens are too long for this model, which reads {positions}; {more}")
