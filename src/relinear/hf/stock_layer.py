"""Convert an operator back into the stock layer that it replaced."""

from typing import Any

import torch
from torch import nn

from relinear.contract.linear_layers import reference_tensor
from relinear.contract.operator import NotLinearError, Operator


@torch.no_grad()
def to_stock_layer(operator: Operator) -> nn.Module:
    """Return a stock layer (nn.Linear, Conv1D or nn.Embedding) with the dense weight and bias of ``operator``.

    Raises:
        NotLinearError: if the operator has no matrix, has one per token, or has an offset that its layer cannot hold.
    """
    if operator.config.conditioned:
        raise NotLinearError(f"{operator.config.kind} depends on the context of each token")
    reference = reference_tensor(operator)
    weight, bias = operator.dense_weight_and_bias()
    if weight.ndim != 2:
        raise NotLinearError(f"{operator.config.kind} has one matrix per token")
    if bias is not None and operator.bias is None:
        raise NotLinearError(f"{operator.config.kind} has an offset that the bias-free layer it replaced cannot hold")
    linear: Any
    kw: Any = {"device": reference.device, "dtype": reference.dtype}
    if operator.replaced.is_conv1d:
        from transformers.pytorch_utils import Conv1D

        linear = Conv1D(operator.out_features, operator.in_features).to(**kw)
        weight = weight.T
    elif operator.num_embeddings is not None:
        table = operator.replaced
        extra = {"embed_scale": table.row_scale} if table.row_scale != 1 else {}
        sizes = table.num_embeddings, operator.in_features
        linear = table.embedding_class(*sizes, padding_idx=table.padding_idx, **extra).to(**kw)
    else:
        linear = nn.Linear(operator.in_features, operator.out_features, bias is not None, **kw)
    linear.weight.copy_(weight)
    if getattr(linear, "bias", None) is not None:
        linear.bias.zero_() if bias is None else linear.bias.copy_(bias)
    return linear.train(operator.training).requires_grad_(reference.requires_grad)
