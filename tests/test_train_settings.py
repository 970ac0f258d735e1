"""Settings that users write: what is accepted, and what the errors say."""

import pytest

from relinear.core.allocator import tune_allocator
from relinear.core.config import parse_setting
from relinear.core.settings import Settings


class Inner(Settings):
    sequence_length: int = 8


class Outer(Settings):
    steps: int = 10
    data: Inner = Inner()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("rotor", {"kind": "rotor"}),
        ("hdpl:rank=128,blocks=8", {"kind": "hdpl", "rank": 128, "blocks": 8}),
        ("x:a=1e-3,b=true,c=none,d=clamp", {"kind": "x", "a": 1e-3, "b": True, "c": None, "d": "clamp"}),
        (
            "x:a=[1, 2],base=(y:b=(z),c=3)",
            {"kind": "x", "a": [1, 2], "base": {"kind": "y", "b": {"kind": "z"}, "c": 3}},
        ),
    ],
)
def test_parse_setting(text, expected):
    assert parse_setting(text) == expected


@pytest.mark.parametrize("text", ["", "a:", "a:b", "a:b=1,b=2", "a:b=(c", "a:b=1,", "3:b=1", "a b", "a:b=c)"])
def test_parse_setting_refuses(text):
    with pytest.raises(ValueError):
        parse_setting(text)


def test_unknown_keys_name_the_nearest():
    with pytest.raises(ValueError, match=r"recipe\.yaml: unknown setting 'step'; did you mean 'steps'"):
        Outer.load({"step": 3}, "recipe.yaml")
    with pytest.raises(ValueError, match=r"data: unknown setting 'sequence_lenght'; did you mean 'sequence_length'"):
        Outer.load({"data": {"sequence_lenght": 3}})
    with pytest.raises(ValueError, match=r"steps: .*integer.*\(got 'many'\)"):
        Outer.load({"steps": "many"})
    with pytest.raises(ValueError, match="expected a mapping"):
        Outer.load([1])
    with pytest.raises(ValueError, match="did you mean 'steps'"):
        Outer(step=3)


def test_updated_checks_again():
    assert Outer().updated(steps=3).steps == 3
    with pytest.raises(ValueError, match="unknown setting"):
        Outer().updated(stepz=3)


def test_tune_allocator_is_idempotent():
    assert tune_allocator() == tune_allocator()
