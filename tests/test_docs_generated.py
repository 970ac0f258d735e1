"""The generated parts of the docs are what results/ and the settings' docstrings make of them."""

import dataclasses
import functools
import importlib
import json
import re
import runpy
import statistics
import sys

import numpy as np
import pytest

from conftest import REPOSITORY
from relinear.compare.report import SHORT_RUN_NOTE
from relinear.contract.operator import OperatorConfig

OPERATORS = sorted((REPOSITORY / "docs" / "operators").glob("*.md"))
CLAIMS = REPOSITORY / "docs" / "claims.md"
PAPERS = sorted((REPOSITORY / "docs" / "claims").glob("*.md"))


def test_generated_parts_are_up_to_date(monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(REPOSITORY / "docs" / "make"))
    assert runpy.run_path(str(REPOSITORY / "docs" / "make" / "__main__.py"))["main"](check=True) == 0


def test_what_large_models_take_to_compress_is_computed_from_the_record() -> None:
    """And is said to be so: in hours and bytes, at the rate of the model that was measured."""
    text = (REPOSITORY / "docs" / "distributed.md").read_text(encoding="utf-8")
    (part,) = re.findall(
        r"Nothing was run\.\s+<!-- generated: compressed -->(.*)<!-- end of compressed -->", text, re.S
    )
    rows = [line.split(" | ") for line in re.findall(r"^\| (Llama.*) \|$", part, re.M)]
    for _, original, file, disk, memory, hours in rows:
        assert 0.28 < float(file) / float(original) < 0.29, "4.5 of 16 bits, and norms"
        assert float(original) < min(float(disk), float(memory)) < 3 * float(original)
        assert 1 < float(hours) < 1000
    assert len(rows) == 2


@pytest.mark.parametrize("kind", sorted(path.stem for path in (REPOSITORY / "docs" / "operators").glob("*.svg")))
def test_an_operator_has_its_parts(kind) -> None:
    """Idea, formula, picture, measurements with their figure, settings with every field; related ones share a page."""
    (page,) = [page for page in OPERATORS if f"]({kind}.svg)" in page.read_text(encoding="utf-8")]
    text = page.read_text(encoding="utf-8")
    shared = page.stem != kind
    if shared:  # its section is the page's last
        text = text[text.rindex("\n## ", 0, text.index(f"]({kind}.svg)")) :]
    assert "$$" in text
    assert page.with_name(f"{kind}.svg").stat().st_size < 20_000
    assert f"../pictures/measured-{kind}-dark.svg" in text
    idea = re.sub(r"\s+", " ", text.split("\n\n")[1])
    assert 4 <= len(re.findall(r"[.?)](?: |$)", idea)) <= 9, "the idea in about five sentences"
    for part in ("settings",) if kind in ("quantized", "pivoted_low_rank") else ("measured", "settings"):
        part = f"{part}_{kind}" if shared else part
        inside = re.search(rf"<!-- generated: {part} -->(.*)<!-- end of {part} -->", text, flags=re.S)
        assert inside is not None, f"no part {part}"
        assert "| --- |" in inside[1]
    for field in dataclasses.fields(OperatorConfig.kinds()[kind]):
        assert f"| `{field.name}` |" in text


def test_every_claim_has_a_verdict_and_every_verdict_a_meaning() -> None:
    meanings = set(re.findall(r"^\| \*\*(.+?)\*\* \| \d+ \|", CLAIMS.read_text(encoding="utf-8"), flags=re.M))
    rows, folded = [], 0
    for page in PAPERS:
        text = page.read_text(encoding="utf-8")
        rows += re.findall(r"^\| (.+) \| \*\*(.+)\*\* \| (.+) \|$", text, flags=re.M)
        text = text.split("\n## The paper, line by line\n")[0]
        folded += len(re.findall("<summary>(?!Withdrawn|The runs|How to read)", text))
        assert f"]({page.relative_to(CLAIMS.parent).as_posix()})" in CLAIMS.read_text(encoding="utf-8")
    assert len(PAPERS) == 5
    assert len(rows) == folded > 50
    assert {verdict for _, verdict, _ in rows} <= meanings
    assert max(len(cell) for row in rows for cell in row) <= 60
    assert max(len(brief.split()) for *_, brief in rows) <= 8


