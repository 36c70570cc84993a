"""Duties of gradients, with unused, tied, frozen, complex and sparse parameters."""

from __future__ import annotations

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
    Net,
    assert_bit_equal_on_all_ranks,
    assert_same,
    samples,
    sgd,
    train_both,
    two_rows_each,
    whole,
)
from unitrain.testing.worlds import World
from unitrain.training.gradients.gradients import GradientReducer


@duty()
def unused_parameters(world: World) -> None:
    """A parameter that no rank used has grad None, so that the optimizer skips it; one that any rank used has not."""
    with world.open(**world.for_unused_parameters) as strategy:
        model, expected = Branches(), Branches()
        prepared, optimizer = strategy.prepare(model, AdamW(model.parameters(), lr=0.1, weight_decay=0.3))
        by_hand = AdamW(expected.parameters(), lr=0.1, weight_decay=0.3)
        inputs, targets = samples(6 * strategy.world_size).tensors
        mine = slice(6 * strategy.rank, 6 * strategy.rank + 6)
        for step in range(4):
            # All ranks use the left branch, except the last one in even steps.
            branch = [int(step % 2 == 0 and rank == strategy.world_size - 1) for rank in range(strategy.world_size)]
            strategy.step(mse_loss(prepared(inputs[mine], branch[strategy.rank]), targets[mine]), optimizer)
            by_hand.zero_grad()
            for rank, its in enumerate(branch):
                rows = slice(6 * rank, 6 * rank + 6)
                (mse_loss(expected(inputs[rows], its), targets[rows]) / strategy.world_size).backward()  # type: ignore[no-untyped-call]
            by_hand.step()
        assert_same(model, expected)
        assert model.never.weight not in optimizer.state
        assert torch.equal(whole(model.never.weight), Branches().never.weight)
        assert_bit_equal_on_all_ranks(strategy, model)


@duty(each={"overlapping": {}, "deterministic": {"deterministic": True}})
def unused_parameters_beside_batch_norm(world: World, settings: dict[str, Any]) -> None:
    """Ranks that take different branches still agree on the order of gradients' and BatchNorm's collectives."""
    settings = {**world.for_unused_parameters, **settings}
    one_for_each_parameter = patch.dict(GradientReducer.__init__.__kwdefaults__ or {}, bucket_mb=1e-6)
    with one_for_each_parameter, world.open(sync_batchnorm=True, **settings) as strategy:
        model, expected = Branches(norm=True), Branches(norm=True)
        del model.never, expected.never  # its bucket, never full, would hold back those that follow
        prepared, optimizer = strategy.prepare(model, sgd(model))
        by_hand = sgd(expected)
        inputs, targets, mine = two_rows_each(strategy)
        for _ in range(3):
            strategy.step(mse_loss(prepared(inputs[mine], strategy.rank), targets[mine]), optimizer)
            by_hand.zero_grad()
            trunk = torch.tanh(expected.norm(expected.trunk(inputs)))
            outputs = expected.left(trunk[:2])
            if strategy.world_size > 1:
                outputs = torch.cat([outputs, expected.right(trunk[2:])])
            mse_loss(outputs, targets).backward()  # type: ignore[no-untyped-call]
            by_hand.step()
        assert_same(model, expected)


