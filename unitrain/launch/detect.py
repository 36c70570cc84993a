"""Launcher detection: reads rank, world size and rendezvous from environment variables into a ``Launch``.

``_BY_PRECEDENCE`` is the table of launchers. The first with variables that are set is used, unless UNITRAIN_LAUNCHER is
set, by hand or by ``unitrain.spawn``. An inner launcher comes before the one that usually starts it: torchrun inside
an srun step is torchrun.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from unitrain.errors import LaunchError, nearest
from unitrain.launch import slurm
from unitrain.launch.variables import OVERRIDE, Variables

Rendezvous = Literal["alone", "tcp", "served", "mpi", "horovod"]
_MASTER = ("MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Launch:
    """How this process was started: the launcher, and its place in the job. Read once, by ``detect``."""

    launcher: str
    """One of ``LAUNCHERS``: torchrun, horovodrun, mpirun, srun, env, spawn, or python (no launcher)."""
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node_rank: int | None = 0
    """Rank of this process's host; None (then on all ranks) if the launcher does not set it."""
    rendezvous: Rendezvous = "alone"
    """How the ranks find one another: a TCP store that rank 0 opens (tcp) or that the launcher keeps open (served),
    MPI (mpi), horovodrun's key-value server (horovod), or none needed (alone)."""
    address: str | None = None
    """Address of the rendezvous, as host:port; None with MPI, through which rank 0 broadcasts it."""
    step: str | None = None
    """SLURM's JOB.STEP, which tells apart jobs that come to one address; None with other launchers."""
    mpi: str | None = None
    """The MPI that the launcher belongs to: Open MPI 4 (or older), Open MPI 5 (or newer) or MPICH (or one based on it:
    Intel MPI, Cray MPICH, MVAPICH)."""
    elastic: bool = False
    """Whether horovodrun continues with other processes when one fails, and when hosts are added or removed."""
    evidence: tuple[str, ...] = ()
    """The variables that this was read from, as NAME=value."""


class _Place(NamedTuple):
    """The names of the variables that say which process this is."""

    rank: str
    world_size: str
    local_rank: str
    local_world_size: str | Callable[[Variables], int]
    """A function reads it where no variable is sure to hold it."""
    node_rank: str | None = None

    @staticmethod
    def under(prefix: str) -> _Place:
        """Return the usual names under a prefix."""
        return _Place(*(f"{prefix}_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")))

    def read(self, launcher: str, variables: Variables) -> Launch:
        """Read the place of this process in the job. A number that is missing or out of range is a LaunchError."""
        world = variables.integer(self.world_size, 1)
        if isinstance(self.local_world_size, str):
            local_world = variables.integer(self.local_world_size, 1, world)
        else:
            local_world = self.local_world_size(variables)
        if self.node_rank is None:
            # With all ranks on one host, its number needs no variable.
            node_rank = 0 if local_world == world else None
        else:
            node_rank = variables.integer(self.node_rank, 0, world - 1)
        return Launch(
            launcher,
            rank=variables.integer(self.rank, 0, world - 1),
            world_size=world,
            local_rank=variables.integer(self.local_rank, 0, local_world - 1),
            local_world_size=local_world,
            node_rank=node_rank,
        )


@dataclass(frozen=True)
class _Launcher:
    """A launcher, and how its variables are read."""

    name: str
    present: tuple[str, ...] | Callable[[Mapping[str, str]], bool]
    """Variables that show that it started this process, each on its own, or a function that finds out."""
    remedy: str
    """What to do if its variables are wrong."""
    place: _Place | None = None
    meet: Callable[[Variables, Launch], Launch] | None = None
    """Adds where the ranks meet if MASTER_ADDR and MASTER_PORT are not set; None if they must be set."""
    more: Callable[[Variables, Launch], Launch] | None = None
    """Reads and checks what else it tells."""
    mpi: str | None = None
    """As in ``Launch``, where it is always the same."""

    def is_present(self, environ: Mapping[str, str]) -> bool:
        """Return whether this launcher has started the process, as far as its variables tell."""
        if callable(self.present):
            return self.present(environ)
        return any(name in environ for name in self.present)

    def read(self, variables: Variables) -> Launch:
        """Read the launch from the variables: first the place in the job, then where the ranks meet, then the rest."""
        if self.place is None:
            return Launch(self.name)
        launch = replace(self.place.read(self.name, variables), mpi=self.mpi)
        # The user's choice of an address comes first.
        if self.meet is None or any(name in variables for name in _MASTER):
            launch = replace(launch, rendezvous="tcp", address=variables.address(*_MASTER))
        else:
            launch = self.meet(variables, launch)
        return launch if self.more is None else self.more(variables, launch)


