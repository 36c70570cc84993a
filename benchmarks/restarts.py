"""Restarts: a host is lost under torchrun and comes back; the time to the next step after each, and the steps lost.

    sudo python benchmarks/restarts.py

Two hosts (network namespaces, as in the tests) with two ranks each run ``torchrun --nnodes 1:2``: with UniTrain, which
saves no checkpoint by itself, and by hand with DDP and a checkpoint every 50 steps. A step lasts 50 ms. A host is lost
25 steps after such a checkpoint, so what is lost by hand is the mean over all moments. When it is back, its torchrun is
started again, and the other host's restarts its ranks.

A host is lost in two ways: all of its processes are killed, so that their connections close, or its power is cut, and
nothing is heard of it any more. UniTrain's watchdog notices the second after 30 seconds. By hand it is noticed when a
collective is given up, for which the script sets 30 seconds as well (gloo's default is 30 minutes). torchrun itself
counts a host out after 15 seconds, and then waits for 30 more for others to come; "soon" is with 4 and 3 seconds.

torchrun is started with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, without which no host can join later (torch 2.15).
"""

from __future__ import annotations

import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shared.report import Found, run, table
from unitrain.launch.local.launchers import launch_environment

if TYPE_CHECKING:
    from cluster import Cluster

HERE = Path(__file__).parent / "restart"
HAND, OURS = "by hand", "UniTrain"
KILLED, CUT = "processes killed", "power cut"
USUAL, SOON = "usual", "soon"
CASES = [(KILLED, USUAL), (KILLED, SOON), (CUT, SOON)]
ROUNDS, SHORT_ROUNDS = 2, 1
PAUSE_S, EVERY, SHORT_EVERY = 0.05, 50, 10
NOTICED_S = 30
PATIENCE_S = 240.0
TORCHRUN = ["torchrun", "--nnodes", "1:2", "--nproc-per-node", "2", "--max-restarts", "9", "--rdzv-backend", "c10d"]
TORCHRUN += ["--rdzv-endpoint", "node0:29400", "--rdzv-id", "job"]
IMPATIENT = ["--rdzv-conf", "keep_alive_interval=1,keep_alive_max_attempt=4,last_call_timeout=3"]


class Run:
    """A job on two hosts, and the steps that it has made."""

    def __init__(self, hosts: Cluster, way: str, waits: str, every: int, folder: Path) -> None:
        script = [str(HERE / "with_unitrain.py"), str(folder), str(PAUSE_S)]
        self._environ = {**launch_environment(), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
        if way == HAND:
            script = [str(HERE / "with_ddp.py"), *script[1:], str(every), str(NOTICED_S)]
        self._command = [*TORCHRUN, *(IMPATIENT if waits == SOON else []), *script]
        self._hosts = hosts
        self._folder = folder
        self._every = every
        self._started: dict[int, subprocess.Popen[str]] = {}

    def start(self, host: int) -> None:
        log = self._folder / f"{host}.log"
        self._started[host] = self._hosts.start(host, self._command, environ=self._environ, output=log)

    def steps(self) -> list[dict[str, Any]]:
        """Return what rank 0 wrote after each step."""
        with suppress(FileNotFoundError):
            lines = (self._folder / "steps.jsonl").read_text().splitlines()
            return [json.loads(line) for line in lines if line.endswith("}")]
        return []

    def until_half_way(self, ranks: int) -> None:
        """Wait until this many ranks have made some steps, half as many after a checkpoint as are between two."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            steps = self.steps()
            newest = [one for one in steps if one["pid"] == steps[-1]["pid"]]
            if newest and newest[-1]["ranks"] == ranks and len(newest) >= self._every:
                if newest[-1]["step"] % self._every >= self._every // 2:
                    return
            elif time.monotonic() > deadline:
                logs = "\n".join(log.read_text() for log in self._folder.glob("*.log"))
                raise TimeoutError(f"there were no steps with {ranks} ranks within {PATIENCE_S:g} s:\n{logs}")
            time.sleep(PAUSE_S / 5)

    def lose(self, host: int, how: str) -> None:
        (self._hosts.cut_power if how == CUT else self._hosts.kill_all)(host)
        self._started.pop(host).wait()

    def after(self, moment: float) -> Found:
        """Return the seconds from a moment to the first step of the next start, and how many steps were lost."""
        steps = self.steps()
        before = max((one for one in steps if one["time"] <= moment), key=lambda one: float(one["time"]))
        last = max(one["step"] for one in steps if one["pid"] == before["pid"])
        first = next(one for one in steps if one["time"] > moment and one["pid"] != before["pid"])
        return {"seconds": first["time"] - moment, "lost": last - (first["step"] - 1)}

    def end(self) -> None:
        for process in self._started.values():
            process.send_signal(signal.SIGTERM)
        for process in self._started.values():
            process.wait()


def measure_run(hosts: Cluster, way: str, how: str, waits: str, every: int) -> Found:
    """Lose a host and get it back, once."""
    with tempfile.TemporaryDirectory() as folder:
        job = Run(hosts, way, waits, every, Path(folder))
        try:
            job.start(0)
            job.start(1)
            job.until_half_way(4)
            lost_at = time.time()
            job.lose(1, how)
            job.until_half_way(2)
            hosts.plug_cable(1)
            back_at = time.time()
            job.start(1)
            job.until_half_way(4)
            return {"loss": job.after(lost_at), "return": job.after(back_at)}
        finally:
            job.end()


def measure(short: bool) -> Found:
    sys.path.append(str(Path(__file__).parents[1] / "tests" / "support" / "hosts"))
    from cluster import cluster, cluster_missing

    reason = cluster_missing()
    if reason is not None:
        return {"cases": [], "left_out": reason}
    rounds, every = (SHORT_ROUNDS, SHORT_EVERY) if short else (ROUNDS, EVERY)
    cases = []
    with tempfile.TemporaryDirectory() as folder, cluster(Path(folder), 2) as hosts:
        for how, waits in CASES[1:2] if short else CASES:
            ways: dict[str, list[Found]] = {HAND: [], OURS: []}
            for i in range(rounds):
                for way in ways:
                    print(f"restarts: {how}, {waits}, {way}, {i + 1} of {rounds}", file=sys.stderr)
                    ways[way].append(measure_run(hosts, way, how, waits, every))
            cases.append({"how": how, "waits": waits, "ways": ways})
    return {"cases": cases, "left_out": None}


def shown(runs: list[Found], event: str, what: str, digits: int) -> str:
    values = [float(one[event][what]) for one in runs]
    low, middle, high = (f"{of(values):.{digits}f}" for of in (min, statistics.median, max))
    return middle if low == high else f"{middle} ({low} to {high})"


def tables(found: Found) -> str:
    if found["left_out"]:
        return f"Nothing was measured: {found['left_out']}.\n"
    rows = [
        [
            case["how"], case["waits"], way, shown(runs, "loss", "seconds", 1), shown(runs, "loss", "lost", 0),
            shown(runs, "return", "seconds", 1), shown(runs, "return", "lost", 0),
        ]
        for case in found["cases"]
        for way, runs in case["ways"].items()
    ]  # fmt: skip
    head = ["the host is lost by", "torchrun's waits", "script", "s to the next step", "steps lost"]
    return table([*head, "back: s to the next step", "steps lost"], rows)


if __name__ == "__main__":
    run(measure, tables)
