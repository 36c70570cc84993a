"""Gradients that a script sets itself: checked, clipped, stepped with and counted, but neither averaged nor scaled."""

from __future__ import annotations

import copy
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from plain_loop import data, model_of, sgd, strategy_of, weights
from ranks import run_ranks
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import mse_loss
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import TensorDataset

import unitrain
from unitrain import CommunicationError, UsageError

ROWS = 6


def conflict(model: Any, parameters: list[Any], inputs: Tensor, targets: Tensor) -> list[list[Tensor]]:
    """Return the gradients of two losses."""
    outputs = model(inputs)
    losses = [(outputs[:, i] - targets[:, i]).square().mean() for i in (0, 1)]
    return [list(torch.autograd.grad(loss, parameters, retain_graph=True)) for loss in losses]


def combined(first: list[Tensor], second: list[Tensor]) -> list[Tensor]:
    """Project the second of two gradients, as PCGrad does."""
    dot = sum((a * b).sum() for a, b in zip(first, second, strict=True))
    square = sum(a.square().sum() for a in first)
    return [a + b - min(dot, torch.zeros(())) / square * a for a, b in zip(first, second, strict=True)]


def projected(strategy: unitrain.Strategy) -> float:
    """Train with projected gradients, and return how far the weights are from those of a plain loop."""
    net = model_of()
    plain = copy.deepcopy(net)
    optimizer = sgd(net)
    scheduler = StepLR(optimizer, 2, gamma=0.5)
    model, optimizer, scheduler = strategy.prepare(net, optimizer, scheduler)
    parameters = list(net.parameters())
    norms = []
    for _ in range(2):
        for inputs, targets in strategy.dataloader(data(), global_batch_size=ROWS, shuffle=False):
            both = conflict(model, parameters, inputs, targets)
            averaged = combined(*(strategy.average(each) for each in both))
            for parameter, gradient in zip(parameters, averaged, strict=True):
                parameter.grad = gradient
            result = strategy.update(optimizer, scheduler)
            assert result.stepped
            assert result.grad_norm is not None
            norms.append(result.grad_norm.item())
            assert all(parameter.grad is None for parameter in parameters)
    assert strategy.global_step == 8

    reference = sgd(plain)
    decay = StepLR(reference, 2, gamma=0.5)
    for step in range(8):
        rows = slice(step % 4 * ROWS, (step % 4 + 1) * ROWS)
        inputs, targets = (whole[rows] for whole in data().tensors)
        mean = combined(*conflict(plain, list(plain.parameters()), inputs, targets))
        for parameter, gradient in zip(plain.parameters(), mean, strict=True):
            parameter.grad = gradient
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        assert abs(norm.item() - norms[step]) < 1e-9
        reference.step()
        decay.step()
    return float((weights(net) - weights(plain)).abs().max())


def adapted(model: Any, parameters: dict[str, Any], inputs: Tensor, targets: Tensor) -> Tensor:
    """Return the loss after a step of gradient descent on the first half of a batch, on the second half: MAML."""
    half = (len(inputs) + 1) // 2
    loss = mse_loss(model(parameters, inputs[:half]), targets[:half])
    gradients = torch.autograd.grad(loss, list(parameters.values()), create_graph=True)
    moved = {n: p - 0.1 * g for (n, p), g in zip(parameters.items(), gradients, strict=True)}
    return mse_loss(model(moved, inputs[half:]), targets[half:])


def meta_learned(strategy: unitrain.Strategy, case: str) -> float:
    """Train by MAML, through the wrapper or with averaged gradients. Return how far a plain loop's weights are."""
    net = model_of()
    plain = copy.deepcopy(net)
    model, optimizer = strategy.prepare(net, sgd(net))
    generator = torch.Generator().manual_seed(4)
    tasks = [torch.randn(5, 8, n, generator=generator, dtype=torch.float64) for n in (4, 2)]

    def of_tasks(net: nn.Module, inputs: Tensor, targets: Tensor, wrapper: Any = None) -> Tensor:
        def called(parameters: dict[str, Any], rows: Tensor) -> Any:
            if wrapper is not None and parameters["0.weight"] is net[0].weight:  # type: ignore[index]
                return wrapper(rows)
            return functional_call(net, parameters, (rows,))

        pairs = zip(inputs, targets, strict=True)
        return torch.stack([adapted(called, dict(net.named_parameters()), *task) for task in pairs]).mean()

    reference = sgd(plain)
    for _ in range(2):
        for inputs, targets in strategy.dataloader(TensorDataset(*tasks), global_batch_size=3):
            loss = of_tasks(net, inputs, targets, model if case == "prepared" else None)
            if case == "averaged":
                gradients = strategy.average(torch.autograd.grad(loss, list(net.parameters())))
                for parameter, gradient in zip(net.parameters(), gradients, strict=True):
                    parameter.grad = gradient
                strategy.update(optimizer)
            else:
                strategy.step(loss, optimizer)
        for rows in (slice(3), slice(3, 5)):
            reference.zero_grad()
            of_tasks(plain, tasks[0][rows], tasks[1][rows]).backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
            reference.step()
    return float((weights(net) - weights(plain)).abs().max())


