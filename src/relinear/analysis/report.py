"""Build a page's blocks from the analyses in a directory, each with a sentence on how to read it."""

from collections.abc import Sequence
from pathlib import Path

from relinear.analysis.analyses import analysis, known_analyses
from relinear.pages.blocks import Block, Listing, Section, Text
from relinear.pages.records import about, read_values, what_ran

#: the record of ``relinear analyze``: its settings and the machine
RECORD = "analyze.json"
# usual values of ``relinear analyze --out``: for a run, or for the models of a comparison
_ANALYSIS_FOLDERS = (
    *(".", "analysis", "analysis/*", "runs/*/*/analysis"),
    *("budgets/*/runs/*/*/analysis", "sizes/*/runs/*/*/analysis"),
)
#: characters of numbers that a page shows; longer ones are only in the analysis's file
_MAX_LISTING = 20_000


def analyses_blocks(directory: Path) -> list[Block]:
    """Return the blocks of all analyses in ``directory``, those of the runs in it included.

    Raises:
        ValueError: for a file that holds no JSON object.
        LookupError, TypeError, AttributeError: for one that is damaged otherwise.
    """
    blocks: list[Block] = []
    for pattern in _ANALYSIS_FOLDERS:
        for folder in [directory] if pattern == "." else sorted(directory.glob(pattern)):
            for name in known_analyses():
                if (folder / f"{name}.json").is_file():
                    blocks += _analysis(folder, name, folder.relative_to(directory).as_posix())
    return blocks


def analyses_section(directory: Path) -> Section:
    """Return the page's section about a directory that has only analyses. Raises as ``analyses_blocks``."""
    blocks = analyses_blocks(directory)
    model = directory.resolve().name
    note = ""
    titles = [block.text.removeprefix("Analysis: ") for block in blocks if isinstance(block, Text) and block.heading]
    if (directory / RECORD).is_file():
        record = read_values(directory / RECORD)
        model = record["model"]
        known = ("command", "machine", "date", "made_by", "version", "task", "settings", "wrote")
        options = {key: str(value) for key, value in record.items() if key not in known and value is not None}
        blocks += what_ran(record, options)
        note = about(record, record.get("data"))
    sentence = f"What {len(titles)} analyses see in {model}: {', '.join(titles)}."
    blocks.insert(0, Text(sentence, lead=True))
    return Section(f"Analyses of {model}", "analyze", blocks, note=note)


def _analysis(folder: Path, name: str, relative_folder: str) -> Sequence[Block]:
    module = analysis(name)
    title = name.replace("_", " ")
    suffix = "" if relative_folder in (".", "analysis") else f", {relative_folder}"
    path = folder / f"{name}.json"
    blocks: list[Block] = [Text(f"Analysis: {title}{suffix}", heading=True), Text(module.HOW_TO_READ)]
    blocks += module.blocks(read_values(path))
    text = path.read_text(encoding="utf-8")
    if len(text) <= _MAX_LISTING:
        blocks.append(Listing(f"{title}: numbers", text))
    return blocks
