"""A small pretrained model, its tokens and settings, for tests of compression."""

import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

from relinear.compression.calibrate import Calibration
from relinear.compression.settings import CompressSettings
from relinear.contract.calibration_statistics import CalibrationStatistics
from relinear.contract.operator import is_replaceable

SETTINGS = {"tokens": 512, "sequence_length": 16, "batch_size": 4, "evaluate": False, "self_sampled": False}
#: with one kind of candidate, for tests of what all budgets have in common: integers take longest to be tried
LOW_RANK = SETTINGS | {"tokens": 256, "keep": 0.8, "candidates": ["low_rank"]}


def tiny(kind: str = "llama", vocabulary: int = 50):
    torch.manual_seed(0)
    if kind == "gpt2":
        config = GPT2Config(vocab_size=vocabulary, n_embd=32, n_layer=3, n_head=2, n_positions=32)
    else:
        config = LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            initializer_range=0.2,
        )
    return AutoModelForCausalLM.from_config(config).eval()


def tokens(count: int = 512) -> list[torch.Tensor]:
    # a sequence with structure, so that moments are far from white
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 50, (count,), generator=generator).cumsum(0) % 50]


def in_layers(model) -> dict[int, dict[str, torch.nn.Module]]:
    from relinear.hf.model_layout import layer_finder

    found: dict[int, dict[str, torch.nn.Module]] = {}
    for name, module in model.named_modules():
        if is_replaceable(module) and (index := layer_finder(model)(name)) is not None:
            found.setdefault(index, {})[name] = module
    return found


def moments_of(calibration: Calibration) -> dict[str, CalibrationStatistics]:
    found: dict[str, CalibrationStatistics] = {}
    calibration.map_layers("candidates", "all", lambda statistics: found.update(statistics) or {})
    return found


def modules(model) -> dict[str, torch.nn.Module]:
    return {name: module for group in in_layers(model).values() for name, module in group.items()}


def calibrate(model, blocks, folder, batch: int = 4, **options) -> Calibration:
    settings = CompressSettings(batch_size=batch)
    return Calibration(model, blocks, in_layers(model), folder, settings, **options)
