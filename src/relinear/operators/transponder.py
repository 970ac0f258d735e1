"""Transponder: gates on a projection's output that are computed from its input.

Paper: "From Transformer to Transponder: introducing contextual modulation training for residual learning in LLMs".
"""

# Legend: I in_features, O out_features, R rank

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from relinear.activations.hooks import HasHookPoints
from relinear.contract.config import Config, Count, check_choice, register
from relinear.contract.inference import CachingModule
from relinear.contract.linear_layers import is_plain_linear
from relinear.contract.module_state import is_unhooked
from relinear.contract.operator import NotLinearError
from relinear.contract.parameters import add_parameters
from relinear.contract.wrapper import Wrapper, WrapperConfig
from relinear.functional.transponder import PHI, modulate, modulate_static, modulator_gate
from relinear.functional.upcast import upcast
from relinear.kernels.transponder import modulated_linear, prepare_few_rows
from relinear.operators.fused_inference import FusedInference

_BIASES = ("down_bias", "scalar_down_bias", "channel_bias", "scalar_bias")


class _ModulatorBase(nn.Module):
    """Base of modulators, with learnt curvatures alpha = exp(log_alpha), so that alpha > 0 throughout training."""

    #: marks a module that the analyses read gates from
    is_modulator = True

    def _alpha(self, name: str) -> Tensor | float:
        log_alpha = getattr(self, name)
        return 1.0 if log_alpha is None else torch.exp(upcast(log_alpha))

    def alphas(self) -> dict[str, float]:
        """Return the curvature of every gate by its name ("channel", "scalar" or "static"); 1 if it is fixed."""
        names = [name for name in ("channel", "scalar", "static") if hasattr(self, f"{name}_log_alpha")]
        return {name: float(self._alpha(f"{name}_log_alpha")) for name in names}


