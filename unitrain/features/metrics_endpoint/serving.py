"""``ServedMetrics``: opens the endpoint on rank 0, and tells it what the ranks and the script report."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
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
    """Serves what the heartbeats of all ranks show, and what the script logs, on rank 0."""

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
        sockets.communicator.on_main(lambda: self._open(members, sockets))
        if self._endpoint is not None:
            sockets.hooks.add_hook(self)
        if watch is not None:
            watch.observe(None if self._endpoint is None else self._endpoint.observe)

    def _open(self, members: Sequence[Member], sockets: Sockets) -> None:
        if find_spec("prometheus_client") is None:
            raise ConfigError(
                "metrics.port needs the package prometheus_client, which rank 0 does not have: pip install "
                '"unitrain[metrics]", or leave metrics.port unset.'
            )
        from unitrain.features.metrics_endpoint.endpoint import Endpoint

        pulse = sockets.communicator.collectives.pulse
        self._endpoint = Endpoint(members, self._settings.host, self._settings.port or 0, pulse)

    def at_folder(self, folder: str | Path) -> None:
        """Leave the address in the folder."""
        if self._endpoint is not None:
            self._endpoint.announce(folder)

    def logged(self, metrics: Mapping[str, float]) -> None:
        """Serve what the script logs."""
        if self._endpoint is not None:
            self._endpoint.log(metrics)

    def at_close(self) -> None:
        """Close the port."""
        if self._endpoint is not None:
            self._endpoint.close()
