"""Damage what a compression keeps, and run its command again: 200 times, counted by what came of it.

    python results/reliability/damage.py --out results/reliability/damage.json

A tiny Llama is compressed once, with measured points and healing. Each time one kept file is cut, zeroed, removed or
has a bit turned. The command is then to refuse in words (exit 2), or to end with the same plan and weights (exit 0): of
what it can measure again, of what it does not read, and of bits that say nothing. Anything else is a failure.
"""

import argparse
import io
import random
import shutil
import tempfile
from collections import Counter
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import torch
from safetensors.torch import load_file

import relinear
from relinear.data.tokenizers import byte_tokenizer
from relinear.system.files import read_json, write_json
from relinear.system.machine import describe_machine
from relinear_cli.main import main as command

CASES = 200
SETTINGS = ("tokens=512", "sequence_length=16", "batch_size=4", "heal_tokens=128", "evaluate=false")


def damaged(content: bytes, kind: str, rng: random.Random) -> bytes | None:
    """Contents of a file that something happened to; None where it is gone."""
    if kind == "removed":
        return None
    if kind == "cut":
        return content[: rng.randrange(len(content))]
    if kind == "zeroed":
        return bytes(len(content))
    turned = bytearray(content)
    turned[rng.randrange(len(turned))] ^= 1 << rng.randrange(8)
    return bytes(turned)


def main() -> None:
    """Damage, run, count and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    torch.manual_seed(0)
    rng, counts = random.Random(0), Counter[str]()
    with tempfile.TemporaryDirectory() as place:
        home = Path(place)
        model = relinear.from_preset("tiny", num_hidden_layers=2)
        relinear.save_pretrained(model, home / "model", tokenizer=byte_tokenizer())
        words = [f"word{rng.randrange(300)}" for _ in range(4000)]
        (home / "text.txt").write_text(" ".join(words))
        good, bad = home / "good", home / "bad"

        def run(folder: Path) -> tuple[int, str]:
            said = io.StringIO()
            options = [text for setting in SETTINGS for text in ("--set", setting)]
            options += ["--bits", "4.25", "--target", "down_proj", "--data", str(home / "text.txt")]
            with redirect_stdout(said), redirect_stderr(said):
                code = command(["compress", str(home / "model"), *options, "--out", str(folder)])
            return code, said.getvalue()

        def made(folder: Path) -> tuple:
            weights = load_file(next((folder / "model").glob("*.safetensors")))
            return read_json(folder / "plan.json"), {name: value.tolist() for name, value in weights.items()}

        code, said = run(good)
        assert code == 0, said
        wanted = made(good)
        for own in ("model", "report.json", "report.html", "plan.json"):  # what a run writes anew
            path = good / own
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        files = sorted(path.relative_to(good) for path in good.rglob("*") if path.is_file() and path.stat().st_size)
        files = [path for path in files if "lock" not in path.name]
        for number in range(CASES):
            file, kind = rng.choice(files), ("cut", "zeroed", "removed", "bit turned")[number % 4]
            shutil.copytree(good, bad)
            after = damaged((bad / file).read_bytes(), kind, rng)
            (bad / file).unlink() if after is None else (bad / file).write_bytes(after)
            code, said = run(bad)
            alike = code == 0 and made(bad) == wanted
            outcome = "refused in words" if code == 2 else "the same plan and weights" if alike else "failed"
            if "Traceback" in said or outcome == "failed":
                outcome = f"failed: {file}, {said[-300:]}"
            counts[f"{kind}: {outcome}"] += 1
            shutil.rmtree(bad)
    print(dict(counts))
    record = {"command": "python results/reliability/damage.py --out results/reliability/damage.json"}
    write_json(
        given.out, record | {"counts": dict(sorted(counts.items())), "files": len(files), "machine": describe_machine()}
    )


if __name__ == "__main__":
    main()