def _torchrun(variables: Variables, launch: Launch) -> Launch:
    """Read whether torchrun, or ``unitrain.spawn``, keeps a store open for the ranks."""
    if launch.launcher == "torchrun":
        variables.integer("TORCHELASTIC_RESTART_COUNT")  # evidence that tells apart the processes of this host only
    served = variables.matching("TORCHELASTIC_USE_AGENT_STORE", "True|False", "True or False") == "True"
    return replace(launch, rendezvous="served" if served else "tcp")


def _horovodrun_server(variables: Variables) -> str:
    """Read the address of horovodrun's key-value server."""
    return variables.address("HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT")


def _horovodrun(variables: Variables, launch: Launch) -> Launch:
    """Check the variables that Horovod itself will read, and read whether the driver is elastic."""
    # Horovod aborts or hangs if these are wrong. Every other host runs at least one process of the job.
    hosts = variables.integer("HOROVOD_CROSS_SIZE", 1, launch.world_size - launch.local_world_size + 1)
    variables.integer("HOROVOD_CROSS_RANK", 0, hosts - 1)
    if "HOROVOD_CPU_OPERATIONS" in variables:
        variables.matching("HOROVOD_CPU_OPERATIONS", "gloo", "gloo")
    _horovodrun_server(variables)
    elastic = variables.environ.get("HOROVOD_ELASTIC") == "1"
    if elastic:
        variables.string("HOROVOD_HOSTNAME")
    return replace(launch, elastic=elastic)


def _open_mpi(variables: Variables, launch: Launch) -> Launch:
    """Read which Open MPI has started this process: 4 uses ORTE, and 5 uses PRRTE."""
    # Open MPI 5 starts its processes through PRRTE, and can't talk to a library of Open MPI 4.
    is_5 = "OMPI_VERSION" in variables or "PRTE_LAUNCHED" in variables
    return replace(launch, mpi="Open MPI 5" if is_5 else "Open MPI 4")


def _is_hydra(environ: Mapping[str, str]) -> bool:
    """Return whether MPICH's hydra, or another process manager with its variables, has started this process."""
    # Set by hydra, which srun does not imitate.
    if "MPI_LOCALRANKID" in environ or "MPI_LOCALNRANKS" in environ:
        return True
    # srun --mpi=pmi2 sets these two as well.
    return ("PMI_RANK" in environ or "PMI_SIZE" in environ) and not slurm.in_step(environ)


