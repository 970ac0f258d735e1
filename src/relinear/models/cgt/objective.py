"""The objective of a Contextually Guided Transformer: the auxiliary loss, the regularisers, and their sum."""

# Legend: B batch, T tokens, E width of y, H tokens of the rest

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from relinear.contract.config import Count, IntRange, NonNegative, register
from relinear.contract.objective import ObjectiveConfig
from relinear.deprecated import renamed_in_module
from relinear.hf.labels import IGNORED_LABEL
from relinear.hf.training_loss import ModelWithObjective
from relinear.models.cgt import losses

__getattr__ = renamed_in_module(__name__, GuidedTraining=ModelWithObjective)

#: name of a batch's entry -> its value at positions that do not count
_PADDING = {"labels": IGNORED_LABEL, "target_mask": 0}


def draw_splits(
    batch: int,
    length: int,
    *,
    horizon: int | None = None,
    allowed: tuple[int, ...] | None = None,
    shared: bool = False,
    device: torch.device | str | None = None,
) -> Tensor:
    """Draw the length of each sequence's prefix, (B,), uniformly over the possible lengths.

    The prefix has at least one token and the rest at least two, so that something is predicted. With a horizon, the
    rest has at least horizon + 1 tokens (CGT, Section 3.2).

    Args:
        batch, length: B and T.
        horizon: Delta, or None for the whole rest.
        allowed: lengths to draw from (such as the ends of examples), as far as T has room; None for all.
        shared: draw one length for the whole batch, so that no computation is wasted on padding.
        device: device of the result.

    Raises:
        ValueError: if no split is possible.
    """
    last = _last_split(length, horizon)
    possible = [s for s in (range(1, last + 1) if allowed is None else allowed) if 1 <= s <= last]
    if not possible:
        raise ValueError(
            f"no split leaves a prefix and a rest: length={length}, horizon={horizon}, allowed={allowed}; splits must "
            f"lie in 1 .. {last}"
        )
    index = torch.randint(len(possible), (1 if shared else batch,), device=device)
    return torch.tensor(possible, device=device)[index].expand(batch)


def _last_split(length: int, horizon: int | None) -> int:
    return length - 2 if horizon is None else length - 1 - horizon


def rest_of(
    batch: Mapping[str, Tensor], splits: Tensor, horizon: int | None = None
) -> tuple[dict[str, Tensor], Tensor]:
    """Return the rest of each sequence after its prefix, aligned to the left and padded.

    Args:
        batch: entries of shape (B, T, ...), with ``labels`` or ``target_mask``, in which padding is marked.
        splits: (B,), tokens in each prefix.
        horizon: Delta; the rest is truncated to Delta + 1 tokens.

    Returns:
        The entries with H positions each, and their original positions (B, H).
    """
    length = next(iter(batch.values())).shape[1]
    count = length - int(splits.min())
    count = count if horizon is None else min(count, horizon + 1)
    source = splits[:, None] + torch.arange(count, device=splits.device)
    inside = source < length
    index = source.clamp(max=length - 1)
    rows = torch.arange(len(splits), device=splits.device)[:, None]
    rest = {name: value[rows, index] for name, value in batch.items()}
    for name, padding in _PADDING.items():
        if name in rest:
            rest[name] = torch.where(inside, rest[name], torch.as_tensor(padding, dtype=rest[name].dtype))
    return rest, source


def auxiliary_loss(
    model: nn.Module,
    batch: Mapping[str, Tensor],
    context: Tensor,
    splits: Tensor,
    *,
    horizon: int | None = None,
    positions: Literal["restart", "continue"] = "restart",
) -> Tensor:
    """Return L_aux: the loss on the rest of each sequence, with y frozen at the end of its prefix (CGT, Section 3.2).

    Attention in the rest does not see the prefix: information and gradients pass only through y. The loss is a mean
    over the targets of the rests, whose number depends on the splits. Accumulated batches give the gradient of one
    large batch exactly if all rests have one length, and on average otherwise.

    Args:
        model: a ``CGTForCausalLM`` or ``CGTForRegression``.
        batch: its inputs, each (B, T, ...), with labels or targets.
        context: (B, T, E), y as computed for the whole sequences.
        splits: (B,), from ``draw_splits``.
        horizon: Delta, or None for the whole rest.
        positions: whether positions in the rest restart from 0, as in a specialised model by default, or continue.
    """
    rest, source = rest_of(batch, splits, horizon)
    rows = torch.arange(len(splits), device=splits.device)
    last = next(iter(batch.values())).shape[1] - 1
    ids = source.clamp(max=last) if positions == "continue" else None
    return model(**rest, frozen_context=context[rows, splits - 1], position_ids=ids, use_cache=False).loss


