"""``Collectives``: the collectives of a started backend, for the core, which passes tensors on the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol, TypeVar

import torch
from torch import Tensor
from typing_extensions import ParamSpec

from unitrain import call_site
from unitrain.communication.backend import Backend, Wait
from unitrain.errors import CommunicationError, UsageError
from unitrain.pulse import Mark, Pulse

T = TypeVar("T")
P = ParamSpec("P")


class Peers(Protocol):
    """The state of the other ranks."""

    def whereabouts(self) -> str:
        """Describe the calls in which the awaited ranks are. Return an empty string if they are unknown."""

    def compare_calls(self, call: str, place: str) -> None:
        """Return once every rank has reached this call. The job ends if a rank makes another call."""


class Collectives:
    """The collectives of a started backend. The arguments of their calls are not checked.

    Args:
        backend: has been started.
        peers: the state of the other ranks; None in a world of one, and before the handshake.
        compares: as the attribute.

    Attributes:
        rank: rank of this process.
        world_size: number of processes.
        device: the device of the tensors that are communicated.
        pulse: records which collective this process is waiting in.
        compares: whether ranks compare their calls before they make them (``debug``); False in a world of one.
        closed: whether communication has ended.
        whole: the collectives of all ranks, if these are of some of them: they are refused and closed together.
        all_reduce_async: the backend's ``all_reduce``: in place, without a wait, a record or an explanation of errors.
        all_gather_async: the backend's ``all_gather``, likewise.
        broadcast_async: the backend's ``broadcast``, likewise.
    """

    def __init__(self, backend: Backend, *, peers: Peers | None = None, compares: bool = False) -> None:
        self.rank: int = backend.rank
        self.world_size: int = backend.world_size
        self.device: torch.device = backend.device
        self.pulse: Pulse = backend.pulse
        self.compares: bool = compares and peers is not None
        self.closed: bool = False
        self.all_reduce_async: Callable[[Tensor, str, str], Wait] = backend.all_reduce
        self.all_gather_async: Callable[[Tensor, str], Callable[[], Tensor]] = backend.all_gather
        self.broadcast_async: Callable[[Tensor, int, str], Wait] = backend.broadcast
        self._backend = backend
        self._peers = peers
        self.whole: Collectives | None = None
        self._refusal = ""

    def mark_calls(self, mark: Mark | None) -> None:
        """Mark each collective from now on, and the wait for it; with None, no more, which costs nothing.

        Args:
            mark: returns a context manager, given the name of what happens within it.
        """
        self.pulse.mark = mark  # for the collectives that scripts call
        backend = self._backend
        self.all_reduce_async = backend.all_reduce if mark is None else _marked(mark, backend.all_reduce)
        self.all_gather_async = backend.all_gather if mark is None else _marked(mark, backend.all_gather)
        self.broadcast_async = backend.broadcast if mark is None else _marked(mark, backend.broadcast)

    def all_reduce(self, tensor: Tensor, op: str) -> None:
        """Reduce a contiguous tensor in place. Collective.

        Args:
            tensor: as in ``Backend.all_reduce``.
            op: ``sum``, ``mean`` (of floats), ``max`` or ``min``.
        """
        reduced = "sum" if op == "mean" else op  # gloo and MPI have no mean
        self._complete(lambda: self.all_reduce_async(tensor, reduced, f"all_reduce.{op}")(), "all_reduce", tensor, op)
        if op == "mean":
            tensor /= self.world_size

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Return the tensors of all ranks, which have the same shape and dtype, stacked. Collective."""
        if self.world_size == 1 or not tensor.numel():
            return tensor.unsqueeze(0).repeat(self.world_size, *[1] * tensor.dim())
        gather = self.all_gather_async
        gathered = self._complete(lambda: gather(as_bytes(tensor), "all_gather")(), "all_gather", tensor)
        return gathered.view(tensor.dtype).view(self.world_size, *tensor.shape)

    def all_gather_padded(self, data: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        """Return the flat tensors of all ranks, which have these sizes. Collective."""
        # Not every library gathers tensors of several sizes.
        padded = torch.zeros(max(sizes), dtype=data.dtype, device=self.device)
        padded[: data.numel()] = data
        return [row[:size] for row, size in zip(self.all_gather(padded), sizes, strict=True)]

    def broadcast(self, tensor: Tensor, src: int) -> Tensor:
        """Overwrite a contiguous tensor with rank ``src``'s, and return it. Collective."""
        if self.world_size > 1 and tensor.numel():
            send = self._backend.broadcast
            self._complete(lambda: send(as_bytes(tensor), src, "broadcast")(), "broadcast", tensor, f"src={src}")
        return tensor

    def barrier(self) -> None:
        """Return when every rank has called it. Collective."""
        if self.world_size > 1:
            zero = torch.zeros(1, device=self.device)
            # Under NCCL a wait synchronises streams and does not block the host; reading the result does.
            self._complete(lambda: (self.all_reduce_async(zero, "sum", "barrier")(), zero.item()), "barrier")

    @contextmanager
    def refused(self, when: str) -> Iterator[None]:
        """Make collectives of the script in the block raise a UsageError, which says when they were called."""
        self._refusal = when
        try:
            yield
        finally:
            self._refusal = ""

    def compare_calls(self, call: str) -> None:
        """With ``debug``, wait until every rank has reached the same call. The job ends if one makes another."""
        if self.compares and self._peers is not None:
            self._peers.compare_calls(call, call_site.current())

    def close(self, *, failed: bool) -> None:
        """Close the backend. ``failed`` is as in ``Backend.close``."""
        self.closed = True
        self._backend.close(failed=failed)

    def _complete(self, collective: Callable[[], T], verb: str, tensor: Tensor | None = None, how: str = "") -> T:
        """Run a collective and wait for it. If it fails because of another rank, say which and where it is.

        ``how`` has its other arguments, which must be the same on all ranks.
        """
        # Before the library gets the call: after its end it may hang.
        whole = self.whole or self
        if whole.closed:
            raise UsageError(f"{verb} was called after strategy.close(), which ends communication: call it before.")
        if whole._refusal:
            raise UsageError(f"{verb} was called {whole._refusal}")
        with self.pulse.within(verb):
            if self.compares:
                form = "" if tensor is None else f" of {str(tensor.dtype)[6:]}{list(tensor.shape)}"
                self.compare_calls(f"{verb}({how}){form}")
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
                    # The other lines are usually a stack of C++.
                    f"Error of {self._backend.name}: {str(error).strip().splitlines()[0]}"
                ) from error


def _marked(mark: Mark, start: Callable[P, Callable[[], T]]) -> Callable[P, Callable[[], T]]:
    """Return a collective that marks its start and the wait for it by its name, the last argument."""

    def marked(*arguments: P.args, **keywords: P.kwargs) -> Callable[[], T]:
        name = str(arguments[-1])
        with mark(name):
            wait = start(*arguments, **keywords)

        def finish() -> T:
            with mark(f"wait for {name}"):
                return wait()

        return finish

    return marked


def as_bytes(tensor: Tensor) -> Tensor:
    """Return a flat view of a contiguous tensor's bytes, so that a backend need not support its dtype to move it."""
    return tensor.reshape(-1).view(torch.uint8)
