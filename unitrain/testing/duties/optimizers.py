"""Duties of optimizers: several losses, optimizers and models; optimizers that change or that the script steps."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import mse_loss
from torch.optim import SGD, Adafactor, Muon, Optimizer

from unitrain import Strategy, UsageError
from unitrain.testing.duty import duty
from unitrain.testing.models import (
    Net,
    Twins,
    assert_bit_equal_on_all_ranks,
    clip_by_hand,
    flat,
    samples,
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


@duty(each={"accumulate=1": 1, "accumulate=2": 2})
def losses_with_separate_weights(world: World, accumulate: int) -> None:
    """Several losses have separate weights, which are exact over ranks and micro-batches, and may be 0 on a rank."""
    with world.open(accumulate=accumulate, clip_norm=1.0, on_nonfinite="raise") as strategy:
        twins = Twins(strategy)
        clip_by_hand(twins.by_hand, 1.0)
        generator = torch.Generator().manual_seed(0)
        for _ in range(3):
            chosen = torch.rand(accumulate, 2, 2 * strategy.world_size, generator=generator) < 0.7
            chosen[0, 1, :2] = False  # rank 0 has none of the second: its mean is NaN
            sums: list[Any] = [0.0, 0.0]
            for number, masks in enumerate(chosen, 1):
                out, own = twins.prepared(number * twins.rows).pow(2).sum(1), masks[:, twins.mine]
                losses = {name: out[mask].sum() / mask.sum() for name, mask in zip("ab", own, strict=True)}
                counts = {name: mask.sum() for name, mask in zip("ab", own, strict=True)}
                assert strategy.step(losses, twins.optimizer, weight=counts).stepped == (number == accumulate)
                by_hand = twins.expected(number * twins.inputs).pow(2).sum(1)
                sums = [total + by_hand[mask].sum() for total, mask in zip(sums, masks, strict=True)]
            totals = chosen.sum((0, 2)).clamp(min=1)
            step_by_hand(sums[0] / totals[0] + sums[1] / totals[1], twins.by_hand)
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
def optimizers_of_one_model(world: World) -> None:
    """Two optimizers of one model are both stepped for every loss, in any order."""
    with world.open() as strategy:
        twins = Twins(strategy)
        optimizers = [strategy.prepare(sgd(layer)) for layer in (twins.model.first, twins.model.last)]
        by_hand = [sgd(layer) for layer in (twins.expected.first, twins.expected.last)]
        for turn in (1, -1, 1):
            strategy.step(twins.loss(), optimizers[::turn])
            step_by_hand(twins.loss_by_hand(), *by_hand[::turn])
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


def _adafactor(model: Net) -> list[Optimizer]:
    return [Adafactor(model.parameters())]


def _muon(model: Net) -> list[Optimizer]:
    layers = (model.first, model.last)
    return [Muon([layer.weight for layer in layers]), Adafactor([layer.bias for layer in layers])]


@duty(
    needs=lambda world, _: world.processes > 1 and not world.shards,
    each={"muon": _muon, "adafactor": _adafactor},
)
def sharded_optimizers(world: World, make: Callable[[Net], list[Optimizer]]) -> None:
    """With shard_optimizer, each rank has a part of the state, also of an optimizer that uses whole parameters."""
    with world.open(shard_optimizer=True, clip_norm=0.5) as strategy:
        twins = Twins(strategy)
        optimizers, by_hand = [strategy.prepare(one) for one in make(twins.model)], make(twins.expected)
        for one in by_hand:
            clip_by_hand(one, 0.5)
        for _ in range(5):
            strategy.step(twins.loss(), optimizers)
            step_by_hand(twins.loss_by_hand(), *by_hand)
        torch.testing.assert_close(flat(twins.model), flat(twins.expected), rtol=0, atol=1e-9)
        assert_bit_equal_on_all_ranks(strategy, twins.model)
        own = sum(len(one.state) for one in optimizers)
        assert own < 4
        assert strategy.all_reduce(torch.tensor(own)) == 4


@duty()
def steps_by_hand(world: World) -> None:
    """An optimizer that the script steps itself is an error if the ranks' weights would diverge."""
    with world.open() as strategy:
        model, other = Net(1), Net(2)
        prepared, optimizer = strategy.prepare(model, sgd(model))
        inputs, targets = samples(2).tensors
        before = flat(model)
        mse_loss(prepared(inputs * (strategy.rank + 1)), targets).backward()  # type: ignore[no-untyped-call]
        if strategy.world_size == 1:
            optimizer.step()
            assert not torch.equal(flat(model), before)
        else:
            for one in (optimizer, sgd(model)):
                with pytest.raises(UsageError, match=r"optimizer\.step\(\) was called for a prepared model"):
                    one.step()
            assert torch.equal(flat(model), before)
        alone = sgd(other)  # a rank may train a model of its own
        step_by_hand(other(inputs).sum(), alone)
