"""Ranks whose shards differ in length end an epoch together, and give every sample the same weight."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
from ranks import on_ranks, run_ranks
from streams import WORLDS, Shards, of_workers
from torch import nn

import unitrain
from unitrain import DataError


def read_shards(sizes: list[int], workers: int) -> dict[str, Any]:
    strategy = unitrain.init(accumulate=2, timeout_s=30)
    model = strategy.prepare(nn.Linear(1, 1))  # without a model in training mode, there would be no stand-ins
    data = Shards(sizes)
    batch = 4 * strategy.world_size
    loader = strategy.dataloader(data, global_batch_size=batch, **of_workers(workers))
    seen, counts, states = [], [], []
    for batch in loader:
        micro_batch = strategy._step.batches.micro_batch
        assert micro_batch is not None
        assert micro_batch.count == (0 if loader.stand_in else len(batch))
        seen += batch.tolist()[: micro_batch.count]
        counts.append((micro_batch.start, micro_batch.stop, micro_batch.count, micro_batch.window, micro_batch.last))
        states.append({**loader.state_dict(), "seeks": None})  # of this rank's shards
    with torch.no_grad():
        again = [sample for batch in loader for sample in batch.tolist()]
    assert again == seen
    assert model.training
    return {"seen": seen, "counts": counts, "states": states}


@pytest.mark.parametrize(("world_size", "launcher"), WORLDS)
@pytest.mark.parametrize("workers", [0, 2])
def test_uneven_shards_end_together(world_size: int, launcher: Literal["spawn", "horovodrun"], workers: int) -> None:
    sizes = [3, 17, 1, 8, 5, 2]
    ranks = run_ranks(read_shards, sizes, workers, nprocs=world_size, launcher=launcher)
    assert sorted(sample for rank in ranks for sample in rank["seen"]) == Shards(sizes).samples()
    position = 0
    windows: list[int] = []
    for parts in zip(*(rank["counts"] for rank in ranks), strict=True):
        start, stop, _, window, last = parts[0]
        assert {(part[0], part[1], part[3], part[4]) for part in parts} == {(start, stop, window, last)}
        assert start == position
        assert sum(part[2] for part in parts) == stop - start
        position = stop
        windows += [window] if last else []
    assert sum(windows) == position == sum(sizes)
    assert all(rank["states"] == ranks[0]["states"] for rank in ranks)


@on_ranks(nprocs=3)
def test_a_rank_without_samples_is_an_error_on_all() -> None:
    loader = unitrain.init(timeout_s=30).dataloader(Shards([5, 5]), batch_size=2)
    with pytest.raises(DataError, match="1 of 3 ranks have no samples of this dataset"):
        list(loader)
