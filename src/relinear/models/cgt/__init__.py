"""The Contextually Guided Transformer (CGT): configuration, models, objective, and specialisation into a GPT-2."""

from relinear.deprecated import renamed_in_module
from relinear.hf.training_loss import ModelWithObjective
from relinear.models.cgt.config import CGTConfig
from relinear.models.cgt.model import CGTForCausalLM, CGTForRegression, CGTModel, CGTOutput
from relinear.models.cgt.objective import CGTObjective

__all__ = ["CGTConfig", "CGTForCausalLM", "CGTForRegression", "CGTModel", "CGTObjective", "CGTOutput"]

__getattr__ = renamed_in_module(__name__, GuidedTraining=ModelWithObjective)