class Modulator(HasHookPoints, CachingModule, _ModulatorBase):
    """Gates in (0, 2) that read the layer's input: z -> z * channel gate * scalar gate (Eq. 4, 5, 9, 10).

    A gate is 2 sigmoid(alpha (B phi(A x + a) + b)), see ``functional.transponder.modulator_gate``.

    Parameters: ``down`` A (R, I), shared by both gates; ``channel_up`` (O, R) and ``scalar_up`` (1, R), the two B;
    ``channel_log_alpha`` and ``scalar_log_alpha`` (1,). With ``shared=False`` the scalar gate has a separate A,
    ``scalar_down`` (R, I). With ``biases=True`` every A and B has a bias: ``down_bias`` and ``scalar_down_bias`` (R,),
    ``channel_bias`` (O,), ``scalar_bias`` (1,). Hook points: ``channel`` and ``scalar``.

    Settings of phi, ``shared`` and ``biases`` other than the defaults run as plain torch operations.
    """

    hook_kind = "modulator"

    finite_fan_in = ("channel_up", "scalar_up")
    finite_fan_out = ("down", "scalar_down", "scalar_up")
    tensor_parallel: ClassVar = {"channel_up": 0}
    down: nn.Parameter
    scalar_down: nn.Parameter | None
    channel_up: nn.Parameter | None
    scalar_up: nn.Parameter | None
    down_bias: nn.Parameter | None
    scalar_down_bias: nn.Parameter | None
    channel_bias: nn.Parameter | None
    scalar_bias: nn.Parameter | None
    channel_log_alpha: nn.Parameter | None
    scalar_log_alpha: nn.Parameter | None

    def __init__(self, config: ModulatorConfig, in_features: int, out_features: int, device=None, dtype=None):
        super().__init__()
        kw = {"device": device, "dtype": dtype}
        rank, biases, learned = config.rank, config.biases, config.learnable_alpha
        separate = config.channel and config.scalar and not config.shared
        add_parameters(self, kw, down=(rank, in_features))
        for name, enabled, size in (("channel", config.channel, out_features), ("scalar", config.scalar, 1)):
            shapes = {"up": (size, rank), "log_alpha": (1,) if learned else None, "bias": (size,) if biases else None}
            add_parameters(self, kw, **{f"{name}_{part}": shape if enabled else None for part, shape in shapes.items()})
        add_parameters(
            self,
            kw,
            scalar_down=(rank, in_features) if separate else None,
            down_bias=(rank,) if biases else None,
            scalar_down_bias=(rank,) if separate and biases else None,
        )
        self.init, self.phi = config.init, config.phi
        #: whether kernels compute the gates: they support sigmoids and a shared A without biases
        self.has_kernels = self.phi == "sigmoid" and not biases and not separate
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self, identity: bool | None = None) -> None:
        """Initialise A and B uniformly, biases at zero, alpha at 1.

        The paper says "Kaiming uniform (He et al., 2015)": "he" has that paper's bound sqrt(6 / fan-in). "kaiming" has
        1 / sqrt(fan-in), sqrt(6) times less, the bound of ``nn.Linear``, which calls torch's function of that name with
        another slope. The gates of a fresh modulator then vary about a fourth as much from token to token. "identity"
        draws A as "kaiming" and sets B to zero.

        Args:
            identity: whether all gates are 1 at first; by default as in the settings.
        """
        identity = self.init == "identity" if identity is None else identity
        slope = 0.0 if self.init == "he" else math.sqrt(5)  # negative slope in ``kaiming_uniform_``
        ups = () if identity else (self.channel_up, self.scalar_up)
        for parameter in self.parameters():
            nn.init.zeros_(parameter)
        for matrix in (self.down, self.scalar_down, *ups):
            if matrix is not None:
                nn.init.kaiming_uniform_(matrix, a=slope)

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        """Return z * channel gate(x) * scalar gate(x) for the layer's input x (..., I) and output z (..., O)."""
        if not self.has_kernels or self.is_intervened:
            gated = z
            for name, gate in self.gates_of(x).items():
                gated = gated * self.hooked(name, gate)
            return gated.to(z.dtype)
        self._show_gates(x)
        alphas = self._alpha("channel_log_alpha"), self._alpha("scalar_log_alpha")
        return modulate(z, x, self.down, self.channel_up, self.scalar_up, *alphas)

    def after_linear(self, x: Tensor, linear: nn.Linear) -> Tensor:
        """Return ``forward(x, linear(x))`` for an ``nn.Linear``, in one kernel if there is one."""
        if not self.has_kernels or self.is_intervened:
            return self(x, linear(x))
        self._show_gates(x)
        weight, bias = linear.weight, linear.bias
        if x.device.type == "cpu" and not torch.is_grad_enabled() and not torch.compiler.is_compiling():
            # 1.0: these ups contain alpha already
            return modulated_linear(x, weight, bias, self.down, *self._cached_ups(), 1.0, 1.0)
        alphas = self._alpha("channel_log_alpha"), self._alpha("scalar_log_alpha")
        return modulated_linear(x, weight, bias, self.down, self.channel_up, self.scalar_up, *alphas)

    def _cached_ups(self) -> tuple[Tensor | None, Tensor | None]:
        """Return ``_scaled_ups``, in inference from the cache: for one token casts take longer than gates."""
        cache = None if self.training else self.parameter_cache
        return (None if cache is None else cache.get("scaled ups", self._scaled_ups)) or self._scaled_ups()

    def _scaled_ups(self) -> tuple[Tensor | None, Tensor | None]:
        """Return alpha B of the channel gate and of the scalar gate, in float32 or wider."""
        ups = self.channel_up, self.scalar_up
        alphas = self._alpha("channel_log_alpha"), self._alpha("scalar_log_alpha")
        wide = torch.promote_types(self.down.dtype, torch.float32)
        channel, scalar = (up if up is None else alpha * up.to(wide) for up, alpha in zip(ups, alphas, strict=True))
        # in the layout that the kernels read
        return None if channel is None else channel.T.contiguous().T, scalar

    def gates_of(self, x: Tensor) -> dict[str, Tensor]:
        """Return the gates for the input x (..., I): "channel" (..., O) and "scalar" (..., 1), in float32 at least."""
        shared = self.scalar_down is None
        scalar_down = (self.down, self.down_bias) if shared else (self.scalar_down, self.scalar_down_bias)
        parts = {
            "channel": (self.down, self.down_bias, self.channel_up, self.channel_bias),
            "scalar": (*scalar_down, self.scalar_up, self.scalar_bias),
        }
        return {
            name: modulator_gate(x, down, up, self._alpha(f"{name}_log_alpha"), self.phi, down_bias, up_bias)
            for name, (down, down_bias, up, up_bias) in parts.items()
            if down is not None and up is not None
        }

    def hook_sizes(self) -> dict[str, int]:
        ups = {"channel": self.channel_up, "scalar": self.scalar_up}
        return {name: up.shape[0] for name, up in ups.items() if up is not None}

    def _show_gates(self, x: Tensor) -> None:
        """Show the gates to hooks that only read; the kernel, which does not return its gates, gives the output."""
        if self.activation_hooks is not None:
            for name, gate in self.gates_of(x).items():
                self.hooked(name, gate)

    def is_neutral(self) -> bool:
        """Return whether every gate is exactly 1 for any input."""
        last = self.channel_up, self.scalar_up, self.channel_bias, self.scalar_bias
        return all(part is None or not bool(part.any()) for part in last)

    def static_gate(self) -> Tensor | None:
        """Return the gate as a vector (O,) or (1,) if it does not depend on the input, else None."""
        return torch.ones_like(self.down[0, :1]) if self.is_neutral() else None

    def flops_per_token(self) -> int:
        """Return the FLOPs of thin products, plus about eight operations per gate entry (sigmoid, scale, product)."""
        rank, in_features = self.down.shape
        downs = 1 if self.scalar_down is None else 2
        ups = sum(up.shape[0] for up in (self.channel_up, self.scalar_up) if up is not None)
        width = self.channel_up.shape[0] if self.channel_up is not None else 0
        biases = sum(getattr(self, name).numel() for name in _BIASES if getattr(self, name) is not None)
        return 2 * rank * (downs * in_features + ups) + 8 * (downs * rank + ups) + 2 * width + biases