@pytest.fixture
def make(monkeypatch):
    """The modules of docs/make by name, forgotten afterwards."""
    folder = REPOSITORY / "docs" / "make"
    monkeypatch.syspath_prepend(str(folder))
    yield importlib.import_module
    for name in {path.stem for path in folder.glob("*.py")} - {"__main__"}:
        sys.modules.pop(name, None)


def test_the_plot_of_claims_has_intervals_of_three_seeds_and_leaves_the_rest_hollow(make) -> None:
    forest = make("forest")
    rows = forest.rows()
    for row in rows:
        assert (row.bounds is None) == (row.seeds < 3)
        if row.bounds and row.printed is None:  # contains Student's t over its seeds
            half = {3: 4.30265, 6: 2.57058, 12: 2.20099}[row.seeds] * statistics.stdev(row.gaps) / row.seeds**0.5
            assert row.bounds[0] <= statistics.fmean(row.gaps) - half + 1e-6
            assert row.bounds[1] >= statistics.fmean(row.gaps) + half - 1e-6
    for theme in forest.THEMES:
        drawn = forest.picture(theme)
        assert drawn.count('fill="none"') - 1 == sum(row.seeds < 3 for row in rows) >= 1  # one is in the key
        assert drawn.count("<circle") == len(rows) + 3  # in the key: whole, hollow and grey
        gray = drawn.count(f'r="5" fill="{forest.THEMES[theme][1]}"')
        assert gray - 1 == sum(bool(row.unlike) and row.seeds >= 3 for row in rows) >= 1


def test_the_page_about_short_runs_says_what_the_records_say(make) -> None:
    decisions = make("decisions")
    assert [round(end, 3) for end in decisions.wilson(7, 10)] == [0.397, 0.892]
    quarter, million = (decisions.pairs(*span) for span in decisions.SPANS[1:])
    assert len(quarter) == len(million) == 10
    heading = SHORT_RUN_NOTE.split("'")[1]
    assert f"## {heading}\n" in CLAIMS.read_text(encoding="utf-8")
    assert all(abs(pair.long) < 0.04 for pair in (*quarter, *million) if not pair.same)


def number_lists(found):
    """Every list of numbers in a record; of runs, in a list or named by their seeds, a list for every field."""
    if isinstance(found, list):
        if found and all(isinstance(one, int | float) for one in found):
            yield found
        if found and all(isinstance(one, dict) for one in found):
            for key in found[0]:
                yield from number_lists([one[key] for one in found if key in one])
        for one in found:
            yield from number_lists(one)
    if isinstance(found, dict):
        runs: dict[str, list] = {}
        for name, one in found.items():
            yield from number_lists(one)
            runs.setdefault(re.sub("/?seed-[0-9]+$", "", name), []).append(one)
        for name, entry in runs.items():
            if name not in found:
                yield from number_lists(entry)
        yield from ([one] for one in found.values() if isinstance(one, int | float))


def test_every_gap_is_in_the_record_that_it_names(make) -> None:
    """As a list of differences by seed, of either sign, or as the difference of two lists of losses."""
    missing, read = [], functools.cache(lambda name: json.loads((REPOSITORY / "results" / name).read_text("utf-8")))
    lists_of = functools.cache(lambda name: list(number_lists(read(name))))
    for row in make("evidence").rows(drawn=False):
        records = row.record.split(" + ")
        lists = [one for name in records for one in lists_of(name) if len(one) == len(row.gaps)]
        rounded = {tuple(round(value, 6) for value in one) for one in lists}
        wanted = [tuple(round(sign * gap, 6) for gap in row.gaps) for sign in (1, -1)]
        table = np.array(lists)
        differences = ((np.abs(ours - table - row.gaps) < 2e-6).all(1).any() for ours in table)
        if not (rounded & set(wanted) or any(differences)):
            missing.append(f"{row.name} in {row.record}")
    assert missing == []


def test_a_claim_asks_for_gaps_that_are_there(make) -> None:
    evidence = make("evidence")
    assert len(evidence.select("Rotor from scratch minus dense")) == 2
    with pytest.raises(ValueError, match="no gap 'HDPL minus nothing'"):
        evidence.select("HDPL minus nothing")


