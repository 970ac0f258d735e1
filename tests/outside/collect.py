"""A plugin of pytest: fixed seeds, and the outcome of every test in a file (``OUTSIDE_OUTCOMES``)."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

_ORDER = ("skipped", "passed", "failed")
_outcomes: dict[str, dict[str, Any]] = {}


def pytest_runtest_setup(item: Any) -> None:
    from transformers import set_seed

    set_seed(0)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_logreport(report: Any) -> None:
    """The worst of a test's parts counts; with several processes, this runs in the one that hands out the tests too."""
    # each of a test's thousands of parts has all that was printed before it, which would fill the memory
    report.sections.clear()
    if report.when != "call" and report.outcome == "passed":
        return
    known = _outcomes.setdefault(report.nodeid, {"outcome": report.outcome, "seconds": 0.0, "said": ""})
    known["seconds"] += report.duration
    if _ORDER.index(report.outcome) >= _ORDER.index(known["outcome"]):
        known["outcome"] = report.outcome
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            known["said"] = str(getattr(crash, "message", report.longrepr))[:300]


def pytest_sessionfinish(session: Any) -> None:
    if not hasattr(session.config, "workerinput"):
        Path(os.environ["OUTSIDE_OUTCOMES"]).write_text(json.dumps(_outcomes))
