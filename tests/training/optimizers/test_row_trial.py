"""Optimizers that update each element by itself pass the trial; the others are refused, and none is changed by it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.optim import SGD, Adam, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from unitrain import UsageError
from unitrain.training.optimizers.row_trial import shapes_of_common_state


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Linear(5, 7), nn.BatchNorm1d(3))


class Blocks(SGD):
    """Divides the gradients by the largest one of each 256, as optimizers with 8-bit states do."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    for block in p.grad.reshape(-1).split(256):
                        block /= block.abs().max() + 1
        super().step(closure)


class Tuned(SGD):
    """Learns its learning rate from all gradients."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["d"] = max(float(p.grad.abs().sum()) for p in group["params"] if p.grad is not None)
        super().step(closure)


class Decays(SGD):
    """Decays weights that have no gradient."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for p in self.param_groups[0]["params"]:
            p.mul_(0.9)


class Around(Optimizer):
    """Has another optimizer for the same parameters."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})
        self.inner = Adam(self.param_groups, lr=lr)
        self.param_groups = self.inner.param_groups

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()


class Idle(SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        pass


class OwnState(SGD):
    def state_dict(self) -> dict[str, Any]:
        return {"state": {}, "param_groups": [{"params": []}]}

    def load_state_dict(self, state_dict: Any) -> None:
        pass


class Counts(Adam):
    """Keeps a number of steps with a dimension, as older code does."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for its in self.state.values():
            its["made"] = its.get("made", torch.zeros(1)) + 1


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda its: optim.SGD(its, momentum=0.9, weight_decay=0.1), set()),
        (lambda its: optim.SGD(its, momentum=0.9, fused=True), set()),
        (lambda its: optim.AdamW(its, lr=torch.tensor(0.0), amsgrad=True), set()),
        (lambda its: optim.AdamW(its, fused=True), set()),
        (optim.NAdam, set()),
        (optim.RAdam, set()),
        (optim.Adagrad, set()),
        (optim.Adadelta, set()),
        (optim.Adamax, set()),
        (optim.Rprop, set()),
        (optim.ASGD, set()),
        (Counts, {(1,)}),
    ],
)
def test_what_updates_each_element_by_itself_is_accepted(
    make: Callable[..., Optimizer], expected: set[tuple[int, ...]]
) -> None:
    optimizer = make(model().parameters())
    LambdaLR(optimizer, lambda step: min(1.0, step / 10))  # a learning rate of 0
    before = copy.deepcopy(optimizer.state_dict())
    assert shapes_of_common_state(optimizer, optimizer.param_groups) == expected
    assert str(optimizer.state_dict()) == str(before)


def test_a_state_that_was_loaded_takes_part_and_stays() -> None:
    optimizer = Adam(model().half().parameters(), lr=0.1)
    for group in optimizer.param_groups:
        for p in group["params"]:
            optimizer.state[p] = {"step": torch.tensor(7.0), "exp_avg": p.detach() * 2, "exp_avg_sq": p.detach() ** 2}
    before = copy.deepcopy(optimizer.state_dict())
    shapes_of_common_state(optimizer, optimizer.param_groups)
    for found, expected in zip(optimizer.state_dict()["state"].values(), before["state"].values(), strict=True):
        assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (optim.Adafactor, "what it does with some rows of a parameter depends on the others"),
        (lambda its: optim.Muon([p for p in its if p.dim() == 2]), "depends on the others"),
        (optim.SparseAdam, "fail with RuntimeError: SparseAdam does not support dense gradients"),
        (optim.LBFGS, "fail with TypeError"),
        (Blocks, "depends on the others"),
        (Tuned, "the options of its groups depend on gradients"),
        (Decays, "it changes parameters without gradients"),
        (lambda its: Around(its, lr=0.1), "depends on the others"),
        (Idle, "it changes nothing"),
        (OwnState, r"its class replaces state_dict\(\) or load_state_dict\(\)"),
    ],
)
def test_what_does_not_is_refused_with_the_reason_and_a_remedy(make: Callable[..., Optimizer], reason: str) -> None:
    net = model()
    optimizer = make(net.parameters())
    weights = [p.detach().clone() for p in net.parameters()]
    for p in net.parameters():
        p.grad = torch.ones_like(p)
    with pytest.raises(UsageError, match=rf"does not support {type(optimizer).__name__}, since .*{reason}") as refusal:
        shapes_of_common_state(optimizer, optimizer.param_groups)
    assert "Set shard_optimizer to false, or use an optimizer that updates each element by itself" in str(refusal.value)
    assert all(map(torch.equal, net.parameters(), weights)), "a trial does not touch the model"
    assert not optimizer.state


def test_groups_with_other_options_are_tried_as_well() -> None:
    class Mixed(SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None and group.get("by_norm"):
                        p.grad /= p.grad.norm()
            super().step(closure)

    groups: list[dict[str, Any]] = [{"params": list(layer.parameters())} for layer in model()]
    optimizer = Mixed([groups[0], {**groups[2], "by_norm": True}])
    shapes_of_common_state(optimizer, optimizer.param_groups[:1])
    with pytest.raises(UsageError, match="does not support Mixed"):
        shapes_of_common_state(optimizer, optimizer.param_groups)


def test_complex_and_small_parameters_are_tried() -> None:
    parameters = [nn.Parameter(torch.ones(3, 2, dtype=torch.cfloat)), nn.Parameter(torch.tensor(1.0))]
    optimizer = Adam(parameters)
    assert shapes_of_common_state(optimizer, optimizer.param_groups) == set()
