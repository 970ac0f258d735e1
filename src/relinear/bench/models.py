"""Time whole models: a training step, prefill and decoding, with and without each operator."""

import contextlib
import itertools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import torch
from pydantic import Field
from torch import nn

from relinear.bench.operators import Mode
from relinear.bench.run import DTYPES, Dtype, parsed_by
from relinear.contract.inference import for_inference_
from relinear.contract.operator import Operator, OperatorConfig
from relinear.models import from_preset, preset_config
from relinear.operators.context_manager import ContextManager
from relinear.settings.base import PositiveInt, Settings, Threads
from relinear.surgery.plan import attach_, replace_
from relinear.system.allocator import tune_allocator
from relinear.system.machine import on_threads
from relinear.system.progress import Progress, ProgressCallback, no_progress
from relinear.system.run_folder import RunFolder
from relinear.system.timing import interleave
from relinear.training.fitting import compiled as through_compiler
from relinear.training.fitting import training_step

ModelPass = Literal["step", "prefill", "decode"]
#: tokens of the prompt before decoding; few, so that the time hardly includes prefill
PROMPT = 8
#: learning rate of AdamW; small, so that the weights hardly change between rounds
_LEARNING_RATE = 1e-4


class ModelBenchSettings(Settings):
    """Settings of the benchmark of whole models.

    Attributes:
        preset: name of a stock model (``relinear.models.preset_names()``).
        passes: of "step" (training: forward, backward, AdamW), "prefill" (a prompt, which fills the cache) and "decode"
            (greedy, with the cache, after a prompt of 8 tokens).
        modes: of "eager" and "compiled": training steps through ``torch.compile`` as in ``fit``, decoding with a
            static cache through transformers' compiled call (CUDA graphs on a GPU). Prefill is eager only.
        dtypes: "fp32" and "bf16", which is autocast for "step" and weights otherwise.
        sequence_length: tokens per sequence, for "step" and "prefill".
        batch_size, inference_batches: sequences at once in training, and in prefill and decoding.
        rounds: how often each variant is timed.
        threads: of torch; None leaves torch's choice.
    """

    preset: Annotated[str, parsed_by(preset_config)]
    passes: tuple[ModelPass, ...] = get_args(ModelPass)
    modes: tuple[Mode, ...] = ("eager",)
    dtypes: tuple[Dtype, ...] = ("fp32",)
    sequence_length: int = Field(default=512, ge=2)
    batch_size: PositiveInt = 1
    inference_batches: tuple[PositiveInt, ...] = Field(default=(1, 8), min_length=1)
    rounds: PositiveInt = 7
    threads: Threads | None = None


def _inference(model: Any, ids: torch.Tensor, phase: str, new_tokens: int, compiled: bool) -> Callable[[], object]:
    from transformers import CompileConfig

    model.generation_config.eos_token_id = None
    limits: dict[str, Any] = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens, "do_sample": False}
    if compiled:
        limits |= {"cache_implementation": "static", "compile_config": CompileConfig(fullgraph=True)}
        limits["compile_config"]._compile_all_devices = True
    if phase == "prefill":
        return torch.no_grad()(lambda: model(input_ids=ids, use_cache=True))
    return torch.no_grad()(lambda: model.generate(ids[:, :PROMPT], **limits))


