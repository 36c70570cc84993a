"""The life of a job, and the place of this process in it."""

from __future__ import annotations

import atexit
import os
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist

import unitrain
from unitrain import rng
from unitrain.communication.backend import load_backend
from unitrain.compat.horovod import modules
from unitrain.compat.horovod import process_sets as sets
from unitrain.errors import ConfigError, UsageError
from unitrain.job.job import current
from unitrain.launch.detect import detect
from unitrain.settings import resolve_strategy
from unitrain.strategy import Strategy

__all__ = [
    "ccl_built", "cross_rank", "cross_size", "cuda_built", "ddl_built", "gloo_built", "gloo_enabled", "init",
    "is_homogeneous", "is_initialized", "local_rank", "local_size", "mpi_built", "mpi_enabled",
    "mpi_threads_supported", "nccl_built", "rank", "rocm_built", "shutdown", "size", "start_timeline",
    "stop_timeline", "strategy",
]  # fmt: skip
_TIMELINE = "no timeline is recorded here: use torch.profiler"
_REFUSED = {
    "HOROVOD_AUTOTUNE": "there is no cycle time and no fusion threshold to tune here: unset it",
    "HOROVOD_TIMELINE": f"{_TIMELINE}, and unset it",
}


class _World(NamedTuple):
    """The strategy, and the place of this process among the hosts."""

    strategy: Strategy
    cross_rank: int
    cross_size: int
    homogeneous: bool


_world: _World | None = None


def init(comm: Any = None, process_sets: Sequence[sets.ProcessSet] | str | None = None) -> None:
    """Join the other processes, unless this has been done. Collective.

    The settings of ``unitrain.init`` are read from the environment. With backend auto, that is ddp if there are other
    processes. Random generators are left as they are.

    Args:
        comm: all ranks, or an MPI communicator of all. Use process sets for others.
        process_sets: to be registered; more may be later, whether or not this is "dynamic".

    Raises:
        UsageError: ``comm`` has not all ranks.
        ConfigError: a variable asks for what is not supported here.
    """
    global _world
    if is_initialized():
        return
    for variable, reason in _REFUSED.items():
        if os.environ.get(variable, "0").lower() not in ("", "0", "false"):
            raise ConfigError(f"{variable} is set, but {reason}.")
    launch, config = detect(os.environ), resolve_strategy(None, {}, os.environ)
    ranks = comm if comm is None or isinstance(comm, Iterable) else range(comm.Get_size())
    if ranks is not None and list(ranks) not in ([], list(range(launch.world_size))):
        raise UsageError(
            f"hvd.init got a communicator of ranks {list(ranks)}, but this job has ranks 0 to {launch.world_size - 1}: "
            "call it without one, and add a process set of these ranks."
        )
    several = launch.world_size > 1 or (dist.is_available() and dist.is_initialized())
    backend = config.backend if config.backend != "auto" else "ddp" if several else "single"
    load_backend(backend).allow_parts()
    # Horovod's init draws nothing and seeds nothing, and scripts have seeded their generators before it.
    states = rng.capture()
    # The backend horovod imports the real package by the name that this module may stand for.
    with modules.real_horovod():
        # A script that has turned deterministic algorithms on keeps them.
        deterministic = config.deterministic or torch.are_deterministic_algorithms_enabled()
        strategy = unitrain.init(backend=backend, deterministic=deterministic)
    rng.restore(states)
    job, launch = current(), strategy.launch
    assert job is not None  # the strategy's
    places = strategy.communicator.all_gather_data((job.node_rank, launch.local_rank, launch.local_world_size))
    peers = sorted(node for node, local, _ in places if local == launch.local_rank)
    _world = _World(strategy, peers.index(job.node_rank), len(peers), len({size for *_, size in places}) == 1)
    sets.global_process_set.ranks = list(range(strategy.world_size))
    sets.global_process_set.open(0, strategy.communicator)
    atexit.register(shutdown)
    for process_set in [] if process_sets is None or isinstance(process_sets, str) else process_sets:
        sets.add_process_set(process_set)


def shutdown() -> None:
    """Leave the job, when all ranks do. Operations that a rank still waits for fail there."""
    global _world
    job = current()
    if _world is None or job is None:  # a forked child: the job is its parent's
        return
    strategy, _world = _world.strategy, None
    atexit.unregister(shutdown)
    if not job.failed and not job.ended:
        sets.global_process_set.queue().end()
    for process_set in (sets.global_process_set, *sets.registered.values()):
        process_set.close()
    sets.registered.clear()
    strategy.close()


def is_initialized() -> bool:
    """Return whether this process has joined a job."""
    return _world is not None


def _joined() -> _World:
    if _world is None:
        raise ValueError(sets.NOT_INITIALIZED)
    return _world


def strategy() -> Strategy:
    """Return the strategy that ``init`` has made, with which a script can move to UniTrain line by line."""
    return _joined().strategy


def rank() -> int:
    """Return the rank of this process."""
    return strategy().rank


def size() -> int:
    """Return the number of processes."""
    return strategy().world_size


def local_rank() -> int:
    """Return the rank of this process on its host."""
    return strategy().launch.local_rank


def local_size() -> int:
    """Return the number of processes of this host."""
    return strategy().launch.local_world_size


def cross_rank() -> int:
    """Return the rank of this process's host among those that have a process of this local rank."""
    return _joined().cross_rank


def cross_size() -> int:
    """Return the number of hosts that have a process of this local rank."""
    return _joined().cross_size


def is_homogeneous() -> bool:
    """Return whether all hosts have the same number of processes."""
    return _joined().homogeneous


def start_timeline(file_path: str, mark_cycles: bool = False) -> NoReturn:
    """Refuse to record a timeline.

    Raises:
        UsageError: always.
    """
    raise UsageError(f"hvd.start_timeline is not supported: {_TIMELINE}.")


def stop_timeline() -> None:
    """Do nothing: there is no timeline."""


def mpi_built() -> bool:
    """Return False: the ranks communicate through the library of the backend."""
    return False


mpi_enabled = mpi_built
mpi_threads_supported = mpi_built
ddl_built = mpi_built
ccl_built = mpi_built


def gloo_built() -> bool:
    """Return whether this torch has gloo."""
    return dist.is_available() and dist.is_gloo_available()


gloo_enabled = gloo_built


def nccl_built() -> bool:
    """Return whether this torch has NCCL."""
    return dist.is_available() and dist.is_nccl_available()


def cuda_built() -> bool:
    """Return whether this torch was built for CUDA."""
    return torch.version.cuda is not None


def rocm_built() -> bool:
    """Return whether this torch was built for ROCm."""
    return torch.version.hip is not None
