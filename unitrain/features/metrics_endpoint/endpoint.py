"""Rank 0's endpoint of OpenMetrics: the state of the ranks by their heartbeats, and the metrics that the script logs.

Prometheus and ``unitrain top`` read it.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any, cast
from uuid import uuid4

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import GaugeMetricFamily, InfoMetricFamily
from prometheus_client.registry import Collector

from unitrain import call_site
from unitrain.errors import ConfigError
from unitrain.features.metrics_endpoint import FILE
from unitrain.job.job import current
from unitrain.job.watch.hub import Member
from unitrain.job.watch.link import close_in_children
from unitrain.job.watch.messages import Heartbeat
from unitrain.process import print_stderr, resident_memory
from unitrain.pulse import Pulse
from unitrain.training.feature import Feature
from unitrain.training.loop.sockets import Sockets
from unitrain.url import parsed

# How many heartbeats averages are over.
_STEPS_OVER, _WAITS_OVER = 8, 60
# How much less of the time than the median rank a rank waits if the others wait for it. By chance it is seldom 0.15.
_SLOWER = 0.2
_OF_RANKS = {
    "step": "Optimizer steps of the run so far.",
    "seconds_per_step": "Seconds that a step takes, over the latest heartbeats.",
    "waiting_ratio": "Share of the latest heartbeats that came from within a step, or another call that waits.",
    "heartbeat_age_seconds": "Seconds since the last heartbeat.",
    "resident_memory_bytes": "Host memory of the process.",
}


@dataclass
class _Rank:
    """A rank that has sent heartbeats: the last and when it came, their number, the steps that they showed."""

    beat: Heartbeat
    heard_at: float
    beats: int = 0
    waits: float = 0.0
    steps: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=_STEPS_OVER))

    def values(self, now: float) -> tuple[float | None, ...]:
        """Return the values of ``_OF_RANKS``."""
        (first, began), (last, ended) = self.steps[0], self.steps[-1]
        step_s = (ended - began) / (last - first) if last > first else None
        return self.beat.step, step_s, self.waits, now - self.heard_at, self.beat.memory


class Endpoint(Feature):
    """Serves the state of all ranks, and the metrics that the script logs, over HTTP in threads of rank 0.

    Args:
        host: the address to listen at.
        port: the port; 0 for a free one.

    Attributes:
        port: the port that it listens at.
    """

    def __init__(self, host: str, port: int) -> None:
        self._host = host
        self.port: int = port
        self._ranks: dict[int, _Rank] = {}
        self._logged: dict[str, float] = {}
        self._files: list[Path] = []

    def plug_in(self, sockets: Sockets) -> None:
        """Open the endpoint. Collective.

        Raises:
            ConfigError: rank 0 can't listen there; on every rank.
        """
        communicator, job = sockets.communicator, current()
        watch = None if job is None else job.watch
        members = (Member(0, socket.gethostname(), os.getpid(), 0),) if watch is None else watch.members
        communicator.on_main(lambda: self.open(members, communicator.collectives.pulse))
        if communicator.is_main:  # the hooks of the others cost nothing
            sockets.hooks.add_hook(self)
        if watch is not None:
            watch.observe(self.observe if communicator.is_main else None)

    def open(self, members: Sequence[Member], pulse: Pulse) -> None:
        """Begin to serve. ConfigError is raised if the address can't be listened at.

        Args:
            members: all processes, by rank.
            pulse: what this process is doing, since there are no heartbeats in a world of one.
        """
        self._members, self._pulse, self._script_thread = members, pulse, threading.get_ident()
        self._about = {"id": uuid4().hex, "host": socket.gethostname(), "version": version("unitrain")}
        # Without auto_describe, which would collect at once, from ranks that have sent nothing.
        registry = CollectorRegistry(auto_describe=False)
        registry.register(cast(Collector, self))
        try:
            self._server, _ = start_http_server(self.port, self._host, registry)
        except OSError as error:
            raise ConfigError(
                f"rank 0 can't serve metrics at {self._host}, port {self.port}, on {self._about['host']}: "
                f"{error.strerror}. Set metrics.port to 0 for any free port, or metrics.host to an address of its host."
            ) from error
        close_in_children(self._server.socket)  # a worker that outlives this process would keep the port
        self.port = self._server.server_port
        self._text = json.dumps({"address": self._host, "port": self.port, **self._about})
        print_stderr(f"unitrain: metrics at http://{self._host}:{self.port}/metrics, on {self._about['host']}")

    def observe(self, rank: int, beat: Heartbeat, now: float) -> None:
        """Record a heartbeat. The work does not grow with the number of ranks."""
        record = self._ranks.setdefault(rank, _Rank(beat, now))
        record.beat, record.heard_at, record.beats = beat, now, record.beats + 1
        # A moving average, so that the work and the memory are the same however long the job runs.
        record.waits += (beat.waits - record.waits) / min(record.beats, _WAITS_OVER)
        if not record.steps or record.steps[-1][0] != beat.trained[0]:
            record.steps.append((beat.trained[0], now))

    def logged(self, metrics: Mapping[str, float]) -> None:
        """Serve the metrics that the script logs."""
        # A new dict: a request may be going through the other one, in a thread.
        self._logged = {**self._logged, **metrics}

    def collect(self) -> Iterator[Any]:
        """Yield all metrics, for prometheus_client."""
        now = time.monotonic()
        if len(self._members) == 1:
            pulse, use = self._pulse, (resident_memory(), call_site.is_loading(self._script_thread))
            self.observe(0, Heartbeat(pulse.phase, pulse.step, 0.0, "", 0.0, (pulse.step, 0), *use), now)
        yield InfoMetricFamily("unitrain_job", "The job.", self._about)
        yield GaugeMetricFamily("unitrain_ranks", "Number of ranks.", len(self._members))
        labels = ("rank", "host")
        families = [GaugeMetricFamily(f"unitrain_{name}", text, labels=labels) for name, text in _OF_RANKS.items()]
        phases = GaugeMetricFamily("unitrain_phase", "1, with what the rank does.", labels=(*labels, "phase"))
        ranks = sorted(self._ranks.copy().items())
        for rank, record in ranks:
            label = (str(rank), self._members[rank].host)
            for family, value in zip(families, record.values(now), strict=True):
                if value is not None:
                    family.add_metric(label, value)
            beat = record.beat
            phases.add_metric((*label, "data" if beat.loads and not beat.waits else beat.phase), 1)
        yield from (*families, phases)
        least, slowest = min(((record.waits, rank) for rank, record in ranks), default=(1.0, 0))
        # The rank that the others wait for is the one that waits least itself.
        if least < median([record.waits for _, record in ranks] or [0.0]) - _SLOWER:
            yield GaugeMetricFamily("unitrain_slowest_rank", "Number of the rank that the others wait for.", slowest)
        logged = GaugeMetricFamily("unitrain_logged", "Latest value that the script has logged.", labels=("name",))
        for name, number in self._logged.items():
            logged.add_metric((name,), number)
        yield logged

    def at_folder(self, folder: str | Path) -> None:
        """Leave the address in a folder of the run, unless it is a URL, until the endpoint is closed."""
        where = parsed(folder)
        if isinstance(where, Path):
            try:
                where.mkdir(parents=True, exist_ok=True)
                (where / FILE).write_text(self._text, encoding="utf-8")
                self._files.append(where / FILE)
            except OSError as error:
                print_stderr(f"unitrain: {where / FILE}, for unitrain top, can't be written: {error.strerror}.")

    def at_close(self) -> None:
        """Close the port, and remove the address from the folders."""
        for file in self._files:
            with suppress(OSError):
                if file.read_text(encoding="utf-8") == self._text:  # and not a later job's
                    file.unlink()
        self._server.shutdown()
        self._server.server_close()
