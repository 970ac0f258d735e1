"""Define the synthetic tasks of the CGT paper (``data: cgt-arithmetic:...``).

A sample is drawn from its number and the seed when it is read. Nothing is stored, so the size of a training set costs
nothing.
"""

# Legend: T tokens, N pairs

from __future__ import annotations

import dataclasses
import re
import zlib
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import AfterValidator
from torch import Tensor
from torch.utils.data import Dataset

from relinear.contract.config import Config, Count, NonNegative, check_value, register
from relinear.hf.labels import IGNORED_LABEL
from relinear.settings.config_text import parse_config_text
from relinear.settings.messages import did_you_mean, quoted

SYMBOLS = "0123456789*=+-|#"
#: number of samples for training, and for evaluation if ``max_validation_tokens`` does not limit it
TRAINING_SAMPLES, VALIDATION_SAMPLES = 1_000_000, 1_024


class Task(Config):
    """Settings of a task. ``draw`` creates a sample with a generator, ``encode`` turns it into inputs."""

    family: ClassVar[str] = "task"

    def defaults(self) -> dict[str, Any]:
        """Return the ``DataSettings`` that the task determines."""
        return {}

    def draw(self, generator: np.random.Generator) -> dict[str, Any]:
        """Return a sample, including the values that are hidden from a model."""
        raise NotImplementedError(f"{type(self).__name__} does not implement draw")

    def encode(self, sample: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return the model's inputs for a sample."""
        raise NotImplementedError(f"{type(self).__name__} does not implement encode")


def task_of(data: Any) -> Task | None:
    """Return the task that the setting ``data`` names; None if it names a corpus.

    Raises:
        ValueError: for an unknown task, an unknown setting of one, or a bad value.
    """
    name, colon, rest = data.partition(":") if isinstance(data, str) else ("", "", "")
    if not re.fullmatch(r"cgt-\w+", name):
        return None
    kind = name.replace("-", "_")
    if kind not in Task.kinds():
        known = [kind.replace("_", "-") for kind in Task.kinds()]
        raise ValueError(f"unknown task {quoted(name)}; {did_you_mean(name, known)}")
    return Task.from_dict(parse_config_text(f"{kind}{colon}{rest}"))


class Samples(Dataset):
    """A dataset of ``size`` samples of a task: each sample has its own generator.

    Args:
        task: with ``draw`` and ``encode``.
        size: number of samples.
        seed, split: determine the samples; two splits of the same seed are drawn independently.
    """

    def __init__(self, task: Any, size: int = TRAINING_SAMPLES, seed: int = 0, split: str = "train") -> None:
        check_value("size", size, Count)
        self.task, self.size, self.seed, self.split = task, size, seed, split

    def __len__(self) -> int:
        return self.size

    def draw(self, index: int) -> dict[str, Any]:
        """Return sample ``index`` as the task draws it, with the values that are hidden from a model."""
        if not 0 <= index < self.size:
            raise IndexError(f"sample {index} of {self.size}")
        return self.task.draw(np.random.default_rng([self.seed, zlib.crc32(self.split.encode()), index]))

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.task.encode(self.draw(index))

    def batch(self, indices: Sequence[int]) -> dict[str, Tensor]:
        """Return the samples ``indices``, stacked."""
        items = [self[index] for index in indices]
        return {key: torch.stack([item[key] for item in items]) for key in items[0]}

    @property
    def checksum(self) -> int:
        """Return a checksum of everything that determines the samples, to compare two runs."""
        return zlib.crc32(repr((self.task, self.size, self.seed, self.split)).encode())


def _ascending(value: tuple[float, float]) -> tuple[float, float]:
    if value[0] > value[1]:
        raise ValueError(f"give the lower number first, such as [-5,5]; got {value}")
    return value


_Range = Annotated[tuple[float, float], AfterValidator(_ascending)]


@register
class ArithmeticTask(Task):
    """Arithmetic with hidden coefficients, as text (CGT, Section 4.1 and Figure 2).

    A sample has ``tasks`` tasks of ``examples`` examples ``AAA*BBB=+CCCCC``: two integers of ``digits`` digits and
    C = aA + bB, truncated to an integer, as a sign and ``digits`` + 2 digits. ``|`` separates examples, ``#`` ends a
    task, as in Figure 2. The model never sees the coefficients a and b of a task. All samples have the same length.

    C is truncated towards zero: the paper writes the floor but calls it truncation, and its example (a = 0.5, b = -1.5:
    ``012*023=-00028`` from -28.5) is truncated towards zero.

    Attributes:
        tasks: number of tasks in a sample. This and the other defaults are the paper's.
        examples: number of examples in a task.
        digits: number of digits of the two integers.
        a: interval from which the coefficient is drawn uniformly.
        b: the same.
        integers: draw whole coefficients (both ends of the intervals included), an easier task.
        answers_only: set the labels of everything but the answers to -100, so that random digits have no loss.
    """

    kind = "cgt_arithmetic"

    tasks: Count = 4
    examples: Count = 4
    digits: Count = 3
    a: _Range = (0.0, 10.0)
    b: _Range = (-10.0, 10.0)
    integers: bool = False
    answers_only: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        bound = max(map(abs, self.a)) + max(map(abs, self.b))
        if bound * (10**self.digits - 1) >= 10 ** (self.digits + 2):
            raise ValueError(f"a={self.a} and b={self.b} give answers of more than {self.digits + 2} digits")

    def defaults(self) -> dict[str, Any]:
        return {"tokenizer": "symbols", "sequence_length": self.length}

    @property
    def example_length(self) -> int:
        """Return the number of symbols of an example and the separator after it."""
        return 3 * self.digits + 6

    @property
    def task_length(self) -> int:
        """Return the number of symbols of a task."""
        return self.examples * self.example_length

    @property
    def half_length(self) -> int:
        """Return the number of symbols of the first half of a task's examples, which has the odd one."""
        return (self.examples - self.examples // 2) * self.example_length

    @property
    def length(self) -> int:
        """Return the number of symbols of a sample."""
        return self.tasks * self.task_length

    def draw_coefficients(self, generator: np.random.Generator, count: int) -> np.ndarray:
        """Return ``count`` draws of (a, b), of shape (count, 2)."""
        low, high = np.array([self.a, self.b], dtype=float).T
        if self.integers:
            return generator.integers(low.astype(int), high.astype(int) + 1, size=(count, 2)).astype(float)
        return generator.uniform(low, high, size=(count, 2))

    def draw(self, generator: np.random.Generator) -> dict[str, Any]:
        """Return ``coefficients`` (tasks, 2), which are hidden, and ``numbers`` (tasks, examples, 2)."""
        hidden = self.draw_coefficients(generator, self.tasks)
        numbers = generator.integers(0, 10**self.digits, size=(self.tasks, self.examples, 2))
        return {"coefficients": hidden, "numbers": numbers}

    def text(self, sample: Mapping[str, Any]) -> str:
        """Return a sample as one line of text."""
        tasks = []
        for (a, b), pairs in zip(sample["coefficients"], sample["numbers"], strict=True):
            tasks.append("|".join(self.example(x, y, int(a * x + b * y)) for x, y in pairs) + "#")
        return "".join(tasks)

    def example(self, x: int, y: int, answer: int) -> str:
        """Return one example in the task's format."""
        d = self.digits
        return f"{x:0{d}d}*{y:0{d}d}={'-' if answer < 0 else '+'}{abs(answer):0{d + 2}d}"

    def answer_mask(self) -> Tensor:
        """Return (T,), True at the tokens after "=" in each example: the sign and the digits."""
        within = torch.arange(self.length) % self.example_length
        return (within >= 2 * self.digits + 2) & (within < self.example_length - 1)

    def example_numbers(self) -> Tensor:
        """Return (T,), the number of each token's example in its task; a separator belongs to the example before."""
        return torch.arange(self.length) % self.task_length // self.example_length

    def encode(self, sample: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return ``input_ids`` and ``labels``, (T,) each."""
        ids = torch.tensor([SYMBOLS.index(symbol) for symbol in self.text(sample)])
        labels = torch.where(self.answer_mask(), ids, IGNORED_LABEL) if self.answers_only else ids.clone()
        return {"input_ids": ids, "labels": labels}


@register
class RegressionTask(Task):
    """Linear regression in context (CGT, Section 4.1): x_1, y_1, ..., x_N, y_N with y = U x + b + eps q.

    All components are standard normal; each sample has its U and b. A model reads vectors, not tokens.

    Attributes:
        inputs: features of x, d_in. This and the other defaults are the paper's.
        outputs: features of y, d_out.
        pairs: N.
        noise: eps.
        layout: ``shared``: a vector has as many features as the longer of x and y, and both begin at the first one.
            Only their positions distinguish x from y, as in the paper, which pads both to the width of the model
            (``CGTConfig(vector_input="padded")`` does the rest of the padding). ``separate``: x fills the first
            ``inputs`` features, y the ``outputs`` others, and the rest is zero.
    """

    kind = "cgt_regression"

    inputs: Count = 16
    outputs: Count = 1
    pairs: Count = 64
    noise: NonNegative = 0.1
    layout: Literal["shared", "separate"] = "shared"

    def defaults(self) -> dict[str, Any]:
        return {"tokenizer": "none", "sequence_length": 2 * self.pairs}

    @property
    def features(self) -> int:
        """Return the number of features of a vector."""
        sizes = (self.inputs, self.outputs)
        return sum(sizes) if self.layout == "separate" else max(sizes)

    def draw(self, generator: np.random.Generator) -> dict[str, np.ndarray]:
        """Return x (N, inputs), y (N, outputs), clean (N, outputs) without noise, u (outputs, inputs), b (outputs,)."""
        u = generator.standard_normal((self.outputs, self.inputs))
        b = generator.standard_normal(self.outputs)
        x = generator.standard_normal((self.pairs, self.inputs))
        clean = x @ u.T + b
        y = clean + self.noise * generator.standard_normal(clean.shape)
        return {"x": x, "y": y, "clean": clean, "u": u, "b": b}

    def encode(self, sample: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return ``vectors`` (2 N, features), ``targets`` (2 N, outputs) and ``target_mask`` (2 N,)."""
        vectors = torch.zeros(2 * self.pairs, self.features)
        targets = torch.zeros(2 * self.pairs, self.outputs)
        vectors[0::2, : self.inputs] = torch.from_numpy(sample["x"]).float()
        first = self.inputs if self.layout == "separate" else 0
        vectors[1::2, first : first + self.outputs] = torch.from_numpy(sample["y"]).float()
        targets[0::2] = torch.from_numpy(sample["y"]).float()
        return {"vectors": vectors, "targets": targets, "target_mask": torch.arange(2 * self.pairs) % 2 == 0}


@register
class MixtureTask(Task):
    """Two excerpts of texts, joined at a random position, where the topic changes (CGT, Section 4.1).

    Attributes:
        of: sources as for ``data``, with "+" between them; each is equally often the source of an excerpt.
        start: the end of the first excerpt is uniform between this share of ``sequence_length`` and ``finish``; in the
            paper between 0.5 and 0.75 of 512.
        finish: see ``start``.
        single: use one excerpt per sample (Figure 15).
    """

    kind = "cgt_mixture"

    of: str = "stdlib"
    start: float = 0.5
    finish: float = 0.75
    single: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.start <= self.finish < 1:
            raise ValueError(f"start={self.start:g} and finish={self.finish:g} must satisfy 0 < start <= finish < 1")

    @property
    def sources(self) -> tuple[str, ...]:
        """Return the sources by their names, as for ``data``."""
        return tuple(name.strip() for name in self.of.split("+"))


@dataclasses.dataclass(frozen=True)
class TokenisedMixture:
    """Draw the samples of a ``MixtureTask`` from tokenised documents.

    Attributes:
        task: the settings.
        length: tokens per sample.
        sources: the token ids of each source's documents; excerpts start anywhere in those that are long enough.
    """

    task: MixtureTask
    length: int
    sources: tuple[tuple[np.ndarray, ...], ...] = dataclasses.field(repr=False)

    def __post_init__(self) -> None:
        usable = tuple(tuple(d for d in documents if len(d) >= self.length) for documents in self.sources)
        object.__setattr__(self, "sources", usable)
        if min(map(len, usable)) < 1 or sum(map(len, usable)) < 2:
            raise ValueError(
                f"a mixture needs two documents, and one of every source, of at least sequence_length={self.length} "
                f"tokens; {self.task.of} has {', '.join(str(len(documents)) for documents in usable)}"
            )

    def draw(self, generator: np.random.Generator) -> dict[str, Any]:
        """Return ``ids`` (T,), ``boundary`` (where the second excerpt begins), and ``documents``: (source, number)."""
        chosen: list[tuple[int, int]] = []
        while len(chosen) < 2:
            source = int(generator.integers(len(self.sources)))
            document = (source, int(generator.integers(len(self.sources[source]))))
            chosen += [document] if document not in chosen else []
        low, high = (round(share * self.length) for share in (self.task.start, self.task.finish))
        boundary = self.length if self.task.single else int(generator.integers(low, high + 1))
        parts = []
        for (source, number), count in zip(chosen, (boundary, self.length - boundary), strict=True):
            tokens = self.sources[source][number]
            begin = int(generator.integers(len(tokens) - count + 1))
            parts.append(np.asarray(tokens[begin : begin + count], dtype=np.int64))
        return {"ids": np.concatenate(parts), "boundary": boundary, "documents": chosen}

    def encode(self, sample: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return ``input_ids`` and ``labels``, (T,) each."""
        ids = torch.from_numpy(sample["ids"])
        return {"input_ids": ids, "labels": ids.clone()}
