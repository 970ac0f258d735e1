"""transformers' Trainer on the checkpoint ``sys.argv[1]``, whose HDPL layers have auxiliary losses: five steps."""

import json
import sys
import tempfile

import torch
import transformers
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

folder, flag = sys.argv[1], json.loads(sys.argv[2])
model = AutoModelForCausalLM.from_pretrained(folder, **flag)
rows = [{"input_ids": row, "labels": row} for row in torch.arange(1, 129).view(8, 16)]
with tempfile.TemporaryDirectory() as out:
    settings = TrainingArguments(
        out, max_steps=5, per_device_train_batch_size=2, gradient_accumulation_steps=2, learning_rate=1e-3,
        logging_steps=1, use_cpu=True, report_to="none", save_strategy="no",
    )  # fmt: skip
    trainer = Trainer(model, settings, train_dataset=rows, eval_dataset=rows)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    after = trainer.evaluate()["eval_loss"]
    batch = {key: torch.stack([row[key] for row in rows]) for key in rows[0]}
    with torch.no_grad():
        output = model.train()(**batch)
        plain = torch.nn.functional.cross_entropy(output.logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
    trainer.save_model(out)
    again = AutoModelForCausalLM.from_pretrained(out, **flag)
    same = all(a.equal(b) for a, b in zip(model.state_dict().values(), again.state_dict().values(), strict=True))
found = {"version": transformers.__version__, "value": round(before, 5), "after": round(after, 5)}
found |= {"auxiliary": f"{float(output.loss - plain):.5f}", "learns": after < before, "reloads": same}
print(json.dumps(found))