def bench_models(
    settings: ModelBenchSettings,
    variants: Mapping[str, Mapping[str, OperatorConfig]],
    phase: str,
    batch_size: int,
    *,
    dtype: torch.dtype = torch.float32,
    compiled: bool = False,
    new_tokens: int = 32,
    on_round: Callable[[int], None] = lambda done: None,
) -> list[dict[str, Any]]:
    """Time the stock model of a preset and variants of it, taking turns in this process.

    Args:
        settings: preset, sequence length and rounds.
        variants: name -> mapping for ``replace_``.
        phase: one of the settings' passes.
        batch_size: sequences at once.
        dtype: see the settings.
        compiled: whether the mode is "compiled".
        new_tokens: tokens to generate for "decode".
        on_round: called between rounds with how many are done.

    Returns:
        rows of ``models.json``, one per variant: tokens per second and the speed relative to the stock model.

    Raises:
        ValueError: for a mapping that does not fit the model.
    """
    calls: dict[str, Callable[[], object]] = {}
    parameters: dict[str, int] = {}
    with contextlib.ExitStack() as stack:
        for name, mapping in {"dense": {}, **variants}.items():
            torch.manual_seed(0)
            model = from_preset(settings.preset)
            if mapping:
                replace_(model, mapping, init="fresh")
                _attach_contexts(model)
            ids = torch.randint(model.config.vocab_size, (batch_size, settings.sequence_length))
            parameters[name] = sum(p.numel() for p in model.parameters())
            if phase == "step":
                stack.enter_context(through_compiler(model, compiled))
                optimizer = torch.optim.AdamW(model.train().parameters(), lr=_LEARNING_RATE, fused=True)
                calls[name] = training_step(model, ids, optimizer, None if dtype == torch.float32 else dtype)
            else:
                for_inference_(model.to(dtype))
                calls[name] = _inference(model, ids, phase, new_tokens, compiled)
        timings = interleave(calls, "dense", rounds=settings.rounds, min_seconds=0.0, warmup=2, on_round=on_round)
    tokens = batch_size * (new_tokens if phase == "decode" else settings.sequence_length)
    return [
        {
            "variant": name,
            "preset": settings.preset,
            "phase": phase,
            "sequence_length": settings.sequence_length,
            "batch_size": batch_size,
            "dtype": str(dtype).removeprefix("torch."),
            "compiled": compiled,
            "parameters": parameters[name],
            "tokens_per_second": tokens / timing.seconds,
            "speedup": 1 / timing.ratio,
            "speedup_low": 1 / timing.ratio_high,
            "speedup_high": 1 / timing.ratio_low,
        }
        for name, timing in timings.items()
    ]


def run_model_bench(
    settings: ModelBenchSettings,
    variants: Mapping[str, Mapping[str, OperatorConfig]],
    out_dir: str | Path,
    *,
    overwrite: bool = False,
    on_progress: ProgressCallback = no_progress,
) -> dict[str, Any]:
    """Run ``bench_models`` in every combination; write ``models.json`` into ``out_dir``.

    Operators that read a context get a ``ContextManager`` of their width.

    Args:
        settings: what to measure.
        variants: see ``bench_models``.
        out_dir: where to write. A finished benchmark with the same settings there is renamed.
        overwrite: also rename a benchmark with other settings, and other files under the same names.
        on_progress: called before every case and between its rounds.

    Returns:
        the content of the file: settings, machine, allocator, and a row per variant and case.

    Raises:
        ValueError: for a mapping that does not fit, or another benchmark in ``out_dir``; nothing has run then.
    """
    for mapping in variants.values():
        with torch.device("meta"):
            replace_(from_preset(settings.preset), mapping, init="fresh")
    settings_by_name = {
        name: {key: config.to_dict() for key, config in part.items()} for name, part in variants.items()
    }
    values = settings.model_dump(mode="json") | {"variants": settings_by_name}
    folder = RunFolder(
        out_dir,
        "bench --model",
        "models.json",
        earlier_records={"models.json": ("settings", "machine", "rounds", "rows")},
    )
    record = folder.check(values, overwrite=overwrite)
    with folder.open(values, overwrite=overwrite or "rows" in (record or {})):
        allocator = tune_allocator()  # before the first tensor
        rows = _all_rows(settings, variants, on_progress)
        return folder.write(allocator=allocator, rounds=settings.rounds, rows=rows)


def _all_rows(
    settings: ModelBenchSettings, variants: Mapping[str, Mapping[str, OperatorConfig]], on_progress: ProgressCallback
) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    cases = [
        (dtype, mode, phase, batch)
        for dtype, mode, phase in itertools.product(settings.dtypes, settings.modes, settings.passes)
        for batch in ((settings.batch_size,) if phase == "step" else settings.inference_batches)
        if mode != "compiled" or phase != "prefill"
    ]
    with on_threads(settings.threads):
        for number, (dtype, mode, phase, batch) in enumerate(cases):

            def report(done: int, case: str = f"{dtype}, {mode}, {phase} of {batch}", earlier: int = number) -> None:
                step, steps = earlier * settings.rounds + done, len(cases) * settings.rounds
                on_progress(Progress(f"timing {settings.preset}", step, steps, detail=case))

            report(0)
            rows += bench_models(
                settings, variants, phase, batch, dtype=DTYPES[dtype], compiled=mode == "compiled", on_round=report
            )
    return rows


def _attach_contexts(model: nn.Module) -> None:
    widths = {m.config.context_dim for m in model.modules() if isinstance(m, Operator) and m.config.conditioned}  # type: ignore[attr-defined]
    for width in widths:
        attach_(model, ContextManager(dim=width))
