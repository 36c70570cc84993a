"""A job that goes on when hosts are lost and come back: what it has done, and whether its training is undisturbed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import psutil
from cluster import Cluster, cluster
from harness import COPIED, PROGRAM, assert_same_training, assert_same_weights

STEPS = 70
ENVIRON = {"UNITRAIN_HEARTBEAT_TIMEOUT_S": "4", "UNITRAIN_TIMEOUT_S": "40", "TESTS_PAUSE": "0.3", **COPIED}
PATIENCE_S = 120.0


@contextmanager
def impatient_cluster(folder: Path, count: int) -> Iterator[Cluster]:
    """Run a cluster whose TCP gives up a silent host after 13 s, and not after 15 minutes."""
    with cluster(folder, count, own_names_are_loopback=True) as hosts:
        for host in range(count):
            assert hosts.start(host, ["sysctl", "-qw", "net.ipv4.tcp_retries2=5"]).communicate(timeout=10)[0] == ""
        yield hosts


@dataclass(frozen=True)
class Part:
    """The steps from a start of the ranks to the next."""

    began: int
    ranks: int
    last: int
    """The last step that was begun; those before it were complete."""


@dataclass
class Elastic:
    """A job whose command is started on each host that takes part."""

    hosts: Cluster
    folder: Path
    command: Sequence[str]
    environ: Mapping[str, str]
    steps: int = STEPS
    started: dict[int, subprocess.Popen[str]] = field(default_factory=dict)

    def start(self, *hosts: int, under: Sequence[str] = ()) -> None:
        script = [str(PROGRAM), str(self.folder), str(self.steps), "none:0:0"]
        for host in hosts:
            self.started[host] = self.hosts.start(
                host, [*under, *self.command, *script], environ={**ENVIRON, **self.environ}, cwd=self.folder,
                output=self._log(host),
            )  # fmt: skip

    def _log(self, host: int) -> Path:
        return self.folder / f"{self.hosts.names[host]}.log"

    def said(self, host: int) -> str:
        return self._log(host).read_text()

    def parts(self) -> list[Part]:
        steps: dict[int, list[int]] = defaultdict(list)
        ranks: dict[int, int] = defaultdict(int)
        for file in self.folder.glob("*.notes"):
            began = int(file.name.split(".")[0])
            ranks[began] += 1
            steps[began] += [json.loads(line)["step"] for line in file.read_text().splitlines() if line.endswith("}")]
        return [Part(began, ranks[began], max(steps[began], default=began)) for began in sorted(ranks)]

    def wait(self, condition: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            said = "\n".join(self.said(host) for host in self.started)
            assert time.monotonic() < deadline, f"{what}: {self.parts()}\n{said}"
            time.sleep(0.1)

    def trains(self, ranks: int) -> None:
        """Wait until a start with this many ranks that comes after now, or is the first, has made some steps."""
        before = len(self.parts())

        def newest() -> bool:
            made = self.parts()
            return len(made) > before and made[-1].ranks == ranks and made[-1].last > made[-1].began + 2

        self.wait(newest, f"it did not go on with {ranks} ranks")

    def ranks_on(self, host: int) -> dict[int, psutil.Process]:
        children = psutil.Process(self.started[host].pid).children(recursive=True)
        return {int(one.environ()["RANK"]): one for one in children if str(PROGRAM) in one.cmdline()}

    def cut_power(self, host: int) -> None:
        self.hosts.cut_power(host)
        self.started.pop(host).wait(10)

    def ends(self, host: int) -> int:
        return self.started[host].wait(PATIENCE_S)

    def end(self) -> None:
        for process in self.started.values():
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
                process.wait(60)

    def assert_ends_as_if_nothing_had_happened(self, alone: Path, lost: int = 1) -> None:
        codes = {host: self.ends(host) for host in self.started}
        assert set(codes.values()) == {0}, "\n".join(map(self.said, codes))
        made = self.parts()
        for before, after in pairwise(made):
            assert before.last + 1 - lost <= after.began <= before.last + 1, f"{lost} steps are made again: {made}"
        if lost == 1:
            assert_same_training(self.folder, alone)
        else:  # a rank of sharded parameters notes stand-ins, too
            assert_same_weights(self.folder, alone)
