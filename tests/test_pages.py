"""Pages: what is in them as text, and what they do in a browser where there is one."""

import csv
import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest

from relinear.analysis.analyses import ANALYSES
from relinear.analysis.report import analyses_section
from relinear.compare import figures
from relinear.compare.report import SHORT_RUN_NOTE, read_results, results_section, results_table, verdict
from relinear.deprecated import with_new_columns
from relinear.distill.report import distill_section
from relinear.pages import page as pages
from relinear.pages.blocks import Cell, Chart, Listing, Row, Section, Table, Text
from relinear.pages.figures import Axis, Panel, Series, described
from relinear.pages.records import as_yaml
from relinear_cli.main import main
from relinear_cli.report import trained_in

RESULTS = Path(__file__).parents[1] / "results"
COMPARISON = Path(__file__).parent / "fixtures" / "v0.1" / "comparison"
HOSTILE = ("<script>alert(1)</script>", '"onload="alert(1)', "</noscript><img src=x onerror=alert(1)>", "{{ 7 * 7 }}")


def hostile_section() -> Section:
    names = list(HOSTILE)
    rows = [Row([name, Cell(str(n), n, small=name, title=name)], name) for n, name in enumerate(names)]
    shown = [Series(name=name, color="#0072B2", number=n, x=[0, 1, 2], y=[n, 1, 2]) for n, name in enumerate(names)]
    shown += [Series(name=n, color="#D55E00", x=[1], y=[0], texts=[n], mode="points", label=n) for n in names]
    chart = Chart(names[0], Panel(shown, Axis(title=names[0]), Axis(title=names[1])))
    blocks = [*map(Text, names), Table(["entry", names[0]], rows), chart]
    blocks += [Listing(name, name) for name in names]
    return Section(names[0], names[1], blocks, dict.fromkeys(names, "#0072B2"), names[2])


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))


def tags_of(page: str) -> list[tuple[str, dict[str, str | None]]]:
    parser = Tags()
    parser.feed(page)
    return parser.tags


def test_text_of_data_is_escaped_everywhere() -> None:
    page = pages.render([hostile_section()])
    tags = tags_of(page)
    assert [a.get("id") for tag, a in tags if tag == "script"] == ["page"]
    assert not [a for _, a in tags for name in a if name.startswith("on")]
    assert all(str(a["src"]).startswith("data:") for _, a in tags if "src" in a)
    assert "{{ 7 * 7 }}" in page


def test_a_page_draws_its_figures_itself_and_is_small() -> None:
    page = pages.render([hostile_section(), hostile_section()])
    assert len(page) < 100_000
    assert page.count("data-figure=") == 2
    values = Panel([Series(name="a", color="#000000", x=range(3), y=[1.0, float("nan"), 2.0])], Axis(ticks={0.5: "b"}))
    said = json.loads(json.dumps(described(values)))
    assert said["shown"][0]["x"] == [0, 1, 2]
    assert said["shown"][0]["y"] == [1.0, None, 2.0]
    assert said["x"]["ticks"] == {"0.5": "b"}


def test_figures_beyond_the_limit_are_left_out_and_named() -> None:
    large, small = ([0.123456789] * count for count in (25_000, 10))
    panels = [Panel([Series(name="entry", color="#0072B2", x=range(len(y)), y=y)]) for y in (large, large, small)]
    charts = [Chart(name, panel) for name, panel in zip(("first", "second", "third"), panels, strict=True)]
    page = pages.render([Section("a", "b", charts)])
    assert len(page.encode()) < pages.LIMIT
    assert page.count("data-figure=") == 2
    assert "Omitted to limit the size of the page: second" in page


