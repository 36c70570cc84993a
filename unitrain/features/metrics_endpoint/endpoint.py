"""The endpoint for Prometheus: the state of the ranks by their heartbeats, and the metrics that the script logs."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from unitrain import call_site
from unitrain.errors import ConfigError
from unitrain.job.job import current
from unitrain.job.watch.hub import Member
from unitrain.job.watch.link import close_in_children
from unitrain.job.watch.messages import Heartbeat
from unitrain.process import print_stderr, resident_memory
from unitrain.pulse import Pulse
from unitrain.training.feature import Feature
from unitrain.training.loop.sockets import Sockets

_OF_RANKS = {
    "step": "Optimizer steps of the run so far.",
    "waiting": "1 within a step, or another call that waits for other ranks, else 0.",
    "heartbeat_age_seconds": "Seconds since the last heartbeat.",
    "resident_memory_bytes": "Host memory of the process.",
}


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
        self._heard: dict[int, tuple[Heartbeat, float]] = {}  # the last heartbeat of each rank, and when it came
        self._logged: dict[str, float] = {}

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
        self._host_name = socket.gethostname()
        # Without auto_describe, which would collect at once, from ranks that have sent nothing.
        registry = CollectorRegistry(auto_describe=False)
        registry.register(cast(Collector, self))
        try:
            self._server, _ = start_http_server(self.port, self._host, registry)
        except OSError as error:
            raise ConfigError(
                f"rank 0 can't serve metrics at {self._host}, port {self.port}, on {self._host_name}: "
                f"{error.strerror}. Set metrics.port to 0 for any free port, or metrics.host to an address of its host."
            ) from error
        close_in_children(self._server.socket)  # a worker that outlives this process would keep the port
        self.port = self._server.server_port
        print_stderr(f"unitrain: metrics at http://{self._host}:{self.port}/metrics, on {self._host_name}")

    def observe(self, rank: int, beat: Heartbeat, now: float) -> None:
        """Record a heartbeat."""
        self._heard[rank] = beat, now

    def logged(self, metrics: Mapping[str, float]) -> None:
        """Serve the metrics that the script logs."""
        # A new dict: a request may be going through the other one, in a thread.
        self._logged = {**self._logged, **metrics}

    def collect(self) -> Iterator[Any]:
        """Yield all metrics, for prometheus_client."""
        now = time.monotonic()
        if len(self._members) == 1:
            memory, loads = resident_memory(), call_site.is_loading(self._script_thread)
            self.observe(0, Heartbeat(self._pulse.phase, self._pulse.step, 0.0, memory=memory, loads=loads), now)
        yield GaugeMetricFamily("unitrain_ranks", "Number of ranks.", len(self._members))
        labels = ("rank", "host")
        families = [GaugeMetricFamily(f"unitrain_{name}", text, labels=labels) for name, text in _OF_RANKS.items()]
        phases = GaugeMetricFamily("unitrain_phase", "1, with what the rank does.", labels=(*labels, "phase"))
        for rank, (beat, heard_at) in sorted(self._heard.copy().items()):
            label = (str(rank), self._members[rank].host)
            for family, value in zip(families, (beat.step, beat.waits, now - heard_at, beat.memory), strict=True):
                family.add_metric(label, value)
            phases.add_metric((*label, "data" if beat.loads and not beat.waits else beat.phase), 1)
        yield from (*families, phases)
        logged = GaugeMetricFamily("unitrain_logged", "Latest value that the script has logged.", labels=("name",))
        for name, number in self._logged.items():
            logged.add_metric((name,), number)
        yield logged

    def at_close(self) -> None:
        """Close the port."""
        self._server.shutdown()
        self._server.server_close()
