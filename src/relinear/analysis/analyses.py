"""The analyses of ``relinear analyze``: each runs a model on tokens and returns numbers as JSON values.

An analysis is one file with ``applies(model) -> bool`` and ``run(subject) -> numbers``, and its name in ``ANALYSES``;
it has ``HOW_TO_READ`` and ``blocks(numbers)``, which makes tables and figures of the numbers: for the page, the
terminal and, figures with a stem, for files.
"""

# Legend: N sequences, T tokens

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from relinear.contract import plugins
from relinear.data import DataSettings, iter_texts
from relinear.data.tasks import MixtureTask, Samples, Task, task_of
from relinear.data.tokenizers import encode, text_start, windows
from relinear.pages.blocks import Cell, Chart, Row
from relinear.pages.matplotlib_figures import save_panels
from relinear.settings.messages import did_you_mean
from relinear.system.files import write_json
from relinear.system.grouped import grouped
from relinear.system.progress import Progress, ProgressCallback, no_progress

#: an analysis is the module of its name
ANALYSES = (
    *("outputs", "effective_rank", "gates", "top_tokens", "fingerprints", "modulators", "latents", "planes"),
    *("cgt_context", "cgt_specialized", "cgt_arithmetic", "cgt_regression"),
)


@dataclasses.dataclass(frozen=True)
class Subject:
    """The model and the text to analyse.

    Attributes:
        model: the model, in eval mode.
        ids: (N, T) token ids of real text, or another input from a task's samples.
        tokenizer: turns tokens into text; without one they are shown by number.
        control: a model to compare with, or None.
        name: the model's name in legends.
        control_name: the control's name in legends.
        data: the source of ``ids``.
        folder: folder of the run that trained the model, if there is one.
    """

    model: Any
    ids: Tensor
    tokenizer: Any = None
    control: Any = None
    name: str = "model"
    control_name: str = "control"
    data: DataSettings | None = None
    folder: Path | None = None

    def samples_of(self, task: type[Task]) -> Samples:
        """Return the samples of ``task`` from which ``ids`` come. Raises ValueError if they come from other data."""
        if self.data is None or not isinstance(task_of(self.data.data), task):
            source = f"{task.kind.replace('_', '-')}:..."
            raise ValueError(f"this analysis needs samples of the task that the model knows: --data {source}")
        return unseen_samples(self.data, len(self.ids))

    @property
    def sources(self) -> tuple[str, ...]:
        """Return the names of a mixture's sources, from which the texts come in turn; else the name of the data."""
        name = "text" if self.data is None else self.data.data
        return task.sources if isinstance(task := task_of(name), MixtureTask) else (name,)

    def token_text(self, token: int) -> str:
        """Return a token as text for readers, with spaces and line ends made visible."""
        if self.tokenizer is None:
            return str(token)
        text = self.tokenizer.decode([token])
        return text.replace("\n", "\\n").replace("\r", "\\r").replace("\t", "\\t").replace(" ", "\u2423")


def short_name(name: str) -> str:
    """Return a layer's name without the parts that all layers share."""
    parts = [p for p in name.split(".") if p not in ("model", "transformer", "layers", "h", "base_model")]
    return ".".join(parts)


def layer_row(name: str, *cells: Cell | str) -> Row:
    """Return a table's row about a layer: its short name, with the full one as a tooltip."""
    return Row([Cell(short_name(name), title=name), *cells])


def high_percentile(table: Iterable[Iterable[float]]) -> float:
    """Return the 99th percentile, to which the colours of a heat map reach."""
    values = sorted(value for row in table for value in row)
    return values[int(0.99 * (len(values) - 1))]


def known_analyses() -> list[str]:
    """Return the names of all analyses: relinear's and those of other packages."""
    return [*ANALYSES, *(name for name in plugins.entry_points("analysis") if name not in ANALYSES)]


def analysis(name: str) -> Any:
    """Return the module of an analysis. Raises ValueError if there is none."""
    if name in ANALYSES:
        return import_module(f"relinear.analysis.{name}")
    if name not in known_analyses():
        raise ValueError(f"unknown analysis {name!r}; {did_you_mean(name, known_analyses())}")
    return plugins.load("analysis", name)


