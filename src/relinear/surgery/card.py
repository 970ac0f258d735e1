"""Write the model card: a checkpoint's ``README.md``, which says what the model contains and how to load it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from relinear.contract.operator import named_operators
from relinear.hf.attachments import attachments
from relinear.hf.model_config import loaded_from
from relinear.surgery.summary import module_bytes, module_parameters
from relinear.system.files import write_text
from relinear.system.grouped import grouped

CARD = "README.md"
_MARKER = "<!-- Written by relinear, and again whenever this model is saved. Remove this line to keep your changes. -->"


def write_card(model: Any, record: Mapping[str, Any], directory: Path) -> None:
    """Write ``README.md`` into ``directory``; ``record`` is the one in the model's ``config.json``."""
    name = _base_model(model)
    causal = type(model).__name__.endswith("ForCausalLM")
    front = ["library_name: transformers", "tags:", "- relinear"]
    front += [f"base_model: {name}"] if name else []
    front += ["pipeline_tag: text-generation"] if causal else []
    origin = f"[{name}](https://huggingface.co/{name})" if name else f"a `{type(model).__name__}`"
    lines = ["---", *front, "---", _MARKER, "", f"# {origin} with layers of relinear", ""]
    packages = {source["package"] for source in record.get("packages", {}).values() if "package" in source}
    lines += [*_table(model), "", *_loading_section(causal, sorted(packages)), ""]
    write_text(directory / CARD, "\n".join(lines))


def is_generated_card(path: Path) -> bool:
    """Return whether ``path`` is a model card that relinear wrote and may replace."""
    return path.is_file() and _MARKER in path.read_text(encoding="utf-8", errors="replace")


def _base_model(model: Any) -> str | None:
    """Return the model's name on the Hub; None for a local directory or a model that was built from a config."""
    name = loaded_from(model)
    return name if name.count("/") == 1 and not Path(name).exists() and name[0] not in "./~" else None


def _table(model: nn.Module) -> list[str]:
    named = named_operators(model)
    sizes = grouped(((repr(op.config), op.in_features, op.out_features), module_bytes(op)) for _, op in named)
    lines = [f"{module_parameters(model):,} parameters."]
    if sizes:
        lines += ["", "| operator | in -> out | layers | bytes |", "| --- | --- | ---: | ---: |"]
        lines += [f"| `{c}` | {i} -> {o} | {len(size)} | {sum(size):,} |" for (c, i, o), size in sizes.items()]
    attached = attachments(model)
    if attached:
        lines += ["", "Attached to the model: " + ", ".join(f"`{config!r}`" for config in attached) + "."]
    return lines


def _loading_section(causal: bool, packages: list[str]) -> list[str]:
    auto = "AutoModelForCausalLM" if causal else "AutoModel"
    return [
        "## Loading",
        "",
        "```sh",
        f"pip install {' '.join(['relinear', *packages])}",
        "```",
        "",
        "```python",
        "import relinear",
        f"from transformers import {auto}",
        "",
        f'model = {auto}.from_pretrained("<this repository or directory>")',
        "```",
        "",
        "Programs that do not import relinear load it with `trust_remote_code=True`: `configuration_relinear.py` here",
        "does nothing but import the installed package. Without either, loading is refused: a stock class would fill",
        "the replaced layers with random numbers.",
    ]
