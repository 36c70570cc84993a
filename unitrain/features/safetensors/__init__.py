"""Weights in files of safetensors, as Hugging Face has them: loaded into a model, and saved by all ranks."""

from unitrain.features.safetensors.loading import load_weights
from unitrain.features.safetensors.saving import save_weights, write_tensors

__all__ = ["load_weights", "save_weights"]

WRITERS = {".safetensors": write_tensors}
