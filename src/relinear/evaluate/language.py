"""Measure a language model's perplexity and LAMBADA accuracy, and run lm-eval tasks on it."""

# Legend: B batch, T tokens, V vocabulary

import contextlib
import dataclasses
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from relinear.contract.config import Count, IntRange, check_value
from relinear.contract.inference import caching_for_inference
from relinear.contract.input_checks import check_model
from relinear.contract.module_state import eval_mode
from relinear.contract.numerics import check_no_nan
from relinear.data.tokenizers import encode, text_start
from relinear.evaluate.losses import perplexity_of, token_losses
from relinear.hf.labels import IGNORED_LABEL, without_padding
from relinear.hf.next_token_check import check_predicts_next_token
from relinear.hf.vocabulary import check_length_fits, check_tokenizer_fits, max_positions


@dataclasses.dataclass(frozen=True)
class Perplexity:
    """What ``perplexity`` measures.

    Attributes:
        loss: mean loss, in nats per token.
        perplexity: exp(``loss``).
        tokens: number of predicted tokens.
    """

    loss: float
    perplexity: float
    tokens: int


@dataclasses.dataclass(frozen=True)
class Lambada:
    """What ``lambada`` measures.

    Attributes:
        accuracy: share of last words that greedy decoding predicts.
        perplexity: exp of the mean loss in nats per word.
        examples: number of texts.
    """

    accuracy: float
    perplexity: float
    examples: int


def perplexity(
    model: nn.Module,
    text: str | Iterable[str] | Dataset,
    tokenizer: Any = None,
    *,
    sequence_length: int | None = None,
    stride: int | None = None,
    max_tokens: int | None = None,
    batch_size: int = 4,
) -> Perplexity:
    """Return the perplexity of a causal language model: exp of the mean loss over every predicted token.

    Text is tokenised as one stream (documents joined by the tokenizer's end-of-text token) and read in windows. Each
    window begins with the tokens that the tokenizer puts before every text, such as Llama's and Gemma's ``<bos>``; they
    are not predicted. With the default stride windows do not overlap, the usual way to state perplexity at a context
    length; without such a token the first token of each window is not predicted. With a smaller stride every token is
    predicted once, with about ``sequence_length - stride`` tokens before it. Auxiliary losses are not included.

    Args:
        model: takes ``input_ids`` (B, T) and returns an object with ``logits`` (B, T, V). Its training mode is kept.
        text: a document, documents, or a dataset of ``{"input_ids": (T,), "labels": (T,)}`` (then arguments about
            windows raise ValueError). Tokens that its ``attention_mask`` (T,) masks are skipped.
        tokenizer: the model's tokenizer; needed for text.
        sequence_length: T of a window; by default the model's longest, at most 1,024.
        stride: tokens from one window to the next; by default ``sequence_length``.
        max_tokens: use the first tokens only.
        batch_size: windows per forward pass.

    Returns:
        Loss, perplexity and the number of tokens.

    Raises:
        ValueError: if there is nothing to predict, an argument is missing or does not fit, the loss is NaN, or
            ``model`` is not a causal language model (for example, if its logits depend on later tokens).

    Examples:
        >>> from relinear.data.tokenizers import byte_tokenizer
        >>> result = relinear.perplexity(relinear.from_preset("tiny"), "Once upon a time", byte_tokenizer())
        >>> 100 < result.perplexity < 1000  # of a model of 258 tokens that has learnt nothing
        True
    """
    check_value("batch_size", batch_size, Count)
    check_value("max_tokens", max_tokens, Count | None)
    check_predicts_next_token(model, "perplexity")
    if isinstance(text, Dataset):
        if (tokenizer, sequence_length, stride) != (None, None, None):
            raise ValueError("a dataset is already tokenised and split: omit tokenizer, sequence_length and stride")
        windows = _dataset_windows(text, max_tokens)
    else:
        if tokenizer is None:
            raise ValueError("perplexity of text needs the model's tokenizer")
        check_tokenizer_fits(tokenizer, model)
        length = _sequence_length(model, sequence_length)
        step = length if stride is None else stride
        if not 1 <= step <= length:
            raise ValueError(f"stride must be from 1 to sequence_length={length}, got {step}")
        ids = _token_stream([text] if isinstance(text, str) else text, tokenizer, max_tokens)
        windows = _text_windows(ids, text_start(tokenizer), length, step)
    total, count = 0.0, 0
    for losses, _, labels in _losses(model, windows, batch_size, "perplexity"):
        total += losses.double().sum().item()
        count += int((labels != IGNORED_LABEL).sum())
    if not count:
        raise ValueError("there is no token to predict: the text has fewer than two tokens")
    loss = total / count
    return Perplexity(loss, perplexity_of(loss), count)


