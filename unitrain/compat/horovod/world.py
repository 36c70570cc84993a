"""The life of a job, and the place of this process in it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist

import unitrain
from unitrain import rng
from unitrain.communication.backend import load_backend
from unitrain.compat.horovod import modules
from unitrain.compat.horovod.process_sets import ProcessSet, add_process_set, global_process_set
from unitrain.errors import ConfigError, UsageError
from unitrain.settings import resolve_strategy
from unitrain.strategy import Strategy

Answer = Callable[[], bool]
_strategy: Strategy | None = None
_places: list[tuple[int, int]] = []  # of each rank: local rank and local world size


def init(comm: Any = None, process_sets: Sequence[ProcessSet] | str | None = None) -> None:
    """Join the other processes, unless this has been done. Collective.

    The settings of ``unitrain.init`` are read from the environment, with ddp as the backend auto. Random generators are
    left as they are.

    Args:
        comm: None. Use process sets for a part of the ranks.
        process_sets: to be registered; more may be later, whether or not this is "dynamic".

    Raises:
        UsageError: there is a ``comm``.
        ConfigError: a variable asks for what is not supported here.
    """
    global _strategy
    if is_initialized():
        return
    if comm:
        raise UsageError("hvd.init takes no communicator here: call it without one, and add a process set of its ranks")
    for variable in ("HOROVOD_AUTOTUNE", "HOROVOD_TIMELINE"):
        if os.environ.get(variable, "0").lower() not in ("", "0", "false"):
            raise ConfigError(f"{variable} is set, but nothing is tuned here, and no timeline recorded: unset it.")
    config = resolve_strategy(None, {}, os.environ)
    backend = "ddp" if config.backend == "auto" else config.backend
    load_backend(backend).allow_parts()
    # Horovod's init draws nothing and seeds nothing, and scripts have seeded their generators before it.
    states = rng.capture()
    # The backend horovod imports the real package by the name that this module may stand for.
    with modules.real_horovod():
        # A script that has turned deterministic algorithms on keeps them.
        deterministic = config.deterministic or torch.are_deterministic_algorithms_enabled()
        _strategy = unitrain.init(backend=backend, deterministic=deterministic)
    rng.restore(states)
    communicator = _strategy.communicator
    _places[:] = communicator.all_gather_data((local_rank(), local_size()))
    global_process_set.ranks = list(range(communicator.world_size))
    global_process_set.register(0, communicator)
    for process_set in [] if isinstance(process_sets, str) else process_sets or []:
        add_process_set(process_set)


def shutdown() -> None:
    """Leave the job, when all ranks do."""
    global _strategy
    if _strategy is not None:
        global_process_set.register(None, None)
        _strategy.close()
        _strategy = None


def is_initialized() -> bool:
    """Return whether this process has joined a job."""
    return _strategy is not None


def strategy() -> Strategy:
    """Return the strategy that ``init`` has made, with which a script can move to UniTrain line by line."""
    if _strategy is None:
        raise ValueError("Horovod has not been initialized; use hvd.init().")
    return _strategy


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


def _across() -> list[int]:
    """Return the ranks with this local rank, one of each host that has it."""
    return [rank for rank, (local, _) in enumerate(_places) if local == local_rank()]


def cross_rank() -> int:
    """Return the rank of this process among those with its local rank on other hosts."""
    return _across().index(rank())


def cross_size() -> int:
    """Return the number of hosts that have a process of this local rank."""
    return len(_across())


def is_homogeneous() -> bool:
    """Return whether all hosts have the same number of processes."""
    return len({size for _, size in _places}) == 1


def start_timeline(file_path: str, mark_cycles: bool = False) -> NoReturn:
    """Refuse to record a timeline.

    Raises:
        UsageError: always.
    """
    raise UsageError("hvd.start_timeline is not supported: no timeline is recorded here. Use torch.profiler.")


def stop_timeline() -> None:
    """Do nothing: there is no timeline."""


# The ranks communicate through the library of the backend.
mpi_built: Answer = partial(bool, False)
mpi_enabled: Answer = mpi_built
mpi_threads_supported: Answer = mpi_built
ddl_built: Answer = mpi_built
ccl_built: Answer = mpi_built
gloo_built: Answer = partial(bool, dist.is_available() and dist.is_gloo_available())
gloo_enabled: Answer = gloo_built
nccl_built: Answer = partial(bool, dist.is_available() and dist.is_nccl_available())
cuda_built: Answer = partial(bool, torch.version.cuda is not None)
rocm_built: Answer = partial(bool, torch.version.hip is not None)
