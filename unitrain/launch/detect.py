"""Who started this process, and as which of how many: a mapping of environment variables to one frozen ``Launch``.

Launchers are looked for in this order; the first whose variables are there is believed:

1. ``UNITRAIN_LAUNCHER``, set by hand (or by ``unitrain.spawn``) to one of ``LAUNCHERS``
2. torchrun, and with it ``python -m torch.distributed.launch``
3. horovodrun with the gloo controller
4. mpirun of Open MPI; horovodrun's MPI controller looks the same
5. mpirun or mpiexec of MPICH, Intel MPI and other relatives of hydra
6. srun
7. RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT set by hand or by a cluster (``env``)
8. nobody (``python``)

The inner launcher comes before the one that it is usually started by: torchrun inside an srun step is torchrun.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from ipaddress import ip_address
from typing import Literal

from unitrain.errors import LaunchError, nearest
from unitrain.launch.slurm import MOST_IDS, first_host, in_step, step_port

OVERRIDE = "UNITRAIN_LAUNCHER"

_MOST = 1_000_000
"""More processes than any job has, or restarts."""
_A_HOST = "a host name or address"

Meeting = Literal["alone", "tcp", "served", "mpi", "horovod"]


@dataclass(frozen=True)
class Launch:
    """What a launcher said about this process. Read once, by ``detect``."""

    launcher: str
    """One of ``LAUNCHERS``: torchrun, horovodrun, mpirun, srun, env, spawn, or python (nobody launched it)."""
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node_rank: int | None = 0
    """Number of this process's host; None (on all ranks alike) where the launcher does not tell."""
    meeting: Meeting = "alone"
    """How the ranks can meet: at a port that rank 0 opens (tcp) or that the launcher keeps open (served), through
    MPI, through horovodrun's key-value server, or not at all."""
    address: str | None = None
    """Where they meet, as host:port; None where that is agreed on through MPI."""
    mpi: str | None = None
    """The MPI whose launcher this is: Open MPI 4 (or older), Open MPI 5 (or newer) or MPICH (or a relative)."""
    restarts: int = 0
    """How often torchrun has restarted the job."""
    also: tuple[str, ...] = ()
    """Other launchers whose variables are there too, and were not believed."""
    evidence: tuple[str, ...] = ()
    """The variables that led to this, as NAME=value."""


