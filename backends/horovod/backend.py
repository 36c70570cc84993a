"""The backend horovod: Horovod with its MPI or gloo controller. The only module that imports Horovod."""

from __future__ import annotations

import copy
import ctypes
import os
import socket
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from importlib.metadata import version
from multiprocessing.util import Finalize
from typing import Any, ClassVar

import torch
from torch import Tensor

from unitrain.communication.backend import Backend, Wait
from unitrain.config import Section, StrategyConfig
from unitrain.device import device_type
from unitrain.errors import BackendError, ConfigError, LaunchError
from unitrain.launch.detect import Launch
from unitrain.launch.mpi import mpi_family, point_to_installed_mpi
from unitrain.launch.network.horovodrun_server import await_all

from .settings import HorovodSettings

_LAUNCHERS = ("horovodrun", "mpirun")
_SERVER = ("HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT")
_ANSWER_S = 3.0
# A collective takes at least Horovod's cycle of 1 ms.
_SHORTEST_NAP_S, _LONGEST_NAP_S = 20e-6, 100e-6
# Dtypes that Horovod can't reduce, and the dtypes to convert them to.
_WIDER = {
    torch.bfloat16: torch.float32,
    torch.int8: torch.int32,
    torch.int16: torch.int32,
    torch.uint8: torch.int32,
}


