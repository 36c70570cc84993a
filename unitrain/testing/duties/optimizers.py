"""Duties of optimizers: several losses, optimizers and models; optimizers that change or that the script steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim import SGD, Adafactor, Adam, Muon, Optimizer

from unitrain import UsageError
from unitrain.testing.duty import duty
from unitrain.testing.models import (
    Net,
    assert_bit_equal_on_all_ranks,
    assert_same,
    flat,
    samples,
    sgd,
    train_both,
    two_rows_each,
    whole,
)
from unitrain.testing.worlds import World


@duty()
def optimizers_that_come_and_change(world: World) -> None:
    """Optimizers may be created after prepare, get new groups, get unfrozen layers, and be replaced by others."""
    with world.open() as strategy:
        model, expected = Net(), Net()
        for one in (model, expected):
            one.first.requires_grad_(False)
        prepared = strategy.prepare(model)
        optimizer, by_hand = (SGD(one.last.parameters(), lr=0.1, momentum=0.9) for one in (model, expected))
        train_both(strategy, prepared, optimizer, expected, by_hand, 2)
        for one, its in ((model, optimizer), (expected, by_hand)):
            its.add_param_group({"params": list(one.first.parameters()), "lr": 0.05})
        train_both(strategy, prepared, optimizer, expected, by_hand, 2)
        for one in (model, expected):
            one.first.requires_grad_(True)
        train_both(strategy, prepared, optimizer, expected, by_hand, 2)
        assert not torch.equal(whole(model.first.weight), Net().first.weight)
        train_both(strategy, prepared, sgd(model), expected, sgd(expected), 2)
        assert_same(model, expected)
        assert_bit_equal_on_all_ranks(strategy, model)


@duty(each={"accumulate=1": 1, "accumulate=2": 2})
def adversaries(world: World, accumulate: int) -> None:
    """A GAN trains as on one device: two models, two optimizers, each loss through both models."""
    with world.open(accumulate=accumulate) as strategy:
        made = [Net(1), Net(2)]
        expected = [Net(1), Net(2)]
        prepared = strategy.prepare(*made)
        optimizers, by_hand = [sgd(m) for m in made], [sgd(m) for m in expected]
        generator = torch.Generator().manual_seed(0)
        rows = 2 * strategy.world_size
        mine = slice(2 * strategy.rank, 2 * strategy.rank + 2)
        for micro_batch in range(3 * accumulate):
            noise = torch.randn(rows, 4, generator=generator, dtype=torch.float64)
            for which in (0, 1):
                result = strategy.step(_game(prepared, noise[mine], which), optimizers[which])
                loss = _game(expected, noise, which) / accumulate
                loss.backward(inputs=list(expected[which].parameters()))  # type: ignore[no-untyped-call]
                assert result.stepped == ((micro_batch + 1) % accumulate == 0)
                if result.stepped:
                    by_hand[which].step()
                    by_hand[which].zero_grad()
        for one, other in zip(made, expected, strict=True):
            assert_same(one, other)
            assert_bit_equal_on_all_ranks(strategy, one)


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
        inputs, targets, mine = two_rows_each(strategy)
        model, expected = Net(), Net()
        prepared, optimizer = strategy.prepare(model, sgd(model))
        by_hand = sgd(expected)
        for both_forwards_first in (True, False, True):
            first = mse_loss(prepared(inputs[mine]), targets[mine])
            if both_forwards_first:
                second = prepared(2 * inputs[mine]).pow(2).mean()
                strategy.backward(first, optimizer)
            else:
                strategy.backward(first, optimizer)
                second = prepared(2 * inputs[mine]).pow(2).mean()
            strategy.backward(second, optimizer)
            assert strategy.update(optimizer).stepped
            by_hand.zero_grad()
            (mse_loss(expected(inputs), targets) + expected(2 * inputs).pow(2).mean()).backward()
            nn.utils.clip_grad_norm_(expected.parameters(), 1.0)
            by_hand.step()
        assert_same(model, expected)


@duty()
def optimizers_of_one_loss(world: World) -> None:
    """One loss of two models steps the optimizers of both, with the ranks weighted by ``weight``."""
    with world.open(clip_norm=1.0) as strategy:
        inputs, _, mine = two_rows_each(strategy)
        pair, other = [Net(1), Net(2)], [Net(1), Net(2)]
        prepared = strategy.prepare(*pair)
        optimizers, by_hand = [sgd(m) for m in pair], [sgd(m) for m in other]
        tokens = torch.arange(1.0, strategy.world_size + 1)
        for _ in range(3):
            loss = (prepared[0](inputs[mine]) * prepared[1](inputs[mine])).mean()
            strategy.step(loss, optimizers, weight=float(tokens[strategy.rank]))
            by_rank = (other[0](inputs) * other[1](inputs)).reshape(strategy.world_size, -1).mean(1)
            for its in by_hand:
                its.zero_grad()
            (by_rank * tokens).sum().div(tokens.sum()).backward()
            for one, its in zip(other, by_hand, strict=True):
                nn.utils.clip_grad_norm_(one.parameters(), 1.0)
                its.step()
        for one, its_twin in zip(pair, other, strict=True):
            assert_same(one, its_twin)
            assert_bit_equal_on_all_ranks(strategy, one)


@duty()
def optimizers_of_one_model(world: World) -> None:
    """Two optimizers of one model are both stepped for every loss, in any order."""
    with world.open() as strategy:
        model, expected = Net(), Net()
        optimizers, by_hand = ([sgd(m.first), sgd(m.last)] for m in (model, expected))
        prepared, *optimizers = strategy.prepare(model, *optimizers)
        inputs, targets, mine = two_rows_each(strategy)
        for turn in ([0, 1], [1, 0], [0, 1]):
            strategy.step(mse_loss(prepared(inputs[mine]), targets[mine]), [optimizers[i] for i in turn])
            expected.zero_grad()
            mse_loss(expected(inputs), targets).backward()  # type: ignore[no-untyped-call]
            for i in turn:
                by_hand[i].step()
        assert_same(model, expected)
        assert_bit_equal_on_all_ranks(strategy, model)


@duty()
def windows_without_a_loader(world: World) -> None:
    """Each optimizer has its own accumulation window; a window that ends early gives the mean of its samples."""
    with world.open(accumulate=2) as strategy:
        made, expected = [Net(1), Net(2)], [Net(1), Net(2)]
        prepared = strategy.prepare(*made)
        optimizers, by_hand = [sgd(m) for m in made], [sgd(m) for m in expected]
        inputs, targets, mine = two_rows_each(strategy)
        counts = [0, 0]
        # The second one's windows begin while the first one's are open; at the end one of its is cut short.
        for which in (0, 1, 1, 0, 0, 1, 0, 1, 0, 1, 1, 0, 1):
            counts[which] += 1
            loss = mse_loss(prepared[which](inputs[mine] * counts[which]), targets[mine])
            ends_early = counts == [6, 7]
            strategy.backward(loss, optimizers[which], sync=True if ends_early else None)
            result = strategy.update(optimizers[which])
            loss = mse_loss(expected[which](inputs * counts[which]), targets) / (1 if ends_early else 2)
            loss.backward()  # type: ignore[no-untyped-call]
            assert result.stepped == (counts[which] % 2 == 0 or ends_early)
            if result.stepped:
                by_hand[which].step()
                by_hand[which].zero_grad()
        for one, other in zip(made, expected, strict=True):
            assert_same(one, other)
            assert_bit_equal_on_all_ranks(strategy, one)


class Lamb(Adam):
    """Scales what Adam adds to a parameter by the norm of the parameter, as LAMB does."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Make a step."""
        before = [(p, p.clone()) for group in self.param_groups for p in group["params"]]
        super().step(closure)
        for p, old in before:
            change = p - old
            p.copy_(old + change * old.norm() * 0.1 / (change.norm() + 1e-9))


