"""Which part of a prediction is wrong, by type of layer: python results/compress/predictions.py MODEL CALIBRATION

    WIKITEXT2/test.txt --out results/compress/predictions.jsonl

All layers of one type are rounded to four bits by GPTQ, all others stay. What that costs is predicted in steps, each
with one assumption fewer, on the windows that also measure it. D is the error of a weight, x an input, g the gradient
of the summed loss at an output, p = g^T D x, means are over tokens:

    calibration  0.5 tr(G D A D^T) with the moments that calibration kept: the prediction that allocation uses
    product      the same with moments of these windows: errors and gradients of a token are independent, tokens too
    apart        the same, with moments of their own for the first position of a window
    weighted     product, with errors weighed by the squared gradients of their token
    tokens       0.5 mean(p^2): errors and gradients of a token hang together, tokens are independent
    windows      0.5 mean((sum of p over a window)^2) / tokens of a window: tokens hang together, too
    kl           measured: Kullback-Leibler divergence from the original, nats per token
    nats         measured: rise of the loss, with its interval over windows

"sampled" has the same figures with gradients at labels that the model draws itself, as Fisher's matrix has them.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

import relinear
from frontier import rounded, texts
from relinear.compression import CompressSettings
from relinear.compression.corpus import read_elsewhere
from relinear.compression.plan import layer_type
from relinear.contract.operator import dense_weight
from relinear.data.tokenizers import load_tokenizer
from relinear.system.confidence import half_width
from relinear.system.machine import describe_machine
from saved_statistics import SavedStatistics


class Moment:
    """The summed second moment of rows (O, O), and the rows of first positions."""

    def __init__(self) -> None:
        self.sum, self.first, self.count = 0.0, [], 0

    def add(self, rows: Tensor) -> None:
        """Add those of one window (T, O)."""
        self.sum = self.sum + rows.T @ rows
        self.first.append(rows[0].clone())
        self.count += len(rows)


class Predictions:
    """0.5 nats a token of one layer under each assumption, from what is added window by window."""

    def __init__(self, errors: Moment) -> None:
        self.errors, self.gradients, self.tokens, self.windows = errors, Moment(), 0.0, 0.0
        self.weighted, self.weight = 0.0, 0.0

    def add(self, error: Tensor, gradient: Tensor) -> None:
        """Add D x and g of one window (T, O); the errors' moment has been told."""
        self.gradients.add(gradient)
        weight = gradient.square().sum(1, keepdim=True)
        self.weighted = self.weighted + (weight * error).T @ error
        self.weight += float(weight.sum())
        p = (error * gradient).sum(1).double()
        self.tokens += float(p.square().sum())
        self.windows += float(p.sum().square())

    def nats(self) -> dict[str, float]:
        """Return the predictions."""
        errors, gradients, count = self.errors, self.gradients, self.errors.count
        first_errors, first_gradients = (torch.stack(m.first) for m in (errors, gradients))
        windows, others = len(first_errors), count - len(first_errors)
        at_first = float((first_errors @ first_gradients.T).square().sum()) / windows
        e, g = (m.sum - first.T @ first for m, first in ((errors, first_errors), (gradients, first_gradients)))
        found = {"product": float((errors.sum * gradients.sum).sum()) / count}
        found["apart"] = at_first + float((e * g).sum()) / others
        found["weighted"] = float((self.weighted * gradients.sum).sum()) / self.weight
        found |= {"tokens": self.tokens, "windows": self.windows}
        return {name: 0.5 * value / count for name, value in found.items()}


def predicted(model, ids: Tensor, missed: dict[str, Tensor], generator) -> dict[str, dict[str, Predictions]]:
    """By layer, with the labels that are given and with ones that the model draws."""
    errors = {name: Moment() for name in missed}
    found = {how: {name: Predictions(errors[name]) for name in missed} for how in ("given", "sampled")}
    outputs: dict[str, tuple[Tensor, Tensor]] = {}

    def watch(name: str):
        def seen(_, inputs, output) -> None:
            outputs[name] = output, (inputs[0].detach() @ missed[name].T)[0]
            errors[name].add(outputs[name][1])

        return seen

    handles = [model.get_submodule(name).register_forward_hook(watch(name)) for name in missed]
    model.get_input_embeddings().weight.requires_grad_(True)
    for window in ids.split(1):
        logits = model(input_ids=window, use_cache=False).logits[0, :-1].float()
        drawn = torch.multinomial(logits.detach().softmax(-1), 1, generator=generator)[:, 0]
        watched = [output for output, _ in outputs.values()]
        for how, labels in (("given", window[0, 1:]), ("sampled", drawn)):
            loss = F.cross_entropy(logits, labels, reduction="sum")
            gradients = torch.autograd.grad(loss, watched, retain_graph=how == "given")
            for (name, (_, error)), gradient in zip(outputs.items(), gradients, strict=True):
                found[how][name].add(error, gradient[0])
        outputs.clear()
    for handle in handles:
        handle.remove()
    model.requires_grad_(False)
    return found


@torch.no_grad()
def log_probabilities(model, ids: Tensor):
    """Yield those of each window (T - 1, V)."""
    for window in ids.split(1):
        yield model(input_ids=window, use_cache=False).logits[0, :-1].float().log_softmax(-1)


def main() -> None:
    """Round, predict, measure; a row for each type of layer."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("calibration")
    parser.add_argument("text")
    parser.add_argument("--types", nargs="+", default=(), help="of layers; by default all")
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--windows", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0, help="of the labels that are drawn")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    calibration, model = SavedStatistics(given.calibration), relinear.from_pretrained(given.model).float().eval()
    model.requires_grad_(False)
    windows = CompressSettings(sequence_length=256, evaluation_tokens=given.windows * 256)
    ids = read_elsewhere({"": texts(given.text)}, load_tokenizer(given.model), windows)[""]
    config, missed, kept = relinear.Quantized(bits=given.bits), {}, defaultdict(float)
    for name in [n for n in calibration.names if not given.types or layer_type(n) in given.types]:
        layer, moments = model.get_submodule(name), calibration.moments(name)
        missed[name] = rounded(layer, config, moments, False).to_dense().detach() - dense_weight(layer).detach()
        kept[layer_type(name)] += float(moments.error(missed[name])) / 2
    generator = torch.Generator().manual_seed(given.seed)
    found = predicted(model, ids, missed, generator)
    before = list(log_probabilities(model, ids))
    for kind in kept:
        row = {"model": Path(given.model).name, "type": kind, "bits": given.bits, "windows": given.windows}
        row["calibration"] = kept[kind]
        names = [name for name in missed if layer_type(name) == kind]
        for how, layers in found.items():
            each = [layers[name].nats() for name in names]
            row[how] = {key: round(sum(one[key] for one in each), 5) for key in each[0]}
        for name in names:
            model.get_submodule(name).weight.data.add_(missed[name])
        kl, rise = [], []
        for old, new, window in zip(before, log_probabilities(model, ids), ids, strict=True):
            kl.append(float((old.exp() * (old - new)).sum(-1).mean()))
            rise.append(float((old - new).gather(1, window[1:, None]).mean()))
        for name in names:
            model.get_submodule(name).weight.data.sub_(missed[name])
        row |= {"kl": sum(kl) / len(kl), "kl_interval": half_width(kl)}
        row |= {"nats": sum(rise) / len(rise), "interval": half_width(rise)}
        row = {key: round(value, 5) if isinstance(value, float) else value for key, value in row.items()}
        with given.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row | {"machine": describe_machine()}) + "\n")
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
