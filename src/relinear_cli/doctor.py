"""``relinear doctor``: what this installation has, what it lacks, and what to do about it."""

import re
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import typer

from relinear_cli.terminal import fitted

#: state of a part: as it should be, something that may be wanted and is not there, something that fails
GOOD, LACKS, FAILS = "ok", "-", "FAILS"

#: state, what is looked at, what was found and, where that can be changed, how
_Finding = tuple[str, str, str]


def command() -> None:
    """Look at this installation: packages, processor, compiler, kernels, GPU, caches, operators of other packages.

    A line each, with what to do; the exit status is 1 where something fails.

    **Example:** `relinear doctor`
    """
    failed = False
    for state, what, found in (*_packages(), *_extras(), *_machine(), *_kernels(), *_caches(), *_plugins()):
        print(fitted(f"{state:5}  {what:12}  {found}", sys.stdout, 21))
        failed |= state == FAILS
    raise typer.Exit(int(failed))


def _requirements() -> Iterator[tuple[str, str]]:
    """(extra or "", requirement) of every package that relinear names, as in its metadata."""
    for line in metadata.requires("relinear") or ():
        requirement, _, marker = line.partition(";")
        extra = re.search(r"extra == ['\"](.+?)['\"]", marker)
        yield extra.group(1) if extra else "", requirement.strip()


def _unmet(line: str) -> str:
    """What is wrong with a requirement: "" where an installed version meets it."""
    from packaging.requirements import Requirement

    wanted = Requirement(line)
    try:
        version = metadata.version(wanted.name)
    except metadata.PackageNotFoundError:
        return f"{wanted.name} is not installed"
    return "" if wanted.specifier.contains(version, prereleases=True) else f"{wanted} is wanted, {version} is installed"


def _packages() -> Iterator[_Finding]:
    import platform

    import torch
    import transformers

    import relinear

    yield GOOD, "relinear", f"{relinear.__version__} in {Path(relinear.__file__).parent}"
    yield GOOD, "python", platform.python_version()
    yield GOOD, "torch", str(torch.__version__)
    yield GOOD, "transformers", transformers.__version__
    for extra, line in _requirements():
        if not extra and (unmet := _unmet(line)):
            yield FAILS, "packages", f"{unmet}: pip install '{line}'"


def _extras() -> Iterator[_Finding]:
    """What every extra brings; those of developers are left out."""
    wanted: dict[str, list[str]] = {}
    for extra, line in _requirements():
        if extra not in ("", "dev", "docs", "outside", "ecosystem"):
            wanted.setdefault(extra, []).append(line)
    for extra, lines in wanted.items():
        lacking = [unmet for line in lines if (unmet := _unmet(line))]
        found = f"{'; '.join(lacking)}: pip install 'relinear[{extra}]'" if lacking else ", ".join(lines)
        yield LACKS if lacking else GOOD, f"[{extra}]", found


def _machine() -> Iterator[_Finding]:
    from relinear.system.machine import describe_machine, fast_bfloat16

    facts = describe_machine()
    bfloat16 = "bfloat16 in hardware" if fast_bfloat16() else "bfloat16 is emulated: train in float32 here"
    extensions = ", ".join(facts["extensions"]) or "no vector extensions that relinear knows"
    memory = facts["memory_bytes"] / 2**30
    yield GOOD, "processor", f"{facts['processor']}, {facts['cores']} cores, {memory:.0f} GiB; {extensions}; {bfloat16}"
    gpus = ", ".join(facts["gpus"])
    yield GOOD if gpus else LACKS, "GPU", gpus or "none that torch sees; everything runs on the processor"


def _kernels() -> Iterator[_Finding]:
    from relinear.kernels import triton
    from relinear.kernels.native import build

    if not build.has_compiler():
        what = "no compiler (g++ or clang++), or RELINEAR_COMPILE_KERNELS=0: torch's operations run, which are slower"
        yield LACKS, "C++ kernels", what
    elif build.is_built():
        yield GOOD, "C++ kernels", f"built, in {build.library_path().parent}"
    else:
        yield GOOD, "C++ kernels", "not built yet: the first large call does it, in about a minute"
    yield (GOOD, "Triton", "there") if triton.HAS_TRITON else (LACKS, "Triton", "none: it is for NVIDIA GPUs alone")


def _caches() -> Iterator[_Finding]:
    from relinear.data.cache import cache_folder
    from relinear.kernels.native import build
    from relinear.system.own import check_own

    for what, folder in (("data cache", cache_folder()), ("kernel cache", build.library_path().parent)):
        try:
            check_own(folder)
        except PermissionError as error:
            yield FAILS, what, f"{error.filename}: {error.strerror}"
        else:
            yield GOOD, what, f"{folder}{'' if folder.is_dir() else ' (not there yet)'}"


def _plugins() -> Iterator[_Finding]:
    import warnings

    from relinear.core import plugins

    for family in plugins.GROUPS:
        for name, point in plugins.offered(family).items():
            where = f"{family} {name} of {point.dist.name if point.dist else point.value}"
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                found = plugins.find(family, name)
            if found is None:
                yield FAILS, "plug-in", f"{where}: {told[-1].message if told else 'it is None'}"
            else:
                yield GOOD, "plug-in", where
