"""The menu entry ``neurons``: narrower MLPs, the same width in all layers, so that the result is a stock model.

Of the inputs h of a down projection W (O, I) with second moment A, those S are kept whose loss is least, and W becomes
W' = W A[:, S] A[S, S]^(-1), the best that the kept ones can do; a ridge stands in for what the data do not show. Which
go is decided greedily from behind (the optimal brain surgeon): with H = A^(-1), taking neuron j away from the present
W' costs w_j^T G w_j / H_jj, after which W' and H are brought up to date.
"""

# Legend: I neurons, O hidden size, G moment of gradients (O, O), S kept neurons

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from relinear.compress.budget import Budget
from relinear.compress.calibrate import Calibration
from relinear.compress.plan import CompressPlan, LayerPlan
from relinear.compress.work import Work
from relinear.core.anatomy import attention_of, decoder_layers
from relinear.core.initialization import swap_module
from relinear.core.modes import evaluating
from relinear.core.moments import Moments
from relinear.core.operator import OperatorConfig, dense_bias, dense_weight, is_conv1d, is_linear, linear_features
from relinear.distill.fit import swapped
from relinear.surgery.summary import module_parameters

#: as it is written in a menu
NEURONS = "neurons"
#: widths are multiples of this
STEP = 8
#: share of the inputs' mean square that is added to their moments
RIDGE = 1e-4
#: portions in which neurons are taken away
PORTIONS = 128
#: attributes of a config that hold an MLP's width
_WIDTHS = ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "ffn_hidden_dim")


