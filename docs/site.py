"""What `make docs` adds to the pages of this folder: those of the repository around it, and the reference of the API.

The pages link to each other as files of the repository, so that they can be read there. On the site README is the first
page and this folder the root; links are turned into those of the site, and lose their target where it is not on it.
"""

import html
import inspect
import itertools
import json
import os
import re
import sys
from pathlib import Path, PurePosixPath

from latex2mathml.converter import convert
from mkdocs.structure.files import File

import relinear
from relinear_cli.main import COMMANDS

sys.path.insert(0, str(Path(__file__).parent / "make"))
import commands

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"(\]\()([^)\s#:]+)(#[^)\s]*)?\)")
SOURCE = re.compile(r'(src(?:set)?=")([^":]+)()"')
PICTURES = (".png", ".svg")
TAG = re.compile("<[^>]*>")
CELL = re.compile(r"<td([^>]*)>\s*(.*?)\s*</td>", flags=re.S)
PICTURE = re.compile(
    r'<picture>\s*<source[^>]* srcset="([^"]*)"[^>]*>\s*(<img[^>]* src=")([^"]*)("[^>]*>)\s*</picture>'
)
CODE = re.compile("<code>.*?</code>", flags=re.S)
#: a path, which narrow columns break behind its folders
PATH = re.compile(r"(?<=<code>)\w[\w.-]*(?:/[\w.-]+)+(?=</code>)")
OPTION = re.compile(r"(?<![\w-])--?[a-z][\w-]*")
ROW = re.compile(r"<tr>(.*?)</tr>", flags=re.S)
#: words of a cell; a table with a longer one is shown as a list
WORDS = 25
#: a table of four and more columns is a table on a phone, too, where these are its most characters: of a cell, and of
#: the longest words of its columns together
NARROW = 16, 40
#: a table of four and more columns that has more rows is folded
MOST_ROWS = 14
#: characters of a signature on one line
LINE = 72
#: a public name in a docstring
NAMED = re.compile(r"<code>relinear\.((?:\w+\.)?\w+)(\(.*?\))?</code>")
FORMULA = re.compile(r"^\$\$(.+?)\$\$", flags=re.S | re.M)


def on_files(files, config):
    """Add README, CONTRIBUTING, CHANGELOG and what is in results/, and write the reference."""
    pages = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
    found = sorted((ROOT / "results").rglob("*"))
    pages += [
        path for path in found if path.suffix in PICTURES or path.match("results/*.md") or path.match("results/*/*.md")
    ]
    for path in pages:
        files.append(File.generated(config, place(path.relative_to(ROOT).as_posix()), abs_src_path=str(path)))
    for name, text in (reference() | commands_and_settings() | gallery() | notebooks()).items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown, page, config, files):
    """Turn links between files of the repository into links between pages of the site, and formulas into MathML."""
    here = home(page.file.src_uri)

    def turned(match):
        target = os.path.normpath(str(PurePosixPath(here).parent / match[2]))
        there = place(target)
        if files.get_file_from_path(there) is None:
            return None
        return os.path.relpath(there, str(PurePosixPath(page.file.src_uri).parent)) + (match[3] or "")

    def whole(match):
        found = turned(match)
        return match[0] if found is None else f"]({found})"

    markdown = FORMULA.sub(lambda found: formula(found[1]), markdown)
    markdown = markdown.replace("<this repository>", config.repo_url or "<this repository>")
    markdown = LINK.sub(whole, markdown)
    markdown = SOURCE.sub(lambda match: f'{match[1]}{turned(match) or match[2]}"', markdown)
    gone = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)\s#:]+)(?:#[^)\s]*)?\)")
    return gone.sub(lambda match: match[0] if is_on_site(match[2], page, files) else match[1], markdown)


