"""The cost of the watchdog, of comparing the ranks at the start, and of hashing; and rank 0's costs in large jobs.

    python benchmarks/watch.py

Two processes train a tiny MLP as fast as they can, while the CPU time of the watchdog's and the hub's threads is
measured. A step can't lose more to them, since it communicates nothing for them. A run of ten minutes is assumed to
compare the ranks once and to save 10 checkpoints of 100 MB.

For large jobs, rank 0's store and hub are real; the other ranks are connections of other processes, with a thread for
each rank, that run the code of the ranks. The CPU time of rank 0's process and the bytes that it receives and sends are
measured: while the ranks meet at the store, connect to the hub, watch each other, and end after one of them has died.
``shared/large_jobs.py`` measures the rest of what such jobs cost, without connections.
"""

from __future__ import annotations

import hashlib
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.request import urlopen

import torch
from torch.distributed import PrefixStore

import unitrain
from shared.large_jobs import measure_pieces, pieces_table
from shared.members import (
    HEARTBEAT_TIMEOUT_S,
    TIMEOUT_S,
    can_have,
    connected_bytes,
    free_address,
    members,
    new_key,
    place,
    simulated,
)
from shared.processes import ALONE, GLOO, HOROVOD_GLOO, HOROVOD_MPI, in_processes, startable, world_name
from shared.report import Found, run, table
from shared.workloads import mlp
from unitrain.communication.backend import load_backend
from unitrain.features.metrics_endpoint.endpoint import Endpoint
from unitrain.job.joining.handshake import handshake
from unitrain.job.watch.hub import heartbeat_interval_s
from unitrain.job.watch.hub_server import HubServer
from unitrain.job.watch.messages import Heartbeat
from unitrain.launch.rendezvous import rendezvous
from unitrain.pulse import Pulse

JOBS = (64, 1000, 10_000)
# torch's clients of a store look up the names of both ends. What a name server takes for that is not to be measured.
QUIET = {"TORCH_CPP_LOG_LEVEL": "ERROR", "RES_OPTIONS": "timeout:1 attempts:1"}
END = "the end of a rank"
ENDPOINT = ("`metrics.port`: a heartbeat, µs", "an answer")
RUN_S, CHECKPOINTS, CHECKPOINT_BYTES = 600.0, 10, 100_000_000


def _seconds_of_watching() -> float:
    """Return the CPU time of this process's watchdog and hub threads."""
    ours = [thread for thread in threading.enumerate() if thread.name in ("unitrain watch", "unitrain hub")]
    assert ours
    return sum(time.clock_gettime(time.pthread_getcpuclockid(int(thread.ident or 0))) for thread in ours)


def measure_world(seconds: float) -> Found | None:
    """Train for a number of seconds, and return the cost of the watchdog on rank 0, which has the hub."""
    with unitrain.init(device="cpu") as strategy:
        torch.set_num_threads(1)
        task = mlp(strategy.rank)
        model, optimizer = strategy.prepare(*task.make())
        strategy.step(task.loss(model(task.inputs)), optimizer)
        begin, watching_before = time.perf_counter(), _seconds_of_watching()
        steps = 0
        while strategy.communicator.broadcast_object(time.perf_counter() - begin < seconds):
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
        hub = HubServer(
            members(ranks), key, timeout_s=TIMEOUT_S, heartbeat_timeout_s=HEARTBEAT_TIMEOUT_S, one_host=True
        )
        hub.start()
        everyone.do("introduce", hub.port, key)
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


def measure_endpoint(ranks: int) -> Found:
    """Take a heartbeat of every rank twice, and answer once, as ``metrics.port`` has rank 0 do."""
    endpoint = Endpoint("127.0.0.1", 0)
    endpoint.open(members(ranks), Pulse())
    begin = time.process_time()
    for step in range(2):
        for rank in range(ranks):
            endpoint.observe(rank, Heartbeat("step", step, 0.1, trained=(step, 0)), float(step))
    observed = time.process_time() - begin
    with urlopen(f"http://127.0.0.1:{endpoint.port}/metrics") as answer:
        size = len(answer.read())
    found = {"heartbeat_s": observed / 2 / ranks, "cpu_s": time.process_time() - begin - observed, "bytes": size}
    endpoint.at_close()
    return found


