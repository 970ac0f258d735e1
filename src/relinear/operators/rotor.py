"""Rotor layers: linear layers replaced by sums of Clifford products r x s~ ("sandwiches"), or by networks of these."""

# Legend: I in_features, O out_features, V = 2^n window, P = n(n-1)/2 planes, W terms or branches

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Annotated, Any, Literal, cast

import torch
from pydantic import Field, SkipValidation
from torch import Tensor, nn

from relinear.clifford.blades import MAX_DIMENSION
from relinear.clifford.tables import device_table
from relinear.contract.config import MAX_LAYERS, Count, IntRange, NonNegative, check_choice, register
from relinear.contract.inference import ParameterCache
from relinear.contract.operator import NotLinearError, Operator, OperatorConfig
from relinear.contract.parameter_roles import ParamRole
from relinear.contract.parameters import are_parameters
from relinear.functional import rotor as reference
from relinear.kernels.autograd import autocasted
from relinear.kernels.dense import dense_cost, dense_product
from relinear.kernels.implementations import is_untraced_cpu
from relinear.kernels.rotor import PreparedNetwork, rotor_network, rotor_step, supports_network, supports_step
from relinear.operators.sandwich_sum import SandwichSum, exponentials
from relinear.system.machine import tiled

_INITIAL_SLOPE = 0.25  # of a PReLU, as in torch


def _activated_and_mixed(config: Rotor, x: Tensor, window: int, step: int, slopes: Tensor, mix: Tensor) -> Tensor:
    """Apply ``mixed_branches`` to a rotor layer's output x (..., W V): permute, normalise, activate and mix.

    Args:
        step: number of the step, which the permutation depends on.
        slopes, mix: (W,).
    """
    branches = x.reshape(-1, len(mix), window)
    order = None
    if config.permute:
        order = device_table(reference.branch_permutation, (window, len(mix), config.seed, step), x, torch.int32)
    y = reference.mixed_branches(branches, order, slopes, mix, config.normalize, config.activation)
    return y.view(*x.shape[:-1], window)


def _branch_slopes(activation: str, learned: Tensor | None, mix: Tensor) -> Tensor:
    """Return the PReLU slopes of a step's branches (W,); activations without slopes ignore them."""
    slope = reference.ACTIVATIONS[activation]
    if learned is not None:
        return learned.expand(len(mix))
    return mix.new_full(mix.shape, slope if isinstance(slope, float) else 1.0)


