"""A picture for every guide, readable in light and dark: what goes in, what happens and what comes out, as boxes."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence

__all__ = ["PICTURES", "large_models", "picture"]

WIDTH, HEIGHT, GAP, HEAD, MARGIN = 146, 52, 24, 22, 2
_STYLE = (
    "<style>.box{fill:#f6f8fa;stroke:#d1d9e0}.ours{fill:#0072B2;stroke:#0072B2}.other{fill:none;stroke:#D55E00}"
    "text{fill:#1f2328}.note,.head{fill:#59636e;font-size:12px}.in text,.in .note{fill:#fff}"
    "@media(prefers-color-scheme:dark){.box{fill:#151b23;stroke:#3d444d}text{fill:#f0f6fc}"
    ".note,.head{fill:#9198a1}.in text,.in .note{fill:#fff}}</style>"
)

#: guide -> what the picture shows, and its rows: what stands over one, and boxes as "label|note", with * before what is
#: relinear's and ! before what is refused; three at most, for a phone's sake. Where the words end in a colon, no arrows
PICTURES: dict[str, tuple[str, Sequence[tuple[str, Sequence[str]]]]] = {
    "surgery": (
        "Names choose layers, a plan is made and checked, then every layer is swapped at once",
        [
            ("before:", ["q_proj|Linear 576 → 576", "k_proj|Linear 576 → 192", "up_proj|Linear 576 → 1536"]),
            ('replace_(model, {"q_proj": HDPL(), "up_proj": Transponder()})', []),
            ("after:", ["*q_proj|HDPL", "k_proj|as it was", "*up_proj|Transponder"]),
        ],
    ),
    "checkpoints": (
        "A checkpoint is the files of a stock model, with the operators named in its config",
        [
            (
                "saved:",
                ["*config.json|layers and operators", "model.safetensors|all weights", "tokenizer.json|as it was"],
            ),
            ("loaded by:", ["from_pretrained|relinear or transformers", "trust_remote_code|without relinear"]),
        ],
    ),
    "training": (
        "A run goes from its settings to a model, and from any checkpoint on",
        [
            ("a run", ["settings|checked first", "*train|steps, evaluations", "model/|and metrics.jsonl"]),
            (
                "after a kill",
                ["checkpoints/|weights, data, noise", "*the same command|goes on", "model/|the same bits"],
            ),
        ],
    ),
    "compare": (
        "Entries are brought to one size, tuned, trained over seeds and put on one page",
        [
            ("for every entry", ["size|equal parameters", "tune|learning rate", "*train|every seed"]),
            ("for all:", ["gaps|with intervals", "speed|tokens a second", "report.html|table and figures"]),
        ],
    ),
    "distill": (
        "Inputs and outputs of a layer are recorded, an operator is fitted to them, then it takes the layer's place",
        [
            ("layer by layer", ["record|inputs and outputs", "*fit|operator to outputs", "swap|the next one sees it"]),
        ],
    ),
    "data": (
        "Text is split by documents, tokenised once and packed into rows without padding",
        [
            ("from:", ["stdlib|always there", "books/|files, folders", "owner/name|the Hub"]),
            ("to", ["split|by document", "tokens|kept in a cache", "*rows|of equal length"]),
        ],
    ),
    "evaluation": (
        "One model is judged by loss, by tasks and by what it writes",
        [
            ("relinear eval MODEL:", ["perplexity|of any text", "LAMBADA|the last word", "lm-eval|its tasks"]),
        ],
    ),
    "explore": (
        "A unit is shown by the texts that move it most, and can be set by hand",
        [
            ("look:", ["texts|coloured by a unit", "top tokens|and its histogram", "a random unit|beside it"]),
            ("change", ["slider|a unit's value", "*intervene|in every pass", "next token|what changes"]),
        ],
    ),
    "latents": (
        "Between a layer's basis and its output a latent can be read, clamped, replaced or added to",
        [
            ("a layer with a rank", ["x|I inputs", "*latent|R numbers", "y|O outputs"]),
            ("intervene:", ["Clamp|to a range", "Replace, Inject|by other values", "Add|a direction"]),
        ],
    ),
    "context": (
        "A manager computes the context once in a forward pass, and every layer reads it",
        [
            ("once a pass", ["hidden states|of one layer", "*ContextManager|causal mean", "context|a vector a token"]),
            ("in every layer", ["x|and context", "*CCL|gates from context", "y|the layer's output"]),
        ],
    ),
    "residual": (
        "How a block's output meets the stream: added, scaled, or normed after the sum",
        [
            ("stock", ["x|the stream", "+ f(norm x)|added"]),
            ("ReZero, LAuReL", ["x|the stream", "*+ a f(norm x)|scaled, learned"]),
            ("Post-LN, DeepNorm", ["x|the stream", "*norm(a x + f x)|after the sum"]),
        ],
    ),
    "cgt": (
        "The y stream reads the prefix and makes the weights with which the x stream reads on",
        [
            ("y stream", ["prefix|read once", "*context y|one vector"]),
            ("x stream", ["*L(y) R(y)|weights from y", "tokens|read with them", "next token|"]),
            ("specialize", ["y frozen|", "GPT-2|stock, no prefix"]),
        ],
    ),
    "clifford": (
        "A rotor turns a multivector from both sides; in a matrix representation that is two small products",
        [
            ("in the algebra", ["x|2ⁿ coefficients", "*r x s̃|two rotors", "y|2ⁿ coefficients"]),
            ("as matrices", ["X|N × N", "*A X Bᴴ|N = 2^(n/2)", "Y|N × N"]),
        ],
    ),
    "speed": (
        "Every operator has a reference in torch and faster forms, tried in order, checked at first use",
        [
            ("a call asks in order", ["*C++|few rows, CPU", "*Triton|NVIDIA GPUs", "torch|the reference"]),
        ],
    ),
    "distributed": (
        "Several processes share one comparison through a folder, or one model through torchrun",
        [
            ("--share:", ["machine 1|takes a run", "*folder|seen by all", "machine 2|takes another"]),
            ("torchrun:", ["rank 0|own batch", "*gradients|of one large batch", "rank 1|own batch"]),
        ],
    ),
    "ecosystem": (
        "A checkpoint with operators goes through the tools of others",
        [
            ("a checkpoint with operators:", ["*config.json|model.safetensors"]),
            ("is read by:", ["Trainer, TRL|training", "PEFT|LoRA on operators", "lm-eval|tasks"]),
        ],
    ),
    "reliability": (
        "Work goes on after a kill; wrong input and files of others are refused before anything changes",
        [
            (
                "a kill, a full disk",
                ["what was whole|is still there", "*the same command|goes on", "the same bits|at the end"],
            ),
            ("refused:", ["!wrong input|before any work", "!files of others|by their names", "!damage|by checksum"]),
        ],
    ),
    "presets": (
        "A preset is a named config; its fields can be set",
        [
            ("from_preset", ["*name|llama-60m", "fields|num_hidden_layers=2", "model|fresh weights"]),
        ],
    ),
    "recipes": (
        "A recipe is a comparison in a file: entries, training, tuning",
        [
            ("NAME.yaml:", ["entries|operators", "train|model, data, steps", "tune|rates, seeds"]),
            ("relinear compare --recipe NAME", ["*report.html|table and figures"]),
        ],
    ),
    "families": (
        "One operator's code serves every family of models",
        [
            ("q_proj, up_proj, c_attn ...:", ["Llama, Qwen2|nn.Linear", "GPT-2|Conv1D", "Mixtral|experts"]),
            ("the same operators", ["*replaced|trained, saved, loaded"]),
        ],
    ),
    "compress": (
        "Text and a budget go in; a plan, a smaller model and a report come out",
        [
            ("relinear compress", ["a model, text|and a budget", "*plan.json|bits by layer", "model/|and report.html"]),
            ("then:", ["--plan|edit it, run again", "--heal-tokens|train further", "--export|other programs"]),
        ],
    ),
    "export": (
        "The checkpoint of relinear, and what else --export writes beside it",
        [
            ("relinear compress --export WHAT", ["*DIR/model|loads with relinear"]),
            ("and, by WHAT:", ["DIR/plain|transformers", "integers|compressed-tensors", "DIR/model.gguf|llama.cpp"]),
        ],
    ),
    "compression": (
        "Moments of every layer give candidates a price, one price of a byte decides, layers are fitted and judged",
        [
            ("measure", ["text|seen by every layer", "*A and G|moments of x and g", "price|0.5 tr(G D A Dᵀ)"]),
            (
                "decide and fit",
                ["*one multiplier|over all layers", "fits|bits, ranks, widths", "verdict|on other text"],
            ),
        ],
    ),
    "own_operator": (
        "A package of yours is found by every command",
        [
            (
                "relinear new operator NAME",
                ["*operator.py|your formula", "tests|the whole suite", "pyproject|an entry point"],
            ),
            (
                "found by name:",
                ["train, compare|beside others", "compress|fits it to a model", "checkpoints|name its package"],
            ),
        ],
    ),
    "command_line": (
        "What the commands read and what they leave: a checkpoint, runs with a report, or figures of a model",
        [
            ("compress, distill", ["a model|and text", "*new layers|chosen, fitted", "a checkpoint|and report.html"]),
            ("train, compare", ["a recipe|and text", "*runs|resume after a kill", "models|and a table"]),
            ("report", ["directories|one or several", "*report.html|--analyze looks inside"]),
            ("a model is read by:", ["inspect, bench|size, time", "eval, analyze|loss, figures", "explore|its units"]),
        ],
    ),
    "transfer": (
        "A rate found on a narrow model is carried to a wide one",
        [
            ("", ["width 64|tune the rate", "*mup|scales every matrix", "width 512|the same rate"]),
        ],
    ),
    "architecture": (
        "Rooms from the command line down to the maths; each may import those below it",
        [
            ("what users start:", ["command line|relinear_cli", "pages|reports", "notebooks|examples"]),
            ("many runs:", ["compare|matched, tuned", "compress|calibrate, fit", "bench|timings"]),
            ("one model:", ["train, distill|one run", "*surgery|plan, swap, save", "analysis|look inside"]),
            ("one layer:", ["*operators|module and settings", "kernels|fast forms", "functional|the reference"]),
        ],
    ),
}


def picture(guide: str) -> str:
    """Return the picture of a guide as SVG."""
    title, rows = PICTURES[guide]
    most = max(len(boxes) for _, boxes in rows)
    width = max(most, 3) * WIDTH + (max(most, 3) - 1) * GAP + 2 * MARGIN
    parts, y = [], MARGIN
    for head, boxes in rows:
        parts.append(f'<text class="head" x="{MARGIN}" y="{y + 14}">{html.escape(head)}</text>')
        y += HEAD
        for number, text in enumerate(boxes):
            x = MARGIN + number * (WIDTH + GAP)
            if number and not head.endswith(":"):
                parts.append(f'<text class="head" x="{x - GAP / 2}" y="{y + 30}" text-anchor="middle">→</text>')
            parts.append(_box(x, y, text))
        y += HEIGHT + 10 if boxes else 2
    return _whole(width, y, title, parts)


def _box(x: float, y: float, text: str) -> str:
    """One box with its label and the note below it."""
    kind = {"*": "ours", "!": "other"}.get(text[0], "box")
    label, _, note = text.lstrip("*!").partition("|")
    middle = x + WIDTH / 2
    group = '<g class="in">' if kind == "ours" else "<g>"
    first = y + (22 if note else 31)
    said = f'<text x="{middle}" y="{first}" text-anchor="middle">{html.escape(label)}</text>'
    if note:
        said += f'<text class="note" x="{middle}" y="{y + 40}" text-anchor="middle">{html.escape(note)}</text>'
    return f'{group}<rect class="{kind}" x="{x}" y="{y}" width="{WIDTH}" height="{HEIGHT}" rx="6"/>{said}</g>'


def large_models(page: str) -> str:
    """Return bars of what a rank of eight holds of the 70B model, read from the table of docs/large_models.md."""
    held = re.findall(r"^\| 70B \| `?(\w+).*? \|(?: [^|]* \|){3} ([\d,.]+) \|.*\|.*\|$", page, flags=re.M)
    values = {name: float(value.replace(",", "")) for name, value in held}
    title = "Memory of a rank of 8 under FSDP2, 70B, in GB: " + ", ".join(f"{n} {v:g}" for n, v in values.items())
    parts = []
    for number, (name, value) in enumerate(values.items()):
        y, length = MARGIN + 26 * number, 250 * value / max(values.values())
        kind = "other" if name == "dense" else "ours"
        parts.append(f'<text x="{MARGIN}" y="{y + 15}">{name}</text>')
        parts.append(f'<rect class="{kind}" x="130" y="{y}" width="{length:.1f}" height="20" rx="3"/>')
        parts.append(f'<text class="note" x="{136 + length:.1f}" y="{y + 15}">{value:g} GB</text>')
    return _whole(460, MARGIN + 26 * len(values), title, parts)


def _whole(width: int, height: float, title: str, parts: Sequence[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="system-ui, sans-serif" font-size="14">'
    )
    return "\n".join([head, f"<title>{html.escape(title)}</title>", _STYLE, *parts, "</svg>"]) + "\n"
