"""Programs that know nothing of relinear, on a checkpoint with operators: refused without the flag, the same with it.

No process here that runs such a program imports relinear itself; the package is installed, and the checkpoint's own
loader imports it. Each program runs without ``trust_remote_code=True`` (it has to be refused) and with it; what it
computes then is held against the same figure from a process that has imported relinear.

    python results/ecosystem/outside_programs.py

writes ``outside_programs.json`` beside this file, the table and the outputs in
``docs/ecosystem.md``. Needs lm-eval, peft, torchao and trl (the extra ``ecosystem``).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
DOCS = HERE.parents[1] / "docs"
FLAG = {"trust_remote_code": True}
TASK = """task: relinear_lines
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: bits_per_byte}]
metadata: {version: 1}
"""
LM_EVAL = {
    "command": "lm_eval --model hf --model_args pretrained=DIR{flag},dtype=float32 --tasks relinear_lines",
    "does": "bits per byte of a small task",
}
PROGRAMS = {
    "transformers pipeline": ("pipeline.py", "`pipeline('text-generation', model=DIR{flag})` writes the same text"),
    "TRL SFTTrainer": ("trl_sft.py", "`SFTTrainer(model=DIR)`: loss before, two steps, saved and loaded again"),
    "PEFT LoRA": ("peft_lora.py", "adapters on the dense layers: saved, loaded, merged, saved and loaded"),
    "transformers Trainer": ("stock_trainer.py", "five steps with auxiliary losses and accumulation, saved and loaded"),
    "torchao": ("torchao_int8.py", "int8 weights in place of those that are `nn.Linear`'s"),
    "torch.export": ("torch_export.py", "exported for any number of tokens, run on more than it saw"),
}


def make_checkpoint(folder: Path) -> None:
    """A small Llama of random weights with five operators, a context and a residual method, with a byte tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    import relinear
    from relinear.data.tokenizers import load_tokenizer

    torch.manual_seed(0)
    tokenizer = load_tokenizer("bytes")
    tokenizer.pad_token = tokenizer.eos_token
    config = LlamaConfig(vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
                         num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=256)  # fmt: skip
    model = LlamaForCausalLM(config)
    operators = {
        "q_proj": relinear.LowRank(rank=8),
        "k_proj": relinear.Monarch(blocks=4),
        "v_proj": relinear.Rotor(),
        "up_proj": relinear.HDPL(rank=8, blocks=4),
        "gate_proj": relinear.Transponder(rank=4),
    }
    relinear.attach_(model, "rezero")
    relinear.replace_(model, operators)
    for name, parameter in model.named_parameters():
        if "relinear_" in name:
            torch.nn.init.constant_(parameter, 0.5)  # blocks that start at zero would hide what is in them
    relinear.save_pretrained(model.eval(), folder, tokenizer=tokenizer)