class _Tied(nn.Module):
    """The second and third layer share a weight; the first is frozen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.first = nn.Linear(4, 4).requires_grad_(False)
        self.middle = nn.Linear(4, 4)
        self.last = nn.Linear(4, 4)
        self.last.weight = self.middle.weight
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(torch.tanh(self.middle(torch.tanh(self.first(x)))))
        return out[:, :2]


@duty()
def tied_and_frozen(world: World) -> None:
    """A weight that two layers share is averaged once, and a frozen one stays as it was."""
    with world.open() as strategy:
        model, expected = _Tied(), _Tied()
        prepared, optimizer = strategy.prepare(model, sgd(model))
        assert model.last.weight is model.middle.weight
        train_both(strategy, prepared, optimizer, expected, sgd(expected), 3)
        assert_same(model, expected)
        assert torch.equal(whole(model.first.weight), _Tied().first.weight)


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
        model, expected = _Turns(), _Turns()
        prepared, optimizer = strategy.prepare(model, sgd(model))
        by_hand = sgd(expected)
        by_hand.register_step_pre_hook(lambda *_: _clip(expected))
        train_both(strategy, prepared, optimizer, expected, by_hand, 3)
        torch.testing.assert_close(whole(model.turn.weight), expected.turn.weight, rtol=0, atol=EXACT)


def _clip(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)


@duty()
def sparse_gradients(world: World) -> str:
    """Sparse gradients are averaged, or are an error on every rank that names the remedy."""
    with world.open() as strategy:
        model, expected = (nn.Embedding(5, 2, sparse=True, _weight=torch.ones(5, 2)).double() for _ in range(2))
        prepared, optimizer = strategy.prepare(model, SGD(model.parameters(), lr=0.1))
        by_hand = SGD(expected.parameters(), lr=0.1)
        try:
            strategy.step(prepared(torch.tensor([strategy.rank, 4])).pow(2).mean(), optimizer)
        except UsageError as error:
            refused = str(error)
        else:
            refused = ""
        if refused:
            assert world.processes > 1
            assert "create its layer with sparse=False" in refused
            return refused
        for rank in range(strategy.world_size):
            loss = expected(torch.tensor([rank, 4])).pow(2).mean() / strategy.world_size
            loss.backward()
        by_hand.step()
        assert_same(model, expected)
        return ""


@duty()
def gradients_in_a_step_hook(world: World) -> None:
    """An optimizer's step pre-hook gets the averaged gradients, and may change them."""
    with world.open() as strategy:
        model, expected = Net(), Net()
        prepared, optimizer = strategy.prepare(model, sgd(model))
        by_hand = sgd(expected)
        inputs, targets, mine = two_rows_each(strategy)
        found: list[Tensor] = []

        def sign(its: Optimizer, *_: Any) -> None:
            for p in (p for group in its.param_groups for p in group["params"]):
                found.append(whole(p.grad.clone()))
                p.grad.sign_()

        for one in (optimizer, by_hand):
            one.register_step_pre_hook(sign)
        strategy.step(mse_loss(prepared(inputs[mine]), targets[mine]), optimizer)
        ours = torch.cat([gradient.reshape(-1) for gradient in found])
        found.clear()
        mse_loss(expected(inputs), targets).backward()  # type: ignore[no-untyped-call]
        by_hand.step()
        torch.testing.assert_close(ours, torch.cat([g.reshape(-1) for g in found]), rtol=0, atol=EXACT)
        assert_same(model, expected)


@duty()
def losses_of_one_trunk(world: World) -> str:
    """Two losses with a backward each, and a shared trunk, give the right gradients or an error."""
    with world.open() as strategy:
        model, expected = Branches(), Branches()
        del model.never, expected.never
        prepared, optimizer = strategy.prepare(model, sgd(model))
        by_hand = sgd(expected)
        inputs, targets, mine = two_rows_each(strategy)
        try:
            for branch in (0, 1):
                strategy.backward(mse_loss(prepared(inputs[mine], branch), targets[mine]), optimizer)
            strategy.update(optimizer)
        except UsageError as error:
            refused = str(error)
        else:
            refused = ""
        if refused:
            assert world.averages_gradients
            assert "add the losses" in refused
            return refused
        for branch in (0, 1):
            mse_loss(expected(inputs, branch), targets).backward()  # type: ignore[no-untyped-call]
        by_hand.step()
        assert_same(model, expected)
        return ""


@duty()
def the_module_itself(world: World) -> str:
    """A script that calls the module it passed to prepare() trains correctly or gets an error."""
    with world.open() as strategy:
        model, expected = Net(), Net()
        _, optimizer = strategy.prepare(model, sgd(model))
        by_hand = sgd(expected)
        inputs, targets, mine = two_rows_each(strategy)
        try:
            for _ in range(3):
                strategy.step(mse_loss(model(inputs[mine]), targets[mine]), optimizer)
        except UsageError as error:
            refused = str(error)
        else:
            refused = ""
        if refused:
            assert world.averages_gradients
            assert "Call the model that prepare() returned" in refused
            return refused
        for _ in range(3):
            by_hand.zero_grad()
            mse_loss(expected(inputs), targets).backward()  # type: ignore[no-untyped-call]
            by_hand.step()
        assert_same(model, expected)
        return ""
