"""What a job costs rank 0 that has up to 10,000 ranks, and by which law that grows.

    python benchmarks/members.py

Rank 0 and what it runs are real; the other ranks are simulated. At the store and at the hub they are connections of
other processes, with a thread for each rank, that run the code of the ranks. In collectives they give what rank 0
gives, or what it expects of them, and their files in a checkpoint are as real as rank 0's. A collective itself takes no
time here: that is up to the communication library.

Costs are the CPU time of rank 0's process, and the bytes that it receives and sends: at the store and at the hub those
of its connections, else what the other ranks give in collectives, and what it broadcasts.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed import PrefixStore

from shared.laws import exponent, law
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
from shared.processes import ALONE, in_processes
from shared.report import Found, run, table
from shared.simulated import SimulatedRank0, written_by_others
from unitrain.job.joining.authentication import SECRET, authenticate
from unitrain.job.joining.handshake import handshake
from unitrain.job.joining.verb_check import check_verbs
from unitrain.job.watch.hub_server import start_hub
from unitrain.launch.rendezvous import rendezvous

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SIZES = (100, 300, 1000, 3000, 10_000)
SHORT = (8, 16, 32)
FEATURES = 16
ROWS = 20_000
"""Of the model, so that each of 10,000 ranks has some."""


class Cost:
    """What a block costs this process. ``not_counted_s`` is CPU time of the simulation itself."""

    def __init__(self) -> None:
        self.found: dict[str, float] = {}
        self.not_counted_s = 0.0


@contextmanager
def costing() -> Iterator[Cost]:
    """Measure a block."""
    cost = Cost()
    (received, sent), cpu, wall = connected_bytes(), time.process_time(), time.perf_counter()
    yield cost
    cost.found |= {
        "cpu_s": time.process_time() - cpu - cost.not_counted_s,
        "wall_s": time.perf_counter() - wall - cost.not_counted_s,
    }
    received_now, sent_now = connected_bytes()
    cost.found |= {"received": received_now - received, "sent": sent_now - sent}


def measure_store(ranks: int) -> Found:
    """Meet at the store that rank 0 opens."""
    address = free_address()
    with simulated(range(1, ranks), ranks) as others, costing() as cost:
        others.begin("meet", address)
        store = rendezvous(place(0, ranks, address), TIMEOUT_S)
        others.end()
    assert isinstance(store, PrefixStore)
    return {"meeting at the store": {**cost.found, "keys": store.underlying_store.num_keys()}}


def measure_hub(ranks: int) -> Found:
    """Connect to the hub; then a rank dies: all are told, and one of the others saves its state."""
    key, last = new_key(), ranks - 1
    with simulated(range(ranks), ranks) as everyone:
        with costing() as introductions:
            port, hub = start_hub(
                members(ranks), key, timeout_s=TIMEOUT_S, heartbeat_timeout_s=HEARTBEAT_TIMEOUT_S, one_host=True
            )
            everyone.do("introduce", port, key)
        with costing() as end:
            died = min(filter(None, everyone.do("die", last)))
            survivors = everyone.do("survive", 100)
        everyone.do("hang_up")
        hub.join()
    told, ended = (max(times) - died for times in zip(*survivors, strict=True))
    return {
        "connecting to the hub": introductions.found,
        "the end of a rank": {**end.found, "told_s": told, "wall_s": ended},
    }


def measure_agreements(ranks: int) -> Found:
    """Join, prepare, save and resume, with one state on all ranks, and with a part of it on each."""
    launch = place(0, ranks, "127.0.0.1:1")
    found: Found = {}
    joining = SimulatedRank0(launch)
    with counting(joining) as cost:
        check_verbs(joining.backend)
        secret = "0123456789abcdef"
        joining.backend.secret = secret.encode()
        key = authenticate(joining.communicator, joining.backend, launch, TIMEOUT_S, {SECRET: secret})
        assert key.is_secret
        handshake(joining.communicator, joining.config, type(joining.backend))
    found["joining"] = cost.found
    for shards, name in ((False, ""), (True, ", sharded")):
        rank_0 = SimulatedRank0(launch, shard_optimizer=shards)
        torch.manual_seed(0)
        model = nn.Linear(FEATURES, ROWS)
        optimizer = torch.optim.Adam(model.parameters())
        with counting(rank_0) as cost:
            rank_0.prepare(model, optimizer)
        found[f"prepare{name}"] = cost.found
        rank_0.train(model(torch.ones(1, FEATURES)).square().mean(), optimizer)
        with tempfile.TemporaryDirectory(dir=_fast_folder()) as folder:
            checkpoint = rank_0.checkpoint(Path(folder, "run"), model=model, optimizer=optimizer)
            with simulated(range(1, ranks), ranks) as others:
                if shards:
                    written_by_others(rank_0, checkpoint, others, Path(folder, "others"))
                with counting(rank_0) as cost:
                    checkpoint.save()
            found[f"save{name}"] = cost.found
            with counting(rank_0) as cost:
                assert checkpoint.resume()
            found[f"resume{name}"] = cost.found
            checkpoint.close()
    return found


@contextmanager
def counting(rank_0: SimulatedRank0) -> Iterator[Cost]:
    """Measure a block without the simulation of the other ranks."""
    backend = rank_0.backend
    seconds, received, sent, calls = backend.seconds, backend.received, backend.sent, backend.calls.total()
    with costing() as cost:
        yield cost
        cost.not_counted_s = backend.seconds - seconds
    cost.found |= {"received": backend.received - received, "sent": backend.sent - sent}
    cost.found["collectives"] = backend.calls.total() - calls


def _fast_folder() -> str | None:
    """Return a folder in memory: what the disk takes to sync each of the other ranks' files is not rank 0's cost."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


