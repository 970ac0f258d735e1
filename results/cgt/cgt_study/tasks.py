"""Synthetic tasks and text mixtures: map-style datasets whose item i depends on (seed, i) alone, of any size.

Nothing is stored: a training set of a billion samples costs as much as one of ten.
"""

# Legend: B batch, T tokens, N pairs

from __future__ import annotations

import itertools
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from relinear.contract.auxiliary_losses import IGNORED_LABEL
from relinear.contract.config import check_choice

__all__ = ["ArithmeticTask", "RegressionTask", "TextMixture"]

_SYMBOLS = "0123456789*=+-|#"


class _Seeded(Dataset):
    """A dataset of ``size`` items, each drawn with a generator of its own."""

    def __init__(self, size: int, seed: int, split: str) -> None:
        if size < 1:
            raise ValueError(f"size must be at least 1, got {size}")
        self.size, self.seed, self.split = size, seed, split

    def __len__(self) -> int:
        return self.size

    def generator(self, index: int) -> np.random.Generator:
        """The generator of item ``index``; two splits of the same seed have nothing in common."""
        if not 0 <= index < self.size:
            raise IndexError(f"item {index} of {self.size}")
        return np.random.default_rng([self.seed, zlib.crc32(self.split.encode()), index])

    def batch(self, indices: Sequence[int]) -> dict[str, Tensor]:
        """The items ``indices``, stacked."""
        items = [self[index] for index in indices]
        return {key: torch.stack([item[key] for item in items]) for key in items[0]}


