"""The operations, on the three collectives of a backend.

Allgather and alltoall gather what all ranks send, padded to the longest. Reducescatter reduces all rows and keeps its
own. A product gathers, and multiplies. So they move more bytes than a library's own would.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from unitrain.communication.collectives import as_bytes
from unitrain.communication.communicator import Communicator
from unitrain.compat.horovod.matching import Form, Operation, Sizes, Start

OPS = ("Average", "Sum", "Adasum", "Min", "Max", "Product")
_REDUCTIONS = {"Average": "sum", "Sum": "sum", "Min": "min", "Max": "max"}
_OF_ROWS = ("allgather", "alltoall")
Tensors = Tensor | Sequence[Tensor]


def _operation(
    verb: str,
    name: str,
    tensors: Tensors,
    start: Start,
    *more: object,
    outputs: Tensors = (),
    sizes: Sequence[int] = (),
) -> Operation:
    """Return an operation on a tensor, or on several.

    Args:
        verb: the verb.
        name: as in ``Operation``.
        tensors: the tensors.
        start: as in ``Operation``.
        *more: what must also be the same on all ranks.
        outputs: as in ``Operation``.
        sizes: as in ``Operation``.
    """
    group = listed(tensors)
    for tensor in group:
        if tensor.layout != torch.strided or not tensor.is_contiguous():  # which Horovod refuses, too
            raise ValueError(f"{verb} needs a dense, contiguous tensor: pass tensor.contiguous() or tensor.to_dense().")
        if verb in (*_OF_ROWS, "reducescatter") and not tensor.dim():
            raise ValueError(f"{verb} needs a tensor with rows, not a scalar: pass tensor.unsqueeze(0).")
    shapes = [list(tensor.shape[1:] if verb in _OF_ROWS else tensor.shape) for tensor in group]
    forms = [(str(tensor.dtype)[6:], shape, tensor.device.type) for tensor, shape in zip(group, shapes, strict=True)]
    single = isinstance(tensors, Tensor)
    return Operation(
        name, (verb, forms, *more), start, group, listed(outputs), single, fuses=verb == "allreduce", sizes=sizes
    )


def listed(tensors: Tensors) -> list[Tensor]:
    """Return a tensor, or several, in a list."""
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def reduction(verb: str, name: str, tensors: Tensors, outputs: Tensors, op: int, *factors: float) -> Operation:
    """Return an allreduce, or a reducescatter.

    Args:
        verb: "allreduce" or "reducescatter".
        name: as in ``Operation``.
        tensors: the tensors.
        outputs: where the results of an allreduce go: the same tensors, or others.
        op: ``hvd.Average``, or another.
        *factors: by which to multiply before and after.
    """
    for tensor in listed(tensors):
        if tensor.dtype == torch.bool or tensor.is_complex():
            raise ValueError(f"{verb} does not support {tensor.dtype}: convert the tensor, for example by .int().")
    start = partial(_start_reduction, verb, OPS[op], factors)
    return _operation(verb, name, tensors, start, OPS[op], *factors, outputs=outputs)


def _start_reduction(
    verb: str, op: str, factors: tuple[float, ...], communicator: Communicator, label: str,
    tensors: Sequence[Tensor], outputs: Sequence[Tensor], sizes: Sizes,
) -> Callable[[], Sequence[Tensor]]:  # fmt: skip
    rank, world = communicator.rank, communicator.world_size

    def rows(tensor: Tensor) -> Tensor:
        """Return this rank's part of a result. Of a reducescatter, the first ranks get a row more."""
        return tensor if verb == "allreduce" else torch.tensor_split(tensor, world)[rank]

    outputs = outputs or [torch.empty_like(rows(tensor)) for tensor in tensors]
    waits: list[tuple[Callable[[], None], Tensor, list[int], bool]] = []
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        those = [number for number, tensor in enumerate(tensors) if tensor.dtype == dtype]
        flat = [tensors[number].reshape(-1).to(communicator.device) for number in those]
        output = outputs[those[0]]
        # In place, where nothing is to be put together or taken apart.
        direct = len(those) == 1 and verb == "allreduce" and output.device == flat[0].device
        buffer = output.data.view(-1).copy_(flat[0]) if direct else torch.cat(flat)
        wait = _start_flat(communicator, f"{label}.{len(waits)}", buffer, op, *factors)
        waits.append((wait, buffer, those, direct))

    def finish() -> Sequence[Tensor]:
        for wait, buffer, those, direct in waits:
            wait()
            parts = torch.split(buffer, [tensors[number].numel() for number in those])
            for number, part in () if direct else zip(those, parts, strict=True):
                outputs[number].data.copy_(rows(part.view(tensors[number].shape)))
        return outputs

    return finish