@contextmanager
def costing() -> Iterator[dict[str, float]]:
    """Measure the CPU time of this process, and its bytes, in a block."""
    cost: dict[str, float] = {}
    (received, sent), cpu = connected_bytes(), time.process_time()
    yield cost
    received_now, sent_now = connected_bytes()
    cost |= {"cpu_s": time.process_time() - cpu, "bytes": received_now - received + sent_now - sent}


def measure_store(ranks: int) -> Found:
    """Meet at the store that rank 0 opens."""
    address = free_address()
    with simulated(range(1, ranks), ranks) as others, costing() as cost:
        others.begin("meet", address)
        store = rendezvous(place(0, ranks, address), TIMEOUT_S)
        others.end()
    assert isinstance(store, PrefixStore)
    return {"meeting at the store": {**cost, "keys": store.underlying_store.num_keys()}}


def measure_hub(ranks: int) -> Found:
    """Connect to the hub; then a rank dies, and all are told."""
    key, last = new_key(), ranks - 1
    with simulated(range(ranks), ranks) as everyone:
        with costing() as introductions:
            hub = HubServer(
                members(ranks), key, timeout_s=TIMEOUT_S, heartbeat_timeout_s=HEARTBEAT_TIMEOUT_S, one_host=True
            )
            hub.start()
            everyone.do("introduce", hub.port, key)
        with costing() as end:
            died = min(filter(None, everyone.do("die", last)))
            survivors = everyone.do("survive", 100)
        everyone.do("hang_up")
        hub.join()
    told = max(survivors) - died
    return {
        "connecting to the hub": introductions,
        END: {**end, "told_s": told},
    }


def measure(short: bool) -> Found:
    worlds = startable(GLOO) if short else startable(GLOO, HOROVOD_MPI, HOROVOD_GLOO)
    seconds = 1 if short else 30
    return {
        "worlds": [(world, in_processes(world, measure_world, seconds=seconds)) for world in worlds],
        "jobs": [
            {
                "ranks": ranks,
                "hub": hub_share(ranks, seconds),
                "endpoint": measure_endpoint(ranks),
                "stages": {
                    **in_processes(ALONE, measure_store, environment=QUIET, ranks=ranks),
                    **in_processes(ALONE, measure_hub, environment=QUIET, ranks=ranks),
                },
            }
            for ranks in jobs(short)
        ],
        "pieces": measure_pieces(short),
    }


def jobs(short: bool) -> list[int]:
    """Return the sizes of jobs whose connections this machine allows, and print the others on stderr."""
    for ranks in JOBS:
        if not can_have(ranks):
            print(f"{ranks} ranks need more open files than the limit here (ulimit -Hn): left out.", file=sys.stderr)
    return [ranks for ranks in JOBS[: 1 if short else None] if can_have(ranks)]


def tables(found: Found) -> str:
    rows = [
        [
            world_name(world),
            f"{one['step_s'] * 1e6:.0f}",
            f"{one['watching_s_of_a_step'] * 1e6:.2f} ({one['watching']:.3%})",
            f"{one['comparing_s'] / RUN_S:.3%}",
            f"{one['hashing_s'] * CHECKPOINTS / RUN_S:.3%}",
        ]
        for world, one in found["worlds"]
    ]
    head = ["world", "a step, µs", "its heartbeats, µs", "comparing, of 10 minutes", "hashing, of 10 minutes"]
    large = [
        [
            f"{one['ranks']:,}",
            f"{heartbeat_interval_s(HEARTBEAT_TIMEOUT_S, one['ranks']):g}",
            f"{one['hub']:.2%}",
            f"{one['endpoint']['heartbeat_s'] * 1e6:.1f}",
            f"{one['endpoint']['cpu_s'] * 1e3:,.0f} ms, {one['endpoint']['bytes'] / 1e3:,.0f} kB",
            *(f"{its['cpu_s'] * 1e3:,.0f} ms, {its['bytes'] / 1e3:,.0f} kB" for its in one["stages"].values()),
            f"{one['stages'][END]['told_s']:.2f}",
        ]
        for one in found["jobs"]
    ]
    stages = found["jobs"][0]["stages"] if found["jobs"] else []
    named = ["ranks", "s between heartbeats", "hub, of a core", *ENDPOINT, *stages, "s until all are told"]
    return "\n".join([table(head, rows), table(named, large), pieces_table(found["pieces"])])


if __name__ == "__main__":
    run(measure, tables)
