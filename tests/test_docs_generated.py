"""The generated parts of the docs are what results/ and the settings' docstrings make of them."""

import dataclasses
import importlib
import json
import re
import statistics
import subprocess
import sys

import pytest

from conftest import REPOSITORY
from relinear.core.operator import OperatorConfig

OPERATORS = sorted((REPOSITORY / "docs" / "operators").glob("*.md"))
CLAIMS = REPOSITORY / "docs" / "claims.md"
PAPERS = sorted((REPOSITORY / "docs" / "claims").glob("*.md"))


def test_generated_parts_are_up_to_date() -> None:
    done = subprocess.run(
        [sys.executable, str(REPOSITORY / "docs" / "make"), "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("page", OPERATORS, ids=lambda page: page.stem)
def test_a_page_has_its_parts(page) -> None:
    """Idea, formula, picture, measurements with their figure, settings with every field."""
    text = page.read_text(encoding="utf-8")
    assert "$$" in text
    assert f"]({page.stem}.svg)" in text
    assert (page.with_suffix(".svg")).stat().st_size < 20_000
    assert f"../pictures/measured-{page.stem}-dark.svg" in text
    idea = re.sub(r"\s+", " ", text.split("\n\n")[1])
    assert 4 <= len(re.findall(r"[.?)](?: |$)", idea)) <= 9, "the idea in about five sentences"
    for part in ("measured", "settings"):
        inside = re.search(rf"<!-- generated: {part} -->(.*)<!-- end of {part} -->", text, flags=re.S)
        assert inside is not None, f"no part {part}"
        assert "| --- |" in inside[1]
    for field in dataclasses.fields(OperatorConfig.kinds()[page.stem]):
        assert f"| `{field.name}` |" in text


def test_every_claim_has_a_verdict_and_every_verdict_a_meaning() -> None:
    meanings = set(re.findall(r"^\| \*\*(.+?)\*\* \| \d+ \|", CLAIMS.read_text(encoding="utf-8"), flags=re.M))
    rows, folded = [], 0
    for page in PAPERS:
        text = page.read_text(encoding="utf-8")
        rows += re.findall(r"^\| (.+) \| \*\*(.+)\*\* \| (.+) \|$", text, flags=re.M)
        folded += text.count("<details") - 2  # the runs, and how to read intervals
        assert f"]({page.relative_to(CLAIMS.parent).as_posix()})" in CLAIMS.read_text(encoding="utf-8")
    assert len(PAPERS) == 5
    assert len(rows) == folded > 50
    assert {verdict for _, verdict, _ in rows} <= meanings
    assert max(len(cell) for row in rows for cell in row) <= 60
    assert max(len(brief.split()) for *_, brief in rows) <= 8


def test_the_plot_of_claims_has_intervals_of_three_seeds_and_leaves_the_rest_hollow(monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(REPOSITORY / "docs" / "make"))
    forest = importlib.import_module("forest")
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
        grey = drawn.count(f'r="5" fill="{forest.THEMES[theme][1]}"')
        assert grey - 1 == sum(bool(row.unlike) and row.seeds >= 3 for row in rows) >= 1
    for name in ("forest", "evidence", "measured"):
        sys.modules.pop(name)


def test_a_claim_asks_for_gaps_that_are_there(monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(REPOSITORY / "docs" / "make"))
    claims = importlib.import_module("claims")
    assert len(claims._rows("Rotor from scratch")) == 12
    with pytest.raises(ValueError, match="no gap of HDPL"):
        claims._rows("HDPL", "nothing of this name")
    for name in ("forest", "claims", "evidence", "measured", "biased", "curves", "cut", "gpu_tables", "plans"):
        sys.modules.pop(name)


def test_not_seen_takes_a_half_width_below_half_of_the_papers_effect(monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(REPOSITORY / "docs" / "make"))
    evidence = importlib.import_module("evidence")

    def verdict(*gaps: float, effect: float | None = -0.1) -> str:
        return evidence.Row("a", "b", gaps, effect=effect).verdict

    assert verdict(-0.01, 0.01, 0.0) == "not seen"  # a half-width of 0.025
    assert verdict(-0.03, 0.03, 0.0) == "no power"  # 0.075
    assert verdict(-0.01, 0.01, 0.0, effect=None) == "no power"
    assert verdict(-0.1, -0.11, -0.12) == "ahead"
    assert verdict(0.1, 0.11, 0.12) == "behind"
    assert verdict(-0.5) == "one seed"
    claims = importlib.import_module("claims")
    stated = {"says": "", "brief": "", "where": "", "found": "", "verdict": "not seen"}
    assert claims.Claim(**stated).verdict == "no power"
    assert claims.Claim(**stated, gaps=[evidence.Row("a", "b", (-0.01, 0.01, 0.0), effect=0.1)]).verdict == "not seen"
    row, far = evidence.Row, (-0.1, -0.11, -0.12)
    for wrong, gaps, match in (
        ("not seen", [row("a", "b", far, effect=-0.1)], "a gap is ahead"),
        ("held", [row("a", "b", (-0.5,))], "of one seed"),
        ("held", [row("a", "b", far, unlike="the rate")], "a gap is open"),
        ("held", [row("a", "b", (-0.5, 0.5, 0.1))], "no gap excludes zero"),
        ("did not hold", [row("a", "b", (-0.5, 0.5, 0.1))], "no gap excludes zero"),
        ("proved", [], "verdicts are held"),
    ):
        with pytest.raises(ValueError, match=match):
            claims.Claim(**stated | {"verdict": wrong}, gaps=gaps)
    assert claims.Claim(**stated | {"verdict": "held"}, gaps=[row("a", "b", far)]).verdict == "held"
    with pytest.raises(ValueError, match="computed, not printed"):
        row("a", "b", far, printed=0.01)
    every = [claim for make in claims.PAPERS for claim in make().claims]
    assert all(evidence.powered(claim.gaps) for claim in every if claim.verdict == "not seen")
    for name in ("forest", "claims", "evidence", "measured", "biased", "curves", "cut", "gpu_tables", "plans"):
        sys.modules.pop(name)


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


@pytest.fixture
def speed(monkeypatch, tmp_path):
    """The maker of the tables of speed, which reads its records from an empty directory."""
    monkeypatch.syspath_prepend(str(REPOSITORY / "docs" / "make"))
    makers = {name: importlib.import_module(name) for name in ("measured", "speed")}
    monkeypatch.setattr(makers["measured"], "RESULTS", tmp_path)
    makers["measured"].read.cache_clear()
    yield makers["speed"]
    makers["measured"].read.cache_clear()
    for name in makers:
        sys.modules.pop(name)


def _bench(folder, **changed) -> None:
    row = {"contender": "rotor", "in_features": 2048, "out_features": 2048, "tokens": 4096, "dtype": "float32"}
    row |= {"mode": "eager", "phase": "forward", "ratio": 0.5, "ratio_minimum": 0.4, "ratio_maximum": 0.7}
    row |= {"memory_ratio": 0.91, "error": None} | changed
    machine = {"processor": "A Processor", "threads": 2, "gpus": [], "torch": "9"}
    record = {"command": "relinear bench -o rotor", "rows": [row], "machine": machine}
    record |= {"settings": {"operators": ["rotor"], "rounds": 3, "repeats": 5}}
    record |= {"roofline": [{"dtype": "float32", "gemm": 2e11}]}
    (folder / "speed" / "bench").mkdir(parents=True, exist_ok=True)
    (folder / "speed" / "bench" / "bench.json").write_text(json.dumps(record))


def test_tables_of_speed_are_read_from_records(speed, tmp_path) -> None:
    _bench(tmp_path)
    aim = next(line for line in speed.wanted().splitlines() if "2048 → 2048, fp32, 4,096 tokens, forward" in line)
    assert aim.endswith("| 1.92 | at most 0.6 | 0.50 (0.40 to 0.70) | yes |")
    assert "not recorded" in speed.wanted()
    assert "5 runs of the whole command, 3 rounds each. Machine: A Processor" in speed.layers()
    assert "| 2048 → 2048 | fp32 | `rotor` | 0.50 (0.40 to 0.70) |" in speed.layers()
    assert "| `bench` | 4,096 | 1 | 60 % | 60 % | 60 % |" in speed.noise()
    assert "0.91" in speed.memory()


def test_a_bound_that_is_missed_is_said(speed, tmp_path) -> None:
    _bench(tmp_path, ratio=0.62)
    aim = next(line for line in speed.wanted().splitlines() if "2048 → 2048, fp32, 4,096 tokens, forward" in line)
    assert aim.endswith("| **no** |")


def test_models_are_read_from_records(speed, tmp_path) -> None:
    row = {"variant": "low rank", "preset": "tiny", "dtype": "bfloat16", "phase": "decode", "batch_size": 8}
    row |= {"tokens_per_second": 1234.5, "speedup": 1.3, "speedup_low": 1.2, "speedup_high": 1.4}
    machine = {"processor": "A Processor", "threads": 2, "gpus": [], "torch": "9"}
    (tmp_path / "speed" / "low-rank").mkdir(parents=True)
    record = {"command": "relinear bench --model tiny", "machine": machine, "rows": [row]}
    (tmp_path / "speed" / "low-rank" / "models.json").write_text(json.dumps(record))
    assert "| tiny | `low rank` | bf16 | decode | 8 | 1,234 | 1.30 (1.20 to 1.40) |" in speed.models()
    aim = next(line for line in speed.wanted().splitlines() if "batch 8, bf16" in line)
    assert aim.endswith("| at least 1.25 | 1.30 (1.20 to 1.40) | yes |")
