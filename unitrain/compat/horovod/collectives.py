"""The collectives, with Horovod's names, arguments and gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from unitrain.communication.communicator import Communicator
from unitrain.compat.horovod.process_sets import ProcessSet, global_process_set

Average, Sum, Adasum, Min, Max, Product = range(6)


def call(
    name: str, form: tuple[Any, ...], function: Callable[[Communicator], Any],
    process_set: ProcessSet = global_process_set,
) -> Any:  # fmt: skip
    """Return the result of a function that calls collectives, once all ranks have come to it by its name.

    For what is built on the communicator, such as ``broadcast_object``: as an operation among the others, it can't meet
    another of them.

    Args:
        name: the name, with the verb: "broadcast_object.epoch".
        form: what must be the same on all ranks, as plain data.
        function: is called with the communicator of the process set.
        process_set: the ranks that call it.
    """
    raise NotImplementedError


def allreduce(
    tensor: Tensor, average: bool | None = None, name: str | None = None, compression: Any = None,
    op: int | None = None, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:  # fmt: skip
    """Return a tensor reduced over the ranks. Differentiable."""
    raise NotImplementedError


def allreduce_(
    tensor: Tensor, average: bool | None = None, name: str | None = None, op: int | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:  # fmt: skip
    """Reduce a tensor over the ranks in place."""
    raise NotImplementedError


def allreduce_async(
    tensor: Tensor, average: bool | None = None, name: str | None = None, op: int | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:  # fmt: skip
    """Submit ``allreduce``, and return its handle."""
    raise NotImplementedError


def allreduce_async_(
    tensor: Tensor, average: bool | None = None, name: str | None = None, op: int | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:  # fmt: skip
    """Submit ``allreduce_``, and return its handle."""
    raise NotImplementedError


def grouped_allreduce(
    tensors: Sequence[Tensor], average: bool | None = None, name: str | None = None, compression: Any = None,
    op: int | None = None, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:  # fmt: skip
    """Return tensors reduced over the ranks. Differentiable."""
    raise NotImplementedError


def grouped_allreduce_(
    tensors: Sequence[Tensor], average: bool | None = None, name: str | None = None, op: int | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:  # fmt: skip
    """Reduce tensors over the ranks in place."""
    raise NotImplementedError


def grouped_allreduce_async(
    tensors: Sequence[Tensor], average: bool | None = None, name: str | None = None, op: int | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:  # fmt: skip
    """Submit ``grouped_allreduce``, and return its handle."""
    raise NotImplementedError


def grouped_allreduce_async_(
    tensors: Sequence[Tensor], average: bool | None = None, name: str | None = None, op: int | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:  # fmt: skip
    """Submit ``grouped_allreduce_``, and return its handle."""
    raise NotImplementedError


def sparse_allreduce_async(
    tensor: Tensor, name: str, op: int, process_set: ProcessSet = global_process_set
) -> Callable[[], Tensor]:  # fmt: skip
    """Submit a sum or mean of sparse tensors, and return a function that waits for it."""
    raise NotImplementedError


def allgather(
    tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:  # fmt: skip
    """Return the rows of all ranks in one. Differentiable."""
    raise NotImplementedError


def allgather_async(
    tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:  # fmt: skip
    """Submit ``allgather``, and return its handle."""
    raise NotImplementedError


def grouped_allgather(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Tensor]:  # fmt: skip
    """Return the rows of all ranks in one. Differentiable."""
    raise NotImplementedError


def grouped_allgather_async(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:  # fmt: skip
    """Submit ``grouped_allgather``, and return its handle."""
    raise NotImplementedError


def broadcast(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:  # fmt: skip
    """Return the tensor of a rank. Differentiable."""
    raise NotImplementedError


def broadcast_async(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:  # fmt: skip
    """Submit ``broadcast``, and return its handle."""
    raise NotImplementedError


def broadcast_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:  # fmt: skip
    """Overwrite a tensor with the one of a rank."""
    raise NotImplementedError


def broadcast_async_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:  # fmt: skip
    """Submit ``broadcast_``, and return its handle."""
    raise NotImplementedError


def alltoall(
    tensor: Tensor, splits: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:  # fmt: skip
    """Return the rows that all ranks have for this one. Differentiable."""
    raise NotImplementedError


def alltoall_async(
    tensor: Tensor, splits: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:  # fmt: skip
    """Submit ``alltoall``, and return its handle."""
    raise NotImplementedError


def reducescatter(
    tensor: Tensor, name: str | None = None, compression: Any = None, op: int = Average,
    process_set: ProcessSet = global_process_set, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
) -> Tensor:  # fmt: skip
    """Return this rank's rows, reduced over the ranks. Differentiable."""
    raise NotImplementedError


def reducescatter_async(
    tensor: Tensor, name: str | None = None, op: int = Average,
    process_set: ProcessSet = global_process_set, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
) -> int:  # fmt: skip
    """Submit ``reducescatter``, and return its handle."""
    raise NotImplementedError


def grouped_reducescatter(
    tensors: Sequence[Tensor], name: str | None = None, compression: Any = None, op: int = Average,
    process_set: ProcessSet = global_process_set, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
) -> list[Tensor]:  # fmt: skip
    """Return this rank's rows, reduced over the ranks. Differentiable."""
    raise NotImplementedError


def grouped_reducescatter_async(
    tensors: Sequence[Tensor], name: str | None = None, op: int = Average,
    process_set: ProcessSet = global_process_set, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
) -> int:  # fmt: skip
    """Submit ``grouped_reducescatter``, and return its handle."""
    raise NotImplementedError


def poll(
    handle: int,
) -> bool:  # fmt: skip
    """Return whether an operation has completed, after a round with the other ranks."""
    raise NotImplementedError


def synchronize(
    handle: int,
) -> Any:  # fmt: skip
    """Wait for an operation, and return its result."""
    raise NotImplementedError


def join(
    device: int = -1,
) -> int:  # fmt: skip
    """Take part in the reductions of other ranks, with zeros, until all have joined. Return the last rank."""
    raise NotImplementedError


def barrier(
    process_set: ProcessSet = global_process_set,
) -> None:  # fmt: skip
    """Return when every rank of a process set has called it."""
    raise NotImplementedError