def test_an_old_comparison_with_analyses_and_a_run_on_one_page(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(COMPARISON, "old")
    (tmp_path / "old" / "analysis").mkdir()
    shutil.copy(RESULTS / "ccl" / "analysis" / "gates.json", "old/analysis")
    shutil.copytree(COMPARISON / "runs" / "dense" / "seed-0", "run")
    assert main(["report", "old", "run"]) == 0
    assert "report.html" in capsys.readouterr().out
    page = Path("report.html").read_text()
    results = json.loads(Path("old/results.json").read_text())
    for text in (*(f'data-entry="{entry["name"]}"' for entry in results["entries"]), "Training run run"):
        assert text in page
    for text in ("Analysis: gates", "A gate near 0 closes", "What was run", "<dt>seeds</dt><dd>0, 1</dd>", "× dense"):
        assert text in page
    assert sorted(path.stem for path in Path("old/plots").glob("*.png")) == ["curves", "pareto", "speeds"]


def comparison(tmp_path: Path, losses: dict[str, list[float]], ngram: float | None = None) -> dict:
    """A comparison of an older version with other losses by entry, one per seed."""
    values = with_new_columns(json.loads((COMPARISON / "results.json").read_text()))
    entry = values["entries"][0]
    values["entries"] = []
    for name, found in losses.items():
        mean = sum(found) / len(found)
        statistic = {"mean": mean, "std": None, "values": found}
        runs = [run | {"validation_loss": loss} for run, loss in zip(entry["runs"] * len(found), found, strict=False)]
        values["entries"].append(entry | {"name": name, "validation_loss": statistic, "runs": runs})
    values["ngram"] = ngram and {"order": 5, "tokens": 320, "validation_loss": ngram, "perplexity": 2.0}
    return values | {"reference": None}


def test_the_best_is_marked_where_its_interval_excludes_the_next(tmp_path) -> None:
    alike = {"dense": [3.0, 3.1], "a": [2.0, 2.5], "b": [2.2, 2.4]}
    assert [row.best for row in results_table(comparison(tmp_path, alike)).rows] == [False] * 3
    apart = alike | {"a": [1.0, 1.1], "b": [2.0, 2.11]}
    assert [row.best for row in results_table(comparison(tmp_path, apart)).rows] == [False, True, False]
    single = {name: found[:1] for name, found in apart.items()}
    table = results_table(comparison(tmp_path, single, 0.5))
    assert [row.best for row in table.rows] == [False] * 4
    assert list(table.head[:4]) == ["entry", "validation loss, nats per byte", "gap to dense", "parameters"]
    assert "perplexity per byte" in table.head
    assert [row.shown[2].text for row in table.rows] == ["–", "-2.000", "-1.000", "-2.500"]
    gap = next(row.shown[2].text for row in results_table(comparison(tmp_path, apart)).rows if row.shown[0].text == "a")
    assert gap == "-2.000 [-2.000, -2.000]"  # over seeds, as in the verdict


def test_an_entry_of_another_size_does_not_win(tmp_path) -> None:
    found = comparison(tmp_path, {"dense": [3.0, 3.1], "a": [1.0, 1.1], "b": [2.0, 2.11]})
    found["entries"][1]["parameters"] *= 0.83
    assert [row.best for row in results_table(found).rows] == [False, False, True]
    assert verdict(found).startswith("b is ahead of dense by 0.995 nats per byte")
    found["match"]["by"] = "flops"
    assert [row.best for row in results_table(found).rows] == [False, True, False]


def test_what_a_token_uses_stands_beside_the_whole(tmp_path) -> None:
    found = comparison(tmp_path, {"dense": [3.0, 3.1], "a": [1.0, 1.1]})
    found["entries"][1] |= {
        "parameters": 900,
        "inactive_parameters": 300,
        "flops_per_token": 500,
        "inactive_flops": 600,
    }
    table = results_table(found)
    place, cost = table.head.index("parameters"), table.head.index("FLOPs / token")
    assert [row.shown[place].text.partition(" ")[2] for row in table.rows[:2]] == ["", "(600 active)"]
    assert table.rows[1].shown[cost].text == "500 (1.10k in all)"


def test_a_comparison_as_csv_and_latex(tmp_path, capsys) -> None:
    shutil.copytree(COMPARISON, tmp_path / "100%_run")
    found = comparison(tmp_path / "100%_run", {"dense": [3.0, 3.1], "a": [1.0, 1.1], "b_c": [2.0, 2.11]}, 2.9)
    found["reference"] = "dense"
    gap = {"mean": -2.0, "low": -2.5, "high": -1.5, "values": [-2.0], "standard_error": 0.1, "blocks": 2}
    found["entries"] = [entry | {"gap": None} for entry in found["entries"]]
    found["entries"][1] |= {"gap": gap, "inactive_parameters": 100}
    (tmp_path / "100%_run" / "results.json").write_text(json.dumps(found))
    table, tex = tmp_path / "t.csv", tmp_path / "t.tex"
    command = ["report", str(tmp_path / "100%_run"), "--csv", str(table), "--latex", str(tex)]
    assert main(command) in (None, 0)
    rows = list(csv.DictReader(table.open(encoding="utf-8")))
    assert [(row["entry"], row["gap_low"], row["seeds"]) for row in rows] == [
        ("dense", "", "2"),
        ("a", "-2.5", "2"),
        ("b_c", "", "2"),
    ]
    assert int(rows[1]["parameters"]) - int(rows[1]["active_parameters"]) == 100
    points = list(csv.DictReader((tmp_path / "t-curves.csv").open(encoding="utf-8")))
    assert {(row["entry"], row["seed"]) for row in points} == {(n, s) for n in ("dense", "a", "b_c") for s in "01"}
    text = tex.read_text(encoding="utf-8")
    assert r"\textbf{a} & 1.050 & $-2.000$ [$-2.500$, $-1.500$] &" in text
    assert r"b\_c & " in text
    assert r"5-grams & 2.900 & $-0.150$ & -- & " in text
    for row in text.partition("\\toprule\n")[2].partition("\\bottomrule")[0].replace("\\midrule\n", "").splitlines():
        assert row.endswith(r" \\")
        assert row.count(" & ") == text.partition("}{")[2].partition("}")[0].count("r")
    capsys.readouterr()
    assert main(command) == 2  # as that is no file of ours to replace
    assert "t.csv exists already" in capsys.readouterr().err
    assert main([*command[:1], str(tmp_path), *command[2:]]) == 2
    assert "one finished comparison" in capsys.readouterr().err


def test_a_short_run_is_told_how_far_it_decides(tmp_path) -> None:
    shutil.copytree(COMPARISON, tmp_path / "comparison")
    for tokens, told in ((128, True), (3_000_000, False)):
        results = json.loads((tmp_path / "comparison" / "results.json").read_text())
        results["entries"][0]["runs"][0]["curve"][-1]["tokens"] = tokens
        (tmp_path / "comparison" / "results.json").write_text(json.dumps(results))
        texts = [block.text for block in results_section(tmp_path / "comparison").blocks if isinstance(block, Text)]
        assert any(SHORT_RUN_NOTE in text for text in texts) == told


def test_a_report_shows_the_settings_that_are_not_defaults(tmp_path) -> None:
    shutil.copytree(COMPARISON, tmp_path / "comparison")
    section = results_section(tmp_path / "comparison")
    listed = {block.title: block.text for block in section.blocks if isinstance(block, Listing)}
    assert "schedule:" not in listed["dense"]  # cosine
    assert "batch_size: 2" in listed["dense"]


def test_the_verdict_says_how_sure_it_is(tmp_path) -> None:
    losses = {"dense": [3.0, 3.1], "a": [2.0, 2.11]}
    assert verdict(comparison(tmp_path, losses)).startswith(
        "a is ahead of dense by 0.995 nats per byte, 95 % interval 0."
    )
    smaller = comparison(tmp_path, losses)
    next(entry for entry in smaller["entries"] if entry["name"] == "a")["parameters"] *= 0.3
    said = verdict(smaller)
    assert said.startswith(
        "Illustration only: untuned learning rate, dense has 3.3 times the parameters. Here a is ahead"
    )
    losses["a"] = [2.9, 3.15]
    assert "Inconclusive: no difference detected between a and dense. " in verdict(comparison(tmp_path, losses))
    said = verdict(comparison(tmp_path, {"dense": [3.0], "a": [3.2]}, 1.0))
    assert said.startswith(
        "Illustration only: one seed, untuned learning rate. Here a is behind dense by 0.200 nats per byte."
    )
    assert "An n-gram model (5-grams) still has a lower loss than every entry" in said


def test_a_line_of_counting_never_squeezes_the_curves() -> None:
    runs = [{"curve": [{"step": n, "tokens": n, "validation_loss": 3 - n / 10} for n in range(6)]}]
    entry = {"name": "a", "runs": runs, "settings": {}}
    for counted, drawn in ((2.4, [2.4]), (0.5, []), (9.0, [])):
        (panel,) = figures.curves([entry], {"a": "#000000"}, {"order": 5, "validation_loss": counted})
        assert [guide.y for guide in panel.guides] == drawn
        low, high = panel.y.bounds
        assert high - low < 1


def test_a_caption_names_the_grey_line_only_where_one_is_drawn(tmp_path) -> None:
    values = with_new_columns(json.loads((COMPARISON / "results.json").read_text()))
    for parameters in (100, 300):  # the best one is the smallest: it beats all others
        entries = [
            entry | {"speed": None, "parameters": size, "flops_per_token": size, "validation_loss": loss}
            for entry, size, value in zip(values["entries"], (200, parameters), (3.0, 2.0), strict=False)
            for loss in [{"mean": value, "std": None, "values": [value]}]
        ]
        (tmp_path / "results.json").write_text(json.dumps(values | {"entries": entries, "reference": None}))
        captions = [block.description for block in results_section(tmp_path).blocks if isinstance(block, Chart)]
        front = next(caption for caption in captions if "against parameters" in caption)
        assert ("grey line" in front) == (parameters == 300)
        (panel,) = {panel.y.title for panel in figures.pareto(entries, {e["name"]: "#000000" for e in entries})}
        assert panel == "validation loss (nats per byte)"


def pages_of_records(folder: Path) -> list[Path]:
    """The page of every kind of record that this repository keeps."""
    made = []
    for place in ("speed/bench", "speed/hdpl-67m", "ccl/analysis", "scale"):
        target = folder / place.replace("/", "-")
        shutil.copytree(RESULTS / place, target)
        made.append(target)
    shutil.copytree(COMPARISON, folder / "comparison")
    shutil.copytree(COMPARISON / "runs" / "dense" / "seed-0", folder / "run")
    for target in [*made, folder / "comparison", folder / "run"]:
        assert main(["report", str(target)]) == 0
    return [target / "report.html" for target in [*made, folder / "comparison", folder / "run"]]


def test_every_page_starts_with_its_verdict_and_a_figure_and_is_small(tmp_path) -> None:
    for path in pages_of_records(tmp_path):
        page = path.read_text()
        assert len(page.encode()) < 1_000_000, path
        section = page[page.index("<section>") :]
        assert (
            section.index('<p class="lead">')
            < section.index("<figure")
            < section.index("<table" if "<table" in section else "<dl")
        )


@pytest.mark.parametrize("name", ["bench", "bench-rotor", "hdpl-67m", "llama-60m", "low-rank"])
def test_recorded_benchmarks_have_a_page(name: str, tmp_path) -> None:
    for kind in ("bench.json", "models.json"):
        if (RESULTS / "speed" / name / kind).is_file():
            shutil.copy(RESULTS / "speed" / name / kind, tmp_path)
    assert main(["report", str(tmp_path)]) == 0
    page = (tmp_path / "report.html").read_text()
    assert "What was run" in page
    assert "2.13.0+cpu" in page


def test_what_cannot_be_reported_is_said(tmp_path, capsys) -> None:
    assert main(["report", str(tmp_path)]) != 0
    assert "has nothing to report" in capsys.readouterr().err
    (tmp_path / "report.json").write_text('{"layers": [1]}')
    assert main(["report", str(tmp_path)]) != 0
    assert "damaged or of another version" in capsys.readouterr().err


def test_a_distillation_has_a_page_without_its_later_fields() -> None:
    fit = {"name": "a<b>", "operator": "x", "parameters": 1, "parameters_before": 2, "start_error": 0.5, "error": 0.25}
    section = distill_section({"loss": "mse", "layers": [fit | {"cosine": None}]})
    page = pages.render([section])
    assert "a&lt;b&gt;" in page
    assert "0.2500" in page


def analyses(folder: Path) -> Path:
    """A directory of every analysis, as ``relinear analyze`` leaves one, with tokens that are no friends of HTML."""
    shutil.copytree(RESULTS / "ccl" / "analysis", folder)
    numbers = json.loads((RESULTS / "transponder" / "modulators.json").read_text())
    numbers["tokens"][: len(HOSTILE)] = HOSTILE
    name = next(iter(numbers["scalar"]))
    values = [[1.0, 1.1], [0.9, 1.0], [0.8, 1.2], [1.0, 1.0]]
    numbers["channel"] = {name: {"channels": [0, 7], "values": values, "spread": 0.2}}
    (folder / "modulators.json").write_text(json.dumps(numbers))
    latent = {"deviation": [0.5, 0.0], "sigma": 1.0, "nats": None, "active": 1, "size": 2}
    (folder / "latents.json").write_text(json.dumps(dict.fromkeys(HOSTILE, latent)))
    angles = {"left": [[30.0, 0.0]], "right": [[1.0, 0.0]]}
    (folder / "planes.json").write_text(json.dumps(dict.fromkeys(HOSTILE, angles)))
    row = {"tokens": 9, "width": 4, "linear_share": 0.5, "update": 0.1, "effective_rank": {"data": 1.5}}
    row |= {"singular_values": {"data": [1.0, 0.5]}}
    (folder / "outputs.json").write_text(json.dumps({HOSTILE[0]: dict.fromkeys(HOSTILE, row)}))
    record = {"model": HOSTILE[0], "command": "relinear analyze MODEL", "machine": {"torch": "2.13"}, "sequences": 64}
    (folder / "analyze.json").write_text(json.dumps(record))
    return folder


def test_every_analysis_has_its_page(tmp_path) -> None:
    folder = analyses(tmp_path / "look")
    assert main(["report", str(folder)]) == 0
    page = (folder / "report.html").read_text()
    shown = [name for name in ANALYSES if (folder / f"{name}.json").is_file()]
    assert all(name.startswith("cgt_") for name in set(ANALYSES) - set(shown))  # whose blocks their own tests make
    for name in shown:
        assert f"Analysis: {name.replace('_', ' ')}" in page
    assert "<dt>command</dt><dd>relinear analyze MODEL</dd>" in page
    assert f"What {len(shown)} analyses see" in page
    assert not [a for _, a in tags_of(page) for key in a if key.startswith("on")]
    assert len(page.encode()) < pages.LIMIT
    (folder / "top_tokens.json").write_text("{}")
    assert main(["report", str(folder)]) != 0


@pytest.mark.slow
def test_a_run_is_looked_into_before_its_page_is_written(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("Once upon a time there were three words and a full stop. " * 300)
    recipe = "--data text.txt --model tiny --steps 1 --seeds 0,1 --set train.warmup_steps=0 --out run"
    monkeypatch.setattr("relinear.compare.run.runs_at_once", lambda recipe: 0)
    small = {"speed.seconds": "0.01", "train.model_overrides": "{hidden_size: 32, num_hidden_layers: 1}"}
    sets = [word for key, value in small.items() for word in ("--set", f"{key}={value}")]
    entries = ["-o", "dense", "-o", "low_rank:rank=4", "-o", "transponder:rank=2"]
    assert main(["compare", *entries, *recipe.split(), *sets]) == 0
    assert main(["report", "run", "--analyze"]) == 0
    assert "runs/dense/seed-0: no analysis applies" in capsys.readouterr().out
    page = Path("run/report.html").read_text()
    headings = re.findall("Analysis: (.*?)</h2>", page)
    assert headings == [
        "outputs, runs/low_rank/seed-0/analysis",
        "effective rank, runs/low_rank/seed-0/analysis",
        "outputs, runs/transponder/seed-0/analysis",
        "modulators, runs/transponder/seed-0/analysis",
    ]
    assert len(page.encode()) < pages.LIMIT
    shutil.rmtree("run/runs/low_rank/seed-0/analysis")
    Path("empty").mkdir()
    assert main(["report", "run", "empty", "--analyze"]) != 0
    assert not Path("run/runs/low_rank/seed-0/analysis").exists()
    assert "no trained model is saved in empty" in capsys.readouterr().err
    for width in ("96", "128"):
        shutil.copytree("run/runs", f"widths/sizes/{width}/runs")
    shutil.move("run/runs", "widths/sizes/not-a-width/runs")
    assert {folder.parts[2] for folder in trained_in(Path("widths"))} == {"128"}
    assert main(["report", "run", "--analyze"]) != 0
    assert "no trained model is saved in run" in capsys.readouterr().err


def test_channel_gates_are_a_map(tmp_path) -> None:
    folder = analyses(tmp_path / "look")

    def charts() -> list[Chart]:
        return [b for b in analyses_section(folder).blocks if isinstance(b, Chart) and "Channel gates" in b.description]

    (drawn,) = charts()
    assert described(drawn.panel)["shown"][0]["values"][1] == [0.9, 1.0]
    numbers = json.loads((folder / "modulators.json").read_text())
    del numbers["channel"]  # a directory of an older version
    (folder / "modulators.json").write_text(json.dumps(numbers))
    assert charts() == []


def test_names_break_where_their_parts_meet() -> None:
    page = pages.render([Section("a", "b", [Table(["entry"], [Row(["x.0<b>_proj"]), Row(["0.25 of 1, 2"])])])])
    assert "x.<wbr>0&lt;b&gt;_<wbr>proj" in page
    assert "0.<wbr>25 of 1, 2" in page


# In a browser


@pytest.fixture(scope="module", params=["comparison", "hostile", "analyses"])
def opened(request, browser, tmp_path_factory):
    """A page in the browser, its kind, and what went wrong on it or was asked for from elsewhere."""
    folder = tmp_path_factory.mktemp("pages")
    if request.param == "comparison":
        shutil.copytree(COMPARISON, folder / "run")
        assert main(["report", str(folder / "run")]) == 0
        path = folder / "run" / "report.html"
    elif request.param == "analyses":
        assert main(["report", str(analyses(folder / "look"))]) == 0
        path = folder / "look" / "report.html"
    else:
        path = pages.write_page(folder / "report.html", [hostile_section()])
    view, wrong = browser.new_page(), []
    view.set_default_timeout(120_000)  # the first page of a busy machine takes its time
    view.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
    view.on("pageerror", lambda error: wrong.append(str(error)))
    view.on("dialog", lambda dialog: wrong.append(f"dialog {dialog.message}"))
    view.on("request", lambda r: None if re.match("file:|data:|blob:", r.url) else wrong.append(r.url))
    view.goto(path.as_uri())
    view.wait_for_selector(".chart .series", state="attached")
    return view, request.param, wrong


def test_a_page_loads_without_an_error_and_fetches_nothing(opened) -> None:
    view, kind, wrong = opened
    view.emulate_media(color_scheme="dark")
    view.set_viewport_size({"width": 390, "height": 800})
    view.wait_for_function("document.documentElement.scrollWidth <= 390")
    tallest = "() => Math.max(...[...document.querySelectorAll('tbody tr')].map((row) => row.offsetHeight))"
    assert view.evaluate(tallest) < 300  # no column is a letter wide
    if kind == "comparison":  # entry, loss and gap are seen first
        edges = (
            view.locator("table.sortable")
            .first.locator("th")
            .evaluate_all("all => all.slice(0, 3).map((e) => [e.textContent, e.getBoundingClientRect().right])")
        )
        assert [name for name, _ in edges] == ["entry", "validation loss, nats per byte", "gap to dense"]
        assert edges[-1][1] <= 390
    view.emulate_media(color_scheme="light", media="screen")
    view.set_viewport_size({"width": 1280, "height": 800})
    view.wait_for_function("[...document.querySelectorAll('.chart')].every((c) => c.querySelector('.series'))")
    assert wrong == []


def test_a_printed_page_says_which_colour_is_whose(opened) -> None:
    view, kind, _ = opened
    view.emulate_media(media="print")
    shown = "() => [...document.querySelectorAll('.entries label')].filter((e) => e.checkVisibility()).length"
    assert view.evaluate(shown) == view.locator(".entries label").count()
    assert view.locator(".entries input:visible").count() == 0
    view.emulate_media(media="screen")
    assert (view.locator(".entries input:visible").count() > 0) == (kind != "analyses")


def test_what_is_pointed_at_is_said(opened) -> None:
    view, _, wrong = opened
    chart = view.locator(".chart").first
    chart.scroll_into_view_if_needed()
    box = chart.locator(":scope > svg").bounding_box()
    for share in range(5, 100, 2):
        view.mouse.move(box["x"] + share / 100 * box["width"], box["y"] + share / 100 * box["height"])
        if chart.locator(".tooltip:visible").count():
            break
    assert chart.locator(".tooltip:visible").inner_text().strip()
    view.mouse.move(0, 0)
    assert wrong == []


def test_tables_sort_up_and_down(opened) -> None:
    view = opened[0]
    table = view.locator("table.sortable").first
    column = 3 if opened[1] == "analyses" else 2  # of numbers
    button = table.locator("th button").nth(column - 1)

    def values() -> list[float]:
        return [
            float(v)
            for v in table.locator(f"tbody td:nth-child({column})").evaluate_all("c => c.map(x => x.dataset.value)")
        ]

    button.click()
    assert values() == sorted(values())
    button.click()
    assert values() == sorted(values(), reverse=True)
    assert table.locator("th").nth(column - 1).get_attribute("aria-sort") == "descending"


def test_the_filter_changes_tables_and_figures(opened) -> None:
    view, kind, wrong = opened
    if kind == "analyses":
        pytest.skip("analyses have no entries to filter by")
    box = view.locator("fieldset.entries input").nth(1)
    rows = view.locator("tr[data-entry]:visible").count()
    shown = "() => document.querySelector('.chart').querySelectorAll('.series').length"
    before = view.evaluate(shown)
    box.uncheck()
    assert view.locator("tr[data-entry]:visible").count() < rows
    assert view.evaluate(shown) < before
    box.check()
    assert view.locator("tr[data-entry]:visible").count() == rows
    assert view.evaluate(shown) == before
    assert wrong == []


def test_values_nested_without_end_are_an_error_in_words() -> None:
    nested: list = []
    for _ in range(5_000):
        nested = [nested]
    with pytest.raises(ValueError, match="nested too deeply"):
        as_yaml(nested)


def test_remarks_of_a_comparison_are_a_paragraph_each(tmp_path) -> None:
    shutil.copytree(COMPARISON, tmp_path / "comparison")
    notes = read_results(tmp_path / "comparison")["notes"]
    said = [getattr(block, "text", None) for block in results_section(tmp_path / "comparison").blocks]
    assert len(notes) > 1
    assert set(notes) <= set(said)
