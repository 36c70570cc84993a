"""Rounds of ``local_steps`` train as workers simulated in one process do, and end before what needs equal weights."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from needs import HOROVOD
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim import SGD, AdamW, Optimizer
from torch.utils.data import TensorDataset

import unitrain
from unitrain import CheckpointError, ConfigError, NonFiniteError, Stopped, UsageError

# Each rank has a sample of each micro-batch.
SAMPLES, BATCH, STEPS, EPOCHS = 23, 6, 3, 2
OUTER = {"outer_lr": 0.7, "outer_momentum": 0.9}
SETTINGS: dict[str, Any] = {"precision": "fp64", "device": "cpu", "timeout_s": 30, "local_steps": STEPS, **OUTER}


class Result(NamedTuple):
    weights: list[Tensor]
    """At the end of each epoch."""
    rows: list[list[int]]
    """The samples of each step on this rank."""


def data() -> TensorDataset:
    made = torch.Generator().manual_seed(1)
    inputs = torch.randn(SAMPLES, 4, generator=made, dtype=torch.float64)
    return TensorDataset(torch.arange(SAMPLES), inputs, inputs.sin()[:, :2])


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()


def adamw(model: nn.Module) -> Optimizer:
    return AdamW(model.parameters(), lr=0.01)


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def train(folder: str, end: int, backend: str, settings: dict[str, Any]) -> Result:
    """Train up to a step, or to the end of the last epoch."""
    with unitrain.init(**{**SETTINGS, "backend": backend, **settings}) as strategy:
        model = net()
        prepared, optimizer = strategy.prepare(model, adamw(model))
        loader = strategy.dataloader(data(), global_batch_size=BATCH, shuffle=True)
        checkpoint = strategy.checkpoint(folder, model=prepared, optimizer=optimizer, loader=loader)
        checkpoint.resume()
        weights: list[Tensor] = []
        rows: list[list[int]] = [[]]
        for _ in loader.epochs(EPOCHS):
            for numbers, inputs, targets in loader:
                rows[-1] += numbers.tolist()
                if strategy.step(mse_loss(prepared(inputs), targets), optimizer).stepped:
                    rows.append([])
                    if strategy.global_step == 2:
                        checkpoint.save()  # after the round, which ends with the next step
                    if strategy.global_step == end:
                        return Result(weights, rows[:-1])
            strategy.check_in_sync(prepared)
            weights.append(flat(model).detach())
        return Result(weights, rows[:-1])


def simulate(ranks: list[list[list[int]]], local_steps: int) -> list[Tensor]:
    """Train a model for each of the ranks, given the samples of their steps, and return the weights of each epoch."""
    workers = [net() for _ in ranks]
    optimizers = [adamw(worker) for worker in workers]
    outer = SGD(net().parameters(), lr=OUTER["outer_lr"], momentum=OUTER["outer_momentum"], nesterov=True)
    firsts = outer.param_groups[0]["params"]
    _, inputs, targets = data().tensors
    found, steps_per_epoch = [], -(-SAMPLES // BATCH)
    for step, of_ranks in enumerate(zip(*ranks, strict=True)):
        in_epoch = step % steps_per_epoch + 1
        whole = sum(map(len, of_ranks))
        for worker, optimizer, rows in zip(workers, optimizers, of_ranks, strict=True):
            optimizer.zero_grad()
            # Its part of the global batch's mean, times the number of workers.
            mean = (worker(inputs[rows]) - targets[rows]).pow(2).sum() / (2 * whole)
            (len(ranks) * mean).backward()
            optimizer.step()
        if in_epoch % local_steps == 0 or in_epoch == steps_per_epoch:
            with torch.no_grad():
                for first, *lasts in zip(firsts, *(worker.parameters() for worker in workers), strict=True):
                    first.grad = first - torch.stack(lasts).mean(0)
                outer.step()
                for first, *lasts in zip(firsts, *(worker.parameters() for worker in workers), strict=True):
                    for last in lasts:
                        last.copy_(first)
        if in_epoch == steps_per_epoch:
            found.append(flat(workers[0]))
    return found


@pytest.mark.parametrize(
    ("backend", "world", "launcher", "settings"),
    [
        ("ddp", 2, "spawn", {"accumulate": 2}),
        pytest.param("horovod", 3, "horovodrun", {}, marks=HOROVOD),
        ("single", 1, "spawn", {}),
    ],
)
def test_ranks_train_as_simulated_workers_and_go_on_after_a_round(
    backend: str, world: int, launcher: Any, settings: dict[str, Any], tmp_path: Path
) -> None:
    begun = run_ranks(train, str(tmp_path), STEPS, backend, settings, nprocs=world, launcher=launcher)
    resumed = run_ranks(train, str(tmp_path), 0, backend, settings, nprocs=world, launcher=launcher)
    assert [len(one.rows) for one in begun + resumed] == [3] * world + [5] * world
    expected = simulate([one.rows + other.rows for one, other in zip(begun, resumed, strict=True)], STEPS)
    for found in resumed:
        torch.testing.assert_close(found.weights, expected, rtol=0, atol=1e-9)


def go_on(folder: str, force: bool) -> None:
    with unitrain.init(**SETTINGS) as strategy:
        model = net()
        prepared, optimizer = strategy.prepare(model, adamw(model))
        checkpoint = strategy.checkpoint(folder, model=prepared, optimizer=optimizer)
        checkpoint.resume(force=force)


def save_one(folder: str, local_steps: int) -> None:
    with unitrain.init(**{**SETTINGS, "local_steps": local_steps}) as strategy:
        model = net()
        prepared, optimizer = strategy.prepare(model, adamw(model))
        checkpoint = strategy.checkpoint(folder, model=prepared, optimizer=optimizer)
        for _ in range(STEPS):
            strategy.step(prepared(torch.ones(2, 4) * (1 + strategy.rank)).sum(), optimizer)
        checkpoint.save()


def test_another_number_of_ranks_is_refused_unless_forced(tmp_path: Path) -> None:
    run_ranks(save_one, str(tmp_path), STEPS)
    with pytest.raises(CheckpointError, match=r"has those of 2 ranks, not of 1: resume with 2 processes, or with"):
        go_on(str(tmp_path), False)
    go_on(str(tmp_path), True)


# -------------------------------------------------------------------------------------------- what all ranks decide


def not_finite() -> tuple[str, bool]:
    with unitrain.init(**SETTINGS, on_nonfinite="raise") as strategy:
        model = net()
        prepared, optimizer = strategy.prepare(model, SGD(model.parameters(), lr=0.1))
        before = flat(model)
        with pytest.raises(UsageError, match=r"strategy\.step"):
            optimizer.step()
        for step in range(STEPS - 1):
            loss = prepared(torch.ones(2, 4) * (1 + strategy.rank)).sum()
            strategy.step(loss * torch.nan if (step, strategy.rank) == (1, 1) else loss, optimizer)
        assert not torch.equal(flat(model), before)
        loss = prepared(torch.ones(2, 4)).sum()
        with pytest.raises(NonFiniteError) as raised:
            strategy.step(loss, optimizer)
        return str(raised.value), torch.equal(flat(model), before)


def test_all_ranks_end_with_the_first_weights_of_a_round_in_which_one_has_no_finite_loss() -> None:
    for message, restored in run_ranks(not_finite):
        assert message.startswith("not finite within the 3 steps up to step 3: the loss of rank 1; first affected")
        assert restored


def stopped(folder: str) -> int:
    with unitrain.init(**SETTINGS) as strategy:
        model = net()
        prepared, optimizer = strategy.prepare(model, adamw(model))
        strategy.checkpoint(folder, model=prepared, optimizer=optimizer)

        def steps() -> None:
            for step in range(30):
                if (step, strategy.rank) == (1, 1):
                    os.kill(os.getpid(), signal.SIGTERM)
                strategy.step(prepared(torch.ones(2, 4) * (1 + strategy.rank)).sum(), optimizer)

        with pytest.raises(Stopped):
            steps()
        strategy.check_in_sync(prepared)
        return strategy.global_step


def test_a_signal_stops_after_a_round(tmp_path: Path) -> None:
    first, second = run_ranks(stopped, str(tmp_path))
    assert first == second
    assert first % STEPS == 0
    assert (tmp_path / f"step-{first:010}" / "manifest.json").exists()


# ------------------------------------------------------------------------------------------------ what is refused


def refused() -> list[str]:
    said = []
    with unitrain.init(**SETTINGS) as strategy:
        model = net()
        prepared, optimizer = strategy.prepare(model, adamw(model))
        strategy.step(prepared(torch.ones(2, 4)).sum() * strategy.rank, optimizer)
        other = SGD(model.parameters(), lr=0.1)
        for call in (
            lambda: strategy.evaluation(prepared).__enter__(),
            lambda: strategy.export(prepared),
            lambda: strategy.check_in_sync(prepared),
            lambda: strategy.ema(prepared),
            lambda: strategy.step(prepared(torch.ones(2, 4)).sum(), other),
        ):
            with pytest.raises(UsageError) as raised:
                call()
            said.append(str(raised.value))
        with pytest.warns(UserWarning, match=r"its last 1 steps were not averaged over the ranks"):
            strategy.close()
    return said


def test_what_needs_equal_weights_is_refused_within_a_round() -> None:
    [said] = {tuple(one) for one in run_ranks(refused, nprocs=1)}
    assert all("called after step 1 of a round of 3 (local_steps)" in one for one in said[:3])
    assert said[3:] == (
        "ema() averages weights after each step, and with local_steps ranks have different ones.",
        "local_steps supports one optimizer: give it all parameters, in groups.",
    )


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"sync_batchnorm": True}, "sync_batchnorm"),
        ({"check_in_sync_every": 2}, "check_in_sync_every"),
        ({"memory_every": 2}, "memory_every"),
        ({"shard_optimizer": True}, "shard_optimizer"),
        ({"compression": "powersgd"}, "compression"),
        ({"precision": "fp16"}, "precision"),
        ({"on_nonfinite": "skip"}, "on_nonfinite"),
        ({"local_steps": 1, "outer_lr": 0.5}, "outer_lr"),
    ],
)
def test_settings_that_exclude_rounds(settings: dict[str, Any], name: str) -> None:
    with pytest.raises(ConfigError, match=rf"local_steps is .*{name} is .*mutually exclusive"):
        unitrain.init(**{"backend": "single", "local_steps": 4, **settings})


def test_fsdp_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"local_steps is 4, but backend fsdp shards one model"):
        unitrain.init(backend="fsdp", device="cpu", local_steps=4)
