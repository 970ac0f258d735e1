"""The effective rank of the matrices that a layer applies along a sequence (CCL, Section 4.4).

"Rank" may refer to three spaces. With W_t (O, I) the matrix of token t:

- operators: the T matrices as vectors of O * I numbers. A static layer has one matrix: rank 1.
- outputs: the columns of all W_t side by side, (O, T * I): directions that the layer can write to.
- inputs: the rows of all W_t on top of each other, (T * O, I): directions that the layer can read. All W_t share one
  basis, so this rank never exceeds R, however the gates vary.

The effective rank is exp(H(p)), H the entropy in nats of the singular values normalised to sum to one, p = s / sum(s)
(Roy and Vetterli 2007). Singular values come from Gram matrices, without forming any W_t: W_t = diag(outer_t) left
diag(inner_t) right, and the inner products need only (O, R) numbers per token, in blocks of rows.
"""

# Legend: T tokens, O out_features, I in_features, R rank

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from relinear.analysis.analyses import Subject, layer_row
from relinear.analysis.recording import record_gates
from relinear.contract.operator import NotLinearError, named_operators
from relinear.pages.blocks import Block, Cell, Chart, Table
from relinear.pages.figures import PALETTE, REFERENCE, Axis, Guide, Panel, Series

#: how to read its figures, for the page
HOW_TO_READ = (
    "The effective rank is the number of directions that operators use to a similar degree. 1 is one matrix for all "
    "tokens, as in a dense layer. If the rank of operators is high and that of outputs low, the layer varies a lot but "
    "writes to few directions."
)

_BLOCK = 64  # rows of left that are processed at a time, for all T matrices
SPACES = {"operators": "the operators as vectors", "outputs": "what they write to", "inputs": "what they read"}


def effective_rank(values: Tensor) -> float:
    """Return exp of the entropy (in nats) of singular values normalised to sum to one; 0.0 if all are zero."""
    total = values.sum()
    if total <= 0:
        return 0.0
    p = values[values > 0] / total
    return float(torch.exp(-(p * p.log()).sum()))


def singular_values(gram: Tensor) -> Tensor:
    """Return the singular values, largest first, of a matrix with the Gram matrix ``gram``; negative rounding is 0."""
    return torch.linalg.eigvalsh(gram.double()).clamp_min(0).sqrt().flip(0)


def _realized(left: Tensor, right: Tensor | None, inner: Any, outer: Any, tokens: int) -> Any:
    """Yield blocks of rows of every W_t in an orthonormal basis of the rows of ``right``: (T, rows, R)."""
    left = left.double()
    # right = triangle^T @ orthonormal: the inner products of W_t are those of W_t with the triangle in its place.
    triangle = None if right is None else torch.linalg.qr(right.double().T, mode="r").R.T
    for start in range(0, left.shape[0], _BLOCK):
        rows = left[None, start : start + _BLOCK]
        if inner is not None:
            rows = rows * inner.double()[:, None, :]
        if triangle is not None:
            rows = rows @ triangle
        if outer is not None:
            rows = rows * outer.double()[:, start : start + _BLOCK, None]
        yield rows.expand(tokens, -1, -1) if rows.shape[0] == 1 else rows


def realized_spectra(
    left: Tensor, right: Tensor | None, inner: Tensor | None = None, outer: Tensor | None = None, tokens: int = 1
) -> dict[str, Tensor]:
    """Return singular values, largest first, in the three spaces of the module's docstring.

    Args:
        left: (O, R).
        right: (R, I), or None for the identity.
        inner: (T, R) gates of the basis, None for ones.
        outer: (T, O) gates of the outputs, None for ones.
        tokens: T where both gates are None.
    """
    blocks = list(_realized(left, right, inner, outer, tokens))
    # Gram matrices: <W_s, W_t> (Frobenius) of all pairs of tokens, and of the rows of all W_t
    operators = torch.as_tensor(sum(b.flatten(1) @ b.flatten(1).T for b in blocks))
    inputs = torch.as_tensor(sum(torch.einsum("tor,tos->rs", b, b) for b in blocks))
    # (O, O) in tiles: rows of two blocks meet over all tokens.
    outputs = torch.cat([torch.cat([torch.einsum("tor,tpr->op", a, b) for b in blocks], dim=1) for a in blocks], dim=0)
    by_space = {"operators": operators, "outputs": outputs, "inputs": inputs}
    return {space: singular_values(gram) for space, gram in by_space.items()}


