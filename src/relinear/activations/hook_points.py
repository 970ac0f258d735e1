"""Sites: values inside a model that can be read and changed while it runs.

A site has the name of a module: of an operator for its latent, of a module and one of its gates for that
(``...up_proj.basis_gate``, ``...down_proj.modulator.channel``), of a layer and ``output`` for what it puts out. At most
one tap stands at a site; whoever computes the value hands it to the tap and goes on with what that returns.
"""

# Legend: R size of the site

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from relinear.contract.operator import Operator, is_linear, linear_features

if TYPE_CHECKING:
    from relinear.activations.interventions import Edit

#: what the name of a layer's output ends with
OUTPUT = "output"
LATENT = "latent"


class Latent(NamedTuple):
    """A Gaussian latent of one forward: z as it was used, mu, logvar and ``sigma`` of its posterior; all (..., R)."""

    z: Tensor
    mu: Tensor
    logvar: Tensor

    @property
    def sigma(self) -> Tensor:
        """The posterior's standard deviation, exp(logvar / 2)."""
        # Computed when asked for: a forward that is read must save the same tensors as one that is not, or a backward
        # under gradient checkpointing after the end of the block could not match the two.
        return torch.exp(0.5 * self.logvar)


def point(value: Tensor) -> Latent:
    """Return a value (..., R) that nothing is drawn for: a latent whose sigma is 0."""
    return Latent(value, value, torch.full_like(value, -math.inf))


Observer = Callable[[Latent], None]


class LatentTap:
    """What stands between where a value is computed and where it is used while someone reads or edits it."""

    def __init__(self) -> None:
        self.edits: list[Edit] = []
        self.observers: list[Observer] = []

    def __call__(self, latent: Latent) -> Tensor:
        """The value to go on with: edited in the order of the edits, then shown to the observers."""
        for edit in self.edits:
            latent = latent._replace(z=edit.apply(latent))
        # A checkpointed forward that is run again for the backward is not a new observation.
        if torch.compiler.is_compiling() or torch._C._current_graph_task_id() == -1:
            for observer in self.observers:
                observer(latent)
        return latent.z


class Gated:
    """A module with gates, or other values by name. Its forward hands each to ``_tapped`` where ``_taps`` is not None.

    Comes first among the bases. Where ``_is_edited`` is False the taps only look, and the forward may go its usual way
    once they have seen the values.
    """

    #: what kind of value it is, in one word
    tap_kind: str = "gate"
    _taps: Mapping[str, LatentTap] | None = None

    def tap_sizes(self) -> dict[str, int]:
        """Name -> R of every value. Names are without dots; "" is the name of a module's only one, its latent."""
        raise TypeError(f"{type(self).__name__} does not say which values it has")

    @property
    def _is_edited(self) -> bool:
        return self._taps is not None and any(tap.edits for tap in self._taps.values())

    def _tapped(self, name: str, value: Tensor) -> Tensor:
        tap = None if self._taps is None else self._taps.get(name)
        return value if tap is None else tap(point(value))

    def __getstate__(self) -> dict[str, Any]:
        state: Any = super().__getstate__()  # a copy is read and edited by nobody
        return {**state, "_taps": None}


class LatentOperator(Gated, Operator):
    """An operator with a latent. Its forward calls ``self._latent_tap`` where it is not None and decodes the result."""

    tap_kind = LATENT

    @property
    def latent_size(self) -> int:
        """R, the number of latent dimensions."""
        raise TypeError(f"{type(self).__name__} does not say how large its latent is")

    @property
    def _latent_tap(self) -> LatentTap | None:
        return None if self._taps is None else self._taps[""]

    def tap_sizes(self) -> dict[str, int]:
        return {"": self.latent_size}


# Where taps are put


@dataclasses.dataclass(eq=False)
class Site:
    """A place for one tap: the value ``name`` of a module, of ``size`` dimensions; ``kind`` says in a word what it is.

    ``tap()`` stands there; ``put(None)`` leaves the site as if there had never been one.
    """

    module: Any
    name: str
    size: int
    kind: str

    def tap(self) -> LatentTap | None:
        return (self.module._taps or {}).get(self.name)

    def put(self, tap: LatentTap | None) -> None:
        # a new mapping, so that a compiled forward sees the change
        taps = {name: other for name, other in (self.module._taps or {}).items() if name != self.name}
        self.module._taps = (taps if tap is None else taps | {self.name: tap}) or None


class _OutputHook:
    """Forward hook of a layer that hands what it puts out to a tap. A copy of the layer has one that does nothing."""

    handle: Any = None

    def __init__(self, tap: LatentTap) -> None:
        self.tap = tap

    def __call__(self, module: nn.Module, args: tuple, output: Tensor) -> Tensor:
        return self.tap(point(output))

    def __getstate__(self) -> dict[str, Any]:
        return {"tap": LatentTap()}


class _OutputSite(Site):
    def _hook(self) -> _OutputHook | None:
        hooks = (hook for hook in self.module._forward_hooks.values() if isinstance(hook, _OutputHook))
        return next((hook for hook in hooks if hook.handle is not None), None)  # not what a copy of the layer came with

    def tap(self) -> LatentTap | None:
        hook = self._hook()
        return None if hook is None else hook.tap

    def put(self, tap: LatentTap | None) -> None:
        hook = self._hook()
        if hook is not None:
            hook.handle.remove()
        if tap is not None:
            hook = _OutputHook(tap)
            hook.handle = self.module.register_forward_hook(hook)


def sites(model: nn.Module, *, outputs: bool = False) -> dict[str, Site]:
    """Every site of ``model`` by name, in the model's order: latents, gates and, with ``outputs``, those of layers."""
    found: dict[str, Site] = {}
    for full, module in model.named_modules():
        name = full.replace("_orig_mod.", "").removesuffix("_orig_mod")
        here: list[Site] = []
        if isinstance(module, Gated):
            here += [Site(module, gate, size, module.tap_kind) for gate, size in module.tap_sizes().items()]
        if outputs and name and is_linear(module):
            here += [_OutputSite(module, OUTPUT, linear_features(module)[1], OUTPUT)]
        found |= {".".join(filter(None, (name, site.name))): site for site in here}
    return found
