"""The Contextually Guided Transformer: its configuration, models, objective, and what turns it into a GPT-2."""

from importlib import import_module
from typing import TYPE_CHECKING

from relinear.models.cgt.config import CGTConfig, when_made
from relinear.system.lazy import imported_on_first_use

if TYPE_CHECKING:
    from relinear.models.cgt.model import CGTForCausalLM, CGTForRegression, CGTModel, CGTOutput
    from relinear.models.cgt.objective import CGTObjective, GuidedTraining

# Imported on first use: GPT-2's code takes a second to import, and transformers' Auto classes need the settings alone.
_LAZY = {
    "CGTForCausalLM": "model",
    "CGTForRegression": "model",
    "CGTModel": "model",
    "CGTObjective": "objective",
    "CGTOutput": "model",
    "GuidedTraining": "objective",
}

__all__ = [
    "CGTConfig",
    "CGTForCausalLM",
    "CGTForRegression",
    "CGTModel",
    "CGTObjective",
    "CGTOutput",
    "GuidedTraining",
]

__getattr__ = imported_on_first_use(__name__, _LAZY)


# The Auto classes find the model of a configuration once there is a configuration, and not before.
when_made.append(lambda: import_module(f"{__name__}.model"))
