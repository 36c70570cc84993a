"""A dataset's fingerprint depends on its content."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from unitrain.data.reading.fingerprint import fingerprint

DATA: Any = list(range(20))  # any sequence is a map-style dataset


class Labelled:
    def __init__(self, targets: Any) -> None:
        self.targets = targets


def test_a_fingerprint_follows_the_content() -> None:
    tensors = TensorDataset(torch.arange(10.0), torch.arange(10))
    kinds = [
        tensors,
        TensorDataset(torch.arange(10.0), torch.arange(10).flip(0)),
        TensorDataset(torch.arange(10.0).bfloat16()),
        Subset(tensors, range(5)),
        Subset(tensors, range(1, 6)),
        ConcatDataset([tensors, tensors]),
        Labelled([1, 2, 3]),
        Labelled(torch.tensor([1, 2, 3])),
        Labelled(["1", "2", "3"]),
    ]
    prints = [fingerprint(kind) for kind in kinds]
    assert "" not in prints
    assert len(set(prints)) == len(prints)
    assert fingerprint(TensorDataset(torch.arange(10.0), torch.arange(10))) == prints[0]
    assert fingerprint(DATA) == fingerprint(Labelled(None)) == ""
