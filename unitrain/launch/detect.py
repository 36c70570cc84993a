"""Launcher detection: reads rank, world size and rendezvous from environment variables into a ``Launch``.

Launchers are looked for in this order. The first whose variables are set is used:

1. ``UNITRAIN_LAUNCHER``, set by hand (or by ``unitrain.spawn``) to one of ``LAUNCHERS``
2. torchrun, and with it ``python -m torch.distributed.launch``
3. horovodrun with the gloo controller
4. mpirun of Open MPI; horovodrun's MPI controller looks the same
5. mpirun or mpiexec of MPICH, Intel MPI and others based on hydra
6. srun
7. RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, set by hand or by a cluster (``env``)
8. none (``python``)

An inner launcher comes before the one that usually starts it: torchrun inside an srun step is torchrun.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from ipaddress import ip_address
from typing import Literal

from unitrain.errors import LaunchError, nearest
from unitrain.launch.slurm import MOST_IDS, first_host_of_groups, hosts, in_step, step_port

OVERRIDE = "UNITRAIN_LAUNCHER"

_MOST = 1_000_000
"""Upper bound for numbers of processes and restarts."""
_A_HOST = "a host name or address"

Rendezvous = Literal["alone", "tcp", "served", "mpi", "horovod"]


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
    """Address of the rendezvous, as host:port; None with MPI, through which rank 0 broadcasts it, and where SLURM does
    not tell it."""
    step: str | None = None
    """SLURM's ids of job and step, as JOB.STEP, which tell apart jobs that come to one address; None without srun."""
    mpi: str | None = None
    """The MPI that the launcher belongs to: Open MPI 4 (or older), Open MPI 5 (or newer) or MPICH (or Intel MPI)."""
    elastic: bool = False
    """Whether horovodrun goes on with other processes when one fails, and when hosts are added or removed."""
    also: tuple[str, ...] = ()
    """Other launchers whose variables are set too. They are ignored."""
    evidence: tuple[str, ...] = ()
    """The variables that this was read from, as NAME=value."""


@dataclass
class _Variables:
    """The variables of one launcher. A missing or wrong one is an error with its name, its value and a remedy."""

    environ: Mapping[str, str]
    launcher: str
    remedy: str
    used: dict[str, str] = field(default_factory=dict)

    def string(self, name: str, wanted: str = "set") -> str:
        value = self.environ.get(name)
        if not value:
            raise self.error(name, wanted)
        self.used[name] = value
        return value

    def matching(self, name: str, pattern: str, wanted: str) -> str:
        value = self.string(name, wanted)
        if not re.fullmatch(pattern, value, re.ASCII):
            raise self.error(name, wanted)
        return value

    def integer(self, name: str, low: int = 0, high: int = _MOST) -> int:
        wanted = f"an integer from {low} to {high}"
        value = int(self.matching(name, r"\d{1,18}", wanted))
        if not low <= value <= high:
            raise self.error(name, wanted)
        return value

    def host(self, name: str) -> str:
        value = self.string(name, _A_HOST)
        if not _is_host(value):
            raise self.error(name, _A_HOST)
        return value

    def error(self, name: str, wanted: str) -> LaunchError:
        state = f"is {self.environ[name]!r}" if name in self.environ else "is not set"
        by = "the variables" if self.launcher == "env" else f"the variables of {self.launcher}"
        return LaunchError(
            f"{name} {state}, but must be {wanted}: {by} show that this process is part of a job. {self.remedy}, "
            f"or set {OVERRIDE}=python to run this process alone."
        )

    def launch(
        self,
        *,
        rank: str,
        world_size: str,
        local_rank: str,
        local_world_size: str | int,
        node_rank: str | None = None,
    ) -> Launch:
        """Return the place of this process in the job, read from the variables with these names."""
        world = self.integer(world_size, 1)
        if isinstance(local_world_size, int):
            local_world = local_world_size
        else:
            local_world = self.integer(local_world_size, 1, world)
        return Launch(
            self.launcher,
            rank=self.integer(rank, 0, world - 1),
            world_size=world,
            local_rank=self.integer(local_rank, 0, local_world - 1),
            local_world_size=local_world,
            node_rank=self.integer(node_rank, 0, world - 1) if node_rank else 0 if local_world == world else None,
        )

    def master(self) -> str:
        """Return the address in MASTER_ADDR and MASTER_PORT."""
        return f"{self.host('MASTER_ADDR')}:{self.integer('MASTER_PORT', 1, 65535)}"

    @property
    def has_master(self) -> bool:
        """Whether MASTER_ADDR or MASTER_PORT is set; ``master`` raises if only one is."""
        return "MASTER_ADDR" in self.environ or "MASTER_PORT" in self.environ


