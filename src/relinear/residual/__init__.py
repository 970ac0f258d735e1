"""Residual methods: ways to add a sub-block's output to the residual stream. Importing this registers all of them."""

from types import ModuleType as _ModuleType

from relinear.residual.attention_gate import SDPAGate as SDPAGate
from relinear.residual.laurel import LaurelLR as LaurelLR
from relinear.residual.laurel import LaurelPA as LaurelPA
from relinear.residual.laurel import LaurelRW as LaurelRW
from relinear.residual.methods import residual_methods as residual_methods
from relinear.residual.post_norm import DeepNorm as DeepNorm
from relinear.residual.post_norm import PostLN as PostLN
from relinear.residual.scaling import LayerNormScaling as LayerNormScaling
from relinear.residual.scaling import ReZero as ReZero
from relinear.residual.second_embedding import SecondEmbedding as SecondEmbedding

__all__ = [name for name, value in list(globals().items()) if name[0] != "_" and not isinstance(value, _ModuleType)]
