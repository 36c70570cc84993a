"""Weights in files of safetensors, as Hugging Face has them: loaded into a model, and saved."""

from unitrain.features.safetensors.weights import load_weights, save_weights, write_tensors

__all__ = ["load_weights", "save_weights"]

WRITERS = {".safetensors": write_tensors}
