"""Rounds of ``local_sgd`` train as workers simulated in one process do, and end before what needs equal weights."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from needs import HOROVOD
from plain_loop import merged
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim import SGD, AdamW, Optimizer
from torch.utils.data import TensorDataset

import unitrain
from unitrain import CheckpointError, ConfigError, NonFiniteError, Stopped, Strategy, UsageError
from unitrain.features.ema import EMA
from unitrain.features.safetensors import load_weights, save_weights

# Each rank has a sample of each micro-batch.
SAMPLES, BATCH, STEPS, EPOCHS = 65, 6, 3, 2
OUTER = {"outer_lr": 0.7, "outer_momentum": 0.9}
SETTINGS: dict[str, Any] = {
    "precision": "fp64",
    "device": "cpu",
    "timeout_s": 30,
    "local_sgd": {"steps": STEPS, **OUTER},
}


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


@contextmanager
def opened(
    settings: dict[str, Any], model: nn.Sequential | None = None
) -> Iterator[tuple[Strategy, nn.Sequential, nn.Module, Optimizer]]:
    """Open a strategy that may be closed within a round, with a model, also as it is prepared, and its optimizer."""
    model = model or net()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the run has ended within a round")
        with unitrain.init(**merged(SETTINGS, settings)) as strategy:
            yield strategy, model, *strategy.prepare(model, adamw(model))


def rows_of(strategy: Strategy, more: int = 0) -> Tensor:
    """Return inputs that differ between the ranks."""
    return torch.ones(2, 4) * (1 + strategy.rank + more)


def train(folder: str, end: int, backend: str, settings: dict[str, Any]) -> Result:
    """Train up to a step, or to the end of the last epoch."""
    with opened({"backend": backend, **settings}) as (strategy, model, prepared, optimizer):
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
                    if strategy.global_step == end - 1:
                        checkpoint.save()  # where the ranks average next
                    if strategy.global_step == end:
                        strategy.close()
                        return Result(weights, rows[:-1])
            strategy.check_in_sync(prepared)
            weights.append(flat(model).clone())
        return Result(weights, rows[:-1])


def simulate(ranks: list[list[list[int]]]) -> list[Tensor]:
    """Train a model for each of the ranks, given the samples of their steps, and return weights as in ``Result``."""
    workers = [net() for _ in ranks]
    optimizers = [adamw(worker) for worker in workers]
    outer_net = net()
    outer = SGD(outer_net.parameters(), lr=OUTER["outer_lr"], momentum=OUTER["outer_momentum"], nesterov=True)
    shared = list(outer_net.parameters())
    lasts = list(zip(*(worker.parameters() for worker in workers), strict=True))
    _, inputs, targets = data().tensors
    found: list[Tensor] = []
    steps_per_epoch = -(-SAMPLES // BATCH)
    for step, of_ranks in enumerate(zip(*ranks, strict=True)):
        in_epoch = step % steps_per_epoch + 1
        whole = sum(map(len, of_ranks))
        for worker, optimizer, rows in zip(workers, optimizers, of_ranks, strict=True):
            optimizer.zero_grad()
            # Its part of the global batch's mean, times the number of workers.
            mean = (worker(inputs[rows]) - targets[rows]).pow(2).sum() / (2 * whole)
            (len(ranks) * mean).backward()
            optimizer.step()
        if in_epoch == steps_per_epoch or in_epoch % STEPS == 0:
            with torch.no_grad():
                for weight, of_workers in zip(shared, lasts, strict=True):
                    weight.grad = weight - torch.stack(of_workers).mean(0)
                outer.step()
                for weight, of_workers in zip(shared, lasts, strict=True):
                    for last in of_workers:
                        last.copy_(weight)
        if in_epoch == steps_per_epoch:
            found.append(flat(outer_net).clone())
    return found


@pytest.mark.parametrize(
    ("backend", "world", "launcher", "settings"),
    [
        ("ddp", 2, "spawn", {"accumulate": 2}),
        pytest.param("horovod", 2, "horovodrun", {}, marks=HOROVOD),
        ("single", 1, "spawn", {}),
    ],
)
def test_ranks_train_as_simulated_workers_and_go_on_after_a_save(
    backend: str, world: int, launcher: Any, settings: dict[str, Any], tmp_path: Path
) -> None:
    begun = run_ranks(train, str(tmp_path), STEPS, backend, settings, nprocs=world, launcher=launcher)
    resumed = run_ranks(train, str(tmp_path), 0, backend, settings, nprocs=world, launcher=launcher)
    assert [len(one.rows) for one in begun + resumed] == [STEPS] * world + [22 - STEPS] * world
    expected = simulate([one.rows + other.rows for one, other in zip(begun, resumed, strict=True)])
    for one in resumed:
        torch.testing.assert_close(one.weights, expected, rtol=0, atol=1e-9)


def go_on(folder: str, force: bool) -> Tensor:
    with opened({}) as (strategy, model, prepared, optimizer):
        checkpoint = strategy.checkpoint(folder, model=prepared, optimizer=optimizer)
        checkpoint.resume(force=force)
        strategy.check_in_sync(prepared)
        return flat(model)


def save_one(folder: str) -> Tensor:
    with opened({}) as (strategy, _, prepared, optimizer):
        checkpoint = strategy.checkpoint(folder, model=prepared, optimizer=optimizer)
        for _ in range(STEPS):
            strategy.step(prepared(rows_of(strategy)).sum(), optimizer)
        checkpoint.save()
        return flat(strategy.export(prepared))


def test_other_ranks_are_refused_unless_forced(tmp_path: Path) -> None:
    shared, _ = run_ranks(save_one, str(tmp_path))
    said = "has those of 2 ranks, not of 1: resume with 2 processes, or with"
    with pytest.raises(CheckpointError, match=said):
        run_ranks(go_on, str(tmp_path), False, nprocs=1)
    [found] = run_ranks(go_on, str(tmp_path), True, nprocs=1)
    assert torch.equal(found, shared)


def not_finite() -> tuple[str, Tensor]:
    with opened({"on_nonfinite": "raise"}) as (strategy, model, prepared, optimizer):
        before = flat(model)
        with pytest.raises(UsageError, match=r"strategy\.step"):
            optimizer.step()

        def steps() -> None:
            for step in range(2 * STEPS):
                loss = prepared(rows_of(strategy)).sum()
                strategy.step(loss * torch.nan if (step, strategy.rank) == (1, 1) else loss, optimizer)
                assert not torch.equal(flat(model), before)

        with pytest.raises(NonFiniteError) as raised:
            steps()
        strategy.check_in_sync(prepared)
        return str(raised.value), flat(model) - before


def test_all_ranks_end_with_shared_weights_after_a_round_in_which_one_has_no_finite_loss() -> None:
    for message, moved in run_ranks(not_finite):
        where = f"not finite within the {STEPS} steps up to step {STEPS}: the loss of rank 1; first affected"
        assert message.startswith(where)
        assert not moved.any()


def stopped(folder: str) -> int:
    with opened({}) as (strategy, _, prepared, optimizer):
        strategy.checkpoint(folder, model=prepared, optimizer=optimizer)

        def steps() -> None:
            for step in range(30):
                if (step, strategy.rank) == (1, 1):
                    os.kill(os.getpid(), signal.SIGTERM)
                strategy.step(prepared(rows_of(strategy)).sum(), optimizer)

        with pytest.raises(Stopped):
            steps()
        strategy.check_in_sync(prepared)
        return strategy.global_step


def test_a_signal_stops_the_run_at_the_end_of_a_round(tmp_path: Path) -> None:
    first, second = run_ranks(stopped, str(tmp_path))
    assert first == second
    assert first % STEPS == 0
    assert (tmp_path / f"step-{first:010}" / "manifest.json").exists()


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"sync_batchnorm": True}, "sync_batchnorm"),
        ({"memory_copies": {"every": 2}}, "memory_copies.every"),
        ({"shard_optimizer": True}, "shard_optimizer"),
        ({"compression": "powersgd"}, "compression"),
        ({"precision": "fp16"}, "precision"),
        ({"on_nonfinite": "skip"}, "on_nonfinite"),
        ({"local_sgd": {"steps": 1, "outer_lr": 0.5}}, "outer_lr"),
    ],
)
def test_settings_that_exclude_rounds(settings: dict[str, Any], name: str) -> None:
    with pytest.raises(ConfigError, match=rf"local_sgd\.steps is .*{name} is .*mutually exclusive"):
        unitrain.init(**merged({"backend": "single", "local_sgd": {"steps": 4}}, settings))


def test_fsdp_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"Backend fsdp does not support local_sgd\.steps 4: each rank must"):
        unitrain.init(backend="fsdp", device="cpu", local_sgd={"steps": 4})


class Counting(nn.Module):
    """Has a buffer that a forward changes, differently on each rank."""

    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros((), dtype=torch.float64))

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.total = self.total + inputs.detach().sum()
        return inputs


def buffers() -> list[float]:
    """Return a buffer that counts the forwards of rank 0 and twice those of rank 1, after each step of two rounds."""
    with opened({}, nn.Sequential(counting := Counting(), net())) as (strategy, _, prepared, optimizer):
        totals = []
        for _ in range(2 * STEPS):
            strategy.step(prepared(torch.full((1 + strategy.rank, 4), 0.25)).sum(), optimizer)
            totals.append(counting.total.item())
    return totals


def test_buffers_are_each_ranks_own_within_a_round_and_rank_0s_after_it() -> None:
    # As a broadcast in every step would make them, they are equal only where a round ends.
    assert run_ranks(buffers) == [[1.0, 2.0, 3.0, 4.0, 5.0, 6.0], [2.0, 4.0, 3.0, 5.0, 7.0, 6.0]]


def test_what_needs_equal_weights_is_refused_within_a_round() -> None:
    with opened({}) as (strategy, model, prepared, optimizer):
        strategy.step(prepared(torch.ones(2, 4)).sum(), optimizer)
        other = SGD(model.parameters(), lr=0.1)
        within = r"called after step 1 of a round of 3 \(local_sgd.steps\)"
        for call, said in (
            (lambda: strategy.evaluation(prepared).__enter__(), within),
            (lambda: strategy.export(prepared), within),
            (lambda: strategy.save(prepared, "model.pt"), within),
            (lambda: save_weights(strategy, prepared, "weights"), within),
            (lambda: load_weights(strategy, prepared, "weights"), within),
            (lambda: strategy.check_in_sync(prepared), within),
            (lambda: strategy.add(EMA(prepared)), "an EMA averages weights after each step, and with local_sgd, ranks"),
            (lambda: strategy.step(prepared(torch.ones(2, 4)).sum(), other), "local_sgd supports one optimizer: give"),
        ):
            with pytest.raises(UsageError, match=said):
                call()
        with pytest.warns(UserWarning, match=r"its last 1 steps were not averaged over the ranks"):
            strategy.close()


def test_a_parameter_that_is_unfrozen_within_a_round_is_refused() -> None:
    frozen = net()
    frozen[0].requires_grad_(False)
    with opened({}, frozen) as (strategy, model, prepared, optimizer):
        strategy.step(prepared(torch.ones(2, 4)).sum(), optimizer)
        strategy.step(prepared(torch.ones(2, 4)).sum(), optimizer)
        model.requires_grad_(True)
        with pytest.raises(
            UsageError, match="a parameter was unfrozen within a round of local_sgd: change it after an"
        ):
            strategy.step(prepared(torch.ones(2, 4)).sum(), optimizer)