def in_turns(strategy: unitrain.Strategy) -> float:
    """Set gradients, let the strategy step, or average those of ``loss.backward()``. Return as ``projected`` does."""
    net = model_of()
    plain = copy.deepcopy(net)
    model, optimizer = strategy.prepare(net, sgd(net))
    parameters, step = list(net.parameters()), 0
    for _ in range(2):
        for inputs, targets in strategy.dataloader(data(), global_batch_size=ROWS, shuffle=False):
            loss = mse_loss(model(inputs), targets)
            if step % 3 == 1:
                strategy.step(loss, optimizer)
            else:
                if step % 3 == 2:
                    loss.backward()  # type: ignore[no-untyped-call]
                local = [p.grad for p in parameters] if step % 3 == 2 else torch.autograd.grad(loss, parameters)
                for parameter, gradient in zip(parameters, strategy.average(local), strict=True):
                    parameter.grad = gradient
                strategy.update(optimizer)
            step += 1

    reference = sgd(plain)
    for step in range(8):
        rows = slice(step % 4 * ROWS, (step % 4 + 1) * ROWS)
        inputs, targets = (whole[rows] for whole in data().tensors)
        reference.zero_grad()
        mse_loss(plain(inputs), targets).backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        reference.step()
    return float((weights(net) - weights(plain)).abs().max())


def distances(backend: str) -> dict[str, float]:
    """Return how far each case is from its plain loop."""
    found = {}
    for case in ("projected", "in turns", "prepared", "averaged"):
        with unitrain.init(backend=backend, precision="fp64", device="cpu", clip_norm=0.5) as strategy:
            train = {"projected": projected, "in turns": in_turns}.get(case)
            found[case] = meta_learned(strategy, case) if train is None else train(strategy)
    return found


def test_a_script_averages_its_gradients() -> None:
    assert max(distances("single").values()) < 1e-9


@pytest.mark.parametrize("backend", ["ddp", "horovod"])
def test_a_script_averages_its_gradients_on_two_ranks(backend: str) -> None:
    for found in run_ranks(distances, backend):
        assert max(found.values()) < 1e-9, found