class HorovodBackend(Backend):
    """Horovod's collectives with explicit names. The core's buckets average the gradients with them.

    ``hvd.DistributedOptimizer`` is not used: it creates a new optimizer object, which loses loaded state and existing
    schedulers, sums over accumulated passes instead of averaging, and must be synchronised before clipping.
    """

    name = "horovod"
    Settings: ClassVar[type[Section]] = HorovodSettings
    served_by = "horovodrun or mpirun"
    matches_by_name = True
    compressions: ClassVar[tuple[str, ...]] = ("none", "fp16")
    _sets: ClassVar[dict[tuple[int, ...], Any]] = {}  # Horovod's process sets, which last as long as it does

    @classmethod
    def expected_world(cls, launch: Launch) -> int:
        """Return the launcher's world size under mpirun and horovodrun, else 1: others don't start Horovod's world."""
        return launch.world_size if launch.launcher in _LAUNCHERS else 1

    @classmethod
    def versions(cls) -> dict[str, str]:
        """Return Horovod's version."""
        return {"Horovod": version("horovod")}

    @classmethod
    def is_engine_error(cls, error: BaseException) -> bool:
        """Return whether an error is a HorovodInternalError."""
        return type(error).__name__ == "HorovodInternalError"

    @classmethod
    def check(cls, config: StrategyConfig, launch: Launch) -> None:
        """Refuse to start without Horovod, or with a controller that it lacks or that the launcher does not support.

        Raises:
            BackendError: Horovod is missing, or was not built for this device, controller or MPI.
            ConfigError: the device or the controller is not supported here.
            LaunchError: horovodrun's server or network interface is not there.
        """
        hvd = _import_horovod()
        kind = device_type(config.device)
        if kind not in ("cpu", "cuda"):
            raise ConfigError(
                f"Horovod does not support devices of type {kind}: set device to cpu, or use backend ddp."
            )
        # A build for CPUs takes GPU tensors, too.
        if kind == "cuda" and not hvd.nccl_built():
            # Horovod would copy to the CPU without waiting for the GPU, and throw in a background thread.
            raise BackendError(
                f"this Horovod was built for CPUs only, but device is {config.device!r} on a host with GPUs: rebuild "
                "it with `unitrain install-horovod --gpu nccl`, set device to cpu, or use backend ddp."
            )
        controller = _controller(config, launch)
        built = {"mpi": hvd.mpi_built(), "gloo": hvd.gloo_built()}
        if not built[controller]:
            raise BackendError(
                f"this Horovod was built without the {controller} controller, which {launch.launcher} needs: rebuild "
                "it with `unitrain install-horovod --force` (for the mpi controller, install an MPI first)."
            )
        if controller == "gloo" and launch.launcher == "mpirun":
            raise ConfigError(
                "horovod.controller is gloo, but these processes were started by mpirun or horovodrun --mpi, which "
                "support only the MPI controller: start with horovodrun --gloo, or set horovod.controller to auto."
            )
        if controller == "mpi" and launch.launcher != "mpirun":
            raise ConfigError(
                f"horovod.controller is mpi, but these processes were started by {launch.launcher}, not through MPI: "
                "start with mpirun or horovodrun --mpi, or set horovod.controller to auto."
            )
        if launch.mpi and controller == "mpi" and (mpi := _mpi(hvd)) not in (None, launch.mpi):
            raise BackendError(
                f"this Horovod was built for {mpi}, but these processes were started by the mpirun of {launch.mpi}, "
                f"with which it would abort: start them with the mpirun of {mpi}, or rebuild it with `unitrain "
                "install-horovod --force` with the other first on PATH, or use backend ddp."
            )
        if controller == "gloo" and _SERVER[0] in os.environ:
            _check_served(*(os.environ[name] for name in _SERVER))

    @classmethod
    def allow_parts(cls) -> None:
        """Allow process sets, which make each cycle of Horovod longer."""
        os.environ.setdefault("HOROVOD_DYNAMIC_PROCESS_SETS", "1")

    @property
    def authenticated(self) -> bool:
        """Whether Horovod communicates through MPI."""
        return _controller(self.config, self.launch) == "mpi"

    def start(self) -> tuple[int, int]:
        """Initialise Horovod, once per process. Blocks until all ranks have come.

        Returns:
            The rank and the world size that Horovod sees.
        """
        self._hvd = _import_horovod()
        self._ops = {"sum": self._hvd.Sum, "max": self._hvd.Max, "min": self._hvd.Min}
        self._ranks: Sequence[int] = range(self.world_size)  # of the job
        self._within: dict[str, Any] = {}  # the argument that limits a collective to a process set
        variables = _variables(self.config, self.launch)
        if not self._hvd.is_initialized():
            os.environ.update(variables)
            if self.launch.mpi:
                point_to_installed_mpi()
            if self.launch.elastic:
                await_all(self.launch, ":".join(os.environ[name] for name in _SERVER), self.config.timeout_s)
            self._hvd.init()
            self._sets.clear()
            # Once per process, until its exit: MPI can't be initialised twice, and ranks that initialise gloo again may
            # find old addresses. Unlike atexit handlers, finalizers run in multiprocessing's children too.
            Finalize(None, self._hvd.shutdown, exitpriority=0)
        elif any(os.environ.get(name) != value for name, value in variables.items()):
            message = "Horovod is initialised once per process: it keeps the settings of the first strategy."
            warnings.warn(message, UserWarning, stacklevel=7)
        return self._hvd.rank(), self._hvd.size()

    def watch_hosts(self, changed: Callable[[], None]) -> None:
        """Have horovodrun's elastic driver tell rank 0 when hosts have been added or removed.

        Args:
            changed: called in a thread of Horovod's.
        """
        if self.rank == 0:
            manager = import_module("horovod.runner.elastic.worker").WorkerNotificationManager()
            manager.handle_hosts_updated = lambda timestamp, update: changed()
            manager.init()

    def all_reduce(self, tensor: Tensor, op: str, name: str) -> Wait:
        """All-reduce; dtypes that Horovod can't reduce are converted to wider ones.

        Args:
            tensor: the input, replaced by the result.
            op: sum, max or min.
            name: by which Horovod matches the calls of the ranks, in whichever order they come.
        """
        wide = tensor.to(_WIDER.get(tensor.dtype, tensor.dtype))
        handle = self._hvd.allreduce_async_(wide, name=name, op=self._ops[op], **self._within)

        def finish() -> None:
            self._wait(handle)
            if wide is not tensor:
                tensor.copy_(wide)

        return finish

    def all_gather(self, tensor: Tensor, name: str) -> Callable[[], Tensor]:
        """All-gather along a new first dimension."""
        # Horovod concatenates along the first dimension.
        handle = self._hvd.allgather_async(tensor.unsqueeze(0), name=name, **self._within)
        return partial(self._wait, handle)

    def broadcast(self, tensor: Tensor, src: int, name: str) -> Wait:
        """Broadcast in place."""
        handle = self._hvd.broadcast_async_(tensor, root_rank=self._ranks[src], name=name, **self._within)
        return partial(self._wait, handle)

    def part(self, groups: Sequence[Sequence[int]]) -> Backend:
        """Make a process set of each of the groups, unless there is one. Collective."""
        part = copy.copy(self)
        for ranks in map(tuple, groups):
            if ranks not in self._sets:
                self._sets[ranks] = self._hvd.add_process_set([*ranks])
            if self.rank in ranks:
                part.rank, part.world_size, part._ranks = ranks.index(self.rank), len(ranks), ranks
                part._within = {"process_set": self._sets[ranks]}
        return part

    def _wait(self, handle: int) -> Any:
        """Wait for a collective, and return its result. HorovodInternalError is raised if another rank has gone."""
        # Horovod's own wait spins, which keeps from running whom it waits for where processes share processors.
        nap_s = _SHORTEST_NAP_S
        while not self._hvd.poll(handle):
            time.sleep(nap_s)
            nap_s = min(2 * nap_s, _LONGEST_NAP_S)
        return self._hvd.synchronize(handle)


