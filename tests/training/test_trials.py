"""Trials: runs within a run, each the same alone and after others, and resumed on any number of ranks."""

from __future__ import annotations

import gc
import os
import re
import signal
import weakref
from contextlib import suppress
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
OTHERS = [
    pytest.param("horovod", marks=[HOROVOD, pytest.mark.all("another backend")]),
    pytest.param("fsdp", marks=[FSDP, pytest.mark.all("another backend")]),
]
BACKENDS = ["ddp", pytest.param("horovod", marks=HOROVOD), pytest.param("fsdp", marks=FSDP)]


class PrunedError(Exception):
    pass


def start(backend: str = "single", **settings: Any) -> unitrain.Strategy:
    return unitrain.init(backend=backend, device="cpu", precision="fp64", timeout_s=30, seed=5, **settings)


def made(strategy: unitrain.Strategy) -> tuple[Any, Any]:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    return strategy.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.mse_loss(model(batch), batch.sum(1, keepdim=True).sin())


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


@pytest.mark.parametrize("backend", ["ddp", *OTHERS])
def test_folds_that_are_killed_go_on_on_another_number_of_ranks(backend: str, tmp_path: Path) -> None:
    with pytest.raises(Exception, match=r"SIGKILL|signal 9"):
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
    with unitrain.init(backend=backend, device="cpu", precision="fp64", timeout_s=30, seed=7) as strategy:
        alone = fold(strategy, 1, None, {})
    with start(backend) as strategy, strategy.trial("a", seed=7):
        assert fold(strategy, 1, None, {}) == alone


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
                raise PrunedError
            strategy.backward(loss_of(model, batch), optimizer)
            if number == pruned_at - 1:
                raise PrunedError
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
            except PrunedError:
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
                            raise PrunedError
                        strategy.step(loss_of(model, batch), optimizer)
            except PrunedError:
                pass


def test_a_rank_that_prunes_a_trial_alone_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(Exception, match="rank"):
        run_ranks(prune_alone, fresh=True)
    said = capfd.readouterr().out
    assert re.search(r"rank 0 .* is in trial\('b', seed=\d+\) after step 0.* rank 1 is in step .* the same calls", said)


def signalled(folder: Path, stopped_at: int) -> list[list[float]]:
    """Train two folds, and keep their scores outside. A signal stops the second one, or the training after it."""
    state: dict[str, list[list[float]]] = {"scores": []}
    with start("ddp") as strategy:

        def stop() -> None:
            if strategy.is_main:
                os.kill(os.getpid(), signal.SIGTERM)

        with suppress(Stopped):
            model, optimizer = made(strategy)
            outer = strategy.checkpoint(folder / "all", state=state, model=model, optimizer=optimizer)
            outer.resume()
            for number in range(len(state["scores"]), 2):
                with strategy.trial(f"fold-{number}"):
                    state["scores"].append(fold(strategy, number, folder, {(1, stopped_at): stop}))
                outer.save()
            for step in range(9):
                if step == 3:
                    stop()
                strategy.step(loss_of(model, DATA[:4]), optimizer)
        return state["scores"]


