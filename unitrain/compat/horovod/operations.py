"""The operations, on the three collectives of a backend.

Allgather and alltoall gather what all ranks send, padded to the longest. Reducescatter reduces all rows and keeps its
own. A product gathers, and multiplies. So they move more bytes than a library's own would.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from unitrain.communication.communicator import Communicator
from unitrain.compat.horovod.matching import STAND_INS, Form

OPS = ("Average", "Sum", "Adasum", "Min", "Max", "Product")
_REDUCTIONS = {"Average": "sum", "Sum": "sum", "Min": "min", "Max": "max"}


def reduce(ranks: Communicator, tensor: Tensor, op: str, prescale: float, postscale: float) -> Tensor:
    """Reduce a tensor in place, and return it.

    Args:
        ranks: the communicator.
        tensor: the tensor.
        op: one of ``OPS``, but for "Adasum".
        prescale: by which to multiply before.
        postscale: by which to multiply after.

    Raises:
        ValueError: the tensor is one of bools or of complex numbers.
    """
    if tensor.dtype == torch.bool or tensor.is_complex():
        raise ValueError(f"reductions of {tensor.dtype} are not supported: convert the tensor, for example by .int().")
    buffer = tensor.data.to(ranks.device)
    _scale(buffer, prescale)
    if op == "Product":
        buffer.copy_(ranks.collectives.all_gather(buffer).prod(0, dtype=buffer.dtype))
    else:
        ranks.collectives.all_reduce(buffer, _REDUCTIONS[op])
    _scale(buffer, postscale / ranks.world_size if op == "Average" else postscale)
    if buffer.device != tensor.device:
        tensor.data.copy_(buffer)
    return tensor


def _scale(buffer: Tensor, factor: float) -> None:
    """Multiply in place, as Horovod does: ints in float64, rounded to zero."""
    if factor != 1 and buffer.is_floating_point():
        buffer.mul_(factor)
    elif factor != 1:
        buffer.copy_(buffer.double() * factor)


def _reduce_zeros(ranks: Communicator, name: str, form: Form) -> None:
    tensors, op, *factors = form
    for dtype, shape, _ in tensors:
        reduce(ranks, torch.zeros(shape, dtype=getattr(torch, dtype)), op, *factors)


STAND_INS |= {"allreduce": _reduce_zeros, "grouped_allreduce": _reduce_zeros}


def reduce_scatter(ranks: Communicator, tensor: Tensor, op: str, prescale: float, postscale: float) -> Tensor:
    """Return this rank's rows of a reduced tensor. The first ranks get a row more."""
    reduced = reduce(ranks, tensor.detach().clone(), op, prescale, postscale)
    return torch.tensor_split(reduced, ranks.world_size)[ranks.rank].clone()


def reduce_sparse(ranks: Communicator, tensor: Tensor, op: str) -> Tensor:
    """Return the mean or sum of sparse tensors, not coalesced."""
    tensor = tensor.coalesce()
    indices, values = gather(ranks, tensor.indices().T.contiguous()), gather(ranks, tensor.values().contiguous())
    divisor = ranks.world_size if op == "Average" else 1
    return torch.sparse_coo_tensor(indices.T, values / divisor, tensor.shape, check_invariants=False)


def gather(ranks: Communicator, tensor: Tensor) -> Tensor:
    """Return the rows of all ranks in one tensor."""
    counts = ranks.collectives.all_gather(torch.tensor(len(tensor), device=ranks.device)).tolist()
    return torch.cat(_rows(ranks, tensor, counts))


def exchange(ranks: Communicator, tensor: Tensor, splits: Sequence[int]) -> tuple[Tensor, list[int]]:
    """Return the rows that the ranks have for this one, and how many each had.

    Args:
        ranks: the communicator.
        tensor: the rows for rank 0, then those for rank 1, and so on; there may be more.
        splits: how many rows are for each rank.
    """
    table = ranks.collectives.all_gather(torch.tensor(splits, device=ranks.device)).tolist()
    rows = _rows(ranks, tensor[: sum(splits)], [*map(sum, table)])
    parts = [torch.split(part, counts)[ranks.rank] for part, counts in zip(rows, table, strict=True)]
    return torch.cat(parts), [counts[ranks.rank] for counts in table]


def _rows(ranks: Communicator, tensor: Tensor, counts: Sequence[int]) -> list[Tensor]:
    """Return the rows of each rank, given how many they have."""
    shape = tensor.shape[1:]
    flat = tensor.detach().reshape(-1).to(ranks.device)
    gathered = ranks.collectives.all_gather_padded(flat, [count * shape.numel() for count in counts])
    return [part.view(count, *shape).to(tensor.device) for part, count in zip(gathered, counts, strict=True)]


def broadcast(ranks: Communicator, tensor: Tensor, src: int) -> Tensor:
    """Overwrite a tensor with the tensor of rank ``src`` of the process set, and return it."""
    buffer = ranks.collectives.broadcast(tensor.data.to(ranks.device), src)
    if buffer.device != tensor.device:
        tensor.data.copy_(buffer)
    return tensor