@dataclass
class _Variables:
    """The variables of one launcher, read strictly: a bad one is an error with its name, value and remedy."""

    environ: Mapping[str, str]
    launcher: str
    remedy: str
    used: dict[str, str] = field(default_factory=dict)

    def text(self, name: str, wanted: str = "set") -> str:
        value = self.environ.get(name)
        if not value:
            raise self.error(name, wanted)
        self.used[name] = value
        return value

    def matching(self, name: str, pattern: str, wanted: str) -> str:
        value = self.text(name, wanted)
        if not re.fullmatch(pattern, value, re.ASCII):
            raise self.error(name, wanted)
        return value

    def whole(self, name: str, low: int = 0, high: int = _MOST) -> int:
        wanted = f"a whole number from {low} to {high}"
        value = int(self.matching(name, r"\d{1,18}", wanted))
        if not low <= value <= high:
            raise self.error(name, wanted)
        return value

    def host(self, name: str) -> str:
        value = self.text(name, _A_HOST)
        if not _is_host(value):
            raise self.error(name, _A_HOST)
        return value

    def error(self, name: str, wanted: str) -> LaunchError:
        state = f"is {self.environ[name]!r}" if name in self.environ else "is not set"
        by = "the variables" if self.launcher == "env" else f"the variables of {self.launcher}"
        return LaunchError(
            f"{name} {state}, but must be {wanted}: {by} say that this process is one of a job. {self.remedy}, "
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
        """Return the place of this process, read from the variables of these names."""
        world = self.whole(world_size, 1)
        local_world = local_world_size if isinstance(local_world_size, int) else self.whole(local_world_size, 1, world)
        return Launch(
            self.launcher,
            rank=self.whole(rank, 0, world - 1),
            world_size=world,
            local_rank=self.whole(local_rank, 0, local_world - 1),
            local_world_size=local_world,
            node_rank=self.whole(node_rank, 0, world - 1) if node_rank else 0 if local_world == world else None,
        )

    def master(self) -> str:
        """Return the address that MASTER_ADDR and MASTER_PORT give."""
        return f"{self.host('MASTER_ADDR')}:{self.whole('MASTER_PORT', 1, 65535)}"

    @property
    def has_master(self) -> bool:
        """Whether somebody chose where to meet; half a choice is an error of ``master``."""
        return "MASTER_ADDR" in self.environ or "MASTER_PORT" in self.environ


def _read_torchrun(variables: _Variables) -> Launch:
    served = variables.matching("TORCHELASTIC_USE_AGENT_STORE", "True|False", "True or False") == "True"
    return replace(
        variables.launch(
            rank="RANK",
            world_size="WORLD_SIZE",
            local_rank="LOCAL_RANK",
            local_world_size="LOCAL_WORLD_SIZE",
            node_rank="GROUP_RANK",
        ),
        meeting="served" if served else "tcp",
        address=variables.master(),
        restarts=variables.whole("TORCHELASTIC_RESTART_COUNT") if variables.launcher == "torchrun" else 0,
    )


def _read_horovodrun(variables: _Variables) -> Launch:
    launch = variables.launch(
        rank="HOROVOD_RANK",
        world_size="HOROVOD_SIZE",
        local_rank="HOROVOD_LOCAL_RANK",
        local_world_size="HOROVOD_LOCAL_SIZE",
    )
    # Horovod aborts the process, or hangs, where these are wrong. Every other host has a process of the job at least.
    hosts = variables.whole("HOROVOD_CROSS_SIZE", 1, launch.world_size - launch.local_world_size + 1)
    variables.whole("HOROVOD_CROSS_RANK", 0, hosts - 1)
    if "HOROVOD_CPU_OPERATIONS" in variables.environ:
        variables.matching("HOROVOD_CPU_OPERATIONS", "gloo", "gloo")
    host = variables.host("HOROVOD_GLOO_RENDEZVOUS_ADDR")
    address = f"{host}:{variables.whole('HOROVOD_GLOO_RENDEZVOUS_PORT', 1, 65535)}"
    if variables.has_master:
        return replace(launch, meeting="tcp", address=variables.master())
    return replace(launch, meeting="horovod", address=address)


def _read_open_mpi(variables: _Variables) -> Launch:
    # OMPI_COMM_WORLD_NODE_RANK is the rank within the node among all jobs there, not the node's number.
    launch = variables.launch(
        rank="OMPI_COMM_WORLD_RANK",
        world_size="OMPI_COMM_WORLD_SIZE",
        local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
        local_world_size="OMPI_COMM_WORLD_LOCAL_SIZE",
    )
    if "PMIX_RANK" in variables.environ or "PMIX_NAMESPACE" in variables.environ:
        # MPI_Init aborts, or hangs, where they are wrong.
        variables.matching("PMIX_RANK", str(launch.rank), f"'{launch.rank}' as OMPI_COMM_WORLD_RANK is")
        variables.text("PMIX_NAMESPACE")
    is_5 = _has_any("OMPI_VERSION", "PRTE_LAUNCHED")(variables.environ)
    return _met_through_mpi(launch, variables, "Open MPI 5" if is_5 else "Open MPI 4")


def _read_hydra(variables: _Variables) -> Launch:
    launch = variables.launch(
        rank="PMI_RANK", world_size="PMI_SIZE", local_rank="MPI_LOCALRANKID", local_world_size="MPI_LOCALNRANKS"
    )
    return _met_through_mpi(launch, variables, "MPICH")


def _met_through_mpi(launch: Launch, variables: _Variables, mpi: str) -> Launch:
    if variables.has_master:
        return replace(launch, mpi=mpi, meeting="tcp", address=variables.master())
    return replace(launch, mpi=mpi, meeting="mpi")


def _read_srun(variables: _Variables) -> Launch:
    rank = str(variables.whole("SLURM_PROCID"))
    wanted = f"a list of the tasks on this node, with {rank!r} among them as SLURM_PROCID says"
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
        # It is another in a batch script that was submitted from inside another step, and has inherited it.
        tasks = variables.used["SLURM_NTASKS"]
        variables.matching("SLURM_STEP_NUM_TASKS", re.escape(tasks), f"{tasks!r} as SLURM_NTASKS is")
    wanted = "a list of nodes, like node[1-4]"
    nodes = variables.text("SLURM_STEP_NODELIST", wanted)
    if not _is_host(first_host(nodes)):
        raise variables.error("SLURM_STEP_NODELIST", wanted)
    job = variables.whole("SLURM_JOB_ID", 0, MOST_IDS)
    step = variables.whole("SLURM_STEP_ID", 0, MOST_IDS)
    if variables.has_master:
        return replace(launch, meeting="tcp", address=variables.master())
    # A node's name need not be known outside SLURM, so it is used only where there is more than one.
    host = first_host(nodes) if launch.local_world_size < launch.world_size else "127.0.0.1"
    reserved = None
    if "SLURM_STEP_RESV_PORTS" in variables.environ:
        reserved = variables.matching("SLURM_STEP_RESV_PORTS", r"\d{1,5}([-,]\d{1,5})*", "ports, like 12000-12001")
    port = step_port(job, step, reserved)
    return replace(launch, meeting="tcp", address=f"{host}:{port}")


def _read_env(variables: _Variables) -> Launch:
    address = variables.master()
    # Hosts that meet at a loopback address are one host; otherwise nobody but the user knows how many are here.
    one_host = "LOCAL_WORLD_SIZE" not in variables.environ and _is_loopback(address.rpartition(":")[0])
    launch = variables.launch(
        rank="RANK",
        world_size="WORLD_SIZE",
        local_rank="LOCAL_RANK",
        local_world_size=variables.whole("WORLD_SIZE", 1) if one_host else "LOCAL_WORLD_SIZE",
    )
    return replace(launch, meeting="tcp", address=address)


def _read_python(variables: _Variables) -> Launch:
    return Launch("python")


def _is_host(text: str) -> bool:
    """Return whether text can be a host's name or address; numbers and dots alone are an address or nothing."""
    try:
        ip_address(text.partition("%")[0])
    except ValueError:
        label = r"(?!-)[\w-]{1,63}(?<!-)"
        return re.fullmatch(rf"({label}\.)*(?!\d+\.?$){label}\.?", text) is not None
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
    """Return what ``environ`` says about who started this process.

    Pure: neither looks at ``os.environ`` nor imports torch, an MPI or Horovod.

    Raises:
        LaunchError: a launcher's variable is missing or wrong; RANK and WORLD_SIZE contradict the launcher; a
            launcher started this process without saying as one of how many; UNITRAIN_LAUNCHER is not a launcher.
    """
    present = [launcher for launcher in _BY_PRECEDENCE if launcher.present(environ)]
    chosen = _overridden(environ) or present[0]
    if chosen is _PYTHON and OVERRIDE not in environ and "PMIX_RANK" in environ:
        raise LaunchError(
            f"PMIX_RANK is {environ['PMIX_RANK']!r}, but nothing says how many processes there are: a PMIx launcher "
            f"such as prterun started this one. Use mpirun, or set {OVERRIDE}=python to run this process alone."
        )
    variables = _Variables(environ, chosen.name, chosen.remedy)
    launch = chosen.read(variables)
    if chosen is _SPAWN or any(launcher.name == "torchrun" for launcher in present):
        present = [launcher for launcher in present if launcher is not _ENV]  # their RANK is not set by hand
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
            "Unset it to let UniTrain find out."
        )
    # Two MPIs share the name mpirun: the one whose variables are there, else the first, which says what is missing.
    return next((launcher for launcher in named if launcher.present(environ)), named[0])


def _refuse_contradiction(launch: Launch, environ: Mapping[str, str]) -> None:
    """Raise where RANK and WORLD_SIZE, set by hand, name another place than the launcher does."""
    by_hand = (environ.get("RANK", str(launch.rank)), environ.get("WORLD_SIZE", str(launch.world_size)))
    if by_hand != (str(launch.rank), str(launch.world_size)):
        raise LaunchError(
            f"{launch.launcher} says that this process is rank {launch.rank} of {launch.world_size}, but RANK and "
            f"WORLD_SIZE say rank {by_hand[0]!r} of {by_hand[1]!r}. Unset RANK and WORLD_SIZE, or say who is right "
            f"with {OVERRIDE}={launch.launcher} or {OVERRIDE}=env."
        )
