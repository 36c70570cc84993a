"""Optimizers that evaluate a closure in a step, LBFGS and SAM as published: as a plain loop, and one step each."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import islice
from typing import Any

import pytest
import torch
from plain_loop import data, model_of, strategy_of, weights
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim import LBFGS, SGD, Optimizer
from torch.optim.lr_scheduler import StepLR

import unitrain
from unitrain import CommunicationError, NonFiniteError, UsageError


class SAM(Optimizer):
    """The class of https://github.com/davda54/sam, which most scripts have a copy of, in its form and words.

    Attributes:
        in_place: whether weights are put back by copies, which fsdp needs.
    """

    in_place = False

    def __init__(self, params: Any, base_optimizer: Any, rho: float = 0.05, adaptive: bool = False, **kwargs: Any):
        super().__init__(params, {"rho": rho, "adaptive": adaptive, **kwargs})
        self.base_optimizer = base_optimizer(self.param_groups, **kwargs)
        self.param_groups = self.base_optimizer.param_groups
        self.defaults.update(self.base_optimizer.defaults)

    @torch.no_grad()
    def first_step(self, zero_grad: bool = False) -> None:
        grad_norm = self._grad_norm()
        for group in self.param_groups:
            scale = group["rho"] / (grad_norm + 1e-12)
            for p in group["params"]:
                if p.grad is None:
                    continue
                self.state[p]["old_p"] = p.data.clone()
                e_w = (torch.pow(p, 2) if group["adaptive"] else 1.0) * p.grad * scale.to(p)
                p.add_(e_w)
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def second_step(self, zero_grad: bool = False) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                if self.in_place:
                    p.data.copy_(self.state[p]["old_p"])
                else:
                    p.data = self.state[p]["old_p"]
        self.base_optimizer.step()
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is not None, "Sharpness Aware Minimization requires closure, but it was not provided"
        closure = torch.enable_grad()(closure)
        self.first_step(zero_grad=True)
        closure()
        self.second_step()

    def _grad_norm(self) -> Tensor:
        shared_device = self.param_groups[0]["params"][0].device
        norms = [
            ((torch.abs(p) if group["adaptive"] else 1.0) * p.grad).norm(p=2).to(shared_device)
            for group in self.param_groups
            for p in group["params"]
            if p.grad is not None
        ]
        norm: Tensor = torch.norm(torch.stack(norms), p=2)
        return norm

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        self.base_optimizer.param_groups = self.param_groups


MAKE: dict[str, Callable[[nn.Module], Optimizer]] = {
    "lbfgs": lambda net: LBFGS(net.parameters(), lr=0.3, max_iter=5, history_size=3),
    "line search": lambda net: LBFGS(net.parameters(), lr=0.3, max_iter=5, line_search_fn="strong_wolfe"),
    "sam": lambda net: SAM(net.parameters(), SGD, rho=0.3, adaptive=True, lr=0.1, momentum=0.9),
    "several batches": lambda net: SAM(net.parameters(), SGD, rho=0.3, lr=0.1, momentum=0.9),
}


def trained(strategy: unitrain.Strategy, case: str, clip: float | None = None) -> float:
    """Train with closures, and return how far the weights are from those of a plain loop."""
    SAM.in_place = strategy.world_size > 1 and strategy.config.backend == "fsdp"
    net = model_of()
    plain = copy.deepcopy(net)
    optimizer = MAKE[case](net)
    scheduler = StepLR(optimizer, 2, gamma=0.5)
    model, optimizer, scheduler = strategy.prepare(net, optimizer, scheduler)
    at_once = 2 if case == "several batches" else 1
    for _ in range(2):
        rest = iter(strategy.dataloader(data(), global_batch_size=6 // at_once, shuffle=False))
        while batches := list(islice(rest, at_once)):

            def closure(batches: Any = batches) -> Any:
                losses = []
                for inputs, targets in batches:
                    losses.append(mse_loss(model(inputs), targets))
                    strategy.backward(losses[-1] * (1 / len(batches)), optimizer, batch=inputs)
                return strategy.mean(torch.stack(losses).mean())

            if case == "sam":  # as published: the first gradients are there when the closure is passed
                inputs, targets = batches[0]
                strategy.backward(mse_loss(model(inputs), targets), optimizer)
            strategy.update(optimizer, scheduler, closure=closure)
    assert strategy.global_step == 8

    reference = MAKE[case](plain)
    decay = StepLR(reference, 2, gamma=0.5)
    for step in range(8):
        inputs, targets = (whole[step % 4 * 6 : (step % 4 + 1) * 6] for whole in data().tensors)

        def plain_closure(inputs: Tensor = inputs, targets: Tensor = targets) -> Any:
            reference.zero_grad()
            loss = mse_loss(plain(inputs), targets)
            if case == "several batches" and len(inputs) > 3:
                loss = (mse_loss(plain(inputs[:3]), targets[:3]) + mse_loss(plain(inputs[3:]), targets[3:])) / 2
            loss.backward()  # type: ignore[no-untyped-call]
            if clip is not None:
                nn.utils.clip_grad_norm_(plain.parameters(), clip)
            return loss

        plain_closure()
        reference.step(plain_closure)
        decay.step()
    with torch.no_grad():
        pairs = zip(net.parameters(), plain.parameters(), strict=True)
        return max(float((strategy.full_tensor(p) - expected).abs().max()) for p, expected in pairs)


def distances(backend: str, cases: list[str]) -> dict[str, float]:
    found = {}
    for case in cases:
        clip = 0.5 if case == "sam" else None
        with unitrain.init(backend=backend, precision="fp64", device="cpu", clip_norm=clip) as strategy:
            found[case] = trained(strategy, case, clip)
    return found


def test_a_closure_makes_one_step() -> None:
    found = distances("single", list(MAKE))
    assert max(found.values()) < 1e-9, found


@pytest.mark.parametrize("backend", ["ddp", "horovod", "fsdp"])
def test_a_closure_makes_one_step_on_two_ranks(backend: str) -> None:
    for found in run_ranks(distances, backend, [case for case in MAKE if case != "lbfgs"]):
        assert max(found.values()) < 1e-9, found


def refused(case: str) -> None:
    settings: dict[str, Any] = {}
    if case in ("accumulate", "sharded"):
        settings = {"accumulate": 2} if case == "accumulate" else {"shard_optimizer": True}
    backend: Any = "fsdp" if case == "assigned" else "ddp"
    strategy = unitrain.init(backend=backend, device="cpu", timeout_s=20, **settings)
    net = model_of()
    model, optimizer = strategy.prepare(net, MAKE["sam" if case == "assigned" else "lbfgs"](net))
    inputs, targets = (rows[strategy.rank :: 2] for rows in data().tensors)

    def closure() -> Any:
        optimizer.zero_grad()
        loss = mse_loss(model(inputs), targets)
        if case == "backward":
            loss.backward()  # type: ignore[no-untyped-call]
            return None
        strategy.backward(loss, optimizer)
        return loss if case == "local" else strategy.mean(loss)

    for _ in range(3):
        strategy.update(optimizer, closure=closure)


@pytest.mark.parametrize(
    ("case", "kind", "message"),
    [
        ("accumulate", UsageError, r"passed a closure, which accumulate above 1 .*: set accumulate to 1"),
        ("sharded", UsageError, r"this run shards optimizers over the ranks: turn that off"),
        (
            "backward",
            CommunicationError,
            r"gradients differ: 0\.weight \(8, 4\) of rank 1 is not .*\. Average",
        ),
        ("local", CommunicationError, r"the closure's losses differ .* Return strategy\.mean\(loss\)"),
        ("assigned", UsageError, r"0\.weight was replaced, .* or its \.data assigned to.*p\.data\.copy_\(values\)"),
    ],
)
def test_a_closure_that_would_make_other_steps_on_each_rank_is_refused(case: str, kind: type, message: str) -> None:
    with pytest.raises(kind, match=message):
        run_ranks(refused, case)


def test_step_names_the_call_that_takes_a_closure() -> None:
    strategy = strategy_of()
    model, optimizer = strategy.prepare(net := model_of(), MAKE["lbfgs"](net))
    with pytest.raises(UsageError, match=r"LBFGS .* call strategy\.update\(optimizer, closure=closure\)"):
        strategy.step(model(data().tensors[0]).square().mean(), optimizer)


@pytest.mark.parametrize("evaluation", [1, 2])
def test_a_non_finite_evaluation(evaluation: int, capfd: pytest.CaptureFixture[str]) -> None:
    strategy = strategy_of(on_nonfinite="skip")
    net = model_of()
    model, optimizer = strategy.prepare(net, MAKE["sam"](net))
    before, evaluations = weights(net), []

    def closure() -> None:
        evaluations.append(1)
        factor = torch.nan if len(evaluations) == evaluation else 1.0
        strategy.backward(model(data().tensors[0]).square().mean() * factor, optimizer)

    if evaluation == 1:
        assert strategy.update(optimizer, closure=closure).skipped
        assert torch.equal(weights(net), before)
        assert strategy.update(optimizer, closure=closure).stepped
        assert strategy.global_step == 2
    else:
        with pytest.raises(NonFiniteError, match=r"in an evaluation of the closure .*0\.weight\. The optimizer has mo"):
            strategy.update(optimizer, closure=closure)
