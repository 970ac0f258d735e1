"""What each rank of the distributed test runs (see test_train_gradients.py)."""

import json
import sys
from pathlib import Path

import torch

from relinear.train import FitSettings, fit
from train_helpers import DATA, Gradients, probe_model

if __name__ == "__main__":
    folder, data, settings = Path(sys.argv[1]), DATA[sys.argv[2]], FitSettings.load(json.loads(sys.argv[3]))
    seen = Gradients()
    fit(probe_model("llama"), (data(), data(seed=1)), settings, callbacks=[seen])
    if torch.distributed.get_rank() == 0:
        torch.save(seen.found, folder / "gradients.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