def test_signals_save_the_checkpoint_of_the_trial_and_after_it_that_of_the_run(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    expected = folds("single", [0, 1])
    for stopped_at, done, where in (
        (4, 1, "[4-6] of trial 'fold-1' and saved in \\S+/1/step-"),
        (-1, 2, "[4-7] and saved in \\S+/all/"),
    ):
        for scores in run_ranks(signalled, tmp_path, stopped_at):
            torch.testing.assert_close(torch.tensor(scores), torch.tensor(expected[:done]), rtol=0, atol=1e-9)
        said = capfd.readouterr().out
        assert re.search(f"stopped by SIGTERM after step {where}", said), said


def test_what_is_begun_outside_is_not_used_within(tmp_path: Path) -> None:
    with start() as strategy:
        model, optimizer = made(strategy)
        loader = strategy.dataloader(DATA, global_batch_size=8)
        outer = strategy.checkpoint(tmp_path, model=model, optimizer=optimizer, loader=loader)
        for batch in loader:
            with pytest.raises(UsageError, match=r"trial 'a' was begun within a loop over a loader.*begin it after"):
                strategy.trial("a").__enter__()
            strategy.step(loss_of(model, batch), optimizer)
        with strategy.trial("a", seed=7) as trial:
            assert (trial.name, trial.seed, strategy.config.seed, strategy.global_step) == ("a", 7, 7, 0)
            for call in outer.save, outer.resume, outer.close:
                with pytest.raises(UsageError, match=rf"{call.__name__}\(\) was called within a trial"):
                    call()
            with pytest.raises(UsageError, match=r"the loader that was made at \S+:\d+ belongs to another"):
                next(iter(loader))
            with strategy.evaluation(model):
                assert len(list(loader)) == 3
            with pytest.raises(UsageError, match="within trial 'a': leave it first"):
                strategy.close()
            with strategy.trial("b") as inner:
                assert inner.name == "a/b"
                theirs, steps = made(strategy)
                for batch in iter(made_in := strategy.dataloader(DATA, global_batch_size=8)):
                    strategy.backward(loss_of(theirs, batch))  # for this optimizer only
                    strategy.update(steps)
                left_open = iter(strategy.dataloader(DATA, global_batch_size=8))
                strategy.step(loss_of(theirs, next(left_open)), steps)
                assert strategy.global_step == 4
            assert strategy.global_step == 0
        with pytest.raises(UsageError, match="belongs to another trial"):
            next(iter(made_in))
        strategy.export(theirs)
        assert strategy.global_step == 3
        for batch in loader:
            strategy.step(loss_of(model, batch), optimizer)
        outer.save()
        with pytest.raises(UsageError, match="Modules of a trial are forgotten at its end"):
            strategy.step(loss_of(theirs, DATA), steps)
    assert {path.name for path in tmp_path.glob("step-*")} == {"step-0000000006"}


class Counts(unitrain.Feature):
    name = "counts"

    def __init__(self) -> None:
        self.steps, self.said = 0, ""

    def after_update(self, optimizer: Any, parameters: Any, stepped: bool) -> None:
        self.steps += 1

    def forbids(self, norm: float) -> bool:
        return self.steps > 5

    def at_end(self) -> None:
        self.said += "end "

    def at_close(self) -> None:
        self.said += "close "


def test_features_that_a_trial_adds_end_with_it_and_others_go_on() -> None:
    with start(on_spike="skip") as strategy:
        outer = strategy.add(Counts())
        for name in ("a", "b"):
            with suppress(PrunedError), strategy.trial(name):
                inner = Counts()
                inner.name = "others"
                strategy.add(inner)
                model, optimizer = made(strategy)
                assert [strategy.step(loss_of(model, DATA), optimizer).skipped for _ in range(3)] == [False] * 3
                norms = strategy._sockets.states.collect()["spikes"]["norms"]
                assert (outer.steps, inner.steps, len(norms)) == (3 if name == "a" else 6, 3, 3)
                if name == "b":
                    raise PrunedError
            assert inner.said == ("end close " if name == "a" else "close ")
            assert strategy._sockets.states.collect().keys() == {"spikes", "counts"}
            assert strategy._sockets.states.collect()["spikes"]["norms"] == []
    assert outer.said == "end close "


def test_rounds_of_local_sgd_end_with_a_trial() -> None:
    run_ranks(rounds)


def rounds() -> None:
    with start("ddp", local_sgd={"steps": 4}) as strategy:
        results = []
        for name in ("a", "b", "a"):
            with strategy.trial(name):
                model, optimizer = made(strategy)
                for _ in range(6):
                    strategy.step(loss_of(model, DATA[strategy.rank :: 2]), optimizer)
            strategy.check_in_sync(model)
            results.append(model[0].weight.sum().item())
        assert results[0] == results[2] != results[1]
