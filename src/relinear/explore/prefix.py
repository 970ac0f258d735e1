"""What a prefix makes of a Contextually Guided Transformer: its weights, its next token, y along the text."""

# Legend: T tokens, E width of y

import random
from typing import Any

import torch
from torch import Tensor

from relinear.core.sites import sites
from relinear.explore.changes import divergence
from relinear.explore.subject import SHOWN, Subject
from relinear.explore.units import values_of

_CONTEXT = "transformer.context"


def prefix_view(subject: Subject, prefix: str, text: str) -> dict[str, Any]:
    """Return the model specialised to ``prefix`` (``relinear.specialize``) beside itself without it, as JSON values.

    Returns:
        "tokens", "shares": the likeliest next tokens after ``text`` and their probabilities for the specialised model,
        the model itself, which reads the text alone, and the model that reads prefix and text in one. "divergence":
        KL(unspecialised || specialised) in nats; "control_divergence": the same where the model was specialised to a
        random text of the corpus. "weights": by layer, the relative change ||dW|| / ||W|| and the rank that holds 99 %
        of the square of dW. "context": y (T, E) along prefix and text, with "context_tokens" and how far each y lies
        from the one before, relative to its length, as "steps". "prefix_tokens", "parameters": counts.

    Raises:
        ValueError: if the model is none that reads prefixes, or a text is empty or too long.
    """
    from relinear.models.cgt.specialize import specialize

    if not subject.reads_prefixes():
        raise ValueError(f"{type(subject.model).__name__} turns no prefix into weights; only a CGT does")
    before, after = subject.encode(prefix), subject.encode(text)
    both = torch.cat([before, after])
    if len(both) > subject.positions():
        raise ValueError(
            f"prefix and text have {len(both):,} tokens, the model reads {subject.positions():,}; shorten one"
        )
    corpus = subject.index.ids.long()
    other = corpus[random.Random(prefix).randrange(len(corpus))]
    with subject.lock, torch.no_grad():
        special = specialize(subject.model, before)
        control = specialize(subject.model, other)
        shares = {
            "specialised": _next(special(after[None])),
            "unspecialised": subject.shares_of(after[None], {})[0, -1],
            "prefix and text in one": subject.shares_of(both[None], {})[0, -1],
        }
        apart = divergence(shares["unspecialised"], _next(control(after[None])))
        context = values_of(subject.model, both, {_CONTEXT: sites(subject.model)[_CONTEXT]})[_CONTEXT]
    likely = torch.cat([one.topk(min(SHOWN, len(one))).indices for one in shares.values()]).unique()
    likely = likely[shares["specialised"][likely].sort(descending=True).indices]
    return {
        "prefix_tokens": len(before),
        "parameters": sum(parameter.numel() for parameter in special.parameters()),
        "tokens": subject.tokens(likely.tolist()),
        "shares": {name: one[likely].tolist() for name, one in shares.items()},
        "divergence": divergence(shares["unspecialised"], shares["specialised"]),
        "control_divergence": apart,
        "weights": _changed(subject.model.state_dict(), special.state_dict()),
        "context": context.tolist(),
        "context_tokens": subject.tokens(both.tolist()),
        "steps": [0.0, *((context[1:] - context[:-1]).norm(dim=1) / context[1:].norm(dim=1).clamp_min(1e-9)).tolist()],
    }


def _next(output: Any) -> Tensor:
    return output.logits[0, -1].float().softmax(-1)


def _changed(before: dict[str, Tensor], after: dict[str, Tensor]) -> list[dict[str, Any]]:
    """The matrices that a prefix changes, by name."""
    rows = []
    for name, weight in after.items():
        own = before.get(name)
        if weight.ndim != 2 or own is None or own.shape != weight.shape or torch.equal(own, weight):
            continue
        change = (weight - own).float()
        energy = torch.linalg.svdvals(change).square().cumsum(0)
        rank = int((energy < 0.99 * energy[-1]).sum()) + 1
        rows.append(
            {"name": name.removesuffix(".weight"), "change": float(change.norm() / own.float().norm()), "rank": rank}
        )
    return rows
