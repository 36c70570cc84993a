"""What the operations do, on the three collectives of a backend.

Allgather and alltoall gather what all ranks send, padded to the longest. Reducescatter reduces all rows and keeps its
own. A product gathers, and multiplies. So they move more bytes than a library's own would.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from unitrain.communication.collectives import as_bytes
from unitrain.communication.communicator import Communicator
from unitrain.compat.horovod.matching import Form, Operation

Average, Sum, Adasum, Min, Max, Product = range(6)
_NAMES = ("Average", "Sum", "Adasum", "Min", "Max", "Product")
_OPS = {"Average": "sum", "Sum": "sum", "Min": "min", "Max": "max"}


def form_of(verb: str, tensor: Tensor, *more: object) -> Form:
    """Return what the ranks' operations must have in common. Of rows, only what one has."""
    if tensor.layout != torch.strided or not tensor.is_contiguous():  # as Horovod refuses it
        raise ValueError(f"{verb} needs a dense, contiguous tensor: pass tensor.contiguous(), or tensor.to_dense().")
    if verb in ("allgather", "alltoall", "reducescatter") and not tensor.dim():
        raise ValueError(f"{verb} needs a tensor with rows, not a scalar: pass tensor.unsqueeze(0).")
    shape = tensor.shape[1:] if verb in ("allgather", "alltoall") else tensor.shape
    return (verb, str(tensor.dtype).removeprefix("torch."), list(shape), tensor.device.type, *more)


def reduction(verb: str, name: str, tensor: Tensor, output: Tensor | None, op: int, *factors: float) -> Operation:
    """Return an allreduce, or a reducescatter, where ``output`` is None.

    Args:
        verb: "allreduce" or "reducescatter".
        name: as in ``Operation``.
        tensor: as in ``Operation``.
        output: as in ``Operation``. It may be the input.
        op: ``Average``, ``Sum``, ``Min``, ``Max`` or ``Product``.
        *factors: by which to multiply before and after.
    """
    if tensor.dtype == torch.bool or tensor.is_complex():
        raise ValueError(f"{verb} does not support {tensor.dtype}: convert the tensor first, for example by .int().")
    form = form_of(verb, tensor, _NAMES[op], *factors)
    return Operation(name, form, _start_reduction, tensor, output, fused=_fused(form))


def _fused(form: Form) -> Form:
    return (*form[:2], *form[3:])  # all but the shape


def _start_reduction(
    communicator: Communicator, name: str, batch: Sequence[Operation], sizes: object
) -> Callable[[], list[Tensor | None]]:
    collectives, world = communicator.collectives, communicator.world_size
    *_, op, before, after = batch[0].form
    inputs = [operation.tensor.detach().reshape(-1).to(collectives.device) for operation in batch]
    output = batch[0].output
    if len(batch) > 1:
        buffer = torch.cat(inputs)
    elif output is not None and output.device == inputs[0].device:
        buffer = output.data.view(-1).copy_(inputs[0])
    else:
        buffer = inputs[0].clone()
    _scale(buffer, before)
    wait: Callable[[], Tensor | None] = lambda: None  # noqa: E731
    if buffer.numel() and op == "Product":
        wait = collectives.all_gather_async(as_bytes(buffer), name)
    elif buffer.numel():
        wait = collectives.all_reduce_async(buffer, _OPS[op], name)

    def finish() -> list[Tensor | None]:
        gathered = wait()
        if gathered is not None:
            buffer.copy_(gathered.view(buffer.dtype).view(world, -1).prod(0, dtype=buffer.dtype))
        _scale(buffer, after / world if op == "Average" else after)
        for operation, part in zip(batch, torch.split(buffer, [part.numel() for part in inputs]), strict=True):
            part = part.view(operation.tensor.shape)
            if operation.output is None:
                rows = _shares(len(part), world)
                part = torch.split(part, rows)[communicator.rank]
                operation.output = part.to(operation.tensor.device, copy=True)
            elif part.data_ptr() != operation.output.data_ptr():
                operation.output.data.copy_(part)
        return [operation.output for operation in batch]

    return finish


def _shares(rows: int, world: int) -> list[int]:
    """Return how many rows of a reducescatter each rank gets: the first ones get one more."""
    return [rows // world + (rank < rows % world) for rank in range(world)]


def _scale(buffer: Tensor, factor: float) -> None:
    """Multiply in place, as Horovod does: ints in float64, rounded to zero."""
    if factor == 1:
        return
    if buffer.is_floating_point():
        buffer.mul_(factor)
    else:
        buffer.copy_(buffer.double().mul_(factor))


def _zeros(name: str, form: Form) -> Operation:
    _, dtype, shape, _, op, *factors = form
    zeros = torch.zeros(shape, dtype=getattr(torch, dtype))
    operation = reduction("allreduce", name, zeros, zeros, _NAMES.index(op), *factors)
    operation.fused = _fused(form)
    return operation


STAND_INS: dict[str, Callable[[str, Form], Operation | None]] = {"allreduce": _zeros}
"""For verbs, what returns the operation by which a rank that has joined takes part in one of a name and form."""


def gathering(name: str, tensor: Tensor) -> Operation:
    """Return an allgather."""
    return Operation(name, form_of("allgather", tensor), _start_gathering, tensor, sizes=[len(tensor)])


def exchange(name: str, tensor: Tensor, splits: Sequence[int]) -> Operation:
    """Return an alltoall. Its result is a pair, of the rows and of how many come from each rank."""
    start = partial(_start_gathering, exchanges=True)
    return Operation(name, form_of("alltoall", tensor), start, tensor[: sum(splits)], sizes=splits)


def _start_gathering(
    communicator: Communicator, name: str, batch: Sequence[Operation], sizes: Sequence[Sequence[int]],
    exchanges: bool = False,
) -> Callable[[], list[object]]:  # fmt: skip
    tensor = batch[0].tensor.detach()
    rank = communicator.rank
    row = tensor.shape[1:]
    row_bytes = row.numel() * tensor.element_size()
    data = as_bytes(tensor.to(communicator.device))
    padded = data.new_zeros(max(map(sum, sizes)) * row_bytes)
    padded[: len(data)] = data
    gather = communicator.collectives.all_gather_async(padded, name) if len(padded) else lambda: padded.unsqueeze(0)

    def finish() -> list[object]:
        parts = []
        for rows, counts in zip(gather(), sizes, strict=False):
            first, last = (sum(counts[:rank]), sum(counts[: rank + 1])) if exchanges else (0, counts[0])
            parts.append(rows[first * row_bytes : last * row_bytes])
        gathered = torch.cat(parts).view(tensor.dtype).view(-1, *row).to(tensor.device)
        return [(gathered, [counts[rank] for counts in sizes]) if exchanges else gathered]

    return finish


def broadcasting(name: str, tensor: Tensor, output: Tensor, src: int) -> Operation:
    """Return a broadcast of the tensor of rank ``src`` of the process set."""
    return Operation(name, form_of("broadcast", tensor, src), _start_broadcast, tensor, output)


def _start_broadcast(
    communicator: Communicator, name: str, batch: Sequence[Operation], sizes: object
) -> Callable[[], list[Tensor]]:
    [operation] = batch
    output = operation.tensor if operation.output is None else operation.output
    buffer = output.data.copy_(operation.tensor.detach()).to(communicator.device)
    send = communicator.collectives.broadcast_async
    wait = send(as_bytes(buffer), operation.form[-1], name) if buffer.numel() else lambda: None

    def finish() -> list[Tensor]:
        wait()
        if buffer.device != output.device:
            output.data.copy_(buffer)
        return [output]

    return finish
