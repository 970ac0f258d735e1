"""Search settings of a run with Optuna: `pip install optuna`, then

    python examples/search_settings.py text.txt --trials 20 --out runs/search

Every trial is a run in a folder of its own. Killed and started again, the search goes on: the seeded sampler proposes
the same, runs that have ended return at once, and the one under way resumes from its last checkpoint.
"""

import argparse
from pathlib import Path

import optuna

import relinear
from relinear.training import NonFiniteLossError, TrainSettings


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--out", type=Path, default=Path("runs/search"))
    options = parser.parse_args()

    def objective(trial: optuna.Trial) -> float:
        rank = trial.suggest_categorical("rank", [8, 16, 32])
        rate = trial.suggest_float("learning_rate", 1e-4, 1e-2, log=True)
        values = {"model": "tiny", "operators": {"all-linear": f"low_rank:rank={rank}"}, "learning_rate": rate}
        values |= {"steps": options.steps, "save_model": False, "data": {"data": str(options.text)}}
        try:
            return relinear.train(TrainSettings.load(values), options.out / f"trial-{trial.number}").validation_loss
        except NonFiniteLossError:
            raise optuna.TrialPruned from None

    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=0))
    study.optimize(objective, n_trials=options.trials)
    print(f"best: {study.best_params}, validation loss {study.best_value:.4f}")


if __name__ == "__main__":
    main()
