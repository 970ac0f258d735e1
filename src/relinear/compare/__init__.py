"""Many runs side by side: recipes, matched sizes, tuning, seeds, budgets, scaling, speeds, sweeps, and the report."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from relinear.compare.plan import Event, plan_comparison
    from relinear.compare.report import read_results, write_report
    from relinear.compare.run import compare
    from relinear.compare.scaling import scale
    from relinear.compare.settings import CompareSettings

# Imported on first use: a recipe is read, and its faults are told, before torch and transformers are there.
_LAZY = {
    "CompareSettings": "settings",
    "Event": "plan",
    "compare": "run",
    "plan_comparison": "plan",
    "read_results": "report",
    "scale": "scaling",
    "write_report": "report",
}

__all__ = ["CompareSettings", "Event", "compare", "plan_comparison", "read_results", "scale", "write_report"]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
    globals()[name] = value
    return value
