"""What `make docs` adds to the pages of this folder: those of the repository around it, and the reference of the API.

The pages link to each other as files of the repository, so that they can be read there. On the site README is the first
page and this folder the root; links are turned into those of the site, and lose their target where it is not on it.
"""

import os
import re
from pathlib import Path, PurePosixPath

from latex2mathml.converter import convert
from mkdocs.structure.files import File

import relinear

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"(\]\()([^)\s#:]+)(#[^)\s]*)?\)")
SOURCE = re.compile(r'(src(?:set)?=")([^":]+)()"')
PICTURES = (".png", ".svg")
FORMULA = re.compile(r"^\$\$(.+?)\$\$", flags=re.S | re.M)


def on_files(files, config):
    """Add README, CONTRIBUTING, CHANGELOG and what is in results/, and write the reference."""
    pages = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
    pages += [path for path in sorted((ROOT / "results").rglob("*")) if path.suffix in (".md", *PICTURES)]
    for path in pages:
        files.append(File.generated(config, place(path.relative_to(ROOT).as_posix()), abs_src_path=str(path)))
    files.append(File.generated(config, "reference.md", content=reference()))
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

    markdown = FORMULA.sub(
        lambda found: f"<div style='overflow-x: auto'>{convert(found[1], display='block')}</div>", markdown
    )
    markdown = LINK.sub(whole, markdown)
    markdown = SOURCE.sub(lambda match: f'{match[1]}{turned(match) or match[2]}"', markdown)
    gone = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)\s#:]+)(?:#[^)\s]*)?\)")
    return gone.sub(lambda match: match[0] if is_on_site(match[2], page, files) else match[1], markdown)


def is_on_site(target, page, files):
    """Whether a turned link leads to a file of the site."""
    path = os.path.normpath(str(PurePosixPath(page.file.src_uri).parent / target))
    return files.get_file_from_path(path) is not None


def place(path):
    """Where a file of the repository is on the site."""
    if path == "README.md":
        return "index.md"
    return path.removeprefix("docs/")


def home(path):
    """Where a page of the site is in the repository."""
    if path == "index.md":
        return "README.md"
    return path if (ROOT / path).is_file() else f"docs/{path}"


def reference():
    """The reference of all public names, by the room they live in."""
    public = {name: getattr(relinear, name) for name in sorted(relinear.__all__)}
    rooms: dict[str, list[str]] = {}
    for name, value in public.items():
        module = getattr(value, "__module__", None)  # what has none is a module, or the version
        if module is not None:
            rooms.setdefault(module.split(".")[1], []).append(f"::: {module}.{name}")
    parts = ["# Reference", "Every public name of `relinear`, from its docstring."]
    for room, found in sorted(rooms.items()):
        parts += [f"## {room}", *found]
    return "\n\n".join(parts) + "\n"
