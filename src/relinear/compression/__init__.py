"""Compress a pretrained model to a budget: calibration, plan, fits, evaluation, exports."""

from relinear.compression.export import export_compressed_tensors as export_compressed_tensors
from relinear.compression.gguf import export_gguf as export_gguf
from relinear.compression.healing import HealReport as HealReport
from relinear.compression.healing import heal as heal
from relinear.compression.run import CompressReport as CompressReport
from relinear.compression.run import compress as compress
from relinear.compression.settings import CompressSettings as CompressSettings
