"""Short texts and numbers that change when data do: of a dataset, without reading samples, and of one sample."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sized
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from unitrain.data.structure import rebuilt
from unitrain.errors import CheckpointError

# Of long tensors, so many rows, spread evenly.
_ROWS = 4096


def fingerprint(dataset: Any) -> str:
    """Return what a dataset shows of its content, as a text; empty where it shows nothing.

    Known are the tensors of a ``TensorDataset``, the labels that torchvision's datasets keep (``targets``), the columns
    of Hugging Face's, and what ``Subset`` and ``ConcatDataset`` are made of. A dataset may have a ``fingerprint``
    attribute of its own, a text.
    """
    digest = hashlib.blake2b(digest_size=8)
    return digest.hexdigest() if _add(digest, dataset) else ""


def _add(digest: Any, dataset: Any) -> bool:
    """Add a dataset's content, and say whether there was anything."""
    own = getattr(dataset, "fingerprint", None)
    if isinstance(own, str):
        digest.update(own.encode())
    elif isinstance(dataset, Subset):
        _add_rows(digest, np.asarray(dataset.indices))
        _add(digest, dataset.dataset)
    elif isinstance(dataset, ConcatDataset):
        digest.update(str(dataset.cumulative_sizes).encode())
        for part in dataset.datasets:
            _add(digest, part)
    elif isinstance(dataset, TensorDataset):
        for tensor in dataset.tensors:
            _add_rows(digest, tensor)
    elif isinstance(getattr(dataset, "features", None), dict) and hasattr(dataset, "column_names"):
        digest.update(str(sorted(dataset.features.items())).encode())
    elif isinstance(getattr(dataset, "targets", None), (list, Tensor, np.ndarray)):
        _add_rows(digest, dataset.targets)
    else:
        return False
    return True


def _add_rows(digest: Any, rows: Tensor | Sized) -> None:
    some = rows[:: max(1, len(rows) // _ROWS)]  # type: ignore[index]
    if isinstance(some, Tensor):
        digest.update(f"{len(rows)} {some.dtype} {tuple(some.shape)}".encode())
        some = some.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    values = np.asarray(some)
    digest.update(f"{len(rows)} {values.dtype} {values.shape}".encode())
    # Of objects numpy has but the addresses.
    digest.update(str(values.tolist()).encode() if values.dtype == object else np.ascontiguousarray(values).tobytes())


def sample_digest(sample: Any) -> int:
    """Return a number that two samples share only if they hold the same tensors, arrays, texts and numbers."""
    digest = hashlib.blake2b(digest_size=7)

    def add(value: Any) -> None:
        if isinstance(value, Tensor) and value.layout == torch.strided and value.dim():
            _add_rows(digest, value)
        elif isinstance(value, (Tensor, np.ndarray, np.generic, str, bytes, int, float, bool, type(None))):
            digest.update(repr(value).encode())
        else:
            digest.update(type(value).__name__.encode())

    rebuilt(sample, add)
    return int.from_bytes(digest.digest(), "little")


def check_same_data(state: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Compare the data that two states of loaders are of.

    Raises:
        CheckpointError: they are not the same.
    """
    remedy = "Give the data that the run was begun with, or begin an epoch with other data: set loader.epoch."
    if state["length"] != own["length"]:
        raise CheckpointError(
            f"the state is of a dataset of {state['length']} samples, and this has {own['length']}. {remedy}"
        )
    if state["fingerprint"] != own["fingerprint"] and state["fingerprint"] and own["fingerprint"]:
        raise CheckpointError(
            f"the state is of another dataset: its fingerprint is {state['fingerprint']}, and this one's "
            f"{own['fingerprint']}. {remedy}"
        )
