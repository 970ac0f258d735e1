"""Context-conditioned linear layers: a low-rank map whose basis and outputs are gated by a shared causal context."""

# Legend: T tokens, I in_features, O out_features, R rank, C context_dim, G gate width, E templates

from __future__ import annotations

import itertools
import math
from typing import Annotated, Any, ClassVar, Literal, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from relinear.activations.hooks import HasHookPoints
from relinear.activations.shared_context import current_context
from relinear.contract.config import MAX_LAYERS, Count, IntRange, NonNegative, check_divides, register
from relinear.contract.operator import NotLinearError, Operator, OperatorConfig
from relinear.contract.parameters import AffineParameters, are_affine_parameters
from relinear.deprecated import with_attributes_of_0_2
from relinear.functional.ccl import ccl_dense, ccl_gated, gate, keep_largest, template_probabilities
from relinear.functional.low_rank import low_rank_factors
from relinear.kernels.ccl import EPS, ccl, prepare_few_rows
from relinear.operators.context_manager import GELU_GAIN
from relinear.operators.fused_inference import FusedInference, Kernel

_OPEN_LOGIT = 2.0  # of a gate after fit_to_linear_: its sigmoid is 0.88, open but not saturated


class CCLLinear(FusedInference, HasHookPoints, Operator):
    """y = ((LayerNorm(x W_basis) * g_basis) W_mix + b) * g_out; the gates are sigmoids of a network of the context.

    Parameters: ``basis`` (R, I), ``mix`` (O, R), optional ``bias`` (O,), ``norm`` (gain and offset of R), ``trunk``
    (the gate network's hidden layers), ``basis_gate`` (R, G) and ``output_gate`` (O, G) with biases, its last layer;
    with templates ``basis_gate`` is (E, G). Needs a context (``relinear.ContextManager`` or
    ``relinear.activations.context``) unless both gates are off. Hook points: ``basis_gate``, with one value per feature
    or template, and ``output_gate``.
    """

    config: CCL
    finite_fan_in = ("mix", "trunk", "basis_gate", "output_gate")
    finite_fan_out = ("basis", "trunk", "basis_gate")
    # the LayerNorm needs all features of the basis, so the basis is split over the inputs
    tensor_parallel: ClassVar = {"basis": 1, "mix": 0, "output_gate": 0, "bias": 0}

    def create(self, **kw: Any) -> None:
        config, rank, sizes = self.config, self.config.rank, self.config.gate_sizes()
        self.basis = nn.Parameter(torch.empty(rank, self.in_features, **kw))
        self.mix = nn.Parameter(torch.empty(self.out_features, rank, **kw))
        self.register_parameter("bias", None)  # its place: optimiser states of earlier runs have it third
        self.norm = AffineParameters(rank, **kw) if config.norm else None
        layers = itertools.pairwise(sizes) if config.conditioned else ()
        self.trunk = nn.ModuleList([AffineParameters(b, a, **kw) for a, b in layers])
        self.basis_gate = AffineParameters(config.basis_gate_count, sizes[-1], **kw) if config.basis_gate else None
        self.output_gate = AffineParameters(self.out_features, sizes[-1], **kw) if config.output_gate else None

    def reset_parameters(self) -> None:
        """Initialise factors as in LowRank, biases as zero, and a gate network that keeps its input's variance.

        Gates are then distributed around one half with a standard deviation of 0.2 for a context of unit variance;
        equal gates would learn slowly. The output's variance is about a half with one gate, a quarter with two.
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
        if self.config.composition != "gates" or not are_affine_parameters((*self.trunk, *parts)):
            return None
        # ``forward`` instead of a call: hooks of the submodules run only in a forward pass of the layer
        trunk = [parameter for layer in self.trunk for parameter in layer.forward()]
        weights = [(None, None) if part is None else part.forward() for part in parts]
        tensors = self.bias, *itertools.chain.from_iterable(weights)
        width = self.config.context_dim if self.config.conditioned else 0
        kernel = prepare_few_rows(x, width, trunk, self.basis, self.mix, *tensors, gate_bias=self.config.gate_bias)
        return None if kernel is None else lambda x: kernel(x, self._context(x))

    def forward(self, x: Tensor) -> Tensor:
        """Return y = ((LayerNorm(x W_basis) * g_basis) W_mix + b) * g_out (Eq. 1 to 4) for the current context.

        ``functional.ccl.ccl`` writes it out. ``features`` is the gate network's last hidden layer, from which the gates
        g_basis and g_out are computed.
        """
        if (y := self.fused_forward(x)) is not None:
            return y
        context = self._context(x)
        features = None if context is None else self._features(context)
        factors = self.basis, self.mix, self.bias, *_affine(self.norm)
        if features is not None and (self.config.composition != "gates" or self.is_intervened):
            g_basis, g_out = self._hooked_gates(x, features)
            return ccl_gated(x, self._per_feature(g_basis), g_out, *factors, self.config.gate_bias)
        if features is not None and self.activation_hooks is not None:
            self._hooked_gates(x, features)  # for observers; y is computed as without them
        gates = *_affine(self.basis_gate), *_affine(self.output_gate)
        return ccl(x, features, *factors, *gates, self.config.gate_bias, EPS)

    def _context(self, x: Tensor) -> Tensor | None:
        return current_context(x, self.config.context_dim, "ccl") if self.config.conditioned else None

    def hook_sizes(self) -> dict[str, int]:
        sizes = {"basis_gate": self.config.basis_gate_count, "output_gate": self.out_features}
        return {name: size for name, size in sizes.items() if getattr(self, name) is not None}

    def _hooked_gates(self, x: Tensor, features: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Return ``_gates`` for the tokens of x, after passing them through activation hooks."""
        g_basis, g_out = self._gates(features, self.training)
        if self.activation_hooks is None:
            return g_basis, g_out
        sizes = *x.shape[:-1], -1
        g_basis = None if g_basis is None else self.hooked("basis_gate", g_basis.expand(sizes))
        return g_basis, None if g_out is None else self.hooked("output_gate", g_out.expand(sizes))

    def _gates(self, features: Tensor, record: bool = False) -> tuple[Tensor | None, Tensor | None]:
        """Return the basis gates (..., R), or templates' probabilities (..., E), and the output gates (..., O)."""
        g_basis: Tensor | None = None
        if self.config.composition != "gates":
            g_basis = self._template_probabilities(features, record)
        elif self.basis_gate is not None:
            g_basis = gate(features, *self.basis_gate())
        return g_basis, None if self.output_gate is None else gate(features, *self.output_gate())

    def _per_feature(self, gates: Tensor | None) -> Tensor | None:
        """Return one gate per basis feature (..., R): a template's probability is repeated for its features."""
        return None if gates is None else gates.repeat_interleave(self.config.rank // self.config.basis_gate_count, -1)

    def _template_probabilities(self, features: Tensor, record: bool) -> Tensor:
        """Return each token's probabilities of templates (..., E), zero for templates that are not selected.

        With "selection" and ``record``, probabilities and selections (..., T, 2, E) are recorded for the balance loss.
        """
        config = self.config
        probabilities = template_probabilities(features, *_affine(self.basis_gate))
        if config.composition != "selection":
            return probabilities
        selected = keep_largest(probabilities, config.selected)
        if record and config.balance:
            used = (selected.detach() > 0).to(selected.dtype) / config.selected
            stacked = torch.stack([probabilities, used], -2)
            self.record_auxiliary({"balance": stacked}, {"busiest": stacked})
        return selected

    def reduce_over_tokens(self, name: str, value: Tensor, mask: Tensor | None) -> Tensor:
        """Return the Switch Transformer's load-balancing loss E sum_e f_e p_e, or for "busiest" the largest f_e.

        f_e is the share of tokens that use template e, p_e its mean probability, both in one sequence. The mean over
        sequences is weighted by their tokens, so padding and batching do not change it.
        """
        if mask is None:
            mask = torch.ones_like(value[..., 0, 0], dtype=torch.bool)
        probabilities, used = torch.where(mask[..., None, None], value, 0.0).unbind(-2)
        tokens = mask.sum().clamp(min=1)
        if name == "busiest":
            return used.flatten(0, -2).sum(0).max() / tokens
        per_sequence = (probabilities.sum(-2) * used.sum(-2)).sum(-1) / mask.sum(-1).clamp(min=1)
        return self.config.balance * self.config.templates * per_sequence.sum() / tokens

    def _features(self, context: Tensor) -> Tensor:
        """Return the gate network's last hidden layer (..., G) for a context (..., C)."""
        features = context.to(self.basis.dtype)
        for layer in self.trunk:
            features = F.gelu(F.linear(features, *layer()))
        return features

    def gates(self, context: Tensor | None = None) -> dict[str, Tensor]:
        """Return the gates for a context (..., C): {"basis": (..., R), "output": (..., O)}, without gates that are off.

        With templates "basis" is the probability of each feature's template.

        Args:
            context: by default that of the running forward pass or ``relinear.activations.context`` block.
        """
        if not self.config.conditioned:
            return {}
        if context is None:
            context = current_context(None, self.config.context_dim, "ccl")
        g_basis, g_out = self._gates(self._features(context))
        gates = {"basis": self._per_feature(g_basis), "output": g_out}
        return {name: value for name, value in gates.items() if value is not None}

    def factors(self) -> tuple[Tensor, Tensor]:
        """Return mix (O, R) and basis (R, I); W_eff is diag(g_out) mix diag(g_basis) basis."""
        return self.mix, self.basis

    def effective_weight(self, context: Tensor | None = None) -> Tensor:
        """Return W_eff of Eq. 5, one matrix (..., O, I) per token, without the LayerNorm, as in the paper."""
        gates = self.gates(context)
        return ccl_dense(self.basis, self.mix, gates.get("basis"), gates.get("output"))

    def to_dense(self) -> Tensor:
        """Return every token's exact matrix for the current context, (..., O, I); without gates one matrix (O, I).

        Raises:
            NotLinearError: with the LayerNorm, which makes the map non-linear; ``effective_weight`` leaves it out.
        """
        if self.norm is not None:
            raise NotLinearError(
                "ccl with norm=True is not linear in its input (the LayerNorm divides by a standard deviation); use "
                "CCL(norm=False), or effective_weight() for the paper's W_eff, which leaves the LayerNorm out"
            )
        return self.effective_weight()

    def dense_bias(self) -> Tensor | None:
        gates = self.gates()
        if self.bias is None or "output" not in gates or not self.config.gate_bias:
            return self.bias
        return self.bias * gates["output"]

    @torch.no_grad()
    def fit_to_linear_(self, linear: nn.Module) -> Self:
        """Set the factors to a truncated SVD of the weight and open the gates: the best fit of this rank.

        Gates are initialised as the constant 0.88, for which the factors compensate. In training the context changes
        them. With "remixing" all templates have equal weights.

        Raises:
            ValueError: with the LayerNorm or "selection", which cannot reproduce a given weight.
        """
        if not self.config.fits_weight:
            raise ValueError(f"ccl cannot be fitted to a weight; {self.config.fit_hint}")
        fitted = min(self.config.rank, self.in_features, self.out_features)
        down, up = low_rank_factors(self.source_weight(linear), fitted)
        open_gate = 1 / (1 + math.exp(-_OPEN_LOGIT))
        g_basis = 1.0 if self.basis_gate is None else open_gate
        if self.config.composition != "gates":
            g_basis = 1 / self.config.templates
        g_out = open_gate if self.output_gate is not None else 1.0
        self.mix.zero_()  # if the rank exceeds the layer's sizes, further basis rows are not used yet
        self.basis[:fitted].copy_(down)
        self.mix[:, :fitted].copy_(up / (g_basis * g_out))
        for last in (self.basis_gate, self.output_gate):
            if last is not None:
                last.weight.zero_()
                last.bias.fill_(_OPEN_LOGIT)
        self.copy_bias_(linear)
        if self.bias is not None and self.config.gate_bias:
            self.bias.div_(g_out)
        return self

    def flops_per_token(self) -> int:
        rank, out = self.config.rank, self.out_features
        hidden = sum(a * b for a, b in itertools.pairwise(self.config.gate_sizes())) if self.config.conditioned else 0
        gates = sum(self.hook_sizes().values())
        network = 2 * (hidden + self.config.gate_sizes()[-1] * gates)
        return 2 * rank * (self.in_features + out) + network + gates


def _keep_variance(layer: Any, gain: float) -> None:
    """Draw the weight of ``layer`` so that outputs have ``gain``^2 times the inputs' variance; zero bias."""
    nn.init.normal_(layer.weight, std=gain / math.sqrt(layer.weight.shape[1]))
    nn.init.zeros_(layer.bias)


def _affine(layer: Any) -> tuple[Any, Any]:
    """Return weight and bias of ``layer``, or (None, None) if it is None."""
    return (None, None) if layer is None else layer()


@with_attributes_of_0_2
@register
class CCL(OperatorConfig):
    """Replace a linear layer by a low-rank one whose basis and outputs a context gates (CCL, Eq. 1 to 4).

    Args:
        rank: R, width of the basis (d_basis in the paper); may exceed the layer's own sizes.
        context_dim: C, width of the context: ``ContextManager(dim=)``.
        basis_gate: gate the basis (Eq. 2, 3).
        output_gate: gate the outputs (Eq. 4).
        gate_bias: let the output gate scale the bias too (Eq. 4); False is the paper's Figure 3.
        gate_depth: hidden layers of the gate network, with GELU; 0 computes the gates from the context by one matrix.
        gate_width: G, their width; None means context_dim.
        norm: LayerNorm with gain and offset after the basis (Eq. 1). ``fit_to_linear_`` and ``to_dense`` need False.
        composition: how a token's operator is composed from the basis. "gates" (the paper): a gate for every basis
            feature. The other two are baselines that the paper's Section 4.2 names without a definition. They split
            basis and mix into ``templates`` low-rank maps of rank R / E. A softmax of the gate network's last layer
            gives their probabilities p_e. "remixing": a mixture of all templates, y = sum_e p_e U_e V_e x. "selection":
            only the ``selected`` templates with the largest p_e, as in a mixture of experts.
        templates: E, for the latter two; must divide rank.
        selected: templates per token, with "selection".
        balance: weight of the Switch Transformer's load-balancing loss, with "selection"; 0 for none. It is computed
            in each sequence, so that it does not depend on batching and padding.

    With both gates off this is the paper's "Static Linear", a low-rank layer without context. With the default settings
    and the manager's default MLP, replacing the MLPs of the paper's Base-64 gives 10.29 M parameters, as the paper's
    CCL-64.

    Examples:
        >>> model = relinear.from_preset("tiny")
        >>> relinear.attach_(model, relinear.ContextManager(dim=16))
        >>> _ = relinear.replace_(model, {"up_proj": relinear.CCL(rank=8, context_dim=16)})
        >>> model(torch.randint(258, (1, 8))).logits.shape
        torch.Size([1, 8, 258])
    """

    kind = "ccl"
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
    def basis_gate_count(self) -> int:
        """Return the number of basis gates: one per feature, or one per template."""
        return self.rank if self.composition == "gates" else self.templates

    @property
    def conditioned(self) -> bool:  # type: ignore[override]
        """Return whether any gate reads the context."""
        return self.basis_gate or self.output_gate

    @property
    def fits_weight(self) -> bool:  # type: ignore[override]
        """Return whether a given weight can be fitted: not with a LayerNorm, nor with "selection"."""
        return not self.norm and self.composition != "selection"

    @property
    def fit_hint(self) -> str:  # type: ignore[override]
        """Return advice for the error if a weight cannot be fitted."""
        if self.composition == "selection":
            return "each token uses a part of the basis; use init='fresh', or relinear.distill_ to fit it on data"
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
