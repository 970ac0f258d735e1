"""The examples of the docs run, tables and CONTRIBUTING are whole, and its operator passes the suite from outside."""

import importlib
import os
import re
import runpy
import subprocess
import sys
import types
from pathlib import Path

import pytest

from cases import CASES
from relinear.analysis.analyses import ANALYSES
from relinear.compare.recipe import BUNDLED

ROOT = Path(__file__).resolve().parents[1]


def blocks(path: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", path.read_text(encoding="utf-8"), flags=re.S | re.M)


@pytest.mark.parametrize("kind", sorted({case.config.kind for case in CASES}))
def test_every_operator_has_an_example_on_its_page(kind: str) -> None:
    """Related operators share a page."""
    pages = sorted((ROOT / "docs" / "operators").glob("*.md"))
    (page,) = [page for page in pages if f"]({kind}.svg)" in page.read_text(encoding="utf-8")]
    name = next(case.config for case in CASES if case.config.kind == kind).__class__.__name__
    assert any(name in block for block in blocks(page))


def rows(page: str, heading: str) -> set[str]:
    """The names at the start of the rows of the first table below a heading."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8").split(f"# {heading}\n")[1].split("\n## ")[0]
    return set(re.findall(r"`([^`]+)`", "".join(line.split("|")[1] for line in text.splitlines() if line[:1] == "|")))


def test_tables_of_the_docs_are_whole() -> None:
    assert rows("explore.md", "Measure all of a model's operators") == set(ANALYSES)
    assert rows("recipes.md", "Recipes that come with relinear") == {path.name for path in BUNDLED.glob("*.yaml")}
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for page in (ROOT / "docs" / "operators").glob("*.md"):
        assert f"(docs/operators/{page.name})" in readme


def test_the_readme_is_short() -> None:
    """At most 900 words, 25 a sentence, six columns a table, sixty characters a cell; its pictures are there."""
    text = re.sub(r"```.*?```|<!--.*?-->", "", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.S)
    rows = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("|")]
    prose = " ".join(line for line in text.splitlines() if not line.startswith("|"))
    assert len(prose.split()) + sum(len(cell.split()) for row in rows for cell in row) <= 900
    assert max(map(len, rows)) <= 6
    assert max(len(re.sub(r"\]\(.*?\)", "", cell).strip()) for row in rows for cell in row) <= 60
    plain = re.sub(r"<[^>]+>|[*`]|\]\(.*?\)", "", "\n".join(line for line in text.splitlines() if line[:1] not in "|#"))
    sentences = re.split(r"(?<=[.!?:])\s+(?=[A-Z`\[])|\n\s*\n|\n- ", plain)
    assert [" ".join(said.split()) for said in sentences if len(said.split()) > 25] == []
    pictures = re.findall(r'src(?:set)?="(.+?)"|!\[[^\]]*\]\((.+?)\)', text)
    assert pictures
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 120
    for one in pictures:
        assert (ROOT / "".join(one)).stat().st_size < 300_000


#: pages that list everything need no picture
LISTS = {"CHANGELOG", "cli"}


def test_pages_are_short_and_show_something(monkeypatch) -> None:
    """No cell of more than 25 words outside of folds, a picture on every page that is no list, 29,904 words."""
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "make"))
    lengths = importlib.import_module("lengths")
    found = {path: lengths.measured(path.read_text(encoding="utf-8")) for path in lengths.pages()}
    assert {path.name: cell for path, (_, cell, _) in found.items() if cell > 25} == {}
    assert [path.name for path, (_, _, pictures) in found.items() if not pictures and path.stem not in LISTS] == []
    assert sum(words for words, *_ in found.values()) <= 29_904


def test_pages_are_few_and_each_is_in_the_menu_once() -> None:
    """At most 33, in four kinds; columns have names and pictures say what they show."""
    pages = sorted((ROOT / "docs").rglob("*.md"))
    assert len(pages) <= 33
    menu = re.findall(r": ([\w/]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), flags=re.M)
    assert {path.relative_to(ROOT / "docs").as_posix() for path in pages} <= set(menu)
    assert len(menu) == len(set(menu))
    for page in (ROOT / "README.md", *pages):
        text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.S | re.M)
        heads = re.findall(r"^\|(.*)\|\n\| ?:?---", text, flags=re.M)
        assert all(cell.strip() for head in heads for cell in head.split("|")), f"{page.name}: a column without a name"
        assert "![](" not in text
        assert all('alt="' in picture for picture in re.findall("<img[^>]*>", text))


#: words of ours for what the field calls initialisation, equal, remaining, default
OURS = re.compile(
    r"\b(its|own|(?<!at )the) start\b(?! of)|\bstart (from|of) \d|\bis level\b|\blevel (with|or)\b|what is left"
    r"|as (it|they) comes?\b|the form that was chosen|numbers that are none",
    flags=re.I,
)


def test_sentences_are_short_and_in_the_words_of_the_field(monkeypatch) -> None:
    """At most 30 words a sentence, folded ones too; docs/cli.md is made of docstrings."""
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "make"))
    lengths = importlib.import_module("lengths")
    assert lengths.sentences("# A\n\nOne `a`, `b` two. `c` three:\n- four\n\n| five |\n") == [
        "One NAME two.",
        "NAME three:",
        "four",
    ]
    pages = [path for path in lengths.pages() if path.name != "cli.md"]
    texts = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in pages}
    said = {(name, one) for name, text in texts.items() for one in lengths.sentences(text)}
    assert {(name, one) for name, one in said if len(one.split()) > 30} == set()
    assert {(name, found[0]) for name, text in texts.items() if (found := OURS.search(text))} == set()
    assert OURS.search("nearly all of that is its start, level with dense")


def test_pages_of_the_site_fit_a_phone_and_its_switch_of_light_and_dark(monkeypatch) -> None:
    """Pictures follow the switch, options stay whole, tables of short cells stay tables, others become cards."""
    pytest.importorskip("mkdocs")
    monkeypatch.setattr(sys, "path", [*sys.path])
    site = runpy.run_path(str(ROOT / "docs" / "site.py"))
    page = types.SimpleNamespace(file=types.SimpleNamespace(src_uri="page.md"))

    def shown(content: str) -> str:
        return site["on_page_content"](content, page, None, None)

    dark = '<source media="(prefers-color-scheme: dark)" srcset="dark.svg" />'
    picture = shown(f'<picture>\n{dark}\n<img alt="a" src="light.svg" />\n</picture>')
    assert picture == '<img alt="a" src="light.svg#only-light" /><img alt="a" src="dark.svg#only-dark" />'
    assert shown("<code>eval --data x</code>") == '<code>eval <span class="option">--data</span> x</code>'
    rows = ["<tr>" + f"<th>{'a b'}</th>" * 4 + "</tr>", "<tr>" + "<td>1 </td>" * 3 + "<td> </td></tr>"]
    assert "data-" not in shown(f"<table>{''.join(rows)}</table>")
    card = shown(f"<table>{''.join(rows).replace('1 ', 'a cell of many words', 1)}</table>")
    assert '<table data-columns="4">' in card
    assert card.endswith('<td data-label="a b"><div>1</div></td><td data-label="a b"></td></tr></table>')
    long = ["<tr><th>a</th><th>b</th></tr>", f"<tr><td>name</td><td>{'word ' * 26}</td></tr>"]
    assert shown(f"<table>{''.join(long)}</table>").startswith("<ul><li><strong>name</strong><br>word word")


def test_contributing_says_where_things_go() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split("## Where things go\n")[1]
    ways = [part for part in text.split("\n\n") if part.startswith("**")]
    assert len(ways) >= 5
    for way in ways:
        assert way.strip().count("\n") < 5, f"more than five lines: {way}"
        for path in re.findall(r"`([\w./*]+\.\w+)`", way):
            pattern = re.sub("KIND|NAME", "*", path)
            above = path.startswith(("tests/", "docs/", "README"))
            folder = ROOT if above else ROOT / "src" if path.startswith("relinear_cli/") else ROOT / "src" / "relinear"
            assert any(folder.glob(pattern)), f"{path} is nowhere"


@pytest.mark.slow
def test_contributing_adds_an_operator_in_a_package_of_its_own(tmp_path) -> None:
    """Outside of the repository, with nothing of it but the package itself."""
    maths, operator, test = blocks(ROOT / "CONTRIBUTING.md")
    package = tmp_path / "my_operators"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "maths.py").write_text(maths)
    (package / "shift_scale.py").write_text(operator)
    (tmp_path / "test_shift_scale.py").write_text(test)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--strict-markers", "-p", "no:cacheprovider", "-k", "not inductor"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{tmp_path}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) > 20
    rules = ["--isolated", "--select", "E,F,I,B", "--line-length", "120"]
    check = subprocess.run([sys.executable, "-m", "ruff", "check", *rules, "."], cwd=tmp_path, check=False)
    assert check.returncode == 0


@pytest.mark.slow
def test_the_estimate_of_large_models_is_what_the_script_computes() -> None:
    table = runpy.run_path(str(ROOT / "results" / "distributed" / "estimate.py"))["table"]()
    assert table in (ROOT / "docs" / "distributed.md").read_text(encoding="utf-8")
