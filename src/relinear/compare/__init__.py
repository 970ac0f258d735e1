"""Many runs side by side: recipes, matched sizes, tuning, seeds, budgets, sizes, speeds, and the report."""

from typing import TYPE_CHECKING

from relinear.system.lazy import imported_on_first_use

if TYPE_CHECKING:
    from relinear.compare.match import plan_comparison
    from relinear.compare.report import read_results, write_report
    from relinear.compare.run import compare
    from relinear.compare.settings import CompareSettings

# Imported on first use: a recipe is read, and its faults are told, before torch and transformers are there.
_LAZY = {
    "match": ("plan_comparison",),
    "report": ("read_results", "write_report"),
    "run": ("compare",),
    "settings": ("CompareSettings",),
}

__all__ = ["CompareSettings", "compare", "plan_comparison", "read_results", "write_report"]

__getattr__ = imported_on_first_use(__name__, _LAZY)
