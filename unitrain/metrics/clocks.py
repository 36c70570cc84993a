"""How far the clock of each rank is ahead of rank 0's, from barriers.

Nobody leaves a barrier before all have entered it. So the times at which a rank enters and leaves bound the offset of
its clock, as a request and its answer do in Cristian's algorithm (F. Cristian, "Probabilistic clock synchronization",
Distributed Computing 3, 1989). Of several barriers, the narrowest bounds are used.
"""

from __future__ import annotations

from time import monotonic_ns
from typing import NamedTuple

import torch

from unitrain.communication.communicator import Communicator

_BARRIERS = 20


class Reading(NamedTuple):
    """What the clocks of rank 0 and of this rank showed when they were compared, in microseconds."""

    main: float
    own: float
    offset: float
    """How far this rank's clock is ahead of rank 0's."""
    error: float
    """By how much any rank's offset is wrong at most."""


def clock() -> float:
    """Return the time of this host's clock, in microseconds."""
    return monotonic_ns() / 1e3


def compare_clocks(communicator: Communicator) -> Reading:
    """Compare the clocks of all ranks. Collective."""
    times = torch.empty(2, _BARRIERS, dtype=torch.float64)
    for i in range(_BARRIERS):
        times[0, i] = clock()
        communicator.barrier()
        times[1, i] = clock()
    entered, left = communicator.all_gather(times).unbind(1)
    low, high = (entered - left[0]).amax(1), (left - entered[0]).amin(1)
    same = (low <= 0) & (high >= 0)  # it counts from the start of the host, so this is the clock of rank 0's host
    offsets, errors = (torch.where(same, 0.0, one / 2) for one in (low + high, high - low))
    own = communicator.rank
    return Reading(float(left[0, -1]), float(left[own, -1]), float(offsets[own]), float(errors.max()))


def on_main_clock(time: float, start: Reading, end: Reading) -> float:
    """Return a time of this rank's clock in microseconds after ``start``, on rank 0's clock.

    Clocks run at slightly different speeds: their offset is interpolated.
    """
    offset = start.offset + (end.offset - start.offset) * (time - start.own) / (end.own - start.own)
    return time - offset - start.main
