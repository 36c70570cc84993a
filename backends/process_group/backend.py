"""The base class of the backends on torch.distributed: its process groups, over any of its libraries."""

from __future__ import annotations

import copy
import itertools
import os
import re
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from unitrain.communication.backend import Backend, Wait
from unitrain.config import StrategyConfig
from unitrain.device import device_type
from unitrain.errors import CommunicationError, ConfigError, UsageError
from unitrain.launch.detect import Launch
from unitrain.launch.network.interfaces import choose_gloo_interface
from unitrain.launch.rendezvous import rendezvous

from .devices import any_shared, gpu_id

_AFTER_WATCH_S = 60.0
_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
# Newer releases of torch have renamed this function, and deprecate the old name.
_ALL_GATHER: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
# Dtypes that gloo and NCCL can't reduce, and the dtypes to convert them to.
_WIDER = {torch.int16: torch.int32}


class ProcessGroupBackend(Backend):
    """Communicates through torch.distributed, as its setting ``communication`` says. The core has a group of its own.

    On one group, ranks that order BatchNorm collectives and gradient collectives differently would abort inside gloo.
    """

    served_by = "torchrun, mpirun, srun or unitrain.spawn"

    @classmethod
    def is_engine_error(cls, error: BaseException) -> bool:
        """Return whether an error comes from torch.distributed. gloo raises plain RuntimeErrors."""
        if isinstance(error, dist.DistError):
            return True
        names = "|".join({"gloo", "nccl", *_libraries()})
        return isinstance(error, RuntimeError) and bool(re.search(rf"ProcessGroup|\b({names})", str(error), re.I))

    @classmethod
    def check(cls, config: StrategyConfig, launch: Launch) -> None:
        """Refuse a communication library that torch does not have for the device.

        Raises:
            ConfigError: torch has none, or not the one that the setting names.
        """
        settings: Any = config.section(cls.name, cls.Settings)
        kind = device_type(config.device)
        library = settings.communication
        if library == "auto":
            library = dist.Backend.default_device_backend_map.get(kind)
        if _serves(library, kind):
            return
        raise ConfigError(
            f"{cls.name}.communication is {settings.communication}, but torch.distributed does not have "
            f"{library or 'a library'} for devices of type {kind} here (device is {config.device!r}): set it to auto, "
            "device to cpu, or use backend single."
        )

    def __init__(self, config: StrategyConfig, launch: Launch, device: torch.device) -> None:
        super().__init__(config, launch, device)
        # A process group that the script has made is used, and is not destroyed.
        self._adopted = dist.is_initialized()
        self._parts: list[ProcessGroupBackend] = []
        self._twin: ProcessGroupBackend | None = None

    def start(self) -> tuple[int, int]:
        """Initialise the default process group, or use the script's, and make a group for the core. Collective.

        Returns:
            The rank and the world size that torch.distributed sees.

        Raises:
            CommunicationError: not all ranks have come in time, or they can't reach one another.
            ConfigError: NCCL is demanded, but ranks share a GPU.
        """
        timeout = timedelta(seconds=self.config.timeout_s)
        if not self._adopted:
            if self.launch.local_world_size == self.world_size:
                os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # else it listens where other hosts can reach it
            store = rendezvous(self.launch, self.config.timeout_s)
            if self.launch.local_world_size < self.world_size:
                choose_gloo_interface(store, self.launch)
            library = self._library(store)
            if library != "gloo":
                # NCCL's watchdog aborts the process. The job's watch, which reports the reason, must come first.
                timeout += timedelta(seconds=_AFTER_WATCH_S)
            try:
                dist.init_process_group(
                    library,
                    store=store,
                    rank=self.rank,
                    world_size=self.world_size,
                    timeout=timeout,
                    # Without it, NCCL guesses the device from LOCAL_RANK or the rank.
                    device_id=self.device if library == "nccl" else None,
                )
            except RuntimeError as error:
                raise CommunicationError(
                    f"rank {self.rank} of {self.world_size} could not initialise the process group at "
                    f"{self.launch.address or 'rank 0'} within {self.config.timeout_s:g} s: "
                    f"{str(error).strip().splitlines()[0]}. If hosts have several networks, set "
                    f"{library.upper()}_SOCKET_IFNAME on each to the interface by which the others reach it (unitrain "
                    "doctor lists them)."
                ) from error
        self.timeout: timedelta = timeout
        # Collectives of the core run beside DDP's, in another order on each rank.
        group = dist.new_group(timeout=timeout)
        assert isinstance(group, dist.ProcessGroup)  # every rank is a member
        self._group: dist.ProcessGroup = group
        return dist.get_rank(), dist.get_world_size()

    def _library(self, store: dist.Store) -> str:
        """Return the communication library, the same on all ranks. Collective on GPUs."""
        wanted = str(self.settings.communication)
        if wanted not in ("auto", "nccl") or self.device.type == "cpu":
            return "gloo" if wanted == "auto" else wanted
        default: str = dist.get_default_backend_for_device(self.device)
        shared = self.world_size > 1 and any_shared(store, gpu_id(self.device, self.rank), self.world_size)
        if shared and wanted == "nccl":
            raise ConfigError(
                f"{self.name}.communication is nccl, which needs a separate GPU for every process, but some of the "
                f"{self.world_size} processes share one, or have MIG instances of one (device is "
                f"{self.config.device!r}): start at most one process per GPU, set {self.name}.communication to auto or "
                "gloo, or, with NCCL 2.30 or newer, set NCCL_MULTI_RANK_GPU_ENABLE=1."
            )
        if wanted == "auto":
            return "gloo" if shared and _serves("gloo", self.device.type) else default
        return wanted

    def close(self, *, failed: bool) -> None:
        """Destroy the process groups made here, unless that would need other ranks, which may be gone."""
        if failed and _libraries() - {"gloo"}:
            return  # destroying NCCL's communicators, for one, waits for the other ranks of the host
        if not failed:
            # gloo's threads end with the last reference. If one frees a tensor while Python shuts down, it aborts.
            for backend in (*self._parts, self):
                dist.destroy_process_group(backend._group)
                del backend._group
        if not self._adopted and dist.is_initialized():
            dist.destroy_process_group()

    def refuse_unused(self, names: Sequence[str], *, all_of_them: bool, searches: bool = False) -> NoReturn:
        """Raise UsageError for parameters that were not used: torch waits for the gradients of all.

        Args:
            names: of the parameters that have no gradient after the backward.
            all_of_them: whether these are all parameters of the optimizer.
            searches: whether the setting does not help then.
        """
        setting = f"set {self.name}.find_unused_parameters to true"
        if all_of_them:
            raise UsageError(
                f"the loss of rank {self.rank} does not depend on the optimizer's parameters ({names[0]}, ...), but "
                f"{self.name} waits for a gradient on each rank: where a batch has nothing to learn from, call the "
                "model anyway, and let the loss be the sum of its output times 0"
                f"{'' if searches else f', or {setting}'}."
            )
        raise UsageError(
            f"{len(names)} parameters were not used in computing this step's loss ({', '.join(names[:3])}, ...) on "
            f"rank {self.rank}, but {self.name} waits for all: {setting}, or freeze them."
        )

    def average(self, parameters: Sequence[Parameter]) -> None:
        """Average gradients over the ranks. Those that are equal on all ranks stay the same. Collective.

        Args:
            parameters: the same on all ranks. One that only some ranks have used has zeros on the others.
        """
        # The ranks must agree, or some would wait for a gradient that others do not have.
        used = self.on_any_rank([p.grad is not None for p in parameters])
        for p in itertools.compress(parameters, used):
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            gradient = p.grad.to(self.device).contiguous()
            self.all_reduce(gradient, "sum", "gradients.late")()
            p.grad.copy_(gradient.div_(self.world_size))

    def on_any_rank(self, flags: Sequence[bool]) -> list[bool]:
        """Return which flags are true on any rank. Collective."""
        flags_of_all = torch.tensor(flags, dtype=torch.int32, device=self.device)
        self.all_reduce(flags_of_all, "max", "gradients.used")()
        return [bool(flag) for flag in flags_of_all.tolist()]

    def all_reduce(self, tensor: Tensor, op: str, name: str) -> Wait:
        """All-reduce in the core's process group."""
        wide = tensor.to(_WIDER.get(tensor.dtype, tensor.dtype))
        work = dist.all_reduce(wide, _OPS[op], group=self._group, async_op=True)

        def finish() -> None:
            _wait(work)
            if wide is not tensor:
                tensor.copy_(wide)

        return finish

    def all_gather(self, tensor: Tensor, name: str) -> Callable[[], Tensor]:
        """All-gather in the core's process group."""
        gathered = tensor.new_empty(self.world_size, *tensor.shape)
        work = _ALL_GATHER(gathered, tensor.unsqueeze(0), group=self._group, async_op=True)

        def finish() -> Tensor:
            _wait(work)
            return gathered

        return finish

    def broadcast(self, tensor: Tensor, src: int, name: str) -> Wait:
        """Broadcast in the core's process group."""
        return partial(_wait, dist.broadcast(tensor, group_src=src, group=self._group, async_op=True))

    def part(self, groups: Sequence[Sequence[int]]) -> Backend:
        """Make a process group of each of the groups, and another for its twin. Collective."""
        part, twin = copy.copy(self), copy.copy(self)
        for ranks in groups:
            for backend in (part, twin):
                group = dist.new_group([*ranks], timeout=self.timeout)
                if self.rank in ranks:
                    backend.rank, backend.world_size = ranks.index(self.rank), len(ranks)
                    assert isinstance(group, dist.ProcessGroup)  # this rank is a member
                    backend._group = group
        part._twin = twin
        self._parts += [part, twin]
        return part

    def twin(self) -> Backend:
        """Make another process group of all ranks. A part's was made with it, as torch numbers groups on all ranks."""
        if self._twin is not None:
            return self._twin
        twin = copy.copy(self)
        group = dist.new_group(timeout=self.timeout)
        assert isinstance(group, dist.ProcessGroup)  # this rank is a member
        twin._group = group
        self._parts.append(twin)
        return twin


def _serves(library: str | None, kind: str) -> bool:
    """Return whether torch has a communication library for a type of device."""
    if library in (None, "fake") or not dist.is_backend_available(library):
        return False
    return kind in dist.Backend.backend_capability.get(library, ())


def _libraries() -> set[str]:
    """Return the communication libraries of the default process group, if there is one."""
    pairs = dist.get_backend_config().split(",") if dist.is_initialized() else ()
    return {pair.rpartition(":")[2] for pair in pairs}


def _wait(work: dist.Work | None) -> None:
    """Block until a collective has ended; on a GPU, only until its stream is ordered behind it."""
    assert work is not None  # async_op=True, and this rank is in the group
    work.wait()
