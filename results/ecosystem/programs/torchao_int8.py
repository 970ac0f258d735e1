"""torchao's int8 weights on the checkpoint ``sys.argv[1]``: what is ``nn.Linear`` is quantised, operators stay."""

import json
import sys

import torch
import torchao
from torchao.quantization import Int8WeightOnlyConfig, quantize_
from transformers import AutoModelForCausalLM

folder, flag = sys.argv[1], json.loads(sys.argv[2])
ids = torch.arange(1, 17).unsqueeze(0)
model = AutoModelForCausalLM.from_pretrained(folder, **flag)
with torch.no_grad():
    value, logits = model(ids, labels=ids).loss.item(), model(ids).logits
    quantize_(model, Int8WeightOnlyConfig())
    quantized = sum(type(m.weight) is not torch.nn.Parameter for m in model.modules() if type(m) is torch.nn.Linear)
    off = float((model(ids).logits - logits).norm() / logits.norm())
found = {"version": torchao.__version__, "value": round(value, 5), "quantised": quantized, "off": f"{off:.4f}"}
print(json.dumps(found | {"close": 0 < off < 0.05}))
