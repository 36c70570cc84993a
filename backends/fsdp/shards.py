"""The tensors of torch's fully_shard: DTensors that are sharded in their first dimension."""

from __future__ import annotations

import copyreg
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from unitrain import call_site


def _pickled(tensor: DTensor) -> Any:
    """Return the pickled form of a sharded tensor, as pickle makes it otherwise, and warn of it.

    State dicts have other tensors than the parameters, so that only their class can tell. It is no error, since each
    rank may load its part again in the same world.
    """
    call_site.warn(
        "this pickles a sharded tensor, as torch.save(model.state_dict()) does: the file has this rank's part of the "
        "values only. Use strategy.save(model, path) on all ranks, or strategy.checkpoint, which save all of them."
    )
    return tensor.__reduce_ex__(2)  # type: ignore[no-untyped-call]


copyreg.pickle(DTensor, _pickled)


def to_local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, in the same memory."""
    if not isinstance(tensor, DTensor):
        return tensor
    with torch.no_grad():  # else it would be a view with a graph
        return tensor.to_local()


def full_tensor(tensor: Tensor) -> Tensor:
    """Return all of a tensor. Collective if it is a DTensor."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def shards_of(tensor: Tensor) -> Sequence[Tensor]:
    """Return the parts of all ranks in order; on the meta device, except this rank's."""
    if not isinstance(tensor, DTensor):
        return (tensor,)
    # With replicas on other hosts, the mesh has another dimension, along which nothing is divided.
    dimension = next((i for i, placement in enumerate(tensor.placements) if placement == Shard(0)), None)
    if dimension is None:
        return (to_local(tensor),)
    size, local_rank = tensor.device_mesh.size(dimension), tensor.device_mesh.get_local_rank(dimension)
    # As torch.chunk divides: the last parts may be smaller, or empty.
    rows = -(-tensor.shape[0] // size)
    shapes = [(max(0, min(rows, tensor.shape[0] - rank * rows)), *tensor.shape[1:]) for rank in range(size)]
    return [
        to_local(tensor) if rank == local_rank else torch.empty(shape, dtype=tensor.dtype, device="meta")
        for rank, shape in enumerate(shapes)
    ]