def test_no_difference_takes_a_half_width_below_half_of_the_papers_effect(make) -> None:
    row = make("evidence").Row

    def verdict(*gaps: float, effect: float | None = -0.1, **more) -> str:
        return row("a", "b", gaps, effect=effect, **more).verdict

    assert verdict(-0.01, 0.01, 0.0) == "no difference"  # a half-width of 0.025
    assert verdict(-0.03, 0.03, 0.0) == "inconclusive"  # 0.075
    assert verdict(-0.01, 0.01, 0.0, effect=None) == "inconclusive"
    assert verdict(-0.1, -0.11, -0.12) == "ahead"
    assert verdict(0.1, 0.11, 0.12) == "behind"
    assert verdict(-0.5) == "inconclusive"  # one seed
    assert verdict(-0.1, -0.11, -0.12, unlike="the rate") == "inconclusive"


def test_gaps_by_file_size_are_drawn_where_a_size_has_only_some_of_the_structures(make, monkeypatch) -> None:
    """A line and a band for each."""
    file_sizes = make("file_sizes")
    drawn, sizes = file_sizes.picture("light", "file-sizes"), file_sizes._sizes()
    structures = {name for names in file_sizes.verdicts().values() for name in names}
    assert drawn.count("<polygon") == len(structures) == 7
    assert all(f">{name}</text>" in drawn for name in structures)
    (full,) = [size["entries"] for size in sizes if size["bytes"] == 500_000]
    some = [entry for entry in full if entry["name"] in ("dense", "block_hadamard")]
    larger = {"bytes": 4_000_000, "title": "4 MB", "entries": some}
    monkeypatch.setattr(file_sizes, "_sizes", lambda: [*sizes, larger])
    with_larger = file_sizes.picture("light", "file-sizes")
    assert with_larger.count("<polygon") == 7
    assert with_larger.count("<circle") == drawn.count("<circle") + 1
    assert with_larger.count(">4000<") == 7
    assert "| 4 MB, block-Hadamard |" in file_sizes.in_page()


def test_a_structure_is_worth_its_bytes_where_it_is_ahead_at_every_size(make, monkeypatch) -> None:
    file_sizes = make("file_sizes")
    ahead, behind, neither = (-0.1, -0.11, -0.12), (0.1, 0.11, 0.12), (-0.1, 0.1, 0.0)

    def size(**gaps: tuple[float, ...]) -> dict:
        loss = {"validation_loss": {"mean": 1.0}}
        return {"entries": [{"name": n, "gap": {"values": g, "standard_error": 0.0}} | loss for n, g in gaps.items()]}

    sizes = [
        size(ccl=ahead, hdpl=ahead, transponder=ahead, rotor=behind, monarch=behind),
        size(ccl=ahead, hdpl=neither, transponder=behind, rotor=behind, monarch=neither),
        size(ccl=ahead),
    ]
    monkeypatch.setattr(file_sizes, "_sizes", lambda: sizes)
    assert file_sizes.verdicts() == {
        "held": ["CCL"],
        "partly": ["HDPL", "Transponder"],
        "did not hold": ["rotor"],
        "inconclusive": ["Monarch"],
    }


@pytest.mark.parametrize(
    ("verdict", "gap", "match"),
    [
        ("held", "Transponder minus DeepNorm", "a gap is inconclusive"),
        ("did not hold", "Transponder minus DeepNorm", "no gap excludes zero"),
        ("proved", "Transponder minus DeepNorm", "verdicts are held"),
        ("held", "CCL minus dense of its width", None),
    ],
)
def test_a_verdict_needs_gaps_that_support_it(make, verdict, gap, match) -> None:
    claim = functools.partial(make("claims").Claim, says="", brief="", found="", gaps=[gap])
    if match is None:
        assert claim(verdict=verdict).verdict == verdict
        return
    with pytest.raises(ValueError, match=match):
        claim(verdict=verdict)


def test_runs_of_claims_are_listed() -> None:
    for page in PAPERS:
        text = page.read_text(encoding="utf-8")
        named = {
            letter for found in re.findall(r"Runs: ([A-Z, ]+)\.$", text, flags=re.M) for letter in found.split(", ")
        }
        assert named
        assert named <= set(re.findall(r"^\*\*([A-Z])\.\*\* .+\n`.+`$", text, flags=re.M))


def test_no_cell_of_claims_is_longer_than_sixty_characters() -> None:
    for page in (CLAIMS, *PAPERS):
        lines = re.findall(r"^\|(.+)\|$", page.read_text(encoding="utf-8"), flags=re.M)
        cells = [re.sub(r"\]\(.+?\)|[*\[]", "", cell.strip()) for line in lines for cell in line.split(" | ")]
        assert max(map(len, cells)) <= 60
        assert max(line.count(" | ") for line in lines) < 6