class StaticModulator(_ModulatorBase):
    """Gate without context, a baseline (Table 4): gate = 2 sigmoid(alpha beta_1 beta_2), the same for every token.

    Parameters: ``channel_beta`` beta_2 (O,), ``scalar_beta`` beta_1 (1,), ``static_log_alpha`` (1,). The paper does not
    state initial values. Here the gate is exactly 1 at first: one factor is 0 and the other 1, so that both can learn.
    """

    channel_beta: nn.Parameter | None
    scalar_beta: nn.Parameter | None
    static_log_alpha: nn.Parameter | None

    def __init__(self, config: ModulatorConfig, in_features: int, out_features: int, device=None, dtype=None):
        super().__init__()
        kw = {"device": device, "dtype": dtype}
        add_parameters(
            self,
            kw,
            channel_beta=(out_features,) if config.channel else None,
            scalar_beta=(1,) if config.scalar else None,
            static_log_alpha=(1,) if config.learnable_alpha else None,
        )
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self, identity: bool | None = None) -> None:
        """Initialise the gate at exactly 1; ``identity`` changes nothing."""
        for parameter in self.parameters():
            nn.init.zeros_(parameter)
        if self.scalar_beta is not None and self.channel_beta is not None:
            nn.init.ones_(self.scalar_beta)

    def _beta(self) -> Tensor:
        factors = [beta for beta in (self.scalar_beta, self.channel_beta) if beta is not None]
        return factors[0] if len(factors) == 1 else factors[0] * factors[1]

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        return modulate_static(z, self._beta(), self._alpha("static_log_alpha"))

    def gates_of(self, x: Tensor) -> dict[str, Tensor]:
        """Return the gate, "channel" (..., O) or "scalar" (..., 1), expanded over the tokens of x (..., I)."""
        gate = self.static_gate()
        return {"scalar" if self.channel_beta is None else "channel": gate.expand(*x.shape[:-1], -1)}

    def static_gate(self) -> Tensor:
        """Return the gate as a vector (O,) or (1,)."""
        one = torch.ones(1, device=self._beta().device, dtype=torch.promote_types(self._beta().dtype, torch.float32))
        return modulate_static(one, self._beta(), self._alpha("static_log_alpha"))

    def flops_per_token(self) -> int:
        """Return the FLOPs of one product per entry; the gate itself is the same for all tokens."""
        return 0 if self.channel_beta is None else self.channel_beta.numel()


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModulatorConfig(Config):
    """Settings of a modulator of any part of a model.

    Args:
        rank: R, the hidden width of the bottleneck (Table 6; the paper's default is 8).
        channel: a gate for every output channel and token.
        scalar: one gate for every token.
        contextual: gates read the input; False replaces them by learnt constants beta_1 beta_2 (Table 4).
        learnable_alpha: the curvature alpha is learnt (one per gate); False keeps it at 1 (Table 4).
        init: for training from scratch "he", the paper's, or "kaiming", sqrt(6) times narrower, an earlier default; or
            "identity": all gates are exactly 1 at first, so that a pretrained model computes the same bits as before.
        phi: activation between A and B (Eq. 4): "sigmoid", "tanh", "relu", "gelu", "silu", or "none" (as in Eq. 9).
        shared: both gates use one A, as the paper's one per cent of parameters implies; False: one each.
        biases: A and B have biases, initialised at zero. The paper initialises "zero biases" that its equations do not
            have; its one per cent of parameters allows either.

    The last three apply to gates that read the input, and ``shared`` only if there are both gates.
    """

    rank: Count = 8
    channel: bool = True
    scalar: bool = True
    contextual: bool = True
    learnable_alpha: bool = True
    init: Literal["he", "kaiming", "identity"] = "he"
    phi: str = "sigmoid"
    shared: bool = True
    biases: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("phi", self.phi, PHI)
        if not self.channel and not self.scalar:
            raise ValueError("a modulator needs channel=True, scalar=True or both")


