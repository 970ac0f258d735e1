"""Properties over drawn shapes, dtypes, settings, patterns and recipes: it works, or is refused with nothing changed.

Drawn by hypothesis, the same cases in every run (``derandomize``); a counterexample is printed in its smallest form.
"""

import contextlib
import dataclasses
import json
import re
import typing

import pytest
import torch
import yaml
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

import relinear
from conftest import make_tiny_gpt2, make_tiny_llama
from fuzz.kinds import settings_examples
from relinear.compare.recipe import BUNDLED, read_recipe
from relinear.compare.settings import CompareSettings
from relinear.contract.operator import NotLinearError, Operator, OperatorConfig
from relinear.settings.yaml_settings import apply_overrides, read_yaml
from relinear.training import TrainSettings

DTYPES = [torch.float32, torch.float64, torch.bfloat16]
IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
SIZES = st.integers(1, 40)


def tries(count):
    return settings(max_examples=count, deadline=None, derandomize=True, database=None)


def told(refused):
    """What is refused is refused in words."""
    assert 0 < len(str(refused)) < 4_000


# Settings of operators


def values_of(hint, default):
    """Values like the default of a setting; of what has structure the default alone."""
    kinds = {kind for kind in (typing.get_args(hint) or (hint,)) if isinstance(kind, type)}
    drawn = [st.just(default)]
    if bool in kinds:
        drawn.append(st.booleans())
    if int in kinds:
        drawn.append(st.integers(0, 9))
    if float in kinds:
        drawn.append(st.sampled_from([0.0, 0.01, 1.0]))
    return st.one_of(drawn)


@st.composite
def configs(draw):
    """Settings of an operator of any kind, as they come: some are refused when they are made."""
    base = OperatorConfig.from_dict(draw(st.sampled_from([s for s in settings_examples() if is_operator(s)])))
    hints = typing.get_type_hints(type(base))
    fields = [field.name for field in dataclasses.fields(base)]
    changed = draw(st.lists(st.sampled_from(fields), max_size=3, unique=True)) if fields else []
    given_values = {name: draw(values_of(hints[name], getattr(base, name))) for name in changed}
    try:
        return dataclasses.replace(base, **given_values)
    except ValueError:
        assume(False)


def is_operator(setting):
    return setting["kind"] in OperatorConfig.kinds()


@tries(60)
@given(config=configs())
def test_settings_come_back_from_json_and_yaml(config):
    values = config.to_dict()
    assert OperatorConfig.from_dict(json.loads(json.dumps(values))) == config
    assert OperatorConfig.from_dict(yaml.safe_load(yaml.safe_dump(values))) == config
    text = f"{config.kind}:" + ",".join(f"{key}={json.dumps(v)}" for key, v in values.items() if key != "kind")
    assert OperatorConfig.read(text.rstrip(":")) == config


# Shapes and dtypes


@tries(80)
@given(
    config=configs(),
    sizes=st.tuples(SIZES, SIZES),
    leading=st.lists(st.integers(0, 3), max_size=3),
    dtype=st.sampled_from(DTYPES),
    bias=st.booleans(),
)
def test_a_layer_of_any_size_works_or_is_refused_when_it_is_built(config, sizes, leading, dtype, bias):
    try:
        layer = config.build(*sizes, bias=bias, dtype=dtype)
    except ValueError as refused:
        told(refused)
        return
    x = torch.randn(*leading, sizes[0], dtype=dtype, requires_grad=True)
    context = torch.randn(*leading, config.context_dim, dtype=dtype) if config.conditioned else None
    with relinear.activations.context(context) if config.conditioned else contextlib.nullcontext():
        y = layer(x)
        assert y.shape == (*leading, sizes[1])
        assert y.dtype == dtype
        assert y.isfinite().all()
        (y.sum() + sum(layer.auxiliary_losses().values())).backward()
        assert x.grad.shape == x.shape
        assert all(p.grad.isfinite().all() for p in layer.parameters() if p.grad is not None)
        layer.eval()
        with torch.no_grad():
            first, second = layer(x), layer(x)
    assert torch.equal(first, second)
    assert layer.flops_per_token() >= 0


