"""``Communicator``: collective communication for users and for the core, built on a backend's three collectives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar, cast

import torch
from torch import Tensor

from unitrain import call_site
from unitrain.communication.backend import Backend
from unitrain.communication.collectives import Collectives, Peers
from unitrain.communication.objects import ObjectTransport
from unitrain.communication.sharding import Sharding
from unitrain.errors import UnitrainError, UsageError, by_rank

T = TypeVar("T")
ReduceOp = Literal["sum", "mean", "max", "min"]
_ON_MAIN = "within on_main, where only rank 0 is: call it on all ranks, before on_main."
# By name, as which an error of rank 0 reaches the other ranks.
_ERROR_KINDS: list[type[UnitrainError]] = [UnitrainError, *UnitrainError.__subclasses__()]
_ERRORS = {kind.__name__: kind for kind in _ERROR_KINDS}


class Communicator:
    """The collectives of a run. All ranks call them, in the same order.

    Args:
        backend: has been started.
        peers: the state of the other ranks; None in a world of one, and before the handshake.
        compares: whether ranks compare their calls before they make them (``debug``).
        key: signs pickled objects; None if the ranks share no secret, and before they have proved it.

    Attributes:
        rank: rank of this process.
        is_main: whether this is rank 0.
        world_size: number of processes.
        device: the device of the tensors that are communicated.
        collectives: the same collectives without checks of arguments, for the core.
        sharding: which tensors are divided among the ranks, for the core.
    """

    def __init__(
        self, backend: Backend, *, peers: Peers | None = None, compares: bool = False, key: bytes | None = None
    ) -> None:
        self.rank: int = backend.rank
        self.is_main: bool = backend.rank == 0
        self.world_size: int = backend.world_size
        self.device: torch.device = backend.device
        self.collectives: Collectives = Collectives(backend, peers=peers, compares=compares)
        self.sharding: Sharding = backend.sharding
        self._objects = ObjectTransport(self.collectives, key)
        self._made_of = backend, peers, key

    def part(self, groups: Sequence[Sequence[int]]) -> Communicator:
        """Return a communicator of the ranks of this rank's group, numbered from 0. Collective.

        Groups don't wait for each other. With one group, it is this communicator.

        Args:
            groups: disjoint, each in ascending order. Together they have all ranks of the job.
        """
        return self if len(groups) == 1 else self._beside(self._made_of[0].part(groups))

    def twin(self) -> Communicator:
        """Return a communicator of the same ranks, with calls in another order. Collective.

        So a thread can make calls with it while another makes calls with this one.
        """
        return self._beside(self._made_of[0].twin())

    def _beside(self, backend: Backend) -> Communicator:
        """Return a communicator that ends with this one."""
        _, peers, key = self._made_of
        communicator = Communicator(backend, peers=peers, key=key)
        communicator.collectives.whole = self.collectives.whole or self.collectives
        return communicator

    def warn(self, message: str) -> None:
        """Issue a UserWarning on rank 0 that shows the line of the script that is being run. Not collective."""
        if self.is_main:
            call_site.warn(message)

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> Tensor:
        """See ``Strategy.all_reduce``."""
        if op not in ("sum", "mean", "max", "min"):
            raise UsageError(f"all_reduce supports sum, mean, max and min, not {op!r}.")
        work = communicable(self, tensor, "all_reduce")
        if work.is_complex():  # libraries can't reduce it
            raise UsageError("all_reduce does not support complex tensors: pass torch.view_as_real(tensor).")
        if op == "mean" and not work.is_floating_point():
            raise UsageError(f"the mean of a {tensor.dtype} tensor is not a {tensor.dtype}: pass tensor.float().")
        if not work.is_floating_point():
            work = work.to(torch.int64)  # a sum in fewer bits would wrap around
        elif op == "mean" and work.element_size() < 4:
            work = work.float()  # the sum may overflow where the mean does not
        if self.world_size > 1 and work.numel():
            self.collectives.all_reduce(work, op)
        is_count = op == "sum" and not tensor.is_floating_point()
        return work.to(tensor.device, torch.int64 if is_count else tensor.dtype)

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Return the tensors of all ranks, stacked along a new first dimension. Collective.

        Args:
            tensor: with the same shape and dtype on all ranks.

        Raises:
            UsageError: their shapes or dtypes differ; on all ranks.
        """
        work = communicable(self, tensor, "all_gather")
        if self.world_size > 1 and not self.collectives.compares:  # calls that are compared name their lines, too
            self._check_same_form(work)
        return self.collectives.all_gather(work).to(tensor.device)

    def broadcast(self, tensor: Tensor, src: int = 0) -> Tensor:
        """Return rank ``src``'s tensor as a new tensor. Shape and dtype must be the same on all ranks. Collective."""
        self._check_rank(src)
        return self.collectives.broadcast(communicable(self, tensor, "broadcast"), src).to(tensor.device)

    def barrier(self) -> None:
        """See ``Strategy.barrier``."""
        self.collectives.barrier()

    def broadcast_object(self, value: T, src: int = 0) -> T:
        """Return rank ``src``'s object on every rank. Collective.

        Plain data (None, bools, ints, floats, strings, bytes, tensors, and lists, tuples and dicts of these) is sent
        as it is. Other objects are pickled, and need a secret that the ranks share.

        Args:
            value: the object; ignored on other ranks than ``src``.
            src: the rank that has the object.

        Raises:
            UsageError: there is no such rank, or the object must be pickled and the ranks share no secret.

        Example:
            >>> names = strategy.communicator.broadcast_object(os.listdir(folder) if strategy.is_main else None)
        """
        self._check_rank(src)
        return self._objects.broadcast(value, src, pickles=True)

    def broadcast_data(self, value: T, src: int = 0) -> T:
        """Return rank ``src``'s plain data on every rank. Collective.

        As ``broadcast_object``, but an object that is not plain data is refused instead of pickled.

        Raises:
            UsageError: there is no such rank.
            TypeError: the object is not plain data.
        """
        self._check_rank(src)
        return self._objects.broadcast(value, src, pickles=False)

    def all_gather_object(self, value: T) -> list[T]:
        """Return the objects of all ranks, in rank order. Collective.

        Args:
            value: this rank's object, sent as by ``broadcast_object``.

        Raises:
            UsageError: the object must be pickled, and the ranks share no secret.

        Example:
            >>> hosts = strategy.communicator.all_gather_object(socket.gethostname())
        """
        return self._objects.all_gather(value, pickles=True)

    def all_gather_data(self, value: T) -> list[T]:
        """Return the plain data of all ranks, in rank order. Collective. Nothing is pickled: see ``broadcast_data``."""
        return self._objects.all_gather(value, pickles=False)

    def on_main(self, action: Callable[[], T]) -> T:
        """Call ``action`` on rank 0, and return its result on every rank, as ``broadcast_object`` does. Collective.

        A ``UnitrainError`` that it raises is raised on every rank.
        """
        failure: UnitrainError | None = None
        outcome: dict[str, Any] = {}
        if self.is_main:
            try:
                with self.collectives.refused(_ON_MAIN):
                    outcome = {"value": action()}
            except UnitrainError as error:
                failure, outcome = error, {"error": [_class_name(error), str(error)]}
        outcome = self.broadcast_object(outcome)
        if "error" in outcome:
            name, text = outcome["error"]
            # On rank 0 the error itself, which has the traceback.
            raise failure or _ERRORS[name](text)
        return cast(T, outcome["value"])

    def _check_same_form(self, tensor: Tensor) -> None:
        forms = self.all_gather_data(f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}")
        if len(set(forms)) > 1:
            raise UsageError(
                f"all_gather needs the same shape and dtype on all ranks, but got {by_rank(enumerate(forms))}: pad, or "
                "use gather."
            )

    def _check_rank(self, src: int) -> None:
        if not 0 <= src < self.world_size:
            raise UsageError(f"there is no rank {src}: this run has ranks 0 to {self.world_size - 1}.")

    def __deepcopy__(self, memo: dict[int, Any]) -> Communicator:
        """Return the same object: a copied model (an average of its weights, say) shares it."""
        return self

    def __reduce__(self) -> Any:
        raise UsageError("an object that communicates can't be pickled: use strategy.save or strategy.export.")


def communicable(communicator: Communicator, tensor: Tensor, verb: str) -> Tensor:
    """Return a contiguous copy of a tensor, on the communicator's device if there are other ranks.

    Raises:
        UsageError: it is no tensor, or sparse, or sharded. ``verb`` is the call to name.
    """
    if not isinstance(tensor, Tensor):
        raise UsageError(f"{verb} takes a tensor, not {type(tensor).__name__}: wrap it in torch.tensor(...).")
    if tensor.layout != torch.strided:
        raise UsageError(f"{verb} does not support sparse tensors: convert it with to_dense() first.")
    if communicator.sharding.is_sharded(tensor):
        raise UsageError(f"{verb} does not support shards: pass strategy.full_tensor(tensor), or a value from it.")
    device = tensor.device if communicator.world_size == 1 else communicator.device
    return tensor.detach().to(device, copy=True, memory_format=torch.contiguous_format)


def _class_name(error: UnitrainError) -> str:
    """Return the name of the class of ``unitrain.errors`` that an error is an instance of."""
    return next(kind.__name__ for kind in type(error).__mro__ if kind in _ERROR_KINDS)
