"""Training throughput of one stock model on one text: transformers' Trainer at its defaults, relinear, a bare loop.

    python results/speed/trainer.py

Every contender runs in a process of its own, in turn, several rounds; tokens are counted without padding, and the first
steps (compilation, caches) are left out. Writes results/speed/trainer.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

import relinear
from relinear.data import DataSettings, iter_texts, prepare_data
from relinear.system.files import write_json
from relinear.system.machine import describe_machine

CONTENDERS = ("transformers' Trainer, defaults", "relinear train", "bare compiled loop")
SKIPPED = 4


def model_of(options: argparse.Namespace, vocabulary: int) -> torch.nn.Module:
    """The same model for every contender."""
    torch.manual_seed(0)
    return relinear.from_preset(options.model, vocab_size=vocabulary)


def data_settings(options: argparse.Namespace) -> DataSettings:
    """The same text for every contender."""
    return DataSettings(
        data=options.data, tokenizer="bpe:4000", sequence_length=options.length, max_validation_tokens=4096
    )


def trainer_defaults(options: argparse.Namespace) -> float:
    """Documents cut to the length and padded in batches, as transformers' examples do it."""
    from transformers import DataCollatorForLanguageModeling, Trainer, TrainerCallback, TrainingArguments

    settings = data_settings(options)
    tokenizer = prepare_data(settings).tokenizer
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.convert_ids_to_tokens(0)
    rows = [tokenizer(text, truncation=True, max_length=options.length) for text in iter_texts(settings, "train")]

    class Clock(TrainerCallback):
        start = 0.0

        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == SKIPPED:
                Clock.start = time.perf_counter()
                Clock.tokens = state.num_input_tokens_seen

        def on_train_end(self, args, state, control, **kwargs):
            Clock.stop = time.perf_counter()
            Clock.tokens = state.num_input_tokens_seen - Clock.tokens

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=options.steps,
            save_strategy="no",
            report_to=[],
            include_num_input_tokens_seen="non_padding",
        )
        collator = DataCollatorForLanguageModeling(tokenizer, mlm=False)
        model = model_of(options, len(tokenizer))
        Trainer(model, arguments, collator, train_dataset=rows, callbacks=[Clock()]).train()
    return float(Clock.tokens) / (Clock.stop - Clock.start)


def relinear_train(options: argparse.Namespace) -> float:
    """``relinear train`` with compilation and the dtype that it chooses itself."""
    from relinear.training import TrainSettings, train

    relinear.system.allocator.tune_allocator()
    settings = TrainSettings(
        model=options.model,
        data=data_settings(options),
        steps=options.steps,
        batch_size=options.batch,
        compile=True,
        eval_every=0,
        save_every=0,
        save_model=False,
        warmup_steps=2,
    )
    with tempfile.TemporaryDirectory() as folder:
        result = train(settings, folder)
    assert result.tokens_per_second is not None
    return result.tokens_per_second


def bare_loop(options: argparse.Namespace) -> float:
    """What one would write by hand: packed batches, autocast to bfloat16, ``torch.compile``, fused AdamW."""
    relinear.system.allocator.tune_allocator()
    data = prepare_data(data_settings(options))
    model = model_of(options, data.vocab_size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    run = torch.compile(model)
    loader = torch.utils.data.DataLoader(data.train, batch_size=options.batch, shuffle=True, drop_last=True)
    start = 0.0
    for step, batch in enumerate(loader):
        if step == SKIPPED:
            start = time.perf_counter()
        if step == options.steps:
            break
        with torch.autocast("cpu", torch.bfloat16):
            loss = run(**batch, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return options.batch * options.length * (options.steps - SKIPPED) / (time.perf_counter() - start)


def main() -> None:
    """Measure every contender in turn and write the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-60m")
    parser.add_argument("--data", default="stdlib")
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--batch", type=int, default=8, help="sequences per step: Trainer's default")
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("runs/speed/trainer.json"))
    parser.add_argument("--contender", type=int, help="run this one alone and print its tokens per second")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.contender is not None:
        print(json.dumps((trainer_defaults, relinear_train, bare_loop)[options.contender](options)))
        return
    rates: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    for _ in range(options.rounds):
        for index, name in enumerate(CONTENDERS):
            command = [sys.executable, __file__, *sys.argv[1:], "--contender", str(index)]
            printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            rates[name].append(json.loads(printed.strip().splitlines()[-1]))
            print(name, round(rates[name][-1]), flush=True)
    medians = {name: statistics.median(values) for name, values in rates.items()}
    ours = medians["relinear train"]
    result = {
        "tokens_per_second": rates,
        "relinear / defaults": ours / medians[CONTENDERS[0]],
        "relinear / bare loop": ours / medians[CONTENDERS[2]],
        "settings": vars(options) | {"out": str(options.out)},
        "machine": describe_machine(),
    }
    write_json(options.out, result)
    print({key: round(value, 3) for key, value in result.items() if "/" in key})


if __name__ == "__main__":
    main()