def on_page_content(content, page, config, files):
    """Fit a page to a phone and to a reader: cells say their column (extra.css shows it), and records are folded.

    Of the pages of results/ every section is folded but the first: they hold long tables and commands.
    """
    content = re.sub(r"<table>.*?</table>", labeled, content, flags=re.S)
    if page.file.src_uri.startswith("reference/"):
        content = NAMED.sub(lambda found: linked(found, files), content)
    content = PATH.sub(lambda path: path[0].replace("/", "/<wbr>"), content)
    content = CODE.sub(lambda code: OPTION.sub(r'<span class="option">\g<0></span>', code[0]), content)
    # the site has a switch of its own between light and dark, which a <picture> would not follow
    content = PICTURE.sub(r"\2\3#only-light\4\2\1#only-dark\4", content)
    if not page.file.src_uri.startswith("results/"):
        return content
    first, *sections = re.split(r"(?=<h2)", content)
    for section in sections:
        title, rest = section.split("</h2>", 1)
        name = TAG.sub("", title).replace("&para;", "")
        first += f"<details><summary>{name}</summary>{title}</h2>{rest}</details>"
    opening = first.split("</p>")
    if not sections and len(opening) > MOST_ROWS:
        inside = "</p>".join(opening[3:])
        first = "</p>".join(opening[:3]) + f"</p><details><summary>The whole record</summary>{inside}</details>"
    return first


def linked(found, files):
    """A public name in a docstring as a link to its page."""
    there = files.get_file_from_path(f"reference/{found[1]}.md")
    return found[0] if there is None else f'<a href="{found[1]}.html">{found[0]}</a>'


def formula(text):
    """A formula as MathML; what stands apart in it goes on a line of its own, for a phone's sake."""
    lines = [convert(part, display="block") for part in re.split(r",?\\q+uad", text)]
    return f"<div style='overflow-x: auto'>{''.join(lines)}</div>"


