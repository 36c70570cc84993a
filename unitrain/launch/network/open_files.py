"""The limit of open files on rank 0, to which every rank opens connections: one to the store, one to the hub."""

from __future__ import annotations

import os
import resource
import sys

from unitrain.errors import LaunchError

# File descriptors for everything else: how many rank 0 should have, and with how few it can't work.
_OTHERS, _FEWEST_OTHERS = 512, 64


def allow_connections(world_size: int) -> None:
    """Raise this process's limit of open files if one more connection to every rank needs that.

    Args:
        world_size: the number of ranks.

    Raises:
        LaunchError: the hard limit, which only root can raise, is too low.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = sys.maxsize if hard == resource.RLIM_INFINITY else hard
    # /dev/fd lists the descriptors of this process, on Linux as on macOS.
    needed = len(os.listdir("/dev/fd")) + world_size
    if most < needed + _FEWEST_OTHERS:
        raise LaunchError(
            f"rank 0 needs connections to all {world_size} ranks, two to each, but may open only {most} files: raise "
            f"the limit for the processes of the job (ulimit -Hn {2 * world_size + _OTHERS}, or nofile in limits.conf)."
        )
    if soft != resource.RLIM_INFINITY and soft < needed + _OTHERS:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, needed + _OTHERS), hard))