def applying(model: Any) -> list[str]:
    """Return the names of the analyses that apply to ``model``."""
    return [name for name in known_analyses() if analysis(name).applies(model)]


def analyze(
    subject: Subject,
    out: Path,
    only: Sequence[str] = (),
    on_progress: ProgressCallback = no_progress,
    on_file: Callable[[str], object] = lambda name: None,
) -> dict[str, dict[str, Any]]:
    """Run the analyses that apply to the model, or those in ``only``; write ``NAME.json`` and the figures into ``out``.

    ``on_progress`` is called before each analysis, ``on_file`` with the name of each file before it is written.

    Returns:
        name -> numbers.

    Raises:
        ValueError: for a name that does not apply to the model, or if none applies.
    """
    possible = applying(subject.model)
    unsuitable = [name for name in only if name not in possible]
    if unsuitable or not possible:
        named = f" named {', '.join(unsuitable)}" if unsuitable else ""
        raise ValueError(f"no analysis{named} applies to this model; those that do: {', '.join(possible) or 'none'}")
    chosen = only or possible
    results = {}
    for number, name in enumerate(chosen):
        on_progress(Progress(name, number, len(chosen), "analyze"))
        results[name] = numbers = analysis(name).run(subject)
        on_file(f"{name}.json")
        write_json(out / f"{name}.json", numbers)
        charts = [block for block in analysis(name).blocks(numbers) if isinstance(block, Chart)]
        for stem, panels in grouped((chart.stem, chart.panel) for chart in charts).items():
            on_file(f"{stem}.png")
            on_file(f"{stem}.svg")
            save_panels(panels, out / stem)
    return results


# Held-out text


DOCUMENTS = 8  # the fewest documents that sequences come from, if there are as many


@dataclasses.dataclass(frozen=True)
class HeldOutText:
    """Say how much of the validation text to read.

    Attributes:
        data: the source of the text.
        sequences: N, the number of sequences.
        length: T, the tokens in each.
        fewer: whether fewer or shorter sequences will do, if the text or the model's context is too short.
    """

    data: DataSettings
    sequences: int = 64
    length: int = 64
    fewer: bool = False


def unseen_samples(data: DataSettings, count: int) -> Samples:
    """Return samples of a task that no run is trained or evaluated on."""
    return Samples(task_of(data.data), count, data.seed, "test")


def held_out_tokens(text: HeldOutText, tokenizer: Any) -> Tensor:
    """Return token ids (N, T) of the validation text, taken in turn from the middles of its first documents.

    Each sequence begins with the tokens that the tokenizer puts before every text. A mixture's sources alternate. A
    task has samples of its length that no run is trained or evaluated on.

    Raises:
        ValueError: if the text is too short; with ``fewer``, if it has not a single sequence.
    """
    sequences, length = text.sequences, text.length
    task = task_of(text.data.data)
    if isinstance(task, MixtureTask):
        sources = [text.data.replace(data=name) for name in task.sources]
        count = -(-sequences // len(sources))
        parts = [held_out_tokens(dataclasses.replace(text, data=data, sequences=count), tokenizer) for data in sources]
        return torch.stack([part[: min(map(len, parts))] for part in parts], 1).flatten(0, 1)
    if task is not None:
        return next(iter(unseen_samples(text.data, sequences).batch(range(sequences)).values()))
    groups: list[list[list[int]]] = []
    rest: list[int] = []
    before = text_start(tokenizer)
    for document in iter_texts(text.data, "validation"):
        # Encode only as much of a document as may be needed.
        rest += encode(tokenizer, [document[: 20 * sequences * length]])[0]
        rows = [window for _, _, window in windows(rest, before, length)]
        if rows:
            start = max(0, len(rows) - sequences) // 2  # the middle: books begin with title pages
            groups.append(rows[start : start + sequences])
            rest = []
        if len(groups) >= DOCUMENTS and sum(map(len, groups)) >= sequences:
            break
    turns = itertools.zip_longest(*groups)
    sequences_read = [row for turn in turns for row in turn if row is not None][:sequences]
    if len(sequences_read) < (1 if text.fewer else sequences):
        raise ValueError(
            f"the text has {len(sequences_read)} sequences of {length} tokens, fewer than the {sequences} asked for"
        )
    return torch.tensor(sequences_read)