def lambada(
    model: nn.Module,
    tokenizer: Any,
    texts: str | Path | Iterable[str | Mapping[str, Any]],
    *,
    max_examples: int | None = None,
    batch_size: int = 8,
) -> Lambada:
    """Predict the last word of passages that needs the whole passage (Paperno et al. 2016), in OpenAI's version.

    The last word is what follows the last space. A prediction is correct if each token of that word is the most likely
    one. Contexts that are too long for the model lose their beginning.

    Args:
        model: as for ``perplexity``.
        tokenizer: the model's tokenizer.
        texts: a file of JSON lines with a ``text``, or the texts, or mappings with a ``text``.
        max_examples: use the first texts only.
        batch_size: texts per forward pass; texts of equal length share a batch.

    Returns:
        Accuracy, perplexity and the number of texts.

    Raises:
        ValueError: if there are no texts, or one has fewer than two words.

    Examples:
        >>> from relinear.data.tokenizers import byte_tokenizer
        >>> result = relinear.evaluate.lambada(relinear.from_preset("tiny"), byte_tokenizer(), ["She read a good book"])
        >>> result.examples
        1
    """
    check_model(model, "lambada")
    check_value("batch_size", batch_size, Count)
    check_value("max_examples", max_examples, Count | None)
    check_tokenizer_fits(tokenizer, model)
    rows = list(_lambada_rows(texts))[:max_examples]
    if not rows:
        raise ValueError("LAMBADA needs at least one text")
    longest = max_positions(model)
    windows = sorted((_last_word_window(tokenizer, row, longest) for row in rows), key=lambda window: len(window[0]))
    correct, total = 0, 0.0
    for losses, logits, labels in _losses(model, windows, batch_size, "lambada"):
        correct += int(((logits.argmax(-1) == labels) | (labels == IGNORED_LABEL)).all(1).sum())
        total += losses.double().sum().item()
    return Lambada(correct / len(windows), perplexity_of(total / len(windows)), len(windows))


def lm_eval(
    model: nn.Module, tokenizer: Any, tasks: str | Sequence[Any], *, batch_size: int = 8, **settings: Any
) -> dict[str, dict[str, Any]]:
    """Run tasks of EleutherAI's evaluation harness on a model with operators in it.

    Args:
        model: a Hugging Face causal language model.
        tokenizer: the model's tokenizer.
        tasks: names of tasks (``"lambada_openai"``, ``["arc_easy", "piqa"]``), or their settings as mappings.
        batch_size: requests per forward pass.
        **settings: further arguments of ``lm_eval.simple_evaluate``: ``limit``, ``num_fewshot``, ``task_manager`` ...

    Returns:
        Metrics by task and name: ``{"piqa": {"acc,none": ..., ...}}``.

    Raises:
        ValueError: if lm-eval is not installed, a task is unknown, or its data are not available.

    Examples:
        >>> from transformers import AutoTokenizer
        >>> model = relinear.from_pretrained("HuggingFaceTB/SmolLM2-135M-Instruct")
        >>> tokenizer = AutoTokenizer.from_pretrained("HuggingFaceTB/SmolLM2-135M-Instruct")
        >>> scores = relinear.evaluate.lm_eval(model, tokenizer, ["arc_easy", "piqa"], limit=100)  # doctest: +SKIP
        >>> scores["piqa"]["acc,none"]  # doctest: +SKIP
    """
    check_value("batch_size", batch_size, Count)
    try:
        from lm_eval import simple_evaluate
        from lm_eval.models.huggingface import HFLM
    except ImportError as error:
        raise ValueError("evaluation tasks need the package lm-eval: pip install 'relinear[eval]'") from error
    names = [tasks] if isinstance(tasks, str) else list(tasks)
    if not names:
        raise ValueError("name at least one task")
    check_model(model, "lm_eval")
    check_tokenizer_fits(tokenizer, model)
    with _evaluating(model):
        wrapped = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size)
        try:
            evaluation = simple_evaluate(model=wrapped, tasks=names, **settings)
        except Exception as error:  # many kinds of registry, network and data errors, which all mean the same to a user
            listed = ", ".join(map(str, names))
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ValueError(f"lm-eval cannot run {listed}: {reason}") from error
    return dict(evaluation["results"])


@contextlib.contextmanager
def _evaluating(model: nn.Module) -> Iterator[torch.device]:
    """Evaluate within the block: no gradients, and weights treated as constant; yield the model's device."""
    with eval_mode(model), torch.no_grad(), caching_for_inference(model):
        yield next(model.parameters()).device