class ArithmeticTask(_Seeded):
    """Hidden-coefficient arithmetic as text (CGT, Section 4.1 and Figure 2).

    A sample is ``tasks`` tasks of ``examples`` examples ``AAA*BBB=+CCCCC``: two integers of ``digits`` digits and
    C = aA + bB, cut to an integer, as a sign and ``digits`` + 2 digits. ``|`` separates examples, ``#`` ends a task, as
    in Figure 2. The coefficients a and b of a task are never shown. All samples have the same length.

    C is cut towards zero: the paper writes the floor but calls it truncation, and its example (a = 0.5, b = -1.5:
    ``012*023=-00028`` from -28.5) is cut towards zero.

    Args:
        tasks, examples, digits: sizes; the paper uses 4, 4 and 3.
        a_range, b_range: intervals of the coefficients, drawn uniformly; [0, 10) and (-10, 10) in the paper.
        integers: draw whole coefficients (both ends of the intervals included), an easier task.
        answers_only: labels of everything but the answers are -100, so that no loss is spent on random digits.
        size: number of samples.
        seed, split: decide the samples.
    """

    vocab_size = len(_SYMBOLS)

    def __init__(
        self,
        *,
        tasks: int = 4,
        examples: int = 4,
        digits: int = 3,
        a_range: tuple[float, float] = (0.0, 10.0),
        b_range: tuple[float, float] = (-10.0, 10.0),
        integers: bool = False,
        answers_only: bool = False,
        size: int = 1_000_000,
        seed: int = 0,
        split: str = "train",
    ) -> None:
        super().__init__(size, seed, split)
        for name, value in (("tasks", tasks), ("examples", examples), ("digits", digits)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        bound = max(abs(a_range[0]), abs(a_range[1])) + max(abs(b_range[0]), abs(b_range[1]))
        if bound * (10**digits - 1) >= 10 ** (digits + 2):
            raise ValueError(
                f"coefficients up to {a_range} and {b_range} give answers of more than {digits + 2} digits"
            )
        self.tasks, self.examples, self.digits = tasks, examples, digits
        self.a_range, self.b_range, self.integers, self.answers_only = a_range, b_range, integers, answers_only
        self.example_length = 3 * digits + 6  # with the separator after it
        self.task_length = examples * self.example_length
        self.length = tasks * self.task_length

    def coefficients(self, index: int) -> np.ndarray:
        """The hidden (a, b) of every task of a sample, (tasks, 2)."""
        return self._draw(index)[0]

    def draw_coefficients(self, generator: np.random.Generator, count: int) -> np.ndarray:
        """``count`` draws of (a, b) from the distribution of the task, (count, 2)."""
        low, high = np.array([self.a_range, self.b_range], dtype=float).T
        if self.integers:
            return generator.integers(low.astype(int), high.astype(int) + 1, size=(count, 2)).astype(float)
        return generator.uniform(low, high, size=(count, 2))

    def _draw(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        generator = self.generator(index)
        hidden = self.draw_coefficients(generator, self.tasks)
        return hidden, generator.integers(0, 10**self.digits, size=(self.tasks, self.examples, 2))

    def numbers(self, index: int) -> np.ndarray:
        """The two integers of every example of a sample, (tasks, examples, 2)."""
        return self._draw(index)[1]

    def text(self, index: int) -> str:
        """The sample as one line of text."""
        hidden, numbers = self._draw(index)
        tasks = []
        for (a, b), pairs in zip(hidden, numbers):
            answers = [int(a * x + b * y) for x, y in pairs]
            tasks.append("|".join(self.example(x, y, c) for (x, y), c in zip(pairs, answers)) + "#")
        return "".join(tasks)

    def example(self, a: int, b: int, c: int) -> str:
        """One example in the task's format."""
        d = self.digits
        return f"{a:0{d}d}*{b:0{d}d}={'-' if c < 0 else '+'}{abs(c):0{d + 2}d}"

    def encode(self, text: str) -> Tensor:
        """Token ids of a text, one a symbol."""
        return torch.tensor([_SYMBOLS.index(symbol) for symbol in text])

    def decode(self, ids: Tensor) -> str:
        """The text of token ids."""
        return "".join(_SYMBOLS[int(i)] for i in ids)

    def answer_mask(self) -> Tensor:
        """(T,), True at the tokens after "=" in each example: the sign and the digits."""
        within = torch.arange(self.length) % self.example_length
        return (within >= 2 * self.digits + 2) & (within < self.example_length - 1)

    def example_of(self) -> Tensor:
        """(T,), the number of the example within its task that each token (and the separator after it) belongs to."""
        return torch.arange(self.length) % self.task_length // self.example_length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = self.encode(self.text(index))
        labels = torch.where(self.answer_mask(), ids, IGNORED_LABEL) if self.answers_only else ids.clone()
        return {"input_ids": ids, "labels": labels}


class RegressionTask(_Seeded):
    """Linear regression in context (CGT, Section 4.1): x_1, y_1, ..., x_N, y_N with y = U x + b + eps q.

    Every component is standard normal; U and b are drawn for each sample.

    Args:
        inputs, outputs: d_in and d_out; 16 and 1 in the paper.
        pairs: N.
        noise: eps.
        layout: ``separate``: a vector has ``inputs`` + ``outputs`` features, x fills the first, y the others, the rest
            is zero. ``shared``: it has as many as the longer of the two, and both begin at the first; only their
            positions tell x from y, as in the paper, which pads each of them to the width of the model
            (``CGTConfig(vector_input="padded")`` does the rest of the padding).
        size, seed, split: as in ``ArithmeticTask``.
    """

    def __init__(
        self,
        *,
        inputs: int = 16,
        outputs: int = 1,
        pairs: int = 64,
        noise: float = 0.1,
        layout: str = "separate",
        size: int = 1_000_000,
        seed: int = 0,
        split: str = "train",
    ) -> None:
        super().__init__(size, seed, split)
        check_choice("layout", layout, ("separate", "shared"))
        for name, value in (("inputs", inputs), ("outputs", outputs), ("pairs", pairs)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        self.inputs, self.outputs, self.pairs, self.noise = inputs, outputs, pairs, noise
        self.layout = layout
        self.features = inputs + outputs if layout == "separate" else max(inputs, outputs)

    def sample(self, index: int) -> dict[str, np.ndarray]:
        """x (N, inputs), y (N, outputs), clean (N, outputs) without noise, u (outputs, inputs), b (outputs,)."""
        generator = self.generator(index)
        u = generator.standard_normal((self.outputs, self.inputs))
        b = generator.standard_normal(self.outputs)
        x = generator.standard_normal((self.pairs, self.inputs))
        clean = x @ u.T + b
        return {
            "x": x,
            "y": clean + self.noise * generator.standard_normal(clean.shape),
            "clean": clean,
            "u": u,
            "b": b,
        }

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        drawn = self.sample(index)
        vectors = torch.zeros(2 * self.pairs, self.features)
        targets = torch.zeros(2 * self.pairs, self.outputs)
        vectors[0::2, : self.inputs] = torch.from_numpy(drawn["x"]).float()
        first = self.inputs if self.layout == "separate" else 0
        vectors[1::2, first : first + self.outputs] = torch.from_numpy(drawn["y"]).float()
        targets[0::2] = torch.from_numpy(drawn["y"]).float()
        return {"vectors": vectors, "targets": targets, "target_mask": torch.arange(2 * self.pairs) % 2 == 0}


class TextMixture(_Seeded):
    """Two excerpts joined at a random place (CGT, Section 4.1): the topic changes there, and the model must notice.

    Args:
        documents: token ids of each document, each of at least two tokens; excerpts start anywhere in them.
        length: l_max, tokens a sample; 512 in the paper.
        start, finish: l_start and l_finish, between which the first excerpt is cut, uniformly; 256 and 384.
        mixed: False gives single excerpts.
        size, seed, split: as in ``ArithmeticTask``.
    """

    def __init__(
        self,
        documents: Sequence[Any],
        *,
        length: int = 512,
        start: int = 256,
        finish: int = 384,
        mixed: bool = True,
        size: int = 1_000_000,
        seed: int = 0,
        split: str = "train",
    ) -> None:
        super().__init__(size, seed, split)
        self.usable = [number for number, document in enumerate(documents) if len(document) >= length]
        if len(self.usable) < 2:
            raise ValueError(f"a mixture needs at least two documents of {length} tokens, got {len(self.usable)}")
        if not 1 <= start <= finish < length:
            raise ValueError(f"start={start} and finish={finish} must satisfy 1 <= start <= finish < length={length}")
        self.documents, self.length, self.start, self.finish, self.mixed = documents, length, start, finish, mixed

    def sample(self, index: int) -> tuple[Tensor, int, tuple[int, int]]:
        """The tokens (T,), where the second excerpt begins, and the numbers of the two documents."""
        generator = self.generator(index)
        first, second = (self.usable[k] for k in generator.choice(len(self.usable), 2, replace=False))
        cut = int(generator.integers(self.start, self.finish + 1)) if self.mixed else self.length
        parts = []
        for number, count in itertools.islice(zip((first, second), (cut, self.length - cut)), 2 if self.mixed else 1):
            begin = int(generator.integers(0, len(self.documents[number]) - count + 1))
            parts.append(np.asarray(self.documents[number][begin : begin + count], dtype=np.int64))
        return torch.from_numpy(np.concatenate(parts)), cut, (first, second if self.mixed else first)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = self.sample(index)[0]
        return {"input_ids": ids, "labels": ids.clone()}
