"""Duties of output that rank 0 writes for all ranks: printed lines, saved states and checkpoints."""

from __future__ import annotations

import time

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim import SGD

from unitrain.testing.duty import duty
from unitrain.testing.models import Net, assert_bit_equal_on_all_ranks, assert_same, samples, sgd, train_plainly, whole
from unitrain.testing.worlds import World


@duty()
def rank_0_goes_first(world: World) -> None:
    """Rank 0 leaves main_first() before the others enter it."""
    marker = world.folder / "marker"
    with world.open() as strategy, strategy.main_first():
        assert marker.exists() != strategy.is_main
        if strategy.is_main:
            time.sleep(0.05)  # enough for the others to enter, if they could
            marker.touch()


@duty()
def saves_and_loads(world: World) -> None:
    """save() writes one complete file without the keys of a wrapper, and load() returns its contents on every rank."""
    with world.open() as strategy:
        model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        keys = list(model.state_dict())
        prepared, optimizer = strategy.prepare(model, SGD(model.parameters(), lr=0.1, momentum=0.9))
        strategy.step(prepared(torch.ones(4, 3)).sum(), optimizer)
        norm = model[1]
        assert isinstance(norm, nn.BatchNorm1d)
        assert isinstance(norm.running_mean, Tensor)
        norm.running_mean.fill_(strategy.rank)
        path = world.folder / "deep" / "er" / "state.pt"
        strategy.save(
            {"model": prepared, "optimizer": optimizer, "list": [1, "two", None], "rank": strategy.rank}, path
        )
        assert [p.name for p in path.parent.iterdir()] == ["state.pt"]
        loaded = strategy.load(path)
        assert list(loaded["model"]) == keys
        assert loaded["model"]["1.running_mean"].tolist() == [(strategy.world_size - 1) / 2] * 3
        assert torch.equal(loaded["model"]["0.weight"], whole(model.get_parameter("0.weight")))
        assert loaded["optimizer"]["state"][0]["momentum_buffer"].shape == (3, 3)
        assert (loaded["list"], loaded["rank"]) == ([1, "two", None], 0)


@duty()
def continues_where_it_stopped(world: World) -> None:
    """A run that stops within an epoch and is resumed trains the same model as an uninterrupted one."""
    expected = Net()
    train_plainly(expected, sgd(expected), global_batch_size=6, epochs=2)
    for last_step in (3, 5, None):
        with world.open() as strategy:
            model = Net(seed=strategy.rank)
            prepared, optimizer = strategy.prepare(model, sgd(model))
            loader = strategy.dataloader(samples(), global_batch_size=6)
            checkpoint = strategy.checkpoint(
                world.folder / "run", background=False, model=prepared, optimizer=optimizer, loader=loader
            )
            checkpoint.resume()
            for _ in loader.epochs(2):
                for rows, wanted in loader:
                    strategy.step(mse_loss(prepared(rows), wanted), optimizer)
                    if strategy.global_step == last_step:
                        checkpoint.save()
                        break
                if strategy.global_step == last_step:
                    break
            assert_bit_equal_on_all_ranks(strategy, model)
            if last_step is None:
                assert_same(model, expected)
