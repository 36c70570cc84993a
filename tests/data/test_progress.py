"""The progress of a loader over all ranks, shown on rank 0's terminal only."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from pretended import pretended_rank, trained
from rich.console import Console
from torch import Tensor
from torch.utils.data import IterableDataset

import unitrain
from unitrain.data.progress import ProgressBar


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Any:
        return iter(torch.arange(10))


def shown(loader: Any, rank: int = 0, terminal: bool = True) -> str:
    console = Console(file=io.StringIO(), force_terminal=terminal, width=120)
    bar = ProgressBar(loader, "epoch 0", is_main=rank == 0, console=console)
    for batch in bar:
        bar.show(loss=0.123456, rows=len(batch))
    output: str = console.file.getvalue()  # type: ignore[attr-defined]
    return output


def test_it_counts_the_samples_of_all_ranks() -> None:
    output = shown(pretended_rank(0, 2).dataloader(list(range(20)), global_batch_size=8))
    assert "epoch 0" in output
    assert "20/20" in output
    assert "samples/s" in output
    assert "loss 0.1235, rows 2" in output


def test_it_begins_where_the_epoch_continues() -> None:
    first = pretended_rank().dataloader(list(range(1000)), global_batch_size=10)
    list(trained(first, 99))
    loader = pretended_rank().dataloader(list(range(1000)), global_batch_size=10)
    loader.load_state_dict(first.state_dict())
    assert loader.yielded == 990
    assert "1000/1000" in shown(loader)


def test_it_knows_no_end_of_a_stream_that_tells_none() -> None:
    loader = pretended_rank().dataloader(Stream(), batch_size=5)
    assert loader.samples is None
    assert "10/?" in shown(loader)


@pytest.mark.parametrize(("rank", "terminal"), [(1, True), (0, False)])
def test_elsewhere_it_shows_nothing(rank: int, terminal: bool) -> None:
    loader = pretended_rank().dataloader(list(range(6)), batch_size=2)
    assert shown(loader, rank, terminal) == ""
    assert loader.epoch == 1


def test_the_samples_of_an_epoch() -> None:
    def samples(**given: Any) -> int | None:
        loader = pretended_rank().dataloader(list(range(20)), **given)
        batches = iter(loader)
        assert loader.yielded == 0
        assert len(next(batches)) == loader.yielded > 0
        return loader.samples

    assert samples(batch_size=8) == 20
    assert samples(batch_size=8, drop_last=True) == 16
    assert samples(batch_sampler=[[1, 2], [4, 5]]) == 4


def test_a_strategy_makes_it() -> None:
    strategy = unitrain.init(backend="single")
    loader = strategy.dataloader(list(range(6)), batch_size=4)
    assert [batch.tolist() for batch in strategy.progress(loader, "epoch 0")] == [[0, 1, 2, 3], [4, 5]]