def _sequence_length(model: nn.Module, requested: int | None) -> int:
    if requested is None:
        return min(1024, max_positions(model) or 1024)
    check_value("sequence_length", requested, Annotated[int, IntRange(2)])
    check_length_fits(requested, model)
    return requested


def _token_stream(texts: Iterable[str], tokenizer: Any, max_tokens: int | None) -> Tensor:
    ids: list[int] = []
    separator = tokenizer.eos_token_id
    for text in texts:
        if ids and separator is not None:
            ids.append(separator)
        ids.extend(encode(tokenizer, [text])[0])
        if max_tokens is not None and len(ids) >= max_tokens:
            break
    return torch.tensor(ids[:max_tokens], dtype=torch.long)


def _text_windows(ids: Tensor, start: list[int], length: int, stride: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield windows that begin with ``start``, and labels that mask it and the tokens of earlier windows."""
    if length <= len(start):
        raise ValueError(
            f"sequence_length={length} has no room for text: the tokenizer puts {len(start)} tokens before it"
        )
    prefix, covered = torch.tensor(start, dtype=torch.long), 0  # tokens before ``covered`` were in an earlier window
    if ids[: len(prefix)].equal(prefix):  # the text already begins with it
        ids = ids[len(prefix) :]
    room = length - len(prefix)
    for begin in range(0, len(ids), min(stride, room)):
        window = ids[begin : begin + room]
        labels = window.clone()
        labels[: covered - begin] = IGNORED_LABEL
        if len(prefix) + len(window) > 1:
            yield torch.cat([prefix, window]), torch.cat([torch.full_like(prefix, IGNORED_LABEL), labels])
        covered = begin + len(window)
        if covered >= len(ids):
            return


def _dataset_windows(dataset: Any, max_tokens: int | None) -> Iterator[tuple[Tensor, Tensor]]:
    used = 0
    for index in range(len(dataset)):
        item = dataset[index]
        remaining = None if max_tokens is None else max_tokens - used
        ids, labels = (value[:remaining] for value in without_padding(item, "input_ids", "labels"))
        if len(ids) > 1:
            yield ids, labels
        used += len(ids)
        if max_tokens is not None and used >= max_tokens:
            return


def _losses(
    model: Any, windows: Iterable[tuple[Tensor, Tensor]], size: int, user: str
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Run ``model`` on windows (ids, labels), ``size`` at a time; neighbours of equal length share a batch.

    Yields:
        For each batch, of every token but the first: its loss (B, T - 1), logits (B, T - 1, V) and label (B, T - 1).
    """
    with _evaluating(model) as device:
        for _, group in itertools.groupby(windows, key=lambda window: len(window[0])):
            while batch := list(itertools.islice(group, size)):
                ids, labels = (torch.stack(part).to(device) for part in zip(*batch, strict=True))
                logits = model(input_ids=ids, use_cache=False).logits
                losses = token_losses(logits, labels)
                check_no_nan(model, losses, user)
                yield losses, logits[:, :-1], labels[:, 1:]


def _lambada_rows(texts: str | Path | Iterable[Any]) -> Iterator[str]:
    if isinstance(texts, str | Path):
        path = Path(texts)
        if not path.is_file():
            raise ValueError(f"no LAMBADA file at {path}; it is a file of JSON lines with a 'text' each")
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                try:
                    yield str(json.loads(line)["text"])
                except (ValueError, KeyError, TypeError, RecursionError) as error:
                    raise ValueError(f"{path}, line {number}: expected a JSON object with a 'text'") from error
        return
    for row in texts:
        yield row["text"] if isinstance(row, Mapping) else row


def _last_word_window(tokenizer: Any, text: str, longest: int | None) -> tuple[Tensor, Tensor]:
    """Return the text's token ids (the last that the model can read), and labels that mask all but the last word."""
    context, _, word = text.rpartition(" ")
    if not context.strip() or not word:
        raise ValueError(f"a LAMBADA text needs a context and a last word, got {text[:80]!r}")
    ids, before = encode(tokenizer, [text, context])
    tokens, start = len(ids) - len(before), text_start(tokenizer)
    room = None if longest is None else longest - len(start)
    if tokens < 1 or (room is not None and tokens >= room):
        raise ValueError(f"the last word {word!r} takes {tokens} tokens, which the model cannot predict in one pass")
    window = torch.tensor([*start, *(ids[-room:] if room else ids)])
    labels = torch.full_like(window, IGNORED_LABEL)
    labels[-tokens:] = window[-tokens:]
    return window, labels
