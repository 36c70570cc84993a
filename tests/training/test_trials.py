"""Trials: runs within a run, each the same alone and after others, and resumed on any number of ranks."""

from __future__ import annotations

import gc
import os
import signal
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from needs import FSDP, HOROVOD
from ranks import on_ranks, run_ranks
from torch import nn

import unitrain
from unitrain import Stopped, UsageError
from unitrain.features.ema import EMA

DATA = torch.randn(24, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
BACKENDS = ["ddp", pytest.param("horovod", marks=HOROVOD), pytest.param("fsdp", marks=FSDP)]


class Pruned(Exception):
    pass


def start(backend: str = "single", **settings: Any) -> unitrain.Strategy:
    return unitrain.init(backend=backend, device="cpu", precision="fp64", timeout_s=30, seed=5, **settings)


def made(strategy: unitrain.Strategy) -> tuple[Any, Any]:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    return strategy.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return (model(batch) - batch.sum(1, keepdim=True).sin()).square().mean()


def fold(strategy: unitrain.Strategy, number: int, folder: Path | None, at: dict[tuple[int, int], Any]) -> list[float]:
    """Train a fold. Return its weights, score and last step.

    Args:
        strategy: of the run.
        number: of the fold.
        folder: of its checkpoints, if it has any.
        at: what is called at a step of a fold, given both.
    """
    held = torch.arange(24) % 3 == number
    model, optimizer = made(strategy)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    train = strategy.dataloader(DATA[~held], global_batch_size=4, shuffle=True)
    ema, state = strategy.add(EMA(model, decay=0.5)), {"score": 0.0}
    if folder is not None:
        objects = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "train": train, "ema": ema}
        checkpoint = strategy.checkpoint(folder / str(number), state=state, **objects)
        checkpoint.resume()
    for _ in train.epochs(3):
        for batch in train:
            at.get((number, strategy.global_step), int)()
            strategy.step(loss_of(model, batch), optimizer, scheduler)
        with strategy.evaluation(ema):
            val = strategy.dataloader(DATA[held], batch_size=4)
            state["score"] = float(torch.cat([strategy.gather(model(batch)) for batch in val]).square().mean())
        if folder is not None:
            checkpoint.save()
    weights = torch.cat([strategy.full_tensor(p.detach()).flatten() for p in model.parameters()])
    return [*weights.tolist(), state["score"], strategy.global_step]


def folds(backend: str, numbers: list[int], folder: Path | None = None, at: Any = None) -> list[list[float]]:
    with start(backend) as strategy:
        torch.manual_seed(3)
        results = []
        for number in numbers:
            with strategy.trial(f"fold-{number}") as trial:
                assert (strategy.global_step, strategy.config.seed) == (0, trial.seed)
                results.append(fold(strategy, number, folder, at or {}))
            assert (strategy.global_step, strategy.config.seed) == (0, 5)
        assert float(torch.rand(())) == float(torch.rand((), generator=torch.Generator().manual_seed(3)))
        return results


def killed(backend: str, folder: Path) -> None:
    folds(backend, [0, 1, 2], folder, {(1, 6): lambda: os.kill(os.getpid(), signal.SIGKILL)})


@pytest.mark.parametrize("backend", BACKENDS)
def test_folds_that_are_killed_go_on_on_another_number_of_ranks(backend: str, tmp_path: Path) -> None:
    with pytest.raises(Exception, match="SIGKILL|signal 9"):
        run_ranks(killed, backend, tmp_path)
    expected = torch.tensor(folds("single", [0, 1, 2]))
    for resumed in run_ranks(folds, backend, [0, 1, 2], tmp_path, nprocs=3):
        torch.testing.assert_close(torch.tensor(resumed), expected, rtol=0, atol=1e-9)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1", "2"]


@pytest.mark.parametrize("backend", BACKENDS)
@on_ranks()
def test_a_fold_is_the_same_alone_and_after_others(backend: str) -> None:
    every = folds(backend, [0, 1, 2])
    assert len({weights for weights, *_ in every}) == 3
    assert folds(backend, [1]) == [every[1]]


@pytest.mark.parametrize("backend", BACKENDS)
@on_ranks()
def test_memory_is_free_after_a_trial(backend: str, tmp_path: Path) -> None:
    """Also if it is pruned, within an accumulation window and a loop. The next one is the same as alone."""

    def train(strategy: unitrain.Strategy, pruned_at: int) -> list[float]:
        model, optimizer = made(strategy)
        ema = strategy.add(EMA(model, decay=0.5))
        shared.extend(map(weakref.ref, (model, strategy.unwrap(model), optimizer, ema, ema.averages[0])))
        loader = strategy.dataloader(DATA, global_batch_size=8, shuffle=True)
        checkpoint = strategy.checkpoint(tmp_path / str(len(results)), model=model, partial=True)
        for number, batch in enumerate(loader):
            if number == pruned_at:
                raise Pruned
            strategy.backward(loss_of(model, batch), optimizer)
            if number == pruned_at - 1:
                raise Pruned
            strategy.update(optimizer)
        checkpoint.save()
        return torch.cat([strategy.full_tensor(p.detach()).flatten() for p in model.parameters()]).tolist()

    shared: list[weakref.ref[Any]] = []
    results = []
    with start(backend, accumulate=2, on_spike="skip") as strategy:
        for pruned_at in (-9, 2, 3, 4, -9):
            try:
                with strategy.trial("a"):
                    results.append(train(strategy, pruned_at))
            except Pruned:
                results.append([])
                continue
            gc.collect()
            assert [reference() for reference in shared] == [None] * len(shared)
            shared.clear()
        assert [*strategy._step.windows] == []
    assert results[0] == results[4]


def prune_alone() -> None:
    with start("ddp") as strategy:
        for name in ("a", "b"):
            try:
                with strategy.trial(name):
                    model, optimizer = made(strategy)
                    for batch in strategy.dataloader(DATA, global_batch_size=8):
                        if strategy.is_main:
                            raise Pruned
                        strategy.step(loss_of(model, batch), optimizer)
            except Pruned:
                pass


def test_a_rank_that_prunes_a_trial_alone_is_named() -> None:
    with pytest.raises(Exception, match=r"rank 0 .*in trial\('b', seed=\d+\) after step 0.*rank 1 .*must make the same"):
        run_ranks(prune_alone)


def signalled(folder: Path) -> None:
    with start("ddp") as strategy:
        state = {"folds": 0}
        outer = strategy.checkpoint(folder / "all", state=state)
        outer.resume()
        for number in range(state["folds"], 2):
            with strategy.trial(str(number)):
                at = {(1, 4): lambda: os.kill(os.getpid(), signal.SIGTERM)}
                fold(strategy, number, folder if number else None, at)
            state["folds"] += 1
            outer.save()


def test_a_signal_saves_the_checkpoint_of_the_trial(tmp_path: Path) -> None:
    pass


def test_what_is_begun_outside_is_not_used_within() -> None:
    pass
