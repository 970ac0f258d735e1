"""Test operators, also those of other packages: subclass ``OperatorConformance`` with a case per variant. Needs pytest.

from relinear.testing import Case, OperatorConformance

class TestMine(OperatorConformance):
    cases = [Case(config=Mine(rank=3))]
"""

import pytest

from relinear.testing.case import NARROW, ODD, SQUARE, WIDE, Case

pytest.register_assert_rewrite("relinear.testing.conformance")  # before its import, so that failing asserts show values

from relinear.testing.conformance import OperatorConformance  # noqa: E402
from relinear.testing.coordinates import Coordinates, check_coordinates  # noqa: E402

__all__ = ["NARROW", "ODD", "SQUARE", "WIDE", "Case", "Coordinates", "OperatorConformance", "check_coordinates"]
