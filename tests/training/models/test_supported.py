"""What ``prepare`` and ``step`` do not support is refused with a remedy, before anything changes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from plain_loop import data, model_of, sgd, strategy_of, weights
from ranks import on_ranks
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim import Muon
from torch.optim.lr_scheduler import ReduceLROnPlateau

import unitrain
from unitrain import UsageError


class Autoencoder(nn.Module):
    """A model with a second tensor in the memory of its weight.

    Args:
        shared: makes the tensor of the weight.
    """

    def __init__(self, shared: Callable[[Tensor], Tensor], device: str = "cpu") -> None:
        super().__init__()
        self.encoder = nn.Linear(4, 4, device=device)
        second = shared(self.encoder.weight)
        self.decoder = nn.ParameterDict({"weight": second}) if isinstance(second, nn.Parameter) else nn.Module()
        self.register_buffer("buffer", None if isinstance(second, nn.Parameter) else second)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(
    ("shared", "name"),
    [
        (lambda weight: nn.Parameter(weight.detach().t()), r"decoder\.weight"),
        (lambda weight: nn.Parameter(weight.detach()[1:], requires_grad=False), r"decoder\.weight"),
        (lambda weight: weight.detach().view(16), "buffer"),
    ],
)
def test_tensors_in_the_memory_of_a_trained_weight_are_refused(
    shared: Callable[[Tensor], Tensor], name: str, device: str
) -> None:
    with pytest.raises(UsageError, match=rf"^{name} is another tensor than encoder\.weight, but in the same memory"):
        strategy_of().prepare(Autoencoder(shared, device))


def test_parameters_may_share_memory_without_an_element_in_common() -> None:
    flat = torch.ones(8)
    parts = [flat[:4], flat[4:]]
    tied = nn.Linear(4, 4)
    strategy_of().prepare(nn.ParameterList([*(nn.Parameter(part) for part in parts), tied.weight, tied.weight]))


@on_ranks()
def test_what_torch_has_sharded_is_refused() -> None:
    from torch.distributed.fsdp import fully_shard

    with unitrain.init(backend="ddp", device="cpu", timeout_s=30) as strategy:
        sharded = nn.Linear(2, 2)
        fully_shard(sharded)
        with pytest.raises(UsageError, match=r"the model is sharded already.* pass it as it was built"):
            strategy.prepare(sharded)


@on_ranks()
def test_muon_trains_sharded_parameters_as_in_one_process() -> None:
    with unitrain.init(backend="fsdp", device="cpu", timeout_s=30) as strategy:
        torch.manual_seed(0)
        made = [nn.Linear(6, 8, bias=False), nn.Linear(6, 8, bias=False)]
        made[1].load_state_dict(made[0].state_dict())
        by_hand = Muon(made[1].parameters(), lr=0.01)
        model = strategy.prepare(made[0])
        optimizer = strategy.prepare(Muon(model.parameters(), lr=0.01))
        inputs = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
        for _ in range(3):
            strategy.step(model(inputs[2 * strategy.rank :][:2]).square().mean(), optimizer)
            by_hand.zero_grad()
            made[1](inputs).square().mean().backward()
            by_hand.step()  # type: ignore[no-untyped-call]
        difference = strategy.full_tensor(made[0].weight.detach()) - made[1].weight.detach()
        assert difference.abs().max() < 0.005, "of updates of 0.03, computed in bfloat16"


class CosineLRScheduler:
    """As timm's, which is stepped with an epoch."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def step(self, epoch: int) -> None:
        raise AssertionError("is never called")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (ReduceLROnPlateau, r"scheduler.step\(metric\) after the evaluation"),
        (CosineLRScheduler, r"can't step a CosineLRScheduler.*scheduler.step_update\(strategy.global_step\)"),
    ],
)
@pytest.mark.parametrize("split", [False, True])
def test_a_scheduler_that_can_not_be_stepped_is_refused_before_the_weights_change(
    make: Any, message: str, split: bool
) -> None:
    strategy = strategy_of()
    model, optimizer = strategy.prepare(model := model_of(), sgd(model))
    before = weights(model)
    inputs, targets = data().tensors
    loss = mse_loss(model(inputs), targets)
    call = strategy.update if split else partial(strategy.step, loss)
    with pytest.raises(UsageError, match=message):
        call(optimizer, make(optimizer))
    assert torch.equal(weights(model), before)
    assert strategy.step(loss, optimizer).stepped
