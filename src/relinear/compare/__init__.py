"""Comparisons of many runs: recipes, matched sizes, tuning, seeds, budgets, speeds, and the report."""

from relinear.compare.match import plan_comparison
from relinear.compare.report import read_results, write_report
from relinear.compare.run import compare
from relinear.compare.settings import CompareSettings

__all__ = ["CompareSettings", "compare", "plan_comparison", "read_results", "write_report"]
