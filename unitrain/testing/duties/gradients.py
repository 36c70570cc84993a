"""Duties of gradients: of unused and sparse parameters, of several losses and of several models."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim import SGD, AdamW

from unitrain import UsageError
from unitrain.testing.duty import duty
from unitrain.testing.models import (
    Branches,
    Net,
    Twins,
    samples,
    step_by_hand,
    whole,
)
from unitrain.testing.worlds import World


@duty()
def unused_parameters(world: World) -> None:
    """A parameter that no rank used has grad None, so that the optimizer skips it; one that any rank used has not."""
    with world.open(**world.for_unused_parameters) as strategy:
        twins = Twins(strategy, Branches, lambda model: AdamW(model.parameters(), lr=0.1, weight_decay=0.3))
        inputs, targets = (rows.view(-1, 6, rows.shape[1]) for rows in samples(6 * strategy.world_size).tensors)
        for step in range(4):
            # All ranks use the left branch, except the last one in even steps.
            branch = [int(step % 2 == 0 and rank == strategy.world_size - 1) for rank in range(strategy.world_size)]
            rank, device = strategy.rank, strategy.device
            output = twins.prepared(inputs[rank].to(device), branch[rank])
            strategy.step(mse_loss(output, targets[rank].to(device)), twins.optimizer)
            losses = [
                mse_loss(twins.expected(*given), target) for *given, target in zip(inputs, branch, targets, strict=True)
            ]
            step_by_hand(torch.stack(losses).mean(), twins.by_hand)
        twins.assert_same()
        never = twins.model.never.weight
        # Weight decay would change a parameter that has a gradient of zeros.
        assert never not in twins.optimizer.state
        assert torch.equal(whole(never).cpu(), Branches().never.weight)


def _two_branches() -> Branches:
    """Return a model with two branches, and no layer that is never used."""
    model = Branches()
    del model.never
    return model


def _assert_names(error: UsageError, remedy: str) -> None:
    """Assert that the message of an error names the remedy."""
    assert remedy in str(error)


def _embedding() -> nn.Embedding:
    """Return an embedding of 5 rows with sparse gradients, the same in every call."""
    return nn.Embedding(5, 2, sparse=True, _weight=torch.ones(5, 2)).double()


@duty()
def sparse_gradients(world: World) -> None:
    """Sparse gradients are averaged, or are an error on every rank that names the remedy."""
    with world.open() as strategy:
        twins = Twins(strategy, _embedding, lambda model: SGD(model.parameters(), lr=0.1))
        try:
            numbers = torch.tensor([strategy.rank, 4], device=strategy.device)
            strategy.step(twins.prepared(numbers).pow(2).mean(), twins.optimizer)
        except UsageError as error:
            assert world.processes > 1
            _assert_names(error, "create its layer with sparse=False")
            return
        losses = [twins.expected(torch.tensor([rank, 4])).pow(2).mean() for rank in range(strategy.world_size)]
        step_by_hand(torch.stack(losses).mean(), twins.by_hand)
        twins.assert_same()


@duty()
def losses_of_one_trunk(world: World) -> None:
    """Two losses with a backward each, and a shared trunk, give the right gradients or an error."""
    with world.open() as strategy:
        twins = Twins(strategy, _two_branches)
        try:
            # The second backward adds to gradients that the first may have averaged already.
            for branch in (0, 1):
                strategy.backward(twins.loss(branch), twins.optimizer)
            strategy.update(twins.optimizer)
        except UsageError as error:
            # The core's own averaging has no reason to refuse this.
            assert world.averages_gradients
            _assert_names(error, "add the losses")
            return
        step_by_hand(twins.loss_by_hand(0) + twins.loss_by_hand(1), twins.by_hand)
        twins.assert_same()


@duty()
def the_module_itself(world: World) -> None:
    """A script that calls the module it passed to prepare() trains correctly or gets an error."""
    with world.open() as strategy:
        twins = Twins(strategy)
        # The usual mistake: DDP averages only through its wrapper.
        twins.prepared = twins.model
        try:
            twins.train()
        except UsageError as error:
            assert world.averages_gradients
            _assert_names(error, "Call the model that prepare() returned")
            return
        twins.assert_same()


@duty(each={"accumulate=1": 1, "accumulate=2": 2})
def adversaries(world: World, accumulate: int) -> None:
    """A GAN trains as on one device: two models, two optimizers, each loss through both models."""
    with world.open(accumulate=accumulate) as strategy:
        pair = [Twins(strategy, partial(Net, seed)) for seed in (1, 2)]
        prepared, expected = [twins.prepared for twins in pair], [twins.expected for twins in pair]
        generator = torch.Generator().manual_seed(0)
        for micro_batch in range(3 * accumulate):
            noise = torch.randn(strategy.world_size, 2, 4, generator=generator, dtype=torch.float64)
            # Each loss goes through both models, but only the model that it trains gets gradients for a step.
            for which, twins in enumerate(pair):
                rows = noise[strategy.rank].to(strategy.device)
                result = strategy.step(_game(prepared, rows, which), twins.optimizer)
                loss = _game(expected, noise.flatten(0, 1), which) / accumulate
                loss.backward(inputs=list(twins.expected.parameters()))  # type: ignore[no-untyped-call]
                assert result.stepped == ((micro_batch + 1) % accumulate == 0)
                if result.stepped:
                    twins.by_hand.step()
                    twins.by_hand.zero_grad()
        for twins in pair:
            twins.assert_same()


def _game(models: Any, noise: Tensor, which: int) -> Tensor:
    """Return the loss of model 0, the discriminator, or of model 1, the generator.

    Args:
        models: both models.
        noise: the inputs (rows, 4) of both.
        which: the number of the model to train.
    """
    forged = models[1](noise)
    if which == 0:
        forged = forged.detach()
    judged = models[0](torch.cat([forged, forged], 1)).mean()
    loss: Tensor = judged + models[0](noise).pow(2).mean() if which == 0 else -judged
    return loss
