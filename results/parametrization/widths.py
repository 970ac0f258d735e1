"""A preset at another width, with heads of one size."""

from relinear.models import is_preset, preset_config, preset_names
from relinear.training.settings import TrainSettings


def at_heads(settings: TrainSettings, width: int) -> TrainSettings:
    """``settings`` with a preset at another width: heads of the same size, an MLP in proportion.

    Raises:
        ValueError: if the model is no preset, the width is no multiple of a head's size, or its heads cannot share keys
            and values as those of the preset do.
    """
    if not is_preset(settings.model):
        known = ", ".join(preset_names())
        raise ValueError(f"{settings.model!r} has the one width it was saved with; give a preset ({known})")
    config = preset_config(settings.model, **settings.model_overrides)
    head = config.hidden_size // config.num_attention_heads
    if width < head or width % head:
        raise ValueError(
            f"width {width} is no multiple of {head}, the size of a head of {settings.model}; give such widths, or "
            "another number of heads (num_attention_heads)"
        )
    own = {config.attribute_map.get(key, key): value for key, value in settings.model_overrides.items()}
    sizes = {"hidden_size": width, "num_attention_heads": width // head}
    inner = "n_inner" if hasattr(config, "n_inner") else "intermediate_size"
    if getattr(config, inner) is not None:
        sizes[inner] = round(getattr(config, inner) * width / config.hidden_size)
    groups = getattr(config, "num_key_value_heads", None)
    if groups is not None:
        sizes["num_key_value_heads"] = shared = max(1, groups * width // config.hidden_size)
        if width // head % shared:
            raise ValueError(
                f"width {width} has {width // head} heads, which {shared} heads of keys and values cannot serve "
                f"(num_key_value_heads={groups} at width {config.hidden_size}); give another width"
            )
    return settings.replace(model_overrides=own | {config.attribute_map.get(k, k): v for k, v in sizes.items()})
