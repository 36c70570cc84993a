"""A model of a data-parallel step: computing, then a ring all-reduce (Patarasuk and Yuan, 2009) that does not overlap.

The ring takes ``2 (n - 1)`` messages in turn, each of one n-th of the gradients, and each with the link's latency. On
one machine all links are the same memory and all ranks share its cores: the machine moves ``2 (n - 1)`` times the
gradients, and works off the ranks' computing on the cores that it has.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Link:
    """What joins two hosts.

    Attributes:
        latency_s: seconds that a message takes however short it is.
        bytes_per_s: bandwidth.
    """

    latency_s: float
    bytes_per_s: float


def step_on_hosts(compute_s: float, gradient_bytes: float, hosts: int, link: Link) -> float:
    """Return the seconds of a step on hosts of their own, nothing overlapping."""
    if hosts == 1:
        return compute_s
    messages = 2 * (hosts - 1)
    return compute_s + messages * (link.latency_s + gradient_bytes / hosts / link.bytes_per_s)


def step_on_one_machine(compute_s: float, pair_s: float, latency_s: float, processes: int, cores: int) -> float:
    """Return the seconds of a step of processes that share a machine.

    Args:
        compute_s: what one process computes alone.
        pair_s: an all-reduce of the gradients between two processes.
        latency_s: one of a few bytes between two processes.
        processes: how many.
        cores: on which they run.
    """
    crowded = max(1.0, processes / cores)
    if processes == 1:
        return compute_s
    # Two processes exchange 2 messages; what is not latency is moving data, all through one memory.
    moving_s = max(0.0, pair_s - latency_s)
    return compute_s * crowded + (processes - 1) * (moving_s + latency_s * crowded)
