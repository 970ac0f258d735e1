"""Register what is looked up by name: kinds with relinear, models and the checkpoint loader with transformers.

``import relinear`` imports this module, and importing the modules below registers what they define.
"""

import relinear.models.cgt  # models and configurations, with transformers' Auto classes
import relinear.models.heads
import relinear.operators
import relinear.operators.fused_decoder  # fused forwards of decoder layers, for for_inference_
import relinear.residual
import relinear.surgery.layer_bias
import relinear.surgery.rebuild  # the loader of checkpoints with operators, with transformers
import relinear.surgery.separate_experts
import relinear.training.distill  # noqa: F401
from relinear.surgery import transformers_patches

transformers_patches.install()