def build_modulator(
    config: ModulatorConfig, in_features: int, out_features: int, device=None, dtype=None
) -> Modulator | StaticModulator:
    """Return the modulator of ``config`` for a layer (in_features -> out_features)."""
    cls = Modulator if config.contextual else StaticModulator
    return cls(config, in_features, out_features, device=device, dtype=dtype)


class TransponderLinear(FusedInference, Wrapper):
    """y = base(x) * channel gate(x) * scalar gate(x); the gates are the submodule ``modulator``.

    The gates scale the whole output of the projection, its bias included (Eq. 6). With PEFT, pass
    ``modules_to_save=["modulator"]`` to train and save them.
    """

    def create(self, **kw: Any) -> None:
        self.modulator = build_modulator(self.config, self.in_features, self.out_features, **kw)

    def neutralize(self) -> None:
        """Set every gate to exactly 1."""
        self.modulator.reset_parameters(identity=True)

    def fused_kernel(self, x: Tensor) -> Callable[[Tensor], Tensor] | None:
        base, modulator = self.base, self.modulator
        if type(modulator) is Modulator and is_plain_linear(base) and modulator.has_kernels:
            return prepare_few_rows(x, base.weight, base.bias, modulator.down, *modulator._scaled_ups())
        return None

    def forward(self, x: Tensor) -> Tensor:
        """Return y = base(x) * channel gate(x) * scalar gate(x) (Eq. 6)."""
        if (y := self.fused_forward(x)) is not None:
            return y
        base, modulator = self.base, self.modulator
        if type(modulator) is Modulator and is_plain_linear(base) and is_unhooked(modulator):
            return modulator.after_linear(x, base)
        return modulator(x, base(x))

    def _static_gate(self) -> Tensor:
        gate = self.modulator.static_gate()
        if gate is None:
            raise NotLinearError(
                "transponder: the gates depend on the input, so the layer is not a linear map and cannot be folded; "
                "only contextual=False, or gates that are still the identity, can"
            )
        return gate

    def to_dense(self) -> Tensor:
        """Return the gated matrix if the gates are the same for all tokens: without context, or still the identity."""
        weight, _ = self.base_dense()
        return (self._static_gate()[:, None] * weight).to(weight.dtype)

    def dense_bias(self) -> Tensor | None:
        _, bias = self.base_dense()
        return None if bias is None else (self._static_gate() * bias).to(bias.dtype)

    def flops_per_token(self) -> int:
        return self.base_flops_per_token() + self.modulator.flops_per_token()


@register
class Transponder(ModulatorConfig, WrapperConfig):
    """Modulate an existing projection, or another operator: multiply its output by gates computed from its input.

    ``Transponder()`` is the paper's default, Modulator-layer-channel-scalar. Its other projection-level variants are
    ``channel=False`` and ``scalar=False``; ``PathTransponder`` has the path-level ones.

    Args:
        rank, channel, scalar, contextual, learnable_alpha, init, phi, shared, biases: see ``ModulatorConfig``.
        base: operator inside, ``Transponder(base=HDPL(...))``; None wraps the existing layer.

    Examples:
        >>> model, ids = relinear.from_preset("tiny").eval(), torch.randint(258, (1, 8))
        >>> before = model(ids).logits
        >>> _ = relinear.replace_(model, {"all-linear": relinear.Transponder(init="identity")})
        >>> torch.equal(model(ids).logits, before)
        True
    """

    kind = "transponder"
    module_class = TransponderLinear
