"""``relinear report``: put the results of commands on one page."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from relinear.pages.blocks import Section


def command(
    runs: list[Path] = typer.Argument(
        metavar="RUN...",
        exists=True,
        help="Directories of compare, replicate, train, compress, distill, bench or analyze.",
    ),
    out: Path | None = typer.Option(None, help="Directory of report.html, or an .html file; by default RUN, or here."),
    analyze: bool = typer.Option(False, "--analyze", help="Also analyze the trained models of RUN, one per entry."),
    csv: Path | None = typer.Option(
        None, "--csv", metavar="FILE", help="Also write the table, and the curves to FILE-curves.", show_default="none"
    ),
    latex: Path | None = typer.Option(
        None,
        "--latex",
        metavar="FILE",
        help="Also write the table with its intervals, for booktabs.",
        show_default="none",
    ),
    overwrite: bool = typer.Option(False, "--overwrite", help="Rename existing files instead of stopping."),
) -> None:
    """Write one page on one or several runs; it holds everything inline and opens without a network.

    For a comparison it also redraws the plots and prints the table. --analyze adds every analysis that applies to the
    trained models, on the run's held-out text: gates, modulators, latents, effective ranks, contexts, rotor planes.

    **Example:** `relinear report runs/demo --analyze`

    **Example:** `relinear report runs/demo runs/compress --out both.html`

    **Example:** `relinear report runs/demo --csv demo.csv --latex demo.tex`
    """
    from relinear.compare.report import read_results, read_scale
    from relinear.compare.schema import RESULTS, SCALE
    from relinear.pages.page import check_page
    from relinear.system.files import write_text
    from relinear.system.run_folder import set_aside
    from relinear_cli.terminal import print_results, print_scale

    if out is not None:
        check_page(page_path(runs, out), overwrite)
    tables = _tables(runs, csv, latex, overwrite) if csv or latex else {}
    if analyze:
        analyze_models([folder for run in runs for folder in trained_in(run)], overwrite)
    path = write_report_of(runs, out)
    for run in runs:
        if (run / SCALE).is_file():
            print_scale(read_scale(run))
        elif (run / RESULTS).is_file():
            print_results(read_results(run))
    print(f"\nreport: {path.resolve()}")
    for file, text in tables.items():
        set_aside(file)
        write_text(file, text)
        print(f"table: {file}")


def _tables(runs: list[Path], csv: Path | None, latex: Path | None, overwrite: bool) -> dict[Path, str]:
    """Return the content of each file of tables about the one comparison in ``runs``.

    Raises:
        ValueError: for several directories, for one without a comparison, and for files that exist.
    """
    from relinear.compare.papers import COMPARISON
    from relinear.compare.report import read_results
    from relinear.compare.schema import RESULTS
    from relinear.compare.tables import as_csv, curve_rows, latex_tables, table_rows

    folders = [folder for run in runs for folder in (run, run / COMPARISON) if (folder / RESULTS).is_file()]
    if len(runs) > 1 or not folders:
        raise ValueError(
            "--csv and --latex take the directory of one finished comparison; start an unfinished one again: it goes on"
        )
    results = read_results(folders[0])
    files: dict[Path, str] = {}
    if csv is not None:
        files[csv] = as_csv(table_rows(results))
        files[csv.with_name(f"{csv.stem}-curves{csv.suffix}")] = as_csv(curve_rows(results))
    if latex is not None:
        files[latex] = latex_tables(results)
    for file in files:
        if file.exists() and not overwrite:
            raise ValueError(f"{file} exists already; choose another name, or --overwrite, which renames it")
    return files


def trained_in(run: Path) -> list[Path]:
    """Return the directories of trained models in ``run``: a training run itself, or one per entry of a comparison.

    An entry counts with its first seed and largest budget or size. Raises ValueError if no model is saved.
    """
    of_series = [folder for key in ("budgets", "sizes") for folder in run.glob(f"{key}/*") if folder.name.isdigit()]
    largest = max(of_series, key=lambda folder: int(folder.name), default=run)
    seeds: dict[Path, Path] = {}
    for folder in sorted(largest.glob("runs/*/seed-*"), key=lambda f: (f.parent, len(f.name), f.name)):
        seeds.setdefault(folder.parent, folder)
    folders = [f for f in (run, *seeds.values()) if (f / "model").is_dir() and (f / "run.json").is_file()]
    if not folders:
        raise ValueError(f"no trained model is saved in {run}; choose a run whose models were saved (save_model)")
    return folders


def analyze_models(folders: list[Path], overwrite: bool = False, samples: int = 64) -> None:
    """Run the analyses that apply to trained models, and write them to the folder ``analysis`` of each run.

    Args:
        folders: directories of trained models, from ``trained_in``.
        overwrite: rename analyses of something else.
        samples: number of sequences to read.

    Raises:
        ValueError: if a text is too short, or a record is damaged.
    """
    from relinear.analysis.analyses import HeldOutText, applying
    from relinear.data import DataSettings
    from relinear.system.files import damaged_file_errors, read_json
    from relinear_cli.analyze import analyze_saved
    from relinear_cli.options import load_model, prepare_process

    prepare_process()
    for folder in folders:
        model = load_model(str(folder / "model"), presets=False)
        names = applying(model)
        print(f"{folder}: {', '.join(name.replace('_', ' ') for name in names) or 'no analysis applies'}")
        if names:
            with damaged_file_errors(folder / "run.json", "damaged", "start the run again"):
                data = DataSettings(**read_json(folder / "run.json")["settings"]["data"])
            text = HeldOutText(data, samples, fewer=True)
            out = folder / "analysis"
            analyze_saved(str(folder / "model"), text, out, names, loaded=model, overwrite=overwrite)


def write_report_of(runs: list[Path], out: Path | None = None) -> Path:
    """Write the page about ``runs`` and return its path, that of ``page_path``.

    Raises:
        FileNotFoundError: for a directory in which nothing has finished.
        ValueError: for damaged files.
    """
    from relinear.pages.page import write_page

    sections = [section_of(run) for run in runs]
    return write_page(page_path(runs, out), sections)


def page_path(runs: list[Path], out: Path | None) -> Path:
    """Return the path of the page about ``runs``: ``out``, or report.html in it, in the only run, or in this folder."""
    if out is not None and out.suffix == ".html":
        return out
    return (out or (runs[0] if len(runs) == 1 else Path())) / "report.html"


def section_of(run: Path) -> Section:
    """Return the section about the directory ``run``, with its analyses. Raises as ``write_report_of``."""
    import dataclasses

    from relinear.analysis.report import analyses_blocks

    try:
        section = _section(run)
    except (LookupError, TypeError, AttributeError, ArithmeticError) as error:
        raise ValueError(
            f"the files in {run} are damaged or of another version ({error!r}); run their command again"
        ) from None
    if section.command == "analyze":
        return section
    return dataclasses.replace(section, blocks=[*section.blocks, *analyses_blocks(run)])


def _section(run: Path) -> Section:
    from relinear.analysis.report import analyses_blocks, analyses_section
    from relinear.bench.report import layers_section, models_section
    from relinear.compare.papers import RECORD
    from relinear.compare.replicate import replicate_section
    from relinear.compare.report import results_section, scale_section
    from relinear.compare.schema import RESULTS, SCALE
    from relinear.compression.report import report_section
    from relinear.deprecated import with_new_columns
    from relinear.distill.report import distill_section
    from relinear.pages.records import read_values
    from relinear.training.report import run_section

    sections = {RECORD: replicate_section, SCALE: scale_section, RESULTS: results_section}
    for name, of_directory in sections.items():
        if (run / name).is_file():
            return of_directory(run)
    if (run / "models.json").is_file():
        return models_section(with_new_columns(read_values(run / "models.json")))
    if (run / "report.json").is_file():
        values = read_values(run / "report.json")
        return distill_section(values) if isinstance(values["layers"], list) else report_section(values)
    if (run / "bench.json").is_file():
        return layers_section(with_new_columns(read_values(run / "bench.json")))
    if (run / "metrics.jsonl").is_file() and (run / "run.json").is_file():
        return run_section(run)
    if analyses_blocks(run):
        return analyses_section(run)
    raise FileNotFoundError(f"{run} has nothing to report, such as {RESULTS}; choose the --out of a finished command")
