"""Collective communication for users and for the core, built on a backend's three collectives."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, Protocol, TypeGuard, TypeVar, cast

import torch
from torch import Tensor
from torch.nn import Parameter

from unitrain import call_site
from unitrain.communication.backend import Backend, Wait
from unitrain.communication.objects import ObjectTransport, as_bytes
from unitrain.errors import CommunicationError, UnitrainError, UsageError, by_rank
from unitrain.pulse import Pulse

T = TypeVar("T")
ReduceOp = Literal["sum", "mean", "max", "min"]
_ERROR_KINDS: list[type[UnitrainError]] = [UnitrainError, *UnitrainError.__subclasses__()]
_ERRORS = {kind.__name__: kind for kind in _ERROR_KINDS}


class Peers(Protocol):
    """The state of the other ranks."""

    def whereabouts(self) -> str:
        """Return what the ranks that this one waits for are doing, or an empty string if that is unknown."""

    def compare_calls(self, call: str, place: str) -> None:
        """Return once every rank has reached this call. The job ends if a rank makes another call."""


class Communicator:
    """Collectives on a started backend.

    Args:
        backend: has been started.
        pulse: records which collective this process is waiting in.
        peers: the state of the other ranks; None in a world of one, and before the handshake.
        compares: whether ranks compare their calls before they make them (``debug``).
        key: signs pickled objects; None if the ranks share no secret, and before they have proved it.

    Attributes:
        rank: rank of this process.
        is_main: whether this is rank 0.
        world_size: number of processes.
        device: the device of the tensors that are communicated.
        compares: as given; False in a world of one.
        closed: whether communication has ended.
        all_reduce_async: the backend's ``all_reduce``, for the core: in place, without checks.
        all_gather_async: the backend's ``all_gather``, for the core: without checks.
        broadcast_async: the backend's ``broadcast``, for the core: in place, without checks.
        shards_parameters: whether ranks have parts of parameters.
        shards_optimizers: whether ranks have parts of the state of optimizers only (``shard_optimizer``).
        shards: whether ranks have either.
        replicas: number of ranks that have the same part of a parameter.
        offloads: whether parts of parameters are in host memory instead of on ``device``.
        owners: with ``shard_optimizer``, the rank that has the state of a parameter.
        to_local: returns this rank's part of a tensor that is sharded, and any other tensor itself.
        full_tensor: returns all of a tensor that is sharded, and any other tensor itself. Collective if it is sharded.
        shards_of: returns the parts of all ranks, on the meta device except this rank's.
    """

    def __init__(
        self,
        backend: Backend,
        pulse: Pulse,
        *,
        peers: Peers | None = None,
        compares: bool = False,
        key: bytes | None = None,
    ) -> None:
        self.rank: int = backend.rank
        self.is_main: bool = backend.rank == 0
        self.world_size: int = backend.world_size
        self.device: torch.device = backend.device
        self.pulse = pulse
        self.closed: bool = False
        self._backend = backend
        self._peers = peers
        self.compares: bool = compares and peers is not None
        self._refusal = ""
        self._objects = ObjectTransport(self, key)
        self.all_reduce_async: Callable[[Tensor, str, str], Wait] = backend.all_reduce
        self.all_gather_async: Callable[[Tensor, str], Callable[[], Tensor]] = backend.all_gather
        self.broadcast_async: Callable[[Tensor, int, str], Wait] = backend.broadcast
        several = backend.world_size > 1
        self.shards_parameters: bool = backend.shards and several
        self.shards_optimizers: bool = backend.config.shard_optimizer and several and not backend.shards
        self.shards: bool = self.shards_parameters or self.shards_optimizers
        self.replicas: int = backend.replicas
        self.offloads: bool = backend.offloads
        self.owners: dict[Parameter, int] = {}
        self.to_local: Callable[[Tensor], Tensor] = backend.to_local
        self.full_tensor: Callable[[Tensor], Tensor] = backend.full_tensor
        self.shards_of: Callable[[Tensor], Sequence[Tensor]] = backend.shards_of

    @contextmanager
    def refused(self, when: str) -> Iterator[None]:
        """Make collectives of the script in the block raise a UsageError, which says when they were called."""
        self._refusal = when
        try:
            yield
        finally:
            self._refusal = ""

    def close(self, *, failed: bool) -> None:
        """Close the backend."""
        self.closed = True
        self._backend.close(failed=failed)

    def is_sharded(self, value: object) -> TypeGuard[Tensor]:
        """Return whether a value is a sharded tensor."""
        return self.shards and isinstance(value, Tensor) and self.to_local(value) is not value

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> Tensor:
        """See ``Strategy.all_reduce``."""
        if op not in ("sum", "mean", "max", "min"):
            raise UsageError(f"all_reduce supports sum, mean, max and min, not {op!r}.")
        work = self._communicable(tensor, "all_reduce")
        if work.is_complex():
            raise UsageError("all_reduce does not support complex tensors: pass torch.view_as_real(tensor).")
        if op == "mean" and not work.is_floating_point():
            raise UsageError(f"the mean of a {tensor.dtype} tensor is not a {tensor.dtype}: pass tensor.float().")
        if work.dtype == torch.bool:
            work = work.to(torch.int64 if op == "sum" else torch.uint8)
        elif op == "sum" and not work.is_floating_point():
            work = work.to(torch.int64)  # a sum in fewer bits would wrap around
        elif op == "mean" and work.element_size() < 4:
            work = work.float()  # the sum may overflow where the mean does not
        if self.world_size > 1 and work.numel():
            reduced = "sum" if op == "mean" else op
            self._complete(lambda: self.all_reduce_async(work, reduced, f"all_reduce.{op}")(), "all_reduce", work, op)
            if op == "mean":
                work /= self.world_size
        if tensor.dtype == torch.bool:
            return work.to(tensor.device, torch.int64 if op == "sum" else torch.bool)
        if op == "sum" and work.dtype != tensor.dtype:
            _check_range(work, tensor.dtype)
        return work.to(tensor.device, tensor.dtype)

    def all_gather(self, tensor: Tensor) -> Tensor:
        """See ``Strategy.all_gather``."""
        work = self._communicable(tensor, "all_gather")
        if self.world_size > 1 and not self.compares:  # calls that are compared name their lines, too
            self.check_same_form(work)
        return self.all_gather_alike(work).to(tensor.device)

    def all_gather_alike(self, work: Tensor) -> Tensor:
        """Gather tensors on ``device``, known to have the same shapes and dtypes on all ranks. Collective."""
        if self.world_size == 1 or not work.numel():
            return work.unsqueeze(0).repeat(self.world_size, *[1] * work.dim())
        gathered = self._complete(lambda: self.all_gather_async(as_bytes(work), "all_gather")(), "all_gather", work)
        return gathered.view(work.dtype).view(self.world_size, *work.shape)

    def gather_rows(self, tensor: Tensor, counts: Sequence[int]) -> Tensor:
        """Return the rows of all ranks' tensors, in rank order. Collective.

        ``counts`` says how many rows each rank has. Dtype and other dimensions are known to be the same on all ranks.
        """
        work = self._communicable(tensor, "gather")
        row = work.shape[1:]
        if self.world_size > 1 and sum(counts) * row.numel():
            parts = self.all_gather_padded(work.reshape(-1), [count * row.numel() for count in counts])
            work = torch.cat(parts).view(sum(counts), *row)
        return work.to(tensor.device)

    def all_gather_padded(self, data: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        """Return the flat tensors of all ranks, which have these sizes. Collective."""
        padded = torch.zeros(max(sizes), dtype=data.dtype, device=self.device)
        padded[: data.numel()] = data
        return [row[:size] for row, size in zip(self.all_gather_alike(padded), sizes, strict=True)]

    def broadcast(self, tensor: Tensor, src: int = 0) -> Tensor:
        """See ``Strategy.broadcast``."""
        self._check_rank(src)
        work = self._communicable(tensor, "broadcast")
        if self.world_size == 1 or not work.numel():
            return work.to(tensor.device)
        self._complete(
            lambda: self._backend.broadcast(as_bytes(work), src, "broadcast")(), "broadcast", work, f"src={src}"
        )
        return work.to(tensor.device)

    def barrier(self) -> None:
        """See ``Strategy.barrier``."""
        if self.world_size > 1:
            zero = torch.zeros(1, device=self.device)
            # Under NCCL a wait synchronises streams and does not block the host; reading the result does.
            self._complete(lambda: (self.all_reduce_async(zero, "sum", "barrier")(), zero.item()), "barrier")

    def broadcast_object(self, value: T, src: int = 0) -> T:
        """See ``Strategy.broadcast_object``."""
        self._check_rank(src)
        return self._objects.broadcast(value, src, pickles=True)

    def broadcast_data(self, value: T, src: int = 0) -> T:
        """Return rank ``src``'s plain data (see ``plain_data``), for the core: never pickled. Collective."""
        self._check_rank(src)
        return self._objects.broadcast(value, src, pickles=False)

    def all_gather_object(self, value: T) -> list[T]:
        """See ``Strategy.all_gather_object``."""
        return self._objects.all_gather(value, pickles=True)

    def all_gather_data(self, value: T) -> list[T]:
        """Return the plain data of all ranks, for the core: never pickled. Collective."""
        return self._objects.all_gather(value, pickles=False)

    def on_main(self, action: Callable[[], T]) -> T:
        """Call ``action`` on rank 0, and return its result on every rank, as ``broadcast_object`` does. Collective.

        A ``UnitrainError`` that it raises is raised on every rank.
        """
        failure: UnitrainError | None = None
        outcome: dict[str, Any] = {}
        if self.is_main:
            try:
                with self.refused("within on_main, where only rank 0 is: call it on all ranks, before on_main."):
                    outcome = {"value": action()}
            except UnitrainError as error:
                failure, outcome = error, {"error": [_class_name(error), str(error)]}
        outcome = self.broadcast_object(outcome)
        if "error" in outcome:
            name, text = outcome["error"]
            raise failure or _ERRORS[name](text)
        return cast(T, outcome["value"])

    def compare_calls(self, call: str) -> None:
        """With ``debug``, wait until every rank has reached the same call. The job ends if one makes another."""
        if self.compares and self._peers is not None:
            self._peers.compare_calls(call, call_site.current())

    def check_same_form(self, tensor: Tensor) -> None:
        """Raise UsageError on all ranks if shapes or dtypes differ between ranks. Collective."""
        form = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
        digest = hashlib.blake2b(form.encode(), digest_size=8).digest()
        digests = self.all_gather_alike(torch.frombuffer(bytearray(digest), dtype=torch.uint8).to(self.device))
        if (digests != digests[0]).any():
            forms = by_rank(enumerate(self.all_gather_data(form)))
            raise UsageError(
                f"all_gather needs the same shape and dtype on all ranks, but got {forms}: pad, or use gather."
            )

    def _communicable(self, tensor: Tensor, verb: str) -> Tensor:
        """Return a contiguous copy, on ``device`` if there are other ranks."""
        if not isinstance(tensor, Tensor):
            raise UsageError(f"{verb} takes a tensor, not {type(tensor).__name__}: wrap it in torch.tensor(...).")
        if tensor.layout != torch.strided:
            raise UsageError(f"{verb} does not support sparse tensors: convert it with to_dense() first.")
        if self.is_sharded(tensor):
            raise UsageError(f"{verb} does not support shards: pass strategy.full_tensor(tensor), or a value from it.")
        device = tensor.device if self.world_size == 1 else self.device
        return tensor.detach().to(device, copy=True, memory_format=torch.contiguous_format)

    def _complete(self, collective: Callable[[], T], verb: str, tensor: Tensor | None = None, how: str = "") -> T:
        """Run a collective and wait for it. If it fails because of another rank, say which and where it is.

        ``how`` has its other arguments, which must be the same on all ranks.
        """
        if self.closed:
            raise UsageError(f"{verb} was called after strategy.close(), which ends communication: call it before.")
        if self._refusal:
            raise UsageError(f"{verb} was called {self._refusal}")
        with self.pulse.within(verb):
            if self.compares:
                what = "" if tensor is None else f" of {str(tensor.dtype)[6:]}{list(tensor.shape)}"
                self.compare_calls(f"{verb}({how}){what}")
            try:
                return collective()
            except Exception as error:
                if not self._backend.is_engine_error(error):
                    raise
                others = self._peers.whereabouts() if self._peers is not None else ""
                remedy = "" if self.compares else "Run with UNITRAIN_DEBUG=true to see which calls differ. "
                raise CommunicationError(
                    f"rank {self.rank} of {self.world_size} could not complete {verb}: another rank has ended, or did "
                    f"not call it within timeout_s. {f'{others}. ' if others else ''}{remedy}"
                    f"Error of {self._backend.name}: {str(error).strip().splitlines()[0]}"
                ) from error

    def _check_rank(self, src: int) -> None:
        if not 0 <= src < self.world_size:
            raise UsageError(f"there is no rank {src}: this run has ranks 0 to {self.world_size - 1}.")

    def __deepcopy__(self, memo: dict[int, Any]) -> Communicator:
        """Return the same object: a copied model (an average of its weights, say) shares it."""
        return self

    def __reduce__(self) -> Any:
        raise UsageError("an object that communicates can't be pickled: use strategy.save or strategy.export.")


def _check_range(total: Tensor, dtype: torch.dtype) -> None:
    """Raise UsageError if an integer dtype can't hold a sum, which is the same on all ranks."""
    held = torch.iinfo(dtype)
    if total.numel() and not held.min <= int(total.min()) <= int(total.max()) <= held.max:
        raise UsageError(
            f"the sum over the ranks is not within {held.min} to {held.max} ({dtype}): pass tensor.to(torch.int64)."
        )


def _class_name(error: UnitrainError) -> str:
    """Return the name of the class of ``unitrain.errors`` that an error is an instance of."""
    return next(kind.__name__ for kind in type(error).__mro__ if kind in _ERROR_KINDS)
