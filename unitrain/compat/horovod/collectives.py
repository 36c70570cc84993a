"""The collectives, with Horovod's names, arguments, defaults and gradients."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from unitrain.communication.communicator import Communicator
from unitrain.compat.horovod import operations
from unitrain.compat.horovod.compression import Compression, Compressor
from unitrain.compat.horovod.matching import Form, HorovodInternalError, Operation, Queue
from unitrain.compat.horovod.operations import Adasum, Average, Max, Min, Product, Sum
from unitrain.compat.horovod.process_sets import ProcessSet, global_process_set
from unitrain.errors import UsageError

__all__ = ["Adasum", "Average", "Max", "Min", "Product", "Sum"]
_NONE = Compression.none


class _Submitted(NamedTuple):
    """What a handle stands for."""

    queue: Queue
    operations: list[Operation]
    result: Callable[[list[Any]], Any]
    """Returns what ``synchronize`` returns, given the results of the operations."""


_submitted: dict[int, _Submitted] = {}
_handles = itertools.count()


def _submit(process_set: ProcessSet, those: list[Operation], result: Callable[[list[Any]], Any]) -> int:
    queue = process_set.queue()
    for operation in those:
        queue.submit(operation)
    handle = next(_handles)
    _submitted[handle] = _Submitted(queue, those, result)
    return handle


def _only(results: list[Any]) -> Any:
    return results[0]


def _names(process_set: ProcessSet, verb: str, name: str | None, count: int | None) -> list[str]:
    """Return the name of an operation, or with a count the names of those of a group."""
    queue = process_set.queue()
    verb = verb if count is None else f"grouped_{verb}"
    base = queue.name(verb) if name is None else f"{verb}.{name}"
    return [base] if count is None else [f"{base}_{number}of{count}" for number in range(1, count + 1)]


class _Differentiable(torch.autograd.Function):
    """Runs operations in the forward, and others on the gradients in the backward."""

    @staticmethod
    def forward(ctx: Any, submit: Callable[..., int], back: Callable[..., Sequence[Tensor]], *tensors: Tensor) -> Any:
        ctx.back = back
        result = synchronize(submit(tensors))
        return result if isinstance(result, tuple) else (result,)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, None, *ctx.back([grad.contiguous() for grad in grads])


def _apply(
    submit: Callable[[Sequence[Tensor]], int], back: Callable[[Sequence[Tensor]], Sequence[Tensor]],
    tensors: Sequence[Tensor], compression: type[Compressor] = _NONE,
) -> list[Tensor]:  # fmt: skip
    """Return the results of operations on tensors. Differentiable.

    Args:
        submit: submits them, given the compressed tensors.
        back: returns the gradients of these, given those of the results.
        tensors: the tensors.
        compression: compresses them, and decompresses the results.
    """
    compressed, contexts = zip(*map(compression.compress, tensors), strict=True)
    results = _Differentiable.apply(submit, back, *compressed)
    return [compression.decompress(result, context) for result, context in zip(results, contexts, strict=True)]


def call(
    name: str, form: Form, function: Callable[[Communicator], Any], process_set: ProcessSet = global_process_set
) -> Any:
    """Return the result of a function that calls collectives, once all ranks have come to it by its name.

    For what is built on the communicator, such as ``broadcast_object``: as an operation among the others, it can't meet
    another of them.

    Args:
        name: the name, with the verb: "broadcast_object.epoch".
        form: what must be the same on all ranks, as plain data.
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


def _allreduce(
    tensors: Sequence[Tensor], count: int | None, name: str | None, scaling: tuple[int, float, float],
    process_set: ProcessSet, outputs: Sequence[Tensor] | None = None,
) -> int:  # fmt: skip
    names = _names(process_set, "allreduce", name, count)
    each = zip(names, tensors, outputs or [*map(torch.empty_like, tensors)], strict=True)
    those = [operations.reduction("allreduce", label, tensor, output, *scaling) for label, tensor, output in each]
    return _submit(process_set, those, _only if count is None else tuple)


