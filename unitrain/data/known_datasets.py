"""What is certain of some datasets and of torch's collate function: that they draw nothing, and what they make.

Nothing here guesses. A dataset of a class that isn't known, a subclass of one that is among them, may draw.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, StackDataset, Subset, TensorDataset, default_collate
from torch.utils.data._utils import collate as torch_collate

# Those of Hugging Face's that are no function of the user's, as ``custom`` is.
_FORMATS = {None, "arrow", "jax", "numpy", "pandas", "polars", "tensorflow", "torch"}
_DTYPES = {
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
}  # fmt: skip


def draws_nothing(dataset: Any) -> bool:
    """Whether a dataset certainly draws no random numbers as it is read, so that its samples need no seeds.

    Those are lists, tuples, ranges, arrays and tensors, ``TensorDataset``, Hugging Face's datasets without a transform,
    and what torch's ``Subset``, ``ConcatDataset`` and ``StackDataset`` make of them.
    """
    kind = type(dataset)
    if kind is Subset:
        return type(dataset.indices) in (list, tuple, range, np.ndarray, Tensor) and draws_nothing(dataset.dataset)
    if kind is ConcatDataset:
        return all(map(draws_nothing, dataset.datasets))
    if kind is StackDataset:
        parts = dataset.datasets
        return all(map(draws_nothing, parts.values() if isinstance(parts, dict) else parts))
    if kind is TensorDataset:
        return all(type(tensor) is Tensor for tensor in dataset.tensors)
    if kind in (list, tuple, range, np.ndarray, Tensor):
        return True
    hugging_face = sys.modules.get("datasets")
    return hugging_face is not None and kind is hugging_face.Dataset and dataset.format["type"] in _FORMATS


def is_default_collate(collate: Any) -> bool:
    """Whether a collate function is torch's own, and does for every type what torch made it do."""
    return collate is default_collate and all(
        function.__module__ == torch_collate.__name__ for function in torch_collate.default_collate_fn_map.values()
    )


def collated_rows(dataset: Any, samples: list[int]) -> list[Tensor] | None:
    """Return what ``default_collate`` makes of a ``TensorDataset``'s samples, from one read of each tensor.

    None where the two might differ in anything, an error's message included: the samples are read one by one then.
    """
    while type(dataset) is Subset and type(dataset.indices) in (list, range):
        samples = [dataset.indices[sample] for sample in samples]
        dataset = dataset.dataset
    if type(dataset) is not TensorDataset or not all(map(_is_plain, dataset.tensors)):
        return None
    index = torch.tensor(samples)
    if index.dtype != torch.int64 or min(samples) < 0 or max(samples) >= min(map(len, dataset.tensors)):
        return None
    return [tensor.index_select(0, index) for tensor in dataset.tensors]


def _is_plain(tensor: Tensor) -> bool:
    return (
        type(tensor) is Tensor
        and tensor.dtype in _DTYPES
        and tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and not tensor.requires_grad
    )
