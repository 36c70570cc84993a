"""Known datasets and torch's collate function: whether they draw random numbers, and a fast path for collating.

Only exact classes are known: a dataset of any other class, including a subclass of a known one, may draw.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Subset, TensorDataset, default_collate
from torch.utils.data._utils import collate as torch_collate


def draws_nothing(dataset: Any) -> bool:
    """Return whether a dataset is known to draw no random numbers when it is read, so that its samples need no seeds.

    Known are lists, tuples, ranges, arrays and tensors, ``TensorDataset``, Hugging Face's datasets without a transform,
    and torch's ``Subset`` and ``ConcatDataset`` of these.
    """
    kind = type(dataset)
    if kind is Subset:
        return type(dataset.indices) in (list, tuple, range, np.ndarray, Tensor) and draws_nothing(dataset.dataset)
    if kind is ConcatDataset:
        return all(map(draws_nothing, dataset.datasets))
    if kind is TensorDataset:
        return all(type(tensor) is Tensor for tensor in dataset.tensors)
    if kind in (list, tuple, range, np.ndarray, Tensor):
        return True
    hugging_face = sys.modules.get("datasets")
    # The format of a transform is "custom".
    return hugging_face is not None and kind is hugging_face.Dataset and dataset.format["type"] != "custom"


def is_default_collate(collate: Any) -> bool:
    """Return whether a collate function is torch's ``default_collate``, without functions that users registered.

    Scripts may add functions for their own types to ``default_collate_fn_map``, and these may draw random numbers.
    """
    return collate is default_collate and all(
        function.__module__ == torch_collate.__name__ for function in torch_collate.default_collate_fn_map.values()
    )


def collated_rows(dataset: Any, samples: list[int]) -> list[Tensor] | None:
    """Return the result of ``default_collate`` for samples of a ``TensorDataset``, with one read of each tensor.

    Return None if the result could differ: then read the samples one by one.

    Args:
        dataset: any dataset. ``Subset`` of a ``TensorDataset`` is read fast, too.
        samples: indices of the dataset.
    """
    while type(dataset) is Subset and type(dataset.indices) in (list, range):
        samples = [dataset.indices[sample] for sample in samples]
        dataset = dataset.dataset
    # A TensorDataset takes negative indices, and index_select does not.
    if type(dataset) is not TensorDataset or not all(map(_is_plain, dataset.tensors)) or min(samples) < 0:
        return None
    index = torch.tensor(samples)
    return [tensor.index_select(0, index.to(tensor.device)) for tensor in dataset.tensors]


def _is_plain(tensor: Tensor) -> bool:
    # index_select of these copies rows as stacking the samples does, to the bit and with its strides.
    return type(tensor) is Tensor and tensor.layout is torch.strided and tensor.is_contiguous()
