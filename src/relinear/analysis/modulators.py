"""What modulators do on real text: their gates by depth, module and token, and what of them varies with the token.

A modulator is any module with ``is_modulator``: the gates of a ``Transponder``, of a ``PathTransponder``, and whatever
else offers ``gates_of(x)`` and ``alphas()``.
"""

# Legend: N sequences, T tokens of all sequences, O channels, L layers

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from relinear.core.anatomy import layer_index
from relinear.core.modes import evaluating

__all__ = ["GateRecord", "modulators", "record_gates", "variance_split"]


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
def record_gates(model: Any, ids: Tensor, *, keep: str | None = None, tokens: int = 128) -> GateRecord:
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
