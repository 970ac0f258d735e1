"""PEFT's LoRA on the checkpoint ``sys.argv[1]``: the layers left dense get adapters; saved, loaded and merged."""

import json
import sys
import tempfile

import peft
import torch
from transformers import AutoModelForCausalLM

folder, flag = sys.argv[1], json.loads(sys.argv[2])
ids = torch.arange(1, 17).unsqueeze(0)
model = AutoModelForCausalLM.from_pretrained(folder, **flag)
value = model(ids, labels=ids).loss.item()
adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["o_proj"], r=2, init_lora_weights=False)).eval()
with tempfile.TemporaryDirectory() as out, torch.no_grad():
    logits = adapted(ids).logits
    adapted.save_pretrained(out)
    again = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder, **flag), out)
    same = torch.equal(again(ids).logits, logits)
    merged = again.merge_and_unload()
    merged.save_pretrained(f"{out}/merged")
    loaded = AutoModelForCausalLM.from_pretrained(f"{out}/merged", **flag)
    same = same and torch.allclose(loaded(ids).logits, logits, atol=1e-5)
print(json.dumps({"version": peft.__version__, "value": round(value, 5), "reloads": same}))
