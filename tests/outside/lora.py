"""PEFT's LoRA tests of decoders, on checkpoints of every family."""

from __future__ import annotations

import os
import sys
import types
from pathlib import Path

from outside import sources

sources.activate()

if "diffusers" not in sys.modules:  # one class of it is imported, which is asked for nothing here
    sys.modules["diffusers"] = types.ModuleType("diffusers")
    setattr(sys.modules["diffusers"], "StableDiffusionPipeline", type("StableDiffusionPipeline", (), {}))  # noqa: B010
import peft_tests.test_decoder_models as theirs  # noqa: E402
from peft import LoraConfig  # noqa: E402

if not getattr(sys.modules["diffusers"], "__file__", None):
    del sys.modules["diffusers"]

CHECKPOINTS = Path(os.environ["OUTSIDE_CHECKPOINTS"])
theirs.PEFT_DECODER_MODELS_TO_TEST[:] = sorted(map(str, CHECKPOINTS.iterdir()))
theirs.ALL_CONFIGS[:] = [pair for pair in theirs.ALL_CONFIGS if pair[0] is LoraConfig]


class Lora(theirs.TestDecoderModels):
    """Those tests alone that take a model."""
