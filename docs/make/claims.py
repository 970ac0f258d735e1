"""The pages of claims: results/claims/*.yaml as Markdown, with verdicts that the gaps have to support."""

from __future__ import annotations

import dataclasses
import functools
import html
import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any

import budgets
import decisions
import evidence
import file_sizes
import forest
from measured import RESULTS, folded, table
from relinear.settings.yaml_settings import read_yaml

PAPERS = ("hdpl", "ccl", "transponder", "cgt", "rotor")
VERDICTS = {
    "held": "measured and confirmed",
    "partly": "confirmed in part, or under a condition",
    "did not hold": "measured and contradicted",
    "inconclusive": "too few seeds, or the runs also differ in other settings",
}
#: what stands in the place of a verdict
OTHERS = {
    "not run": "the code is tested, the experiment was not run",
    "not claimed": "measured; the paper makes no such claim",
}
#: characters of a claim, words of its summary, words of a text that is not split into points
LONGEST, MOST_WORDS, PARAGRAPH = 60, 8, 60


@dataclasses.dataclass(frozen=True)
class Claim:
    """A claim of a paper and what was found.

    says: at most 60 characters. brief: the result in at most eight words. where: in the paper. found: in full. runs:
    the letters of the runs it rests on. whole: the claim in the paper's words, where it is longer. gaps: names of the
    rows of results/gaps.yaml that the verdict rests on, in ``unit``. tables: heads and rows below what was found.
    """

    says: str
    verdict: str
    brief: str
    found: str
    where: str = ""
    runs: str = ""
    whole: str = ""
    gaps: Sequence[str] = ()
    unit: str = "nats"
    tables: Sequence[Mapping[str, Any]] = ()

    def __post_init__(self) -> None:
        if against := self._unfounded({row.verdict for row in self.rows}):
            raise ValueError(f"{self.says!r} cannot be {self.verdict!r}: {against}")
        if len(self.says) > LONGEST or len(self.brief.split()) > MOST_WORDS:
            raise ValueError(f"too long for a table: {self.says!r}, {self.brief!r}")

    @property
    def rows(self) -> list[evidence.Row]:
        """The gaps that the verdict rests on."""
        return [row for name in self.gaps for row in evidence.select(name)]

    def _unfounded(self, verdicts: set[str]) -> str:
        """Why the gaps do not support the verdict; "" where they do."""
        if self.verdict not in VERDICTS | OTHERS:
            return f"verdicts are {', '.join(VERDICTS)}"
        if self.verdict == "held" and evidence.INCONCLUSIVE in verdicts:
            return "a gap is inconclusive"
        if self.verdict == "did not hold" and verdicts == {evidence.INCONCLUSIVE}:
            return "no gap excludes zero or half of the paper's effect"
        return ""


@functools.cache
def papers() -> tuple[dict[str, Any], ...]:
    """What results/claims says of every paper, with its claims as ``Claim``."""
    found = [_read(name) for name in PAPERS]
    return tuple(paper | {"claims": [Claim(**one) for one in paper["claims"]]} for paper in found)


def _read(name: str) -> dict[str, Any]:
    return read_yaml(RESULTS / "claims" / f"{name}.yaml")


def pages() -> dict[str, str]:
    """The page of all claims and one a paper, in Markdown, by their paths under docs/."""
    return {"claims.md": _overview()} | {f"claims/{paper['name']}.md": _page(paper) for paper in papers()}


def _counts(claims: Sequence[Claim]) -> dict[str, int]:
    verdicts = [claim.verdict for claim in claims]
    return {verdict: verdicts.count(verdict) for verdict in VERDICTS | OTHERS}


def _overview() -> str:
    told, names, counts = _read("overview"), list[str](), list[dict[str, int]]()
    for paper in papers():
        counts.append(_counts(paper["claims"]))
        names.append(f"[{paper['title'].partition(':')[0].removesuffix(' layers')}](claims/{paper['name']}.md)")
    lines = [[f"**{word}**", *(str(count[word]) for count in counts)] for word in VERDICTS | OTHERS]
    every = _counts([claim for paper in papers() for claim in paper["claims"]])
    legend = [[f"**{word}**", str(every[word]), meaning] for word, meaning in (VERDICTS | OTHERS).items()]
    parts = [
        _head("overview", "Which claims held"),
        told["introduction"],
        forest.in_page("pictures"),
        told["drawn"],
        table(["verdict", *names], lines),
        table(["verdict", "claims", "meaning"], legend),
        "## Is a structure worth its bytes?",
        f"{_worth()}\n{told['bytes']}",
        file_sizes.in_claims(),
        "## How far short runs decide",
        told["short"],
        decisions.in_page(),
        "## What was planned, and what it changed",
        told["planned"],
        folded(f"Table of the {len(told['plans']['rows'])} plans", table(told["plans"]["head"], told["plans"]["rows"])),
        "Each paper's page ends with its equations: where each is in the code, its test, and what differs.",
    ]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _worth() -> str:
    found = file_sizes.verdicts()
    said = [f"**{verdict}** for {', '.join(found[verdict])}" for verdict in VERDICTS if verdict in found]
    return f"At equal file size, against dense: {'; '.join(said)}."


