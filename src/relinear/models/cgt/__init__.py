"""The Contextually Guided Transformer (CGT): configuration, models, objective, and specialisation into a GPT-2."""

from relinear.models.cgt.config import CGTConfig
from relinear.models.cgt.model import CGTForCausalLM, CGTForRegression, CGTModel, CGTOutput
from relinear.models.cgt.objective import CGTObjective, GuidedTraining

__all__ = ["CGTConfig", "CGTForCausalLM", "CGTForRegression", "CGTModel", "CGTObjective", "CGTOutput", "GuidedTraining"]
