"""Tests for operators, also those of other packages: one class and a row a variant. Needs pytest, nothing else.

from relinear.testing import Case, OperatorConformance

class TestMine(OperatorConformance):
    cases = [Case(config=Mine(rank=3))]
"""

import pytest

from relinear.testing.case import NARROW, ODD, SQUARE, WIDE, Case

pytest.register_assert_rewrite("relinear.testing.conformance")  # before it is imported: asserts then say what differs

from relinear.testing.conformance import OperatorConformance  # noqa: E402
from relinear.testing.coordinates import Coordinates, check_coordinates  # noqa: E402

__all__ = ["NARROW", "ODD", "SQUARE", "WIDE", "Case", "Coordinates", "OperatorConformance", "check_coordinates"]
