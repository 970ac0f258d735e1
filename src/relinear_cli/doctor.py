"""``relinear doctor``: check this installation, and say what is missing and how to fix it."""

import platform
import re
import sys
import warnings
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import typer

from relinear_cli.terminal import wrapped

#: state of a part: good, an optional part that is missing, something that fails
GOOD, LACKS, FAILS = "ok", "-", "FAILS"
#: state, name of the part, and what was found, with advice if there is any
_Finding = tuple[str, str, str]


def command() -> None:
    """Check this installation: packages, processor, compiler, kernels, GPU, operators of other packages.

    Prints a line per check, with what to do. The exit status is 1 if a check fails.

    **Example:** `relinear doctor`
    """
    failed = False
    for state, subject, text in (*_packages(), *_extras(), *_machine(), *_kernels(), *_plugins()):
        print(wrapped(f"{state:5}  {subject:12}  {text}", sys.stdout, 21))
        failed |= state == FAILS
    raise typer.Exit(int(failed))


def _requirements() -> dict[str, list[str]]:
    """Return extra -> its requirements, from the metadata; those of relinear itself are under ""."""
    versions: dict[str, list[str]] = {}
    for line in metadata.requires("relinear") or ():
        requirement, _, marker = line.partition(";")
        extra = re.search(r"extra == ['\"](.+?)['\"]", marker)
        versions.setdefault(extra[1] if extra else "", []).append(requirement.strip())
    return versions


def _unmet(line: str) -> str:
    """Return what is wrong with a requirement; "" if the installed version satisfies it."""
    from packaging.requirements import Requirement

    needed = Requirement(line)
    try:
        version = metadata.version(needed.name)
    except metadata.PackageNotFoundError:
        return f"{needed.name} is not installed"
    return "" if needed.specifier.contains(version, prereleases=True) else f"needs {needed}; {version} is installed"


def _packages() -> Iterator[_Finding]:
    import relinear
    from relinear.system.version import __version__

    yield GOOD, "relinear", f"{__version__} in {Path(relinear.__file__).parent}"
    yield GOOD, "python", platform.python_version()
    for name in ("torch", "transformers"):
        yield GOOD, name, metadata.version(name)
    for line in _requirements().get("", ()):
        if unmet := _unmet(line):
            yield FAILS, "packages", f"{unmet}: pip install '{line}'"


def _extras() -> Iterator[_Finding]:
    """Check the requirements of every extra for users; skip those for developers."""
    for extra, lines in _requirements().items():
        if extra in ("", "dev", "docs", "outside", "ecosystem"):
            continue
        lacking = [unmet for line in lines if (unmet := _unmet(line))]
        to_do = f"{'; '.join(lacking)}: pip install {' '.join(map(repr, lines))}"
        yield LACKS if lacking else GOOD, f"[{extra}]", to_do if lacking else ", ".join(lines)


def _machine() -> Iterator[_Finding]:
    from relinear.kernels import triton
    from relinear.system.machine import describe_machine, fast_bfloat16
    from relinear.system.text import gib

    facts = describe_machine()
    bfloat16 = "bfloat16 in hardware" if fast_bfloat16() else "bfloat16 is emulated: train in float32 here"
    extensions = ", ".join(facts["extensions"]) or "no vector extensions that relinear knows"
    memory = gib(facts["memory_bytes"])
    yield GOOD, "processor", f"{facts['processor']}, {facts['cores']} cores, {memory}; {extensions}; {bfloat16}"
    gpus = ", ".join(facts["gpus"])
    yield GOOD if gpus else LACKS, "GPU", gpus or "none that torch sees; everything runs on the processor"
    version = metadata.version("triton") if triton.HAS_TRITON else ""
    yield GOOD if version else LACKS, "Triton", version or "none: it is for NVIDIA GPUs alone"


def _kernels() -> Iterator[_Finding]:
    from relinear.kernels.native import build

    compiler = build.compiler()
    yield GOOD if compiler else LACKS, "compiler", compiler or "no g++ or clang++, or RELINEAR_COMPILE_KERNELS=0"
    if compiler:
        later = "not built yet: the first large call does it, in some seconds"
        yield GOOD, "C++ kernels", "built" if build.is_built() else later


def _plugins() -> Iterator[_Finding]:
    from relinear.contract import plugins

    offered = [(family, *entry) for family in plugins.GROUPS for entry in plugins.entry_points(family).items()]
    for family, name, point in offered:
        source = f"{family} {name} of {point.dist.name if point.dist else point.value}"
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            plugin = plugins.load(family, name)
        if plugin is None:
            yield FAILS, "plug-in", f"{source}: {caught[-1].message if caught else 'it is None'}"
        else:
            yield GOOD, "plug-in", source
