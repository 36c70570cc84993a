"""What processes say to one another: three asynchronous verbs that a backend fills, and all that follows from them."""

from __future__ import annotations

import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

import torch
from torch import Tensor

from unitrain.errors import CommunicationError, UnitrainError, UsageError
from unitrain.job import call_site

if TYPE_CHECKING:
    from unitrain.config import StrategyConfig
    from unitrain.job.pulse import Pulse
    from unitrain.job.watch import Watch

T = TypeVar("T")
Wait = Callable[[], None]
ReduceOp = Literal["sum", "mean", "max", "min"]


class Collectives(ABC):
    """Communication of one process with the others.

    Attributes:
        config: the resolved configuration.
        rank: number of this process, from 0.
        world_size: number of processes.
        device: where tensors are communicated.
        pulse: where this process notes down what it waits in.
        watch: knows where the other ranks are; None where there are none, or before they have met.
        closed: whether communication has ended.
    """

    config: StrategyConfig
    rank: int
    world_size: int
    device: torch.device
    pulse: Pulse
    watch: Watch | None
    closed: bool

    @abstractmethod
    def _all_reduce(self, tensor: Tensor, op: str, name: str) -> Wait:
        """Begin to reduce a contiguous tensor on ``device`` in place; return what waits for the end.

        Args:
            tensor: of any real dtype but bool.
            op: ``sum``, ``max`` or ``min``.
            name: the same on all ranks; of two reductions under way at once, no two share one.
        """

    @abstractmethod
    def _all_gather(self, tensor: Tensor, name: str) -> Callable[[], Tensor]:
        """Begin to gather contiguous tensors of one shape; the result waits and returns them as (world, ...).

        Args:
            tensor: of uint8 or float64.
            name: as in ``_all_reduce``.
        """

    @abstractmethod
    def _broadcast(self, tensor: Tensor, src: int, name: str) -> Wait:
        """Begin to overwrite a contiguous tensor of uint8 with rank ``src``'s; return what waits for the end."""

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> Tensor:
        """Return a new tensor: the element-wise sum, mean, maximum or minimum over all ranks. Collective.

        Args:
            tensor: dense and real, of the same shape and dtype on all ranks, on any device. Booleans are counted
                by ``sum``.
            op: ``sum``, ``mean`` (of floating-point tensors), ``max`` or ``min``.

        Raises:
            UsageError: another op, or a tensor that can't be reduced.
            CommunicationError: the other ranks did not take part within ``timeout_s``.
        """
        if op not in ("sum", "mean", "max", "min"):
            raise UsageError(f"all_reduce knows sum, mean, max and min, not {op!r}.")
        work = self._communicable(tensor, "all_reduce")
        if work.is_complex():
            raise UsageError("all_reduce can't reduce complex tensors: give it torch.view_as_real(tensor).")
        if op == "mean" and not work.is_floating_point():
            raise UsageError(
                f"the mean of a {tensor.dtype} tensor is not one: convert it to a floating-point dtype first."
            )
        if work.dtype == torch.bool:
            work = work.to(torch.int64 if op == "sum" else torch.uint8)
        if self.world_size > 1 and work.numel():
            engine_op = "sum" if op == "mean" else op
            self._complete(lambda: self._all_reduce(work, engine_op, f"all_reduce.{op}")(), "all_reduce", work, op)
            if op == "mean":
                work /= self.world_size
        if tensor.dtype == torch.bool and op != "sum":
            work = work.bool()
        return work.to(tensor.device)

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Return all ranks' tensors (of one shape and dtype), stacked along a new first dimension. Collective."""
        work = self._communicable(tensor, "all_gather")
        if self.world_size == 1 or not work.numel():
            return work.unsqueeze(0).repeat(self.world_size, *[1] * work.dim()).to(tensor.device)
        gathered = self._complete(lambda: self._all_gather(_as_bytes(work), "all_gather")(), "all_gather", work)
        return gathered.view(work.dtype).view(self.world_size, *work.shape).to(tensor.device)

    def broadcast(self, tensor: Tensor, src: int = 0) -> Tensor:
        """Return a new tensor: rank ``src``'s. It has the same shape and dtype on all ranks. Collective."""
        self._check_rank(src)
        work = self._communicable(tensor, "broadcast")
        if self.world_size == 1 or not work.numel():
            return work.to(tensor.device)
        self._complete(lambda: self._broadcast(_as_bytes(work), src, "broadcast")(), "broadcast", work, f"src={src}")
        return work.to(tensor.device)

    def barrier(self) -> None:
        """Wait until every rank has come here. Collective."""
        if self.world_size > 1:
            zero = torch.zeros(1, device=self.device)
            self._complete(lambda: self._all_reduce(zero, "sum", "barrier")(), "barrier")

    def broadcast_object(self, value: T, src: int = 0) -> T:
        """Return rank ``src``'s picklable object. The other ranks' values are not read. Collective."""
        self._check_rank(src)
        if self.world_size == 1:
            return value
        data = _to_bytes(value) if self.rank == src else torch.empty(0, dtype=torch.uint8)
        size = int(self.broadcast(torch.tensor(data.numel()), src))
        data = self.broadcast(data if self.rank == src else torch.empty(size, dtype=torch.uint8), src)
        return value if self.rank == src else _from_bytes(data)

    def on_main(self, action: Callable[[], T]) -> T:
        """Do something on rank 0, and return on every rank what it returns there. Collective.

        Args:
            action: returns something picklable, or raises a ``UnitrainError``, which is raised on every rank.
        """
        outcome: tuple[T | None, UnitrainError | None] = (None, None)
        if self.rank == 0:
            try:
                outcome = (action(), None)
            except UnitrainError as error:
                outcome = (None, error)
        value, failure = self.broadcast_object(outcome)
        if failure is not None:
            raise failure
        return cast(T, value)

    def all_gather_object(self, value: T) -> list[T]:
        """Return all ranks' picklable objects, in rank order. Collective."""
        if self.world_size == 1:
            return [value]
        data = _to_bytes(value)
        sizes = self.all_gather(torch.tensor(data.numel())).tolist()
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: data.numel()] = data
        return [_from_bytes(row[:size]) for row, size in zip(self.all_gather(padded), sizes, strict=True)]

    def _communicable(self, tensor: Tensor, verb: str) -> Tensor:
        """Return a contiguous copy on ``device`` that may be overwritten."""
        if not isinstance(tensor, Tensor):
            raise UsageError(f"{verb} takes a tensor, not {type(tensor).__name__}: wrap it in torch.tensor(...).")
        if tensor.layout != torch.strided:
            raise UsageError(f"{verb} can't communicate sparse tensors: convert it first (to_dense).")
        return tensor.detach().to(self.device, copy=True, memory_format=torch.contiguous_format)

    def _complete(self, collective: Callable[[], T], verb: str, tensor: Tensor | None = None, how: str = "") -> T:
        """Run a collective to its end, and say in our words where it has none.

        Args:
            collective: runs it.
            verb: its name.
            tensor: what it communicates.
            how: what else must be the same on all ranks.
        """
        if self.closed:
            raise UsageError(f"{verb} was called after close(), which ends communication: call it before.")
        with self.pulse.within(verb):
            if self.config.debug:
                what = "" if tensor is None else f" of {str(tensor.dtype)[6:]}{list(tensor.shape)}"
                self._compare_calls(f"{verb}({how}){what}")
            try:
                return collective()
            except RuntimeError as error:  # whatever the engine: all of them raise a kind of it
                if str(error).startswith("DataLoader worker"):
                    raise  # torch says so wherever it finds this process
                others = self.watch.whereabouts() if self.watch is not None else ""
                raise CommunicationError(
                    f"rank {self.rank} of {self.world_size} could not complete {verb}: another rank has ended, or has "
                    f"not called it in time. {f'{others}. ' if others else ''}"
                    f"What the engine said: {str(error).strip().splitlines()[0]}"
                ) from error

    def _compare_calls(self, call: str) -> None:
        """Wait until every rank has come to the same call. Where one comes to another, the job ends."""
        if self.watch is not None:
            self.watch.compare_calls(call, call_site.current())

    def _check_rank(self, src: int) -> None:
        if not 0 <= src < self.world_size:
            raise UsageError(f"there is no rank {src}: this run has ranks 0 to {self.world_size - 1}.")

    def sum(self, value: Tensor) -> Tensor:
        """Return the sum of a tensor over all ranks, on its device. Collective."""
        return self.all_reduce(value)

    def mean(self, total: Tensor, count: Tensor | int) -> Tensor:
        """Return the mean over all samples of all ranks: of sums of ``count`` samples each. Collective, once.

        Args:
            total: the sum over this rank's samples, of a floating-point dtype.
            count: how many they are.
        """
        flat = torch.cat([total.detach().reshape(-1), torch.as_tensor(count).to(total.device, total.dtype).reshape(1)])
        reduced = self.all_reduce(flat)
        return (reduced[:-1] / reduced[-1]).view(total.shape)


def _as_bytes(tensor: Tensor) -> Tensor:
    """Return a flat view of a tensor's bytes: what is only moved need not be of a dtype that an engine knows."""
    return tensor.reshape(-1).view(torch.uint8)


def _to_bytes(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)


def _from_bytes(data: Tensor) -> Any:
    return pickle.loads(data.cpu().numpy().tobytes())
