"""``prepare``: what it does with optimizers, which later changes it follows, and which inputs are errors."""

from __future__ import annotations

import pytest
import torch
from ranks import run_ranks
from torch import nn

import unitrain
from unitrain import UsageError


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
