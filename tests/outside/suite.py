"""transformers' common, generation and training tests, a class for every family."""

from __future__ import annotations

import unittest
from typing import Any

import torch
import transformers

from outside import sources
from outside.families import FAMILIES, Family, with_operators
from relinear.models.cgt import CGTConfig, CGTForCausalLM
from relinear.models.cgt.model import CGTModel

sources.activate()

from tests import test_modeling_common as common  # noqa: E402
from tests.generation import test_utils as generation  # noqa: E402
from tests.test_training_mixin import TrainingTesterMixin  # noqa: E402

_MIXINS = (common.ModelTesterMixin, generation.GenerationTesterMixin, TrainingTesterMixin, unittest.TestCase)
del TrainingTesterMixin  # pytest would take it for a suite

_SIZES = {"vocab_size": 99, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_GPT2 = _SIZES | {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 512}
_LLAMA = _SIZES | {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
_HEADS = ("Model", "ForCausalLM", "ForSequenceClassification", "ForQuestionAnswering", "ForTokenClassification")
#: model -> its config's class, settings, and classes; the language model is the second
MODELS: dict[str, tuple[type, dict[str, Any], list[type]]] = {
    "llama": (transformers.LlamaConfig, _LLAMA, [getattr(transformers, f"Llama{head}") for head in _HEADS]),
    "gpt2": (
        transformers.GPT2Config,
        _GPT2,
        [transformers.GPT2Model, transformers.GPT2LMHeadModel]
        + [getattr(transformers, f"GPT2{head}") for head in _HEADS[2:]],
    ),
    "cgt": (
        CGTConfig,
        _GPT2 | {"context_layer": 1, "context_size": 16, "context_heads": 2, "rank": 2, "templates": 4},
        [CGTModel, CGTForCausalLM],
    ),
}


class ModelTester:
    """What the mixins ask: sizes, a config, and inputs for it."""

    batch_size, seq_length, num_labels, is_training = 13, 7, 3, True

    def __init__(self, parent: unittest.TestCase, family: Family) -> None:
        self.parent = parent
        self.config_class, self.settings, _ = MODELS[family.model]
        for name, value in self.settings.items():
            setattr(self, name, value)
        for name in ("hidden_size", "num_hidden_layers", "num_attention_heads"):
            setattr(self, name, getattr(self.get_config(), name))

    def get_config(self) -> Any:
        return self.config_class(**self.settings)

    def prepare_config_and_inputs_for_common(self) -> tuple[Any, dict[str, torch.Tensor]]:
        ids = common.ids_tensor([self.batch_size, self.seq_length], self.vocab_size)
        return self.get_config(), {"input_ids": ids, "attention_mask": torch.tril(torch.ones_like(ids))}


def _suite(name: str, family: Family) -> type:
    classes = [with_operators(stock, family) for stock in MODELS[family.model][2]]

    def set_up(self: Any) -> None:
        self.model_tester = ModelTester(self, family)
        self.model_tester.base_model_class, self.model_tester.causal_lm_class = classes[:2]

    body = {"setUp": set_up, "all_model_classes": classes, "model_tester": None}
    return type(name, _MIXINS, body)


for _name, _family in FAMILIES.items():
    globals()[_name] = _suite(_name, _family)
