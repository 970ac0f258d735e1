"""What the context of a Contextually Guided Transformer says about text: topics, joints, and where it helps."""

# Legend: B samples, T tokens, E width of y, V vocabulary

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from relinear.contract.modes import evaluating

__all__ = [
    "clustering_scores",
    "document_context",
    "dot_products",
    "embed_2d",
    "losses_by_position",
    "spectrum",
    "token_shifts",
]


@torch.no_grad()
def losses_by_position(
    model: Any,
    ids: Tensor,
    cut: int,
    *,
    rate: float = 1 / 300,
    baseline: nn.Module | None = None,
    others: Tensor | None = None,
) -> dict[str, np.ndarray]:
    """Cross-entropy at each token of the second part, with and without knowledge of the first (CGT, Section 4.4).

    No model has the first part in its attention. Positions start again at the second part.

    Args:
        model: a ``CGTForCausalLM``.
        ids: (B, T), of which the first ``cut`` tokens are the first part.
        cut: where y is taken.
        rate: gamma of the moving average (Figure 14).
        baseline: another language model, to be run on the second part alone (Figure 13).
        others: (B, any length) first parts of other texts, whose y is frozen as a control: what it gains, any y gains,
            and not what is known of this text.

    Returns:
        Arrays (T - cut - 1,), mean over samples, the first for the second token: ``dynamic``, y computed on the second
        part alone; ``specialized``, y frozen at the end of the first; ``average``, a moving average that starts there;
        and, where asked for, ``baseline`` and ``shuffled``, y frozen at the end of ``others``.
    """
    if not 1 <= cut <= ids.shape[1] - 2:
        raise ValueError(f"cut={cut} must leave both parts some of the {ids.shape[1]} tokens")
    rest = ids[:, cut:]

    def losses(logits: Tensor) -> np.ndarray:
        flat = torch.nn.functional.cross_entropy(logits[:, :-1].mT.float(), rest[:, 1:], reduction="none")
        return flat.mean(0).numpy()

    with evaluating(model):
        y = model.context(ids[:, :cut])[:, -1]
        results = {
            "dynamic": losses(model(rest, use_cache=False).logits),
            "specialized": losses(model(rest, frozen_context=y, use_cache=False).logits),
            "average": losses(model(rest, frozen_context=y, context_rate=rate, use_cache=False).logits),
        }
        if others is not None:
            y = model.context(others)[:, -1]
            results["shuffled"] = losses(model(rest, frozen_context=y, use_cache=False).logits)
    if baseline is not None:
        with evaluating(baseline):
            results["baseline"] = losses(baseline(rest, use_cache=False).logits)
    return results


def dot_products(y: Tensor) -> np.ndarray:
    """n_s . n_t of the normalised contexts, averaged over samples, (T, T) (CGT, Figures 3 and 10).

    Args:
        y: (B, T, E), or (T, E) for one text.
    """
    n = torch.nn.functional.normalize(y.double(), dim=-1)
    n = n if n.ndim == 3 else n[None]
    return (n @ n.mT).mean(0).numpy()


@torch.no_grad()
def document_context(model: Any, ids: Tensor, last: int = 16) -> Tensor:
    """(B, E): y averaged over the ``last`` tokens of each text (CGT, Figure 16)."""
    return model.context(ids)[:, -last:].mean(1)


def embed_2d(vectors: np.ndarray, *, seed: int = 0, perplexity: float = 30.0) -> np.ndarray:
    """t-SNE of (samples, E) into (samples, 2), on normalised vectors. Needs scikit-learn (``relinear[analysis]``)."""
    from sklearn.manifold import TSNE

    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    perplexity = min(perplexity, (len(vectors) - 1) / 3)
    return TSNE(perplexity=perplexity, random_state=seed, init="pca").fit_transform(unit)


def clustering_scores(vectors: np.ndarray, classes: Sequence[int]) -> dict[str, float]:
    """How well classes of documents separate in y, measured in the full space with cosine distances.

    Args:
        vectors: (samples, E).
        classes: the class of each sample.

    Returns:
        ``silhouette``, the mean silhouette in [-1, 1]; ``neighbours``, the share of samples whose nearest other sample
        is of their class; ``chance``, what ``neighbours`` would be for random vectors.
    """
    from sklearn.metrics import silhouette_score

    labels = np.asarray(classes)
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    similarity = unit @ unit.T
    np.fill_diagonal(similarity, -np.inf)
    counts = np.unique(labels, return_counts=True)[1]
    return {
        "silhouette": float(silhouette_score(unit, labels, metric="cosine")),
        "neighbours": float((labels[similarity.argmax(1)] == labels).mean()),
        "chance": float((counts * (counts - 1)).sum() / (len(labels) * (len(labels) - 1))),
    }


@torch.no_grad()
def token_shifts(model: Any, ids: Tensor, own: Tensor, other: Tensor, top: int = 20) -> list[tuple[int, float]]:
    """The tokens whose logits rise most when y comes from another text (CGT, Appendix D.3, "Token probabilities").

    Args:
        model: a ``CGTForCausalLM``.
        ids: (B, T), the text that is read.
        own, other: (E,), the context of that text and of the other one.
        top: how many tokens.

    Returns:
        (token id, mean rise of its logit relative to the mean over the vocabulary), the largest first.
    """
    with evaluating(model):
        logits = [model(ids, frozen_context=y.expand(len(ids), -1), use_cache=False).logits for y in (own, other)]
    rise = (logits[1] - logits[0]).mean((0, 1))
    rise = rise - rise.mean()
    best = rise.topk(min(top, len(rise)))
    return [(int(token), float(value)) for value, token in zip(best.values, best.indices)]


def spectrum(y: Tensor) -> np.ndarray:
    """<|f_k|^2> of the discrete Fourier transform of y along the sequence, summing to one (CGT, Figure 17).

    Args:
        y: (B, T, E); the mean over positions is taken out, so that k = 0 is empty.
    """
    centred = (y - y.mean(1, keepdim=True)).double()
    power = torch.fft.rfft(centred, dim=1).abs().square().mean((0, 2))
    return (power / power.sum()).numpy()
