"""``torch.export`` of the checkpoint ``sys.argv[1]`` for any number of tokens; run on more tokens than it saw."""

import json
import sys

import torch
from transformers import AutoModelForCausalLM

folder, flag = sys.argv[1], json.loads(sys.argv[2])
model = AutoModelForCausalLM.from_pretrained(folder, **flag).eval()
ids = torch.arange(1, 41).unsqueeze(0)
tokens = {1: torch.export.Dim("tokens", min=2, max=64)}
with torch.no_grad():
    program = torch.export.export(
        model, (), {"input_ids": ids[:, :7], "use_cache": False},
        dynamic_shapes={"input_ids": tokens, "use_cache": None},
    )  # fmt: skip
    logits, expected = program.module()(input_ids=ids, use_cache=False).logits, model(ids, use_cache=False).logits
close = torch.allclose(logits, expected, atol=1e-5)
print(
    json.dumps({"version": torch.__version__, "value": round(float(expected.logsumexp(-1).mean()), 5), "close": close})
)
