"""The model card: ``README.md`` beside a checkpoint says what is in it and how it is loaded."""

from collections import Counter
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData
from torch import nn

from relinear.core.attachment import attachments
from relinear.core.operator import named_operators
from relinear.system.files import write_text
from relinear.system.written import CARD, CARD_LINE, is_own_card, signed_card


def write_card(model: Any, directory: Path) -> None:
    """Write ``README.md`` into ``directory``, unless there is one that somebody else wrote, or changed."""
    path = directory / CARD
    if not path.exists() or is_own_card(path):
        write_text(path, _card(model))


def foreign_card(directory: Path) -> str | None:
    """Return the text of ``README.md`` in ``directory`` if somebody else wrote it, or changed it."""
    path = directory / CARD
    return None if is_own_card(path) or not path.is_file() else path.read_text(encoding="utf-8", errors="replace")


def settle_card(model: Any, directory: Path, kept: str | None) -> None:
    """Put ``kept`` into ``README.md``, or without it relinear's card, unless what is there comes from a person.

    That is what transformers does before it uploads ``directory``: it puts the Hub's own card there, or its template.
    """
    path = directory / CARD
    card = ModelCard.load(path)
    card.data.tags = [tag for tag in card.data.tags or [] if tag not in (model.model_tags or [])]  # added to the Hub's
    if kept is not None:
        write_text(path, kept)
    elif is_own_card(str(card)) or card.text == _template().text:
        write_text(path, _card(model))


def _template() -> ModelCard:
    """What transformers sends for a model without a card (``create_and_tag_model_card``)."""
    description = (
        "This is the model card of a 🤗 transformers model that has been pushed on the Hub. This model card has been "
        "automatically generated."
    )
    return ModelCard.from_template(ModelCardData(library_name="transformers"), model_description=description)


def remove_card(directory: Path) -> None:
    """Remove ``README.md`` from ``directory`` if it is relinear's: it tells of a model that is no longer there."""
    if is_own_card(directory / CARD):
        (directory / CARD).unlink()


def _card(model: Any) -> str:
    name = _base_model(model)
    causal = type(model).__name__.endswith("ForCausalLM")
    front = ["library_name: transformers", "tags:", "- relinear"]
    front += [f"base_model: {name}"] if name else []
    front += ["pipeline_tag: text-generation"] if causal else []
    origin = f"[{name}](https://huggingface.co/{name})" if name else f"a `{type(model).__name__}`"
    lines = ["---", *front, "---", CARD_LINE, "", f"# {origin} with layers of relinear", ""]
    lines += [*_table(model), "", *_how_to_load(causal), ""]
    return signed_card("\n".join(lines))


def _base_model(model: Any) -> str | None:
    """The model's name on the Hub; None for a local directory and for a model that was built from a config."""
    name = str(getattr(model.config, "_name_or_path", "") or "")
    return name if name.count("/") == 1 and not Path(name).exists() and name[0] not in "./~" else None


def _table(model: nn.Module) -> list[str]:
    rows: Counter[tuple[str, int, int]] = Counter()
    sizes: Counter[tuple[str, int, int]] = Counter()
    for _, operator in named_operators(model):
        row = (repr(operator.config), operator.in_features, operator.out_features)
        rows[row] += 1
        sizes[row] += sum(value.nbytes for value in operator.state_dict().values())
    count = getattr(model, "num_parameters", None)
    lines = [f"{count():,} parameters." if callable(count) else ""]
    if rows:
        lines += ["", "| operator | in -> out | layers | bytes |", "| --- | --- | ---: | ---: |"]
        lines += [f"| `{r[0]}` | {r[1]} -> {r[2]} | {rows[r]} | {sizes[r]:,} |" for r in rows]
    attached = attachments(model)
    if attached:
        lines += ["", "Attached to the model: " + ", ".join(f"`{config!r}`" for config in attached) + "."]
    return lines


def _how_to_load(causal: bool) -> list[str]:
    auto = "AutoModelForCausalLM" if causal else "AutoModel"
    return [
        "## Loading",
        "",
        "```sh",
        "pip install relinear",
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
