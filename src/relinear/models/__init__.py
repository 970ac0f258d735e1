"""Models: presets, which are named sizes of stock Hugging Face models, and the Contextually Guided Transformer."""

from relinear.models.heads import HeadBias as HeadBias
from relinear.models.heads import ReadoutScale as ReadoutScale
from relinear.models.presets import draw_as_torch_ as draw_as_torch_
from relinear.models.presets import from_preset as from_preset
from relinear.models.presets import locate_model as locate_model
from relinear.models.presets import model_folder as model_folder
from relinear.models.presets import preset_config as preset_config
from relinear.models.presets import preset_names as preset_names
