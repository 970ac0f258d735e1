"""Define the ``relinear`` command line. A subcommand is a module with a function ``command``, named in ``_COMMANDS``.

These modules import only typer, ``options`` and the standard library at the top. A command imports ``relinear``, and
with it torch and transformers, when it runs. So ``--help`` and completion are fast.
"""

import functools
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from itertools import pairwise
from runpy import run_path
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup, TyperOption
from typer.main import get_command

from relinear_cli.errors import USER_ERROR, exit_code

#: group in ``relinear --help`` -> its commands; NAME is the function ``command`` of relinear_cli/NAME.py, which has an
#: underscore where the command has a hyphen
_COMMANDS = {
    "A smaller model": "compress distill",
    "Training and comparing": "replicate compare train",
    "Looking inside and measuring": "inspect explore analyze eval bench report specialize",
    "Setup and reference": "list new doctor",
}
COMMANDS = {name: group for group, names in _COMMANDS.items() for name in names.split()}


#: group in a command's help -> its options, by the names of their parameters; all others are in "More"
_GROUPS = {
    "Model": "model replace attach objective layers exclude target candidates operators recipe preregistration match "
    "first_position",
    "Data": "data text_column split tokenizer sequences length sequence_length evaluate_on prefix_file lambada tasks "
    "evaluate",
    "Budget": "budget bits size keep reader steps tokens seeds max_tokens limit heal_tokens "
    "batch_size learning_rate tune",
    "Output": "out plan plan_only dry_run as_json index static",
    "Cases": "shapes dtypes modes passes inference_batches",
    "Speed": "threads workers executor partition slurm rounds repeats",
}
#: command -> flag of 0.2 -> its name now; the old one works for one version, and warns
_RENAMED_FLAGS = {
    "compare": {"--plan": "--preregistration"},
    "compress": {"--menu": "--candidates"},
    "explore": {"--sites": "--hook-points"},
}


def _without_imports(arguments: Sequence[str]) -> list[str]:
    """Remove every ``--import MODULE`` from the arguments; it may be anywhere in them.

    The modules go into an environment variable, for ``import relinear`` here and in processes that a command starts.
    """
    rest = []
    modules = []
    remaining = iter(arguments)
    for argument in remaining:
        name, equals, module = argument.partition("=")
        if name != "--import":
            rest.append(argument)
            continue
        module = module if equals else next(remaining, "")
        if not module or module.startswith("-"):
            raise ValueError("--import takes the name of a module: --import my_package.operators")
        modules.append(module)
    if modules:
        if "" not in sys.path:
            sys.path.insert(0, "")  # import from the working directory, as python -m does
        for module in modules:
            if find_spec(module.partition(".")[0]) is None:
                raise ValueError(f"--import {module}: no such module is installed, in PYTHONPATH or in this folder")
        os.environ["RELINEAR_IMPORT"] = ",".join([*filter(None, [os.environ.get("RELINEAR_IMPORT")]), *modules])
        if "relinear" in sys.modules:  # a program that calls main() has imported it
            sys.modules["relinear.contract.plugins"].import_from_environment()
    return rest


class _Command(TyperCommand):
    """A command that shows its options in groups and rejects empty values."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        for previous, argument in pairwise(["", *args]):
            has_value = argument[:2] == "--" and "=" in argument
            name, _, value = argument.partition("=") if has_value else (previous, "", argument)
            if not value.strip():  # an empty path would mean the working directory
                argument_name = name if name[:1] == "-" else "an argument"
                raise ValueError(f"{argument_name} must not be empty, got {value!r}; fill it in, or omit it")
        return super().parse_args(ctx, [self._with_new_flag(argument) for argument in args])

    def _with_new_flag(self, argument: str) -> str:
        flag, equals, value = argument.partition("=")
        new = _RENAMED_FLAGS.get(self.name or "", {}).get(flag)
        if new is None:
            return argument
        warnings.warn(f"{flag} has a new name: {new}; the old one works in this version only", stacklevel=2)
        return f"{new}{equals}{value}"

    def get_params(self, ctx: Any) -> list[Any]:
        params = super().get_params(ctx)
        groups = {name: group for group, names in _GROUPS.items() for name in names.split()}
        for option in params:
            if isinstance(option, TyperOption):
                option.rich_help_panel = option.rich_help_panel or groups.get(option.name or "", "More")
        return sorted(params, key=lambda param: param.rich_help_panel == "More")


class _WrappedInterrupt(BaseException):
    """Carry a KeyboardInterrupt (its argument) through typer, which would give all of them the exit code of Ctrl-C."""


class _Group(TyperGroup):
    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as interrupt:
            raise _WrappedInterrupt(interrupt) from None


app = typer.Typer(
    name="relinear",
    cls=_Group,
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(show: bool) -> None:
    if show:
        spec: Any = find_spec("relinear")  # without importing it
        print(f"relinear {run_path(f'{spec.submodule_search_locations[0]}/system/version.py')['__version__']}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(False, "--version", callback=_show_version, is_eager=True, help="Show the version."),
) -> None:
    """Replace the linear layers of Hugging Face decoders with other operators, and measure what that changes.

    Six operators side by side on real text: `relinear compare --recipe quick --out runs/demo`

    A smaller model for llama.cpp: `relinear compress MODEL --for llama.cpp --size 90MB`

    Every command takes `--import MODULE`, for operators of your own; those of installed packages are found by name.
    """


def command_of(name: str) -> Callable:
    """Return the function of a command, by its name."""
    return import_module(f"relinear_cli.{name.replace('-', '_')}").command


for _name in COMMANDS:
    app.command(_name, cls=_Command, rich_help_panel=COMMANDS[_name])(command_of(_name))


@functools.cache  # takes ten times as long as a command that is refused
def _program() -> Any:
    return get_command(app)


def _invoke(arguments: Sequence[str]) -> int | None:
    try:
        result: Any = _program()(args=_without_imports(arguments), prog_name="relinear", standalone_mode=False)
    except _WrappedInterrupt as wrapped:
        raise wrapped.args[0] from None
    except typer.Abort as error:
        raise KeyboardInterrupt from error
    except Exception as error:
        if not hasattr(error, "format_message"):
            raise
        if not error.format_message():  # there were no arguments, so typer has printed the help
            return USER_ERROR
        # a usage error of typer has the command's path
        path = getattr(getattr(error, "ctx", None), "command_path", "relinear")
        raise ValueError(f"{_usage_message(error)} (see '{path} --help')") from error
    return result if isinstance(result, int) else None


def _usage_message(error: Any) -> str:
    """Return the message of typer's usage error, rephrased."""
    fault = next(iter(error.__cause__.errors()), None) if hasattr(error.__cause__, "errors") else None
    if fault is not None and error.param is not None:
        flag = (error.param.opts or [error.param.name])[0]
        text = fault["msg"].removeprefix("Value error, ")
        expected = text.removeprefix("Input should be ").partition(", unable to parse")[0]
        return f"{flag}: {text}" if text.startswith(expected) else f"{flag} must be {expected}, got {fault['input']!r}"
    return str(error.format_message())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line on ``arguments`` (of the process by default) and return its exit code."""
    return exit_code(lambda: _invoke(sys.argv[1:] if arguments is None else arguments))


_FORMATTED = warnings.formatwarning


def _format_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """Format a warning as one line, without the source line that raised it, which says nothing to a user."""
    if category is not UserWarning:
        return _FORMATTED(message, category, filename, lineno, line)
    return f"warning: {message}\n"


def run() -> None:
    """Run the ``relinear`` script: its entry point."""
    warnings.formatwarning = _format_warning
    sys.exit(main())
