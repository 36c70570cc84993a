"""Whole jobs with unequal shares train like one process, and go on with other shares in the middle of an epoch."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from pretended import pretended_rank
from ranks import on_ranks, run_ranks
from streams import Numbers, Shards
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

import unitrain
from unitrain import ConfigError

SAMPLES, GLOBAL_BATCH = 23, 10


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(SAMPLES, 4, generator=generator, dtype=torch.float64)
    return TensorDataset(inputs, inputs[:, :2].sin())


def train(
    folder: str, parts: list[tuple[tuple[int, ...] | None, int]], backend: str = "ddp"
) -> tuple[list[float], list[Tensor]]:
    """Train some steps for each shares, each time in a run that continues the one before; return the last one's."""
    for shares, steps in parts:
        with unitrain.init(
            backend=backend, shares=shares, sync_batchnorm=True, precision="fp64", device="cpu", timeout_s=60
        ) as strategy:
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
            prepared, optimizer = strategy.prepare(model, optimizer)
            loader = strategy.dataloader(data(), global_batch_size=GLOBAL_BATCH, shuffle=True)
            checkpoint = strategy.checkpoint(folder, model=prepared, optimizer=optimizer, loader=loader)
            checkpoint.resume()
            losses: list[float] = []
            batches = (batch for _ in loader.epochs(2) for batch in loader)
            for inputs, targets in islice(batches, steps):
                meter = strategy.meter()
                loss = mse_loss(prepared(inputs), targets)
                meter.add(mean=loss, count=len(targets))
                strategy.step(loss, optimizer)
                losses.append(meter.value())
            checkpoint.save()
            weights = [value.double() for value in model.state_dict().values()]
    return losses, weights


def test_a_run_goes_on_with_other_shares_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    """The steps of an epoch are 10, 10 and 3 samples, of which a rank may have none: stopped after 1, 2 and 4 steps."""
    expected, expected_weights = train(str(tmp_path / "alone"), [(None, 6)], "single")
    folder = str(tmp_path / "parts")
    run_ranks(train, folder, [((2, 1, 1), 1), ((1, 1, 3), 1)], nprocs=3)
    for losses, weights in run_ranks(train, folder, [((1, 4), 2), ((1, 1), 2)], nprocs=2):
        assert losses == pytest.approx(expected[4:], rel=0, abs=1e-9)
        for ours, theirs in zip(weights, expected_weights, strict=True):
            assert float((ours - theirs).abs().max()) < 1e-9


@on_ranks()
def test_statistics_that_are_not_synchronised_are_averaged_by_shares() -> None:
    """The rows of rank 0 are 0, those of rank 1 are 1."""
    with unitrain.init(backend="ddp", device="cpu", shares=(3, 1), timeout_s=60) as strategy:
        layers = nn.BatchNorm1d(1, momentum=1.0), nn.BatchNorm1d(1, track_running_stats=False)
        model = strategy.prepare(nn.Sequential(*layers))
        model(torch.full((4, 1), float(strategy.rank)))
        with strategy.evaluation(model):
            buffers: dict[str, Any] = dict(strategy.unwrap(model).named_buffers())
            assert (buffers["0.running_mean"], buffers["0.num_batches_tracked"]) == (0.25, 1)


@pytest.mark.parametrize(
    ("shares", "micro_batches", "largest"), [(None, 3, 6), ((2, 1, 1), 4, 6), ((10, 1, 1), 7, 6), ((1, 1, 1), 3, 6)]
)
def test_the_largest_share_fits_into_a_micro_batch(
    shares: tuple[int, ...] | None, micro_batches: int, largest: int
) -> None:
    counts = []
    for rank in range(3):
        loader = pretended_rank(rank, 3, shares=shares).dataloader(
            list(range(48)), global_batch_size=48, micro_batch_size=6
        )
        assert len(loader) == micro_batches
        assert loader.steps_per_epoch == 1
        counts += [len(batch) for batch in loader]
    assert max(counts) <= largest


def test_the_global_batch_does_not_depend_on_the_shares() -> None:
    sizes = {
        pretended_rank(0, 3, shares=shares).dataloader(list(range(48)), batch_size=4).global_batch_size
        for shares in (None, (2, 1, 1), (1, 7, 3))
    }
    assert sizes == {12}


def test_shares_that_can_not_be_used_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"shares is \[2, 1, 1\], but this job has 1 ranks: give one for each"):
        unitrain.init(backend="single", shares=(2, 1, 1))
    with pytest.raises(ConfigError, match=r"a sharded Shards can't be split by shares, .* set strategy\.shares to"):
        pretended_rank(0, 2, shares=(2, 1)).dataloader(Shards([4, 4]), batch_size=2)
    pretended_rank(0, 2, shares=(2, 1)).dataloader(Numbers(4), batch_size=2)
