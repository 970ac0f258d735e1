"""Settings that users write: what is accepted, and what the errors say."""

import json

import pytest

from relinear import LowRank
from relinear.settings.base import Settings
from relinear.settings.config_text import parse_config_text
from relinear.system.allocator import tune_allocator
from relinear.training import TrainSettings


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
def test_parse_config_text(text, expected):
    assert parse_config_text(text) == expected


@pytest.mark.parametrize("text", ["", "a:", "a:b", "a:b=1,b=2", "a:b=(c", "a:b=1,", "3:b=1", "a b", "a:b=c)"])
def test_parse_config_text_refuses(text):
    with pytest.raises(ValueError):
        parse_config_text(text)


def test_unknown_keys_name_the_nearest():
    with pytest.raises(ValueError, match=r"recipe\.yaml: unknown setting 'step'; did you mean 'steps'"):
        Outer.load({"step": 3}, "recipe.yaml")
    with pytest.raises(ValueError, match=r"data: unknown setting 'sequence_lenght'; did you mean 'sequence_length'"):
        Outer.load({"data": {"sequence_lenght": 3}})
    with pytest.raises(ValueError, match="steps must be a whole number, got 'many'"):
        Outer.load({"steps": "many"})
    with pytest.raises(ValueError, match="expected a mapping"):
        Outer.load([1])
    with pytest.raises(ValueError, match=r"^Outer: unknown setting 'step'; did you mean 'steps'[?]$"):
        Outer(step=3)
    with pytest.raises(ValueError, match=r"^Outer: data\.sequence_length must be a whole number, got 'x'$"):
        Outer(data={"sequence_length": "x"})


def test_replace_checks_again():
    assert Outer().replace(steps=3).steps == 3
    with pytest.raises(ValueError, match="unknown setting"):
        Outer().replace(stepz=3)


def test_tune_allocator_is_idempotent():
    assert tune_allocator() == tune_allocator()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"step": 3}, "unknown setting 'step'; did you mean 'steps'"),
        ({"steps": 0}, "steps must be above 0, got 0"),
        ({"learning_rate": float("nan")}, "learning_rate must be a finite number"),
        ({"betas": [0.9, 1.5]}, "betas.1 must be below 1, got 1.5"),
        ({"steps": 5, "warmup_steps": 5}, "warmup_steps=5 must be below steps=5"),
        ({"compile": "fast"}, "compile must be one of False, True or 'reduce-overhead', got 'fast'"),
        ({"compile": "reduce-overhead", "accumulation": 2}, "CUDA graphs.* accumulation=2 would be wrong"),
        ({"schedule": "linear"}, "schedule must be one of 'onecycle', 'cosine', 'noam' or 'constant'"),
        ({"operators": {"q_proj": "low_rnk:rank=3"}}, "unknown operator kind 'low_rnk'; did you mean 'low_rank'"),
        ({"operators": {"q_proj": {"kind": "low_rank", "rnk": 3}}}, "unknown setting 'rnk'; did you mean 'rank'"),
        ({"operators": "low_rank"}, "operators must be a mapping, got 'low_rank'"),
        ({"attachments": "context"}, "attachments must be a list, got 'context'"),
        ({"data": {"data": "stdlib", "tokeniser": "bytes"}}, "tokeniser"),
    ],
)
def test_train_settings_refuse(values, message):
    with pytest.raises(ValueError, match=message):
        TrainSettings.load(values)


def test_train_settings_survive_json():
    settings = TrainSettings.load({"operators": {"q_proj": "low_rank:rank=3", "o_proj": None}, "layers": [0, 2]})
    assert settings.operators["q_proj"] == {"kind": "low_rank", "rank": 3}
    assert TrainSettings.load(json.loads(json.dumps(settings.model_dump(mode="json")))) == settings
    assert settings.operator_configs == {"q_proj": LowRank(rank=3), "o_proj": None}
