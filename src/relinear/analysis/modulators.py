"""``modulators``: gates of modulators by depth, module and token (Transponder, Figures 2 and 3), and what varies.

A modulator is any module with ``is_modulator``: the gates of a ``Transponder``, of a ``PathTransponder``, and whatever
else offers ``gates_of(x)`` and ``alphas()``.
"""

# Legend: N sequences, T tokens of all sequences, O channels, L layers

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from relinear.analysis.analyses import Result, Subject
from relinear.analysis.plots import PALETTE, REFERENCE, new_figure, short_name
from relinear.core.anatomy import layer_index
from relinear.core.modes import evaluating
from relinear.pages import blocks as parts
from relinear.pages.blocks import Block, Cell, Chart, Picture, Row, Table, heat, line, numbered, or_surface

__all__ = [
    "HOW_TO_READ",
    "GateRecord",
    "applies",
    "blocks",
    "modulators",
    "plot_alphas",
    "plot_channels",
    "plot_scalars",
    "plot_surfaces",
    "plot_variance",
    "record_modulators",
    "run",
    "variance_split",
]

#: how to read its figures, for the page
HOW_TO_READ = (
    "A gate of 1 leaves its module as it is, below 1 damps and above 1 amplifies it; look for what changes "
    "with depth and with the token: gates that are alike for all tokens could be folded into the weights."
)

TOKENS = 48  # tokens shown in surfaces and maps
LINES = 12  # tokens with a line of their own in the figure of scalar gates


def modulators(model: nn.Module) -> dict[str, nn.Module]:
    """Every modulator of ``model`` by the name of the layer or sub-block that it modulates."""
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if getattr(module, "is_modulator", False):
            parts = name.split(".")
            cut = next(i for i, part in enumerate(parts) if part.endswith("modulator"))
            found.setdefault(".".join(parts[:cut]), module)
    return found


def variance_split(gate: Tensor) -> dict[str, float]:
    """How a gate's variance over tokens and channels divides (two-way analysis of variance; the parts add up).

    Args:
        gate: (T, O), or (T, 1) for a scalar gate.

    Returns:
        ``total``: variance over all entries. ``static``: of the channels' means over the tokens, which a constant gain
        could do as well. ``token``: of the tokens' means over the channels, one gain a token. ``token_channel``: the
        rest, which needs both. ``varying``: the share of ``token`` and ``token_channel`` in the total (0 if there is
        no variance).
    """
    gate = gate.double()
    channels, tokens = gate.mean(0), gate.mean(1)
    total = gate.var(unbiased=False).item()
    static, token = channels.var(unbiased=False).item(), tokens.var(unbiased=False).item()
    rest = (gate - channels - tokens[:, None] + gate.mean()).square().mean().item()
    varying = (token + rest) / total if total > 0 else 0.0
    return {"total": total, "static": static, "token": token, "token_channel": rest, "varying": varying}


@dataclasses.dataclass(frozen=True)
class GateRecord:
    """The gates of a model on some tokens.

    statistics: name of the modulated layer -> its decoder layer, its module's name, mean, least and largest value and
        ``variance_split`` of each of its gates, and their alphas.
    scalar: name -> (T,) values of the scalar gate, for layers that have one.
    channel: name -> (T, O) values of the channel gate, for the layers that were asked for.
    """

    statistics: dict[str, dict[str, Any]]
    scalar: dict[str, Tensor]
    channel: dict[str, Tensor]

    def modules(self) -> list[str]:
        """Names of the modulated modules within a layer ("q_proj", ...), in the model's order."""
        return list(dict.fromkeys(row["module"] for row in self.statistics.values()))

    def table(self, gate: str, value: str) -> Tensor:
        """(L, modules) of one statistic of the gates called ``gate``; NaN where a layer has no such gate."""
        names = self.modules()
        depth = 1 + max(row["layer"] for row in self.statistics.values())
        table = torch.full((depth, len(names)), float("nan"))
        for row in self.statistics.values():
            if gate in row["gates"]:
                table[row["layer"], names.index(row["module"])] = row["gates"][gate][value]
        return table


