"""Duties of the backend's methods, called as the core calls them: concurrently, in any thread, by name."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from unitrain import Backend
from unitrain.communication.backend import Wait
from unitrain.config import StrategyConfig
from unitrain.launch.detect import detect
from unitrain.testing.duty import duty, several_processes
from unitrain.testing.worlds import World


@contextmanager
def _started(world: World) -> Iterator[Backend]:
    """Start a backend itself, without a strategy, and close it at the end. Collective."""
    config = StrategyConfig(backend=world.backend, device="cpu", timeout_s=30)
    launch = detect(os.environ)
    backend = world.kind(config, launch, torch.device("cpu"))
    assert backend.start() == (launch.rank, world.processes), "start() returns the rank and the world size"
    try:
        yield backend
        # No rank closes its backend while another still waits.
        backend.all_reduce(torch.zeros(1), "sum", "duty.end")()
    except BaseException:
        backend.close(failed=True)
        raise
    backend.close(failed=False)


def _total(backend: Backend, size: int) -> Tensor:
    """Return the expected sum of all ranks' inputs."""
    return sum((_given(rank, size) for rank in range(backend.world_size)), torch.zeros(size))


def _given(rank: int, size: int) -> Tensor:
    """Return a rank's input: ``size`` numbers with sums that are exact in float32."""
    return torch.arange(size, dtype=torch.float32) + rank


# Small and large in turn, so that a backend which does not keep calls apart mixes them up.
_SIZES = (1, 5000, 3, 200_000, 17, 1)


@duty()
def several_calls_at_once(world: World) -> None:
    """Calls may be started before earlier ones are waited for, and waited for in any order."""
    with _started(world) as backend:
        for _ in range(2):  # a name may be reused after its call has ended
            tensors = [_given(backend.rank, size) for size in _SIZES]
            waits = [backend.all_reduce(tensor, "sum", f"duty.{i}") for i, tensor in enumerate(tensors)]
            gather = backend.all_gather(torch.full((3,), backend.rank, dtype=torch.float64), "duty.gather")
            received = torch.full((4,), backend.rank, dtype=torch.uint8)
            broadcast = backend.broadcast(received, backend.world_size - 1, "duty.broadcast")
            broadcast()
            assert received.tolist() == [backend.world_size - 1] * 4
            assert gather().tolist() == [[rank] * 3 for rank in range(backend.world_size)]
            for wait in reversed(waits):
                wait()
            for tensor, size in zip(tensors, _SIZES, strict=True):
                assert torch.equal(tensor, _total(backend, size)), f"the sum of {size} elements"


@duty(needs=several_processes)
def calls_in_another_thread(world: World) -> None:
    """A call may be started and waited for in different threads: on a GPU, backward runs in a thread of autograd."""
    with _started(world) as backend:
        tensor = _given(backend.rank, 1000)
        waits: list[Wait] = []
        thread = threading.Thread(target=lambda: waits.append(backend.all_reduce(tensor, "sum", "duty.thread")))
        thread.start()
        # The call was started, and its thread has ended, before anybody waits for it.
        thread.join()
        waits[0]()
        assert torch.equal(tensor, _total(backend, 1000))


@duty(needs=lambda world: world.processes > 1 and world.kind.matches_by_name)
def calls_in_another_order(world: World) -> None:
    """With matches_by_name, the ranks may make their calls in different orders."""
    with _started(world) as backend:
        names = [f"duty.{i}" for i in range(4)]
        tensors = {name: _given(backend.rank, 10 + i) for i, name in enumerate(names)}
        # Each rank begins with another call.
        rotated = names[backend.rank :] + names[: backend.rank]
        waits = {name: backend.all_reduce(tensors[name], "sum", name) for name in rotated}
        for name in names:
            waits[name]()
        for i, name in enumerate(names):
            assert torch.equal(tensors[name], _total(backend, 10 + i)), f"the sum of {name}"
