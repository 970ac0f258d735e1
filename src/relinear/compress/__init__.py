"""From a pretrained model and a budget to a smaller model: calibration, plan, fits in order, what is left on disk."""

import sys
from types import ModuleType
from typing import Any

from relinear.compress.export import export_compressed_tensors as export_compressed_tensors
from relinear.compress.export import export_plain as export_plain
from relinear.compress.export_gguf import export_gguf as export_gguf
from relinear.compress.heal import HealReport as HealReport
from relinear.compress.heal import heal as heal
from relinear.compress.run import CompressReport as CompressReport
from relinear.compress.run import compress as compress
from relinear.compress.settings import CompressSettings as CompressSettings


class _Callable(ModuleType):
    """``relinear.compress`` is the function, or this room once something in it was imported: both can be called."""

    def __call__(self, *args: Any, **kwargs: Any) -> CompressReport:
        return compress(*args, **kwargs)


sys.modules[__name__].__class__ = _Callable
