"""``ChangedHosts``: saves and goes on with other hosts when they have been added or removed."""

from __future__ import annotations

import atexit
import os

from unitrain.features.horovod_elastic.again import start_again
from unitrain.job.job import current
from unitrain.job.watch.stopping import Stopped
from unitrain.process import print_stdout
from unitrain.training.feature import Feature
from unitrain.training.loop.sockets import Sockets

_REQUEST = "hosts_changed"


class ChangedHosts(Feature):
    """Stops the run on all ranks at the same boundary, after saving, and starts the script again at the exit.

    Attributes:
        goes_on: whether this process has stopped to go on with other hosts.
    """

    def __init__(self) -> None:
        self.goes_on: bool = False
        self._waits = False  # hosts have changed before there was a checkpoint

    def plug_in(self, sockets: Sockets) -> None:
        """Watch the hosts, if the launcher may change them."""
        if not sockets.backend.launch.elastic:
            return
        self._stopping = stopping = sockets.stopping
        self._communicator = sockets.communicator
        stopping.add_action(_REQUEST, lambda _: self._stop())
        sockets.backend.watch_hosts(lambda: stopping.request(_REQUEST))
        atexit.register(self._start_again)  # after the strategy was closed, which is registered later
        super().plug_in(sockets)

    def at_boundary(self) -> None:
        """Stop now if hosts have changed before there was a checkpoint."""
        if self._waits and self._stopping.checkpoint is not None:
            self._waits = False
            self._stopping.request(_REQUEST)

    def _stop(self) -> None:
        """Save a checkpoint, and stop; not before there is a checkpoint, from which to go on. Collective."""
        checkpoint = self._stopping.checkpoint
        if checkpoint is None:
            self._waits = True
            return
        where, step = checkpoint.save_now(), self._communicator.collectives.pulse.step
        if self._communicator.is_main:
            print_stdout(f"unitrain: hosts have changed: stopped after step {step}, saved in {where}.")
        self.goes_on = True
        raise Stopped(os.EX_TEMPFAIL)  # not seen by the launcher, unless the process can't be started again

    def _start_again(self) -> None:
        if self.goes_on and current() is not None:  # else a child that the script has forked
            start_again()
