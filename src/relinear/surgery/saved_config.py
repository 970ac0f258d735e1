"""Write the config of a model with operators so that no program loads it as a stock model.

A stock class would load such a checkpoint with only a warning and initialise the missing layers at random. So
``config.json`` has a model type that only relinear knows, and names a loader for ``trust_remote_code=True``. Classes
called by name (``LlamaForCausalLM.from_pretrained``) ignore the type; they fail at ``transformers_weights``, which
holds advice instead of a file name. In memory a config is the stock one.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from relinear.hf.config_record import LOADER, METHOD, record_in_config, without_loader
from relinear.settings.messages import quoted
from relinear.system.files import write_text

_LOADER_TEXT = '''"""Lets programs that do not import relinear load this checkpoint, with trust_remote_code=True.

Some layers of this model are relinear's; they come from the installed package: `pip install relinear`. After
`import relinear` this file is not needed, nor is trust_remote_code.
"""

from relinear import SavedConfig

__all__ = ["SavedConfig"]
'''
_BASE_TYPE = "base_model_type"
_HOW_TO_LOAD = (
    "this checkpoint has layers of relinear: `pip install relinear`, then `import relinear` before loading it, or load "
    "it through an Auto class with trust_remote_code=True"
)


class SavedConfig(PreTrainedConfig):
    """Read a ``config.json`` that ``write_config`` wrote, as the stock config that it describes (``LlamaConfig``, ...).

    ``AutoConfig`` finds this class by the model type once relinear is imported, else by the loader in the checkpoint.

    Examples:
        >>> _ = relinear.save_pretrained(relinear.from_preset("tiny"), "out")
        >>> type(relinear.SavedConfig.from_pretrained("out")).__name__
        'LlamaConfig'
    """

    model_type = METHOD

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """Return the stock config, read from what ``AutoConfig.from_pretrained`` takes."""
        values, unused = PreTrainedConfig.get_config_dict(pretrained_model_name_or_path, **kwargs)
        return cls.from_dict(values, **unused)

    @classmethod
    def from_dict(cls, config_dict: Mapping[str, Any], **kwargs: Any) -> Any:
        """Return the stock config that ``config_dict`` describes, with the record of operators in quantization_config.

        Raises:
            ValueError: if the record of operators is gone, or the type of the model underneath is unknown.
        """
        values = {key: value for key, value in without_loader(config_dict).items() if key != "transformers_weights"}
        stock_type = values.pop(_BASE_TYPE, values.get("model_type"))
        if not isinstance(stock_type, str) or stock_type == METHOD or stock_type not in CONFIG_MAPPING:
            raise ValueError(
                f"config.json gives {quoted(stock_type)} as {_BASE_TYPE}, unknown to this transformers; upgrade it"
            )
        config = CONFIG_MAPPING[stock_type].from_dict(values | {"model_type": stock_type}, **kwargs)
        if values.get("model_type") == METHOD and not values.get("quantization_config"):
            raise ValueError("config.json has lost its record of operators (quantization_config); restore a copy")
        return config


AutoConfig.register(METHOD, SavedConfig)


def needs_loader(config: PreTrainedConfig) -> bool:
    """Return whether only relinear can load this config's model: it has operators, or relinear defines its class."""
    return record_in_config(config) is not None or type(config).__module__.startswith("relinear.")


def remove_file_only_fields_(config: PreTrainedConfig) -> None:
    """Remove the fields that ``write_config`` adds to ``config.json`` from a config that a stock class read."""
    for key in ("model_type", "transformers_weights", _BASE_TYPE):  # the class knows its model_type
        config.__dict__.pop(key, None)
    auto_map = without_loader(vars(config)).get("auto_map")
    config.__dict__.pop("auto_map", None)
    if auto_map:
        config.auto_map = auto_map


def write_config(config: PreTrainedConfig, path: Path, text: str) -> None:
    """Write ``text``, the stock JSON of ``config``, to ``path`` with the changes above, and the loader next to it."""
    values = json.loads(text)
    stock_type = type(config).model_type
    is_known = stock_type in CONFIG_MAPPING  # else the model's own remote code has to read the file
    if is_known:
        values["auto_map"] = values.get("auto_map", {}) | {"AutoConfig": f"{LOADER}.{SavedConfig.__name__}"}
        write_text(path.with_name(f"{LOADER}.py"), _LOADER_TEXT)
    if record_in_config(config) is not None:
        values["transformers_weights"] = _HOW_TO_LOAD
        if is_known:
            values |= {"model_type": METHOD, _BASE_TYPE: stock_type}
    if path.is_symlink():  # do not write through a link, such as one into the Hub's cache
        path.unlink()
    write_text(path, json.dumps(values, indent=2, sort_keys=True) + "\n")
