"""transformers' common, generation and training tests, a class for every family.

With ``OUTSIDE_BARE`` set relinear is not imported and the stock families alone are here: what passes then has to pass.
"""

from __future__ import annotations

import copy
import os
import unittest
from typing import Any

import torch
import transformers

from outside import sources

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
_HEADS = ("ForSequenceClassification", "ForQuestionAnswering", "ForTokenClassification")


def _classes(model: str, language_model: str) -> list[type]:
    return [getattr(transformers, model + name) for name in ("Model", language_model, *_HEADS)]


#: model -> its config's class, settings, and classes; the language model is the second
MODELS: dict[str, tuple[type, dict[str, Any], list[type]]] = {
    "llama": (transformers.LlamaConfig, _LLAMA, _classes("Llama", "ForCausalLM")),
    "gpt2": (transformers.GPT2Config, _GPT2, _classes("GPT2", "LMHeadModel")),
}


class _Tester:
    """What the mixins ask: sizes, a config, and inputs for it."""

    batch_size, seq_length, num_labels, is_training = 13, 7, 3, True

    def __init__(self, config_class: type, settings: dict[str, Any], classes: list[type]) -> None:
        self.config_class, self.settings = config_class, settings
        self.base_model_class, self.causal_lm_class = classes[:2]
        for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"):
            setattr(self, name, getattr(self.get_config(), name))

    def get_config(self) -> Any:
        return self.config_class(**self.settings)

    def prepare_config_and_inputs_for_common(self) -> tuple[Any, dict[str, torch.Tensor]]:
        common.global_rng.seed(0)
        ids = common.ids_tensor([self.batch_size, self.seq_length], self.vocab_size)
        return self.get_config(), {"input_ids": ids, "attention_mask": torch.tril(torch.ones_like(ids))}


def _suite(name: str, model: str, classes: list[type], *mixins: type, **more: Any) -> None:
    """The class of all tests for a family, with what it says otherwise."""

    def set_up(self: Any) -> None:
        self.model_tester = _Tester(*MODELS[model][:2], classes)

    body = {"setUp": set_up, "all_model_classes": classes, "model_tester": None} | more
    globals()[name] = type(name, mixins + _MIXINS, body)


def _split(cache: Any) -> tuple[Any, list[Any]]:
    """A cache of the decoder's own layers alone, as any model's, and the entries behind them."""
    layers = MODELS["llama"][1]["num_hidden_layers"]
    own = copy.copy(cache)
    own.layers = cache.layers[:layers]
    return own, cache.layers[layers:]


class _MoreInTheCache(generation.GenerationTesterMixin):
    """The checks of a cache that has one more entry, as the mixin asks models with such a cache to write them."""

    def _check_past_key_values_for_generate(
        self, batch_size: int, past_key_values: Any, seq_length: int, config: Any
    ) -> None:
        own, more = _split(past_key_values)
        assert len(more) == 1
        super()._check_past_key_values_for_generate(batch_size, own, seq_length, config)

    def _check_caches_are_equal(self, first: Any, second: Any) -> None:
        (first, (entry,)), (second, (other,)) = _split(first), _split(second)
        super()._check_caches_are_equal(first, second)
        for name in ("state", "keys", "values"):
            if hasattr(entry, name):
                torch.testing.assert_close(getattr(entry, name), getattr(other, name))


if os.environ.get("OUTSIDE_BARE"):
    for _model in MODELS:
        _suite(_model, _model, MODELS[_model][2])
else:
    from outside.families import FAMILIES, with_operators
    from relinear.models.cgt import CGTConfig, CGTForCausalLM
    from relinear.models.cgt.model import CGTModel

    sizes = {"context_layer": 1, "context_size": 16, "context_heads": 2, "rank": 2, "templates": 4}
    MODELS["cgt"] = (CGTConfig, _GPT2 | sizes, [CGTModel, CGTForCausalLM])
    for _names, _class in (("MODEL_MAPPING_NAMES", CGTModel), ("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", CGTForCausalLM)):
        setattr(common, _names, {**getattr(common, _names), CGTConfig.model_type: _class.__name__})
    for _name, _family in FAMILIES.items():
        _made = [with_operators(stock, _family) for stock in MODELS[_family.model][2]]
        _mixins = (_MoreInTheCache,) if _family.more_in_cache else ()
        _suite(_name, _family.model, _made, *_mixins, training_overfit_steps=_family.steps)
