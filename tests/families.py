"""Families of models times operators: every pair is run on a tiny model, and the outcome becomes a page of the docs.

python tests/families.py --out docs/families.md --json results/families.json

Of every pair: replace all linear layers (under a context manager where the operator reads a context), forward,
backward and a step, generate, save, load in another process, the same logits and the same tokens there.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import relinear
from relinear.contract.operator import OperatorConfig
from relinear.operators import CCL, HDPL, ContextManager, LowRank, Monarch, Rotor, Transponder
from relinear.surgery.plan import attach_, replace_
from relinear.system.files import write_json, write_text
from tiny_models import ENCODER_DECODERS, FAMILIES, MORE_DECODERS, VOCABULARY, make_family

__all__ = ["COMMAND", "FAILED", "MADE", "OK", "OPERATORS", "REFUSED", "failures", "page", "run"]

COMMAND = "python tests/families.py --out docs/families.md --json results/families.json"
OK, REFUSED, FAILED = "ok", "refused", "FAILED"
_CONTEXT = 8
#: of sizes that suit the tiny models' layers
OPERATORS: dict[str, OperatorConfig] = {
    "LowRank": LowRank(rank=4),
    "HDPL": HDPL(rank=4, blocks=4),
    "Monarch": Monarch(blocks=4),
    "Rotor": Rotor(),
    "Transponder": Transponder(rank=2),
    "CCL": CCL(rank=4, context_dim=_CONTEXT),
}
#: the families of the table, by the model type of their configs
MADE = (*FAMILIES, *MORE_DECODERS, *ENCODER_DECODERS)
#: largest difference of logits that counts as none, as a share of the largest logit
TOLERANCE = 1e-6
_NEW_TOKENS = 4
_IDS = torch.randint(1, VOCABULARY, (2, 7), generator=torch.Generator().manual_seed(1))
_PACKAGE = Path(relinear.__file__).parent
_MESSAGE = 240  # characters of a refusal that the page shows

#: The program that loads: it knows the checkpoints' folders, the classes and the inputs, and imports relinear.
_ELSEWHERE = """
import json, sys
from pathlib import Path

import relinear
import torch
import transformers
from safetensors.torch import load_file, save_file

for folder in map(Path, json.loads(sys.stdin.read())):
    asked = json.loads((folder / "asked.json").read_text())
    try:
        model = getattr(transformers, asked["class"]).from_pretrained(folder / "model")
        inputs = load_file(folder / "inputs.safetensors")
        with torch.no_grad():
            answer = {"logits": model(**inputs, use_cache=False).logits}
        answer["tokens"] = model.generate(inputs["input_ids"], **asked["generate"])
        save_file({name: tensor.contiguous() for name, tensor in answer.items()}, folder / "answer.safetensors")
    except Exception as error:
        (folder / "error.txt").write_text(f"{type(error).__name__}: {error}")
