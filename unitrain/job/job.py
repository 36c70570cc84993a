"""The job that this process belongs to: its pulse, its watch, and how it stops."""

from __future__ import annotations

import os
from typing import Any

from unitrain import call_site
from unitrain.communication.backend import Backend
from unitrain.communication.communicator import Communicator
from unitrain.config import StrategyConfig
from unitrain.errors import LaunchError, UnitrainError
from unitrain.job.joining.authentication import authenticate
from unitrain.job.joining.handshake import handshake
from unitrain.job.joining.self_test import check_collectives
from unitrain.job.joining.start_watch import watched_start
from unitrain.job.watch.boundaries import Boundaries
from unitrain.job.watch.exit_watch import watch_exit
from unitrain.job.watch.messages import Exits
from unitrain.job.watch.stopping import Stopping
from unitrain.job.watch.watch import Watch
from unitrain.launch.detect import Launch
from unitrain.pulse import CLOSING, Pulse

# A library's error about another rank's death may arrive before the hub's verdict on that rank.
CAUSE_S = 3.0
_current: Job | None = None


def join(backend: Backend, config: StrategyConfig, launch: Launch) -> tuple[Communicator, Job]:
    """Start a backend and join the other processes. The job becomes the current one. Collective.

    Blocks until all ranks have come, or ``timeout_s`` has passed.

    Args:
        backend: a backend that has not been started.
        config: the resolved settings.
        launch: how this process was started.

    Returns:
        The communicator and the job.

    Raises:
        BackendError: the backend's collectives fail their self-test.
        ConfigError: the ranks run with different settings, versions or scripts, or do not share their secret.
        CommunicationError: not all ranks have come in time.
        LaunchError: the backend sees another world than the launcher has started.
    """
    # Nothing else notices a rank that ends before the watch is connected.
    with watched_start(launch, config):
        _start(backend, launch)
        communicator = Communicator(backend)
        try:
            # First of all: the handshake itself needs collectives that are right.
            if backend.world_size > 1:
                check_collectives(backend)
            job = Job(communicator, config, launch, backend)
        except UnitrainError:
            communicator.collectives.close(failed=True)
            raise
    global _current
    _current = job
    # Another one than the handshake's, which had neither a watch to compare calls by nor a key to sign pickles with.
    return Communicator(backend, peers=job.watch, compares=config.debug, key=job.secret_key), job


def _start(backend: Backend, launch: Launch) -> None:
    """Start a backend, and check that it sees the world that the launcher has started."""
    # A wrong rank would be noticed as a wrong model only.
    seen = backend.start()
    if seen != (backend.rank, backend.world_size):
        backend.close(failed=True)
        raise LaunchError(
            f"according to {launch.launcher} this process is rank {backend.rank} of {backend.world_size}, but backend "
            f"{backend.name!r} returned {seen} as its rank and world size. Detected from "
            f"{', '.join(launch.evidence) or 'the absence of launcher variables'}."
        )


class Job:
    """The membership of this process in a job. Runs the handshake and starts the watch. Collective.

    Attributes:
        launch: how this process was started.
        pulse: what this process is doing.
        node_rank: rank of its host.
        watch: sends heartbeats to rank 0 and ends this process when the job ends; None in a world of one.
        secret_key: the job's key; None if the ranks share no secret.
        stopping: stops this process at the same boundary as the others.
        failed: whether this process is ending because of an error; it then does not wait for other ranks.
        ended: whether it is leaving, or has left, the job.
    """

    def __init__(self, communicator: Communicator, config: StrategyConfig, launch: Launch, backend: Backend) -> None:
        self.launch = launch
        self.pulse: Pulse = communicator.collectives.pulse
        self.node_rank: int = launch.node_rank or 0
        self.failed = False
        self.ended: bool = False
        self._backend = type(backend)
        self.secret_key: bytes | None = None
        boundaries = Boundaries(self.pulse)
        self.watch: Watch | None = None
        if communicator.world_size > 1:
            key = authenticate(communicator, backend, launch, config.timeout_s, os.environ)
            self.secret_key = key.value if key.is_secret else None
            members = handshake(communicator, config, type(backend))
            # Some launchers, such as mpirun, do not number the hosts: they are numbered in the order of the ranks.
            if launch.node_rank is None:
                hosts = [member.host for member in members]
                self.node_rank = list(dict.fromkeys(hosts)).index(hosts[communicator.rank])
            self.watch = Watch(communicator, members, boundaries, config, launch, key.value)
            watch_exit(str(self.watch), self.pulse, config.timeout_s)
        # A single process has no hub to agree with, but is stopped by signals as well.
        send = None if self.watch is None else self.watch.send
        self.stopping: Stopping = Stopping(boundaries, self.pulse, send, is_main=communicator.is_main)

    def is_secondary(self, error: BaseException | None) -> bool:
        """Return whether an error is, or was caused by, one that the library raises when another rank has gone.

        Args:
            error: the error, with its chain of causes; None for no error.
        """
        while error is not None:
            if self._backend.is_engine_error(error):
                return True
            error = error.__cause__ or error.__context__
        return False

    def abandon(self) -> None:
        """Leave the job before it has begun, since all ranks refuse its settings. The process may join another."""
        global _current
        self.ended = True
        self.leave()
        _current = None

    def report_exit(self, code: Any) -> None:
        """Tell the hub the exit code of this process, unless it is 0, for its message on a rank that others wait for.

        Args:
            code: the argument of ``sys.exit``.
        """
        if code and self.watch is not None:
            self.watch.send(Exits(f"called sys.exit({code!r})"))

    def meet(self, code: Any) -> None:
        """Wait until every rank has come to its end. Collective, but over the watch's connections.

        A rank that still makes collective calls would take one of this rank's for its counterpart: gloo aborts.

        Args:
            code: as in ``report_exit``.
        """
        self.report_exit(code)
        self.compare(CLOSING)

    def compare(self, call: str) -> None:
        """Wait until every rank has come to a call. The job ends if one makes another. Collective, as ``meet`` is.

        Args:
            call: the call, and its arguments as far as they must be the same on all ranks.
        """
        if self.watch is not None:
            with self.pulse.within(call):
                self.watch.compare_calls(call, call_site.current())

    def leave(self) -> None:
        """Leave the job. Blocks until every rank has reached its end, or for seconds if rank 0 has gone."""
        if self.watch is not None:
            self.watch.close()


def current() -> Job | None:
    """Return the job that this process belongs to, or belonged to last; None before the first."""
    return _current


def _leave_in_child() -> None:
    """Forget the job in a forked child: its connections and its place among the ranks are the parent's."""
    global _current
    _current = None


os.register_at_fork(after_in_child=_leave_in_child)
