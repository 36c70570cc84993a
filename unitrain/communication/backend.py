"""The interface that a communication backend implements, and the registry that finds backends by name.

A backend implements ``start``, ``all_reduce``, ``all_gather`` and ``broadcast``, and ``close`` if there is something
to shut down. Everything else is derived from these, once, for every backend. It overrides ``wrap_model``, ``arm`` and
``watch_gradients`` only if its library averages gradients itself, as torch's DDP does, and has a ``sharding`` of its
own only if a rank keeps a part of each parameter, as with FSDP.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence, Set
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from unitrain.communication.sharding import Sharding
from unitrain.config import Section, StrategyConfig
from unitrain.device import devices_of
from unitrain.errors import BackendError, ConfigError, nearest
from unitrain.launch.detect import Launch
from unitrain.module_copy import move_foreign
from unitrain.pulse import Pulse

GROUP = "unitrain.backends"
"""The entry-point group under which packages register backends."""

Wait = Callable[[], None]
"""Returned by an asynchronous collective. Call it to wait for the result."""


class Backend(ABC):
    """Communicates with the other processes through one library. Base class of all backends.

    Only the core calls these methods, in the same order on all ranks unless ``matches_by_name`` is set. A name
    identifies a call: no two calls in flight have the same name.

    Args:
        config: the resolved settings of the run.
        launch: rank, world size and launcher of this process.
        device: the device that this process computes on.

    Attributes:
        settings: this backend's section of the settings, an instance of ``Settings``.
        rank: rank of this process according to the launcher; ``start`` must return the same.
        world_size: number of processes; ``start`` must return the same.
        device: the device of the tensors that are communicated.
        devices: all devices that this process computes on.
        sharding: which tensors are divided among the ranks, and how to reach their parts.
        pulse: records the present call of this process, for the other ranks.
    """

    name: ClassVar[str]
    """Name of the backend. Must equal the name of its entry point."""
    Settings: ClassVar[type[Section]] = Section
    """The settings of this backend. Users write them as ``strategy.NAME.SETTING``."""
    served_by: ClassVar[str] = "see its documentation"
    """The launchers that this backend works under, for error messages."""
    compressions: ClassVar[tuple[str, ...]] = ("none", "fp16", "bf16")
    """The values of ``compression`` that this backend supports."""
    matches_by_name: ClassVar[bool] = False
    """Whether the library matches calls across ranks by name instead of by order."""
    gradient_reduction: Literal["sum", "mean"] = "sum"
    """Whether ``watch_gradients`` leaves the sum of the gradients over the ranks, or their mean."""
    shards: ClassVar[bool] = False
    """Whether, with several processes, ``wrap_model`` leaves each rank a part of each parameter (a shard).

    Such a backend sets ``sharding`` to an instance of a subclass of ``Sharding``.
    """

    def __init__(self, config: StrategyConfig, launch: Launch, device: torch.device) -> None:
        self.config = config
        self.launch = launch
        self.settings: Any = config.section(self.name, self.Settings)
        self.rank: int = launch.rank
        self.world_size: int = self.expected_world(launch)
        self.device = device
        self.devices: tuple[torch.device, ...] = (device,)
        self.sharding: Sharding = Sharding()
        self.pulse: Pulse = Pulse()

    # ------------------------------------------------------------------------- called before anything is started

    @classmethod
    def expected_world(cls, launch: Launch) -> int:
        """Return the world size that this backend would have under ``launch``, without starting anything."""
        return launch.world_size

    @classmethod
    def replicas(cls, config: StrategyConfig) -> int:
        """Return on how many devices a process has a copy of the model, each for a part of its batch."""
        return 1

    @classmethod
    def check(cls, config: StrategyConfig, launch: Launch) -> None:
        """Check that this backend can run with these settings. Called before any other work.

        Raises:
            BackendError: its library is missing.
            ConfigError: a setting is not supported.
        """

    @classmethod
    def versions(cls) -> dict[str, str]:
        """Return the versions of its libraries other than torch, by name. They must be the same on all ranks."""
        return {}

    @classmethod
    def is_engine_error(cls, error: BaseException) -> bool:
        """Return whether the library raises this error because another rank has died or did not join a collective.

        Such an error is reported as a consequence of the other rank's failure, and names that rank. Any other error
        is reported as one of the script or of the backend.
        """
        return False

    @classmethod
    def allow_parts(cls) -> None:
        """Prepare for calls of ``part``. Called before the start."""

    @property
    def authenticated(self) -> bool:
        """Whether only processes that the launcher has started can take part in the collectives, as with MPI."""
        return False

    # ------------------------------------------------------------------------------------------ to be implemented

    @abstractmethod
    def start(self) -> tuple[int, int]:
        """Start communication. Return this process's rank and the world size according to the library."""

    @abstractmethod
    def all_reduce(self, tensor: Tensor, op: str, name: str) -> Wait:
        """Start an in-place all-reduce of a contiguous tensor on ``device``. Return a function that waits for it.

        The result is the same on all ranks, bit for bit.

        Args:
            tensor: of any real dtype except bool, with the same shape and dtype on all ranks. It is not read or
                written until the wait has returned.
            op: ``sum``, ``max`` or ``min``.
            name: identifies the call; the same on all ranks.
        """

    @abstractmethod
    def all_gather(self, tensor: Tensor, name: str) -> Callable[[], Tensor]:
        """Start an all-gather of equally shaped tensors. Return a function that waits and returns (world size, ...).

        Args:
            tensor: contiguous, of dtype uint8 or float64.
            name: as in ``all_reduce``.
        """

    @abstractmethod
    def broadcast(self, tensor: Tensor, src: int, name: str) -> Wait:
        """Start to overwrite a contiguous uint8 tensor with rank ``src``'s. Return a function that waits."""

    # --------------------------------------------------------------------------------------------------- optional

    def close(self, *, failed: bool) -> None:
        """End communication.

        Args:
            failed: whether this process ends because of an error. Other ranks may be gone: do not wait for them.
        """

    def part(self, groups: Sequence[Sequence[int]]) -> Backend:
        """Return a backend that communicates among the ranks of this rank's group, numbered from 0. Collective.

        It has the three collectives, and ends with this backend.

        Args:
            groups: two or more, disjoint, each in ascending order. Together they have all ranks.

        Raises:
            ConfigError: this backend communicates among all ranks only.
        """
        raise ConfigError(
            f"backend {self.name!r} communicates among all ranks only, and not in groups, which these settings need: "
            "use ddp, fsdp or horovod."
        )

    def twin(self) -> Backend:
        """Return a backend of the same ranks with an order of calls that this one's don't affect. Collective.

        A library that matches calls by name needs no other one.
        """
        return self

    def watch_hosts(self, changed: Callable[[], None]) -> None:
        """Have a function called, in any thread and on any rank, when the launcher has other hosts for the job.

        Only for a launcher with which ``launch.elastic`` is true.
        """

    def place(self, module: nn.Module) -> None:
        """Move a module to ``device``. If ``wrap_model`` does so, part by part, do nothing.

        A module stays where the script has put its layers, on several devices: its gradients may be on any of them.

        Raises:
            UsageError: this backend does not support such a module.
        """
        if len(devices_of(module)) < 2:
            move_foreign([*module.parameters(), *module.buffers()], self.device)
            module.to(self.device)

    def wrap_model(self, module: nn.Module) -> nn.Module:
        """Return the module that the user calls in place of ``module``.

        Its parameters stay the same objects, except with ``shards``: then the module gets other parameters of the same
        names, which optimizers get in place of the original ones.
        """
        return module

    def arm(self, sync: bool) -> None:
        """Set whether the next forward and backward communicate. Called before the forward."""

    def keep(self, parameters: Collection[Parameter]) -> None:
        """Forget all other parameters, which the script has dropped with their modules."""

    def expect_gradients(self, parameters: Set[Parameter]) -> bool:
        """Prepare for a backward that gives gradients to these parameters at most, the same on all ranks.

        An empty set means that the script sets gradients: its backwards must average only if ``arm`` says so.

        Called before the first such backward, after its forward.

        Returns:
            Whether gradients are averaged in another way from now on: ``watch_gradients`` is then called again.
        """
        return False

    def watch_gradients(self, parameters: Sequence[Parameter]) -> Callable[[bool], None] | None:
        """Average the gradients of ``parameters`` in every armed backward from now on.

        Returns:
            A function that completes the averaging of a step: afterwards each ``grad`` holds the reduced gradient, or
            None if no rank had one. Its argument is true if ``arm`` came too late for some of the gradients' backward.
            Return None to leave the averaging to the core's buckets.
        """
        return None


