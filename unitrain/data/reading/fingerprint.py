"""Fingerprints that change when data change: of a dataset, without reading samples, and of a sample."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sized
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from unitrain.communication.structure import leaves
from unitrain.errors import CheckpointError

# At most about this many rows of a tensor are used, at even distances.
_ROWS = 4096


def fingerprint(dataset: Any) -> str:
    """Return a fingerprint of a dataset as a string, or an empty string if its content is unknown.

    It covers the tensors of a ``TensorDataset``, the labels of torchvision's datasets (``targets``), the columns of
    Hugging Face's, and the parts of ``Subset`` and ``ConcatDataset``. Any dataset may define it as a string attribute
    ``fingerprint``.

    Of a tensor, about 4,096 rows are hashed, so that it takes milliseconds: a change of a few rows may go unnoticed.
    """
    digest = hashlib.blake2b(digest_size=8)
    return digest.hexdigest() if _add(digest, dataset) else ""


def is_declared(dataset: Any) -> bool:
    """Return whether a dataset defines its fingerprint itself."""
    return isinstance(getattr(dataset, "fingerprint", None), str)


def _add(digest: Any, dataset: Any) -> bool:
    """Add a dataset's content to the digest, and return whether any is known."""
    if is_declared(dataset):
        digest.update(dataset.fingerprint.encode())
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
    """Add rows at even distances to the digest, with the number of all, their dtype and their shape."""
    picked = rows[:: max(1, len(rows) // _ROWS)]  # type: ignore[index]
    if isinstance(picked, Tensor):
        digest.update(f"{len(rows)} {picked.dtype} {tuple(picked.shape)}".encode())
        # As bytes: numpy has no bfloat16.
        picked = picked.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    values = np.asarray(picked)
    digest.update(f"{len(rows)} {values.dtype} {values.shape}".encode())
    # The bytes of an object array are addresses.
    digest.update(str(values.tolist()).encode() if values.dtype == object else np.ascontiguousarray(values).tobytes())


def sample_digest(sample: Any) -> int:
    """Return a digest of a sample as an int: equal for samples with equal tensors, arrays, strings, ints and floats.

    It has 56 bits, so that it fits a tensor of int64 when ranks exchange it. Of other objects, the bytes count if they
    have ``tobytes``, as images have, or else only the class.
    """
    digest = hashlib.blake2b(digest_size=7)

    for value in leaves(sample):
        if isinstance(value, Tensor) and value.layout == torch.strided and value.dim():
            _add_rows(digest, value)
        elif isinstance(value, Tensor):
            digest.update(repr(value.cpu()).encode())  # the device's index is the rank's
        elif isinstance(value, (np.ndarray, np.generic)) and value.dtype.hasobject:
            digest.update(f"{value.dtype} {value.shape}".encode())  # an object's bytes are its address
        elif isinstance(value, (np.generic, str, bytes, int, float, bool, type(None))):
            digest.update(repr(value).encode())
        elif callable(getattr(value, "tobytes", None)):
            digest.update(type(value).__name__.encode() + value.tobytes())
        else:
            digest.update(type(value).__name__.encode())

    return int.from_bytes(digest.digest(), "little")


def check_same_data(state: Mapping[str, Any], current: Mapping[str, Any]) -> None:
    """Check that a loader's saved state belongs to the same data as its current state. Not collective.

    Args:
        state: the saved state, with ``length`` and ``fingerprint``.
        current: the loader's state now. An unknown fingerprint is "", and equals any.

    Raises:
        CheckpointError: the length or the fingerprint differs.
    """
    for name in ("length", "fingerprint"):
        saved, now = state[name], current[name]
        if saved != now and (name == "length" or (saved and now)):
            raise CheckpointError(
                f"the state belongs to another dataset: its {name} is {saved}, but this one's is {now}. Use the data "
                "that the run was started with, or start a new epoch with other data: set loader.epoch."
            )
