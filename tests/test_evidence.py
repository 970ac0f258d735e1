"""Rules of evidence: intervals over seeds are Student's, one seed has none, plans are fixed and have power."""

import importlib
import json
import signal
import statistics
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from conftest import REPOSITORY, mostly_slow
from relinear.compare import gaps
from relinear.compare.figures import series
from relinear.compare.settings import MatchSettings, Preregistration, read_preregistration
from relinear.contract import config as registry
from relinear.deprecated import RENAMED_SETTINGS
from relinear.system.confidence import half_width, seeds_needed, t_quantile

#: two-sided 95 %, by degrees of freedom
TABLE = {1: 12.7062, 2: 4.30265, 3: 3.18245, 4: 2.77645, 7: 2.36462, 11: 2.20099, 29: 2.04523, 1000: 1.96234}


def losses(seeds: int, blocks: int, seed: int = 0) -> list[np.ndarray]:
    generator = np.random.default_rng(seed)
    return list(2 + generator.normal(0, 0.05, (seeds, 1)) + generator.normal(0, 0.2, blocks))


@pytest.mark.parametrize(("freedom", "wanted"), TABLE.items())
def test_quantiles_are_those_of_the_table(freedom, wanted):
    assert t_quantile(freedom) == pytest.approx(wanted, abs=1e-5)


@pytest.mark.parametrize("blocks", [1, 2, 300])
@pytest.mark.parametrize("seeds", [2, 3, 4, 8, 12])
def test_an_interval_over_seeds_contains_the_paired_t_interval(seeds, blocks):
    own, reference = losses(seeds, blocks, 1), losses(seeds, blocks, 2)
    found = gaps.gap(own, reference)
    values = [float((a - b).mean()) for a, b in zip(own, reference, strict=True)]
    half = TABLE[seeds - 1] * statistics.stdev(values) / seeds**0.5
    assert found["low"] <= found["mean"] - half + 1e-6
    assert found["mean"] + half - 1e-6 <= found["high"]
    if blocks == 1:  # nothing is known of the text
        assert found["high"] - found["mean"] == pytest.approx(half, rel=1e-5)


def test_one_seed_has_no_interval_however_long_its_text():
    found = gaps.gap(losses(1, 300, 1), losses(1, 300, 2))
    assert (found["low"], found["high"]) == (None, None)
    assert found["standard_error"] > 0
    assert half_width(found["values"]) is None


def recorded(found, place):
    """Every gap by seed of a record, with its place: an object of ``values``, ``low`` and ``high``."""
    if isinstance(found, dict) and {"values", "low", "high"} <= found.keys():
        yield place, found
    inside = found.items() if isinstance(found, dict) else enumerate(found) if isinstance(found, list) else ()
    for name, one in inside:
        yield from recorded(one, f"{place}.{name}")


def test_recorded_intervals_contain_the_paired_t_interval():
    seen, wrong, results = 0, [], REPOSITORY / "results"
    for path in sorted(results.rglob("*.json")):
        text = path.read_text(encoding="utf-8")
        for place, found in recorded(json.loads(text), str(path.relative_to(results))):
            values, bounds = found["values"], (found["low"], found["high"])
            if len(values) < 2 or None in bounds:  # one seed has no interval, and more have one
                wrong += [place] * (bounds != (None, None) or len(values) > 1)
                continue
            half = t_quantile(len(values) - 1) * statistics.stdev(values) / len(values) ** 0.5
            middle, seen = statistics.fmean(values), seen + 1
            wrong += [place] * (bounds[0] > middle - half + 1e-9 or bounds[1] < middle + half - 1e-9)
    assert wrong == []
    assert seen > 400


@pytest.mark.parametrize("seeds", mostly_slow([2, 3], 3))
def test_drawn_intervals_of_power_laws_err_by_less_than_a_tenth_of_their_width(seeds):
    drawn = [gaps.interval(gaps.replicates(np.stack(losses(seeds, 300)), seed=one)) for one in range(10)]
    width = statistics.fmean(high - low for low, high in drawn)
    for bounds in zip(*drawn, strict=True):
        assert statistics.stdev(bounds) < width / 10