def in_readme() -> str:
    """How many claims got which verdict, and what that takes."""
    every = _counts([claim for paper in papers() for claim in paper["claims"]])
    return (
        f"**What has it found?** Of {sum(every[verdict] for verdict in VERDICTS)} claims of five papers on such layers "
        f"**{every['held']} held, {every['partly']} held in part, {every['did not hold']} did not, "
        f"{every['inconclusive']} are inconclusive**. Our runs are far below the papers' scale. "
        f"Another {every['not run']} claims were not run. "
        "A gap counts only if its 95 % interval over seeds excludes zero. "
        "Each claim has its [command, interval and verdict](docs/claims.md)."
    )


def _head(name: str, title: str) -> str:
    return f"<!-- Generated by `make docs-operators` from results/claims/{name}.yaml. -->\n\n# {title}"


def _page(paper: Mapping[str, Any]) -> str:
    """A paper: question, answer, picture, a table of verdicts, and folded what each rests on."""
    name, claims = paper["name"], paper["claims"]
    runs = [
        f"**{letter}.** {run['budget']} ([{run['page']}](../../results/{run['page']}/README.md)):\\\n`{run['command']}`"
        for letter, run in paper["runs"].items()
    ]
    parts = [
        _head(name, paper["title"]),
        f"*{paper['question']}* {paper['summary']}",
        forest.in_page("../pictures", name),
        *([budgets.in_page("../pictures", name)] if name in budgets.PAPERS else []),
        table(["the paper says", "verdict", "in short"], [[c.says, f"**{c.verdict}**", c.brief] for c in claims]),
        "## What was found\n\nOpen a claim for details; letters refer to the runs at the end.",
        *map(_found, claims),
        *_withdrawn(paper),
        folded("The runs: commands, budgets, pages with machine and settings", "\n\n".join(runs)),
        folded("How to read the intervals", _read("overview")["notes"].strip()),
        "## The paper, line by line",
        'Each item has a test that compares it with the paper, or a reason why it differs. "Not run": the code is '
        "there, the experiment was not run.",
        *itertools.starmap(_lines, _read(f"lines/{name}").items()),
        "[All claims](../claims.md)",
    ]
    return "\n\n".join(parts) + "\n"


def _withdrawn(paper: Mapping[str, Any]) -> list[str]:
    """Folded: what earlier records of a paper said, and what took its place."""
    if "withdrawn" not in paper:
        return []
    told = paper["withdrawn"]
    inside = f"{told['said'].strip()}\n\n{table(told['head'], told['rows'])}"
    return [folded("Withdrawn figures beside the new ones", inside)]


def _lines(part: str, rows: Sequence[Mapping[str, str]]) -> str:
    """A part of the paper: what it says, where that is in the code, what checks it, where it differs and why."""
    items = []
    for row in rows:
        said = [f"**{row['paper']}**"]
        said += [f"{words} {row[key]}" for key, words in (("here", "In"), ("checked", "Checked by")) if key in row]
        said += [row["differs"][0].upper() + row["differs"][1:]] if "differs" in row else []
        items.append(f"- {'. '.join(said)}.")
    return folded(f"{part}: {len(items)} items", "\n".join(items))


def _found(claim: Claim) -> str:
    says = claim.whole or claim.says
    said = f"In the paper ({claim.where}): {says}." if claim.where else "The paper makes no such claim."
    text = f"{claim.found}."
    if claim.rows:
        text += f" {evidence.described(claim.rows, claim.unit)}."
    if claim.runs:
        text += f" Runs: {claim.runs}."
    tables = [table(one["head"], one["rows"]) for one in claim.tables]
    summary = html.escape(f"{claim.says}: {claim.verdict}", quote=False)
    return folded(summary, "\n\n".join([said, _in_points(text), *tables]))


def _in_points(text: str) -> str:
    """A long text with a point for each sentence; nothing that is bold or in brackets is taken apart."""
    points = [""]
    for sentence in re.split(r"(?<=\.) (?=[A-Z*`])", text):
        whole = points[-1].count("(") == points[-1].count(")") and points[-1].count("**") % 2 == 0
        points[-1:] = [points[-1], sentence] if whole else [f"{points[-1]} {sentence}"]
    points = points[1:]
    return text if len(points) < 3 or len(text.split()) < PARAGRAPH else "\n".join(f"- {point}" for point in points)
