"""The collectives, with Horovod's names, arguments, defaults and gradients.

Where two functions differ only in that one takes several tensors, or waits, it is made from the other.
"""

from __future__ import annotations

import inspect
import itertools
import warnings
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from unitrain.communication.communicator import Communicator
from unitrain.compat.horovod import operations
from unitrain.compat.horovod.compression import Compression, Compressor
from unitrain.compat.horovod.matching import Form, HorovodInternalError, Operation, Queue
from unitrain.compat.horovod.process_sets import ProcessSet, global_process_set
from unitrain.errors import UsageError

__all__ = [
    "Adasum", "Average", "Max", "Min", "Product", "Sum", "allgather", "allgather_async", "allreduce", "allreduce_",
    "allreduce_async", "allreduce_async_", "alltoall", "alltoall_async", "barrier", "broadcast", "broadcast_",
    "broadcast_async", "broadcast_async_", "grouped_allgather", "grouped_allgather_async", "grouped_allreduce",
    "grouped_allreduce_", "grouped_allreduce_async", "grouped_allreduce_async_", "grouped_reducescatter",
    "grouped_reducescatter_async", "join", "poll", "reducescatter", "reducescatter_async", "sparse_allreduce_async",
    "synchronize",
]  # fmt: skip
# As in operations.OPS.
Average: int = 0
Sum: int = 1
Adasum: int = 2
Min: int = 3
Max: int = 4
Product: int = 5
_NONE = Compression.none
_submitted: dict[int, tuple[Queue, Operation]] = {}
_handles = itertools.count()


def _submit(process_set: ProcessSet, operation: Operation) -> int:
    queue = process_set.queue()
    queue.submit(operation)
    handle = next(_handles)
    _submitted[handle] = queue, operation
    return handle


def _name(process_set: ProcessSet, verb: str, tensors: Any, name: str | None) -> str:
    verb = verb if isinstance(tensors, Tensor) else f"grouped_{verb}"
    return process_set.queue().name(verb) if name is None else f"{verb}.{name}"


