"""Where the suites come from: the source distributions of the installed transformers and PEFT, fetched by pip.

transformers' carries its common and training tests; its generation tests are in its repository alone, of which the
tag of the installed version is cloned. Nothing of theirs is kept in this repository.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import types
from importlib.metadata import version
from pathlib import Path

__all__ = ["FOLDER", "SourcesError", "activate", "fetch", "has_generation"]

REPOSITORY = Path(__file__).resolve().parents[2]
FOLDER = Path(os.environ.get("OUTSIDE_DIR", REPOSITORY / ".outside")).resolve()
#: another address of transformers' repository, a folder too
CLONED_FROM = os.environ.get("OUTSIDE_TRANSFORMERS", "https://github.com/huggingface/transformers")


class SourcesError(Exception):
    """A suite could not be had: no network, most likely."""


def _folder(name: str) -> Path:
    return FOLDER / f"{name}-{version(name)}"


def fetch() -> str:
    """Get what is not there yet. Returns what to say of the generation tests, "" if they are there.

    Raises:
        SourcesError: if a source distribution can neither be found nor fetched.
    """
    for name in ("transformers", "peft"):
        if not (_folder(name) / "tests").is_dir():
            _from_sdist(name, _folder(name))
    tests = _folder("transformers") / "tests"
    if not (tests / "generation").is_dir():
        try:
            _from_tag(f"v{version('transformers')}", tests)
        except SourcesError as error:
            return f"generation tests are left out: {error}"
    return ""


def _run(*command: str) -> None:
    try:
        environment = os.environ | {"GIT_TERMINAL_PROMPT": "0"}
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=120, env=environment)
    except FileNotFoundError:
        raise SourcesError(f"no {command[0]} on this machine") from None
    except subprocess.TimeoutExpired:
        raise SourcesError(f"{' '.join(command[:3])} did not end in two minutes") from None
    except subprocess.CalledProcessError as error:
        raise SourcesError(f"{' '.join(command[:3])}: {(error.stderr.strip() or 'failed').splitlines()[-1]}") from None


def _from_sdist(name: str, folder: Path) -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=FOLDER) as temporary:
        wanted = f"{name}=={version(name)}"
        _run(
            *(sys.executable, "-m", "pip", "download", wanted, "--no-binary", ":all:", "--no-deps"),
            *("--quiet", "--disable-pip-version-check", "--timeout=15", "--retries=1", "--dest", temporary),
        )
        (archive,) = Path(temporary).glob("*.tar.gz")
        with tarfile.open(archive) as packed:
            members = [m for m in packed.getmembers() if m.name.split("/")[1:2] == ["tests"]]
            packed.extractall(temporary, members, filter="data")
        (tests,) = Path(temporary).glob("*/tests")
        (tests / "__init__.py").touch()
        tests.parent.rename(folder)


def _from_tag(tag: str, tests: Path) -> None:
    with tempfile.TemporaryDirectory(dir=FOLDER) as temporary:
        clone = ("git", "clone", "--quiet", "--depth=1", "--filter=blob:none", "--sparse", f"--branch={tag}")
        _run(*clone, CLONED_FROM, temporary)
        _run("git", "-C", temporary, "sparse-checkout", "set", "tests/generation")
        shutil.move(Path(temporary, "tests", "generation"), tests / "generation")


def has_generation() -> bool:
    return (_folder("transformers") / "tests" / "generation").is_dir()


def activate() -> None:
    """Make transformers' suite importable as ``tests`` (it says so itself), and PEFT's as ``peft_tests``."""
    sys.path.insert(0, str(_folder("transformers")))
    _stub("tests.exporters.test_export", "ExportTesterMixin", "ExportGenerateTesterMixin")
    if not has_generation():
        _stub("tests.generation.test_utils", "GenerationTesterMixin")
    where = _folder("peft") / "tests"
    found = importlib.util.spec_from_file_location(
        "peft_tests", where / "__init__.py", submodule_search_locations=[str(where)]
    )
    assert found is not None
    sys.modules["peft_tests"] = importlib.util.module_from_spec(found)


def _stub(name: str, *classes: str) -> None:
    """A module of empty classes in the place of one that is not there (exporters are no part of this)."""
    module = types.ModuleType(name)
    for each in classes:
        setattr(module, each, type(each, (), {}))
    package, _, _ = name.rpartition(".")
    sys.modules[package], sys.modules[name] = types.ModuleType(package), module