@dataclasses.dataclass(frozen=True)
class _Mlp:
    """The MLP of a decoder layer: ``readers`` make its neurons (one, two with a gate, or both fused), ``writer`` reads
    them, as (name, layer)."""

    layer: nn.Module
    readers: Sequence[tuple[str, Any]]
    writer: tuple[str, Any]

    @property
    def width(self) -> int:
        """I, the number of neurons."""
        return linear_features(self.writer[1])[0]

    def narrowed(self, kept: Tensor, weight: Tensor | None = None) -> dict[str, nn.Module]:
        """Name -> the layer where neurons ``kept`` are left, read through ``weight`` or as they are."""
        found = {}
        for name, reader in self.readers:
            parts = linear_features(reader)[1] // self.width
            rows = torch.cat([kept + part * self.width for part in range(parts)])
            bias = dense_bias(reader)
            found[name] = _like(reader, dense_weight(reader)[rows], None if bias is None else bias[rows])
        name, writer = self.writer
        read = dense_weight(writer)[:, kept] if weight is None else weight
        return found | {name: _like(writer, read, dense_bias(writer))}

    def sizes(self, width: int) -> dict[str, int]:
        """Name -> parameters at a width: all but the bias behind the neurons grow with it."""
        name, writer = self.writer
        bias = dense_bias(writer)
        fixed = 0 if bias is None else bias.numel()
        found = {reader: module_parameters(layer) // self.width * width for reader, layer in self.readers}
        return found | {name: fixed + (module_parameters(writer) - fixed) // self.width * width}


def _like(layer: Any, weight: Tensor, bias: Tensor | None) -> nn.Module:
    """A stock layer of the class of ``layer`` with other weights (O, I)."""
    reference = layer.weight
    weight = weight.detach().to(reference.dtype)
    new: Any
    if is_conv1d(layer):
        new = type(layer)(weight.shape[0], weight.shape[1])
        weight = weight.T
    else:
        new = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, device="meta")
    new.weight = nn.Parameter(weight.contiguous(), reference.requires_grad)
    if bias is not None:
        new.bias = nn.Parameter(bias.detach().clone(), layer.bias.requires_grad)
    return new.train(layer.training)


@torch.no_grad()
def fewer_neurons(weight: Tensor, moments: Moments, width: int) -> tuple[Tensor, Tensor, float]:
    """Return which neurons to keep, and the weight that reads them.

    Args:
        weight: W (O, I) of the down projection.
        moments: of its inputs and, where they were measured, of the gradients at its output.
        width: how many neurons are left.

    Returns:
        S (width,), ascending; W' (O, width) in float64; the error tr(G (W - W') A (W - W')^T).
    """
    weight, inputs = weight.detach().double(), moments.inputs.double()
    count = weight.shape[1]
    scale = float(inputs.diagonal().mean()) or 1.0
    ridged = inputs + RIDGE * scale * torch.eye(count, dtype=torch.float64, device=inputs.device)
    left, now, inverse = torch.arange(count, device=inputs.device), weight, torch.linalg.inv(ridged)
    portion = max(1, (count - width) // PORTIONS)
    while len(left) > width:
        weighted = now if moments.outputs is None else moments.outputs.to(now) @ now
        cost = (now * weighted).sum(0) / inverse.diagonal()
        order = cost.argsort(stable=True)
        number = min(portion, len(left) - width)
        gone, stay = order[:number], order[number:].sort().values
        step = torch.linalg.solve(inverse[gone][:, gone], inverse[gone][:, stay])
        now = now[:, stay] - now[:, gone] @ step
        inverse = inverse[stay][:, stay] - inverse[stay][:, gone] @ step
        left = left[stay]
    fitted = torch.linalg.solve(ridged[left][:, left], weight @ ridged[:, left], left=False)
    difference = weight.clone()
    difference[:, left] -= fitted
    return left, fitted, float(moments.error(difference))


class Neurons:
    """The menu of one choice: a width for all MLPs, by the budget. Nothing has changed when it is made.

    Raises:
        ValueError: if the model's layers have no MLP of linear layers around neurons that act by themselves, some of
            these layers are left out, or no setting of its config says how wide they are.
    """

    timed = False

    def __init__(self, work: Work) -> None:
        self.work, self.model = work, work.model
        names = {id(module): name for name, module in self.model.named_modules()}
        self.mlps = [_mlp(index, layer, names) for index, layer in enumerate(decoder_layers(self.model))]
        widths = sorted({mlp.width for mlp in self.mlps})
        if len(widths) > 1:
            raise ValueError(f"neurons: the layers' MLPs have several widths ({widths}), a stock config one")
        self.width = self.chosen = widths[0]
        missing = [name for mlp in self.mlps for name, _ in (*mlp.readers, mlp.writer) if name not in work.modules]
        if missing:
            raise ValueError(f"neurons: every layer's MLP is narrowed, so {missing[0]} must be among the targets")
        self._check_neurons_act_alone()
        self.setting = self._setting()
        self.fitted: dict[str, tuple[Tensor, Tensor, float]] = {}

    @torch.no_grad()
    def _check_neurons_act_alone(self) -> None:
        """Taking neurons away must be the same as silencing them."""
        mlp, (_, writer) = self.mlps[0], self.mlps[0].writer
        kept = torch.arange(0, self.width, 2, device=writer.weight.device)
        silent = torch.zeros(self.width, dtype=writer.weight.dtype, device=kept.device)
        silent[kept] = 1.0
        ids = torch.arange(8, device=kept.device)[None]
        with evaluating(self.model):
            handle = writer.register_forward_pre_hook(lambda module, args: (args[0] * silent,))
            try:
                wanted = self.model(input_ids=ids).logits
            finally:
                handle.remove()
            try:
                with swapped(self.model, mlp.narrowed(kept)):
                    got = self.model(input_ids=ids).logits
            except RuntimeError as error:
                raise ValueError(self._refusal(f"does not run with a narrower MLP ({error})")) from error
        difference = float((wanted - got).abs().max())
        if not difference <= 1e-3 * max(1.0, float(wanted.abs().max())):
            raise ValueError(self._refusal("mixes its neurons before they are read, so none can go by itself"))

    def _refusal(self, why: str) -> str:
        return f"neurons: {type(self.model).__name__} {why}; use another menu, such as low_rank"

    def _setting(self) -> str:
        """The attribute of the config that holds the width, found by building the stock model on no device."""
        wanted = {name: tuple(value.shape) for name, value in self.model.named_parameters()}
        for mlp in self.mlps:
            for name, new in mlp.narrowed(torch.arange(STEP)).items():
                wanted |= {f"{name}.{key}": tuple(value.shape) for key, value in new.named_parameters()}
        for name in _WIDTHS:
            config = copy.deepcopy(self.model.config)
            if not hasattr(config, name):
                continue
            setattr(config, name, STEP)
            with torch.device("meta"):
                built = AutoModelForCausalLM.from_config(config)
            if type(built) is type(self.model) and wanted == {k: tuple(v.shape) for k, v in built.named_parameters()}:
                return name
        raise ValueError(self._refusal(f"has no setting for the width of its MLPs (tried {', '.join(_WIDTHS)})"))

    def sizes(self, shape: tuple[int, int]) -> list[OperatorConfig]:
        """Return nothing: no layer becomes an operator."""
        return []

    def read_plan(self, path: str | Path) -> CompressPlan:
        """Raise ValueError: the budget alone decides."""
        raise ValueError("menu: neurons has one width for all layers, by the budget: it takes no plan")

    def check(self, budget: Budget) -> None:
        """Find the width. Raises ValueError if none meets the budget."""
        self.chosen = self.fitting_width(budget.limit)

    def fitting_width(self, limit: float) -> int:
        """The largest width, a multiple of 8, at which the layers that may be replaced have ``limit`` parameters.

        Raises:
            ValueError: if the other layers alone exceed that.
        """
        others = sum(map(module_parameters, self.work.modules.values())) - self._parameters(self.width)
        for width in range(self.width - self.width % STEP, 0, -STEP):
            if others + self._parameters(width) <= limit:
                return width
        raise ValueError(
            f"the budget of {int(limit):,} parameters cannot be met by fewer neurons: with {STEP} of them in each "
            f"layer {others + self._parameters(STEP):,} are left; keep more, or give another menu"
        )

    def _parameters(self, width: int) -> int:
        return sum(size for mlp in self.mlps for size in mlp.sizes(width).values())

    def plan(self, calibration: Calibration, budget: Budget, judging: Tensor) -> tuple[CompressPlan, list[Any]]:
        """Return the plan of this width, fitted; no layer is tried by itself."""
        sizes: dict[str, int] = {}
        for done, mlp in enumerate(self.mlps, start=1):
            name, writer = mlp.writer
            self.fitted[name] = fewer_neurons(dense_weight(writer), calibration.moments(name), self.chosen)
            sizes |= mlp.sizes(self.chosen)
            self.work.on_progress("candidates", done, len(self.mlps))
        layers, weighed = {}, self.work.settings.fisher
        for name, module in self.work.modules.items():
            before, error = module_parameters(module), self.fitted[name][2] if name in self.fitted else 0.0
            layers[name] = LayerPlan(None, sizes.get(name, before), before, 0.5 * error if weighed else None)
        return CompressPlan.of(self.model, layers), []

    @torch.no_grad()
    def carry_out_(self, whole: CompressPlan, calibration: Calibration, blocks: Tensor) -> None:
        """Narrow every MLP, and the model's config."""
        for mlp in self.mlps:
            kept, weight, _ = self.fitted[mlp.writer[0]]
            for name, new in mlp.narrowed(kept.to(mlp.writer[1].weight.device), weight).items():
                swap_module(self.model, [name], self.work.modules[name], new)
            for owner in mlp.layer.modules():
                if vars(owner).get(self.setting) == self.width:
                    setattr(owner, self.setting, self.chosen)
        setattr(self.model.config, self.setting, self.chosen)


def _mlp(index: int, layer: nn.Module, names: Mapping[int, str]) -> _Mlp:
    """The MLP of a decoder layer: what is linear in it and not in its attention."""
    inside = {id(module) for module in attention_of(index, layer).modules()}
    found = {names[id(m)]: m for m in layer.modules() if is_linear(m) and id(m) not in inside}
    where = f"layer {index} ({type(layer).__name__})"
    if len(found) < 2:
        raise ValueError(f"neurons: {where} has no MLP of plain linear layers; use another menu, such as low_rank")
    *readers, writer_name = found
    writer = found[writer_name]
    width, hidden = linear_features(writer)
    shapes = [linear_features(found[name]) for name in readers]
    if shapes not in ([(hidden, width)], [(hidden, width)] * 2, [(hidden, 2 * width)]):
        stated = ", ".join(f"{name.rpartition('.')[2]} {linear_features(module)}" for name, module in found.items())
        raise ValueError(
            f"neurons: {where} has an MLP of another kind than one that is {width} wide, with a gate or without "
            f"((in, out) sizes {stated}); use another menu, such as low_rank"
        )
    return _Mlp(layer, [(name, found[name]) for name in readers], (writer_name, writer))
