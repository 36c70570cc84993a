"""``prepare``: what it does with optimizers, which later changes it follows, and which inputs are errors."""

from __future__ import annotations

import copy

import pytest
import torch
from plain_loop import assert_equal, model_of, strategy_of
from ranks import run_ranks
from torch import nn
from torch.optim import SGD, Adam

import unitrain
from unitrain import UsageError


def test_parameter_groups_added_and_frozen_layers_freed_after_prepare() -> None:
    strategy = strategy_of()
    model = model_of()
    model[0].requires_grad_(False)
    expected = copy.deepcopy(model)
    prepared, optimizer = strategy.prepare(model, SGD(model[2].parameters(), lr=0.1))
    plain_optimizer = SGD(expected[2].parameters(), lr=0.1)
    x = torch.randn(3, 4, dtype=torch.float64)

    def both() -> None:
        strategy.step(prepared(x).pow(2).mean(), optimizer)
        plain_optimizer.zero_grad()
        expected(x).pow(2).mean().backward()
        plain_optimizer.step()

    both()
    for target, opt in ((model, optimizer), (expected, plain_optimizer)):
        opt.add_param_group({"params": list(target[0].parameters()), "lr": 0.05})
    both()
    for target in (model, expected):
        target[0].requires_grad_(True)
    both()
    both()
    assert_equal(model, expected)
    assert not torch.equal(model.get_parameter("0.weight"), model_of().get_parameter("0.weight"))


def with_another_layer(world_size: int) -> str:
    with unitrain.init(deterministic=True, device="cpu", timeout_s=20) as strategy:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = strategy.prepare(model, optimizer)
        loader = strategy.dataloader(torch.ones(8, 4), global_batch_size=2)
        model[1] = strategy.prepare(nn.Linear(4, 1))  # of which the gradients would be averaged
        for inputs in loader:
            strategy.step(model(inputs).sum(), optimizer)
        model[1] = nn.Linear(4, 1)
        if world_size == 1:
            return str(len(list(loader)))
        with pytest.raises(UsageError) as refused:
            list(loader)
        return str(refused.value)


def test_a_layer_that_was_replaced_after_prepare_is_refused_on_several_processes() -> None:
    assert all("1.weight of a prepared Sequential is another para" in said for said in run_ranks(with_another_layer, 2))
    assert with_another_layer(1) == "4"


def test_lbfgs_is_refused() -> None:
    model = model_of()
    with pytest.raises(UsageError, match="LBFGS"):
        strategy_of().prepare(model, torch.optim.LBFGS(model.parameters()))


def test_adam_state_loaded_before_prepare_is_kept() -> None:
    torch.manual_seed(0)
    reference = model_of()
    reference_optimizer = Adam(reference.parameters(), lr=0.1)
    reference(torch.ones(1, 4, dtype=torch.float64)).sum().backward()
    reference_optimizer.step()
    model = copy.deepcopy(reference)
    optimizer = Adam(model.parameters(), lr=0.1)
    optimizer.load_state_dict(copy.deepcopy(reference_optimizer.state_dict()))
    strategy = strategy_of()
    prepared, returned = strategy.prepare(model, optimizer)
    assert returned is optimizer
    strategy.step(prepared(torch.ones(1, 4)).sum(), optimizer)
    reference_optimizer.zero_grad()
    reference(torch.ones(1, 4, dtype=torch.float64)).sum().backward()
    reference_optimizer.step()
    assert_equal(model, reference)
