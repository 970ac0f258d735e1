"""What each rank of the distributed tests runs (see test_train_gradients.py): FOLDER TASK DATA SETTINGS."""

import json
import sys
from pathlib import Path

import torch
from transformers import TrainerCallback

import relinear
from conftest import make_tiny_llama
from relinear.hf.training_loss import ModelWithObjective
from relinear.models.cgt import objective
from relinear.training import FitSettings, fit
from tiny_models import make_cgt
from train_helpers import DATA, Gradients, probe_model


class Stop(TrainerCallback):
    """Ends a run at a step, as a kill does: nothing more is written."""

    class Killed(Exception):
        pass

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            raise Stop.Killed


class Record(torch.nn.Module):
    """A model that notes its batches."""

    def __init__(self, model):
        super().__init__()
        self.model, self.batches = model, []

    def forward(self, input_ids, **kwargs):
        if self.training:
            self.batches.append(input_ids)
        return self.model(input_ids=input_ids, **kwargs)


def noisy_model(kind):
    torch.manual_seed(0)
    if kind == "splits":
        return ModelWithObjective(make_cgt(vocab_size=96), objective.CGTObjective())
    model = make_tiny_llama()
    relinear.replace_(model, {"up_proj": relinear.HDPL(rank=4)})
    return model


def noise(folder, data, settings):
    """The noise and the batches of a whole run and of one that is killed and started again, with their weights."""
    found, drawn = {}, []
    randn, draw_splits = torch.randn, objective.draw_splits

    def noted(draw):
        def wrapper(*args, **kwargs):
            value = draw(*args, **kwargs)
            drawn.append(value.flatten()[:4].double())
            return value

        return wrapper

    torch.randn, objective.draw_splits = noted(randn), noted(draw_splits)
    for kind in ("latents", "splits"):
        for name, stops in {"whole": (None,), "resumed": (4, None)}.items():
            batches = []
            for stop in stops:
                model = Record(noisy_model(kind))
                model.batches = batches
                drawn.clear()
                try:
                    fit(model, data(), settings, out_dir=folder / kind / name, callbacks=[Stop(stop)])
                except Stop.Killed:
                    del batches[-1]  # of the step that is done again
            found[f"{kind}/{name}"] = {
                "noise": list(drawn),
                "batches": batches,
                "weights": {key: p.detach().clone() for key, p in model.named_parameters()},
            }
    torch.save(found, folder / f"noise_{torch.distributed.get_rank()}.pt")


def gradients(folder, data, settings):
    seen = Gradients()
    fit(probe_model("llama"), (data(), data(seed=1)), settings, callbacks=[seen])
    if torch.distributed.get_rank() == 0:
        torch.save(seen.found, folder / "gradients.pt")


if __name__ == "__main__":
    folder, task, data, settings = sys.argv[1:]
    tasks = {"gradients": gradients, "noise": noise}
    tasks[task](Path(folder), DATA[data], FitSettings.load(json.loads(settings)))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
