"""Find and read recipes of ``relinear compare``."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from relinear.contract import plugins
from relinear.deprecated import RENAMED_SETTINGS
from relinear.settings.base import Settings
from relinear.settings.messages import did_you_mean, quoted
from relinear.settings.yaml_settings import apply_overrides, read_yaml, without_key
from relinear.system.text import shorten

#: the recipes that come with relinear
BUNDLED = Path(__file__).parent / "recipes"
#: settings that say the same in several ways: one that is given replaces those of a recipe
_ALTERNATIVES = (
    ("tokens", "budgets", "train.steps", "widths.tokens_per_parameter"),
    ("train.warmup_steps", "train.warmup_ratio"),
)


def true_as(default: Any) -> Callable[[Any], Any]:
    """Return a function that reads ``true`` as ``default`` and ``false`` as None, and leaves other values unchanged."""
    return lambda value: {True: default, False: None}[value] if isinstance(value, bool) else value


def _read_widths(value: Any) -> Any:
    return value if value is None or isinstance(value, Mapping | Settings) else {"widths": value}


#: setting -> what reads its short form: ``match: parameters``, ``widths: [32, 64]``, ``tune: true``
SHORT_FORMS: dict[str, Callable[[Any], Any]] = {
    "match": lambda value: {"by": value} if isinstance(value, str) else value,
    "widths": _read_widths,
    "tune": true_as({}),
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
    in_full = {key: read(values[key]) for key, read in SHORT_FORMS.items() if key in values}
    changed = apply_overrides({**values, **in_full}, changes)
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
