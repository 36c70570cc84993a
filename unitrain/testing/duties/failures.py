"""Duties of failing jobs: they end soon, with the error of the rank that failed."""

from __future__ import annotations

import time

import torch

from unitrain.testing.duty import duty
from unitrain.testing.models import Twins
from unitrain.testing.worlds import World


@duty(needs=lambda world: world.processes == 2, ending=r"rank 1 on \S+ \(pid \d+\) is in user code")
def collective_of_one_rank(world: World) -> None:
    """A rank that waits in a collective for another ends within timeout_s, and its error says where the other is."""
    # Not closed at the end of a block: closing would wait for the other rank.
    strategy = world.open(timeout_s=3)
    if strategy.rank == 0:
        strategy.all_reduce(torch.ones(1))
    # Rank 1 stays here, in user code. The job ends it long before.
    time.sleep(60)


@duty(needs=lambda world: world.processes == 2, ending=r"ZeroDivisionError: on purpose")
def error_of_one_rank(world: World) -> None:
    """An error on one rank ends the job, even if the others wait for it in a step."""
    strategy = world.open()
    twins = Twins(strategy)
    # The other rank trains until the job ends it.
    for step in range(1_000_000):
        if step == 3 and strategy.rank == 1:
            raise ZeroDivisionError("on purpose")
        strategy.step(twins.loss(), twins.optimizer)
