"""Read facts from a model's config; a model may have none."""

from pathlib import Path
from typing import Any


def text_config(model: Any) -> Any:
    """Return the config of a model's language model, which is the model's own unless it is made of several models."""
    config = getattr(model, "config", None)
    getter = getattr(config, "get_text_config", None)
    return getter() if callable(getter) else config


def is_encoder_decoder(model: Any) -> bool:
    """Return whether a model has an encoder beside its decoder."""
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))


def loaded_from(model: Any) -> str:
    """Return the path or the Hub's name that a model was loaded from; "" if it was built from a config."""
    return str(getattr(getattr(model, "config", None), "_name_or_path", "") or "")


def model_name(model: Any) -> str:
    """Return a model's name: the last part of the path that it was loaded from (RUN for RUN/model), or its class."""
    parts = Path(loaded_from(model) or type(model).__name__).parts
    return next((part for part in reversed(parts) if part != "model"), "model")
