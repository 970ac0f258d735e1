"""Record inputs or outputs of layers on blocks of tokens, in memory or on disk."""

# Legend: N blocks, T tokens per block, M recorded tokens, C context_dim

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import math
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from relinear.activations.shared_context import current_context
from relinear.contract.module_state import observe_forwards
from relinear.data.chat import as_document
from relinear.data.tokenizers import encode_documents, text_start, windows
from relinear.hf.labels import without_padding
from relinear.settings.messages import quoted


def iter_documents(data: Iterable[Any], tokenizer: Any) -> Iterator[str | list[int]]:
    """Yield the documents of a corpus as text (a ``Conversation`` is one), or as token ids without padding.

    Raises:
        ValueError: if it is not a corpus, has items of several kinds, or has text and there is no tokenizer.
    """
    try:
        items = iter(data)
    except TypeError:
        raise ValueError(
            f"data must be texts, token tensors or mappings with input_ids, one after another, got {quoted(data)}"
        ) from None
    first = next(items, None)
    if first is None:
        return
    chained = itertools.chain([first], items)
    if as_document(first) is not None:
        if tokenizer is None:
            raise ValueError("text needs the model's tokenizer: give tokenizer=, or token ids in place of text")
        for item in chained:
            document = as_document(item)
            if document is None:
                raise ValueError(f"data began with text or messages, and goes on with {quoted(item)}; give one kind")
            yield document
        return
    for item in chained:
        row = item if isinstance(item, Mapping) else {"input_ids": item}
        if row.get("input_ids") is None:
            raise ValueError(f"data must hold texts, token ids or mappings with input_ids, got {type(item).__name__}")
        try:
            row = {name: torch.as_tensor(row[name]) for name in ("input_ids", "attention_mask") if name in row}
        except (RuntimeError, TypeError, ValueError):
            hint = "token ids are whole numbers, a conversation a list of {'role', 'content'}"
            raise ValueError(f"data must hold texts, conversations or token ids, got {quoted(item)}; {hint}") from None
        yield without_padding(row, "input_ids")[0].tolist()


def _encoded(items: Iterator[str | list[int]], tokenizer: Any) -> Iterator[list[int]]:
    """Yield token ids of documents; text is encoded many documents at a time."""
    for first in items:
        chained = itertools.chain([first], items)
        if isinstance(first, str):
            yield from (array.tolist() for array in encode_documents(tokenizer, chained))  # type: ignore[arg-type]
        else:
            yield from chained  # type: ignore[misc]


def token_blocks(data: Iterable[Any], tokenizer: Any, sequence_length: int, count: int) -> Tensor:
    """Return the first ``count`` blocks (N, T) of a corpus, read no further than needed.

    Every block of text begins with the tokens that the tokenizer puts before a text; token ids are used unchanged.

    Args:
        data: texts and conversations (tokenised as one stream), or tensors of token ids, or mappings with
            ``input_ids``; these are concatenated, without the tokens that their ``attention_mask`` masks. A
            conversation is a list of ``{"role", "content"}``, or a mapping with such a list as ``messages``; the
            tokenizer's chat template turns it into text.
        tokenizer: the model's tokenizer, for texts.
        sequence_length: T, tokens per block.
        count: N, the number of blocks.

    Raises:
        ValueError: if ``data`` is not a corpus, is too short, or has items of another kind.
    """
    if isinstance(data, str):
        data = [data]
    total = count * sequence_length
    ids: list[int] = []
    items = iter_documents(data, tokenizer)
    first = next(items, None)
    prefix = text_start(tokenizer) if isinstance(first, str) else []  # token ids are used unchanged
    for document in _encoded(itertools.chain([] if first is None else [first], items), tokenizer):
        ids += document
        if len(ids) >= total:
            break
    chosen = [window for _, _, window in windows(ids, prefix, sequence_length)][:count]
    if len(chosen) == count:
        return torch.tensor(chosen)
    raise ValueError(f"the corpus has {len(ids):,} tokens; tokens and validation_tokens need {total:,}; give more")


class _Done(Exception):
    """Raised to end a forward pass once every module of interest has run."""


class SharedTensors:
    """Find names that get the same tensor in a pass, such as the inputs of q, k and v.

    Attributes:
        owners: name -> the first name that got the same tensor.
    """

    def __init__(self) -> None:
        self.owners: dict[str, str] = {}
        self._seen: dict[int, tuple[Tensor, str]] = {}

    def new_pass(self) -> None:
        """Forget the tensors of the previous pass."""
        self._seen.clear()

    def is_first(self, name: str, tensor: Tensor) -> bool:
        """Return whether ``name`` is the first of this pass to get ``tensor``."""
        _, owner = self._seen.setdefault(id(tensor), (tensor, name))  # held, so that no other tensor gets its id
        self.owners[name] = owner
        return owner == name