def run(command: list[str], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run ``command`` without a terminal, which transformers would ask for its trust."""
    return subprocess.run(
        command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=900, check=False
    )


def refusal(done: subprocess.CompletedProcess[str]) -> str | None:
    """The last line of the error if the program was refused because of the missing flag; None if it ran or fell."""
    lines = [line.strip() for line in done.stderr.splitlines() if "trust_remote_code=True" in line]
    return lines[-1] if done.returncode and lines else None


def last_json(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """What a program printed last; ends everything if it failed."""
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        raise SystemExit(f"{done.args} failed:\n{done.stderr[-3000:]}")
    return json.loads(lines[-1])


def script(name: str, folder: Path, flag: dict[str, Any], environment: dict[str, str], *, known: bool = False) -> Any:
    """Run a program; ``known``: in a process that has imported relinear first, as the reference."""
    program = str(HERE / "programs" / name)
    start = f"import runpy, sys; sys.argv = sys.argv[1:]; {'import relinear; ' if known else ''}"
    code = start + "runpy.run_path(sys.argv[0], run_name='__main__')"
    return run([sys.executable, "-c", code, program, str(folder), json.dumps(flag)], environment)


def lm_eval(
    folder: Path, scratch: Path, flag: dict[str, Any], environment: dict[str, str], *, known: bool = False
) -> Any:
    """lm-eval's own command, with the task in a folder of its own."""
    tasks = scratch / "tasks"
    tasks.mkdir(exist_ok=True)
    lines = scratch / "lines.jsonl"
    lines.write_text(
        "".join(json.dumps({"text": t}) + "\n" for t in ("one line of text", "another, longer line of it"))
    )
    (tasks / "relinear_lines.yaml").write_text(TASK.replace("FILE", str(lines)))
    model = f"pretrained={folder},dtype=float32" + "".join(f",{k}={v}" for k, v in flag.items())
    start = "import relinear; " if known else ""
    code = start + "import sys; from lm_eval.__main__ import cli_evaluate; sys.argv[0] = 'lm_eval'; cli_evaluate()"
    out = scratch / f"lm_eval_{len(flag)}_{known}"
    arguments = ["--model", "hf", "--model_args", model, "--tasks", "relinear_lines", "--include_path", str(tasks)]
    arguments += ["--device", "cpu", "--batch_size", "1", "--output_path", str(out)]
    done = run([sys.executable, "-c", code, *arguments], environment)
    if done.returncode == 0:
        result = json.loads(next(out.rglob("results_*.json")).read_text())
        value = result["results"]["relinear_lines"]["bits_per_byte,none"]
        version = result.get("lm_eval_version")
        shown = "\n".join(line for line in done.stdout.splitlines() if line.startswith("|"))
        done.stdout += "\n" + json.dumps({"version": version, "value": round(value, 6), "printed": shown})
    return done


def row(name: str, does: str, refused: Any, flagged: Any, known: Any) -> dict[str, Any]:
    """The record of one program, from its three runs (see ``WAYS``)."""
    got, expected = last_json(flagged), last_json(known)
    shown = got.pop("printed", None) or json.dumps(got)
    return {
        "program": name,
        "version": got.pop("version"),
        "does": does,
        "refused_without_flag": refusal(refused) is not None,
        "refusal": refusal(refused),
        "value": got["value"],
        "value_with_relinear_imported": expected["value"],
        "same": got["value"] == expected["value"],
        "printed": shown,
        **{key: value for key, value in got.items() if key != "value"},
    }


def table(rows: list[dict[str, Any]]) -> str:
    """``rows`` in Markdown."""
    lines = ["| program | without the flag | with it |", "| --- | --- | --- |"]
    for r in rows:
        with_flag = "the same figure" if r["same"] else f"{r['value']} for {r['value_with_relinear_imported']}"
        with_flag += "".join(f", {key}" for key in ("learns", "reloads", "close") if r.get(key))
        without = "refused" if r["refused_without_flag"] else "**not refused**"
        lines.append(f"| {r['program']} {r['version']} | {without} | {with_flag} |")
    return "\n".join(lines)


def printed(rows: list[dict[str, Any]]) -> str:
    """What every program printed last, and its refusal, in Markdown."""
    parts = []
    for r in rows:
        lines = [f"### {r['program']} {r['version']}", "", f"{r['does']}.", "", "```text", r["printed"], "```"]
        parts.append("\n".join([*lines, "", "Without the flag:", "", "```text", r["refusal"], "```"]))
    return "\n\n".join(parts)


def _write(page: str, mark: str, text: str) -> None:
    """Put ``text`` between the marks of a page."""
    path = DOCS / page
    marked = f"<!-- {mark} -->\n{text}\n<!-- end -->"
    found = re.sub(rf"<!-- {mark} -->.*?<!-- end -->", lambda _: marked, path.read_text(encoding="utf-8"), flags=re.S)
    path.write_text(found, encoding="utf-8")


def main() -> None:
    """Run every program in every way; write the record and the table."""
    import torch
    import transformers

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/ecosystem"), help="folder; results/ecosystem: docs, too")
    out = parser.parse_args().out
    rows = []
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        folder = scratch / "model"
        make_checkpoint(folder)
        environment = os.environ | {"HF_MODULES_CACHE": str(scratch / "modules"), "HF_HUB_OFFLINE": "1"}
        environment |= {"HF_DATASETS_CACHE": str(scratch / "datasets"), "HF_DATASETS_OFFLINE": "1"}
        runs = [lm_eval(folder, scratch, flag, environment, known=known) for flag, known in WAYS]
        rows.append(row("lm-eval", LM_EVAL["does"], *runs))
        for program, (file, does) in PROGRAMS.items():
            runs = [script(file, folder, flag, environment, known=known) for flag, known in WAYS]
            rows.append(row(program, does.format(flag=", trust_remote_code=True"), *runs))
            print(rows[-1], flush=True)
    versions = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    record = {"command": "python results/ecosystem/outside_programs.py", "versions": versions, "programs": rows}
    out.mkdir(parents=True, exist_ok=True)
    (out / "outside_programs.json").write_text(json.dumps(record, indent=2) + "\n")
    print(table(rows))
    if out.resolve() == HERE:
        _write("ecosystem.md", "outside programs", table(rows))
        _write("ecosystem.md", "printed", printed(rows))
    if not all(r["same"] and r["refused_without_flag"] for r in rows):
        raise SystemExit("a program was not refused without the flag, or computed something else with it")


#: without the flag, with it, and in a process that has imported relinear
WAYS = [({}, False), (FLAG, False), ({}, True)]

if __name__ == "__main__":
    main()
