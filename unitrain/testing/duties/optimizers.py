"""Duties of optimizers: several losses, optimizers and models; optimizers that change or that the script steps."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD

from unitrain import Strategy
from unitrain.testing.duty import duty
from unitrain.testing.models import (
    Net,
    Twins,
    clip_by_hand,
    sgd,
    step_by_hand,
    whole,
)
from unitrain.testing.worlds import World


@duty()
def optimizers_that_come_and_change(world: World) -> None:
    """Optimizers may be created after prepare, get new groups, get unfrozen layers, and be replaced by others."""
    with world.open() as strategy:
        twins = Twins(strategy, _half_frozen)
        both = (twins.model, twins.expected)
        twins.optimizer, twins.by_hand = (SGD(one.last.parameters(), lr=0.1, momentum=0.9) for one in both)
        twins.train(2)
        for one, its in zip(both, (twins.optimizer, twins.by_hand), strict=True):
            its.add_param_group({"params": list(one.first.parameters()), "lr": 0.05})
        twins.train(2)
        for one in both:
            one.first.requires_grad_(True)
        twins.train(2)
        assert not torch.equal(whole(twins.model.first.weight), Net().first.weight)
        twins.optimizer, twins.by_hand = (sgd(one) for one in both)
        twins.train(2)
        twins.assert_same()


def _half_frozen() -> Net:
    model = Net()
    model.first.requires_grad_(False)
    return model


def _pair(strategy: Strategy) -> tuple[Twins, Twins]:
    """Return two models and their twins."""
    first, second = (Twins(strategy, partial(Net, seed)) for seed in (1, 2))
    return first, second


@duty(each={"accumulate=1": 1, "accumulate=2": 2})
def adversaries(world: World, accumulate: int) -> None:
    """A GAN trains as on one device: two models, two optimizers, each loss through both models."""
    with world.open(accumulate=accumulate) as strategy:
        pair = _pair(strategy)
        prepared, expected = [one.prepared for one in pair], [one.expected for one in pair]
        generator = torch.Generator().manual_seed(0)
        for micro_batch in range(3 * accumulate):
            noise = torch.randn(strategy.world_size, 2, 4, generator=generator, dtype=torch.float64)
            for which, one in enumerate(pair):
                result = strategy.step(_game(prepared, noise[strategy.rank], which), one.optimizer)
                loss = _game(expected, noise.flatten(0, 1), which) / accumulate
                loss.backward(inputs=list(one.expected.parameters()))  # type: ignore[no-untyped-call]
                assert result.stepped == ((micro_batch + 1) % accumulate == 0)
                if result.stepped:
                    one.by_hand.step()
                    one.by_hand.zero_grad()
        for one in pair:
            one.assert_same()


def _game(models: Any, noise: Tensor, which: int) -> Tensor:
    """Return the loss of model 0, the discriminator, or of model 1, the generator."""
    forged = models[1](noise)
    if which == 0:
        forged = forged.detach()
    judged = models[0](torch.cat([forged, forged], 1)).mean()
    loss: Tensor = judged + models[0](noise).pow(2).mean() if which == 0 else -judged
    return loss


@duty()
def losses_of_one_optimizer(world: World) -> None:
    """The gradients of two losses of one optimizer are summed, in any order of forwards and backwards."""
    with world.open(clip_norm=1.0) as strategy:
        twins = Twins(strategy)
        optimizer = twins.optimizer
        clip_by_hand(twins.by_hand, 1.0)
        for both_forwards_first in (True, False, True):
            first = twins.loss()
            if both_forwards_first:
                second = twins.prepared(2 * twins.rows).pow(2).mean()
                strategy.backward(first, optimizer)
            else:
                strategy.backward(first, optimizer)
                second = twins.prepared(2 * twins.rows).pow(2).mean()
            strategy.backward(second, optimizer)
            assert strategy.update(optimizer).stepped
            step_by_hand(twins.loss_by_hand() + twins.expected(2 * twins.inputs).pow(2).mean(), twins.by_hand)
        twins.assert_same()


@duty()
def optimizers_of_one_loss(world: World) -> None:
    """One loss of two models steps the optimizers of both, with the ranks weighted by ``weight``."""
    with world.open(clip_norm=1.0) as strategy:
        one, other = pair = _pair(strategy)
        tokens = torch.arange(1.0, strategy.world_size + 1)
        for twins in pair:
            clip_by_hand(twins.by_hand, 1.0)
        for _ in range(3):
            loss = (one.prepared(one.rows) * other.prepared(one.rows)).mean()
            strategy.step(loss, [twins.optimizer for twins in pair], weight=float(tokens[strategy.rank]))
            by_rank = (one.expected(one.inputs) * other.expected(one.inputs)).reshape(strategy.world_size, -1).mean(1)
            step_by_hand((by_rank * tokens).sum() / tokens.sum(), one.by_hand, other.by_hand)
        for twins in pair:
            twins.assert_same()


@duty()
def windows_without_a_loader(world: World) -> None:
    """Each optimizer has its own accumulation window; a window that ends early gives the mean of its samples."""
    with world.open(accumulate=2) as strategy:
        pair = _pair(strategy)
        counts = [0, 0]
        # The second one's windows begin while the first one's are open; at the end one of its is cut short.
        for which in (0, 1, 1, 0, 0, 1, 0, 1, 0, 1, 1, 0, 1):
            counts[which] += 1
            twins = pair[which]
            ends_early = counts == [6, 7]
            loss = twins.loss(scale=counts[which])
            strategy.backward(loss, twins.optimizer, sync=True if ends_early else None)
            result = strategy.update(twins.optimizer)
            loss = twins.loss_by_hand(scale=counts[which]) / (1 if ends_early else 2)
            loss.backward()  # type: ignore[no-untyped-call]
            assert result.stepped == (counts[which] % 2 == 0 or ends_early)
            if result.stepped:
                twins.by_hand.step()
                twins.by_hand.zero_grad()
        for twins in pair:
            twins.assert_same()
