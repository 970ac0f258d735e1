"""Four ends that README leads to: by three links at most, and by commands that run as the pages print them.

A paper replicated, a model compressed for llama.cpp, an operator of one's own, a comparison on a folder of text.
Each test follows the links, takes the commands out of the pages, and types them into a shell in an empty folder.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable

import pytest

from conftest import REPOSITORY

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

#: what stands in for llama.cpp where it is not installed: the file is read whole by llama.cpp's own library for Python
READER = """#!{python}
import sys
from gguf import GGUFReader
file = GGUFReader(sys.argv[sys.argv.index("-m") + 1])
print(file.fields["general.architecture"].contents(), len(file.tensors), "tensors")
"""


def reached(*links: str) -> str:
    """The text that the last link leads to; every link stands in the text that the one before leads to."""
    assert len(links) <= 3
    page, text = REPOSITORY / "README.md", (REPOSITORY / "README.md").read_text(encoding="utf-8")
    for link in links:
        assert f"]({link})" in text, f"{page} has no link to {link}"
        name, _, anchor = link.partition("#")
        page = page.parent / name
        text = page.read_text(encoding="utf-8")
        if anchor:
            text = section(text, anchor)
    return text


def section(text: str, anchor: str) -> str:
    """The part below the heading with this anchor, up to the next heading of its level."""
    for heading in re.finditer(r"^(#+) (.+)$", text, flags=re.M):
        if re.sub(r"[^\w -]", "", heading[2].lower()).replace(" ", "-") == anchor:
            return re.split(rf"^{heading[1]} ", text[heading.end() :], maxsplit=1, flags=re.M)[0]
    raise AssertionError(f"no heading has the anchor {anchor}")


def commands(text: str, *with_: str) -> str:
    """The lines of the blocks of commands; with words given, those that have one of them."""
    lines = "".join(re.findall(r"^```sh\n(.*?)^```$", text, flags=re.S | re.M)).splitlines()
    found = [line for line in lines if not with_ or any(word in line for word in with_)]
    assert found, f"no command with {with_}"
    return "\n".join(found)


def way_in(start: str) -> str:
    """The part of README that begins with these bold words, up to the next bold words or heading."""
    text = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    after = re.split(rf"^\*\*\[?{start}", text, maxsplit=1, flags=re.M)[1]
    return re.split(r"^(?:\*\*|#)", after, maxsplit=1, flags=re.M)[0]


@pytest.fixture
def type_in(tmp_path) -> Callable[[str], str]:
    """A shell in an empty folder, with relinear in an environment of its own that sees this one's packages."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], check=True)
    programs, here = tmp_path / "venv" / "bin", tmp_path / "here"
    here.mkdir()
    (site,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    (site / "these.pth").write_text(f"{REPOSITORY / 'src'}\n{sysconfig.get_path('purelib')}\n")
    python = programs / "python"
    scripts = {
        "relinear": f'#!{python}\nfrom relinear_cli.main import run\nif __name__ == "__main__":\n    run()\n',
        "pytest": f"#!{python}\nimport sys, pytest\nsys.exit(pytest.main())\n",
        "pip": f"#!{python}\nimport sys\nfrom pip._internal.cli.main import main\nsys.exit(main())\n",
    }
    if shutil.which("llama-cli") is None:
        scripts["llama-cli"] = READER.format(python=python)
    for name, text in scripts.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    offline = {"PIP_NO_BUILD_ISOLATION": "0", "PIP_NO_DEPS": "1", "PIP_NO_INDEX": "1"}  # 0 means: without isolation
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {**offline, "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}

    def shell(lines: str) -> str:
        done = subprocess.run(
            ["bash", "-ec", lines], cwd=here, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{lines}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
        return done.stdout

    return shell


def test_a_paper_is_replicated(type_in, tmp_path) -> None:
    """At the budget that the page offers for a first look; README's own takes ten minutes on an idle machine."""
    assert "relinear replicate hdpl" in commands(way_in("Repeat a paper"))
    page = reached("docs/recipes.md#repeat-a-papers-tables")
    printed = type_in(commands(page, "list papers", "--dry-run", "runs/glance"))
    assert "hdpl" in printed
    report = (tmp_path / "here" / "runs" / "glance" / "report.html").read_text(encoding="utf-8")
    assert "Table 1: baseline and surgical hybrid" in report
    assert "4.2838" in report, "the paper's own figures stand beside ours"


def test_a_model_is_compressed_for_llama_cpp(type_in, tmp_path, smollm2) -> None:
    """README and the page that it leads to print the same commands, the last of which talks to the model."""
    typed = commands(way_in("Compress a model"))
    start = reached("docs/start/compress.md")
    assert [line.split("#")[0].strip() for line in typed.splitlines()] == commands(
        start, "compress", "llama-cli"
    ).splitlines()
    assert "llama-cli -m runs/small/model.gguf" in typed
    here = tmp_path / "here"
    (here / "models").mkdir()
    (here / "models" / "smollm2").symlink_to(smollm2)
    printed = type_in(typed)
    assert "llama 272 tensors" in printed or shutil.which("llama-cli")
    assert (here / "runs" / "small" / "model.gguf").stat().st_size <= 90_000_000
    for name in ("report.html", "plan.json", "model/config.json"):
        assert (here / "runs" / "small" / name).is_file()


def test_an_operator_of_ones_own_is_known_after_one_line(type_in, tmp_path) -> None:
    pytest.importorskip("setuptools")  # pip builds the package with it
    typed = commands(way_in("Test an operator")).splitlines()
    before, after = typed[:1], typed[1:2]
    type_in("\n".join(before))
    assert "mine" not in {line.split()[0] for line in type_in("relinear list operators").splitlines() if line.strip()}
    type_in("\n".join(after))  # the one line
    assert "mine" in {line.split()[0] for line in type_in("relinear list operators").splitlines() if line.strip()}
    page = reached("docs/start/operator.md")
    printed = type_in(commands(page, "new operator scaled ", "install", "pytest", "list", "inspect"))
    assert int(re.search(r"(\d+) passed", printed)[1]) > 20
    assert "ScaledLinear" in printed or "Scaled(" in printed


def test_layers_are_compared_fairly_on_a_folder_of_text(type_in, tmp_path) -> None:
    """Three seeds, a learning rate for each entry, dense resized: the text alone is another than README's."""
    (typed,) = commands(way_in("Compare layers")).splitlines()
    reached("docs/data.md")
    texts = tmp_path / "here" / "texts"
    texts.mkdir()
    for number, page in enumerate(sorted((REPOSITORY / "docs").rglob("*.md"))):
        shutil.copy(page, texts / f"{number}.md")  # training.md would be the training split
    assert " --data stdlib " in typed
    type_in(typed.replace("--data stdlib", "--data texts"))
    folder = tmp_path / "here" / "runs" / "fair"
    results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    dense, hdpl = (entry for entry in results["entries"] if entry["name"] in ("dense", "hdpl"))
    assert abs(dense["parameters"] / hdpl["parameters"] - 1) <= 0.02
    assert "texts" in json.dumps(results)
    assert "95 %" in (folder / "report.html").read_text(encoding="utf-8")
