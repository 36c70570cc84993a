"""The collectives, with Horovod's names, arguments, defaults and gradients.

Where two functions differ only in that one takes several tensors, waits, or has another tensor as its result, it is
made from the other.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor

from unitrain.communication.communicator import Communicator
from unitrain.compat.horovod import operations
from unitrain.compat.horovod.compression import Compression, Compressor
from unitrain.compat.horovod.matching import HorovodInternalError, Operation
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
_OF_ROWS = ("allgather", "alltoall")


def _submit(
    process_set: ProcessSet, verb: str, tensors: Any, name: str | None, run: Callable[..., Any], *more: object
) -> Operation:  # fmt: skip
    """Submit an operation on a tensor, or on several, and return its handle.

    Args:
        process_set: the ranks that take part.
        verb: the verb.
        tensors: the tensor or tensors.
        name: by which the ranks match it; None for one that its number makes.
        run: runs it, given the communicator, a tensor and ``more``, and returns its result.
        *more: what must also be the same on all ranks.
    """
    single = isinstance(tensors, Tensor)
    group: list[Tensor] = [tensors] if single else tensors
    for tensor in group:
        if tensor.layout != torch.strided or not tensor.is_contiguous():  # which Horovod refuses, too
            raise ValueError(f"{verb} needs a dense, contiguous tensor: pass tensor.contiguous() or tensor.to_dense().")
        if verb in (*_OF_ROWS, "reducescatter") and not tensor.dim():
            raise ValueError(f"{verb} needs a tensor with rows, not a scalar: pass tensor.unsqueeze(0).")
    first = 1 if verb in _OF_ROWS else 0  # the ranks may have different numbers of rows
    forms = [(str(tensor.dtype)[6:], list(tensor.shape[first:]), tensor.device.type) for tensor in group]

    def run_all(ranks: Communicator) -> Any:
        results = tuple(run(ranks, tensor, *more) for tensor in group)
        return results[0] if single else results

    return process_set.queue().submit(verb if single else f"grouped_{verb}", name, (forms, *more), run_all)


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


def _copied(function: Callable[..., Operation]) -> Callable[..., Operation]:
    """Return a function that submits an operation on a copy of the tensor, or tensors, given one without a copy."""

    @wraps(function)
    def copied(tensor: Any, *args: Any, **kwargs: Any) -> Operation:
        copies = tensor.detach().clone() if isinstance(tensor, Tensor) else [part.detach().clone() for part in tensor]
        return function(copies, *args, **kwargs)

    copied.__name__ = function.__name__.removesuffix("_")
    copied.__doc__ = f"As ``{function.__name__}``, with another tensor as its result."
    return copied


def _waited(function: Callable[..., Operation]) -> Callable[..., Any]:
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
    def forward(
        ctx: Any, submit: Callable[..., Operation], back: Callable[..., Sequence[Tensor]], *tensors: Tensor
    ) -> Any:
        ctx.back = back
        result = synchronize(submit(tensors))
        return result if isinstance(result, tuple) else (result,)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, None, *ctx.back([grad.contiguous() for grad in grads])


def _differentiable(
    tensors: Any, submit: Callable[[Any], Operation], back: Callable[[Sequence[Tensor]], Sequence[Tensor]],
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
    parts, contexts = zip(*map(compression.compress, [tensors] if single else tensors), strict=True)
    results = _Differentiable.apply(lambda parts: submit(parts[0] if single else parts), back, *parts)
    whole = [compression.decompress(result, context) for result, context in zip(results, contexts, strict=True)]
    return whole[0] if single else whole


# ------------------------------------------------------------------------------------------------------- allreduce


def _op(op: int | None, average: bool | None) -> int:
    """Return the reduction that a call names: by ``op``, or by the old ``average``."""
    if average is not None and op is not None:
        raise ValueError("op and average exclude each other: pass op only.")
    if op == Adasum:
        raise UsageError(
            "hvd.Adasum is not supported: use hvd.Average, with a learning rate that is scaled by hvd.size() and "
            "warmed up over the first epochs."
        )
    return op if op is not None else Sum if average is False else Average


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


def allreduce_async_(
    tensor: Tensor, average: bool | None = None, name: str | None = None, op: int | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> Operation:  # fmt: skip
    """Submit ``allreduce`` with the tensor as its result, and return its handle. Not differentiable."""
    how = operations.OPS[_op(op, average)], prescale_factor, postscale_factor
    return _submit(process_set, "allreduce", tensor, name, operations.reduce, *how)


allreduce_async: Callable[..., Operation] = _copied(allreduce_async_)
allreduce_: Callable[..., Tensor] = _waited(allreduce_async_)
grouped_allreduce: Callable[..., list[Tensor]] = _grouped(allreduce)
grouped_allreduce_: Callable[..., tuple[Tensor, ...]] = _grouped(allreduce_)
grouped_allreduce_async: Callable[..., Operation] = _grouped(allreduce_async)
grouped_allreduce_async_: Callable[..., Operation] = _grouped(allreduce_async_)


def sparse_allreduce_async(
    tensor: Tensor, name: str, op: int, process_set: ProcessSet = global_process_set
) -> Callable[[], Tensor]:
    """Submit a mean or sum of sparse tensors, and return a function that waits and returns it, not coalesced."""
    form = (str(tensor.dtype), list(tensor.shape), op)
    run = partial(operations.reduce_sparse, tensor=tensor, op=operations.OPS[op])
    return partial(synchronize, process_set.queue().submit("sparse_allreduce", name, form, run))


# ------------------------------------------------------------------------------------------------ those that move rows


def allgather(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> Tensor:
    """Return the rows of all ranks in one. Differentiable: a rank gets the mean over the ranks of its gradients."""
    single = isinstance(tensor, Tensor)
    rows = torch.tensor([[part.shape[:1].numel() for part in ([tensor] if single else tensor)]])

    def back(grads: Sequence[Tensor]) -> list[Tensor]:
        firsts = allgather(rows, process_set=process_set)[: process_set.rank()].sum(0).tolist()
        reduced = grouped_allreduce(grads, process_set=process_set)
        return [grad.narrow(0, *part) for grad, *part in zip(reduced, firsts, rows[0].tolist(), strict=True)]

    result: Tensor = _differentiable(tensor, lambda parts: allgather_async(parts, name, process_set), back)
    return result


def allgather_async(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> Operation:
    """Submit ``allgather``, and return its handle. Not differentiable."""
    return _submit(process_set, "allgather", tensor, name, operations.gather)


grouped_allgather: Callable[..., list[Tensor]] = _grouped(allgather)
grouped_allgather_async: Callable[..., Operation] = _grouped(allgather_async)


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
) -> Operation:
    """Submit ``alltoall``, and return its handle. Its result has how many rows each rank had in any case."""
    world, rows = len(process_set.ranks), tensor.shape[:1].numel()
    counts = [rows // world] * world if splits is None else [int(count) for count in splits]
    floats = isinstance(splits, Tensor) and splits.is_floating_point()
    if floats or (splits is None and rows % world) or len(counts) != world or min(counts) < 0 or sum(counts) > rows:
        raise ValueError(
            f"alltoall got {rows} rows for {world} ranks, and splits {splits}: pass a whole number for each rank, "
            "together not more than there are."
        )
    like = splits if isinstance(splits, Tensor) else torch.empty(0, dtype=torch.int32)

    def run(ranks: Communicator, tensor: Tensor) -> tuple[Tensor, Tensor]:
        received, counted = operations.exchange(ranks, tensor, counts)
        return received, like.new_tensor(counted)

    return _submit(process_set, "alltoall", tensor, name, run)


def broadcast(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Return the tensor of a rank. Differentiable: that rank gets the mean over the ranks of the gradients."""

    def back(grads: Sequence[Tensor]) -> list[Tensor]:
        return [allreduce(grads[0], process_set=process_set) * (global_process_set.rank() == root_rank)]

    result: Tensor = _differentiable(tensor, lambda part: broadcast_async(part, root_rank, name, process_set), back)
    return result


