"""This process's part in its job: what it is doing, who watches it, and how it stops or ends."""

from __future__ import annotations

from unitrain.backend import Backend
from unitrain.communicator import Communicator
from unitrain.config import StrategyConfig
from unitrain.errors import BackendError, LaunchError, UnitrainError
from unitrain.job.handshake import introduce
from unitrain.job.stopping import Boundaries, Stopping
from unitrain.job.verb_check import check_verbs
from unitrain.job.watch import Watch
from unitrain.launch.detect import Launch
from unitrain.pulse import Pulse

_current: Job | None = None


def join(backend: Backend, config: StrategyConfig, launch: Launch) -> tuple[Communicator, Job]:
    """Start a backend, and let this process join the others; it becomes the current job. Collective.

    Args:
        backend: not started yet.
        config: the settings.
        launch: who started this process.

    Raises:
        BackendError: the backend does not do what it must.
        LaunchError: it sees another world than the launcher made.
        ConfigError: the ranks have other settings, other versions or other code.
        CommunicationError: the ranks can't reach one another.
    """
    _start(backend, launch)
    communicator = Communicator(backend, Pulse())
    try:
        if backend.world_size > 1:
            check_verbs(backend)
        job = Job(communicator, config, launch, type(backend))
    except UnitrainError:
        communicator.close(failed=True)
        raise
    global _current
    _current = job
    return Communicator(backend, job.pulse, peers=job.watch, compares=config.debug), job


def _start(backend: Backend, launch: Launch) -> None:
    seen = backend.start()
    if not (isinstance(seen, tuple) and len(seen) == 2 and all(isinstance(number, int) for number in seen)):
        raise BackendError(
            f"backend {backend.name!r}: start() must return this process's rank and the world size, but returned "
            f"{seen!r}."
        )
    if seen != (backend.rank, backend.world_size):
        backend.close(failed=True)
        raise LaunchError(
            f"{launch.launcher} says that this is rank {backend.rank} of {backend.world_size}, but backend "
            f"{backend.name} sees rank {seen[0]} of {seen[1]}. Evidence: {', '.join(launch.evidence) or 'none'}."
        )


class Job:
    """One process of a job. Collective: the ranks compare what they run, and watch one another from now on.

    Args:
        communicator: of this process.
        config: the settings.
        launch: who started this process.
        backend: the backend's class.

    Attributes:
        launch: as given.
        pulse: what this process is doing.
        node_rank: number of this process's host.
        watch: reports this process to rank 0 and ends it when the job ends; None where there is one process.
        stopping: stops this process when all are to stop.
        failed: whether this process is ending because of an error: it then waits for nobody.
        ended: whether it is leaving, or has left, the job.

    Raises:
        ConfigError: the ranks have other settings, other versions or other code.
        CommunicationError: rank 0 can't be reached.
    """

    def __init__(
        self, communicator: Communicator, config: StrategyConfig, launch: Launch, backend: type[Backend]
    ) -> None:
        self.launch = launch
        self.pulse: Pulse = communicator.pulse
        self.node_rank: int = launch.node_rank or 0
        self.failed = False
        self.ended = False
        self._backend = backend
        boundaries = Boundaries(self.pulse)
        self.watch: Watch | None = None
        if communicator.world_size > 1:
            members = introduce(communicator, config, backend)
            if launch.node_rank is None:  # the launcher does not tell: hosts are numbered in the order of the ranks
                hosts = [member.host for member in members]
                self.node_rank = list(dict.fromkeys(hosts)).index(hosts[communicator.rank])
            one_host = launch.local_world_size == communicator.world_size
            self.watch = Watch(communicator, members, boundaries, config, one_host=one_host)
        self.stopping: Stopping = Stopping(boundaries, self.pulse, self.watch, is_main=communicator.is_main)

    def follows_from_another(self, error: BaseException | None) -> bool:
        """Return whether an error is, or comes from, what the backend's library raises where another rank has gone."""
        while error is not None:
            if self._backend.is_engine_error(error):
                return True
            error = error.__cause__ or error.__context__
        return False

    def leave(self) -> None:
        """Leave in good order, when every rank has come to its end."""
        if self.watch is not None:
            self.watch.close()


def current() -> Job | None:
    """Return the job that this process belongs to, or belonged to last."""
    return _current
