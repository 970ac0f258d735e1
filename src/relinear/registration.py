"""Importing this makes known what is looked up by name: kinds to the registry, models and loader to transformers.

``import relinear`` imports it.
"""

import relinear.models.cgt  # the configuration, to transformers' Auto classes
import relinear.models.heads
import relinear.operators
import relinear.operators.fused_decoder  # the forward of decoder layers that for_inference_ puts in place
import relinear.residual
import relinear.surgery.layer_bias
import relinear.surgery.rebuild  # the loader of checkpoints with operators in them, to transformers
import relinear.surgery.separate_experts
import relinear.training.distill  # noqa: F401
from relinear.surgery import transformers_patches

transformers_patches.install()
