"""``ServedMetrics``: opens the endpoint on rank 0, for the heartbeats of all ranks and the metrics of the script."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING

from unitrain.errors import ConfigError
from unitrain.features.metrics_endpoint import MetricsSettings
from unitrain.job.job import current
from unitrain.job.watch.hub import Member
from unitrain.training.feature import Feature
from unitrain.training.loop.sockets import Sockets

if TYPE_CHECKING:
    from unitrain.features.metrics_endpoint.endpoint import Endpoint


class ServedMetrics(Feature):
    """Serves the state of all ranks, and the metrics that the script logs, on rank 0."""

    def __init__(self, settings: MetricsSettings) -> None:
        self._settings = settings
        self._endpoint: Endpoint | None = None

    def plug_in(self, sockets: Sockets) -> None:
        """Open the endpoint. Collective.

        Raises:
            ConfigError: rank 0 can't listen there, or lacks prometheus_client; on every rank.
        """
        job = current()
        watch = None if job is None else job.watch
        members = (Member(0, socket.gethostname(), os.getpid(), 0),) if watch is None else watch.members
        # Only rank 0 needs the package and a free port; on_main raises its error on every rank.
        sockets.communicator.on_main(lambda: self._open(members, sockets))
        if watch is not None:
            watch.observe(None if self._endpoint is None else self._endpoint.observe)

    def _open(self, members: Sequence[Member], sockets: Sockets) -> None:
        """Open the endpoint, on rank 0: the hooks of the others cost nothing."""
        if find_spec("prometheus_client") is None:
            raise ConfigError(
                "metrics.port needs the package prometheus_client, which rank 0 does not have: pip install "
                '"unitrain[metrics]", or leave metrics.port unset.'
            )
        from unitrain.features.metrics_endpoint.endpoint import Endpoint

        pulse = sockets.communicator.collectives.pulse
        self._endpoint = Endpoint(members, self._settings.host, self._settings.port or 0, pulse)
        sockets.hooks.add_hook(self._endpoint)
