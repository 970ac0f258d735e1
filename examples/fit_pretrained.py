"""Replace projections of a pretrained model by their best low-rank fits, and see what it costs.

    make smollm2
    python examples/fit_pretrained.py models/smollm2 wiki.test.txt --ranks 576 256 64

Prints the perplexity of the stock model, then for each rank that of the model with the chosen projections replaced,
folds the last one back into plain layers, and saves it as a stock checkpoint if --out is given.
"""

import argparse
import copy
from pathlib import Path

import torch
from transformers import AutoTokenizer

import relinear


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="directory or Hub name")
    parser.add_argument("text", type=Path, help="a text file to evaluate on")
    parser.add_argument("--pattern", default="up_proj", help="which projections (as in relinear.replace_)")
    parser.add_argument("--ranks", type=int, nargs="+", default=[64])
    parser.add_argument("--max-tokens", type=int, default=8192)
    parser.add_argument("--out", type=Path, help="where to save the folded model")
    arguments = parser.parse_args()

    relinear.system.allocator.tune_allocator()
    model = relinear.from_pretrained(arguments.model, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    text = arguments.text.read_text(encoding="utf-8")

    def evaluate(candidate):
        return relinear.perplexity(
            candidate, text, tokenizer, sequence_length=1024, max_tokens=arguments.max_tokens, batch_size=2
        )

    stock = evaluate(model)
    print(f"stock: loss {stock.loss:.4f}, perplexity {stock.perplexity:.3f} on {stock.tokens:,} tokens")
    for rank in arguments.ranks:
        fitted = copy.deepcopy(model)
        report = relinear.replace_(fitted, {arguments.pattern: relinear.LowRank(rank=rank)}, init="from_weight")
        result = evaluate(fitted)
        print(
            f"{arguments.pattern} at rank {rank}: loss {result.loss:.4f} ({result.loss - stock.loss:+.4f}), "
            f"perplexity {result.perplexity:.3f}, {report.parameters / report.parameters_before:.1%} of the parameters"
        )
    relinear.fold_(fitted)
    if arguments.out:
        print(f"saved: {relinear.save_pretrained(fitted, arguments.out, tokenizer=tokenizer)}")


if __name__ == "__main__":
    main()
