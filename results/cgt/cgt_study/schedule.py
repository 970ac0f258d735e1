"""What the training scripts of the study have in common: the schedule's options, and the paper's own."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from relinear.train import FitSettings

__all__ = ["PAPER_SCHEDULE", "add_schedule", "fit_settings", "parse_options"]

#: of all experiments in the paper (Section 4, Appendix B.2)
PAPER_SCHEDULE = {
    "steps": 400_000,
    "batch_size": 128,
    "learning_rate": 5e-4,
    "warmup": 10_000,
    "min_lr_ratio": 0.0,
    "weight_decay": 1e-8,
    "beta2": 0.999,
}


def add_schedule(parser: argparse.ArgumentParser, **defaults: float) -> None:
    """Add ``--paper``, ``--threads`` and the options of the schedule.

    Args:
        defaults: of ``steps``, ``batch_size``, ``min_lr_ratio``, ``weight_decay`` and ``beta2``.
    """
    parser.add_argument("--paper", action="store_true", help="start from the paper's settings (400,000 steps)")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--batch-size", type=int)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--warmup", type=int, default=50, help="steps, a quarter of all at most")
    parser.add_argument("--min-lr-ratio", type=float)
    parser.add_argument("--weight-decay", type=float)
    parser.add_argument("--beta2", type=float)
    parser.add_argument("--threads", type=int, default=1)
    parser.set_defaults(**defaults)


def parse_options(
    parser: argparse.ArgumentParser, paper: Mapping[str, Any], arguments: Sequence[str] | None = None
) -> argparse.Namespace:
    """The options given; with ``--paper`` those that are not given are the paper's: ``paper`` and its schedule."""
    if parser.parse_known_args(arguments)[0].paper:
        parser.set_defaults(**paper, **PAPER_SCHEDULE)
    return parser.parse_args(arguments)


def fit_settings(options: argparse.Namespace, **more: Any) -> FitSettings:
    """How a script with these options (and a ``seed``) trains; ``more`` says the rest."""
    return FitSettings(
        steps=options.steps,
        batch_size=options.batch_size,
        learning_rate=options.learning_rate,
        warmup_steps=min(options.warmup, options.steps // 4),
        min_lr_ratio=options.min_lr_ratio,
        weight_decay=options.weight_decay,
        betas=(0.9, options.beta2),
        dtype="float32",
        seed=options.seed,
        threads=options.threads,
        save_every=0,
        **more,
    )
