"""The compressed model compared with the original: loss, agreement, samples with their ends, speed.

What the original does is noted before the first layer is replaced. For speeds its linear layers are stood in for by
random ones of the same shapes, so that both take turns in one process while memory holds one model and a few layers.
"""

# Legend: N blocks, T tokens

from __future__ import annotations

import copy
import dataclasses
import itertools
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from relinear.contract.inference import build_for_inference
from relinear.contract.operator import linear_features
from relinear.data.tokenizers import encode, text_start
from relinear.evaluate.losses import token_losses
from relinear.hf.vocabulary import entries_of, most_positions
from relinear.system.confidence import half_width
from relinear.system.timing import Timing, interleave

#: bytes of random stand-ins: more than processors cache, less than a large model
STAND_IN_BYTES = 256 * 2**20
#: seconds that the rounds of one measurement of speed may take, about, and how many there are
SPEED_SECONDS, ROUNDS = 8.0, (3, 15)
PREFILL_TOKENS, DECODED_TOKENS = 128, 16
#: tokens of a passage that is continued, and of its continuation
PASSAGE_TOKENS, CONTINUED_TOKENS = 32, 64


@dataclasses.dataclass(frozen=True)
class Reading:
    """What a model did on token ids (N, T): losses of windows in nats a token (N,), its likeliest tokens (N, T - 1)."""

    losses: Tensor
    likeliest: Tensor

    @property
    def loss(self) -> float:
        """Mean over the windows."""
        return float(self.losses.mean())

    def against(self, original: Reading) -> dict[str, Any]:
        """Return both as JSON values; ``interval`` is half the width of that of 95 %, paired over windows."""
        rise = self.losses - original.losses
        return {
            "tokens": self.likeliest.numel(),
            "windows": len(rise),
            "loss_before": original.loss,
            "loss": self.loss,
            "nats": self.loss - original.loss,
            "interval": half_width(rise.tolist()),
            "agreement": float((original.likeliest == self.likeliest).double().mean()),
        }


@dataclasses.dataclass(frozen=True)
class Observation:
    """What a model did: on tokens of the corpus, on other texts by name, and what it made of each prompt.

    repeated: share of the 4-grams of its greedy continuations of passages that were there before; None without any.
    """

    reading: Reading
    elsewhere: dict[str, Reading]
    samples: tuple[Sample, ...]
    repeated: float | None = None


@dataclasses.dataclass(frozen=True)
class Sample:
    """A greedy continuation: ``ended`` tells whether the model closed it with its end-of-text token."""

    prompt: str
    text: str
    tokens: int
    ended: bool


def observe(
    model: Any,
    blocks: Tensor,
    tokenizer: Any = None,
    prompts: Sequence[str] = (),
    new_tokens: int = 48,
    elsewhere: Mapping[str, Tensor] | None = None,
    passages: int = 0,
    on_step: Callable[[int, int], None] = lambda done, total: None,
) -> Observation:
    """Run ``model`` (in eval mode) on token ids (N, T), and let it continue prompts.

    Args:
        tokenizer: of the model; without one the first tokens of the blocks are continued in place of prompts, and
            samples are token ids.
        prompts: put through the tokenizer's chat template where it has one.
        new_tokens: of a sample at most.
        elsewhere: further token ids, by name.
        passages: of these token ids, how many are continued to see whether the model repeats itself.
        on_step: told how many blocks and prompts are done, and how many there are.
    """
    device = next(model.parameters()).device
    others, asked = dict(elsewhere or {}), _prompts(model, blocks, tokenizer, prompts)
    steps = len(blocks) + sum(map(len, others.values())) + len(asked) + bool(passages)
    done = itertools.count(1)

    def told() -> None:
        on_step(next(done), steps)

    reading = read(model, blocks, told)
    readings = {name: read(model, other, told) for name, other in others.items()}
    samples = []
    for prompt, ids in asked:
        samples.append(_sample(model, prompt, ids.to(device), tokenizer, new_tokens))
        told()
    repeated = None
    if passages:
        repeated = _repeated(model, _passages(torch.cat([blocks, *others.values()]), passages).to(device), tokenizer)
        told()
    return Observation(reading, readings, tuple(samples), repeated)