"""


def run(families: Iterable[str] = MADE, operators: Iterable[str] = tuple(OPERATORS)) -> dict[str, Any]:
    """Run every pair and return the record that `page` prints; one other process loads all the checkpoints.

    Raises ValueError at a name that is not known, before anything has run.
    """
    families, operators = list(families), list(operators)
    for given, known in ((families, MADE), (operators, OPERATORS)):
        if unknown := [name for name in given if name not in known]:
            raise ValueError(f"unknown: {', '.join(unknown)}; expected names of {', '.join(known)}")
    cells: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        for family in families:
            cells[family] = {name: _here(family, name, Path(temporary, family, name)) for name in operators}
            print(f"{family}: {', '.join(cell['status'] for cell in cells[family].values())}", file=sys.stderr)
        saved = [Path(temporary, f, name) for f in families for name in operators if cells[f][name]["status"] == OK]
        _load_elsewhere(saved)
        for folder in saved:
            cells[folder.parent.name][folder.name] |= _compare(folder)
    return {
        "command": COMMAND,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "tolerance": TOLERANCE,
        "operators": {name: repr(OPERATORS[name]) for name in operators},
        "families": cells,
    }


def failures(record: Mapping[str, Any]) -> list[str]:
    """The pairs that failed, each with the step and the message."""
    return [
        f"{family} x {name}, {cell['step']}: {cell['message']}"
        for family, cells in record["families"].items()
        for name, cell in cells.items()
        if cell["status"] == FAILED
    ]


# One pair


def _here(family: str, name: str, folder: Path) -> dict[str, Any]:
    """All that happens before another process loads: a cell of the record, and the checkpoint in ``folder``."""
    cell: dict[str, Any] = {"status": OK}
    step = "build"
    try:
        model = make_family(family)
        cell["class"] = type(model).__name__
        step = "replace"
        fresh = _operate(model, OPERATORS[name], cell)
        step = "forward"
        inputs = {"input_ids": _IDS} | ({"decoder_input_ids": _IDS} if model.config.is_encoder_decoder else {})
        _check_finite({"logits": model(**inputs, use_cache=False).logits})
        step = "backward"
        _train_step(model, inputs, fresh)
        step = "generate"
        settings = {"max_new_tokens": _NEW_TOKENS, "min_new_tokens": _NEW_TOKENS, "do_sample": False, "pad_token_id": 0}
        cached, plain = _generate(model, settings)
        with torch.no_grad():
            logits = model(**inputs, use_cache=False).logits
        if not torch.equal(cached, plain):
            if _cache_is_exact(family, inputs, settings):
                raise AssertionError(f"tokens with a cache {cached.tolist()}, without {plain.tolist()}")
            cell["note"] = "tokens with a cache differ from those without, and do so in the stock model"
        step = "save"
        model.save_pretrained(folder / "model")
        seq2seq = model.config.is_encoder_decoder
        auto = "AutoModelForSeq2SeqLM" if seq2seq else "AutoModelForCausalLM"
        write_json(folder / "asked.json", {"class": auto, "generate": settings | {"use_cache": True}})
        save_file({key: value.clone() for key, value in inputs.items()}, folder / "inputs.safetensors")
        save_file({"logits": logits.contiguous(), "tokens": cached}, folder / "expected.safetensors")
    except Exception as error:  # whatever a family or an operator raises belongs into the table
        cell |= {"status": _status(step, error), "step": step, "message": f"{error}"}
        if cell["status"] == FAILED:
            cell["message"] = f"{type(error).__name__}: {error}"
    return cell


def _status(step: str, error: Exception) -> str:
    """Refused is what relinear itself turns down in words when it replaces or at the first pass; the rest failed."""
    source = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
    in_words = step in ("replace", "forward") and isinstance(error, ValueError) and source.is_relative_to(_PACKAGE)
    return REFUSED if in_words else FAILED


def _operate(model: nn.Module, operator: OperatorConfig, cell: dict[str, Any]) -> dict[str, nn.Parameter]:
    """Put the operator in place of all linear layers; note in ``cell`` what was left; the new parameters by name."""
    before = {id(p) for p in model.parameters()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what "all-linear" leaves: the table says it
        if getattr(operator, "context_dim", None):
            attach_(model, ContextManager(dim=_CONTEXT))
        table = replace_(model, {"all-linear": operator})
    cell["layers"] = table.coverage.replaced_layers
    cell["left"] = {entry.reason: len(entry.names) for entry in table.coverage.skipped}
    return {name: p for name, p in model.named_parameters() if id(p) not in before}


def _train_step(model: nn.Module, inputs: dict[str, Tensor], fresh: dict[str, nn.Parameter]) -> None:
    """Check the gradients of all new parameters, and take one step, so that no weight is as it was initialised."""
    model.train()
    model(**inputs, labels=_IDS, use_cache=False).loss.backward()
    gradients = {name: p.grad for name, p in fresh.items() if p.grad is not None}
    if missing := fresh.keys() - gradients.keys():
        raise AssertionError(f"no gradient in {', '.join(sorted(missing))}")
    _check_finite(gradients)
    torch.optim.AdamW(model.parameters(), lr=1e-2).step()
    model.eval()


def _generate(model: Any, settings: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Greedy tokens with a cache and without."""
    cached, plain = (model.generate(_IDS, **settings, use_cache=cache).contiguous() for cache in (True, False))
    return cached, plain


