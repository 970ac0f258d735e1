"""TRL's SFTTrainer on the checkpoint ``sys.argv[1]``: loss before training, two steps, a save, a load."""

import json
import sys
import tempfile

import trl
from datasets import Dataset
from transformers import AutoModelForCausalLM

folder, flag = sys.argv[1], json.loads(sys.argv[2])
with tempfile.TemporaryDirectory() as out:
    settings = trl.SFTConfig(
        output_dir=out,
        max_steps=2,
        per_device_train_batch_size=2,
        per_device_eval_batch_size=2,
        max_length=32,
        report_to=[],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        save_strategy="no",
        model_init_kwargs=flag,
    )
    texts = Dataset.from_dict({"text": ["one line of text", "another line of it", "a third one", "and a fourth"]})
    trainer = trl.SFTTrainer(model=folder, args=settings, train_dataset=texts, eval_dataset=texts)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    after = trainer.evaluate()["eval_loss"]
    trainer.save_model(out)
    again = AutoModelForCausalLM.from_pretrained(out, **flag)
    same = all(
        a.equal(b) for a, b in zip(trainer.model.state_dict().values(), again.state_dict().values(), strict=True)
    )
print(json.dumps({"version": trl.__version__, "value": round(before, 5), "learns": after < before, "reloads": same}))