def _read_torchrun(variables: _Variables) -> Launch:
    if variables.launcher == "torchrun":
        variables.integer("TORCHELASTIC_RESTART_COUNT")  # evidence that tells apart the processes of this host only
    served = variables.matching("TORCHELASTIC_USE_AGENT_STORE", "True|False", "True or False") == "True"
    return replace(
        variables.launch(
            rank="RANK",
            world_size="WORLD_SIZE",
            local_rank="LOCAL_RANK",
            local_world_size="LOCAL_WORLD_SIZE",
            node_rank="GROUP_RANK",
        ),
        rendezvous="served" if served else "tcp",
        address=variables.master(),
    )


def _read_horovodrun(variables: _Variables) -> Launch:
    launch = variables.launch(
        rank="HOROVOD_RANK",
        world_size="HOROVOD_SIZE",
        local_rank="HOROVOD_LOCAL_RANK",
        local_world_size="HOROVOD_LOCAL_SIZE",
    )
    # Horovod aborts or hangs if these are wrong. Every other host runs at least one process of the job.
    hosts = variables.integer("HOROVOD_CROSS_SIZE", 1, launch.world_size - launch.local_world_size + 1)
    variables.integer("HOROVOD_CROSS_RANK", 0, hosts - 1)
    if "HOROVOD_CPU_OPERATIONS" in variables.environ:
        variables.matching("HOROVOD_CPU_OPERATIONS", "gloo", "gloo")
    host = variables.host("HOROVOD_GLOO_RENDEZVOUS_ADDR")
    address = f"{host}:{variables.integer('HOROVOD_GLOO_RENDEZVOUS_PORT', 1, 65535)}"
    elastic = variables.environ.get("HOROVOD_ELASTIC") == "1"
    if elastic:
        variables.string("HOROVOD_HOSTNAME")
    if variables.has_master:
        return replace(launch, rendezvous="tcp", address=variables.master(), elastic=elastic)
    return replace(launch, rendezvous="horovod", address=address, elastic=elastic)


def _read_open_mpi(variables: _Variables) -> Launch:
    # OMPI_COMM_WORLD_NODE_RANK is the rank among all jobs on the node, not the rank of the node.
    launch = variables.launch(
        rank="OMPI_COMM_WORLD_RANK",
        world_size="OMPI_COMM_WORLD_SIZE",
        local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
        local_world_size="OMPI_COMM_WORLD_LOCAL_SIZE",
    )
    if "PMIX_RANK" in variables.environ or "PMIX_NAMESPACE" in variables.environ:
        # MPI_Init aborts or hangs if they are wrong.
        variables.matching("PMIX_RANK", str(launch.rank), f"'{launch.rank}', the value of OMPI_COMM_WORLD_RANK")
        variables.string("PMIX_NAMESPACE")
    is_5 = _has_any("OMPI_VERSION", "PRTE_LAUNCHED")(variables.environ)
    return _with_mpi(launch, variables, "Open MPI 5" if is_5 else "Open MPI 4")


def _read_hydra(variables: _Variables) -> Launch:
    launch = variables.launch(
        rank="PMI_RANK", world_size="PMI_SIZE", local_rank="MPI_LOCALRANKID", local_world_size="MPI_LOCALNRANKS"
    )
    return _with_mpi(launch, variables, "MPICH")


def _with_mpi(launch: Launch, variables: _Variables, mpi: str) -> Launch:
    if variables.has_master:
        return replace(launch, mpi=mpi, rendezvous="tcp", address=variables.master())
    return replace(launch, mpi=mpi, rendezvous="mpi")