def test_the_seeds_of_a_plan_are_the_least_that_have_power():
    for effect, spread in [(0.274, 0.049), (0.014, 0.011), (1.0, 0.001)]:
        count = seeds_needed(effect, spread)
        widths = [t_quantile(n - 1) * spread / n**0.5 for n in range(2, count + 1)]
        assert widths[-1] < effect / 2
        assert all(width >= effect / 2 for width in widths[:-1])


PLAN = {
    "question": "?",
    "command": "relinear compare",
    "effect": 0.2,
    "effect_from": "Table 1",
    "std": 0.03,
    "std_from": "three seeds",
    "budget": "a minute",
    "stopping": "at the end",
    "comparison": {"entries": {"dense": "dense", "low_rank": "low_rank:rank=1"}, "seeds": [0, 1, 2]},
}


def test_a_plan_needs_the_seeds_of_its_power_or_a_reason():
    assert Preregistration.load(PLAN).seeds_needed == 3
    few = PLAN | {"comparison": PLAN["comparison"] | {"seeds": [0, 1]}}
    with pytest.raises(ValueError, match="use 3, or say why not as without_power"):
        Preregistration.load(few)
    assert Preregistration.load(few | {"without_power": "hours of a core"}).comparison.seeds == (0, 1)


def test_a_plan_of_an_earlier_version_says_spread():
    earlier = {{"std": "spread", "std_from": "spread_from"}.get(key, key): value for key, value in PLAN.items()}
    with pytest.warns(DeprecationWarning, match="spread has a new name: std"):
        assert Preregistration.load(earlier) == Preregistration.load(PLAN)


@pytest.mark.parametrize("more", [["--set", "train.steps=3"], ["-o", "hdpl"], ["--tune"], ["--recipe", "quick"]])
def test_a_plan_is_carried_out_as_it_is_written(more, tmp_path):
    from relinear_cli.main import app

    path = tmp_path / "plan.yaml"
    path.write_text(json.dumps(PLAN))
    found = CliRunner().invoke(app, ["compare", "--preregistration", str(path), *more])
    assert found.exit_code != 0
    assert "--preregistration fixes all settings: combine it only with --out, --workers and --executor" in str(
        found.exception
    )


def test_the_old_name_of_the_flag_works(tmp_path):
    from relinear_cli.main import app

    with pytest.warns(UserWarning, match="--plan has a new name: --preregistration"):
        found = CliRunner().invoke(app, ["compare", f"--plan={tmp_path / 'plan.yaml'}"])
    assert "Invalid value for '--preregistration'" in found.output


@pytest.fixture(scope="module")
def committed() -> dict[str, tuple[str, dict]]:
    """Name -> command, and the comparison of every committed plan.

    Afterwards nothing is left of their operators: one of results/ is no operator of the library.
    """
    known = {*sys.modules}
    with pytest.MonkeyPatch.context() as patch:
        for family, kinds in registry._REGISTRY.items():
            patch.setitem(registry._REGISTRY, family, dict(kinds))
        for folder, module in (("rotor", "added"), ("fair", "field"), ("hdpl", "dense_start")):
            patch.syspath_prepend(str(REPOSITORY / "results" / folder))
            importlib.import_module(module)
        plans = {path.stem: read_preregistration(path) for path in (REPOSITORY / "results" / "plans").glob("*.yaml")}
        found = {name: (plan.command, plan.comparison.model_dump(mode="json")) for name, plan in plans.items()}
    for name in {*sys.modules} - known:
        del sys.modules[name]
    return found


def test_the_committed_plans_are_plans(committed):
    assert len(committed) >= 13
    for name, (command, _) in committed.items():
        assert f"--plan results/plans/{name}.yaml" in command


class _Started:
    """A plan that is run as far as its time reaches."""

    def __init__(self, log, command, needed):
        self.out, self.needed, self.log = Path(command[-1]), needed, log

    def wait(self, seconds=None):
        if seconds is not None and seconds < self.needed:
            raise subprocess.TimeoutExpired("compare", seconds)
        if self.needed == 0:
            self.out.mkdir()
            (self.out / "results.json").write_text("{}")

    def send_signal(self, number):
        self.log.append((self.out.name, number))

    def kill(self):
        self.send_signal(signal.SIGKILL)


