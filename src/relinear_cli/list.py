"""``relinear list``: list operators, recipes, papers and other names, or print the settings of one."""

import inspect
import re
import sys
from typing import Any

import typer

from relinear_cli.terminal import wrapped

#: an entry of "Args:", indented by four spaces; its further lines are indented by more
_ENTRY = re.compile(r"^    ([a-z_]+(?:, [a-z_]+)*): (.*(?:\n      .*)*)", flags=re.M)
_WHAT = ("operators", "residual", "attachments", "objectives", "analyses", "tasks", "recipes", "papers", "presets")


def command(
    what: str = typer.Argument(
        "", metavar="[WHAT]", help=f"{', '.join(_WHAT[:-1])} or {_WHAT[-1]}; else the names of all."
    ),
    name: str | None = typer.Argument(None, metavar="[NAME]", help="Show the settings of this one."),
) -> None:
    """List the names that the command line and recipes know, or the settings of one.

    **Example:** `relinear list operators hdpl`
    """
    if not what:
        for topic in _WHAT:
            print(wrapped(f"{topic}: {', '.join(listed(topic))}", sys.stdout, 2))
        return
    from relinear.settings.messages import did_you_mean

    if what not in _WHAT:
        raise ValueError(f"there is no list of {what!r}; {did_you_mean(what, _WHAT)}")
    rows = listed(what)
    if name is None:
        width = max(map(len, rows), default=0)
        for row, described in rows.items():
            print(wrapped(f"{row:<{width}}  {_line(described)}{_package(described)}", sys.stdout, width + 2))
        return
    if name not in rows:
        raise ValueError(f"there is no {name!r} among the {what}; {did_you_mean(name, rows)}")
    print(wrapped(f"{name}: {_line(rows[name])}{_package(rows[name])}", sys.stdout))
    if isinstance(rows[name], type):
        meanings = setting_meanings(rows[name])
        for setting, default in _settings(rows[name]).items():
            print(wrapped(f"  {setting} = {default}: {meanings.get(setting, '')}".rstrip(": "), sys.stdout, 4))


def setting_meanings(config: type) -> dict[str, str]:
    """Return field -> its description in the docstrings of the class and its bases; that of the class comes first."""
    rows: dict[str, str] = {}
    for base in config.__mro__:
        text = inspect.cleandoc(base.__doc__ or "").replace("\nAttributes:\n", "\nArgs:\n")
        for names, meaning in _ENTRY.findall(text.partition("\nArgs:\n")[2]):
            if ", " not in names:  # fields that share an entry are described elsewhere
                rows.setdefault(names, " ".join(meaning.split()).replace("``", "`"))
    return rows


def listed(topic: str) -> dict[str, Any]:
    """Return name -> its description: a class of settings, a module, or a text."""
    import relinear
    from relinear.analysis.analyses import analysis, known_analyses
    from relinear.compare.papers import PAPERS, read_paper
    from relinear.compare.recipe import BUNDLED
    from relinear.contract import plugins
    from relinear.contract.attachment import AttachmentConfig
    from relinear.contract.objective import ObjectiveConfig
    from relinear.contract.operator import OperatorConfig
    from relinear.data.tasks import Task
    from relinear.models import preset_config, preset_names
    from relinear.settings.yaml_settings import read_yaml

    if topic == "presets":
        template = "{0.model_type}, width {0.hidden_size}, {0.num_hidden_layers} layers, {0.vocab_size:,} tokens"
        return {preset: template.format(preset_config(preset)) for preset in preset_names()}
    if topic == "recipes":
        offered = {name: plugins.load("recipe", name) for name in plugins.entry_points("recipe")}
        files = {path.stem: path for path in sorted(BUNDLED.glob("*.yaml"))} | offered
        return {name: str(read_yaml(path).get("description", "")) for name, path in files.items() if path is not None}
    if topic == "papers":
        return {path.stem: read_paper(path.stem).about for path in sorted(PAPERS.glob("*.yaml"))}
    if topic == "analyses":
        return {name: analysis(name) for name in known_analyses()}
    if topic == "tasks":
        return {kind.replace("_", "-"): task for kind, task in Task.kinds().items()}
    family: Any = {"operators": OperatorConfig, "objectives": ObjectiveConfig}.get(topic, AttachmentConfig)
    for name in plugins.entry_points(family.family):
        plugins.load(family.family, name)
    return relinear.residual.residual_methods() if topic == "residual" else dict(sorted(family.kinds().items()))


def _line(described: Any) -> str:
    text = described if isinstance(described, str) else described.__doc__ or ""
    return re.split(r"(?<!Eq)(?<!\.)\. ", " ".join(text.split("\n\n")[0].split()))[0].rstrip(".").replace("``", "")


def _package(described: Any) -> str:
    from relinear.contract.plugins import origin

    if not isinstance(described, type) or described.__module__.startswith("relinear."):
        return ""
    source = origin(described)
    return f" [{source.get('package', source['module'])} {source.get('version', '')}".rstrip() + "]"


def _settings(described: type) -> dict[str, Any]:
    from dataclasses import MISSING, fields

    defaults = {f.name: f.default if f.default_factory is MISSING else f.default_factory() for f in fields(described)}
    return {name: "(needed)" if default is MISSING else default for name, default in defaults.items()}