def _grouped(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of several ``tensors``, given one that takes a ``tensor``, or several."""

    def grouped(tensors: Sequence[Tensor], *args: Any, **kwargs: Any) -> Any:
        return function(list(tensors), *args, **kwargs)

    signature = inspect.signature(function)
    first, *others = signature.parameters.values()
    grouped.__signature__ = signature.replace(parameters=[first.replace(name="tensors"), *others])  # type: ignore[attr-defined]
    grouped.__name__ = f"grouped_{function.__name__}"
    grouped.__doc__ = f"As ``{function.__name__}``, with several tensors."
    return grouped


def _waited(function: Callable[..., int]) -> Callable[..., Any]:
    """Return a function that waits for the operation that another one submits, and returns its result."""

    @wraps(function)
    def waited(*args: Any, **kwargs: Any) -> Any:
        return synchronize(function(*args, **kwargs))

    waited.__name__ = function.__name__.replace("async_", "")
    waited.__doc__ = f"As ``{function.__name__}``, but wait, and return the tensor."
    return waited


class _Differentiable(torch.autograd.Function):
    """Runs an operation in the forward, and others on the gradients in the backward."""

    @staticmethod
    def forward(ctx: Any, submit: Callable[..., int], back: Callable[..., Sequence[Tensor]], *tensors: Tensor) -> Any:
        ctx.back = back
        result = synchronize(submit(tensors))
        return result if isinstance(result, tuple) else (result,)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, None, *ctx.back([grad.contiguous() for grad in grads])


def _differentiable(
    tensors: Any, submit: Callable[[Any], int], back: Callable[[Sequence[Tensor]], Sequence[Tensor]],
    compression: type[Compressor] = _NONE,
) -> Any:  # fmt: skip
    """Return the results of an operation on a tensor, or on several.

    Args:
        tensors: the tensor or tensors.
        submit: submits it, given what they are compressed to.
        back: returns the gradients of these, given the gradients of the results.
        compression: compresses them, and decompresses the results.
    """
    single = isinstance(tensors, Tensor)
    parts, contexts = zip(*map(compression.compress, operations.listed(tensors)), strict=True)
    results = _Differentiable.apply(lambda parts: submit(parts[0] if single else parts), back, *parts)
    whole = [compression.decompress(result, context) for result, context in zip(results, contexts, strict=True)]
    return whole[0] if single else whole


def call(
    name: str, form: Form, function: Callable[[Communicator], Any], process_set: ProcessSet = global_process_set
) -> Any:
    """Return the result of a function that calls collectives, once all ranks have come to it by its name.

    For what is built on the communicator, such as ``broadcast_object``: as an operation among the others, it can't meet
    another of them.

    Args:
        name: the name, with the verb: "broadcast_object.epoch".
        form: what must be the same on all ranks, as plain data, the verb first.
        function: is called with the communicator of the process set.
        process_set: the ranks that call it.
    """
    return process_set.queue().call(name, form, function)


# ------------------------------------------------------------------------------------------------------- allreduce


def _op(op: int | None, average: bool | None) -> int:
    """Return the reduction that a call names: by ``op``, or by the old ``average``."""
    if average is not None:
        if op is not None:
            raise ValueError("op and average exclude each other: pass op only.")
        warnings.warn("average is deprecated: pass op=hvd.Average or op=hvd.Sum.", DeprecationWarning, stacklevel=3)
        return Average if average else Sum
    if op == Adasum:
        raise UsageError(
            "hvd.Adasum is not supported: use hvd.Average, with a learning rate that is scaled by hvd.size() and "
            "warmed up over the first epochs."
        )
    return Average if op is None else op


def allreduce(
    tensor: Tensor, average: bool | None = None, name: str | None = None, compression: type[Compressor] = _NONE,
    op: int | None = None, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:  # fmt: skip
    """Return the mean of a tensor over the ranks, or another reduction. Differentiable."""
    scaling = (_op(op, average), prescale_factor, postscale_factor, process_set)
    result: Tensor = _differentiable(
        tensor,
        lambda parts: allreduce_async(parts, None, name, *scaling),
        lambda grads: grouped_allreduce(grads, None, None, _NONE, *scaling),
        compression,
    )
    return result


def allreduce_async(
    tensor: Tensor, average: bool | None = None, name: str | None = None, op: int | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> int:  # fmt: skip
    """Submit ``allreduce``, and return its handle. Not differentiable."""
    outputs = [*map(torch.empty_like, operations.listed(tensor))]
    scaling, name = (_op(op, average), prescale_factor, postscale_factor), _name(process_set, "allreduce", tensor, name)
    return _submit(process_set, operations.reduction("allreduce", name, tensor, outputs, *scaling))


def allreduce_async_(
    tensor: Tensor, average: bool | None = None, name: str | None = None, op: int | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> int:  # fmt: skip
    """Submit ``allreduce`` with the tensor as its result, and return its handle."""
    scaling, name = (_op(op, average), prescale_factor, postscale_factor), _name(process_set, "allreduce", tensor, name)
    return _submit(process_set, operations.reduction("allreduce", name, tensor, tensor, *scaling))


allreduce_: Callable[..., Tensor] = _waited(allreduce_async_)
grouped_allreduce: Callable[..., list[Tensor]] = _grouped(allreduce)
grouped_allreduce_: Callable[..., tuple[Tensor, ...]] = _grouped(allreduce_)
grouped_allreduce_async: Callable[..., int] = _grouped(allreduce_async)
grouped_allreduce_async_: Callable[..., int] = _grouped(allreduce_async_)


def sparse_allreduce_async(
    tensor: Tensor, name: str, op: int, process_set: ProcessSet = global_process_set
) -> Callable[[], Tensor]:
    """Submit a mean or sum of sparse tensors, and return a function that waits and returns it, not coalesced."""
    tensor = tensor.coalesce()
    indices = allgather_async(tensor.indices().T.contiguous(), f"{name}.indices", process_set)
    values = allgather_async(tensor.values().contiguous(), f"{name}.values", process_set)

    def wait() -> Tensor:
        divisor = len(process_set.ranks) if op == Average else 1
        return torch.sparse_coo_tensor(
            synchronize(indices).T, synchronize(values) / divisor, tensor.shape, check_invariants=False
        )

    return wait


# ------------------------------------------------------------------------------------------------ those that move rows


def allgather(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> Tensor:
    """Return the rows of all ranks in one. Differentiable: a rank gets the mean over the ranks of its gradients."""
    rows = torch.tensor([[part.shape[:1].numel() for part in operations.listed(tensor)]])

    def back(grads: Sequence[Tensor]) -> list[Tensor]:
        firsts = allgather(rows, process_set=process_set)[: process_set.rank()].sum(0).tolist()
        reduced = grouped_allreduce(grads, process_set=process_set)
        return [grad.narrow(0, *part) for grad, *part in zip(reduced, firsts, rows[0].tolist(), strict=True)]

    result: Tensor = _differentiable(tensor, lambda parts: allgather_async(parts, name, process_set), back)
    return result


def allgather_async(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> int:
    """Submit ``allgather``, and return its handle. Not differentiable."""
    return _submit(process_set, operations.gathering(_name(process_set, "allgather", tensor, name), tensor))


grouped_allgather: Callable[..., list[Tensor]] = _grouped(allgather)
grouped_allgather_async: Callable[..., int] = _grouped(allgather_async)


def alltoall(
    tensor: Tensor, splits: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Return the rows that the ranks have for this one; with ``splits``, also how many each had. Differentiable.

    Args:
        tensor: the rows for rank 0, then those for rank 1, and so on.
        splits: how many rows are for each rank; None for equal numbers.
        name: the name of the operation.
        process_set: the ranks that take part.
    """
    counts: Tensor
    rows, counts = _Differentiable.apply(
        lambda parts: alltoall_async(parts[0], splits, name, process_set),
        lambda grads: [alltoall(grads[0], counts, process_set=process_set)[0]],
        tensor,
    )
    return rows if splits is None else (rows, counts)


def alltoall_async(
    tensor: Tensor, splits: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Submit ``alltoall``, and return its handle. Its result has how many rows each rank had in any case."""
    name, world = _name(process_set, "alltoall", tensor, name), len(process_set.ranks)
    rows = tensor.shape[:1].numel() if tensor.dim() else 0
    counts = [rows // world] * world if splits is None else [int(count) for count in splits]
    floats = isinstance(splits, Tensor) and splits.is_floating_point()
    if floats or (splits is None and rows % world) or len(counts) != world or min(counts) < 0 or sum(counts) > rows:
        raise ValueError(
            f"alltoall got {rows} rows for {world} ranks, and splits {splits}: pass a whole number for each rank, "
            "together not more than there are."
        )
    like = splits if isinstance(splits, Tensor) else torch.empty(0, dtype=torch.int32)
    return _submit(process_set, operations.exchange(name, tensor, counts, like))


def broadcast(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Return the tensor of a rank. Differentiable: that rank gets the mean over the ranks of the gradients."""

    def back(grads: Sequence[Tensor]) -> list[Tensor]:
        return [allreduce(grads[0], process_set=process_set) * (global_process_set.rank() == root_rank)]

    result: Tensor = _differentiable(tensor, lambda part: broadcast_async(part, root_rank, name, process_set), back)
    return result


def broadcast_async(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Submit ``broadcast``, and return its handle. Not differentiable."""
    return _broadcast(tensor, torch.empty_like(tensor), root_rank, name, process_set)


def broadcast_async_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Submit ``broadcast`` with the tensor as its result, and return its handle."""
    return _broadcast(tensor, tensor, root_rank, name, process_set)


broadcast_: Callable[..., Tensor] = _waited(broadcast_async_)


def _broadcast(tensor: Tensor, output: Tensor, root_rank: int, name: str | None, process_set: ProcessSet) -> int:
    name = _name(process_set, "broadcast", tensor, name)
    if root_rank not in process_set.ranks:
        raise ValueError(f"broadcast got root_rank {root_rank}, but must get one of the ranks {process_set.ranks}.")
    root = process_set.ranks.index(root_rank)
    return _submit(process_set, operations.broadcasting(name, tensor, output, root))


def reducescatter(
    tensor: Tensor, name: str | None = None, compression: type[Compressor] = _NONE, op: int = Average,
    process_set: ProcessSet = global_process_set, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
) -> Tensor:  # fmt: skip
    """Return this rank's rows of the mean or sum of a tensor over the ranks. Differentiable."""
    # As Horovod scales gradients.
    factor = prescale_factor * postscale_factor * (len(process_set.ranks) if op == Sum else 1)
    result: Tensor = _differentiable(
        tensor,
        lambda parts: reducescatter_async(parts, name, op, process_set, prescale_factor, postscale_factor),
        lambda grads: grouped_allgather([grad * factor for grad in grads], process_set=process_set),
        compression,
    )
    return result


def reducescatter_async(
    tensor: Tensor, name: str | None = None, op: int = Average, process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0,
) -> int:  # fmt: skip
    """Submit ``reducescatter``, and return its handle. Not differentiable."""
    if op not in (Average, Sum):
        raise HorovodInternalError("reducescatter supports hvd.Average and hvd.Sum only: use hvd.allreduce for others.")
    name, factors = _name(process_set, "reducescatter", tensor, name), (prescale_factor, postscale_factor)
    return _submit(process_set, operations.reduction("reducescatter", name, tensor, (), op, *factors))


grouped_reducescatter: Callable[..., list[Tensor]] = _grouped(reducescatter)
grouped_reducescatter_async: Callable[..., int] = _grouped(reducescatter_async)

# --------------------------------------------------------------------------------------------------------- handles


def poll(handle: int) -> bool:
    """Return whether an operation can be waited for without other ranks.

    Unlike Horovod's, it takes part in a round, and so waits until the other ranks wait or poll, too.

    Raises:
        ValueError: there is no such handle, or it was synchronized.
    """
    if handle not in _submitted:
        raise ValueError(f"there is no handle {handle}, or it was synchronized before: poll before that.")
    queue, operation = _submitted[handle]
    return queue.poll(operation)


def synchronize(handle: int) -> Any:
    """Wait for an operation, and return its result: a tuple for several tensors. None if that was done before.

    Raises:
        HorovodInternalError: the ranks don't agree on it, or it has failed because of another rank.
    """
    if handle not in _submitted:
        return None
    queue, operation = _submitted.pop(handle)
    return queue.finish(operation)


def join(device: int = -1) -> int:
    """Take part in the reductions of other ranks, with zeros, until all have joined. Return the rank that was last.

    Args:
        device: ignored: the zeros are where the ranks communicate.
    """
    return global_process_set.queue().join()


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Return when every rank of a process set has called it."""
    queue = process_set.queue()
    queue.call(queue.name("barrier"), ("barrier",), lambda communicator: None)