def _lamb(model: Net) -> list[Optimizer]:
    return [Lamb(model.parameters())]


def _adafactor(model: Net) -> list[Optimizer]:
    return [Adafactor(model.parameters())]


def _muon(model: Net) -> list[Optimizer]:
    layers = (model.first, model.last)
    return [Muon([layer.weight for layer in layers]), Adafactor([layer.bias for layer in layers])]


@duty(
    needs=lambda world: world.processes > 1 and not world.shards,
    each={"lamb": _lamb, "muon": _muon, "adafactor": _adafactor},
)
def sharded_optimizers(world: World, make: Callable[[Net], list[Optimizer]]) -> None:
    """With shard_optimizer, each rank has a part of the state, also of an optimizer that uses whole parameters."""
    with world.open(shard_optimizer=True, clip_norm=0.5) as strategy:
        model, expected = Net(), Net()
        prepared, *optimizers = strategy.prepare(model, *make(model))
        by_hand = make(expected)
        inputs, targets, mine = two_rows_each(strategy)
        for _ in range(5):
            strategy.step(mse_loss(prepared(inputs[mine]), targets[mine]), optimizers)
            expected.zero_grad()
            mse_loss(expected(inputs), targets).backward()  # type: ignore[no-untyped-call]
            for one in by_hand:
                nn.utils.clip_grad_norm_([p for group in one.param_groups for p in group["params"]], 0.5)
                one.step()
        torch.testing.assert_close(flat(model), flat(expected), rtol=0, atol=1e-9)
        assert_bit_equal_on_all_ranks(strategy, model)
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
        other(inputs).sum().backward()
        alone.step()