@torch.no_grad()
def has_matrices(operator: Any) -> bool:
    """Return whether an operator has a matrix for each token, from its factors, or one for all tokens."""
    if callable(getattr(operator, "factors", None)):
        return True
    try:
        return not operator.config.conditioned and operator.to_dense().ndim == 2
    except NotLinearError:
        return False


@torch.no_grad()
def effective_ranks(model: nn.Module, ids: Tensor) -> dict[str, dict[str, Any]]:
    """Return the spectra and effective ranks of every operator of ``model`` along one sequence.

    Operators without gates (static low-rank layers, the control) realise the same matrix at every token; operators that
    are not linear are left out.

    Args:
        model: a language model with operators.
        ids: (1, T) token ids.

    Returns:
        {name: {"tokens", "distinct_tokens", "rank", "effective_rank": {space: number}, "singular_values": {space:
        list, normalised to a largest one of 1}}}.
    """
    operators: dict[str, Any] = dict(named_operators(model))
    conditioned = any(op.config.conditioned for op in operators.values())
    gates = next(iter(record_gates(model, ids))) if conditioned else {}
    by_name = {}
    for name, operator in operators.items():
        if not has_matrices(operator):
            continue
        has_factors = callable(getattr(operator, "factors", None))
        left, right = operator.factors() if has_factors else (operator.to_dense(), None)
        layer_gates = gates.get(name, {})
        spectra = realized_spectra(left, right, layer_gates.get("basis"), layer_gates.get("output"), ids.shape[1])
        by_name[name] = {
            "tokens": ids.shape[1],
            "distinct_tokens": len(ids.unique()),
            "rank": min(left.shape) if right is None else min(*left.shape, *right.shape),
            "effective_rank": {space: effective_rank(values) for space, values in spectra.items()},
            "singular_values": {space: (v / v[0].clamp_min(1e-300)).tolist() for space, v in spectra.items()},
        }
    return by_name


def applies(model: nn.Module) -> bool:
    """Return whether the model has operators with matrices."""
    return any(has_matrices(operator) for _, operator in named_operators(model))


def run(subject: Subject) -> dict[str, Any]:
    """Return the ranks of the model along its first sequence, and of the control along the same one."""
    sequence = subject.ids[:1]
    ranks = {subject.name: effective_ranks(subject.model, sequence)}
    if subject.control is not None:
        ranks[subject.control_name] = effective_ranks(subject.control, sequence)
    return ranks


def blocks(numbers: Mapping[str, Any]) -> list[Block]:
    """Return the page's blocks for ``numbers``: singular values in the three spaces, and a row per layer."""
    palette = dict(zip(numbers, (PALETTE[0], REFERENCE, *PALETTE[1:])))
    rows = [
        layer_row(layer, name, *(Cell.of(values["effective_rank"][space], ".1f") for space in SPACES))
        for name, layers in numbers.items()
        for layer, values in layers.items()
    ]
    head = ["layer", "model", *(f"effective rank of {space}" for space in SPACES)]
    rank = max(layer["rank"] for layers in numbers.values() for layer in layers.values())
    page_blocks: list[Block] = []
    for space, meaning in SPACES.items():
        series = [line for name in numbers for line in decays(numbers[name], space, name, palette[name])]
        guide = Guide(x=rank, text=f"rank of one operator: {rank}")
        text = f"{space}: {meaning}. A line per layer; one that falls late is a rank that is used."
        page_blocks.append(
            Chart(text, decay_panel(series, f"{space}: {meaning}", guide), inline=True, stem="effective_rank")
        )
    return [*page_blocks, Table(head, rows, (0, 1))]


def decay_panel(series: list[Series], title: str, *guides: Guide) -> Panel:
    """Return the panel of ``decays``."""
    x_axis = Axis(title="index of the singular value", from_zero=True)
    return Panel(series, x_axis, Axis(title="relative to the largest", log=True), guides, title=title)


def decays(layers: Mapping[str, Any], space: str, model: str, color: str) -> list[Series]:
    """Return a line per layer, with its name and effective rank as a tooltip."""
    series = []
    for number, (layer, values) in enumerate(layers.items()):
        decay = [round(v, 7) for v in values["singular_values"][space] if v > 1e-6]
        text = f"{model}, {layer}: effective rank {values['effective_rank'][space]:.1f}"
        style: dict[str, Any] = {
            "mode": "points" if len(decay) == 1 else "plain",
            "opacity": 0.6,
            "legend": number == 0,
        }
        series.append(Series(name=model, color=color, x=range(1, len(decay) + 1), y=decay, texts=text, **style))
    return series