def _start_flat(
    communicator: Communicator, label: str, buffer: Tensor, op: str, prescale: float, postscale: float
) -> Callable[[], None]:
    collectives, world = communicator.collectives, communicator.world_size
    _scale(buffer, prescale)
    wait: Callable[[], Tensor | None] = lambda: None  # noqa: E731
    if buffer.numel() and op == "Product":
        wait = collectives.all_gather_async(as_bytes(buffer), label)
    elif buffer.numel():
        wait = collectives.all_reduce_async(buffer, _REDUCTIONS[op], label)

    def finish() -> None:
        gathered = wait()
        if gathered is not None:
            buffer.copy_(gathered.view(buffer.dtype).view(world, -1).prod(0, dtype=buffer.dtype))
        _scale(buffer, postscale / world if op == "Average" else postscale)

    return finish


def _scale(buffer: Tensor, factor: float) -> None:
    """Multiply in place, as Horovod does: ints in float64, rounded to zero."""
    if factor != 1 and buffer.is_floating_point():
        buffer.mul_(factor)
    elif factor != 1:
        buffer.copy_(buffer.double() * factor)


def _zeros(name: str, form: Form) -> Operation:
    """Return the allreduce of a rank that has joined."""
    verb, tensors, op, *factors = form
    zeros = [torch.zeros(shape, dtype=getattr(torch, dtype)) for dtype, shape, _ in tensors]
    return reduction(verb, name, zeros, zeros, OPS.index(op), *factors)


STAND_INS: dict[str, Callable[[str, Form], Operation | None]] = {"allreduce": _zeros}
"""For verbs, what returns the operation by which a rank that has joined takes part in one of a name and form."""


def gathering(name: str, tensors: Tensors) -> Operation:
    """Return an allgather."""

    def start(
        communicator: Communicator, label: str, tensors: Sequence[Tensor], _: Sequence[Tensor], sizes: Sizes
    ) -> Callable[[], list[Tensor]]:
        waits = []
        for number, tensor in enumerate(tensors):
            rows = [row[number] for row in sizes]
            waits.append(_gather(communicator, f"{label}.{number}", tensor, rows, [(0, count) for count in rows]))
        return lambda: [wait() for wait in waits]

    return _operation("allgather", name, tensors, start, sizes=[tensor.shape[:1].numel() for tensor in listed(tensors)])


def exchange(name: str, tensor: Tensor, splits: Sequence[int], like: Tensor) -> Operation:
    """Return an alltoall. Its result is a pair: the rows, and how many come from each rank, in a tensor ``like``."""

    def start(
        communicator: Communicator, label: str, tensors: Sequence[Tensor], _: Sequence[Tensor], sizes: Sizes
    ) -> Callable[[], list[Any]]:
        rank = communicator.rank
        parts = [(sum(row[:rank]), sum(row[: rank + 1])) for row in sizes]
        wait = _gather(communicator, label, tensors[0], [*map(sum, sizes)], parts)
        return lambda: [(wait(), like.new_tensor([row[rank] for row in sizes]))]

    return _operation("alltoall", name, tensor, start, sizes=splits)


def _gather(
    communicator: Communicator, label: str, tensor: Tensor, counts: Sequence[int], parts: Sequence[tuple[int, int]]
) -> Callable[[], Tensor]:
    """Gather rows. Return a function that waits, and returns those that this rank wants.

    Args:
        communicator: the communicator.
        label: as in ``Operation``.
        tensor: this rank's rows.
        counts: how many of its rows each rank sends.
        parts: which of them this rank wants: the first, and the one after the last.
    """
    width = tensor.shape[1:].numel() * tensor.element_size()
    data = as_bytes(tensor.to(communicator.device))[: counts[communicator.rank] * width]
    padded = data.new_zeros(max(counts) * width)
    padded[: len(data)] = data
    gather: Callable[[], Tensor] = partial(padded.new_empty, (len(counts), 0))
    if len(padded):
        gather = communicator.collectives.all_gather_async(padded, label)

    def finish() -> Tensor:
        rows = [row[first * width : last * width] for row, (first, last) in zip(gather(), parts, strict=True)]
        count = sum(last - first for first, last in parts)
        return torch.cat(rows).view(tensor.dtype).view(count, *tensor.shape[1:]).to(tensor.device)

    return finish


def broadcasting(name: str, tensor: Tensor, output: Tensor, src: int) -> Operation:
    """Return a broadcast of the tensor of rank ``src`` of the process set."""

    def start(
        communicator: Communicator, label: str, tensors: Sequence[Tensor], outputs: Sequence[Tensor], sizes: Sizes
    ) -> Callable[[], Sequence[Tensor]]:
        buffer = output.data.copy_(tensors[0]).to(communicator.device)
        send = communicator.collectives.broadcast_async
        wait = send(as_bytes(buffer), src, label) if buffer.numel() else lambda: None

        def finish() -> Sequence[Tensor]:
            wait()
            if buffer.data_ptr() != output.data_ptr():
                output.data.copy_(buffer)
            return outputs

        return finish

    return _operation("broadcast", name, tensor, start, src, outputs=output)
