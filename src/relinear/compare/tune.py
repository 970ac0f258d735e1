"""A learning rate for every entry: short runs over a grid, kept in an optuna study that a killed run goes on with."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from relinear.compare.settings import Tune

__all__ = ["open_study", "tune_learning_rate"]

STORAGE = "optuna.db"


def open_study(folder: str | Path, name: str, sampler: Any = None) -> Any:
    """The optuna study ``name`` in ``folder/optuna.db``; trials that a killed process left running count as failed.

    Raises:
        ImportError: if optuna is not installed.
    """
    try:
        import optuna
    except ImportError as error:
        raise ImportError("tuning and sweeps need optuna: pip install 'relinear[sweep]'") from error

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    storage = f"sqlite:///{(folder / STORAGE).resolve()}"
    study = optuna.create_study(storage=storage, study_name=name, load_if_exists=True, sampler=sampler)
    for trial in study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.RUNNING,)):
        study.tell(trial.number, state=optuna.trial.TrialState.FAIL)
    return study


def tune_learning_rate(
    settings: Tune, study: Any, evaluate: Callable[[float], float | None]
) -> tuple[float, dict[str, Any]]:
    """The best learning rate of the grid, which grows where the best is at its edge.

    Args:
        settings: the grid and how often it may grow.
        study: from ``open_study``; rates that it has results for are not run again.
        evaluate: learning rate -> validation loss, or None where training diverged.

    Returns:
        The rate, and what was tried: ``{"trials": [{"learning_rate", "validation_loss"}], "edge": bool}``.

    Raises:
        ValueError: if training diverged at every rate.
    """
    rates = list(settings.learning_rates)
    losses: dict[float, float] = {}
    for extension in range(settings.extensions + 1):
        for rate in rates:
            if rate not in losses:
                losses[rate] = _trial(study, rate, evaluate)
        best = min(rates, key=lambda rate: losses[rate])
        if not math.isfinite(losses[best]):
            # A still lower rate is the only way on; the grid below its lowest is not searched blindly.
            raise ValueError(f"training diverged at every learning rate of the grid {rates}; lower tune.learning_rates")
        if extension == settings.extensions or best not in (rates[0], rates[-1]):
            break
        if best == rates[0]:
            rates.insert(0, _rounded(rates[0] * rates[0] / rates[1]))
        else:
            rates.append(_rounded(rates[-1] * rates[-1] / rates[-2]))
    trials = [
        {"learning_rate": rate, "validation_loss": losses[rate] if math.isfinite(losses[rate]) else None}
        for rate in rates
    ]
    return best, {"trials": trials, "edge": best in (rates[0], rates[-1])}


def _rounded(rate: float) -> float:
    return float(f"{rate:.3g}")


def _trial(study: Any, rate: float, evaluate: Callable[[float], float | None]) -> float:
    import optuna

    done = (optuna.trial.TrialState.COMPLETE, optuna.trial.TrialState.PRUNED)
    for trial in study.get_trials(deepcopy=False, states=done):
        if trial.params.get("learning_rate") == rate:
            return trial.value if trial.state == done[0] else math.inf
    study.enqueue_trial({"learning_rate": rate})
    # The range is the same for every trial, as optuna asks for; it only has to hold every rate.
    trial = study.ask({"learning_rate": optuna.distributions.FloatDistribution(1e-12, 1e3, log=True)})
    loss = evaluate(rate)
    if loss is None:
        study.tell(trial, state=optuna.trial.TrialState.PRUNED)
        return math.inf
    study.tell(trial, loss)
    return loss