def _check_served(host: str, port: str) -> None:
    """Refuse a missing network interface or horovodrun server, with which Horovod would abort the process."""
    interface = os.environ.get("HOROVOD_GLOO_IFACE")
    known = [name for _, name in socket.if_nameindex()]
    if interface and interface not in known:
        raise LaunchError(
            f"HOROVOD_GLOO_IFACE is {interface!r}, but must be one of this host's network interfaces, "
            f"{', '.join(known)}: set it with horovodrun --network-interfaces."
        )
    try:
        socket.create_connection((host, int(port)), _ANSWER_S).close()
    except OSError as error:
        raise LaunchError(
            f"{' and '.join(_SERVER)} are {host!r} and {port!r}, but horovodrun does not answer there ({error}). Start "
            "the job with horovodrun --gloo -np N python SCRIPT and leave its variables as they are."
        ) from error


def _variables(config: StrategyConfig, launch: Launch) -> dict[str, str]:
    """Return the environment variables to initialise Horovod with. Those that the user has set take precedence."""
    controller, seconds = _controller(config, launch), config.timeout_s
    unless_set = {
        "HOROVOD_CPU_OPERATIONS": controller,
        # If a rank does not come, gloo aborts the others. The start watch acts before.
        "HOROVOD_GLOO_TIMEOUT_SECONDS": str(max(1, int(2 * seconds))),
        # A rank that waits for one that does not come gets Horovod's error at the timeout, as with other backends.
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": str(max(1, int(seconds))),
        "HOROVOD_STALL_CHECK_TIME_SECONDS": str(max(1, min(60, int(seconds) // 2))),
    }
    variables = {name: os.environ.get(name, value) for name, value in unless_set.items()}
    variables["HOROVOD_CONTROLLER"] = controller
    # A program that a rank under mpirun has started, to run alone, inherits MPI's, which need MPI's controller.
    if variables["HOROVOD_CPU_OPERATIONS"] == "mpi":
        variables["HOROVOD_CPU_OPERATIONS"] = controller
    if config.deterministic:
        variables["HOROVOD_FUSION_THRESHOLD"] = "0"  # what is fused, and so the order of summation, depends on timing
    return variables


def _controller(config: StrategyConfig, launch: Launch) -> str:
    """Return the controller that the setting names, or else the launcher's."""
    chosen = config.section("horovod", HorovodSettings).controller
    if chosen != "auto":
        return chosen
    # In a single process, the MPI controller would need an MPI that can start without its launcher.
    return "mpi" if launch.launcher == "mpirun" else "gloo"


def _mpi(hvd: Any) -> str | None:
    """Return the MPI that Horovod was built for, as in ``Launch.mpi``; None if that can't be found out."""
    version, length = ctypes.create_string_buffer(8192), ctypes.c_int()
    try:
        # MPI allows this call before MPI_Init.
        ctypes.CDLL(hvd.mpi_ops.mpi_lib.__file__).MPI_Get_library_version(version, ctypes.byref(length))
    except (AttributeError, OSError):
        return None
    return mpi_family(version.value.decode(errors="replace"))


def _import_horovod() -> Any:
    """Import horovod.torch. The import succeeds without its C extension, so check for that, too.

    Raises:
        BackendError: it can't be imported, or has no extension for this torch.
    """
    remedy = "Build it for this torch with `unitrain install-horovod`, or use backend ddp."
    try:
        hvd = import_module("horovod.torch")
    except ImportError as error:
        raise BackendError(f"backend horovod needs Horovod, which can't be imported: {error}. {remedy}") from error
    if not hasattr(hvd, "init"):
        raise BackendError(f"Horovod is installed, but was not built for torch {torch.__version__}. {remedy}")
    return hvd