def _tasks_on_a_node(variables: Variables) -> int:
    """Return the number of a Flux job's tasks on a node: Flux tells the numbers of tasks and nodes only."""
    return -(-variables.integer("FLUX_JOB_SIZE", 1) // variables.integer("FLUX_JOB_NNODES", 1))


def _meet_in_step(variables: Variables, launch: Launch) -> Launch:
    """Compute the address where the ranks of a SLURM step meet: the same on every rank, without asking."""
    several = launch.local_world_size < launch.world_size
    return replace(launch, rendezvous="tcp", address=slurm.step_address(variables, several_hosts=several))


def _srun(variables: Variables, launch: Launch) -> Launch:
    """Check that the variables are the step's, and read its id."""
    if "SLURM_STEP_NUM_TASKS" in variables:
        # They differ in a batch script that was submitted from inside a step, and has inherited the step's variables.
        tasks = variables.used["SLURM_NTASKS"]
        variables.matching("SLURM_STEP_NUM_TASKS", re.escape(tasks), f"{tasks!r}, the value of SLURM_NTASKS")
    return replace(launch, step="{}.{}".format(*slurm.step_ids(variables)))


def _processes_here(variables: Variables) -> int:
    """Return the number of processes on this host: all of them if the ranks meet at a loopback address."""
    # Otherwise only the user knows how many processes are on each host.
    host = variables.host("MASTER_ADDR")
    on_loopback = host in ("localhost", "::1", "ip6-localhost") or host.startswith("127.")
    world = variables.integer("WORLD_SIZE", 1)
    if on_loopback and "LOCAL_WORLD_SIZE" not in variables:
        return world
    return variables.integer("LOCAL_WORLD_SIZE", 1, world)


_WITHOUT_SIZE = {"PMIX_RANK": "a PMIx launcher such as prterun", "MPT_LRANK": "mpiexec_mpt of HPE's MPT"}
_TORCHRUN_PLACE = _Place("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
_LEAVE = "and leave its variables as they are"

_SPAWN = _Launcher("spawn", (), "Start the processes with unitrain.spawn", _TORCHRUN_PLACE, more=_torchrun)
_ENV = _Launcher(
    "env",
    ("RANK", "WORLD_SIZE"),
    "Give every process RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as torchrun does",
    _Place("RANK", "WORLD_SIZE", "LOCAL_RANK", _processes_here),
)
"""Variables that were set by hand or by a cluster."""
_PYTHON = _Launcher("python", lambda environ: True, "")


def _mpirun(
    start: str,
    place: _Place,
    more: Callable[[Variables, Launch], Launch] | None = None,
    *,
    present: Callable[[Mapping[str, str]], bool] | None = None,
) -> _Launcher:
    """Return a launcher of MPI: rank 0 broadcasts the address of its store through MPI."""
    # Either is enough, so that a missing one is reported and does not make every process train alone.
    shows = present or (place.rank, place.local_rank)

    def meet(_variables: Variables, launch: Launch) -> Launch:
        return replace(launch, rendezvous="mpi")

    # All are called mpirun: to the rest of the package they are one launcher. All but Open MPI have the ABI of MPICH.
    return _Launcher("mpirun", shows, f"Start the job with {start} {_LEAVE}", place, meet, more, "MPICH")


_BY_PRECEDENCE = (
    _Launcher(
        "torchrun",  # and python -m torch.distributed.launch
        ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"),
        f"Start the job with torchrun --nproc-per-node N SCRIPT {_LEAVE}",
        _TORCHRUN_PLACE,
        more=_torchrun,
    ),
    _Launcher(
        "horovodrun",  # with the gloo controller
        ("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_GLOO_RENDEZVOUS_ADDR"),
        f"Start the job with horovodrun --gloo -np N python SCRIPT {_LEAVE}",
        _Place.under("HOROVOD"),
        lambda variables, launch: replace(launch, rendezvous="horovod", address=_horovodrun_server(variables)),
        _horovodrun,
    ),
    # Of Open MPI; horovodrun's MPI controller looks the same. OMPI_COMM_WORLD_NODE_RANK is the rank among all jobs on
    # the node, not the rank of the node.
    _mpirun("mpirun -np N python SCRIPT", _Place.under("OMPI_COMM_WORLD"), _open_mpi),
    # Of LSF, with an MPI other than Spectrum MPI, which has the variables of Open MPI.
    _mpirun("jsrun -n N python SCRIPT", _Place.under("JSM_NAMESPACE")),
    _mpirun(
        "mpiexec -n N --ppn N python SCRIPT (PALS)",  # HPE's
        _Place("PALS_RANKID", "PMI_SIZE", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE", "PALS_NODEID"),
    ),
    _mpirun(
        "flux run -n N python SCRIPT",
        _Place("FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID", _tasks_on_a_node),
    ),
    _mpirun("mpirun_rsh -np N HOSTS python SCRIPT", _Place.under("MV2_COMM_WORLD")),  # of MVAPICH2
    _mpirun(
        "mpiexec -n N python SCRIPT (MPICH, Intel MPI)",  # and others that are based on hydra; also called mpirun
        _Place("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
        present=_is_hydra,
    ),
    _Launcher(
        "srun",
        slurm.in_step,
        f"Start the job with srun -n N python SCRIPT {_LEAVE}",
        _Place("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", slurm.tasks_here, "SLURM_NODEID"),
        _meet_in_step,
        _srun,
    ),
    _ENV,
    _PYTHON,
)

LAUNCHERS = tuple(dict.fromkeys(launcher.name for launcher in (*_BY_PRECEDENCE, _SPAWN)))
LOCAL_RANKS = tuple(dict.fromkeys(launcher.place.local_rank for launcher in _BY_PRECEDENCE if launcher.place))
"""The variables that hold the local rank."""


def detect(environ: Mapping[str, str]) -> Launch:
    """Return how this process was started, according to ``environ``.

    A pure function: does not read ``os.environ``, and imports neither torch nor an MPI nor Horovod.

    Args:
        environ: the environment of the process.

    Raises:
        LaunchError: a variable of the launcher is missing or wrong, two launchers contradict each other, or an unknown
            launcher has started several processes.
    """
    present = [launcher for launcher in _BY_PRECEDENCE if launcher.is_present(environ)]
    # The last one is python, which is always present.
    chosen = _overridden(environ) or present[0]
    # Otherwise every process of such a launcher would train the whole job alone.
    unsized = next((name for name in _WITHOUT_SIZE if name in environ), None)
    if chosen is _PYTHON and OVERRIDE not in environ and unsized is not None:
        raise LaunchError(
            f"{unsized} is {environ[unsized]!r}, but no variable gives the world size: this process was started by "
            f"{_WITHOUT_SIZE[unsized]}. Use mpirun, or give every process RANK, WORLD_SIZE, LOCAL_RANK, "
            f"LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT, or set {OVERRIDE}=python to run this process alone."
        )
    variables = Variables(environ, chosen.name, chosen.remedy)
    launch = chosen.read(variables)
    # torchrun sets RANK itself. Otherwise it may be left from an earlier shell, or be meant: only the user knows.
    if _ENV in present and OVERRIDE not in environ and launch.launcher not in ("env", "torchrun"):
        _refuse_contradiction(launch, environ)
    return replace(launch, evidence=tuple(f"{name}={value}" for name, value in variables.used.items()))


def _overridden(environ: Mapping[str, str]) -> _Launcher | None:
    """Return the launcher that UNITRAIN_LAUNCHER names; None if it is not set."""
    name = environ.get(OVERRIDE)
    if name is None:
        return None
    named = [launcher for launcher in (*_BY_PRECEDENCE, _SPAWN) if launcher.name == name]
    if not named:
        raise LaunchError(
            f"{OVERRIDE} is {name!r}, but must be one of {', '.join(LAUNCHERS)}, or unset.{nearest(name, LAUNCHERS)}"
        )
    # Two share the name mpirun: take the one with variables that are set, else the first, which says what is missing.
    return next((launcher for launcher in named if launcher.is_present(environ)), named[0])


def _refuse_contradiction(launch: Launch, environ: Mapping[str, str]) -> None:
    """Raise if RANK and WORLD_SIZE, set by hand, contradict the launcher."""
    by_hand = (environ.get("RANK", str(launch.rank)), environ.get("WORLD_SIZE", str(launch.world_size)))
    if by_hand != (str(launch.rank), str(launch.world_size)):
        raise LaunchError(
            f"according to {launch.launcher} this process is rank {launch.rank} of {launch.world_size}, but according "
            f"to RANK and WORLD_SIZE rank {by_hand[0]!r} of {by_hand[1]!r}. Unset RANK and WORLD_SIZE, or choose with "
            f"{OVERRIDE}={launch.launcher} or {OVERRIDE}=env."
        )
