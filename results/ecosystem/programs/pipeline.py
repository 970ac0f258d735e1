"""transformers' pipeline on the checkpoint ``sys.argv[1]``; prints what it wrote."""

import json
import sys

import transformers

folder, flag = sys.argv[1], json.loads(sys.argv[2])
generate = transformers.pipeline("text-generation", model=folder, **flag)
text = generate("two words", max_new_tokens=8, do_sample=False)[0]["generated_text"]
print(json.dumps({"version": transformers.__version__, "value": text}))
