"""What the tests of training share: a data set, a probe operator with an auxiliary loss, runs of a tiny model."""

import torch
from torch.utils.data import Dataset
from transformers import TrainerCallback

from conftest import make_tiny_gpt2, make_tiny_llama
from relinear import replace_
from relinear.contract.config import register
from relinear.contract.operator import OperatorConfig
from relinear.operators.low_rank import LowRankLinear
from relinear.training import FitSettings, TrainSettings

MODELS = {"llama": make_tiny_llama, "gpt2": make_tiny_gpt2}
TARGETS = {"llama": "up_proj", "gpt2": "c_fc"}


class Tokens(Dataset):
    """Random sequences that repeat every four tokens, so that a model can learn them."""

    def __init__(self, samples=64, length=12, vocabulary=96, seed=0):
        generator = torch.Generator().manual_seed(seed)
        pattern = torch.randint(vocabulary, (samples, 4), generator=generator)
        self.ids = pattern.repeat(1, length // 4)

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        return {"input_ids": self.ids[index], "labels": self.ids[index].clone()}


class Padded(Tokens):
    """The same sequences, each with its own number of tokens; the rest is padding, without a label."""

    def __getitem__(self, index):
        ids = self.ids[index]
        labels = ids.clone()
        labels[2 + 7 * index % (len(ids) - 1) :] = -100
        return {"input_ids": ids, "labels": labels}


DATA = {"full": Tokens, "padded": Padded}


class ProbeLinear(LowRankLinear):
    """A low-rank layer with an auxiliary loss of every token, as HDPL's KL is, without the noise."""

    def forward(self, x):
        y = super().forward(x)
        if self.training:
            self.record_auxiliary({"energy": 0.1 * y.square().mean(-1)}, {"energy": y.detach().square().mean(-1)})
        return y


@register
class Probe(OperatorConfig):
    kind = "train_probe"
    module_class = ProbeLinear
    rank: int = 4


def probe_model(kind="llama", dtype=torch.float64):
    torch.manual_seed(0)
    model = MODELS[kind]()
    replace_(model, {TARGETS[kind]: Probe()})
    return model.to(dtype)


class Gradients(TrainerCallback):
    """Keeps the gradient of the first optimiser step, as the optimiser sees it."""

    def __init__(self):
        self.found = {}

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        if not self.found:
            self.found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


FIT = FitSettings(
    steps=9,
    batch_size=4,
    accumulation=2,
    eval_every=4,
    log_every=2,
    save_every=3,
    warmup_steps=2,
    threads=1,
    device="cpu",
)


FIT_DATA = (Tokens(samples=24), Tokens(samples=8, seed=1))  # three steps go through the data once


class Interrupt(Exception):
    pass


def stop_at(step):
    def on_progress(progress):
        if progress.done == step and progress.stage == "train":
            raise Interrupt

    return on_progress


def dropout_model():
    """With dropout, so that the state of the random generator matters."""
    model = probe_model("gpt2", torch.float32)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.1
    return model


RUN = {
    "model": "tiny",
    "model_overrides": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2},
    "operators": {"up_proj": "low_rank:rank=4"},
    "steps": 12,
    "batch_size": 2,
    "save_every": 5,
    "eval_every": 5,
    "log_every": 2,
    "threads": 1,
}


def run_settings(corpus, **changes):
    data = {"data": str(corpus), "sequence_length": 32, "max_validation_tokens": 256}
    return TrainSettings.load(RUN | {"data": data} | changes)