def _cache_is_exact(family: str, inputs: dict[str, Tensor], settings: dict[str, Any]) -> bool:
    """Whether a stock model of the family, after the same step, generates the same with a cache as without."""
    model = make_family(family)
    _train_step(model, inputs, {})
    return torch.equal(*_generate(model, settings))


def _check_finite(tensors: Mapping[str, Tensor]) -> None:
    if wrong := [name for name, tensor in tensors.items() if not torch.isfinite(tensor).all()]:
        raise AssertionError(f"not finite: {', '.join(wrong)}")


# The other process


def _load_elsewhere(folders: list[Path]) -> None:
    """One fresh Python process answers for all checkpoints: logits and tokens, or what went wrong, beside each."""
    if not folders:
        return
    path = os.pathsep.join([str(_PACKAGE.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-c", _ELSEWHERE],
        input=json.dumps([str(folder) for folder in folders]),
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"the process that loads ended with {done.returncode}: {done.stderr[-1000:]}")


def _compare(folder: Path) -> dict[str, Any]:
    """What the other process answered, held against what was computed before saving."""
    error = folder / "error.txt"
    if error.is_file():
        return {"status": FAILED, "step": "load", "message": error.read_text(encoding="utf-8")}
    expected, answer = (load_file(folder / f"{name}.safetensors") for name in ("expected", "answer"))
    largest = expected["logits"].abs().max().item()
    difference = (answer["logits"] - expected["logits"]).abs().max().item() / largest
    if not difference <= TOLERANCE:
        return {"status": FAILED, "step": "equal logits", "message": f"they differ by {difference:.1e} of the largest"}
    if not torch.equal(answer["tokens"], expected["tokens"]):
        return {"status": FAILED, "step": "generate elsewhere", "message": "other tokens"}
    return {"logits_difference": difference}


# The page


def page(record: Mapping[str, Any]) -> str:
    """The page of the docs for a record of `run`, in Markdown."""
    operators, families = record["operators"], record["families"]
    notes: dict[str, int] = {}
    whole = [family for family, cells in families.items() if _is_whole(cells)]
    rows = [
        f"| `{family}` | {_layers(cells, notes)} | {_working(cells, notes)} | {_not_working(cells, notes)} |"
        for family, cells in families.items()
        if family not in whole
    ]
    states = [cell["status"] for cells in families.values() for cell in cells.values()]
    counts = f"{states.count(OK)} pairs work, {states.count(REFUSED)} are refused, {states.count(FAILED)} {FAILED}"
    lines = [
        "# Families of models",
        "",
        "![One operator's code serves every family of models](pictures/guide-families.svg)",
        "",
        f"Six operators ({', '.join(operators)}), each in every linear layer of a tiny model of each family:",
        f"{counts}.",
        "",
        f"**All six work in all linear layers of** {', '.join(f'`{name}`' for name in whole)} (each a `model_type`).",
        "",
        "The others; numbers in brackets are notes:",
        "",
        "| family | layers replaced | works | refused |",
        "| --- | --- | --- | --- |",
        *rows,
        "",
        "- **works**: the model trains one step and generates four tokens, with a cache and without. Saved and loaded",
        f"  in another process, it gives the same tokens, and the same logits within {record['tolerance']:.0e}.",
        "- **refused**: `attach_`, `replace_` or the first pass raises an error that says why.",
        "",
        'Experts stored as one tensor become layers by `relinear.attach_(model, "separate_experts")`;',
        "`relinear.compress` does this for you.",
    ]
    if notes:
        lines += ["", "## Notes", "", *(f"{n}. {text}" for text, n in notes.items())]
    lines += [
        "",
        "## Run it again",
        "",
        f"`make families` makes this page. Last run: {record['date']}, torch {record['torch']}, transformers "
        f"{record['transformers']}. Settings are in `results/families.json`.",
        "",
        "<!-- not run (minutes): every operator in a model of every family -->",
        "```sh",
        record["command"],
        "```",
    ]
    return "\n".join(lines) + "\n"


def _is_whole(cells: Mapping[str, Any]) -> bool:
    """Whether every operator took the place of every linear layer but the head, without a note."""
    return all(cell["status"] == OK and "note" not in cell for cell in cells.values()) and not _left(cells)


def _left(cells: Mapping[str, Any]) -> list[str]:
    """The layers that stayed as they were, beside the output head, and why."""
    seen = next((cell["left"] for cell in cells.values() if "left" in cell), {})
    return [f"{n} not replaced: {reason}" for reason, n in seen.items() if reason not in _HEADS]


def _layers(cells: Mapping[str, Any], notes: dict[str, int]) -> str:
    seen = next((cell for cell in cells.values() if "layers" in cell), None)
    if seen is None:
        return "none"
    numbers = [notes.setdefault(reason, len(notes) + 1) for reason in _left(cells)]
    return f"{seen['layers']} ({', '.join(map(str, numbers))})" if numbers else str(seen["layers"])


#: reasons that concern the output head, which "all-linear" always leaves
_HEADS = ("output head", "tied to the embedding")


def _working(cells: Mapping[str, Any], notes: dict[str, int]) -> str:
    working = [name for name, cell in cells.items() if cell["status"] == OK]
    noted = sorted({_number(cell, notes) for cell in cells.values() if cell["status"] == OK and "note" in cell})
    names = f"all {len(cells)}" if len(working) == len(cells) else ", ".join(working) or "none"
    if 1 < len(working) < len(cells):
        names = f"all but {', '.join(name for name in cells if name not in working)}"
    return f"{names} ({', '.join(map(str, noted))})" if noted else names


def _not_working(cells: Mapping[str, Any], notes: dict[str, int]) -> str:
    others = {name: cell for name, cell in cells.items() if cell["status"] != OK}
    failed = {name: f" {FAILED}" * (cell["status"] == FAILED) for name, cell in others.items()}
    return ", ".join(f"{name}{failed[name]} ({_number(cell, notes)})" for name, cell in others.items()) or "–"


def _number(cell: Mapping[str, Any], notes: dict[str, int]) -> int:
    text = {OK: cell.get("note"), REFUSED: cell.get("message")}.get(
        cell["status"], f"{cell.get('step')}: {cell.get('message')}"
    )
    text = " ".join(text.split()).partition("; ")[0]  # without the advice
    text = text if len(text) <= _MESSAGE else f"{text[:_MESSAGE].rstrip()} ..."
    return notes.setdefault(text, len(notes) + 1)


def main(arguments: list[str] | None = None) -> int:
    """The command; returns the exit status, 1 where a pair failed."""
    parser = argparse.ArgumentParser(prog="python tests/families.py", description=__doc__)
    parser.add_argument("--out", required=True, help="page to write, for instance docs/families.md")
    parser.add_argument("--json", required=True, help="record to write, for instance results/families.json")
    parser.add_argument("--families", default=",".join(MADE), help="model types, with commas; default: all")
    parser.add_argument("--operators", default=",".join(OPERATORS), help="operators, with commas; default: all")
    given = parser.parse_args(arguments)
    try:
        record = run(given.families.split(","), given.operators.split(","))
    except ValueError as error:
        parser.error(str(error))
    write_json(given.json, record)
    write_text(given.out, page(record))
    for failure in failures(record):
        print(failure, file=sys.stderr)
    return 1 if failures(record) else 0


if __name__ == "__main__":
    sys.exit(main())
