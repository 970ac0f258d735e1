"""Context-conditioned linear layers: a low-rank map whose basis and outputs are gated by a shared causal context."""

# Legend: T tokens, I in_features, O out_features, R rank, C context_dim, G gate width, E templates

from __future__ import annotations

import itertools
import math
from typing import Annotated, Any, ClassVar, Literal, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from relinear.activations.hook_points import HasHookPoints
from relinear.activations.shared_context import current_context
from relinear.contract.config import MAX_LAYERS, Count, IntRange, NonNegative, check_divides, register
from relinear.contract.operator import NotLinearError, Operator, OperatorConfig
from relinear.contract.parameters import AffineParameters, are_affine
from relinear.functional.ccl import ccl_dense, ccl_gated, gate, largest_shares, template_shares
from relinear.functional.low_rank import low_rank_factors
from relinear.kernels.ccl import EPS, ccl, prepare_few_rows
from relinear.operators.context_manager import GELU_GAIN
from relinear.operators.fused_inference import FusedInference, Kernel

_OPEN = 2.0  # gate logit that from_linear starts at: sigmoid 0.88, open and yet far from saturated


class CCLLinear(FusedInference, HasHookPoints, Operator):
    """y = ((LayerNorm(x W_basis) * g_basis) W_mix + b) * g_out, the gates sigmoids of a network of the context.

    Parameters: ``basis`` (R, I), ``mix`` (O, R), optional ``bias`` (O,), ``norm`` (gain and offset of R), ``trunk``
    (the gate network's hidden layers), ``basis_gate`` (R, G) and ``output_gate`` (O, G) with biases, its last layer;
    with templates ``basis_gate`` is (E, G). Needs a context (``relinear.ContextManager`` or
    ``relinear.activations.context``) unless both gates are off. The gates can be read and changed as ``basis_gate``
    (with templates one value each) and ``output_gate``.
    """

    config: CCL
    finite_fan_in = ("mix", "trunk", "basis_gate", "output_gate")
    finite_fan_out = ("basis", "trunk", "basis_gate")
    # its LayerNorm needs all features of the basis, so that is a sum over the inputs
    tensor_parallel: ClassVar = {"basis": 1, "mix": 0, "output_gate": 0, "bias": 0}

    def __init__(self, config, in_features, out_features, *, bias=True, device=None, dtype=None):
        super().__init__(config, in_features, out_features)
        kw = {"device": device, "dtype": dtype}
        rank, sizes = config.rank, config.gate_sizes()
        self.basis = nn.Parameter(torch.empty(rank, in_features, **kw))
        self.mix = nn.Parameter(torch.empty(out_features, rank, **kw))
        self.register_parameter("bias", nn.Parameter(torch.empty(out_features, **kw)) if bias else None)
        self.norm = AffineParameters(rank, **kw) if config.norm else None
        layers = itertools.pairwise(sizes) if config.conditioned else ()
        self.trunk = nn.ModuleList([AffineParameters(b, a, **kw) for a, b in layers])
        self.basis_gate = AffineParameters(config.basis_gates, sizes[-1], **kw) if config.basis_gate else None
        self.output_gate = AffineParameters(out_features, sizes[-1], **kw) if config.output_gate else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Factors as in LowRank, zero biases, unit norm; a gate network that keeps its input's variance.

        The gates then start spread around one half (standard deviation 0.2 for a context of unit variance): gates that
        start all alike learn slowly. The output starts at about half (one gate) or a quarter (two) of unit variance.
        """
        nn.init.normal_(self.basis, std=1 / math.sqrt(self.in_features))
        nn.init.normal_(self.mix, std=1 / math.sqrt(self.config.rank))
        self.zero_bias_()
        if self.norm is not None:
            self.norm.reset_parameters()
        for index, layer in enumerate(self.trunk):
            _keep_variance(layer, GELU_GAIN if index else 1.0)
        for last in (self.basis_gate, self.output_gate):
            if last is not None:
                _keep_variance(last, GELU_GAIN if self.trunk else 1.0)

    def fused_kernel(self, x: Tensor) -> Kernel | None:
        parts = (self.norm, self.basis_gate, self.output_gate)
        if self.config.composition != "gates" or not are_affine((*self.trunk, *parts)):
            return None
        # by their forward: hooks are for the calls of a forward pass
        trunk = [parameter for layer in self.trunk for parameter in layer.forward()]
        weights = [(None, None) if part is None else part.forward() for part in parts]
        tensors = self.bias, *itertools.chain.from_iterable(weights)
        width = self.config.context_dim if self.config.conditioned else 0
        kernel = prepare_few_rows(x, width, trunk, self.basis, self.mix, *tensors, gate_bias=self.config.gate_bias)
        return None if kernel is None else lambda x: kernel(x, self._context(x))

    def forward(self, x: Tensor) -> Tensor:
        """Return y = ((LayerNorm(x W_basis) * g_basis) W_mix + b) * g_out, with the gates of the current context."""
        if (y := self.fused_forward(x)) is not None:
            return y
        context = self._context(x)
        features = None if context is None else self._features(context)
        factors = self.basis, self.mix, self.bias, *_affine(self.norm)
        templates = self.config.composition != "gates"
        if features is not None and (templates or self._activation_hooks is not None):
            inner, outer = self._hooked_gates(x, features)
            if templates or self._is_intervened:
                return ccl_gated(x, self._of_features(inner), outer, *factors, self.config.gate_bias)
        gates = *_affine(self.basis_gate), *_affine(self.output_gate)
        return ccl(x, features, *factors, *gates, self.config.gate_bias, EPS)

    def _context(self, x: Tensor) -> Tensor | None:
        return current_context(x, self.config.context_dim, "ccl") if self.config.conditioned else None

    def hook_sizes(self) -> dict[str, int]:
        sizes = {"basis_gate": self.config.basis_gates, "output_gate": self.out_features}
        return {name: size for name, size in sizes.items() if getattr(self, name) is not None}

    def _hooked_gates(self, x: Tensor, features: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """``_gates`` for the tokens of x, as interventions change them."""
        inner, outer = self._gates(features, self.training)
        if self._activation_hooks is None:
            return inner, outer
        tokens = x.shape[:-1]
        inner = None if inner is None else self._hooked("basis_gate", inner.expand(*tokens, -1))
        return inner, None if outer is None else self._hooked("output_gate", outer.expand(*tokens, -1))

    def _gates(self, features: Tensor, record: bool = False) -> tuple[Tensor | None, Tensor | None]:
        """Return the gates of the basis (..., R), or the shares of templates (..., E), and of the outputs (..., O)."""
        inner, outer = None, None
        if self.config.composition != "gates":
            inner = self._shares(features, record)
        elif self.basis_gate is not None:
            inner = gate(features, *self.basis_gate())
        if self.output_gate is not None:
            outer = gate(features, *self.output_gate())
        return inner, outer

    def _of_features(self, gates: Tensor | None) -> Tensor | None:
        """Return gates of the basis as one for every feature (..., R)."""
        return None if gates is None else gates.repeat_interleave(self.config.rank // self.config.basis_gates, -1)

    def _shares(self, features: Tensor, record: bool) -> Tensor:
        """Return a token's share of every template, (..., E): its probability, or zero where it is not selected.

        With "selection" and ``record``, each token's probabilities and templates (..., T, 2, E) are recorded.
        """
        config, probabilities = self.config, template_shares(features, *_affine(self.basis_gate))
        if config.composition != "selection":
            return probabilities
        shares = largest_shares(probabilities, config.selected)
        if record and config.balance:
            used = (shares.detach() > 0).to(shares.dtype) / config.selected
            both = torch.stack([probabilities, used], -2)
            self.record_auxiliary({"balance": both}, {"busiest": both.detach()})
        return shares

    def reduce_over_tokens(self, name: str, value: Tensor, mask: Tensor | None) -> Tensor:
        """The Switch Transformer's loss against collapse, E sum_e f_e p_e, in each sequence; or the largest f_e of all.

        f_e is the share of tokens that use e, p_e their mean probability. The mean over sequences is weighted by their
        tokens, so that neither padding nor the way in which sequences are put into batches changes it.
        """
        if mask is None:
            mask = torch.ones_like(value[..., 0, 0], dtype=torch.bool)
        probabilities, used = torch.where(mask[..., None, None], value, 0.0).unbind(-2)
        tokens = mask.sum().clamp(min=1)
        if name == "busiest":
            return used.flatten(0, -2).sum(0).max() / tokens
        together = (probabilities.sum(-2) * used.sum(-2)).sum(-1) / mask.sum(-1).clamp(min=1)
        return self.config.balance * self.config.templates * together.sum() / tokens

    def _features(self, context: Tensor) -> Tensor:
        features = context.to(self.basis.dtype)
        for layer in self.trunk:
            features = F.gelu(F.linear(features, *layer()))
        return features

    def gates(self, context: Tensor | None = None) -> dict[str, Tensor]:
        """Return the gates for a context (..., C): {"basis": (..., R), "output": (..., O)}, without those that are off.

        With templates "basis" is the share of the template that each feature belongs to.

        Args:
            context: by default that of the forward pass or ``relinear.activations.context`` block which is running.
        """
        if not self.config.conditioned:
            return {}
        if context is None:
            context = current_context(None, self.config.context_dim, "ccl")
        inner, outer = self._gates(self._features(context))
        gates = {"basis": self._of_features(inner), "output": outer}
        return {name: value for name, value in gates.items() if value is not None}

    def factors(self) -> tuple[Tensor, Tensor]:
        """(mix (O, R), basis (R, I)): W_eff is diag(g_out) mix diag(g_basis) basis."""
        return self.mix, self.basis

    def effective_weight(self, context: Tensor | None = None) -> Tensor:
        """Return W_eff of Eq. 5 as (..., O, I), one matrix per token; without the LayerNorm, as in the paper."""
        gates = self.gates(context)
        return ccl_dense(self.basis, self.mix, gates.get("basis"), gates.get("output"))

    def to_dense(self) -> Tensor:
        """Return the exact matrix of every token of the current context, (..., O, I); one matrix (O, I) without gates.

        Raises:
            NotLinearError: with the LayerNorm, which makes the map non-linear (``effective_weight`` leaves it out).
        """
        if self.norm is not None:
            raise NotLinearError(
                "ccl with norm=True is not linear in its input (the LayerNorm divides by the token's own spread); use "
                "CCL(norm=False), or effective_weight() for the paper's W_eff, which leaves the LayerNorm out"
            )
        return self.effective_weight()

    def dense_bias(self) -> Tensor | None:
        gates = self.gates()
        if self.bias is None or "output" not in gates or not self.config.gate_bias:
            return self.bias
        return self.bias * gates["output"]

    @torch.no_grad()
    def from_linear(self, linear: nn.Module) -> Self:
        """Set a truncated SVD of the weight with open gates: the best fit of this rank, in every context.

        The gates start constant at 0.88 (zero weights, open biases) and the factors make up for it; training lets the
        context move them. With "remixing" all templates start with an equal share.

        Raises:
            ValueError: with the LayerNorm or with "selection", under which no given weight is reproduced.
        """
        if not self.config.fits_weight:
            raise ValueError(f"ccl cannot take over a weight; {self.config.fit_hint}")
        fitted = min(self.config.rank, self.in_features, self.out_features)
        down, up = low_rank_factors(self.source_weight(linear), fitted)
        opening = 1 / (1 + math.exp(-_OPEN))
        inner = 1.0 if self.basis_gate is None else opening
        if self.config.composition != "gates":
            inner = 1 / self.config.templates
        outer = opening if self.output_gate is not None else 1.0
        self.mix.zero_()  # a rank above the layer's own leaves basis rows that nothing reads yet
        self.basis[:fitted].copy_(down)
        self.mix[:, :fitted].copy_(up / (inner * outer))
        for last in (self.basis_gate, self.output_gate):
            if last is not None:
                last.weight.zero_()
                last.bias.fill_(_OPEN)
        self.copy_bias_(linear)
        if self.bias is not None and self.config.gate_bias:
            self.bias.div_(outer)
        return self

    def flops_per_token(self) -> int:
        rank, out = self.config.rank, self.out_features
        hidden = sum(a * b for a, b in itertools.pairwise(self.config.gate_sizes())) if self.config.conditioned else 0
        gates = (self.config.basis_gates if self.basis_gate is not None else 0) + (
            out if self.output_gate is not None else 0
        )
        network = 2 * (hidden + self.config.gate_sizes()[-1] * gates)
        return 2 * rank * (self.in_features + out) + network + gates


def _keep_variance(layer: Any, gain: float) -> None:
    nn.init.normal_(layer.weight, std=gain / math.sqrt(layer.weight.shape[1]))
    nn.init.zeros_(layer.bias)


def _affine(layer: Any) -> tuple[Any, Any]:
    return (None, None) if layer is None else layer()


@register
class CCL(OperatorConfig):
    """Replace a linear layer by a low-rank one whose basis and outputs a context gates (CCL, Eq. 1 to 4).

    Args:
        rank: R, width of the basis (d_basis in the paper); may exceed the layer's own sizes.
        context_dim: C, width of the context that it reads: ``ContextManager(dim=)``.
        basis_gate: gate the basis (Eq. 2, 3).
        output_gate: gate the outputs (Eq. 4).
        gate_bias: let the output gate scale the bias too (Eq. 4); False is the paper's Figure 3.
        gate_depth: hidden layers of the gate network, with GELU; 0 reads the gates off the context by one matrix.
        gate_width: G, their width; None means context_dim.
        norm: LayerNorm with gain and offset after the basis (Eq. 1). ``from_linear`` and ``to_dense`` need False.
        composition: what makes the operator of a token out of the basis. "gates": a gate for every basis feature
            (the paper). The other two are the baselines that its Section 4.2 names and does not define; they have
            ``templates`` low-rank maps of rank R / E in the same basis and mix matrices, and a softmax over them on the
            gate network's last layer. "remixing": a mixture of all templates, y = sum_e p_e U_e V_e x (dynamic
            composition without gates on features). "selection": the ``selected`` largest p_e alone (experts).
        templates: E, for the latter two; must divide rank.
        selected: templates a token uses, with "selection".
        balance: weight of the Switch Transformer's loss that keeps all templates in use, with "selection"; 0 is none.
            It is taken in each sequence, so that it is the same in batches of any size, with and without padding.

    Both gates off is the paper's "Static Linear": a low-rank layer that needs no context. With one hidden layer of the
    context's width in every gate network and the manager's default MLP, replacing the MLPs of the paper's Base-64 gives
    10.29 M parameters, the paper's CCL-64.

    Examples:
        >>> model = relinear.from_preset("tiny")
        >>> relinear.attach_(model, relinear.ContextManager(dim=16))
        >>> _ = relinear.replace_(model, {"up_proj": relinear.CCL(rank=8, context_dim=16)})
        >>> model(torch.randint(258, (1, 8))).logits.shape
        torch.Size([1, 8, 258])
    """

    kind: ClassVar[str] = "ccl"
    module_class = CCLLinear

    rank: Count = 64
    context_dim: Count = 64
    basis_gate: bool = True
    output_gate: bool = True
    gate_bias: bool = True
    gate_depth: Annotated[int, IntRange(0, MAX_LAYERS)] = 1
    gate_width: Count | None = None
    norm: bool = True
    composition: Literal["gates", "remixing", "selection"] = "gates"
    templates: Count = 8
    selected: Count = 1
    balance: NonNegative = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.composition == "gates":
            return
        if not self.basis_gate:
            raise ValueError(
                f"composition={self.composition!r} replaces the basis gate, which is off; set basis_gate=True"
            )
        check_divides("templates", self.templates, rank=self.rank)
        if self.selected > self.templates:
            raise ValueError(f"selected={self.selected} exceeds templates={self.templates}")

    @property
    def basis_gates(self) -> int:
        """Return outputs of the gate network for the basis: one per feature, or one per template."""
        return self.rank if self.composition == "gates" else self.templates

    @property
    def conditioned(self) -> bool:  # type: ignore[override]
        """Return whether any gate reads the context."""
        return self.basis_gate or self.output_gate

    @property
    def fits_weight(self) -> bool:  # type: ignore[override]
        """Return whether a given weight can be taken over: not through a LayerNorm, nor by a part of the basis."""
        return not self.norm and self.composition != "selection"

    @property
    def fit_hint(self) -> str:  # type: ignore[override]
        """Return advice for when it cannot."""
        if self.composition == "selection":
            return "a token uses a part of the basis alone; use init='fresh', or relinear.distill_ to fit it on data"
        return (
            "the LayerNorm between basis and gate rescales every token: use norm=False, initialised as the best "
            "low-rank fit, or init='fresh', or relinear.distill_ to fit it on data"
        )

    def gate_sizes(self) -> tuple[int, ...]:
        """Return the widths of the gate network from the context to its last hidden layer."""
        return (self.context_dim, *[self.gate_width or self.context_dim] * self.gate_depth)

    def scaled(self, in_features: int, out_features: int, ratio: float) -> CCL:
        step = 1 if self.composition == "gates" else self.templates
        return self.replace(rank=step * max(1, round(self.rank * ratio / step)))
