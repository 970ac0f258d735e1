"""Compress a pretrained model to a budget: calibration, plan, fits, evaluation, exports."""

from relinear.compression.export import export_compressed_tensors
from relinear.compression.gguf import export_gguf
from relinear.compression.healing import HealReport, heal
from relinear.compression.run import CompressReport, compress
from relinear.compression.settings import CompressSettings

__all__ = [
    "CompressReport",
    "CompressSettings",
    "HealReport",
    "compress",
    "export_compressed_tensors",
    "export_gguf",
    "heal",
]
