"""``Profile``: a trace of each rank, on every backend, and what it leaves behind."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from needs import HOROVOD
from ranks import run_ranks
from torch import nn
from torch.utils.data import TensorDataset

import unitrain
from unitrain import Strategy, UsageError
from unitrain.features.profile import Profile


def nothing(strategy: Strategy, step: int) -> None:
    pass


def train(strategy: Strategy, steps: int, each: Callable[[Strategy, int], None] = nothing) -> list[float]:
    """Train in steps of 8 samples, call ``each`` after each, and return the weights."""
    torch.manual_seed(0)
    rows = TensorDataset(torch.randn(8 * steps, 4))
    model = nn.Linear(4, 1)
    prepared, optimizer = strategy.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for (inputs,) in strategy.dataloader(rows, global_batch_size=8):
        if strategy.step(prepared(inputs).square().mean(), optimizer).stepped:
            each(strategy, strategy.global_step)
    return model.weight.flatten().tolist()


def names(file: Path) -> list[str]:
    """Return the names of the events in a trace."""
    with gzip.open(file) as trace:
        return [event["name"] for event in json.load(trace)["traceEvents"]]


def profiled(folder: Path, backend: str, ranks: list[int] | None) -> list[float]:
    with unitrain.init(backend=backend, device="cpu", accumulate=2) as strategy:
        strategy.add(Profile(folder, steps=2, skip=2, ranks=ranks))

        def each(strategy: Strategy, step: int) -> None:
            if step == 3:
                strategy.all_reduce(torch.ones(1))
                strategy.checkpoint(folder / "checkpoints", partial=True).save()

        return train(strategy, 6, each)


@pytest.mark.parametrize(
    ("backend", "averaging"),
    [
        ("ddp", {"gloo:all_reduce"}),
        pytest.param("horovod", {"unitrain: gradients.0.0", "unitrain: wait for gradients.0.0"}, marks=HOROVOD),
    ],
)
def test_a_trace_has_what_a_rank_did(tmp_path: Path, backend: str, averaging: set[str]) -> None:
    weights = run_ranks(profiled, tmp_path, backend, None)
    assert weights[0] == weights[1]
    for rank in range(2):
        found = names(tmp_path / f"trace-step3-rank{rank}.json.gz")
        # Two steps of two micro-batches.
        assert [found.count(f"unitrain: {call}") for call in ("backward", "update")] == [4, 4]
        assert found.count("Optimizer.step#SGD.step") == 2
        calls = {"unitrain: checkpoint.save", "unitrain: checkpoint.wait", "unitrain: all_reduce", "aten::addmm"}
        assert averaging | calls <= set(found)


def test_some_ranks_are_recorded_and_no_others(tmp_path: Path) -> None:
    run_ranks(profiled, tmp_path, "ddp", [1])
    assert [file.name for file in tmp_path.glob("trace*")] == ["trace-step3-rank1.json.gz"]


def without_loader(strategy: Strategy, steps: int) -> None:
    model = nn.Linear(4, 1)
    prepared, optimizer = strategy.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(steps):
        strategy.step(prepared(torch.ones(2, 4)).mean(), optimizer)


def test_a_run_pays_nothing_before_and_after(tmp_path: Path) -> None:
    with unitrain.init(device="cpu") as strategy:
        ranks, hooks = strategy.communicator.collectives, vars(strategy._hooks)

        def cost() -> list[Any]:
            calls = ranks.all_reduce_async, ranks.all_gather_async, ranks.broadcast_async, ranks.pulse.mark
            return [*calls, *map(list, hooks.values())]

        before = cost()
        strategy.add(Profile(tmp_path, steps=1, skip=1))
        without_loader(strategy, 3)
        assert cost() == before
        strategy.add(Profile(tmp_path, steps=2, skip=1))
        without_loader(strategy, 3)
    for step, steps in ((2, 1), (5, 2)):
        assert names(tmp_path / f"trace-step{step}-rank0.json.gz").count("unitrain: backward") == steps


def test_a_run_that_ends_early_or_fails_has_a_shorter_trace_or_none(tmp_path: Path) -> None:
    def fail(strategy: Strategy, step: int) -> None:
        if step == 6:
            raise ValueError

    for steps in (4, 7):
        strategy = unitrain.init(device="cpu")
        strategy.add(Profile(tmp_path / str(steps)))
        try:
            with strategy:
                train(strategy, steps, fail)
        except ValueError:
            assert steps == 7
    assert not (tmp_path / "4").exists()
    assert names(tmp_path / "7" / "trace-step5-rank0.json.gz").count("unitrain: backward") == 2
    with torch.profiler.profile():  # a second one would be refused
        pass


def test_training_goes_on_if_the_trace_can_not_be_written(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    with unitrain.init(device="cpu") as strategy:
        strategy.add(Profile(tmp_path / "file", steps=1, skip=1))
        train(strategy, 4)
    assert "a profile could not be written to " in capfd.readouterr().err


def test_no_steps_are_refused(tmp_path: Path) -> None:
    for steps, skip in ((0, 1), (1, 0)):
        with pytest.raises(UsageError, match=f"at least 1, not {steps} and {skip}"):
            Profile(tmp_path, steps=steps, skip=skip)
