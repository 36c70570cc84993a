"""A cost model of a data-parallel step: computation, then a ring all-reduce (Patarasuk and Yuan, 2009), no overlap.

The ring takes ``2 (n - 1)`` messages, one after another, each with one n-th of the gradients and the link's latency. On
one machine, all links are the same memory and all ranks share the cores: the machine moves ``2 (n - 1)`` times the
gradients, and the ranks' computations take turns on the cores.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Link:
    """A network link between two hosts.

    Attributes:
        latency_s: latency of a message, in seconds.
        bytes_per_s: bandwidth.
    """

    latency_s: float
    bytes_per_s: float


def step_on_hosts(compute_s: float, gradient_bytes: float, hosts: int, link: Link) -> float:
    """Return the seconds of a step with one process per host, without overlap."""
    if hosts == 1:
        return compute_s
    messages = 2 * (hosts - 1)
    return compute_s + messages * (link.latency_s + gradient_bytes / hosts / link.bytes_per_s)


def step_on_one_machine(compute_s: float, pair_s: float, latency_s: float, processes: int, cores: int) -> float:
    """Return the seconds of a step of processes that share a machine.

    Args:
        compute_s: seconds of a step on one process.
        pair_s: seconds of an all-reduce of the gradients between two processes.
        latency_s: seconds of an all-reduce of a few bytes between two processes.
        processes: number of processes.
        cores: number of cores of the machine.
    """
    crowded = max(1.0, processes / cores)
    if processes == 1:
        return compute_s
    # Two processes exchange 2 messages; the time beyond the latency is that of moving data through the memory.
    moving_s = max(0.0, pair_s - latency_s)
    return compute_s * crowded + (processes - 1) * (moving_s + latency_s * crowded)
