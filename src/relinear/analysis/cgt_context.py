"""How y of a Contextually Guided Transformer changes along texts, and which texts have similar y."""

# Legend: N texts, T tokens, E width of y

import copy
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from relinear.analysis.analyses import Subject
from relinear.models.cgt import CGTForCausalLM, CGTForRegression
from relinear.pages.blocks import Block, Cell, Chart, Row, Table
from relinear.pages.figures import Axis, Heat, Panel, Series

#: how to read its figures, for the page
HOW_TO_READ = (
    "Blocks in the map of dot products are stretches with nearly constant y: a text of one topic is one block. If the "
    "spectrum falls early, y changes slowly. If points of one colour lie together, y separates the sources, which "
    "means little if an untrained model does it as well."
)
#: positions in the map; components in the trace; tokens at a text's end over which y is averaged
POSITIONS, COMPONENTS, LAST = 64, 12, 16


def context_variation(y: Tensor, first: slice, second: slice) -> float:
    """Return the mean ||y_s - y_{s-1}|| over the segment E2, y normalised over E1 + E2 (CGT, Eq. 4).

    y is centred with its mean over E1 + E2 of each sample, and divided by the root mean square of its norm there.

    Args:
        y: (N, T, E).
        first, second: the positions of E1 and of E2, which follow each other.
    """
    segments = y[:, first.start : second.stop]
    centered = segments - segments.mean(1, keepdim=True)
    scale = centered.square().sum(-1).mean(1).clamp_min(1e-20).sqrt()
    late = centered[:, second.start - first.start - 1 :] / scale[:, None, None]
    return (late[:, 1:] - late[:, :-1]).norm(dim=-1).mean().item()


def dot_products(y: Tensor) -> Tensor:
    """Return n_s . n_t of normalised contexts (N, T, E), averaged over texts: (T, T) (CGT, Figures 3, 10, 13b, 18)."""
    unit = F.normalize(y.double(), dim=-1)
    return (unit @ unit.mT).mean(0)


def spectrum(y: Tensor) -> Tensor:
    """Return <|f_k|^2> of the Fourier transform of y (N, T, E) along the text, summing to one (CGT, Figure 17)."""
    power = torch.fft.rfft((y - y.mean(1, keepdim=True)).double(), dim=1).abs().square().mean((0, 2))
    return power / power.sum()


def neighbors(vectors: Tensor, classes: Sequence[int]) -> tuple[float, float]:
    """Return the share of texts whose nearest other text (by cosine) has the same class, and that of random vectors."""
    labels, unit = torch.as_tensor(classes), F.normalize(vectors.double(), dim=-1)
    nearest = (unit @ unit.T).fill_diagonal_(-torch.inf).argmax(1)
    counts = labels.bincount().double()
    chance = (counts * (counts - 1)).sum() / (len(labels) * (len(labels) - 1))
    return float((labels[nearest] == labels).double().mean()), float(chance)


def embedded(vectors: Tensor) -> tuple[Tensor, str]:
    """Return vectors (N, E) in two dimensions, and the method: t-SNE if scikit-learn is installed, else PCA."""
    unit = F.normalize(vectors.double(), dim=-1)
    if find_spec("sklearn") is None or len(unit) < 4:
        left, values, _ = torch.linalg.svd(unit - unit.mean(0), full_matrices=False)
        return left[:, :2] * values[:2], "PCA"
    from sklearn.manifold import TSNE

    points = TSNE(perplexity=min(30.0, (len(unit) - 1) / 3), random_state=0, init="pca").fit_transform(unit.numpy())
    return torch.from_numpy(points), "t-SNE"


def untrained(model: Any) -> Any:
    """Return an untrained model of the same config; its seed is 0, whatever that of the trained one was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return type(model)(copy.deepcopy(model.config)).eval()


def applies(model: nn.Module) -> bool:
    """Return whether the model is a CGT."""
    return isinstance(model, CGTForCausalLM | CGTForRegression)


def run(subject: Subject) -> dict[str, Any]:
    """Return variation, dot products, spectrum, a trace and an embedding of y over the subject's texts."""
    y = subject.model.context(subject.ids).float()
    names = subject.sources
    length = y.shape[1]
    vectors = y[:, -LAST:].mean(1)
    variation = context_variation(y, slice(0, length // 2), slice(length // 2, length))
    if len(names) > 1:  # two sources joined in the middle show whether y changes there
        halves = subject.ids[:, : length // 2]
        y = subject.model.context(torch.cat([halves[:-1], halves[1:]], 1)).float()
    step = max(1, length // POSITIONS)
    order = y[0].std(0).argsort(descending=True)[:COMPONENTS]
    points, method = embedded(vectors)
    classes = [index % len(names) for index in range(len(vectors))]
    results: dict[str, Any] = {
        "variation": variation,
        "products": dot_products(y)[::step, ::step].tolist(),
        "step": step,
        "spectrum": spectrum(y).tolist(),
        "trace": y[0][:, order].T.tolist(),
        "points": points.tolist(),
        "embedding": method,
        "classes": classes,
        "sources": list(names),
    }
    if len(names) > 1:
        results["neighbours"], results["chance"] = neighbors(vectors, classes)
        before = untrained(subject.model).context(subject.ids)[:, -LAST:].mean(1)
        results["neighbours_untrained"] = neighbors(before, classes)[0]
    return results


def blocks(numbers: Mapping[str, Any]) -> list[Block]:
    """Return the page's blocks for ``numbers``."""
    rows = [Row(["variation of y (Eq. 4)", Cell.of(numbers["variation"])])]
    for key, label in (
        ("neighbours", "texts whose nearest neighbour is of their source"),
        ("chance", "the same by chance"),
        ("neighbours_untrained", "the same without training"),
    ):
        rows += [Row([label, Cell.of(numbers[key], ".1%")])] if key in numbers else []
    positions = [str(number * numbers["step"]) for number in range(len(numbers["products"]))]
    table = [[round(value, 4) for value in row] for row in numbers["products"]]
    heat = Heat(values=table, x=positions, y=positions, bounds=(-1, 1), what="dot product", diverging=True)
    power = numbers["spectrum"][1:]
    wave = Series(name="y", x=range(1, len(power) + 1), y=power, mode="plain")
    trace = [
        Series(name=f"component {i + 1}", number=i, x=range(len(values)), y=values, mode="plain", legend=False)
        for i, values in enumerate(numbers["trace"])
    ]
    points = []
    for number, name in enumerate(numbers["sources"]):
        x, y = zip(*(p for p, c in zip(numbers["points"], numbers["classes"], strict=True) if c == number), strict=True)
        points.append(Series(name=name, number=number, x=x, y=y, mode="points"))
    position = Axis(title="position")
    method = numbers["embedding"]
    plane = Axis(title=f"{method}, first dimension"), Axis(title=f"{method}, second dimension")
    products = "Dot products of normalised y; texts of two sources are joined in the middle."
    charts = {
        "cgt_products": (products, Panel([heat], position, position)),
        "cgt_spectrum": ("Power by harmonic k.", Panel([wave], Axis(title="k"), Axis(title="power", log=True))),
        "cgt_trace": ("The components of y that vary most in one text.", Panel(trace, position, Axis(title="value"))),
        "cgt_sources": (f"y at the ends of texts, by {method}.", Panel(points, *plane)),
    }
    page_blocks: list[Block] = [Table(["measure", "value"], rows)]
    return page_blocks + [Chart(text, panel, stem=stem, inline=True) for stem, (text, panel) in charts.items()]