def test_plans_of_a_gpu_are_a_queue_that_the_next_call_goes_on_with(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(REPOSITORY / "tools")
    import gpu_evidence

    done = subprocess.run([*gpu_evidence.RELINEAR, "compare", "--help"], capture_output=True, text=True, check=True)
    assert "--preregistration" in done.stdout
    stopped, begun = [], []
    long = gpu_evidence.QUEUE[1]

    def start(command, cwd):
        begun.append(Path(command[-1]).name)
        assert command[: len(gpu_evidence.RELINEAR)] == gpu_evidence.RELINEAR
        assert Path(command[command.index("--preregistration") + 1]).is_file()
        return _Started(stopped, command, needed=1e9 if begun == [gpu_evidence.QUEUE[0], long] else 0)

    assert gpu_evidence.carry_out(tmp_path, 0.5, 1, start) == list(gpu_evidence.QUEUE)  # too short to begin anything
    left = gpu_evidence.carry_out(tmp_path, 9, 1, start)
    # it does not end by itself
    assert (left, stopped) == ([long], [(long, signal.SIGTERM), (long, signal.SIGKILL)])
    begun.append("next call")
    assert gpu_evidence.carry_out(tmp_path, 9, 1, start) == []
    assert begun[-1] == long


def test_processes_of_a_gpu_begin_with_several_plans(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(REPOSITORY / "tools")
    import gpu_evidence

    begun, together = [], threading.Barrier(gpu_evidence.AT_ONCE)

    def start(command, cwd):
        begun.append(Path(command[-1]).name)
        if len(begun) <= gpu_evidence.AT_ONCE:
            together.wait(60)  # so that none goes on before all have begun
        return _Started([], command, needed=1e9)

    gpu_evidence.carry_out(tmp_path, 9, gpu_evidence.AT_ONCE, start)
    assert sorted(begun[: gpu_evidence.AT_ONCE]) == sorted(gpu_evidence.QUEUE[: gpu_evidence.AT_ONCE])


@pytest.mark.parametrize("seeds", [1, 2])
def test_a_gap_of_one_seed_is_drawn_hollow_and_without_a_band(seeds):
    found = gaps.gap(losses(seeds, 30, 1), losses(seeds, 30, 2))
    entries = [{"name": "dense", "gap": None}, {"name": "hdpl", "gap": found}]
    rows = [{"tokens": tokens, "entries": entries} for tokens in (1_000, 2_000)]
    (panel,) = series(entries, {"dense": "#000000", "hdpl": "#000000"}, rows, "tokens", "dense")
    (line,) = panel.shown
    assert line.hollow == (seeds == 1)
    assert (line.low is None) == (seeds == 1)


def departures(plan, found, key=""):
    """Dotted names of the settings in which two mappings differ."""
    if not isinstance(plan, dict) or not isinstance(found, dict):
        return [] if plan == found else [key]
    names = dict.fromkeys([*plan, *found])
    return [each for n in names for each in departures(plan.get(n), found.get(n), f"{key}.{n}".strip("."))]


def test_departures_are_named_at_their_place():
    assert departures({"a": {"b": 1, "c": [2]}, "d": 3}, {"a": {"b": 1, "c": [4]}, "e": 5}) == ["a.c", "d", "e"]


def test_records_differ_from_their_plan_as_their_page_says(committed):
    """A record of a plan names it in its command, and lies in the folder that the plan's name begins with."""
    results, seen = REPOSITORY / "results", []
    for name, (_, comparison) in sorted(committed.items()):
        folder = results / name.partition("-")[0]
        texts = [record.read_text(encoding="utf-8") for record in sorted(folder.rglob("*.json"))]
        records = [json.loads(text) for text in texts if f"plans/{name}.yaml" in text]
        for record in records:
            if not isinstance(record, dict) or f"plans/{name}.yaml" not in record.get("command", ""):
                continue
            page = (folder / "README.md").read_text(encoding="utf-8")
            recipe = record["recipe"]  # with what came after it, under today's names
            train = {RENAMED_SETTINGS["TrainSettings"].get(key, key): value for key, value in recipe["train"].items()}
            found = departures(comparison, recipe | {"match": MatchSettings.upgraded(recipe["match"]), "train": train})
            assert [one for one in found if f"`{one}`" not in page] == []
            seen.append(name)
    assert "rotor" in seen