class LocalBackend(Backend):
    """Base class of backends that run in a single process: every collective is the identity."""

    served_by: ClassVar[str] = "python"
    compressions: ClassVar[tuple[str, ...]] = ("none",)

    @classmethod
    def expected_world(cls, launch: Launch) -> int:
        """Return 1 under every launcher."""
        return 1

    def start(self) -> tuple[int, int]:
        """Return the rank and a world size of 1."""
        return self.rank, 1

    def all_reduce(self, tensor: Tensor, op: str, name: str) -> Wait:
        """Leave the tensor unchanged."""
        return lambda: None

    def all_gather(self, tensor: Tensor, name: str) -> Callable[[], Tensor]:
        """Return the tensor with a first dimension of size 1."""
        return lambda: tensor.unsqueeze(0)

    def broadcast(self, tensor: Tensor, src: int, name: str) -> Wait:
        """Leave the tensor unchanged."""
        return lambda: None


def _installed() -> dict[str, EntryPoint]:
    return _installed_on(tuple(sys.path))  # scripts may add folders with backends to it


@lru_cache(maxsize=4)  # a lookup costs 4 ms, and unitrain.StrategyConfig looks up every backend
def _installed_on(path: tuple[str, ...]) -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=GROUP)}


def backend_names() -> list[str]:
    """Return the names of the installed backends, sorted, without importing them."""
    return sorted(_installed())


# Names of other things that users of torch.distributed and Horovod call a backend.
_MEANT = {
    "nccl": " NCCL is a communication library of the backend ddp: set backend to ddp and ddp.communication to nccl.",
    "gloo": " gloo is a communication library of the backend ddp: set backend to ddp and ddp.communication to gloo.",
    "mpi": " Under mpirun, use the backend horovod (horovod.controller is mpi there) or ddp.",
}


def load_backend(name: str) -> type[Backend]:
    """Import the backend called ``name`` and return its class."""
    installed = _installed()
    if name not in installed:
        raise ConfigError(
            f"backend {name!r} is not installed.{_MEANT.get(name) or nearest(name, installed)} "
            f"Installed: auto, {', '.join(sorted(installed)) or 'none (reinstall unitrain: pip install -e .)'}."
        )
    value = installed[name].value
    try:
        backend = installed[name].load()
    except (ImportError, AttributeError) as error:
        raise BackendError(f"backend {name!r} ({value}) can't be imported: {error}") from error
    if not (isinstance(backend, type) and issubclass(backend, Backend) and getattr(backend, "name", None) == name):
        raise BackendError(
            f"backend {name!r} is registered as {value}, which is not a subclass of unitrain.Backend with this `name`."
        )
    return backend
