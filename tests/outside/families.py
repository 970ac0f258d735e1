"""The families that other people's suites run on: a stock model, and the same with each kind of operator in place."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

import relinear
from relinear.contract.attachment import AttachmentConfig
from relinear.contract.operator import OperatorConfig

__all__ = ["FAMILIES", "Family", "with_operators"]

CONTEXT = relinear.ContextManager(dim=8, source="embeddings")
CCL = relinear.CCL(context_dim=8, rank=8)
IN_MLP = dict.fromkeys(("gate_proj", "up_proj", "down_proj"), CCL)


@dataclasses.dataclass(frozen=True)
class Family:
    """What is put into the models of a family, and which family has to pass a test before this one is asked."""

    layers: Mapping[str, OperatorConfig] = dataclasses.field(default_factory=dict)
    attachments: tuple[AttachmentConfig, ...] = ()
    model: str = "llama"
    stock: str = "llama"
    #: a quick run has it
    quick: bool = False
    #: an entry in the cache beside the decoder's layers
    more_in_cache: bool = False
    #: of training, until a repeated text is known by heart: fewer parameters take longer than transformers' 300
    steps: int = 300

    def put_in(self, model: Any) -> None:
        for attachment in self.attachments:
            relinear.attach_(model, attachment)
        if self.layers:
            relinear.replace_(model, self.layers)

    @torch.no_grad()
    def put_in_as_trained(self, model: Any) -> None:
        """Put them in, with scalars that have left zero: where ReZero starts, nothing in a layer counts."""
        self.put_in(model)
        for parameter in model.parameters():
            if parameter.numel() == 1 and not parameter.is_meta and not parameter.any():
                parameter.fill_(0.5)


def _all(operator: OperatorConfig, *attachments: AttachmentConfig, **settings: Any) -> Family:
    return Family({"all-linear": operator}, attachments, **settings)


#: "llama" and "gpt2" are stock
FAMILIES: dict[str, Family] = {
    "llama": Family(quick=True),
    "gpt2": Family(model="gpt2", stock="gpt2", quick=True),
    "low_rank": _all(relinear.LowRank(rank=8), steps=600),
    "pivoted_low_rank": _all(relinear.PivotedLowRank(rank=8), steps=600),
    "monarch": _all(relinear.Monarch(blocks=4), steps=600),
    "block_hadamard": _all(relinear.BlockHadamard(blocks=4), steps=600),
    # deeper networks differ by more in half precision than the tests allow, which know one product per layer
    "rotor": _all(relinear.Rotor(depth=1), steps=600),
    "hdpl": _all(relinear.HDPL(rank=8, blocks=4)),
    "transponder": _all(relinear.Transponder(rank=8)),
    "output_gate": _all(relinear.OutputGate()),
    "ccl": _all(CCL, CONTEXT),
    "ccl_with_memory": Family(IN_MLP, (CONTEXT.replace(mixer="ema"),), more_in_cache=True),
    "ccl_of_tokens": Family(IN_MLP, (CONTEXT.replace(source="tokens"),)),
    "path_transponder": Family(attachments=(relinear.PathTransponder(rank=8),)),
    "sdpa_gate": Family(attachments=(relinear.residual.SDPAGate(),)),
    "second_embedding": Family(attachments=(relinear.residual.SecondEmbedding(),)),
    "laurel_rw": Family(attachments=(relinear.residual.LaurelRW(),)),
    "laurel_lr": Family(attachments=(relinear.residual.LaurelLR(rank=8),)),
    "laurel_pa": Family(attachments=(relinear.residual.LaurelPA(),)),
    # starts where adapters change nothing, as no other family does: a quick run sees that, too
    "rezero": Family(attachments=(relinear.residual.ReZero(),), quick=True),
    "layer_norm_scaling": Family(attachments=(relinear.residual.LayerNormScaling(),)),
    "post_ln": Family(attachments=(relinear.residual.PostLN(),)),
    "deep_norm": Family(attachments=(relinear.residual.DeepNorm(),)),
    "mixed": Family(
        {
            "q_proj": relinear.Rotor(),
            "k_proj": relinear.LowRank(rank=8),
            "v_proj": relinear.HDPL(rank=8, blocks=4),
            "o_proj": relinear.Transponder(rank=8),
            "gate_proj": CCL,
            "up_proj": relinear.Monarch(blocks=4),
            "down_proj": relinear.BlockHadamard(blocks=4),
        },
        (CONTEXT, relinear.residual.LaurelLR(rank=8)),
        quick=True,
    ),
    "mixed_gpt2": Family(
        {
            "c_attn": CCL,
            r"attn\.c_proj|.*\.attn\.c_proj": relinear.LowRank(rank=8),
            "c_fc": relinear.HDPL(rank=8, blocks=4),
        },
        (CONTEXT, relinear.residual.LaurelRW()),
        model="gpt2",
        stock="gpt2",
    ),
    "cgt": Family(model="cgt", stock="gpt2", quick=True, more_in_cache=True),
}

_loading = False


@contextmanager
def _as_recorded() -> Iterator[None]:
    """Loading puts operators in place by itself."""
    global _loading
    before, _loading = _loading, True
    try:
        yield
    finally:
        _loading = before


def with_operators(stock: type, family: Family) -> type:
    """A class like ``stock`` whose instances have the family's operators from the start."""
    if not family.layers and not family.attachments:
        return stock

    def made(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        if not _loading and hasattr(config, "quantization_config"):
            del config.quantization_config  # the record of a model that had this config before
        super(cls, self).__init__(config, *args, **kwargs)
        if not _loading:
            family.put_in_as_trained(self)

    def load(cls: Any, *args: Any, config: Any = None, **kwargs: Any) -> Any:
        nothing = not (args or kwargs.get("pretrained_model_name_or_path"))
        if nothing or args[:1] == (None,):  # a state alone: it is the config that says what it is of
            with torch.device("meta"):
                config = cls(copy.deepcopy(config)).config
        with _as_recorded():
            return super(own, cls).from_pretrained(*args, config=config, **kwargs)

    def from_config(cls: Any, config: Any, **kwargs: Any) -> Any:
        if not hasattr(config, "quantization_config"):
            return super(own, cls)._from_config(config, **kwargs)
        with _as_recorded():
            return super(own, cls)._from_config(config, **kwargs)

    body = {"__init__": made, "__module__": stock.__module__, "__doc__": stock.__doc__}
    body |= {"from_pretrained": classmethod(load), "_from_config": classmethod(from_config)}
    named = [base for base in stock.__bases__ if base.__name__ == "GenerationMixin"]  # asked for among the bases
    cls = own = type(stock.__name__, (stock, *named), body)
    return cls