class Recording:
    """Store the inputs (or outputs) of modules; a tensor that several modules read is stored once.

    Args:
        tokens: M, the tokens to record.
        folder: folder for memory-mapped files; None stores everything in memory.
    """

    def __init__(self, tokens: int, folder: Path | None) -> None:
        self.tokens, self.folder, self._row = tokens, folder, 0
        self._stores: dict[str, Tensor] = {}
        #: a name's values are stored under the first name that shares them
        self._shared = SharedTensors()

    def new_pass(self, row: int) -> None:
        """Forget the tensors of the previous pass; the next values go to rows from ``row`` on."""
        self._row = row
        self._shared.new_pass()

    def clear(self) -> None:
        """Forget the recorded values."""
        self._stores.clear()

    def write(self, name: str, values: Tensor) -> None:
        """Store values (..., size) under ``name``, unless this pass has already stored the same tensor."""
        if self._shared.is_first(name, values):
            rows = values.detach().reshape(-1, values.shape[-1])
            if name not in self._stores:
                self._stores[name] = self._allocate(name, rows)
            self._stores[name][self._row : self._row + len(rows)] = rows

    def _allocate(self, name: str, rows: Tensor) -> Tensor:
        shape = (self.tokens, rows.shape[-1])
        if self.folder is None:
            return torch.empty(shape, dtype=rows.dtype, device="cpu")
        file = str(self.folder / f"{len(self._stores)}.bin")
        return torch.from_file(file, shared=True, size=math.prod(shape), dtype=rows.dtype).view(shape)

    def values(self, name: str) -> Tensor:
        """Return the recorded inputs (or outputs) (M, size) of the module ``name``."""
        if (stored := self._stored(name)) is None:
            raise ValueError(f"{name} was never called in a forward pass, so there is nothing to fit it to")
        return stored

    def contexts(self, name: str) -> Tensor | None:
        """Return the context (M, C) of every input of ``name``, or None if it was not recorded."""
        return self._stored(f"{name} context")

    def _stored(self, name: str) -> Tensor | None:
        return self._stores.get(self._shared.owners.get(name, name))


@contextlib.contextmanager
def record(
    model: nn.Module,
    blocks: Tensor,
    modules: Mapping[str, nn.Module],
    *,
    batch: int,
    outputs: bool = False,
    context_dims: Mapping[str, int] | None = None,
    folder: Path | None = None,
    on_block: Callable[[int, int], None] = lambda done, total: None,
) -> Iterator[Recording]:
    """Run ``model`` over ``blocks`` and record the inputs of ``modules``; they are available within the ``with`` block.

    A forward pass stops after the last of these modules.

    Args:
        model: the model, in eval mode; takes ``input_ids``.
        blocks: token ids (N, T).
        modules: name -> module.
        batch: blocks per pass.
        outputs: record outputs instead of inputs.
        context_dims: name of a module that reads a context -> width of the context.
        folder: folder for memory-mapped files; None stores everything in memory.
        on_block: called with the numbers of blocks done and of all blocks.
    """
    dims = dict(context_dims or {})
    finished: set[str] = set()

    def on_output(name: str, module: nn.Module, args: tuple, output: Tensor) -> None:
        recording.write(name, output if outputs else args[0])
        if name in dims:
            context = current_context(args[0], dims[name], name)
            recording.write(f"{name} context", context.expand(*args[0].shape[:-1], dims[name]))
        finished.add(name)
        if len(finished) == len(modules):
            raise _Done

    device = next(model.parameters()).device
    with contextlib.ExitStack() as stack:
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=folder)))
        recording = Recording(blocks.numel(), folder)
        stack.callback(recording.clear)
        with torch.no_grad(), observe_forwards(modules.items(), on_output):
            for first in range(0, len(blocks), batch):
                _run_until_done(model, blocks[first : first + batch].to(device))
                done = min(first + batch, len(blocks))
                recording.new_pass(done * blocks.shape[1])
                finished.clear()
                on_block(done, len(blocks))
        yield recording


def _run_until_done(model: Any, ids: Tensor) -> None:
    with contextlib.suppress(_Done):
        model(input_ids=ids, **({"use_cache": False} if hasattr(model, "generate") else {}))


def first_call(module: nn.Module, run: Callable[[], Any]) -> tuple[tuple, Any] | None:
    """Call ``run`` until ``module`` is called; return that call's arguments and output, or None without a call."""
    calls: list[tuple[tuple, Any]] = []

    def on_output(name: str, module: nn.Module, args: tuple, output: Any) -> None:
        calls.append((args, output))
        raise _Done

    with observe_forwards([("", module)], on_output), contextlib.suppress(_Done):
        run()
    return calls[0] if calls else None


def output_of(model: nn.Module, name: str, ids: Tensor) -> Tensor:
    """Return the (first) output of the module ``name`` for ids (N, T); later modules do not run.

    Raises:
        ValueError: if the output is not a tensor, or the module is never called.
    """
    call = first_call(model.get_submodule(name), lambda: _run_until_done(model, ids))
    output = None if call is None else call[1][0] if isinstance(call[1], tuple | list) else call[1]
    if not isinstance(output, Tensor):
        raise ValueError(f"{name or 'the model'} gives no tensor in a forward pass, so there is nothing to fit it to")
    return output


def fingerprint_of(values: Any, tensors: Iterable[Tensor | str]) -> str:
    """Return a hash of JSON values and of a sequence of tensors and strings."""
    digest = hashlib.sha256(json.dumps(values, sort_keys=True).encode())
    for tensor in tensors:
        if isinstance(tensor, Tensor):
            digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
        else:
            digest.update(tensor.encode())
    return digest.hexdigest()