def _read_srun(variables: _Variables) -> Launch:
    rank = str(variables.integer("SLURM_PROCID"))
    wanted = f"a list of the tasks on this node that contains SLURM_PROCID, {rank!r}"
    tasks_here = variables.matching("SLURM_GTIDS", r"\d+(,\d+)*", wanted).split(",")
    if rank not in tasks_here:
        raise variables.error("SLURM_GTIDS", wanted)
    launch = variables.launch(
        rank="SLURM_PROCID",
        world_size="SLURM_NTASKS",
        local_rank="SLURM_LOCALID",
        local_world_size=len(tasks_here),
        node_rank="SLURM_NODEID",
    )
    if "SLURM_STEP_NUM_TASKS" in variables.environ:
        # They differ in a batch script that was submitted from inside a step, and has inherited the step's variables.
        tasks = variables.used["SLURM_NTASKS"]
        variables.matching("SLURM_STEP_NUM_TASKS", re.escape(tasks), f"{tasks!r}, the value of SLURM_NTASKS")
    nodes = _nodes(variables, "SLURM_STEP_NODELIST")
    job = variables.integer("SLURM_JOB_ID", 0, MOST_IDS)
    step = variables.integer("SLURM_STEP_ID", 0, MOST_IDS)
    launch = replace(launch, step=f"{job}.{step}")
    if variables.has_master:
        return replace(launch, rendezvous="tcp", address=variables.master())
    # A node's name may not resolve outside SLURM, so it is used only if there are several nodes.
    several = launch.local_world_size < launch.world_size
    if several and variables.environ.get("SLURM_DISTRIBUTION") == "arbitrary":
        return replace(launch, rendezvous="tcp")
    host = _host_of_rank_0(variables, nodes, job) if several else "127.0.0.1"
    reserved = None
    # Each group of a heterogeneous job has ports of its own.
    if "SLURM_STEP_RESV_PORTS" in variables.environ and "SLURM_HET_SIZE" not in variables.environ:
        reserved = variables.matching("SLURM_STEP_RESV_PORTS", r"\d{1,5}([-,]\d{1,5})*", "ports, like 12000-12001")
    port = step_port(job, step, reserved)
    return replace(launch, rendezvous="tcp", address=f"{host}:{port}")


def _nodes(variables: _Variables, name: str) -> str:
    wanted = "a list of nodes, like node[1-4]"
    nodes = variables.string(name, wanted)
    if not _is_host(next(iter(hosts(nodes)), "")):
        raise variables.error(name, wanted)
    return nodes


def _host_of_rank_0(variables: _Variables, nodes: str, job: int) -> str:
    """Return the host of a step of several nodes on which rank 0 is: the first, except in a heterogeneous job."""
    if "SLURM_HET_SIZE" not in variables.environ:
        return hosts(nodes)[0]
    # Up to SLURM 22.05, srun without an allocation uses the older word.
    words = [word for word in ("HET", "PACK") if f"SLURM_JOB_ID_{word}_GROUP_0" in variables.environ] or ["HET"]
    leader = variables.integer(f"SLURM_JOB_ID_{words[0]}_GROUP_0", 0, MOST_IDS)
    if leader != job:  # the variables are those of another job, from inside which this one was submitted
        return hosts(nodes)[0]
    names = [f"SLURM_JOB_NODELIST_{words[0]}_GROUP_{n}" for n in range(variables.integer("SLURM_HET_SIZE", 1))]
    host = first_host_of_groups(nodes, [_nodes(variables, name) for name in names])
    if host is None:
        raise variables.error(names[0], "a list of nodes, of which this step has some")
    return host


def _read_env(variables: _Variables) -> Launch:
    address = variables.master()
    # A loopback address means one host; otherwise only the user knows how many processes are on each.
    one_host = "LOCAL_WORLD_SIZE" not in variables.environ and _is_loopback(address.rpartition(":")[0])
    launch = variables.launch(
        rank="RANK",
        world_size="WORLD_SIZE",
        local_rank="LOCAL_RANK",
        local_world_size=variables.integer("WORLD_SIZE", 1) if one_host else "LOCAL_WORLD_SIZE",
    )
    return replace(launch, rendezvous="tcp", address=address)


def _read_python(variables: _Variables) -> Launch:
    return Launch("python")


def _is_host(name: str) -> bool:
    """Return whether a string is a valid host name or IP address; digits and dots alone must be an address."""
    try:
        ip_address(name.partition("%")[0])
    except ValueError:
        label = r"(?!-)[\w-]{1,63}(?<!-)"
        return re.fullmatch(rf"({label}\.)*(?!\d+\.?$){label}\.?", name) is not None
    return True


def _is_loopback(host: str) -> bool:
    return host in ("localhost", "::1", "ip6-localhost") or host.startswith("127.")


def _has_any(*names: str) -> Callable[[Mapping[str, str]], bool]:
    return lambda environ: any(name in environ for name in names)


def _is_hydra(environ: Mapping[str, str]) -> bool:
    # srun --mpi=pmi2 sets PMI_RANK and PMI_SIZE too, but not these.
    return _has_any("MPI_LOCALRANKID", "MPI_LOCALNRANKS")(environ) or (
        _has_any("PMI_RANK", "PMI_SIZE")(environ) and not in_step(environ)
    )


@dataclass(frozen=True)
class _Launcher:
    name: str
    present: Callable[[Mapping[str, str]], bool]
    read: Callable[[_Variables], Launch]
    remedy: str


