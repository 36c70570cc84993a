"""``prepare``: what it does with optimizers, which later changes it follows, and which inputs are errors."""

from __future__ import annotations

import copy

import pytest
import torch
from plain_loop import assert_equal, model_of, strategy_of
from torch.optim import SGD, Adam

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