def broadcast_async_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Operation:
    """Submit ``broadcast`` with the tensor as its result, and return its handle. Not differentiable."""
    if root_rank not in process_set.ranks:
        raise ValueError(f"broadcast got root_rank {root_rank}, but must get one of the ranks {process_set.ranks}.")
    return _submit(process_set, "broadcast", tensor, name, operations.broadcast, process_set.ranks.index(root_rank))


broadcast_async: Callable[..., Operation] = _copied(broadcast_async_)
broadcast_: Callable[..., Tensor] = _waited(broadcast_async_)


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
) -> Operation:  # fmt: skip
    """Submit ``reducescatter``, and return its handle. Not differentiable."""
    if op not in (Average, Sum):
        raise HorovodInternalError("reducescatter supports hvd.Average and hvd.Sum only: use hvd.allreduce for others.")
    how = operations.OPS[op], prescale_factor, postscale_factor
    return _submit(process_set, "reducescatter", tensor, name, operations.reduce_scatter, *how)


grouped_reducescatter: Callable[..., list[Tensor]] = _grouped(reducescatter)
grouped_reducescatter_async: Callable[..., Operation] = _grouped(reducescatter_async)

# --------------------------------------------------------------------------------------------------------- handles


def poll(handle: Operation) -> bool:
    """Wait for an operation, unlike Horovod's, and return True: nothing runs in the background."""
    return handle.queue.poll(handle)


def synchronize(handle: Operation) -> Any:
    """Wait for an operation, and return its result: a tuple for several tensors.

    Raises:
        HorovodInternalError: the ranks don't agree on it, or it has failed because of another rank.
    """
    return handle.queue.finish(handle)


def join(device: int = -1) -> int:
    """Take part in the reductions of other ranks, with zeros, until all have joined. Return the rank that was last.

    Args:
        device: ignored: the zeros are where the ranks communicate.
    """
    return global_process_set.queue().join()


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Return when every rank of a process set has called it."""
    process_set.queue().call("barrier", None, (), lambda ranks: None)