def real_positions(batch: Mapping[str, Tensor]) -> Tensor | None:
    """Return (B, T), True where a sequence is not padding; None if there is no padding, or it is unknown.

    ``attention_mask`` marks padding. Without it, all positions after a sequence's last label that counts are padding.
    Labels of -100 before that one, such as those of a prompt, are not padding.
    """
    mask, labels = batch.get("attention_mask"), batch.get("labels")
    if mask is not None and mask.ndim == 2:
        real = mask != 0
    elif labels is not None:
        real = (labels != _PADDING["labels"]).int().flip(1).cummax(1).values.flip(1) != 0
    else:
        return None
    return None if bool(real.all()) else real


def _shares(batch: Mapping[str, Tensor]) -> Tensor | None:
    """Return the number of targets of each sequence (B,), as ``share_of_batch`` counts them; None without labels."""
    labels = batch.get("labels")
    return None if labels is None else (labels[:, 1:] != _PADDING["labels"]).sum(1)


@register
class CGTObjective(ObjectiveConfig):
    """L' = eta L_ce + (1 - eta) L_aux + w_C R_C + w_D R_D (CGT, Eq. 3), with the alternatives of Appendix A.

    Args:
        eta: weight of the ordinary loss; with 1 the auxiliary loss is not computed.
        horizon, splits, shared_split, positions: settings of the auxiliary loss, as for ``draw_splits`` and
            ``auxiliary_loss``.
        continuity: w_C, the weight of R_C.
        decorrelation: w_D, the weight of R_D; the paper takes half of w_C.
        profile: zeta_C = zeta_D: ``constant``, ``linear``, ``quadratic``, ``second_half``, or ``kernel``, which derives
            it from the prior's kernel (Appendix A.3).
        kl: beta_y of the VAE variant; needs a model with ``variational=True``.
        kl_reduction: the KL that beta_y multiplies: ``mean``: the KL per token and component; ``components``: the KL
            per token (the evidence bound); ``sum``: the KL of the sequence, as in Eq. 2. To get the same loss as with
            ``mean``, divide beta_y by E or by T E. The paper's 0.01, "virtually non-existent", fits the mean.
        aux_context: the y that L_aux freezes in the VAE variant: ``sample``, the sampled one (as in the paper, where
            the sample is used everywhere), or ``mean``.
        matching: weight of R_P, the Gaussian-process matching regulariser, estimated on ``matching_positions`` random
            positions.
        moments: weight of R'_D, its simplified form.
        kernel: the prior, ``rbf`` (nu I + (1 - nu) RBF), ``exponential`` or ``estimation`` (Eq. 1).
        kernel_scale: lambda as a share of the length (rbf, exponential), or eps (estimation).
        kernel_nu: nu of rbf.
    """

    kind = "cgt"

    eta: Annotated[float, Field(ge=0, le=1)] = 0.5
    horizon: Count | None = None
    splits: tuple[int, ...] | None = None
    shared_split: bool = False
    positions: Literal["restart", "continue"] = "restart"
    continuity: NonNegative = 0.0
    decorrelation: NonNegative = 0.0
    profile: Literal["constant", "linear", "quadratic", "second_half", "kernel"] = "constant"
    kl: NonNegative = 0.0
    kl_reduction: Literal["mean", "components", "sum"] = "mean"
    aux_context: Literal["sample", "mean"] = "sample"
    matching: NonNegative = 0.0
    matching_positions: Annotated[int, IntRange(2)] = 16
    moments: NonNegative = 0.0
    kernel: Literal["rbf", "exponential", "estimation"] = "rbf"
    kernel_scale: float = 0.1
    kernel_nu: float = 0.03

    def check_length(self, length: int) -> None:
        """Raise ValueError for ``splits`` that leave no prefix and no rest of texts of ``length`` tokens."""
        last = _last_split(length, self.horizon)
        if wrong := [str(split) for split in self.splits or () if not 1 <= split <= last]:
            raise ValueError(
                f"the cgt objective cannot split texts of {length} tokens at {', '.join(wrong)}: splits must lie in "
                f"1 .. {last}; change objective.splits or sequence_length"
            )

    def prepare(self, model: nn.Module) -> CGTObjective:
        """Return the objective itself, for a model that has a context.

        Raises:
            ValueError: if ``model`` is not a CGT.
        """
        if not hasattr(model, "context"):
            raise ValueError(
                f"the cgt objective trains a CGT, got {type(model).__name__}; save a relinear.CGTForCausalLM and give "
                "its directory as the model"
            )
        return self

    def prior(self, length: int) -> Tensor:
        """Return the (T, T) covariance of the prior, in float64."""
        if self.kernel == "rbf":
            return losses.rbf_kernel(length, self.kernel_scale, self.kernel_nu)
        if self.kernel == "exponential":
            return losses.exponential_kernel(length, self.kernel_scale)
        return losses.estimation_kernel(length, self.kernel_scale)

    def regularizers(
        self, context: Tensor, log_variance: Tensor | None, batch: Mapping[str, Tensor] | None = None
    ) -> dict[str, Tensor]:
        """Return the weighted regularisers of y (B, T, E) that are switched on, by name.

        Args:
            context, log_variance: outputs of the model.
            batch: the model's inputs, which give padding and the number of targets of each sample; None for neither.
        """
        real, shares = real_positions(batch or {}), _shares(batch or {})
        length = context.shape[1]
        terms: dict[str, Tensor] = {}
        if self.continuity or self.decorrelation:
            by_kernel = self.profile == "kernel"
            weights = losses.kernel_profile(self.prior(length)) if by_kernel else losses.profile(self.profile, length)
            weights = weights.to(context.device)
            if self.continuity:
                terms["continuity"] = self.continuity * losses.continuity(context, weights, real=real, shares=shares)
            if self.decorrelation:
                terms["decorrelation"] = self.decorrelation * losses.decorrelation(context, weights, real=real)
        if self.kl or self.matching:
            prior = self.prior(length).to(context.device)
            if self.kl:
                if log_variance is None:
                    raise ValueError("kl needs the variance of y: build the model with variational=True")
                terms["kl"] = self.kl * losses.gaussian_process_kl(
                    context, log_variance, prior, reduction=self.kl_reduction, real=real, shares=shares
                )
            if self.matching:
                chosen = torch.randperm(length, device=context.device)[: self.matching_positions].sort().values
                terms["matching"] = self.matching * losses.gaussian_process_matching(context, prior, chosen, real=real)
        if self.moments:
            terms["moments"] = self.moments * losses.moment_matching(context, real=real)
        return terms

    def __call__(self, model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor], Any]:
        """Return (loss, its weighted terms by name, the model's output on the whole sequences) for one batch."""
        output = model(**batch, use_cache=False)
        terms = {"ce": self.eta * output.loss}
        if self.eta < 1:
            sample = output.context_sample if self.aux_context == "sample" else None
            y = output.context if sample is None else sample
            options: dict[str, Any] = {"horizon": self.horizon, "allowed": self.splits, "shared": self.shared_split}
            splits = draw_splits(*y.shape[:2], **options, device=y.device)
            aux = auxiliary_loss(model, batch, y, splits, horizon=self.horizon, positions=self.positions)
            terms["aux"] = (1 - self.eta) * aux
        terms |= self.regularizers(output.context, output.context_log_variance, batch)
        return torch.stack(list(terms.values())).sum(), terms, output
