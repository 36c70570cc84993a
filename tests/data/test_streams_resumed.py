"""Sharded datasets of libraries continue from a checkpoint on other ranks and workers, each sample exactly once."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from needs import HOROVOD
from ranks import run_ranks
from streams import Shards, StatefulShards, of_workers, write_tars
from torch import nn

import unitrain

SIZES = (5, 9, 3, 12, 7, 1, 8, 6)
SEEKING = ("stateful", "generator", "few", "arrow", "mapped")  # that have a state to continue from exactly
KINDS = ("shards", *SEEKING, "shuffled", "webdataset")


def rows(sizes: tuple[int, ...], shards: list[int]) -> Iterator[dict[str, int]]:
    for i in shards:
        yield from ({"x": 100 * i + j} for j in range(sizes[i]))


def doubled(batch: dict[str, list[int]]) -> dict[str, list[int]]:
    return {"x": list(batch["x"])}


def as_row(sample: dict[str, int]) -> dict[str, int]:
    return {"x": sample["cls"]}


def data_of(kind: str, urls: list[str]) -> Any:
    """Return a dataset; of Hugging Face's, each has another way to its state."""
    if kind == "shards":
        return Shards(list(SIZES))
    if kind == "stateful":
        return StatefulShards(list(SIZES))
    if kind == "webdataset":
        import webdataset

        data = webdataset.WebDataset(urls, shardshuffle=False, nodesplitter=webdataset.split_by_node, empty_check=False)
        return data.shuffle(5).decode().map(as_row)  # seeded with the time, if it were not for the loader
    import datasets

    if kind == "arrow":
        flat = datasets.Dataset.from_list(list(rows(SIZES, list(range(len(SIZES))))))
        return flat.to_iterable_dataset(num_shards=8).with_format("torch")
    rows_of = {"sizes": SIZES, "shards": list(range(len(SIZES)))}
    if kind == "few":  # shards for the parts of a global batch: each part reads all, and keeps its own
        rows_of = {"sizes": (sum(SIZES[:3]), *SIZES[3:6]), "shards": [0, 1, 2]}
    data = datasets.IterableDataset.from_generator(rows, gen_kwargs=rows_of)
    if kind == "shuffled":
        return data.shuffle(seed=1, buffer_size=4).with_format("torch")
    if kind == "mapped":
        return data.map(doubled, batched=True, batch_size=3).filter(lambda row: row["x"] % 10 != 7).with_format("torch")
    return data


def numbers(batch: Any) -> list[int]:
    return [int(number) for number in (batch["x"] if isinstance(batch, dict) else batch)]


def train(folder: Path, urls: list[str], workers: int, stop: int | None) -> dict[str, list[list[int]]]:
    """Train from where the checkpoint is, for some steps of an epoch. Return the samples of each step, by dataset."""
    strategy = unitrain.init(timeout_s=60)
    model, optimizer = strategy.prepare(model := nn.Linear(1, 1), torch.optim.SGD(model.parameters(), lr=1e-6))
    loaders: dict[str, Any] = {
        kind: strategy.dataloader(data_of(kind, urls), global_batch_size=6, shards=(4, 2), **of_workers(workers))
        for kind in KINDS
    }
    checkpoint = strategy.checkpoint(folder, model=model, optimizer=optimizer, **loaders)
    checkpoint.resume()
    found: dict[str, list[list[int]]] = {kind: [] for kind in KINDS}
    for kind, loader in loaders.items():
        for batch in loader:
            samples = numbers(batch)
            strategy.step(model(torch.tensor(samples).float().unsqueeze(1)).mean(), optimizer)
            found[kind].append([] if loader.stand_in else samples)
            if len(found[kind]) == stop:
                break
        seeks = loader.state_dict()["seeks"][1]
        assert any(state for *_, state in seeks) == (kind in SEEKING and stop is not None)
    checkpoint.save()
    return found


def together(ranks: list[dict[str, list[list[int]]]]) -> dict[str, list[list[int]]]:
    """Return the global batches."""
    return {
        kind: [sorted(itertools.chain(*parts)) for parts in zip(*(rank[kind] for rank in ranks), strict=True)]
        for kind in KINDS
    }


def expected(kind: str) -> list[int]:
    sizes = (sum(SIZES[:3]), *SIZES[3:5]) if kind == "few" else SIZES
    return [sample for sample in Shards(list(sizes)).samples() if kind != "mapped" or sample % 10 != 7]


WORLDS = [
    pytest.param([(1, 2, "spawn"), (2, 0, "spawn")], id="1-2"),
    pytest.param([(1, 2, "spawn"), (3, 0, "spawn"), (2, 2, "spawn")], id="1-3-2", marks=pytest.mark.all("more worlds")),
    pytest.param([(2, 2, "horovodrun"), (1, 0, "spawn")], id="horovod", marks=[HOROVOD, pytest.mark.soak]),
]


@pytest.mark.parametrize("worlds", WORLDS)
def test_streams_continue_on_other_ranks_and_workers(
    tmp_path: Path, worlds: list[tuple[int, int, Literal["spawn", "horovodrun"]]]
) -> None:
    urls = write_tars(tmp_path, SIZES)
    whole = together(run_ranks(train, tmp_path / "whole", urls, 0, None, nprocs=1))
    assert {kind: sorted(itertools.chain(*steps)) for kind, steps in whole.items()} == {
        kind: expected(kind) for kind in KINDS
    }
    begun: dict[str, list[list[int]]] = {kind: [] for kind in KINDS}
    for number, (ranks, workers, launcher) in enumerate(worlds, 1):
        stop = 3 if number < len(worlds) else None
        part = run_ranks(train, tmp_path / "parts", urls, workers, stop, nprocs=ranks, launcher=launcher)
        for kind, steps in together(part).items():
            begun[kind] += steps
    assert begun == whole
