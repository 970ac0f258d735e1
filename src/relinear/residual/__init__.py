"""How a block's output meets the residual stream; importing this registers every method's kind."""

from relinear.residual.attention_gate import SDPAGate
from relinear.residual.laurel import LaurelLR, LaurelPA, LaurelRW
from relinear.residual.post_norm import DeepNorm, PostLN
from relinear.residual.scaling import LayerNormScaling, ReZero
from relinear.residual.second_embedding import SecondEmbedding
from relinear.residual.surgery import residual_, residual_methods

__all__ = [
    "DeepNorm",
    "LaurelLR",
    "LaurelPA",
    "LaurelRW",
    "LayerNormScaling",
    "PostLN",
    "ReZero",
    "SDPAGate",
    "SecondEmbedding",
    "residual_",
    "residual_methods",
]