@torch.no_grad()
def read(model: Any, blocks: Tensor, told: Callable[[], None] = lambda: None) -> Reading:
    """Return what ``model`` (in eval mode) does on token ids (N, T)."""
    losses, likeliest = [], []
    for ids in blocks.to(next(model.parameters()).device).split(1):
        logits = model(input_ids=ids, use_cache=False).logits
        losses.append(float(token_losses(logits, ids).double().mean()))
        likeliest.append(logits[0, :-1].argmax(-1).cpu())
        told()
    return Reading(torch.tensor(losses, dtype=torch.float64), torch.stack(likeliest))


def _passages(blocks: Tensor, count: int) -> Tensor:
    """``count`` beginnings of passages (P, T'), spread over the windows; several of each where there are too few."""
    length = max(1, min(PASSAGE_TOKENS, blocks.shape[1] // 2))
    return blocks.unfold(1, length, length).transpose(0, 1).flatten(0, 1)[:count]  # the first of each window first


@torch.no_grad()
def _repeated(model: Any, passages: Tensor, tokenizer: Any) -> float:
    """Share of the 4-grams of greedy continuations that stood in the continuation before, in mean over passages."""
    ends = _ends(model, tokenizer)
    shares = []
    for ids in _continued(model, passages, ends, CONTINUED_TOKENS).tolist():
        end = next((at for at, token in enumerate(ids) if token in ends), len(ids))
        runs = list(zip(*(ids[at:end] for at in range(4)), strict=False))
        shares += [1 - len(set(runs)) / len(runs)] if runs else []
    return sum(shares) / len(shares) if shares else 0.0


def _longest(model: Any) -> int:
    return most_positions(model) or 1 << 30


def _prompts(model: Any, blocks: Tensor, tokenizer: Any, prompts: Sequence[str]) -> list[tuple[str, Tensor]]:
    """Prompts in words and as token ids (1, T) that leave room for an answer."""
    most = max(1, _longest(model) // 2)
    if tokenizer is None:
        count = min(8, most, blocks.shape[1])
        return [(_in_words(ids[:count], None), ids[None, :count]) for ids in blocks[:2]]
    found = []
    for prompt in prompts:
        if getattr(tokenizer, "chat_template", None):
            turn = [{"role": "user", "content": prompt}]
            given = tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False)
            ids = encode(tokenizer, [given])[0]
        else:
            ids = [*text_start(tokenizer), *encode(tokenizer, [prompt])[0]]
        found.append((prompt, torch.tensor([ids[-most:]])))
    return found


def _in_words(ids: Tensor, tokenizer: Any) -> str:
    if tokenizer is None:
        return " ".join(map(str, ids.tolist()))
    return tokenizer.decode(ids.tolist(), skip_special_tokens=True)


def _ends(model: Any, tokenizer: Any) -> list[int]:
    """Token ids that end a text: the model's, and the tokenizer's."""
    found: list[int] = []
    for owner in (getattr(model, "generation_config", None), tokenizer):
        stated = getattr(owner, "eos_token_id", None)
        found += [] if stated is None else [stated] if isinstance(stated, int) else list(stated)
    return list(dict.fromkeys(found))


def _continued(model: Any, ids: Tensor, ends: Sequence[int], new_tokens: int) -> Tensor:
    """The greedy continuations (P, T') of token ids (P, T), up to an end or as far as the model's positions go."""
    return model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=max(1, min(new_tokens, _longest(model) - ids.shape[1])),
        do_sample=False,
        eos_token_id=list(ends) or None,
        pad_token_id=ends[0] if ends else 0,
    )[:, ids.shape[1] :].cpu()


def _sample(model: Any, prompt: str, ids: Tensor, tokenizer: Any, new_tokens: int) -> Sample:
    ends = _ends(model, tokenizer)
    made = _continued(model, ids, ends, new_tokens)[0]
    ended = bool(len(made)) and int(made[-1]) in ends
    return Sample(prompt, _in_words(made[:-1] if ended else made, tokenizer), len(made), ended)


def compared(original: Observation, compressed: Observation, unseen: bool, speed: Mapping[str, Any]) -> dict[str, Any]:
    """Return both observations and the speeds as JSON values.

    Args:
        unseen: whether calibration has not seen the tokens of the corpus that both ran on.
        speed: of ``measure_speed``.
    """
    samples = []
    for sides in zip(original.samples, compressed.samples, strict=True):
        before, after = (dataclasses.asdict(sample) for sample in sides)
        samples.append({"prompt": before.pop("prompt"), "original": before, "compressed": after})
        del after["prompt"]
    elsewhere = {name: reading.against(original.elsewhere[name]) for name, reading in compressed.elsewhere.items()}
    return compressed.reading.against(original.reading) | {
        "unseen": unseen,
        "elsewhere": elsewhere,
        "ended_before": sum(sample.ended for sample in original.samples),
        "ended": sum(sample.ended for sample in compressed.samples),
        "repeated_before": original.repeated,
        "repeated": compressed.repeated,
        "samples": samples,
        "speed": dict(speed),
    }


# Speed


def like_before(model: nn.Module, originals: Mapping[str, nn.Module]) -> nn.Module:
    """Return a copy of ``model`` that shares its tensors, with random layers where it has not those of ``originals``.

    Args:
        originals: by name, the layers that it once had, on the meta device.
    """
    shared: dict[int, Any] = {id(t): t for t in (*model.parameters(), *model.buffers())}
    device = next(model.parameters()).device
    made, used = dict[tuple, list[nn.Module]](), Counter[tuple]()
    kinds = {_kind(layer) for layer in originals.values()}
    for name, layer in originals.items():
        now, kind = model.get_submodule(name), _kind(layer)
        if type(now) is type(layer) and linear_features(now) == linear_features(layer):
            continue
        pool = made.setdefault(kind, [])
        weights = sum(p.numel() * p.element_size() for p in layer.parameters())
        most = max(1, STAND_IN_BYTES // len(kinds) // weights)
        if len(pool) < most:
            pool.append(_random(layer, device))
        shared[id(now)] = pool[used[kind] % len(pool)]
        used[kind] += 1
    return copy.deepcopy(model, shared)


def _kind(layer: nn.Module) -> tuple:
    return type(layer), linear_features(layer), getattr(layer, "bias", None) is not None


def _random(layer: nn.Module, device: torch.device) -> nn.Module:
    made = copy.deepcopy(layer).to_empty(device=device).requires_grad_(False)
    with torch.random.fork_rng():
        for parameter in made.parameters():
            nn.init.normal_(parameter, std=0.02)
        for buffer in made.buffers():
            buffer.fill_(1)
    return made.eval()


@torch.no_grad()
def measure_speed(original: Any, compressed: Any, batch: int, text: Tensor | None = None) -> dict[str, Any]:
    """Return tokens a second of prefill and of decoding, in turns.

    Args:
        original: a decoder, or ``like_before`` of the compressed one.
        compressed: what became of it.
        batch: sequences at once.
        text: token ids (N, T) to run on; random ones by default.
    """
    build_for_inference(compressed)
    contenders = {"original": original, "compressed": compressed}
    tokens = min(PREFILL_TOKENS, _longest(compressed))
    if text is None:
        vocabulary = entries_of(compressed.get_input_embeddings())
        text = torch.randint(vocabulary, (batch, tokens), generator=torch.Generator().manual_seed(0))
    ids = text[:, :tokens].repeat(-(-batch // len(text)), 1)[:batch].to(next(compressed.parameters()).device)
    decoded = max(1, min(DECODED_TOKENS, _longest(compressed) - 8))

    def prefill(one: Any) -> Callable[[], object]:
        return lambda: one(input_ids=ids, use_cache=False)

    def decode(one: Any) -> Callable[[], object]:
        limits = {"max_new_tokens": decoded, "min_new_tokens": decoded, "do_sample": False, "pad_token_id": 0}
        prompt = ids[:, :8]
        return lambda: one.generate(prompt, attention_mask=torch.ones_like(prompt), **limits)

    found: dict[str, Any] = {"batch": batch, "prefill_tokens": ids.shape[1], "decoded_tokens": decoded}
    for what, make, count in (("prefill", prefill, ids.shape[1]), ("decode", decode, decoded)):
        calls = {name: make(one) for name, one in contenders.items()}
        timings = _in_turns(calls)
        before, after = timings["original"], timings["compressed"]
        ratios = {name: getattr(before, name) for name in ("ratio", "ratio_low", "ratio_high")}
        found[what] = ratios | {"original_tokens_per_second": batch * count / before.seconds}
        found[what]["compressed_tokens_per_second"] = batch * count / after.seconds
    return found


def _in_turns(calls: Mapping[str, Callable[[], object]]) -> dict[str, Timing]:
    """Time calls in turns for about ``SPEED_SECONDS``, in as many ``ROUNDS`` as that allows."""
    start = time.perf_counter()
    for call in 2 * [*calls.values()]:
        call()
    rounds = max(ROUNDS[0], min(ROUNDS[1], int(2 * SPEED_SECONDS / (time.perf_counter() - start))))
    return interleave(calls, "compressed", rounds=rounds, min_seconds=0.0, warmup=1)
