"""Going on in another world under horovodrun's elastic driver, when a rank has failed or hosts have changed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from unitrain.communication.backend import Backend
from unitrain.config import StrategyConfig
from unitrain.errors import ConfigError

if TYPE_CHECKING:
    from unitrain.launch.detect import Launch
    from unitrain.training.feature import Feature


def before_joining(launch: Launch, backend: type[Backend]) -> None:
    """Have survivors of a failure run again in place of ending, if the launcher is elastic."""
    if not launch.elastic:
        return
    if backend.watch_hosts is Backend.watch_hosts:
        raise ConfigError(
            f"backend {backend.name!r} can't go on with other hosts, as horovodrun --host-discovery-script wants it "
            "to: use backend horovod, or restart the job with unitrain run --max-restarts 5 -- horovodrun -np N ..."
        )
    from unitrain.features.horovod_elastic.again import start_again
    from unitrain.job.ending import succeed_by

    succeed_by(start_again)


def make(config: StrategyConfig) -> Feature:
    """Return the feature that saves and goes on when hosts have changed."""
    from unitrain.features.horovod_elastic.hosts import ChangedHosts

    return ChangedHosts()
