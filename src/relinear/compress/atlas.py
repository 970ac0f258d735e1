"""The atlas of a pretrained model: what every operator would cost in the place of every layer, at several sizes."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from relinear.compress.budget import layer_parameters
from relinear.compress.calibrate import calibrate
from relinear.compress.checks import check_ids, check_model_fits
from relinear.compress.corpus import read_corpus
from relinear.compress.settings import CompressSettings
from relinear.compress.targets import by_decoder_layer, check_tokens, linear_layers, model_name
from relinear.core import plugins
from relinear.core.config import shown
from relinear.core.modes import evaluating
from relinear.core.moments import Moments
from relinear.core.operator import NotLinearError, Operator, OperatorConfig, dense_weight, linear_features
from relinear.system.files import read_json, write_json
from relinear.system.lock import only_process_in
from relinear.system.machine import command_line, describe_machine

__all__ = ["RECORD", "AtlasSettings", "atlas", "default_operators"]

RECORD = "atlas.json"


@dataclasses.dataclass(frozen=True, kw_only=True)
class AtlasSettings:
    """What an atlas looks at.

    Args:
        operators: as text, such as ``monarch:blocks=8``; None for all that can be fitted and save parameters.
        layers: decoder layers; None for all.
        shares: of a layer's parameters, at which operators are tried whose sizes are fitted one by one.
        steps: of the descent of such a fit, at most.
        tokens, sequence_length: of the corpus that the layers are measured on.
    """

    operators: Sequence[str] | None = None
    layers: Sequence[int] | None = None
    shares: Sequence[float] = (0.125, 0.25, 0.5, 0.75)
    steps: int = 5
    tokens: int = 8192
    sequence_length: int = 512

    def __post_init__(self) -> None:
        if not self.shares or not all(0 < share < 1 for share in self.shares):
            raise ValueError(f"shares must lie between 0 and 1, got {shown(self.shares)}")
        if self.steps < 1:
            raise ValueError(f"steps must be at least 1, got {self.steps}")


def default_operators() -> list[OperatorConfig]:
    """Return all operators, installed ones among them, that have a dense matrix and fewer parameters than it."""
    for name in plugins.offered("operator"):
        plugins.find("operator", name)
    made = []
    for _, known in sorted(OperatorConfig.kinds().items()):
        try:
            config = known()
        except (TypeError, ValueError):  # needs a setting
            continue
        if isinstance(config, OperatorConfig) and _is_candidate(config):
            made.append(config)
    return made


def _is_candidate(config: OperatorConfig) -> bool:
    """Whether it is fitted to a weight, has a dense matrix of its own, and is all in its floating-point parameters."""
    sizes = config.sizes(64, 64)
    if config.conditioned or not config.fits_weight or not sizes:
        return False
    operator = sizes[0].build(64, 64, bias=False)
    if any(buffer.element_size() == 1 for buffer in operator.buffers()):
        return False  # few bits for each weight: a count of parameters says nothing
    try:
        operator.to_dense()
    except NotLinearError:
        return False
    return True


def atlas(
    model: Any,
    texts: Iterable[Any] | Mapping[str, Iterable[Any]],
    *,
    tokenizer: Any = None,
    settings: AtlasSettings | None = None,
    out_dir: str | Path,
    on_progress: Callable[[str, int, int], None] = lambda phase, done, total: None,
) -> dict[str, Any]:
    """Return, for every linear layer of ``model``, the second-order cost of every operator at several sizes.

    The cost is 0.5 tr(G (W - W') A (W - W')^T) in nats a token, with W' the operator's best fit under the moments of
    the layer's inputs (A) and output gradients (G). The model is left as it is. Killed and called again with the same
    arguments, it goes on behind the last layer that is done.

    Args:
        model: a Hugging Face decoder.
        texts: as ``relinear.compress`` takes them.
        tokenizer: of the model, needed for texts.
        settings: what is looked at.
        out_dir: where the moments and ``atlas.json`` are kept.
        on_progress: called with a phase, how much of it is done and how much there is.

    Returns:
        What ``atlas.json`` holds: ``layers``, by name, with the ``depth``, ``type``, ``parameters``, ``nothing`` (the
        cost without the layer) and ``operators``: kind -> a list of ``setting``, ``parameters`` and ``nats``.

    Raises:
        ValueError: as ``relinear.compress``; if an operator does not fit or ``out_dir`` holds another atlas.
    """
    chosen = settings or AtlasSettings()
    menu = default_operators() if chosen.operators is None else [OperatorConfig.read(one) for one in chosen.operators]
    if wrong := [str(config) for config in menu if not _is_candidate(config)]:
        raise ValueError(f"{wrong[0]} cannot be in an atlas: it takes a linear map that is fitted to a weight")
    modules = _layers(model, chosen.layers)
    counted = CompressSettings(tokens=chosen.tokens, sequence_length=chosen.sequence_length, keep=0.5)
    check_model_fits(model, counted.sequence_length)
    check_tokens(counted, [module for group in modules.values() for module in group.values()])
    with only_process_in(out_dir) as folder, evaluating(model):
        record = _begin(Path(folder), model, menu, chosen)
        blocks = read_corpus(texts, {}, tokenizer, counted, True).blocks
        check_ids(blocks, model, "the corpus")
        where, batch = Path(folder) / "calibration", counted.batch_size
        found = calibrate(model, blocks, modules, where, batch=batch, fisher=True, on_layer=on_progress)
        record |= {"tokens": found.tokens, "loss": found.loss}
        names = [(depth, name, module) for depth, group in modules.items() for name, module in group.items()]
        for done, (depth, name, module) in enumerate(names):
            if name not in record["layers"] and found.knows(name, module):
                record["layers"][name] = _of_layer(depth, name, module, menu, found.moments(name), chosen)
                write_json(Path(folder) / RECORD, record)
            on_progress("atlas", done + 1, len(names))
        return record


def _layers(model: Any, wanted: Sequence[int] | None) -> dict[int, dict[str, nn.Module]]:
    """Decoder layer -> name -> linear layer."""
    plain = {name: module for name, module in linear_layers(model).items() if not isinstance(module, Operator)}
    found = {
        index: layers
        for index, layers in by_decoder_layer(model, plain).items()
        if index is not None and (wanted is None or index in wanted)
    }
    if not found:
        raise ValueError(f"no decoder layer with linear layers is among layers={shown(wanted)}")
    return found


def _begin(folder: Path, model: Any, menu: Sequence[OperatorConfig], settings: AtlasSettings) -> dict[str, Any]:
    """The record to go on with: what is there of this very atlas, or an empty one."""
    values = {"operators": [config.to_dict() for config in menu], "settings": dataclasses.asdict(settings)}
    about = json.loads(json.dumps(values))  # as it is read again
    path = folder / RECORD
    if path.is_file():
        there = read_json(path)
        if {key: there[key] for key in about} != about:
            raise ValueError(f"{path} is an atlas with other operators or settings; give another directory")
        return there
    return {"model": model_name(model), **about, "machine": describe_machine(), "command": command_line(), "layers": {}}


def _of_layer(
    depth: int, name: str, module: nn.Module, menu: Sequence[OperatorConfig], moments: Moments, settings: AtlasSettings
) -> dict[str, Any]:
    """One layer's row of the record."""
    dense = layer_parameters(module, None)
    operators: dict[str, list[dict[str, Any]]] = {}
    for entry in menu:
        points = []
        for config, error in _curve(entry, module, moments, settings):
            count = layer_parameters(module, config)
            if count < dense:
                points.append({"setting": str(config), "parameters": count, "nats": 0.5 * error})
        operators[entry.kind] = sorted(points, key=lambda point: point["parameters"])
    return {
        "depth": depth,
        "type": name.rpartition(".")[2],
        "parameters": dense,
        "nothing": 0.5 * float(moments.error(dense_weight(module).detach().double())),
        "operators": operators,
    }


def _curve(
    entry: OperatorConfig, module: nn.Module, moments: Moments, settings: AtlasSettings
) -> list[tuple[OperatorConfig, float]]:
    """Sizes and errors: all of them from one decomposition where there is such, else those nearest to the shares."""
    if type(entry).error_curve is not OperatorConfig.error_curve:
        return entry.error_curve(module, moments)
    dense = layer_parameters(module, None)
    sizes = {config: layer_parameters(module, config) for config in entry.sizes(*linear_features(module))}
    nearest = {min(sizes, key=lambda config: abs(sizes[config] - share * dense)) for share in settings.shares if sizes}
    return [(config, config.fit_error(module, moments, steps=settings.steps)) for config in nearest]
