"""Read text corpora, load or train tokenizers, and pack text into blocks of tokens."""

from relinear.data.corpora import iter_texts
from relinear.data.packing import PackedData, PackedDataset, prepare_data
from relinear.data.settings import DataSettings

__all__ = ["DataSettings", "PackedData", "PackedDataset", "iter_texts", "prepare_data"]
