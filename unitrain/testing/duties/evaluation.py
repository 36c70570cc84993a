"""Duties of evaluation, between epochs and within one."""

from __future__ import annotations

import contextlib

import torch
from torch import nn
from torch.nn.functional import mse_loss

from unitrain.testing.duty import duty
from unitrain.testing.models import EXACT, Net, Twins, samples, sgd, train_plainly
from unitrain.testing.worlds import World


@duty()
def evaluation_of_batch_norm(world: World) -> None:
    """All ranks evaluate with the mean of their running statistics, and the modes of layers are restored."""
    with world.open() as strategy:
        model = Net(norm=True)
        model.first.eval()
        prepared, _ = strategy.prepare(model, sgd(model))
        assert isinstance(model.norm, nn.BatchNorm1d)
        prepared(torch.full((2, 4), float(strategy.rank), dtype=torch.float64) + torch.eye(2, 4))
        means = strategy.all_gather(model.norm.running_mean)  # type: ignore[arg-type]
        with contextlib.suppress(ZeroDivisionError), strategy.evaluation(prepared):
            assert not prepared.training
            assert not torch.is_grad_enabled()
            torch.testing.assert_close(model.norm.running_mean, means.mean(0))
            raise ZeroDivisionError
        assert [m.training for m in (model, model.first, model.norm, model.last)] == [True, False, True, True]
        assert torch.is_grad_enabled()


@duty()
def evaluation_of_uneven_batches(world: World) -> None:
    """Trained weights are evaluated, each sample counts once, and ranks without samples keep no other waiting."""
    with world.open(timeout_s=10) as strategy:
        twins = Twins(strategy)
        twins.train()
        prepared, expected = twins.prepared, twins.expected
        data = samples(2 * strategy.world_size + 1)
        test = strategy.dataloader(data, batch_size=1)
        error, gathered = strategy.meter(), []
        with strategy.evaluation(prepared):
            for inputs, targets in test:
                error.add(mean=mse_loss(prepared(inputs), targets), count=len(inputs))
            for inputs, _ in test:
                gathered.append(strategy.gather(prepared(inputs)))
            inputs, targets = data.tensors
            wanted = expected(inputs)
        torch.testing.assert_close(error.value(), float(mse_loss(wanted, targets)), rtol=0, atol=EXACT)
        assert error.count() == len(data)
        torch.testing.assert_close(torch.cat(gathered), wanted, rtol=0, atol=EXACT)


@duty()
def evaluation_within_an_epoch(world: World) -> None:
    """An evaluation between forward and step does not change training, and sees each sample once."""
    with world.open() as strategy:
        twins = Twins(strategy)
        test = strategy.dataloader(samples(7), batch_size=2)
        seen = strategy.meter()
        for inputs, targets in strategy.dataloader(samples(), global_batch_size=9):
            loss = mse_loss(twins.prepared(inputs), targets)
            with strategy.evaluation(twins.prepared):
                for rows, targets_of_rows in test:
                    seen.add(total=mse_loss(twins.prepared(rows), targets_of_rows).isfinite(), count=len(rows))
            strategy.step(loss, twins.optimizer)
        train_plainly(twins.expected, twins.by_hand, global_batch_size=9)
        twins.assert_same()
        assert seen.count() == 3 * 7