# torch's clients of a store look up the names of both ends. What a name server takes for that is not to be measured.
_QUIET = {"TORCH_CPP_LOG_LEVEL": "ERROR", "RES_OPTIONS": "timeout:1 attempts:1"}
PARTS: tuple[Callable[[int], Found], ...] = (measure_store, measure_hub, measure_agreements)


def measure(short: bool) -> Found:
    sizes = [ranks for ranks in (SHORT if short else SIZES) if can_have(ranks)]
    for ranks in sorted(set(SHORT if short else SIZES) - set(sizes)):
        print(f"{ranks} ranks need more open files than the limit here (ulimit -Hn): left out.", file=sys.stderr)
    by_size: list[Found] = []
    for ranks in sizes:
        found: Found = {}
        for part in PARTS:
            found |= in_processes(ALONE, part, environment=_QUIET, ranks=ranks)
        by_size.append(found)
    costs = {stage: [found[stage] for found in by_size] for stage in by_size[0]}
    return {"sizes": sizes, "stages": costs, "laws": {stage: _laws(sizes, its) for stage, its in costs.items()}}


def _laws(sizes: Sequence[int], costs: Sequence[dict[str, float]]) -> dict[str, Any]:
    series = {"cpu_s": [one["cpu_s"] for one in costs], "bytes": [one["received"] + one["sent"] for one in costs]}
    return {
        name: {"law": law(sizes, series[name]), "exponent": exponent(sizes, series[name])}
        for name in ("cpu_s", "bytes")
    }


def tables(found: Found) -> str:
    sizes, rows = found["sizes"], []
    for stage, costs in found["stages"].items():
        laws = found["laws"][stage]
        cpu = [f"{one['cpu_s'] * 1e3:,.0f}" for one in costs]
        transferred = [f"{(one['received'] + one['sent']) / 1e3:,.0f}" for one in costs]
        rows.append([stage, "CPU, ms", *cpu, _shown(laws["cpu_s"])])
        rows.append([stage, "bytes, kB", *transferred, _shown(laws["bytes"])])
    head = ["what", "cost to rank 0", *(f"{ranks:,} ranks" for ranks in sizes), "law (power at the end)"]
    ends = found["stages"]["the end of a rank"]
    keys = found["stages"]["meeting at the store"]
    other = [
        ["seconds until all ranks are told of the end of one", *(f"{one['told_s']:.2f}" for one in ends)],
        ["seconds until one of them has saved and all have ended", *(f"{one['wall_s']:.2f}" for one in ends)],
        ["keys in the store", *(f"{one['keys']:,}" for one in keys)],
    ]
    return "\n\n".join([table(head, rows), table(["", *(f"{ranks:,} ranks" for ranks in sizes)], other)])


def _shown(one: dict[str, Any]) -> str:
    return f"{one['law']} ({one['exponent']:.2f})"


def plot(found: Found, figure: Figure) -> None:
    axis = figure.subplots()
    for stage, costs in found["stages"].items():
        axis.loglog(found["sizes"], [max(one["cpu_s"], 1e-4) for one in costs], marker="o", label=stage)
    axis.loglog(found["sizes"], [1e-4 * ranks for ranks in found["sizes"]], color="grey", linestyle=":", label="O(n)")
    axis.set_xlabel("ranks")
    axis.set_ylabel("CPU of rank 0, s")
    axis.legend(fontsize=6)


if __name__ == "__main__":
    run(measure, tables, plot)