class _HiddenStep(nn.Module):
    """Apply W parallel sandwiches (branches), permute, normalise and activate each, and mix them by learnt scalars."""

    slopes: nn.Parameter | None

    def __init__(self, config: Rotor, window: int, index: int, device, dtype):
        super().__init__()
        self.config, self.window, self.index = config, window, index
        # a layer with one input window and W output windows, which are the branches
        self.rotors = SandwichSum(config, window, window * config.width, window, 1, device, dtype)
        kw = {"device": device, "dtype": dtype}
        self.mix = nn.Parameter(torch.empty(config.width, **kw))
        has_slopes = config.activation == "prelu" and config.slopes == "branch"
        self.register_parameter("slopes", nn.Parameter(torch.empty(config.width, **kw)) if has_slopes else None)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        self.rotors.reset_parameters()
        nn.init.constant_(self.mix, 1.0 if self.config.gains == "ones" else self.config.width**-0.5)
        if self.slopes is not None:
            nn.init.constant_(self.slopes, _INITIAL_SLOPE)

    def forward(self, x: Tensor, slope: Tensor | None = None, rotors: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """Return the step's output; ``slope`` is the network's shared one, ``rotors`` are computed if not passed."""
        config, slopes = self.config, self.slopes_or(slope)
        left, right = self.rotors.left, self.rotors.right
        if not supports_step(x, left, left if right is None else right, slopes, self.mix):
            return _activated_and_mixed(config, self.rotors(x, rotors), self.window, self.index, slopes, self.mix)
        seed = config.seed if config.permute else None
        tensors = x.reshape(-1, self.window), *self.rotors.factors_for(x, rotors), slopes, self.mix
        y = rotor_step(*tensors, seed, self.index, config.basis, config.normalize, config.activation)
        return y.view(x.shape)

    def slopes_or(self, slope: Tensor | None) -> Tensor:
        """Return the slopes of the branches (W,); ``slope``, the network's, if they have none."""
        return _branch_slopes(self.config.activation, slope if self.slopes is None else self.slopes, self.mix)


class RotorLinear(Operator):
    """y = sum_w r_w x s_w~ + bias (depth 0), or the paper's network of such sandwiches (depth >= 1)::

        z_0 = r x s~                                               entry
        z_k = sum_w mix_kw phi(P_kw norm(r_kw z_(k-1) s_kw~))      hidden, k = 1 .. depth
        y   = r z_depth s~ + bias                                  exit

    phi is the activation, P_kw a fixed permutation. ``functional.rotor.rotor_network`` is the reference: all paths of
    ``forward`` compute it. ``entry`` holds the parameters of a ``SandwichSum``. With depth >= 1 there are also
    ``hidden.k.rotors``, ``hidden.k.mix`` (W,), ``hidden.k.slopes`` (W,) and ``exit``. ``slope`` (1,) belongs to the
    entry layer's PReLU or, if slopes are shared, to all. ``bias`` (O,) is optional. ``forward`` takes the first of
    these paths that can run::

        dense_product       linear maps in inference: one cached dense matrix
        _fused_network      depth >= 1: one kernel for all layers; parameters that are cached are converted for it once
        self.entry          depth 0: the sum of sandwiches
        through_network     depth >= 1: layer by layer; one batch of matrix exponentials gives the rotors of all layers
    """

    config: Rotor
    exit: SandwichSum | None
    slope: nn.Parameter | None

    def create(self, **kw: Any) -> None:
        config, in_features, out_features = self.config, self.in_features, self.out_features
        window = reference.window_size(in_features, out_features)
        self.inner = inner = config.inner_size(in_features, out_features)
        if config.depth:
            self.entry = SandwichSum(config, in_features, inner, reference.window_size(in_features, inner), 1, **kw)
            self.hidden = nn.ModuleList(_HiddenStep(config, inner, k, **kw) for k in range(config.depth))
            self.exit = SandwichSum(config, inner, out_features, reference.window_size(inner, out_features), 1, **kw)
        else:
            self.entry = SandwichSum(config, in_features, out_features, window, config.width, **kw)
            self.hidden, self.exit = nn.ModuleList(), None
        has_slope = (
            config.depth and config.activation == "prelu" and (config.activate_entry or config.slopes == "shared")
        )
        self.register_parameter("slope", nn.Parameter(torch.empty(1, **kw)) if has_slope else None)

    def _layers(self) -> list[SandwichSum | _HiddenStep]:
        hidden = cast("list[_HiddenStep]", list(self.hidden))
        return [self.entry, *hidden, *([] if self.exit is None else [self.exit])]

    def _sums(self) -> list[SandwichSum]:
        return [layer.rotors if isinstance(layer, _HiddenStep) else layer for layer in self._layers()]

    def reset_parameters(self) -> None:
        """Initialise every layer, see their ``reset_parameters``; slope 0.25, zero bias."""
        for layer in self._layers():
            layer.reset_parameters()
        if self.slope is not None:
            nn.init.constant_(self.slope, _INITIAL_SLOPE)
        self.zero_bias_()

    def _prefers_dense(self, in_features: int, out_features: int, dtype: torch.dtype, tokens: int) -> bool:
        if not self.config.linear:
            return False
        factored = sum(layer.factored_cost(tokens, dtype) for layer in self._sums())
        return dense_cost(in_features, out_features, tokens, dtype.itemsize, tiled(dtype)) < factored

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of sandwiches r x s~ plus bias, or the network of such sums (``functional.rotor``)."""
        if (y := dense_product(self, x, self._prefers_dense)) is not None:
            return y
        (x,) = autocasted(x)
        if self._is_fused(x):
            return self._fused_network(x)
        y = self._without_bias(x)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def _is_fused(self, x: Tensor) -> bool:
        """Return whether one kernel runs the whole network."""
        if self.exit is None:
            return False
        sums = self._sums()
        if not all(is_untraced_cpu(s.left) for s in sums):
            return False
        return supports_network(x, [size for s in sums for size in s.factor_sizes])

    def _fused_network(self, x: Tensor) -> Tensor:
        cache = self._network_cache(x)
        tokens = x.reshape(-1, self.in_features)
        run = None
        if cache is not None:
            run = cache.get("network", lambda: PreparedNetwork(self.in_features, *self._network_tensors()))
        if run is not None:
            y = run(tokens, self.bias)
        else:
            left, right, orders, slopes, mix, network = self._network_tensors()
            y = rotor_network(tokens, left, right, orders, slopes, mix, self.bias, network)
        return y.view(*x.shape[:-1], self.out_features)

    def _network_cache(self, x: Tensor) -> ParameterCache | None:
        """Return the cache for ``_network_tensors``; None unless every layer may cache."""
        parameters = are_parameters(self, "slope") and all(are_parameters(s, "mix", "slopes") for s in self.hidden)
        if not parameters or any(s.cache_for(x) is None for s in self._sums()):
            return None
        return self.cache_or_compare(self.entry.left)

    def _network_tensors(self) -> tuple[Any, ...]:
        """Return the arguments of ``rotor_network`` without x and bias: left, right, orders, slopes, mix, network."""
        config, sums = self.config, self._sums()
        hidden = cast("list[_HiddenStep]", list(self.hidden))
        rotors = exponentials(sums) if self.entry.exponentiates else [None] * len(sums)
        factors = [s.factors(pair) for s, pair in zip(sums, rotors, strict=True)]
        left, right = ([factor.squeeze(0) for factor in side] for side in zip(*factors, strict=True))
        slopes: list[Tensor] = [step.slopes_or(self.slope) for step in hidden]
        mix: list[Tensor] = [step.mix for step in hidden]
        if config.activate_entry:
            one = self.entry.left.new_ones(1)
            slopes, mix = [_branch_slopes(config.activation, self.slope, one), *slopes], [one, *mix]
        orders = None
        if config.permute:
            arguments = self.inner, config.width, config.depth, config.activate_entry, config.seed
            orders = device_table(reference.branch_orders, arguments, self.entry.left, torch.int32)
        network = reference.NetworkSettings(
            out_features=self.out_features,
            window_sizes=tuple(s.window for s in sums),
            basis=config.basis,
            layout=config.windows,
            normalize=config.normalize,
            activate_entry=config.activate_entry,
            residual=config.residual,
            activation=config.activation,
        )
        return left, right, orders, torch.cat(slopes), torch.cat(mix), network

    def _rotors(self, x: Tensor) -> Sequence[tuple[Tensor, Tensor] | None]:
        """Return the rotors of every layer, computed in one batch; None for each if layers compute or cache theirs."""
        sums = self._sums()
        offloaded = self.entry.left.is_meta  # a layer has its parameters only while it runs
        separate = offloaded or not self.entry.exponentiates or self.entry.cache_for(x) is not None
        return [None] * len(sums) if separate else exponentials(sums)

    def _without_bias(self, x: Tensor) -> Tensor:
        if self.exit is None:
            return self.entry(x)
        first, *inner, last = self._rotors(x)
        hidden = (
            functools.partial(step, slope=self.slope, rotors=rotors)
            for step, rotors in zip(self.hidden, inner, strict=True)
        )
        entry, exit = functools.partial(self._run_entry, rotors=first), functools.partial(self.exit, rotors=last)
        return reference.through_network(x, entry, hidden, exit, self.config.residual)

    def _run_entry(self, x: Tensor, rotors: tuple[Tensor, Tensor] | None) -> Tensor:
        y = self.entry(x, rotors)
        if not self.config.activate_entry:
            return y
        one = y.new_ones(1)  # from y, as offloading may have moved the entry's parameters to the meta device again
        slopes = _branch_slopes(self.config.activation, self.slope, one)
        return _activated_and_mixed(self.config, y, self.inner, self.config.depth, slopes, one)

    def to_dense(self) -> Tensor:
        if not self.config.linear:
            raise NotLinearError(
                f"{self.config} has no dense matrix; it takes depth=0, or neither activation nor normalize"
            )
        if self.exit is None:
            return self.entry.dense().to(self.entry.left.dtype)
        eye = torch.eye(self.in_features, dtype=self.entry.left.dtype, device=self.entry.left.device)
        return self._without_bias(eye).T

    def fit_to_weight_(self, weight: Tensor) -> None:
        """Set the factors to the nearest sum of Kronecker products; only for settings with ``Rotor.fits_weight``."""
        size = self.entry.window
        if not self.config.fits_weight or self.in_features != size or self.out_features != size:
            raise ValueError(f"{self.config.kind} has no closed-form fit of a given weight; {self.config.fit_hint}")
        left, right = reference.nearest_kronecker(weight, *self.entry.factor_sizes, self.config.width)
        assert self.entry.right is not None
        nn.init.zeros_(self.entry.left)  # if there are more terms than the L^2 that suffice for any matrix
        nn.init.zeros_(self.entry.right)
        self.entry.left[: len(left), 0, 0].copy_(left)
        self.entry.right[: len(right), 0, 0].copy_(right)
        if self.entry.scale is not None:
            nn.init.ones_(self.entry.scale)

    def flops_per_token(self) -> int:
        activated = self.config.width * self.config.depth + self.config.activate_entry
        pointwise = 12 * self.inner * activated
        return sum(layer.flops_per_token() for layer in self._sums()) + pointwise

    def param_roles(self) -> dict[str, ParamRole]:
        """Return roles without weight decay for bivectors, as it would turn rotors towards the identity.

        A general element of the algebra acts as a matrix that sums over its V coordinates. The sizes of the two
        Kronecker factors multiply to V, so their fans grow as the square root of the width.
        """
        roles = super().param_roles()
        for name, role in roles.items():
            match name.rpartition(".")[2], self.config.terms:
                case "scale", _:
                    roles[name] = ParamRole(None, weight_decay=False)
                case "left" | "right", "rotor":
                    roles[name] = ParamRole(None, lr_multiplier=self.config.lr_multiplier, weight_decay=False)
                case "left" | "right", "kronecker":
                    roles[name] = role._replace(growth=0.5)
                case "left" | "right", "multivector":
                    roles[name] = role._replace(fan_out=None)
        return roles


@register
class Rotor(OperatorConfig):
    """Replace a matrix by rotors of a Clifford algebra (arXiv 2507.11688): O(log^2 d) parameters.

    A window of V = 2^n features, the largest power of two that fits, is an element x of Cl(n); a pair of rotors turns
    it into r x s~. Sizes that are not a power of two are covered by wrapping, overlapping windows. Each pair of an
    input and an output window has separate rotors; outputs that two windows reach are averaged. With ``depth`` 0 the
    layer is the linear map sum_w r_w x s_w~. With more it is a small network: one rotor layer into the inner width,
    ``depth`` steps of ``width`` parallel branches (rotor, permutation, normalisation, activation) mixed by learnt
    scalars, and one rotor layer to the output.

    Args:
        width: W, the terms of the sum (depth 0) or the parallel branches.
        depth: hidden steps.
        rotors: "double": r and s differ, 2 P parameters per pair of windows; "single": s = r, P parameters.
        basis: "spinor": coordinates of the spin representation, which is fastest; "blade": coordinates of blades,
            exactly the paper's map. Both are the same family up to a fixed orthogonal change of basis.
        terms: "rotor"; "multivector": general a_w x b_w (Lemma 1), 2 V parameters per pair of windows; "kronecker":
            free Kronecker factors. All cost the same to run, so comparing them measures the rotor constraint. For
            n = 5, 6, 7 modulo 8 general elements are those of Cl(0, n), which has the smaller matrices.
        activation: "prelu", "relu", "gelu", "silu", "leaky_relu" (slope 0.01), "elu" or "none", in the hidden steps.
        normalize: whether branches are normalised (LayerNorm without parameters).
        permute: whether branches are permuted, by a fixed random order (``seed``).
        scale: a learnt factor for every term and pair of windows; without it a rotor layer cannot change norms.
        init_std: standard deviation of the initial bivector coordinates.
        lr_multiplier: factor on the learning rate of the bivectors in a training recipe.
        seed: the permutations' seed.
        inner: the width within the network (depth 1 or more), a power of two: "both": the largest that fits into
            inputs and outputs; "input": the largest that fits into the inputs; or a number. Each layer's windows are
            the largest that fit into its two sides.
        windows: "wrapped": one after another, the last wrapping round to the beginning, input windows summed;
            "spread": the i-th of c windows of d coordinates starts at i d / c, and input windows are averaged.
        activate_entry: whether permutation, normalisation and activation follow the entry layer too.
        slopes: "branch": every branch learns a slope of its PReLU; "shared": one slope for the whole network.
        gains: initial ``scale`` and mixing scalars: "variance": such that variance is kept; "ones": 1.
        residual: whether the entry and the exit layer add their input if they have as many inputs as outputs.
        permute_terms: with ``depth`` 0, whether every term but the first reads the window in a different fixed order
            (drawn with ``seed``). Without it sums of any number of rotor terms span V^2 / 4 of the V^2 dimensions of
            matrices (general terms V^2 / 2 for odd n, all for even n); with it they span all.
        power_iterations: None: exact exponentials of bivectors. Otherwise bivectors are decomposed by Algorithms 1 and
            2 of the paper, with this number of iterations per plane in every forward pass (the authors: at most 20).
            Iterations start from the result of the last training step and only one is differentiated, so the gradient
            is biased (see ``clifford.decompose``). For reproduction only.

    Examples:
        >>> layer = relinear.Rotor(depth=0).build(64, 64)
        >>> layer(torch.randn(2, 64)).shape
        torch.Size([2, 64])
    """

    kind = "rotor"
    module_class = RotorLinear

    width: Count = 3
    depth: Annotated[int, IntRange(0, MAX_LAYERS)] = 2
    rotors: Literal["double", "single"] = "double"
    basis: Literal["spinor", "blade"] = "spinor"
    terms: Literal["rotor", "multivector", "kronecker"] = "rotor"
    activation: str = "prelu"
    normalize: bool = True
    permute: bool = True
    scale: bool = False
    init_std: Annotated[float, Field(gt=0)] = 0.02  # not 0: rotors that start equal would stay equal
    lr_multiplier: NonNegative = 1.0
    seed: Annotated[int, IntRange(0, 2**63 - 1)] = 0
    inner: Annotated[str | int, SkipValidation] = "both"
    windows: Literal["wrapped", "spread"] = "wrapped"
    activate_entry: bool = False
    slopes: Literal["branch", "shared"] = "branch"
    gains: Literal["variance", "ones"] = "variance"
    residual: bool = False
    permute_terms: bool = False
    power_iterations: Count | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("activation", self.activation, reference.ACTIVATIONS)
        sizes = {1 << n for n in range(1, MAX_DIMENSION + 1)}
        if self.inner not in ("both", "input") and (type(self.inner) is not int or self.inner not in sizes):
            raise ValueError(
                f"inner must be 'both', 'input' or a power of two from 2 to {1 << MAX_DIMENSION}, got {self.inner!r}"
            )
        for name, unused in (("activate_entry", False), ("residual", False), ("inner", "both")):
            value = getattr(self, name)
            if value != unused and not self.depth:
                raise ValueError(f"{name}={value!r} is about a network, which needs a depth of 1 or more, got depth=0")
        if self.permute_terms and self.depth:
            raise ValueError(f"permute_terms=True needs depth=0, got depth={self.depth}; networks have permute=True")
        if self.power_iterations is not None and self.terms != "rotor":
            raise ValueError(f"power_iterations decompose the bivectors of rotors; terms={self.terms!r} has none")

    @classmethod
    def authors(cls, **changes: Any) -> Rotor:
        """Return the network as the authors' code builds it, with ``changes`` applied.

        It has blade coordinates, standard normal bivectors, a scale for every rotor, one PReLU slope, and spread
        windows, averaged on both sides. Scales and mixing scalars are 1 at first. Permutation, LayerNorm and PReLU
        follow the entry layer too. As in their settings, depth is 2, width 3, rotors are double and there is no
        residual. The inner width is what fits into the inputs; theirs is a number for each model, such as
        ``inner=2048`` for 1,536 inputs. Their exponentials come from a power iteration that has usually converged:
        ``power_iterations=20`` adds it, with its biased gradient.
        """
        settings: dict[str, Any] = {
            "basis": "blade",
            "scale": True,
            "init_std": 1.0,
            "inner": "input",
            "windows": "spread",
            "activate_entry": True,
            "slopes": "shared",
            "gains": "ones",
        }
        return cls(**settings | changes)

    @property
    def linear(self) -> bool:
        """Return whether the layer is a linear map of its input."""
        return self.depth == 0 or (self.activation == "none" and not self.normalize)

    @property
    def fits_weight(self) -> bool:  # type: ignore[override]
        """Return whether there is a closed-form fit: only for a plain sum of Kronecker factors in the spinor basis."""
        return self.depth == 0 and self.terms == "kronecker" and self.basis == "spinor" and not self.permute_terms

    def inner_size(self, in_features: int, out_features: int) -> int:
        """Return the width within the network."""
        if isinstance(self.inner, int):
            return self.inner
        return reference.window_size(in_features, in_features if self.inner == "input" else out_features)

    def check_shape(self, in_features: int, out_features: int) -> None:
        if min(in_features, out_features) < 2:
            raise ValueError(
                f"a rotor layer needs at least two inputs and outputs, got {in_features=}, {out_features=}"
            )

    def scaled(self, in_features: int, out_features: int, ratio: float) -> Rotor:
        return self.replace(width=max(1, round(self.width * ratio)))
