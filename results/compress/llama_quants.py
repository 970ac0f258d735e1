"""A Llama in llama.cpp's own types, by its own programs with its importance matrix: files for frontier.py to judge.

    python results/compress/llama_quants.py models/smollm2-rotated --calibrate TEXT [TEXT ...] --programs DIR \\
        --types Q8_0 Q4_K_M IQ3_S --out runs/llama-quants/smollm2-rotated
    python results/compress/frontier.py models/smollm2-rotated ... --gguf runs/llama-quants/smollm2-rotated \\
        --rows llama.cpp:Q8_0 llama.cpp:Q4_K_M llama.cpp:IQ3_S

DIR holds ``llama-imatrix`` and ``llama-quantize``. The matrix is of the tokens that calibrate frontier.py's other rows,
in the same windows: their text, if its tokens are the same again, or nothing is written. "TYPE+down=TYPE" gives the
layers of one name a type of their own, by ``--tensor-type``. Embedding and head stay in half precision. A row of
weights must be a multiple of a type's block, of 256 in most; llama-quantize takes another type where it is not.
"""

from __future__ import annotations

import argparse
import subprocess
from pathlib import Path

import relinear
from frontier import texts
from relinear.compression import CompressSettings, export_gguf
from relinear.compression.corpus import read_corpus
from relinear.data.tokenizers import load_tokenizer


def main() -> None:
    """Write the model, the text and its matrix, then a file for each type; those that are there stay."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--calibrate", nargs="+", required=True, metavar="TEXT")
    parser.add_argument("--programs", type=Path, required=True, metavar="DIR")
    parser.add_argument("--types", nargs="+", required=True)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--seed", type=int, default=0, help="of the excerpts that calibrate")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    source, text, matrix = (given.out / name for name in ("source.gguf", "text.txt", "imatrix.gguf"))
    tokenizer = load_tokenizer(given.model)
    settings = CompressSettings(tokens=given.tokens, seed=given.seed, evaluate=False)
    corpora = {Path(path).parent.name: texts(path) for path in given.calibrate}
    blocks = read_corpus(corpora, tokenizer, settings, plan_only=True).blocks
    told = "".join(tokenizer.decode(ids, clean_up_tokenization_spaces=False) for ids in blocks.tolist())
    if tokenizer(told, add_special_tokens=False)["input_ids"] != blocks.flatten().tolist():
        raise SystemExit("the text of these excerpts has other tokens")

    def call(program: str, *arguments: object) -> None:
        subprocess.run([given.programs / program, *map(str, arguments)], check=True)

    if not matrix.exists():
        export_gguf(relinear.from_pretrained(given.model), source, tokenizer=tokenizer)
        text.write_bytes(told.encode())
        call("llama-imatrix", "-m", source, "-f", text, "-o", matrix, "-c", blocks.shape[1], "--parse-special", "-t", 1)
    for name in given.types:
        kind, *own = name.split("+")
        own = [part for one in own for part in ("--tensor-type", one.replace("down", "ffn_down"))]
        kept = ("--token-embedding-type", "f16", "--output-tensor-type", "f16")
        if not (path := given.out / f"{name}.gguf").exists():
            call("llama-quantize", "--imatrix", matrix, *kept, *own, source, path, kind, 1)


if __name__ == "__main__":
    main()