def refused(case: str, backend: str) -> None:
    strategy = unitrain.init(backend=backend, device="cpu", timeout_s=20)
    model, optimizer = strategy.prepare(*(net := model_of(), sgd(net)))
    inputs, targets = (rows[strategy.rank :: 2] for rows in data().tensors)
    for step in range(3):
        parameters = list(net.parameters())
        local = torch.autograd.grad(mse_loss(model(inputs), targets), parameters)
        averaged: list[Any] = [*strategy.average(local)]
        if case == "none" and strategy.rank == 1:
            averaged[3] = None
        for parameter, gradient in zip(parameters, averaged, strict=True):
            parameter.grad = gradient
        if case == "backward" and step == 1:
            optimizer.zero_grad()
            mse_loss(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
        if case == "drawn":
            parameters[2].grad = averaged[2] + torch.randn(2, 8)  # the ranks draw different numbers
        strategy.update(optimizer)


@pytest.mark.parametrize(
    ("case", "backend", "name"),
    [
        ("drawn", "ddp", r"2\.weight \(2, 8\)"),
        ("none", "ddp", r"2\.bias \(2,\)"),
        ("backward", "ddp", r"0\.weight \(8, 4\)"),
        ("backward", "horovod", r"0\.weight \(8, 4\)"),
    ],
)
def test_gradients_that_differ_between_ranks_are_refused(case: str, backend: str, name: str) -> None:
    with pytest.raises(CommunicationError, match=f"gradients differ: {name} of rank 1 is not .* strategy.average"):
        run_ranks(refused, case, backend)


def test_an_update_without_gradients_is_refused() -> None:
    strategy = strategy_of()
    net = model_of()
    _, optimizer = strategy.prepare(net, sgd(net))
    with pytest.raises(UsageError, match=r"without a backward\(\) before it, and the SGD has no gradients"):
        strategy.update(optimizer)


def test_gradients_of_the_script_are_refused_within_an_accumulation_window() -> None:
    strategy = strategy_of(accumulate=2)
    net = model_of()
    _, optimizer = strategy.prepare(net, sgd(net))
    net(data().tensors[0]).sum().backward()
    with pytest.raises(UsageError, match="set accumulate to 1, and add the gradients of several batches"):
        strategy.update(optimizer)


def test_a_step_with_bad_gradients_is_skipped() -> None:
    strategy = strategy_of(on_nonfinite="skip")
    net: Any = model_of()
    before = weights(net)
    _, optimizer = strategy.prepare(net, sgd(net))
    for bad in (True, False):
        net(data().tensors[0]).sum().backward()
        if bad:
            net[0].weight.grad[1, 2] = torch.inf
        assert strategy.update(optimizer).skipped is bad
        assert torch.equal(weights(net), before) is bad
    assert strategy.global_step == 2


def test_a_run_goes_on_behind_the_batches_of_its_last_step(tmp_path: Path) -> None:
    seen: list[list[float]] = []
    for _ in range(2):
        strategy = strategy_of()
        net = model_of()
        _, optimizer = strategy.prepare(net, sgd(net))
        train = strategy.dataloader(TensorDataset(torch.arange(8.0)), global_batch_size=1, shuffle=False)
        checkpoint = strategy.checkpoint(tmp_path, model=net, optimizer=optimizer, loader=train)
        checkpoint.resume()
        rest = iter(train)
        seen.append([])
        while pair := list(islice(rest, 2)):  # a step has two batches
            seen[-1] += [float(batch[0]) for batch in pair]
            net(data().tensors[0]).sum().backward()
            strategy.update(optimizer)
            if pair[0][0] == 2:
                break
        checkpoint.save()
        strategy.close()
    assert seen == [[0, 1, 2, 3], [4, 5, 6, 7]]


def called_with_other_weights(case: str) -> None:
    strategy = unitrain.init(backend="fsdp", device="cpu", timeout_s=20)
    model: Any = strategy.prepare(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)))
    if case == "functional_call":
        loss = functional_call(model, dict(model.named_parameters()), (torch.ones(2, 4),)).sum()
        torch.autograd.grad(loss, list(model.parameters()))
    model[1].bias = nn.Parameter(strategy.full_tensor(model[1].bias.detach()))
    model(torch.ones(2, 4))


@pytest.mark.parametrize(("case", "name"), [("functional_call", r"0\.weight"), ("replaced", r"1\.bias")])
def test_a_sharded_model_is_not_called_with_other_weights(case: str, name: str) -> None:
    with pytest.raises(UsageError, match=name + " was replaced, by functional_call for .* use backend ddp or horovod"):
        run_ranks(called_with_other_weights, case)


def of_shards(backend: str) -> float:
    """Step with gradients that the script computes without a graph, and return how far a plain loop's weights are."""
    strategy = unitrain.init(backend=backend, precision="fp64", device="cpu", clip_norm=0.5)
    net = model_of()
    plain = copy.deepcopy(net)
    _, optimizer = strategy.prepare(net, sgd(net))
    reference, generator = sgd(plain), torch.Generator().manual_seed(5)
    for _ in range(3):
        for parameter, expected in zip(net.parameters(), plain.parameters(), strict=True):
            expected.grad = torch.randn(expected.shape, generator=generator, dtype=torch.float64)
            parameter.grad = strategy.shard_like(expected.grad, parameter)
        assert strategy.update(optimizer).stepped
        nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        reference.step()
    pairs = zip(net.parameters(), plain.parameters(), strict=True)
    return max(float((strategy.full_tensor(p.detach()) - q.detach()).abs().max()) for p, q in pairs)


def test_gradients_of_sharded_parameters_are_clipped_by_their_whole_norm() -> None:
    assert max(run_ranks(of_shards, "fsdp")) < 1e-9
