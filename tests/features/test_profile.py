"""``Profile``: one trace of several ranks, on every backend, and what it leaves behind."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from needs import GPU, HOROVOD
from ranks import on_ranks, run_ranks
from torch import nn
from torch.utils.data import TensorDataset

import unitrain
from unitrain import Strategy, UsageError
from unitrain.features.profile import Profile, timeline

SHIFT_NS = 10**12
Event = dict[str, Any]


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


def events(file: Path) -> list[Event]:
    with gzip.open(file) as trace:
        found: list[Event] = json.load(trace)["traceEvents"]
    return found


def named(trace: list[Event], name: str, rank: int) -> list[Event]:
    return sorted((e for e in trace if (e["name"], e["pid"]) == (name, rank)), key=lambda event: event["ts"])


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
        pytest.param("horovod", {"unitrain: update"}, marks=HOROVOD),
    ],
)
def test_a_trace_has_a_process_for_each_rank_with_what_it_did(
    tmp_path: Path, backend: str, averaging: set[str]
) -> None:
    weights = run_ranks(profiled, tmp_path, backend, None)
    assert weights[0] == weights[1]
    trace = events(tmp_path / "trace-step3.json.gz")
    for event in trace:
        assert {"ph", "pid", "tid", "name"} <= event.keys()
        assert event["ph"] != "X" or min(event["ts"], event["dur"]) >= 0
    labels = {e["pid"]: e["args"]["name"] for e in trace if e["name"] == "process_name"}
    assert [labels[rank].split(" on ")[0] for rank in sorted(labels)] == ["rank 0", "rank 1"]
    arrows = [e for e in trace if e["ph"] == "s"]
    assert len({(e["cat"], e["id"]) for e in arrows}) == len(arrows) > 0
    for rank in range(2):
        # Two steps of two micro-batches, and the wait for the batch after each.
        assert [len(named(trace, f"unitrain: {call}", rank)) for call in ("backward", "update", "data")] == [4, 4, 4]
        assert len(named(trace, "Optimizer.step#SGD.step", rank)) == 2
        found = {e["name"] for e in trace if e["pid"] == rank}
        assert averaging | {"unitrain: checkpoint.save", "unitrain: all_reduce", "aten::addmm"} <= found
        assert "unitrain: checkpoint.wait" in found


def test_a_trace_of_some_ranks_has_no_others(tmp_path: Path) -> None:
    run_ranks(profiled, tmp_path, "ddp", [1])
    assert {event["pid"] for event in events(tmp_path / "trace-step3.json.gz")} == {1}


def shift_clock(rank: int) -> None:
    """Let the clock of rank 1 be ahead."""
    patch.object(timeline, "monotonic_ns", lambda: time.monotonic_ns() + rank * SHIFT_NS).start()


def profiled_with_other_clocks(folder: Path) -> None:
    with unitrain.init(backend="ddp", device="cpu") as strategy:
        shift_clock(strategy.rank)
        strategy.add(Profile(folder, skip=1))
        train(strategy, 6)


def test_ranks_with_other_clocks_are_on_one_timeline(tmp_path: Path) -> None:
    run_ranks(profiled_with_other_clocks, tmp_path, fresh=True)
    trace = events(tmp_path / "trace-step2.json.gz")
    calls = [named(trace, "unitrain: backward", rank) for rank in range(2)]
    assert len(calls[0]) == len(calls[1]) == 4
    # No backward ends before it has begun on the other rank, whose gradients it needs. A clock is ahead by 1000 s.
    for one, other in (calls, calls[::-1]):
        for ends, begins in zip(one, other, strict=True):
            assert ends["ts"] + ends["dur"] > begins["ts"] - 1e5


def without_loader(strategy: Strategy, steps: int) -> None:
    model = nn.Linear(4, 1)
    prepared, optimizer = strategy.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(steps):
        strategy.step(prepared(torch.ones(2, 4)).mean(), optimizer)


def test_a_run_pays_nothing_before_and_after(tmp_path: Path) -> None:
    with unitrain.init(device="cpu") as strategy:
        pulse, hooks = strategy.communicator.collectives.pulse, vars(strategy._hooks)

        def cost() -> list[Any]:
            return [pulse.mark, *map(list, hooks.values())]

        before = cost()
        strategy.add(Profile(tmp_path, steps=1, skip=1))
        without_loader(strategy, 3)
        assert cost() == before
        strategy.add(Profile(tmp_path, steps=2, skip=1))
        without_loader(strategy, 3)
    for name, steps in (("trace-step2.json.gz", 1), ("trace-step5.json.gz", 2)):
        assert len(named(events(tmp_path / name), "unitrain: backward", 0)) == steps


def test_a_run_that_ends_early_has_a_shorter_trace_or_says_so(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for steps in (3, 4, 6):
        with unitrain.init(device="cpu") as strategy:
            strategy.add(Profile(tmp_path / str(steps)))
            train(strategy, steps)
    assert capfd.readouterr().err.count("nothing was profiled: the run ended after step") == 2
    trace = events(tmp_path / "6" / "trace-step5.json.gz")
    assert len(named(trace, "unitrain: backward", 0)) == 2


def test_a_profile_ends_with_a_run_that_fails(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def fail(strategy: Strategy, step: int) -> None:
        if step == 3:
            raise ValueError

    strategy = unitrain.init(device="cpu")
    strategy.add(Profile(tmp_path, steps=4, skip=1))
    with pytest.raises(ValueError), strategy:
        train(strategy, 4, fail)
    assert "nothing was profiled: the run ended after step 3" in capfd.readouterr().err
    with torch.profiler.profile():  # a second one would be refused
        pass


def unwritable(folder: Path, backend: str) -> list[float]:
    with unitrain.init(backend=backend, device="cpu") as strategy:
        strategy.add(Profile(folder / "gone", steps=1, skip=1))
        strategy.on_main((folder / "gone").rmdir)
        return train(strategy, 4)


def test_training_goes_on_if_the_trace_can_not_be_written(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    weights = run_ranks(unwritable, tmp_path, "ddp")
    assert weights[0] == weights[1]
    unwritable(tmp_path, "single")
    assert "the profile of steps 2 to 2 could not be written to " in capfd.readouterr().err


def test_bad_arguments_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with unitrain.init(device="cpu") as strategy:
        wrong: list[dict[str, Any]] = [{"steps": 0}, {"skip": 0}, {"ranks": [1]}, {"ranks": []}]
        for one in wrong:
            with pytest.raises(UsageError, match=r"some ranks from 0 to 0, not .*/new, "):
                strategy.add(Profile(tmp_path / "new", **one))
        with pytest.raises(UsageError, match="a folder on a disk"):
            strategy.add(Profile("s3://bucket/run"))
        with pytest.raises(UsageError, match=r"profile: .*/file can't be written: .*File exists.* Correct that"):
            strategy.add(Profile(tmp_path / "file"))
        strategy.add(Profile(tmp_path / "new"))
        with pytest.raises(UsageError, match="another profile has not ended"):
            strategy.add(Profile(tmp_path / "new"))
        signal.signal(signal.SIGUSR2, lambda *_: None)
        try:
            with pytest.raises(UsageError, match="SIGUSR2 has a handler already"):
                strategy.add(Profile(tmp_path / "new", on_signal=signal.SIGUSR2))
        finally:
            signal.signal(signal.SIGUSR2, signal.SIG_DFL)


def signalled(folder: Path, backend: str) -> list[float]:
    with unitrain.init(backend=backend, device="cpu", timeout_s=60) as strategy:
        strategy.add(Profile(folder, steps=1, skip=1, on_signal=signal.SIGUSR2))
        last = strategy.world_size - 1

        def each(strategy: Strategy, step: int) -> None:
            if strategy.rank == last and step in (3, 30):
                for _ in range(2):  # a launcher may forward one that this process gets as well
                    os.kill(os.getpid(), signal.SIGUSR2)
            time.sleep(0.01)

        weights = train(strategy, 60, each)
    os.kill(os.getpid(), signal.SIGUSR2)  # does nothing after the run
    return weights


@pytest.mark.parametrize(
    ("backend", "world"),
    [("single", 1), ("ddp", 2), pytest.param("horovod", 2, marks=HOROVOD)],
)
def test_a_signal_to_one_rank_begins_a_profile_of_all_as_often_as_it_comes(
    tmp_path: Path, backend: str, world: int, capfd: pytest.CaptureFixture[str]
) -> None:
    weights = run_ranks(signalled, tmp_path, backend, nprocs=world)
    assert weights[0] == weights[-1]
    assert re.search(
        r"^unitrain: kill -USR2 \d+ on \S+ begins a profile of all ranks\.$", "".join(capfd.readouterr()), re.M
    )
    first, second = sorted(int(file.name[10:].partition(".")[0]) for file in tmp_path.iterdir())
    assert 4 < first < 30 < second
    for number in (first, second):
        trace = events(tmp_path / f"trace-step{number}.json.gz")
        for rank in range(len(weights)):
            assert len(named(trace, "unitrain: backward", rank)) == 1


@pytest.mark.parametrize("nprocs", [1, 2])
@on_ranks()
def test_a_stop_is_not_lost_to_a_profile(tmp_path: Path, nprocs: int) -> None:
    with unitrain.init(device="cpu", timeout_s=60) as strategy:
        strategy.add(Profile(tmp_path, on_signal=signal.SIGUSR2))
        strategy.checkpoint(tmp_path / "checkpoints", partial=True)

        def each(strategy: Strategy, step: int) -> None:
            if strategy.is_main and step == 3:
                os.kill(os.getpid(), signal.SIGTERM)
                os.kill(os.getpid(), signal.SIGUSR2)
            time.sleep(0.01)

        with pytest.raises(unitrain.Stopped) as end:
            train(strategy, 200, each)
        assert (end.value.code, strategy.world_size) == (143, nprocs)


def test_a_trace_shows_how_much_memory_is_allocated(tmp_path: Path) -> None:
    kept = []
    with unitrain.init(device="cpu") as strategy:
        strategy.add(Profile(tmp_path, steps=2, skip=1, memory=True))
        train(strategy, 4, lambda *_: kept.append(torch.ones(2**20)))
    values = [event["args"]["bytes"] for event in events(tmp_path / "trace-step2.json.gz") if event["ph"] == "C"]
    assert max(values) - values[0] >= 2**22


@pytest.mark.gpu
@GPU
def test_a_snapshot_has_the_memory_of_a_gpu(tmp_path: Path) -> None:
    with unitrain.init(device="cuda") as strategy:
        strategy.add(Profile(tmp_path, steps=2, skip=1, memory=True))
        train(strategy, 4)
    with (tmp_path / "memory-step2-rank0.pickle").open("rb") as file:
        snapshot = pickle.load(file)
    assert any(entry["action"] == "alloc" for entry in snapshot["device_traces"][0])
    assert any(event["ph"] == "C" for event in events(tmp_path / "trace-step2.json.gz"))
