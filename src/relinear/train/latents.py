"""Running moments of latents during training, as a callback that keeps them across a resume."""

# Legend: R latent size

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from relinear.core.config import shown
from relinear.core.latents import Latent, Moments, observe
from relinear.system.files import read_json, write_json
from relinear.system.text import cut

FILE = "latent_moments.json"
_SUMS = ("tokens", "mu", "mu_squared", "variance")


class LatentMoments(TrainerCallback):
    """Keep the running mean and standard deviation of every latent: of the mixture of N(mu, sigma^2) over tokens.

    Sums over tokens are discounted by ``decay`` a step that is looked at, so that the moments follow the training.
    Written to ``latent_moments.json`` in every checkpoint (and read from there on resume) and, at the end, in the run's
    directory; ``moments()`` gives them in between. With several ranks, those of the first rank's tokens.

    Args:
        every: look at one step in so many (its forwards compute nothing extra; a compiled model has a second graph).
        decay: discount of what was seen before, for each such step; 1 weighs the whole run equally.

    Raises:
        ValueError: if ``every`` is below 1 or ``decay`` outside of (0, 1].

    Examples:
        >>> moments = relinear.LatentMoments(every=1)  # relinear.fit(model, data, callbacks=[moments], out_dir="run")
        >>> moments.moments()
        {}
    """

    def __init__(self, every: int = 10, decay: float = 0.99) -> None:
        if every < 1 or not 0 < decay <= 1:
            raise ValueError(f"every must be at least 1 and decay in (0, 1], got every={every}, decay={decay}")
        self.every, self.decay = every, decay
        self._sums: dict[str, dict[str, Tensor]] = {}
        self._block: AbstractContextManager | None = None

    def moments(self) -> dict[str, Moments]:
        """Return the mean and standard deviation (R,) by operator name, in float64 on the CPU."""
        return {name: _moments(sums) for name, sums in self._sums.items()}

    @torch.no_grad()
    def _see(self, name: str, latent: Latent) -> None:
        mu, sigma = (t.detach().flatten(0, -2).double() for t in (latent.mu, latent.sigma))
        new = (torch.tensor(len(mu), dtype=torch.float64), mu.sum(0), mu.square().sum(0), sigma.square().sum(0))
        old = self._sums.get(name, dict.fromkeys(_SUMS, 0.0))
        self._sums[name] = {key: old[key] + value.cpu() for key, value in zip(_SUMS, new, strict=True)}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        saved = Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}" / FILE
        if state.global_step and saved.is_file():
            self._sums = _read_sums(saved)

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step % self.every == 0 and self._block is None:
            self._sums = {n: {k: v * self.decay for k, v in sums.items()} for n, sums in self._sums.items()}
            self._block = observe(model, self._see)
            self._block.__enter__()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._block is not None:
            self._block.__exit__(None, None, None)
            self._block = None

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        folder = Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
        if state.is_world_process_zero and folder.is_dir():
            self._write(folder / FILE)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.on_step_end(args, state, control)
        if state.is_world_process_zero:
            folder = Path(args.output_dir)
            # relinear's own runs give transformers a folder of checkpoints below the run's directory.
            self._write((folder.parent if folder.name == "checkpoints" else folder) / FILE)

    def _write(self, path: Path) -> None:
        latents = {
            name: {"mean": moments.mean.tolist(), "std": moments.std.tolist()}
            | {"sums": {key: value.tolist() for key, value in self._sums[name].items()}}
            for name, moments in self.moments().items()
        }
        write_json(path, {"format": 1, "every": self.every, "decay": self.decay, "latents": latents})


def read_moments(path: str | Path) -> dict[str, Moments]:
    """Return the moments by operator name that ``LatentMoments`` wrote.

    Args:
        path: the file, or the run's directory that holds it.

    Raises:
        ValueError: if the file is no such file.
        FileNotFoundError: if there is none.

    Examples:
        >>> model, ids = relinear.from_preset("tiny"), torch.randint(258, (8, 32))
        >>> _ = relinear.replace_(model, {"q_proj": relinear.HDPL(rank=4)}, layers=0)
        >>> rows, moments = [{"input_ids": row, "labels": row} for row in ids], relinear.LatentMoments(every=1)
        >>> _ = relinear.fit(model, rows, relinear.train.FitSettings(steps=2), out_dir="run", callbacks=[moments])
        >>> list(relinear.read_moments("run"))
        ['model.layers.0.self_attn.q_proj']
    """
    path = Path(path)
    return {name: _moments(sums) for name, sums in _read_sums(path / FILE if path.is_dir() else path).items()}


def _moments(sums: dict[str, Tensor]) -> Moments:
    tokens, mu, mu_squared, variance = (sums[key] for key in _SUMS)
    mean = mu / tokens
    return Moments(mean, ((mu_squared + variance) / tokens - mean.square()).clamp(min=0).sqrt())


def _read_sums(path: Path) -> dict[str, dict[str, Tensor]]:
    try:
        content = read_json(path)
        if content["format"] != 1:
            raise ValueError(f"format {shown(content['format'])}")
        found = {name: _sums(latent["sums"]) for name, latent in dict(content["latents"]).items()}
    except (LookupError, TypeError, ValueError, RuntimeError, OverflowError) as error:
        said = cut(str(error))
        raise ValueError(f"{path} is not a file of latent moments of this version: {said}") from error
    return found


def _sums(values: dict[str, Any]) -> dict[str, Tensor]:
    tokens, *others = (torch.tensor(values[key], dtype=torch.float64) for key in _SUMS)
    if tokens.dim() or len({tuple(value.shape) for value in others}) > 1:
        raise ValueError(f"sums of unequal sizes {[tuple(value.shape) for value in others]}")
    return dict(zip(_SUMS, (tokens, *others), strict=True))