@tries(40)
@given(config=configs(), sizes=st.tuples(SIZES, SIZES), tokens=st.integers(0, 4))
def test_the_dense_matrix_of_any_layer_is_the_layer(config, sizes, tokens):
    assume(not config.conditioned)
    try:
        layer = config.build(*sizes, dtype=torch.float64).eval()
    except ValueError:
        return
    x = torch.randn(tokens, sizes[0], dtype=torch.float64)
    with torch.no_grad():
        try:
            dense = layer.to_dense()
        except NotLinearError:
            return
        zero = layer(x.new_zeros(1, sizes[0]))
        assert dense.shape == sizes[::-1]
        torch.testing.assert_close(layer(x) - zero, x @ dense.mT, atol=1e-9, rtol=1e-9)


@tries(30)
@given(config=configs(), sizes=st.tuples(SIZES, SIZES), wrong=SIZES, dtype=st.sampled_from(DTYPES))
def test_input_of_another_width_is_refused(config, sizes, wrong, dtype):
    assume(wrong != sizes[0] and not config.conditioned)
    try:
        layer = config.build(*sizes, dtype=dtype)
    except ValueError:
        return
    with pytest.raises(ValueError, match=re.escape(str(sizes[0]))):
        layer(torch.randn(3, wrong, dtype=dtype))


# Patterns


def of_names(model):
    return [name for name, module in model.named_modules() if name and not list(module.children())]


MODELS = {"llama": make_tiny_llama, "gpt2": make_tiny_gpt2}
NAMES = {kind: of_names(make()) for kind, make in MODELS.items()}
LINEAR = {
    kind: [name for name in NAMES[kind] if type(make().get_submodule(name)).__name__ in ("Linear", "Conv1D")]
    for kind, make in MODELS.items()
}


@st.composite
def patterns(draw, kind):
    """Names, ends of names, expressions made of them, and what is neither."""
    parts = draw(st.sampled_from(NAMES[kind])).split(".")
    start = draw(st.integers(0, len(parts) - 1))
    end = draw(st.integers(start + 1, len(parts)))
    plain = ".".join(parts[start:end])
    forms = [
        ".".join(parts[start:]), plain, f".*{re.escape(plain)}", f".*{re.escape(plain)}.*", rf".*\d.*({parts[-1]}|x)",
        "all-linear", parts[-1][1:] or "x", draw(st.text(max_size=6)),
    ]  # fmt: skip
    return draw(st.sampled_from(forms))


@st.composite
def mappings(draw):
    kind = draw(st.sampled_from(sorted(MODELS)))
    chosen = draw(st.lists(patterns(kind), min_size=1, max_size=3, unique=True))
    operators = st.sampled_from([relinear.LowRank(rank=2), relinear.Monarch(blocks=4), None])
    options = {
        "layers": draw(st.sampled_from([None, None, 0, [1], [0, -1], range(2), [5]])),
        "exclude": draw(st.sampled_from([None, None, draw(patterns(kind))])),
    }
    return kind, {pattern: draw(operators) for pattern in chosen}, options


def meant(pattern, name):
    """PEFT's rule, written down once more."""
    if re.fullmatch(r"[\w.\-]+", pattern):
        return f".{name}".endswith(f".{pattern}")
    return bool(re.fullmatch(pattern, name))


def expected(kind, mapping, options):
    """name -> settings of what a mapping means; the first pattern counts."""
    found = {}
    layers = options["layers"]
    layers = None if layers is None else {index % 2 for index in ([layers] if isinstance(layers, int) else layers)}
    for name in LINEAR[kind]:
        head = name == "lm_head"
        hits = [p for p in mapping if (not head if p == "all-linear" else meant(p, name))]
        layer = next((int(part) for part in name.split(".") if part.isdigit()), None)
        left = options["exclude"] is not None and meant(options["exclude"], name)
        if hits and not left and (layers is None or layer in layers) and mapping[hits[0]] is not None:
            found[name] = mapping[hits[0]]
    return found


