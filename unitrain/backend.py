"""What a backend is: the narrow interface that communicates, and the registry in which backends are found by name.

A backend implements ``start``, ``all_reduce``, ``all_gather`` and ``broadcast``, and ``close`` where there is something
to end. Everything else is derived from these, once, for every backend. It overrides ``wrap_model``, ``arm`` and
``watch_gradients`` only where its library averages gradients in a way of its own, as torch's DDP does.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from unitrain.config import Section, StrategyConfig
from unitrain.errors import BackendError, ConfigError, nearest
from unitrain.launch.detect import Launch

GROUP = "unitrain.backends"
"""The entry-point group in which distributions name their backends."""

Wait = Callable[[], None]
"""What an asynchronous collective returns: call it to wait for the result."""


class Backend(ABC):
    """Communication of one process with the others, as one library does it. Base class of every backend.

    Only the core calls these methods, always in the same order on all ranks unless ``matches_by_name`` is set. Names
    identify a call: of two calls under way at once, no two have the same name.

    Args:
        config: the resolved settings of the run.
        launch: who this process is, as its launcher says.
        device: where this process computes.

    Attributes:
        settings: this backend's own section of the settings: an instance of ``Settings``.
        rank: rank of this process, as the launcher says; ``start`` must agree.
        world_size: number of processes; ``start`` must agree.
        device: where tensors are communicated.
        devices: all devices that this process computes on.
    """

    name: ClassVar[str]
    """The backend's name: that of its entry point."""
    Settings: ClassVar[type[Section]] = Section
    """The backend's own settings, which a user writes as ``strategy.NAME.SETTING``."""
    served_by: ClassVar[str] = "see its documentation"
    """The launchers that start what this backend can use, for messages."""
    compressions: ClassVar[tuple[str, ...]] = ("none", "fp16", "bf16")
    """What ``compression`` may be under this backend."""
    matches_by_name: ClassVar[bool] = False
    """Whether the library matches the ranks' calls by their names, and not by their order."""
    gradient_reduction: Literal["sum", "mean"] = "sum"
    """Whether the gradients that ``watch_gradients`` leaves are the sum over the ranks, or the mean."""

    def __init__(self, config: StrategyConfig, launch: Launch, device: torch.device) -> None:
        self.config = config
        self.launch = launch
        self.settings: Any = config.section(self.name, self.Settings)
        self.rank: int = launch.rank
        self.world_size: int = self.expected_world(launch)
        self.device = device
        self.devices: tuple[torch.device, ...] = (device,)

    # ------------------------------------------------------------------------- asked before anything is started

    @classmethod
    def expected_world(cls, launch: Launch) -> int:
        """Return the world size that this backend would see under ``launch``, without starting anything."""
        return launch.world_size

    @classmethod
    def check(cls, config: StrategyConfig, launch: Launch) -> None:
        """Raise where this backend can't run, or can't honour the settings. Called before any work.

        Raises:
            BackendError: its library is missing.
            ConfigError: a setting can't be honoured.
        """

    @classmethod
    def versions(cls) -> dict[str, str]:
        """Return the versions of the libraries other than torch, by name. They must be the same on all ranks."""
        return {}

    @classmethod
    def is_engine_error(cls, error: BaseException) -> bool:
        """Return whether an error is what the library raises where another rank has died, or does not come.

        Such an error is reported as a consequence: the rank that died is named instead. Any other error is reported
        as the script's or the backend's own.
        """
        return False

    # ------------------------------------------------------------------------------------------ to be implemented

    @abstractmethod
    def start(self) -> tuple[int, int]:
        """Start communication; return this process's rank and the world size, as the library sees them."""

    @abstractmethod
    def all_reduce(self, tensor: Tensor, op: str, name: str) -> Wait:
        """Start to reduce a contiguous tensor on ``device`` in place; return what waits for the end.

        The result is the same on all ranks, bit for bit.

        Args:
            tensor: of any real dtype but bool, of the same shape and dtype on all ranks. It must not be read or
                written until the wait has returned.
            op: ``sum``, ``max`` or ``min``.
            name: the same on all ranks.
        """

    @abstractmethod
    def all_gather(self, tensor: Tensor, name: str) -> Callable[[], Tensor]:
        """Start to gather contiguous tensors of one shape; the result waits and returns them as (world size, ...).

        Args:
            tensor: of dtype uint8 or float64.
            name: as in ``all_reduce``.
        """

    @abstractmethod
    def broadcast(self, tensor: Tensor, src: int, name: str) -> Wait:
        """Start to overwrite a contiguous uint8 tensor with rank ``src``'s; return what waits for the end."""

    # --------------------------------------------------------------------------------------------------- optional

    def close(self, *, failed: bool) -> None:
        """End communication.

        Args:
            failed: whether this process ends because of an error. Other ranks may be gone: wait for none of them.
        """

    def wrap_model(self, module: nn.Module) -> nn.Module:
        """Return what the user calls instead of ``module``. Its parameters stay the same objects."""
        return module

    def arm(self, sync: bool) -> None:
        """Say whether the coming forward and backward shall communicate. Called before the forward."""

    def watch_gradients(self, parameters: Sequence[Parameter]) -> Callable[[bool], None] | None:
        """Average the gradients of ``parameters`` in every backward that is armed, from now on.

        Returns:
            What completes a step's averaging: afterwards each ``grad`` holds the reduced gradient, or None where no
            rank had one. Its argument is true where some gradients came from a backward that ``arm`` was too late
            for. None leaves the averaging to the core's buckets.
        """
        return None


