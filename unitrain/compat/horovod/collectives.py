"""The collectives, with Horovod's names, arguments, defaults and gradients, on the three of a backend.

A verb is a function that submits it, with the tensor as its result where it can be. ``_variant`` makes Horovod's
functions of it. Allgather and alltoall gather what all ranks send, padded to the longest. Reducescatter reduces all
rows and keeps its own. A product gathers, and multiplies. So they move more bytes than a library's own would.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from unitrain.communication.communicator import Communicator
from unitrain.communication.gathering import gather_rows
from unitrain.compat.horovod.process_sets import Form, Operation, ProcessSet, T, global_process_set, synchronize
from unitrain.errors import UsageError


class Compressor:
    """Changes the dtype of floats before they are reduced, sums included, and back.

    Args:
        dtype: the other dtype; None to change nothing.

    Attributes:
        dtype: as the argument.
    """

    def __init__(self, dtype: torch.dtype | None) -> None:
        self.dtype: torch.dtype | None = dtype

    def compress(self, tensor: Tensor) -> tuple[Tensor, torch.dtype]:
        """Return the tensor to send for one, and its dtype."""
        return tensor.to(self.dtype) if self.dtype and tensor.is_floating_point() else tensor, tensor.dtype

    def decompress(self, tensor: Tensor, ctx: torch.dtype) -> Tensor:
        """Return a result in the dtype that ``compress`` has returned."""
        return tensor.to(ctx)


class Compression:
    """The compressions that there are."""

    none: Compressor = Compressor(None)
    fp16: Compressor = Compressor(torch.float16)


Average: int = 0
Sum: int = 1
Adasum: int = 2
Min: int = 3
Max: int = 4
Product: int = 5
_ALL = global_process_set
Variant = Callable[..., Any]
_REDUCTIONS = {Average: "sum", Sum: "sum", Min: "min", Max: "max"}


def _submit(
    process_set: ProcessSet, verb: str, tensors: Any, name: str | None, run: Callable[..., Any], *more: object,
    back: Callable[[Sequence[Tensor]], Sequence[Tensor]],
) -> Operation:  # fmt: skip
    """Submit an operation on a tensor, or on several, and return its handle.

    Args:
        process_set: the ranks that take part.
        verb: the verb.
        tensors: the tensor or tensors.
        name: by which the ranks match it; None for one that its number makes.
        run: runs it, given the communicator, a tensor and ``more``, and returns its result.
        *more: what must also be the same on all ranks.
        back: returns the gradients of the tensors, given the results' gradients.
    """
    single = isinstance(tensors, Tensor)
    group: list[Tensor] = [tensors] if single else tensors
    if any(tensor.layout != torch.strided or not tensor.is_contiguous() for tensor in group):  # as Horovod
        raise ValueError(f"{verb} needs a dense, contiguous tensor: pass tensor.contiguous() or tensor.to_dense().")
    if verb in ("allgather", "alltoall", "reducescatter") and not all(tensor.dim() for tensor in group):
        raise ValueError(f"{verb} needs a tensor with rows, not a scalar: pass tensor.unsqueeze(0).")
    first = 1 if verb in ("allgather", "alltoall") else 0  # the ranks may have different numbers of rows
    forms = [(str(tensor.dtype)[6:], list(tensor.shape[first:]), tensor.device.type) for tensor in group]

    def run_all(ranks: Communicator) -> Any:
        results = tuple(run(ranks, tensor, *more) for tensor in group)
        return results[0] if single else results

    operation = process_set.submit(verb if single else f"grouped_{verb}", name, (forms, *more), run_all)
    operation.back = back
    return operation


def _copied(tensors: Any) -> Any:
    """Return a copy of a tensor, or of each of several."""
    return tensors.detach().clone() if isinstance(tensors, Tensor) else [*map(_copied, tensors)]


class _Differentiable(torch.autograd.Function):
    """Runs an operation on copies in the forward, and others on the gradients in the backward."""

    @staticmethod
    def forward(ctx: Any, submit: Callable[[Any], Operation], single: bool, *tensors: Tensor) -> Any:
        operation = submit(_copied(tensors[0] if single else tensors))
        ctx.back = operation.back
        result = synchronize(operation)
        return result if isinstance(result, tuple) else (result,)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, None, *ctx.back([grad.contiguous() for grad in grads])


def _variant(submit: Callable[..., Operation], name: str) -> Variant:
    """Return a function of a verb.

    Args:
        submit: submits the verb for a tensor, or for several, which it may overwrite.
        name: of the function, with {} for the verb. With ``grouped_``, it takes several tensors; with ``async``, it
            returns a handle; with ``_`` at the end, it overwrites the tensor. Without the last two, it is
            differentiable, and has the argument ``compression``, if ``submit`` has it.
    """
    several, waits, in_place = name.startswith("grouped"), "async" not in name, name.endswith("_")
    label, differentiable = "tensors" if several else "tensor", waits and not in_place
    first, *others = inspect.signature(submit).parameters.values()
    others = [parameter for parameter in others if differentiable or parameter.name != "compression"]
    signature = inspect.Signature([first.replace(name=label), *others])

    def variant(*args: Any, **kwargs: Any) -> Any:
        options = signature.bind(*args, **kwargs).arguments
        given = options.pop(label)
        if not differentiable:
            operation = submit(given if in_place else _copied(given), **options)
            return synchronize(operation) if waits else operation
        compression = options.get("compression", Compression.none)
        parts, contexts = zip(*map(compression.compress, given if several else [given]), strict=True)
        results = _Differentiable.apply(partial(submit, **options), not several, *parts)
        # Of alltoall, the second result is the numbers of rows.
        whole = (*map(compression.decompress, results, contexts), *results[len(contexts) :])
        return whole if several or options.get("splits") is not None else whole[0]

    variant.__name__ = name.format(submit.__name__[1:])
    variant.__doc__ = submit.__doc__
    variant.__signature__ = signature  # type: ignore[attr-defined]
    return variant


# ------------------------------------------------------------------------------------------------------- allreduce


def _op(op: int | None, average: bool | None) -> int:
    """Return the reduction that a call names: by ``op``, or by the old ``average``."""
    if average is not None and op is not None:
        raise ValueError("op and average exclude each other: pass op only.")
    if op == Adasum:
        raise UsageError("hvd.Adasum is not supported: use hvd.Average, with a learning rate that is warmed up.")
    return op if op is not None else Sum if average is False else Average


def _allreduce(
    tensor: Any, average: bool | None = None, name: str | None = None, compression: Compressor = Compression.none,
    op: int | None = None, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
    process_set: ProcessSet = _ALL,
) -> Operation:  # fmt: skip
    """Return the mean of a tensor over the ranks, or another reduction."""
    how = _op(op, average), prescale_factor, postscale_factor

    def back(grads: Sequence[Tensor]) -> Any:
        return grouped_allreduce(grads, None, None, Compression.none, *how, process_set)

    return _submit(process_set, "allreduce", tensor, name, reduce, *how, back=back)


allreduce: Variant = _variant(_allreduce, "{}")
allreduce_: Variant = _variant(_allreduce, "{}_")
allreduce_async: Variant = _variant(_allreduce, "{}_async")
allreduce_async_: Variant = _variant(_allreduce, "{}_async_")
grouped_allreduce: Variant = _variant(_allreduce, "grouped_{}")
grouped_allreduce_: Variant = _variant(_allreduce, "grouped_{}_")
grouped_allreduce_async: Variant = _variant(_allreduce, "grouped_{}_async")
grouped_allreduce_async_: Variant = _variant(_allreduce, "grouped_{}_async_")


def reduce(ranks: Communicator, tensor: Tensor, op: int, prescale: float = 1.0, postscale: float = 1.0) -> Tensor:
    """Reduce a tensor in place, and return it.

    Args:
        ranks: the communicator.
        tensor: the tensor.
        op: the reduction.
        prescale: by which to multiply before.
        postscale: by which to multiply after.

    Raises:
        ValueError: the tensor is one of bools or of complex numbers.
    """
    if tensor.dtype == torch.bool or tensor.is_complex():
        raise ValueError(f"reductions of {tensor.dtype} are not supported: convert the tensor, for example by .int().")
    buffer = tensor.data.to(ranks.device)
    _scale(buffer, prescale)
    if op == Product:
        buffer.copy_(ranks.collectives.all_gather(buffer).prod(0, dtype=buffer.dtype))
    else:
        ranks.collectives.all_reduce(buffer, _REDUCTIONS[op])
    _scale(buffer, postscale / ranks.world_size if op == Average else postscale)
    tensor.data.copy_(buffer)  # no copy on the same device
    return tensor


def _scale(buffer: Tensor, factor: float) -> None:
    """Multiply in place, as Horovod does: ints in float64, rounded to zero."""
    if factor != 1 and buffer.is_floating_point():
        buffer.mul_(factor)
    elif factor != 1:
        buffer.copy_(buffer.double() * factor)


def _reduce_zeros(ranks: Communicator, name: str, form: Form) -> None:
    tensors, *how = form
    for dtype, shape, _ in tensors:
        reduce(ranks, torch.zeros(shape, dtype=getattr(torch, dtype)), *how)


ProcessSet.stand_ins |= {"allreduce": _reduce_zeros, "grouped_allreduce": _reduce_zeros}


def sparse_allreduce_async(tensor: Tensor, name: str, op: int, process_set: ProcessSet = _ALL) -> Callable[[], Tensor]:
    """Submit a mean or sum of sparse tensors, and return a function that waits and returns it, not coalesced."""
    form = (str(tensor.dtype), list(tensor.shape), op)
    run = partial(reduce_sparse, tensor=tensor, op=op)
    return partial(synchronize, process_set.submit("sparse_allreduce", name, form, run))


def reduce_sparse(ranks: Communicator, tensor: Tensor, op: int) -> Tensor:
    """Return the mean or sum of sparse tensors, not coalesced."""
    tensor = tensor.coalesce()
    counts = _counts(ranks, tensor.values())
    indices, values = (gather_rows(ranks, part, counts) for part in (tensor.indices().T, tensor.values()))
    divisor = ranks.world_size if op == Average else 1
    return torch.sparse_coo_tensor(indices.T, values / divisor, tensor.shape, check_invariants=False)


# ------------------------------------------------------------------------------------------------ those that move rows


def _counts(ranks: Communicator, tensor: Tensor) -> list[int]:
    """Return how many rows each rank has."""
    counts: list[int] = ranks.collectives.all_gather(torch.tensor(len(tensor), device=ranks.device)).tolist()
    return counts


def _allgather(tensor: Any, name: str | None = None, process_set: ProcessSet = _ALL) -> Operation:
    """Return the rows of all ranks in one. A rank gets the mean over the ranks of its gradients."""
    counts: list[list[int]] = []  # of each tensor, for each rank

    def run(ranks: Communicator, tensor: Tensor) -> Tensor:
        counts.append(_counts(ranks, tensor))
        return gather_rows(ranks, tensor, counts[-1])

    def back(grads: Sequence[Tensor]) -> list[Tensor]:
        reduced = grouped_allreduce(grads, process_set=process_set)
        rank = process_set.communicator.rank
        return [grad.split(rows)[rank] for grad, rows in zip(reduced, counts, strict=True)]

    return _submit(process_set, "allgather", tensor, name, run, back=back)


allgather: Variant = _variant(_allgather, "{}")
allgather_async: Variant = _variant(_allgather, "{}_async")
grouped_allgather: Variant = _variant(_allgather, "grouped_{}")
grouped_allgather_async: Variant = _variant(_allgather, "grouped_{}_async")


def _alltoall(tensor: Any, splits: Any = None, name: str | None = None, process_set: ProcessSet = _ALL) -> Operation:
    """Return the rows that the ranks have for this one, and how many each had. The result has both."""
    world, rows = len(process_set.ranks), tensor.shape[:1].numel()
    counts = [rows // world] * world if splits is None else [int(count) for count in splits]
    floats = isinstance(splits, Tensor) and splits.is_floating_point()
    if floats or (splits is None and rows % world) or len(counts) != world or min(counts) < 0 or sum(counts) > rows:
        raise ValueError(f"alltoall got splits {splits} of {rows} rows for {world} ranks: pass an int for each.")
    like = splits if isinstance(splits, Tensor) else torch.empty(0, dtype=torch.int32)
    received: list[int] = []

    def run(ranks: Communicator, tensor: Tensor) -> tuple[Tensor, Tensor]:
        table = ranks.collectives.all_gather(torch.tensor(counts, device=ranks.device)).tolist()
        totals = [*map(sum, table)]
        parts = torch.split(gather_rows(ranks, tensor[: sum(counts)], totals), totals)
        received[:] = [row[ranks.rank] for row in table]
        mine = [torch.split(part, row)[ranks.rank] for part, row in zip(parts, table, strict=True)]
        return torch.cat(mine), like.new_tensor(received)

    def back(grads: Sequence[Tensor]) -> Any:
        return alltoall(grads[0], received, process_set=process_set)[:1]

    return _submit(process_set, "alltoall", tensor, name, run, back=back)


alltoall: Variant = _variant(_alltoall, "{}")
alltoall_async: Variant = _variant(_alltoall, "{}_async")


def _broadcast(tensor: Any, root_rank: int, name: str | None = None, process_set: ProcessSet = _ALL) -> Operation:
    """Return the tensor of a rank. That rank gets the mean over the ranks of the gradients."""
    if root_rank not in process_set.ranks:
        raise ValueError(f"broadcast got root_rank {root_rank}, but must get one of the ranks {process_set.ranks}.")

    def run(ranks: Communicator, tensor: Tensor, src: int) -> Tensor:
        tensor.data.copy_(ranks.broadcast(tensor, src))
        return tensor

    def back(grads: Sequence[Tensor]) -> list[Tensor]:
        return [allreduce(grads[0], process_set=process_set) * (global_process_set.rank() == root_rank)]

    return _submit(process_set, "broadcast", tensor, name, run, process_set.ranks.index(root_rank), back=back)


broadcast: Variant = _variant(_broadcast, "{}")
broadcast_: Variant = _variant(_broadcast, "{}_")
broadcast_async: Variant = _variant(_broadcast, "{}_async")
broadcast_async_: Variant = _variant(_broadcast, "{}_async_")


def _reducescatter(
    tensor: Any, name: str | None = None, compression: Compressor = Compression.none, op: int = Average,
    process_set: ProcessSet = _ALL, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
) -> Operation:  # fmt: skip
    """Return this rank's rows of the mean or sum of a tensor over the ranks. The first ranks get a row more."""
    if op not in (Average, Sum):
        raise NotImplementedError("reducescatter supports hvd.Average and hvd.Sum only: use hvd.allreduce for others.")
    # As Horovod scales gradients.
    factor = prescale_factor * postscale_factor * (len(process_set.ranks) if op == Sum else 1)

    def run(ranks: Communicator, tensor: Tensor, *how: Any) -> Tensor:
        return torch.tensor_split(reduce(ranks, tensor, *how), ranks.world_size)[ranks.rank].clone()

    def back(grads: Sequence[Tensor]) -> Any:
        return grouped_allgather([grad * factor for grad in grads], process_set=process_set)

    return _submit(process_set, "reducescatter", tensor, name, run, op, prescale_factor, postscale_factor, back=back)


reducescatter: Variant = _variant(_reducescatter, "{}")
reducescatter_async: Variant = _variant(_reducescatter, "{}_async")
grouped_reducescatter: Variant = _variant(_reducescatter, "grouped_{}")
grouped_reducescatter_async: Variant = _variant(_reducescatter, "grouped_{}_async")


# --------------------------------------------------------------------------------------------------------- objects


def broadcast_object(obj: T, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = _ALL) -> T:
    """Return a rank's object. Collective.

    Args:
        obj: as of ``Communicator.broadcast_object``; ignored on other ranks.
        root_rank: the rank that has it, of all.
        name: matches the calls of the ranks.
        process_set: the ranks that call it.
    """

    def send(communicator: Communicator) -> T:
        return communicator.broadcast_object(obj, process_set.ranks.index(root_rank))

    return process_set.call("broadcast_object", name, (root_rank,), send)


def allgather_object(obj: T, name: str | None = None) -> list[T]:
    """Return the objects of all ranks, in their order. Collective.

    Args:
        obj: as of ``Communicator.all_gather_object``.
        name: matches the calls of the ranks.
    """
    return global_process_set.call("allgather_object", name, (), lambda ranks: ranks.all_gather_object(obj))