def _allreduced(
    tensors: Sequence[Tensor], count: int | None, name: str | None, scaling: tuple[int, float, float],
    process_set: ProcessSet, compression: type[Compressor] = _NONE,
) -> list[Tensor]:  # fmt: skip
    return _apply(
        lambda parts: _allreduce(parts, count, name, scaling, process_set),
        lambda grads: _allreduced(grads, len(grads), None, scaling, process_set),
        tensors,
        compression,
    )


def allreduce(
    tensor: Tensor, average: bool | None = None, name: str | None = None, compression: type[Compressor] = _NONE,
    op: int | None = None, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:  # fmt: skip
    """Return the mean of a tensor over the ranks, or another reduction. Differentiable."""
    scaling = _op(op, average), prescale_factor, postscale_factor
    return _allreduced([tensor], None, name, scaling, process_set, compression)[0]


def allreduce_(
    tensor: Tensor, average: bool | None = None, name: str | None = None, op: int | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> Tensor:  # fmt: skip
    """Reduce a tensor over the ranks in place, and return it."""
    synchronize(allreduce_async_(tensor, average, name, op, prescale_factor, postscale_factor, process_set))
    return tensor


def allreduce_async(
    tensor: Tensor, average: bool | None = None, name: str | None = None, op: int | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> int:  # fmt: skip
    """Submit ``allreduce``, and return its handle. Not differentiable."""
    return _allreduce([tensor], None, name, (_op(op, average), prescale_factor, postscale_factor), process_set)


def allreduce_async_(
    tensor: Tensor, average: bool | None = None, name: str | None = None, op: int | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> int:  # fmt: skip
    """Submit ``allreduce_``, and return its handle."""
    scaling = _op(op, average), prescale_factor, postscale_factor
    return _allreduce([tensor], None, name, scaling, process_set, [tensor])


def grouped_allreduce(
    tensors: Sequence[Tensor], average: bool | None = None, name: str | None = None,
    compression: type[Compressor] = _NONE, op: int | None = None, prescale_factor: float = 1.0,
    postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> list[Tensor]:  # fmt: skip
    """Return ``allreduce`` of several tensors."""
    scaling = _op(op, average), prescale_factor, postscale_factor
    return _allreduced(tensors, len(tensors), name, scaling, process_set, compression)


def grouped_allreduce_(
    tensors: Sequence[Tensor], average: bool | None = None, name: str | None = None, op: int | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Reduce several tensors over the ranks in place, and return them."""
    synchronize(grouped_allreduce_async_(tensors, average, name, op, prescale_factor, postscale_factor, process_set))
    return tuple(tensors)


def grouped_allreduce_async(
    tensors: Sequence[Tensor], average: bool | None = None, name: str | None = None, op: int | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> int:  # fmt: skip
    """Submit ``grouped_allreduce``, and return its handle. Not differentiable."""
    scaling = _op(op, average), prescale_factor, postscale_factor
    return _allreduce(tensors, len(tensors), name, scaling, process_set)


def grouped_allreduce_async_(
    tensors: Sequence[Tensor], average: bool | None = None, name: str | None = None, op: int | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> int:  # fmt: skip
    """Submit ``grouped_allreduce_``, and return its handle."""
    scaling = _op(op, average), prescale_factor, postscale_factor
    return _allreduce(tensors, len(tensors), name, scaling, process_set, tensors)


def sparse_allreduce_async(
    tensor: Tensor, name: str, op: int, process_set: ProcessSet = global_process_set
) -> Callable[[], Tensor]:
    """Submit a mean or sum of sparse tensors, and return a function that waits and returns it, not coalesced."""
    indices = allgather_async(tensor._indices().T.contiguous(), f"{name}.indices", process_set)
    values = allgather_async(tensor._values().contiguous(), f"{name}.values", process_set)

    def wait() -> Tensor:
        divisor = len(process_set.ranks) if op == Average else 1
        return torch.sparse_coo_tensor(synchronize(indices).T, synchronize(values) / divisor, tensor.shape)

    return wait


# --------------------------------------------------------------------------------------------- allgather, alltoall


def _allgather(tensors: Sequence[Tensor], count: int | None, name: str | None, process_set: ProcessSet) -> int:
    names = _names(process_set, "allgather", name, count)
    return _submit(process_set, [*map(operations.gathering, names, tensors)], _only if count is None else tuple)


def _allgathered(
    tensors: Sequence[Tensor], count: int | None, name: str | None, process_set: ProcessSet
) -> list[Tensor]:
    rows = torch.tensor([[len(tensor) for tensor in tensors]])

    def back(grads: Sequence[Tensor]) -> list[Tensor]:
        firsts = allgather(rows, process_set=process_set)[: process_set.rank()].sum(0).tolist()
        reduced = grouped_allreduce(grads, process_set=process_set)
        return [grad.narrow(0, *part) for grad, *part in zip(reduced, firsts, rows[0].tolist(), strict=True)]

    return _apply(lambda parts: _allgather(parts, count, name, process_set), back, tensors)


def allgather(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> Tensor:
    """Return the rows of all ranks in one. Differentiable: a rank gets the mean over the ranks of its gradients."""
    return _allgathered([tensor], None, name, process_set)[0]


def allgather_async(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> int:
    """Submit ``allgather``, and return its handle. Not differentiable."""
    return _allgather([tensor], None, name, process_set)


def grouped_allgather(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Tensor]:
    """Return ``allgather`` of several tensors."""
    return _allgathered(tensors, len(tensors), name, process_set)


def grouped_allgather_async(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Submit ``grouped_allgather``, and return its handle. Not differentiable."""
    return _allgather(tensors, len(tensors), name, process_set)


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

    def back(grads: Sequence[Tensor]) -> list[Tensor]:
        return [alltoall(grads[0], counts, process_set=process_set)[0]]

    rows, counts = _Differentiable.apply(
        lambda parts: alltoall_async(parts[0], splits, name, process_set), back, tensor
    )
    return rows if splits is None else (rows, counts)


def alltoall_async(
    tensor: Tensor, splits: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Submit ``alltoall``, and return its handle. Its result has how many rows each rank had in any case."""
    [label] = _names(process_set, "alltoall", name, None)
    world, rows = len(process_set.ranks), len(tensor) if tensor.dim() else 0
    counts = [rows // world] * world if splits is None else [int(count) for count in splits]
    if (splits is None and rows % world) or len(counts) != world or min(counts) < 0 or sum(counts) > rows:
        raise ValueError(
            f"alltoall got {rows} rows for {world} ranks, and splits {splits}: pass a number for each rank, which "
            "together are not more than there are."
        )
    kind = splits if isinstance(splits, Tensor) else torch.empty(0, dtype=torch.int32)
    return _submit(
        process_set,
        [operations.exchange(label, tensor, counts)],
        lambda results: (results[0][0], kind.new_tensor(results[0][1])),
    )


# ------------------------------------------------------------------------------------------------------- broadcast


def broadcast(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Return the tensor of a rank. Differentiable: that rank gets the mean over the ranks of the gradients."""

    def back(grads: Sequence[Tensor]) -> list[Tensor]:
        return [allreduce(grads[0], process_set=process_set) * (global_process_set.rank() == root_rank)]

    return _apply(lambda parts: broadcast_async(parts[0], root_rank, name, process_set), back, [tensor])[0]


def broadcast_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Overwrite a tensor with the one of a rank, and return it."""
    synchronize(broadcast_async_(tensor, root_rank, name, process_set))
    return tensor


def broadcast_async(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Submit ``broadcast``, and return its handle. Not differentiable."""
    return _broadcast(tensor, torch.empty_like(tensor), root_rank, name, process_set)


def broadcast_async_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Submit ``broadcast_``, and return its handle."""
    return _broadcast(tensor, tensor, root_rank, name, process_set)


def _broadcast(tensor: Tensor, output: Tensor, root_rank: int, name: str | None, process_set: ProcessSet) -> int:
    [label] = _names(process_set, "broadcast", name, None)
    if root_rank not in process_set.ranks:
        raise ValueError(
            f"broadcast got root_rank {root_rank}, but the ranks are {process_set.ranks}: pass one of them."
        )
    root = process_set.ranks.index(root_rank)
    return _submit(process_set, [operations.broadcasting(label, tensor, output, root)], _only)


# --------------------------------------------------------------------------------------------------- reducescatter


def _reducescatter(
    tensors: Sequence[Tensor], count: int | None, name: str | None, scaling: tuple[int, float, float],
    process_set: ProcessSet,
) -> int:  # fmt: skip
    if scaling[0] not in (Average, Sum):
        raise HorovodInternalError("reducescatter supports hvd.Average and hvd.Sum only: use hvd.allreduce for others.")
    names = _names(process_set, "reducescatter", name, count)
    each = zip(names, tensors, strict=True)
    those = [operations.reduction("reducescatter", label, tensor, None, *scaling) for label, tensor in each]
    return _submit(process_set, those, _only if count is None else tuple)


def _reducescattered(
    tensors: Sequence[Tensor], count: int | None, name: str | None, scaling: tuple[int, float, float],
    process_set: ProcessSet, compression: type[Compressor],
) -> list[Tensor]:  # fmt: skip
    def back(grads: Sequence[Tensor]) -> list[Tensor]:
        op, before, after = scaling
        factor = before * after * (len(process_set.ranks) if op == Sum else 1)  # as Horovod scales them
        return grouped_allgather([grad * factor for grad in grads], process_set=process_set)

    return _apply(lambda parts: _reducescatter(parts, count, name, scaling, process_set), back, tensors, compression)


def reducescatter(
    tensor: Tensor, name: str | None = None, compression: type[Compressor] = _NONE, op: int = Average,
    process_set: ProcessSet = global_process_set, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
) -> Tensor:  # fmt: skip
    """Return this rank's rows of the mean or sum of a tensor over the ranks. Differentiable."""
    scaling = op, prescale_factor, postscale_factor
    return _reducescattered([tensor], None, name, scaling, process_set, compression)[0]


def reducescatter_async(
    tensor: Tensor, name: str | None = None, op: int = Average, process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0,
) -> int:  # fmt: skip
    """Submit ``reducescatter``, and return its handle. Not differentiable."""
    return _reducescatter([tensor], None, name, (op, prescale_factor, postscale_factor), process_set)


def grouped_reducescatter(
    tensors: Sequence[Tensor], name: str | None = None, compression: type[Compressor] = _NONE, op: int = Average,
    process_set: ProcessSet = global_process_set, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
) -> list[Tensor]:  # fmt: skip
    """Return ``reducescatter`` of several tensors."""
    scaling = op, prescale_factor, postscale_factor
    return _reducescattered(tensors, len(tensors), name, scaling, process_set, compression)


def grouped_reducescatter_async(
    tensors: Sequence[Tensor], name: str | None = None, op: int = Average,
    process_set: ProcessSet = global_process_set, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
) -> int:  # fmt: skip
    """Submit ``grouped_reducescatter``, and return its handle. Not differentiable."""
    return _reducescatter(tensors, len(tensors), name, (op, prescale_factor, postscale_factor), process_set)


# --------------------------------------------------------------------------------------------------------- handles


def poll(handle: int) -> bool:
    """Return whether an operation can be waited for without other ranks.

    Unlike Horovod's, it takes part in a round, and so waits until the other ranks wait or poll, too.

    Raises:
        ValueError: there is no such handle, or it was synchronized.
    """
    if handle not in _submitted:
        raise ValueError(f"there is no handle {handle}, or it was synchronized before: poll before that.")
    return _submitted[handle].queue.poll(_submitted[handle].operations)


def synchronize(handle: int) -> Any:
    """Wait for an operation, and return its result: a tuple for several tensors. None if that was done before.

    Raises:
        HorovodInternalError: the ranks don't agree on it, or it has failed because of another rank.
    """
    submitted = _submitted.pop(handle, None)
    if submitted is None:
        return None
    return submitted.result([submitted.queue.finish(operation) for operation in submitted.operations])


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
