"""The Contextually Guided Transformer: its configuration, models, objective, and what turns it into a GPT-2."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from relinear.models.cgt.config import CGTConfig, when_made

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


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
    globals()[name] = value
    return value


# The Auto classes find the model of a configuration once there is a configuration, and not before.
when_made.append(lambda: import_module(f"{__name__}.model"))