_SPAWN = _Launcher("spawn", lambda environ: False, _read_torchrun, "Start the processes with unitrain.spawn")
_ENV = _Launcher(
    "env",
    _has_any("RANK", "WORLD_SIZE"),
    _read_env,
    "Give every process RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE (the number of processes on its host), "
    "MASTER_ADDR and MASTER_PORT, or let torchrun do it",
)
_PYTHON = _Launcher("python", lambda environ: True, _read_python, "")
_BY_PRECEDENCE = (
    _Launcher(
        "torchrun",
        _has_any("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"),
        _read_torchrun,
        "Start the job with torchrun --nproc-per-node N SCRIPT and leave its variables as they are",
    ),
    _Launcher(
        "horovodrun",
        _has_any("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_GLOO_RENDEZVOUS_ADDR"),
        _read_horovodrun,
        "Start the job with horovodrun --gloo -np N python SCRIPT and leave its variables as they are",
    ),
    _Launcher(
        "mpirun",
        _has_any("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
        _read_open_mpi,
        "Start the job with mpirun -np N python SCRIPT and leave its variables as they are",
    ),
    _Launcher(
        "mpirun",
        _is_hydra,
        _read_hydra,
        "Start the job with mpiexec -n N python SCRIPT (MPICH, Intel MPI) and leave its variables as they are",
    ),
    _Launcher(
        "srun",
        in_step,
        _read_srun,
        "Start the job with srun -n N python SCRIPT and leave its variables as they are",
    ),
    _ENV,
    _PYTHON,
)

LAUNCHERS = tuple(dict.fromkeys(launcher.name for launcher in (*_BY_PRECEDENCE, _SPAWN)))


def detect(environ: Mapping[str, str]) -> Launch:
    """Return how this process was started, according to ``environ``.

    A pure function: does not read ``os.environ``, and imports neither torch nor an MPI nor Horovod.

    Raises:
        LaunchError: a launcher's variable is missing or wrong; RANK and WORLD_SIZE contradict the launcher; a
            launcher set no world size; UNITRAIN_LAUNCHER is not a launcher.
    """
    present = [launcher for launcher in _BY_PRECEDENCE if launcher.present(environ)]
    chosen = _overridden(environ) or present[0]
    if chosen is _PYTHON and OVERRIDE not in environ and "PMIX_RANK" in environ:
        raise LaunchError(
            f"PMIX_RANK is {environ['PMIX_RANK']!r}, but no variable gives the world size: this process was started by "
            f"a PMIx launcher such as prterun. Use mpirun, or set {OVERRIDE}=python to run this process alone."
        )
    variables = _Variables(environ, chosen.name, chosen.remedy)
    launch = chosen.read(variables)
    if chosen is _SPAWN or any(launcher.name == "torchrun" for launcher in present):
        present = [launcher for launcher in present if launcher is not _ENV]  # it sets RANK itself
    elif _ENV in present and chosen is not _ENV and OVERRIDE not in environ:
        _refuse_contradiction(launch, environ)
    also = [launcher.name for launcher in present if launcher not in (chosen, _PYTHON)]
    return replace(
        launch,
        also=tuple(name for name in dict.fromkeys(also) if name != chosen.name),
        evidence=tuple(f"{name}={value}" for name, value in variables.used.items()),
    )


def _overridden(environ: Mapping[str, str]) -> _Launcher | None:
    name = environ.get(OVERRIDE)
    if name is None:
        return None
    named = [launcher for launcher in (*_BY_PRECEDENCE, _SPAWN) if launcher.name == name]
    if not named:
        raise LaunchError(
            f"{OVERRIDE} is {name!r}, but must be one of {', '.join(LAUNCHERS)}.{nearest(name, LAUNCHERS)} "
            "Unset it to detect the launcher."
        )
    # Two share the name mpirun: take the one whose variables are set, else the first, which says what is missing.
    return next((launcher for launcher in named if launcher.present(environ)), named[0])


def _refuse_contradiction(launch: Launch, environ: Mapping[str, str]) -> None:
    """Raise if RANK and WORLD_SIZE, set by hand, contradict the launcher."""
    by_hand = (environ.get("RANK", str(launch.rank)), environ.get("WORLD_SIZE", str(launch.world_size)))
    if by_hand != (str(launch.rank), str(launch.world_size)):
        raise LaunchError(
            f"according to {launch.launcher} this process is rank {launch.rank} of {launch.world_size}, but according "
            f"to RANK and WORLD_SIZE rank {by_hand[0]!r} of {by_hand[1]!r}. Unset RANK and WORLD_SIZE, or choose with "
            f"{OVERRIDE}={launch.launcher} or {OVERRIDE}=env."
        )