@tries(60)
@given(drawn=mappings())
def test_a_mapping_replaces_what_it_means_or_nothing(drawn):
    kind, mapping, options = drawn
    model = MODELS[kind]()
    before = {name: type(module) for name, module in model.named_modules()}
    with torch.no_grad():
        logits = model(IDS).logits
    try:
        relinear.replace_(model, mapping, **options)
    except ValueError as refused:
        told(refused)
        assert {name: type(module) for name, module in model.named_modules()} == before
        with torch.no_grad():
            assert torch.equal(model(IDS).logits, logits)
        return
    found = {name: module.config for name, module in model.named_modules() if isinstance(module, Operator)}
    assert found == expected(kind, mapping, options)
    assert all(type(model.get_submodule(n)) is before[n] for n in NAMES[kind] if n not in found)


@tries(12)
@given(config=configs(), target=st.sampled_from(["q_proj", "up_proj", "down_proj", "all-linear"]), half=st.booleans())
def test_a_model_with_any_layers_comes_back_from_disk(config, target, half, tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    model = make_tiny_llama()
    for parameter in model.parameters():  # not the frequencies of positions, which are no half-precision ones on disk
        parameter.data = parameter.data.bfloat16() if half else parameter.data
    if config.conditioned:
        relinear.attach_(model, relinear.ContextManager(dim=config.context_dim))
    try:
        relinear.replace_(model, {target: config})
    except ValueError:
        return
    relinear.save_pretrained(model, folder)
    loaded = relinear.from_pretrained(folder, dtype="auto")
    with torch.no_grad():
        assert torch.equal(loaded(IDS).logits, model(IDS).logits)
    assert loaded.state_dict().keys() == model.state_dict().keys()
    assert isinstance(loaded, nn.Module)


# Recipes

TRAIN = {
    "model": st.sampled_from(["tiny", "llama-60m"]),
    "steps": st.integers(-1, 1_000),
    "learning_rate": st.floats(-1e-3, 1.0),
    "batch_size": st.integers(0, 64),
    "weight_decay": st.floats(0, 1),
    "seed": st.integers(0, 2**31),
    "dtype": st.sampled_from(["float32", "bfloat16", "float8"]),
    "layers": st.none() | st.lists(st.integers(0, 3), max_size=3),
    "operators": st.dictionaries(st.sampled_from(["q_proj", "up_proj", ".*"]), st.none() | configs(), max_size=2),
    "warmup_steps": st.integers(0, 10),
}


def train_values():
    return st.fixed_dictionaries({}, optional=TRAIN).map(
        lambda values: (
            values
            | {
                "operators": {
                    name: None if config is None else config.to_dict()
                    for name, config in values.get("operators", {}).items()
                }
            }
        )
    )


@tries(60)
@given(values=train_values())
def test_settings_of_a_run_are_read_as_they_are_written(values, tmp_path_factory):
    try:
        loaded = TrainSettings.load(values)
    except ValueError as refused:
        told(refused)
        return
    path = tmp_path_factory.mktemp("recipes") / "train.yaml"
    path.write_text(yaml.safe_dump(loaded.model_dump(mode="json")))
    assert TrainSettings.load(read_yaml(path)) == loaded
    assert TrainSettings.upgraded(loaded.model_dump(mode="json")) == loaded.model_dump(mode="json")
    set_one_by_one = apply_overrides({}, {key: value for key, value in values.items() if key != "operators"})
    assert TrainSettings.load(set_one_by_one | {"operators": values["operators"]}) == loaded


@tries(30)
@given(
    name=st.sampled_from(sorted(path.stem for path in BUNDLED.glob("*.yaml"))),
    train=train_values(),
    seeds=st.lists(st.integers(-1, 5), max_size=3),
)
def test_recipes_with_other_settings_are_read_as_they_are_written(name, train, seeds, tmp_path_factory):
    del train["operators"]  # an entry's own
    values = read_recipe(BUNDLED / f"{name}.yaml")
    values["train"] = {**values.get("train", {}), **train}
    values["seeds"] = seeds
    try:
        loaded = CompareSettings.load(values)
    except ValueError as refused:
        told(refused)
        return
    written = loaded.model_dump(mode="json")
    assert CompareSettings.upgraded(json.loads(json.dumps(written))) == written
    del written["match"]["tolerance"], written["speed"]  # as a version wrote it that did not know them
    completed = CompareSettings.upgraded(written)
    assert "speed" in completed
    assert "tolerance" in completed["match"]
    assert {key for key in completed if completed[key] != loaded.model_dump(mode="json")[key]} <= {"match", "speed"}
