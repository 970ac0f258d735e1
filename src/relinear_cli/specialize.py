"""``relinear specialize``: make a stock GPT-2 from a Contextually Guided Transformer and a prefix."""

from pathlib import Path

import typer

from relinear_cli import options


def command(
    model: Path = typer.Argument(exists=True, help="Directory of a saved CGTForCausalLM.", metavar="DIR"),
    prefix_file: Path = typer.Option(
        ..., "--prefix-file", exists=True, help="UTF-8 text to specialise to.", metavar="FILE"
    ),
    out: Path = typer.Option(..., "--out", help="Where the GPT-2 and its tokenizer are written.", metavar="DIR"),
    tokenizer: options.Tokenizer = None,
    first_position: int = typer.Option(
        0, help="Position of the first token after the prefix; -1 continues after the prefix."
    ),
) -> None:
    """Read a prefix once and write what the model becomes: a stock GPT-2 that needs neither the prefix nor relinear.

    Prints the largest difference between its logits and those of the model with its context frozen.

    **Example:** `relinear specialize runs/cgt/model --prefix-file prompt.txt --out runs/specialized`
    """
    from relinear.hf.vocabulary import check_tokenizer_fits
    from relinear.models.cgt import CGTForCausalLM
    from relinear.models.cgt.specialize import specialize
    from relinear.surgery.checkpoint import save_pretrained
    from relinear.system.files import read_text

    if out.resolve() == model.resolve():
        raise ValueError(f"{out} is the model that is read, and would be replaced; choose another --out")
    prefix = read_text(prefix_file)
    import torch

    loaded = options.load_model(str(model), presets=False)
    if not isinstance(loaded, CGTForCausalLM):  # relinear.specialize also takes models of vectors
        raise ValueError(f"{model} is no CGT of text; only a relinear.CGTForCausalLM can be specialised here")
    model_tokenizer = options.load_model_tokenizer(str(model), tokenizer)
    ids = torch.tensor(model_tokenizer(prefix)["input_ids"], dtype=torch.long)
    if not len(ids):
        raise ValueError(f"{prefix_file} has no text")
    check_tokenizer_fits(model_tokenizer, loaded)
    position = len(ids) if first_position == -1 else first_position
    stock = specialize(loaded, ids, first_position=position)

    probe = ids[None, : stock.config.n_positions]
    with torch.no_grad():
        frozen = loaded.context(ids[None])[:, -1]
        positions = torch.arange(position, position + probe.shape[1])[None]
        expected = loaded(probe, frozen_context=frozen, position_ids=positions).logits
        difference = (stock(probe).logits - expected).abs().max().item()
    save_pretrained(stock, out, tokenizer=model_tokenizer)
    before, after = (sum(p.numel() for p in m.parameters()) for m in (loaded, stock))
    print(f"read {len(ids)} tokens; GPT-2 with {after:,} of {before:,} parameters written to {out}")
    print(f"largest logit difference from the frozen model: {difference:.1e}")