def labeled(table):
    """A table whose cells say their column, where it has too many to stand side by side on a phone; or a list."""
    names, cells = (
        [plain(cell) for cell in re.findall(rf"<{tag}\b[^>]*>(.*?)</{tag}>", table[0], flags=re.S)]
        for tag in ("th", "td")
    )
    if max((len(cell.split()) for cell in cells), default=0) > WORDS:
        return folded(as_list(table[0], names), len(cells) // len(names), names)
    if len(names) < 4:
        return table[0]
    columns = [" ".join([name, *cells[at :: len(names)]]).split() for at, name in enumerate(names)]
    shown = table[0]
    together = sum(max(map(len, words), default=0) for words in columns)
    if max(map(len, cells), default=0) > NARROW[0] or together > NARROW[1]:
        named = itertools.cycle(map(html.escape, names))
        shown = CELL.sub(
            lambda cell: f'<td data-label="{next(named)}"{cell[1]}>{cell[2] and f"<div>{cell[2]}</div>"}</td>', shown
        )
        shown = shown.replace("<table", f'<table data-columns="{len(names)}"', 1)
    return folded(shown, shown.count("<tr") - 1, names)


def as_list(table, names):
    """Rows as items of a list: the first cell, then the others, which say their column where they are several."""
    items = []
    for row in ROW.findall(table)[1:]:
        first, *others = (cell for _, cell in CELL.findall(row))
        called = [f"<em>{html.escape(name)}:</em> " if len(names) > 2 else "" for name in names[1:]]
        said = [name + cell for name, cell in zip(called, others, strict=True) if cell]
        items.append("<li>" + "<br>".join([f"<strong>{first}</strong>", *said]) + "</li>")
    return f"<ul>{''.join(items)}</ul>"


def folded(shown, rows, names):
    """What is shown of a table, folded where it has many rows."""
    if rows <= MOST_ROWS:
        return shown
    return f"<details><summary>{rows} rows: {', '.join(map(html.escape, names))}</summary>{shown}</details>"


def plain(cell):
    """The text of a cell."""
    return " ".join(html.unescape(TAG.sub("", cell)).split())


def is_on_site(target, page, files):
    """Whether a turned link leads to a file of the site."""
    path = os.path.normpath(str(PurePosixPath(page.file.src_uri).parent / target))
    return files.get_file_from_path(path) is not None


def place(path):
    """Where a file of the repository is on the site."""
    if path == "README.md":
        return "index.md"
    return re.sub(r"\.ipynb$", ".md", path.removeprefix("docs/"))


def home(path):
    """Where a page of the site is in the repository."""
    if path == "index.md":
        return "README.md"
    return path if (ROOT / path).is_file() else f"docs/{path}"


def reference():
    """Pages of the reference by their names: all public names, and each of them with its docstring."""
    names = {name: getattr(relinear, name) for name in relinear.__all__ if name != "__version__"}
    rooms = {name: room for name, room in names.items() if inspect.ismodule(room)}
    for room, module in rooms.items():
        inside = {f"{room}.{name}": getattr(module, name) for name in getattr(module, "__all__", [])}
        names |= {name: value for name, value in inside.items() if name.partition(".")[2] not in names}
    listed = [
        "# Reference",
        "",
        "Every public name, on a page of its own. Examples take `import relinear` and `import torch` as given.",
        "",
        "| name | what it is |",
        "| --- | --- |",
    ]
    made = {}
    for name, value in sorted(names.items(), key=lambda found: found[0].lower()):
        whole = inspect.ismodule(value)
        place = value.__name__ if whole else f"{value.__module__}.{value.__qualname__}"
        options = "    options: {members: []}\n" if whole else ""
        called = "" if whole else f"```{{.python .doc-signature}}\n{signature(name, value)}\n```\n\n"
        head = f"# relinear.{name}\n\n[All names](../reference.md)\n\n"
        made[f"reference/{name}.md"] = f"{head}{called}::: {place}\n{options}"
        said = " ".join((inspect.getdoc(value) or "").split("\n\n")[0].split())
        said = re.sub(r"``(.+?)``", r"`\1`", said).replace("|", r"\|")
        listed.append(f"| [`{name}`](reference/{name}.md) | {said} |")
    return made | {"reference.md": "\n".join(listed) + "\n"}


def signature(name, value):
    """How a public name is called, with types and defaults; a parameter a line where they are many."""
    try:
        found = inspect.signature(value)
    except ValueError:  # an exception that adds nothing to its class
        return f"{name}(*args)"
    parts, named = [], False
    for one in found.parameters.values():
        if one.kind is one.KEYWORD_ONLY and not named:
            parts.append("*")
        named = named or one.kind in (one.KEYWORD_ONLY, one.VAR_POSITIONAL)
        said = str(one.replace(annotation=one.empty, default=one.empty))  # with its stars
        said += "" if one.annotation is one.empty else f": {kind(one.annotation)}"
        default = "..." if inspect.isfunction(one.default) else repr(one.default)
        parts.append(said if one.default is one.empty else f"{said} = {default}")
    given = found.return_annotation
    returns = "" if inspect.isclass(value) or given is found.empty else f" -> {kind(given)}"
    line = f"{name}({', '.join(parts)}){returns}"
    if len(line) <= LINE:
        return line
    return f"{name}(\n" + "".join(f"    {part},\n" for part in parts) + f"){returns}"


def kind(annotation):
    """A type as code would write it: without the modules that its names come from, and without bounds."""
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    text = re.sub(r"(?<![\w'\"])(?:\w+\.)+(?=\w)", "", text)
    text = re.sub(r"\bAnnotated\[([^\[\]]+?), \w+\([^\[\]]*\)\]", r"\1", text)
    text = re.sub(r"\bOptional\[(.+)\]", r"\1 | None", text)
    return re.sub(r"\bCount\b", "int", re.sub(r"\bNonNegative\b", "float", text)).replace("~", "")


def commands_and_settings():
    """A page for every command, and for the settings of those that have many, as docs/make reads them."""
    names = list(commands.made())
    made = {f"commands/{name}.md": commands.page(name) for name in COMMANDS}
    made |= {f"settings/{name}.md": commands.settings_page(name) for name in names}
    listed = "\n".join(f"- [{name}](settings/{name}.md)" for name in names)
    said = "What `--set` and recipes take, by the command that reads it. Operators' settings stand on their own pages."
    return made | {"settings.md": f"# Settings\n\n{said}\n\n{listed}\n"}


def gallery():
    """The page of all operators: what README says of them."""
    text = (ROOT / "README.md").read_text(encoding="utf-8").split("## The operators\n")[1].split("\n## ")[0]
    return {"operators.md": "# The operators\n" + text.replace("](docs/", "](")}


def notebooks():
    """A page for every notebook, with the outputs that it keeps."""
    made = {}
    for path in sorted((ROOT / "examples" / "notebooks").glob("*.ipynb")):
        parts = []
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
            source = "".join(cell["source"])
            parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
            printed = "".join("".join(one.get("text", "")) for one in cell.get("outputs", ()))
            parts += [f"```text\n{printed.rstrip()}\n```"] if printed else []
            for one in cell.get("outputs", ()):
                if picture := "".join(one.get("data", {}).get("image/png", "")).replace("\n", ""):
                    parts.append(f'<img alt="What the cell draws" src="data:image/png;base64,{picture}">')
        made[place(path.relative_to(ROOT).as_posix())] = "\n\n".join(parts) + "\n"
    return made
