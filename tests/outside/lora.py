"""PEFT's LoRA tests of decoders, on a checkpoint of every family (folders in ``OUTSIDE_CHECKPOINTS``)."""

from __future__ import annotations

import inspect
import os
import sys
import types
from pathlib import Path

from outside import sources

sources.activate()

if "diffusers" not in sys.modules:  # one class of it is imported, and nothing here is an instance of it
    diffusers = types.ModuleType("diffusers")
    diffusers.StableDiffusionPipeline = type("StableDiffusionPipeline", (), {})  # type: ignore[attr-defined]
    sys.modules["diffusers"] = diffusers
    from peft_tests import test_decoder_models as theirs

    del sys.modules["diffusers"]
else:
    from peft_tests import test_decoder_models as theirs

from peft import LoraConfig  # noqa: E402
from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as DEFAULT_TARGETS  # noqa: E402

DEFAULT_TARGETS.setdefault("relinear_cgt", ["c_attn"])
FOLDERS = sorted(Path(os.environ["OUTSIDE_CHECKPOINTS"]).iterdir())
# parametrised with these very lists
theirs.PEFT_DECODER_MODELS_TO_TEST[:] = [str(folder) for folder in FOLDERS]
theirs.SMALL_GRID_MODELS[:] = []
theirs.ALL_CONFIGS[:] = [pair for pair in theirs.ALL_CONFIGS if pair[0] is LoraConfig]

if not os.environ.get("OUTSIDE_BARE"):
    import relinear  # noqa: F401  registers what loads the checkpoints


class TestLora(theirs.TestDecoderModels):
    """Those tests that are given a model; the others fetch models of their own."""


for _name, _test in inspect.getmembers(TestLora, inspect.isfunction):
    if _name.startswith("test_") and "model_id" not in inspect.signature(_test).parameters:
        setattr(TestLora, _name, None)
