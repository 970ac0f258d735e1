"""Count the lines of code of the library, room by room, and hold them to a limit.

``python tools/lines.py`` prints the table; it exits with 1 where there are more than ``LIMIT``. Blank lines, comments
and docstrings do not count, so that nothing is gained by squeezing them.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections import Counter
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1] / "src"
#: two per cent above what there is, so that no line is squeezed to save one; a commit that raises it says why
LIMIT = 28_180
_NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def code_lines(text: str) -> int:
    """Return the number of lines of ``text``, a Python file, that hold code."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    lines = {n for t in tokens if t.type not in _NO_CODE for n in range(t.start[0], t.end[0] + 1)}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, _DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            docstring = node.body[0]
            lines -= set(range(docstring.lineno, (docstring.end_lineno or docstring.lineno) + 1))
    return len(lines)


def main() -> int:
    """Print lines and lines of code of every room; return the exit status."""
    total, code = Counter[str](), Counter[str]()
    for path in sorted(SOURCE.rglob("*.py")):
        room = path.relative_to(SOURCE).parent.as_posix().split("/", 1)[-1].split("/")[0]
        text = path.read_text(encoding="utf-8")
        total[room] += text.count("\n")
        code[room] += code_lines(text)
    for room in sorted(code):
        print(f"{room:12} {total[room]:6} {code[room]:6}")
    print(f"{'all':12} {total.total():6} {code.total():6}  limit {LIMIT}")
    if code.total() > LIMIT:
        print(f"{code.total() - LIMIT} lines of code too many: shorten, or raise LIMIT in tools/lines.py and say why")
    return int(code.total() > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
