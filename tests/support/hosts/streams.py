"""Iterable datasets for the tests: numbers, and shards of them."""

from __future__ import annotations

import itertools
import random
import tarfile
from collections.abc import Iterator, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from needs import HOROVOD
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

WORLDS = [pytest.param(3, "spawn"), pytest.param(2, "horovodrun", marks=HOROVOD)]


def of_workers(count: int) -> dict[str, Any]:
    """Return the settings for a number of workers, forked because these ranks would otherwise need seconds."""
    return {"num_workers": count, "multiprocessing_context": "fork"} if count else {}


class Numbers(IterableDataset[Tensor]):
    """Yields 0 to ``length - 1`` on every rank and worker."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[Tensor]:
        return (torch.tensor(i) for i in range(self.length))


class Shards(IterableDataset[Tensor]):
    """Has the method ``shard``. Sample 100 i + j is the j-th of shard i."""

    def __init__(self, sizes: list[int], parts: int = 1, index: int = 0) -> None:
        self.sizes, self.parts, self.index = sizes, parts, index

    def shard(self, num_shards: int, index: int) -> Shards:
        return Shards(self.sizes, num_shards, index)

    def __iter__(self) -> Iterator[Tensor]:
        for i in range(self.index, len(self.sizes), self.parts):
            yield from (torch.tensor(100 * i + j) for j in range(self.sizes[i]))

    def samples(self) -> list[int]:
        return [100 * i + j for i, size in enumerate(self.sizes) for j in range(size)]


class StatefulShards(Shards):
    """Has a state, and begins anew after its end, as torchdata's datasets do; notes what it reads in ``read``."""

    def __init__(self, sizes: list[int], parts: int = 1, index: int = 0, read: list[int] | None = None) -> None:
        super().__init__(sizes, parts, index)
        self.read: list[int] = [] if read is None else read
        self.position = 0

    def shard(self, num_shards: int, index: int) -> StatefulShards:
        return StatefulShards(self.sizes, num_shards, index, self.read)

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]

    def __iter__(self) -> Iterator[Tensor]:
        samples = [int(sample) for sample in super().__iter__()]
        while self.position < len(samples):
            self.position += 1
            self.read.append(samples[self.position - 1])
            yield torch.tensor(samples[self.position - 1])
        self.position = 0


class SplitsAmongWorkers(Numbers):
    """Shards itself over workers, as in torch's documentation."""

    def __iter__(self) -> Iterator[Tensor]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        return itertools.islice(super().__iter__(), first, None, step)


class Shuffling(IterableDataset[Tensor]):
    """Draws its order and its samples from python, numpy and torch."""

    def __iter__(self) -> Iterator[Tensor]:
        order = random.sample(range(20), 20)
        return (torch.tensor([i, np.random.rand(), torch.rand(()).item()]) for i in order)


class StatefulShuffling(Shuffling):
    """Has a state, like ``StatefulShards``; what a sample draws is not in it."""

    def __init__(self) -> None:
        self.position = 0
        self.read: list[int] = []

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]

    def __iter__(self) -> Iterator[Tensor]:
        while self.position < 20:
            self.position += 1
            self.read.append(self.position)
            yield torch.tensor([self.position, random.random(), np.random.rand(), torch.rand(()).item()])
        self.position = 0


def write_tars(folder: Path, sizes: Sequence[int]) -> list[str]:
    """Write a file of WebDataset for each size, whose samples are numbers, and return their paths."""
    for i, size in enumerate(sizes):
        with tarfile.open(folder / f"{i:03}.tar", "w") as tar:
            for j in range(size):
                member = tarfile.TarInfo(f"{100 * i + j:06}.cls")
                content = str(100 * i + j).encode()
                member.size = len(content)
                tar.addfile(member, BytesIO(content))
    return [str(folder / f"{i:03}.tar") for i in range(len(sizes))]