@torch.no_grad()
def record_modulators(model: Any, ids: Tensor, *, keep: str | None = None, tokens: int = 128) -> GateRecord:
    """Run ``model`` on ``ids`` in eval mode and look at every gate.

    Args:
        model: a model with modulators.
        ids: (N, tokens in each) token ids.
        keep: name of the module whose channel gates are kept in full ("down_proj"); by default the last one of a
            layer that has some.
        tokens: how many tokens of the first sequence are kept of each gate; the statistics are over all of ``ids``.

    Raises:
        ValueError: if the model has no modulator, or none is called ``keep``.
    """
    found = modulators(model)
    if not found:
        raise ValueError(
            "the model has no modulator; put some in with relinear.Transponder or relinear.PathTransponder"
        )
    statistics: dict[str, dict[str, Any]] = {}
    scalar: dict[str, Tensor] = {}
    channel: dict[str, Tensor] = {}
    with_channel = [name for name, module in found.items() if "channel" in _gate_names(module)]
    known = [name.rpartition(".")[2] for name in with_channel]
    if keep is not None and keep not in known:
        raise ValueError(f"no module named {keep!r} has channel gates; there are: {', '.join(dict.fromkeys(known))}")
    keep = keep or (known[-1] if known else None)

    def look(name: str, module: Any, x: Tensor) -> None:
        row: dict[str, Any] = {"layer": layer_index(model, name) or 0, "module": name.rpartition(".")[2]}
        row["alphas"], row["gates"] = module.alphas(), {}
        for kind, gate in module.gates_of(x).items():
            flat = gate.reshape(-1, gate.shape[-1]).float().cpu()
            extent = {"mean": flat.mean().item(), "least": flat.min().item(), "largest": flat.max().item()}
            row["gates"][kind] = extent | variance_split(flat)
            first = flat[: min(tokens, ids.shape[1])]
            if kind == "scalar":
                scalar[name] = first[:, 0].clone()
            elif row["module"] == keep:
                channel[name] = first.clone()
        statistics[name] = row

    handles = [
        module.register_forward_pre_hook(lambda module, args, name=name: look(name, module, args[0]))
        for name, module in found.items()
    ]
    try:
        with evaluating(model):
            model(ids.to(next(model.parameters()).device), use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    ordered = {name: statistics[name] for name in found if name in statistics}
    return GateRecord(ordered, scalar, channel)


def _gate_names(module: Any) -> set[str]:
    return {
        kind
        for kind in ("channel", "scalar")
        for key, value in module.named_parameters(recurse=False)
        if key in (f"{kind}_up", f"{kind}_beta") and value is not None
    }


def applies(model: nn.Module) -> bool:
    """Whether the model has modulators."""
    return bool(modulators(model))


def run(subject: Subject) -> Result:
    """Statistics over all tokens of the subject; figures of the first tokens of its first sequence."""
    record = record_modulators(subject.model, subject.ids, tokens=TOKENS)
    labels = [subject.token_text(int(token)) for token in subject.ids[0, :TOKENS]]
    figures = {
        "modulators_scalar": plot_scalars(record, labels),
        "modulators_surface": plot_surfaces(record),
        "modulators_channel": plot_channels(record, labels),
        "modulators_variance": plot_variance(record),
        "modulators_alpha": plot_alphas(record),
    }
    lines = []
    for gate in ("scalar", "channel"):
        rows = [row["gates"][gate] for row in record.statistics.values() if gate in row["gates"]]
        if rows:
            mean = float(np.mean([row["mean"] for row in rows]))
            least, largest = min(row["least"] for row in rows), max(row["largest"] for row in rows)
            line = f"{gate} gates of {len(rows)} modules: mean {mean:.2f}, from {least:.2f} to {largest:.2f}"
            if gate == "channel":
                line += f"; {np.mean([row['varying'] for row in rows]):.0%} of a module's variance is with the token"
            lines.append(line)
    numbers = {
        "modules": record.statistics,
        "scalar": {name: [round(v, 5) for v in gate.tolist()] for name, gate in record.scalar.items()},
        "channel": _shown_channels(record),
        "tokens": labels,
    }
    return Result(numbers, {stem: figure for stem, figure in figures.items() if figure is not None}, "\n".join(lines))


CHANNELS, MAPS = 96, 3  # channels and layers whose gates are written out


def _shown_channels(record: GateRecord) -> dict[str, Any]:
    """Layer -> some of its channels, their gates by token, and the spread that all maps share; {} where none are."""
    if not record.channel:
        return {}
    found, spread = {}, round(_spread(record), 4)
    for name in _shown_layers(record, MAPS):
        gate = record.channel[name].numpy()
        channels = np.unique(np.linspace(0, gate.shape[1] - 1, min(CHANNELS, gate.shape[1])).round().astype(int))
        values = [[round(v, 3) for v in row] for row in gate[:, channels].tolist()]
        found[name] = {"channels": channels.tolist(), "values": values, "spread": spread}
    return found


def _by_module(record: GateRecord, names: Sequence[str]) -> dict[str, list[str]]:
    """Modulated layers of ``names`` by module, each in order of depth."""
    groups: dict[str, list[str]] = {}
    for name in sorted(names, key=lambda name: record.statistics[name]["layer"]):
        groups.setdefault(record.statistics[name]["module"], []).append(name)
    return {module: groups[module] for module in record.modules() if module in groups}


def plot_scalars(record: GateRecord, labels: Sequence[str] = ()) -> Any:
    """The scalar gate against depth, a panel a module, a line a token (Figure 2); None without scalar gates."""
    groups = _by_module(record, list(record.scalar))
    if not groups:
        return None
    import matplotlib

    columns = min(4, len(groups))
    figure, panels = new_figure(3.1 * columns, 2.7 * math.ceil(len(groups) / columns), columns, rows=len(groups))
    count = len(next(iter(record.scalar.values())))
    shown = np.unique(np.linspace(0, count - 1, min(LINES, count)).round().astype(int))
    colours = matplotlib.colormaps["viridis"](np.linspace(0, 0.92, len(shown)))
    lowest = min(float(gate.min()) for gate in record.scalar.values())
    highest = max(float(gate.max()) for gate in record.scalar.values())
    margin = 0.05 * (highest - lowest) or 0.05
    for axes, (module, names) in zip(panels, groups.items()):
        depth = [record.statistics[name]["layer"] for name in names]
        values = np.array([record.scalar[name].numpy() for name in names])  # (L, T)
        for colour, token in zip(colours, shown, strict=True):
            label = f"{token}: {labels[token]}" if token < len(labels) else str(token)
            axes.plot(depth, values[:, token], color=colour, lw=1.1, marker="o", ms=2, label=label)
        axes.plot(depth, values.mean(1), color="#222222", lw=2, label="mean of all tokens")
        axes.axhline(1, color="#999999", lw=0.8, ls=":")
        axes.set_title(module, loc="left")
        axes.set_ylim(lowest - margin, highest + margin)
        axes.set_xticks(depth if len(depth) < 9 else depth[:: len(depth) // 6])
    for axes in panels[len(groups) :]:
        axes.set_axis_off()
    panels[0].set_ylabel("scalar gate")
    figure.supxlabel("decoder layer", fontsize=10)
    handles, names = panels[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside right center", frameon=False, fontsize=8, title="token")
    return figure


def plot_surfaces(record: GateRecord) -> Any:
    """The channel gate as a surface over channels and tokens, a panel a layer (Figure 3); None where there is none."""
    if not record.channel:
        return None
    names = _shown_layers(record)
    columns = min(4, len(names))
    figure, panels = new_figure(
        3.4 * columns,
        3.2 * math.ceil(len(names) / columns),
        columns,
        rows=len(names),
        subplot_kw={"projection": "3d"},
    )
    spread = _spread(record)
    for axes, name in zip(panels, names):
        gate = record.channel[name].numpy()
        x, y = np.meshgrid(np.arange(gate.shape[1]), np.arange(gate.shape[0]))
        axes.plot_surface(
            x, y, gate, cmap="RdBu_r", vmin=1 - spread, vmax=1 + spread, lw=0, rcount=48, ccount=96, rasterized=True
        )
        axes.set_zlim(1 - spread, 1 + spread)
        axes.set_title(f"layer {record.statistics[name]['layer']}", fontsize=10)
        axes.set_xlabel("channel", fontsize=8)
        axes.set_ylabel("token", fontsize=8)
        axes.tick_params(labelsize=7)
    for axes in panels[len(names) :]:
        axes.set_axis_off()
    module = record.statistics[names[0]]["module"]
    figure.suptitle(f"Channel gates of {module}", fontsize=11)
    return figure


def plot_channels(record: GateRecord, labels: Sequence[str] = ()) -> Any:
    """The channel gate as a map, tokens down and channels across, a panel a layer; None where there is none."""
    if not record.channel:
        return None
    names = _shown_layers(record)
    figure, panels = new_figure(1.2 + 2.6 * len(names), 0.8 + 0.15 * TOKENS, len(names), sharey=True)
    spread = _spread(record)
    for axes, name in zip(panels, names, strict=True):
        gate = record.channel[name].numpy()
        image = axes.imshow(
            gate, aspect="auto", cmap="RdBu_r", vmin=1 - spread, vmax=1 + spread, interpolation="nearest"
        )
        axes.set_title(f"layer {record.statistics[name]['layer']}", loc="left")
        axes.set_xlabel("channel")
        axes.grid(False)
    if labels:
        panels[0].set_yticks(range(len(labels)), labels, fontsize=6, family="monospace")
    panels[0].set_ylabel("token")
    module = record.statistics[names[0]]["module"]
    figure.suptitle(f"Channel gates of {module}: below 1 blue, above 1 red", fontsize=11, x=0.01, ha="left")
    figure.colorbar(image, ax=panels, shrink=0.6, pad=0.01)
    return figure


def _shown_layers(record: GateRecord, most: int = 8) -> list[str]:
    """Names of at most ``most`` layers with channel gates, evenly over the depth, the first and the last among them."""
    names = list(record.channel)
    chosen = np.unique(np.linspace(0, len(names) - 1, min(most, len(names))).round().astype(int))
    return [names[i] for i in chosen]


def _spread(record: GateRecord) -> float:
    """Distance from 1 that the colours span: all values but the outermost half per cent on either side."""
    distances = np.concatenate([np.abs(gate.numpy() - 1).ravel() for gate in record.channel.values()])
    return max(float(np.quantile(distances, 0.99)), 0.02)


#: kind of gate -> the statistics shown of it, each with its title (all of a scalar gate's variance is the tokens')
_PANELS = {
    "scalar": (("total", "standard deviation over tokens"), ("mean", "mean over tokens")),
    "channel": (("total", "standard deviation"), ("varying", "share of variance with the token")),
}


def plot_variance(record: GateRecord) -> Any:
    """How far the gates spread, by module and layer: over tokens, or tokens and channels."""
    kinds = [k for k in _PANELS if any(k in row["gates"] for row in record.statistics.values())]
    modules = record.modules()
    figure, panels = new_figure(10.4, 1.2 + 2.4 * len(kinds), 2, rows=2 * len(kinds))
    lines = {}
    for axes, (kind, value, title) in zip(panels, [(k, *panel) for k in kinds for panel in _PANELS[k]], strict=True):
        table = record.table(kind, value).numpy()
        table = np.sqrt(table) if value == "total" else table
        for place, module in enumerate(modules):
            if not np.isnan(table[:, place]).all():
                colour = PALETTE[place % len(PALETTE)]
                (lines[module],) = axes.plot(table[:, place], color=colour, lw=1.6, marker="o", ms=3)
        axes.set_title(f"{kind} gates: {title}", loc="left")
        axes.set_ylim(0, 1.05 if value == "varying" else None)
        axes.set_xticks(range(table.shape[0]) if table.shape[0] < 9 else range(0, table.shape[0], 3))
        axes.set_xlabel("decoder layer")
    figure.legend(lines.values(), lines, loc="outside right center", frameon=False, fontsize=9)
    return figure


def plot_alphas(record: GateRecord) -> Any:
    """The learnt curvatures, layers down and modules across; None where all are fixed at 1."""
    rows, modules = record.statistics.values(), record.modules()
    depth = 1 + max(row["layer"] for row in rows)
    kinds = list(dict.fromkeys(kind for row in rows for kind in row["alphas"]))
    values = {kind: np.full((depth, len(modules)), np.nan) for kind in kinds}
    for row in rows:
        for kind, alpha in row["alphas"].items():
            values[kind][row["layer"], modules.index(row["module"])] = alpha
    if not values or all(np.all((table == 1) | np.isnan(table)) for table in values.values()):
        return None
    spread = max(0.02, max(float(np.nanmax(np.abs(table - 1))) for table in values.values()))
    depth = len(next(iter(values.values())))
    figure, panels = new_figure(
        1.5 + 0.75 * len(record.modules()) * len(kinds), 1.4 + 0.32 * depth, len(kinds), sharey=True
    )
    for axes, (kind, table) in zip(panels, values.items(), strict=True):
        image = axes.imshow(table, cmap="RdBu_r", vmin=1 - spread, vmax=1 + spread, aspect="auto")
        for (i, j), alpha in np.ndenumerate(table):
            if not np.isnan(alpha) and depth < 25:
                ink = "white" if abs(alpha - 1) > 0.7 * spread else "black"
                axes.text(j, i, f"{alpha:.2f}", ha="center", va="center", fontsize=7.5, color=ink)
        axes.set_xticks(range(len(modules)), modules, rotation=40, ha="right", fontsize=8)
        axes.set_yticks(range(depth) if depth < 13 else range(0, depth, 3))
        axes.set_title(f"alpha of the {kind} gates", loc="left")
        axes.grid(False)
    panels[0].set_ylabel("decoder layer")
    figure.colorbar(image, ax=panels, shrink=0.8, pad=0.02)
    return figure


#: figures of ``run`` that are pictures, and how to read them
_PICTURES = {
    "modulators_channel": "Channel gates: a row a token, a column a channel. Stripes down are the same channel "
    "at every token, "
    "which a constant gain would do as well; stripes across are tokens that open or shut a whole layer.",
    "modulators_surface": "The same as surfaces, as in the paper's Figure 3: flat is a gate that leaves its "
    "layer alone.",
    "modulators_alpha": "Learnt curvatures: above 1 gates react more steeply to the input than at first, below 1 less.",
}

#: those of them that the numbers of channel gates take the place of
_LIVE = ("modulators_channel", "modulators_surface")


def blocks(numbers: Mapping[str, Any], image_of: Callable[[str], str | None]) -> list[Block]:
    """What a page shows of ``numbers``: gates by depth and token, how far they vary, and a row a layer and gate."""
    found: list[Block] = [
        *_scalars(numbers, image_of),
        *_variances(numbers["modules"], image_of),
    ]
    for place, name in enumerate(numbers.get("channel", {})):
        found.append(_channels(numbers, name, image_of("modulators_channel") if place == 0 else None))
    for stem, text in _PICTURES.items():
        image = None if stem in _LIVE and numbers.get("channel") else image_of(stem)
        if image is not None:
            found.append(Picture(text, image))
    return [*found, _table(numbers["modules"])]


def _table(modules: Mapping[str, Any]) -> Table:
    rows = []
    for name, row in modules.items():
        for kind, gate in row["gates"].items():
            alpha = row["alphas"].get(kind)
            cells = [Cell(f"{gate[key]:.3f}", gate[key]) for key in ("mean", "least", "largest")]
            cells.append(Cell(f"{100 * gate['varying']:.0f} %", gate["varying"]))
            cells.append(Cell("–" if alpha is None else f"{alpha:.3f}", alpha))
            rows.append(Row([Cell(short_name(name), title=name), kind, *cells]))
    return Table(["module", "gate", "mean", "least", "largest", "variance with the token", "alpha"], rows, (0, 1))


def _scalars(numbers: Mapping[str, Any], image_of: Callable[[str], str | None]) -> list[Chart]:
    """Scalar gates against depth, a figure a module, a line a token."""
    modules: dict[str, list[tuple[int, Sequence[float]]]] = {}
    for name, values in numbers["scalar"].items():
        row = numbers["modules"][name]
        modules.setdefault(row["module"], []).append((row["layer"], values))
    charts = []
    for number, (module, found) in enumerate(modules.items()):
        found.sort(key=lambda pair: pair[0])
        depth, tokens = [layer for layer, _ in found], len(found[0][1])
        data = []
        for token in np.unique(np.linspace(0, tokens - 1, min(LINES, tokens)).round().astype(int)).tolist():
            label = f"{token} {numbers['tokens'][token]}" if token < len(numbers["tokens"]) else str(token)
            colour = PALETTE[number % len(PALETTE)]
            data += line(label, colour, 0, depth, [values[token] for _, values in found])
        mean = [float(np.mean(values)) for _, values in found]
        data = [trace | {"opacity": 0.45} for trace in data] + line("mean of all tokens", REFERENCE, 1, depth, mean)
        layout = parts.axes("decoder layer", f"scalar gate of {module}", showlegend=False)
        text = f"{module}: a line a token, the strong one their mean. Lines apart are gates that read the token."
        image = image_of("modulators_scalar") if number == 0 else None
        charts.append(Chart(text, {"data": data, "layout": layout}, image, 320, beside=True))
    return charts


def _variances(modules: Mapping[str, Any], image_of: Callable[[str], str | None]) -> list[Chart]:
    """How far gates spread, against depth, a line a module: both panels of every kind."""
    charts: list[Chart] = []
    for kind, value, title in [(name, *panel) for name, panels in _PANELS.items() for panel in panels]:
        lines: dict[str, list[tuple[int, float]]] = {}
        for row in modules.values():
            if kind in row["gates"]:
                found = row["gates"][kind][value]
                shown = math.sqrt(found) if value == "total" else found
                lines.setdefault(row["module"], []).append((row["layer"], shown))
        data = [
            trace
            for number, (module, spots) in enumerate(lines.items())
            for trace in line(module, PALETTE[number % len(PALETTE)], number, *zip(*sorted(spots), strict=True))
        ]
        if data:
            hint = "1 changes nothing." if value == "mean" else "Near 0 a constant would do."
            layout = parts.axes("decoder layer", title)
            text = f"{kind} gates: {title}, a line a module. {hint}"
            image = None if charts else image_of("modulators_variance")
            charts.append(Chart(text, {"data": data, "layout": layout}, image, 380, beside=True))
    return charts


def _channels(numbers: Mapping[str, Any], name: str, image: str | None) -> Chart:
    """The channel gate of a layer as a map or a surface; ``image`` is that of all layers."""
    row, found = numbers["modules"][name], numbers["channel"][name]
    spread = found["spread"]
    words = numbered(numbers["tokens"][: len(found["values"])])
    channels = [f"channel {channel}" for channel in found["channels"]]
    trace = heat(found["values"], channels, words, (1 - spread, 1 + spread), "gate", diverging=True)
    layout = parts.axes(
        "", "", xaxis={"nticks": 8}, yaxis={"autorange": "reversed", "nticks": 24, "tickfont": {"size": 9}}
    )
    text = f"Channel gates of {row['module']} in layer {row['layer']}, {len(channels)} channels: "
    text += _PICTURES["modulators_channel"].partition(": ")[2] + " As a surface it is the paper's Figure 3."
    return Chart(text, or_surface(trace, layout, "gate"), image, height=520)
