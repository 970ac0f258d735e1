"""``relinear replicate``: repeat the main tables of a paper and compare the numbers."""

from pathlib import Path

import typer

from relinear_cli import options


def command(
    paper: str = typer.Argument(metavar="PAPER", help="One of `relinear list papers`, such as `hdpl`."),
    budget: str | None = typer.Option(
        None,
        help="Share of the paper's tokens, such as 0.01; `paper` is 1, with its model and text.",
        show_default="ten minutes on two cores",
    ),
    model: str | None = typer.Option(
        None,
        help="`small`, `paper`, a preset (rotor: a trained model), a model's directory, or a Hub name.",
        show_default="small",
    ),
    data: str | None = typer.Option(
        None, help="`stdlib`, `paper`, a file or folder, or a Hub name.", show_default="stdlib"
    ),
    tokenizer: str | None = typer.Option(
        None, help="`bytes`, `bpe:N`, or a Hub name.", show_default="that of the sizes"
    ),
    evaluate_on: str | None = typer.Option(
        None, help="A second text, for `rotor`.", show_default="PyTorch's documentation"
    ),
    seeds: str | None = typer.Option(None, help="Every entry runs once per seed: 0,1,2.", show_default="the paper's"),
    out: Path | None = typer.Option(None, help="Directory of the results.", show_default="runs/PAPER"),
    overwrite: options.Overwrite = False,
    dry_run: options.DryRun = False,
    workers: options.Workers = None,
    executor: options.Executor = None,
    slurm: options.Slurm = None,
) -> None:
    """Repeat a paper's main tables, small by default; ends with a page of the paper's numbers beside ours.

    First it prints the runs, time and disk that it takes. If it is killed, start the command again: it resumes.

    **Example:** `relinear replicate hdpl`

    **Example:** `relinear replicate rotor --model models/smollm2 --dry-run`

    **Example:** `relinear replicate hdpl --budget 0.01 --seeds 0,1,2 --out runs/hdpl`
    """
    from relinear.compare.papers import COMPARISON
    from relinear.compare.replicate import replicate, replication, replication_folder
    from relinear_cli.progress import watch
    from relinear_cli.report import analyze_models, trained_in, write_report_of
    from relinear_cli.terminal import print_requirements

    choices = {"budget": budget, "model": model, "data": data, "tokenizer": tokenizer, "evaluate_on": evaluate_on}
    experiment = replication(paper, **choices, seeds=options.parse_numbers("--seeds", seeds))
    execution = options.execution(workers, executor, slurm)
    out = out or Path("runs") / paper
    record = replication_folder(out).check(experiment.request.model_dump(mode="json"), overwrite=overwrite)
    options.prepare_process()
    if dry_run or record is None:
        print_requirements(experiment.requirements(workers))
    if dry_run:
        return
    with watch(resumable=True) as on_progress:
        report = replicate(experiment, out, overwrite=overwrite, **execution, on_progress=on_progress)
    if experiment.paper.analyze:
        analyze_models(trained_in(out / COMPARISON), samples=experiment.paper.samples)
        report = write_report_of([out])
    print(f"\nreport: {report.resolve()}")
