"""The Contextually Guided Transformer: its configuration, models, objective, and what turns it into a GPT-2."""

from relinear.models.cgt.config import CGTConfig as CGTConfig
from relinear.models.cgt.model import CGTForCausalLM as CGTForCausalLM
from relinear.models.cgt.model import CGTForRegression as CGTForRegression
from relinear.models.cgt.model import CGTModel as CGTModel
from relinear.models.cgt.model import CGTOutput as CGTOutput
from relinear.models.cgt.objective import CGTObjective as CGTObjective
from relinear.models.cgt.objective import GuidedTraining as GuidedTraining
