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
from plain_loop import weights as flat
from ranks import on_ranks, run_ranks
from safetensors.torch import load_file
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
STREAMED: dict[str, Any] = {"local_sgd": {"steps": 7, "fragments": 3}}
FRAGMENTS = [[0], [2], [1, 3]]  # the largest parameter first, each to the smallest fragment
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
    shared: list[Tensor]
    """In an evaluation after each step, if there are fragments."""
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
        shared: list[Tensor] = []
        rows: list[list[int]] = [[]]
        for _ in loader.epochs(EPOCHS):
            for numbers, inputs, targets in loader:
                rows[-1] += numbers.tolist()
                if strategy.step(mse_loss(prepared(inputs), targets), optimizer).stepped:
                    rows.append([])
                    if settings.get("local_sgd", {}).get("fragments", 1) > 1:
                        strategy.check_in_sync(prepared)
                        with strategy.evaluation(prepared):
                            shared.append(flat(model).clone())
                    if strategy.global_step == end - 1:
                        checkpoint.save()  # where the ranks average next
                    if strategy.global_step == end:
                        strategy.close()
                        return Result(weights, shared, rows[:-1])
            strategy.check_in_sync(prepared)
            weights.append(flat(model).clone())
        return Result(weights, shared, rows[:-1])


def simulate(ranks: list[list[list[int]]], local_steps: int, fragments: list[list[int]]) -> Result:
    """Train a model for each of the ranks, given the samples of their steps."""
    workers = [net() for _ in ranks]
    optimizers = [adamw(worker) for worker in workers]
    outer_net = net()
    outer = SGD(outer_net.parameters(), lr=OUTER["outer_lr"], momentum=OUTER["outer_momentum"], nesterov=True)
    shared = list(outer_net.parameters())
    lasts = list(zip(*(worker.parameters() for worker in workers), strict=True))
    _, inputs, targets = data().tensors
    found, steps_per_epoch = Result([], [], []), -(-SAMPLES // BATCH)
    under_way: dict[int, Tensor] = {}

    def differences(numbers: list[int]) -> dict[int, Tensor]:
        return {n: (shared[n] - torch.stack(lasts[n]).mean(0)).detach() for n in numbers}

    @torch.no_grad()
    def take(gradients: dict[int, Tensor], mixed: float) -> None:
        for n, gradient in gradients.items():
            shared[n].grad = gradient
        outer.step()
        outer.zero_grad()
        for n in gradients:
            for last in lasts[n]:
                last.copy_(mixed * shared[n] + (1 - mixed) * last)

    for step, of_ranks in enumerate(zip(*ranks, strict=True)):
        in_epoch = step % steps_per_epoch + 1
        whole = sum(map(len, of_ranks))
        for worker, optimizer, rows in zip(workers, optimizers, of_ranks, strict=True):
            optimizer.zero_grad()
            # Its part of the global batch's mean, times the number of workers.
            mean = (worker(inputs[rows]) - targets[rows]).pow(2).sum() / (2 * whole)
            (len(ranks) * mean).backward()
            optimizer.step()
        sent = in_epoch * len(fragments) // local_steps
        if len(fragments) > 1 and sent > (in_epoch - 1) * len(fragments) // local_steps:
            take(under_way, 0.5)
            under_way = differences(fragments[(sent - 1) % len(fragments)])
        found.shared.append(flat(outer_net).clone())
        if in_epoch == steps_per_epoch or (len(fragments) == 1 and in_epoch % local_steps == 0):
            take(under_way, 0.5)
            take(differences(list(range(len(shared)))), 1.0)
            under_way = {}
        if in_epoch == steps_per_epoch:
            found.weights.append(flat(workers[0]).clone())
    return found


@pytest.mark.parametrize(
    ("backend", "world", "settings"),
    [
        ("ddp", 2, {"accumulate": 2}),
        ("ddp", 2, {"accumulate": 2, **STREAMED}),
        pytest.param("horovod", 2, STREAMED, marks=HOROVOD),
        ("single", 1, {}),
    ],
)
def test_ranks_train_as_simulated_workers_and_go_on_after_a_save(
    backend: str, world: int, settings: dict[str, Any], tmp_path: Path
) -> None:
    schedule = settings.get("local_sgd", {})
    fragments = FRAGMENTS if "fragments" in schedule else [[0, 1, 2, 3]]
    local_steps = schedule.get("steps", STEPS)
    end = 5 if "fragments" in schedule else STEPS  # where the second fragment is sent, and the first one taken
    begun = run_ranks(train, str(tmp_path), end, backend, settings, nprocs=world)
    resumed = run_ranks(train, str(tmp_path), 0, backend, settings, nprocs=world)
    assert [len(one.rows) for one in begun + resumed] == [end] * world + [22 - end] * world
    expected = simulate(
        [one.rows + other.rows for one, other in zip(begun, resumed, strict=True)], local_steps, fragments
    )
    for first, then in zip(begun, resumed, strict=True):
        torch.testing.assert_close(then.weights, expected.weights, rtol=0, atol=1e-9)
        if len(fragments) > 1:
            torch.testing.assert_close(first.shared + then.shared, expected.shared, rtol=0, atol=1e-9)


def go_on(folder: str, settings: dict[str, Any], force: bool) -> Tensor:
    with opened(settings) as (strategy, model, prepared, optimizer):
        checkpoint = strategy.checkpoint(folder, model=prepared, optimizer=optimizer)
        checkpoint.resume(force=force)
        strategy.check_in_sync(prepared)
        return flat(model)


def save_one(folder: str, settings: dict[str, Any]) -> Tensor:
    with opened(settings) as (strategy, _, prepared, optimizer):
        checkpoint = strategy.checkpoint(folder, model=prepared, optimizer=optimizer)
        for _ in range(STEPS):
            strategy.step(prepared(rows_of(strategy)).sum(), optimizer)
        checkpoint.save()
        return flat(strategy.export(prepared))


@pytest.mark.parametrize(
    ("before", "after", "nprocs", "said"),
    [
        (1, 1, 1, r"has those of 2 ranks, not of 1: resume with 2 processes, or with"),
        (2, 2, 1, r"has those of 2 ranks, not of 1: resume with 2 processes, or with"),
        (2, 3, 2, r"strategy\.local_sgd\.fragments was 2 and is now 3"),
    ],
)
def test_other_ranks_and_fragments_are_refused_unless_forced(
    before: int, after: int, nprocs: int, said: str, tmp_path: Path
) -> None:
    shared, _ = run_ranks(save_one, str(tmp_path), {"local_sgd": {"fragments": before}})
    settings = {"local_sgd": {"fragments": after}}
    with pytest.raises(CheckpointError, match=said):
        run_ranks(go_on, str(tmp_path), settings, False, nprocs=nprocs)
    for found in run_ranks(go_on, str(tmp_path), settings, True, nprocs=nprocs):
        assert torch.equal(found, shared)


@pytest.mark.parametrize(("settings", "steps"), [({}, STEPS), ({"local_sgd": {"steps": 4, "fragments": 2}}, 4)])
@on_ranks()
def test_all_ranks_end_with_shared_weights_after_a_round_in_which_one_has_no_finite_loss(
    settings: dict[str, Any], steps: int
) -> None:
    with opened({**settings, "on_nonfinite": "raise"}) as (strategy, model, prepared, optimizer):
        before = flat(model)
        with pytest.raises(UsageError, match=r"strategy\.step"):
            optimizer.step()

        def train_on() -> None:
            for step in range(2 * STEPS):
                loss = prepared(rows_of(strategy)).sum()
                strategy.step(loss * torch.nan if (step, strategy.rank) == (1, 1) else loss, optimizer)
                assert not torch.equal(flat(model), before)

        said = f"^not finite within the {steps} steps up to step {steps}: the loss of rank 1; first affected"
        with pytest.raises(NonFiniteError, match=said):
            train_on()
        strategy.check_in_sync(prepared)
        assert torch.equal(flat(model), before)


def stopped(folder: str, settings: dict[str, Any]) -> int:
    with opened(settings) as (strategy, _, prepared, optimizer):
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


@pytest.mark.parametrize(
    "settings", [{}, {"local_sgd": {"steps": 6, "fragments": 2}}], ids=["at its end", "where a fragment is sent"]
)
def test_a_signal_stops_a_round(settings: dict[str, Any], tmp_path: Path) -> None:
    first, second = run_ranks(stopped, str(tmp_path), settings)
    assert first == second
    assert first % STEPS == 0
    assert (tmp_path / f"step-{first:010}" / "manifest.json").exists()


def stopped_in_an_evaluation(folder: str, resumes: bool) -> tuple[Tensor, Tensor]:
    """Return this rank's weights and the shared ones, of when it was stopped, or as they are resumed.

    The last loss before the stop is NaN on rank 1.
    """
    settings = {"local_sgd": {"steps": 4, "fragments": 2}, "on_nonfinite": "raise"}
    with opened(settings) as (strategy, model, prepared, optimizer):
        loader = strategy.dataloader(data(), global_batch_size=BATCH)
        checkpoint = strategy.checkpoint(folder, model=prepared, optimizer=optimizer)

        def steps(first: int, end: int) -> None:
            for step in range(first, end):
                loss = prepared(rows_of(strategy, step)).sum()
                strategy.step(loss * torch.nan if (step, strategy.rank) == (4, 1) else loss, optimizer)

        if not resumes:
            steps(0, 5)
        assert checkpoint.resume() == resumes
        own = flat(model).clone()
        with strategy.evaluation(prepared):
            shared = flat(model).clone()
            with pytest.raises(UsageError, match="a step was made within evaluation"), torch.enable_grad():
                strategy.step(prepared(torch.ones(2, 4)).sum(), optimizer)

        def evaluations() -> None:
            with strategy.evaluation(prepared):
                os.kill(os.getpid(), signal.SIGTERM)
                for _ in range(100):
                    for _ in loader:
                        assert torch.equal(flat(model), shared)

        if not resumes:
            with pytest.raises(Stopped):
                evaluations()
        assert torch.equal(flat(model), own)
        if resumes:
            with pytest.raises(NonFiniteError, match="within the 6 steps up to step 8"):
                steps(5, 10)
        return own, shared


def test_what_a_signal_saves_in_an_evaluation_within_a_round(tmp_path: Path) -> None:
    saved = run_ranks(stopped_in_an_evaluation, str(tmp_path), False)
    assert not torch.equal(saved[0][0], saved[1][0])
    assert torch.equal(saved[0][1], saved[1][1])
    for found, expected in zip(run_ranks(stopped_in_an_evaluation, str(tmp_path), True), saved, strict=True):
        assert all(map(torch.equal, found, expected))


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
        ({"local_sgd": {"steps": 1, "fragments": 2}}, "fragments"),
        ({"local_sgd": {"fragments": 5}}, "fragments"),
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


@on_ranks()
def test_evaluation_and_exports_have_the_shared_weights_within_a_round_with_fragments(tmp_path: Path) -> None:
    folder, settings = tmp_path / "weights", {"local_sgd": {"steps": 4, "fragments": 2}}
    counting = nn.Sequential(net(), Counting())
    with opened(settings, counting) as (strategy, model, prepared, optimizer):
        for step in range(5):
            strategy.step(prepared(rows_of(strategy, step)).sum(), optimizer)
        own = flat(model).clone()
        strategy.check_in_sync(prepared)
        with strategy.evaluation(prepared):
            shared = flat(model).clone()
            strategy.check_in_sync(prepared)
            assert torch.equal(flat(strategy.export(prepared)), shared)
        assert not torch.equal(own, shared)
        assert torch.equal(flat(strategy.export(prepared)), shared)
        save_weights(strategy, prepared, folder)
        with pytest.raises(UsageError, match=r"save\(\) was called after step 1 of a round of 4 .*after the epoch"):
            strategy.save(prepared, f"{folder}/model.pt")
        assert torch.equal(flat(model), own)
        with pytest.raises(UsageError, match=r"load_weights\(\) was called after step 1 of a round of 4"):
            load_weights(strategy, prepared, folder)
        saved = load_file(f"{folder}/model.safetensors")
        assert torch.equal(torch.cat([saved[name].reshape(-1) for name, _ in model.named_parameters()]), shared)


@on_ranks()
def test_buffers_are_each_ranks_own_within_a_round_and_rank_0s_after_it() -> None:
    """The buffer counts the forwards of rank 0 and twice those of rank 1."""
    with opened({}, nn.Sequential(counting := Counting(), net())) as (strategy, _, prepared, optimizer):
        totals = []
        for _ in range(2 * STEPS):
            strategy.step(prepared(torch.full((1 + strategy.rank, 4), 0.25)).sum(), optimizer)
            totals.append(counting.total.item())
        # As a broadcast in every step would make them, they are equal only where a round ends.
        assert totals == ([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], [2.0, 4.0, 3.0, 5.0, 7.0, 6.0])[strategy.rank]


def test_what_needs_equal_weights_is_refused_within_a_round() -> None:
    with opened({}) as (strategy, model, prepared, optimizer):
        strategy.step(prepared(torch.ones(2, 4)).sum(), optimizer)
        other = SGD(model.parameters(), lr=0.1)
        within = r"called after step 1 of a round of 3 \(local_sgd.steps\)"
        for call, said in (
            (lambda: strategy.evaluation(prepared).__enter__(), within),
            (lambda: strategy.export(prepared), within),
            (lambda: strategy.check_in_sync(prepared), within),
            (lambda: strategy.add(EMA(prepared)), "an EMA averages weights after each step, and with local_sgd, ranks"),
            (lambda: strategy.step(prepared(torch.ones(2, 4)).sum(), other), "local_sgd supports one optimizer: give"),
        ):
            with pytest.raises(UsageError, match=said):
                call()
        with pytest.warns(UserWarning, match=r"its last 1 steps were not averaged over the ranks"):
            strategy.close()


def test_fragments_of_no_parameters_are_refused() -> None:
    with opened({"local_sgd": {"steps": 8, "fragments": 5}}) as (strategy, _, prepared, optimizer):
        said = "fragments is 5, but only 4 parameters are trained, and each fragment needs one: set it to fewer"
        with pytest.raises(UsageError, match=said):
            strategy.step(prepared(torch.ones(2, 4)).sum(), optimizer)


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
