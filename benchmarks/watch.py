"""The cost of the watchdog, of comparing the ranks at the start, and of hashing a checkpoint.

    python benchmarks/watch.py

Two processes train a tiny MLP as fast as they can, while the CPU time of the watchdog's and the hub's threads is
measured. A step can't lose more to them, since it communicates nothing for them. A run of ten minutes is assumed to
compare the ranks once and to save 10 checkpoints of 100 MB.

The hub's share of a core is measured for larger jobs, too. Their ranks are connections of other processes, which
send the heartbeats of a job of that size.
"""

from __future__ import annotations

import hashlib
import sys
import threading
import time
from typing import TYPE_CHECKING

import unitrain
from shared.members import HEARTBEAT_TIMEOUT_S, TIMEOUT_S, can_have, members, new_key, simulated
from shared.processes import GLOO, HOROVOD_GLOO, HOROVOD_MPI, in_processes, startable, world_name
from shared.report import Found, run, table
from shared.workloads import mlp
from unitrain.communication.backend import load_backend
from unitrain.job.joining.handshake import handshake
from unitrain.job.watch.hub import heartbeat_interval_s
from unitrain.job.watch.hub_server import start_hub

if TYPE_CHECKING:
    from matplotlib.figure import Figure

JOBS = (64, 256, 1000, 10_000)
RUN_S, CHECKPOINTS, CHECKPOINT_BYTES = 600.0, 10, 100_000_000


def _seconds_of_watching() -> float:
    """Return the CPU time of this process's watchdog and hub threads."""
    ours = [thread for thread in threading.enumerate() if thread.name in ("unitrain watch", "unitrain hub")]
    assert ours
    return sum(time.clock_gettime(time.pthread_getcpuclockid(int(thread.ident or 0))) for thread in ours)


def measure_world(seconds: float) -> Found | None:
    """Train for a number of seconds, and return the cost of the watchdog on rank 0, which has the hub."""
    with unitrain.init(device="cpu", threads_per_process=1) as strategy:
        task = mlp(strategy.rank)
        model, optimizer = strategy.prepare(*task.make())
        strategy.step(task.loss(model(task.inputs)), optimizer)
        begin, watching_before = time.perf_counter(), _seconds_of_watching()
        steps = 0
        while strategy.broadcast_object(time.perf_counter() - begin < seconds):
            for _ in range(100):
                strategy.step(task.loss(model(task.inputs)), optimizer)
            steps += 100
        lasted, watching = time.perf_counter() - begin, _seconds_of_watching() - watching_before
        begin = time.perf_counter()
        handshake(strategy.communicator, strategy.config, load_backend(strategy.config.backend))
        compared = time.perf_counter() - begin
        begin = time.perf_counter()
        hashlib.sha256(bytes(CHECKPOINT_BYTES)).digest()
        found = {
            "step_s": lasted / steps,
            "watching_s_of_a_step": watching / steps,
            "watching": watching / lasted,
            "comparing_s": compared,
            "hashing_s": time.perf_counter() - begin,
        }
        return found if strategy.is_main else None


def hub_share(ranks: int, seconds: float) -> float:
    """Return the share of a core that the hub of a job of so many ranks takes."""
    key, interval_s = new_key(), heartbeat_interval_s(HEARTBEAT_TIMEOUT_S, ranks)
    with simulated(range(ranks), ranks) as everyone:
        port, hub = start_hub(
            members(ranks), key, timeout_s=TIMEOUT_S, heartbeat_timeout_s=HEARTBEAT_TIMEOUT_S, one_host=True
        )
        everyone.do("introduce", port, key)
        everyone.begin("watch", interval_s + seconds)
        time.sleep(interval_s)
        clock = time.pthread_getcpuclockid(int(hub.ident or 0))
        begin, used = time.perf_counter(), time.clock_gettime(clock)
        time.sleep(seconds)
        share = (time.clock_gettime(clock) - used) / (time.perf_counter() - begin)
        assert hub.is_alive(), "the job has ended"
        everyone.end()
        everyone.do("leave")
        everyone.do("hang_up")
        hub.join()
    return share


def measure(short: bool) -> Found:
    worlds = startable(GLOO) if short else startable(GLOO, HOROVOD_MPI, HOROVOD_GLOO)
    return {
        "worlds": [(world, in_processes(world, measure_world, seconds=1 if short else 30)) for world in worlds],
        "hub": [(ranks, hub_share(ranks, 1 if short else 30)) for ranks in jobs(short)],
    }


def jobs(short: bool) -> list[int]:
    """Return the sizes of jobs whose connections this machine allows, and say on stderr which it does not."""
    for ranks in JOBS:
        if not can_have(ranks):
            print(f"{ranks} ranks need more open files than the limit here (ulimit -Hn): left out.", file=sys.stderr)
    return [ranks for ranks in JOBS[: 1 if short else None] if can_have(ranks)]


def shares(one: Found) -> dict[str, float]:
    """Return each cost as a share of a step, or of a run of ten minutes."""
    return {
        "heartbeats": one["watching"],
        "comparing before the first step": one["comparing_s"] / RUN_S,
        "hashing checkpoints": one["hashing_s"] * CHECKPOINTS / RUN_S,
    }


def tables(found: Found) -> str:
    rows = [
        [
            world_name(world),
            f"{one['step_s'] * 1e6:.0f}",
            f"{one['watching_s_of_a_step'] * 1e6:.2f} ({one['watching']:.3%})",
            *(f"{share:.3%}" for share in list(shares(one).values())[1:]),
        ]
        for world, one in found["worlds"]
    ]
    head = ["world", "a step, us", "of it heartbeats, us", "comparing, of 10 minutes", "hashing, of 10 minutes"]
    sizes = [
        [f"{ranks:,}", f"{heartbeat_interval_s(HEARTBEAT_TIMEOUT_S, ranks):g}", f"{share:.2%}"]
        for ranks, share in found["hub"]
    ]
    return "\n\n".join([table(head, rows), table(["ranks", "s between heartbeats", "the hub, of a core"], sizes)])


def plot(found: Found, figure: Figure) -> None:
    axis = figure.subplots()
    for i, (world, one) in enumerate(found["worlds"]):
        costs = shares(one)
        axis.barh([y + 0.25 * i for y in range(len(costs))], [100 * share for share in costs.values()], 0.2,
                  label=world_name(world))  # fmt: skip
    axis.set_yticks(range(len(costs)), list(costs), fontsize=7)
    axis.axvline(1.0, color="grey", linestyle=":")
    axis.set_xlabel("% (the bound is 1)")
    axis.legend(fontsize=7)


if __name__ == "__main__":
    run(measure, tables, plot)
