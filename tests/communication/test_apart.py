"""Ranks that would silently diverge, because they call different collectives or train copies of one job."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import nn, ones

import unitrain
from unitrain import CommunicationError, Strategy

Call = Callable[[Strategy, Callable[[], Any]], Any]


def at(call: Call) -> int:
    return call.__code__.co_firstlineno


# What rank 0 calls and what rank 1 calls, after one step that both have made, and how it is told.
CALLS: dict[str, tuple[tuple[Call, str], tuple[Call, str]]] = {
    "verb": (
        (lambda strategy, step: strategy.barrier(), "barrier()"),
        (lambda strategy, step: strategy.all_reduce(ones(2)), "all_reduce(sum) of float32[2]"),
    ),
    "shape": (
        (lambda strategy, step: strategy.all_reduce(ones(3)), "all_reduce(sum) of float32[3]"),
        (lambda strategy, step: strategy.all_reduce(ones(2)), "all_reduce(sum) of float32[2]"),
    ),
    "dtype": (
        (lambda strategy, step: strategy.communicator.all_gather(ones(3)), "all_gather() of float32[3]"),
        (lambda strategy, step: strategy.communicator.all_gather(ones(3).int()), "all_gather() of int32[3]"),
    ),
    "source": (
        (lambda strategy, step: strategy.communicator.broadcast(ones(3)), "broadcast(src=0) of float32[3]"),
        (lambda strategy, step: strategy.communicator.broadcast(ones(3), 1), "broadcast(src=1) of float32[3]"),
    ),
    "forward": (
        (lambda strategy, step: step(), "forward of batch_norm.1"),
        (lambda strategy, step: strategy.barrier(), "barrier()"),
    ),
    "close": (
        (lambda strategy, step: strategy.close(), "close"),
        (lambda strategy, step: step(), "forward of batch_norm.1"),
    ),
}


def call_apart(case: str, sync_batchnorm: bool = True) -> None:
    with unitrain.init(backend="ddp", debug=True, sync_batchnorm=sync_batchnorm) as strategy:
        model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
        model, optimizer = strategy.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))

        def step() -> None:
            strategy.step(model(torch.randn(4, 2)).sum(), optimizer)

        step()
        CALLS[case][strategy.rank][0](strategy, step)


def told(capsys: pytest.CaptureFixture[str]) -> set[tuple[str, str, str]]:
    """Return (rank, call, place) as each of the ranks has told of both."""
    lines = [line for line in capsys.readouterr().out.splitlines() if "stopped because" in line]
    assert len(lines) == 2
    found = [
        set(re.findall(r"rank (\d)(?: on \S+ \(pid \d+\))? called (.*?) at (\S+?)(?=, where|: all ranks)", line))
        for line in lines
    ]
    assert found[0] == found[1]
    return found[0]


@pytest.mark.parametrize("case", CALLS)
def test_debug_names_the_lines_of_calls_that_differ(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(CommunicationError, match="exited with code 1"):
        run_ranks(call_apart, case)
    places = [f"{__file__}:{at(call)}" for call, _ in CALLS[case]]
    for rank, call, place in told(capsys):
        assert call == CALLS[case][int(rank)][1]
        if "forward" not in call:  # which is called in step()
            assert place == places[int(rank)]


def test_debug_names_a_backward_that_only_one_rank_does(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(CommunicationError, match="exited with code 1"):
        run_ranks(call_apart, "forward", False)
    assert {(rank, call) for rank, call, _ in told(capsys)} == {("0", "backward for optimizer 0"), ("1", "barrier()")}
