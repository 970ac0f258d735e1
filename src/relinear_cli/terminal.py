"""Text in the terminal's width."""

import shutil
import textwrap
from typing import TextIO


def fitted(text: str, stream: TextIO, indent: int = 2) -> str:
    """Return ``text`` in lines that the terminal shows whole, what goes on indented; a pipe gets it as it is."""
    if not stream.isatty():
        return text
    width = max(40, min(100, shutil.get_terminal_size().columns))
    fill = textwrap.TextWrapper(width, break_on_hyphens=False, break_long_words=False)  # a path is copied whole
    lines = []
    for line in text.splitlines():
        words = line.lstrip()
        fill.initial_indent = line[: len(line) - len(words)]
        fill.subsequent_indent = fill.initial_indent + " " * indent
        lines.append(fill.fill(words))
    return "\n".join(lines)
