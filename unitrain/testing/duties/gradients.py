"""Duties of gradients, with unused, complex and sparse parameters."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim import SGD, AdamW, Optimizer

from unitrain import UsageError
from unitrain.testing.duty import duty
from unitrain.testing.models import (
    EXACT,
    Branches,
    Twins,
    assert_same,
    clip_by_hand,
    samples,
    step_by_hand,
    two_rows_each,
    whole,
)
from unitrain.testing.worlds import World
from unitrain.training.gradients.gradients import GradientReducer


@duty()
def unused_parameters(world: World) -> None:
    """A parameter that no rank used has grad None, so that the optimizer skips it; one that any rank used has not."""
    with world.open(**world.for_unused_parameters) as strategy:
        twins = Twins(strategy, Branches, lambda model: AdamW(model.parameters(), lr=0.1, weight_decay=0.3))
        inputs, targets = (rows.view(-1, 6, rows.shape[1]) for rows in samples(6 * strategy.world_size).tensors)
        for step in range(4):
            # All ranks use the left branch, except the last one in even steps.
            branch = [int(step % 2 == 0 and rank == strategy.world_size - 1) for rank in range(strategy.world_size)]
            rank = strategy.rank
            own = targets[rank].to(strategy.device)
            strategy.step(mse_loss(twins.prepared(inputs[rank], branch[rank]), own), twins.optimizer)
            losses = [
                mse_loss(twins.expected(*given), its) for *given, its in zip(inputs, branch, targets, strict=True)
            ]
            step_by_hand(torch.stack(losses).mean(), twins.by_hand)
        twins.assert_same()
        never = twins.model.never.weight
        assert never not in twins.optimizer.state
        assert torch.equal(whole(never), Branches().never.weight)


def _two_branches(*, norm: bool = False) -> Branches:
    model = Branches(norm=norm)
    del model.never  # its bucket, never full, would hold back those that follow
    return model


@duty(each={"overlapping": {}, "deterministic": {"deterministic": True}})
def unused_parameters_beside_batch_norm(world: World, settings: dict[str, Any]) -> None:
    """Ranks that take different branches still agree on the order of gradients' and BatchNorm's collectives."""
    settings = {**world.for_unused_parameters, **settings}
    one_for_each_parameter = patch.dict(GradientReducer.__init__.__kwdefaults__ or {}, bucket_mb=1e-6)
    with one_for_each_parameter, world.open(sync_batchnorm=True, **settings) as strategy:
        twins = Twins(strategy, partial(_two_branches, norm=True))
        expected = twins.expected
        _, targets, _ = two_rows_each(strategy)
        for _ in range(3):
            strategy.step(twins.loss(strategy.rank), twins.optimizer)
            trunk = torch.tanh(expected.norm(expected.trunk(twins.inputs)))
            outputs = expected.left(trunk[:2])
            if strategy.world_size > 1:
                outputs = torch.cat([outputs, expected.right(trunk[2:])])
            step_by_hand(mse_loss(outputs, targets), twins.by_hand)
        assert_same(twins.model, expected)


class _Turns(nn.Module):
    """A layer with complex weights, as Fourier operators have."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.turn = nn.Linear(4, 2, dtype=torch.cdouble)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.turn(x.to(torch.cdouble)).abs()
        return out


@duty()
def complex_weights(world: World) -> None:
    """Complex gradients are averaged, clipped and stepped as on one device."""
    with world.open(clip_norm=0.5) as strategy:
        twins = Twins(strategy, _Turns)
        clip_by_hand(twins.by_hand, 0.5)
        twins.train()
        found, wanted = whole(twins.model.turn.weight), twins.expected.turn.weight
        torch.testing.assert_close(found, wanted, rtol=0, atol=EXACT)


def _embedding() -> nn.Embedding:
    return nn.Embedding(5, 2, sparse=True, _weight=torch.ones(5, 2)).double()


@duty()
def sparse_gradients(world: World) -> str:
    """Sparse gradients are averaged, or are an error on every rank that names the remedy."""
    with world.open() as strategy:
        twins = Twins(strategy, _embedding, lambda model: SGD(model.parameters(), lr=0.1))
        try:
            strategy.step(twins.prepared(torch.tensor([strategy.rank, 4])).pow(2).mean(), twins.optimizer)
        except UsageError as error:
            assert world.processes > 1
            refused = str(error)
            assert "create its layer with sparse=False" in refused
            return refused
        losses = [twins.expected(torch.tensor([rank, 4])).pow(2).mean() for rank in range(strategy.world_size)]
        step_by_hand(torch.stack(losses).mean(), twins.by_hand)
        twins.assert_same()
        return ""


@duty()
def gradients_in_a_step_hook(world: World) -> None:
    """An optimizer's step pre-hook gets the averaged gradients, and may change them."""

    def sign(optimizer: Optimizer, *_: Any) -> None:
        for p in (p for group in optimizer.param_groups for p in group["params"]):
            p.grad.sign_()

    with world.open() as strategy:
        twins = Twins(strategy)
        for optimizer in (twins.optimizer, twins.by_hand):
            optimizer.register_step_pre_hook(sign)
        twins.train(steps=1)
        twins.assert_same()


@duty()
def losses_of_one_trunk(world: World) -> str:
    """Two losses with a backward each, and a shared trunk, give the right gradients or an error."""
    with world.open() as strategy:
        twins = Twins(strategy, _two_branches)
        try:
            for branch in (0, 1):
                strategy.backward(twins.loss(branch), twins.optimizer)
            strategy.update(twins.optimizer)
        except UsageError as error:
            assert world.averages_gradients
            refused = str(error)
            assert "add the losses" in refused
            return refused
        step_by_hand(twins.loss_by_hand(0) + twins.loss_by_hand(1), twins.by_hand)
        twins.assert_same()
        return ""


@duty()
def the_module_itself(world: World) -> str:
    """A script that calls the module it passed to prepare() trains correctly or gets an error."""
    with world.open() as strategy:
        twins = Twins(strategy)
        twins.prepared = twins.model
        try:
            twins.train()
        except UsageError as error:
            assert world.averages_gradients
            refused = str(error)
            assert "Call the model that prepare() returned" in refused
            return refused
        twins.assert_same()
        return ""
