"""What each rank of the distributed test runs (see test_train_gradients.py)."""

import json
import sys
from pathlib import Path

import torch

from relinear.train import FitSettings, fit
from train_helpers import Gradients, Tokens, probe_model

if __name__ == "__main__":
    folder, settings = Path(sys.argv[1]), FitSettings.load(json.loads(sys.argv[2]))
    seen = Gradients()
    fit(probe_model("llama"), (Tokens(), Tokens(seed=1)), settings, callbacks=[seen])
    if torch.distributed.get_rank() == 0:
        torch.save(seen.found, folder / "gradients.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
