"""Each wait of UniTrain's for the device is needed: without it, run on a simulated accelerator, numbers are wrong.

Its streams work as late as is legal, so that what is read too early has not been written.
"""

from __future__ import annotations

import inspect
import math
import textwrap
import time
from typing import Any

import pytest
import torch
from on_device import NEEDS_COMPILER, run
from test_contract_on_device import OnDevice

from unitrain.checkpoint import writer
from unitrain.communication.backend import load_backend
from unitrain.communication.counts import CountReduction
from unitrain.data.reading import feeding
from unitrain.device import pick_device
from unitrain.launch.detect import Launch
from unitrain.testing.worlds import World
from unitrain.training.gradients.guard import GuardedStep

pytestmark = NEEDS_COMPILER


def without(owner: Any, function: str, line: str) -> None:
    """Leave a line out of a function of a module or class, for the rest of this process."""
    found = getattr(owner, function)
    source = textwrap.dedent(inspect.getsource(found))
    assert source.count(f"{line}\n") == 1, f"{function} has no line {line}: has its wait moved?"
    compiled: dict[str, Any] = {}
    exec(f"from __future__ import annotations\n{source.replace(line, 'pass')}", found.__globals__, compiled)
    setattr(owner, function, compiled[function])


def fed(*missing: str) -> list[float]:
    """Feed batches from pinned memory, and return what is computed of each."""
    for line in missing:
        without(feeding, "_arrived", line)
    batches = [torch.full((1000,), float(i)).pin_memory() for i in range(4)]
    totals = []
    for _, batch in feeding.feed(enumerate(batches), torch.device("sim", 0)):
        totals.append(batch.mean())
        del batch
    return torch.stack(totals).tolist()


@pytest.mark.parametrize("missing", ["computing.wait_event(arrival)", "tensor.record_stream(computing)"])
def test_feeding(missing: str) -> None:
    assert run(fed) == [[0, 1, 2, 3]]
    [wrong] = run(fed, missing)
    assert any(map(math.isnan, wrong)), "memory was read before the copy, or after it was given to another"


def guarded(*missing: str) -> list[bool]:
    """Step with gradients of which the second ones are not finite, and return which steps the guard let through."""
    for line in missing:
        without(GuardedStep, "_step_flagged", line)
    weight = torch.nn.Parameter(torch.ones(3, device=pick_device("sim", Launch("python"))))
    optimizer = torch.optim.SGD([weight], lr=0.1, fused=True)
    guard = GuardedStep(weight.device, None)
    stepped = []
    for scale in (1.0, math.inf, 1.0):
        weight.grad = torch.ones_like(weight) * scale
        stepped.append(guard.step(optimizer, [weight], guard.gradients([weight]))[0])
    return stepped


def test_the_guard() -> None:
    assert run(guarded) == [[True, False, True]]
    assert run(guarded, "copied.synchronize()") != [[True, False, True]]


def copied(*missing: str) -> list[float]:
    """Copy weights that are changed at once, in one go and beside what comes then, and return what was copied."""
    for line in missing:
        without(writer, "_wait_for", line)
    weights = torch.ones(1000, device="sim") * 3
    found, copies = [writer.snapshot({"weights": weights})], list[Any]()
    later: Any = writer.snapshot({"weights": weights}, copies=copies)
    weights.zero_()
    writer._write_after(copies, found.append, later)
    return [float(each["weights"].mean()) for each in found]


def test_a_snapshot() -> None:
    assert run(copied) == [[3.0, 3.0]]
    [wrong] = run(copied, "event.synchronize()")
    assert any(map(math.isnan, wrong))


def counted(*missing: str) -> list[int]:
    for line in missing:
        without(CountReduction, "start", line)
    with World("ddp", 2).open(device="sim") as strategy:
        return CountReduction(strategy.communicator, "sum", "rows").start([3, 4])()


def test_counts() -> None:
    """The stream of counts must wait for the collective, which is in another."""
    assert run(counted, nprocs=2) == [[6, 8]] * 2
    assert run(counted, "wait()", nprocs=2) == [[3, 4]] * 2


def summed(*missing: str) -> list[float]:
    with World("ddp", 2).open(device="sim") as strategy:
        for line in missing:  # only now: the self-test of the backend would see it
            without(inspect.getmodule(load_backend("ddp").__mro__[1]), "_wait", line)
        total: list[float] = strategy.all_reduce(torch.ones(2, device="sim") * (strategy.rank + 1), "sum").tolist()
        return total


def test_a_collective() -> None:
    assert run(summed, nprocs=2) == [[3, 3]] * 2
    assert run(summed, "work.wait()", nprocs=2) == [[1, 1], [2, 2]]


def seconds_in_barrier(world: World) -> float:
    """Return how long a rank is in a barrier that the last rank reaches a second later."""
    with world.open() as strategy:
        strategy.barrier()
        time.sleep(strategy.rank)
        start = time.monotonic()
        strategy.barrier()
        return time.monotonic() - start


def test_a_barrier() -> None:
    """The host waits in it, as it does not in other collectives of a device."""
    world = OnDevice("ddp", 2)
    assert world.run(seconds_in_barrier, world)[0] > 0.7
