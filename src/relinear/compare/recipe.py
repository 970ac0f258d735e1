"""Find and read recipes of ``relinear compare``."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from relinear.contract import plugins
from relinear.contract.messages import did_you_mean, quoted
from relinear.contract.yaml_settings import apply_overrides, read_yaml, without_key
from relinear.deprecated import RENAMED_SETTINGS
from relinear.system.text import shorten

#: the recipes that come with relinear
BUNDLED = Path(__file__).parent / "recipes"
#: settings that say the same in several ways: one that is given replaces those of a recipe
_ALTERNATIVES = (
    ("tokens", "budgets", "train.steps", "widths.tokens_per_parameter"),
    ("train.warmup_steps", "train.warmup_ratio"),
)
#: setting -> what its short form says: ``match: parameters``, ``widths: [32, 64]``, ``tune: true``
_SHORT_FORMS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "match": lambda value: {"by": value},
    "widths": lambda value: {"widths": value},
    "tune": lambda value: {},
}


def change_recipe(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recipe with dotted keys set on the command line, and a description that says which.

    A budget among the changes, in tokens or in steps, replaces whatever the recipe says of it; so does a warm-up.

    Raises:
        ValueError: as ``apply_overrides``.
    """
    values, changes = _with_new_names(values), _with_new_names(changes)
    for keys in _ALTERNATIVES:
        if not changes.keys().isdisjoint(keys):
            for key in keys:
                values = without_key(values, key)
    for key in {name.partition(".")[0] for name in changes if "." in name} & _SHORT_FORMS.keys():
        if not isinstance(written := values.get(key), Mapping | None):
            values = {**values, key: _SHORT_FORMS[key](written)}
    changed = apply_overrides(values, changes)
    if changes and "description" not in changes:
        listed = ", ".join(f"{k}={shorten(v) if isinstance(v, str) else quoted(v)}" for k, v in changes.items())
        # the recipe's description is about its own entries, which were replaced
        recipe = "" if "entries" in changes else f" The recipe: {values.get('description', '')}"
        changed["description"] = f"Changed on the command line: {listed}.{recipe}"
    return changed


def _with_new_names(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``values`` with settings of 0.2, also as the first part of a dotted name, under their new names."""
    names = RENAMED_SETTINGS["CompareSettings"]
    parts = {key: key.partition(".") for key in values}
    return {names.get(head, head) + dot + rest: values[key] for key, (head, dot, rest) in parts.items()}


def find_recipe(name: str | Path) -> Path:
    """Return the file of a recipe: a path, or the name of a recipe in the folder ``recipes`` here or in relinear's own.

    An existing file comes first. Else NAME, NAME.yaml, recipes/NAME and recipes/NAME.yaml all mean the recipe NAME.

    Raises:
        FileNotFoundError: if there is none, with the nearest names.
    """
    path = Path(name)
    if path.is_file():
        return path
    folders = [Path("recipes"), BUNDLED]
    if path.parent in (Path(), Path("recipes")):
        for folder in folders:
            candidate = folder / f"{path.name.removesuffix('.yaml')}.yaml"
            if candidate.is_file():
                return candidate
    if path.exists():
        return path  # such as a folder: reading it raises the error
    if (other := plugins.load("recipe", path.name.removesuffix(".yaml"))) is not None:
        return Path(other)
    known = sorted(
        set(plugins.entry_points("recipe"))
        | {file.stem for folder in folders if folder.is_dir() for file in folder.glob("*.yaml")}
    )
    raise FileNotFoundError(f"no recipe {str(name)!r}; {did_you_mean(path.stem, known)}")


def read_recipe(name: str | Path) -> dict[str, Any]:
    """Return the values of a recipe by file or by name; its name is the file's unless it says otherwise.

    Raises:
        FileNotFoundError: if there is none (names the nearest).
        ValueError: if it is not a YAML mapping.
    """
    path = find_recipe(name)
    return {"name": path.stem} | read_yaml(path)