class LocalBackend(Backend):
    """Base of the backends of one process, which has nobody to communicate with."""

    served_by: ClassVar[str] = "plain python"
    compressions: ClassVar[tuple[str, ...]] = ("none",)

    @classmethod
    def expected_world(cls, launch: Launch) -> int:
        """Return 1, whoever launched the process."""
        return 1

    def start(self) -> tuple[int, int]:
        """Start nothing."""
        return self.rank, 1

    def all_reduce(self, tensor: Tensor, op: str, name: str) -> Wait:
        """Leave the tensor as it is."""
        return lambda: None

    def all_gather(self, tensor: Tensor, name: str) -> Callable[[], Tensor]:
        """Return the tensor as a world of one."""
        return lambda: tensor.unsqueeze(0)

    def broadcast(self, tensor: Tensor, src: int, name: str) -> Wait:
        """Leave the tensor as it is."""
        return lambda: None


def _found() -> dict[str, EntryPoint]:
    return _found_on(tuple(sys.path))


@lru_cache(maxsize=4)  # a look costs 4 ms, and every backend is looked up for unitrain.StrategyConfig
def _found_on(path: tuple[str, ...]) -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=GROUP)}


def backend_names() -> list[str]:
    """Return the names of the installed backends, sorted. Imports none of them."""
    return sorted(_found())


def load_backend(name: str) -> type[Backend]:
    """Import the backend called ``name`` and return its class.

    Raises:
        ConfigError: no backend of that name is installed.
        BackendError: its entry point can't be imported, or names something that is no backend or is called otherwise.
    """
    found = _found()
    if name not in found:
        raise ConfigError(
            f"backend {name!r} is not installed.{nearest(name, found)} "
            f"Installed: auto, {', '.join(sorted(found)) or 'none (reinstall unitrain: pip install -e .)'}."
        )
    value = found[name].value
    try:
        backend = found[name].load()
    except (ImportError, AttributeError) as error:
        raise BackendError(f"backend {name!r} ({value}) can't be imported: {error}") from error
    if not (isinstance(backend, type) and issubclass(backend, Backend)):
        raise BackendError(f"backend {name!r} names {value}, which is not a subclass of unitrain.Backend.")
    called = getattr(backend, "name", None)
    if called != name:
        raise BackendError(
            f"the entry point {name!r} names {value}, which calls itself {called!r}: its class attribute `name` must "
            f"be {name!r} as well, or settings and messages would speak of two backends."
        )
    missing = sorted(backend.__abstractmethods__)
    if missing:
        raise BackendError(f"backend {name!r} ({value}) does not implement {', '.join(missing)}.")
    return backend
