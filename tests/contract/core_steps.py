"""Duties of objects, preparing and steps, which the core does for any backend; see ``core_duties``."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import StepLR

from unitrain import Strategy, UsageError
from unitrain.testing.duty import duty
from unitrain.testing.models import (
    EXACT,
    Branches,
    Net,
    Twins,
    assert_bit_equal_on_all_ranks,
    assert_same,
    sgd,
    step_by_hand,
    two_rows_each,
    whole,
)
from unitrain.testing.worlds import World
from unitrain.training.gradients.gradients import GradientReducer


def clip_by_hand(optimizer: Optimizer, norm: float) -> None:
    """Clip the gradients of a plain loop before each step of the optimizer."""

    def clip(*_: object) -> None:
        nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], norm)

    optimizer.register_step_pre_hook(clip)


@duty()
def objects(world: World) -> None:
    """Picklable objects of any size can be communicated, also of a different size on each rank."""
    with world.open() as strategy:
        rank, size = strategy.rank, strategy.world_size
        assert (size, strategy.is_main) == (world.processes, rank == 0)
        for src in range(size):
            mine, theirs = ({"from": r, "none": None, "long": "x" * 100_000 * (r + 1)} for r in (rank, src))
            assert strategy.communicator.broadcast_object(mine, src) == theirs
        assert strategy.communicator.broadcast_object(None) is None
        assert strategy.communicator.all_gather_object(["r"] * rank) == [["r"] * other for other in range(size)]
        strategy.barrier()


@duty()
def preparation(world: World) -> None:
    """Objects keep their identity, unless they are sharded; weights, buffers and state become rank 0's."""
    with world.open(sync_batchnorm=True) as strategy:
        model = Net(seed=strategy.rank, norm=True)
        turn = torch.polar(torch.ones(3), torch.full((3,), float(strategy.rank)))
        model.register_buffer("turn", turn)
        model.register_buffer("flag", torch.tensor(strategy.rank == 0), persistent=False)
        parameters = dict(model.named_parameters())
        optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
        for p in model.parameters():
            p.grad = torch.full_like(p, float(strategy.rank + 1))
        optimizer.step()
        optimizer.zero_grad()
        momentum = optimizer.state[model.first.weight]["momentum_buffer"].clone()
        scheduler = StepLR(optimizer, 1)
        keys = list(model.state_dict())

        returned = strategy.prepare(scheduler, model, optimizer)  # in any order
        assert returned[0] is scheduler
        assert returned[2] is optimizer
        assert world.shards or all(p is parameters[name] for name, p in model.named_parameters())
        assert all(p is q for p, q in zip(optimizer.param_groups[0]["params"], model.parameters(), strict=True))
        momentum, state = strategy.communicator.broadcast(momentum), optimizer.state[model.first.weight]
        assert strategy.all_reduce(torch.tensor(bool(state)), "max")  # with shard_optimizer, one rank has it
        assert not state or torch.equal(strategy.full_tensor(state["momentum_buffer"]).cpu(), momentum)
        assert strategy.unwrap(returned[1]) is model
        assert strategy.unwrap(model) is model
        assert list(strategy.unwrap(returned[1]).state_dict()) == keys
        assert torch.equal(model.get_buffer("turn").to("cpu", torch.cfloat), torch.ones(3, dtype=torch.cfloat))
        assert bool(model.get_buffer("flag"))
        del model.turn  # which is complex
        assert_bit_equal_on_all_ranks(strategy, model)
        strategy.check_in_sync(returned[1])
        with pytest.raises(UsageError, match="has already been prepared"):
            strategy.prepare(model)
        with pytest.raises(UsageError, match="has already been prepared"):
            strategy.prepare(returned[1])
        with pytest.raises(UsageError, match="takes modules, optimizers and schedulers, not list"):
            strategy.prepare([model])
        if strategy.world_size > 1:
            with pytest.raises(UsageError, match="1 parameters of the optimizer belong to no prepared module"):
                strategy.prepare(SGD([nn.Parameter(torch.ones(2))], lr=0.1))


def _two_branches() -> Branches:
    model = Branches(norm=True)
    del model.never  # its bucket, never full, would hold back those that follow
    return model


@duty(each={"overlapping": {}, "deterministic": {"deterministic": True}})
def unused_parameters_beside_batch_norm(world: World, settings: dict[str, Any]) -> None:
    """Ranks that take different branches still agree on the order of gradients' and BatchNorm's collectives."""
    settings = {**world.for_unused_parameters, **settings}
    one_for_each_parameter = patch.dict(GradientReducer.__init__.__kwdefaults__ or {}, bucket_mb=1e-6)
    with one_for_each_parameter, world.open(sync_batchnorm=True, **settings) as strategy:
        twins = Twins(strategy, _two_branches)
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
        torch.testing.assert_close(found.cpu(), wanted, rtol=0, atol=EXACT)


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
        assert not torch.equal(whole(twins.model.first.weight).cpu(), Net().first.weight)
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
    """Each optimizer has its own accumulation window."""
    with world.open(accumulate=2) as strategy:
        pair = _pair(strategy)
        counts = [0, 0]
        # The second one's windows begin while the first one's are open.
        for which in (0, 1, 1, 0, 0, 1, 0, 1, 0, 1, 1, 0):
            counts[which] += 1
            twins = pair[which]
            loss = twins.loss(scale=counts[which])
            strategy.backward(loss, twins.optimizer)
            result = strategy.update(twins.optimizer)
            loss = twins.loss_by_hand(scale=counts[which]) / 2
            loss.backward()  # type: ignore[no-untyped-call]
            assert result.stepped == (counts[which] % 2 == 0)
            if result.stepped:
                twins.by_hand.step()
                twins.by_hand.zero_grad()
        for twins in pair:
            twins.assert_same()
