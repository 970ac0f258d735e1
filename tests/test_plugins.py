"""Operators of other packages: found by name, named by module, recorded in checkpoints."""

import sys
from importlib import metadata

import pytest
import torch

import relinear
from conftest import make_tiny_llama
from relinear.contract import config as registry
from relinear.contract import plugins
from relinear.contract.operator import Operator, OperatorConfig
from relinear_cli.main import main

OPERATOR = '''
"""An operator of another package."""
from typing import ClassVar
import torch
from torch import nn
from relinear import Operator, OperatorConfig, register


class ScaleLinear(Operator):
    def __init__(self, config, in_features, out_features, *, bias=True, device=None, dtype=None):
        super().__init__(config, in_features, out_features)
        self.scale = nn.Parameter(torch.empty(in_features, device=device, dtype=dtype))
        self.register_parameter("bias", None)
        self.reset_parameters()

    def reset_parameters(self):
        nn.init.normal_(self.scale)

    def forward(self, x):
        return x * self.scale

    def flops_per_token(self):
        return self.in_features


@register
class Scale(OperatorConfig):
    """A diagonal layer."""

    kind = "outside_scale"
    module_class = ScaleLinear
    gain: float = 1.0
'''


@pytest.fixture
def package(tmp_path, monkeypatch):
    """An installed package of its own, whose entry points name an operator that is there and one that fails."""
    (tmp_path / "outside_package.py").write_text(OPERATOR)
    (tmp_path / "outside_broken.py").write_text("raise RuntimeError('broken by its author')")
    info = tmp_path / "outside_package-0.3.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: outside-package\nVersion: 0.3\n")
    (info / "top_level.txt").write_text("outside_package\n")
    (info / "entry_points.txt").write_text(
        "[relinear.operators]\noutside_scale = outside_package:Scale\noutside_broken = outside_broken:Nothing\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    registry._REGISTRY["operator"].pop("outside_scale", None)
    for name in ("outside_package", "outside_broken"):
        sys.modules.pop(name, None)


def saved(folder):
    model = make_tiny_llama()
    relinear.replace_(model, {"q_proj": "outside_scale:gain=2"})
    relinear.save_pretrained(model, folder)
    return model


def test_a_kind_is_found_among_the_entry_points_of_packages(package, tmp_path) -> None:
    assert "outside_scale" not in OperatorConfig.kinds()
    model = saved(tmp_path / "out")
    told = model.config.quantization_config["packages"]
    assert told == {"outside_scale": {"module": "outside_package", "package": "outside-package", "version": "0.3"}}
    assert "pip install relinear outside-package\n" in (tmp_path / "out" / "README.md").read_text()
    registry._REGISTRY["operator"].pop("outside_scale")  # as in another process
    sys.modules.pop("outside_package")
    again = relinear.from_pretrained(tmp_path / "out")
    ids = torch.arange(7)[None]
    assert torch.equal(again(ids).logits, model(ids).logits)


def test_a_package_is_looked_up_once(package, tmp_path, monkeypatch) -> None:
    """Reading what is installed takes a second or two: once for every layer would make saving take minutes."""
    looked = []
    everything = metadata.packages_distributions
    monkeypatch.setattr(metadata, "packages_distributions", lambda: looked.append(1) or everything())
    model = make_tiny_llama()
    relinear.replace_(model, {"q_proj": "outside_scale"})
    relinear.save_pretrained(model, tmp_path / "one")
    relinear.save_pretrained(model, tmp_path / "two")
    assert len(looked) <= 1


def test_a_checkpoint_says_which_package_it_needs(package, tmp_path, monkeypatch) -> None:
    saved(tmp_path / "out")
    registry._REGISTRY["operator"].pop("outside_scale")
    monkeypatch.setattr(metadata, "entry_points", lambda **_: [])
    with pytest.raises(ValueError, match=r"'outside_scale' of .*'outside-package', 'version': '0\.3'}\. Install them"):
        relinear.from_pretrained(tmp_path / "out")


def test_a_broken_package_is_one_warning_that_names_it(package) -> None:
    with pytest.warns(UserWarning, match="outside_broken.*outside-package.*broken by its author") as told:
        assert plugins.load("operator", "outside_broken") is None
    assert len(told) == 1
    with pytest.raises(ValueError, match="unknown operator kind 'outside_brokn'; did you mean 'outside_broken'"):
        OperatorConfig.from_dict({"kind": "outside_brokn"})


def test_modules_are_named_on_the_command_line_for_every_process(package, capsys, monkeypatch) -> None:
    (package / "outside_package-0.3.dist-info" / "entry_points.txt").unlink()
    monkeypatch.setenv(plugins.IMPORT_VARIABLE, "")  # restored afterwards
    assert main(["inspect", "tiny", "-r", "q_proj=outside_scale"]) == 2
    assert "unknown operator kind 'outside_scale'" in capsys.readouterr().err
    assert main(["inspect", "tiny", "-r", "q_proj=outside_scale", "--import", "outside_package"]) in (None, 0)
    assert "Scale" in capsys.readouterr().out
    assert "outside_package" in registry.worker_environment()[plugins.IMPORT_VARIABLE].split(",")
    assert main(["inspect", "tiny", "--import"]) == 2
    assert "--import takes the name of a module" in capsys.readouterr().err
    assert main(["inspect", "tiny", "--import", "nosuchmodule"]) == 2
    assert "--import nosuchmodule: no such module" in capsys.readouterr().err


def test_what_can_be_named_is_listed(package, capsys) -> None:
    with pytest.warns(UserWarning, match="outside_broken"):
        assert main(["list", "operators"]) in (None, 0)
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line}
    assert {"hdpl", "low_rank", "rotor", "outside_scale"} <= set(lines)
    assert lines["outside_scale"].endswith("A diagonal layer [outside-package 0.3]")
    assert main(["list", "residual", "rezero"]) in (None, 0)
    assert main(["list", "operators", "hdpl"]) in (None, 0)
    assert "rank = " in capsys.readouterr().out
    for what in ("presets", "recipes", "objectives", "analyses", "attachments"):
        assert main(["list", what]) in (None, 0)
        assert capsys.readouterr().out.strip()
    assert main(["list"]) in (None, 0)
    assert "objectives: cgt, distill\n" in capsys.readouterr().out
    assert main(["list", "operatrs"]) == 2
    assert main(["list", "operators", "hdpll"]) == 2
    assert "did you mean 'hdpl'" in capsys.readouterr().err


def test_annotations_of_settings_may_be_types_themselves(monkeypatch):
    monkeypatch.setitem(registry._REGISTRY, "operator", dict(registry._REGISTRY["operator"]))
    written = {"__annotations__": {"mode": str, "other": str | None}, "mode": "none", "other": "full", "kind": "typed"}
    written["module_class"] = Operator
    relinear.register(type("Typed", (OperatorConfig,), written | {"__module__": __name__}))
    read = OperatorConfig.from_dict({"kind": "typed", "mode": None, "other": None})
    assert (read.mode, read.other) == ("none", None)
